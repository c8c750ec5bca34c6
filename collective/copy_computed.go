package collective

import (
	"errors"
	"fmt"
	"runtime/debug"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/memory"
)

// Copy is a copy of Bytes from Src to Dst, which are memory of this rank and do not overlap; 0 bytes is nothing.
type Copy = memory.WorkCopy

// Stage takes bytes of memory, all 0, that the CPU reads and writes, and that the copies of [Builder.CopyComputed] reach at the address. It lives as
// long as the plan. ErrUnsupported on a device whose work of the CPU cannot copy.
func (b *Builder) Stage(bytes int64) ([]byte, device.Ptr) {
	if b.err != nil {
		return nil, 0
	}
	if bytes <= 0 {
		b.fail(errs.Invalid("Builder.Stage", "bytes", bytes, "1 and more"))
		return nil, 0
	}
	p := b.plan
	if _, ok := p.device.(device.HostMemory); ok {
		at := b.alloc(bytes)
		if at.IsNil() {
			return nil, 0
		}
		return b.Bytes(at, bytes), at
	}
	streams, ok := p.device.(device.WorkStreamer)
	if !ok {
		b.fail(fmt.Errorf("memory of the CPU that %s copies to: %w", p.device.Name(), errs.ErrUnsupported))
		return nil, 0
	}
	buffer, err := streams.NewHostBuffer(bytes)
	if err != nil {
		b.fail(err)
		return nil, 0
	}
	p.held.buffers = append(p.held.buffers, buffer)
	return buffer.Bytes(), buffer.Ptr()
}

// CopyComputed adds copies within this rank's memory and what Stage has given, which are known only when a run comes to them, also at each replay of a
// graph: copies is called when all earlier steps of the plan's stream have ended, by one goroutine at a time. It must be quick and must not block. The
// plan's stream goes on when the copies have ended. What it returns may be the same memory each time. Its error makes the plan fail, and peers get no signals from this rank any more. ErrUnsupported on a
// device whose work of the CPU cannot copy.
func (b *Builder) CopyComputed(copies func() ([]Copy, error)) {
	if b.err != nil {
		return
	}
	if copies == nil {
		b.fail(errs.Invalid("Builder.CopyComputed", "copies", nil, "a function"))
		return
	}
	by, err := b.work.copiesByWork()
	if err != nil {
		b.fail(err)
		return
	}
	if b.plan.device.Kind() != device.Host {
		c := &copyStep{work: b.work, by: by, copies: copies}
		c.under.step = c
		b.add(step{kind: stepLaunch, launch: c})
		return
	}
	b.Host(func() error {
		all, err := copies()
		if err == nil {
			_, err = by.Start(all...)
		}
		return err
	})
}

// copiesByWork is what makes copies that are known only in a run.
func (w *programWork) copiesByWork() (*memory.WorkCopies, error) {
	if w.copies != nil {
		return w.copies, nil
	}
	var err error
	w.copies, err = w.plan.memory.NewWorkCopies()
	return w.copies, err
}

// copyStep is such copies as work of the CPU, on a device that has others carry it out.
type copyStep struct {
	work   *programWork
	by     *memory.WorkCopies
	copies func() ([]Copy, error)
	under  copyRun // the run that has made the work run; there is one at a time
}

// Launch enqueues the step, or records it.
func (c *copyStep) Launch(s device.Stream) error {
	return device.EnqueueHostWork(s, c)
}

// Close does nothing.
func (c *copyStep) Close() error { return nil }

// String describes the plan in errors of the stream.
func (c *copyStep) String() string { return c.work.plan.name }

// Failed makes the plan fail when a run was cut off: the stream goes on without it.
func (c *copyStep) Failed(err error) {
	err = c.work.fail(err)
	if c.work.signals != nil {
		c.work.signals.Fail(err)
	}
}

// Start begins a run, unless the plan has failed.
func (c *copyStep) Start() (device.HostProgress, error) {
	p := c.work.plan
	if err := p.released(); err != nil {
		return nil, err
	}
	if err := p.Err(); err != nil {
		if c.work.signals != nil {
			return &copyFailed{run: c.work.signals.FailByWork(c.by, err)}, nil // told by a wait
		}
		return nil, err
	}
	// A graph may be launched on a stream that no Run was told of.
	if c.work.running.Swap(true) {
		return c.fail(fmt.Errorf("running %s: %w", p.name, errs.ErrTwoStreams)), nil
	}
	run, err := c.begin()
	if err != nil {
		c.work.running.Store(false)
		return c.fail(err), nil
	}
	c.under.run = run
	return &c.under, nil
}

// begin finds out what to copy, and begins.
func (c *copyStep) begin() (_ device.HostProgress, err error) {
	defer func() {
		if v := recover(); v != nil { // signals have to be told before the stream goes on
			err = errors.Join(fmt.Errorf("a step of %s has panicked", c.work.plan.name), &device.PanicError{Value: v, Stack: string(debug.Stack())})
		}
	}()
	all, err := c.copies()
	if err != nil {
		return nil, err
	}
	return c.by.Start(all...)
}

// fail makes the plan fail. What it returns ends with the error, when nothing behind the step signals.
func (c *copyStep) fail(err error) device.HostProgress {
	err = c.work.fail(err)
	f := &copyFailed{err: err}
	if c.work.signals != nil {
		f.run = c.work.signals.FailByWork(c.by, err)
	}
	return f
}

// copyRun is copies under way.
type copyRun struct {
	step *copyStep
	run  device.HostProgress
}

// Poll drives the run on.
func (r *copyRun) Poll() (bool, error) {
	ended, err := r.run.Poll()
	if !ended && err == nil {
		return false, nil
	}
	if err != nil {
		_ = r.step.fail(err) // the device takes no copies any more: it signals nobody either
	}
	r.step.work.running.Store(false)
	return ended, err
}

// copyFailed copies nothing.
type copyFailed struct {
	run device.HostProgress // nil if there is nothing to wait for
	err error               // nil if others tell it
}

// Poll waits until nothing signals.
func (f *copyFailed) Poll() (bool, error) {
	if f.run != nil {
		if ended, err := f.run.Poll(); !ended && err == nil {
			return false, nil
		}
	}
	return true, f.err
}
