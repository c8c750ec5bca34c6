package group

import (
	"context"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/group/durable"
)

// movingAddress is an address that passes on to that of one service after the other, as those do that a platform gives.
type movingAddress struct {
	net.Listener
	to atomic.Pointer[string]
}

func newMovingAddress(t *testing.T) *movingAddress {
	t.Helper()
	a := &movingAddress{Listener: listenLoopback(t)}
	var work sync.WaitGroup
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	work.Go(func() {
		for {
			near, err := a.Accept()
			if err != nil {
				return
			}
			work.Go(func() {
				defer near.Close()
				far, err := net.Dial("tcp", *a.to.Load())
				if err != nil {
					return
				}
				defer far.Close()
				stop := context.AfterFunc(ctx, func() { _, _ = near.Close(), far.Close() })
				defer stop()
				back := make(chan struct{})
				go func() {
					defer close(back)
					_, _ = io.Copy(near, far)
					_ = near.Close()
				}()
				_, _ = io.Copy(far, near)
				_ = far.Close()
				<-back
			})
		}
	})
	t.Cleanup(func() {
		cancel()
		require.NoError(t, a.Close())
		work.Wait()
	})
	return a
}

// TestIdleServiceIsReplaced: a service whose ranks ask for nothing notices as well that another one has its place, in time for the ranks to go there.
func TestIdleServiceIsReplaced(t *testing.T) {
	t.Parallel() // it waits, most of the time
	eachStore(t, func(t *testing.T, store string) {
		ctx := testContext(t)
		s := newKeptService(t, 2, Options{Job: uniqueJob(), Store: store, Timeout: 8 * time.Second, LivenessTimeout: time.Second})
		address := newMovingAddress(t)
		first := s.addr
		address.to.Store(&first)
		s.addr = address.Addr().String()
		groups := s.join()
		requireNone(t, onAll(groups, func(g *Group) error { return g.Store().Set(ctx, "k", []byte("v")) }))
		time.Sleep(300 * time.Millisecond) // so that nothing of that is to be kept any more
		ended, stop := s.ended, s.stop
		defer stop()
		l := listenLoopback(t)
		next := l.Addr().String()
		address.to.Store(&next)
		s.start(l)
		select {
		case err := <-ended:
			var replaced *durable.StoreError
			require.ErrorAs(t, err, &replaced)
			require.Equal(t, durable.Replaced, replaced.Condition)
		case <-time.After(10 * time.Second):
			t.Error("the service that was replaced goes on")
			stop()
			<-ended
		}
		requireNone(t, onAll(groups, func(g *Group) error { return g.Barrier(ctx, "at the next one") }))
		value, err := groups[0].Store().Get(ctx, "k")
		require.NoError(t, err)
		require.Equal(t, "v", string(value))
		s.finish(ctx, groups)
	})
}
