package nccl

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/memory"
)

// TestSubGroupsAtOnce: two sub-groups of all ranks are opened at the same time, in another order on each rank, while the group makes windows: each has the
// memory of its own ranks.
func TestSubGroupsAtOnce(t *testing.T) {
	m := newMachine(2)
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		o := m.plain(g.Rank())
		o.KernelTimeout = 10 * time.Second
		return withMemory(ctx, g, o, func(b *Backend, mem *memory.Memory) error {
			own := *o
			own.Parent, own.Opened = b, b.device
			for range 20 {
				var subs [2]*group.Group
				for i := range subs {
					var err error
					if subs[i], err = g.Sub(ctx, []int{0, 1}); err != nil {
						return err
					}
				}
				try := func(mem *memory.Memory) error { return backendtest.TryWindow(ctx, mem, 64) }
				ended := make(chan error, len(subs))
				for i := range subs {
					go func() {
						s := subs[(i+g.Rank())%2]
						time.Sleep(time.Duration(i) * 100 * time.Microsecond)
						err := withMemory(ctx, s, &own, func(_ *Backend, mem *memory.Memory) error { return try(mem) })
						ended <- errors.Join(err, s.Close(ctx))
					}()
				}
				if err := errors.Join(try(mem), <-ended, <-ended); err != nil {
					return err
				}
			}
			return nil
		})
	}))
	m.requireClean(t)
}

// TestSplitInTurn: a communicator with a call under way on one rank is not split on any, and one that is lent waits with its calls.
func TestSplitInTurn(t *testing.T) {
	m := newMachine(2)
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		o := m.plain(g.Rank())
		return withMemory(ctx, g, o, func(b *Backend, _ *memory.Memory) error {
			own := *o
			own.Parent, own.Opened = b, b.device
			s, err := g.Sub(ctx, []int{0, 1})
			if err != nil {
				return err
			}
			if g.Rank() == 0 {
				b.lending.begin(ctx)
			}
			err = withMemory(ctx, s, &own, func(c *Backend, mem *memory.Memory) error {
				if c.split {
					return errors.New("a communicator was split that a rank used")
				}
				if g.Rank() == 0 {
					b.lending.end()
				}
				return backendtest.TryWindow(ctx, mem, 64)
			})
			if err = errors.Join(err, s.Close(ctx)); err != nil {
				return err
			}
			if !b.lending.lend() || b.lending.lend() {
				return errors.New("it can be lent once")
			}
			begun := make(chan struct{})
			go func() { b.lending.begin(ctx); close(begun) }()
			select {
			case <-begun:
				return errors.New("a call has begun on a communicator that is lent")
			case <-time.After(10 * time.Millisecond):
			}
			b.lending.back()
			<-begun
			b.lending.end()
			if b.lending.calls != 0 || b.lending.lent != nil {
				return fmt.Errorf("%d calls are left", b.lending.calls)
			}
			return nil
		})
	}))
	require.Zero(t, m.split)
	m.requireClean(t)
}
