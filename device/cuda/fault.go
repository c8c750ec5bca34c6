package cuda

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/symmem/symmem/device"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/errs"
)

// FaultWord is a 64-bit word in pinned host memory that kernels write when they fail. It implements [device.FaultWord].
type FaultWord struct {
	dev    *Device
	decode func(uint64) error
	ptr    device.Ptr
	named  atomic.Bool // launches name it, and their streams tell

	mu       sync.Mutex
	word     *uint64 // memory of the driver; nil when it was given back
	last     uint64  // what it was then
	reported bool
}

// NewFaultWord returns a word that is 0. Once it is not 0, the streams whose launches name it, or for which Watch was called, return decode's
// error for its value; if there are none, the next Synchronize of any stream of the device does, once. decode must not call anything of
// the device, and may be called by Close.
func (d *Device) NewFaultWord(decode func(word uint64) error) (device.FaultWord, error) {
	const call = "NewFaultWord"
	if decode == nil {
		return nil, errs.Invalid(call, "decode", nil, "a function")
	}
	if err := d.enter(call); err != nil {
		return nil, err
	}
	defer d.leave()
	if err := d.needCells(fewCells); err != nil {
		return nil, err
	}
	mem, ptr, err := d.pinned(8)
	if err != nil {
		return nil, fmt.Errorf("making a fault word: %w", err)
	}
	f := &FaultWord{dev: d, decode: decode, ptr: ptr, word: (*uint64)(mem)}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.faults[f] = struct{}{}
	return f, nil
}

// pinned returns bytes of memory, a multiple of 8, that the host and the device reach. The first 8 are 0. The context is current.
func (d *Device) pinned(bytes uint64) (mem unsafe.Pointer, at device.Ptr, err error) {
	r := d.drv.MemHostAlloc(&mem, bytes, cu.HostAllocPortable|cu.HostAllocDeviceMap)
	if err := d.drv.Check("cuMemHostAlloc", r); err != nil {
		return nil, 0, err
	}
	atomic.StoreUint64((*uint64)(mem), 0)
	if err := d.drv.Check("cuMemHostGetDevicePointer", d.drv.MemHostGetDevicePointer(&at, mem, 0)); err != nil {
		return nil, 0, errors.Join(err, d.retire(retired{host: mem}))
	}
	return mem, at, nil
}

// fault returns the error of a fault word that no launch named, was written and not reported yet, or nil.
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

// report returns the error of the word if it was written, once.
func (f *FaultWord) report() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.word == nil || f.reported || f.named.Load() {
		return nil
	}
	word := atomic.LoadUint64(f.word)
	if word == 0 {
		return nil
	}
	f.reported = true
	return f.err(word)
}

// err returns the error for a value that is not 0.
func (f *FaultWord) err(word uint64) error {
	if err := f.decode(word); err != nil {
		return err
	}
	return fmt.Errorf("a kernel has reported a failure: 0x%x", word)
}

// Watch makes s, a stream of the same device, report the word as if a launch on it named the word. It is for work that is not enqueued through this
// package. If s is capturing, the streams on which the graph is launched report it.
func (f *FaultWord) Watch(s *Stream) {
	f.named.Store(true)
	s.mu.Lock()
	defer s.mu.Unlock()
	defer s.pin().unpin()
	if c := s.recording(); c != nil {
		c.addWord(f)
	} else {
		s.oweWord(f)
	}
}

// Ptr returns the word's address on the device.
func (f *FaultWord) Ptr() device.Ptr { return f.ptr }

// Load reads the word, which takes some nanoseconds. After Close it returns the word's last value.
func (f *FaultWord) Load() uint64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.word == nil {
		return f.last
	}
	return atomic.LoadUint64(f.word)
}

// Store writes the word as a kernel would, for failures of device work that only the host learns of. It does not block.
func (f *FaultWord) Store(word uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.word != nil {
		atomic.CompareAndSwapUint64(f.word, 0, word)
	}
}

// Close releases the word. No kernel that may write it may be queued. Streams still return errors of it that they have not returned. A second Close
// returns ErrClosed.
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
	d.settle(f)
	return f.destroy(d.retire)
}

// destroy returns the memory to free, if it has not returned it before; the context is current.
func (f *FaultWord) destroy(free func(retired) error) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.word == nil {
		return nil
	}
	f.last = atomic.LoadUint64(f.word)
	mem := unsafe.Pointer(f.word)
	f.word = nil
	return free(retired{host: mem})
}
