package kernels

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/backend/native"
	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/simcuda"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// TestRoomIsAgreed: ranks that run their plans alike, each on a stream of its own, get a RoomError for the same plan, however they share devices: none runs, and
// waits for one that was refused.
func TestRoomIsAgreed(t *testing.T) {
	for _, c := range []struct{ gpus, size, blocks int }{{1, 2, 0}, {1, 2, 6}, {1, 3, 4}, {2, 3, 0}, {2, 3, 5}, {2, 3, 12}} {
		t.Run(fmt.Sprintf("gpus=%d/ranks=%d/blocks=%d", c.gpus, c.size, c.blocks), func(t *testing.T) {
			machine, err := simcuda.New(simcuda.Config{GPUs: c.gpus, Seed: 1})
			require.NoError(t, err)
			refused := make([][]bool, c.size)
			backendtest.RequireAll(t, backendtest.OnRanks(t, c.size, nil, func(ctx context.Context, g *group.Group) error {
				b, err := native.New(ctx, g, &native.Options{Driver: machine.Driver(), LocalRank: g.Rank(), ShareDevice: true, Multicast: config.MulticastOff, KernelTimeout: 20 * time.Second})
				if err != nil {
					return err
				}
				m := memory.New(b, g, &memory.Options{KernelTimeout: 20 * time.Second})
				x, err := tensor.Zeros(ctx, m, tensor.Float32, 1<<16)
				if err != nil {
					return err
				}
				if err := x.Rendezvous(ctx); err != nil {
					return err
				}
				var plans []*Plan
				for range 4 {
					p, err := NewAllReduce(ctx, x, Sum, &AllReduceOptions{Algorithm: TwoShotPull, MaxBlocks: c.blocks})
					if err != nil {
						return err
					}
					s, err := m.Device().NewStream()
					if err != nil {
						return err
					}
					// One rank is late, so that the others come to their room first.
					if g.Rank() == c.size-1 {
						time.Sleep(20 * time.Millisecond)
					}
					err = p.Run(s)
					_, room := errors.AsType[*collective.RoomError](err)
					refused[g.Rank()] = append(refused[g.Rank()], room)
					if !room {
						err = errors.Join(err, s.Synchronize(ctx))
					} else {
						err = nil
					}
					if err := errors.Join(err, g.Barrier(ctx, "ran")); err != nil {
						return err
					}
					plans = append(plans, p)
				}
				for _, p := range plans {
					if err := p.Close(ctx); err != nil {
						return err
					}
				}
				return m.Close(ctx)
			}))
			for r := range refused {
				require.Equal(t, refused[0], refused[r], "rank %d", r)
			}
			require.Contains(t, refused[0], true)
		})
	}
}
