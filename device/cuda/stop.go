package cuda

import (
	"fmt"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/symmem/symmem/device"
)

// StopWord is a 32-bit word in pinned host memory that kernels read while they wait. It implements [device.StopWord].
type StopWord struct {
	dev *Device
	ptr device.Ptr

	mu   sync.Mutex
	word *uint32 // memory of the driver; nil when it was given back
}

// NewStopWord returns a word that is 0.
func (d *Device) NewStopWord() (device.StopWord, error) {
	const call = "NewStopWord"
	if err := d.enter(call); err != nil {
		return nil, err
	}
	defer d.leave()
	mem, ptr, err := d.pinned(8)
	if err != nil {
		return nil, fmt.Errorf("making a stop word: %w", err)
	}
	w := &StopWord{dev: d, ptr: ptr, word: (*uint32)(mem)}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.stops[w] = struct{}{}
	return w, nil
}

// Ptr returns the word's address on the device.
func (w *StopWord) Ptr() device.Ptr { return w.ptr }

// Stop sets the word to 1, for good. It does not block, may be called several times, and does nothing after Close.
func (w *StopWord) Stop() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.word != nil {
		atomic.StoreUint32(w.word, 1)
	}
}

// Close releases the word. No kernel that may read it may be queued. A second Close returns ErrClosed.
func (w *StopWord) Close() error {
	const call = "Close"
	d := w.dev
	if err := d.enter(call); err != nil {
		return err
	}
	defer d.leave()
	d.mu.Lock()
	_, open := d.stops[w]
	delete(d.stops, w)
	d.mu.Unlock()
	if !open {
		return closed(call, "stop word")
	}
	return w.destroy(d.retire)
}

// destroy returns the memory to free, if it has not returned it before; the context is current.
func (w *StopWord) destroy(free func(retired) error) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.word == nil {
		return nil
	}
	mem := unsafe.Pointer(w.word)
	w.word = nil
	return free(retired{host: mem})
}
