package nccl

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/nccl"
	"github.com/symmem/symmem/memory"
)

// TestFailureIsTold: a call that takes all ranks and fails on one ends on the others long before their deadline, with an error that names the call and
// the rank, and is the same condition.
func TestFailureIsTold(t *testing.T) {
	type does func(ctx context.Context, b *Backend) error
	calls := map[string]does{
		"ncclCommInitRankScalable": nil,
		"ncclCommSplit": func(ctx context.Context, b *Backend) error {
			_, err := b.reducer(ctx, plainForm, nccl.Part{Ranks: b.group.Size(), Rank: b.group.Rank()}, false)
			return err
		},
		"ncclCommWindowRegister": func(ctx context.Context, b *Backend) error {
			a, err := b.Allocate(ctx, granule)
			if err != nil {
				return err
			}
			_, err = b.register(ctx, a.(*allocation).base, a.(*allocation).span) // nobody votes here
			return errors.Join(err, a.Release(ctx))
		},
		"ncclDevCommCreate": func(ctx context.Context, b *Backend) error {
			_, err := b.NewDevComm(ctx, 1)
			return err
		},
	}
	for call, do := range calls {
		for victim := range 2 {
			t.Run(fmt.Sprintf("%s/rank=%d", call, victim), func(t *testing.T) {
				m := newMachine(3)
				failing := func() {
					m.fail = func(c string, rank, _ int) nccl.Result {
						if c == call && rank == victim {
							return nccl.RemoteError
						}
						return nccl.Success
					}
				}
				failed := backendtest.OnRanks(t, 3, nil, func(ctx context.Context, g *group.Group) error {
					o := m.plain(g.Rank())
					o.KernelTimeout = 10 * time.Minute // the test's own limit comes first
					if do == nil {
						m.set(failing)
						_, err := New(ctx, g, o)
						return err
					}
					b, err := New(ctx, g, o)
					if err != nil {
						return err
					}
					if err := g.Barrier(ctx, "open"); err != nil {
						return err
					}
					m.set(failing)
					if err := g.Barrier(ctx, "failing"); err != nil {
						return err
					}
					err = do(ctx, b)
					return errors.Join(err, b.Close(ctx))
				})
				for r, err := range failed {
					switch {
					case err == nil || errors.Is(err, context.DeadlineExceeded):
						t.Errorf("rank %d: %v", r, err)
					case !errors.Is(err, errs.ErrPeerLost): // what ncclRemoteError means
						t.Errorf("rank %d has another condition: %v", r, err)
					case !strings.Contains(err.Error(), call):
						t.Errorf("rank %d does not name the call: %v", r, err)
					case r != victim && !strings.Contains(err.Error(), fmt.Sprintf("rank %d", victim)):
						t.Errorf("rank %d does not name the rank: %v", r, err)
					}
				}
				if call != "ncclCommInitRankScalable" { // NCCL keeps what waits for a rank that never comes
					m.requireClean(t)
				}
			})
		}
	}
}

// TestGivingUpIsTold: a call that the caller of one rank waits for no longer ends on the others long before their deadline. The rank may have come to NCCL all the
// same, or not, which chance decides.
func TestGivingUpIsTold(t *testing.T) {
	for range 10 {
		m := newMachine(3)
		failed := backendtest.OnRanks(t, 3, nil, func(ctx context.Context, g *group.Group) error {
			o := m.plain(g.Rank())
			o.KernelTimeout = 10 * time.Minute // the test's own limit comes first
			b, err := New(ctx, g, o)
			if err != nil {
				return err
			}
			a, err := b.Allocate(ctx, granule)
			if err != nil {
				return err
			}
			within, cancel := context.WithCancel(ctx)
			defer cancel()
			if g.Rank() == 1 {
				cancel()
			}
			w, err := b.register(within, a.(*allocation).base, a.(*allocation).span)
			if err == nil {
				err = b.deregister(ctx, w, a.(*allocation).base)
			}
			return errors.Join(err, a.Release(ctx), b.Close(ctx))
		})
		for r, err := range failed {
			if err == nil && r == 1 || err != nil && (errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), context.Canceled.Error())) {
				t.Fatalf("rank %d: %v", r, err)
			}
		}
		m.requireClean(t)
	}
}

// TestFailedRunIsTold: a run that one rank cannot enqueue, which the kernels of the others would wait for without a bound, ends on all ranks, with an
// error that names the call and the rank. Prepared again, the all-reduce runs.
func TestFailedRunIsTold(t *testing.T) {
	const victim = 1
	for _, form := range []string{plainForm, symmetricForm} {
		t.Run(form, func(t *testing.T) {
			m := newMachine(3)
			var failing atomic.Bool
			m.fail = func(call string, rank, _ int) nccl.Result {
				if call == "ncclAllReduce" && rank == victim && failing.CompareAndSwap(true, false) {
					return nccl.InternalError
				}
				return nccl.Success
			}
			run := func(p backend.PreparedAllReduce, s device.Stream) error {
				return errors.Join(p.Enqueue(s), s.Synchronize(t.Context()))
			}
			backendtest.RequireAll(t, backendtest.OnRanks(t, 3, nil, func(ctx context.Context, g *group.Group) error {
				return withMemory(ctx, g, m.plain(g.Rank()), func(_ *Backend, mem *memory.Memory) error {
					err := reduceBy(ctx, g, mem, form, 10, func(p backend.PreparedAllReduce, s device.Stream) error {
						if err := errors.Join(run(p, s), g.Barrier(ctx, "ran")); err != nil {
							return err
						}
						failing.Store(true)
						if err := g.Barrier(ctx, "failing"); err != nil {
							return err
						}
						switch err := run(p, s); {
						case err == nil:
							return fmt.Errorf("rank %d has no error", g.Rank())
						case !strings.Contains(err.Error(), "ncclAllReduce returned"):
							return fmt.Errorf("rank %d does not name the call: %w", g.Rank(), err)
						case g.Rank() != victim && !strings.Contains(err.Error(), fmt.Sprintf("rank %d", victim)):
							return fmt.Errorf("rank %d does not name the rank: %w", g.Rank(), err)
						}
						return g.Barrier(ctx, "failed")
					})
					return errors.Join(err, reduceBy(ctx, g, mem, form, 10, run))
				})
			}))
			m.requireClean(t)
		})
	}
}
