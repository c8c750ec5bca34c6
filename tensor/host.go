package tensor

import (
	"fmt"
	"unsafe"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
)

// HostSlice gives the elements of v as a Go slice of the memory itself, in row-major order: no copy, and what is written to it is in the
// tensor, of this rank or another's. It works where the CPU can address the device's memory, as that of the host device; [Read], [Write] and
// [ReadAll] copy, and work on every device. T must be the Go type of the dtype; [F16] and [BF16] hold the bits of their numbers. The slice
// has as many elements as v, and no room to append in place. Local; it neither blocks nor copies.
//
// The slice is there until the tensor is closed, or its group, and does not keep them open: to touch it afterwards is a fault that ends the
// program. It is ordered with no stream and with no other rank. Write to it before enqueueing what reads it; before reading what a stream
// writes, synchronize the stream; before reading what a peer writes, synchronize a stream that has waited for the peer's signal or barrier.
// Whatever works on the same elements at the same time, another goroutine or a stream or a rank, is a data race.
//
// ErrClosed once the tensor was closed; ErrUnsupported where the CPU cannot address the memory; ErrInvalid for no view, for a T that is not
// the type of the dtype, and for a view with gaps, as [Tensor.Contiguous] gives where copies do not end on the next one's first byte: take
// its parts with [View.Index].
func HostSlice[T Element](v *View) ([]T, error) {
	const op = "HostSlice"
	if err := v.check(op, DTypeOf[T](), 0, 0); err != nil {
		return nil, err
	}
	hm, ok := v.device.(device.HostMemory)
	if !ok {
		return nil, named(v.name, fmt.Errorf("%s: the CPU cannot address memory of %s; copy with Read and Write: %w", op, v.device.Name(), errs.ErrUnsupported))
	}
	n := v.NumElements()
	if n == 0 {
		return []T{}, nil
	}
	if v.gaps() {
		return nil, named(v.name, errs.Advised(op, "view", fmt.Sprintf("%v with %d elements from row to row", v.shape, v.strides[0]),
			"a view without gaps", "take its parts with Index"))
	}
	if size := v.dtype.Bytes(); uint64(v.ptr)%uint64(size) != 0 {
		return nil, named(v.name, errs.Advised(op, "address", v.ptr, fmt.Sprintf("a multiple of %d bytes", size), "copy with Read and Write"))
	}
	b, err := hm.Bytes(v.ptr, v.Bytes())
	if err != nil {
		return nil, named(v.name, fmt.Errorf("%s: %w", op, err))
	}
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(b))), n), nil
}
