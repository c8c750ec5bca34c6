package cuda

import (
	"fmt"
	"sync"
	"unsafe"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
)

// HostBuffer is pinned memory of the host. It implements [device.HostBuffer].
type HostBuffer struct {
	dev *Device
	ptr device.Ptr

	mu  sync.Mutex
	mem []byte // of the driver; nil when it was given back
}

// NewHostBuffer returns bytes (> 0) of pinned memory of the host, all 0. It blocks for as long as the driver takes.
func (d *Device) NewHostBuffer(bytes int64) (device.HostBuffer, error) {
	const call = "NewHostBuffer"
	if bytes <= 0 {
		return nil, errs.Invalid(call, "bytes", bytes, "1 and more")
	}
	if err := d.enter(call); err != nil {
		return nil, err
	}
	defer d.leave()
	mem, ptr, err := d.pinned(uint64(bytes+7) / 8 * 8)
	if err != nil {
		return nil, fmt.Errorf("allocating %d bytes of pinned memory: %w", bytes, err)
	}
	b := &HostBuffer{dev: d, ptr: ptr, mem: unsafe.Slice((*byte)(mem), bytes)}
	clear(b.mem)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.buffers[b] = struct{}{}
	return b, nil
}

// Bytes returns the memory, or nil after Close.
func (b *HostBuffer) Bytes() []byte {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.mem
}

// Ptr returns the buffer's address on the device.
func (b *HostBuffer) Ptr() device.Ptr { return b.ptr }

// Close frees the memory, when no stream has work. A second Close returns ErrClosed.
func (b *HostBuffer) Close() error {
	const call = "Close"
	d := b.dev
	if err := d.enter(call); err != nil {
		return err
	}
	defer d.leave()
	d.mu.Lock()
	_, open := d.buffers[b]
	delete(d.buffers, b)
	d.mu.Unlock()
	if !open {
		return closed(call, "host buffer")
	}
	return b.destroy(d.retire)
}

// destroy returns the memory to free, if it has not returned it before; the context is current.
func (b *HostBuffer) destroy(free func(retired) error) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.mem == nil {
		return nil
	}
	mem := unsafe.Pointer(unsafe.SliceData(b.mem))
	b.mem = nil
	return free(retired{host: mem})
}
