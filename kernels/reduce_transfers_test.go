package kernels

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/tensor"
)

// placed is a tensor of which only the place and the size are known.
type placed struct {
	tensor.SymmetricTensor
	rank, size int
	n          int64
}

func (p placed) Rank() int           { return p.rank }
func (p placed) WorldSize() int      { return p.size }
func (p placed) NumElements() int64  { return p.n }
func (p placed) Bytes() int64        { return p.n }
func (p placed) DType() tensor.DType { return tensor.Int8 }
func (p placed) Ptr() device.Ptr     { return 1<<20 + 5 }

// recordedLaps is the steps that a lapForm adds.
type recordedLaps []transferStep

func (r *recordedLaps) add(s transferStep) { *r = append(*r, s) }
func (r *recordedLaps) send(lap int)       { r.add(transferStep{kind: stepSend, lap: lap}) }
func (r *recordedLaps) put(lap int)        { r.add(transferStep{kind: stepPut, lap: lap}) }
func (r *recordedLaps) announce()          { r.add(transferStep{kind: stepAnnounce, signal: signalLap}) }
func (r *recordedLaps) wait(signal int)    { r.add(transferStep{kind: stepWait, signal: signal}) }
func (r *recordedLaps) finish(signal int)  { r.add(transferStep{kind: stepFinish, signal: signal}) }
func (r *recordedLaps) room(lap int)       { r.add(transferStep{kind: stepGrant, lap: lap}) }
func (r *recordedLaps) reduce(lap int)     { r.add(transferStep{kind: stepReduce, lap: lap}) }
func (r *recordedLaps) fork()              { r.add(transferStep{kind: stepFork}) }
func (r *recordedLaps) join()              { r.add(transferStep{kind: stepJoin}) }

// lapSimulation is a simulation of reductions, which runs steps as simulation does.
type lapSimulation struct {
	random *rand.Rand
	ranks  []*lapRank
	lane   bool
}

// lapRank is one rank of it.
type lapRank struct {
	form           lapForm
	steps          []transferStep
	in, out, slots []int
	signals        [][]int // by number and writer: that came
	taken          []int   // by number: that were waited for
	queue          []transferStep
	sending        []int // the peers that the step under way has not put to and told yet
}

func newLapRanks(t *testing.T, form lapForm, size int, n int64) []*lapRank {
	var ranks []*lapRank
	for rank := range size {
		f := form
		r := *form.reduction
		r.maker = &maker{in: placed{rank: rank, size: size, n: n}}
		f.reduction = &r
		var steps recordedLaps
		f.build(&steps)
		waits := steps[len(steps)-1]
		for i := len(steps) - 1; waits.kind != stepWait && waits.kind != stepFinish; i-- {
			waits = steps[i]
		}
		require.Equal(t, stepFinish, waits.kind, "the last wait is not the user's stream's")
		l := &lapRank{form: f, steps: steps, in: make([]int, n), out: make([]int, n), slots: make([]int, f.workspaceBytes()), taken: make([]int, signalRoom+f.slots())}
		for signal := range l.taken {
			begun := make([]int, size)
			if signal >= signalRoom && !f.forward {
				for w := range begun {
					begun[w] = 1 // granted
				}
			}
			l.signals = append(l.signals, begun)
		}
		ranks = append(ranks, l)
	}
	return ranks
}

// step does the next step of a rank.
func (s *lapSimulation) step(rank int) (moved, ended bool) {
	ranks, r := s.ranks, s.ranks[rank]
	f := r.form
	step := r.queue[0]
	// result is where the lap's result is.
	result := func(lap int) []int {
		lo, hi := f.piece(rank, lap)
		if f.forward && rank != f.root {
			at := f.sumAt(rank, lap)
			return r.slots[at : at+hi-lo]
		}
		begin, _ := f.whole(rank)
		if f.forward {
			begin = 0
		}
		return r.out[lo-begin : hi-begin]
	}
	switch step.kind {
	case stepWait, stepFinish:
		for w := range ranks {
			if w != rank && r.signals[step.signal][w] <= r.taken[step.signal] {
				return false, false
			}
		}
		r.taken[step.signal]++
	case stepSend, stepPut, stepAnnounce:
		var to int
		to, r.sending = sendNext(s.random, r.sending, peersOf(rank, len(ranks)))
		if lo, hi := f.piece(to, step.lap); hi > lo && step.kind != stepAnnounce {
			copy(ranks[to].slots[f.slot(to, rank, step.lap):], r.in[lo:hi])
		}
		if step.kind != stepPut {
			ranks[to].signals[signalLap][rank]++
		}
	case stepReduce:
		lo, hi := f.piece(rank, step.lap)
		sums := make([]int, hi-lo)
		for i := range sums {
			sums[i] = r.in[lo+int64(i)]
			for w := range ranks {
				if w != rank {
					sums[i] += r.slots[f.slot(rank, w, step.lap)+int64(i)]
				}
			}
		}
		copy(result(step.lap), sums)
	case stepGrant:
		var to int
		if to, r.sending = sendNext(s.random, r.sending, peersOf(rank, len(ranks))); to == f.root && f.forward {
			lo, _ := f.piece(rank, step.lap)
			copy(ranks[f.root].out[lo:], result(step.lap))
		}
		ranks[to].signals[signalRoom+step.lap%f.slots()][rank]++
	}
	if len(r.sending) > 0 {
		return true, false
	}
	r.queue = r.queue[1:]
	return true, len(r.queue) == 0
}

func (s *lapSimulation) begin(rank, run int) {
	r := s.ranks[rank]
	for i := range r.in {
		r.in[i] = lapValue(rank, run, i)
	}
	clear(r.out)
	r.queue = serialize(s.random, r.steps, s.lane)
}

func lapValue(rank, run, i int) int { return (i*7+rank*13+run*29)%101 + 1 }

func (s *lapSimulation) check(rank, run int) error {
	r := s.ranks[rank]
	want := make([]int, len(r.out))
	lo, hi := r.form.share(rank)
	for i := lo; i < hi; i++ {
		for w := range s.ranks {
			want[i-lo] += lapValue(w, run, int(i))
		}
	}
	if !slices.Equal(want, r.out) {
		return fmt.Errorf("run %d of rank %d has %v, and %v was expected", run, rank, r.out, want)
	}
	return nil
}

// TestLapProgram: whatever order the streams of the ranks run in, nobody waits in a circle, nothing is overwritten that is still wanted, and
// every run gives every rank its share of the sum. What a run has left to do on the lane is done before the next one's user sees anything.
func TestLapProgram(t *testing.T) {
	for size := 2; size <= 5; size++ {
		for _, laps := range []int64{1, 2, 3, 4, 7} {
			n := int64(size)*laps*shardAlign - 37
			each := alignUp((n+int64(size)-1)/int64(size), shardAlign)
			forms := map[string]lapForm{
				"scatter":       {reduction: &reduction{scatter: true}, lap: alignUp((shareElements(n, size)+laps-1)/laps, shardAlign)},
				"root":          {reduction: &reduction{root: size - 1}, lap: alignUp((n+laps-1)/laps, shardAlign)},
				"scatter apart": {reduction: &reduction{scatter: true}, lap: 1},
				"root apart":    {reduction: &reduction{root: size - 1}, lap: 1},
				"forward":       {reduction: &reduction{root: 1}, forward: true, shard: each, lap: alignUp((each+laps-1)/laps, shardAlign)},
			}
			for name, f := range forms {
				longest := map[string]int64{"scatter": shareElements(n, size), "scatter apart": shareElements(n, size), "root": n, "root apart": n, "forward": each}[name]
				f.laps = int((longest + f.lap - 1) / f.lap)
				if name == "scatter apart" || name == "root apart" {
					f.setApart(longest, max(longest>>(laps-1), 1))
				}
				for _, lane := range []bool{false, true} {
					t.Run(fmt.Sprintf("%s/size=%d/laps=%d/lane=%t", name, size, f.laps, lane), func(t *testing.T) {
						for seed := range uint64(4) {
							s := &lapSimulation{random: rand.New(rand.NewPCG(seed, 7)), ranks: newLapRanks(t, f, size, n), lane: lane}
							require.NoErrorf(t, simulate(s.random, size, 3, s), "seed %d", seed)
						}
					})
				}
			}
		}
	}
}

// TestLapPieces: slots are apart, in the workspace, and placed as the owner's shard of the input is.
func TestLapPieces(t *testing.T) {
	for size := 2; size <= 9; size++ {
		for _, n := range []int64{1, 17, 129, 5000, 100_003} {
			for _, scatter := range []bool{true, false} {
				for _, laps := range []int64{1, 3, -2, -128} { // those below 0 are places for each lap, the last one of so many bytes
					longest := n
					if scatter {
						longest = shareElements(n, size)
					}
					r := &reduction{maker: &maker{in: placed{size: size, n: n}}, scatter: scatter}
					f := lapForm{reduction: r, lap: longest, laps: 1, lead: 5}
					if laps > 1 {
						f.lap = alignUp((longest+laps-1)/laps, shardAlign)
						f.laps = int((longest + f.lap - 1) / f.lap)
					}
					if laps < 0 {
						f.setApart(longest, -laps)
					}
					for owner := range size {
						taken := map[int64]bool{}
						next, end := f.whole(owner)
						for lap := range f.laps {
							lo, hi := f.piece(owner, lap)
							require.Equal(t, next, lo)
							next = hi
							for writer := range size {
								if writer == owner || lap >= f.slots() && !f.apart || hi == lo {
									continue
								}
								at := f.slot(owner, writer, lap)
								require.Equal(t, int64(f.in.Ptr().Add(lo)%16), at%16, "not alike modulo 16")
								require.LessOrEqual(t, at+hi-lo, f.workspaceBytes())
								require.Equal(t, at/f.span(), (at+hi-lo-1)/f.span(), "beyond its slot")
								if f.apart {
									for i := at; i < at+hi-lo; i++ {
										require.False(t, taken[i], "two laps have one place")
										taken[i] = true
									}
									continue
								}
								require.False(t, taken[at/f.span()], "two writers have one slot")
								taken[at/f.span()] = true
							}
						}
						require.Equal(t, end, next)
					}
				}
			}
		}
	}
}
