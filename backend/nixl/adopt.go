package nixl

import (
	"errors"
	"fmt"
	"unsafe"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/cuda"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/errs"
)

// adoptable returns an error that says why memory cannot be adopted, or nil.
func (b *Backend) adoptable(p device.Ptr, bytes int64) error {
	if hm, ok := b.device.(device.HostMemory); ok {
		_, err := hm.Bytes(p, bytes)
		return err
	}
	d, ok := b.device.(*cuda.Device)
	if !ok {
		return nil
	}
	return d.WithContext(func() error { return adoptableGPU(d, p, bytes) })
}

// adoptableGPU is adoptable for GPU memory; the context is current.
func adoptableGPU(d *cuda.Device, p device.Ptr, bytes int64) error {
	drv := d.Driver()
	if err := drv.Require("cuPointerGetAttribute", "cuMemGetAddressRange_v2"); err != nil {
		return err
	}
	bad := func(what, allowed string) error {
		return errs.Invalid("Register", "memory", fmt.Sprintf("%d bytes at %s, %s", bytes, p, what), allowed)
	}
	var where cu.MemoryType
	r := drv.PointerGetAttribute(unsafe.Pointer(&where), cu.PointerMemoryType, p)
	if err := drv.Check("cuPointerGetAttribute", r); err != nil {
		if errors.Is(err, cuda.ErrContextLost) { // which says nothing about the memory
			return err
		}
		return bad(fmt.Sprintf("where no memory of a GPU is (%v)", err), "memory that cuMemAlloc or cuMemCreate of this process made and that was not freed")
	}
	if where != cu.MemoryDevice {
		return bad("which is memory of the host", "memory of "+d.UUID())
	}
	var ordinal int32
	r = drv.PointerGetAttribute(unsafe.Pointer(&ordinal), cu.PointerDeviceOrdinal, p)
	if err := drv.Check("cuPointerGetAttribute", r); err != nil {
		return err
	}
	if ordinal != int32(d.Ordinal()) {
		return bad(fmt.Sprintf("on the GPU with index %d", ordinal),
			fmt.Sprintf("memory of this rank's GPU, %s with index %d", d.UUID(), d.Ordinal()))
	}
	var base device.Ptr
	var size uint64
	if err := drv.Check("cuMemGetAddressRange", drv.MemGetAddressRange(&base, &size, p)); err != nil {
		return err
	}
	// UCX shares only the first physical allocation, and would reach the wrong memory behind it.
	if uint64(p-base)+uint64(bytes) > size {
		return bad(fmt.Sprintf("beyond the end of its allocation of %d bytes at %s", size, base),
			"memory that lies in one allocation")
	}
	if size < gpuBlock {
		return bad(fmt.Sprintf("in an allocation of %d bytes, which shares a block of the GPU's memory with others", size),
			fmt.Sprintf("memory in an allocation of %d bytes and more, which other processes can map by itself", gpuBlock))
	}
	return nil
}
