package memory

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
)

// HeapAlign is what every allocation of a [Heap] begins at a multiple of, and what sizes are rounded up to, in bytes.
const HeapAlign = 256

// Heap is symmetric memory of which pieces are taken without any exchange between the ranks: one allocation, and one rendezvous. [Memory.NewHeap]
// makes it.
//
// # Alike on every rank
//
// Every rank asks a heap for the same, in the same order: allocations of the same sizes, dtypes and shapes, frees and calls of Reclaim. Then each
// allocation is at the same offset on every rank. Requests are not compared one by one. Each rank keeps a hash of all its requests, and the ranks
// compare theirs whenever they meet: in every rendezvous on the memory, when a plan is made, and in Check, Reclaim and Close. Where one rank is
// ahead of another, only what both have asked for is compared, except in the last three. Ranks that differ all get a [*group.MismatchError] that names
// the first request that differs and what each rank asked for. After it the heap gives out nothing more and returns that error; close it.
//
// # Freed memory
//
// What is freed is not given out at once, as a peer's device may still be reading or writing it. It waits for a Reclaim, in which every rank waits
// for its own device and for all other ranks, and then fills what was freed with zeros. So new allocations are always zero, before any peer can write
// to them. An allocation that finds no room reclaims by itself: then it is collective, at the same request on every rank.
//
// Methods may be called from several goroutines at once, as long as the order of the requests is the same on every rank.
type Heap struct {
	memory *Memory
	entry  *entry
	number uint64
	nth    uint64 // of the memory's heaps

	// order is the turn of whatever gives out or reclaims memory. Who takes a place in it takes one in the memory's collective too, under asking: so calls
	// have the same order in both.
	asking   sync.Mutex
	order    turn
	compared bool // by a Close; guarded by the memory's collective
	closed   atomic.Bool

	mu     sync.Mutex // taken after the memory's mu
	spans  spans
	live   []*HeapAllocation            // sorted by offset
	empty  map[*HeapAllocation]struct{} // live, of 0 bytes
	freed  []*HeapAllocation            // since the last Reclaim
	log    heapLog
	broken error // the ranks have differed
}

// HeapAllocation is a piece of a [Heap], at the same offset on every rank.
type HeapAllocation struct {
	heap    *Heap
	entry   *entry
	window  *Window
	number  uint64 // of the request
	span    span
	bytes   int64
	callers [8]uintptr

	mu     sync.Mutex
	freed  bool
	ended  bool // nothing works on it any more, and what was kept for it is freed
	tables []device.Ptr
}

// HeapUsage says how a heap's memory is used, in bytes.
type HeapUsage struct {
	Bytes   int64 // of the heap
	Used    int64 // by allocations that are not freed, each rounded up to [HeapAlign]
	Waiting int64 // freed, and given out again after the next Reclaim
	Free    int64 // can be given out
	Largest int64 // the largest piece of what is free
}

// HeapFullError says that a heap has no room for an allocation, even after all that was freed has been reclaimed. It is ErrNoMemory, and the
// same on every rank.
type HeapFullError struct {
	Bytes   int64 // that were asked for
	Size    int64 // of the heap
	Free    int64 // in all
	Largest int64 // the largest piece of them
}

// Error says how much was asked for, how much is free and in which pieces, and what to do.
func (e *HeapFullError) Error() string {
	return fmt.Sprintf("the heap of %d bytes has no room for %d bytes: %d are free, in pieces of at most %d; close tensors of it, or make a larger heap",
		e.Size, e.Bytes, e.Free, e.Largest)
}

// Is reports that a HeapFullError is an ErrNoMemory.
func (e *HeapFullError) Is(target error) bool { return target == errs.ErrNoMemory }

// heapName is the name of a heap's allocation.
const heapName = "heap"

// NewHeap makes a heap of bytes, rounded up to [HeapAlign], on each rank. Collective: it blocks until all ranks have come. A difference is
// ErrMismatch on every rank; bytes that are not positive are ErrInvalid, and where some rank lacks the memory, or cannot make it reachable, every
// rank gets an error that names it (ErrNoMemory, ErrNotReachable). Nothing is left then. Its other errors are those of collective calls. Close the heap.
func (m *Memory) NewHeap(ctx context.Context, bytes int64) (*Heap, error) {
	if err := m.made("NewHeap"); err != nil {
		return nil, err
	}
	if err := errs.Given("NewHeap", "ctx", ctx, "a context"); err != nil {
		return nil, err
	}
	place := callerPlace()
	h, err := inTurn(ctx, &m.collective, "making a heap", func(ctx context.Context, gaveUp error) (*Heap, error) {
		return m.newHeap(ctx, bytes, place, gaveUp)
	})
	if err != nil {
		return nil, fmt.Errorf("making a heap of %d bytes: %w", bytes, err)
	}
	return h, nil
}

func (m *Memory) newHeap(ctx context.Context, bytes int64, place string, gaveUp error) (*Heap, error) {
	ctx = group.Heard(ctx) // all ranks come to each of these steps
	failure := cmp.Or(gaveUp, m.Err())
	if failure == nil && (bytes <= 0 || bytes > math.MaxInt64-HeapAlign) {
		failure = errs.Invalid("NewHeap", "bytes", bytes, fmt.Sprintf("1 to %d", math.MaxInt64-HeapAlign))
	}
	if _, err := m.exchange(ctx, m.record("heap", heapName, &Record{Bytes: bytes}), failure); err != nil {
		return nil, err
	}
	m.heapsMade++ // where all ranks agreed, as rendezvous are counted
	if err := m.makeSignals(ctx); err != nil {
		return nil, err
	}
	bytes = roundUp(bytes)
	alloc, err := m.fromBackend(ctx, bytes)
	if vote := m.group.Vote(ctx, "allocating a heap", err); vote != nil {
		if err == nil {
			vote = errors.Join(vote, alloc.Release(context.WithoutCancel(ctx)))
		}
		return nil, vote
	}
	e := &entry{alloc: alloc, name: heapName, place: place}
	m.add(e)
	w, err := m.rendezvous(ctx, alloc, Record{Name: heapName}, nil)
	if err != nil {
		m.remove(alloc, false)
		return nil, errors.Join(err, alloc.Release(context.WithoutCancel(ctx)))
	}
	h := &Heap{memory: m, entry: e, number: w.number, nth: m.heapsMade, empty: map[*HeapAllocation]struct{}{}}
	h.spans.give(span{0, bytes})
	m.mu.Lock()
	e.heap = h
	m.mu.Unlock()
	m.heaps = append(m.heaps, h)
	return h, nil
}

// pieceNumber is the number of the window of what a heap's request has made: never that of a rendezvous, nor of another heap. It comes again after 2^32
// requests. What has it then is at another place in the heap, or has the place of what was freed. So who goes by numbers goes by places too, and by whether
// what they knew was freed.
func pieceNumber(heap, request uint64) uint64 { return 1<<63 | heap<<32 | request&math.MaxUint32 }

func roundUp(bytes int64) int64 { return (bytes + HeapAlign - 1) / HeapAlign * HeapAlign }

// String names the heap alike on every rank.
func (h *Heap) String() string {
	if h == nil {
		return "no heap"
	}
	return fmt.Sprintf("heap %d", h.number)
}

// Memory is the memory that the heap is of.
func (h *Heap) Memory() *Memory {
	if h == nil {
		return nil
	}
	return h.memory
}

// Bytes is the size of the heap on each rank.
func (h *Heap) Bytes() int64 {
	if h.made("Bytes") != nil {
		return 0
	}
	return h.entry.alloc.Bytes()
}

// Window is the window of the whole heap. Those of its allocations have the same addresses and offsets.
func (h *Heap) Window() *Window {
	if h.made("Window") != nil {
		return nil
	}
	return h.entry.window
}

// made says that NewHeap has not made the heap, if it has not.
func (h *Heap) made(op string) error {
	if h == nil || h.memory == nil {
		return errs.Invalid(op, "heap", "no heap", "one that NewHeap gave")
	}
	return nil
}

// Err is nil as long as the heap gives out memory: otherwise ErrClosed, ErrPeerLost or, where the ranks have differed, a [*group.MismatchError].
func (h *Heap) Err() error {
	if err := h.made("Err"); err != nil {
		return err
	}
	if h.closed.Load() {
		return fmt.Errorf("%s: %w", h, errs.ErrClosed)
	}
	if err := h.memory.Err(); err != nil {
		return fmt.Errorf("%s: %w", h, err)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.broken
}

// Usage says how the heap's memory is used. Local.
func (h *Heap) Usage() HeapUsage {
	if h.made("Usage") != nil {
		return HeapUsage{}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	u := HeapUsage{Bytes: h.Bytes(), Free: h.spans.free, Largest: h.spans.largest()}
	for _, a := range h.freed {
		u.Waiting += a.span.bytes
	}
	u.Used = u.Bytes - u.Free - u.Waiting
	return u
}

// Allocate takes bytes of the heap, which are zero; 0 bytes is a valid allocation without memory. dtype and shape say what it is used for, and are
// compared as bytes is; shape must not be changed later. Local, and it makes no call of the device, unless there is no room and something was freed since the last Reclaim: then it
// is collective, reclaims and tries again. One that gives up behind another call on the heap ([*TurnError]) has asked for nothing. ErrInvalid if bytes is
// negative; a [*HeapFullError] where there is no room; after Close ErrClosed; where the ranks have differed a [*group.MismatchError]; and when it reclaims the
// errors of Reclaim.
func (h *Heap) Allocate(ctx context.Context, bytes int64, dtype string, shape []int64) (*HeapAllocation, error) {
	if err := errors.Join(h.made("Allocate"), errs.Given("Allocate", "ctx", ctx, "a context")); err != nil {
		return nil, err
	}
	if bytes < 0 {
		return nil, errs.Invalid("Allocate", "bytes", bytes, "0 or more")
	}
	reclaim := h.reclaim
	if h.memory.collective.within(ctx) == nil {
		what := fmt.Sprintf("allocating from %s", h)
		here, all := h.join(what)
		defer here.leave()
		if err := here.wait(ctx, what); err != nil {
			all.leave()
			return nil, fmt.Errorf("%d bytes of %s: %w", bytes, h, err)
		}
		kept := true
		defer func() {
			if kept {
				all.leave()
			}
		}()
		reclaim = func(ctx context.Context) error {
			kept = false
			return h.memory.collective.doAt(ctx, h.reclaiming(), h.reclaimNow, all)
		}
	}
	if err := h.Err(); err != nil {
		return nil, fmt.Errorf("allocating %d bytes: %w", bytes, err)
	}
	need := bytes
	if bytes <= h.Bytes() { // else it must not overflow
		need = roundUp(bytes)
	}
	h.mu.Lock()
	number := h.log.add(heapRequest{kind: heapAllocate, bytes: bytes, dtype: dtype, shape: shape})
	at, ok := h.spans.take(need)
	full := !ok && len(h.freed) > 0
	h.mu.Unlock()
	if full {
		if err := reclaim(ctx); err != nil {
			// A rank that gave up is known to have done so.
			h.mu.Lock()
			h.log.add(heapRequest{kind: heapFailed, of: number})
			h.mu.Unlock()
			return nil, fmt.Errorf("allocating %d bytes, for which freed memory has to be reclaimed: %w", bytes, err)
		}
		h.mu.Lock()
		at, ok = h.spans.take(need)
		h.mu.Unlock()
	}
	if !ok {
		h.mu.Lock()
		defer h.mu.Unlock()
		return nil, &HeapFullError{Bytes: bytes, Size: h.Bytes(), Free: h.spans.free, Largest: h.spans.largest()}
	}
	w := h.entry.window
	e := &entry{alloc: h.entry.alloc, name: heapName, whole: h.entry}
	// The window has a number of its own, the same on every rank, and the addresses of the heap's.
	e.window = &Window{memory: h.memory, alloc: w.alloc, entry: e, mapping: w.mapping, number: pieceNumber(h.nth, number), whole: w, near: w.near}
	a := &HeapAllocation{heap: h, entry: e, window: e.window, number: number, span: at, bytes: bytes}
	e.piece = a
	runtime.Callers(2, a.callers[:])
	h.mu.Lock()
	h.keep(a)
	h.mu.Unlock()
	if h.memory.log.Enabled(ctx, slog.LevelDebug) {
		h.memory.log.Debug("allocated from a heap", "heap", h.number, "request", number, "offset", at.start, "bytes", bytes)
	}
	return a, nil
}

// keep adds a to what is live. The caller holds h.mu.
func (h *Heap) keep(a *HeapAllocation) {
	if a.span.bytes == 0 {
		h.empty[a] = struct{}{}
		return
	}
	i, _ := slices.BinarySearchFunc(h.live, a.span.start, byOffset)
	h.live = slices.Insert(h.live, i, a)
}

func byOffset(a *HeapAllocation, offset int64) int { return cmp.Compare(a.span.start, offset) }

// at gives the entry of what is live at the offset; nil if that is nothing.
func (h *Heap) at(offset int64) *entry {
	h.mu.Lock()
	defer h.mu.Unlock()
	i, exact := slices.BinarySearchFunc(h.live, offset, byOffset)
	if !exact {
		i--
	}
	if i < 0 || offset >= h.live[i].span.start+h.live[i].bytes {
		return nil
	}
	return h.live[i].entry
}

// made refuses an allocation that no heap has made.
func (a *HeapAllocation) made(op string) error {
	if a == nil || a.heap == nil {
		return errs.Invalid(op, "allocation", "the zero HeapAllocation", "one that Heap.Allocate gave")
	}
	return nil
}

// orZero is the allocation, or a zero one for nil.
func (a *HeapAllocation) orZero() *HeapAllocation {
	if a == nil {
		return new(HeapAllocation)
	}
	return a
}

// Window is the window of the allocation. It has the heap's addresses and offsets, of which the allocation's are those from Offset on, and a number of
// its own, the same on every rank.
func (a *HeapAllocation) Window() *Window { return a.orZero().window }

// Allocation is the memory of the whole heap.
func (a *HeapAllocation) Allocation() backend.Allocation {
	if a.made("Allocation") != nil {
		return nil
	}
	return a.entry.alloc
}

// Offset is where in the heap the allocation begins: a multiple of [HeapAlign], and 0 for an empty one.
func (a *HeapAllocation) Offset() int64 { return a.orZero().span.start }

// Bytes is the size that was asked for.
func (a *HeapAllocation) Bytes() int64 { return a.orZero().bytes }

// Err is ErrClosed once the allocation was freed, or its heap closed.
func (a *HeapAllocation) Err() error {
	if err := a.made("Err"); err != nil {
		return err
	}
	if a.entry.closing.Load() || a.heap.closed.Load() {
		return fmt.Errorf("allocation of %s: %w", a.heap, errs.ErrClosed)
	}
	return nil
}

// Keep hands over memory of the device, which is freed when nothing works on the allocation any more: at once where that is so already.
func (a *HeapAllocation) Keep(p device.Ptr) {
	if a.made("Keep") != nil {
		return
	}
	a.mu.Lock()
	ended := a.ended // and nobody comes for tables again
	if !ended {
		a.tables = append(a.tables, p)
	}
	a.mu.Unlock()
	if !ended {
		return
	}
	if err := a.heap.memory.device.Free(p); err != nil && !errors.Is(err, errs.ErrClosed) {
		a.heap.memory.log.Warn("memory that was kept for a piece of a heap could not be freed", "heap", a.heap.number, "address", p, "error", err)
	}
}

// Place is the place in the program, file:line, that made the allocation.
func (a *HeapAllocation) Place() string {
	a = a.orZero()
	n := slices.Index(a.callers[:], 0)
	if n < 0 {
		n = len(a.callers)
	}
	return placeOf(a.callers[:n])
}

// Free gives the allocation back to its heap, which gives it out again after the next [Heap.Reclaim]. Local: it waits for nothing, and work that
// is enqueued still has the memory. Freeing twice, or after the heap was closed, is ErrClosed.
func (a *HeapAllocation) Free() error {
	if err := a.made("Free"); err != nil {
		return err
	}
	h := a.heap
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.freed || h.closed.Load() {
		return fmt.Errorf("freeing an allocation of %s: %w", h, errs.ErrClosed)
	}
	a.freed = true
	h.mu.Lock()
	defer h.mu.Unlock()
	a.entry.closing.Store(true)
	h.log.add(heapRequest{kind: heapFree, of: a.number, bytes: a.bytes})
	if a.span.bytes == 0 {
		delete(h.empty, a)
	} else if i, ok := slices.BinarySearchFunc(h.live, a.span.start, byOffset); ok {
		h.live = slices.Delete(h.live, i, i+1)
	}
	h.freed = append(h.freed, a)
	return nil
}

// Check compares what the ranks have asked for so far. Collective: it blocks until all ranks have come. Ranks that differ all get a
// [*group.MismatchError] that names the first request that differs. Its other errors are those of collective calls, and ErrClosed.
func (h *Heap) Check(ctx context.Context) error {
	if err := errors.Join(h.made("Check"), errs.Given("Check", "ctx", ctx, "a context")); err != nil {
		return err
	}
	return h.do(ctx, fmt.Sprintf("checking %s", h), h.check)
}

func (h *Heap) check(ctx context.Context, gaveUp error) error {
	if err := h.Err(); err != nil {
		return fmt.Errorf("checking: %w", err)
	}
	h.mu.Lock()
	state := h.state()
	h.mu.Unlock()
	if err := h.compare(ctx, "check", state, gaveUp); err != nil {
		return fmt.Errorf("checking %s: %w", h, err)
	}
	return nil
}

// join takes a place in the heap's turn and in the memory's.
func (h *Heap) join(what string) (here, all *place) {
	h.asking.Lock()
	defer h.asking.Unlock()
	return h.order.join(what), h.memory.collective.join(what)
}

// do makes a collective call in the heap's turn and the memory's. In a turn of the memory that is had already it needs no turn of the heap: what has that
// may be waiting for the memory's.
func (h *Heap) do(ctx context.Context, what string, call func(ctx context.Context, gaveUp error) error) error {
	c := &h.memory.collective
	if c.within(ctx) != nil {
		return c.do(ctx, what, call)
	}
	here, all := h.join(what)
	return c.doAt(ctx, what, call, here, all)
}

// Reclaim makes what was freed since the last time ready to be given out again, filled with zeros. Collective: it blocks until this rank's device has
// nothing left to do and every rank has come. An error on any rank is an error on every rank, and then what was freed goes on waiting. Ranks that have
// asked for different things all get a [*group.MismatchError], as in Check.
//
// Graphs that hold what was freed must not be launched any more. What the CPU runs or moves, which on the host device is all, is ErrClosed in its stream then; but
// what a GPU runs or copies by itself would write into memory that may be another allocation's. Do not reclaim while a stream is recorded.
func (h *Heap) Reclaim(ctx context.Context) error {
	if err := errors.Join(h.made("Reclaim"), errs.Given("Reclaim", "ctx", ctx, "a context")); err != nil {
		return err
	}
	return h.reclaim(ctx)
}

// reclaim is Reclaim for callers that have given a context.
func (h *Heap) reclaim(ctx context.Context) error { return h.do(ctx, h.reclaiming(), h.reclaimNow) }

func (h *Heap) reclaiming() string { return fmt.Sprintf("reclaiming memory of %s", h) }

// reclaimNow is reclaim in its turn.
func (h *Heap) reclaimNow(ctx context.Context, gaveUp error) error {
	if err := h.Err(); err != nil {
		return fmt.Errorf("reclaiming: %w", err)
	}
	m, began := h.memory, time.Now()
	ctx = group.Heard(ctx) // what the others have again, a rank that has not heard so would not
	// What is reclaimed is what the compared requests have freed, and no more.
	h.mu.Lock()
	going, state := slices.Clone(h.freed), h.state()
	h.mu.Unlock()
	err := gaveUp
	if err == nil {
		err = h.settle(ctx, going)
	}
	// All come, whatever became of their devices: the others wait.
	all := ctx
	if err != nil {
		all = context.WithoutCancel(ctx)
	}
	// When all have come, no device works on what was freed, and none ever will.
	if err := h.compare(all, "reclaim", state, err); err != nil {
		return fmt.Errorf("reclaiming memory of %s: %w", h, err)
	}
	err = h.clear(context.WithoutCancel(ctx), going)
	// When all have come, everybody's copy is zero: peers may write to what is given out.
	if err := m.group.Vote(ctx, "clearing freed memory of a heap", err); err != nil {
		return fmt.Errorf("reclaiming memory of %s: %w", h, err)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.freed = slices.Clone(h.freed[len(going):]) // so that what is gone is not kept alive
	bytes := int64(0)
	for _, a := range going {
		h.spans.give(a.span)
		bytes += a.span.bytes
	}
	h.log.add(heapRequest{kind: heapReclaim, bytes: bytes})
	m.log.Info("reclaimed memory of a heap", "heap", h.number, "allocations", len(going), "bytes", bytes, "took", time.Since(began))
	return nil
}

// settle waits until this rank's device does nothing with what was freed, and keeps graphs from beginning again.
func (h *Heap) settle(ctx context.Context, going []*HeapAllocation) error {
	m := h.memory
	entries := make([]*entry, len(going))
	for i, a := range going {
		entries[i] = a.entry
	}
	if err := errors.Join(m.Err(), m.idle(ctx, entries...)); err != nil {
		return err
	}
	var err error
	for _, a := range going {
		err = errors.Join(err, a.end())
	}
	// A graph may have been launched just before.
	return errors.Join(err, m.idle(ctx))
}

// end keeps everything from working on the allocation. The device does nothing with it.
func (a *HeapAllocation) end() error {
	a.entry.closing.Store(true)
	a.entry.gone.Store(true)
	err := a.heap.memory.copies.forget(a.entry)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.ended = true
	for _, p := range a.tables {
		if freeErr := a.heap.memory.device.Free(p); !errors.Is(freeErr, errs.ErrClosed) { // else the device has gone, and its memory with it
			err = errors.Join(err, freeErr)
		}
	}
	a.tables = nil
	return err
}

// clear fills what was freed with zeros on this rank.
func (h *Heap) clear(ctx context.Context, going []*HeapAllocation) error {
	if len(going) == 0 {
		return nil
	}
	s, err := h.memory.device.NewStream()
	if err != nil {
		return err
	}
	for _, a := range going {
		if a.span.bytes > 0 {
			err = errors.Join(err, s.Fill(h.entry.alloc.Ptr().Add(a.span.start), 0, a.span.bytes))
		}
	}
	return errors.Join(err, s.Synchronize(ctx), s.Close())
}

// Close gives the heap's memory back: it waits for this rank's device and for all ranks. Collective. What was not freed is logged as a leak, with the
// place that allocated it, and ends with the heap. Ranks that have asked for different things all get a [*group.MismatchError], and the heap is closed. If
// ctx ends while this rank's device still works, the heap stays as it was on this rank: close it again. If a peer is lost (ErrPeerLost) this rank's
// memory is given back all the same. Closing twice is ErrClosed.
func (h *Heap) Close(ctx context.Context) error {
	if err := errors.Join(h.made("Close"), errs.Given("Close", "ctx", ctx, "a context")); err != nil {
		return err
	}
	return h.do(ctx, fmt.Sprintf("closing %s", h), h.close)
}

func (h *Heap) close(ctx context.Context, gaveUp error) error {
	m := h.memory
	if err := m.Closed(); err != nil {
		return fmt.Errorf("closing %s: %w", h, err)
	}
	if h.closed.Load() {
		return fmt.Errorf("closing %s: %w", h, errs.ErrClosed)
	}
	var differ error
	if !h.compared {
		h.compared = true
		h.mu.Lock()
		state, broken := h.state(), h.broken
		h.mu.Unlock()
		if broken == nil {
			err := h.compare(ctx, "close", state, gaveUp)
			if mismatch, ok := errors.AsType[*group.MismatchError](err); ok {
				differ = mismatch // freeing tells of everything else
			}
		}
	}
	h.closed.Store(true)
	err := m.free(ctx, h.entry.alloc, gaveUp)
	if err != nil && m.Holds(h.entry.alloc) {
		h.closed.Store(false)
		return fmt.Errorf("closing %s: %w", h, errors.Join(differ, err))
	}
	if err = errors.Join(differ, err); err != nil {
		return fmt.Errorf("closing %s: %w", h, err)
	}
	return nil
}

// end ends all allocations before the heap's memory is released, and tells of those that were not freed.
func (h *Heap) end() error {
	h.closed.Store(true)
	h.mu.Lock()
	live, freed := slices.Clone(h.live), h.freed
	for a := range h.empty {
		live = append(live, a)
	}
	h.live, h.freed, h.empty = nil, nil, map[*HeapAllocation]struct{}{}
	h.mu.Unlock()
	slices.SortFunc(live, func(a, b *HeapAllocation) int { return cmp.Compare(a.number, b.number) })
	var err error
	type leak struct{ count, bytes int64 }
	leaks := map[string]*leak{} // by place: a loop that forgets them gives one line
	for _, a := range live {
		l := leaks[a.Place()]
		if l == nil {
			l = &leak{}
			leaks[a.Place()] = l
		}
		l.count++
		l.bytes += a.bytes
		err = errors.Join(err, a.end())
	}
	for _, place := range slices.Sorted(maps.Keys(leaks)) {
		h.memory.log.Warn("symmetric memory was not freed before its heap was closed", "heap", h.number, "allocated at", place, "allocations", leaks[place].count,
			"bytes", leaks[place].bytes)
	}
	for _, a := range freed {
		err = errors.Join(err, a.end())
	}
	return err
}
