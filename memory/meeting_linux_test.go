package memory_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/memory"
)

// underWay begins a rendezvous on rank 0, to which the other ranks come when rank 0 lets them, and gives what lets them, and what waits until
// the rendezvous has ended on this rank.
func underWay(ctx context.Context, m *memory.Memory, key string, meet func() error) (let, end func() error) {
	g := m.Group()
	met := make(chan error, 1)
	if g.Rank() != 0 {
		return func() error { return nil }, func() error {
			if _, err := g.Store().Get(ctx, key); err != nil {
				return err
			}
			return meet()
		}
	}
	// An earlier call that gave up still tells the others in its turn: that is not this one.
	for m.Places() > 0 && ctx.Err() == nil {
		time.Sleep(100 * time.Microsecond)
	}
	go func() { met <- meet() }()
	for collective := false; !collective && ctx.Err() == nil; collective, _ = m.Held() {
		time.Sleep(100 * time.Microsecond)
	}
	return func() error { return g.Store().Set(ctx, key, nil) }, func() error { return <-met }
}

// awaitPlaces waits until so many collective calls of the rank have their turn or wait for it.
func awaitPlaces(ctx context.Context, m *memory.Memory, n int) {
	for m.Places() < n && ctx.Err() == nil {
		time.Sleep(100 * time.Microsecond)
	}
}

// TestFreeDuringRendezvous: memory that is freed while its rendezvous is under way is freed when that has ended, with the other ranks.
func TestFreeDuringRendezvous(t *testing.T) {
	onAiling(t, func(ctx context.Context, _ *ailing, m *memory.Memory, _ bool) error {
		if err := backendtest.TryWindow(ctx, m, 100); err != nil { // the signal pads are there
			return err
		}
		a, err := m.Allocate(ctx, 100, "")
		if err != nil {
			return err
		}
		let, end := underWay(ctx, m, "memory: free during", func() error {
			_, err := m.Rendezvous(ctx, a, memory.Record{})
			return err
		})
		freed := make(chan error, 1)
		if m.Group().Rank() == 0 {
			for !m.Meeting(a) && ctx.Err() == nil {
				time.Sleep(100 * time.Microsecond)
			}
			go func() { freed <- m.Free(ctx, a) }()
			for m.Places() < 2 && len(freed) == 0 && ctx.Err() == nil { // it comes to where it waits
				time.Sleep(100 * time.Microsecond)
			}
		}
		if err := errors.Join(let(), end()); err != nil {
			return fmt.Errorf("a rendezvous of memory that is to be freed: %w", err)
		}
		if m.Group().Rank() != 0 {
			return m.Free(ctx, a)
		}
		return <-freed
	})
}

// TestFreeAfterFailedRendezvous: memory whose rendezvous has failed is this rank's alone again: freeing it waits for no other rank, even while
// another rendezvous does.
func TestFreeAfterFailedRendezvous(t *testing.T) {
	onAiling(t, func(ctx context.Context, b *ailing, m *memory.Memory, fails bool) error {
		a, err := m.Allocate(ctx, 100, "")
		if err != nil {
			return err
		}
		other, err := m.Allocate(ctx, 100, "")
		if err != nil {
			return err
		}
		meet := func() error {
			_, err := m.Rendezvous(ctx, other, memory.Record{})
			return err
		}
		if err := meet(); err != nil { // the signal pads are there
			return err
		}
		b.noMapping = fails
		_, err = m.Rendezvous(ctx, a, memory.Record{})
		b.noMapping = false
		if err := wantVote(err, fails); err != nil {
			return err
		}
		let, end := underWay(ctx, m, "memory: free after", meet)
		freed := make(chan error, 1)
		go func() { freed <- m.Free(ctx, a) }()
		select {
		case err = <-freed:
		case <-time.After(10 * time.Second):
			m.Group().Abort("the test has failed")
			return fmt.Errorf("memory whose rendezvous has failed waits for another rendezvous: %w", <-freed)
		}
		return errors.Join(err, let(), end(), m.Free(ctx, other))
	})
}
