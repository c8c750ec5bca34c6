package tensor

import (
	"context"
	"log/slog"
	"runtime"
	"slices"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/memory"
)

// Heap is symmetric memory that tensors are taken from without any exchange between the ranks: one allocation and one rendezvous for all of them.
// See [memory.Heap] for what it has besides Zeros, and for what holds for all heaps: that every rank asks for the same, in the same order, which the ranks
// compare whenever they meet, and that freed memory waits for a Reclaim.
type Heap struct{ *memory.Heap }

// NewHeap makes a heap of bytes on each rank, on the memory's device. Collective: it blocks until all ranks have come. See
// [memory.Memory.NewHeap] for the errors. Close the heap.
func NewHeap(ctx context.Context, m *memory.Memory, bytes int64) (*Heap, error) {
	if err := given("NewHeap", ctx, m); err != nil {
		return nil, err
	}
	h, err := m.NewHeap(ctx, bytes)
	if err != nil {
		return nil, err
	}
	return &Heap{h}, nil
}

// orNone is the heap of package memory, nil for a nil Heap too: NewHeap gives that where it fails, and methods that were only embedded would panic.
func (h *Heap) orNone() *memory.Heap {
	if h == nil {
		return nil
	}
	return h.Heap
}

// String is [memory.Heap.String].
func (h *Heap) String() string { return h.orNone().String() }

// Memory is [memory.Heap.Memory].
func (h *Heap) Memory() *memory.Memory { return h.orNone().Memory() }

// Bytes is [memory.Heap.Bytes].
func (h *Heap) Bytes() int64 { return h.orNone().Bytes() }

// Window is [memory.Heap.Window].
func (h *Heap) Window() *memory.Window { return h.orNone().Window() }

// Err is [memory.Heap.Err].
func (h *Heap) Err() error { return h.orNone().Err() }

// Usage is [memory.Heap.Usage].
func (h *Heap) Usage() memory.HeapUsage { return h.orNone().Usage() }

// Allocate is [memory.Heap.Allocate].
func (h *Heap) Allocate(ctx context.Context, bytes int64, dtype string, shape []int64) (*memory.HeapAllocation, error) {
	return h.orNone().Allocate(ctx, bytes, dtype, shape)
}

// Check is [memory.Heap.Check].
func (h *Heap) Check(ctx context.Context) error { return h.orNone().Check(ctx) }

// Reclaim is [memory.Heap.Reclaim].
func (h *Heap) Reclaim(ctx context.Context) error { return h.orNone().Reclaim(ctx) }

// Close is [memory.Heap.Close].
func (h *Heap) Close(ctx context.Context) error { return h.orNone().Close(ctx) }

// Zeros takes a symmetric tensor, filled with zeros, from the heap. It has its rendezvous behind it, and lies at the same offset on every rank.
// Every rank does the same, in the same order.
//
// It is local, waits for nothing and enqueues nothing, so it takes some microseconds, unless there is no room: then it reclaims what was closed and
// tries again, which is collective and blocks until all ranks have come, at the same request on each. ErrInvalid for an unknown dtype, a negative
// dimension or a size that overflows; a [*memory.HeapFullError], which is ErrNoMemory, where there is no room after all; ErrClosed; ErrPeerLost; a
// MismatchError of package group once the ranks are known to differ.
//
// Closing the tensor is local and waits for nothing: its memory is given out again after the next Reclaim. It ends with the heap.
func (h *Heap) Zeros(ctx context.Context, dtype DType, shape ...int64) (*Tensor, error) {
	if err := errs.Given("Zeros", "ctx", ctx, "a context"); err != nil {
		return nil, err
	}
	if h.orNone() == nil {
		return nil, errs.Invalid("Zeros", "heap", nil, "one that NewHeap gave")
	}
	bytes, err := checkShape("Zeros", dtype, shape)
	if err != nil {
		return nil, err
	}
	own := Shape(slices.Clone(shape))
	a, err := h.Allocate(ctx, bytes, dtype.String(), own)
	if err != nil {
		return nil, err
	}
	st := &storage{memory: h.Memory(), alloc: a.Allocation(), piece: a}
	t := &Tensor{storage: st, offset: a.Offset(), bytes: bytes, dtype: dtype, shape: own}
	t.window.Store(a.Window())
	runtime.AddCleanup(t, func(st *storage) {
		if !st.freed.Load() && st.piece.Err() == nil && st.memory.Err() == nil {
			st.memory.Logger().Warn("a symmetric tensor was dropped without Close; its memory stays until its heap closes",
				slog.Any("address", st.alloc.Ptr().Add(st.piece.Offset())), slog.Int64("bytes", st.piece.Bytes()), slog.String("allocated at", st.piece.Place()))
		}
	}, st)
	return t, nil
}

// keepTable keeps a peer table for as long as work may use it. The caller holds st.mu.
func (st *storage) keepTable(p device.Ptr) {
	if st.piece != nil {
		st.piece.Keep(p)
		return
	}
	st.tables = append(st.tables, p)
}
