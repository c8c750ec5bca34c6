package kernels

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/device"
)

// simulation is ranks that run the programs of a form as slowly and as much out of order as the programs allow: each rank has one
// queue, into which the steps of its streams are put in some order that keeps what forks, joins and streams demand.
type simulation struct {
	random  *rand.Rand
	ranks   []*simulatedRank
	inPlace bool
	lane    bool
	want    [][]int // by run: the result
}

// transferStep is one step of a run, as a rank of the simulation does it.
type transferStep struct {
	kind   transferKind
	lap    int // stepSend, stepReduce
	signal int
}

type transferKind uint8

const (
	stepSend transferKind = iota + 1
	stepWait
	stepFinish
	stepGrant
	stepReduce
	stepFork
	stepJoin
	stepPut      // as stepSend, without signals
	stepAnnounce // as stepGrant, on the plan's stream
)

// recorded is the steps that a form adds.
type recorded []transferStep

func (r *recorded) add(s transferStep) { *r = append(*r, s) }
func (r *recorded) send(signal, lap int) {
	r.add(transferStep{kind: stepSend, signal: signal, lap: lap})
}
func (r *recorded) wait(signal int)   { r.add(transferStep{kind: stepWait, signal: signal}) }
func (r *recorded) finish(signal int) { r.add(transferStep{kind: stepFinish, signal: signal}) }
func (r *recorded) grant(signal int)  { r.add(transferStep{kind: stepGrant, signal: signal}) }
func (r *recorded) reduce(lap int)    { r.add(transferStep{kind: stepReduce, lap: lap}) }
func (r *recorded) fork()             { r.add(transferStep{kind: stepFork}) }
func (r *recorded) join()             { r.add(transferStep{kind: stepJoin}) }
func (r *recorded) put(lap int)       { r.add(transferStep{kind: stepPut, signal: signalData, lap: lap}) }
func (r *recorded) announce(signal int) {
	r.add(transferStep{kind: stepAnnounce, signal: signal})
}

type simulatedRank struct {
	form    transferForm
	steps   []transferStep
	in, out []int          // by byte
	slots   []int          // the workspace, by byte
	signals [][]int        // by number and writer: that came
	taken   []int          // by number: that were waited for
	queue   []transferStep // of this run, in the order in which it goes
	sending []int          // the peers that the step under way has not put to and told yet
}

func newSimulation(seed uint64, form transferForm, inPlace, lane bool) *simulation {
	s := &simulation{random: rand.New(rand.NewPCG(seed, 1)), inPlace: inPlace, lane: lane}
	for rank := range form.size {
		f := form
		f.rank = rank
		var steps recorded
		f.build(&steps)
		r := &simulatedRank{form: f, steps: steps, in: make([]int, f.bytes), slots: make([]int, f.workspaceBytes()), taken: make([]int, transferSignals)}
		for i := range r.in {
			r.in[i] = (i*7 + rank*13) % 101
		}
		if r.out = r.in; !inPlace {
			r.out = make([]int, f.bytes)
		}
		r.signals = [][]int{make([]int, f.size), make([]int, f.size)}
		if f.small {
			for w := range f.size {
				r.signals[signalResults][w] = 1
			}
		}
		s.ranks = append(s.ranks, r)
	}
	return s
}

// serialize puts the steps of a run into one queue, as out of order as streams allow.
func serialize(random *rand.Rand, steps []transferStep, lane bool) (all []transferStep) {
	if !lane {
		return slices.Clone(steps)
	}
	after := behind(len(steps), func(i int) runStream {
		switch steps[i].kind {
		case stepReduce, stepFinish, stepAnnounce:
			return onPlan
		case stepFork:
			return forks
		case stepJoin:
			return joins
		}
		return onLane
	})
	for _, i := range queue(random, after) {
		all = append(all, steps[i])
	}
	return all
}

func (s *simulation) begin(rank, _ int) {
	r := s.ranks[rank]
	r.queue = serialize(s.random, r.steps, s.lane)
}

// step does the next step of a rank.
func (s *simulation) step(rank int) (moved, ended bool) {
	r := s.ranks[rank]
	f := r.form
	step := r.queue[0]
	switch step.kind {
	case stepWait, stepFinish:
		for w := range f.size {
			if w != rank && r.signals[step.signal][w] <= r.taken[step.signal] {
				return false, false
			}
		}
		r.taken[step.signal]++
	case stepReduce:
		lo, hi := f.piece(rank, step.lap)
		for i := lo; i < hi; i++ {
			sum := r.in[i]
			for w := range f.size {
				if w != rank {
					sum += r.slots[f.slot(rank, w, step.lap)+i-lo]
				}
			}
			r.out[i] = sum
		}
	case stepSend, stepPut, stepGrant, stepAnnounce:
		var to int
		to, r.sending = sendNext(s.random, r.sending, peersOf(rank, f.size))
		switch peer := s.ranks[to]; {
		case step.kind == stepGrant || step.kind == stepAnnounce:
		case step.signal == signalResults:
			lo, hi := f.piece(rank, step.lap)
			copy(peer.out[lo:hi], r.out[lo:hi])
		default:
			lo, hi := f.piece(to, step.lap)
			copy(peer.slots[f.slot(to, rank, step.lap):], r.in[lo:hi])
		}
		if step.kind != stepPut {
			s.ranks[to].signals[step.signal][rank]++
		}
	}
	if len(r.sending) > 0 {
		return true, false
	}
	r.queue = r.queue[1:]
	return true, len(r.queue) == 0
}

func (s *simulation) check(rank, run int) error {
	if got := s.ranks[rank].out; !slices.Equal(s.want[run], got) {
		return fmt.Errorf("run %d of rank %d has %v, and %v was expected", run, rank, got, s.want[run])
	}
	return nil
}

// run lets every rank run the program runs times, in a random order, and looks at every result.
func (s *simulation) run(runs int) error {
	size := len(s.ranks)
	s.want = make([][]int, runs)
	for n := range runs {
		s.want[n] = make([]int, len(s.ranks[0].in))
		for i := range s.want[n] {
			for rank := range size {
				if n == 0 || !s.inPlace {
					s.want[n][i] += (i*7 + rank*13) % 101
				} else {
					s.want[n][i] += s.want[n-1][i]
				}
			}
		}
	}
	return simulate(s.random, size, runs, s)
}

// formOf is a form that cuts a message into so many laps.
func formOf(size int, bytes int64, laps int) transferForm {
	f := transferForm{size: size, bytes: bytes, lead: 4, laps: laps}
	f.shard = alignUp((bytes+int64(size)-1)/int64(size), shardAlign)
	f.lap = alignUp((f.shard+int64(laps)-1)/int64(laps), shardAlign)
	f.laps = int((f.shard + f.lap - 1) / f.lap)
	return f
}

// TestTransferProgram: whatever order the streams of the ranks run in, nobody waits in a circle, nothing is overwritten that is
// still wanted, and every run on every rank gives the sum.
func TestTransferProgram(t *testing.T) {
	seeds := uint64(5)
	if testing.Short() {
		seeds = 1
	}
	for size := 2; size <= 5; size++ {
		var forms []transferForm
		for _, laps := range []int{1, 2, 3, 4, 5, 6, 9} {
			// The last shards are shorter, or empty.
			forms = append(forms, formOf(size, int64(size*laps*shardAlign), laps), formOf(size, int64((size*laps-1)*shardAlign-5), laps), formOf(size, int64(laps*shardAlign+1), laps))
		}
		for _, f := range forms {
			f.near = true
			forms = append(forms, f)
		}
		forms = append(forms, transferForm{size: size, bytes: 333, small: true, shard: 333, lap: 333, laps: 1, lead: 2})
		for _, f := range forms {
			for _, lane := range []bool{false, true} {
				if lane && f.small {
					continue // it has none
				}
				for _, inPlace := range []bool{false, true} {
					t.Run(fmt.Sprintf("size=%d/laps=%d/bytes=%d/near=%t/lane=%t/in_place=%t", size, f.laps, f.bytes, f.near, lane, inPlace), func(t *testing.T) {
						for seed := range seeds {
							require.NoErrorf(t, newSimulation(seed, f, inPlace, lane).run(3), "seed %d", seed)
						}
					})
				}
			}
		}
	}
}

// TestTransferPieces: the laps of all shards are the message, without gap or overlap, and slots are apart, in the workspace, and
// placed as the input is.
func TestTransferPieces(t *testing.T) {
	for size := 2; size <= 9; size++ {
		for _, kind := range []device.Kind{device.Host, device.CUDA} {
			for _, bytes := range []int64{1, 127, 128, 129, 16<<10 + 1, 1 << 20, 3<<20 + 6, 1<<30 + 2} {
				f := transferForm{size: size, bytes: bytes, lead: 6}
				f.small, f.lap = transferGeometry(kind, bytes%2 == 0, bytes, size)
				if f.shard, f.laps = bytes, 1; !f.small {
					f = formOf(size, bytes, int((alignUp((bytes+int64(size)-1)/int64(size), shardAlign)+f.lap-1)/f.lap))
					f.lead = 6
					next := int64(0)
					for owner := range size {
						for l := range f.laps {
							lo, hi := f.piece(owner, l)
							require.Equal(t, next, lo)
							require.LessOrEqual(t, hi-lo, f.lap)
							next = hi
						}
					}
					require.Equal(t, bytes, next)
				}
				ends := map[int64]bool{}
				for owner := range size {
					clear(ends)
					for l := range f.slots() {
						for w := range size {
							if w == owner {
								continue
							}
							at := f.slot(owner, w, l)
							require.Equal(t, f.lead, at%16)
							require.GreaterOrEqual(t, at, int64(0))
							require.LessOrEqual(t, at+f.lap, f.workspaceBytes())
							require.False(t, ends[(at-f.lead)/f.span()], "two writers have one slot")
							ends[(at-f.lead)/f.span()] = true
						}
					}
				}
			}
		}
	}
}
