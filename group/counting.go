package group

import (
	"encoding/binary"
	"net"
	"sync/atomic"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
)

// messageHeader is the bytes that gRPC puts in front of each message ("gRPC over HTTP2", Length-Prefixed-Message).
const messageHeader = 5

// send passes a message to gRPC, which writes it later, on a goroutine of its own. Every message to the socket's peer goes this way, so that flushed is
// right.
func (c *serviceSocket) send(stream grpc.ServerStream, message any) error {
	n := messageHeader
	switch m := message.(type) {
	case rawFrame:
		n += len(m)
	case proto.Message:
		n += proto.Size(m)
	}
	c.due.Add(int64(n))
	return stream.SendMsg(message)
}

// flushed reports whether the system has taken all messages that were sent.
func (c *serviceSocket) flushed() bool { return c.messages.Load() >= c.due.Load() }

// frameData is the type of HTTP/2's frames that have messages in them.
const frameData = 0x0

// countingConn counts the bytes of gRPC's messages among those that are written: what is in HTTP/2's frames of the type DATA (RFC 9113, sections 4.1 and 6.1), which gRPC does not
// pad. All else, such as headers, pings and window updates, does not count, and comes when it likes.
type countingConn struct {
	net.Conn
	count *atomic.Int64

	header [9]byte // of the frame that is being written
	have   int     // bytes of it
	left   int     // bytes of the frame behind the header that are still to come
}

func (c *countingConn) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	for rest := b[:n]; len(rest) > 0; {
		if c.have < len(c.header) {
			k := copy(c.header[c.have:], rest)
			c.have, rest = c.have+k, rest[k:]
			if c.have == len(c.header) {
				c.left = int(binary.BigEndian.Uint32(c.header[:4]) >> 8)
			}
		} else {
			k := min(c.left, len(rest))
			if c.header[3] == frameData {
				c.count.Add(int64(k))
			}
			c.left, rest = c.left-k, rest[k:]
		}
		if c.have == len(c.header) && c.left == 0 {
			c.have = 0
		}
	}
	return n, err
}
