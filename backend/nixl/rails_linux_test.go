package nixl

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/kernels/kernelstest"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// newRailPlan makes an all-reduce in the form Hierarchical. Collective.
func newRailPlan(ctx context.Context, in, out tensor.SymmetricTensor) (kernelstest.Plan, error) {
	opts := &kernels.AllReduceOptions{Algorithm: kernels.Hierarchical}
	if out != in {
		opts.Out = out
	}
	p, err := kernels.NewAllReduce(ctx, in, kernels.Sum, opts)
	if err == nil && p.Algorithm() != kernels.Hierarchical {
		err = fmt.Errorf("%s came", p.Algorithm())
	}
	return p, err
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
				err := kernelstest.AllReduceOverIslands(ctx, m, islands, func(in, out tensor.SymmetricTensor) (kernelstest.Plan, error) { return newRailPlan(ctx, in, out) })
				if err != nil {
					return err
				}
				s, err := m.Device().NewStream()
				if err != nil {
					return err
				}
				return errors.Join(othersOnRails(ctx, m, s, islands), s.Close())
			})
		})
	}
}

// othersOnRails makes plans of the other collectives, which have the form too, of what cannot be, and of what auto takes, and runs them.
func othersOnRails(ctx context.Context, m *memory.Memory, s device.Stream, islands [][]int) error {
	x, err := kernelstest.Tensor(ctx, m, 60, func(int) float32 { return 1 })
	if err != nil {
		return err
	}
	z, err := kernelstest.Tensor(ctx, m, 60, func(int) float32 { return 1 })
	if err != nil {
		return err
	}
	y, err := kernelstest.Tensor(ctx, m, int64(60*m.Group().Size()), func(int) float32 { return 1 })
	if err != nil {
		return err
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
		{"averages", true, func() (*kernels.Plan, error) {
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
