package cuda

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/symmem/symmem/device"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/errs"
)

// Stream is a queue of work of the GPU. It implements [device.Stream]. All methods may be called from several goroutines at
// once, but not from host functions.
type Stream struct {
	dev      *Device
	failures failures
	debts    debts

	mu      sync.Mutex // held during the driver's calls, so that the handle stays good
	handle  cu.StreamHandle
	closed  bool
	capture *capture       // what the stream takes part in; it may have ended, see recording
	pinned  *capture       // by lock, until unlock
	before  cu.EventHandle // recorded when it last began a capture or joined one; 0 if it never did
	waits   waits
	ops     [4]cu.BatchMemOp // what a wait passes to the driver; here, so that it allocates nothing
	work    *workLane        // for work of the CPU; nil until there is some
	ends    *workLane        // that of the work of the CPU that was enqueued last, or nil if that was something else
	handed  bool             // somebody has the handle, and may enqueue past this package
	left    cu.EventHandle   // of a stream that was destroyed with work in it: complete when that has ended; else 0
	behind  bool             // its Close has ended, and left that work behind
	over    atomic.Bool      // it is closed and has no work
}

// NewStream returns a new stream, which is not ordered against the NULL stream.
func (d *Device) NewStream() (device.Stream, error) { return d.newStream("NewStream", false) }

// NewWorkStream returns a stream of the highest priority, for what work of the CPU enqueues: see createUrgent.
func (d *Device) NewWorkStream() (device.Stream, error) { return d.newStream("NewWorkStream", true) }

func (d *Device) newStream(call string, urgent bool) (device.Stream, error) {
	if err := d.enter(call); err != nil {
		return nil, err
	}
	defer d.leave()
	s := &Stream{dev: d}
	if err := d.needProgress(); err != nil {
		return nil, fmt.Errorf("making a stream: %w", err)
	}
	d.faultMu.Lock()
	reports := len(d.faultPages) > 0
	d.faultMu.Unlock()
	if reports {
		if err := d.needCells(fewCells); err != nil {
			return nil, fmt.Errorf("making a stream: %w", err)
		}
	}
	d.making.Lock()
	defer d.making.Unlock()
	create := func() error {
		return d.drv.Check("cuStreamCreate", d.drv.StreamCreate(&s.handle, cu.StreamNonBlocking))
	}
	if urgent {
		create = func() error { return d.createUrgent(&s.handle) }
	}
	if err := create(); err != nil {
		return nil, fmt.Errorf("making a stream: %w", err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.streams[s] = struct{}{}
	return s, nil
}

// Device returns the device that the stream's work runs on.
func (s *Stream) Device() device.Device { return s.dev }

// Handle returns the CUstream, for calls of libraries that take one. It is valid until Close. The caller has to order what is enqueued without this
// package. A closed stream has handle 0.
func (s *Stream) Handle() uintptr {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.handed = true
	return uintptr(s.handle)
}

// enqueue enqueues work by fn, which is one call of the driver named native.
func (s *Stream) enqueue(call, native string, fn func() cu.Result) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ends = nil
	return s.enqueueLocked(call, native, fn)
}

// enqueueMark is enqueue for work that only shows how far the stream has come: work of the CPU before and after it counts as directly following,
// since nobody can tell when the second begins.
func (s *Stream) enqueueMark(call, native string, fn func() cu.Result) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.enqueueLocked(call, native, fn)
}

// enqueueLocked is enqueue; the stream is locked.
func (s *Stream) enqueueLocked(call, native string, fn func() cu.Result) error {
	if s.closed {
		return closed(call, "stream")
	}
	if err := s.dev.use(call); err != nil {
		return err
	}
	defer s.dev.unuse()
	defer s.pin().unpin()
	r, err := s.dev.try(fn)
	if err != nil {
		return fmt.Errorf("%s: %w", call, err)
	}
	return s.dev.check(call, native, r)
}

// lock begins a call of the driver: it locks the stream, refuses closed ones and makes the context current. unlock must follow
// unless there is an error.
func (s *Stream) lock(call string) error {
	_, err := s.lockBehind(call)
	return err
}

// lockBehind is lock, and returns the lane of the work of the CPU that the stream ends with, or nil if it may end with something else.
func (s *Stream) lockBehind(call string) (*workLane, error) {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return nil, closed(call, "stream")
	}
	if err := s.dev.enter(call); err != nil {
		s.mu.Unlock()
		return nil, err
	}
	s.pinned = s.pin()
	ends := s.ends
	s.ends = nil
	if s.handed {
		ends = nil
	}
	return ends, nil
}

// unlock ends what lock began.
func (s *Stream) unlock() {
	s.dev.leave()
	s.pinned.unpin()
	s.pinned = nil
	s.mu.Unlock()
}

// check returns the error of a result of the driver, with the caller's call before it.
func (d *Device) check(call, native string, r cu.Result) error {
	if r == cu.Success {
		return nil
	}
	return fmt.Errorf("%s: %w", call, d.drv.Check(native, r))
}

// Copy enqueues a copy of bytes from src to dst, which must not overlap and must each be in memory of a GPU that this one can
// reach, or in pinned host memory.
func (s *Stream) Copy(dst, src device.Ptr, bytes int64) error {
	const call = "Copy"
	if err := checkRange(call, "dst", dst, bytes); err != nil {
		return s.prefer(call, err)
	}
	if err := checkRange(call, "src", src, bytes); err != nil {
		return s.prefer(call, err)
	}
	if bytes == 0 {
		return s.usable(call)
	}
	if dst < src.Add(bytes) && src < dst.Add(bytes) {
		return errs.Invalid(call, "dst", fmt.Sprintf("%v with %d bytes from %v", dst, bytes, src),
			"memory that does not overlap with the source")
	}
	// Not cuMemcpyAsync, which treats an address that it does not know as plain host memory, and reads it.
	return s.enqueue(call, "cuMemcpyDtoDAsync", func() cu.Result {
		return s.dev.drv.MemcpyDtoDAsync(dst, src, uint64(bytes), s.handle)
	})
}

// Fill enqueues setting bytes at dst to value.
func (s *Stream) Fill(dst device.Ptr, value byte, bytes int64) error {
	const call = "Fill"
	if err := checkRange(call, "dst", dst, bytes); err != nil {
		return s.prefer(call, err)
	}
	if bytes == 0 {
		return s.usable(call)
	}
	return s.enqueue(call, "cuMemsetD8Async", func() cu.Result {
		return s.dev.drv.MemsetD8Async(dst, value, uint64(bytes), s.handle)
	})
}

// WriteValue32 enqueues writing value to the aligned 32-bit word at p, which may be on another GPU. All earlier writes of the stream are visible to
// everybody who sees it.
func (s *Stream) WriteValue32(p device.Ptr, value uint32) error {
	const call = "WriteValue32"
	if err := checkWord(call, p); err != nil {
		return s.prefer(call, err)
	}
	return s.enqueue(call, "cuStreamWriteValue32", func() cu.Result {
		return s.dev.drv.StreamWriteValue32(s.handle, p, value, cu.WriteValueDefault)
	})
}

// WaitValue32 makes the stream wait until the aligned 32-bit word at p is value or beyond it, modulo 2^32. The package comment says how the wait ends
// if nobody writes the word.
func (s *Stream) WaitValue32(p device.Ptr, value uint32) error {
	const call = "WaitValue32"
	if err := checkWord(call, p); err != nil {
		return s.prefer(call, err)
	}
	if err := s.lock(call); err != nil {
		return err
	}
	defer s.unlock()
	return s.enqueueWait(call, p, value)
}

// usable returns the error of calls that do nothing: ErrClosed if the stream is closed.
func (s *Stream) usable(call string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return closed(call, "stream")
	}
	return nil
}

// prefer returns ErrClosed if the stream is closed, and otherwise err.
func (s *Stream) prefer(call string, err error) error {
	if e := s.usable(call); e != nil {
		return e
	}
	return err
}

// recording returns the capture that the stream takes part in, or nil; mu is held.
func (s *Stream) recording() *capture {
	if s.capture != nil && s.capture.over() {
		s.capture = nil
	}
	return s.capture
}

// Capturing reports whether the stream is recording, because of its own BeginCapture or of an event it waited for.
func (s *Stream) Capturing() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return !s.closed && s.recording() != nil
}

// Query reports without waiting whether all work has ended. Errors of host functions and waits are left for Synchronize; a lost
// context is an error here too.
func (s *Stream) Query() (bool, error) {
	const call = "Query"
	if !s.mu.TryLock() {
		return false, s.dev.open(call) // somebody is enqueueing work at this moment
	}
	defer s.mu.Unlock()
	if s.closed {
		return false, closed(call, "stream")
	}
	if s.recording() != nil {
		return false, capturing(call)
	}
	if err := s.dev.enter(call); err != nil {
		return false, err
	}
	defer s.dev.leave()
	r := s.dev.drv.StreamQuery(s.handle)
	if r == cu.NotReady {
		return false, nil
	}
	s.dev.ran.see()
	return r == cu.Success, s.dev.check(call, "cuStreamQuery", r)
}

// mark is an event that is complete when the work before it has ended. The zero mark is complete.
type mark struct {
	event    cu.EventHandle
	borrowed bool // it is the stream's own, and not to be dropped
}

// drop returns the event to the pool for other waits.
func (m mark) drop(d *Device) {
	if m.event != 0 && !m.borrowed {
		d.dropMark(m.event)
	}
}

// dropLocked is drop with the device's mu held.
func (m mark) dropLocked(d *Device) {
	if m.event != 0 && !m.borrowed {
		d.dropMarkLocked(m.event)
	}
}

// mark marks the work enqueued so far; for a capturing stream, what was enqueued before its capture. A stream that was closed may still have work.
func (s *Stream) mark(ctx context.Context) (mark, error) {
	if err := s.lockWithin(ctx); err != nil {
		return mark{}, err
	}
	defer s.mu.Unlock()
	if s.handle == 0 {
		return mark{event: s.left, borrowed: true}, nil
	}
	if err := s.dev.push(); err != nil {
		return mark{}, err
	}
	defer s.dev.pop()
	if s.recording() != nil {
		return mark{event: s.before, borrowed: true}, nil
	}
	switch r := s.dev.drv.StreamQuery(s.handle); r {
	case cu.Success:
		s.dev.ran.see()
		return mark{}, nil
	case cu.NotReady:
		return s.recordMark()
	default:
		return mark{}, s.dev.drv.Check("cuStreamQuery", r)
	}
}

// lockWithin locks mu, or returns the error of ctx: a call of another goroutine may hold mu for long if the driver's queue is full.
func (s *Stream) lockWithin(ctx context.Context) error {
	for begin := time.Now(); !s.mu.TryLock(); pauseBetween(begin) {
		if err := ctx.Err(); err != nil {
			return err
		}
	}
	return nil
}

// recordMark records an event for waiting behind the work so far; mu is held and the context is current.
func (s *Stream) recordMark() (mark, error) {
	m, err := s.dev.takeMark()
	if err != nil {
		return mark{}, err
	}
	if r := s.dev.drv.EventRecord(m, s.handle); r != cu.Success {
		s.dev.dropMark(m)
		return mark{}, s.dev.drv.Check("cuEventRecord", r)
	}
	return mark{event: m}, nil
}

// Synchronize waits until all work enqueued before the call has ended, or for ctx. It returns the first failure of host functions and waits that was
// not returned yet, as a [*device.WorkError], and what the stream's kernels have reported by fault words and cells and was not returned yet. The work
// of a graph counts as work of the stream that it was launched on. If ctx ends first, its error is returned and the work goes on.
func (s *Stream) Synchronize(ctx context.Context) error {
	const call = "Synchronize"
	if ctx == nil {
		return errs.Invalid(call, "ctx", nil, "a context")
	}
	d := s.dev
	if err := s.lockWithin(ctx); err != nil {
		return fmt.Errorf("synchronizing the stream: %w", err)
	}
	closedNow, recording := s.closed, s.recording() != nil
	s.mu.Unlock()
	if closedNow {
		return closed(call, "stream")
	}
	if recording {
		return capturing(call)
	}
	if err := d.use(call); err != nil {
		return err
	}
	defer d.unuse()
	owed := s.owed()
	m, err := s.mark(ctx)
	if err == nil {
		err = d.await(ctx, m.event, time.Time{})
		m.drop(d)
	}
	if err != nil {
		return fmt.Errorf("synchronizing the stream: %w", err)
	}
	if err := join(s.failures.take(), s.pay(owed)); err != nil {
		return fmt.Errorf("work of the stream: %w", err)
	}
	return d.fault()
}

// Close waits for the work, no longer than the device's WaitTimeout, and releases the stream. It returns the first failure that no Synchronize has
// returned; the stream is closed then, too. A second Close returns ErrClosed.
func (s *Stream) Close() error {
	const call = "Close"
	if err := s.dev.use(call); err != nil {
		return err // closing the device closes the stream
	}
	defer s.dev.unuse()
	deadline := time.Now().Add(s.dev.waitTimeout)
	if err := s.beginClose(deadline, false); err != nil {
		return err
	}
	_, err := s.finishClose(deadline)
	return err
}

// beginClose makes the stream take no more work, and its waits end by the deadline. force closes a capturing stream, too, and
// throws its capture away.
func (s *Stream) beginClose(deadline time.Time, force bool) error {
	const call = "Close"
	within, cancel := context.WithDeadline(context.Background(), deadline)
	defer cancel()
	if err := s.lockWithin(within); err != nil {
		return fmt.Errorf("%s: another call of the stream does not return: %w", call, err)
	}
	defer s.mu.Unlock()
	if s.closed {
		return closed(call, "stream")
	}
	if c := s.recording(); c != nil {
		if !force {
			return capturing(call)
		}
		s.abandon(c)
	}
	s.closed = true // and it is in a capture that it has joined until that ends
	s.waits.end(deadline)
	return nil
}

// finishClose waits for the work until deadline and frees the stream. It reports whether the work had ended.
func (s *Stream) finishClose(deadline time.Time) (done bool, err error) {
	d := s.dev
	err = s.drain(deadline)
	done = err == nil || errors.Is(err, cu.ErrContextLost)
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		err = fmt.Errorf("%w after %v: %w", errWorkLeft, d.waitTimeout, err)
	case !done:
		done = s.ended(deadline) // it is the wait that has failed, and perhaps not the work
	}
	failed := []error{err}
	if e := d.push(); e != nil {
		failed = append(failed, e)
	} else {
		s.mu.Lock()
		// The driver frees a stream that still has work when the work has ended.
		failed = append(failed, d.drv.Check("cuStreamDestroy", d.drv.StreamDestroy(s.handle)))
		mark{event: s.before}.drop(d)
		s.handle, s.before = 0, 0
		s.mu.Unlock()
		d.pop()
	}
	if done {
		s.forget() // one that still works stays known, so that the device does not free what it uses
	}
	failed = append(failed, s.failures.take(), s.pay(s.owed()))
	if done {
		s.leave()
	} else {
		s.mu.Lock()
		s.behind = true
		s.mu.Unlock()
	}
	if err := errors.Join(failed...); err != nil {
		return done, fmt.Errorf("work of the closed stream: %w", err)
	}
	return done, nil
}

// forget gives back what the stream's work needed, which has ended.
func (s *Stream) forget() {
	d := s.dev
	s.waits.clear(d)
	if s.work != nil {
		s.work.drop(d)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.streams, s)
	s.over.Store(true)
}

// drain waits for the work of a closed stream.
func (s *Stream) drain(deadline time.Time) error {
	d := s.dev
	if err := d.push(); err != nil {
		return err
	}
	s.mu.Lock()
	m, err := s.recordMark()
	s.mu.Unlock()
	d.pop()
	if err != nil {
		return err
	}
	// The waits end by the deadline; the work after them has a little longer.
	if err := d.await(context.Background(), m.event, deadline.Add(time.Second)); err != nil {
		s.mu.Lock()
		s.left = m.event
		s.mu.Unlock()
		d.keepMark(m.event)
		return err
	}
	m.drop(d)
	return nil
}

// ended asks the driver, until the deadline, whether a closed stream has nothing left to do. It is for when no event can be waited for.
func (s *Stream) ended(deadline time.Time) bool {
	for begin := time.Now(); ; pauseBetween(begin) {
		if err := s.dev.push(); err != nil {
			return false
		}
		r := s.dev.drv.StreamQuery(s.handle)
		s.dev.pop()
		if r == cu.Success || r.Sticky() {
			return true
		}
		if r != cu.NotReady || time.Now().After(deadline) {
			return false
		}
	}
}

// checkRange refuses a number of bytes below 0, and a range that no address space has.
func checkRange(call, arg string, p device.Ptr, bytes int64) error {
	if bytes < 0 {
		return errs.Invalid(call, "bytes", bytes, "0 and more")
	}
	if bytes > 0 && (p.IsNil() || p.Add(bytes) < p) {
		return errs.Invalid(call, arg, fmt.Sprintf("%v with %d bytes", p, bytes), "memory that the device can address")
	}
	return nil
}

// checkWord refuses what cannot be the address of a 32-bit word.
func checkWord(call string, p device.Ptr) error {
	if p%4 != 0 {
		return errs.Invalid(call, "p", p, "a multiple of 4")
	}
	return checkRange(call, "p", p, 4)
}
