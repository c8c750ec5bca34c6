package nvshmem

import (
	"context"
	"errors"
	"fmt"
	"math"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
)

// kind says where memory comes from.
type kind string

const (
	inHeap     kind = "memory of NVSHMEM's heap"
	inArena    kind = "memory of the arena"
	registered kind = "memory of the caller"
)

// allocation is one rank's memory: its own, or adopted.
type allocation struct {
	backend *Backend
	kind    kind
	ptr     device.Ptr
	bytes   int64
	rounded int64

	turn   uint64 // of memory of the heap: the turn in which it was made
	offset int64  // of memory of the arena: its place in the world's heap; of the caller's: of ptr in its allocation
	part   uint64 // of memory of the arena that peers have seen: its name in the group; else 0
	span   int64  // of the caller's memory: bytes that are registered, from offset bytes before ptr on
}

// Allocate takes memory from the heap or, in groups of only some PEs, from the arena, and fills it with zeros. Collective. The error is ErrNoMemory
// if there is not that much left on some rank. NVSHMEM is then not called, and the backend goes on working.
func (b *Backend) Allocate(ctx context.Context, bytes int64) (backend.Allocation, error) {
	var failure error
	switch {
	case bytes <= 0:
		failure = errs.Invalid("Allocate", "bytes", bytes, "1 and more")
	case bytes > math.MaxInt64-alignment || b.world.heap.total > 0 && bytes > b.world.heap.total:
		failure = fmt.Errorf("%d bytes are asked for, and the smallest GPU has %d in all: %w", bytes, b.world.heap.total, errs.ErrNoMemory)
	}
	a := &allocation{backend: b, kind: inHeap, bytes: bytes}
	if failure == nil {
		a.rounded = roundUp(bytes, alignment)
	}
	var err error
	if b.all {
		err = b.fromHeap(ctx, a, failure)
	} else {
		err = b.fromArena(ctx, a, failure)
	}
	if err != nil {
		return nil, err
	}
	if err := b.zero(ctx, a); err != nil {
		return nil, fmt.Errorf("filling %d bytes of GPU memory with zeros: %w", a.rounded, err)
	}
	return a, nil
}

// fromHeap takes memory from the heap. Collective over all PEs.
func (b *Backend) fromHeap(ctx context.Context, a *allocation, failure error) error {
	w := b.world
	mine := ask{Op: "allocating", Kind: inHeap, Bytes: a.bytes, need: a.rounded}
	if failure == nil {
		mine.Free, _, failure = b.device.MemInfo()
	}
	return w.collectively(ctx, b.group, mine, failure, func(turn uint64, _ []ask) error {
		p, err := w.allocate(a.rounded)
		if err != nil {
			return err
		}
		a.turn, a.ptr, a.offset = turn, p, w.offset(p)
		w.hold(turn, &resource{ptr: uint64(p), bytes: a.rounded})
		return nil
	})
}

// fromArena takes memory from the arena. Collective over the group.
func (b *Backend) fromArena(ctx context.Context, a *allocation, failure error) error {
	if _, _, err := b.among(ctx, ask{Op: "allocating", Kind: inArena, Bytes: a.bytes}, failure); err != nil {
		return err
	}
	offset, err := b.world.arena.take(a.rounded)
	if err != nil {
		return err
	}
	a.kind, a.offset, a.ptr = inArena, offset, b.world.ref.Add(offset)
	return nil
}

// zero fills the memory with zeros, or frees it if that fails.
func (b *Backend) zero(ctx context.Context, a *allocation) error {
	err := b.stream.Fill(a.ptr, 0, a.rounded)
	if err == nil {
		err = b.stream.Synchronize(ctx)
	}
	if err == nil {
		return nil
	}
	if idle, _ := b.stream.Query(); !idle {
		return fmt.Errorf("the GPU still works on it, so it is kept until the library is finalized: %w", err)
	}
	return errors.Join(err, a.Release(ctx))
}

func (a *allocation) Ptr() device.Ptr     { return a.ptr }
func (a *allocation) Bytes() int64        { return a.bytes }
func (a *allocation) RoundedBytes() int64 { return a.rounded }

// Release says that this rank no longer needs the memory. The memory returns to the heap, or to the arena, when all ranks have released it, with
// their next agreement; never if one of them is lost.
func (a *allocation) Release(context.Context) error {
	switch a.kind {
	case inHeap:
		a.backend.world.release(a.turn)
	case inArena:
		a.backend.releasePart(a)
	case registered:
		// The memory is the caller's. NVSHMEM's registration ended with the mapping.
	}
	return nil
}
