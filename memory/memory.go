package memory

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/kernels/tuning"
)

// Memory is one rank's symmetric memory: a backend, the group it serves, and every allocation made through it. It is safe
// for use by several goroutines; collective calls must still come in the same order on every rank.
type Memory struct {
	backend backend.Backend
	group   *group.Group
	device  device.Device
	log     *slog.Logger
	opts    Options

	oversubscribed bool
	peerErr        func() error // the group's Err, kept because a method value allocates

	// collective serialises the collective operations of this rank, so that their order is one order.
	collective turn
	operations uint64                     // rendezvous that all ranks agreed on; guarded by collective
	workspace  pool                       // guarded by collective
	devices    []string                   // every rank's device, by rank, once a workspace was taken; guarded by collective
	heaps      []*Heap                    // guarded by collective
	heapsMade  uint64                     // heaps that all ranks agreed on; guarded by collective
	tuning     atomic.Pointer[tuning.Set] // that SetTuning gave
	capability atomic.Int64               // the least compute capability of the ranks' GPUs, once they have told each other
	left       bool                       // Close has told the others, but something was still at work; guarded by collective
	agreed     bool                       // all ranks have agreed to close; guarded by collective
	signals    atomic.Pointer[signals]    // made with the signal pads by the first rendezvous
	untold     []signals                  // given up by this rank, where others may have been told that all have theirs; guarded by collective
	compiled   compiled
	copies     copies

	locals    locals // calls that Close waits for before it closes the backend
	enqueuing entry  // stands for the memory's own signals in calls that enqueue them
	holds     holds  // calls that enqueue work on any memory of it

	closed   atomic.Bool // Close was called; set under mu
	again    atomic.Bool // the last Close has kept everything, and can be called again
	gone     atomic.Bool // Close gives everything back, or has: work that a graph has kept must not touch it
	released atomic.Bool // Close has heard that nobody's device is at work

	mu        sync.Mutex
	entries   []*entry       // sorted by address, empty allocations first
	atRelease []func() error // see AtRelease
}

// Options sets what a Memory keeps for its users. Zero values mean the defaults. What is out of bounds is brought inside of them.
type Options struct {
	// Channels is the number of channels for Signal, Wait and Barrier: 1 to 1024, default 64.
	Channels int
	// KernelTimeout bounds every wait of device work; default 2 minutes, as for what is not positive.
	KernelTimeout time.Duration
	// MaxBlocks bounds the blocks of the kernel of any plan; default 0, no bound.
	MaxBlocks int
	// RankOrder keeps Auto, of every plan that reduces, to forms that combine in the order of the ranks, as RankOrder of package kernels' options does for one plan. Every rank gives the same.
	RankOrder bool
	// Logger takes one event for each allocation, rendezvous and release; default: none are logged.
	Logger *slog.Logger
}

// entry is what a Memory knows about one allocation.
type entry struct {
	alloc   backend.Allocation
	name    string
	window  *Window         // nil before rendezvous
	place   string          // where it was allocated, for leak reports
	heap    *Heap           // that the allocation is; nil for all others; guarded by the memory's mu
	piece   *HeapAllocation // of a heap, which the entry stands for; such an entry is in no list of the memory
	whole   *entry          // of the heap, for such an entry
	own     bool            // the memory has made the allocation for itself
	adopted bool            // Register has made it of memory of the caller
	untold  bool            // this rank does not know whether others have a window of it; guarded by the memory's mu
	left    bool            // this rank has told the others that it frees the allocation, but its device was still busy

	number uint64 // of the rendezvous that has mapped it, or that this rank has given up; the same on all ranks

	meeting bool // a rendezvous of it is under way; guarded by the memory's mu, as the window is

	uses    atomic.Int64 // calls that enqueue work on it at this moment
	closing atomic.Bool  // no more work is enqueued on it
	gone    atomic.Bool  // it is being released, or was: work that a graph has kept must not touch it
}

// released reports whether work that a graph has kept must not touch the allocation, or the heap that it is a piece of, any more.
func (e *entry) released() bool { return e.gone.Load() || e.whole != nil && e.whole.gone.Load() }

// use begins enqueueing work on the allocation, unless it is being freed, or the heap that it is a piece of; then the answer is ErrClosed. unuse ends it.
func (e *entry) use() error {
	if e.whole != nil {
		if err := e.whole.use(); err != nil {
			return err
		}
	}
	e.uses.Add(1)
	if e.closing.Load() {
		e.unuse()
		return errs.ErrClosed
	}
	return nil
}

func (e *entry) unuse() {
	e.uses.Add(-1)
	if e.whole != nil {
		e.whole.unuse()
	}
}

// seal refuses work from now on, and waits for calls that are enqueueing some.
func (e *entry) seal(ctx context.Context) error {
	e.closing.Store(true)
	return poll(ctx, func() bool { return e.uses.Load() == 0 })
}

// New returns the memory of this rank of g over b, which it owns from then on. It is local: the first rendezvous makes the workspace.
func New(b backend.Backend, g *group.Group, opts *Options) *Memory {
	m := &Memory{backend: b, group: g, device: b.Device(), peerErr: g.Err}
	if opts != nil {
		m.opts = *opts
	}
	m.opts.Channels = min(max(cmp.Or(m.opts.Channels, 64), 1), mostChannels)
	if m.opts.KernelTimeout <= 0 {
		m.opts.KernelTimeout = 2 * time.Minute
	}
	m.opts.MaxBlocks = max(m.opts.MaxBlocks, 0)
	m.oversubscribed = g.Oversubscribed()
	m.log = m.opts.Logger
	if m.log == nil {
		m.log = slog.New(slog.DiscardHandler)
	}
	m.log = m.log.With("backend", b.Name(), "group", g.Name(), "rank", g.Rank())
	return m
}

// made refuses a memory that New did not make.
func (m *Memory) made(call string) error {
	if m == nil || m.group == nil {
		return errs.Invalid(call, "memory", "the zero Memory", "one that New gave")
	}
	return nil
}

// orZero is the memory, or a zero one for nil: what cannot fail says of both what there is, which is nothing.
func (m *Memory) orZero() *Memory {
	if m == nil {
		return new(Memory)
	}
	return m
}

// Backend is the backend below.
func (m *Memory) Backend() backend.Backend { return m.orZero().backend }

// Group is the group whose ranks share the memory.
func (m *Memory) Group() *group.Group { return m.orZero().group }

// Capabilities says what the backend can do here, with the number of peers whose memory has an address in this process.
func (m *Memory) Capabilities() backend.Capabilities {
	if m.made("Capabilities") != nil {
		return backend.Capabilities{}
	}
	c := m.backend.Capabilities()
	if c.PeerPointers {
		c.PointerPeers = m.group.Size() - 1
	}
	return c
}

// Device is the device whose memory it is.
func (m *Memory) Device() device.Device { return m.orZero().device }

// Channels is the number of channels for Signal, Wait and Barrier.
func (m *Memory) Channels() int { return m.orZero().opts.Channels }

// KernelTimeout bounds every wait of device work.
func (m *Memory) KernelTimeout() time.Duration { return m.orZero().opts.KernelTimeout }

// MaxBlocks is the most blocks that the kernel of a plan takes on this rank's device; 0 is no bound.
func (m *Memory) MaxBlocks() int { return m.orZero().opts.MaxBlocks }

// RankOrder reports whether Auto takes only forms that combine in the order of the ranks.
func (m *Memory) RankOrder() bool { return m.orZero().opts.RankOrder }

// Tuning is the tables that say which form of a collective is the fastest: those that SetTuning gave, or else [tuning.Default].
func (m *Memory) Tuning() *tuning.Set {
	if m.made("Tuning") != nil {
		return nil
	}
	if s := m.tuning.Load(); s != nil {
		return s
	}
	return tuning.Default(m.device.Kind() == device.Host)
}

// SetTuning gives plans that are made from now on other tables; nil gives the default back. Every rank of the group gives the same, at the same place in the
// order of its collective calls: it is local, and ranks that go by different tables may not agree on a form, so that making a plan is ErrMismatch. Nobody may change the tables
// afterwards. [github.com/symmem/symmem.Open] does this with the tables that the ranks have agreed on.
func (m *Memory) SetTuning(s *tuning.Set) { m.orZero().tuning.Store(s) }

// capabilityOf is the compute capability of a GPU, ten times the major number plus the minor one, and 0 of other devices.
func capabilityOf(d device.Device) int {
	if g, ok := d.(interface{ ComputeCapability() int }); ok {
		return g.ComputeCapability()
	}
	return 0
}

// LeastCapability is the least compute capability of the ranks' GPUs, 90 for 9.0: the ranks of a plan have one kernel. 0 on other devices. All ranks get the same once they have told each other in a
// rendezvous, in making a plan, or in MeetCapability; before, each gets that of its own.
func (m *Memory) LeastCapability() int {
	m = m.orZero()
	if c := m.capability.Load(); c != 0 {
		return int(c)
	}
	return capabilityOf(m.device)
}

// MeetCapability makes LeastCapability the same on all ranks: they tell each other. Collective: it blocks until all ranks have come.
func (m *Memory) MeetCapability(ctx context.Context) error {
	if err := m.made("MeetCapability"); err != nil {
		return err
	}
	return m.InTurn(ctx, "meeting devices", func(ctx context.Context, gaveUp error) error {
		_, err := m.exchange(ctx, m.record("devices", "", &Record{}), cmp.Or(gaveUp, m.Err()))
		return err
	})
}

// Oversubscribed reports whether the group was oversubscribed ([group.Group.Oversubscribed]) when the memory was made. A rank that polls a peer's
// flag for long may then keep that peer from setting it.
func (m *Memory) Oversubscribed() bool { return m.orZero().oversubscribed }

// Err is nil as long as the memory can be used: otherwise ErrClosed or the group's error (ErrPeerLost). It is cheap.
func (m *Memory) Err() error {
	if err := m.made("using symmetric memory"); err != nil {
		return err
	}
	if err := m.Closed(); err != nil {
		return err
	}
	return m.group.Err()
}

// Closed is ErrClosed once Close was called, and nil before, whatever has become of the group. It is cheap.
func (m *Memory) Closed() error {
	if err := m.made("using symmetric memory"); err != nil {
		return err
	}
	if m.closed.Load() {
		return fmt.Errorf("symmetric memory of rank %d: %w", m.group.Rank(), errs.ErrClosed)
	}
	return nil
}

// kept is the error of work that a graph has kept until the memory was closed; nil before.
func (m *Memory) kept() error {
	if m.gone.Load() {
		return m.Closed()
	}
	return nil
}

// Allocate returns bytes of this rank's memory, filled with zeros; 0 bytes is a valid allocation without memory. The name takes part in the
// agreement of the rendezvous and may be empty. ErrInvalid if bytes is negative, ErrNoMemory if there is not that much, ErrClosed or
// ErrPeerLost if the memory cannot be used any more.
//
// It is local, except over a backend whose capabilities say CollectiveAllocate. There it is collective: the sizes are compared first, and
// a difference is ErrMismatch on every rank.
func (m *Memory) Allocate(ctx context.Context, bytes int64, name string) (backend.Allocation, error) {
	if err := m.made("Allocate"); err != nil {
		return nil, err
	}
	if err := errs.Given("Allocate", "ctx", ctx, "a context"); err != nil {
		return nil, err
	}
	return m.allocate(ctx, bytes, name, callerPlace())
}

func (m *Memory) allocate(ctx context.Context, bytes int64, name, place string) (backend.Allocation, error) {
	var invalid error
	if bytes < 0 {
		invalid = errs.Invalid("Allocate", "bytes", bytes, "0 or more")
	}
	if m.backend.Capabilities().CollectiveAllocate {
		return inTurn(ctx, &m.collective, fmt.Sprintf("allocating %d bytes", bytes), func(ctx context.Context, gaveUp error) (backend.Allocation, error) {
			if _, err := m.exchange(group.Heard(ctx), m.record("allocate", name, &Record{Bytes: bytes}), errors.Join(gaveUp, invalid, m.Err())); err != nil {
				return nil, fmt.Errorf("allocating %d bytes: %w", bytes, err)
			}
			return m.allocateNow(ctx, bytes, name, place)
		})
	}
	if !m.locals.enter() {
		return nil, fmt.Errorf("allocating %d bytes: %w", bytes, m.Closed())
	}
	defer m.locals.leave()
	if err := errors.Join(invalid, m.Err()); err != nil {
		return nil, fmt.Errorf("allocating %d bytes: %w", bytes, err)
	}
	return m.allocateNow(ctx, bytes, name, place)
}

// allocateNow is allocate when nothing speaks against it.
func (m *Memory) allocateNow(ctx context.Context, bytes int64, name, place string) (backend.Allocation, error) {
	began := time.Now()
	ctx = group.Heard(ctx) // where it is collective, a rank that has memory alone is out of step
	var a backend.Allocation
	var err error
	if bytes == 0 {
		a = &emptyAllocation{}
	} else {
		a, err = m.fromBackend(ctx, bytes)
	}
	if m.backend.Capabilities().CollectiveAllocate {
		if vote := m.group.Vote(ctx, "allocate", err); vote != nil {
			if err == nil {
				err = errors.Join(vote, a.Release(context.WithoutCancel(ctx)))
			} else {
				err = vote
			}
		}
	}
	if err != nil {
		err = fmt.Errorf("allocating %d bytes: %w", bytes, err)
		m.group.Excuse(err) // the others may wait for this rank's rendezvous
		return nil, err
	}
	m.add(&entry{alloc: a, name: name, place: place})
	m.log.Info("allocated", "name", name, "address", a.Ptr(), "bytes", bytes, "rounded", a.RoundedBytes(), "took", time.Since(began))
	return a, nil
}

// Empty is an allocation of 0 bytes, for who would register none. Unlike that of Allocate it is local over every backend. ErrClosed or ErrPeerLost if the memory cannot be used any more.
func (m *Memory) Empty(name string) (backend.Allocation, error) {
	if err := m.made("Empty"); err != nil {
		return nil, err
	}
	if !m.locals.enter() {
		return nil, fmt.Errorf("allocating 0 bytes: %w", m.Closed())
	}
	defer m.locals.leave()
	if err := m.Err(); err != nil {
		return nil, fmt.Errorf("allocating 0 bytes: %w", err)
	}
	a := &emptyAllocation{}
	m.add(&entry{alloc: a, name: name, place: callerPlace()})
	return a, nil
}

// Register adopts bytes (> 0) of memory at p, which the caller owns and keeps until Free. Local. ErrUnsupported, with the reason, over a
// backend that adopts none; ErrInvalid for memory that it cannot adopt, as the backend's Register says; ErrClosed or ErrPeerLost if
// the memory cannot be used any more.
func (m *Memory) Register(ctx context.Context, p device.Ptr, bytes int64, name string) (backend.Allocation, error) {
	if err := m.made("Register"); err != nil {
		return nil, err
	}
	if err := errs.Given("Register", "ctx", ctx, "a context"); err != nil {
		return nil, err
	}
	began := time.Now()
	if !m.locals.enter() {
		return nil, fmt.Errorf("registering %d bytes at %s: %w", bytes, p, m.Closed())
	}
	defer m.locals.leave()
	if err := m.Err(); err != nil {
		return nil, fmt.Errorf("registering %d bytes at %s: %w", bytes, p, err)
	}
	if c := m.backend.Capabilities(); !c.Register {
		return nil, c.Missing(m.backend.Name(), "register")
	}
	if bytes <= 0 || p.IsNil() {
		return nil, errs.Invalid("Register", "memory", fmt.Sprintf("%d bytes at %s", bytes, p), "at least 1 byte at an address that is not nil")
	}
	a, err := m.backend.Register(ctx, p, bytes)
	if err = gave(m.backend.Name(), "Register", "allocation", a, err); err != nil {
		err = fmt.Errorf("registering %d bytes at %s: %w", bytes, p, err)
		m.group.Excuse(err)
		return nil, err
	}
	m.add(&entry{alloc: a, name: name, place: callerPlace(), adopted: true})
	m.log.Info("registered", "name", name, "address", p, "bytes", bytes, "took", time.Since(began))
	return a, nil
}

// record fills in what every record of this memory has. The caller holds m.collective.
func (m *Memory) record(kind, name string, r *Record) *Record {
	r.Backend, r.Name, r.Operation = m.backend.Name(), name, m.operations
	r.DeviceUUID, r.Capability = m.device.UUID(), capabilityOf(m.device)
	r.Heaps = m.heapStates()
	if r.DType == "" {
		r.DType = kind
	}
	return r
}

// Rendezvous makes a reachable by every rank and returns its window. Collective: it blocks until all ranks have come. The fields Name,
// DType, Shape and Offset of what say what the caller uses the memory for. They, the sizes and the order of calls must be the same on every
// rank; a difference is ErrMismatch, and nothing is mapped. The window is made once: a later rendezvous of the same allocation agrees again
// and returns the same window.
//
// ErrNotSymmetric if an allocation is not of this memory or was freed. A rank that cannot map fails the call on every rank, with the
// condition of its backend (ErrNoMemory, ErrNotReachable, ErrUnsupported), and it can be tried again. Where a rank gives it up half way, over a backend that
// moves data itself, all wait up to 5 seconds for the others, so that nobody writes to what is freed next. Its other errors are those of collective calls.
func (m *Memory) Rendezvous(ctx context.Context, a backend.Allocation, what Record) (*Window, error) {
	if err := m.made("Rendezvous"); err != nil {
		return nil, err
	}
	if err := errs.Given("Rendezvous", "ctx", ctx, "a context"); err != nil {
		return nil, err
	}
	return inTurn(ctx, &m.collective, "rendezvous", func(ctx context.Context, gaveUp error) (*Window, error) {
		if err := m.makeSignals(ctx); err != nil { // also for a rank that gave up: the others' next step is the same
			return nil, err
		}
		return m.rendezvous(ctx, a, what, gaveUp)
	})
}

// FailRendezvous comes to a rendezvous for which this rank has no allocation, and says why: the others, who may be waiting, are told, and all have that error. Collective, as Rendezvous.
func (m *Memory) FailRendezvous(ctx context.Context, failure error) error {
	if err := m.made("FailRendezvous"); err != nil {
		return err
	}
	if err := errors.Join(errs.Given("FailRendezvous", "ctx", ctx, "a context"), errs.Given("FailRendezvous", "failure", failure, "an error")); err != nil {
		return err
	}
	return m.collective.do(ctx, "rendezvous", func(ctx context.Context, gaveUp error) error {
		if err := m.makeSignals(ctx); err != nil {
			return err
		}
		_, err := m.rendezvous(ctx, nil, Record{}, cmp.Or(gaveUp, failure))
		return err
	})
}

// rendezvous is Rendezvous for callers that hold m.collective, and may have given up.
func (m *Memory) rendezvous(ctx context.Context, a backend.Allocation, what Record, gaveUp error) (*Window, error) {
	began := time.Now()
	e := m.meet(a)
	if e != nil {
		defer m.met(e)
	}
	failure := cmp.Or(gaveUp, m.Err())
	switch {
	case failure != nil:
	case a == nil || e == nil:
		failure = fmt.Errorf("the allocation is not of this memory, or was freed: %w", errs.ErrNotSymmetric)
	default:
		what.Bytes, what.RoundedBytes, what.Mapped = a.Bytes(), a.RoundedBytes(), e.window != nil
		what.Adopted = e.adopted
		if what.Name == "" {
			what.Name = e.name
		}
	}
	mine := m.record("bytes", what.Name, &what)
	records, err := m.exchange(group.Heard(ctx), mine, failure)
	if err != nil {
		return nil, fmt.Errorf("rendezvous %d: %w", mine.Operation, err)
	}
	m.operations++ // only where all ranks agreed, so that they go on agreeing after one that failed
	if e.window != nil {
		return e.window, nil
	}
	w := &Window{memory: m, alloc: a, entry: e, number: m.operations, adopted: slices.ContainsFunc(records, func(r Record) bool { return r.Adopted })}
	e.number = w.number
	if a.Bytes() > 0 {
		mapping, mapErr := m.backend.Rendezvous(group.Heard(ctx), a)
		mapErr = gave(m.backend.Name(), "Rendezvous", "mapping", mapping, mapErr)
		if err := m.group.Vote(group.Heard(ctx), "mapping", mapErr); err != nil { // a rank without the window that the others have could not free it with them
			known := m.leaveMapping(ctx, err)
			if mapErr == nil {
				err = errors.Join(err, mapping.Unmap(context.WithoutCancel(ctx)))
				m.mu.Lock()
				e.untold = !known
				m.mu.Unlock()
			}
			return nil, fmt.Errorf("rendezvous %d: %w", mine.Operation, err)
		}
		w.mapping = mapping
		w.reach()
	}
	m.mu.Lock()
	e.window, e.untold = w, false
	m.mu.Unlock()
	m.log.Info("rendezvous", "operation", mine.Operation, "name", what.Name, "address", a.Ptr(), "bytes", a.Bytes(),
		"offset", what.Offset, "took", time.Since(began))
	return w, nil
}

// leaveMapping waits, where a rank has given a rendezvous up, until all ranks have left it: over a backend that moves data behind the device's back one may
// be writing to the new memory of another, which frees it without asking anybody. It reports whether no rank has a window: the answer to this rank may have been
// lost that all have mapped, and then the others do not come, and may put here.
func (m *Memory) leaveMapping(ctx context.Context, failed error) bool {
	_, behind := backend.QuiescerOf(m.backend)
	_, abandoned := errors.AsType[*group.AbandonedError](failed)
	_, missing := errors.AsType[*group.MissingRanksError](failed)
	if !behind || !abandoned && !missing {
		return true
	}
	within, cancel := context.WithDeadline(context.WithoutCancel(ctx), tellBy(ctx))
	defer cancel()
	err := m.group.Vote(within, "leaving a mapping", nil)
	if err != nil {
		m.log.Debug("a rank may still be mapping", "error", err)
	}
	return abandoned || err == nil
}

// Free releases a when this rank's device has nothing left to do. Without a window it is local, unless this rank has given up a rendezvous that the others may have
// made. With one it is collective: it also waits
// for all ranks, so that nobody unmaps memory that a peer may still write; then every rank unmaps and releases. If ctx ends while
// the device still works, or before an earlier collective call has ended, the memory is kept on this rank, and Free can be called again; it has waited up to
// 5 seconds for the others then, to tell them. If a peer is lost, this rank's memory is released and the error is ErrPeerLost; if the ranks free different memory at once, or one of them
// is in another call, likewise with ErrMismatch, and if one does not come in time, with that error, except over a backend that moves data itself, where it is kept as after a context that has ended. Freeing twice is ErrClosed, and so is freeing what has a window after Close, even if that has kept it.
func (m *Memory) Free(ctx context.Context, a backend.Allocation) error {
	if err := m.made("Free"); err != nil {
		return err
	}
	if err := errors.Join(errs.Given("Free", "ctx", ctx, "a context"), errs.Given("Free", "allocation", a, "one that Allocate or Register gave")); err != nil {
		return err
	}
	if !m.locals.enter() {
		return fmt.Errorf("freeing %d bytes: %w", a.Bytes(), m.Closed())
	}
	e := m.remove(a, true)
	if e != nil {
		defer m.locals.leave()
		return m.freeEntry(ctx, e, nil)
	}
	m.locals.leave()
	return m.collective.do(ctx, fmt.Sprintf("freeing %d bytes", a.Bytes()), func(ctx context.Context, gaveUp error) error { return m.free(ctx, a, gaveUp) })
}

// free is Free for callers that hold m.collective, and may have given up.
func (m *Memory) free(ctx context.Context, a backend.Allocation, gaveUp error) error {
	if err := m.Closed(); err != nil { // the others have told of all their memory in Close, and come to no vote about this
		return fmt.Errorf("freeing: %w", err)
	}
	e := m.remove(a, false)
	if e == nil {
		return fmt.Errorf("freeing symmetric memory: %w", errs.ErrClosed)
	}
	return m.freeEntry(ctx, e, gaveUp)
}

// freeEntry frees what was taken out of the entries, and puts it back if the device still works on it.
func (m *Memory) freeEntry(ctx context.Context, e *entry, gaveUp error) error {
	a, began := e.alloc, time.Now()
	var busy, err error
	switch {
	case e.window != nil || e.untold:
		// Ranks that free different memory at once are told: each would go on with what a peer has freed.
		busy, err = m.quiesce(ctx, fmt.Sprintf("freeing what rendezvous %d has mapped", e.number), e.left, gaveUp, e.gone.Store, e)
		e.left = busy != nil
	case gaveUp != nil:
		busy = gaveUp
	case a.Bytes() > 0:
		busy, err = m.settle(ctx, e.gone.Store, e)
	}
	if busy != nil {
		e.closing.Store(false)
		m.add(e)
		return fmt.Errorf("freeing %d bytes at %s: %s, so it was kept; free it again: %w", a.Bytes(), a.Ptr(), inUse(busy), busy)
	}
	if own := m.release(ctx, e); own != nil {
		err = errors.Join(err, own)
		// The others know nothing of it, and go on.
		m.group.Excuse(fmt.Errorf("freeing %d bytes at %s: %w", a.Bytes(), a.Ptr(), own))
	}
	m.log.Info("freed", "name", e.name, "address", a.Ptr(), "bytes", a.Bytes(), "took", time.Since(began), "err", err)
	if err != nil {
		return fmt.Errorf("freeing %d bytes at %s (they were released): %w", a.Bytes(), a.Ptr(), err)
	}
	return nil
}

// idle waits until this rank's device, and the library that moves data behind its back if there is one, has nothing left to do. No more
// work is enqueued on the entries that are to go, nor on memory that was refused before.
func (m *Memory) idle(ctx context.Context, going ...*entry) error {
	for _, e := range going {
		if err := e.seal(ctx); err != nil {
			return err
		}
	}
	if err := m.holds.drain(ctx); err != nil {
		return err
	}
	if err := m.device.Synchronize(ctx); err != nil {
		return err
	}
	if q, ok := backend.QuiescerOf(m.backend); ok {
		return q.Quiesce(ctx)
	}
	return nil
}

// idleOrBroken is idle, and tells a device that still works (busy) from one whose context is lost, which does nothing any more, and never will. Nor
// does one that the program has closed, which would be found busy for ever.
func (m *Memory) idleOrBroken(ctx context.Context, going ...*entry) (busy, broken error) {
	busy = m.idle(ctx, going...)
	switch {
	case errors.Is(busy, errs.ErrContextLost):
		broken = busy
	case !errors.Is(busy, errs.ErrClosed):
		return busy, nil
	}
	if q, ok := backend.QuiescerOf(m.backend); ok {
		return q.Quiesce(ctx), broken
	}
	return nil, broken
}

// settle is idleOrBroken for memory that is given back then: gone tells work that a graph has kept that it must not touch that memory any more. It is told so when the device is idle, and what a
// graph has begun meanwhile ends before settle does: else that would work on memory that is released under it, as the caller waits for the other ranks first. gone is taken back if the device is busy.
func (m *Memory) settle(ctx context.Context, gone func(bool), going ...*entry) (busy, broken error) {
	if busy, broken = m.idleOrBroken(ctx, going...); busy != nil {
		return busy, broken
	}
	gone(true)
	if busy, broken = m.idleOrBroken(ctx); busy != nil {
		gone(false)
	}
	return busy, broken
}

// tellTime is how long a rank whose device is at work when the caller's context ends waits for the others, to tell them.
const tellTime = 5 * time.Second

// tellBy is until when it waits: several calls with one context that has ended wait no longer than one. A context does not say when it was cancelled: those of one turn count from when the first of
// them has found that.
func tellBy(ctx context.Context) time.Time {
	since := time.Now()
	if d, ok := ctx.Deadline(); ok && d.Before(since) {
		since = d
	}
	if found, ok := ctx.Value(endedKey{}).(*atomic.Pointer[time.Time]); ok && ctx.Err() != nil && !found.CompareAndSwap(nil, &since) {
		since = *found.Load()
	}
	return since.Add(tellTime)
}

// quiesce waits until this rank's device has nothing left to do and every rank has said so. Every rank comes to the vote,
// even one whose device does not finish in time (busy); one that has voted before (left) does not vote again. Over a backend that
// may move data behind the device's back, this rank is busy as long as a peer that lives is, whose library may still write its memory,
// and all vote again. That this rank's context is lost is an error, and keeps nothing. A rank that gave up before its turn came is busy, whatever its device does. For gone see settle; it is taken back
// where this rank is busy.
func (m *Memory) quiesce(ctx context.Context, op string, left bool, gaveUp error, gone func(bool), going ...*entry) (busy, lost error) {
	var broken error
	if busy = gaveUp; busy == nil {
		busy, broken = m.settle(ctx, gone, going...)
	}
	_, behind := backend.QuiescerOf(m.backend)
	if left && !behind {
		return busy, broken
	}
	failure := broken
	if busy != nil {
		// The caller's context has ended, but the others must be told. Those who have not come by then find that this rank has given up, which tells them
		// the same.
		within, cancel := context.WithDeadline(context.WithoutCancel(ctx), tellBy(ctx))
		defer cancel()
		ctx, failure = within, busy
	}
	// A rank that has not heard that all are idle would keep what the others give back.
	err := m.group.Vote(group.Heard(ctx), op, failure)
	_, alone := errors.AsType[*group.PeerLostError](err) // in this group: a peer that is busy may tell of a loss elsewhere
	if broken != nil && !errors.Is(err, errs.ErrContextLost) {
		err = errors.Join(broken, err)
	}
	if behind && busy == nil && err != nil && !alone && !onlyBroken(err) {
		gone(false)
		return err, nil
	}
	return busy, err
}

// onlyBroken reports whether all ranks that have failed in a vote have lost their contexts, and so are not at work.
func onlyBroken(err error) bool {
	vote, ok := errors.AsType[*group.VoteError](err)
	return ok && !slices.ContainsFunc(vote.Failures, func(f group.RankFailure) bool { return !slices.Contains(f.Conditions, errs.ErrContextLost) })
}

// inUse says what keeps memory, for the error that quiesce has found. One of the vote is about the others, whose libraries may still write it: they are at work, have not come or make another call.
func inUse(busy error) string {
	_, failed := errors.AsType[*group.VoteError](busy)
	_, abandoned := errors.AsType[*group.AbandonedError](busy)
	_, missing := errors.AsType[*group.MissingRanksError](busy)
	if failed || abandoned || missing || errors.Is(busy, errs.ErrMismatch) {
		return "other ranks may still write it"
	}
	return "the device still works on it"
}

// release unmaps and releases one allocation on this rank.
func (m *Memory) release(ctx context.Context, e *entry) error {
	ctx = context.WithoutCancel(ctx)
	var err error
	if h := e.heap; h != nil {
		err = h.end()
		m.heaps = slices.DeleteFunc(m.heaps, func(other *Heap) bool { return other == h })
	}
	err = errors.Join(err, m.copies.forget(e))
	if e.window != nil && e.window.mapping != nil {
		err = errors.Join(err, e.window.mapping.Unmap(ctx))
	}
	return errors.Join(err, e.alloc.Release(ctx))
}

// Close releases everything: it waits for this rank's device and for all ranks, unmaps, releases and closes the backend. Collective.
// Allocations that were not freed are logged as leaks, with the place that made them, and released. Lost peers do not hold it
// up. If ctx ends while this rank's device still works, or before an earlier call that allocates, frees or is collective has ended, nothing is released on this
// rank, and Close can be called again, as after Free; [Memory.Busy] reports that. Closing twice is ErrClosed.
func (m *Memory) Close(ctx context.Context) error {
	if err := m.made("Close"); err != nil {
		return err
	}
	if err := errs.Given("Close", "ctx", ctx, "a context"); err != nil {
		return err
	}
	err := m.collective.do(ctx, "closing symmetric memory", m.close)
	if _, gaveUp := errors.AsType[*TurnError](err); gaveUp {
		m.again.Store(true)
	}
	return err
}

// close is Close for callers that hold m.collective, and may have given up.
func (m *Memory) close(ctx context.Context, gaveUp error) error {
	m.mu.Lock()
	if m.closed.Load() && !m.left {
		m.mu.Unlock()
		m.again.Store(false)
		return fmt.Errorf("closing symmetric memory: %w", errs.ErrClosed)
	}
	m.closed.Store(true)
	going := append(slices.Clone(m.entries), &m.enqueuing)
	m.mu.Unlock()

	var busy, err error
	switch {
	case !m.agreed:
		busy, err = m.quiesce(ctx, "closing", m.left, gaveUp, func(is bool) {
			m.gone.Store(is)
			for _, e := range going {
				e.gone.Store(is)
			}
		}, going...)
	case gaveUp != nil:
		busy = gaveUp
	default: // the others have closed theirs, and come to no vote
		busy, err = m.idleOrBroken(ctx, going...)
	}
	what := inUse(busy)
	if busy == nil {
		m.agreed = true
		// Local calls that are under way end first; those to come find the memory closed.
		if busy = m.locals.end(ctx); busy != nil {
			what, busy = "a call that allocates or frees is still under way", errors.Join(busy, err)
		}
	}
	m.left = busy != nil
	m.again.Store(m.left)
	if busy != nil {
		return fmt.Errorf("closing symmetric memory: %s, so it was kept; close it again: %w", what, busy)
	}
	m.released.Store(true)
	m.mu.Lock()
	kept := m.atRelease
	m.atRelease = nil
	m.mu.Unlock()
	for _, giveBack := range kept {
		err = errors.Join(err, giveBack())
	}
	// The pads of signals may be memory of their own, which the backend must still be there for.
	if s := m.signals.Load(); s != nil {
		err = errors.Join(err, (*s).close())
	}
	for _, s := range m.untold {
		err = errors.Join(err, s.close())
	}
	m.mu.Lock()
	entries := m.entries
	m.entries = nil
	m.mu.Unlock()
	for _, e := range slices.Backward(entries) {
		if !e.own {
			m.log.Warn("symmetric memory was not freed before close", "name", e.name, "address", e.alloc.Ptr(),
				"bytes", e.alloc.Bytes(), "allocated at", e.place)
		}
		err = errors.Join(err, m.release(ctx, e))
	}
	err = errors.Join(err, m.compiled.close(), m.backend.Close(context.WithoutCancel(ctx)))
	if err != nil {
		return fmt.Errorf("closing symmetric memory (it was released): %w", err)
	}
	return nil
}

// AtRelease hands over what could not be given back because the device was at work: giveBack is called when the memory is released, before its allocations and its backend are. Nothing that used the
// memory is at work any more then. Where it was released already, giveBack is called at once, and its error is that of AtRelease; later it is Close's.
func (m *Memory) AtRelease(giveBack func() error) error {
	if err := m.made("AtRelease"); err != nil {
		return err
	}
	if err := errs.Given("AtRelease", "giveBack", giveBack, "a function"); err != nil {
		return err
	}
	m.mu.Lock()
	released := m.released.Load() // Close takes the list after this is set
	if !released {
		m.atRelease = append(m.atRelease, giveBack)
	}
	m.mu.Unlock()
	if released {
		return giveBack()
	}
	return nil
}

// Busy reports whether the last Close found this rank's device, or an earlier call, at work, and so kept everything.
func (m *Memory) Busy() bool { return m != nil && m.again.Load() }

// Find returns the allocation that p is in, its window, and the offset of p from its first byte. It is for those who have only an address: of
// memory that Register adopted, or that a library returned. (A tensor knows its window.) The window is nil before the rendezvous.
// Local. ErrNotSymmetric if p is in no allocation that is not freed.
func (m *Memory) Find(p device.Ptr) (a backend.Allocation, w *Window, offset int64, err error) {
	if err := m.made("Find"); err != nil {
		return nil, nil, 0, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if e, off := m.at(p, 1); e != nil {
		return e.alloc, e.window, off, nil
	}
	return nil, nil, 0, fmt.Errorf("address %s: %w", p, errs.ErrNotSymmetric)
}

// at gives the entry that bytes at an address are in, and the offset in it. Memory may be adopted twice, and in parts: of several entries it is one that has all the bytes, if any
// has, the one that begins last. It is nil if the address is in none. The caller holds m.mu.
func (m *Memory) at(p device.Ptr, bytes int64) (found *entry, offset int64) {
	i, _ := slices.BinarySearchFunc(m.entries, p, func(e *entry, p device.Ptr) int {
		if e.alloc.Ptr() <= p {
			return -1
		}
		return 1
	})
	for i--; i >= 0 && !p.IsNil(); i-- {
		e := m.entries[i]
		off := p - e.alloc.Ptr()
		if uint64(off) >= uint64(e.alloc.Bytes()) {
			continue
		}
		if e.heap != nil {
			if e = e.heap.at(int64(off)); e == nil {
				continue // nothing is allocated there
			}
		}
		if e.end()-int64(off) >= bytes {
			return e, int64(off)
		}
		if found == nil {
			found, offset = e, int64(off)
		}
	}
	return found, offset
}

// end is where in its allocation the entry ends.
func (e *entry) end() int64 {
	if e.piece != nil {
		return e.piece.span.start + e.piece.bytes
	}
	return e.alloc.Bytes()
}

// local gives the entry that the local side of a transfer, bytes at p, is in.
func (m *Memory) local(op, arg string, p device.Ptr, bytes int64) (*entry, error) {
	m.mu.Lock()
	e, off := m.at(p, bytes)
	m.mu.Unlock()
	if e == nil {
		return nil, fmt.Errorf("%s: the local side of %s must be memory that was allocated or registered here: address %s: %w", op, arg, p, errs.ErrNotSymmetric)
	}
	end := e.end()
	if left := end - off; bytes > left {
		return nil, errs.Invalid(op, arg+".Bytes", bytes, fmt.Sprintf("0 to %d, what is left of the allocation at %s", left, p))
	}
	return e, nil
}

// checkStream refuses what is no stream of the memory's device: work on another one would not be waited for when memory is freed.
func (m *Memory) checkStream(op string, s device.Stream) error {
	const allowed = "a stream of the memory's own device"
	if errs.IsNil(s) {
		return errs.Invalid(op, "stream", nil, allowed)
	}
	if d := s.Device(); d != m.device {
		return errs.Invalid(op, "stream", "one of another "+d.Name(), fmt.Sprintf("%s, %s", allowed, m.device.Name()))
	}
	return nil
}

// Holds reports whether a is an allocation of this memory that is not freed yet.
func (m *Memory) Holds(a backend.Allocation) bool { return m.orZero().find(a) != nil }

// Place is the place in the program, file:line, that allocated a.
func (m *Memory) Place(a backend.Allocation) string {
	if e := m.orZero().find(a); e != nil {
		return e.place
	}
	return "unknown place"
}

// Logger takes this memory's events.
func (m *Memory) Logger() *slog.Logger { return m.orZero().log }

// Allocations counts the allocations that are not freed yet, the memory's own workspace not counted.
func (m *Memory) Allocations() int {
	m = m.orZero()
	m.mu.Lock()
	defer m.mu.Unlock()
	n := 0
	for _, e := range m.entries {
		if !e.own {
			n++
		}
	}
	return n
}

func (m *Memory) add(e *entry) {
	m.mu.Lock()
	defer m.mu.Unlock()
	i, _ := slices.BinarySearchFunc(m.entries, e.alloc.Ptr(), func(e *entry, p device.Ptr) int { return cmp.Compare(e.alloc.Ptr(), p) })
	m.entries = slices.Insert(m.entries, i, e)
}

func (m *Memory) find(a backend.Allocation) *entry {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, e := range m.entries {
		if e.alloc == a {
			return e
		}
	}
	return nil
}

// meet finds the entry of a for a rendezvous, until the end of which it is not freed.
func (m *Memory) meet(a backend.Allocation) *entry {
	e := m.find(a)
	if e == nil {
		return nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if !slices.Contains(m.entries, e) {
		return nil // it was freed just now
	}
	e.meeting = true
	return e
}

// met ends what meet began.
func (m *Memory) met(e *entry) {
	m.mu.Lock()
	defer m.mu.Unlock()
	e.meeting = false
}

// remove takes the entry of a out of the list; with local, only if this rank alone knows of it.
func (m *Memory) remove(a backend.Allocation, local bool) *entry {
	m.mu.Lock()
	defer m.mu.Unlock()
	for i, e := range m.entries {
		if e.alloc == a {
			if local && (e.window != nil || e.untold || e.meeting) {
				return nil
			}
			m.entries = slices.Delete(m.entries, i, i+1)
			return e
		}
	}
	return nil
}

// emptyAllocation is an allocation of 0 bytes: valid, without memory.
type emptyAllocation struct{ _ byte } // one byte, so that two of them are two

func (*emptyAllocation) Ptr() device.Ptr               { return 0 }
func (*emptyAllocation) Bytes() int64                  { return 0 }
func (*emptyAllocation) RoundedBytes() int64           { return 0 }
func (*emptyAllocation) Release(context.Context) error { return nil }

// callerPlace is file:line of the first caller outside of the packages that allocate on behalf of others.
func callerPlace() string {
	var pcs [16]uintptr
	return placeOf(pcs[:runtime.Callers(3, pcs[:])])
}

// placeOf is file:line of the first of the callers that is outside of these packages.
func placeOf(pcs []uintptr) string {
	frames := runtime.CallersFrames(pcs)
	place := "unknown place"
	for {
		f, more := frames.Next()
		if f.File != "" {
			place = fmt.Sprintf("%s:%d", f.File, f.Line)
		}
		if !more || !strings.HasPrefix(f.Function, modulePath+".") && !strings.HasPrefix(f.Function, modulePath+"/tensor.") &&
			!strings.HasPrefix(f.Function, modulePath+"/kernels.") && !strings.HasPrefix(f.Function, modulePath+"/collective.") &&
			!strings.HasPrefix(f.Function, modulePath+"/backend.") {
			return place
		}
	}
}

const modulePath = "github.com/symmem/symmem"

// Islands returns, by rank, the lowest rank of the island that it is in: ranks of one island have addresses of each other's memory, unless it was
// adopted. All ranks get the same.
func (m *Memory) Islands() []int {
	if m.made("Islands") != nil {
		return nil
	}
	of := make([]int, m.group.Size())
	if m.backend.Capabilities().PeerPointers {
		return of
	}
	if i, ok := m.backend.(backend.Islander); ok {
		if islands := i.Islands(); islands != nil {
			return slices.Clone(islands)
		}
	}
	for r := range of {
		of[r] = r
	}
	return of
}
