package simcuda

import (
	"slices"
	"time"

	"golang.org/x/sys/unix"

	cu "github.com/symmem/symmem/internal/cuda"
)

// cast is a multicast object: the switch's list of which memory of which GPU stands behind one address.
//
// What its file says, behind the card, all processes see: which GPUs were added, and what is bound where.
type cast struct {
	machine *Machine
	file    file
	fd      int
	bytes   uint64
	devices int
	handles cu.HandleType
	own     bool
	refs    int // handles and mappings
	added   []int
	bound   []binding // by GPU's ordinal, those of GPUs that were added
}

// binding is memory of one GPU.
type binding struct {
	gpu               int
	of                *physical
	offset, memOffset uint64
	bytes             uint64
}

// has says whether a GPU was added.
func (c *cast) has(gpu int) bool { return slices.Contains(c.added, gpu) }

// whole says whether every GPU has bound memory, the same part of the object. Before that, what an access makes is not defined.
func (c *cast) whole() bool {
	if len(c.bound) < c.devices {
		return false
	}
	for _, b := range c.bound {
		if b.offset != c.bound[0].offset || b.bytes != c.bound[0].bytes {
			return false
		}
	}
	return true
}

// drop gives back a reference.
func (c *cast) drop() {
	if c.refs--; c.refs > 0 {
		return
	}
	m := c.machine
	delete(m.objects, c.file)
	for _, b := range c.bound {
		b.of.drop()
	}
	c.bound = nil
	_ = unix.Close(c.fd)
}

// spread shows the object's mappings to kernels, or hides them, as far as it is whole now.
func (c *cast) spread() {
	m := c.machine
	for _, x := range m.spaces {
		if x.cast == c {
			m.spread(x)
		}
	}
}

// findCast gives the object that a descriptor is of. An object is gone with its last handle and mapping; a descriptor does not keep it.
func (m *Machine) findCast(fd int, _ card) (*cast, cu.Result) {
	id, err := identify(fd)
	if err != nil {
		return nil, cu.InvalidValue
	}
	if c := m.objects[id]; c != nil {
		return c, cu.Success
	}
	return nil, m.violation(cu.InvalidHandle, "import of a multicast object that nobody in this process holds")
}

// bindLimit is how long cuMulticastBindMem waits for GPUs that are not added: a real driver would wait for ever.
const bindLimit = 20 * time.Second

// multicast gives the functions for multicast.
func (m *Machine) multicast() *cu.Multicast {
	object := func(h cu.MemHandle) *cast {
		if x := m.handles[h]; x != nil {
			return x.cast
		}
		return nil
	}
	return &cu.Multicast{
		Create: func(h *cu.MemHandle, prop *cu.MulticastObjectProp) cu.Result {
			return m.do(func() cu.Result {
				switch {
				case !m.config.Multicast:
					return cu.NotSupported
				case prop.NumDevices < 1 || prop.Size == 0 || prop.Size%granule != 0 || prop.Flags != 0:
					return m.violation(cu.InvalidValue, "cuMulticastCreate of %d bytes for %d GPUs", prop.Size, prop.NumDevices)
				case int(prop.NumDevices) > len(m.gpus):
					return cu.InvalidValue
				case cu.HandleType(prop.HandleTypes)&cu.HandleFabric != 0:
					return cu.NotPermitted
				case len(m.objects) >= m.config.MulticastObjects:
					return cu.OutOfMemory // the switches have so many; NCCL's issues name CUDA_ERROR_OUT_OF_MEMORY for it
				}
				fd, id, err := createFile(page, card{Kind: kindCast, Devices: int32(prop.NumDevices)})
				if err != nil {
					return cu.OperatingSystem
				}
				c := &cast{machine: m, file: id, fd: fd, bytes: prop.Size, devices: int(prop.NumDevices), handles: cu.HandleType(prop.HandleTypes), own: true, refs: 1}
				m.objects[id] = c
				*h = m.newHandle(&handle{cast: c})
				return cu.Success
			})
		},
		// CUDA driver API, cuMulticastAddDevice: a device is added once, and no more than the object was made for.
		AddDevice: func(h cu.MemHandle, dev cu.DeviceOrdinal) cu.Result {
			return m.do(func() cu.Result {
				c := object(h)
				if c == nil || int(dev) >= len(m.gpus) || dev < 0 {
					return m.violation(cu.InvalidValue, "cuMulticastAddDevice of GPU %d to no object", dev)
				}
				if c.has(int(dev)) || len(c.added) == c.devices {
					return m.violation(cu.InvalidValue, "cuMulticastAddDevice of GPU %d to an object that has %v, of %d", dev, c.added, c.devices)
				}
				c.added = append(c.added, int(dev))
				m.moved.Broadcast()
				return cu.Success
			})
		},
		BindMem: func(h cu.MemHandle, offset uint64, mem cu.MemHandle, memOffset, bytes, flags uint64) cu.Result {
			return m.do(func() cu.Result {
				c, of := object(h), (*physical)(nil)
				if x := m.handles[mem]; x != nil {
					of = x.of
				}
				switch {
				case c == nil || of == nil || flags != 0 || bytes == 0 || offset%granule != 0 || memOffset%granule != 0 || bytes%granule != 0 ||
					bytes > c.bytes || offset > c.bytes-bytes || bytes > uint64(len(of.mem)) || memOffset > uint64(len(of.mem))-bytes:
					return m.violation(cu.InvalidValue, "cuMulticastBindMem of %d bytes at %d to offset %d", bytes, memOffset, offset)
				case of.legacy:
					return m.violation(cu.InvalidValue, "cuMulticastBindMem of memory that is not of cuMemCreate")
				}
				// CUDA driver API, cuMulticastAddDevice: cuMulticastBindMem and its kin "may block until all devices" were added (seen to hang: PyTorch #195596).
				deadline := time.Now().Add(bindLimit)
				late := time.AfterFunc(bindLimit, m.moved.Broadcast)
				defer late.Stop()
				for len(c.added) < c.devices {
					if time.Now().After(deadline) {
						return m.violation(cu.InvalidValue, "cuMulticastBindMem waits in vain: GPUs %v of %d were added", c.added, c.devices)
					}
					m.moved.Wait()
				}
				if !c.has(of.gpu) {
					return m.violation(cu.InvalidDevice, "cuMulticastBindMem of memory of GPU %d, which was not added", of.gpu)
				}
				if slices.ContainsFunc(c.bound, func(b binding) bool { return b.gpu == of.gpu }) {
					return m.violation(cu.InvalidValue, "cuMulticastBindMem of memory of GPU %d, which has bound some", of.gpu)
				}
				of.refs++
				c.bound = append(c.bound, binding{gpu: of.gpu, of: of, offset: offset, memOffset: memOffset, bytes: bytes})
				c.spread()
				return cu.Success
			})
		},
		// PyTorch #162429: to unbind what is still mapped fails with CUDA_ERROR_INVALID_VALUE.
		Unbind: func(h cu.MemHandle, dev cu.DeviceOrdinal, offset, bytes uint64) cu.Result {
			return m.do(func() cu.Result {
				c := object(h)
				if c == nil {
					return m.violation(cu.InvalidValue, "cuMulticastUnbind of no object")
				}
				i := slices.IndexFunc(c.bound, func(b binding) bool { return b.gpu == int(dev) && b.offset == offset && b.bytes == bytes })
				if i < 0 {
					return m.violation(cu.InvalidValue, "cuMulticastUnbind of GPU %d, which has not bound %d bytes at %d", dev, bytes, offset)
				}
				for _, x := range m.spaces {
					if x.cast == c && x.access[dev] {
						return m.violation(cu.InvalidValue, "cuMulticastUnbind of GPU %d, which has the object mapped", dev)
					}
				}
				b := c.bound[i]
				for _, x := range m.spaces { // others' kernels can no longer use it
					if x.cast == c {
						for _, g := range m.gpus {
							m.leave(g, x)
						}
					}
				}
				c.bound = slices.Delete(c.bound, i, i+1)
				b.of.drop()
				return cu.Success
			})
		},
		GetGranularity: func(n *uint64, prop *cu.MulticastObjectProp, _ cu.Granularity) cu.Result {
			return m.do(func() cu.Result {
				if *n = granule; !m.config.Multicast || prop.NumDevices < 1 {
					return cu.InvalidValue
				}
				return cu.Success
			})
		},
	}
}
