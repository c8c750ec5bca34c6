package nccl

import (
	"context"
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/simcuda"
	"github.com/symmem/symmem/internal/simlib"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/kernels/kernelstest"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// onSimulatedHosts runs f on simulated GPUs, of which so many are on each host, with a simulated NCCL. Kernels wait for as long as timeout.
func onSimulatedHosts(t *testing.T, ranks, perHost int, timeout time.Duration, f func(ctx context.Context, g *group.Group, mem *memory.Memory) error) []error {
	t.Helper()
	m, err := simcuda.New(simcuda.Config{GPUs: ranks, Seed: 1})
	require.NoError(t, err)
	lib := simlib.NewNCCL(m)
	lib.Spread(perHost)
	failed := backendtest.OnRanks(t, ranks, nil, func(ctx context.Context, g *group.Group) error {
		o := &Options{
			Driver: m.Driver(), Functions: lib.Functions(), LocalRank: g.Rank(), Multicast: "off",
			Getenv: func(name string) string {
				return map[string]string{hostEnv: fmt.Sprint("host ", g.Rank()/perHost)}[name]
			},
		}
		b, err := New(ctx, g, o)
		if err != nil {
			return err
		}
		mem := memory.New(b, g, &memory.Options{Channels: 2, KernelTimeout: timeout})
		return errors.Join(f(ctx, g, mem), g.Barrier(ctx, "end"), mem.Close(ctx))
	})
	assert.NoError(t, m.Err())
	assert.Empty(t, lib.Left())
	return failed
}

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

// TestRails: an all-reduce by kernels inside hosts and NCCL between them gives the same bits on every rank, those of the order that it states, with hosts of as
// many ranks and of others, in place and not, for every length that cuts the message otherwise, again and again, and from a graph.
func TestRails(t *testing.T) {
	for _, c := range []struct{ ranks, perHost int }{{4, 2}, {3, 2}, {2, 1}, {2, 2}} {
		t.Run(fmt.Sprintf("%d ranks, %d a host", c.ranks, c.perHost), func(t *testing.T) {
			var islands [][]int
			for r := range c.ranks {
				if r%c.perHost == 0 {
					islands = append(islands, nil)
				}
				islands[len(islands)-1] = append(islands[len(islands)-1], r)
			}
			backendtest.RequireAll(t, onSimulatedHosts(t, c.ranks, c.perHost, 2*time.Minute, func(ctx context.Context, _ *group.Group, mem *memory.Memory) error {
				return kernelstest.AllReduceOverIslands(ctx, mem, islands, func(in, out tensor.SymmetricTensor) (kernelstest.Plan, error) { return newRailPlan(ctx, in, out) })
			}))
		})
	}
}

// TestRailsLate: a rank that does not come makes the run fail on every other rank, on those of other hosts too: what came of the rank's host was never
// finished, and nobody takes it for a result. No rank waits for ever, also not in NCCL, nor does the rank that comes when the others have given up. A
// new plan can be made then.
func TestRailsLate(t *testing.T) {
	for _, ranks := range []int{4, 3} { // of 3, the last is alone on its host, and waits for nobody else than NCCL
		t.Run(fmt.Sprintf("%d ranks", ranks), func(t *testing.T) { lateOnRails(t, ranks) })
	}
}

func lateOnRails(t *testing.T, ranks int) {
	backendtest.RequireAll(t, onSimulatedHosts(t, ranks, 2, time.Second, func(ctx context.Context, g *group.Group, mem *memory.Memory) error {
		s, err := mem.Device().NewStream()
		if err != nil {
			return err
		}
		x, err := kernelstest.Tensor(ctx, mem, 1000, func(int) float32 { return 1 })
		if err != nil {
			return err
		}
		p, err := kernels.NewAllReduce(ctx, x, kernels.Sum, &kernels.AllReduceOptions{Algorithm: kernels.Hierarchical})
		if err != nil {
			return err
		}
		run := func() error { return errors.Join(p.Run(s), s.Synchronize(ctx)) }
		var ran error
		if g.Rank() != 1 {
			ran = run()
		}
		if err := g.Barrier(ctx, "the others have given up"); err != nil {
			return err
		}
		if g.Rank() == 1 {
			ran = run()
		}
		if !errors.Is(ran, os.ErrDeadlineExceeded) || ctx.Err() != nil {
			return fmt.Errorf("a run that rank 1 was late for: %w", ran)
		}
		if err := p.Run(s); err == nil {
			return errors.New("a plan that has failed runs again")
		}
		another, err := kernels.NewAllReduce(ctx, x, kernels.Sum, &kernels.AllReduceOptions{Algorithm: kernels.Hierarchical})
		if err != nil {
			return err
		}
		return errors.Join(another.Close(ctx), p.Close(ctx), x.Close(ctx), s.Close())
	}))
}

// TestParts: an all-reduce in parts of the group that cannot be is an error on every rank.
func TestParts(t *testing.T) {
	m := newMachine(3)
	backendtest.RequireAll(t, backendtest.OnRanks(t, 3, nil, func(ctx context.Context, g *group.Group) error {
		return withMemory(ctx, g, m.onHost("", g.Rank()), func(b *Backend, mem *memory.Memory) error {
			return backendtest.WithWindow(ctx, mem, 4096, func(w *memory.Window) error {
				call := func(c backend.Call) []backend.Call { return []backend.Call{c} }
				four := backend.Call{Count: 4, DType: "f32", Op: "sum"}
				good := backend.AllReduce{Name: plainForm, Parts: []int{0, 1, 0}, Calls: call(four)}
				for _, bad := range []struct {
					what   string
					change func(c *backend.AllReduce)
					want   error
				}{
					{"too few", func(c *backend.AllReduce) { c.Parts = []int{0, 0} }, errs.ErrInvalid},
					{"none", func(c *backend.AllReduce) { c.Parts = []int{} }, errs.ErrInvalid},
					{"no rank", func(c *backend.AllReduce) { c.Parts = []int{0, 7, 0} }, errs.ErrInvalid},
					{"negative", func(c *backend.AllReduce) { c.Parts = []int{-1, 1, 0} }, errs.ErrInvalid},
					{"not the lowest", func(c *backend.AllReduce) { c.Parts = []int{2, 1, 2} }, errs.ErrInvalid},
					{"of another part", func(c *backend.AllReduce) { c.Parts = []int{0, 0, 1} }, errs.ErrInvalid},
					{"no calls", func(c *backend.AllReduce) { c.Calls = nil }, errs.ErrInvalid},
					{"of nothing", func(c *backend.AllReduce) { four.Count = 0; c.Calls = call(four) }, errs.ErrInvalid},
					{"nothing of all", func(c *backend.AllReduce) { c.Parts = nil; c.DType, c.Op = "f32", "sum" }, errs.ErrInvalid},
					{"symmetric", func(c *backend.AllReduce) { c.Name = symmetricForm }, errs.ErrUnsupported},
					{"a dtype that NCCL lacks", func(c *backend.AllReduce) { c.Calls = call(backend.Call{Count: 4, DType: "u16", Op: "sum"}) }, errs.ErrUnsupported},
					{"an operation that NCCL lacks", func(c *backend.AllReduce) { c.Calls = call(backend.Call{Count: 4, DType: "f32", Op: "mean"}) }, errs.ErrUnsupported},
					{"no collective", func(c *backend.AllReduce) {
						c.Calls = call(backend.Call{Collective: "barrier", Count: 4, DType: "f32", Op: "sum"})
					}, errs.ErrUnsupported},
					{"a root of another part", func(c *backend.AllReduce) {
						c.Calls = call(backend.Call{Collective: "broadcast", Root: 1 - g.Rank()%2, Count: 4, DType: "f32", Op: "sum"})
					}, errs.ErrInvalid},
					{"a root that is no rank", func(c *backend.AllReduce) {
						c.Calls = call(backend.Call{Collective: "broadcast", Root: 3, Count: 4, DType: "f32", Op: "sum"})
					}, errs.ErrInvalid},
				} {
					c := good
					bad.change(&c)
					if _, err := mem.PrepareCollective(ctx, memory.Place{Window: w}, memory.Place{Window: w}, 16, 16, c); !errors.Is(err, bad.want) {
						return fmt.Errorf("%s: %w", bad.what, err)
					}
				}
				return nil
			})
		})
	}))
	m.requireClean(t)
}
