package kernels

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/kernels/kernelstest"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// puttingHosts are islands with as many ranks and with others, in the order of the ranks and not, two and more, and one alone.
var puttingHosts = [][][]int{
	{{0, 1}, {2, 3}}, {{0}, {1}, {2}}, {{0, 1, 2}, {3}}, {{0, 3}, {1, 2}}, {{0}, {1}, {2, 3}}, {{0, 1}, {2, 3}, {4, 5}}, {{0, 2, 4}, {1, 3}}, {{0, 1}},
}

// TestRailPuts: an all-reduce by kernels inside islands and by puts between them gives every rank the bits of the order that it states: in place and not, in one lap and in several, again and
// again, and from a graph, also where puts take their time.
func TestRailPuts(t *testing.T) {
	for k, islands := range puttingHosts {
		for i, lap := range []int64{1 << 20, 1 << 10} {
			if !fullMatrix && (k/2+i)%2 == 1 {
				continue // the short form has each of the islands with laps of one length, of either with puts that take their time and that do not
			}
			t.Run(fmt.Sprintf("%v/laps of %d", islands, lap), func(t *testing.T) {
				shortRails(t, lap)
				w := &wire{islands: islands, delay: time.Duration(k%2) * 300 * time.Microsecond}
				backendtest.RequireAll(t, onWired(t, w, uint64(k+1), 2*time.Minute, func(ctx context.Context, g *group.Group, m *memory.Memory) error {
					for _, n := range []int64{1, 33, 1000, 4099} {
						for _, inPlace := range []bool{false, true} {
							if (n > 500) != (lap < 1<<20) && inPlace {
								continue
							}
							if err := putAllReduce(ctx, g, m, islands, n, inPlace); err != nil {
								return fmt.Errorf("%d elements, in place %t: %w", n, inPlace, err)
							}
						}
					}
					return nil
				}))
			})
		}
	}
}

func putAllReduce(ctx context.Context, g *group.Group, m *memory.Memory, islands [][]int, n int64, inPlace bool) error {
	x, err := tensor.Zeros(ctx, m, tensor.Float32, n+3)
	if err != nil {
		return err
	}
	y, err := tensor.Zeros(ctx, m, tensor.Float32, n+3)
	if err != nil {
		return err
	}
	if err := errors.Join(x.Rendezvous(ctx), y.Rendezvous(ctx)); err != nil {
		return err
	}
	in, err := x.Sub(3, n) // at an odd place
	if err != nil {
		return err
	}
	out, err := y.Sub(2, n) // and another
	if err != nil {
		return err
	}
	if inPlace {
		out = in
	}
	s, err := m.Device().NewStream()
	if err != nil {
		return err
	}
	p, err := NewAllReduce(ctx, in, Sum, &AllReduceOptions{Algorithm: Hierarchical, Out: out, FirstEpoch: 1<<32 - 3})
	if err != nil {
		return err
	}
	mine := make([]float32, n)
	for i := range mine {
		mine[i] = kernelstest.Number(g.Rank(), i)
	}
	fill := func() error {
		return errors.Join(g.Barrier(ctx, "ended"), tensor.Write(out.Local(), slices.Repeat([]float32{float32(math.NaN())}, int(n)), 0),
			tensor.Write(in.Local(), mine, 0), g.Barrier(ctx, "filled"))
	}
	check := func(what string) error {
		got := make([]float32, n)
		if err := tensor.Read(out.Local(), got, 0); err != nil {
			return err
		}
		for i, v := range got {
			if want := kernelstest.IslandSum(islands, i); v != want {
				return fmt.Errorf("%s: element %d is %v, expected %v", what, i, v, want)
			}
		}
		return nil
	}
	for run := range 3 {
		if err := errors.Join(fill(), p.Run(s), s.Synchronize(ctx), check(fmt.Sprint("run ", run))); err != nil {
			return err
		}
	}
	if err := errors.Join(fill(), s.BeginCapture(), p.Run(s)); err != nil {
		return err
	}
	graph, err := s.EndCapture()
	if err != nil {
		return err
	}
	err = graph.Launch(s)
	if !inPlace { // sums of sums otherwise
		err = errors.Join(err, graph.Launch(s), p.Run(s), p.Run(s), graph.Launch(s))
	}
	return errors.Join(err, s.Synchronize(ctx), check("graph"), graph.Close(), p.Close(ctx), s.Close(), y.Close(ctx), x.Close(ctx))
}

// TestRailPutCollectives: on islands of GPUs that put to each other, every collective that has the form Hierarchical gives what it states, as [TestRailCollectives] has it.
func TestRailPutCollectives(t *testing.T) {
	for i, islands := range puttingHosts {
		if (testing.Short() || !fullMatrix) && i > 2 {
			continue
		}
		for _, lap := range []int64{1 << 20, 4 << 10} {
			if !fullMatrix && lap >= 1<<20 && i > 0 {
				continue // one lap is one among several, but for the first islands
			}
			t.Run(fmt.Sprintf("%v/laps of %d", islands, lap), func(t *testing.T) {
				shortRails(t, lap)
				backendtest.RequireAll(t, onWired(t, &wire{islands: islands}, uint64(i+1), 2*time.Minute, func(ctx context.Context, _ *group.Group, m *memory.Memory) error {
					return everyRail(ctx, m, islands)
				}))
			})
		}
	}
}

// TestRailPutBlocks: an all-to-all whose blocks go straight to the outputs gives what it states, as [TestRailPutCollectives] has it of packs.
func TestRailPutBlocks(t *testing.T) {
	straightBlocks(t)
	for i, islands := range puttingHosts {
		if !fullMatrix && i%2 == 1 {
			continue // the short form has islands of two ranks, of three and one, and of one, one and two
		}
		t.Run(fmt.Sprint(islands), func(t *testing.T) {
			backendtest.RequireAll(t, onWired(t, &wire{islands: islands}, uint64(i+1), 2*time.Minute, func(ctx context.Context, _ *group.Group, m *memory.Memory) error {
				return everyBlock(ctx, m)
			}))
		})
	}
}

// TestRailPutsOrder is [TestRailOrder] by puts.
func TestRailPutsOrder(t *testing.T) {
	shortRails(t, 2<<10)
	for _, islands := range [][][]int{{{0, 1}, {2}, {3}}, {{0, 3}, {1, 2}}, {{0, 1, 2}, {3}}} {
		backendtest.RequireAll(t, onWired(t, &wire{islands: islands}, 1, 2*time.Minute, func(ctx context.Context, _ *group.Group, m *memory.Memory) error {
			return railsInOrder(ctx, m, islands)
		}))
	}
}

// TestRailPutsLateRank: a rank that does not come makes the run fail on every other rank, on those of other islands too, and the rank that comes when the others have given up fails
// likewise. A new plan can be made then, and runs.
func TestRailPutsLateRank(t *testing.T) {
	eachRail(t, func(t *testing.T, what string) {
		for _, c := range []struct {
			islands [][]int
			late    int
		}{{[][]int{{0, 1}, {2}}, 1}, {[][]int{{0, 1}, {2}}, 2}, {[][]int{{0, 1}, {2, 3}}, 1}} {
			if (testing.Short() || !fullMatrix) && len(c.islands[1]) > 1 {
				continue
			}
			t.Run(fmt.Sprintf("%v/%d", c.islands, c.late), func(t *testing.T) {
				t.Parallel() // they wait more than they work
				backendtest.RequireAll(t, onWired(t, &wire{islands: c.islands}, 1, 800*time.Millisecond, func(ctx context.Context, g *group.Group, m *memory.Memory) error {
					return lateRail(ctx, g, m, what, c.late, true)
				}))
			})
		}
	})
}

// TestRailPutsLostRank: a rank that is lost ends the run on every other rank, and is named.
func TestRailPutsLostRank(t *testing.T) {
	eachRail(t, func(t *testing.T, what string) {
		failed := onWired(t, &wire{islands: [][]int{{0, 1}, {2, 3}}}, 1, time.Minute, func(ctx context.Context, g *group.Group, m *memory.Memory) error {
			return lostRail(ctx, g, m, what)
		})
		requireLost(t, failed)
	})
}

// TestRailPutsFail: a put that fails on one rank, in the first lap or in the last, ends the run on every rank; on that rank with the error of the put. No rank takes what did not come for a
// result.
func TestRailPutsFail(t *testing.T) {
	failure := errors.New("the wire is cut")
	eachRail(t, func(t *testing.T, what string) {
		fails := 3
		if what == "broadcast" {
			fails = 1 // the other rank that puts
		}
		var left atomic.Int64 // how many of its puts succeed; negative: all
		left.Store(-1)
		w := &wire{islands: [][]int{{0, 1}, {2, 3}}, fail: func(from int) error {
			if from != fails || left.Load() < 0 {
				return nil
			}
			if left.Load() == 0 {
				return failure
			}
			left.Add(-1)
			return nil
		}}
		backendtest.RequireAll(t, onWired(t, w, 1, 2*time.Second, func(ctx context.Context, g *group.Group, m *memory.Memory) error {
			_, closeAll, s, p, err := railPlan(ctx, m, what)
			if err != nil {
				return err
			}
			if err := errors.Join(p.Run(s), s.Synchronize(ctx), g.Barrier(ctx, "a run before")); err != nil {
				return err
			}
			if g.Rank() == fails {
				left.Store(0)
				if railLapBytes < 1<<20 {
					left.Store(1) // a lap is on its way
				}
			}
			if err := g.Barrier(ctx, "armed"); err != nil {
				return err
			}
			ran := errors.Join(p.Run(s), s.Synchronize(ctx))
			if ran == nil || ctx.Err() != nil {
				return fmt.Errorf("a run of which a put has failed: %w", ran)
			}
			if g.Rank() == fails && !errors.Is(ran, failure) {
				return fmt.Errorf("the rank whose put has failed says something else: %w", ran)
			}
			if err := p.Run(s); err == nil {
				return errors.New("a plan that has failed runs again")
			}
			return errors.Join(g.Barrier(ctx, "failed"), p.Close(ctx), closeAll(), s.Close())
		}))
	})
}

// TestRailPutsOnTwoStreams: two plans at once on two streams, which the ranks enqueue in opposite orders, both give their results.
func TestRailPutsOnTwoStreams(t *testing.T) {
	shortRails(t, 1<<10)
	for _, first := range [][]int{{0, 1, 0, 1}, {0, 0, 1, 1}} { // the other way around in each island, and from one to the other
		islands := [][]int{{0, 1}, {2, 3}}
		backendtest.RequireAll(t, onWired(t, &wire{islands: islands, delay: 100 * time.Microsecond}, 1, time.Minute, func(ctx context.Context, g *group.Group, m *memory.Memory) error {
			return onTwoStreams(ctx, m, islands, first[g.Rank()])
		}))
	}
}

// onTwoStreams runs two all-reduces of other values on two streams, again and again, beginning each time with the first or the second.
func onTwoStreams(ctx context.Context, m *memory.Memory, islands [][]int, first int) error {
	const n = 700
	var ins, outs [2]tensor.SymmetricTensor
	var plans [2]*Plan
	var streams [2]device.Stream
	number := func(plan, rank, i int) float32 { return kernelstest.Number(rank, i+plan*n) }
	for k := range plans {
		var err error
		if ins[k], err = kernelstest.Tensor(ctx, m, n, func(i int) float32 { return number(k, m.Group().Rank(), i) }); err != nil {
			return err
		}
		if outs[k], err = kernelstest.Tensor(ctx, m, n, func(int) float32 { return 0 }); err != nil {
			return err
		}
		if plans[k], err = NewAllReduce(ctx, ins[k], Sum, &AllReduceOptions{Algorithm: Hierarchical, Out: outs[k]}); err != nil {
			return err
		}
		if streams[k], err = m.Device().NewStream(); err != nil {
			return err
		}
	}
	for range 10 {
		if err := errors.Join(plans[first].Run(streams[first]), plans[1-first].Run(streams[1-first])); err != nil {
			return err
		}
	}
	for k := range plans {
		got := make([]float32, n)
		if err := errors.Join(streams[k].Synchronize(ctx), tensor.Read(outs[k].Local(), got, 0)); err != nil {
			return err
		}
		for i, v := range got {
			if want := kernelstest.IslandSum(islands, i+k*n); v != want {
				return fmt.Errorf("plan %d: element %d is %v, expected %v", k, i, v, want)
			}
		}
		if err := errors.Join(plans[k].Close(ctx), streams[k].Close(), outs[k].Close(ctx), ins[k].Close(ctx)); err != nil {
			return err
		}
	}
	return nil
}
