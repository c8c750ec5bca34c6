package kernels

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// hierarchicalSimulation lets the steps of all ranks run in random orders, as out of order as streams allow, and fails where somebody waits in a
// circle, reads what has not come, or finds the wrong result. Values are sets of contributions: a byte of a result says whose bytes are in it, in which order.
type hierarchicalSimulation struct {
	random  *rand.Rand
	inPlace bool
	lane    bool
	ranks   []*hierarchicalRank
}

// hierarchicalStep is a step of a run.
type hierarchicalStep struct {
	kind   string
	signal int
	lap    int
}

type hierarchicalRank struct {
	form      hierarchicalForm
	steps     []hierarchicalStep
	in, out   []string // by unit
	workspace []string
	came      []map[int]int // signals, by number and writer
	taken     []map[int]int
	queue     []hierarchicalStep
	sending   []int // the peers that the step under way has not put to and told yet
}

func (r *hierarchicalRank) add(kind string, signal, lap int) {
	r.steps = append(r.steps, hierarchicalStep{kind, signal, lap})
}

func (r *hierarchicalRank) sum(lap int)       { r.add("sum", 0, lap) }
func (r *hierarchicalRank) combine(lap int)   { r.add("combine", 0, lap) }
func (r *hierarchicalRank) spread(lap int)    { r.add("spread", 0, lap) }
func (r *hierarchicalRank) reduceAlone()      { r.add("alone", 0, 0) }
func (r *hierarchicalRank) send(lap int)      { r.add("send", hierarchicalData, lap) }
func (r *hierarchicalRank) results(lap int)   { r.add("results", hierarchicalResults, lap) }
func (r *hierarchicalRank) signal(signal int) { r.add("signal", signal, 0) }
func (r *hierarchicalRank) wait(signal int)   { r.add("wait", signal, 0) }
func (r *hierarchicalRank) finish(signal int) { r.add("finish", signal, 0) }
func (r *hierarchicalRank) fork()             { r.add("fork", 0, 0) }
func (r *hierarchicalRank) join()             { r.add("join", 0, 0) }

// hierarchicalUnit is how many bytes of a message the simulation takes for one value; places are multiples of it.
const hierarchicalUnit = shardAlign

// message is what a rank contributes to a run.
func (s *hierarchicalSimulation) message(rank, run, unit int) string {
	if s.inPlace {
		run = 0 // what the program writes before each run
	}
	return fmt.Sprintf("%d.%d.%d", rank, run, unit)
}

// want is what a run gives for a unit.
func (s *hierarchicalSimulation) want(run, unit int) string {
	var islands string
	for _, ranks := range s.ranks[0].form.islands {
		var sum string
		for _, r := range ranks {
			sum += s.message(r, run, unit) + " "
		}
		islands += "(" + sum + ")"
	}
	return islands
}

func newHierarchicalSimulation(seed uint64, islands [][]int, bytes, lap, direct int64, inPlace, lane bool) *hierarchicalSimulation {
	s := &hierarchicalSimulation{random: rand.New(rand.NewPCG(seed, 7)), inPlace: inPlace, lane: lane}
	size := 0
	for _, ranks := range islands {
		size += len(ranks)
	}
	for rank := range size {
		f := hierarchicalForm{bytes: bytes, wide: 1}
		f.place(rank, islands)
		f.cut(lap, direct)
		signals := hierarchicalResults + 1
		if f.direct {
			signals = hierarchicalResults + f.slots()
		}
		units := int((bytes + hierarchicalUnit - 1) / hierarchicalUnit)
		r := &hierarchicalRank{form: f, in: make([]string, units), workspace: make([]string, f.workspaceBytes()/hierarchicalUnit)}
		if r.out = r.in; !inPlace {
			r.out = make([]string, units)
		}
		f.build(r)
		for n := range signals {
			r.came, r.taken = append(r.came, map[int]int{}), append(r.taken, map[int]int{})
			if f.direct && n >= hierarchicalResults {
				for peer := range size {
					r.came[n][peer] = 1
				}
			}
		}
		s.ranks = append(s.ranks, r)
	}
	return s
}

// order puts the steps of a run into one queue.
func (s *hierarchicalSimulation) order(r *hierarchicalRank) (steps []hierarchicalStep) {
	if !s.lane {
		return slices.Clone(r.steps)
	}
	after := behind(len(r.steps), func(i int) runStream {
		switch r.steps[i].kind {
		case "sum", "combine", "spread", "alone", "finish":
			return onPlan
		case "fork":
			return forks
		case "join":
			return joins
		}
		return onLane
	})
	for _, i := range queue(s.random, after) {
		steps = append(steps, r.steps[i])
	}
	return steps
}

func (s *hierarchicalSimulation) begin(rank, run int) {
	r := s.ranks[rank]
	for u := range r.out {
		r.out[u] = fmt.Sprintf("poison %d", run)
	}
	for u := range r.in {
		r.in[u] = s.message(rank, run, u)
	}
	r.queue = s.order(r)
}

// units is the places of the values between two bytes.
func units(lo, hi int64) (int, int) {
	if lo == hi {
		return 0, 0
	}
	return int(lo / hierarchicalUnit), int((hi + hierarchicalUnit - 1) / hierarchicalUnit)
}

// step does the next step of a rank.
func (s *hierarchicalSimulation) step(rank int) (moved, ended bool) {
	r := s.ranks[rank]
	f, step := r.form, r.queue[0]
	peers := f.peersOf(step.signal)
	sumOf := func(u int) string {
		var sum string
		for _, p := range f.islands[f.island] {
			sum += s.ranks[p].in[u] + " "
		}
		return "(" + sum + ")"
	}
	switch step.kind {
	case "wait", "finish":
		for _, p := range peers {
			if r.came[step.signal][p] <= r.taken[step.signal][p] {
				return false, false
			}
		}
		for _, p := range peers {
			r.taken[step.signal][p]++
		}
	case "alone":
		lo, hi := units(min(int64(f.local)*f.shard, f.bytes), min(int64(f.local+1)*f.shard, f.bytes))
		for u := lo; u < hi; u++ {
			sum := sumOf(u)
			for _, p := range f.islands[f.island] {
				s.ranks[p].out[u] = sum
			}
		}
	case "sum":
		lo, hi := units(f.piece(step.lap))
		for u := lo; u < hi; u++ {
			r.workspace[int(f.partialAt(step.lap)/hierarchicalUnit)+u-lo] = sumOf(u)
		}
	case "combine":
		begin, _ := f.piece(step.lap)
		lo, hi := units(f.owned(f.island, step.lap))
		for u := lo; u < hi; u++ {
			var all string
			for i := range f.islands {
				at := int(f.partialAt(step.lap)/hierarchicalUnit) + u - int(begin/hierarchicalUnit)
				if i != f.island {
					at = int(f.slot(f.island, i, step.lap)/hierarchicalUnit) + u - lo
				}
				all += r.workspace[at]
			}
			r.out[u] = all
			if f.direct {
				for _, p := range f.near() {
					s.ranks[p].out[u] = all
				}
			}
		}
	case "spread":
		lo, hi := units(f.piece(step.lap))
		for _, p := range f.near() {
			copy(s.ranks[p].out[lo:hi], r.out[lo:hi])
		}
	case "signal", "send", "results":
		if len(peers) == 0 {
			break
		}
		var to int
		to, r.sending = sendNext(s.random, r.sending, peers)
		switch peer := s.ranks[to]; step.kind {
		case "send":
			begin, _ := f.piece(step.lap)
			lo, hi := units(f.owned(peer.form.island, step.lap))
			from := int(f.partialAt(step.lap)/hierarchicalUnit) + lo - int(begin/hierarchicalUnit)
			if lo < hi {
				copy(peer.workspace[f.slot(peer.form.island, f.island, step.lap)/hierarchicalUnit:], r.workspace[from:from+hi-lo])
			}
		case "results":
			lo, hi := units(f.owned(f.island, step.lap))
			copy(peer.out[lo:hi], r.out[lo:hi])
		}
		s.ranks[to].came[step.signal][rank]++
	}
	if len(r.sending) > 0 {
		return true, false
	}
	r.queue = r.queue[1:]
	return true, len(r.queue) == 0
}

func (s *hierarchicalSimulation) check(rank, run int) error {
	for u, got := range s.ranks[rank].out {
		if want := s.want(run, u); got != want {
			return fmt.Errorf("run %d of rank %d has %q for unit %d, and %q was expected", run, rank, got, u, want)
		}
	}
	return nil
}

// run lets every rank run the program runs times.
func (s *hierarchicalSimulation) run(runs int) error {
	return simulate(s.random, len(s.ranks), runs, s)
}

// hierarchicalIslands are islands alike and not, in one piece and not.
var hierarchicalIslands = [][][]int{
	{{0}, {1}}, {{0, 1}}, {{0, 1}, {2, 3}}, {{0, 2}, {1, 3}}, {{0}, {1, 2}}, {{0, 1, 4}, {2, 3}}, {{0, 1}, {2, 3}, {4, 5}}, {{0}, {1, 2}, {3, 4}}, {{0, 3}, {1, 4, 5}, {2, 6}, {7, 8}},
}

// TestHierarchicalProgram: whatever order the streams of the ranks run in, nobody waits in a circle, nothing is overwritten that is still wanted, and
// every run gives every rank the sum, those of islands first, in the order of ranks and of islands.
func TestHierarchicalProgram(t *testing.T) {
	const seeds = 3 // each its own way: in place or not, with a lane or without
	for _, islands := range hierarchicalIslands {
		for _, laps := range []int64{1, 2, 5} {
			for _, direct := range []int64{0, 1 << 30} {
				for _, short := range []int64{0, 5*shardAlign + 3} {
					rails := int64(len(islands[0]))
					for _, ranks := range islands {
						rails = min(rails, int64(len(ranks)))
					}
					const lap = 3 * shardAlign
					bytes := max(rails*laps*lap-short, 1)
					for seed := range uint64(seeds) {
						inPlace, lane := seed%2 == 0, seed%3 != 2
						s := newHierarchicalSimulation(seed, islands, bytes, lap, direct, inPlace, lane)
						require.NoErrorf(t, s.run(3), "islands %v, %d bytes, direct %d, seed %d, in place %t, with a lane %t", islands, bytes, direct, seed, inPlace, lane)
					}
				}
			}
		}
	}
}

// TestHierarchicalPieces: the laps of all shards, and what the ranks of a rail own of them, are the message, without gap or overlap; slots and partial
// sums are apart, in the workspace, and at places for every dtype.
func TestHierarchicalPieces(t *testing.T) {
	for _, islands := range hierarchicalIslands {
		for _, bytes := range []int64{1, 127, 128, 129, 16<<10 + 1, 1 << 20, 3<<20 + 6, 1<<26 + 2} {
			for _, wide := range []int64{1, 2} {
				next := int64(0)
				for local := range len(islands[0]) {
					f := hierarchicalForm{bytes: bytes, wide: wide}
					f.place(islands[0][local], islands)
					f.cut(hierarchicalLapBytes, hierarchicalDirectBytes)
					if !f.owns() {
						continue
					}
					for l := range f.laps {
						lo, hi := f.piece(l)
						require.Equal(t, next, lo)
						require.LessOrEqual(t, hi-lo, f.lap)
						for i := range islands {
							from, to := f.owned(i, l)
							require.LessOrEqual(t, to-from, f.part)
							if f.direct {
								require.Equal(t, []int64{lo, hi}, []int64{from, to})
								continue
							}
							require.Equal(t, next, from)
							next = to
						}
						next = hi
					}
					if !f.crosses() {
						continue
					}
					var ends []int64
					for l := range f.slots() {
						ends = append(ends, f.partialAt(l)+f.span())
						for w := range islands {
							if w != f.island {
								ends = append(ends, f.slot(f.island, w, l)+f.slotSpan())
							}
						}
					}
					slices.Sort(ends)
					require.Equal(t, f.workspaceBytes(), ends[len(ends)-1])
					require.Len(t, slices.Compact(ends), f.slots()*len(islands), "two have one place")
					for _, end := range ends {
						require.Zero(t, end%shardAlign)
					}
				}
				require.Equal(t, bytes, next)
			}
		}
	}
}
