package nixl

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/kernels/kernelstest"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// newDispatch makes an all-to-all with counts. Collective.
func newDispatch(ctx context.Context, m *memory.Memory, graph bool) (*kernelstest.Dispatch, error) {
	return kernelstest.NewDispatch(ctx, m, graph, func(in, out, counts, received tensor.SymmetricTensor) (kernelstest.Plan, error) {
		return kernels.NewAllToAllV(ctx, in, out, counts, received, nil)
	})
}

// TestAllToAllVMovesWhatThereIs: the library moves the counts, and of the rows those that there are, in each run anew. A graph of a plan that was closed
// moves nothing, and says so.
func TestAllToAllVMovesWhatThereIs(t *testing.T) {
	for _, graph := range []bool{false, true} {
		t.Run(fmt.Sprintf("graph=%t", graph), func(t *testing.T) {
			n := &network{}
			gpuWorld{hosts: []string{"a", "b", "a"}, net: n}.run(t, func(ctx context.Context, m *memory.Memory) error {
				g := m.Group()
				me, size := g.Rank(), int64(g.Size())
				d, err := newDispatch(ctx, m, graph)
				if err != nil {
					return err
				}
				assert.Equal(t, kernels.Transfers, d.Plan.(*kernels.Plan).Algorithm())
				for run, rows := range []int64{0, 1, 4, 0, 3, 3} {
					counts, from := make([]int64, size), make([]int64, size)
					counts[(me+1)%3] = rows // of the three one is to a rank of the same host
					from[(me+2)%3] = rows
					if err := d.Fill(ctx, counts); err != nil {
						return err
					}
					before := n.moved.Load()
					if err := errors.Join(g.Barrier(ctx, "counted"), d.Run(), d.Stream.Synchronize(ctx), g.Barrier(ctx, "moved"), d.Check(from)); err != nil {
						return fmt.Errorf("run %d: %w", run, err)
					}
					// Of the six ways between ranks four are between hosts, and so are two of the three that rows go.
					assert.Equal(t, 4*8*size+2*rows*kernelstest.DispatchWidth, n.moved.Load()-before, "run %d", run)
					if err := g.Barrier(ctx, "looked"); err != nil {
						return err
					}
				}
				if err := d.Plan.Close(ctx); err != nil {
					return err
				}
				if graph {
					assert.ErrorIs(t, errors.Join(d.Run(), d.Stream.Synchronize(ctx)), errs.ErrClosed)
				}
				err = d.Close(ctx)
				if !errors.Is(err, errs.ErrClosed) { // the plan
					return fmt.Errorf("closing again: %w", err)
				}
				return nil
			})
		})
	}
}

// TestAllToAllVFails: where the rows of one rank cannot be moved, that rank has the library's error, and whom they were for wait in vain: nobody is told that
// they have come.
func TestAllToAllVFails(t *testing.T) {
	for _, hosts := range [][]string{{"", ""}, {"a", "b", "a"}} {
		t.Run(strings.Join(hosts, ""), func(t *testing.T) {
			var failing atomic.Bool
			n := &network{fail: func(engine, call string) error {
				if failing.Load() && call == "NewRequest" && strings.HasPrefix(engine, "world-1-") {
					return errBackend
				}
				return nil
			}}
			options := func(int) Options { return Options{Islands: islandsOff, KernelTimeout: 2 * time.Second} }
			gpuWorld{hosts: hosts, net: n, options: options}.run(t, func(ctx context.Context, m *memory.Memory) error {
				g := m.Group()
				d, err := newDispatch(ctx, m, false)
				if err != nil {
					return err
				}
				counts := make([]int64, g.Size())
				for q := range counts {
					counts[q] = 1
				}
				if err := errors.Join(d.Fill(ctx, counts), d.Run(), d.Stream.Synchronize(ctx), d.Check(counts), d.Fill(ctx, []int64{2, 2, 2}[:g.Size()])); err != nil {
					return err
				}
				failing.Store(true) // requests for other rows than before
				err = errors.Join(g.Barrier(ctx, "failing"), d.Run())
				if err != nil {
					return err
				}
				told := d.Stream.Synchronize(ctx)
				if g.Rank() == 1 {
					assert.ErrorIs(t, told, errBackend)
				} else {
					assert.ErrorIs(t, told, os.ErrDeadlineExceeded)
				}
				assert.ErrorIs(t, d.Plan.Run(d.Stream), d.Plan.Err())
				if err := g.Barrier(ctx, "failed"); err != nil {
					return err
				}
				failing.Store(false)
				return errors.Join(g.Barrier(ctx, "working"), d.Close(ctx))
			})
		})
	}
}

// TestAllToAllVLosesARank: the others are told in the run that waits for it, and give everything back.
func TestAllToAllVLosesARank(t *testing.T) {
	for _, graph := range []bool{false, true} {
		t.Run(fmt.Sprintf("graph=%t", graph), func(t *testing.T) {
			gpuWorld{hosts: []string{"a", "b", "a", "b"}, loses: true}.run(t, func(ctx context.Context, m *memory.Memory) error {
				g := m.Group()
				d, err := newDispatch(ctx, m, graph)
				if err != nil {
					return err
				}
				counts := []int64{1, 2, 3, 0}
				from := make([]int64, 4)
				for r := range from {
					from[r] = counts[g.Rank()]
				}
				if err := errors.Join(d.Fill(ctx, counts), d.Run(), d.Stream.Synchronize(ctx), d.Check(from)); err != nil {
					return err
				}
				if g.Rank() != 1 {
					err = d.Run()
				}
				if err := errors.Join(err, g.Barrier(ctx, "the last run")); err != nil {
					return err
				}
				if g.Rank() == 1 {
					g.Abort("test")
					_ = d.Close(ctx) // in which it is lost to itself
					return nil
				}
				assert.ErrorIs(t, d.Stream.Synchronize(ctx), errs.ErrPeerLost)
				assert.ErrorIs(t, d.Plan.Run(d.Stream), errs.ErrPeerLost)
				if err := d.Close(ctx); err != nil && !errors.Is(err, errs.ErrPeerLost) {
					return err
				}
				return nil
			})
		})
	}
}
