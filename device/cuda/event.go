package cuda

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/symmem/symmem/device"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/errs"
)

// Event marks a place in a stream. It implements [device.Event]. It may be recorded again and again; a WaitEvent means the
// record that was the latest when it was called. All methods may be called from several goroutines at once.
type Event struct {
	dev *Device

	enqueuing sync.Mutex // taken before mu of a stream, and held by Record and WaitEvent, whose calls of the driver may wait for room

	mu       sync.Mutex // taken after enqueuing, and held during the other calls of the driver; what it guards changes with both held
	handle   cu.EventHandle
	closed   bool
	marking  bool // a Record is under way
	recorded bool
	capture  *capture // where the latest record is, if it was made in a capture
}

// NewEvent returns a new event, not yet recorded.
func (d *Device) NewEvent() (device.Event, error) {
	const call = "NewEvent"
	if err := d.enter(call); err != nil {
		return nil, err
	}
	defer d.leave()
	e := &Event{dev: d}
	if err := d.drv.Check("cuEventCreate", d.drv.EventCreate(&e.handle, cu.EventDefault)); err != nil {
		return nil, fmt.Errorf("making an event: %w", err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.events[e] = struct{}{}
	return e, nil
}

// cudaEvent returns ev as an event of this package.
func cudaEvent(call, arg string, ev device.Event) (*Event, error) {
	e, ok := ev.(*Event)
	if !ok || e == nil {
		return nil, errs.Invalid(call, arg, fmt.Sprintf("%T", ev), "an event of a CUDA device")
	}
	return e, nil
}

// Record enqueues e, which must be an event of the same device: it is complete when all work enqueued before it has ended.
// In a capture the event only orders streams of that capture, and is no use outside of it until it is recorded again.
func (s *Stream) Record(ev device.Event) error {
	const call = "Record"
	e, err := cudaEvent(call, "e", ev)
	if err != nil {
		return err
	}
	if e.dev != s.dev {
		return errs.Invalid(call, "e", e.dev.uuid, "an event of the stream's own device; make it with that device's NewEvent")
	}
	e.enqueuing.Lock()
	defer e.enqueuing.Unlock()
	if e.closed {
		return closed(call, "event")
	}
	e.mark(true)
	defer e.mark(false)
	var c *capture
	err = s.enqueueMark(call, "cuEventRecord", func() cu.Result {
		c = s.recording()
		return s.dev.drv.EventRecord(e.handle, s.handle)
	})
	if err == nil {
		e.mu.Lock()
		defer e.mu.Unlock()
		e.recorded, e.capture = true, c
	}
	return err
}

// mark notes that a Record is under way, or no more; enqueuing is held.
func (e *Event) mark(is bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.marking = is
}

// WaitEvent makes the stream's later work wait until the latest Record of e so far is complete; e may be of another CUDA device. It does nothing if e
// was never recorded. If the record is in a capture, the stream joins that capture.
func (s *Stream) WaitEvent(ev device.Event) error {
	const call = "WaitEvent"
	e, err := cudaEvent(call, "e", ev)
	if err != nil {
		return err
	}
	e.enqueuing.Lock()
	defer e.enqueuing.Unlock()
	if e.closed {
		return closed(call, "event")
	}
	if e.recorded && e.capture != nil {
		return s.join(call, e)
	}
	refused := ""
	err = s.enqueue(call, "cuStreamWaitEvent", func() cu.Result {
		if refused = e.refusal(s); refused != "" || !e.recorded {
			return cu.Success
		}
		return s.dev.drv.StreamWaitEvent(s.handle, e.handle, 0)
	})
	if refused != "" {
		return &device.CaptureError{Op: call, Reason: refused}
	}
	return err
}

// refusal says why s cannot wait for e, if it cannot. s is locked, and enqueuing of e is held.
func (e *Event) refusal(s *Stream) string {
	current := s.recording()
	switch {
	case !e.recorded:
		return ""
	case e.capture != nil && current != nil && current != e.capture:
		return "the event was recorded in another capture than the stream's; end that one first, and record the event again"
	case e.capture != nil && e.capture.origin.dev != s.dev:
		return "the event was recorded in a capture of another device; a graph holds work of one device"
	case e.capture != nil && e.capture.over():
		return "the event was recorded in a capture that has ended; record it again"
	case e.capture == nil && current != nil:
		return "the stream is capturing, and the event was recorded outside of the capture; wait for it before BeginCapture"
	}
	return ""
}

// begin begins a call that asks the driver about the event: it locks the event and makes the context current. It refuses events that are closed or
// whose latest record is in a capture. end must follow unless there is an error.
func (e *Event) begin(call string) error {
	e.mu.Lock()
	var err error
	switch {
	case e.closed:
		err = closed(call, "event")
	case e.capture != nil:
		err = &device.CaptureError{Op: call, Reason: "the event was last recorded in a capture, which runs nothing; record it again outside"}
	default:
		err = e.dev.enter(call)
	}
	if err != nil {
		e.mu.Unlock()
	}
	return err
}

// end ends what begin began.
func (e *Event) end() {
	e.dev.leave()
	e.mu.Unlock()
}

// Query reports without waiting whether the latest record is complete; true if never recorded. A Record that has not returned yet is none that is complete.
func (e *Event) Query() (bool, error) {
	const call = "Query"
	if err := e.begin(call); err != nil {
		return false, err
	}
	defer e.end()
	if e.marking {
		return false, nil
	}
	r := e.dev.drv.EventQuery(e.handle)
	if r == cu.NotReady {
		return false, nil
	}
	e.dev.ran.see()
	return r == cu.Success, e.dev.check(call, "cuEventQuery", r)
}

// Synchronize waits until the latest record is complete, or until ctx ends; if the event is recorded again meanwhile, that is the latest. Errors of
// host functions and waits before it are left to the stream.
func (e *Event) Synchronize(ctx context.Context) error {
	const call = "Synchronize"
	if ctx == nil {
		return errs.Invalid(call, "ctx", nil, "a context")
	}
	for begin := time.Now(); ; pauseBetween(begin) {
		done, err := e.Query()
		if err != nil || done {
			return err
		}
		if err := ctx.Err(); err != nil {
			return fmt.Errorf("synchronizing the event: %w", err)
		}
	}
}

// Since returns the time from when start was complete to when this event was, to about half a microsecond. Both must be recorded
// and complete, on streams of the same device.
func (e *Event) Since(start device.Event) (time.Duration, error) {
	const call = "Since"
	from, err := cudaEvent(call, "start", start)
	if err != nil {
		return 0, err
	}
	if from.dev != e.dev {
		return 0, errs.Invalid(call, "start", from.dev.uuid, "an event of the same device")
	}
	if err := e.complete(call, "event"); err != nil {
		return 0, err
	}
	if err := from.complete(call, "start"); err != nil {
		return 0, err
	}
	if e == from {
		return 0, nil
	}
	// Two locks of one kind: always that of the lower handle first.
	first, second := e, from
	if first.handleNow() > second.handleNow() {
		first, second = second, first
	}
	if err := first.begin(call); err != nil {
		return 0, err
	}
	defer first.end()
	if err := second.begin(call); err != nil {
		return 0, err
	}
	defer second.end()
	switch { // one that is recorded again just now
	case e.marking:
		return 0, errs.Invalid(call, "event", "not complete", eventComplete)
	case from.marking:
		return 0, errs.Invalid(call, "start", "not complete", eventComplete)
	}
	var ms float32
	if r := e.dev.drv.EventElapsedTime(&ms, from.handle, e.handle); r != cu.Success {
		return 0, e.dev.check(call, "cuEventElapsedTime", r)
	}
	return time.Duration(float64(ms) * float64(time.Millisecond)), nil
}

// handleNow returns the handle, 0 if the event is closed.
func (e *Event) handleNow() cu.EventHandle {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.handle
}

// eventComplete is what events must be to be compared.
const eventComplete = "an event that is recorded and complete; Record and Synchronize it first"

// complete refuses an event that was never recorded or is not complete.
func (e *Event) complete(call, arg string) error {
	done, err := e.Query()
	if err != nil {
		return err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.recorded {
		return errs.Invalid(call, arg, "never recorded", eventComplete)
	}
	if !done {
		return errs.Invalid(call, arg, "not complete", eventComplete)
	}
	return nil
}

// Close releases the event. Waits that were enqueued for it still end when its record is complete. A second Close returns ErrClosed.
func (e *Event) Close() error {
	const call = "Close"
	if err := e.dev.enter(call); err != nil {
		return err
	}
	defer e.dev.leave()
	d := e.dev
	d.mu.Lock()
	_, open := d.events[e]
	delete(d.events, e)
	d.mu.Unlock()
	if !open {
		return closed(call, "event")
	}
	return e.destroy()
}

// destroy closes the event if it is open; the context is current.
func (e *Event) destroy() error {
	e.enqueuing.Lock()
	defer e.enqueuing.Unlock()
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return nil
	}
	e.closed, e.capture = true, nil
	r := e.dev.drv.EventDestroy(e.handle)
	e.handle = 0
	return e.dev.drv.Check("cuEventDestroy", r)
}
