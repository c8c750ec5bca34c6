package cuda

import (
	"runtime"

	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/errs"
)

// WithContext calls fn on a locked OS thread with the device's primary context current, and restores what was current before. It is for the caller's
// own calls of the driver and of libraries. fn may call methods of the device, but not Close. The error is that of fn, or ErrClosed.
func (d *Device) WithContext(fn func() error) error {
	if err := d.enter("WithContext"); err != nil {
		return err
	}
	defer d.leave()
	return fn()
}

// use notes that a call is under way, so that Close waits for it before it releases the context.
func (d *Device) use(call string) error {
	for !d.closing.Load() {
		n := d.uses.Load()
		if n == 0 {
			break
		}
		if d.uses.CompareAndSwap(n, n+1) {
			return nil
		}
	}
	if err := d.made(call); err != nil {
		return err
	}
	return closed(call, "device")
}

// open returns ErrClosed if the device is closed.
func (d *Device) open(call string) error {
	if err := d.made(call); err != nil {
		return err
	}
	if d.closing.Load() {
		return closed(call, "device")
	}
	return nil
}

// made refuses a device that Open did not give.
func (d *Device) made(call string) error {
	if d.drv == nil {
		return errs.Invalid(call, "device", "the zero Device", "one that Open gave")
	}
	return nil
}

// unuse notes that the call has ended.
func (d *Device) unuse() {
	if d.uses.Add(-1) == 0 {
		close(d.unused)
	}
}

// push locks the goroutine to its thread and makes the context current. Pushing and popping is two calls, where asking for
// the current context, setting and restoring it would be three.
func (d *Device) push() error {
	runtime.LockOSThread()
	if r := d.drv.CtxPushCurrent(d.ctx); r != cu.Success {
		runtime.UnlockOSThread()
		return d.drv.Check("cuCtxPushCurrent", r)
	}
	return nil
}

// pop makes current what was before push.
func (d *Device) pop() {
	if r := d.drv.CtxPopCurrent(nil); r != cu.Success {
		// Nothing can be done about the error, and the work of the call is done, but the thread's context is not restored.
		d.log.Warn("restoring the thread's CUDA context failed", "error", d.drv.Check("cuCtxPopCurrent", r))
	}
	runtime.UnlockOSThread()
}

// enter is use and push; leave must follow unless there is an error.
func (d *Device) enter(call string) error {
	if err := d.use(call); err != nil {
		return err
	}
	if err := d.push(); err != nil {
		d.unuse()
		return err
	}
	return nil
}

// leave is pop and unuse.
func (d *Device) leave() {
	d.pop()
	d.unuse()
}

// try calls fn, which does nothing but enqueue work in a stream by one call of the driver. For such calls the driver takes the context from the
// stream, and making it current would cost as much as some of the calls. So they are tried without it. If the driver refuses, the call is repeated
// with the context current, and from then on always made so.
func (d *Device) try(fn func() cu.Result) (cu.Result, error) {
	if !d.scoped.Load() {
		// Another context may be current, with which a driver might not know the stream.
		r := fn()
		if r != cu.InvalidContext && r != cu.InvalidHandle {
			return r, nil
		}
		if r == cu.InvalidContext {
			d.scoped.Store(true)
		}
	}
	if err := d.push(); err != nil {
		return cu.Success, err
	}
	defer d.pop()
	return fn(), nil
}
