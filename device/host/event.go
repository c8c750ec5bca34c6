package host

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
)

// Event marks a place in a stream. It implements [device.Event]. It may be recorded again and again; a wait means the record
// that was the latest when the wait was called. All methods may be called from several goroutines at once.
type Event struct {
	dev *Device

	mu      sync.Mutex // taken before that of a stream
	closed  bool
	stream  *Stream       // where the latest record is; nil if there is none, or if it is in a capture
	seq     uint64        // which work of that stream it is
	stamped bool          // it is complete, and at is valid
	at      time.Duration // when it was complete, since the device was opened

	capture *capture // where the latest record is, if it was made in a capture
	before  clock    // what that capture had recorded before it
}

// complete notes the time at which the record that is work seq of s was reached, if it is still the latest.
func (e *Event) complete(s *Stream, seq uint64) {
	at := time.Since(e.dev.opened)
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.stream == s && e.seq == seq {
		e.at, e.stamped = at, true
	}
}

// hostEvent returns ev as an event of this package.
func hostEvent(call, arg string, ev device.Event) (*Event, error) {
	e, ok := ev.(*Event)
	if !ok || e == nil {
		return nil, errs.Invalid(call, arg, fmt.Sprintf("%T", ev), "an event of a host device")
	}
	return e, nil
}

// Record enqueues e, which must be an event of the same device: it is complete when all work enqueued before it has ended.
// In a capture nothing is enqueued: the event then only orders streams of that capture, and is no use outside of it until it
// is recorded again.
func (s *Stream) Record(ev device.Event) error {
	const call = "Record"
	e, err := hostEvent(call, "e", ev)
	if err != nil {
		return err
	}
	if e.dev != s.dev {
		return errs.Invalid(call, "e", e.dev.UUID(), "an event of the stream's own device; make it with that device's NewEvent")
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return closed(call, "event")
	}
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return closed(call, "stream")
	}
	if c := s.recording(); c != nil {
		if before, ok := c.clockOf(s); ok {
			s.mu.Unlock()
			e.stream, e.seq, e.stamped = nil, 0, false
			e.capture, e.before = c, before
			return nil
		}
		s.capture.Store(nil) // it has ended just now
	}
	unpark := s.put(&op{kind: opRecord, what: e})
	e.stream, e.seq, e.stamped = s, s.enqueued, false
	e.capture, e.before = nil, nil
	s.mu.Unlock()
	if unpark {
		s.wake <- struct{}{}
	}
	return nil
}

// WaitEvent makes the stream's later work wait until the latest Record of e so far is complete; e may be of another host device. It does nothing if e
// was never recorded. If the record is in a capture, the stream joins that capture.
func (s *Stream) WaitEvent(ev device.Event) error {
	const call = "WaitEvent"
	e, err := hostEvent(call, "e", ev)
	if err != nil {
		return err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return closed(call, "event")
	}
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return closed(call, "stream")
	}
	current := s.recording()
	refused := ""
	switch {
	case e.capture != nil && current != nil && current != e.capture:
		refused = "the event was recorded in another capture than the stream's; end that one first, and record the event again"
	case e.capture != nil && e.capture.origin.dev != s.dev:
		refused = "the event was recorded in a capture of another device; a graph holds work of one device"
	case e.capture != nil:
		if e.capture.join(s, e.before) {
			s.capture.Store(e.capture)
		} else {
			refused = "the event was recorded in a capture that has ended; record it again"
		}
	case e.stream == nil:
	case current != nil:
		refused = "the stream is capturing, and the event was recorded outside of the capture; wait for it before BeginCapture"
	default:
		if s.put(&op{kind: opWaitEvent, what: e.stream, n: e.seq}) {
			defer func() { s.wake <- struct{}{} }()
		}
	}
	s.mu.Unlock()
	if refused != "" {
		return &device.CaptureError{Op: call, Reason: refused}
	}
	return nil
}

// latest returns the latest record: its stream, nil if there is none, and the number of its work.
func (e *Event) latest(call string) (*Stream, uint64, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return nil, 0, closed(call, "event")
	}
	if e.capture != nil {
		const reason = "the event was last recorded in a capture, which runs nothing; record it again outside"
		return nil, 0, &device.CaptureError{Op: call, Reason: reason}
	}
	return e.stream, e.seq, nil
}

// Query reports without waiting whether the latest record is complete; true if never recorded.
func (e *Event) Query() (bool, error) {
	s, seq, err := e.latest("Query")
	if err != nil {
		return false, err
	}
	return s == nil || s.done.reached(seq), nil
}

// Synchronize waits until the record that is the latest at the call is complete, or until ctx ends. Errors of the work before it are left to the
// stream.
func (e *Event) Synchronize(ctx context.Context) error {
	const call = "Synchronize"
	if ctx == nil {
		return errs.Invalid(call, "ctx", nil, "a context")
	}
	s, seq, err := e.latest(call)
	if err != nil || s == nil {
		return err
	}
	if err := s.done.wait(ctx, seq); err != nil {
		return fmt.Errorf("synchronizing the event: %w", err)
	}
	return nil
}

// Since returns the time from when start was complete to when this event was. Both must be recorded and complete, on streams
// of the same device.
func (e *Event) Since(start device.Event) (time.Duration, error) {
	const call = "Since"
	from, err := hostEvent(call, "start", start)
	if err != nil {
		return 0, err
	}
	if from.dev != e.dev {
		return 0, errs.Invalid(call, "start", from.dev.UUID(), "an event of the same device")
	}
	end, err := e.stamp(call, "event")
	if err != nil {
		return 0, err
	}
	begin, err := from.stamp(call, "start")
	if err != nil {
		return 0, err
	}
	return end - begin, nil
}

// stamp returns the time at which the latest record was complete.
func (e *Event) stamp(call, arg string) (time.Duration, error) {
	s, _, err := e.latest(call)
	if err != nil {
		return 0, err
	}
	const allowed = "an event that is recorded and complete; Record and Synchronize it first"
	if s == nil {
		return 0, errs.Invalid(call, arg, "never recorded", allowed)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.stamped {
		return 0, errs.Invalid(call, arg, "not complete", allowed)
	}
	return e.at, nil
}

// Close releases the event. Waits that were enqueued for it still end when its record is complete. A second Close returns ErrClosed.
func (e *Event) Close() error {
	if !e.markClosed() {
		return closed("Close", "event")
	}
	e.dev.mu.Lock()
	defer e.dev.mu.Unlock()
	delete(e.dev.events, e)
	return nil
}

// markClosed closes the event and reports whether it was open.
func (e *Event) markClosed() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	was := !e.closed
	e.closed = true
	e.stream, e.capture, e.before = nil, nil, nil
	return was
}
