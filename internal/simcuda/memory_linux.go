package simcuda

import (
	"slices"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/symmem/symmem/device"
	cu "github.com/symmem/symmem/internal/cuda"
)

const (
	granule = 2 << 20 // what an H100 says
	// firstAddress and hiddenAddress begin where no memory of the host is. Hidden addresses are for the copies behind a multicast address.
	firstAddress  device.Ptr = 1 << 44
	hiddenAddress device.Ptr = 1 << 62
)

// handle is a CUmemGenericAllocationHandle: of memory or of a multicast object.
type handle struct {
	of   *physical
	cast *cast
}

// mapping is memory at an address.
type mapping struct {
	base   device.Ptr
	bytes  uint64
	of     *physical // nil for memory of the host and multicast
	cast   *cast
	host   bool
	legacy bool
	opened int    // how often an IPC handle was opened there
	mem    []byte // nil for multicast
	access []bool // by GPU
	inside []bool // by GPU: its kernels find it
	hidden [][]device.Ptr
}

func (m *Machine) search(p device.Ptr) (int, bool) {
	return slices.BinarySearchFunc(m.spaces, p, func(x *mapping, p device.Ptr) int {
		switch {
		case p < x.base:
			return 1
		case uint64(p-x.base) >= x.bytes:
			return -1
		}
		return 0
	})
}

// at is the mapping that an address is in, or nil.
func (m *Machine) at(p device.Ptr) *mapping {
	if i, ok := m.search(p); ok {
		return m.spaces[i]
	}
	return nil
}

func (m *Machine) insert(x *mapping) {
	x.access, x.inside, x.hidden = make([]bool, len(m.gpus)), make([]bool, len(m.gpus)), make([][]device.Ptr, len(m.gpus))
	i, _ := m.search(x.base)
	m.spaces = slices.Insert(m.spaces, i, x)
}

// remove takes a mapping away.
func (m *Machine) remove(x *mapping) {
	for _, g := range m.gpus {
		m.leave(g, x)
	}
	i, _ := m.search(x.base)
	m.spaces = slices.Delete(m.spaces, i, i+1)
	switch {
	case x.of != nil:
		x.of.drop()
	case x.cast != nil:
		x.cast.drop()
	}
}

// reaches says whether the kernels of a GPU may use a mapping.
func (g *gpu) reaches(x *mapping) bool {
	switch {
	case x.host:
		return true // CUDA driver API, cuMemHostAlloc: with CU_MEMHOSTALLOC_PORTABLE it is pinned for all contexts, and unified addressing maps it
	case x.legacy:
		// CUDA driver API, cuCtxEnablePeerAccess: "all allocations from peerContext will immediately be accessible by the current context".
		return x.of.gpu == g.ordinal || x.opened > 0 || g.peers[x.of.gpu]
	}
	return x.access[g.ordinal]
}

// enter shows a mapping to the kernels of a GPU if they may use it, and hides it if not.
func (m *Machine) enter(g *gpu, x *mapping) {
	switch may := g.space != nil && g.reaches(x) && (x.cast == nil || x.cast.whole()); {
	case may == x.inside[g.ordinal]:
	case !may:
		m.leave(g, x)
	case x.cast != nil:
		var copies []uint64
		low, bytes := x.cast.bound[0].offset, x.cast.bound[0].bytes
		for _, b := range x.cast.bound {
			p := hiddenAddress + m.next
			m.next += device.Ptr(b.bytes + granule)
			g.show(p, b.of, b.of.mem, b.memOffset, b.bytes)
			x.hidden[g.ordinal] = append(x.hidden[g.ordinal], p)
			copies = append(copies, uint64(p))
		}
		if err := g.space.Multicast(uint64(x.base)+low, bytes, copies...); err != nil {
			panic(err) // all of it is made here
		}
		x.inside[g.ordinal] = true
	default:
		g.show(x.base, x.of, x.mem, 0, uint64(len(x.mem)))
		x.inside[g.ordinal] = true
	}
}

// show puts bytes at an address of the GPU's kernels.
func (g *gpu) show(p device.Ptr, of *physical, mem []byte, offset, n uint64) {
	var err error
	switch {
	case !g.machine.config.Weak:
		err = g.space.Map(uint64(p), mem[offset:offset+n])
	case of == nil:
		err = g.space.MapHost(uint64(p), mem[offset:offset+n])
	default:
		err = g.space.MapAllocation(uint64(p), of.allocation(), offset, n)
	}
	if err != nil {
		panic(err) // addresses come from this package
	}
}

// leave hides a mapping from the kernels of a GPU.
func (m *Machine) leave(g *gpu, x *mapping) {
	if !x.inside[g.ordinal] {
		return
	}
	x.inside[g.ordinal] = false
	base := uint64(x.base)
	if x.cast != nil && len(x.cast.bound) > 0 {
		base += x.cast.bound[0].offset
	}
	_ = g.space.Unmap(base)
	for _, p := range x.hidden[g.ordinal] {
		_ = g.space.Unmap(uint64(p))
	}
	x.hidden[g.ordinal] = nil
}

// spread enters a mapping everywhere.
func (m *Machine) spread(x *mapping) {
	for _, g := range m.gpus {
		m.enter(g, x)
	}
}

// pieces calls f with the bytes at an address, as they lie in neighbouring mappings, or says what an access by the GPU makes of it.
func (m *Machine) pieces(g *gpu, p device.Ptr, n uint64, f func(x *mapping, at uint64, b []byte)) cu.Result {
	for n > 0 {
		x := m.at(p)
		if x == nil || x.mem == nil || !g.reaches(x) {
			return cu.IllegalAddress
		}
		at := uint64(p - x.base)
		k := min(n, x.bytes-at)
		f(x, at, x.mem[at:at+k])
		p, n = p.Add(int64(k)), n-k
	}
	return cu.Success
}

// space gives unused addresses.
func (m *Machine) addresses(bytes, alignment uint64) device.Ptr {
	alignment = max(alignment, granule)
	p := (uint64(m.next) + alignment - 1) / alignment * alignment
	m.next = device.Ptr(p + (bytes+granule-1)/granule*granule + granule)
	return device.Ptr(p)
}

func (m *Machine) newHandle(h *handle) cu.MemHandle {
	n := cu.MemHandle(m.number())
	m.handles[n] = h
	return n
}

// memory fills the table with virtual memory management and the older calls.
func (m *Machine) memory(d *cu.Driver) {
	d.MemGetAllocationGranularity = func(n *uint64, prop *cu.MemAllocationProp, _ cu.Granularity) cu.Result {
		return m.do(func() cu.Result {
			*n = granule
			return m.creatable(prop)
		})
	}
	// CUDA driver API, cuMemCreate: size "must be a multiple of the granularity returned via cuMemGetAllocationGranularity".
	d.MemCreate = func(h *cu.MemHandle, bytes uint64, prop *cu.MemAllocationProp, flags uint64) cu.Result {
		return m.do(func() cu.Result {
			if r := m.creatable(prop); r != cu.Success {
				return r
			}
			if bytes == 0 || bytes%granule != 0 || flags != 0 {
				return m.violation(cu.InvalidValue, "cuMemCreate of %d bytes", bytes)
			}
			p, r := m.create(m.gpus[prop.Location.ID], bytes, kindVirtual, *prop)
			if r == cu.Success {
				p.refs++
				*h = m.newHandle(&handle{of: p})
			}
			return r
		})
	}
	d.MemRelease = func(h cu.MemHandle) cu.Result {
		return m.do(func() cu.Result {
			x := m.handles[h]
			if x == nil {
				return m.violation(cu.InvalidValue, "cuMemRelease of no handle")
			}
			delete(m.handles, h)
			if x.cast != nil {
				x.cast.drop()
			} else {
				x.of.drop()
			}
			return cu.Success
		})
	}
	d.MemAddressReserve = func(p *device.Ptr, bytes, alignment uint64, _ device.Ptr, flags uint64) cu.Result {
		return m.do(func() cu.Result {
			if bytes == 0 || bytes%page != 0 || alignment&(alignment-1) != 0 || flags != 0 {
				return m.violation(cu.InvalidValue, "cuMemAddressReserve of %d bytes", bytes)
			}
			if bytes > 1<<46 {
				return cu.OutOfMemory
			}
			*p = m.addresses(bytes, alignment)
			m.reserved[*p] = bytes
			return cu.Success
		})
	}
	// CUDA driver API, cuMemAddressFree: the size "must match what was given to cuMemAddressReserve", and the range must be unmapped.
	d.MemAddressFree = func(p device.Ptr, bytes uint64) cu.Result {
		return m.do(func() cu.Result {
			if m.reserved[p] != bytes || bytes == 0 {
				return m.violation(cu.InvalidValue, "cuMemAddressFree of %d bytes at %s, which were not reserved so", bytes, p)
			}
			if i, in := m.search(p); in || i < len(m.spaces) && m.spaces[i].base < p.Add(int64(bytes)) {
				return m.violation(cu.InvalidValue, "cuMemAddressFree of %d bytes at %s, which are mapped", bytes, p)
			}
			delete(m.reserved, p)
			return cu.Success
		})
	}
	d.MemMap = m.memMap
	// CUDA driver API, cuMemUnmap: the range "must be the entire address range that was mapped to" by one call or several.
	d.MemUnmap = func(p device.Ptr, bytes uint64) cu.Result {
		return m.do(func() cu.Result {
			all := m.whole(p, bytes)
			if all == nil {
				return m.violation(cu.InvalidValue, "cuMemUnmap of %d bytes at %s, which were not mapped so", bytes, p)
			}
			for _, x := range all {
				m.remove(x)
			}
			return cu.Success
		})
	}
	d.MemSetAccess = m.memSetAccess
	d.MemGetAccess = func(flags *uint64, at *cu.MemLocation, p device.Ptr) cu.Result {
		return m.do(func() cu.Result {
			x := m.at(p)
			if x == nil || at.Type != cu.LocationDevice || at.ID < 0 || int(at.ID) >= len(m.gpus) {
				return cu.InvalidValue
			}
			if *flags = 0; m.gpus[at.ID].reaches(x) {
				*flags = uint64(cu.AccessReadWrite)
			}
			return cu.Success
		})
	}
	d.MemRetainAllocationHandle = func(h *cu.MemHandle, p device.Ptr) cu.Result {
		return m.do(func() cu.Result {
			x := m.at(p)
			if x == nil || x.of == nil || x.legacy {
				return cu.InvalidValue // of memory that is not of cuMemCreate there is no handle
			}
			x.of.refs++
			*h = m.newHandle(&handle{of: x.of})
			return cu.Success
		})
	}
	d.MemGetAllocationPropertiesFromHandle = func(prop *cu.MemAllocationProp, h cu.MemHandle) cu.Result {
		return m.do(func() cu.Result {
			x := m.handles[h]
			if x == nil || x.of == nil {
				return m.violation(cu.InvalidValue, "cuMemGetAllocationPropertiesFromHandle of no handle")
			}
			*prop = x.of.prop
			return cu.Success
		})
	}
	d.MemGetAddressRange = func(base *device.Ptr, bytes *uint64, p device.Ptr) cu.Result {
		return m.do(func() cu.Result {
			x := m.at(p)
			if x == nil {
				return cu.NotFound
			}
			*base, *bytes = x.base, x.bytes
			return cu.Success
		})
	}
	d.PointerGetAttribute = func(value unsafe.Pointer, attr cu.PointerAttribute, p device.Ptr) cu.Result {
		return m.do(func() cu.Result {
			x := m.at(p)
			switch {
			case x == nil:
				return cu.InvalidValue
			case attr == cu.PointerMemoryType && x.host:
				*(*cu.MemoryType)(value) = cu.MemoryHost
			case attr == cu.PointerMemoryType:
				*(*cu.MemoryType)(value) = cu.MemoryDevice
			case attr == cu.PointerDeviceOrdinal && x.of != nil:
				*(*int32)(value) = int32(x.of.gpu)
			default:
				return cu.InvalidValue
			}
			return cu.Success
		})
	}
	m.legacy(d)
	m.hostMemory(d)
}

// creatable says whether memory can be made with the properties.
func (m *Machine) creatable(prop *cu.MemAllocationProp) cu.Result {
	switch {
	case prop.Type != cu.AllocationPinned || prop.Location.Type != cu.LocationDevice:
		return m.violation(cu.InvalidValue, "memory of type %d at a location of type %d", prop.Type, prop.Location.Type)
	case prop.Location.ID < 0 || int(prop.Location.ID) >= len(m.gpus):
		return cu.InvalidDevice
	case prop.RequestedHandleTypes&cu.HandleFabric != 0:
		return cu.NotPermitted // as without an IMEX channel
	}
	return cu.Success
}

// memMap is cuMemMap. CUDA driver API: the range must be reserved, the offset "currently must be zero", size a multiple of the granularity.
func (m *Machine) memMap(p device.Ptr, bytes, offset uint64, h cu.MemHandle, flags uint64) cu.Result {
	return m.do(func() cu.Result {
		x := m.handles[h]
		if x == nil {
			return m.violation(cu.InvalidValue, "cuMemMap of no handle")
		}
		if offset != 0 || flags != 0 || bytes == 0 || bytes%granule != 0 || p%granule != 0 || !m.isReserved(p, bytes) {
			return m.violation(cu.InvalidValue, "cuMemMap of %d bytes at %s, offset %d", bytes, p, offset)
		}
		if i, in := m.search(p); in || i < len(m.spaces) && m.spaces[i].base < p.Add(int64(bytes)) {
			return m.violation(cu.InvalidValue, "cuMemMap of %d bytes at %s, where something is", bytes, p)
		}
		y := &mapping{base: p, bytes: bytes, of: x.of, cast: x.cast}
		if x.cast != nil {
			if bytes != x.cast.bytes {
				return m.violation(cu.InvalidValue, "cuMemMap of %d bytes of a multicast object of %d", bytes, x.cast.bytes)
			}
			x.cast.refs++
		} else {
			if bytes != uint64(len(x.of.mem)) {
				return cu.NotSupported // the driver maps whole allocations only (seen on H200, driver 580)
			}
			x.of.refs++
			y.mem = x.of.mem
		}
		m.insert(y)
		return cu.Success
	})
}

func (m *Machine) isReserved(p device.Ptr, bytes uint64) bool {
	for base, n := range m.reserved {
		if p >= base && uint64(p-base) <= n && bytes <= n-uint64(p-base) {
			return true
		}
	}
	return false
}

// whole lists the mappings of cuMemMap that make up the range; nil if it is not made up of whole ones.
func (m *Machine) whole(p device.Ptr, bytes uint64) (all []*mapping) {
	for end := p.Add(int64(bytes)); p < end; {
		x := m.at(p)
		if x == nil || x.base != p || x.legacy || x.host || p.Add(int64(x.bytes)) > end {
			return nil
		}
		all = append(all, x)
		p = p.Add(int64(x.bytes))
	}
	return all
}

// memSetAccess is cuMemSetAccess, of whole mappings.
func (m *Machine) memSetAccess(p device.Ptr, bytes uint64, desc *cu.MemAccessDesc, count uint64) cu.Result {
	return m.do(func() cu.Result {
		all := m.whole(p, bytes)
		if all == nil {
			return m.violation(cu.InvalidValue, "cuMemSetAccess of %d bytes at %s, which were not mapped so", bytes, p)
		}
		for _, d := range unsafe.Slice(desc, count) {
			if d.Location.Type != cu.LocationDevice || d.Location.ID < 0 || int(d.Location.ID) >= len(m.gpus) {
				return cu.InvalidDevice
			}
			if d.Flags != 0 && d.Flags != cu.AccessReadWrite {
				return cu.NotSupported
			}
			g := m.gpus[d.Location.ID]
			for _, x := range all {
				switch {
				case d.Flags == 0:
				case x.of != nil && !m.peer(g.ordinal, x.of.gpu):
					return cu.PeerAccessUnsupported
				case x.cast != nil && !x.cast.has(g.ordinal):
					return m.violation(cu.InvalidDevice, "cuMemSetAccess to a multicast object for GPU %d, which was not added to it", g.ordinal)
				}
			}
			for _, x := range all {
				if x.cast != nil {
					x.cast.look()
				}
				x.access[g.ordinal] = d.Flags != 0
				m.enter(g, x)
			}
		}
		return cu.Success
	})
}

// peer says whether a GPU reaches the memory of another.
func (m *Machine) peer(gpu, other int) bool {
	return gpu == other || m.config.Peers == nil || m.config.Peers(gpu, other)
}

// legacy fills the table with cuMemAlloc and what is around it.
func (m *Machine) legacy(d *cu.Driver) {
	d.MemAlloc = func(p *device.Ptr, bytes uint64) cu.Result {
		return m.on(func(g *gpu) cu.Result {
			if bytes == 0 || bytes > g.Memory {
				if bytes == 0 {
					return m.violation(cu.InvalidValue, "cuMemAlloc of nothing")
				}
				return cu.OutOfMemory
			}
			of, r := m.create(g, bytes, kindLegacy, cu.MemAllocationProp{})
			if r != cu.Success {
				return r
			}
			of.refs++
			bytes = (bytes + 255) &^ 255 // cuMemAlloc's alignment
			x := &mapping{base: m.addresses(bytes, 0), bytes: bytes, of: of, legacy: true, mem: of.mem[:bytes]}
			m.insert(x)
			m.spread(x)
			*p = x.base
			return cu.Success
		})
	}
	d.MemFree = func(p device.Ptr) cu.Result {
		return m.on(func(g *gpu) cu.Result {
			m.drain(g)
			x := m.at(p)
			if x == nil || x.base != p || !x.legacy || x.opened > 0 {
				return m.violation(cu.InvalidValue, "cuMemFree of %s, which cuMemAlloc has not given", p)
			}
			m.remove(x)
			return cu.Success
		})
	}
	d.MemGetInfo = func(free, total *uint64) cu.Result {
		return m.on(func(g *gpu) cu.Result {
			*free, *total = g.Memory-g.used, g.Memory
			return cu.Success
		})
	}
	d.IPCGetMemHandle = func(h *cu.IPCMemHandle, p device.Ptr) cu.Result {
		return m.on(func(*gpu) cu.Result {
			x := m.at(p)
			if x == nil || !x.legacy || x.opened > 0 {
				return cu.InvalidValue
			}
			h.Reserved = [8]uint64{magic, uint64(unix.Getpid()), uint64(x.of.fd), x.of.file.device, x.of.file.inode, x.bytes}
			return cu.Success
		})
	}
	// CUDA driver API, cuIpcOpenMemHandle: in the process that has made the memory it is CUDA_ERROR_INVALID_CONTEXT; opened again it is the same
	// address, and each opening is closed.
	d.IPCOpenMemHandle = func(p *device.Ptr, h cu.IPCMemHandle, flags uint32) cu.Result {
		return m.on(func(*gpu) cu.Result {
			r := h.Reserved
			if r[0] != magic || flags != cu.IPCLazyEnablePeerAccess {
				return cu.InvalidValue
			}
			if int(r[1]) == unix.Getpid() {
				return cu.InvalidContext
			}
			for _, x := range m.spaces {
				if x.opened > 0 && x.of.file == (file{r[3], r[4]}) {
					x.opened++
					*p = x.base
					return cu.Success
				}
			}
			fd, err := open(int64(r[1]), int64(r[2]))
			if err != nil {
				return cu.InvalidValue
			}
			defer unix.Close(fd)
			c, ok := readCard(fd)
			if id, err := identify(fd); !ok || err != nil || id != (file{r[3], r[4]}) {
				return cu.InvalidValue // it was freed
			}
			of, res := m.find(fd, c)
			if res != cu.Success {
				return res
			}
			of.refs++
			x := &mapping{base: m.addresses(r[5], 0), bytes: r[5], of: of, legacy: true, opened: 1, mem: of.mem[:r[5]]}
			m.insert(x)
			m.spread(x)
			*p = x.base
			return cu.Success
		})
	}
	d.IPCCloseMemHandle = func(p device.Ptr) cu.Result {
		return m.on(func(g *gpu) cu.Result {
			m.drain(g)
			x := m.at(p)
			if x == nil || x.opened == 0 || x.base != p {
				return m.violation(cu.InvalidValue, "cuIpcCloseMemHandle of %s, which was not opened", p)
			}
			if x.opened--; x.opened == 0 {
				m.remove(x)
			}
			return cu.Success
		})
	}
	d.MemExportFD = func(fd *int32, h cu.MemHandle, kind cu.HandleType, flags uint64) cu.Result {
		return m.do(func() cu.Result {
			x := m.handles[h]
			if x == nil || kind != cu.HandleFD || flags != 0 {
				return m.violation(cu.InvalidValue, "cuMemExportToShareableHandle of no handle")
			}
			from := -1
			switch {
			case x.cast != nil && x.cast.handles&cu.HandleFD != 0:
				from = x.cast.fd
				x.cast.share()
			case x.of != nil && x.of.prop.RequestedHandleTypes&cu.HandleFD != 0:
				from = x.of.fd
			default: // the kind must have been asked for when it was made
				return m.violation(cu.InvalidValue, "cuMemExportToShareableHandle of what was not made to be exported")
			}
			n, err := unix.FcntlInt(uintptr(from), unix.F_DUPFD_CLOEXEC, 0)
			if err != nil {
				return cu.OperatingSystem
			}
			*fd = int32(n)
			return cu.Success
		})
	}
	d.MemImportFD = func(h *cu.MemHandle, fd uintptr, kind cu.HandleType) cu.Result {
		return m.do(func() cu.Result {
			c, ok := readCard(int(fd))
			if !ok || kind != cu.HandleFD {
				return cu.InvalidValue
			}
			if c.Kind == kindCast {
				x, r := m.findCast(int(fd), c)
				if r == cu.Success {
					x.refs++
					*h = m.newHandle(&handle{cast: x})
				}
				return r
			}
			p, r := m.find(int(fd), c)
			if r == cu.Success {
				p.refs++
				*h = m.newHandle(&handle{of: p})
			}
			return r
		})
	}
	d.MemExportFabric = func(*cu.FabricHandle, cu.MemHandle, cu.HandleType, uint64) cu.Result { return cu.NotSupported }
	d.MemImportFabric = func(*cu.MemHandle, *cu.FabricHandle, cu.HandleType) cu.Result { return cu.NotSupported }
}

// hostMemory fills the table with pinned memory. It is at the same address for the GPUs: CUDA C++ programming guide, unified virtual address space.
func (m *Machine) hostMemory(d *cu.Driver) {
	d.MemHostAlloc = func(p *unsafe.Pointer, bytes uint64, flags uint32) cu.Result {
		return m.on(func(*gpu) cu.Result {
			if bytes == 0 || flags&^(cu.HostAllocPortable|cu.HostAllocDeviceMap) != 0 {
				return m.violation(cu.InvalidValue, "cuMemHostAlloc of %d bytes with flags %#x", bytes, flags)
			}
			if bytes > 1<<34 {
				return cu.OutOfMemory // as if the host had no more; too much is no misuse
			}
			mem, err := unix.Mmap(-1, 0, int(bytes+page-1)&^(page-1), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
			if err != nil {
				return cu.OutOfMemory
			}
			*p = unsafe.Pointer(&mem[0])
			x := &mapping{base: device.Ptr(uintptr(*p)), bytes: uint64(len(mem)), host: true, mem: mem}
			m.insert(x)
			m.spread(x)
			return cu.Success
		})
	}
	d.MemHostGetDevicePointer = func(q *device.Ptr, p unsafe.Pointer, flags uint32) cu.Result {
		return m.on(func(*gpu) cu.Result {
			if x := m.at(device.Ptr(uintptr(p))); x == nil || !x.host || flags != 0 {
				return cu.InvalidValue
			}
			*q = device.Ptr(uintptr(p))
			return cu.Success
		})
	}
	d.MemFreeHost = func(p unsafe.Pointer) cu.Result {
		return m.on(func(g *gpu) cu.Result {
			m.drain(g)
			x := m.at(device.Ptr(uintptr(p)))
			if x == nil || !x.host || x.base != device.Ptr(uintptr(p)) {
				return m.violation(cu.InvalidValue, "cuMemFreeHost of %p, which cuMemHostAlloc has not given", p)
			}
			m.remove(x)
			_ = unix.Munmap(x.mem)
			return cu.Success
		})
	}
}
