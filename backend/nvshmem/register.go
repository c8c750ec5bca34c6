package nvshmem

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"unsafe"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/cuda"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/errs"
)

// adoptAlign is what adopted memory must be aligned to, in bytes: kernels move it in words of this size.
const adoptAlign = 16

// whyNoRegister says what the driver lacks to find out about memory; "" if nothing.
func whyNoRegister(drv *cu.Driver) string {
	err := drv.Require("cuMemRetainAllocationHandle", "cuMemGetAllocationPropertiesFromHandle", "cuMemGetAddressRange_v2",
		"cuPointerGetAttribute", "cuMemRelease", "cuMemGetAccess")
	if err != nil {
		return err.Error()
	}
	return ""
}

// Register adopts memory of this rank's GPU that the caller keeps until the allocation is released: memory of cuMemCreate,
// pinned, made with the one handle type of POSIX file descriptors, mapped as a whole at one place, readable and writable. It may be a
// part of its allocation, which NVSHMEM registers as a whole, once for all tensors in it. The allocation's size must be the same on all
// ranks, and a multiple of the granularity of NVSHMEM's heap (2 MiB, unless NVSHMEM_CUMEM_GRANULARITY says otherwise). All of that is
// checked here, because NVSHMEM tears its heap down over memory that it cannot register. Everything that is wrong is in the
// [*cuda.MemoryError], which is ErrInvalid. Local.
func (b *Backend) Register(_ context.Context, p device.Ptr, bytes int64) (backend.Allocation, error) {
	if b.whyNoRegister() != "" {
		return nil, b.Capabilities().Missing(Name, "register")
	}
	if bytes <= 0 || p.IsNil() || p.Add(bytes) < p {
		return nil, errs.Invalid("Register", "memory", fmt.Sprintf("%d bytes at %s", bytes, p), "at least 1 byte at an address that is not nil")
	}
	if err := b.world.usable(); err != nil { // the library, which adopt asks, may have no heap any more
		return nil, err
	}
	a := &allocation{backend: b, kind: registered, ptr: p, bytes: bytes, rounded: bytes}
	if err := b.device.WithContext(a.adopt); err != nil {
		return nil, err
	}
	return a, nil
}

// adopt finds out what the memory is and whether NVSHMEM can register it; the context is current.
func (a *allocation) adopt() error {
	b, p := a.backend, a.ptr
	bad := &cuda.MemoryError{Ptr: p, Bytes: a.bytes}
	if p%adoptAlign != 0 {
		bad.Note("the address is not a multiple of %d", adoptAlign)
	}
	if at, err := b.world.lib.Ptr(uint64(p), b.world.pe); err != nil {
		return err
	} else if at != 0 {
		bad.Note("it is memory of NVSHMEM's symmetric heap, which all ranks reach already; use the tensor that it is of")
		return bad
	}
	var where cu.MemoryType
	r := b.drv.PointerGetAttribute(unsafe.Pointer(&where), cu.PointerMemoryType, p)
	if err := b.drv.Check("cuPointerGetAttribute", r); err != nil {
		if errors.Is(err, cuda.ErrContextLost) {
			return err
		}
		bad.Err = err
		bad.Note("no memory of a GPU is there: it was freed, or never allocated by this process (%v)", err)
		return bad
	}
	if where != cu.MemoryDevice {
		bad.Note("it is memory of the host; allocate it on %s", b.device.UUID())
		return bad
	}
	var ordinal int32
	r = b.drv.PointerGetAttribute(unsafe.Pointer(&ordinal), cu.PointerDeviceOrdinal, p)
	if err := b.drv.Check("cuPointerGetAttribute", r); err != nil {
		return err
	}
	if own := int32(b.device.Ordinal()); ordinal != own {
		bad.Note("it is memory of the GPU with index %d, and this rank's is %s with index %d", ordinal, b.device.UUID(), own)
		return bad // the driver tells no more of it in this rank's context
	}
	var base device.Ptr
	var size uint64
	if err := b.drv.Check("cuMemGetAddressRange", b.drv.MemGetAddressRange(&base, &size, p)); err != nil {
		return err
	}
	// NVSHMEM maps the memory's handle, and the driver maps whole allocations only.
	a.offset, a.span = int64(p-base), int64(size)
	if end := uint64(a.offset) + uint64(a.bytes); end > size {
		bad.Note("it ends %d bytes behind the end of its allocation, %d bytes at %s; one tensor cannot lie in several", end-size, size, base)
	}
	if unit := b.world.heap.granularity; a.span%unit != 0 {
		bad.Note("its allocation has %d bytes, and NVSHMEM takes whole multiples of %d, the granularity of its heap; allocate %d", size, unit, roundUp(a.span, unit))
	}
	if err := a.look(base, bad); err != nil {
		return err
	}
	if len(bad.Problems) > 0 {
		return bad
	}
	return nil
}

// look finds out what was allocated at base, and notes in bad why NVSHMEM cannot register it.
func (a *allocation) look(base device.Ptr, bad *cuda.MemoryError) error {
	drv := a.backend.drv
	var h cu.MemHandle
	switch r := drv.MemRetainAllocationHandle(&h, base); r {
	case cu.Success:
	case cu.InvalidValue, cu.NotSupported, cu.NotPermitted:
		bad.Note("it is not memory of cuMemCreate, which alone NVSHMEM can register; allocate it so, or let this library allocate it")
		return nil
	default:
		return drv.Check("cuMemRetainAllocationHandle", r)
	}
	var prop cu.MemAllocationProp
	err := drv.Check("cuMemGetAllocationPropertiesFromHandle", drv.MemGetAllocationPropertiesFromHandle(&prop, h))
	if err := errors.Join(err, drv.Check("cuMemRelease", drv.MemRelease(h))); err != nil {
		return err
	}
	if prop.Type != cu.AllocationPinned {
		bad.Note("it is not pinned (type %d); create it as CU_MEM_ALLOCATION_TYPE_PINNED", prop.Type)
	}
	if prop.Location.Type != cu.LocationDevice {
		bad.Note("it was not created on a GPU (location type %d)", prop.Location.Type)
	}
	if prop.RequestedHandleTypes != cu.HandleFD {
		bad.Note("its handle types are %#x, and NVSHMEM registers only memory whose only one is CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR (%#x)",
			prop.RequestedHandleTypes, cu.HandleFD)
	}
	where := cu.MemLocation{Type: cu.LocationDevice, ID: int32(a.backend.device.Ordinal())}
	var access uint64
	if err := drv.Check("cuMemGetAccess", drv.MemGetAccess(&access, &where, base)); err != nil {
		return err
	}
	if access != uint64(cu.AccessReadWrite) {
		bad.Note("this rank's GPU may not read and write it (access %d); allow it by cuMemSetAccess", access)
	}
	return nil
}

// alias is the second address of registered memory, in the heap.
type alias struct {
	base device.Ptr // where the caller has it
	at   device.Ptr // where it is in the heap
	span int64
	turn uint64
	uses int // mappings
}

// aliasOf returns the alias of the allocation that registered memory is in, or nil if it has none yet.
func (b *Backend) aliasOf(a *allocation) *alias {
	b.mu.Lock()
	defer b.mu.Unlock()
	base := a.ptr.Add(-a.offset)
	i := slices.IndexFunc(b.aliases, func(x *alias) bool { return x.base == base && x.span == a.span })
	if i < 0 {
		return nil
	}
	return b.aliases[i]
}

// register makes the allocation that the memory is in a part of the heap, unless it is one already, on which all ranks have agreed. It is part of a
// turn.
func (m *mapping) register(turn uint64, a *allocation) error {
	b, w := m.backend, m.backend.world
	if x := b.aliasOf(a); x != nil {
		b.mu.Lock()
		defer b.mu.Unlock()
		x.uses++
		m.alias = x
		return nil
	}
	h := &w.heap
	if err := h.within(a.span); err != nil {
		return err
	}
	base := a.ptr.Add(-a.offset)
	p, err := w.lib.Register(uint64(base), a.span)
	if err != nil {
		return w.breakUp(err)
	}
	if p == 0 {
		return w.tear(fmt.Errorf("NVSHMEM could not register %d bytes at %s (nvshmemx_buffer_register_symmetric) and has torn its heap down: %w", a.span, base,
			errs.ErrUnsupported))
	}
	h.registered += a.span
	w.hold(turn, &resource{ptr: p, bytes: a.span, alias: true})
	m.alias = &alias{base: base, at: device.Ptr(p), span: a.span, turn: turn, uses: 1}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.aliases = append(b.aliases, m.alias)
	return nil
}

// forget removes registered memory from the heap, if nothing else uses it.
func (b *Backend) forget(a *alias) {
	b.mu.Lock()
	if a.uses--; a.uses > 0 {
		b.mu.Unlock()
		return
	}
	b.aliases = slices.DeleteFunc(b.aliases, func(x *alias) bool { return x == a })
	b.mu.Unlock()
	b.world.release(a.turn)
}

// inHeap returns the address in the heap of symmetric memory: for registered memory, that of its alias.
func (b *Backend) inHeap(p device.Ptr) device.Ptr {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, a := range b.aliases {
		if p >= a.base && p < a.base.Add(a.span) {
			return a.at.Add(int64(p - a.base))
		}
	}
	return p
}
