package group

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/symmem/symmem/internal/errs"
)

// TestServedServiceIsLost: where the service is no rank's, its loss names no rank, as all of them are there.
func TestServedServiceIsLost(t *testing.T) {
	ctx := testContext(t)
	l := listenLoopback(t)
	serving, stop := context.WithCancel(ctx)
	defer stop()
	ended := make(chan error, 1)
	go func() { ended <- Serve(serving, &Options{WorldSize: 2, Listener: l}) }()
	groups, failures := make([]*Group, 2), make([]error, 2)
	var wait sync.WaitGroup
	for rank := range groups {
		wait.Go(func() {
			groups[rank], failures[rank] = Join(ctx, &Options{Rank: rank, WorldSize: 2, Addr: l.Addr().String(), Served: true})
		})
	}
	wait.Wait()
	requireNone(t, failures)
	subs := make([]*Group, 2)
	requireNone(t, onAll(groups, func(g *Group) (err error) {
		subs[g.Rank()], err = g.Sub(ctx, []int{0, 1})
		return err
	}))
	stop()
	require.ErrorAs(t, <-ended, new(*MissingRanksError))
	within := time.After(8 * time.Second) // a connection that breaks is noticed at once, and not when nothing was heard for as long as ranks may be silent
	for _, g := range append(groups, subs...) {
		select {
		case <-g.Lost():
		case <-within:
			require.Fail(t, "the loss of the service was not noticed")
		}
		var lost *PeerLostError
		require.ErrorAs(t, g.Barrier(ctx, "b"), &lost)
		require.Equal(t, PeerLostError{Group: worldName, Rank: -1, Reason: lost.Reason}, *lost)
		require.ErrorContains(t, lost, "the rendezvous service of group world is lost: the connection")
		require.NotContains(t, lost.Error(), "rank")
	}
	for _, g := range groups {
		_ = g.Close(ctx) // there is nobody to say goodbye to
	}
}

// mutedListener accepts connections by which nothing is sent any more once it is muted, as those of a process that is stopped, or behind a cable that was pulled out.
type mutedListener struct {
	net.Listener
	muted atomic.Bool
}

func (l *mutedListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &mutedConn{c, &l.muted}, nil
}

type mutedConn struct {
	net.Conn
	muted *atomic.Bool
}

func (c *mutedConn) Write(b []byte) (int, error) {
	if c.muted.Load() {
		return len(b), nil
	}
	return c.Conn.Write(b)
}

// TestServedServiceIsSilent: a service that says nothing any more, while its connections are there, is lost on every rank after the liveness timeout, and not before.
func TestServedServiceIsSilent(t *testing.T) {
	const liveness = 2 * time.Second
	ctx := testContext(t)
	l := &mutedListener{Listener: listenLoopback(t)}
	serving, stop := context.WithCancel(ctx)
	defer stop()
	ended := make(chan error, 1)
	go func() { ended <- Serve(serving, &Options{WorldSize: 3, Listener: l, LivenessTimeout: liveness}) }()
	groups, failures := make([]*Group, 3), make([]error, 3)
	var wait sync.WaitGroup
	for rank := range groups {
		wait.Go(func() {
			groups[rank], failures[rank] = Join(ctx, &Options{Rank: rank, WorldSize: 3, Addr: l.Addr().String(), Served: true, LivenessTimeout: liveness})
		})
	}
	wait.Wait()
	requireNone(t, failures)
	requireNone(t, onAll(groups, func(g *Group) error { return g.Barrier(ctx, "before") }))
	l.muted.Store(true)
	since := time.Now()
	requireNone(t, onAll(groups, func(g *Group) error {
		// What the service said last may be a fourth of the timeout old, as often as it speaks, and ranks count it as lost a look before the timeout.
		if err := g.Barrier(ctx, "behind"); !errors.Is(err, errs.ErrPeerLost) || !strings.Contains(err.Error(), "the liveness timeout is 2s") || strings.Contains(err.Error(), "rank") {
			return fmt.Errorf("rank %d: %w", g.Rank(), err)
		}
		if took := time.Since(since); took < liveness/2 || took > 5*liveness { // on a machine that is busy
			return fmt.Errorf("rank %d knew after %v, of %v", g.Rank(), took, liveness)
		}
		return nil
	}))
	for _, g := range groups {
		_ = g.Close(ctx) // there is nobody to say goodbye to
	}
	stop()
	<-ended
}

// TestStoreWithoutService: requests after the service is lost say so, however many there are, and none of them is kept.
func TestStoreWithoutService(t *testing.T) {
	ctx := testContext(t)
	lim := defaultLimits
	lim.queued = 4
	groups, failures := joinOver(t, listenLoopback(t), 2, Options{limits: &lim})
	requireNone(t, failures)
	host, ok := groups[0].session.transport.(*hostTransport)
	require.True(t, ok)
	host.service.stop()
	<-groups[1].session.done
	for range 2 * queueFactor * lim.queued {
		_, _, err := groups[1].Store().TryGet(ctx, "k")
		var lost *PeerLostError
		require.ErrorAs(t, err, &lost)
	}
	r := groups[1].session.transport.(*remote)
	r.mu.Lock()
	require.Empty(t, r.requests)
	r.mu.Unlock()
	for _, g := range groups {
		_ = g.Close(ctx) // there is no service
	}
}
