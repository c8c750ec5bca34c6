package nccl

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/group"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/simcuda"
	"github.com/symmem/symmem/internal/simlib"
	"github.com/symmem/symmem/memory"
)

// TestFreeWithoutContextBetweenHosts: where NCCL puts, memory of a rank whose context is lost is released too, and its memory is closed at once: nothing
// works on it any more.
func TestFreeWithoutContextBetweenHosts(t *testing.T) {
	const ranks = 2
	m, err := simcuda.New(simcuda.Config{GPUs: ranks, Seed: 1})
	require.NoError(t, err)
	lib := simlib.NewNCCL(m)
	lib.Spread(1)
	lib.GIN()
	var lost atomic.Bool
	backendtest.RequireAll(t, backendtest.OnRanks(t, ranks, nil, func(ctx context.Context, g *group.Group) error {
		d := m.Driver()
		if g.Rank() == 0 {
			query, ended, record := d.StreamQuery, d.EventQuery, d.EventRecord
			d.StreamQuery = func(s cu.StreamHandle) cu.Result {
				if lost.Load() {
					return cu.IllegalAddress
				}
				return query(s)
			}
			d.EventQuery = func(e cu.EventHandle) cu.Result {
				if lost.Load() {
					return cu.IllegalAddress
				}
				return ended(e)
			}
			d.EventRecord = func(e cu.EventHandle, s cu.StreamHandle) cu.Result {
				if lost.Load() {
					return cu.IllegalAddress
				}
				return record(e, s)
			}
		}
		b, err := New(ctx, g, &Options{
			Driver: d, Functions: lib.Functions(), LocalRank: g.Rank(), Multicast: "off", KernelTimeout: 20 * time.Second,
			Getenv: func(name string) string { return map[string]string{hostEnv: fmt.Sprint(g.Rank())}[name] },
		})
		if err != nil {
			return err
		}
		mem := memory.New(b, g, nil)
		if !b.Moves() {
			return errors.New("it does not put")
		}
		a, err := mem.Allocate(ctx, 100, "")
		if err != nil {
			return err
		}
		_, err = mem.Rendezvous(ctx, a, memory.Record{})
		if err = errors.Join(err, g.Barrier(ctx, "mapped")); err != nil {
			return err
		}
		lost.Store(true)
		if err = mem.Free(ctx, a); !errors.Is(err, errs.ErrContextLost) || mem.Holds(a) {
			g.Abort("the test has failed") // the others may be waiting
			return fmt.Errorf("freeing: %w", err)
		}
		if err = mem.Close(ctx); !errors.Is(err, errs.ErrContextLost) || mem.Busy() {
			g.Abort("the test has failed")
			return fmt.Errorf("closing: %w", err)
		}
		return nil
	}))
}
