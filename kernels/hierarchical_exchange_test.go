package kernels

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// exchangeRank is a rank of exchangeSimulation.
type exchangeRank struct {
	form        *islandExchange
	steps       []func() bool // false where it waits
	in, out     []string      // by block
	workspace   []string
	came, taken [exchangeSignals]map[int]int // by writer
	next        int
	sending     []int // the peers that the send under way has not put to and told yet
}

func (r *exchangeRank) add(f func() bool) { r.steps = append(r.steps, f) }

// exchangeSimulation lets the ranks take their steps in random orders, and fails where somebody waits in a circle, reads what has not come, or finds the wrong result. A value says whose block it is, for
// whom, and of which run.
type exchangeSimulation struct {
	random *rand.Rand
	ranks  []*exchangeRank
}

// exchangeRecorder makes the steps those of a rank of the simulation.
type exchangeRecorder struct {
	*exchangeSimulation
	*exchangeRank
	rank int
}

func (r exchangeRecorder) peers(signal int) []int {
	f := r.form
	return [][]int{f.near(), append(f.near(), f.links()...), f.links()}[signal]
}

// tell adds a step for each peer of a signal, whom it tells when it has put to it. They may go in any order.
func (r exchangeRecorder) tell(signal int, put func(to int)) {
	for range r.peers(signal) {
		r.add(func() bool {
			var to int
			to, r.sending = sendNext(r.random, r.sending, r.peers(signal))
			put(to)
			r.ranks[to].came[signal][r.rank]++
			return true
		})
	}
}

func (r exchangeRecorder) signal(signal int) { r.tell(signal, func(int) {}) }

func (r exchangeRecorder) wait(signal int) {
	r.add(func() bool {
		for _, p := range r.peers(signal) {
			if r.came[signal][p] <= r.taken[signal][p] {
				return false
			}
		}
		for _, p := range r.peers(signal) {
			r.taken[signal][p]++
		}
		return true
	})
}

func (r exchangeRecorder) finish(signal int) { r.wait(signal) }

func (r exchangeRecorder) pack() {
	r.add(func() bool {
		f := r.form
		for k, t := range f.carriesFor() {
			for i, from := range f.islands[f.island] {
				r.workspace[f.packAt(k)+int64(i)] = r.ranks[from].in[t.rank]
			}
		}
		r.out[r.rank] = r.in[r.rank]
		return true
	})
}

func (r exchangeRecorder) send() {
	r.tell(exchangeData, func(to int) {
		f := r.form
		for k, t := range f.carriesFor() {
			if t.rank == to {
				copy(r.ranks[to].workspace[f.slotAt(f.island):], r.workspace[f.packAt(k):][:len(f.islands[f.island])])
			}
		}
		if slices.Contains(f.near(), to) {
			r.ranks[to].out[r.rank] = r.in[to]
		}
	})
}

func (r exchangeRecorder) unpack() {
	r.add(func() bool {
		f := r.form
		for _, island := range f.otherIslands() {
			for i, from := range f.islands[island] {
				r.out[from] = r.workspace[f.slotAt(island)+int64(i)]
			}
		}
		return true
	})
}

func newExchangeSimulation(seed uint64, islands [][]int) *exchangeSimulation {
	s := &exchangeSimulation{random: rand.New(rand.NewPCG(seed, 11))}
	size := 0
	for _, ranks := range islands {
		size += len(ranks)
	}
	for rank := range size {
		f := newIslandExchange(nil, rank, islands, 1)
		r := &exchangeRank{form: f, in: make([]string, size), out: make([]string, size), workspace: make([]string, f.workspaceBytes())}
		for n := range r.came {
			r.came[n], r.taken[n] = map[int]int{}, map[int]int{}
		}
		for _, p := range f.links() {
			r.came[exchangeRoom][p] = 1
		}
		s.ranks = append(s.ranks, r)
		f.build(exchangeRecorder{s, r, rank})
	}
	return s
}

func (s *exchangeSimulation) begin(rank, run int) {
	r := s.ranks[rank]
	r.next = 0
	for to := range r.in {
		r.in[to], r.out[to] = fmt.Sprintf("%d for %d in run %d", rank, to, run), "poison"
	}
}

func (s *exchangeSimulation) step(rank int) (moved, ended bool) {
	r := s.ranks[rank]
	if !r.steps[r.next]() {
		return false, false
	}
	r.next++
	return true, r.next == len(r.steps)
}

func (s *exchangeSimulation) check(rank, run int) error {
	for from, got := range s.ranks[rank].out {
		if want := fmt.Sprintf("%d for %d in run %d", from, rank, run); got != want {
			return fmt.Errorf("run %d of rank %d has %q, and %q was expected", run, rank, got, want)
		}
	}
	return nil
}

// run lets every rank run the program runs times.
func (s *exchangeSimulation) run(runs int) error { return simulate(s.random, len(s.ranks), runs, s) }

// TestIslandExchangeProgram: whatever rank runs ahead of others, nobody waits in a circle, nothing is overwritten that is still wanted, and every run gives every rank the blocks of that run.
func TestIslandExchangeProgram(t *testing.T) {
	for _, islands := range hierarchicalIslands {
		if len(islands) == 1 {
			continue
		}
		for seed := range uint64(40) {
			require.NoErrorf(t, newExchangeSimulation(seed, islands).run(4), "islands %v, seed %d", islands, seed)
		}
	}
}

// TestIslandExchangePlaces: packs and slots are apart, and fill the workspace but for what other ranks need more; every rank's blocks come to each other island by one rank there.
func TestIslandExchangePlaces(t *testing.T) {
	for _, islands := range append([][][]int{{{0}, {1, 2, 3, 4, 5, 6, 7, 8}}}, hierarchicalIslands...) {
		if len(islands) == 1 {
			continue
		}
		const block = 24
		size := 0
		for _, ranks := range islands {
			size += len(ranks)
		}
		came := make([]map[int]int, size) // by receiver, packs by island
		for rank := range size {
			came[rank] = map[int]int{}
		}
		workspace := newIslandExchange(nil, 0, islands, block).workspaceBytes()
		require.LessOrEqual(t, workspace, int64(3*size*block), "about twice a message")
		for rank := range size {
			f := newIslandExchange(nil, rank, islands, block)
			require.Equal(t, workspace, f.workspaceBytes(), "alike on every rank")
			var at []int64
			for k, target := range f.carriesFor() {
				came[target.rank][f.island]++
				require.Contains(t, f.links(), target.rank)
				for i := range f.islands[f.island] {
					at = append(at, f.packAt(k)+int64(i)*block)
				}
			}
			for island, ranks := range islands {
				for i := range ranks {
					at = append(at, f.slotAt(island)+int64(i)*block)
				}
			}
			slices.Sort(at)
			for i := range at[1:] {
				require.GreaterOrEqual(t, at[i+1]-at[i], int64(block), "two have one place")
			}
			require.Equal(t, workspace, at[len(at)-1]+block)
		}
		for rank, packs := range came {
			require.Len(t, packs, len(islands)-1, "rank %d", rank)
			for _, n := range packs {
				require.Equal(t, 1, n)
			}
		}
	}
}
