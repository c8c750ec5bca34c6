package native

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"unsafe"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/cuda"
	"github.com/symmem/symmem/internal/errs"
)

// adoptAlign is what adopted memory must be aligned to, in bytes: kernels move it in words of this size.
const adoptAlign = 16

// MemoryError is memory that cannot be adopted, with everything that is wrong with it. It is ErrInvalid.
type MemoryError struct {
	Ptr      device.Ptr
	Bytes    int64
	Problems []string // each says what is wrong and what to do
	Err      error    // the driver's error, if it refused the address altogether
}

// Error lists the problems.
func (e *MemoryError) Error() string {
	return fmt.Sprintf("the %d bytes at %s cannot be adopted: %s", e.Bytes, e.Ptr, strings.Join(e.Problems, "; "))
}

// Is reports that a MemoryError is an ErrInvalid.
func (e *MemoryError) Is(target error) bool { return target == errs.ErrInvalid }

// Unwrap gives the driver's error, or nil.
func (e *MemoryError) Unwrap() error { return e.Err }

// Register adopts memory of this rank's GPU that the caller keeps until the allocation is released: memory of cuMemCreate, which must
// be pinned and have been made with the handle type of POSIX file descriptors, or of cuMemAlloc or cudaMalloc. It must be aligned to
// 16 bytes and lie in one allocation. Everything that is wrong is in the [*MemoryError].
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
	b, p := a.backend, a.ptr
	bad := &MemoryError{Ptr: p, Bytes: a.bytes}
	problem := func(format string, args ...any) { bad.Problems = append(bad.Problems, fmt.Sprintf(format, args...)) }
	if p%adoptAlign != 0 {
		problem("the address is not a multiple of %d", adoptAlign)
	}
	var where cuda.MemoryType
	r := b.drv.PointerGetAttribute(unsafe.Pointer(&where), cuda.PointerMemoryType, p)
	if err := b.drv.Check("cuPointerGetAttribute", r); err != nil {
		if errors.Is(err, cuda.ErrContextLost) {
			return err
		}
		bad.Err = err
		problem("no memory of a GPU is there: it was freed, or never allocated by this process (%v)", err)
		return bad
	}
	if where != cuda.MemoryDevice {
		problem("it is memory of the host; allocate it on %s", b.device.UUID())
		return bad
	}
	var ordinal int32
	r = b.drv.PointerGetAttribute(unsafe.Pointer(&ordinal), cuda.PointerDeviceOrdinal, p)
	if err := b.drv.Check("cuPointerGetAttribute", r); err != nil {
		return err
	}
	if own := int32(b.device.Ordinal()); ordinal != own {
		problem("it is memory of the GPU with index %d, and this rank's is %s with index %d", ordinal, b.device.UUID(), own)
		return bad // the driver tells no more of it in this rank's context
	}
	var base device.Ptr
	var size uint64
	if err := b.drv.Check("cuMemGetAddressRange", b.drv.MemGetAddressRange(&base, &size, p)); err != nil {
		return err
	}
	a.offset = int64(p - base)
	if end := uint64(a.offset) + uint64(a.bytes); end > size {
		problem("it ends %d bytes behind the end of its allocation, %d bytes at %s; one tensor cannot lie in several", end-size, size, base)
	}
	handle, prop, err := b.retain(p)
	switch {
	case err != nil:
		return err
	case handle == 0:
		a.adoptLegacy(base, problem)
	default:
		a.undo.add(func() error { return release(b.drv, handle) })
		a.adoptVirtual(handle, prop, int64(size), problem)
	}
	if len(bad.Problems) > 0 {
		return errors.Join(bad, a.undo.run())
	}
	return nil
}

// retain gives a handle of the memory at p that the caller releases, and its properties; 0 if it is not memory with handles.
func (b *Backend) retain(p device.Ptr) (cuda.MemHandle, cuda.MemAllocationProp, error) {
	var h cuda.MemHandle
	var prop cuda.MemAllocationProp
	switch r := b.drv.MemRetainAllocationHandle(&h, p); r {
	case cuda.Success:
	case cuda.InvalidValue, cuda.NotSupported, cuda.NotPermitted:
		return 0, prop, nil
	default:
		return 0, prop, b.drv.Check("cuMemRetainAllocationHandle", r)
	}
	r := b.drv.MemGetAllocationPropertiesFromHandle(&prop, h)
	if err := b.drv.Check("cuMemGetAllocationPropertiesFromHandle", r); err != nil {
		return 0, prop, errors.Join(err, release(b.drv, h))
	}
	return h, prop, nil
}

// adoptVirtual takes memory of cuMemCreate, of which size bytes are mapped.
func (a *allocation) adoptVirtual(h cuda.MemHandle, prop cuda.MemAllocationProp, size int64, problem func(string, ...any)) {
	b := a.backend
	a.kind, a.handle, a.fabric = virtual, h, prop.RequestedHandleTypes&cuda.HandleFabric != 0
	a.span = min(roundUp(a.offset+a.bytes, b.granularity), size)
	if prop.Type != cuda.AllocationPinned {
		problem("it is not pinned (type %d); create it as CU_MEM_ALLOCATION_TYPE_PINNED", prop.Type)
	}
	if prop.Location.Type != cuda.LocationDevice {
		problem("it was not created on a GPU (location type %d)", prop.Location.Type)
	}
	if prop.RequestedHandleTypes&cuda.HandleFD == 0 {
		problem("it cannot be passed to other ranks (handle types %#x); create it with CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR",
			prop.RequestedHandleTypes)
	}
}

// adoptLegacy takes memory of cuMemAlloc whose allocation begins at base.
func (a *allocation) adoptLegacy(base device.Ptr, problem func(string, ...any)) {
	b := a.backend
	a.kind = legacy
	if !b.otherProcess() {
		return
	}
	var h cuda.IPCMemHandle
	if err := b.drv.Check("cuIpcGetMemHandle", b.drv.IPCGetMemHandle(&h, base)); err != nil {
		problem("it has no handle for other processes, as managed memory and memory of pools have not (%v); "+
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
