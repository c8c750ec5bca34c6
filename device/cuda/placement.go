package cuda

import (
	"errors"
	"fmt"
	"strings"
	"unsafe"

	"github.com/symmem/symmem/device"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/errs"
)

// MemoryError is memory that cannot be adopted, with everything that is wrong with it. It is ErrInvalid.
type MemoryError struct {
	Ptr      device.Ptr
	Bytes    int64
	Problems []string // each says what is wrong and what to do
	Err      error    // the driver's error, if it refused the address altogether, or another condition that the memory stands for
}

// Error lists the problems.
func (e *MemoryError) Error() string {
	return fmt.Sprintf("the %d bytes at %s cannot be adopted: %s", e.Bytes, e.Ptr, strings.Join(e.Problems, "; "))
}

// Is reports that a MemoryError is an ErrInvalid.
func (e *MemoryError) Is(target error) bool { return target == errs.ErrInvalid }

// Unwrap returns Err.
func (e *MemoryError) Unwrap() error { return e.Err }

// Note adds a problem.
func (e *MemoryError) Note(format string, args ...any) {
	e.Problems = append(e.Problems, fmt.Sprintf(format, args...))
}

// Placement says where in an allocation memory lies, and how the allocation was made.
type Placement struct {
	Base   device.Ptr // of the allocation
	Bytes  int64      // of the allocation
	Offset int64      // of the memory from Base
	// Handle is the handle of memory of cuMemCreate, and 0 for other memory. The caller of Place releases it.
	Handle cu.MemHandle
	// Prop holds the properties that it was created with, if there is a handle.
	Prop cu.MemAllocationProp
}

// Place finds out what memory bad describes, for backends that adopt it. What makes it impossible to share is noted in bad; the placement is nil if
// nothing more can be known. Any other error is the driver's. The device's context is current, and the driver has cuPointerGetAttribute,
// cuMemGetAddressRange and the functions of allocation handles.
func (d *Device) Place(bad *MemoryError) (*Placement, error) {
	if err := d.made("Place"); err != nil {
		return nil, err
	}
	p, drv := bad.Ptr, d.drv
	var where cu.MemoryType
	r := drv.PointerGetAttribute(unsafe.Pointer(&where), cu.PointerMemoryType, p)
	if err := drv.Check("cuPointerGetAttribute", r); err != nil {
		if errors.Is(err, cu.ErrContextLost) {
			return nil, err
		}
		bad.Err = err
		bad.Note("no memory of a GPU is there: it was freed, or never allocated by this process (%v)", err)
		return nil, nil
	}
	if where != cu.MemoryDevice {
		bad.Note("it is memory of the host; allocate it on %s", d.UUID())
		return nil, nil
	}
	var ordinal int32
	r = drv.PointerGetAttribute(unsafe.Pointer(&ordinal), cu.PointerDeviceOrdinal, p)
	if err := drv.Check("cuPointerGetAttribute", r); err != nil {
		return nil, err
	}
	if own := int32(d.Ordinal()); ordinal != own {
		bad.Note("it is memory of the GPU with index %d, and this rank's is %s with index %d", ordinal, d.UUID(), own)
		return nil, nil // the driver tells no more of it in this rank's context
	}
	var at Placement
	var size uint64
	if err := drv.Check("cuMemGetAddressRange", drv.MemGetAddressRange(&at.Base, &size, p)); err != nil {
		return nil, err
	}
	at.Bytes, at.Offset = int64(size), int64(p-at.Base)
	if end := uint64(at.Offset) + uint64(bad.Bytes); end > size {
		bad.Note("it ends %d bytes behind the end of its allocation, %d bytes at %s; one tensor cannot lie in several", end-size,
			size, at.Base)
	}
	switch r := drv.MemRetainAllocationHandle(&at.Handle, p); r {
	case cu.Success:
	case cu.InvalidValue, cu.NotSupported, cu.NotPermitted:
		at.Handle = 0
		return &at, nil
	default:
		return nil, drv.Check("cuMemRetainAllocationHandle", r)
	}
	r = drv.MemGetAllocationPropertiesFromHandle(&at.Prop, at.Handle)
	if err := drv.Check("cuMemGetAllocationPropertiesFromHandle", r); err != nil {
		return nil, errors.Join(err, drv.Check("cuMemRelease", drv.MemRelease(at.Handle)))
	}
	return &at, nil
}

// NoteVirtual notes what keeps memory with a handle from being passed to other ranks.
func (p *Placement) NoteVirtual(bad *MemoryError) {
	if p.Prop.Type != cu.AllocationPinned {
		bad.Note("it is not pinned (type %d); create it as CU_MEM_ALLOCATION_TYPE_PINNED", p.Prop.Type)
	}
	if p.Prop.Location.Type != cu.LocationDevice {
		bad.Note("it was not created on a GPU (location type %d)", p.Prop.Location.Type)
	}
	if p.Prop.RequestedHandleTypes&cu.HandleFD == 0 {
		bad.Note("it cannot be passed to other ranks (handle types %#x); create it with CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR",
			p.Prop.RequestedHandleTypes)
	}
}
