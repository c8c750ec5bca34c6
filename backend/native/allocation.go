package native

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/cuda"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/errs"
)

// kind says how memory is shared.
type kind string

const (
	virtual kind = "memory of cuMemCreate" // physical memory with a handle
	legacy  kind = "memory of cuMemAlloc"  // memory with an IPC handle
)

// allocation is one rank's memory: its own, or adopted.
type allocation struct {
	backend *Backend
	kind    kind
	ptr     device.Ptr
	bytes   int64
	rounded int64 // what of it is taken, as RoundedBytes says

	handle cu.MemHandle  // of virtual memory; kept, so that each rendezvous can export it
	offset int64         // of ptr in what is exported
	span   int64         // bytes that are mapped of virtual memory, beginning offset bytes before ptr
	fabric bool          // whether it can be exported to other hosts
	early  chan exported // what the first rendezvous passes on, once that is there; nil: nothing is exported for it
	undo   undo
}

// exported is memory as a file, or why there is none.
type exported struct {
	file *os.File
	err  error
}

// Allocate creates memory, maps it and fills it with zeros. It blocks until the GPU has done so. The error is ErrNoMemory, with how much is free, if
// the GPU does not have that much left.
func (b *Backend) Allocate(ctx context.Context, bytes int64) (backend.Allocation, error) {
	if bytes <= 0 {
		return nil, errs.Invalid("Allocate", "bytes", bytes, "1 and more")
	}
	if b.found.total > 0 && bytes > b.found.total || bytes > math.MaxInt64-b.granularity {
		return nil, fmt.Errorf("%d bytes are asked for and %s (%s) has %d in all: %w", bytes, b.device.Name(), b.device.UUID(),
			b.found.total, errs.ErrNoMemory)
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if err := b.sweep(); err != nil {
		return nil, err
	}
	rounded := roundUp(bytes, b.granularity)
	a := &allocation{backend: b, kind: virtual, bytes: bytes, rounded: rounded, span: rounded,
		fabric: b.found.prop.RequestedHandleTypes&cu.HandleFabric != 0}
	err := b.device.WithContext(a.make)
	if errors.Is(err, errs.ErrNoMemory) && b.device.Regain() {
		err = b.device.WithContext(a.make)
	}
	if err != nil {
		return nil, fmt.Errorf("making %d bytes of memory on %s (%s): %w", rounded, b.device.Name(), b.device.UUID(), err)
	}
	if b.group.Size() > 1 && b.islands.Count() == 1 {
		a.exportEarly()
	}
	if err := b.zero(ctx, a); err != nil {
		return nil, fmt.Errorf("filling %d bytes of GPU memory with zeros: %w", rounded, err)
	}
	return a, nil
}

// make creates the memory and maps it; the context is current.
func (a *allocation) make() error {
	b := a.backend
	h, err := create(b.drv, a.span, &b.found.prop, &a.undo)
	if err == nil {
		a.handle = h
		a.ptr, err = reserve(b.drv, a.span, b.granularity, &a.undo)
	}
	if err == nil {
		err = mapAt(b.drv, a.ptr, a.span, h, &a.undo)
	}
	if err == nil {
		err = allow(b.device, a.ptr, a.span)
	}
	if err != nil {
		return errors.Join(err, a.undo.run())
	}
	return nil
}

// mostEarly is how many allocations may be exported that no rendezvous has had: each is a descriptor, of which a process may have no more than 1024.
const mostEarly = 16

// exportEarly begins to export the memory, for the rendezvous that most memory comes to next: the driver takes about a millisecond, and exports of the
// ranks one after the other.
func (a *allocation) exportEarly() {
	if a.backend.early.Add(1) > mostEarly {
		a.backend.early.Add(-1)
		return
	}
	early := make(chan exported, 1)
	go func() {
		var e exported
		e.err = a.backend.device.WithContext(func() error {
			var err error
			e.file, err = exportFile(a.backend.drv, a.handle)
			return err
		})
		early <- e
	}()
	a.early = early
	a.undo.add(func() error {
		if a.early == nil {
			return nil // a rendezvous had it
		}
		return closeFile(a.takeEarly().file)
	})
}

// export returns the memory as a file, which the caller closes; the context is current.
func (a *allocation) export() (*os.File, error) {
	if a.early == nil {
		return exportFile(a.backend.drv, a.handle)
	}
	e := a.takeEarly()
	return e.file, e.err
}

// takeEarly waits for what exportEarly has begun.
func (a *allocation) takeEarly() exported {
	e := <-a.early
	a.early = nil
	a.backend.early.Add(-1)
	return e
}

// zero fills the memory with zeros, or frees it if that fails.
func (b *Backend) zero(ctx context.Context, a *allocation) error {
	err := b.stream.Fill(a.ptr, 0, a.span)
	if err == nil {
		err = b.stream.Synchronize(ctx)
	}
	if err == nil {
		return nil
	}
	// Unmapping memory that the GPU is still writing would end the context. Where it cannot be asked, it may be at work.
	if idle, unknown := b.stream.Query(); !idle && !errors.Is(unknown, cuda.ErrContextLost) {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.kept = append(b.kept, a.undo)
		return fmt.Errorf("the GPU still works on it, so it is given back later: %w", errors.Join(err, unknown))
	}
	return errors.Join(err, b.device.WithContext(a.undo.run))
}

// sweep frees memory that was kept because the GPU was working on it, if the GPU no longer does.
func (b *Backend) sweep() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.kept) == 0 {
		return nil
	}
	if idle, err := b.stream.Query(); !idle {
		return err
	}
	return b.giveBackKept()
}

// giveBackKept frees kept memory; the GPU no longer works on it, and mu is held.
func (b *Backend) giveBackKept() error {
	if len(b.kept) == 0 {
		return nil
	}
	return b.device.WithContext(func() error {
		kept := b.kept
		b.kept = nil
		var err error
		for _, u := range kept {
			err = errors.Join(err, u.run())
		}
		return err
	})
}

// Kind says how the memory is shared: ranks can share it only if it is of the same kind on all of them.
func (a *allocation) Kind() string { return string(a.kind) }

func (a *allocation) Ptr() device.Ptr     { return a.ptr }
func (a *allocation) Bytes() int64        { return a.bytes }
func (a *allocation) RoundedBytes() int64 { return a.rounded }

// Release frees the memory; adopted memory stays the caller's. Memory that peers still map, because they are lost, is gone when they are.
func (a *allocation) Release(context.Context) error {
	if len(a.undo) == 0 {
		return nil
	}
	if err := a.backend.giveBack(&a.undo); err != nil {
		return fmt.Errorf("releasing %d bytes at %s: %w", a.bytes, a.ptr, err)
	}
	return nil
}

// roundUp returns the least multiple of unit that is not less than n.
func roundUp(n, unit int64) int64 { return (n + unit - 1) / unit * unit }
