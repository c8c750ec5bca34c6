package memory

import (
	"context"
	"sync"
	"sync/atomic"
	"time"
)

// Hold keeps memory from being released until End. The zero Hold keeps nothing.
type Hold struct{ count *atomic.Int64 }

// End ends the hold. Once.
func (h Hold) End() {
	if h.count != nil {
		h.count.Add(-1)
	}
}

// Hold begins a call that asks whether memory of m is still there and then enqueues work on it, as the runs of plans do: between the two nothing of m is released. Whatever
// releases memory refuses its use first ([Window.Usable]), and then waits for the holds that were there, and for the device. So take one before asking, and call nothing that releases memory, or waits for who
// does, before End. Local; it does not block, and costs some nanoseconds.
func (m *Memory) Hold() Hold {
	if m == nil {
		return Hold{}
	}
	return Hold{m.holds.begin()}
}

// holds counts calls that are under way, so that one can wait for those that were there when it began, however many come after. New calls are in one of two
// counts, and whoever waits makes that the other one first.
type holds struct {
	counts   [2]atomic.Int64
	turn     atomic.Uint32 // whose lowest bit is which
	draining sync.Mutex
}

func (h *holds) begin() *atomic.Int64 {
	for {
		turn := h.turn.Load()
		count := &h.counts[turn&1]
		count.Add(1)
		if h.turn.Load() == turn {
			return count
		}
		count.Add(-1) // which somebody may have seen at 0 already
	}
}

// drain waits until all calls have ended that were under way when it was called, or ctx has.
func (h *holds) drain(ctx context.Context) error {
	if err := poll(ctx, h.draining.TryLock); err != nil {
		return err
	}
	defer h.draining.Unlock()
	for range h.counts { // of the other one there are those that a drain before this one has given up
		count := &h.counts[(h.turn.Add(1)-1)&1]
		if err := poll(ctx, func() bool { return count.Load() == 0 }); err != nil {
			return err
		}
	}
	return nil
}

// poll waits until done, or ctx has ended. What it waits for is soon over.
func poll(ctx context.Context, done func() bool) error {
	for !done() {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(50 * time.Microsecond):
		}
	}
	return nil
}
