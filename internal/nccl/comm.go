package nccl

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/futex"
)

// Comm is a communicator: this rank's membership among the ranks that met with one unique id. NCCL allows one call of a communicator at a time, so
// the methods wait for each other; only Abort does not wait long.
type Comm struct {
	lib    *Library
	ranks  int
	rank   int
	scope  func(func() error) error
	making func(func() error) error // scope, of the call that makes it
	owned  bool

	operation chan struct{} // holds a token while something is under way that takes several calls
	mu        sync.Mutex    // held during NCCL's calls
	handle    atomic.Uint64 // the CommHandle; 0 when destroyed or aborted
	state     sync.Mutex
	cause     error           // why it was aborted, or cannot go on
	stuck     bool            // a call has not ended, so that there can be no other
	window    bool            // one could not be removed, so that it can only be aborted
	settled   <-chan struct{} // closed when that call has ended after all, and what it made is gone; nil if none is stuck
	failed    error           // the first failure of a call, or of what NCCL does by itself

	made  atomic.Bool   // there ever was a handle
	ended chan struct{} // closed when the call that ends the communicator has returned
}

// CommOptions says what communicator to make.
type CommOptions struct {
	// Ranks is the number of ranks, and Rank this one's number, from 0.
	Ranks, Rank int
	// ID is what rank 0 made by NewUniqueID.
	ID UniqueID
	// Config may be nil.
	Config *Config
	// Making, unless nil, is Scope for the call that makes the communicator.
	Making func(func() error) error
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
// blocks until all have come, or until ctx ends: then the error is a [*StuckError], and the communicator is aborted, as soon as NCCL has given its
// handle, which closes the error's Ended. Destroy or abort the communicator.
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
	if o.Making != nil {
		c.making = o.Making
	}
	handle, config, id := new(CommHandle), o.Config.layout(l.version), o.ID
	discard := func() {
		_ = c.note(c.give(errors.New("its rank had given it up")))
	}
	err := c.note(c.doOne(ctx, "making the communicator", initCall, handle, discard, func(CommHandle) Result {
		r := l.call.CommInitRankScalable(handle, int32(o.Ranks), int32(o.Rank), 1, &id, config)
		if r == Success || r == InProgress {
			c.handle.Store(uint64(*handle))
			c.made.Store(true)
		}
		return r
	}))
	if err != nil {
		err = fmt.Errorf("making a communicator of %d ranks: %w", o.Ranks, err)
		gave := c.give(err)
		if gave == nil && c.made.Load() { // else the call itself has not returned, which may take long
			gave = c.awaitLate(context.WithoutCancel(ctx))
		}
		return nil, errors.Join(err, gave)
	}
	return c, nil
}

// initCall is the one call that is made without a communicator.
const initCall = "ncclCommInitRankScalable"

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
	return &Comm{lib: l, ranks: ranks, rank: rank, scope: scope, making: scope, owned: true, operation: make(chan struct{}, 1), ended: make(chan struct{})}
}

// Ranks returns the number of ranks.
func (c *Comm) Ranks() int { return c.ranks }

// Rank returns this rank's number, from 0.
func (c *Comm) Rank() int { return c.rank }

// Ended is closed when NCCL has released the communicator, or has refused to. It stays open for one that was adopted.
func (c *Comm) Ended() <-chan struct{} { return c.ended }

// Handle returns the ncclComm_t; 0 when the communicator was destroyed or aborted.
func (c *Comm) Handle() CommHandle { return CommHandle(c.handle.Load()) }

// Over reports whether the communicator was destroyed or aborted, and NCCL has released all of it, so that it moves no data any more.
func (c *Comm) Over() bool {
	select {
	case <-c.ended:
		return true
	default:
		return false
	}
}

// Device returns the index of the GPU in the CUDA runtime's count.
func (c *Comm) Device() (int, error) {
	var n int32
	err := c.quick("ncclCommCuDevice", func(h CommHandle) Result { return c.lib.call.CommCuDevice(h, &n) })
	return int(n), err
}

// Split makes a communicator of the same ranks, in the same order, from this one, which is cheaper than NewComm. It is collective, and bounded as
// NewComm is. If ctx ends first, this communicator can only be aborted, and one that comes of the call late is aborted too. The error is ErrUnsupported
// before NCCL 2.18.
func (c *Comm) Split(ctx context.Context, config *Config) (*Comm, error) {
	return c.SplitBy(ctx, Part{Ranks: c.ranks, Rank: c.rank}, config)
}

// Part is one of the groups that a communicator's ranks fall into when it is split.
type Part struct {
	// Color is the number of the part, 0 or more: ranks with the same are in one.
	Color int
	// Ranks is how many ranks the part has, and Rank this one's number among them, in the order that they have in the communicator.
	Ranks, Rank int
}

// SplitBy is Split into several communicators, of which this rank gets that of its part. All ranks of the communicator call it, also those whose part
// has no other rank. ErrInvalid, on this rank alone, for a part that cannot be.
func (c *Comm) SplitBy(ctx context.Context, part Part, config *Config) (*Comm, error) {
	if err := c.lib.Require("ncclCommSplit"); err != nil {
		return nil, fmt.Errorf("splitting the communicator: %w", err)
	}
	if part.Color < 0 || part.Ranks < 1 || part.Ranks > c.ranks || part.Rank < 0 || part.Rank >= part.Ranks {
		return nil, errs.Invalid("SplitBy", "part", fmt.Sprintf("%+v", part), fmt.Sprintf("a color of 0 or more, 1 to %d ranks, and a rank among them", c.ranks))
	}
	child := newComm(c.lib, part.Ranks, part.Rank, c.scope)
	handle, layout := new(CommHandle), config.layout(c.lib.version)
	discard := func() {
		child.handle.Store(uint64(*handle))
		_ = c.note(child.give(errors.New("it was made after its rank had given it up")))
	}
	err := c.note(c.doOne(ctx, "splitting the communicator", "ncclCommSplit", handle, discard, func(h CommHandle) Result {
		return c.lib.call.CommSplit(h, int32(part.Color), int32(c.rank), handle, layout)
	}))
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
	call := Call{What: what, Send: send, Recv: recv, Count: count, Type: t, Op: op, Root: root}
	r := c.lib.enqueue(handle, stream, &call)
	if r = c.await(handle, r); r != Success {
		return c.refused(call.String(), what, r)
	}
	return nil
}

// await is the result of an enqueuing call when its work is in the stream, which must be before more is enqueued. The caller holds c.mu.
func (c *Comm) await(handle CommHandle, r Result) Result {
	for r == InProgress { // of a communicator that does not block
		futex.Doze(shortest)
		if c.Handle() == 0 {
			break
		}
		var state Result
		if r = c.lib.call.CommAsyncError(handle, &state); r == Success {
			r = state
		}
	}
	return r
}

// refused is the error of an enqueuing call that was no success.
func (c *Comm) refused(what string, call Collective, r Result) error {
	if c.Handle() == 0 { // it was aborted meanwhile: the result says nothing
		return c.gone(call.String())
	}
	return c.note(fmt.Errorf("%s: %w", what, c.lib.check(collectiveSymbols[call], r)))
}

// The calls around a group.
const groupStart, groupEnd = "ncclGroupStart", "ncclGroupEnd"

// inGroup makes calls as one group, which is the thread's; the library has groups. It returns what they have, if that is an error, or the result of the
// call around them that it names: of groupStart only an error, and nothing was called then.
func (l *Library) inGroup(calls func() Result) (r Result, of string) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if r = l.call.GroupStart(); r != Success {
		return r, groupStart
	}
	r = calls()
	end := l.call.GroupEnd() // in any case: the thread would stay in the group
	if r == Success || r == InProgress {
		return end, groupEnd
	}
	return r, ""
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
		return c.release(ctx, "Destroy")
	}
	if c.stuckNow() {
		return c.abort(ctx, errors.New("it was destroyed before a call had ended"))
	}
	c.state.Lock()
	window := c.window
	c.state.Unlock()
	if window {
		return c.abort(ctx, errors.New("it was destroyed with a window that could not be removed"))
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
// is for a rank whose peers have failed, and may be called while another goroutine is in a method. It waits until NCCL has released everything, and for
// a while until a call that was given up has ended. If ctx ends first, or that call does not end, the error is a [*StuckError]. All its windows are
// gone, also those that were made late. An adopted communicator is released and goes on.
func (c *Comm) Abort(ctx context.Context, cause error) error {
	if !c.owned {
		c.setCause(cause)
		return c.release(ctx, "Abort")
	}
	return c.abort(ctx, cause)
}

// release forgets an adopted communicator. What a call of it does late can only be known while there is a handle.
func (c *Comm) release(ctx context.Context, op string) error {
	if c.Handle() == 0 {
		return c.gone(op)
	}
	err := c.awaitLate(ctx)
	if c.handle.Swap(0) == 0 {
		return c.gone(op)
	}
	return err
}

// abort aborts the communicator, and waits for a call that was given up.
func (c *Comm) abort(ctx context.Context, cause error) error {
	if err := c.abortOnly(ctx, cause); err != nil {
		return err
	}
	return c.awaitLate(ctx)
}

// awaitLate waits until a call that was given up has ended, if there is one.
func (c *Comm) awaitLate(ctx context.Context) error {
	c.state.Lock()
	settled := c.settled
	c.state.Unlock()
	if settled == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, lateTime)
	defer cancel()
	select {
	case <-settled:
		return nil
	case <-ctx.Done():
		return &StuckError{Library: libraryName, What: "ending a call that was given up", Err: context.Cause(ctx), Ended: settled}
	}
}

func (c *Comm) abortOnly(ctx context.Context, cause error) error {
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

// reclaim makes one of the calls that end a communicator, which wait for what it is doing. Where NCCL could not be called, it has the communicator as before, and so
// has the caller.
func (c *Comm) reclaim(ctx context.Context, what, call string, fn func(CommHandle) Result, handle CommHandle) error {
	_, err := Bound(ctx, what, func() (struct{}, error) {
		called := false
		defer func() {
			if called {
				close(c.ended)
			} else {
				c.handle.Store(uint64(handle))
			}
		}()
		return struct{}{}, c.scope(func() error {
			called = true
			if r := fn(handle); r != InProgress {
				return c.lib.check(call, r)
			}
			return nil
		})
	})
	return err
}

// give aborts a communicator that nobody has got, if it is there.
func (c *Comm) give(cause error) error {
	if c.Handle() == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), abortTime)
	defer cancel()
	if err := c.abortOnly(ctx, cause); err != nil && !errors.Is(err, errs.ErrClosed) {
		return err
	}
	return nil
}

// abortTime is how long NCCL gets to give up a communicator.
const abortTime = 20 * time.Second

// lateTime is how long a call that was given up gets to end once its communicator was aborted.
const lateTime = 5 * time.Second

// The pauses between two checks whether a call has ended. They grow to the first limit while an answer may be near, since registering a window takes
// some milliseconds, and then to the second.
const (
	shortest = 20 * time.Microsecond
	near     = 100 * time.Microsecond
	longest  = time.Millisecond
	rarely   = 50 * time.Millisecond // when nobody waits for it any more
	soon     = 20 * time.Millisecond
)

// do makes a call and waits until what it began is done. If ctx ends first the communicator is stuck: only Abort can be called. keep is the memory
// that NCCL may still write.
func (c *Comm) do(ctx context.Context, what, call string, keep any, fn func(h CommHandle) Result) error {
	return c.note(c.doOne(ctx, what, call, keep, nil, fn))
}

// doOne is do for a call that makes something: discard, unless nil, gives that back when the call ends after it was given up.
func (c *Comm) doOne(ctx context.Context, what, call string, keep any, discard func(), fn func(h CommHandle) Result) error {
	select {
	case c.operation <- struct{}{}:
	case <-ctx.Done():
		return fmt.Errorf("%s: waiting for another call of the communicator: %w", what, context.Cause(ctx))
	}
	defer func() { <-c.operation }()
	if c.stuckNow() {
		return c.gone(what)
	}
	err := c.begin(ctx, what, call, call == initCall, fn)
	if err == nil {
		// Some calls return success when they have only begun (ncclCommWindowRegister in dev_runtime.cc of 2.28), so the state is checked in any
		// case.
		err = c.wait(ctx, what, call)
	}
	if stuck, ok := errors.AsType[*StuckError](err); ok {
		abandoned.Store(keep, struct{}{})
		stuck.Ended = c.settle(stuck.Ended, call == initCall, keep, discard)
		c.setStuck(err, stuck.Ended)
	}
	return err
}

// settle begins to wait until a call that was given up has ended, or its communicator, and lets discard give back what it has made. A call that is not
// polled any more has ended when NCCL says so, or when NCCL has nothing left of the communicator. returned is closed when the call has returned, and nil
// if it has already. What settle returns is closed afterwards.
func (c *Comm) settle(returned <-chan struct{}, making bool, keep any, discard func()) <-chan struct{} {
	settled := make(chan struct{})
	go func() {
		if returned != nil {
			<-returned
		}
		if making { // there is nothing to wait for
			discard()
			if c.made.Load() {
				<-c.ended
			}
		} else {
			if !c.ends() {
				return
			}
			if discard != nil {
				discard()
			}
		}
		abandoned.Delete(keep)
		close(settled)
	}()
	return settled
}

// ends waits until no call of the communicator is under way. It reports false if nobody can know.
func (c *Comm) ends() bool {
	for pause := longest; ; pause = min(2*pause, rarely) {
		if state, err := c.ask(); err == nil && state != InProgress {
			return true
		}
		if !c.owned && c.Handle() == 0 {
			return false
		}
		wait := time.NewTimer(pause)
		select {
		case <-c.ended:
			wait.Stop()
			return true
		case <-wait.C:
		}
	}
}

// begin makes the call, and waits no longer than ctx for it to return. making is that the call makes the communicator.
func (c *Comm) begin(ctx context.Context, what, call string, making bool, fn func(h CommHandle) Result) error {
	scope := c.scope
	if making {
		scope = c.making
	}
	_, err := Bound(ctx, what, func() (struct{}, error) {
		c.mu.Lock()
		defer c.mu.Unlock()
		handle := c.Handle()
		if handle == 0 && !making {
			return struct{}{}, c.gone(what)
		}
		return struct{}{}, scope(func() error {
			if handle != c.Handle() { // it was ended while the context was made current
				return c.gone(what)
			}
			if r := fn(handle); r != InProgress {
				return c.lib.check(call, r)
			}
			return nil
		})
	})
	return err
}

// wait asks until the call is done. If it cannot know that, the error is a [*StuckError].
func (c *Comm) wait(ctx context.Context, what, call string) error {
	began, limit := time.Now(), near
	for pause := shortest; ; pause = min(2*pause, limit) {
		if limit == near && time.Since(began) > soon {
			limit = longest
		}
		state, err := c.ask()
		if err == nil && state != InProgress {
			return c.lib.check(call, state)
		}
		if err == nil && ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		if err != nil {
			return &StuckError{Library: libraryName, What: what, Err: err, Abortable: c.owned}
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
	if c.stuckNow() { // a thread may be inside NCCL for good
		return c.gone(call)
	}
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

func (c *Comm) setStuck(cause error, settled <-chan struct{}) {
	c.setCause(cause)
	c.state.Lock()
	defer c.state.Unlock()
	c.stuck, c.settled = true, settled
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
