package native

import (
	"errors"
	"fmt"
	"os"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/cuda"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/errs"
)

// The driver's calls for virtual memory, each with the step that undoes it. They need no current context, but the device's is current anyway.

// create creates physical memory.
func create(drv *cu.Driver, bytes int64, prop *cu.MemAllocationProp, u *undo) (cu.MemHandle, error) {
	var h cu.MemHandle
	if err := drv.Check("cuMemCreate", drv.MemCreate(&h, uint64(bytes), prop, 0)); err != nil {
		return 0, withFree(drv, err)
	}
	u.add(func() error { return release(drv, h) })
	return h, nil
}

// release releases a handle. The memory stays as long as it is mapped somewhere.
func release(drv *cu.Driver, h cu.MemHandle) error {
	return drv.Check("cuMemRelease", drv.MemRelease(h))
}

// reserve reserves a range of addresses.
func reserve(drv *cu.Driver, bytes, alignment int64, u *undo) (device.Ptr, error) {
	var p device.Ptr
	r := drv.MemAddressReserve(&p, uint64(bytes), uint64(alignment), 0, 0)
	if err := drv.Check("cuMemAddressReserve", r); err != nil {
		return 0, fmt.Errorf("reserving %d bytes of addresses: %w", bytes, err)
	}
	u.addUnmapped(fmt.Sprintf("%d bytes of addresses at %s stay reserved", bytes, p), func() error {
		return drv.Check("cuMemAddressFree", drv.MemAddressFree(p, uint64(bytes)))
	})
	return p, nil
}

// mapAt maps the first bytes of the memory at p.
func mapAt(drv *cu.Driver, p device.Ptr, bytes int64, h cu.MemHandle, u *undo) error {
	if err := drv.Check("cuMemMap", drv.MemMap(p, uint64(bytes), 0, h, 0)); err != nil {
		return withFree(drv, err)
	}
	u.addUnmap(func() error { return drv.Check("cuMemUnmap", drv.MemUnmap(p, uint64(bytes))) })
	return nil
}

// allow lets the device read and write what is mapped at p.
func allow(d *cuda.Device, p device.Ptr, bytes int64) error {
	drv := d.Driver()
	access := cu.MemAccessDesc{
		Location: cu.MemLocation{Type: cu.LocationDevice, ID: int32(d.Ordinal())},
		Flags:    cu.AccessReadWrite,
	}
	return withFree(drv, drv.Check("cuMemSetAccess", drv.MemSetAccess(p, uint64(bytes), &access, 1)))
}

// exportFile returns memory as a new file, which the caller closes.
func exportFile(drv *cu.Driver, h cu.MemHandle) (*os.File, error) {
	fd := int32(-1)
	r := drv.MemExportFD(&fd, h, cu.HandleFD, 0)
	if err := drv.Check("cuMemExportToShareableHandle", r); err != nil {
		if r == cu.OperatingSystem || r == cu.OutOfMemory {
			err = fmt.Errorf("%w; perhaps no file descriptor is left: raise the limit (ulimit -n) or free tensors", err)
		}
		return nil, err
	}
	return newFile(fd, "GPU memory")
}

// importFile returns the memory behind a file that a rank exported. The file stays the caller's.
func importFile(drv *cu.Driver, f *os.File) (cu.MemHandle, error) {
	raw, err := f.SyscallConn()
	if err != nil {
		return 0, err
	}
	var h cu.MemHandle
	var failed error
	err = raw.Control(func(fd uintptr) {
		failed = drv.Check("cuMemImportFromShareableHandle", drv.MemImportFD(&h, fd, cu.HandleFD))
	})
	return h, errors.Join(err, failed)
}

// withFree adds how much memory is left to an error of running out of memory.
func withFree(drv *cu.Driver, err error) error {
	var free, total uint64
	if errors.Is(err, errs.ErrNoMemory) && drv.MemGetInfo != nil && drv.MemGetInfo(&free, &total) == cu.Success {
		return fmt.Errorf("%w (%d of %d bytes are free)", err, free, total)
	}
	return err
}
