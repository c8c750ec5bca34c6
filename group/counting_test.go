package group

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"net"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
)

// sink takes what is written, and now and then only a part.
type sink struct {
	net.Conn
	random *rand.Rand
}

func (s sink) Write(b []byte) (int, error) {
	if n := s.random.IntN(len(b) + 1); s.random.IntN(3) == 0 && n < len(b) {
		return n, net.ErrClosed
	}
	return len(b), nil
}

// TestCounting: only what is in DATA frames counts, however the frames are cut when they are written, and as far as they were.
func TestCounting(t *testing.T) {
	for seed := range uint64(50) {
		random := rand.New(rand.NewPCG(seed, 0))
		var stream bytes.Buffer
		var ends []int // of the bytes of the stream that count
		for range 30 {
			kind, n := byte(random.IntN(10)), []int{0, 1, 8, 17, 70000}[random.IntN(5)]
			stream.Write(binary.BigEndian.AppendUint32(nil, uint32(n)<<8|uint32(kind)))
			stream.Write([]byte{byte(random.IntN(256)), 0, 0, 0, byte(random.IntN(3))})
			for range n {
				if stream.WriteByte(byte(random.IntN(256))); kind == 0 {
					ends = append(ends, stream.Len())
				}
			}
		}
		var count atomic.Int64
		c := &countingConn{Conn: sink{random: random}, count: &count}
		written := 0
		for rest := stream.Bytes(); len(rest) > 0; {
			n, err := c.Write(rest[:1+random.IntN(min(len(rest), []int{1, 10, 100000}[random.IntN(3)]))])
			require.True(t, err == nil || n >= 0)
			rest, written = rest[n:], written+n
			want := 0
			for want < len(ends) && ends[want] <= written {
				want++
			}
			require.EqualValues(t, want, count.Load(), "seed %d, %d bytes", seed, written)
		}
	}
}

// TestFlushed: pings and headers in between are no messages.
func TestFlushed(t *testing.T) {
	s := &serviceSocket{}
	c := &countingConn{Conn: sink{random: rand.New(rand.NewPCG(3, 3))}, count: &s.messages}
	frame := func(kind byte, n int) {
		for rest := append(binary.BigEndian.AppendUint32(nil, uint32(n)<<8|uint32(kind)), make([]byte, 5+n)...); len(rest) > 0; {
			n, _ := c.Write(rest)
			rest = rest[n:]
		}
	}
	require.True(t, s.flushed())
	s.due.Add(20)
	for kind := byte(1); kind < 10; kind++ {
		frame(kind, 100)
		require.False(t, s.flushed())
	}
	frame(0, 12)
	require.False(t, s.flushed())
	frame(0, 8)
	require.True(t, s.flushed())
}
