package nccl

import (
	"context"
	"errors"
	"fmt"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/cuda"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/nccl"
)

// allocation is one rank's memory: its own, or adopted.
type allocation struct {
	backend *Backend
	ptr     device.Ptr
	bytes   int64
	rounded int64 // what of it is taken, as RoundedBytes says
	adopted bool
	freed   bool
	mapped  int // mappings of it, each of which keeps the window of its allocation; under the backend's mu

	base   device.Ptr // of the allocation of virtual memory that it is in
	span   int64      // the size of that
	offset int64      // of ptr from base
}

// Allocate takes memory from NCCL and fills it with zeros. It blocks until the GPU has done so. The error is ErrNoMemory, with how much is free, if
// the GPU does not have that much left.
func (b *Backend) Allocate(ctx context.Context, bytes int64) (backend.Allocation, error) {
	if bytes <= 0 {
		return nil, errs.Invalid("Allocate", "bytes", bytes, "1 and more")
	}
	if b.total > 0 && bytes > b.total {
		return nil, fmt.Errorf("%d bytes are asked for and %s (%s) has %d in all: %w", bytes, b.device.Name(), b.device.UUID(),
			b.total, errs.ErrNoMemory)
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if err := errors.Join(b.sweep(), b.freeLate()); err != nil {
		return nil, err
	}
	a := &allocation{backend: b, bytes: bytes}
	err := b.device.WithContext(a.make)
	if errors.Is(err, errs.ErrNoMemory) && b.device.Regain() {
		err = b.device.WithContext(a.make)
	}
	if err != nil {
		return nil, fmt.Errorf("making %d bytes of memory on %s (%s): %w", bytes, b.device.Name(), b.device.UUID(), err)
	}
	if err := b.zero(ctx, a); err != nil {
		return nil, fmt.Errorf("filling %d bytes of GPU memory with zeros: %w", a.span, err)
	}
	return a, nil
}

// make allocates the memory; the context is current.
func (a *allocation) make() error {
	b := a.backend
	p, err := b.takeMemory(a.bytes)
	if err != nil {
		return err
	}
	a.ptr, a.base = device.Ptr(p), device.Ptr(p)
	bad := &cuda.MemoryError{Ptr: a.ptr, Bytes: a.bytes}
	at, err := b.device.Place(bad)
	switch {
	case err != nil:
	case at == nil || len(bad.Problems) > 0:
		err = bad
	case at.Handle == 0:
		err = fmt.Errorf("NCCL gave plain memory, which cannot become a window, because its use of virtual memory is off (NCCL_CUMEM_ENABLE=0 "+
			"when it was first used, or a driver or container without it); unset the variable: %w", errs.ErrUnsupported)
	default:
		err = b.drv.Check("cuMemRelease", b.drv.MemRelease(at.Handle))
		a.base, a.span, a.offset, a.rounded = at.Base, at.Bytes, at.Offset, at.Bytes-at.Offset
	}
	if err != nil {
		return errors.Join(err, b.lib.MemFree(p))
	}
	return nil
}

// takeMemory takes memory from NCCL; the context is current.
func (b *Backend) takeMemory(bytes int64) (p uint64, err error) {
	if p, err = b.lib.MemAlloc(bytes); err != nil {
		b.lib.Log()
		err = b.outOfMemory(bytes, err)
	}
	return p, err
}

// unit is the least that NCCL takes memory in multiples of, in bytes: the granularity that the driver recommends (ncclMemAlloc in allocator.cc).
const unit = 2 << 20

// outOfMemory makes ErrNoMemory of NCCL's unhandled CUDA error, if there is too little left.
func (b *Backend) outOfMemory(bytes int64, err error) error {
	var free, total uint64
	if b.drv.MemGetInfo != nil && b.drv.MemGetInfo(&free, &total) == cu.Success && (uint64(bytes)+unit-1)/unit*unit > free {
		return fmt.Errorf("%w: %w (%d of %d bytes are free)", errs.ErrNoMemory, err, free, total)
	}
	return err
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
	// Freeing memory that the GPU is still writing would end the context. Where it cannot be asked, it may be at work.
	if idle, unknown := b.stream.Query(); !idle && !errors.Is(unknown, cuda.ErrContextLost) {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.kept = append(b.kept, a)
		return fmt.Errorf("the GPU still works on it, so it is given back later: %w", errors.Join(err, unknown))
	}
	return errors.Join(err, a.free())
}

// sweep frees memory that was kept because the GPU was working on it, if the GPU no longer does.
func (b *Backend) sweep() error {
	if !b.keepsMemory() {
		return nil
	}
	if idle, err := b.stream.Query(); !idle {
		return err
	}
	return b.giveBackKept()
}

func (b *Backend) keepsMemory() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.kept) > 0
}

// giveBackKept frees kept memory; the GPU no longer works on it. Without a context it stays kept.
func (b *Backend) giveBackKept() error {
	if !b.keepsMemory() {
		return nil
	}
	return b.device.WithContext(func() error {
		b.mu.Lock()
		kept := b.kept
		b.kept = nil
		b.mu.Unlock()
		var err error
		for _, a := range kept {
			err = errors.Join(err, b.lib.MemFree(uint64(a.ptr)))
		}
		return err
	})
}

func (a *allocation) free() error { return a.backend.freeMemory(uint64(a.ptr)) }

// freeMemory gives memory back to NCCL.
func (b *Backend) freeMemory(p uint64) error {
	return b.device.WithContext(func() error { return b.lib.MemFree(p) })
}

func (a *allocation) Ptr() device.Ptr     { return a.ptr }
func (a *allocation) Bytes() int64        { return a.bytes }
func (a *allocation) RoundedBytes() int64 { return a.rounded }

// Release frees the memory; adopted memory stays the caller's. If a call of NCCL's that was given up, or a window that could not be removed,
// may still use it, it is freed later, and if it is adopted, that is an error.
func (a *allocation) Release(ctx context.Context) error {
	if a.freed {
		return nil
	}
	b := a.backend
	late := b.settle(ctx, a.base)
	if a.adopted {
		if late != nil {
			return fmt.Errorf("the %d bytes at %s, which were adopted, must stay until the rank is closed, since a call of NCCL's that was given up, or a window that could "+
				"not be removed, may still use them",
				a.bytes, a.ptr)
		}
		return nil
	}
	a.freed = true
	if late != nil {
		b.keepFor(late, a.bytes, a.free)
		return nil
	}
	if err := a.free(); err != nil {
		return fmt.Errorf("releasing %d bytes at %s: %w", a.bytes, a.ptr, err)
	}
	return nil
}

// Register adopts memory of this rank's GPU that the caller keeps until the allocation is released: memory of cuMemCreate (ncclMemAlloc among it),
// pinned, made with the handle type of POSIX file descriptors. It must lie in one allocation, at an offset that is a multiple of 4096 bytes.
// Everything that is wrong is in the [*cuda.MemoryError]. The window is that of the whole allocation, whose size must be the same on all ranks.
func (b *Backend) Register(_ context.Context, p device.Ptr, bytes int64) (backend.Allocation, error) {
	if bytes <= 0 || p.IsNil() || p.Add(bytes) < p {
		return nil, errs.Invalid("Register", "memory", fmt.Sprintf("%d bytes at %s", bytes, p),
			"at least 1 byte at an address that is not nil")
	}
	a := &allocation{backend: b, ptr: p, bytes: bytes, rounded: bytes, adopted: true}
	if err := b.device.WithContext(a.adopt); err != nil {
		return nil, err
	}
	return a, nil
}

// adopt finds out what the memory is and whether it can become a window; the context is current.
func (a *allocation) adopt() error {
	b := a.backend
	bad := &cuda.MemoryError{Ptr: a.ptr, Bytes: a.bytes}
	at, err := b.device.Place(bad)
	if err != nil {
		return err
	}
	if at == nil {
		return bad
	}
	a.base, a.span, a.offset = at.Base, at.Bytes, at.Offset
	if at.Offset%nccl.WindowAlignment != 0 {
		bad.Note("it begins %d bytes after its allocation, and NCCL registers memory at multiples of %d", at.Offset,
			nccl.WindowAlignment)
	}
	if at.Handle == 0 {
		bad.Note("it is memory of cuMemAlloc or cudaMalloc, which NCCL cannot map on other ranks; allocate it by cuMemCreate or ncclMemAlloc, " +
			"or let this library allocate it")
	} else {
		at.NoteVirtual(bad)
		err = b.drv.Check("cuMemRelease", b.drv.MemRelease(at.Handle))
	}
	if len(bad.Problems) > 0 {
		return errors.Join(bad, err)
	}
	return err
}
