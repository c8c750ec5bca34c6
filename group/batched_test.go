package group

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
)

// randomBytes returns n bytes that are the same for the same seed.
func randomBytes(seed uint64, n int) []byte {
	random := rand.New(rand.NewPCG(seed, 0))
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(random.Uint32())
	}
	return b
}

// watchedConn notes how much each Write writes, and fails or blocks if it is told to.
type watchedConn struct {
	net.Conn
	once   sync.Once
	closed chan struct{}

	mu     sync.Mutex
	writes []int
	fail   error
	stuck  chan struct{} // if not nil, writes block until Close, and the first one closes it
}

func (c *watchedConn) Write(b []byte) (int, error) {
	c.mu.Lock()
	c.writes = append(c.writes, len(b))
	fail, stuck := c.fail, c.stuck
	c.mu.Unlock()
	switch {
	case fail != nil:
		return 0, fail
	case stuck != nil:
		close(stuck)
		<-c.closed
		return 0, net.ErrClosed
	}
	return c.Conn.Write(b)
}

func (c *watchedConn) Close() error {
	c.once.Do(func() { close(c.closed) })
	return c.Conn.Close()
}

// take returns what was written since it was last called.
func (c *watchedConn) take() []int {
	c.mu.Lock()
	defer c.mu.Unlock()
	writes := c.writes
	c.writes = nil
	return writes
}

func (c *watchedConn) set(fail error, stuck chan struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.fail, c.stuck = fail, stuck
}

// secured returns both ends of a TLS connection, after its handshake, and what is below the service's.
func secured(t *testing.T) (service, rank *batchedTLS, below *watchedConn) {
	t.Helper()
	config, err := serviceTLS(&Options{Token: "x"})
	require.NoError(t, err)
	near, far := connected(t)
	below = &watchedConn{Conn: near, closed: make(chan struct{})}
	service, rank = batchedServer(below, config), batchedClient(far, clientTLS(&Options{Token: "x"}))
	t.Cleanup(func() { _, _ = service.Close(), rank.Close() })
	var both errgroup.Group
	both.Go(service.Handshake)
	both.Go(rank.Handshake)
	require.NoError(t, both.Wait())
	below.take()
	return service, rank, below
}

// TestRecordsTogether: the records of one Write go to the system in one call, as far as a bounded buffer holds them, and nothing stays behind.
func TestRecordsTogether(t *testing.T) {
	service, rank, below := secured(t)
	for i, size := range []int{1, 1000, streamBuffer, streamBuffer, 1 << 20, 3, 200_000} {
		data := randomBytes(uint64(i), size)
		var reading errgroup.Group
		reading.Go(func() error {
			got := make([]byte, size)
			if _, err := io.ReadFull(rank, got); err != nil {
				return err
			}
			if !bytes.Equal(data, got) {
				return fmt.Errorf("%d bytes came as others", size)
			}
			return nil
		})
		n, err := service.Write(data)
		require.NoError(t, err)
		require.Equal(t, size, n)
		require.NoError(t, reading.Wait())
		writes := below.take()
		require.LessOrEqual(t, len(writes), 1+size/streamBuffer, "%d bytes in writes of %v", size, writes)
		require.LessOrEqual(t, slices.Max(writes), batchBytes)
	}
	// What TLS writes by itself goes as well.
	require.NoError(t, service.CloseWrite())
	_, err := rank.Read(make([]byte, 1))
	require.ErrorIs(t, err, io.EOF)
}

// TestRecordsConcurrent: several goroutines may write at once.
func TestRecordsConcurrent(t *testing.T) {
	service, rank, _ := secured(t)
	const writers, times, size = 4, 100, 60_000
	var writing errgroup.Group
	for i := range writers {
		writing.Go(func() error {
			for range times {
				if _, err := service.Write(bytes.Repeat([]byte{byte(i)}, size)); err != nil {
					return err
				}
			}
			return nil
		})
	}
	var came [writers]int
	b := make([]byte, size)
	require.NoError(t, rank.SetReadDeadline(time.Now().Add(time.Minute)))
	for range writers * times {
		_, err := io.ReadFull(rank, b)
		require.NoError(t, err)
		require.Equal(t, size, bytes.Count(b, b[:1]), "what one Write wrote is in one piece")
		came[b[0]]++
	}
	require.NoError(t, writing.Wait())
	require.Equal(t, [writers]int{times, times, times, times}, came)
}

// TestRecordsFail: a Write whose records could not be written says so, and so does each later one, since the stream has a gap.
func TestRecordsFail(t *testing.T) {
	service, _, below := secured(t)
	broken := errors.New("broken")
	below.set(broken, nil)
	n, err := service.Write(make([]byte, 100))
	require.ErrorIs(t, err, broken)
	require.Zero(t, n)
	below.set(nil, nil)
	below.take()
	_, err = service.Write(make([]byte, 100))
	require.ErrorIs(t, err, broken)
	require.Empty(t, below.take())
}

// TestCloseEndsWrite: a connection whose peer takes nothing can be closed at once, without its deadlines.
func TestCloseEndsWrite(t *testing.T) {
	service, _, below := secured(t)
	stuck := make(chan struct{})
	below.set(nil, stuck)
	written, closed := make(chan error, 1), make(chan error, 1)
	go func() {
		_, err := service.Write(make([]byte, 100))
		written <- err
	}()
	<-stuck
	go func() { closed <- service.Close() }()
	for _, ended := range []chan error{closed, written} {
		select {
		case err := <-ended:
			if ended == written {
				require.ErrorIs(t, err, net.ErrClosed)
			} else {
				require.NoError(t, err)
			}
		case <-time.After(time.Minute):
			require.NoError(t, below.Close())
			t.Fatal("a blocked Write kept the connection from being closed")
		}
	}
	require.Nil(t, service.records.batch, "a connection keeps no buffer when it does not write")
}

// TestResultsStay: what an all-gather has returned belongs to its caller: later ones leave it alone, whatever buffers they share, and so do other ranks.
func TestResultsStay(t *testing.T) {
	for _, token := range []string{"", "secret"} {
		t.Run("token="+token, func(t *testing.T) {
			const ranks, rounds = 4, 60
			groups, ctx := newJob(t, ranks, Options{Token: token}), testContext(t)
			brought := func(rank, round int) []byte { // some fit into a frame of HTTP/2, some need many
				return randomBytes(uint64(rank*rounds+round), []int{256, 0, 5000, 16384, 90_000}[(rank+round)%5])
			}
			requireNone(t, onAll(groups, func(g *Group) error {
				var kept [][][]byte
				for round := range rounds {
					all, err := g.AllGather(ctx, "kept", brought(g.Rank(), round))
					if err != nil {
						return err
					}
					if round%ranks == g.Rank() {
						for _, b := range all {
							clear(b)
						}
					}
					kept = append(kept, all)
				}
				for round, all := range kept {
					for rank, b := range all {
						want := brought(rank, round)
						if round%ranks == g.Rank() {
							clear(want)
						}
						if !bytes.Equal(want, b) {
							return fmt.Errorf("what rank %d brought to round %d was changed on rank %d", rank, round, g.Rank())
						}
					}
				}
				return nil
			}))
		})
	}
}
