package group

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
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
