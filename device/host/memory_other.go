//go:build !linux

package host

import (
	"fmt"
	"unsafe"

	"github.com/symmem/symmem/device"
)

// alignment of what Alloc gives, in bytes.
const alignment = 256

// mostHeap bounds what is asked of the Go heap in bytes: beyond it make panics, where a caller wants an error.
const mostHeap = 1 << 36

// obtain gets n bytes from the Go heap: full is all of it, mem the n bytes at an aligned address. The heap does not move, and
// the device keeps full alive.
func obtain(n int) (full, mem []byte, err error) {
	if uint64(n) > mostHeap {
		return nil, nil, fmt.Errorf("on this system at most %d bytes at once: %w", uint64(mostHeap), device.ErrNoMemory)
	}
	full = make([]byte, n+alignment)
	skip := int(-uintptr(unsafe.Pointer(unsafe.SliceData(full))) % alignment)
	return full, full[skip : skip+n : skip+n], nil
}

// giveBack leaves the memory to the garbage collector.
func giveBack([]byte) error { return nil }
