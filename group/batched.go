package group

import (
	"bufio"
	"crypto/tls"
	"io"
	"net"
	"sync"
	"sync/atomic"
)

// batchBytes is how many bytes of records are written in one call: those of streamBuffer bytes, and what TLS adds to them. TLS begins with records of about
// a kilobyte, to each of which it adds 22 bytes.
const batchBytes = streamBuffer + streamBuffer/32

// batches holds the buffers for records. A connection has one only while it writes.
var batches = sync.Pool{New: func() any { return bufio.NewWriterSize(nil, batchBytes) }}

// batchedTLS is a TLS connection that writes all records of one Write together. TLS's records have at most 16 KiB, and it makes a call to the system for
// each.
type batchedTLS struct {
	*tls.Conn
	records *recordConn
	writing atomic.Int32 // calls of Write under way
	turn    sync.Mutex   // of one of them
}

// batchedClient is the rank's end of a batched TLS connection. It also reads many records at a time, as answers have many.
func batchedClient(conn net.Conn, config *tls.Config) *batchedTLS {
	records := &recordConn{Conn: conn, in: bufio.NewReaderSize(conn, streamBuffer)}
	return &batchedTLS{Conn: tls.Client(records, config), records: records}
}

// batchedServer is the service's end. It keeps no buffer for a connection, which may be anyone's.
func batchedServer(conn net.Conn, config *tls.Config) *batchedTLS {
	records := &recordConn{Conn: conn, in: conn}
	return &batchedTLS{Conn: tls.Server(records, config), records: records}
}

// Write writes b. After an error it is not known how much of b the peer gets.
func (c *batchedTLS) Write(b []byte) (int, error) {
	c.writing.Add(1)
	defer c.writing.Add(-1)
	c.turn.Lock()
	defer c.turn.Unlock()
	c.records.hold()
	n, err := c.Conn.Write(b)
	if failure := c.records.release(); failure != nil {
		return 0, failure
	}
	return n, err
}

// Close ends the connection, and a Write that is blocked. As tls.Conn.Close, it tells the peer only if no Write is under way: it would have to wait for it.
func (c *batchedTLS) Close() error {
	if c.writing.Load() > 0 {
		return c.records.Close()
	}
	return c.Conn.Close()
}

// recordConn is the connection below TLS.
type recordConn struct {
	net.Conn
	in io.Reader

	mu      sync.Mutex
	batch   *bufio.Writer // nil if nothing is held back
	failure error         // of writing, after which the stream of records has a gap
}

func (c *recordConn) Read(b []byte) (int, error) { return c.in.Read(b) }

// Write writes b, or holds it back. TLS also writes when it reads, such as alerts.
func (c *recordConn) Write(b []byte) (n int, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.failure != nil {
		return 0, c.failure
	}
	if c.batch != nil {
		n, err = c.batch.Write(b)
	} else {
		n, err = c.Conn.Write(b)
	}
	c.failure = err
	return n, err
}

// hold begins to hold back what is written.
func (c *recordConn) hold() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.batch = batches.Get().(*bufio.Writer)
	c.batch.Reset(c.Conn)
}

// release writes what was held back. It returns an error if that failed, now or before.
func (c *recordConn) release() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.failure == nil {
		c.failure = c.batch.Flush()
	}
	c.batch.Reset(nil) // so that it keeps nothing alive
	batches.Put(c.batch)
	c.batch = nil
	return c.failure
}
