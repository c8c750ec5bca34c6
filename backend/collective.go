package backend

import (
	"context"

	"github.com/symmem/symmem/device"
)

// AllReducer is a Backend whose library has all-reduces of its own, which work on this backend's memory.
type AllReducer interface {
	// PrepareAllReduce makes what running the library's all-reduce takes. Collective; a rank that fails returns at once, and
	// the caller tells the others. What was asked for was checked: both places are inside windows of this backend.
	PrepareAllReduce(ctx context.Context, r *AllReduce) (PreparedAllReduce, error)
}

// AllReduce says which all-reduce of a library is wanted, and on what.
type AllReduce struct {
	// Name is the library's form: "nccl", "nccl_symmetric", "nvshmem".
	Name string
	// In and Out are the allocations of the input and of the output, which may be one. Both have had their rendezvous.
	In, Out Allocation
	// InOffset and OutOffset are the places of the first elements, in bytes from the allocations' beginnings.
	InOffset, OutOffset int64
	// Count is the number of elements, at least 1.
	Count int64
	// DType and Op are the names of the elements' type, "bf16", and of the operation, "sum".
	DType, Op string
}

// PreparedAllReduce is a library's all-reduce that can be run many times.
type PreparedAllReduce interface {
	// Enqueue enqueues one run on s, or records it if s is capturing, and returns at once.
	Enqueue(s device.Stream) error
	// Close releases what it holds. The device has nothing left to do for it.
	Close() error
}
