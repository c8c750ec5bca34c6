package kernels

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/backend/host"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// onHostRanks runs f on ranks with two tensors of 100 f32 that have had their rendezvous, over host memory.
func onHostRanks(t *testing.T, size int, f func(ctx context.Context, m *memory.Memory, x, y *tensor.Tensor) error) {
	t.Helper()
	backendtest.RequireAll(t, backendtest.OnRanks(t, size, nil, func(ctx context.Context, g *group.Group) error {
		m, err := newHostMemory(g)
		if err != nil {
			return err
		}
		x, err := tensor.Zeros(ctx, m, tensor.Float32, 100)
		if err != nil {
			return err
		}
		y, err := tensor.Zeros(ctx, m, tensor.Float32, 100)
		if err != nil {
			return err
		}
		if err = errors.Join(x.Rendezvous(ctx), y.Rendezvous(ctx)); err == nil {
			err = f(ctx, m, x, y)
		}
		if err != nil {
			g.Abort("the test has failed") // the other ranks may be waiting
		}
		return errors.Join(err, x.Close(ctx), y.Close(ctx), m.Close(ctx))
	}))
}

func newHostMemory(g *group.Group) (*memory.Memory, error) {
	b, err := host.New(g, nil)
	if err != nil {
		return nil, err
	}
	return memory.New(b, g, &memory.Options{KernelTimeout: 5 * time.Second}), nil
}

// TestRanksMakeOnePlan: where ranks do not make the same plan, all of them are told.
func TestRanksMakeOnePlan(t *testing.T) {
	onHostRanks(t, 2, func(ctx context.Context, m *memory.Memory, x, y *tensor.Tensor) error {
		z, err := tensor.Zeros(ctx, m, tensor.Float32, 100)
		if err != nil {
			return err
		}
		if err := z.Rendezvous(ctx); err != nil {
			return err
		}
		type request struct {
			in *tensor.Tensor
			o  AllReduceOptions
		}
		for _, c := range []struct {
			what string
			of   [2]request
		}{
			{"inputs", [2]request{{x, AllReduceOptions{Out: z}}, {y, AllReduceOptions{Out: z}}}},
			{"outputs", [2]request{{x, AllReduceOptions{Out: y}}, {x, AllReduceOptions{Out: z}}}},
			{"most blocks", [2]request{{x, AllReduceOptions{MaxBlocks: 1}}, {x, AllReduceOptions{MaxBlocks: 2}}}},
			{"first epochs", [2]request{{x, AllReduceOptions{FirstEpoch: 1}}, {x, AllReduceOptions{FirstEpoch: 2}}}},
		} {
			mine := c.of[m.Group().Rank()]
			if _, err := NewAllReduce(ctx, mine.in, Sum, &mine.o); !errors.Is(err, errs.ErrMismatch) {
				return fmt.Errorf("ranks with other %s: %w", c.what, err)
			}
		}
		return z.Close(ctx)
	})
}

// TestMissingTensorIsTold: a rank that has no input, or one that is none, but has an output, or the other way about, tells the others instead of keeping them
// waiting.
func TestMissingTensorIsTold(t *testing.T) {
	onHostRanks(t, 2, func(ctx context.Context, m *memory.Memory, x, y *tensor.Tensor) error {
		for _, c := range []struct {
			what    string
			in, out tensor.SymmetricTensor
		}{
			{"no input", nil, y}, {"the zero Tensor as input", &tensor.Tensor{}, y}, {"the zero Tensor as output", x, &tensor.Tensor{}},
		} {
			in, out := tensor.SymmetricTensor(x), tensor.SymmetricTensor(y)
			if m.Group().Rank() == 1 {
				in, out = c.in, c.out
			}
			_, err := NewAllReduce(ctx, in, Sum, &AllReduceOptions{Out: out})
			if vote, ok := errors.AsType[*group.VoteError](err); !ok || len(vote.Failures) != 1 || vote.Failures[0].Rank != 1 || !errors.Is(err, errs.ErrInvalid) {
				return fmt.Errorf("rank 1 with %s: %w", c.what, err)
			}
		}
		// Also where in and out are one, and other tensors are missing.
		numbers, err := tensor.Zeros(ctx, m, tensor.Int64, 2)
		if err != nil {
			return err
		}
		if err := numbers.Rendezvous(ctx); err != nil {
			return err
		}
		var none *tensor.Tensor
		for _, missing := range []tensor.SymmetricTensor{nil, none, &tensor.Tensor{}} {
			counts, received := tensor.SymmetricTensor(numbers), tensor.SymmetricTensor(numbers)
			if m.Group().Rank() == 1 {
				counts, received = missing, missing
			}
			if _, err := NewAllToAllV(ctx, x, x, counts, received, nil); !errors.Is(err, errs.ErrInvalid) {
				return fmt.Errorf("rank 1 with counts of %v: %w", missing, err)
			}
			// The counts say with whom, too.
			in, out := tensor.SymmetricTensor(x), tensor.SymmetricTensor(x)
			if m.Group().Rank() == 1 {
				in, out = missing, missing
			}
			_, err := NewAllToAllV(ctx, in, out, numbers, numbers, nil)
			if vote, ok := errors.AsType[*group.VoteError](err); !ok || !slices.ContainsFunc(vote.Failures, func(f group.RankFailure) bool { return f.Rank == 1 }) {
				return fmt.Errorf("rank 1 with an input of %v: %w", missing, err)
			}
		}
		return numbers.Close(ctx)
	})
}

// TestPlanIntoAnotherGroup: the result goes into memory of the group that the input is of.
func TestPlanIntoAnotherGroup(t *testing.T) {
	onHostRanks(t, 2, func(ctx context.Context, m *memory.Memory, x, _ *tensor.Tensor) error {
		other, err := newHostMemory(m.Group())
		if err != nil {
			return err
		}
		out, err := tensor.Zeros(ctx, other, tensor.Float32, 100)
		if err != nil {
			return err
		}
		if err := out.Rendezvous(ctx); err != nil {
			return err
		}
		if p, err := NewAllReduce(ctx, x, Sum, &AllReduceOptions{Out: out}); !errors.Is(err, errs.ErrInvalid) {
			if err == nil {
				err = p.Close(ctx)
			}
			return fmt.Errorf("an output of another memory: %w", err)
		}
		return errors.Join(out.Close(ctx), other.Close(ctx))
	})
}
