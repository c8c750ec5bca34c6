package collective

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/cpu"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/memory"
)

// Plan is a collective that was prepared once and can be run many times. One run follows the other: a plan may move to another stream only
// when its work on the last one has ended (ErrTwoStreams). Different plans do not disturb each other: the kernels of any two, on two streams
// and in whatever order, run at the same time and leave room for others; of more streams, see [RoomError]. Launches of a [Program] that are a library's may ask for one order on all ranks.
//
// Its methods may be called from several goroutines at once. The ranks' runs of a plan, in the order in which they are enqueued, are one
// run each of the collective.
type Plan struct {
	name       string
	memory     *memory.Memory
	device     device.Device
	rank, size int
	spec       Spec
	workspace  *memory.Workspace
	work       work
	held       held
	windows    []*memory.Window // of the tensors
	lives      []life           // that a recorded run asks for when it runs

	failed atomic.Pointer[error]

	_ cpu.CacheLinePad // kernels on the host look at what is above, and a run changes what is below

	// mu keeps the steps of a run together, and the plan open until they are enqueued.
	mu     sync.Mutex
	tenant *tenant // what its kernels take of the device while they wait for peers
	closed atomic.Bool
	stream atomic.Pointer[device.Stream] // of the last Run that was not recorded
}

// work is what a plan enqueues.
type work interface {
	// enqueue enqueues one run on s, or records it. It allocates nothing.
	enqueue(s device.Stream, recorded bool) error
	// settled reports whether all runs that were enqueued, those of graphs not counted, have ended.
	settled() (bool, error)
	// close gives back what the work holds besides the workspace. The device has nothing left to do for it.
	close() error
}

// made refuses a plan that New did not make.
func (p *Plan) made(call string) error {
	if p == nil || p.memory == nil {
		return errs.Invalid(call, "plan", "the zero Plan", "one that New gave")
	}
	return nil
}

// String returns the collective's name.
func (p *Plan) String() string {
	if p.made("String") != nil {
		return "no plan"
	}
	return p.name
}

// Run enqueues one run on s, or records it if s is capturing, and returns at once. Every rank runs the plan equally often.
// It allocates nothing. After a run has failed (Err), ErrClosed, ErrPeerLost or that failure. ErrTwoStreams while the plan runs on
// another stream, and a [*RoomError] where it would not fit the device beside the plans on others.
func (p *Plan) Run(s device.Stream) error {
	if err := p.made("Run"); err != nil {
		return err
	}
	// Of a stream that the plan has run on before nothing need be asked again.
	last := p.stream.Load()
	again := last != nil && *last == s
	if !again && errs.IsNil(s) {
		return errs.Invalid("Run", "stream", nil, "a stream of the plan's device "+p.device.Name())
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	held := p.memory.Hold() // what is there now is there until the run is enqueued
	defer held.End()
	if err := p.usable(); err != nil {
		return fmt.Errorf("running %s: %w", p.name, err)
	}
	if !again && s.Device() != p.device {
		return errs.Invalid("Run", "stream", fmt.Sprintf("a stream of %s", s.Device().Name()), "a stream of the plan's device "+p.device.Name())
	}
	recorded := s.Capturing()
	last = p.stream.Load()
	moves := !recorded && (last == nil || *last != s)
	if moves && last != nil {
		if err := p.leaves(); err != nil {
			return fmt.Errorf("running %s: %w", p.name, err)
		}
	}
	if err := p.tenant.move(s); err != nil {
		return fmt.Errorf("running %s: %w", p.name, err)
	}
	if err := p.work.enqueue(s, recorded); err != nil {
		return fmt.Errorf("running %s: %w", p.name, err)
	}
	if moves { // not before: what was refused is no run there, and the plan may go on where it was, whatever s is at
		p.runsOn(s)
	}
	return nil
}

// leaves refuses to let the plan go to another stream while a run is under way.
func (p *Plan) leaves() error {
	settled, err := p.work.settled()
	if err != nil {
		return err
	}
	if !settled {
		return fmt.Errorf("synchronize the stream it runs on first: %w", errs.ErrTwoStreams)
	}
	return nil
}

// runsOn makes s the stream that the plan runs on. It is apart because it allocates.
func (p *Plan) runsOn(s device.Stream) { p.stream.Store(&s) }

// idle reports whether the stream of the last run that was not recorded has nothing left to do.
func (p *Plan) idle() (bool, error) {
	s := p.stream.Load()
	if s == nil {
		return true, nil
	}
	done, err := (*s).Query()
	if errors.Is(err, errs.ErrClosed) {
		return gone(*s), nil
	}
	return done, err
}

func (p *Plan) usable() error {
	if p.closed.Load() {
		return fmt.Errorf("plan: %w", errs.ErrClosed)
	}
	if err := p.Err(); err != nil {
		return err
	}
	for _, t := range p.spec.Tensors {
		if err := t.Err(); err != nil {
			return err
		}
	}
	for _, w := range p.windows {
		if err := w.Usable(); err != nil {
			return err
		}
	}
	return p.memory.Err()
}

// over reports whether the plan takes nothing of its device any more, and never will. Memory that it works on was given back: that waited for the device, and no run
// comes after it. (The close of a slice does not wait, and so does not count.) Or it was closed while the device was at work, it or its memory, and its stream has come to its end since.
func (p *Plan) over() bool {
	if p.released() != nil {
		return true
	}
	if !p.closed.Load() && p.memory.Closed() == nil {
		return false
	}
	on := p.tenant.stream.Load()
	if on == nil {
		return false
	}
	ended, _ := (*on).Query() // of one that is recorded it says nothing
	return ended || gone(*on)
}

// Err returns the error of the first run that failed, or nil. Such a plan cannot go on: the ranks no longer agree how often it
// has run.
func (p *Plan) Err() error {
	if err := p.made("using a plan"); err != nil {
		return err
	}
	if err := p.failed.Load(); err != nil {
		return *err
	}
	return nil
}

// Close gives the plan back, and its workspace if that is large and no other plan has any of it. Collective: it waits for a Run that another
// goroutine is in, for this rank's device and for all ranks. If ctx ends while the device still works, what the plan's kernels use stays until the rank closes, and Close
// waits up to 5 seconds for the others, to tell them. Close
// graphs that hold the plan first: where the CPU runs them, a launch afterwards, or while Close waits for the others, is ErrClosed in its stream; a GPU writes into workspace that
// may be another plan's. Ranks that close different plans all get ErrMismatch, and the workspace of these stays until the rank closes. Closing twice is ErrClosed.
func (p *Plan) Close(ctx context.Context) error {
	if err := errors.Join(p.made("Close"), errs.Given("Close", "ctx", ctx, "a context")); err != nil {
		return err
	}
	p.mu.Lock()
	closed := p.closed.Swap(true)
	p.mu.Unlock()
	if closed {
		return fmt.Errorf("closing %s: %w", p.name, errs.ErrClosed)
	}
	err := p.memory.InTurn(ctx, "closing "+p.name, p.close)
	if err != nil {
		return fmt.Errorf("closing %s: %w", p.name, err)
	}
	return nil
}

// close is Close in its turn.
func (p *Plan) close(ctx context.Context, gaveUp error) error {
	busy := gaveUp
	if busy == nil {
		busy = p.device.Synchronize(ctx)
	}
	if busy == nil || errors.Is(busy, errs.ErrClosed) { // or the device has gone
		p.tenant.leave()
	}
	err := p.workspace.Close(ctx) // in any case: the other ranks are there, or will be
	giveBack := func() error { return errors.Join(p.work.close(), p.held.close(p.device)) }
	if busy == nil {
		err = errors.Join(err, giveBack())
	} else { // the device may be that of a parent, and outlive the rank
		err = errors.Join(err, p.memory.AtRelease(giveBack))
	}
	err = errors.Join(err, p.memory.TrimWorkspace(ctx))
	return errors.Join(busy, err)
}

// fail notes the first failure, and returns the one that it was given.
func (p *Plan) fail(err error) error {
	p.failed.CompareAndSwap(nil, &err)
	return err
}

// life is memory that a plan works on, for as long as Err is nil.
type life interface{ Err() error }

// liveOn notes the memory that the plan works on.
func (p *Plan) liveOn() {
	p.lives = []life{p.workspace}
	noted := map[*memory.Window]bool{}
	for _, t := range p.spec.Tensors {
		if t.Bytes() == 0 {
			continue
		}
		if w, _, err := t.Window(); err == nil && !noted[w] {
			noted[w] = true
			p.windows, p.lives = append(p.windows, w), append(p.lives, w)
		}
	}
}

// released is the error of a run that a graph has kept until the plan, a tensor of it or its group was closed; nil before. Run refuses
// sooner: when any of them begins to close, while runs that are queued still have their memory.
func (p *Plan) released() error {
	for _, l := range p.lives {
		if err := l.Err(); err != nil {
			return fmt.Errorf("running %s from a graph: %w", p.name, err)
		}
	}
	return nil
}

// held is memory of the device, and of the host, that belongs to a plan, and its fault word.
type held struct {
	memory  []device.Ptr
	buffers []device.HostBuffer
	fault   device.FaultWord
}

// close gives it back.
func (h *held) close(d device.Device) error {
	var err error
	if h.fault != nil {
		err = h.fault.Close()
		h.fault = nil
	}
	for _, p := range h.memory {
		err = errors.Join(err, d.Free(p))
	}
	for _, b := range h.buffers {
		err = errors.Join(err, b.Close())
	}
	h.memory, h.buffers = nil, nil
	return notClosed(err)
}

// notClosed is err unless that says that the device has gone, and all of this with it.
func notClosed(err error) error {
	if errors.Is(err, errs.ErrClosed) {
		return nil
	}
	return err
}
