package group

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/group/internal/pb"
)

// wrappingListener changes the connections that it accepts.
type wrappingListener struct {
	net.Listener
	wrap func(net.Conn) net.Conn
}

func (l *wrappingListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return l.wrap(c), nil
}

// pausingConn stops once, when so many bytes have been read: nothing more is heard of the other side for a while. It counts the connections on which there is more.
type pausingConn struct {
	net.Conn
	after int
	pause time.Duration
	more  *atomic.Int64
}

func (c *pausingConn) Read(b []byte) (int, error) {
	paused := c.after == 0
	if paused {
		time.Sleep(c.pause)
	}
	if c.after > 0 && len(b) > c.after {
		b = b[:c.after]
	}
	n, err := c.Conn.Read(b)
	c.after -= n
	if paused && n > 0 {
		c.more.Add(1)
	}
	return n, err
}

// joinOver joins n ranks over a listener of the test's own.
func joinOver(t testing.TB, l net.Listener, n int, base Options) ([]*Group, []error) {
	ctx := testContext(t)
	base.WorldSize, base.Addr = n, l.Addr().String()
	groups, failures := make([]*Group, n), make([]error, n)
	var wait sync.WaitGroup
	for rank := range n {
		o := base
		if o.Rank = rank; rank == 0 {
			o.Listener = l
		}
		wait.Go(func() { groups[rank], failures[rank] = Join(ctx, &o) })
	}
	wait.Wait()
	return groups, failures
}

// TestPauseWhileJoining stops a rank for longer than an attempt to connect may take, before its hello is heard.
func TestPauseWhileJoining(t *testing.T) {
	lim := defaultLimits
	lim.attempt = 100 * time.Millisecond
	var hellos atomic.Int64 // where a machine takes longer than an attempt for the greeting, a rank connects again before its hello
	l := &wrappingListener{Listener: listenLoopback(t), wrap: func(c net.Conn) net.Conn {
		return &pausingConn{Conn: c, after: prologueLength, pause: 5 * lim.attempt, more: &hellos}
	}}
	groups, failures := joinOver(t, l, 3, Options{limits: &lim})
	requireNone(t, failures)
	require.EqualValues(t, 2, hellos.Load(), "nobody had to say hello twice")
	requireNone(t, onAll(groups, func(g *Group) error { return g.Barrier(testContext(t), "all there") }))
	leaveAll(t, groups)
}

// TestJoinGoesOn breaks the connection of a rank that was admitted and has not spoken yet.
func TestJoinGoesOn(t *testing.T) {
	ctx := testContext(t)
	l := listenLoopback(t)
	base := Options{WorldSize: 3, Addr: l.Addr().String(), LivenessTimeout: time.Second, Timeout: time.Minute}
	groups, failures := make([]*Group, 3), make([]error, 3)
	var wait sync.WaitGroup
	o := base
	o.Listener = l
	wait.Go(func() { groups[0], failures[0] = Join(ctx, &o) })

	dial := func(rank int, id string) (*remote, error) {
		o, err := base.checked()
		require.NoError(t, err)
		s := newSession(rank, 0, nil, &defaultLimits)
		s.id = id
		m, err := thisProcess(rank, 0, "")
		require.NoError(t, err)
		return connect(ctx, s, m, o)
	}
	leave := func(r *remote) {
		r.cancel()
		r.work.Wait()
	}
	first, err := dial(1, "join A")
	require.NoError(t, err)
	_, err = dial(1, "join B")
	requireRefused(t, err, RefusedDuplicate, base.Addr)
	second, err := dial(1, "join A") // the first connection still stands
	require.NoError(t, err)
	leave(first)
	leave(second)
	third, err := dial(1, "join A")
	require.NoError(t, err)
	answer := make(outcomeChan, 1)
	third.arrive("none", 0, &arrival{kind: kindBarrier, to: answer})
	<-answer // so the service has heard it
	_, err = dial(1, "join A")
	requireRefused(t, err, RefusedDuplicate, base.Addr)

	// Another one is admitted and never comes again. It is lost, and so is the job.
	gone, err := dial(2, "join C")
	require.NoError(t, err)
	leave(gone)
	third.arrive(worldName, 5, &arrival{kind: kindBarrier, to: answer})
	require.Equal(t, failLost, (<-answer).failure.kind)
	leave(third)
	wait.Wait()
	var lost *PeerLostError
	require.ErrorAs(t, failures[0], &lost)
	require.Equal(t, 2, lost.Rank)
}

// TestManyJoin joins a thousand ranks of one process at the same time.
func TestManyJoin(t *testing.T) {
	n := 1000
	if testing.Short() {
		n = 100
	}
	for _, token := range []string{"", "a token that is long enough"} {
		t.Run(fmt.Sprintf("token=%t", token != ""), func(t *testing.T) {
			if token != "" && os.Getenv("SYMMEM_TEST_LARGE") == "" {
				n = 100
			}
			began := time.Now()
			groups, failures := joinOver(t, listenLoopback(t), n, Options{Token: token})
			t.Logf("%d ranks joined in %v", n, time.Since(began))
			requireNone(t, failures)
			requireNone(t, onAll(groups, func(g *Group) error { return g.Barrier(testContext(t), "all there") }))
			leaveAll(t, groups)
		})
	}
}

// slowConn carries so many bytes a second in each direction.
type slowConn struct {
	net.Conn
	rate int
}

// slowStep is how many bytes go at a time.
const slowStep = 4 << 10

func (c *slowConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b[:min(len(b), slowStep)])
	time.Sleep(time.Second * time.Duration(n) / time.Duration(c.rate))
	return n, err
}

func (c *slowConn) Write(b []byte) (int, error) {
	done := 0
	for done < len(b) {
		n, err := c.Conn.Write(b[done:min(done+slowStep, len(b))])
		done += n
		if err != nil {
			return done, err
		}
		time.Sleep(time.Second * time.Duration(n) / time.Duration(c.rate))
	}
	return done, nil
}

// TestSlowLink sends messages that take longer than a rank may be silent.
func TestSlowLink(t *testing.T) {
	t.Parallel()
	const liveness = 800 * time.Millisecond
	const rate = 512 << 10
	l := &wrappingListener{Listener: listenLoopback(t), wrap: func(c net.Conn) net.Conn { return &slowConn{Conn: c, rate: rate} }}
	groups, failures := joinOver(t, l, 2, Options{LivenessTimeout: liveness})
	requireNone(t, failures)
	ctx := testContext(t)
	large := bytes.Repeat([]byte{7}, rate*5/4) // 1.25 s there and as long back
	requireNone(t, onAll(groups, func(g *Group) error {
		var data []byte
		if g.Rank() == 1 {
			data = large
		}
		all, err := g.AllGather(ctx, "large", data)
		if err == nil && !bytes.Equal(all[1], large) {
			err = errors.New("it was changed")
		}
		return err
	}))
	leaveAll(t, groups)
}

// TestManyWithData gathers 10 KB from each of many ranks, so that everybody gets all of it at the same time.
func TestManyWithData(t *testing.T) {
	n, liveness := 100, 5*time.Second
	if os.Getenv("SYMMEM_TEST_LARGE") != "" {
		n, liveness = 500, defaultLivenessTimeout
	}
	groups, failures := joinOver(t, listenLoopback(t), n, Options{LivenessTimeout: liveness})
	requireNone(t, failures)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	began := time.Now()
	requireNone(t, onAll(groups, func(g *Group) error {
		all, err := g.AllGather(ctx, "data", bytes.Repeat([]byte{byte(g.Rank())}, 10<<10))
		if err != nil {
			return err
		}
		for rank, b := range all {
			if len(b) != 10<<10 || b[0] != byte(rank) {
				return fmt.Errorf("rank %d brought %d bytes", rank, len(b))
			}
		}
		return nil
	}))
	t.Logf("%d ranks in %v", n, time.Since(began))
	leaveAll(t, groups)
}

// TestBrokenWhileServiceStops: a rank whose connection broke before it had spoken can come again as long as it may be silent, not counting the time in which the service did
// not run, as a process does not that was stopped.
func TestBrokenWhileServiceStops(t *testing.T) {
	lim := tightLimits()
	l := newBoundedListener(listenLoopback(t), lim, newSession(0, 0, nil, lim).logger)
	defer l.Close()
	o, err := (&Options{WorldSize: 2, Addr: l.Addr().String(), Timeout: time.Minute}).checked()
	require.NoError(t, err)
	o.limits = lim
	s := newService(newHub(2, lim), o, false, l.logger)
	admitted := func() *serviceConn {
		near, far := net.Pipe()
		t.Cleanup(func() { _, _ = near.Close(), far.Close() })
		c := &serviceConn{service: s, socket: l.track(near), outbox: newOutbox(100, 1<<20), gone: make(chan struct{})}
		c.rank.Store(-1)
		require.Nil(t, c.admit(&pb.Hello{WorldSize: 2, Member: Member{WorldRank: 1}.toWire(), Session: "one"}))
		return c
	}
	first := admitted()
	first.breaks("the test says so")
	first.broken = first.broken.Add(-2 * o.LivenessTimeout) // then the service was stopped
	require.Empty(t, s.silent(true))
	require.Empty(t, s.silent(false), "it goes on, and the rank has not had its time")
	second := admitted()
	require.Empty(t, s.silent(false))
	require.Same(t, second, s.attached[1])
	second.breaks("the test says so")
	second.broken = second.broken.Add(-2 * o.LivenessTimeout)
	require.Len(t, s.silent(false), 1, "the service was there all the time")
}
