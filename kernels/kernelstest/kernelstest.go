// Package kernelstest is what the tests of kernels and those of the backends that run them share. It imports no kernels, so that their own tests can use it too: who calls it says how a plan is made.
package kernelstest

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// Plan is a plan of a collective.
type Plan interface {
	Run(s device.Stream) error
	Err() error
	Close(ctx context.Context) error
}

// Number is element i of a rank. The sum of those of several ranks depends on the order.
func Number(rank, i int) float32 {
	return float32(math.Sin(float64(rank*7919+i+1))) * float32(math.Exp2(float64((rank*5+i)%13)))
}

// IslandSum is the sum of all ranks' element i in the order that the form Hierarchical states: each island in the order of its ranks, rounded, and then the islands.
func IslandSum(islands [][]int, i int) (sum float32) {
	for k, ranks := range islands {
		part := Number(ranks[0], i)
		for _, r := range ranks[1:] {
			part += Number(r, i)
		}
		if k == 0 {
			sum = part
		} else {
			sum += part
		}
	}
	return sum
}

// Tensor makes a tensor of f32 with a value of each element. Collective.
func Tensor(ctx context.Context, m *memory.Memory, n int64, value func(i int) float32) (tensor.SymmetricTensor, error) {
	x, err := tensor.Zeros(ctx, m, tensor.Float32, n)
	if err == nil {
		err = x.Rendezvous(ctx)
	}
	if err != nil {
		return nil, err
	}
	all := make([]float32, n)
	for i := range all {
		all[i] = value(i)
	}
	return x, tensor.Write(x.Local(), all, 0)
}

// AllReduceOverIslands runs all-reduces over islands and holds that every rank gets the bits of [IslandSum]: of every length that cuts the message otherwise, in place and not, again and again, and
// from a graph. A plan of which a tensor was closed does not run. Collective.
func AllReduceOverIslands(ctx context.Context, m *memory.Memory, islands [][]int, newPlan func(in, out tensor.SymmetricTensor) (Plan, error)) error {
	s, err := m.Device().NewStream()
	if err != nil {
		return err
	}
	for _, n := range []int64{1, 31, 32, 33, 1000, 4099} {
		for _, inPlace := range []bool{true, false} {
			if err := allReduce(ctx, m, s, islands, n, inPlace, newPlan); err != nil {
				return fmt.Errorf("%d elements, in place %t: %w", n, inPlace, err)
			}
		}
	}
	return s.Close()
}

func allReduce(ctx context.Context, m *memory.Memory, s device.Stream, islands [][]int, n int64, inPlace bool, newPlan func(in, out tensor.SymmetricTensor) (Plan, error)) error {
	in, err := Tensor(ctx, m, n, func(i int) float32 { return Number(m.Group().Rank(), i) })
	if err != nil {
		return err
	}
	out := in
	if !inPlace {
		if out, err = Tensor(ctx, m, n, func(int) float32 { return float32(math.NaN()) }); err != nil {
			return err
		}
	}
	p, err := newPlan(in, out)
	if err != nil {
		return err
	}
	if err := errors.Join(p.Run(s), s.Synchronize(ctx)); err != nil {
		return err
	}
	got := make([]float32, n)
	if err := tensor.Read(out.Local(), got, 0); err != nil {
		return err
	}
	for i, v := range got {
		if want := IslandSum(islands, i); v != want {
			return fmt.Errorf("element %d is %v, expected %v", i, v, want)
		}
	}
	if inPlace {
		return errors.Join(p.Close(ctx), in.Close(ctx))
	}
	if err := s.BeginCapture(); err != nil {
		return err
	}
	err = p.Run(s)
	graph, captured := s.EndCapture()
	if err := errors.Join(err, captured); err != nil {
		return err
	}
	if err := errors.Join(graph.Launch(s), p.Run(s), graph.Launch(s), s.Synchronize(ctx), graph.Close()); err != nil {
		return err
	}
	again := make([]float32, n)
	if err := tensor.Read(out.Local(), again, 0); err != nil || !slices.Equal(got, again) {
		return errors.Join(errors.New("a later run gave something else"), err)
	}
	if err := out.Close(ctx); err != nil {
		return err
	}
	if err := p.Run(s); !errors.Is(err, errs.ErrClosed) {
		return errors.Join(errors.New("a run with a tensor that was closed has another error, or none"), err)
	}
	return errors.Join(p.Close(ctx), in.Close(ctx))
}
