package nvshmem

import (
	"fmt"
	"slices"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/nvshmem"
)

const (
	// alignment is the unit and the alignment of all memory, in bytes: workspaces want pages.
	alignment = 4096
	// chunkAlign is what the chunks that NVSHMEM gives are aligned to, in bytes.
	chunkAlign = 2 << 20
	// reserve is memory of the GPU, in bytes, that the heap leaves free, for what the driver and kernels need at any time.
	reserve = 64 << 20
	// unknown is how much of the heap, in bytes, NVSHMEM itself may have taken before our first allocation.
	unknown = 256 << 20
	// defaultMaxHeap is the heap's largest size in bytes in NVSHMEM 3.4.5, env_defs.h.
	defaultMaxHeap = 256 << 30
)

// heap is what this backend has taken of NVSHMEM's heap. It is the same on every PE, because it changes in turns only. NVSHMEM is asked for large
// chunks, which are divided here, for three reasons: the heap never shrinks anyway; NVSHMEM tears it down when it cannot grow, and does not say how
// much of it is free; and its own allocations may lie across two pieces of physical memory, which the driver cannot copy across.
type heap struct {
	granularity int64 // that it grows by, in bytes
	chunk       int64 // that we let it grow by at least
	limit       int64 // its largest size; 0 if not known
	total       int64 // memory of the smallest GPU in bytes
	grown       int64 // what it has grown by since the start
	registered  int64 // bytes of registered memory in it
	rest        int64 // what was left in the physical memory before a chunk, which it began with
	regions     []*region
	teams       []nvshmem.Team // that no collective has at the moment
	made        int            // teams in all
}

// region is one piece of physical memory of the heap, or what we have of it.
type region struct {
	span
	free spans
}

// take cuts bytes (a multiple of alignment) from the first region that has them.
func (h *heap) take(bytes int64) (start int64, ok bool) {
	for _, r := range h.regions {
		if start, ok := r.free.take(bytes); ok {
			return start, true
		}
	}
	return 0, false
}

// give puts bytes back.
func (h *heap) give(g span) {
	for _, r := range h.regions {
		if g.start >= r.start && g.start < r.start+r.bytes {
			r.free.give(g)
			return
		}
	}
}

// growth returns what the heap grows by for a chunk: NVSHMEM adds the alignment, and rounds up.
func (h *heap) growth(chunk int64) int64 { return roundUp(chunk+chunkAlign, h.granularity) }

// next returns the size of the chunk to ask for when no region has bytes: a large one or, if that does not fit, just enough. free is the least memory
// that a GPU has left. If the error is ErrNoMemory, NVSHMEM must not be asked.
func (h *heap) next(bytes, free int64) (chunk int64, err error) {
	if bytes < h.chunk && h.room(h.chunk+h.rest, free) == nil {
		return h.chunk + h.rest, nil
	}
	chunk = roundUp(bytes, chunkAlign) + h.rest
	return chunk, h.room(chunk, free)
}

// room returns an error if the heap cannot grow by a chunk.
func (h *heap) room(chunk, free int64) error {
	growth := h.growth(chunk)
	if growth > free-reserve {
		return fmt.Errorf("the heap would have to grow by %d bytes, and a GPU has %d left, of which %d stay free: %w",
			growth, free, int64(reserve), errs.ErrNoMemory)
	}
	return h.within(growth)
}

// within returns an error if the heap has no addresses for that many more bytes.
func (h *heap) within(bytes int64) error {
	if h.limit > 0 && unknown+h.grown+h.registered+bytes > h.limit {
		return fmt.Errorf("NVSHMEM's heap would have to grow by %d bytes; it has grown by %d, holds %d of registered memory, and can have %d "+
			"in all (%s): %w", bytes, h.grown, h.registered, h.limit, nvshmem.MaxHeapEnv, errs.ErrNoMemory)
	}
	return nil
}

// mostChunks is how often the heap grows for one piece. A chunk may begin in the rest of the physical memory before its own. It is then two regions,
// neither of which need be large enough. The next chunk leaves room for such a rest, which does not change.
const mostChunks = 3

// has reports whether a region has bytes.
func (h *heap) has(bytes int64) bool {
	return slices.ContainsFunc(h.regions, func(r *region) bool {
		return slices.ContainsFunc(r.free, func(f span) bool { return f.bytes >= bytes })
	})
}

// allocate returns bytes of the heap (a multiple of alignment), which has grown for them. It is part of a turn.
func (w *world) allocate(bytes int64) (device.Ptr, error) {
	if p, ok := w.heap.take(bytes); ok {
		return device.Ptr(p), nil
	}
	return 0, fmt.Errorf("NVSHMEM's heap has no piece of %d bytes: %w", bytes, errs.ErrNoMemory)
}

// growFor lets the heap grow until it has bytes in one piece, by chunks, each of which together asks the library for: ranks on which it came would wait in
// the library's next call for one on which it did not, so the ranks vote behind it. It is part of a turn, and does the same on every PE.
func (w *world) growFor(bytes int64, all []ask, together func(grow step) error) error {
	if err := backend.Alike("size in bytes", all, func(a *ask) int64 { return a.Bytes }); err != nil {
		return err
	}
	free := least(all)
	for range mostChunks {
		if w.heap.has(bytes) {
			return nil
		}
		chunk, err := w.heap.next(bytes, free)
		if err == nil {
			err = together(func(uint64, []ask) error { return w.grow(chunk) })
		}
		if err != nil {
			return err
		}
		free -= w.heap.growth(chunk)
	}
	return nil
}

// grow asks the library for a chunk and finds out which pieces of physical memory it is made of.
func (w *world) grow(chunk int64) error {
	p, err := w.lib.Align(chunkAlign, chunk)
	if err != nil {
		return w.breakUp(err)
	}
	if p == 0 {
		return w.tear(fmt.Errorf("NVSHMEM could not allocate %d bytes of its heap (nvshmem_align; grown by %d so far) and has torn the heap down: %w",
			chunk, w.heap.grown, errs.ErrNoMemory))
	}
	w.heap.grown += w.heap.growth(chunk)
	for at, end := int64(p), int64(p)+chunk; at < end; {
		upTo, err := physicalEnd(w.device.Driver(), device.Ptr(at))
		if err != nil {
			return w.breakUp(err)
		}
		s := span{at, min(upTo, end) - at}
		if at == int64(p) {
			w.heap.rest = s.bytes % chunk // the whole chunk is no rest
		}
		w.heap.regions = append(w.heap.regions, &region{span: s, free: spans{s}})
		at += s.bytes
	}
	return nil
}

// physicalEnd returns where the physical memory that is mapped at p ends.
func physicalEnd(drv *cu.Driver, p device.Ptr) (int64, error) {
	var base device.Ptr
	var size uint64
	if err := drv.Check("cuMemGetAddressRange", drv.MemGetAddressRange(&base, &size, p)); err != nil {
		return 0, err
	}
	if end := base.Add(int64(size)); p >= base && p < end {
		return int64(end), nil
	}
	return 0, fmt.Errorf("the driver finds %s in %d bytes at %s: %w", p, size, base, errs.ErrUnsupported)
}

// roundUp returns the least multiple of unit that is not less than n.
func roundUp(n, unit int64) int64 { return (n + unit - 1) / unit * unit }
