package group

import (
	"errors"
	"io"
	"net"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// mute is a connection whose writes fail.
type mute struct {
	*net.TCPConn
	with error
}

func (m mute) Write([]byte) (int, error) { return 0, m.with }

// connected returns both ends of a connection.
func connected(t *testing.T) (near, far *net.TCPConn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	one, err := net.Dial("tcp", l.Addr().String())
	require.NoError(t, err)
	t.Cleanup(func() { _ = one.Close() })
	other, err := l.Accept()
	require.NoError(t, err)
	t.Cleanup(func() { _ = other.Close() })
	return one.(*net.TCPConn), other.(*net.TCPConn)
}

// TestFailedWrite: the peer of a connection on which a write has failed learns of it at once, and what it had sent can still be read.
func TestFailedWrite(t *testing.T) {
	near, far := connected(t)
	broken := errors.New("broken")
	c := &heardConn{Conn: mute{near, broken}}
	_, err := far.Write([]byte("why"))
	require.NoError(t, err)
	_, err = c.Write([]byte("lost"))
	require.ErrorIs(t, err, broken)
	require.NoError(t, far.SetReadDeadline(time.Now().Add(time.Minute)))
	got, err := io.ReadAll(far) // until the end
	require.NoError(t, err)
	require.Empty(t, got)
	require.NoError(t, far.Close())
	got, err = io.ReadAll(c)
	require.NoError(t, err)
	require.Equal(t, "why", string(got))
	_, err = c.Write([]byte("lost"))
	require.ErrorIs(t, err, broken)
}

// TestFailedWriteOfHalves: a connection that cannot be closed for one direction is closed, and one whose deadline came is left to whoever set it.
func TestFailedWriteOfHalves(t *testing.T) {
	here, there := net.Pipe()
	defer there.Close()
	broken := errors.New("broken")
	whole := &halfless{Conn: here, with: os.ErrDeadlineExceeded}
	c := &heardConn{Conn: whole}
	_, err := c.Write([]byte{1})
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
	require.False(t, whole.closed)
	whole.with = broken
	_, err = c.Write([]byte{1})
	require.ErrorIs(t, err, broken)
	require.True(t, whole.closed)
	_, err = there.Read(make([]byte, 1))
	require.ErrorIs(t, err, io.EOF)
}

// halfless is a connection whose writes fail, and which is closed as a whole.
type halfless struct {
	net.Conn
	with   error
	closed bool
}

func (h *halfless) Write([]byte) (int, error) { return 0, h.with }

func (h *halfless) Close() error {
	h.closed = true
	return h.Conn.Close()
}
