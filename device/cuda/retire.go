package cuda

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"
	"unsafe"

	"github.com/symmem/symmem/device"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/futex"
)

// The driver frees memory, of the GPU and pinned memory, only when the GPU has nothing to do, and until then other calls wait for the one that frees.
// If memory were freed while a stream waits for work of the CPU, or a kernel for a peer, that work could not be done: the copy that it makes is such
// a call, and so is the launch that the peer waits for. So memory that was freed while streams have work is kept, and returned to the driver when
// they have none, with the streams locked so that they get none meanwhile. The device's own lane counts like a stream where a copy has outlasted its call. So do the streams and the
// lane of every other device on the context: that of another rank of this process.

const (
	// The pauses between two checks whether the streams have work; they double.
	firstRetiredLook   = time.Millisecond
	longestRetiredLook = 50 * time.Millisecond
	// retiredWait is how long an allocation that finds no memory waits for the streams, so that memory that was freed can be used.
	retiredWait = 5 * time.Second
)

// retired is memory that is to be freed: of the GPU, or pinned memory of the host; or kernels that are to be unloaded.
type retired struct {
	ptr    device.Ptr // without host and kernels
	host   unsafe.Pointer
	module cu.ModuleHandle
}

// retire frees the memory if nothing may use it that is under way, and otherwise keeps it until nothing is. The context is current.
func (d *Device) retire(r retired) error {
	if busy, err := d.whileIdle(func() error { return d.give(r) }); !busy {
		return err
	}
	d.keep(r)
	return nil
}

// keep keeps the memory until no stream has work, and then frees it.
func (d *Device) keep(r retired) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.retired = append(d.retired, r)
	if !d.reaping {
		d.reaping = true
		go d.reap()
	}
}

// give returns memory to the driver. The context is current.
func (d *Device) give(r retired) error {
	switch {
	case r.module != 0:
		return d.drv.Check("cuModuleUnload", d.drv.ModuleUnload(r.module))
	case r.host != nil:
		return d.drv.Check("cuMemFreeHost", d.drv.MemFreeHost(r.host))
	}
	return d.drv.Check("cuMemFree", d.drv.MemFree(r.ptr))
}

// BetweenWork calls f, with the context current, when no stream of the context has work of the CPU that has not ended, and lets none of this device get any work until f
// returns. It is for calls that wait inside the driver for what the GPU has under way, and would block the work of the CPU that the GPU waits for. f
// must not use the device's streams. If there is no such moment within the time, f is called anyway. The error is that of f, or ErrClosed after
// Close.
func (d *Device) BetweenWork(within time.Duration, f func() error) error {
	const call = "BetweenWork"
	if err := d.enter(call); err != nil {
		return err
	}
	defer d.leave()
	// The streams of other ranks are not kept from work: f may wait for those ranks.
	own, nothing := []*Device{d}, func() error { return nil }
	for begin := time.Now(); time.Since(begin) < within; pauseBetween(begin) {
		if busy, _ := d.whileAllOf((*Stream).withoutWork, nothing); busy {
			continue
		}
		if busy, err := whileAll(own, (*Stream).withoutWork, f); !busy {
			return err
		}
	}
	return f()
}

// betweenWork is BetweenWork for one call of the driver, and for the streams of all devices on the context, which is current.
func (d *Device) betweenWork(within time.Duration, f func() error) error {
	for begin := time.Now(); time.Since(begin) < within; pauseBetween(begin) {
		if busy, err := d.whileAllOf((*Stream).withoutWork, f); !busy {
			return err
		}
	}
	return f()
}

// whileAllOf is whileAll for the streams of all devices on the context.
func (d *Device) whileAllOf(is func(*Stream) bool, f func() error) (busy bool, err error) {
	c := d.sharing
	if !c.mu.TryLock() {
		return true, nil
	}
	defer c.mu.Unlock()
	return whileAll(c.devices, is, f)
}

// withoutWork reports whether the stream has no work of the CPU that has not ended, by itself or in graphs; mu is held.
func (s *Stream) withoutWork() bool {
	if s.dev.proxy.pending.Load() > 0 {
		return false
	}
	return s.work == nil || s.work.ended()
}

// whileIdle calls f if no stream of the context has work, and makes sure that none gets any meanwhile; otherwise busy is true. The context is current.
func (d *Device) whileIdle(f func() error) (busy bool, err error) {
	c := d.sharing
	if !c.mu.TryLock() {
		return true, nil
	}
	defer c.mu.Unlock()
	return c.whileIdle(f)
}

// whileAll calls f if is reports true for every stream of the devices, and makes sure that none gets work meanwhile; otherwise busy is true. The context is current.
func whileAll(devices []*Device, is func(*Stream) bool, f func() error) (busy bool, err error) {
	var locked []*sync.Mutex
	defer func() {
		for _, mu := range locked {
			mu.Unlock()
		}
	}()
	lock := func(mu *sync.Mutex) bool {
		if !mu.TryLock() {
			return false
		}
		locked = append(locked, mu)
		return true
	}
	for _, d := range devices {
		if !lock(&d.making) {
			return true, nil
		}
		for _, s := range d.working() {
			if !lock(&s.mu) || !is(s) {
				return true, nil
			}
		}
	}
	return false, f()
}

// idle reports whether the stream has no work that was enqueued; mu is held, and the context is current. A stream in a capture may have work from
// before. A lost context has no work; a stream whose driver does not say counts as at work.
func (s *Stream) idle() bool {
	r := cu.Success
	switch {
	case s.recording() != nil:
		if s.before != 0 {
			r = s.dev.drv.EventQuery(s.before)
		}
	case s.handle == 0:
		return s.gone()
	default:
		r = s.dev.drv.StreamQuery(s.handle)
	}
	return r == cu.Success || r.Sticky()
}

// gone reports whether a stream that was destroyed has no work, and forgets one whose work has ended since; mu is held, and the context is current. One of
// which nothing tells that counts as at work.
func (s *Stream) gone() bool {
	d := s.dev
	if s.behind && s.left != 0 {
		if r := d.drv.EventQuery(s.left); r == cu.Success || r.Sticky() {
			s.behind = false
			s.forget()
			s.leave()
		}
	}
	return s.over.Load()
}

// Ended reports whether a stream is closed and has no work left. One whose Close waits for the work, or has given that up, may have some, and none although Close has not returned. It waits for nothing.
func (s *Stream) Ended() bool {
	d := s.dev
	if d.use("Ended") != nil {
		return true // the device was closed
	}
	defer d.unuse()
	if !s.mu.TryLock() {
		return false
	}
	defer s.mu.Unlock()
	if !s.closed || d.push() != nil {
		return false
	}
	defer d.pop()
	return s.idle()
}

// awaitGone waits until deadline for streams that were destroyed with work in them.
func (d *Device) awaitGone(deadline time.Time) error {
	for _, s := range d.openStreams() {
		for begin := time.Now(); ; pauseBetween(begin) {
			if err := d.push(); err != nil {
				return err
			}
			s.mu.Lock()
			over := !s.behind || s.left == 0 || s.gone()
			s.mu.Unlock()
			d.pop()
			if over || time.Now().After(deadline) {
				break
			}
		}
	}
	return nil
}

// reap returns retired memory to the driver as soon as no stream has work, and ends when there is none left, or the device is closed,
// which frees it itself.
func (d *Device) reap() {
	pause := firstRetiredLook
	for {
		futex.Doze(pause)
		pause = min(2*pause, longestRetiredLook)
		if d.use("Free") != nil {
			return
		}
		d.reapOnce()
		d.mu.Lock()
		d.reaping = len(d.retired) > 0
		more := d.reaping
		d.mu.Unlock()
		d.unuse()
		if !more {
			return
		}
	}
}

// reapOnce frees what is retired if no stream has work.
func (d *Device) reapOnce() {
	if err := d.push(); err != nil {
		d.log.Debug("the context for freeing memory cannot be made current", "error", err)
		return
	}
	defer d.pop()
	_, err := d.whileIdle(func() error {
		d.mu.Lock()
		all := slices.Clone(d.retired)
		d.mu.Unlock()
		var failed []error
		for _, r := range all {
			failed = append(failed, d.give(r))
		}
		// Not before: an allocation that finds no memory waits for as long as something is retired.
		d.mu.Lock()
		d.retired = d.retired[len(all):]
		d.mu.Unlock()
		return errors.Join(failed...)
	})
	if err != nil {
		d.log.Warn("memory that was freed while the GPU had work could not be given back", "error", err)
	}
}

// holdsRetired reports whether anything is retired.
func (d *Device) holdsRetired() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.retired) > 0
}

// Regain waits for the streams' present work, for no longer than five seconds and WaitTimeout, so that memory that was freed while they had work goes back to the driver, and reports
// whether all of it did; false if there was none. It is for allocations that the device does not make itself, and that find no memory.
func (d *Device) Regain() bool {
	if d.use("Regain") != nil {
		return false
	}
	defer d.unuse()
	return d.regain()
}

// regain waits for the streams' present work, for no longer than retiredWait, so that what is retired is freed, and reports whether
// anything was.
func (d *Device) regain() bool {
	if !d.holdsRetired() {
		return false
	}
	ctx, cancel := context.WithTimeout(context.Background(), min(retiredWait, d.waitTimeout))
	defer cancel()
	// Where the streams have nothing left that can be waited for, and yet one counts as at work, Synchronize does not look at ctx.
	for begin := time.Now(); d.Synchronize(ctx) == nil && ctx.Err() == nil; pauseBetween(begin) {
		if d.reapOnce(); !d.holdsRetired() {
			return true
		}
	}
	return false
}
