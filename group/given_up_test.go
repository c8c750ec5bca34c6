package group

import (
	"context"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// deafTransport never hears that a group was opened: the service is too slow.
type deafTransport struct{ transport }

func (d deafTransport) arrive(group string, seq uint64, a *arrival) {
	if a.kind == kindSub {
		a.to = make(outcomeChan, 1)
	}
	d.transport.arrive(group, seq, a)
}

// TestSubThatIsGivenUp: a rank that gives up opening a group, which is open for the others already, is none that they wait for.
func TestSubThatIsGivenUp(t *testing.T) {
	eachKind(t, 3, func(t *testing.T, groups []*Group) {
		ctx := testContext(t)
		s := groups[2].session
		hearing := s.transport
		s.transport = deafTransport{hearing}
		impatient, giveUp := context.WithCancel(ctx)
		defer giveUp()
		gaveUp := make(chan error, 1)
		go func() {
			_, err := groups[2].Sub(impatient, []int{0, 1, 2})
			gaveUp <- err
		}()
		subs := make([]*Group, 2)
		requireNone(t, onAll(groups[:2], func(g *Group) (err error) {
			subs[g.Rank()], err = g.Sub(ctx, []int{0, 1, 2})
			return err
		}))
		giveUp()
		require.ErrorIs(t, <-gaveUp, context.Canceled)
		s.transport = hearing
		for _, err := range onAll(subs, func(g *Group) error { return g.Barrier(ctx, "without one") }) {
			require.ErrorIs(t, err, ErrPeerLost)
			require.ErrorContains(t, err, "has left")
		}
		requireNone(t, onAll(groups, func(g *Group) error { return g.Barrier(ctx, "all") }))
	})
}

// TestSubBeyondTheQuota: a rank that has too many groups tells the others so, and hears meanwhile that the service is lost, or that it has left itself.
func TestSubBeyondTheQuota(t *testing.T) {
	for _, end := range []string{"the service is lost", "the rank leaves"} {
		t.Run(end, func(t *testing.T) {
			ctx := testContext(t)
			lim := defaultLimits
			lim.groups = 1 // the world
			s := newTestService(t, listenLoopback(t), Options{WorldSize: 2}, Serve)
			groups, failures := joinAll(t, 2, func(rank int) *Options {
				return &Options{Rank: rank, WorldSize: 2, Addr: s.addr, Served: true, limits: &lim}
			})
			requireNone(t, failures)
			quota := make(chan error, 1)
			go func() {
				_, err := groups[0].Sub(ctx, []int{0, 1})
				quota <- err
			}()
			require.Never(t, func() bool { return len(quota) > 0 }, 50*time.Millisecond, 10*time.Millisecond, "the other has not come")
			if end == "the rank leaves" {
				require.NoError(t, groups[0].Close(ctx))
			} else {
				require.Error(t, s.end())
			}
			select {
			case err := <-quota:
				if end == "the rank leaves" {
					require.ErrorIs(t, err, ErrClosed)
				} else {
					require.ErrorIs(t, err, ErrPeerLost)
				}
			case <-time.After(20 * time.Second):
				t.Fatal("it waits still")
			}
			for _, g := range groups {
				_ = g.Close(ctx) // its service is lost, or it is closed
			}
		})
	}
}

// TestGetsOfClosedGroups: a Get that waits when its group is closed is forgotten on this rank, and by the service.
func TestGetsOfClosedGroups(t *testing.T) {
	eachKind(t, 2, func(t *testing.T, groups []*Group) {
		ctx := testContext(t)
		for range 3 {
			requireNone(t, onAll(groups, func(g *Group) error {
				sub, err := g.Sub(ctx, []int{0, 1})
				if err != nil {
					return err
				}
				got := make(chan error, 1)
				go func() {
					_, err := sub.Store().Get(ctx, "never")
					got <- err
				}()
				if err := sub.Barrier(ctx, "asked"); err != nil {
					return err
				}
				if err := sub.Close(ctx); err != nil {
					return err
				}
				require.ErrorIs(t, <-got, ErrClosed)
				return nil
			}))
		}
		for _, g := range groups {
			r, ok := g.session.transport.(*remote)
			if !ok {
				continue // it asks the hub itself
			}
			require.Eventually(t, func() bool {
				r.mu.Lock()
				defer r.mu.Unlock()
				return len(r.requests) == 0
			}, 10*time.Second, 10*time.Millisecond, "requests that nobody waits for")
		}
		requireNone(t, onAll(groups, func(g *Group) error { return g.Barrier(ctx, "all") }))
	})
}

// lateListener accepts connections from which nothing is read for a while once that is set.
type lateListener struct {
	net.Listener
	late atomic.Int64 // nanoseconds
}

func (l *lateListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &lateConn{c, &l.late}, nil
}

type lateConn struct {
	net.Conn
	late *atomic.Int64
}

func (c *lateConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	time.Sleep(time.Duration(c.late.Load()))
	return n, err
}

// TestCloseWithoutTime: a rank that leaves with a context that has ended, or ends before the service has answered, has left, and is not lost for the others. It waits for that
// no longer than a moment.
func TestCloseWithoutTime(t *testing.T) {
	ctx := testContext(t)
	const n = 12
	l := &lateListener{Listener: listenLoopback(t)}
	groups, failures := joinOver(t, l, n, Options{LivenessTimeout: 5 * time.Second})
	requireNone(t, failures)
	requireNone(t, onAll(groups[2:n-1], func(g *Group) error {
		ended, cancel := context.WithCancel(ctx)
		cancel()
		return g.Close(ended)
	}))
	l.late.Store(int64(200 * time.Millisecond))
	ending, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
	defer cancel()
	require.NoError(t, groups[n-1].Close(ending))
	l.late.Store(0)
	for _, g := range groups[:2] {
		require.NoError(t, g.Err())
	}
	requireNone(t, onAll(groups[:2], func(g *Group) error {
		s, err := g.Sub(ctx, []int{0, 1})
		if err == nil {
			err = s.Close(ctx)
		}
		return err
	}))
	l.late.Store(int64(graceTimeout + 500*time.Millisecond))
	ended, end := context.WithCancel(ctx)
	end()
	err := groups[1].Close(ended)
	require.ErrorIs(t, err, context.Canceled)
	require.ErrorContains(t, err, "did not confirm the goodbye")
	l.late.Store(0)
	require.NoError(t, groups[0].Close(ctx))
}
