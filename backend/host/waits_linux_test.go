package host_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/backend/host"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/memory"
)

// TestPlanWaitHolds: a plan's wait holds its stream up until the signals have come, at the end of the numbers too.
func TestPlanWaitHolds(t *testing.T) {
	for _, first := range []uint32{0, math.MaxUint32 - 1, math.MaxUint32} {
		o := memory.SignalsOptions{Channels: 1, First: first, Op: "test"}
		onPlans(t, 2, time.Minute, o, func(ctx context.Context, p *plan) error {
			other, err := p.memory.Device().NewStream()
			if err != nil {
				return err
			}
			for round := range 3 {
				if err := p.signals.WaitAll(p.stream, 0); err != nil {
					return err
				}
				time.Sleep(5 * time.Millisecond)
				done, err := p.stream.Query()
				if err != nil {
					return err
				}
				if done {
					return fmt.Errorf("round %d from %d on: a wait without a signal has passed", round, first)
				}
				g := p.memory.Group()
				err = errors.Join(g.Barrier(ctx, "held up"), p.signals.SignalAll(other, 0), other.Synchronize(ctx), p.stream.Synchronize(ctx), g.Barrier(ctx, "passed"))
				if err != nil {
					return err
				}
			}
			return other.Close()
		})
	}
}

// TestBarrierNamesTheLate: a barrier in vain names the rank that did not come.
func TestBarrierNamesTheLate(t *testing.T) {
	// All at once, as they wait: long enough for the ranks that come to do so on a busy machine, else they name each other.
	const size = 3
	failed := make(map[string][]error)
	var mu sync.Mutex
	var all sync.WaitGroup
	for _, far := range []bool{false, true} {
		for late := range size {
			all.Go(func() {
				errs := backendtest.OnRanks(t, size, nil, func(ctx context.Context, g *group.Group) error {
					near, err := host.New(g, nil)
					if err != nil {
						return err
					}
					var b backend.Backend = near
					if far {
						b = backendtest.Far(near, g, nil)
					}
					m := memory.New(b, g, &memory.Options{Channels: 1, KernelTimeout: 2 * time.Second})
					return errors.Join(waitInVain(ctx, m, late), g.Barrier(ctx, "end"), m.Close(ctx))
				})
				mu.Lock()
				defer mu.Unlock()
				failed[fmt.Sprintf("far=%t/late=%d", far, late)] = errs
			})
		}
	}
	all.Wait()
	for name, errs := range failed {
		t.Run(name, func(t *testing.T) { backendtest.RequireAll(t, errs) })
	}
}

// waitInVain comes to a barrier to which one rank does not come.
func waitInVain(ctx context.Context, m *memory.Memory, late int) error {
	return backendtest.WithWindow(ctx, m, 64, func(*memory.Window) error {
		if m.Group().Rank() == late {
			return nil
		}
		s, err := m.Device().NewStream()
		if err != nil {
			return err
		}
		if err := m.Barrier(s, 0); err != nil {
			return errors.Join(err, s.Close())
		}
		err = s.Synchronize(ctx)
		wait, ok := errors.AsType[*device.WaitError](err)
		if !ok || wait.Op != "barrier" || wait.Peer != late || wait.Channel != 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
			err = fmt.Errorf("a barrier without rank %d: %w", late, err)
		} else {
			err = nil
		}
		return errors.Join(err, s.Close())
	})
}

// TestFailedPlanIsSilent: a rank that has waited in vain signals nobody any more, so that its peer, which may take what was not sent,
// waits in vain too.
func TestFailedPlanIsSilent(t *testing.T) {
	onPlans(t, 2, 100*time.Millisecond, memory.SignalsOptions{Channels: 2, Op: "the plan"}, func(ctx context.Context, p *plan) error {
		if p.memory.Group().Rank() == 0 {
			err := errors.Join(p.signals.WaitAll(p.stream, 0), p.signals.SignalAll(p.stream, 1))
			if err := errors.Join(err, p.stream.Synchronize(ctx)); !errors.Is(err, os.ErrDeadlineExceeded) {
				return fmt.Errorf("a wait in vain: %w", err)
			}
			return p.memory.Group().Barrier(ctx, "failed")
		}
		if err := p.memory.Group().Barrier(ctx, "failed"); err != nil {
			return err
		}
		if err := errors.Join(p.signals.WaitAll(p.stream, 1), p.stream.Synchronize(ctx)); !errors.Is(err, os.ErrDeadlineExceeded) {
			return fmt.Errorf("a wait for a plan that has failed: %w", err)
		}
		return nil
	})
}
