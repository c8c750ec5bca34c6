package symmem

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// Rank is one rank's place in a group: the group, a device, and symmetric memory on it. Methods may be called from several
// goroutines; collective ones must come in the same order on every rank.
//
// # Collectives without plans
//
// AllReduce, ReduceScatter, Reduce, AllGather, Broadcast and AllToAll, and AllReduceMany, ReduceScatterMany, AllGatherMany and BroadcastMany for lists of tensors, are for who does not want plans. Each
// runs on the rank's own stream, [Rank.Stream], and returns when it is enqueued there:
//
//	err := r.AllReduce(ctx, t, kernels.Sum) // the first time: makes a plan, with all other ranks
//	err = r.AllReduce(ctx, t, kernels.Sum)  // from then on: finds it and runs it
//	err = r.Synchronize(ctx)                // both have ended
//
// A rank keeps the plan of each call by what was called, on which memory, with which operation and root, and runs it when the same comes again,
// also through another slice of that memory, and after the slice that came first was closed. So a call is one of two things:
//
//   - The first of its kind makes the plan: it blocks until all ranks have come, and takes as long as the constructor in package kernels, some
//     milliseconds, and two exchanges more. It cannot be recorded in a graph.
//   - A later one does not wait for other ranks, and may be recorded. Beside the plan's Run it costs a look into a map, well below a microsecond, and
//     allocates nothing; those for lists look at each tensor, and allocate. It does not look at ctx.
//
// [MaxPlans] plans are kept, and those that were recorded in a graph besides. The one that was not used for longest goes when another is made, and so
// do those whose memory was given back by the Close of a tensor that is no slice. These closings are collective as well, and wait for the device. A
// program with more calls in a loop than that makes its own plans, or one of many tensors. Which plan goes follows from the order of the calls alone,
// which is that of the program and so the same on every rank. Where the calls of the ranks differ, those that make a plan get an ErrMismatch or, if the
// others do not come, the errors of collective calls; a rank that found its plan waits on the device, for the kernel timeout at most. A rank whose slice
// is closed is ErrClosed at once if the call has a plan, which the others run.
//
// A call whose ctx ends while an earlier call makes its plan is a [memory.TurnError]. If it would have made one too, the others are told; otherwise they run theirs, and the
// call has to be made again.
//
// Their errors are those of the constructors in package kernels, of the plan's Run, and of collective calls, and ErrInvalid for a call that would
// have to make a plan while the rank's own stream is recorded. A plan that has failed keeps failing, as the ranks no longer agree how often it has
// run.
type Rank struct {
	group    *group.Group
	memory   *memory.Memory
	name     string // of the backend
	refusals []backend.Refusal
	env      backend.Env
	memOpts  memory.Options
	log      *slog.Logger
	tuned    *tuned        // the tables of the fastest forms
	timeout  time.Duration // of Close, when its context has no deadline
	calls    *planCache

	mu      sync.Mutex
	closed  bool
	closing chan struct{} // closed when the Close that is under way has returned; nil if none is
	parent  *Rank
	subs    []*Rank

	making   int           // sub-groups that are being made
	subsMade chan struct{} // closed when there are none
}

// made refuses a rank that Open did not make.
func (r *Rank) made(call string) error {
	if r == nil || r.memory == nil {
		return errs.Invalid(call, "rank", "the zero Rank", "one that Open, OpenLocal or Sub gave")
	}
	return nil
}

// orZero is the rank, or a zero one for nil.
func (r *Rank) orZero() *Rank {
	if r == nil {
		return new(Rank)
	}
	return r
}

// Rank returns this rank's number in its group, from 0.
func (r *Rank) Rank() int {
	if r.made("Rank") != nil {
		return 0
	}
	return r.group.Rank()
}

// WorldSize returns the number of ranks in the group.
func (r *Rank) WorldSize() int {
	if r.made("WorldSize") != nil {
		return 0
	}
	return r.group.Size()
}

// Group returns the group: who the ranks are, and how they exchange small things.
func (r *Rank) Group() *group.Group { return r.orZero().group }

// Device returns the device that the rank's memory is on. It is the rank's to close.
func (r *Rank) Device() device.Device { return r.Memory().Device() }

// Memory returns the rank's symmetric memory, below the tensors.
func (r *Rank) Memory() *memory.Memory { return r.orZero().memory }

// Backend returns the name of the backend that was chosen.
func (r *Rank) Backend() string { return r.orZero().name }

// Refusals says why the backends that were preferred to the chosen one could not be used.
func (r *Rank) Refusals() []backend.Refusal { return slices.Clone(r.orZero().refusals) }

// Capabilities says what the backend can do here, and how many of the other ranks have addresses in this process.
func (r *Rank) Capabilities() backend.Capabilities { return r.Memory().Capabilities() }

// Zeros allocates a symmetric tensor, filled with zeros: every rank does the same, then Rendezvous. See [tensor.Zeros].
func (r *Rank) Zeros(ctx context.Context, dtype tensor.DType, shape ...int64) (*tensor.Tensor, error) {
	return tensor.Zeros(ctx, r.Memory(), dtype, shape...)
}

// NewHeap makes a symmetric heap of bytes: collective, once, and then tensors come from it without any exchange between the ranks, in some
// microseconds. See [tensor.NewHeap] and [tensor.Heap.Zeros].
func (r *Rank) NewHeap(ctx context.Context, bytes int64) (*tensor.Heap, error) {
	return tensor.NewHeap(ctx, r.Memory(), bytes)
}

// FromPtr makes a symmetric tensor of device memory that the caller owns. See [tensor.FromPtr].
func (r *Rank) FromPtr(ctx context.Context, p device.Ptr, dtype tensor.DType, shape ...int64) (*tensor.Tensor, error) {
	return tensor.FromPtr(ctx, r.Memory(), p, dtype, shape...)
}

// NewStream returns a stream of the rank's device. Close it before the rank.
func (r *Rank) NewStream() (device.Stream, error) {
	if err := r.made("NewStream"); err != nil {
		return nil, err
	}
	return r.Device().NewStream()
}

// Barrier waits until every rank has come; it does not wait for devices. Collective, and so behind the rank's earlier calls that are still under way: if ctx ends before
// those have ended, the error is a [memory.TurnError], and the others are told.
func (r *Rank) Barrier(ctx context.Context) error {
	if err := r.made("Barrier"); err != nil {
		return err
	}
	ctx, failure := errs.WithContext("Barrier", ctx, nil)
	return r.memory.InTurn(ctx, "barrier", func(ctx context.Context, gaveUp error) error {
		return r.group.Vote(ctx, "barrier", cmp.Or(gaveUp, failure))
	})
}

// Err returns nil as long as the rank can be used: otherwise ErrClosed or, when another rank has died, ErrPeerLost. It is cheap.
func (r *Rank) Err() error { return r.Memory().Err() }

// Sub makes a group of some of the ranks, given in ascending order as they are numbered in r; their numbers in the new group
// are their places in the list. Collective over those ranks only; several may be
// made at a time, as by ranks that make pairs with both of their neighbours. The new rank has memory of its own and shares the device,
// so its tensors can be used on r's streams. Groups may overlap. Close it before r.
func (r *Rank) Sub(ctx context.Context, ranks []int) (*Rank, error) {
	if err := r.made("Sub"); err != nil {
		return nil, err
	}
	if err := r.beginSub(); err != nil {
		return nil, err
	}
	defer r.endSub()
	g, err := r.group.Sub(ctx, ranks)
	if err != nil {
		return nil, fmt.Errorf("making a sub-group: %w", err)
	}
	env := r.env
	env.Group, env.Opened, env.Parent = g, r.Device(), r.memory.Backend()
	m, err := memory.Open(ctx, r.name, &env, &r.memOpts)
	if err != nil {
		err = because(ctx, err)
		ctx, cancel := afterwards(ctx, r.timeout)
		defer cancel()
		return nil, fmt.Errorf("making a sub-group: %w", errors.Join(err, g.Close(ctx)))
	}
	tables, err := tuneSub(ctx, r.tuned, m, r.log)
	if err != nil {
		err = because(ctx, err)
		ctx, cancel := afterwards(ctx, r.timeout)
		defer cancel()
		return nil, fmt.Errorf("making a sub-group: %w", errors.Join(err, m.Close(ctx), g.Close(ctx)))
	}
	s := &Rank{group: g, memory: m, name: r.name, env: r.env, memOpts: r.memOpts, log: r.log, tuned: tables, timeout: r.timeout, calls: newPlanCache(m), parent: r}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.subs = append(r.subs, s)
	return s, nil
}

// beginSub notes that a sub-group is being made, which Close waits for. endSub ends it.
func (r *Rank) beginSub() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return fmt.Errorf("making a sub-group: %w", ErrClosed)
	}
	if r.making == 0 {
		r.subsMade = make(chan struct{})
	}
	r.making++
	return nil
}

func (r *Rank) endSub() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.making--; r.making == 0 {
		close(r.subsMade)
	}
}

// awaitSubs waits for the sub-groups that are being made; none begins any more.
func (r *Rank) awaitSubs(ctx context.Context) error {
	r.mu.Lock()
	making, made := r.making, r.subsMade
	r.mu.Unlock()
	if making == 0 {
		return nil
	}
	select {
	case <-made:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("%d sub-groups are still being made: %w", making, ctx.Err())
	}
}

// Close releases everything and leaves the group. Collective. Sub-groups and tensors that were not closed are logged as leaks and closed, sub-groups
// in an order that is the same on all their ranks; one that another goroutine is closing is waited for. What is being recorded on the rank's own stream is given up. If ctx ends while the rank's device still works on symmetric memory, or an earlier call of
// the rank is under way, what is left is kept: close again. The others are told that a device is at work, for which Close waits up to 5 seconds for them. Unlike other collective calls that give up
// behind an earlier one, Close does not tell them that: they wait for this rank's next Close, for as long as theirs lasts. Otherwise the rank is closed whatever the error says. A second Close returns ErrClosed.
func (r *Rank) Close(ctx context.Context) error {
	if err := r.made("Close"); err != nil {
		return err
	}
	if err := errs.Given("Close", "ctx", ctx, "a context"); err != nil {
		return err
	}
	end := r.beginClose()
	if end == nil {
		return fmt.Errorf("closing rank %d: %w", r.Rank(), ErrClosed)
	}
	defer end()
	return r.close(ctx)
}

// beginClose notes that the rank is being closed, and end that this is over. end is nil if it was closed before, or is being closed.
func (r *Rank) beginClose() (end func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return nil
	}
	over := make(chan struct{})
	r.closed, r.closing = true, over
	return func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.closing == over { // else what was kept is being closed again
			r.closing = nil
		}
		close(over)
	}
}

// closeSub closes a sub-group that was not closed, or waits for another goroutine that closes it: it has the device, and memory there. kept is why it is
// still there, and err what else has gone wrong.
func (r *Rank) closeSub(ctx context.Context, s *Rank) (err, kept error) {
	for {
		if end := s.beginClose(); end != nil {
			r.log.Warn("a sub-group was not closed before its parent", "group", s.group.Name(), "rank", s.Rank())
			err := s.close(ctx)
			end()
			if s.open() {
				return nil, err
			}
			return err, nil
		}
		s.mu.Lock()
		closing := s.closing
		s.mu.Unlock()
		if closing == nil {
			return nil, nil
		}
		select {
		case <-closing: // who closes it has the error; what was kept is closed here
		case <-ctx.Done():
			return nil, fmt.Errorf("sub-group %s is still being closed: %w", s.group.Name(), ctx.Err())
		}
	}
}

// close is Close, after beginClose.
func (r *Rank) close(ctx context.Context) error {
	if _, bounded := ctx.Deadline(); !bounded {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, r.timeout)
		defer cancel()
	}
	var err error
	keep := func(why error) error {
		r.mu.Lock()
		r.closed = false
		r.mu.Unlock()
		return fmt.Errorf("closing rank %d: %w", r.Rank(), errors.Join(err, why))
	}
	if why := r.awaitSubs(ctx); why != nil {
		return keep(why)
	}
	// One turn of the memory for all: a collective call of another goroutine is in front of them or behind them, and on no rank between them.
	var began bool
	var memErr error
	turnErr := r.memory.InTurn(ctx, "closing the rank", func(ctx context.Context, gaveUp error) error {
		if gaveUp != nil {
			return nil // the others may have closed what comes first: they have to wait for the next Close anyway
		}
		for _, s := range r.leftSubs() { // each takes itself out of the list
			subErr, kept := r.closeSub(ctx, s)
			if kept != nil {
				return kept
			}
			err = errors.Join(err, subErr)
		}
		if why := r.calls.shut(ctx); why != nil {
			return why
		}
		began = true
		err = errors.Join(err, r.calls.close(ctx))
		memErr = r.memory.Close(ctx)
		return nil
	})
	if !began {
		return keep(turnErr)
	}
	if memErr != nil && r.memory.Busy() {
		return keep(memErr)
	}
	err = errors.Join(err, r.calls.end(), memErr, r.group.Close(ctx))
	if p := r.parent; p != nil {
		p.mu.Lock()
		p.subs = slices.DeleteFunc(p.subs, func(s *Rank) bool { return s == r })
		p.mu.Unlock()
	}
	if err != nil {
		return fmt.Errorf("closing rank %d: %w", r.Rank(), err)
	}
	return nil
}

// leftSubs is the sub-groups that were not closed, in an order that all their ranks have: those that were made at the same time may have come into the list in any, and ranks that
// closed them so could wait for each other in a circle. Of sub-groups of the same ranks the youngest is first, which has the largest number at the end of its name.
func (r *Rank) leftSubs() []*Rank {
	r.mu.Lock()
	subs := slices.Clone(r.subs)
	r.mu.Unlock()
	slices.SortFunc(subs, func(a, b *Rank) int {
		x, y := a.group.Name(), b.group.Name()
		return cmp.Or(cmp.Compare(len(y), len(x)), cmp.Compare(y, x))
	})
	return subs
}

// open reports whether the rank was not closed.
func (r *Rank) open() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return !r.closed
}
