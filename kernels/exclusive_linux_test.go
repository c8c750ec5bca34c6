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
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/simcuda"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// TestExclusive: each constructor passes the option on: beside a plan of another stream for which there is room with a plan like it, there is none with an exclusive one; and ranks agree.
func TestExclusive(t *testing.T) {
	const n = 1 << 17
	onTwoGPUs(t, func(ctx context.Context, g *group.Group, m *memory.Memory) error {
		var ts [3]*tensor.Tensor
		var err error
		for i := range ts {
			if ts[i], err = tensor.Zeros(ctx, m, tensor.Float32, n); err == nil {
				err = ts[i].Rendezvous(ctx)
			}
			if err != nil {
				return err
			}
		}
		in, out := ts[0], ts[1]
		half, err := ts[1].Slice(0, n/2)
		if err != nil {
			return err
		}
		beside, err := NewAllReduce(ctx, ts[2], Sum, &AllReduceOptions{Algorithm: TwoShotPush})
		if err != nil {
			return err
		}
		s1, err1 := m.Device().NewStream()
		s2, err2 := m.Device().NewStream()
		if err := errors.Join(err1, err2, beside.Run(s1), s1.Synchronize(ctx)); err != nil {
			return err
		}
		type constructor struct {
			name string
			make func(exclusive bool) (*Plan, error)
		}
		var agreed []constructor
		for _, c := range []constructor{
			{"NewAllReduce", func(x bool) (*Plan, error) {
				return NewAllReduce(ctx, in, Sum, &AllReduceOptions{Algorithm: TwoShotPush, Exclusive: x})
			}},
			{"NewReduce", func(x bool) (*Plan, error) {
				return NewReduce(ctx, in, out, Sum, 0, &Options{Algorithm: OneShotPush, Exclusive: x})
			}},
			{"NewReduceScatter", func(x bool) (*Plan, error) {
				return NewReduceScatter(ctx, in, half, Sum, &Options{Algorithm: OneShotPush, Exclusive: x})
			}},
			{"NewAllGather", func(x bool) (*Plan, error) {
				return NewAllGather(ctx, half, in, &Options{Algorithm: OneShotLL, Exclusive: x})
			}},
			{"NewAllToAll", func(x bool) (*Plan, error) {
				return NewAllToAll(ctx, in, out, &Options{Algorithm: OneShotLL, Exclusive: x})
			}},
		} {
			for _, exclusive := range []bool{false, true} {
				p, err := c.make(exclusive)
				if err != nil {
					return fmt.Errorf("%s: %w", c.name, err)
				}
				err = p.Run(s2)
				_, room := errors.AsType[*collective.RoomError](err)
				if room != exclusive || !room && err != nil {
					return fmt.Errorf("%s, exclusive %t: %w", c.name, exclusive, err)
				}
				if err := errors.Join(s2.Synchronize(ctx), p.Close(ctx)); err != nil {
					return fmt.Errorf("%s: %w", c.name, err)
				}
			}
			agreed = append(agreed, c)
		}
		agreed = append(agreed, []constructor{ // which are of no use with more than half
			{"NewAllReduceMany", func(x bool) (*Plan, error) {
				return NewAllReduceMany(ctx, []Pair{{In: in}, {In: out}}, Sum, &Options{Exclusive: x})
			}},
			{"NewAllGatherMany", func(x bool) (*Plan, error) {
				half, err := in.Sub(0, in.NumElements()/2)
				if err != nil {
					return nil, err
				}
				return NewAllGatherMany(ctx, []Pair{{In: half, Out: out}}, &Options{Exclusive: x})
			}},
			{"NewBroadcast", func(x bool) (*Plan, error) { return NewBroadcast(ctx, in, 0, &Options{Exclusive: x}) }},
			{"NewBarrier", func(x bool) (*Plan, error) { return NewBarrier(ctx, m, &Options{Exclusive: x}) }},
		}...)
		for _, c := range agreed {
			if p, err := c.make(g.Rank() == 1); !errors.Is(err, errs.ErrMismatch) {
				return fmt.Errorf("%s: one rank's is exclusive: %v, %w", c.name, p, err)
			}
		}
		return errors.Join(beside.Close(ctx), m.Close(ctx))
	})
}

// onTwoGPUs runs f on two ranks with a simulated GPU each, which run the kernels' PTX.
func onTwoGPUs(t *testing.T, f func(ctx context.Context, g *group.Group, m *memory.Memory) error) {
	t.Helper()
	machine, err := simcuda.New(simcuda.Config{GPUs: 2, Seed: 1})
	require.NoError(t, err)
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		b, err := native.New(ctx, g, &native.Options{Driver: machine.Driver(), LocalRank: g.Rank(), Multicast: config.MulticastOff, KernelTimeout: 20 * time.Second})
		if err != nil {
			return err
		}
		return f(ctx, g, memory.New(b, g, &memory.Options{KernelTimeout: 20 * time.Second}))
	}))
}
