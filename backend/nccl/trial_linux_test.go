package nccl

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/group"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/memory"
)

// TestTrialThatOneRankCannotWaitFor: what keeps one rank from seeing the end of the trial is an error on all, soon, and the next plan has another communicator.
func TestTrialThatOneRankCannotWaitFor(t *testing.T) {
	for name, hold := range map[string]bool{"the driver fails": false, "its caller waits no longer": true} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(2)
			m.patience = 20 * time.Second
			var armed atomic.Bool
			within, giveUp := context.WithCancel(t.Context())
			defer giveUp()
			m.inReduce = func() {
				if hold {
					time.AfterFunc(200*time.Millisecond, giveUp)
				}
				armed.Store(!hold)
			}
			m.holds = hold
			backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
				o, mine := m.plain(g.Rank()), ctx
				if g.Rank() == 1 {
					mine = within
					query := o.Driver.StreamQuery
					o.Driver.StreamQuery = func(s cu.StreamHandle) cu.Result {
						if armed.Swap(false) {
							return cu.OperatingSystem
						}
						return query(s)
					}
				}
				return withMemory(ctx, g, o, func(_ *Backend, mem *memory.Memory) error {
					return backendtest.WithWindow(ctx, mem, 64, func(w *memory.Window) error {
						in := memory.Place{Window: w}
						prepare := func(ctx context.Context) (backend.PreparedAllReduce, error) {
							return mem.PrepareAllReduce(ctx, plainForm, in, in, 10, 40, "f32", "sum")
						}
						began := time.Now()
						if _, err := prepare(mine); err == nil {
							return errors.New("it has a plan that rank 1 has not")
						}
						if took := time.Since(began); took > m.patience/2 {
							return fmt.Errorf("it was not told for %v", took)
						}
						if err := g.Barrier(ctx, "failed"); err != nil {
							return err
						}
						m.set(func() { m.holds, m.inReduce = false, nil })
						p, err := prepare(ctx)
						if err != nil {
							return err
						}
						s, err := mem.Device().NewStream()
						if err != nil {
							return err
						}
						return errors.Join(p.Enqueue(s), s.Synchronize(ctx), s.Close())
					})
				})
			}))
			m.requireClean(t)
		})
	}
}
