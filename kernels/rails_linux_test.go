package kernels

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/backend/host"
	"github.com/symmem/symmem/backend/nccl"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	ncclib "github.com/symmem/symmem/internal/nccl"
	"github.com/symmem/symmem/internal/simcuda"
	"github.com/symmem/symmem/internal/simlib"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// shortRails makes messages have several laps that are small, for a test.
func shortRails(t *testing.T, bytes int64) {
	lap, rooms := railLapBytes, railExchangeBytes
	t.Cleanup(func() { railLapBytes, railExchangeBytes = lap, rooms })
	railLapBytes, railExchangeBytes = bytes, 2*bytes
}

// onGPUHosts runs f on simulated GPUs of several hosts, by their ranks, with a simulated NCCL, whose functions change may have changed. Kernels wait for as long as timeout.
func onGPUHosts(t *testing.T, hosts [][]int, seed uint64, timeout time.Duration, change func(rank int, f *ncclib.Functions), f func(ctx context.Context, g *group.Group, m *memory.Memory) error) []error {
	t.Helper()
	var gpus, ranks []int
	for _, host := range hosts {
		gpus, ranks = append(gpus, len(host)), append(ranks, host...)
	}
	machine, err := simcuda.New(simcuda.Config{GPUs: len(ranks), Seed: seed})
	require.NoError(t, err)
	lib := simlib.NewNCCL(machine)
	lib.Spread(gpus...)
	failed := backendtest.OnRanks(t, len(ranks), nil, func(ctx context.Context, g *group.Group) error {
		host := slices.IndexFunc(hosts, func(of []int) bool { return slices.Contains(of, g.Rank()) })
		functions := lib.Functions()
		if change != nil {
			change(g.Rank(), functions)
		}
		b, err := nccl.New(ctx, g, &nccl.Options{
			Driver: machine.Driver(), Functions: functions, LocalRank: slices.Index(ranks, g.Rank()), Multicast: "off",
			Getenv: func(name string) string { return map[string]string{"NCCL_HOSTID": fmt.Sprint("host ", host)}[name] },
		})
		if err != nil {
			return err
		}
		m := memory.New(b, g, &memory.Options{Channels: 2, KernelTimeout: timeout})
		return errors.Join(f(ctx, g, m), g.Barrier(ctx, "end"), m.Close(ctx))
	})
	assert.NoError(t, machine.Err())
	assert.Empty(t, lib.Left())
	return failed
}

// railHosts are hosts with as many ranks and with others, in the order of the ranks and not, and one alone.
var railHosts = [][][]int{
	{{0, 1}, {2, 3}}, {{0, 1, 2}, {3, 4, 5}}, {{0, 1}, {2, 3}, {4, 5}}, {{0, 1, 2, 3}, {4, 5, 6, 7}}, {{0}, {1, 2, 3}}, {{0, 3}, {1, 2}}, {{0, 3, 4}, {1, 2}}, {{0}, {1}}, {{0, 1}},
}

// TestRailCollectives: on GPUs of several hosts, every collective that has the form Hierarchical gives what it states: from and to every rank, with uneven and empty shares, at odd places, in
// place, several times and from a graph, in one lap and in several.
func TestRailCollectives(t *testing.T) {
	for i, hosts := range railHosts {
		if (testing.Short() || !fullMatrix) && len(hosts) == 2 && len(hosts[0])+len(hosts[1]) != 4 {
			continue // the short form has hosts of two ranks, of other numbers, and three hosts
		}
		for _, lap := range []int64{1 << 20, 4 << 10} {
			if (testing.Short() || !fullMatrix) && lap >= 1<<20 && i > 0 {
				continue // one lap is one among several, but for the first hosts
			}
			t.Run(fmt.Sprintf("%v/laps of %d", hosts, lap), func(t *testing.T) {
				shortRails(t, lap)
				backendtest.RequireAll(t, onGPUHosts(t, hosts, uint64(i+1), 2*time.Minute, nil, func(ctx context.Context, _ *group.Group, m *memory.Memory) error {
					return everyRail(ctx, m, hosts)
				}))
			})
		}
	}
}

// everyRail runs every collective over rails: in one lap, or, where laps are short, in several.
func everyRail(ctx context.Context, m *memory.Memory, hosts [][]int) (err error) {
	size := m.Group().Size()
	everyCollective(size, func(string) []Algorithm { return []Algorithm{Hierarchical} }, func(c collectiveTest) {
		if c.combines() {
			c.dtype = map[tensor.DType]tensor.DType{tensor.Float64: tensor.Float32, tensor.Uint16: tensor.Int32}[c.dtype]
			if c.dtype == 0 {
				c.dtype = tensor.BFloat16
			}
			if c.op == Prod || c.op == Avg && (!c.dtype.IsFloat() || size != 4) {
				c.op = Sum // exact in any order
			}
		}
		if c.n > 10000 {
			c.n = 7013
			if c.what == "all-to-all" {
				c.n -= c.n % int64(size)
			}
		}
		// Nothing and one element, and what fits into one lap, are no different between more ranks.
		if (size > 5 || size > 2 && !fullMatrix) && c.n != 67 && c.n != 7013 && c.what != "all-to-all" {
			return
		}
		if err == nil && (c.n > 1000) == (railLapBytes < 1<<20) {
			if err = c.run(ctx, m, 0x5a); err != nil {
				err = fmt.Errorf("%+v: %w", c, err)
			}
		}
	})
	return err
}

// combines reports whether it is a reduction.
func (c collectiveTest) combines() bool { return c.what == "reduce" || c.what == "reduce-scatter" }

// TestRailOrder: over hosts of GPUs, an all-reduce has the bits of the order that is stated, in any number of laps, and so have a reduce-scatter, and a reduction to any rank.
func TestRailOrder(t *testing.T) {
	for _, lap := range []int64{1 << 20, 1 << 10} {
		for _, hosts := range [][][]int{
			{{0, 1}, {2, 3}}, {{0, 3}, {1, 2}}, {{0, 1, 2}, {3}}, {{0, 3}, {1}, {2}}, {{0}, {1}, {2}}, {{0, 2}, {1, 5}, {3, 4}}, {{0}, {1}, {2, 3, 5}, {4}}, {{0}, {1, 2, 3}, {4}}, {{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}, {8}}, {{0, 1, 2, 3, 4}, {5, 6, 7, 8}},
		} {
			// The short form has hosts of which there are more than kernels have for themselves in several laps only, and leaves out some others.
			if (testing.Short() || !fullMatrix) && (len(hosts) == 4 || lap >= 1<<20 && (len(hosts) < 3 || len(hosts) > 4)) {
				continue
			}
			t.Run(fmt.Sprintf("%v/laps of %d", hosts, lap), func(t *testing.T) {
				shortRails(t, lap)
				backendtest.RequireAll(t, onGPUHosts(t, hosts, 1, 2*time.Minute, nil, func(ctx context.Context, _ *group.Group, m *memory.Memory) error {
					return railsInOrder(ctx, m, hosts)
				}))
			})
		}
	}
}

// railsInOrder looks at the bits of what is combined over rails.
func railsInOrder(ctx context.Context, m *memory.Memory, hosts [][]int) error {
	s, err := m.Device().NewStream()
	if err != nil {
		return err
	}
	for i, n := range []int64{503, 5003} {
		for _, op := range []Op{Sum, Avg} {
			dtype := []tensor.DType{tensor.Float16, tensor.Float32}[i]
			if err := sameAsAllReduce(ctx, m, s, dtype, op, n); err != nil {
				return fmt.Errorf("hosts %v, %s of %d %s: %w", hosts, op, n, dtype, err)
			}
			if size := m.Group().Size(); op == Avg && size&(size-1) != 0 {
				continue // a product or a quotient
			}
			if err := orderOnIslands(ctx, m, s, hosts, railOrder, dtype, op, n, (i == 1) == (op == Sum)); err != nil {
				return fmt.Errorf("hosts %v, order of %s of %d %s: %w", hosts, op, n, dtype, err)
			}
		}
	}
	return s.Close()
}

// railOrder is what an all-reduce over rails gives. It is that of islands of CPUs but for averages, which are those of averages.
func railOrder(dtype tensor.DType, op Op, islands [][]int, value func(rank int) float32) float32 {
	if op != Avg {
		return islandOrder(dtype, op, islands, value)
	}
	var all []float32 // the average of each island, as often as it has ranks
	for _, ranks := range islands {
		sum := value(ranks[0])
		for _, r := range ranks[1:] {
			sum += value(r)
		}
		all = append(all, slices.Repeat([]float32{rounded(dtype, sum/float32(len(ranks)))}, len(ranks))...)
	}
	if alikeIslands(islands) {
		each := len(islands[0])
		for i := range islands {
			all[i] = all[each*i]
		}
		all = all[:len(islands)]
	}
	sum := all[0]
	for _, x := range all[1:] {
		sum += x
	}
	return rounded(dtype, sum/float32(len(all)))
}

// railPlans makes a plan of each collective over rails, on tensors that close closes.
func railPlans(ctx context.Context, m *memory.Memory, n int64) (plans map[string]func() (*Plan, error), closeAll func() error, err error) {
	size := int64(m.Group().Size())
	var ts [4]*tensor.Tensor
	for i, elements := range []int64{n * size, n * size, n, n} {
		if ts[i], err = tensor.Zeros(ctx, m, tensor.Float32, elements); err == nil {
			err = ts[i].Rendezvous(ctx)
		}
		if err != nil {
			return nil, nil, err
		}
	}
	o := &Options{Algorithm: Hierarchical}
	return map[string]func() (*Plan, error){
			"all-reduce": func() (*Plan, error) {
				return NewAllReduce(ctx, ts[0], Sum, &AllReduceOptions{Algorithm: Hierarchical, Out: ts[1]})
			},
			"broadcast":      func() (*Plan, error) { return NewBroadcast(ctx, ts[0], 1, o) },
			"reduce":         func() (*Plan, error) { return NewReduce(ctx, ts[0], ts[1], Sum, 1, o) },
			"reduce-scatter": func() (*Plan, error) { return NewReduceScatter(ctx, ts[0], ts[2], Sum, o) },
			"all-gather":     func() (*Plan, error) { return NewAllGather(ctx, ts[3], ts[1], o) },
			"all-to-all":     func() (*Plan, error) { return NewAllToAll(ctx, ts[0], ts[1], o) },
		}, func() error {
			var err error
			for _, t := range ts {
				err = errors.Join(err, t.Close(ctx))
			}
			return err
		}, nil
}

// railPlan is railPlans with a stream, and one of the plans made.
func railPlan(ctx context.Context, m *memory.Memory, what string) (plans map[string]func() (*Plan, error), closeAll func() error, s device.Stream, p *Plan, err error) {
	if plans, closeAll, err = railPlans(ctx, m, 600); err != nil {
		return nil, nil, nil, nil, err
	}
	if s, err = m.Device().NewStream(); err != nil {
		return nil, nil, nil, nil, err
	}
	p, err = plans[what]()
	return plans, closeAll, s, p, err
}

// straightBlocks makes all blocks go straight to where they are to be, for a test.
func straightBlocks(t *testing.T) {
	most := hierarchicalPackBytes
	t.Cleanup(func() { hierarchicalPackBytes = most })
	hierarchicalPackBytes = 0
}

// everyBlock runs the all-to-alls of every collective.
func everyBlock(ctx context.Context, m *memory.Memory) (err error) {
	everyCollective(m.Group().Size(), func(what string) []Algorithm {
		if what != "all-to-all" {
			return nil
		}
		return []Algorithm{Hierarchical}
	}, func(c collectiveTest) {
		if err == nil {
			if err = c.run(ctx, m, 0x5a); err != nil {
				err = fmt.Errorf("%+v: %w", c, err)
			}
		}
	})
	return err
}

// TestRailBlocks: an all-to-all whose blocks go straight to the outputs gives what it states, as [TestRailCollectives] has it of packs.
func TestRailBlocks(t *testing.T) {
	straightBlocks(t)
	for i, hosts := range railHosts {
		if (testing.Short() || !fullMatrix) && i%3 > 0 {
			continue // the short form has hosts of two ranks, of four, and of three and two
		}
		t.Run(fmt.Sprint(hosts), func(t *testing.T) {
			backendtest.RequireAll(t, onGPUHosts(t, hosts, uint64(i+1), 2*time.Minute, nil, func(ctx context.Context, _ *group.Group, m *memory.Memory) error {
				return everyBlock(ctx, m)
			}))
		})
	}
}

// eachRail runs f with each collective over rails, in one lap and in several, and with an all-to-all that goes straight.
func eachRail(t *testing.T, f func(t *testing.T, what string)) {
	t.Run("all-to-all/straight", func(t *testing.T) {
		straightBlocks(t)
		f(t, "all-to-all")
	})
	inLaps(t, []string{"all-reduce", "broadcast", "reduce", "reduce-scatter", "all-gather", "all-to-all"}, f)
}

func inLaps(t *testing.T, whats []string, f func(t *testing.T, what string)) {
	for _, what := range whats {
		for _, lap := range []int64{1 << 20, 1 << 10} {
			t.Run(fmt.Sprintf("%s/laps of %d", what, lap), func(t *testing.T) {
				shortRails(t, lap)
				f(t, what)
			})
		}
	}
}

// eachRailOfHosts is eachRail over NCCL: with two hosts, and with three, between which reductions go by messages.
func eachRailOfHosts(t *testing.T, f func(t *testing.T, what string, hosts [][]int)) {
	eachRail(t, func(t *testing.T, what string) { f(t, what, [][]int{{0, 1}, {2, 3}}) })
	t.Run("three hosts", func(t *testing.T) {
		inLaps(t, []string{"all-reduce", "reduce", "reduce-scatter"}, func(t *testing.T, what string) { f(t, what, [][]int{{0, 1}, {2, 3}, {4, 5}}) })
	})
}

// TestRailsLateRank: a rank that does not come makes the run fail on every other rank, on those of other hosts too, whatever of it was on its way, and no rank waits for ever, also not in NCCL, nor
// does the rank that comes when the others have given up. A new plan can be made then, and runs.
func TestRailsLateRank(t *testing.T) {
	eachRail(t, func(t *testing.T, what string) {
		for _, c := range []struct {
			hosts [][]int
			late  int
		}{{[][]int{{0, 1}, {2}}, 1}, {[][]int{{0, 1}, {2}}, 2}, {[][]int{{0, 1}, {2, 3}}, 1}, {[][]int{{0, 1}, {2}, {3}}, 1}, {[][]int{{0, 1}, {2}, {3}}, 3}} {
			if (testing.Short() || !fullMatrix) && len(c.hosts[1]) > 1 || len(c.hosts) > 2 && !strings.Contains(what, "reduce") {
				continue
			}
			t.Run(fmt.Sprintf("%v/%d", c.hosts, c.late), func(t *testing.T) {
				t.Parallel() // they wait more than they work
				backendtest.RequireAll(t, onGPUHosts(t, c.hosts, 1, 800*time.Millisecond, nil, func(ctx context.Context, g *group.Group, m *memory.Memory) error {
					return lateRail(ctx, g, m, what, c.late, false)
				}))
			})
		}
	})
}

// TestRailsLateHost: ranks all of which wait in NCCL, for a host that does not come, wait no longer than kernels do.
func TestRailsLateHost(t *testing.T) {
	eachRail(t, func(t *testing.T, what string) {
		backendtest.RequireAll(t, onGPUHosts(t, [][]int{{0}, {1}}, 1, 800*time.Millisecond, nil, func(ctx context.Context, g *group.Group, m *memory.Memory) error {
			return lateRail(ctx, g, m, what, 1, false)
		}))
	})
}

// lateRail is one rank of a test in which one is late. If what was put to it before is all that it needs, its own run may give its result, and then the next one fails.
func lateRail(ctx context.Context, g *group.Group, m *memory.Memory, what string, late int, put bool) error {
	plans, closeAll, s, p, err := railPlan(ctx, m, what)
	if err != nil {
		return err
	}
	run := func(p *Plan) error { return errors.Join(p.Run(s), s.Synchronize(ctx)) }
	var ran error
	if g.Rank() != late {
		ran = run(p)
	}
	if err := g.Barrier(ctx, "the others have given up"); err != nil {
		return err
	}
	if g.Rank() == late {
		if ran = run(p); ran == nil && put {
			ran = run(p)
		}
	}
	if ran == nil || !strings.Contains(ran.Error(), "did not come in 800ms") || ctx.Err() != nil {
		return fmt.Errorf("a run that rank %d was late for: %w", late, ran)
	}
	if of := m.Islands(); g.Rank() != late && of[g.Rank()] == of[late] && !errors.Is(ran, os.ErrDeadlineExceeded) {
		return fmt.Errorf("a rank of the same host: %w", ran)
	}
	if err := p.Run(s); err == nil {
		return errors.New("a plan that has failed runs again")
	}
	another, err := plans[what]()
	if err != nil {
		return err
	}
	return errors.Join(run(another), another.Close(ctx), p.Close(ctx), closeAll(), s.Close())
}

// heldGroups makes what a rank calls in a group go to its streams when the group ends, as NCCL has it: end gets what does that, and returns what the group's end does. If the word goes at
// once, it does not wait for the end.
func heldGroups(f *ncclib.Functions, wordAtOnce bool, end func(all func() ncclib.Result) ncclib.Result) {
	var mu sync.Mutex // guards open and held
	var open bool
	var held []func() ncclib.Result
	later := func(call func() ncclib.Result) ncclib.Result {
		mu.Lock()
		defer mu.Unlock()
		if !open {
			return call()
		}
		held = append(held, call)
		return ncclib.Success
	}
	own := *f
	f.GroupStart = func() ncclib.Result {
		mu.Lock()
		defer mu.Unlock()
		open = true
		return ncclib.Success
	}
	f.AllReduce = func(in, out uint64, n uintptr, d ncclib.DataType, op ncclib.Op, c ncclib.CommHandle, s uintptr) ncclib.Result {
		call := func() ncclib.Result { return own.AllReduce(in, out, n, d, op, c, s) }
		if n == 1 && wordAtOnce {
			return call()
		}
		return later(call)
	}
	f.Broadcast = func(in, out uint64, n uintptr, d ncclib.DataType, root int32, c ncclib.CommHandle, s uintptr) ncclib.Result {
		return later(func() ncclib.Result { return own.Broadcast(in, out, n, d, root, c, s) })
	}
	f.Reduce = func(in, out uint64, n uintptr, d ncclib.DataType, op ncclib.Op, root int32, c ncclib.CommHandle, s uintptr) ncclib.Result {
		return later(func() ncclib.Result { return own.Reduce(in, out, n, d, op, root, c, s) })
	}
	f.AllGather = func(in, out uint64, n uintptr, d ncclib.DataType, c ncclib.CommHandle, s uintptr) ncclib.Result {
		return later(func() ncclib.Result { return own.AllGather(in, out, n, d, c, s) })
	}
	f.ReduceScatter = func(in, out uint64, n uintptr, d ncclib.DataType, op ncclib.Op, c ncclib.CommHandle, s uintptr) ncclib.Result {
		return later(func() ncclib.Result { return own.ReduceScatter(in, out, n, d, op, c, s) })
	}
	f.Send = func(p uint64, n uintptr, d ncclib.DataType, peer int32, c ncclib.CommHandle, s uintptr) ncclib.Result {
		return later(func() ncclib.Result { return own.Send(p, n, d, peer, c, s) })
	}
	f.Recv = func(p uint64, n uintptr, d ncclib.DataType, peer int32, c ncclib.CommHandle, s uintptr) ncclib.Result {
		return later(func() ncclib.Result { return own.Recv(p, n, d, peer, c, s) })
	}
	f.GroupEnd = func() ncclib.Result {
		mu.Lock()
		calls := held
		open, held = false, nil
		mu.Unlock()
		return end(func() ncclib.Result {
			r := own.GroupStart()
			for _, call := range calls {
				r = max(r, call())
			}
			return max(r, own.GroupEnd())
		})
	}
}

// TestRailsFailedCall: a call of NCCL's that fails on one rank, in the first lap or in the last, ends the run on every rank, with an error that has its condition. If it says so of what is on
// its way nevertheless, others may have their result, and their next run fails.
func TestRailsFailedCall(t *testing.T) {
	eachRailOfHosts(t, func(t *testing.T, what string, hosts [][]int) { failedCall(t, what, hosts, 0, false) })
	inLaps(t, []string{"all-reduce", "reduce"}, func(t *testing.T, what string) {
		shortRails(t, 4<<10)
		for back := range 2 { // the results of the last lap, or its parts
			failedCall(t, what, [][]int{{0}, {1}, {2}, {3}}, back+1, false)
		}
	})
	for _, lap := range []int64{1 << 20, 1 << 10} {
		t.Run(fmt.Sprintf("on its way/laps of %d", lap), func(t *testing.T) {
			shortRails(t, lap)
			failedCall(t, "all-gather", [][]int{{0, 1}, {2, 3}}, 0, true) // what ends the run is the same for all of them
		})
	}
}

// failedCall has a call fail: in the first lap, the second if there are several, or, if back is not 0, that one of the run's groups, counted from the last.
func failedCall(t *testing.T, what string, hosts [][]int, back int, sent bool) {
	var arm, seen [6]atomic.Int64 // how many groups of a rank succeed, negative: all; and how many there were
	for i := range arm {
		arm[i].Store(-1)
	}
	failing := func(rank int, f *ncclib.Functions) {
		heldGroups(f, false, func(all func() ncclib.Result) ncclib.Result {
			seen[rank].Add(1)
			left := arm[rank].Load()
			if left > 0 {
				arm[rank].Add(-1)
			}
			if left != 0 {
				return all()
			}
			if sent {
				all()
			}
			return ncclib.SystemError
		})
	}
	backendtest.RequireAll(t, onGPUHosts(t, hosts, 1, 2*time.Second, failing, func(ctx context.Context, g *group.Group, m *memory.Memory) error {
		_, closeAll, s, p, err := railPlan(ctx, m, what)
		if err != nil {
			return err
		}
		run := func() error { return errors.Join(p.Run(s), s.Synchronize(ctx)) }
		seen[g.Rank()].Store(0)
		if err := errors.Join(run(), g.Barrier(ctx, "a run before")); err != nil {
			return err
		}
		if g.Rank() == 3 {
			switch {
			case back > 0:
				arm[3].Store(seen[3].Load() - int64(back))
			case railLapBytes < 1<<20:
				arm[3].Store(1) // a lap is on its way
			default:
				arm[3].Store(0)
			}
		}
		ran := run()
		if sent && g.Rank() < 2 && ran == nil {
			ran = run()
		}
		switch {
		case ran == nil || ctx.Err() != nil:
			err = fmt.Errorf("a run of which a call has failed ends with %v", ran)
		case g.Rank() == 3 && !errors.Is(ran, errs.ErrUnavailable) && !strings.Contains(ran.Error(), "ncclSystemError"):
			err = fmt.Errorf("the rank whose call has failed says something else: %w", ran)
		case p.Run(s) == nil:
			err = errors.New("a plan that has failed runs again")
		}
		arm[g.Rank()].Store(-1)
		return errors.Join(g.Vote(ctx, "failed", err), p.Close(ctx), closeAll(), s.Close())
	}))
}

// TestRailsWordFirst: NCCL does what it gets as one in any order. Where a rail is cut off when the word has come, which says that nobody has given up, and
// the rest has not, the kernels behind it give up too, so that no rank of the island loads what is not there.
func TestRailsWordFirst(t *testing.T) {
	eachRailOfHosts(t, func(t *testing.T, what string, hosts [][]int) {
		var arm atomic.Bool
		change := func(rank int, f *ncclib.Functions) {
			heldGroups(f, true, func(all func() ncclib.Result) ncclib.Result {
				if rank == 3 && arm.Load() {
					time.Sleep(200 * time.Millisecond) // meanwhile the word comes
					return ncclib.SystemError
				}
				return all()
			})
		}
		backendtest.RequireAll(t, onGPUHosts(t, hosts, 1, 2*time.Second, change, func(ctx context.Context, g *group.Group, m *memory.Memory) error {
			_, closeAll, s, p, err := railPlan(ctx, m, what)
			if err != nil {
				return err
			}
			if err := errors.Join(p.Run(s), s.Synchronize(ctx), g.Barrier(ctx, "a run before")); err != nil {
				return err
			}
			arm.Store(true)
			ran := errors.Join(p.Run(s), s.Synchronize(ctx))
			switch {
			case ran == nil || ctx.Err() != nil:
				err = fmt.Errorf("a run that was cut off: %w", ran)
			case g.Rank() == 1 && railLapBytes >= 1<<20 && !strings.Contains(ran.Error(), "of another island has given up"):
				err = fmt.Errorf("the kernels go on behind a rail that was cut off: %w", ran) // a word of a later lap, which has not come, would end them too
			}
			return errors.Join(g.Vote(ctx, "failed", err), p.Close(ctx), closeAll(), s.Close())
		}))
	})
}

// TestRailsLostRank: a rank that is lost ends the run on every other rank, and is named.
func TestRailsLostRank(t *testing.T) {
	eachRailOfHosts(t, func(t *testing.T, what string, hosts [][]int) {
		failed := onGPUHosts(t, hosts, 1, time.Minute, nil, func(ctx context.Context, g *group.Group, m *memory.Memory) error {
			return lostRail(ctx, g, m, what)
		})
		requireLost(t, failed)
	})
}

func lostRail(ctx context.Context, g *group.Group, m *memory.Memory, what string) error {
	_, _, s, p, err := railPlan(ctx, m, what)
	if err != nil {
		return err
	}
	if err := g.Barrier(ctx, "planned"); err != nil {
		return err
	}
	if g.Rank() == 3 {
		g.Abort("the test takes it away")
		return errTakenAway
	}
	return errors.Join(p.Run(s), s.Synchronize(ctx))
}

func requireLost(t *testing.T, failed []error) {
	for rank, err := range failed {
		if rank == 3 {
			continue
		}
		require.ErrorIs(t, err, errs.ErrPeerLost, "rank %d", rank)
		require.ErrorContains(t, err, "rank 3")
	}
}

// TestRailsOnTwoStreams: two plans at once on two streams, which all ranks enqueue in one order, as NCCL wants it, both give their results.
func TestRailsOnTwoStreams(t *testing.T) {
	shortRails(t, 1<<10)
	hosts := [][]int{{0, 1}, {2, 3}}
	backendtest.RequireAll(t, onGPUHosts(t, hosts, 1, time.Minute, nil, func(ctx context.Context, _ *group.Group, m *memory.Memory) error {
		return onTwoStreams(ctx, m, hosts, 0)
	}))
}

var errTakenAway = errors.New("taken away")

// TestRailsByAuto: between hosts of GPUs, Auto takes NCCL's own collectives, and the form Hierarchical for shares that NCCL does not have. What cannot be is an error on every rank.
func TestRailsByAuto(t *testing.T) {
	backendtest.RequireAll(t, onGPUHosts(t, [][]int{{0, 1}, {2}}, 1, time.Minute, nil, func(ctx context.Context, _ *group.Group, m *memory.Memory) error {
		tensors := map[tensor.DType]*tensor.Tensor{}
		for _, dtype := range []tensor.DType{tensor.Float32, tensor.Uint16, tensor.Int32} {
			x, err := tensor.Zeros(ctx, m, dtype, 400)
			if err != nil {
				return err
			}
			if err := x.Rendezvous(ctx); err != nil {
				return err
			}
			tensors[dtype] = x
		}
		part := func(dtype tensor.DType, at, n int64) tensor.SymmetricTensor {
			x, err := tensors[dtype].Sub(at, n)
			if err != nil {
				panic(err)
			}
			return x
		}
		const u16, f32 = tensor.Uint16, tensor.Float32
		for _, c := range []struct {
			what string
			want Algorithm
			err  error
			make func() (*Plan, error)
		}{
			{"all-gather, even", NCCL, nil, func() (*Plan, error) { return NewAllGather(ctx, part(f32, 0, 20), part(f32, 40, 60), nil) }},
			{"all-gather, uneven", Hierarchical, nil, func() (*Plan, error) { return NewAllGather(ctx, part(f32, 0, 20), part(f32, 40, 59), nil) }},
			{"all-gather of u16, uneven", Hierarchical, nil, func() (*Plan, error) { return NewAllGather(ctx, part(u16, 0, 20), part(u16, 40, 59), nil) }},
			{"reduce-scatter, even", NCCL, nil, func() (*Plan, error) { return NewReduceScatter(ctx, part(f32, 40, 60), part(f32, 0, 20), Sum, nil) }},
			{"reduce-scatter, uneven", Hierarchical, nil, func() (*Plan, error) {
				return NewReduceScatter(ctx, part(f32, 40, 59), part(f32, 0, 20), Sum, nil)
			}},
			{"reduce-scatter, uneven, in the order of the ranks", 0, errs.ErrUnsupported, func() (*Plan, error) {
				return NewReduceScatter(ctx, part(f32, 40, 59), part(f32, 0, 20), Sum, &Options{RankOrder: true})
			}},
			{"reduce-scatter of u16", 0, errs.ErrUnsupported, func() (*Plan, error) {
				return NewReduceScatter(ctx, part(u16, 40, 59), part(u16, 0, 20), Sum, &Options{Algorithm: Hierarchical})
			}},
			{"averages of unequal hosts", Hierarchical, nil, func() (*Plan, error) {
				return NewReduce(ctx, part(f32, 0, 59), part(f32, 100, 59), Avg, 1, &Options{Algorithm: Hierarchical})
			}},
			{"averages of integers", 0, errs.ErrUnsupported, func() (*Plan, error) {
				return NewReduce(ctx, part(tensor.Int32, 0, 59), part(tensor.Int32, 100, 59), Avg, 1, &Options{Algorithm: Hierarchical})
			}},
			{"all-to-all", NCCL, nil, func() (*Plan, error) { return NewAllToAll(ctx, part(u16, 0, 60), part(u16, 100, 60), nil) }},
			{"all-to-all by name", Hierarchical, nil, func() (*Plan, error) {
				return NewAllToAll(ctx, part(u16, 0, 60), part(u16, 100, 60), &Options{Algorithm: Hierarchical})
			}},
			{"all-to-all of what is not even", 0, errs.ErrInvalid, func() (*Plan, error) {
				return NewAllToAll(ctx, part(f32, 0, 59), part(f32, 100, 59), &Options{Algorithm: Hierarchical})
			}},
			{"all-to-all in one place", 0, errs.ErrInvalid, func() (*Plan, error) {
				return NewAllToAll(ctx, part(f32, 0, 60), part(f32, 30, 60), &Options{Algorithm: Hierarchical})
			}},
			{"broadcast", NCCL, nil, func() (*Plan, error) { return NewBroadcast(ctx, part(f32, 0, 59), 1, nil) }},
			{"reduce", NCCL, nil, func() (*Plan, error) { return NewReduce(ctx, part(f32, 0, 59), part(f32, 100, 59), Sum, 1, nil) }},
			{"all-reduce", NCCL, nil, func() (*Plan, error) { return NewAllReduce(ctx, part(f32, 0, 399), Sum, nil) }},
		} {
			p, err := c.make()
			if !errors.Is(err, c.err) || err != nil && c.err == nil {
				return fmt.Errorf("%s: %w", c.what, err)
			}
			if err != nil {
				continue
			}
			if p.Algorithm() != c.want {
				return fmt.Errorf("%s: %s came", c.what, p.Algorithm())
			}
			if err := p.Close(ctx); err != nil {
				return err
			}
		}
		var err error
		for _, dtype := range []tensor.DType{f32, u16, tensor.Int32} {
			err = errors.Join(err, tensors[dtype].Close(ctx))
		}
		return err
	}))
}

// TestLargeAllReducesByRails: between hosts of GPUs with as many ranks each, Auto takes the form Hierarchical for large all-reduces, as far as it has them, and NCCL's own for all others.
func TestLargeAllReducesByRails(t *testing.T) {
	for _, hosts := range [][][]int{{{0, 1}, {2, 3}}, {{0, 2}, {1, 3}}, {{0, 1}, {2}}, {{0}, {1}}} {
		t.Run(fmt.Sprint(hosts), func(t *testing.T) {
			want := Hierarchical
			if len(hosts[1]) == 1 {
				want = NCCL
			}
			backendtest.RequireAll(t, onGPUHosts(t, hosts, 1, time.Minute, nil, func(ctx context.Context, _ *group.Group, m *memory.Memory) error {
				large := int64(len(hosts[0])) * railsFromShard // bytes
				for _, c := range []struct {
					dtype tensor.DType
					bytes int64
					op    Op
					opts  *AllReduceOptions
					want  Algorithm
					err   error
				}{
					{tensor.Float32, large, Sum, nil, want, nil},
					{tensor.BFloat16, large, Avg, nil, want, nil},
					{tensor.BFloat16, large - 2, Sum, nil, NCCL, nil},
					{tensor.Int32, large, Sum, nil, want, nil},
					{tensor.Int32, large, Avg, nil, NCCL, nil}, // of which rails have none
					{tensor.Uint16, large, Sum, nil, 0, errs.ErrUnsupported},
					{tensor.Float32, large, Sum, &AllReduceOptions{RankOrder: true}, 0, errs.ErrUnsupported},
					{tensor.Float32, large, Sum, &AllReduceOptions{Algorithm: NCCL}, NCCL, nil},
				} {
					x, err := tensor.Zeros(ctx, m, c.dtype, c.bytes/c.dtype.Bytes())
					if err != nil {
						return err
					}
					if err := x.Rendezvous(ctx); err != nil {
						return err
					}
					p, err := NewAllReduce(ctx, x, c.op, c.opts)
					switch {
					case !errors.Is(err, c.err) || err != nil && c.err == nil:
						return fmt.Errorf("%s of %d bytes of %s: %w", c.op, c.bytes, c.dtype, err)
					case err == nil && p.Algorithm() != c.want:
						return fmt.Errorf("%s of %d bytes of %s: %s came", c.op, c.bytes, c.dtype, p.Algorithm())
					case err == nil:
						err = p.Close(ctx)
					default:
						err = nil
					}
					if err := errors.Join(err, x.Close(ctx)); err != nil {
						return err
					}
				}
				return nil
			}))
		})
	}
}

// TestUnevenWithoutRoom: where one rank has no memory for the workspace of an all-gather that is not even, which NCCL has not, every rank is told what there is no room for, and not that NCCL has none.
func TestUnevenWithoutRoom(t *testing.T) {
	backendtest.RequireAll(t, onGPUHosts(t, [][]int{{0, 1}, {2}}, 1, time.Minute, nil, func(ctx context.Context, g *group.Group, m *memory.Memory) error {
		const n = 8<<20 - 1
		in, inErr := mapped(ctx, m, shareElements(n, g.Size()))
		out, outErr := mapped(ctx, m, n)
		first, firstErr := NewBarrier(ctx, m, nil) // which makes the first workspace
		if err := errors.Join(inErr, outErr, firstErr); err != nil {
			return err
		}
		var taken []device.Ptr
		for bytes := int64(1 << 30); g.Rank() == 1 && bytes >= 2<<20; bytes /= 2 {
			if p, err := m.Device().Alloc(bytes); err == nil {
				taken = append(taken, p)
			}
		}
		if err := g.Barrier(ctx, "taken"); err != nil {
			return err
		}
		_, err := NewAllGather(ctx, in, out, nil)
		if _, ok := errors.AsType[*memory.WorkspaceError](err); !ok {
			return fmt.Errorf("without memory: %w", err)
		}
		err = nil
		for _, p := range taken {
			err = errors.Join(err, m.Device().Free(p))
		}
		return errors.Join(err, first.Close(ctx), in.Close(ctx), out.Close(ctx))
	}))
}

// TestRailThatGaveUpIsNamed: a run that was cut off names the ranks of its rail on other islands, if the rank has a rail.
func TestRailThatGaveUpIsNamed(t *testing.T) {
	backendtest.RequireAll(t, backendtest.OnRanks(t, 1, nil, func(ctx context.Context, g *group.Group) error {
		b, err := host.New(g, nil)
		if err != nil {
			return err
		}
		m := memory.New(b, g, nil)
		in, err := tensor.Zeros(ctx, m, tensor.Int8, 1)
		if err != nil {
			return err
		}
		for rank, want := range []string{"rank 1 or 3 of", "rank 0 or 3 of", "a rank of"} {
			f := &railForm{in: in, islandPlace: newIslandPlace(rank, [][]int{{0}, {1, 2}, {3}}, true)}
			if told := f.told(); !strings.HasPrefix(told.Error(), want+" another island has given up") {
				err = errors.Join(err, fmt.Errorf("rank %d: %w", rank, told))
			}
		}
		return errors.Join(err, in.Close(ctx), m.Close(ctx))
	}))
}
