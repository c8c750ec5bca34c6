package host

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/cpu"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
)

// Stream is a queue of work with a goroutine that runs it. It implements [device.Stream] and [device.HostLauncher]. All
// methods may be called from several goroutines at once, but not from work of this device.
type Stream struct {
	dev     *Device
	waitErr func() error  // whyStop, made once because a method value allocates
	wake    chan struct{} // holds one: the worker parks here
	exited  chan struct{} // closed when the worker has ended, or never will start
	closeBy atomic.Int64  // when the waits of a closed stream end, in ns since the device was opened; 0 while it is open

	mu       sync.Mutex
	queue    []op          // enqueued, and not taken by the worker yet
	enqueued uint64        // how much work was ever enqueued
	filled   atomic.Uint64 // how often the queue was empty and then no more, which the worker looks for without mu
	started  bool          // the worker runs, or is about to
	parked   bool          // the worker waits for wake
	closed   bool
	capture  atomic.Pointer[capture] // what the stream takes part in; it may have ended, see recording

	_ cpu.CacheLinePad // the worker's half is apart from that of those who enqueue

	done     progress // how much work has ended
	failures failures

	// Only the worker touches these.
	batch  []op    // what was taken from the queue
	at     int     // the current work in batch
	taken  uint64  // what filled was when batch was taken
	frames []frame // in a graph, the current work at each level of nesting
	pinned pins    // memory of the current work

	launcher atomic.Pointer[Stream] // of what runs a branch of a graph: the stream whose launch it is
	side     func()                 // of the same: replaySide, made once for the same reason as waitErr
}

// newStream makes a stream of d.
func newStream(d *Device) *Stream {
	s := &Stream{dev: d, wake: make(chan struct{}, 1), exited: make(chan struct{})}
	s.waitErr = s.whyStop
	return s
}

// Device returns the device that the stream's work runs on.
func (s *Stream) Device() device.Device { return s.dev }

// Launch enqueues k, whose RunKernel runs on the goroutine of the stream. It allocates nothing.
func (s *Stream) Launch(k device.HostKernel) error {
	if k == nil {
		return errs.Invalid("Launch", "k", nil, "a kernel")
	}
	return s.enqueue(&op{kind: opKernel, kernel: k})
}

// HostFunc enqueues a call of fn on the goroutine of the stream. fn must not call anything of this device.
func (s *Stream) HostFunc(fn func()) error {
	if fn == nil {
		return errs.Invalid("HostFunc", "fn", nil, "a function")
	}
	return s.enqueue(&op{kind: opFunc, what: fn})
}

// Copy enqueues a copy of bytes from src to dst, which must each be in one mapping, now and when the copy runs, and must not
// overlap.
func (s *Stream) Copy(dst, src device.Ptr, bytes int64) error {
	const call = "Copy"
	if bytes == 0 {
		return s.usable(call)
	}
	if err := s.dev.space.check(call, "dst", dst, bytes); err != nil {
		return s.prefer(call, err)
	}
	if err := s.dev.space.check(call, "src", src, bytes); err != nil {
		return s.prefer(call, err)
	}
	if dst < src.Add(bytes) && src < dst.Add(bytes) {
		return errs.Invalid(call, "dst", fmt.Sprintf("%v with %d bytes from %v", dst, bytes, src),
			"memory that does not overlap with the source")
	}
	return s.enqueue(&op{kind: opCopy, dst: dst, src: src, n: uint64(bytes)})
}

// Fill enqueues setting bytes at dst to value.
func (s *Stream) Fill(dst device.Ptr, value byte, bytes int64) error {
	const call = "Fill"
	if bytes == 0 {
		return s.usable(call)
	}
	if err := s.dev.space.check(call, "dst", dst, bytes); err != nil {
		return s.prefer(call, err)
	}
	return s.enqueue(&op{kind: opFill, dst: dst, value: uint32(value), n: uint64(bytes)})
}

// WriteValue32 enqueues writing value to the aligned 32-bit word at p and waking everybody who waits for it, in any process.
func (s *Stream) WriteValue32(p device.Ptr, value uint32) error {
	const call = "WriteValue32"
	if err := s.dev.space.checkWord(call, p); err != nil {
		return s.prefer(call, err)
	}
	return s.enqueue(&op{kind: opWrite, dst: p, value: value})
}

// WaitValue32 makes the stream wait until the aligned 32-bit word at p is value or beyond it, modulo 2^32. A write by WriteValue32 of any process is
// seen at once, a plain write within a millisecond. The wait fails after the WaitTimeout of the options, when their Err reports an error, and when
// the memory is unmapped.
func (s *Stream) WaitValue32(p device.Ptr, value uint32) error {
	const call = "WaitValue32"
	if err := s.dev.space.checkWord(call, p); err != nil {
		return s.prefer(call, err)
	}
	return s.enqueue(&op{kind: opWait, dst: p, value: value})
}

// enqueue puts o at the end of the queue, or into the capture.
func (s *Stream) enqueue(o *op) error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return closed(o.kind.String(), "stream")
	}
	if c := s.capture.Load(); c != nil && s.record(c, o) {
		s.mu.Unlock()
		return nil
	}
	unpark := s.put(o)
	s.mu.Unlock()
	if unpark {
		s.wake <- struct{}{}
	}
	return nil
}

// record puts o into the capture and reports whether it could; the stream leaves a capture that has ended. mu is held.
func (s *Stream) record(c *capture, o *op) bool {
	if c.add(s, o) {
		return true
	}
	s.capture.Store(nil)
	return false
}

// put puts o into the queue and reports whether the caller must wake the worker once mu, which is held, is free again.
func (s *Stream) put(o *op) (unpark bool) {
	if len(s.queue) == 0 { // not each time: an atomic store takes longer than the rest
		s.filled.Store(s.filled.Load() + 1)
	}
	s.queue = append(s.queue, *o)
	s.enqueued++
	if !s.started {
		s.started = true
		go s.work()
	}
	unpark, s.parked = s.parked, false
	return unpark
}

// recording returns the capture that the stream takes part in, or nil; mu is held. The capture may end at any moment if
// another stream began it.
func (s *Stream) recording() *capture {
	c := s.capture.Load()
	if c != nil && c.over() {
		s.capture.Store(nil)
		return nil
	}
	return c
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

// prefer returns ErrClosed if the stream is closed, and otherwise err, which closing may have caused.
func (s *Stream) prefer(call string, err error) error {
	if e := s.usable(call); e != nil {
		return e
	}
	return err
}

// Capturing reports whether the stream is recording, because of its own BeginCapture or of an event it waited for.
func (s *Stream) Capturing() bool {
	if s.capture.Load() == nil {
		return false // without the lock: plans ask before every launch
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return !s.closed && s.recording() != nil
}

// Query reports without waiting whether all work has ended. Errors of the work are left for Synchronize.
func (s *Stream) Query() (bool, error) {
	target, err := s.target("Query")
	return err == nil && s.done.reached(target), err
}

// Synchronize waits until all work enqueued before the call has ended, or for ctx. It returns the first failure among that
// work which was not returned yet, as a [*device.WorkError]; that counts the other failures among it, which are not returned
// again. When ctx ends first, its error is returned and the work goes on.
func (s *Stream) Synchronize(ctx context.Context) error {
	const call = "Synchronize"
	if ctx == nil {
		return errs.Invalid(call, "ctx", nil, "a context")
	}
	target, err := s.target(call)
	if err != nil {
		return err
	}
	if err := s.done.wait(ctx, target); err != nil {
		return fmt.Errorf("synchronizing the stream: %w", err)
	}
	if err := s.failures.take(target); err != nil {
		return fmt.Errorf("work of the stream: %w", err)
	}
	return nil
}

// target returns how much work was enqueued so far, for a call that is refused on closed and on capturing streams.
func (s *Stream) target(call string) (uint64, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return 0, closed(call, "stream")
	}
	if s.recording() != nil {
		return 0, capturing(call)
	}
	return s.enqueued, nil
}

// Close waits for the work, as long as the package's comment says, ends the goroutine and releases the stream. It returns the first failure that no
// Synchronize has returned; the stream is closed then, too. A second Close returns ErrClosed.
func (s *Stream) Close() error {
	if err := s.beginClose(false); err != nil {
		return err
	}
	return s.finishClose()
}

// beginClose makes the stream take no more work. force closes a capturing stream, too; its capture never ends.
func (s *Stream) beginClose(force bool) error {
	const call = "Close"
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return closed(call, "stream")
	}
	if s.recording() != nil && !force {
		s.mu.Unlock()
		return capturing(call)
	}
	s.closed = true
	s.capture.Store(nil)
	s.closeBy.Store(int64(time.Since(s.dev.opened) + s.dev.waitTimeout))
	unpark := s.parked
	s.parked = false
	if !s.started {
		close(s.exited)
	}
	s.mu.Unlock()
	if unpark {
		s.wake <- struct{}{}
	}
	return nil
}

// finishClose waits for the worker to end.
func (s *Stream) finishClose() error {
	<-s.exited
	s.dev.mu.Lock()
	delete(s.dev.streams, s)
	s.dev.mu.Unlock()
	s.batch, s.queue, s.frames = nil, nil, nil
	if err := s.failures.take(s.done.value.Load()); err != nil {
		return fmt.Errorf("work of the closed stream: %w", err)
	}
	return nil
}
