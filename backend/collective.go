package backend

import (
	"context"
	"fmt"

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
	// Close gives back what it holds. The device has nothing left to do for it.
	Close() error
}

// PrepareAllReduce prepares the all-reduce called name of the backend's library, of count elements (> 0) at in, with the result at
// out; bytes is their size. Both are inside windows of this memory. Collective. ErrUnsupported if the backend has no such form.
func (m *Memory) PrepareAllReduce(ctx context.Context, name string, in, out device.Ptr, count, bytes int64, dtype, op string) (PreparedAllReduce, error) {
	library, ok := m.backend.(AllReducer)
	if !ok {
		return nil, fmt.Errorf("backend %s has no all-reduce called %s: %w", m.backend.Name(), name, ErrUnsupported)
	}
	r := &AllReduce{Name: name, Count: count, DType: dtype, Op: op}
	for _, place := range []struct {
		p      device.Ptr
		alloc  *Allocation
		offset *int64
	}{{in, &r.In, &r.InOffset}, {out, &r.Out, &r.OutOffset}} {
		a, w, offset, err := m.Find(place.p)
		if err != nil {
			return nil, err
		}
		if w == nil {
			return nil, fmt.Errorf("memory at %s: %w", place.p, ErrNoRendezvous)
		}
		if bytes > a.Bytes()-offset {
			return nil, fmt.Errorf("%d bytes at %s do not fit into their allocation: %w", bytes, place.p, ErrInvalid)
		}
		*place.alloc, *place.offset = a, offset
	}
	m.collective.Lock()
	defer m.collective.Unlock()
	return library.PrepareAllReduce(ctx, r)
}
