package native

import (
	"errors"
	"fmt"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device/cuda"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/multicast"
)

// finding is what was found out about a GPU by trying.
type finding struct {
	prop        cu.MemAllocationProp // what memory is created with
	granularity int64                // in bytes
	total       int64                // memory of the GPU in bytes; 0 if not known
	noFabric    string               // why memory cannot be passed between hosts; "" if it can
	noRegister  string               // why memory cannot be adopted; "" if it can
	noMulticast string               // why this GPU has no multicast here; "" if it has
	multicast   *cu.Multicast        // nil without multicast, and when no group was given
}

// The driver functions that the backend needs, and those that adopting memory needs besides.
var (
	needed = []string{
		"cuMemGetAllocationGranularity", "cuMemCreate", "cuMemRelease", "cuMemAddressReserve", "cuMemAddressFree", "cuMemMap",
		"cuMemUnmap", "cuMemSetAccess", "cuMemExportToShareableHandle", "cuMemImportFromShareableHandle", "cuDeviceCanAccessPeer",
	}
	neededToRegister = []string{
		"cuMemRetainAllocationHandle", "cuMemGetAllocationPropertiesFromHandle", "cuMemGetAddressRange_v2", "cuPointerGetAttribute",
		"cuIpcGetMemHandle", "cuIpcOpenMemHandle_v2", "cuIpcCloseMemHandle", "cuCtxEnablePeerAccess",
	}
)

// find tries on d what the backend needs. Multicast functions are looked up only if the policy allows it, and then only for a group: size is its
// number of ranks, or 0 for none. An error is ErrUnsupported and says what is missing, or ErrNoMemory.
func find(d *cuda.Device, p *multicast.Policy, size int) (*finding, error) {
	drv := d.Driver()
	f := &finding{}
	if err := drv.Require(needed...); err != nil {
		return nil, err
	}
	if err := drv.Require(neededToRegister...); err != nil {
		f.noRegister = err.Error()
	}
	for _, a := range []struct {
		attr cu.DeviceAttribute
		what string
	}{
		{cu.AttrVMM, "virtual memory management"},
		{cu.AttrHandlePosixFD, "memory that can be passed to other processes as a file descriptor"},
	} {
		if have, err := d.Attribute(int(a.attr)); err != nil {
			return nil, err
		} else if have == 0 {
			return nil, fmt.Errorf("%s (%s) has no %s: use backend nccl or host: %w", d.Name(), d.UUID(), a.what, errs.ErrUnsupported)
		}
	}
	err := d.WithContext(func() error {
		var total uint64
		if drv.DeviceTotalMem != nil && drv.DeviceTotalMem(&total, d.Ordinal()) == cu.Success {
			f.total = int64(total)
		}
		return f.try(d)
	})
	if err != nil {
		return nil, fmt.Errorf("trying memory of %s (%s): %w", d.Name(), d.UUID(), err)
	}
	if err := f.findMulticast(d, p, size); err != nil {
		return nil, err
	}
	return f, nil
}

// try finds the properties that memory can be created with: preferably with all kinds of handles, and for network cards too.
func (f *finding) try(d *cuda.Device) error {
	rdma, fabric := attribute(d, cu.AttrGPUDirectRDMAWithVMM), attribute(d, cu.AttrHandleFabric)
	f.noFabric = "the GPU or its driver has no fabric handles"
	var err error
	for _, c := range []struct {
		handles  cu.HandleType
		rdma     uint8
		possible bool
	}{
		{cu.HandleFD | cu.HandleFabric, 1, rdma && fabric},
		{cu.HandleFD | cu.HandleFabric, 0, fabric},
		{cu.HandleFD, 1, rdma},
		{cu.HandleFD, 0, true},
	} {
		if !c.possible {
			continue
		}
		f.prop = cu.MemAllocationProp{
			Type:                 cu.AllocationPinned,
			RequestedHandleTypes: c.handles,
			Location:             cu.MemLocation{Type: cu.LocationDevice, ID: int32(d.Ordinal())},
			GPUDirectRDMACapable: c.rdma,
		}
		if err = f.tryProp(d); err == nil {
			if c.handles&cu.HandleFabric != 0 {
				f.noFabric = ""
			}
			return nil
		}
		if errors.Is(err, errs.ErrNoMemory) || errors.Is(err, cuda.ErrContextLost) {
			return err
		}
		if c.handles&cu.HandleFabric != 0 {
			f.noFabric = "memory with fabric handles cannot be made here, mostly because no IMEX channel is set up: " + err.Error()
		}
	}
	return err
}

// tryProp creates one granule and exports it in each way that the properties allow.
func (f *finding) tryProp(d *cuda.Device) (err error) {
	drv := d.Driver()
	var granularity uint64
	r := drv.MemGetAllocationGranularity(&granularity, &f.prop, cu.GranularityRecommended)
	if err := drv.Check("cuMemGetAllocationGranularity", r); err != nil {
		return err
	}
	if granularity == 0 || granularity > 1<<32 {
		return fmt.Errorf("the driver recommends a granularity of %d bytes: %w", granularity, errs.ErrUnsupported)
	}
	f.granularity = int64(granularity)
	var u undo
	defer func() { err = errors.Join(err, u.run()) }()
	h, err := create(drv, f.granularity, &f.prop, &u)
	if err != nil {
		return err
	}
	file, err := exportFile(drv, h)
	if err != nil {
		return err
	}
	if err := file.Close(); err != nil {
		return fmt.Errorf("closing an exported file: %w", err)
	}
	if f.prop.RequestedHandleTypes&cu.HandleFabric == 0 {
		return nil
	}
	var fabric cu.FabricHandle
	return drv.Check("cuMemExportToShareableHandle", drv.MemExportFabric(&fabric, h, cu.HandleFabric, 0))
}

// findMulticast finds out whether the GPU has multicast, as far as the policy allows it. The error is that of a device that could not be asked.
func (f *finding) findMulticast(d *cuda.Device, p *multicast.Policy, size int) error {
	switch {
	case p.Forbidden != "":
		f.noMulticast = p.Forbidden
	case !attribute(d, cu.AttrMulticast):
		f.noMulticast = "the GPU or its driver has no multicast"
	case size == 1:
		f.noMulticast = "the group has only one rank"
	case size > 1:
		return d.WithContext(func() error {
			if err := f.resolveMulticast(d, size); err != nil {
				f.noMulticast, f.multicast = err.Error(), nil
			}
			return nil
		})
	}
	return nil
}

// resolveMulticast looks up the multicast functions, and raises the granularity so that all memory can be bound. The context is current.
func (f *finding) resolveMulticast(d *cuda.Device, size int) error {
	m, err := d.Driver().ResolveMulticast()
	if err != nil {
		return err
	}
	prop := multicastProp(size, f.granularity)
	var granularity uint64
	if err := d.Driver().Check("cuMulticastGetGranularity", m.GetGranularity(&granularity, prop, cu.GranularityMinimum)); err != nil {
		return err
	}
	if granularity > 1<<32 {
		return fmt.Errorf("multicast memory comes in pieces of %d bytes: %w", granularity, errs.ErrUnsupported)
	}
	f.granularity, f.multicast = max(f.granularity, int64(granularity)), m
	return nil
}

// attribute reports whether the GPU has an attribute. It is false for one that the driver does not know.
func attribute(d *cuda.Device, a cu.DeviceAttribute) bool {
	value, err := d.Attribute(int(a))
	return err == nil && value != 0
}

// capabilities says what works on this GPU, as far as no peers are needed to know it.
func (f *finding) capabilities() backend.Capabilities {
	c := backend.Capabilities{
		PeerPointers:      true,
		Contiguous:        true,
		Multicast:         f.noMulticast == "",
		Register:          f.noRegister == "",
		Transfers:         true,
		Graphs:            true,
		RanksInOneProcess: true,
		SeveralHosts:      f.noFabric == "",
		Why:               map[string]string{},
	}
	for name, why := range map[string]string{"multicast": f.noMulticast, "register": f.noRegister, "several_hosts": f.noFabric} {
		if why != "" {
			c.Why[name] = why
		}
	}
	return c
}
