package nvshmem

import (
	"fmt"

	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/nvshmem"
)

const (
	// alignment is what all memory is a multiple of, in bytes; NVSHMEM's own is 512. Channels want pages.
	alignment = 4096
	// reserve is memory of the GPU, in bytes, that the heap does not grow into: what the driver and kernels need at any time.
	reserve = 64 << 20
	// unknown is what NVSHMEM itself may have of the heap, in bytes, before the first of our own.
	unknown = 256 << 20
	// defaultMaxHeap is the heap's largest size in bytes in NVSHMEM 3.4.5, env_defs.h.
	defaultMaxHeap = 256 << 30
)

// heap is what is known of NVSHMEM's heap, the same on every PE, because all of it comes from turns. NVSHMEM tells nothing of its heap,
// and tears it down when it cannot grow: so what is surely free in it is kept here.
type heap struct {
	granularity int64 // that it grows by, in bytes
	chunk       int64 // that we let it grow by at least
	limit       int64 // its largest size; 0 if not known
	total       int64 // memory of the smallest GPU in bytes
	grown       int64 // what it has grown by since the start
	registered  int64 // bytes of registered memory in it
	free        spans // by address
	teams       []nvshmem.Team
	made        int // teams in all
}

// growth is what the heap grows by to have bytes more: NVSHMEM adds the alignment, and rounds up.
func (h *heap) growth(bytes int64) int64 { return roundUp(bytes+alignment, h.granularity) }

// plan says how bytes (a multiple of alignment) are allocated: with extra, memory of that size is added to the heap first, so that small
// allocations do not grow it one by one. free is the least that a GPU has left. An error is ErrNoMemory: NVSHMEM must not be asked.
func (h *heap) plan(bytes, free int64) (extra int64, err error) {
	if h.free.fits(bytes + alignment) {
		return 0, nil
	}
	if bytes < h.chunk && h.room(h.chunk, free) == nil {
		return h.chunk, nil
	}
	return 0, h.room(bytes, free)
}

// room says why the heap cannot grow by bytes.
func (h *heap) room(bytes, free int64) error {
	growth := h.growth(bytes)
	if growth > free-reserve {
		return fmt.Errorf("the heap would have to grow by %d bytes, and a GPU has %d left, of which %d stay free: %w",
			growth, free, int64(reserve), errs.ErrNoMemory)
	}
	if h.limit > 0 && unknown+h.grown+h.registered+growth > h.limit {
		return fmt.Errorf("the heap would have to grow by %d bytes; it has grown by %d, holds %d of registered memory, and can have %d in "+
			"all (%s): %w", growth, h.grown, h.registered, h.limit, nvshmem.MaxHeapEnv, errs.ErrNoMemory)
	}
	return nil
}

// allocate asks the library for bytes (a multiple of alignment), as plan has said. It is part of a turn. 0 from the library is the end
// of it.
func (w *world) allocate(bytes, extra int64) (uint64, error) {
	if extra > 0 {
		p, err := w.align(extra)
		if err == nil {
			err = w.lib.Free(p)
		}
		if err != nil {
			return 0, err
		}
		w.heap.free.give(span{int64(p), extra}, alignment)
	}
	p, err := w.align(bytes)
	if err != nil {
		return 0, err
	}
	w.heap.free.remove(span{int64(p), bytes})
	return p, nil
}

func (w *world) align(bytes int64) (uint64, error) {
	fits := w.heap.free.fits(bytes + alignment)
	p, err := w.lib.Align(alignment, bytes)
	if err == nil && p == 0 {
		err = fmt.Errorf("NVSHMEM could not allocate %d bytes of its heap (grown by %d so far) and has torn the heap down: %w",
			bytes, w.heap.grown, errs.ErrNoMemory)
	}
	if err != nil {
		return 0, w.breakUp(err)
	}
	if !fits {
		w.heap.grown += w.heap.growth(bytes)
	}
	return p, nil
}

// roundUp gives the least multiple of unit that is not less than n.
func roundUp(n, unit int64) int64 { return (n + unit - 1) / unit * unit }
