package nccl

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/nccl"
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
					{"a message to a rank of another part", func(c *backend.AllReduce) {
						c.Calls = call(backend.Call{Collective: "send", Root: 1 - g.Rank()%2, Count: 4, DType: "f32", Op: "sum"})
					}, errs.ErrInvalid},
					{"a message of nobody", func(c *backend.AllReduce) {
						c.Calls = call(backend.Call{Collective: "receive", Root: 3, Count: 4, DType: "f32", Op: "sum"})
					}, errs.ErrInvalid},
					{"a message to itself", func(c *backend.AllReduce) {
						c.Calls = call(backend.Call{Collective: "receive", Root: g.Rank(), Count: 4, DType: "f32", Op: "sum"})
					}, errs.ErrInvalid},
					{"a message of nothing", func(c *backend.AllReduce) {
						c.Calls = call(backend.Call{Collective: "send", Root: 2 - g.Rank(), DType: "f32", Op: "sum"})
					}, errs.ErrInvalid},
					{"a message of all", func(c *backend.AllReduce) {
						*c = backend.AllReduce{Name: plainForm, Collective: "send", Count: 4, DType: "f32", Op: "sum", Root: (g.Rank() + 1) % 3}
					}, errs.ErrUnsupported},
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

// TestMessages: in parts, ranks send each other what they have together with collectives, in any order of calls, the n-th to the n-th, again and again.
func TestMessages(t *testing.T) {
	const size, count = 4, 5
	m := newMachine(size)
	backendtest.RequireAll(t, backendtest.OnRanks(t, size, nil, func(ctx context.Context, g *group.Group) error {
		return withMemory(ctx, g, m.onHost("", g.Rank()), func(b *Backend, mem *memory.Memory) error {
			return backendtest.WithWindow(ctx, mem, 1024, func(w *memory.Window) error {
				rank, other := g.Rank(), (g.Rank()+2)%size
				at := w.Allocation().Ptr()
				message := func(what string, n, elements int64) backend.Call {
					c := backend.Call{Collective: what, Root: other, Count: elements, DType: "i8", Op: "sum", In: at.Add(64 * n)}
					if what == "receive" {
						c.In, c.Out = 0, at.Add(512+64*n)
					}
					return c
				}
				calls := []backend.Call{
					message("send", 0, count), message("receive", 0, count), message("send", 1, count+1), message("receive", 1, count+1),
					{Collective: "all_gather", In: at.Add(256), Out: at.Add(768), Count: 4, DType: "u8", Op: "sum"},
				}
				if rank == 2 {
					calls[0], calls[1], calls[2], calls[3] = calls[1], calls[3], calls[0], calls[2]
				}
				p, err := mem.PrepareCollective(ctx, memory.Place{}, memory.Place{}, 0, 0, backend.AllReduce{Name: plainForm, Parts: []int{0, 1, 0, 1}, Calls: calls})
				if err := g.Vote(ctx, "prepared", err); err != nil {
					return err
				}
				s, err := mem.Device().NewStream()
				if err != nil {
					return err
				}
				value := func(rank, run int, at int) byte { return byte(100*run + 20*rank + at%16 + at/64) }
				for run := range 2 {
					whole := make([]byte, 1024)
					for i := range 512 {
						whole[i] = value(rank, run, i)
					}
					if err := errors.Join(mem.Device().CopyFromHost(at, whole), g.Barrier(ctx, "filled"), p.Enqueue(s), s.Synchronize(ctx), g.Barrier(ctx, "sent"), mem.Device().CopyToHost(whole, at)); err != nil {
						return err
					}
					want := make([]byte, 512)
					for i := range count {
						want[i] = value(other, run, i)
					}
					for i := range count + 1 {
						want[64+i] = value(other, run, 64+i)
					}
					for i, r := range []int{min(rank, other), max(rank, other)} {
						for k := range 4 {
							want[256+4*i+k] = value(r, run, 256+k)
						}
					}
					if string(whole[512:]) != string(want) {
						return fmt.Errorf("run %d: %x, not %x", run, whole[512:], want)
					}
				}
				return errors.Join(s.Close(), p.Close())
			})
		})
	}))
	m.requireClean(t)
}

// TestMessagesFail: where a rank cannot send or receive, or a library has no messages, preparing them is every rank's error, and another time it works.
func TestMessagesFail(t *testing.T) {
	for _, call := range []string{"ncclSend", "ncclRecv", "ncclGroupEnd", ""} {
		t.Run(call, func(t *testing.T) {
			m := newMachine(2)
			m.fail = func(of string, rank, n int) nccl.Result {
				if of == call && rank == 1 && n == 1 {
					return nccl.SystemError
				}
				return nccl.Success
			}
			backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
				o := m.onHost("", g.Rank())
				if call == "" && g.Rank() == 1 {
					o.load = func(*nccl.Options) (*nccl.Library, error) {
						f := m.library()
						f.Recv = nil
						return nccl.New("/fake/libnccl.so.2", f)
					}
				}
				return withMemory(ctx, g, o, func(b *Backend, mem *memory.Memory) error {
					return backendtest.WithWindow(ctx, mem, 1024, func(w *memory.Window) error {
						prepare := func() (backend.PreparedAllReduce, error) {
							return mem.PrepareCollective(ctx, memory.Place{}, memory.Place{}, 0, 0, backend.AllReduce{Name: plainForm, Parts: []int{0, 0}, Calls: []backend.Call{
								{Collective: "send", Root: 1 - g.Rank(), In: w.Allocation().Ptr(), Count: 4, DType: "u8", Op: "sum"},
								{Collective: "receive", Root: 1 - g.Rank(), Out: w.Allocation().Ptr().Add(512), Count: 4, DType: "u8", Op: "sum"},
							}})
						}
						_, err := prepare()
						if call == "" {
							if !errors.Is(err, errs.ErrUnsupported) {
								return fmt.Errorf("without ncclRecv on rank 1: %w", err)
							}
							return nil
						}
						if err == nil || !strings.Contains(err.Error(), "ncclSystemError") || !strings.Contains(err.Error(), "rank 1") {
							return fmt.Errorf("%s fails: %w", call, err)
						}
						p, err := prepare()
						if err != nil {
							return fmt.Errorf("once more: %w", err)
						}
						return p.Close()
					})
				})
			}))
			m.requireClean(t)
		})
	}
}
