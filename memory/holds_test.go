package memory

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestHolds: who waits waits for the holds that were there, also where somebody before has given that up, and for no others, however many there are.
func TestHolds(t *testing.T) {
	var h holds
	within := func(d time.Duration) context.Context {
		ctx, cancel := context.WithTimeout(t.Context(), d)
		t.Cleanup(cancel)
		return ctx
	}
	require.NoError(t, h.drain(within(time.Minute)))
	first := Hold{h.begin()}
	for range 3 {
		require.ErrorIs(t, h.drain(within(5*time.Millisecond)), context.DeadlineExceeded)
	}
	drained := make(chan error, 2)
	for range 2 { // at once
		go func() { drained <- h.drain(within(time.Minute)) }()
	}
	time.Sleep(5 * time.Millisecond)
	second := Hold{h.begin()}
	require.Empty(t, drained, "the first is there")
	first.End()
	second.End()
	require.NoError(t, <-drained)
	require.NoError(t, <-drained)
	(Hold{}).End()
	(*Memory)(nil).Hold().End()

	// Two that follow upon each other without end, so that there is always one.
	var over atomic.Bool
	var both sync.WaitGroup
	next := Hold{h.begin()}
	holds := make(chan Hold, 1)
	holds <- next
	both.Go(func() {
		for !over.Load() {
			before := <-holds
			holds <- Hold{h.begin()}
			before.End()
		}
	})
	for range 20 {
		require.NoError(t, h.drain(within(time.Minute)))
	}
	over.Store(true)
	both.Wait()
	(<-holds).End()
	require.NoError(t, h.drain(within(time.Minute)))
	require.Zero(t, h.counts[0].Load()+h.counts[1].Load())
}

// TestHoldsHold: what is refused before a drain is used by no hold behind it.
func TestHoldsHold(t *testing.T) {
	for range 200 {
		var h holds
		var refused, freed atomic.Bool
		var wrong atomic.Int64
		var users sync.WaitGroup
		for range 4 {
			users.Go(func() {
				for range 50 {
					hold := Hold{h.begin()}
					if !refused.Load() {
						for range 20 {
							if freed.Load() {
								wrong.Add(1)
							}
						}
					}
					hold.End()
				}
			})
		}
		refused.Store(true)
		require.NoError(t, h.drain(t.Context()))
		freed.Store(true)
		users.Wait()
		require.Zero(t, wrong.Load())
	}
}
