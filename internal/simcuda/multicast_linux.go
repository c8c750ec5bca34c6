package simcuda

import (
	"slices"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	cu "github.com/symmem/symmem/internal/cuda"
)

// cast is a multicast object: the switch's list of which memory of which GPU stands behind one address.
//
// All processes that have it see its file: which GPUs were added, and what is bound. What others have bound is opened in their processes, and
// looked at again before kernels go on, when the file's count of changes says so.
type cast struct {
	machine *Machine
	file    file
	fd      int
	raw     []byte // the file, without its card
	head    *castHead
	slots   []castSlot // by GPU's ordinal
	bytes   uint64
	devices int
	handles cu.HandleType
	shared  bool // other processes may have it
	refs    int  // handles and mappings
	bound   []binding
	seen    uint32 // of the changes
}

// castHead is the beginning of the file.
type castHead struct {
	bytes   uint64
	holders atomic.Int32  // processes that have it; one that was killed counts on
	changes atomic.Uint32 // of what is bound
	added   atomic.Int32  // GPUs
	_       [44]byte
}

// castSlot is what the file says of a GPU. Whoever binds or unbinds takes the slot for itself first, so that one that dies meanwhile leaves nothing bound.
type castSlot struct {
	state             atomic.Uint32 // a number, times slotNext, and slotFree, slotTaken or slotBound
	added             atomic.Uint32
	pid, fd           int64
	memory            file
	offset, memOffset uint64
	bytes             uint64
}

const (
	slotFree uint32 = iota
	slotTaken
	slotBound
	slotNext // of the number
)

// binding is memory of one GPU, as this process has it.
type binding struct {
	gpu               int
	state             uint32 // of the slot
	of                *physical
	offset, memOffset uint64
	bytes             uint64
}

// castBytes is how large the file is for some GPUs.
func castBytes(gpus int) uint64 {
	n := uint64(unsafe.Sizeof(castHead{})) + uint64(gpus)*uint64(unsafe.Sizeof(castSlot{}))
	return (n + page - 1) / page * page
}

// attach maps the object's file and makes it known. It closes the descriptor if that fails.
func (m *Machine) attach(fd int, id file, c card) (*cast, cu.Result) {
	raw, err := unix.Mmap(fd, 0, int(c.Bytes), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		_ = unix.Close(fd)
		return nil, cu.OperatingSystem
	}
	x := &cast{
		machine: m, file: id, fd: fd, raw: raw, head: (*castHead)(unsafe.Pointer(&raw[0])), devices: int(c.Devices), handles: cu.HandleType(c.Handles),
		slots: unsafe.Slice((*castSlot)(unsafe.Pointer(&raw[unsafe.Sizeof(castHead{})])), len(m.gpus)),
	}
	x.bytes = x.head.bytes
	m.objects[id] = x
	return x, cu.Success
}

// has says whether a GPU was added.
func (c *cast) has(gpu int) bool { return c.slots[gpu].added.Load() != 0 }

// add adds a GPU, once and no more than the object was made for.
func (c *cast) add(gpu int) bool {
	if !c.slots[gpu].added.CompareAndSwap(0, 1) {
		return false
	}
	if int(c.head.added.Add(1)) > c.devices {
		c.head.added.Add(-1)
		c.slots[gpu].added.Store(0)
		return false
	}
	return true
}

func (c *cast) added() (all []int) {
	for gpu := range c.slots {
		if c.has(gpu) {
			all = append(all, gpu)
		}
	}
	return all
}

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

// look takes over what processes have bound and unbound, if anything has changed.
func (c *cast) look() {
	changes := c.head.changes.Load()
	if changes == c.seen {
		return
	}
	c.seen = changes
	m := c.machine
	for _, x := range m.spaces { // kernels can no longer use what is bound no more
		if x.cast == c {
			for _, g := range m.gpus {
				m.leave(g, x)
			}
		}
	}
	old := c.bound
	c.bound = nil
	for gpu := range c.slots {
		s := &c.slots[gpu]
		state := s.state.Load()
		if state%slotNext != slotBound {
			continue
		}
		if i := slices.IndexFunc(old, func(b binding) bool { return b.gpu == gpu && b.state == state }); i >= 0 {
			c.bound = append(c.bound, old[i])
			old = slices.Delete(old, i, i+1)
			continue
		}
		b := binding{gpu: gpu, state: state, offset: s.offset, memOffset: s.memOffset, bytes: s.bytes}
		b.of = m.memoryOf(s.pid, s.fd, s.memory)
		if b.of == nil || s.state.Load() != state || b.memOffset+b.bytes > uint64(len(b.of.mem)) {
			continue // it is gone with its process, or changes right now
		}
		b.of.refs++
		c.bound = append(c.bound, b)
	}
	for _, b := range old {
		b.of.drop()
	}
	c.spread()
}

// memoryOf is memory that another process has, or nil if it has it no more.
func (m *Machine) memoryOf(pid, number int64, id file) *physical {
	if p := m.physicals[id]; p != nil {
		return p
	}
	fd, err := open(pid, number)
	if err != nil {
		return nil
	}
	defer unix.Close(fd)
	c, ok := readCard(fd)
	if now, err := identify(fd); !ok || err != nil || now != id || c.Kind != kindVirtual {
		return nil
	}
	p, r := m.find(fd, c)
	if r != cu.Success {
		return nil
	}
	return p
}

// drop gives back a reference.
func (c *cast) drop() {
	if c.refs--; c.refs > 0 {
		return
	}
	m := c.machine
	delete(m.objects, c.file)
	m.shared = slices.DeleteFunc(m.shared, func(o *cast) bool { return o == c })
	for _, b := range c.bound {
		b.of.drop()
	}
	c.bound = nil
	c.head.holders.Add(-1)
	_ = unix.Munmap(c.raw)
	_ = unix.Close(c.fd)
}

// share says that other processes may have the object from now on.
func (c *cast) share() {
	if !c.shared {
		c.shared = true
		c.machine.shared = append(c.machine.shared, c)
	}
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

// findCast gives the object that a descriptor is of. An object is gone with its last handle and mapping, those of all processes; a descriptor does not
// keep it.
func (m *Machine) findCast(fd int, k card) (*cast, cu.Result) {
	id, err := identify(fd)
	if err != nil {
		return nil, cu.InvalidValue
	}
	if c := m.objects[id]; c != nil {
		return c, cu.Success
	}
	switch {
	case !m.config.Multicast:
		return nil, cu.NotSupported
	case m.config.Weak:
		return nil, m.foreign()
	case k.Bytes != castBytes(len(m.gpus)):
		return nil, cu.InvalidDevice // of a machine with other GPUs
	case len(m.objects) >= m.config.MulticastObjects:
		return nil, cu.OutOfMemory
	}
	own, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, cu.OperatingSystem
	}
	c, r := m.attach(own, id, k)
	if r != cu.Success {
		return nil, r
	}
	if c.head.holders.Add(1) == 1 { // nobody had it
		c.refs = 1
		c.drop()
		return nil, m.violation(cu.InvalidHandle, "import of a multicast object that nobody holds")
	}
	c.share()
	return c, cu.Success
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
				k := card{Kind: kindCast, Devices: int32(prop.NumDevices), Handles: int32(prop.HandleTypes), Bytes: castBytes(len(m.gpus))}
				fd, id, err := createFile(k.Bytes, k)
				if err != nil {
					return cu.OperatingSystem
				}
				c, r := m.attach(fd, id, k)
				if r != cu.Success {
					return r
				}
				c.bytes, c.head.bytes, c.refs = prop.Size, prop.Size, 1
				c.head.holders.Add(1)
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
				if !c.add(int(dev)) {
					return m.violation(cu.InvalidValue, "cuMulticastAddDevice of GPU %d to an object that has %v, of %d", dev, c.added(), c.devices)
				}
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
				// Those of other processes wake nobody here.
				deadline := time.Now().Add(bindLimit)
				for pause := firstPause; int(c.head.added.Load()) < c.devices; pause = min(2*pause, longestPause) {
					if time.Now().After(deadline) {
						return m.violation(cu.InvalidValue, "cuMulticastBindMem waits in vain: GPUs %v of %d were added", c.added(), c.devices)
					}
					m.mu.Unlock()
					time.Sleep(pause)
					if m.lock(); object(h) != c || m.handles[mem] == nil || m.handles[mem].of != of {
						return m.violation(cu.InvalidValue, "cuMulticastBindMem of what was released meanwhile")
					}
				}
				if !c.has(of.gpu) {
					return m.violation(cu.InvalidDevice, "cuMulticastBindMem of memory of GPU %d, which was not added", of.gpu)
				}
				s := &c.slots[of.gpu]
				state := s.state.Load()
				taken := state - state%slotNext + slotNext + slotTaken
				if state%slotNext != slotFree || !s.state.CompareAndSwap(state, taken) {
					return m.violation(cu.InvalidValue, "cuMulticastBindMem of memory of GPU %d, which has bound some", of.gpu)
				}
				s.pid, s.fd, s.memory = int64(unix.Getpid()), int64(of.fd), of.file
				s.offset, s.memOffset, s.bytes = offset, memOffset, bytes
				s.state.Store(taken - slotTaken + slotBound)
				c.head.changes.Add(1)
				c.look()
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
				c.look()
				i := slices.IndexFunc(c.bound, func(b binding) bool { return b.gpu == int(dev) && b.offset == offset && b.bytes == bytes })
				if i < 0 {
					return m.violation(cu.InvalidValue, "cuMulticastUnbind of GPU %d, which has not bound %d bytes at %d", dev, bytes, offset)
				}
				for _, x := range m.spaces {
					if x.cast == c && x.access[dev] {
						return m.violation(cu.InvalidValue, "cuMulticastUnbind of GPU %d, which has the object mapped", dev)
					}
				}
				s, state := &c.slots[dev], c.bound[i].state
				s.state.CompareAndSwap(state, state-slotBound+slotFree)
				c.head.changes.Add(1)
				c.look()
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
