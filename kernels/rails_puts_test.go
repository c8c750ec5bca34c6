package kernels

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// railSimulation lets the steps of all ranks run in random orders, as out of order as streams allow, and fails where everybody waits, or somebody reads what has not come or is gone.
// Values say whose bytes they are, of which run.
type railSimulation struct {
	random *rand.Rand
	what   railKind
	passes bool // what is railGather
	lane   bool
	ranks  []*simulatedRail
}

// railKind is what is simulated.
type railKind string

const (
	railSums     railKind = "an all-reduce"
	railGather   railKind = "an all-gather" // in which islands pass on what they have
	railPacks    railKind = "an all-to-all, in packs"
	railStraight railKind = "an all-to-all, straight"
)

// simulatedRail is a rank. It takes the steps of a run.
type simulatedRail struct {
	*railForm
	steps       []railStep
	after       [][]int // by step: those that it comes behind
	done        []bool  // in this run
	left        int
	in, out     []string         // by unit
	rooms       map[int64]string // by place in the workspace
	came, taken []map[int]int    // signals, by number and writer
	met         int              // the barriers of the island that it has come to
	sending     []int            // the peers that the send under way has not put to and told yet
}

// railStep is a step of a run. A kernel that waits for the island is three: it comes, does its work when all have come, and ends when all have done theirs.
type railStep struct {
	kind        string
	signal, lap int
}

func (r *simulatedRail) add(kind string, signal, lap int) {
	r.steps = append(r.steps, railStep{kind, signal, lap})
}

func (r *simulatedRail) onRail(kind string, signal, lap int) {
	if r.owns() {
		r.add(kind, signal, lap)
	}
}

func (r *simulatedRail) enter(lap int) {
	r.add("meet", 0, lap)
	r.add("enter", 0, lap)
	r.add("met", 0, lap)
}
func (r *simulatedRail) leave(lap int) {
	r.add("meet", 0, lap)
	r.add("leave", 0, lap)
	r.add("met", 0, lap)
}
func (r *simulatedRail) combine(lap int)   { r.onRail("combine", 0, lap) }
func (r *simulatedRail) send(lap int)      { r.onRail("send", railData, lap) }
func (r *simulatedRail) come(lap int)      { r.onRail("wait", railData, lap) }
func (r *simulatedRail) finish(lap int)    { r.onRail("finish", railData, lap) }
func (r *simulatedRail) signal(signal int) { r.onRail("signal", signal, 0) }
func (r *simulatedRail) wait(signal int)   { r.onRail("wait", signal, 0) }
func (r *simulatedRail) fork()             { r.add("fork", 0, 0) }
func (r *simulatedRail) join()             { r.add("join", 0, 0) }

// units is the places of the values in some ranges.
func unitsOf(ranges []stretch) (all []int64) {
	for _, x := range ranges {
		for at := x.lo; at < x.hi; at += shardAlign {
			all = append(all, at/shardAlign)
		}
	}
	return all
}

// newRailSimulation is one of a message of so many units, or, of an all-to-all, of blocks of so many.
func newRailSimulation(seed uint64, islands [][]int, units int64, what railKind, inPlace, lane bool) *railSimulation {
	s := &railSimulation{random: rand.New(rand.NewPCG(seed, 7)), what: what, passes: what == railGather, lane: lane}
	size := int64(len(slices.Concat(islands...)))
	block := units * shardAlign
	if s.exchanges() {
		units *= size
	}
	for rank := range int(size) {
		f := &railForm{islandPlace: newIslandPlace(rank, islands, true), own: 1, rooms: len(islands), puts: &railPuts{}}
		switch {
		case s.exchanges():
			f.exchange = &railExchange{block: block, straight: what == railStraight}
			f.exchanges(f.exchange)
		case s.passes:
			for _, ranks := range islands {
				var all []stretch
				for _, r := range ranks {
					lo, hi := shareOf(units, int(size), r)
					all = append(all, stretch{lo * shardAlign, hi * shardAlign})
				}
				f.shards = append(f.shards, cutShares(all, f.rails))
			}
			f.puts.passes = func(lap, island int) []stretch { return f.lapOf(island, f.local, lap) }
			f.cut()
		default:
			f.shards = [][][]stretch{cutEvenly([]stretch{{0, units * shardAlign}}, f.rails)}
			f.cut()
		}
		r := &simulatedRail{railForm: f, in: make([]string, units), rooms: map[int64]string{}}
		if r.out = r.in; !inPlace || s.exchanges() {
			r.out = make([]string, units)
		}
		f.buildByPuts(r)
		r.after = behind(len(r.steps), func(i int) runStream { return s.streamOf(r.steps[i]) })
		for n := range railReady + railSlots {
			r.came, r.taken = append(r.came, map[int]int{}), append(r.taken, map[int]int{})
			for peer := range int(size) {
				if n >= railReady && f.toRooms() {
					r.came[n][peer] = 1
				}
			}
		}
		s.ranks = append(s.ranks, r)
	}
	return s
}

func (s *railSimulation) exchanges() bool { return s.what == railPacks || s.what == railStraight }

// streamOf is where a step is.
func (s *railSimulation) streamOf(step railStep) runStream {
	switch kind := step.kind; {
	case !s.lane:
		return onPlan
	case kind == "fork":
		return forks
	case kind == "join":
		return joins
	case kind == "send" || kind == "wait" || kind == "signal":
		return onLane
	}
	return onPlan
}

// step does a step of a rank that is ready, if there is one.
func (s *railSimulation) step(rank int) (moved, ended bool) {
	r := s.ranks[rank]
	steps := ready(r.after, r.done)
	switch s.random.IntN(3) { // the worst orders are those of one stream as far ahead of the other as it can be
	case 0:
		slices.Reverse(steps)
	case 1:
		s.random.Shuffle(len(steps), func(i, k int) { steps[i], steps[k] = steps[k], steps[i] })
	}
	for _, i := range steps {
		if s.does(rank, r.steps[i]) {
			if kind := r.steps[i].kind; len(r.sending) > 0 && (kind == "send" || kind == "signal") {
				return true, false
			}
			r.done[i] = true
			r.left--
			return true, r.left == 0
		}
	}
	return false, false
}

func (s *railSimulation) begin(rank, run int) {
	r := s.ranks[rank]
	for u := range r.out {
		r.out[u] = fmt.Sprintf("poison %d", run)
	}
	for u := range r.in {
		if s.passes && rank != s.owner(u) {
			continue // not of this rank's share
		}
		r.in[u] = fmt.Sprintf("%d.%d.%d", rank, run, u)
	}
	r.done, r.left = make([]bool, len(r.steps)), len(r.steps)
}

// owner is the rank whose share has a unit.
func (s *railSimulation) owner(u int) int {
	for rank := range s.ranks {
		if lo, hi := shareOf(int64(len(s.ranks[0].in)), len(s.ranks), rank); int64(u) >= lo && int64(u) < hi {
			return rank
		}
	}
	return -1
}

// want is what a run gives a rank for a unit.
func (s *railSimulation) want(rank, run, u int) (all string) {
	switch {
	case s.passes:
		return fmt.Sprintf("%d.%d.%d", s.owner(u), run, u)
	case s.exchanges():
		block := len(s.ranks[0].in) / len(s.ranks)
		return fmt.Sprintf("%d.%d.%d", u/block, run, rank*block+u%block)
	}
	for _, ranks := range s.ranks[0].islands {
		all += "("
		for _, r := range ranks {
			all += fmt.Sprintf("%d.%d.%d ", r, run, u)
		}
		all += ")"
	}
	return all
}

// does does a step of a rank, and reports false if it waits.
func (s *railSimulation) does(rank int, step railStep) bool {
	r := s.ranks[rank]
	island := r.islands[r.island]
	var own []int64 // of an all-reduce
	if s.what == railSums {
		own = unitsOf(r.lapOf(0, r.local, step.lap))
	}
	switch step.kind {
	case "meet":
		r.met++
	case "met", "enter", "leave":
		for _, p := range island {
			if s.ranks[p].met < r.met {
				return false
			}
		}
		switch {
		case s.exchanges():
			if step.kind != "met" {
				s.exchange(r, step)
			}
		case step.kind == "enter" && s.passes:
			for _, u := range unitsOf(r.lapOf(r.island, r.local, step.lap)) {
				r.out[u] = s.ranks[s.owner(int(u))].in[u]
			}
		case step.kind == "enter":
			for k, u := range own {
				sum := "("
				for _, p := range island {
					sum += s.ranks[p].in[u] + " "
				}
				r.rooms[r.roomAt(step.lap, 0)/shardAlign+int64(k)] = sum + ")"
			}
		case step.kind == "leave":
			for place, p := range island {
				for part := range r.shards {
					for _, u := range unitsOf(r.lapOf(part, place, step.lap)) {
						r.out[u] = s.ranks[p].out[u]
					}
				}
			}
		}
		if step.kind != "met" {
			r.met++
		}
	case "wait", "finish":
		for _, p := range r.partners() {
			if r.came[step.signal][p] <= r.taken[step.signal][p] {
				return false
			}
		}
		for _, p := range r.partners() {
			r.taken[step.signal][p]++
		}
	case "combine":
		for k, u := range own {
			r.out[u] = ""
			for i := range r.islands {
				room := 0
				if i != r.island {
					room = r.roomOf(r.island, i)
				}
				r.out[u] += r.rooms[r.roomAt(step.lap, room)/shardAlign+int64(k)]
			}
		}
	case "send", "signal":
		if len(r.partners()) == 0 {
			break
		}
		var to int
		to, r.sending = sendNext(s.random, r.sending, r.partners())
		peer := s.ranks[to]
		switch {
		case step.kind == "send" && s.exchanges():
			s.put(r, peer, step.lap)
		case step.kind == "send" && s.passes:
			for _, u := range unitsOf(r.lapOf(r.island, r.local, step.lap)) {
				peer.out[u] = r.out[u]
			}
		case step.kind == "send":
			for k := range own {
				peer.rooms[r.roomAt(step.lap, r.roomOf(peer.island, r.island))/shardAlign+int64(k)] = r.rooms[r.roomAt(step.lap, 0)/shardAlign+int64(k)]
			}
		}
		peer.came[step.signal][rank]++
	}
	return true
}

// block is the units of a lap of the block at a number of a tensor.
func (r *simulatedRail) block(number, lap int) []int64 {
	return unitsOf([]stretch{r.part(r.exchange, number, lap)})
}

// exchange does the work of a kernel of an all-to-all.
func (s *railSimulation) exchange(r *simulatedRail, step railStep) {
	x, ranks := r.exchange, r.islands[r.island]
	room := func(at int64, place int) int64 { return (at + int64(place)*r.lap) / shardAlign }
	if step.kind == "leave" {
		for _, island := range r.otherIslands() {
			for place, p := range r.islands[island] {
				for k, u := range r.block(p, step.lap) {
					if !x.straight {
						r.out[u] = r.rooms[room(r.slotAt(x, step.lap, island), place)+int64(k)]
					}
				}
			}
		}
		return
	}
	for place, p := range ranks {
		in, mine := s.ranks[p].in, r.block(ranks[r.local], step.lap)
		for k, u := range r.block(p, step.lap) {
			r.out[u] = in[mine[k]]
		}
		for index, t := range r.carriesFor() {
			for k, u := range r.block(t.rank, step.lap) {
				if !x.straight {
					r.rooms[room(r.packAt(step.lap, index), place)+int64(k)] = in[u]
				}
			}
		}
	}
}

// put does one put of a lap of an all-to-all, if there is one.
func (s *railSimulation) put(r, peer *simulatedRail, lap int) {
	x, ranks := r.exchange, r.islands[r.island]
	if x.straight {
		from := r.block(peer.islands[peer.island][peer.local], lap)
		for k, u := range r.block(ranks[r.local], lap) {
			peer.out[u] = r.in[from[k]]
		}
		return
	}
	for index, t := range r.carriesFor() {
		if s.ranks[t.rank] != peer {
			continue
		}
		for at := int64(0); at < int64(len(ranks))*r.lap; at += shardAlign {
			peer.rooms[(r.slotAt(x, lap, r.island)+at)/shardAlign] = r.rooms[(r.packAt(lap, index)+at)/shardAlign]
		}
	}
}

func (s *railSimulation) check(rank, run int) error {
	for u, got := range s.ranks[rank].out {
		if want := s.want(rank, run, u); got != want {
			return fmt.Errorf("run %d of rank %d has %q for unit %d, and %q was expected", run, rank, got, u, want)
		}
	}
	return nil
}

// run lets every rank run the program runs times.
func (s *railSimulation) run(runs int) error { return simulate(s.random, len(s.ranks), runs, s) }

// TestRailPutsProgram: whatever order the streams of the ranks run in, nobody waits in a circle, nothing is overwritten that is still wanted, and every run of an all-reduce, of an all-gather and of
// an all-to-all gives every rank what it states, those of islands first, in the order of ranks and of islands.
func TestRailPutsProgram(t *testing.T) {
	lap, rooms := railLapBytes, railExchangeBytes
	t.Cleanup(func() { railLapBytes, railExchangeBytes = lap, rooms })
	railLapBytes, railExchangeBytes = 2*shardAlign, 24*shardAlign
	for _, islands := range hierarchicalIslands {
		if len(islands) == 1 {
			continue // no rails
		}
		for _, units := range []int64{1, 7, 40} {
			for _, what := range []railKind{railSums, railGather, railPacks, railStraight} {
				for seed := range uint64(12) {
					inPlace, lane := seed%2 == 0, seed%3 != 2
					s := newRailSimulation(seed, islands, units, what, inPlace, lane)
					require.NoErrorf(t, s.run(3), "islands %v, %d units, %s, seed %d, in place %t, with a lane %t", islands, units, what, seed, inPlace, lane)
				}
			}
		}
	}
}
