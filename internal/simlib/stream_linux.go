package simlib

import (
	"fmt"
	"maps"
	"slices"
	"sync"

	"github.com/symmem/symmem/device"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/simcuda"
)

// work are the collectives of some ranks on their streams. The n-th that a rank enqueues is that of the others with the same number, and the k-th
// run of the n-th that it records as well.
type work struct {
	machine *simcuda.Machine

	mu      sync.Mutex
	made    [][2]int // by rank: how many were enqueued, and recorded
	freed   []bool   // by rank: the last that was enqueued is a barrier
	open    map[run]*collective
	aborted []bool // by rank

	called map[side]int // how many messages
	mail   map[letter]*envelope
}

// run names a run of a collective.
type run struct {
	recorded bool
	number   int
	run      int
}

// collective is a run that not all ranks have ended.
type collective struct {
	what  string
	ins   [][]byte
	came  int
	ended int
	out   []byte // what is combined of all, once it is
}

func newWork(m *simcuda.Machine, ranks int) *work {
	return &work{machine: m, made: make([][2]int, ranks), freed: make([]bool, ranks), open: map[run]*collective{}, aborted: make([]bool, ranks),
		called: map[side]int{}, mail: map[letter]*envelope{}}
}

// call is one rank's part of a collective.
type call struct {
	what   string // the same on all ranks
	rank   int
	send   device.Ptr
	bytes  int64 // that the rank sends; 0: it only waits for the others
	recv   device.Ptr
	joint  func(ins [][]byte) []byte             // what is made of what all bring, once for all ranks
	result func(ins [][]byte, all []byte) []byte // what the rank receives; nil if nothing
}

// abort ends all runs of a rank, and those that come. Those of the others wait for what it has not brought until they abort, too: of NCCL's kernels each looks at the
// abort flag of its own communicator (comm.h), and each rank has to abort its own.
func (w *work) abort(rank int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.aborted[rank] = true
	maps.DeleteFunc(w.mail, func(name letter, e *envelope) bool { return name.from == rank && !e.taken }) // what was on its way is lost
}

// free notes whether what a rank enqueues next is a barrier, and says whether the last was one.
func (w *work) free(rank int, barrier bool) (was bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	was, w.freed[rank] = w.freed[rank], barrier
	return was
}

// enqueue puts a rank's part on a stream.
func (w *work) enqueue(stream uintptr, c call) cu.Result {
	return w.machine.EnqueueLibrary(cu.StreamHandle(stream), func(recorded bool) func() simcuda.Step {
		w.mu.Lock()
		defer w.mu.Unlock()
		kind := 0
		if recorded {
			kind = 1
		}
		name := run{recorded: recorded, number: w.made[c.rank][kind]}
		w.made[c.rank][kind]++
		return func() simcuda.Step {
			mine := name
			w.mu.Lock()
			name.run++
			w.mu.Unlock()
			came := false
			return func(a *simcuda.Access) (done, moved bool, err error) {
				w.mu.Lock()
				defer w.mu.Unlock()
				done, err = w.step(a, &c, mine, !came)
				moved = !came || done
				came = true
				return done, moved, err
			}
		}
	})
}

// step does what a rank can do of a run. mu is held.
func (w *work) step(a *simcuda.Access, c *call, name run, first bool) (done bool, err error) {
	if w.aborted[c.rank] {
		return true, nil
	}
	x := w.open[name]
	if x == nil {
		x = &collective{what: c.what, ins: make([][]byte, len(w.made))}
		w.open[name] = x
	}
	if first {
		if x.what != c.what {
			w.machine.Violation("rank %d runs %s, and others %s", c.rank, c.what, x.what)
			return true, fmt.Errorf("%s among %s", c.what, x.what)
		}
		if c.bytes > 0 {
			pieces, err := a.Bytes(c.send, c.bytes)
			if err != nil {
				return true, err
			}
			x.ins[c.rank] = slices.Concat(pieces...)
		}
		x.came++
	}
	if x.came < len(w.made) {
		return false, nil
	}
	if x.out == nil && c.joint != nil {
		x.out = c.joint(x.ins)
	}
	if out := c.result(x.ins, x.out); len(out) > 0 {
		to, err := a.Bytes(c.recv, int64(len(out)))
		if err != nil {
			return true, err
		}
		for _, b := range to {
			out = out[copy(b, out):]
		}
	}
	if x.ended++; x.ended == len(w.made) {
		delete(w.open, name)
	}
	return true, nil
}
