package native

import (
	"context"
	"errors"
	"fmt"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/cuda"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/errs"
)

// adoptAlign is what adopted memory must be aligned to, in bytes: kernels move it in words of this size.
const adoptAlign = 16

// Register adopts memory of this rank's GPU that the caller keeps until the allocation is released: memory of cuMemCreate, which must be pinned and
// have been made with the handle type of POSIX file descriptors, or of cuMemAlloc or cudaMalloc. It must be aligned to 16 bytes and lie anywhere in
// one allocation, of which peers map the whole. Everything that is wrong is in the [*cuda.MemoryError], which is ErrNotReachable too for memory of cuMemAlloc in a
// group of several hosts, or of containers that cannot pass memory to each other.
func (b *Backend) Register(_ context.Context, p device.Ptr, bytes int64) (backend.Allocation, error) {
	if b.found.noRegister != "" {
		return nil, b.Capabilities().Missing(Name, "register")
	}
	if bytes <= 0 || p.IsNil() || p.Add(bytes) < p {
		return nil, errs.Invalid("Register", "memory", fmt.Sprintf("%d bytes at %s", bytes, p),
			"at least 1 byte at an address that is not nil")
	}
	a := &allocation{backend: b, ptr: p, bytes: bytes, rounded: bytes}
	if err := b.device.WithContext(a.adopt); err != nil {
		return nil, err
	}
	return a, nil
}

// adopt finds out what the memory is and whether it can be shared; the context is current.
func (a *allocation) adopt() error {
	b := a.backend
	bad := &cuda.MemoryError{Ptr: a.ptr, Bytes: a.bytes}
	if a.ptr%adoptAlign != 0 {
		bad.Note("the address is not a multiple of %d", adoptAlign)
	}
	at, err := b.device.Place(bad)
	switch {
	case err != nil:
		return err
	case at == nil:
		return bad
	case at.Handle == 0:
		a.offset = at.Offset
		a.adoptLegacy(at.Base, bad)
	default:
		a.undo.add(func() error { return release(b.drv, at.Handle) })
		a.kind, a.handle, a.fabric, a.offset = virtual, at.Handle, at.Prop.RequestedHandleTypes&cu.HandleFabric != 0, at.Offset
		a.span = at.Bytes // the driver maps whole allocations only
		at.NoteVirtual(bad)
	}
	if len(bad.Problems) > 0 {
		return errors.Join(bad, a.undo.run())
	}
	return nil
}

// adoptLegacy adopts memory of cuMemAlloc whose allocation begins at base.
func (a *allocation) adoptLegacy(base device.Ptr, bad *cuda.MemoryError) {
	b := a.backend
	a.kind = legacy
	if b.islands.Count() > 1 {
		// A handle means nothing on another host, or it means other memory there.
		bad.Note("it was allocated by cuMemAlloc or cudaMalloc, and cannot be passed to other hosts, or to containers apart, where ranks of the group are; " +
			"allocate it by cuMemCreate with CU_MEM_HANDLE_TYPE_FABRIC, or let this library allocate it")
		bad.Err = errs.ErrNotReachable
		return
	}
	if !b.otherProcess() {
		return
	}
	var h cu.IPCMemHandle
	if err := b.drv.Check("cuIpcGetMemHandle", b.drv.IPCGetMemHandle(&h, base)); err != nil {
		bad.Note("it has no handle for other processes, as managed memory and memory of pools have not (%v); "+
			"allocate it by cuMemCreate, cuMemAlloc or cudaMalloc, or let this library allocate it", err)
	}
}

// otherProcess reports whether some rank is in another process than this one.
func (b *Backend) otherProcess() bool {
	members := b.group.Members()
	for _, m := range members {
		if m.Process != members[b.group.Rank()].Process {
			return true
		}
	}
	return false
}
