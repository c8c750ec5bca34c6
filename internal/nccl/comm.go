package nccl

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/futex"
)

// Comm is a communicator: this rank's membership among the ranks that met with one unique id. NCCL allows one call of a communicator at a time, so
// the methods wait for each other; only Abort does not wait long.
type Comm struct {
	lib   *Library
	ranks int
	rank  int
	scope func(func() error) error
	owned bool

	operation chan struct{} // holds a token while something is under way that takes several calls
	mu        sync.Mutex    // held during NCCL's calls
	handle    atomic.Uint64 // the CommHandle; 0 when destroyed or aborted
	state     sync.Mutex
	cause     error // why it was aborted, or cannot go on
	stuck     bool  // a call has not ended, so that there can be no other
	failed    error // the first failure of a call, or of what NCCL does by itself
}

// CommOptions says what communicator to make.
type CommOptions struct {
	// Ranks is the number of ranks, and Rank this one's number, from 0.
	Ranks, Rank int
	// ID is what rank 0 made by NewUniqueID.
	ID UniqueID
	// Config may be nil.
	Config *Config
	// Scope calls a function with the GPU's primary context current on its thread: (*cuda.Device).WithContext. All methods but AllReduce use it where
	// NCCL needs that. If it is nil, the caller has to make the context current for every call, which works in tests.
	Scope func(func() error) error
}

// NewUniqueID makes the id of one new communicator and opens the socket at which its ranks will meet. One rank calls it, with
// the GPU's context current.
func (l *Library) NewUniqueID() (UniqueID, error) {
	id := new(UniqueID)
	if err := l.check("ncclGetUniqueId", l.call.GetUniqueID(id)); err != nil {
		return UniqueID{}, fmt.Errorf("making a unique id: %w", err)
	}
	return *id, nil
}

// NewComm makes a communicator of the ranks that bring one id, each with another number and another GPU. It is collective and
// blocks until all have come, or until ctx ends: then a communicator that does not block is aborted, and for one that does the
// error is a [*StuckError]. Destroy or abort the communicator.
func (l *Library) NewComm(ctx context.Context, o *CommOptions) (*Comm, error) {
	const op = "NewComm"
	if o.Ranks < 1 {
		return nil, errs.Invalid(op, "ranks", o.Ranks, "1 and more")
	}
	if o.Rank < 0 || o.Rank >= o.Ranks {
		return nil, errs.Invalid(op, "rank", o.Rank, fmt.Sprintf("0 to %d", o.Ranks-1))
	}
	if c := o.Config; c != nil && (c.MinCTAs < 0 || c.MaxCTAs < 0 || c.MaxCTAs > 0 && c.MinCTAs > c.MaxCTAs) {
		return nil, errs.Invalid(op, "Config", fmt.Sprintf("%d to %d blocks", c.MinCTAs, c.MaxCTAs), "0 and more, the least first")
	}
	c := newComm(l, o.Ranks, o.Rank, o.Scope)
	handle, config, id := new(CommHandle), o.Config.layout(l.version), o.ID
	err := c.do(ctx, "making the communicator", "ncclCommInitRankScalable", handle, func(CommHandle) Result {
		r := l.call.CommInitRankScalable(handle, int32(o.Ranks), int32(o.Rank), 1, &id, config)
		if r == Success || r == InProgress {
			c.handle.Store(uint64(*handle))
		}
		return r
	})
	if err != nil {
		err = fmt.Errorf("making a communicator of %d ranks: %w", o.Ranks, err)
		return nil, errors.Join(err, c.give(err))
	}
	return c, nil
}

// Adopt wraps a communicator that the caller has made with this library and destroys itself. Nobody else may use it meanwhile.
func (l *Library) Adopt(handle CommHandle, scope func(func() error) error) (*Comm, error) {
	if handle == 0 {
		return nil, errs.Invalid("Adopt", "communicator", handle, "one that exists")
	}
	c := newComm(l, 0, 0, scope)
	c.owned = false
	c.handle.Store(uint64(handle))
	var ranks, rank int32
	err := c.scope(func() error {
		if err := l.check("ncclCommCount", l.call.CommCount(handle, &ranks)); err != nil {
			return err
		}
		return l.check("ncclCommUserRank", l.call.CommUserRank(handle, &rank))
	})
	if err != nil {
		return nil, fmt.Errorf("looking at the communicator that was given: %w", err)
	}
	c.ranks, c.rank = int(ranks), int(rank)
	return c, nil
}

func newComm(l *Library, ranks, rank int, scope func(func() error) error) *Comm {
	if scope == nil {
		scope = func(fn func() error) error { return fn() }
	}
	return &Comm{lib: l, ranks: ranks, rank: rank, scope: scope, owned: true, operation: make(chan struct{}, 1)}
}

// Ranks returns the number of ranks.
func (c *Comm) Ranks() int { return c.ranks }

// Rank returns this rank's number, from 0.
func (c *Comm) Rank() int { return c.rank }

// Handle returns the ncclComm_t; 0 when the communicator was destroyed or aborted.
func (c *Comm) Handle() CommHandle { return CommHandle(c.handle.Load()) }

// Device returns the index of the GPU in the CUDA runtime's count.
func (c *Comm) Device() (int, error) {
	var n int32
	err := c.quick("ncclCommCuDevice", func(h CommHandle) Result { return c.lib.call.CommCuDevice(h, &n) })
	return int(n), err
}

// Split makes a communicator of the same ranks, in the same order, from this one, which is cheaper than NewComm. It is collective, and bounded as
// NewComm is. The error is ErrUnsupported before NCCL 2.18.
func (c *Comm) Split(ctx context.Context, config *Config) (*Comm, error) {
	if err := c.lib.Require("ncclCommSplit"); err != nil {
		return nil, fmt.Errorf("splitting the communicator: %w", err)
	}
	child := newComm(c.lib, c.ranks, c.rank, c.scope)
	handle, layout := new(CommHandle), config.layout(c.lib.version)
	err := c.do(ctx, "splitting the communicator", "ncclCommSplit", handle, func(h CommHandle) Result {
		return c.lib.call.CommSplit(h, 0, int32(c.rank), handle, layout)
	})
	if err == nil && *handle == 0 {
		err = c.note(errors.New("NCCL has split the communicator and given none"))
	}
	if err != nil {
		return nil, fmt.Errorf("splitting the communicator: %w", err)
	}
	child.handle.Store(uint64(*handle))
	return child, nil
}

// AllReduce enqueues on stream, a CUstream, the combination by op of count elements at send on all ranks, with the result at
// recv on each; or it records it, if the stream is capturing. send and recv are addresses of the GPU's memory, the same or not
// overlapping. The GPU's context is current. Collective: every rank enqueues it alike. It returns before the work has run; when
// the driver's queue is full it waits for room, and the first of a kind may wait for the other ranks.
func (c *Comm) AllReduce(stream uintptr, send, recv uint64, count int64, t DataType, op Op) error {
	return c.Enqueue(AllReduce, stream, send, recv, count, t, op, 0)
}

// Enqueue is AllReduce for any of NCCL's collectives. count is what nccl.h says of each: of AllGather what one rank sends, of ReduceScatter what one
// receives, of AllToAll what one sends to another. Those that combine nothing do not look at op, and only Broadcast and Reduce at root.
// ErrUnsupported if the library lacks it.
func (c *Comm) Enqueue(what Collective, stream uintptr, send, recv uint64, count int64, t DataType, op Op, root int) error {
	if count < 0 {
		return errs.Invalid(what.String(), "count", count, "0 and more")
	}
	if err := c.lib.Has(what); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	handle := c.Handle()
	if handle == 0 {
		return c.gone(what.String())
	}
	var r Result
	switch f := &c.lib.call; what {
	case AllReduce:
		r = f.AllReduce(send, recv, uintptr(count), t, op, handle, stream)
	case Broadcast:
		r = f.Broadcast(send, recv, uintptr(count), t, int32(root), handle, stream)
	case Reduce:
		r = f.Reduce(send, recv, uintptr(count), t, op, int32(root), handle, stream)
	case AllGather:
		r = f.AllGather(send, recv, uintptr(count), t, handle, stream)
	case ReduceScatter:
		r = f.ReduceScatter(send, recv, uintptr(count), t, op, handle, stream)
	case AllToAll:
		r = f.AllToAll(send, recv, uintptr(count), t, handle, stream)
	}
	for r == InProgress { // of a communicator that does not block; the work must be in the stream before more is enqueued
		futex.Doze(shortest)
		if c.Handle() == 0 {
			return c.gone(what.String())
		}
		var state Result
		if r = c.lib.call.CommAsyncError(handle, &state); r == Success {
			r = state
		}
	}
	if r != Success {
		if c.Handle() == 0 { // it was aborted meanwhile: the result says nothing
			return c.gone(what.String())
		}
		return c.note(fmt.Errorf("%s of %d %v, %v: %w", what, count, t, op, c.lib.check(collectiveSymbols[what], r)))
	}
	return nil
}

// Err returns the error of what NCCL does asynchronously. It is nil if there is none, or if a call is under way. It does not wait.
func (c *Comm) Err() error {
	if !c.mu.TryLock() {
		return nil
	}
	defer c.mu.Unlock()
	handle := c.Handle()
	if handle == 0 {
		return c.gone("Err")
	}
	var state Result
	return c.note(c.scope(func() error {
		if err := c.lib.check("ncclCommGetAsyncError", c.lib.call.CommAsyncError(handle, &state)); err != nil || state == InProgress {
			return err
		}
		return c.lib.check("ncclCommGetAsyncError", state)
	}))
}

// Sound returns nil if the communicator exists, none of its calls has failed or was given up on this rank, and NCCL reports no error. It says nothing
// about the other ranks. It does not wait.
func (c *Comm) Sound() error {
	c.state.Lock()
	failed := c.failed
	c.state.Unlock()
	if failed != nil {
		return fmt.Errorf("a call of the communicator has failed: %w", failed)
	}
	if c.stuckNow() {
		return c.gone("Sound")
	}
	return c.Err()
}

// note remembers the first failure, and returns err.
func (c *Comm) note(err error) error {
	if err != nil {
		c.state.Lock()
		defer c.state.Unlock()
		if c.failed == nil {
			c.failed = err
		}
	}
	return err
}

// Destroy destroys the communicator. All ranks should call it when no work is left on their streams, all windows are deregistered, and all graphs
// that recorded its work are closed: NCCL waits for these. It blocks until that is done. If ctx ends first the error is a [*StuckError]. It returns
// ErrClosed if the communicator was destroyed or aborted before. An adopted communicator is released and goes on.
func (c *Comm) Destroy(ctx context.Context) error {
	if !c.owned {
		if c.handle.Swap(0) == 0 {
			return c.gone("Destroy")
		}
		return nil
	}
	if c.stuckNow() {
		return c.abort(ctx, errors.New("it was destroyed before a call had ended"))
	}
	finalize := func(h CommHandle) Result { return c.lib.call.CommFinalize(h) }
	if err := c.do(ctx, "finishing the communicator", "ncclCommFinalize", nil, finalize); err != nil {
		if c.Handle() == 0 {
			return err
		}
		return errors.Join(fmt.Errorf("destroying the communicator: %w", err), c.abort(ctx, err))
	}
	handle := CommHandle(c.handle.Swap(0))
	if handle == 0 {
		return c.gone("Destroy")
	}
	if err := c.reclaim(ctx, "destroying the communicator", "ncclCommDestroy", c.lib.call.CommDestroy, handle); err != nil {
		return fmt.Errorf("destroying the communicator: %w", err)
	}
	return nil
}

// Abort destroys the communicator without the other ranks and ends its work, whether done or not; cause is what its methods return from then on. It
// is for a rank whose peers have failed, and may be called while another goroutine is in a method. It waits until NCCL has released everything. If
// ctx ends first the error is a [*StuckError]. All its windows are gone. An adopted communicator is released and goes on.
func (c *Comm) Abort(ctx context.Context, cause error) error {
	if !c.owned {
		c.setCause(cause)
		if c.handle.Swap(0) == 0 {
			return c.gone("Abort")
		}
		return nil
	}
	return c.abort(ctx, cause)
}

func (c *Comm) abort(ctx context.Context, cause error) error {
	c.setCause(cause)
	// Calls of a communicator that does not block end at once. One that blocks is ended by the abort.
	for range 100 {
		if c.mu.TryLock() {
			defer c.mu.Unlock()
			break
		}
		time.Sleep(time.Millisecond)
	}
	handle := CommHandle(c.handle.Swap(0))
	if handle == 0 {
		return c.gone("Abort")
	}
	if err := c.reclaim(ctx, "aborting the communicator", "ncclCommAbort", c.lib.call.CommAbort, handle); err != nil {
		return fmt.Errorf("aborting the communicator: %w", err)
	}
	return nil
}

// reclaim makes one of the calls that end a communicator, which wait for what it is doing.
func (c *Comm) reclaim(ctx context.Context, what, call string, fn func(CommHandle) Result, handle CommHandle) error {
	_, err := Bound(ctx, what, func() (struct{}, error) {
		return struct{}{}, c.scope(func() error {
			if r := fn(handle); r != InProgress {
				return c.lib.check(call, r)
			}
			return nil
		})
	})
	return err
}

// give aborts a communicator that was never complete.
func (c *Comm) give(cause error) error {
	if c.Handle() == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), abortTime)
	defer cancel()
	return c.abort(ctx, cause)
}

// abortTime is how long NCCL gets to give up a communicator.
const abortTime = 20 * time.Second

// The pauses between two checks whether a call has ended. They grow to the first limit while an answer may be near, since registering a window takes
// some milliseconds, and then to the second.
const (
	shortest = 20 * time.Microsecond
	near     = 100 * time.Microsecond
	longest  = time.Millisecond
	soon     = 20 * time.Millisecond
)

// do makes a call and waits until what it began is done. If ctx ends first the communicator is stuck: only Abort can be called. keep is the memory
// that NCCL may still write.
func (c *Comm) do(ctx context.Context, what, call string, keep any, fn func(h CommHandle) Result) error {
	return c.note(c.doOne(ctx, what, call, keep, fn))
}

func (c *Comm) doOne(ctx context.Context, what, call string, keep any, fn func(h CommHandle) Result) error {
	select {
	case c.operation <- struct{}{}:
	case <-ctx.Done():
		return fmt.Errorf("%s: waiting for another call of the communicator: %w", what, context.Cause(ctx))
	}
	defer func() { <-c.operation }()
	if c.stuckNow() {
		return c.gone(what)
	}
	made := call == "ncclCommInitRankScalable"
	err := c.begin(ctx, what, call, made, fn)
	if err == nil {
		// Some calls return success when they have only begun (ncclCommWindowRegister in dev_runtime.cc of 2.28), so the state is checked in any
		// case.
		err = c.wait(ctx, what, call)
	}
	if _, stuck := errors.AsType[*StuckError](err); stuck {
		c.setStuck(err)
		abandoned.Store(keep, struct{}{})
	}
	return err
}

// begin makes the call, and waits no longer than ctx for it to return.
func (c *Comm) begin(ctx context.Context, what, call string, made bool, fn func(h CommHandle) Result) error {
	_, err := Bound(ctx, what, func() (struct{}, error) {
		c.mu.Lock()
		defer c.mu.Unlock()
		handle := c.Handle()
		if handle == 0 && !made {
			return struct{}{}, c.gone(what)
		}
		return struct{}{}, c.scope(func() error {
			if r := fn(handle); r != InProgress {
				return c.lib.check(call, r)
			}
			return nil
		})
	})
	return err
}

// wait asks until the call is done.
func (c *Comm) wait(ctx context.Context, what, call string) error {
	began, limit := time.Now(), near
	for pause := shortest; ; pause = min(2*pause, limit) {
		if limit == near && time.Since(began) > soon {
			limit = longest
		}
		state, err := c.ask()
		if err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
		if state != InProgress {
			return c.lib.check(call, state)
		}
		if ctx.Err() != nil {
			return &StuckError{Library: libraryName, What: what, Err: context.Cause(ctx), Abortable: c.owned}
		}
		futex.Doze(pause)
	}
}

// ask asks whether the last call is done. It needs no context and is called often, so it does not use the scope.
func (c *Comm) ask() (Result, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	handle := c.Handle()
	if handle == 0 {
		return 0, c.gone("ncclCommGetAsyncError")
	}
	state := new(Result)
	r := c.lib.call.CommAsyncError(handle, state)
	return *state, c.lib.check("ncclCommGetAsyncError", r)
}

// quick makes a call that does not wait for anybody.
func (c *Comm) quick(call string, fn func(h CommHandle) Result) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	handle := c.Handle()
	if handle == 0 {
		return c.gone(call)
	}
	return c.note(c.scope(func() error { return c.lib.check(call, fn(handle)) }))
}

// abandoned holds the places that NCCL may write at any time.
var abandoned sync.Map

func (c *Comm) setCause(cause error) {
	c.state.Lock()
	defer c.state.Unlock()
	if c.cause == nil {
		c.cause = cause
	}
}

func (c *Comm) setStuck(cause error) {
	c.setCause(cause)
	c.state.Lock()
	defer c.state.Unlock()
	c.stuck = true
}

func (c *Comm) stuckNow() bool {
	c.state.Lock()
	defer c.state.Unlock()
	return c.stuck
}

// Stuck reports whether a call was given up before it ended, so that the communicator can only be aborted.
func (c *Comm) Stuck() bool { return c.stuckNow() }

// gone returns the error of using a communicator that was destroyed or aborted, or that is stuck.
func (c *Comm) gone(op string) error {
	c.state.Lock()
	defer c.state.Unlock()
	if c.cause != nil {
		return fmt.Errorf("%s: the communicator was given up, so that it is %w: %w", op, errs.ErrClosed, c.cause)
	}
	return fmt.Errorf("%s: the communicator is %w", op, errs.ErrClosed)
}
