package nixl

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// railTensor is a tensor with a value of each element on a rank.
func railTensor(ctx context.Context, m *memory.Memory, n int64, value func(i int) float32) (tensor.SymmetricTensor, error) {
	x, err := tensor.Zeros(ctx, m, tensor.Float32, n)
	if err == nil {
		err = x.Rendezvous(ctx)
	}
	if err != nil {
		return nil, err
	}
	return x, writeRail(x, value)
}

func writeRail(x tensor.SymmetricTensor, value func(i int) float32) error {
	all := make([]float32, x.NumElements())
	for i := range all {
		all[i] = value(i)
	}
	return tensor.Write(x.Local(), all, 0)
}

// railValue is a number whose sum depends on the order.
func railValue(rank, i int) float32 {
	return float32(math.Sin(float64(rank*7919+i+1))) * float32(math.Exp2(float64((rank*5+i)%13)))
}

// islandSum is the sum in the order that the form states: each island in the order of its ranks, rounded, and then the islands.
func islandSum(islands [][]int, i int) (sum float32) {
	for k, ranks := range islands {
		part := railValue(ranks[0], i)
		for _, r := range ranks[1:] {
			part += railValue(r, i)
		}
		if k == 0 {
			sum = part
		} else {
			sum += part
		}
	}
	return sum
}

// islandsAt are the ranks of each host, in the order of their lowest ranks.
func islandsAt(hosts []string) (islands [][]int) {
	at := map[string]int{}
	for r, h := range hosts {
		if _, ok := at[h]; !ok {
			at[h] = len(islands)
			islands = append(islands, nil)
		}
		islands[at[h]] = append(islands[at[h]], r)
	}
	return islands
}

// TestRails: an all-reduce by kernels inside islands of GPUs and by puts between them gives every rank the bits of the order that it states.
func TestRails(t *testing.T) {
	for _, hosts := range [][]string{{"a", "a", "b", "b"}, {"a", "b", "c"}, {"a", "b", "b", "a"}, {"a", "a", "b"}, {"a", "a"}, {"a", "a", "b", "b", "c", "c"}} {
		t.Run(fmt.Sprint(hosts), func(t *testing.T) {
			islands := islandsAt(hosts)
			gpuWorld{hosts: hosts}.run(t, func(ctx context.Context, m *memory.Memory) error {
				me := m.Group().Rank()
				s, err := m.Device().NewStream()
				if err != nil {
					return err
				}
				for k, n := range []int64{1, 31, 33, 1000, 4099} {
					x, err := railTensor(ctx, m, n, func(i int) float32 { return railValue(me, i) })
					if err != nil {
						return err
					}
					opts, out := &kernels.AllReduceOptions{Algorithm: kernels.Hierarchical}, x
					if k%2 == 1 {
						if out, err = railTensor(ctx, m, n, func(int) float32 { return float32(math.NaN()) }); err != nil {
							return err
						}
						opts.Out = out
					}
					p, err := kernels.NewAllReduce(ctx, x, kernels.Sum, opts)
					if err != nil {
						return err
					}
					if p.Algorithm() != kernels.Hierarchical {
						return fmt.Errorf("%s came", p.Algorithm())
					}
					if err := errors.Join(p.Run(s), s.Synchronize(ctx)); err != nil {
						return err
					}
					got := make([]float32, n)
					if err := tensor.Read(out.Local(), got, 0); err != nil {
						return err
					}
					for i, v := range got {
						if want := islandSum(islands, i); v != want {
							return fmt.Errorf("element %d of %d is %v, expected %v", i, n, v, want)
						}
					}
					if out != x { // again and again gives the same
						if err := s.BeginCapture(); err != nil {
							return err
						}
						err := p.Run(s)
						graph, captured := s.EndCapture()
						if err := errors.Join(err, captured, graph.Launch(s), p.Run(s), graph.Launch(s), s.Synchronize(ctx), graph.Close()); err != nil {
							return err
						}
						again := make([]float32, n)
						if err := tensor.Read(out.Local(), again, 0); err != nil || !slices.Equal(got, again) {
							return fmt.Errorf("a later run gave something else: %w", err)
						}
						if err := out.Close(ctx); err != nil {
							return err
						}
					}
					if err := errors.Join(p.Close(ctx), x.Close(ctx)); err != nil {
						return err
					}
				}
				return errors.Join(othersOnRails(ctx, m, s, islands), s.Close())
			})
		})
	}
}

// othersOnRails makes plans of the other collectives, which have the form too, of what cannot be, and of what auto takes, and runs them.
func othersOnRails(ctx context.Context, m *memory.Memory, s device.Stream, islands [][]int) error {
	x, err := railTensor(ctx, m, 60, func(int) float32 { return 1 })
	if err != nil {
		return err
	}
	z, err := railTensor(ctx, m, 60, func(int) float32 { return 1 })
	if err != nil {
		return err
	}
	y, err := railTensor(ctx, m, int64(60*m.Group().Size()), func(int) float32 { return 1 })
	if err != nil {
		return err
	}
	same := true
	for _, ranks := range islands {
		same = same && len(ranks) == len(islands[0])
	}
	byName := &kernels.Options{Algorithm: kernels.Hierarchical}
	for _, c := range []struct {
		what string
		made bool
		make func() (*kernels.Plan, error)
	}{
		{"broadcast", true, func() (*kernels.Plan, error) { return kernels.NewBroadcast(ctx, x, 0, byName) }},
		{"all-gather", true, func() (*kernels.Plan, error) { return kernels.NewAllGather(ctx, x, y, byName) }},
		{"reduce-scatter", true, func() (*kernels.Plan, error) { return kernels.NewReduceScatter(ctx, y, x, kernels.Sum, byName) }},
		{"all-to-all", true, func() (*kernels.Plan, error) { return kernels.NewAllToAll(ctx, x, z, byName) }},
		{"all-to-all in place", false, func() (*kernels.Plan, error) { return kernels.NewAllToAll(ctx, x, x, byName) }},
		{"averages", same, func() (*kernels.Plan, error) {
			return kernels.NewAllReduce(ctx, x, kernels.Avg, &kernels.AllReduceOptions{Algorithm: kernels.Hierarchical})
		}},
		{"auto, all-reduce", true, func() (*kernels.Plan, error) { return kernels.NewAllReduce(ctx, y, kernels.Sum, nil) }},
		{"auto, broadcast", true, func() (*kernels.Plan, error) { return kernels.NewBroadcast(ctx, x, 0, nil) }},
		{"auto, reduce", true, func() (*kernels.Plan, error) { return kernels.NewReduce(ctx, x, z, kernels.Sum, 0, nil) }},
		{"auto, all-gather", true, func() (*kernels.Plan, error) { return kernels.NewAllGather(ctx, x, y, nil) }},
		{"auto, reduce-scatter", true, func() (*kernels.Plan, error) { return kernels.NewReduceScatter(ctx, y, x, kernels.Sum, nil) }},
		{"auto, all-to-all", true, func() (*kernels.Plan, error) { return kernels.NewAllToAll(ctx, x, z, nil) }},
		{"auto, barrier", true, func() (*kernels.Plan, error) { return kernels.NewBarrier(ctx, m, nil) }},
	} {
		p, err := c.make()
		if !c.made {
			if err == nil {
				return fmt.Errorf("%s was made", c.what)
			}
			if c.what == "averages" && !errors.Is(err, errs.ErrUnsupported) {
				return fmt.Errorf("%s: %w", c.what, err)
			}
			continue
		}
		if err != nil {
			return fmt.Errorf("%s: %w", c.what, err)
		}
		auto, got := strings.HasPrefix(c.what, "auto"), p.Algorithm()
		if auto == (got == kernels.Hierarchical) || auto && len(islands) > 1 && got != kernels.Transfers {
			return fmt.Errorf("%s: %s came", c.what, got)
		}
		if err := errors.Join(p.Run(s), s.Synchronize(ctx)); err != nil {
			return fmt.Errorf("%s: %w", c.what, err)
		}
		if err := p.Close(ctx); err != nil {
			return err
		}
	}
	return errors.Join(y.Close(ctx), z.Close(ctx), x.Close(ctx))
}
