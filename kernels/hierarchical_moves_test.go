package kernels

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// moverSimulation lets the steps of all ranks run in random orders, as out of order as streams allow, and fails where everybody waits, or somebody passes on what has not come. A value says whose unit it
// is, of which run.
type moverSimulation struct {
	random *rand.Rand
	lane   bool
	ranks  []*moverRank
}

// moverRank is a rank. It takes the steps of a run.
type moverRank struct {
	*islandMovement
	rank        int
	steps       []moverStep
	after       [][]int // by step: those that it comes behind
	done        []bool  // in this run
	out         []string
	came, taken []map[int]int // signals, by number and writer
	sending     []int         // the peers that the send under way has not put to and told yet
}

type moverStep struct {
	kind        string
	signal, lap int
}

func (r *moverRank) add(kind string, signal, lap int) {
	r.steps = append(r.steps, moverStep{kind, signal, lap})
}

func (r *moverRank) load(lap int)      { r.add("load", 0, lap) }
func (r *moverRank) spread(lap int)    { r.add("spread", 0, lap) }
func (r *moverRank) send(lap int)      { r.add("send", islandData, lap) }
func (r *moverRank) pass(lap int)      { r.add("pass", islandRelayed, lap) }
func (r *moverRank) signal(signal int) { r.add("signal", signal, 0) }
func (r *moverRank) wait(signal int)   { r.add("wait", signal, 0) }
func (r *moverRank) finish(signal int) { r.add("finish", signal, 0) }
func (r *moverRank) fork()             { r.add("fork", 0, 0) }
func (r *moverRank) join()             { r.add("join", 0, 0) }

// peers is whom a rank exchanges a signal with.
func (r *moverRank) peers(signal int) []int {
	switch signal {
	case islandReady:
		return append(r.near(), r.links()...)
	case islandDone, islandLap:
		return r.near()
	}
	return r.links()
}

// newMoverSimulation is one of a message of so many units, in place: a broadcast from root, or, if that is below 0, an all-gather.
func newMoverSimulation(seed uint64, islands [][]int, units int64, root int, relay, lane bool) *moverSimulation {
	s := &moverSimulation{random: rand.New(rand.NewPCG(seed, 5)), lane: lane}
	size := len(slices.Concat(islands...))
	for rank := range size {
		f := &islandMovement{root: root, islandPlace: newIslandPlace(rank, islands, root >= 0), relay: relay}
		if root < 0 {
			f.share = func(rank int) (lo, hi int64) {
				lo, hi = shareOf(units, size, rank)
				return lo * shardAlign, hi * shardAlign
			}
			f.cut(shareElements(units, size)*shardAlign, 2*shardAlign)
		} else {
			shard := shareElements(units, f.rails) * shardAlign
			first := islands[newIslandPlace(root, islands, true).island]
			f.share = func(rank int) (lo, hi int64) {
				place := slices.Index(first, rank)
				if place < 0 || place >= f.rails {
					return 0, 0
				}
				lo = min(int64(place)*shard, units*shardAlign)
				return lo, min(lo+shard, units*shardAlign)
			}
			f.cut(shard, 2*shardAlign)
		}
		r := &moverRank{islandMovement: f, rank: rank, out: make([]string, units)}
		f.build(r)
		r.after = behind(len(r.steps), func(i int) runStream { return s.streamOf(r.steps[i].kind) })
		for range islandRelayed + 1 {
			r.came, r.taken = append(r.came, map[int]int{}), append(r.taken, map[int]int{})
		}
		s.ranks = append(s.ranks, r)
	}
	return s
}

func (s *moverSimulation) streamOf(kind string) runStream {
	switch {
	case !s.lane:
		return onPlan
	case kind == "fork":
		return forks
	case kind == "join":
		return joins
	case kind == "load" || kind == "spread" || kind == "finish":
		return onPlan
	}
	return onLane
}

// owner is whose value a unit has behind a run.
func (s *moverSimulation) owner(u int) int {
	if root := s.ranks[0].root; root >= 0 {
		return root
	}
	return slices.IndexFunc(s.ranks, func(r *moverRank) bool {
		lo, hi := r.share(r.rank)
		return int64(u)*shardAlign >= lo && int64(u)*shardAlign < hi
	})
}

func (s *moverSimulation) begin(rank, run int) {
	r := s.ranks[rank]
	for u := range r.out {
		if r.out[u] = fmt.Sprintf("poison %d", run); s.owner(u) == rank {
			r.out[u] = fmt.Sprintf("%d.%d.%d", rank, run, u)
		}
	}
	r.done = make([]bool, len(r.steps))
}

// step does a step of a rank that is ready, if there is one.
func (s *moverSimulation) step(rank int) (moved, ended bool) {
	r := s.ranks[rank]
	steps := ready(r.after, r.done)
	s.random.Shuffle(len(steps), func(i, k int) { steps[i], steps[k] = steps[k], steps[i] })
	for _, i := range steps {
		if !s.does(r, r.steps[i]) {
			continue
		}
		if kind := r.steps[i].kind; len(r.sending) == 0 || kind != "send" && kind != "pass" && kind != "signal" {
			r.done[i] = true
		}
		return true, !slices.Contains(r.done, false)
	}
	return false, false
}

// copies copies what is between two bytes.
func copies(to, from *moverRank, lo, hi int64) {
	copy(to.out[lo/shardAlign:hi/shardAlign], from.out[lo/shardAlign:hi/shardAlign])
}

// does does a step of a rank, or a part of it, and reports false if it waits.
func (s *moverSimulation) does(r *moverRank, step moverStep) bool {
	peers := r.peers(step.signal)
	switch step.kind {
	case "wait", "finish":
		for _, p := range peers {
			if r.came[step.signal][p] <= r.taken[step.signal][p] {
				return false
			}
		}
		for _, p := range peers {
			r.taken[step.signal][p]++
		}
	case "load":
		from := r
		if r.root >= 0 {
			from = s.ranks[r.root]
		}
		lo, hi := r.brought(r.rank, step.lap)
		for _, p := range append(r.near(), r.rank) {
			copies(s.ranks[p], from, lo, hi)
		}
	case "spread":
		for _, i := range r.otherIslands() {
			for _, from := range r.carried(i) {
				lo, hi := r.brought(from, step.lap)
				for _, p := range r.near() {
					copies(s.ranks[p], r, lo, hi)
				}
			}
		}
	case "send", "pass", "signal":
		if len(peers) == 0 {
			break
		}
		var to int
		to, r.sending = sendNext(s.random, r.sending, peers)
		peer := s.ranks[to]
		switch {
		case step.kind == "send" && r.owns() && r.carrier(peer.island) == to:
			lo, hi := r.part(r.rank, r.island, peer.island, step.lap)
			copies(peer, r, lo, hi)
		case step.kind == "pass":
			for _, i := range r.otherIslands() {
				for _, from := range r.carried(i) {
					if lo, hi := r.part(from, i, r.island, step.lap); i != peer.island && r.carrier(peer.island) == to {
						copies(peer, r, lo, hi)
					}
				}
			}
		}
		peer.came[step.signal][r.rank]++
	}
	return true
}

func (s *moverSimulation) check(rank, run int) error {
	for u, got := range s.ranks[rank].out {
		if want := fmt.Sprintf("%d.%d.%d", s.owner(u), run, u); got != want {
			return fmt.Errorf("run %d of rank %d has %q for unit %d, and %q was expected", run, rank, got, u, want)
		}
	}
	return nil
}

// TestIslandMoverProgram: whatever order the streams of the ranks run in, nobody waits in a circle, nothing is passed on that has not come, nor overwritten that is still wanted, and every run of an
// all-gather, and of a broadcast from any rank, in parts or whole, gives every rank what it states.
func TestIslandMoverProgram(t *testing.T) {
	for _, islands := range hierarchicalIslands {
		size := len(slices.Concat(islands...))
		for _, units := range []int64{1, 5, 23} {
			for root := -1; root < size; root++ {
				for seed := range uint64(6) {
					relay, lane := seed%2 == 0 && len(islands) > 2 && root >= 0, seed%3 != 2
					s := newMoverSimulation(seed, islands, units, root, relay, lane)
					require.NoErrorf(t, simulate(s.random, size, 3, s), "islands %v, %d units, root %d, seed %d, in parts %t, with a lane %t", islands, units, root, seed, relay, lane)
				}
			}
		}
	}
}
