package collective

import (
	"context"
	"fmt"
	"runtime/debug"
	"sync/atomic"
	"time"

	"golang.org/x/sys/cpu"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/futex"
	"github.com/symmem/symmem/memory"
)

// HostKernel is one rank's part of one run on the host device. It runs on a goroutine of the stream, and waits for its peers by r only. An
// error makes the plan fail; it is the stream's.
type HostKernel func(r *HostRun) error

// HostRun is what the kernel of a plan for the host device knows of its run and of the other ranks, as symmem::Ranks is for CUDA.
// It belongs to the kernel that it was given to.
type HostRun struct {
	name     string
	rank     int
	peers    []int // all others, the next one first
	epoch    uint32
	timeout  time.Duration
	peerErr  func() error // what ends a wait early
	patience *futex.Patience
	looks    int

	mine   [Flags][]*futex.Word // by writer: flags that the peers set here
	seen   [Flags][]uint32      // by writer: what they were when this rank looked last
	theirs [Flags][]*futex.Word // by owner: flags that this rank sets there
}

// Flags is how many flags each rank has for each other, of a kernel on the host device, and of each block of a CUDA kernel.
const Flags = 3

// A wait looks at a flag so often before it reads the clock for its bound, which takes as long as the flag of a peer that is there takes to come:
// for some hundred nanoseconds where each rank should have a processor of its own, and else not as long.
const (
	fewLooks  = 100
	manyLooks = 500
)

// flagStride is the distance in bytes between two flags: each has one writer, and two cache lines keep the writers apart on
// processors that fetch lines in pairs.
const flagStride = 128

// hostForm is a plan as a kernel of the host. Its workspace begins with
//
//	flags    [flag][writer] one futex.Word each, flagStride apart
type hostForm struct{ plan *Plan }

func (f hostForm) describe() string       { return "on the host" }
func (f hostForm) offer() ([]byte, error) { return nil, nil }
func (f hostForm) launch() string         { return "" }

func (f hostForm) settle([]memory.WorkspaceOffer) (int64, error) {
	return f.dataAt() + max(f.plan.spec.Workspace, 1), nil
}

func (f hostForm) dataAt() int64 { return f.flag(Flags, 0) }

func (f hostForm) flag(flag, writer int) int64 { return int64(flag*f.plan.size+writer) * flagStride }

// hostWork is a plan's work on the host device.
type hostWork struct {
	plan   *Plan
	kernel HostKernel

	// A plan that is in no graph runs on one stream at a time. Only from its first recording on is each run marked as long as it is under way.
	recorded atomic.Bool
	unmarked uint64 // what enqueued was at that time; written before recorded

	_ cpu.CacheLinePad // the stream only looks at what is above

	enqueued uint64 // runs, those of graphs not counted; guarded by the plan's mu

	_ cpu.CacheLinePad // what the stream writes is apart from what is written by who enqueues

	// state is 2 for each of those runs that has ended, and 1 while a run is marked.
	state atomic.Uint64
	run   HostRun

	_ cpu.CacheLinePad
}

func (f hostForm) prepare(_ context.Context, a *Addresses) (work, error) {
	p := f.plan
	w := &hostWork{plan: p, run: HostRun{
		name: p.name, rank: p.rank, epoch: p.spec.FirstEpoch, timeout: p.memory.KernelTimeout(), peerErr: p.memory.Group().Err, looks: fewLooks,
	}}
	if !p.memory.Oversubscribed() {
		w.run.patience, w.run.looks = &futex.Patience{}, manyLooks
	}
	for i := 1; i < p.size; i++ {
		w.run.peers = append(w.run.peers, (p.rank+i)%p.size)
	}
	for r := range p.size {
		flags := a.Bytes(a.base(r), f.dataAt())
		if a.err != nil {
			return nil, a.err
		}
		for flag := range Flags {
			theirs, err := futex.At(flags[f.flag(flag, p.rank):])
			if err != nil {
				return nil, err
			}
			w.run.theirs[flag] = append(w.run.theirs[flag], theirs)
			if r != p.rank {
				continue
			}
			for writer := range p.size {
				mine, err := futex.At(flags[f.flag(flag, writer):])
				if err != nil {
					return nil, err
				}
				mine.Store(p.spec.FirstEpoch)
				w.run.mine[flag] = append(w.run.mine[flag], mine)
				w.run.seen[flag] = append(w.run.seen[flag], p.spec.FirstEpoch)
			}
		}
	}
	var err error
	if w.kernel, err = p.spec.Host(a); err != nil {
		return nil, err
	}
	if w.kernel == nil {
		return nil, errs.Invalid("New", "Host", "a function that returned no kernel", "a kernel or an error")
	}
	return w, nil
}

// Rank is this rank.
func (r *HostRun) Rank() int { return r.rank }

// WorldSize is the number of ranks.
func (r *HostRun) WorldSize() int { return len(r.theirs[0]) }

// Epoch is the number of this run: one more than that of the last, modulo 2^32, and the same on every rank.
func (r *HostRun) Epoch() uint32 { return r.epoch }

// Signal sets this rank's flag, from 0 to Flags-1, at another rank, to value. All that this rank wrote before is visible to who has waited for
// it. Values of a flag only grow, modulo 2^32; a new plan's flags are 0, or Spec.FirstEpoch. It panics, with an ErrInvalid that is the run's error
// then, for a flag or a rank that does not exist.
func (r *HostRun) Signal(rank, flag int, value uint32) {
	if !r.has(rank, flag) {
		panic(r.refused("Signal", rank, flag))
	}
	r.theirs[flag][rank].Store(value)
}

// has reports whether there are such a rank and flag.
func (r *HostRun) has(rank, flag int) bool {
	return uint(flag) < Flags && uint(rank) < uint(len(r.theirs[0]))
}

// refused says which of the two there is not.
func (r *HostRun) refused(call string, rank, flag int) error {
	if uint(flag) >= Flags {
		return errs.Invalid(call, "flag", flag, fmt.Sprintf("0 to %d", Flags-1))
	}
	return errs.Invalid(call, "rank", rank, fmt.Sprintf("0 to %d", len(r.theirs[0])-1))
}

// Wait waits until rank has set its flag at this rank to value or a later one. It is bounded as every wait of device work is; its error is a
// [*device.WaitError], or ErrInvalid for a flag or a rank that does not exist.
func (r *HostRun) Wait(rank, flag int, value uint32) error {
	if !r.has(rank, flag) {
		return r.refused("Wait", rank, flag)
	}
	// A peer that is ahead has said so once for several runs, and each look at a flag that it goes on setting fetches that again.
	seen := &r.seen[flag][rank]
	if int32(*seen-value) >= 0 {
		return nil
	}
	w := r.mine[flag][rank]
	for range r.looks {
		if have := w.Load(); int32(have-value) >= 0 {
			*seen = have
			return nil
		}
	}
	bound := futex.Bound{Deadline: time.Now().Add(r.timeout), Err: r.peerErr, Patience: r.patience}
	if err := w.WaitAtLeast(value, bound); err != nil {
		return &device.WaitError{Op: r.name, Channel: -1, Peer: rank, Err: err}
	}
	*seen = value // or it falls behind, and half of the values on it seems to be ahead
	return nil
}

// Barrier tells every peer by flag that this rank has come here in this run, and waits until all have. Each barrier of a run has a flag of
// its own. Its errors are those of Wait.
func (r *HostRun) Barrier(flag int) error {
	if !r.has(r.rank, flag) {
		return r.refused("Barrier", r.rank, flag)
	}
	for _, peer := range r.peers {
		r.theirs[flag][peer].Store(r.epoch)
	}
	for _, peer := range r.peers {
		if err := r.Wait(peer, flag, r.epoch); err != nil {
			return err
		}
	}
	return nil
}

func (w *hostWork) enqueue(s device.Stream, recorded bool) error {
	l, ok := s.(device.HostLauncher)
	if !ok {
		return fmt.Errorf("a stream of %s cannot run kernels of the host: %w", s.Device().Name(), errs.ErrUnsupported)
	}
	if recorded {
		if !w.recorded.Load() {
			w.unmarked = w.enqueued
			w.recorded.Store(true)
		}
		return l.Launch((*recordedRun)(w))
	}
	if err := l.Launch((*run)(w)); err != nil {
		return err
	}
	w.enqueued++
	return nil
}

func (w *hostWork) settled() (bool, error) { return w.state.Load()/2 == w.enqueued, nil }

func (w *hostWork) close() error { return nil }

// run is the work as a stream runs it, and recordedRun as a graph does.
type (
	run         hostWork
	recordedRun hostWork
)

// String describes the plan in errors of the stream.
func (k *run) String() string         { return k.plan.name }
func (k *recordedRun) String() string { return k.plan.name }

// RunKernel runs the plan once.
func (k *run) RunKernel() error { return (*hostWork)(k).once(2) }

// RunKernel runs the plan once.
func (k *recordedRun) RunKernel() error { return (*hostWork)(k).once(0) }

// begin marks a run as under way, and reports whether no other is: a graph may be launched on a stream that no Run was told of. Runs that were enqueued
// before the plan was recorded have no mark, and must have ended.
func (w *hostWork) begin(ofGraph bool) bool {
	for {
		state := w.state.Load()
		if state&1 != 0 || ofGraph && state/2 < w.unmarked {
			return false
		}
		if w.state.CompareAndSwap(state, state|1) {
			return true
		}
	}
}

// once is one run, which adds to the state when it has ended.
func (w *hostWork) once(adds uint64) (err error) {
	if err := w.plan.released(); err != nil {
		w.state.Add(adds)
		return err
	}
	if err := w.plan.Err(); err != nil {
		w.state.Add(adds)
		return err // whichever stream this run is on has not got its result
	}
	var mark uint64
	if w.recorded.Load() {
		if !w.begin(adds == 0) {
			w.state.Add(adds)
			return w.plan.fail(fmt.Errorf("running %s: %w", w.plan.name, errs.ErrTwoStreams))
		}
		mark = 1
	}
	w.run.epoch++
	ended := false
	defer func() {
		if !ended {
			err = w.plan.fail(brokenOff("kernel", w.plan.name, recover()))
		}
		w.state.Add(adds - mark)
	}()
	err = w.kernel(&w.run)
	ended = true
	if err != nil {
		return w.plan.fail(err)
	}
	return nil
}

// brokenOff is the error of a function of the user's that has not returned: of the panic that was recovered, or of runtime.Goexit, which goes on, and
// whose stream has its own error.
func brokenOff(what, plan string, recovered any) error {
	if recovered == nil {
		return fmt.Errorf("the %s of %s called runtime.Goexit (testing's FailNow does) instead of returning", what, plan)
	}
	return &device.PanicError{Value: recovered, Stack: string(debug.Stack())}
}
