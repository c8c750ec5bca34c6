package cuda

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
)

// FaultWord is a 64-bit word in pinned host memory that kernels write when they fail. It implements [device.FaultWord].
type FaultWord struct {
	dev    *Device
	decode func(uint64) error
	ptr    device.Ptr

	mu       sync.Mutex
	word     *uint64 // memory of the driver; nil when it was given back
	last     uint64  // what it was then
	reported bool
}

// NewFaultWord gives a word that is 0. When it is not any more, the next Synchronize of any stream of the device returns
// decode's error for its value, once. decode must not call anything of the device.
func (d *Device) NewFaultWord(decode func(word uint64) error) (device.FaultWord, error) {
	const call = "NewFaultWord"
	if decode == nil {
		return nil, errs.Invalid(call, "decode", nil, "a function")
	}
	if err := d.enter(call); err != nil {
		return nil, err
	}
	defer d.leave()
	mem, ptr, err := d.pinnedWord()
	if err != nil {
		return nil, fmt.Errorf("making a fault word: %w", err)
	}
	f := &FaultWord{dev: d, decode: decode, ptr: ptr, word: (*uint64)(mem)}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.faults[f] = struct{}{}
	return f, nil
}

// pinnedWord gives a 64-bit word, 0, of memory that the host and the device reach. The context is current.
func (d *Device) pinnedWord() (mem unsafe.Pointer, at device.Ptr, err error) {
	r := d.drv.MemHostAlloc(&mem, 8, HostAllocPortable|HostAllocDeviceMap)
	if err := d.drv.Check("cuMemHostAlloc", r); err != nil {
		return nil, 0, err
	}
	atomic.StoreUint64((*uint64)(mem), 0)
	if err := d.drv.Check("cuMemHostGetDevicePointer", d.drv.MemHostGetDevicePointer(&at, mem, 0)); err != nil {
		return nil, 0, errors.Join(err, d.drv.Check("cuMemFreeHost", d.drv.MemFreeHost(mem)))
	}
	return mem, at, nil
}

// fault gives the error of a fault word that was written and not reported yet, or nil.
func (d *Device) fault() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	for f := range d.faults {
		if err := f.report(); err != nil {
			return err
		}
	}
	return nil
}

// report gives the error of the word if it was written, once.
func (f *FaultWord) report() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.word == nil || f.reported {
		return nil
	}
	word := atomic.LoadUint64(f.word)
	if word == 0 {
		return nil
	}
	f.reported = true
	if err := f.decode(word); err != nil {
		return err
	}
	return fmt.Errorf("a kernel has reported a failure: 0x%x", word)
}

// Ptr is the word's address on the device.
func (f *FaultWord) Ptr() device.Ptr { return f.ptr }

// Load reads the word, in some nanoseconds. After Close it gives what the word was then.
func (f *FaultWord) Load() uint64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.word == nil {
		return f.last
	}
	return atomic.LoadUint64(f.word)
}

// Store writes the word as a kernel would, for failures of device work that only the host learns of. It waits for nothing.
func (f *FaultWord) Store(word uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.word != nil {
		atomic.CompareAndSwapUint64(f.word, 0, word)
	}
}

// Close gives the word back; no kernel that may write it is queued. Twice is ErrClosed.
func (f *FaultWord) Close() error {
	const call = "Close"
	d := f.dev
	if err := d.enter(call); err != nil {
		return err
	}
	defer d.leave()
	d.mu.Lock()
	_, open := d.faults[f]
	delete(d.faults, f)
	d.mu.Unlock()
	if !open {
		return closed(call, "fault word")
	}
	return f.destroy()
}

// destroy gives the memory back if it was not; the context is current.
func (f *FaultWord) destroy() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.word == nil {
		return nil
	}
	f.last = atomic.LoadUint64(f.word)
	mem := unsafe.Pointer(f.word)
	f.word = nil
	return f.dev.drv.Check("cuMemFreeHost", f.dev.drv.MemFreeHost(mem))
}
