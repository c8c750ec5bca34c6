package cuda

import (
	"errors"
	"fmt"

	"github.com/symmem/symmem/device"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/errs"
)

// Alloc returns bytes (> 0) of memory of the GPU that only this rank uses, filled with zeros and aligned to 256 bytes. It blocks for as long as the
// driver takes. Memory that peers are to reach is allocated by a backend instead.
func (d *Device) Alloc(bytes int64) (device.Ptr, error) {
	const call = "Alloc"
	if bytes <= 0 {
		return 0, errs.Invalid(call, "bytes", bytes, "1 and more")
	}
	if err := d.use(call); err != nil {
		return 0, err
	}
	defer d.unuse()
	p, err := d.allocate(bytes)
	if errors.Is(err, device.ErrNoMemory) && d.regain() {
		p, err = d.allocate(bytes)
	}
	if err != nil {
		return 0, fmt.Errorf("allocating %d bytes of GPU memory: %w", bytes, err)
	}
	if err := d.lane.fill(p, 0, bytes); err != nil {
		if e := d.push(); e != nil {
			d.keep(retired{ptr: p})
		} else {
			err = errors.Join(err, d.retire(retired{ptr: p}))
			d.pop()
		}
		return 0, fmt.Errorf("filling %d bytes of GPU memory with zeros: %w", bytes, err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.allocs[p] = bytes
	d.bytes += bytes
	return p, nil
}

// allocate asks the driver for memory.
func (d *Device) allocate(bytes int64) (device.Ptr, error) {
	if err := d.push(); err != nil {
		return 0, err
	}
	defer d.pop()
	var p device.Ptr
	err := d.drv.Check("cuMemAlloc", d.drv.MemAlloc(&p, uint64(bytes)))
	var free, total uint64
	if errors.Is(err, device.ErrNoMemory) && d.drv.MemGetInfo != nil && d.drv.MemGetInfo(&free, &total) == cu.Success {
		err = fmt.Errorf("%w (%d of %d bytes are free)", err, free, total)
	}
	return p, err
}

// Free releases memory that Alloc returned. It does not wait: while streams have work, which may use the memory, or a copy is under way whose call has failed, the
// device keeps it, and frees it when there is none. Streams of other devices on the context count too: the driver would wait for them.
func (d *Device) Free(p device.Ptr) error {
	const call = "Free"
	if err := d.enter(call); err != nil {
		return err
	}
	defer d.leave()
	d.mu.Lock()
	bytes, ok := d.allocs[p]
	if ok {
		delete(d.allocs, p)
		d.bytes -= bytes
	}
	d.mu.Unlock()
	if !ok {
		return errs.Invalid(call, "p", p, "an address that Alloc gave and that was not freed yet")
	}
	if err := d.retire(retired{ptr: p}); err != nil {
		return fmt.Errorf("freeing the GPU memory at %v: %w", p, err)
	}
	return nil
}

// CopyFromHost copies src to dst and returns when dst holds it. It is not ordered with any stream: synchronize first. It waits for the GPU for at
// most WaitTimeout.
func (d *Device) CopyFromHost(dst device.Ptr, src []byte) error {
	const call = "CopyFromHost"
	if err := d.checkCopy(call, "dst", dst, len(src)); err != nil || len(src) == 0 {
		return err
	}
	defer d.unuse()
	if err := d.lane.in(dst, src); err != nil {
		return fmt.Errorf("copying %d bytes to %v: %w", len(src), dst, err)
	}
	return nil
}

// CopyToHost copies len(dst) bytes at src to dst and returns when they are there. It is not ordered with any stream: synchronize first. It waits for
// the GPU for at most WaitTimeout.
func (d *Device) CopyToHost(dst []byte, src device.Ptr) error {
	const call = "CopyToHost"
	if err := d.checkCopy(call, "src", src, len(dst)); err != nil || len(dst) == 0 {
		return err
	}
	defer d.unuse()
	if err := d.lane.out(dst, src); err != nil {
		return fmt.Errorf("copying %d bytes from %v: %w", len(dst), src, err)
	}
	return nil
}

// checkCopy checks the n bytes at p and notes a call under way, unless n is 0 or there is an error.
func (d *Device) checkCopy(call, arg string, p device.Ptr, n int) error {
	if err := d.open(call); err != nil {
		return err
	}
	if n == 0 {
		return nil
	}
	if err := checkRange(call, arg, p, int64(n)); err != nil {
		return err
	}
	d.mu.Lock()
	bytes, ok := d.allocs[p]
	d.mu.Unlock()
	if ok && int64(n) > bytes {
		// The driver would only refuse the part that begins after the end.
		return errs.Invalid(call, arg, fmt.Sprintf("%v with %d bytes", p, n),
			fmt.Sprintf("the %d bytes that were allocated there", bytes))
	}
	return d.use(call)
}
