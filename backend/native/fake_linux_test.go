package native

import (
	"encoding/binary"
	"fmt"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/symmem/symmem/backend/backendtest/fakecuda"
	"github.com/symmem/symmem/device"
	cu "github.com/symmem/symmem/internal/cuda"
)

const granule = 2 << 20

// machine is a host with some GPUs, as far as this backend asks the driver for it: physical memory with handles, addresses, mappings
// with access rights, contexts, and streams whose work runs at once. It notes what a real driver would not survive.
type machine struct {
	*fakecuda.GPUs
	fabric      int // the attribute
	fabricWorks bool
	multicast   int // the attribute
	objects     int // the most multicast objects that the switches have; 0 is no limit
	noPeers     func(dev, peer int) bool
	// fail, unless nil, is asked at each call, with the GPU whose context is current and how often the call was made on it.
	fail func(call string, gpu, n int) cu.Result

	counts   map[string]int
	used     []uint64
	next     uint64
	handles  map[cu.MemHandle]*physical
	exported map[uint64]*physical // what was ever exported: a descriptor keeps memory, whoever has given up its handle
	reserved map[device.Ptr]uint64
	mapped   map[device.Ptr]*fakeMapping
	peers    map[[2]int]bool
	resolved int // how often multicast was looked up
	created  int // multicast objects that were made
	live     int // of them, those that are there
}

// physical is memory, or a multicast object.
type physical struct {
	id     uint64
	gpu    int
	bytes  uint64
	mem    []byte // made at first need
	dirty  bool   // mem is to begin with something else than zeros
	refs   int    // handles and mappings
	prop   cu.MemAllocationProp
	legacy bool

	cast  bool
	ranks int
	added map[int]bool
	bound map[int]bool
}

type fakeMapping struct {
	of     *physical
	bytes  uint64
	access map[int]bool
}

func newMachine(gpus int) *machine {
	m := &machine{
		GPUs: fakecuda.New(gpus), counts: map[string]int{}, used: make([]uint64, gpus), next: 1 << 40,
		handles: map[cu.MemHandle]*physical{}, exported: map[uint64]*physical{}, reserved: map[device.Ptr]uint64{}, mapped: map[device.Ptr]*fakeMapping{},
		peers: map[[2]int]bool{},
	}
	m.Call = m.called
	m.Find = func(p device.Ptr) (fakecuda.Memory, bool) {
		base, x := m.at(p)
		if x == nil {
			return fakecuda.Memory{}, false
		}
		return fakecuda.Memory{GPU: x.of.gpu, Base: base, Bytes: x.bytes}, true
	}
	return m
}

// failing makes the nth call of that name on the GPU return r; n of 0 is every call.
func (m *machine) failing(call string, gpu, nth int, r cu.Result) {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	m.counts = map[string]int{}
	m.fail = func(c string, g, n int) cu.Result {
		if c == call && g == gpu && (nth == 0 || n == nth) {
			return r
		}
		return cu.Success
	}
}

// working ends failing and reports whether the call was made as often as nth.
func (m *machine) working(call string, gpu, nth int) bool {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	m.fail = nil
	return m.counts[fmt.Sprint(call, gpu)] >= nth
}

// left says what is not given back.
func (m *machine) left() string {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	left := m.GPUs.Left(map[string]int{"handles": len(m.handles), "ranges": len(m.reserved), "mappings": len(m.mapped)})
	for g, n := range m.used {
		if n != 0 {
			left = append(left, fmt.Sprintf("%d bytes of GPU %d", n, g))
		}
	}
	return strings.Join(left, ", ")
}

// called counts the calls, and returns what the call is to fail with.
func (m *machine) called(name string, gpu int) cu.Result {
	key := fmt.Sprint(name, gpu)
	m.counts[key]++
	if m.fail != nil {
		return m.fail(name, gpu, m.counts[key])
	}
	return cu.Success
}

// number returns a new address or handle, with room behind it.
func (m *machine) number() uint64 {
	n := m.next
	m.next += 64 * granule
	return n
}

func (m *machine) newPhysical(gpu int, bytes uint64) *physical {
	m.used[gpu] += bytes
	return &physical{id: m.number(), gpu: gpu, bytes: bytes, dirty: true}
}

func (m *machine) handle(p *physical) cu.MemHandle {
	h := cu.MemHandle(m.number())
	p.refs++
	m.handles[h] = p
	return h
}

// data returns the bytes of the memory.
func (p *physical) data() []byte {
	if p.mem == nil {
		// Not make: most of it is never looked at.
		mem, err := unix.Mmap(-1, 0, int(p.bytes), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
		if err != nil {
			panic(err)
		}
		p.mem = mem
		for i := 0; p.dirty && i < len(p.mem); i += 1021 {
			p.mem[i] = 0xa5
		}
	}
	return p.mem
}

// forget gives the bytes back; a further look at them finds others.
func (p *physical) forget() {
	if p.mem != nil {
		if err := unix.Munmap(p.mem); err != nil {
			panic(err)
		}
	}
	p.mem = nil
}

// drop releases one reference.
func (m *machine) drop(p *physical) {
	if p.refs--; p.refs > 0 {
		return
	}
	if !p.cast {
		m.used[p.gpu] -= p.bytes
		p.forget()
		return
	}
	m.live--
	if len(p.bound) > 0 {
		m.Violation("a multicast object was released with the memory of %d GPUs bound", len(p.bound))
	}
}

// at finds the mapping that p is in.
func (m *machine) at(p device.Ptr) (device.Ptr, *fakeMapping) {
	for base, x := range m.mapped {
		if p >= base && uint64(p-base) < x.bytes {
			return base, x
		}
	}
	return 0, nil
}

// bytes returns what the GPU finds at p, piece by piece, as pieces lie in neighbouring mappings.
func (m *machine) bytes(gpu int, p device.Ptr, n uint64, f func(of *physical, off, n uint64)) cu.Result {
	for n > 0 {
		base, x := m.at(p)
		if x == nil || !x.access[gpu] && !(x.of.legacy && (x.of.gpu == gpu || m.peers[[2]int{gpu, x.of.gpu}])) || x.of.cast {
			return m.Violation("GPU %d has no access to %d bytes at %s", gpu, n, p)
		}
		off := uint64(p - base)
		k := min(n, x.bytes-off)
		f(x.of, off, k)
		p, n = p.Add(int64(k)), n-k
	}
	return cu.Success
}

// driver returns a table for the machine. Functions that nothing here calls are not supported.
func (m *machine) driver() *cu.Driver {
	d := m.GPUs.Driver()
	m.basics(d)
	m.memory(d)
	m.sharing(d)
	m.work(d)
	d.MulticastSource = m.resolve
	return d
}

func (m *machine) basics(d *cu.Driver) {
	d.DeviceGetAttribute = func(v *int32, a cu.DeviceAttribute, _ cu.DeviceOrdinal) cu.Result {
		return m.Do(fmt.Sprint("attribute", a), func(int) cu.Result {
			switch *v = fakecuda.Attribute(a); a {
			case cu.AttrMulticast:
				*v = int32(m.multicast)
			case cu.AttrHandleFabric:
				*v = int32(m.fabric)
			}
			return cu.Success
		})
	}
	d.DeviceCanAccessPeer = func(can *int32, dev, peer cu.DeviceOrdinal) cu.Result {
		*can = 1
		if m.noPeers != nil && m.noPeers(int(dev), int(peer)) {
			*can = 0
		}
		return cu.Success
	}
	d.CtxEnablePeerAccess = func(c cu.ContextHandle, _ uint32) cu.Result {
		return m.Do("cuCtxEnablePeerAccess", func(gpu int) cu.Result {
			pair := [2]int{gpu, int(c) - 1}
			if m.peers[pair] {
				return cu.PeerAccessAlreadyEnabled
			}
			m.peers[pair] = true
			return cu.Success
		})
	}
	d.MemGetInfo = func(free, total *uint64) cu.Result {
		return m.Do("cuMemGetInfo", func(gpu int) cu.Result {
			*free, *total = fakecuda.TotalMemory-m.used[max(gpu, 0)], fakecuda.TotalMemory
			return cu.Success
		})
	}
}

func (m *machine) memory(d *cu.Driver) {
	d.MemGetAllocationGranularity = func(n *uint64, _ *cu.MemAllocationProp, _ cu.Granularity) cu.Result {
		return m.Do("cuMemGetAllocationGranularity", func(int) cu.Result { *n = granule; return cu.Success })
	}
	d.MemCreate = func(h *cu.MemHandle, bytes uint64, prop *cu.MemAllocationProp, _ uint64) cu.Result {
		return m.Do("cuMemCreate", func(gpu int) cu.Result {
			switch {
			case bytes == 0 || bytes%granule != 0:
				return m.Violation("cuMemCreate of %d bytes", bytes)
			case prop.RequestedHandleTypes&cu.HandleFabric != 0 && !m.fabricWorks:
				return cu.NotPermitted
			case m.used[prop.Location.ID]+bytes > fakecuda.TotalMemory:
				return cu.OutOfMemory
			}
			p := m.newPhysical(int(prop.Location.ID), bytes)
			p.prop = *prop
			*h = m.handle(p)
			return cu.Success
		})
	}
	d.MemRelease = func(h cu.MemHandle) cu.Result {
		return m.Do("cuMemRelease", func(int) cu.Result {
			p := m.handles[h]
			if p == nil {
				return m.Violation("cuMemRelease of no handle")
			}
			delete(m.handles, h)
			m.drop(p)
			return cu.Success
		})
	}
	d.MemAddressReserve = func(p *device.Ptr, bytes, _ uint64, _ device.Ptr, _ uint64) cu.Result {
		return m.Do("cuMemAddressReserve", func(int) cu.Result {
			m.next = (m.next + granule - 1) / granule * granule
			*p = device.Ptr(m.next)
			m.next += bytes + granule
			m.reserved[*p] = bytes
			return cu.Success
		})
	}
	d.MemAddressFree = func(p device.Ptr, bytes uint64) cu.Result {
		return m.Do("cuMemAddressFree", func(int) cu.Result {
			if m.reserved[p] != bytes {
				return m.Violation("cuMemAddressFree of %d bytes at %s", bytes, p)
			}
			for base := range m.mapped {
				if base >= p && base < p.Add(int64(bytes)) {
					return m.Violation("cuMemAddressFree of mapped addresses")
				}
			}
			delete(m.reserved, p)
			return cu.Success
		})
	}
	d.MemMap = func(p device.Ptr, bytes, offset uint64, h cu.MemHandle, _ uint64) cu.Result {
		return m.Do("cuMemMap", func(int) cu.Result {
			of := m.handles[h]
			if of == nil || offset != 0 || bytes > of.bytes || bytes%granule != 0 || p%granule != 0 {
				return m.Violation("cuMemMap of %d bytes at %s", bytes, p)
			}
			if bytes != of.bytes {
				return cu.NotSupported // the driver maps whole allocations only
			}
			of.refs++
			m.mapped[p] = &fakeMapping{of: of, bytes: bytes, access: map[int]bool{}}
			return cu.Success
		})
	}
	d.MemUnmap = func(p device.Ptr, bytes uint64) cu.Result {
		return m.Do("cuMemUnmap", func(int) cu.Result {
			x := m.mapped[p]
			if x == nil || x.bytes != bytes {
				return m.Violation("cuMemUnmap of %d bytes at %s", bytes, p)
			}
			delete(m.mapped, p)
			m.drop(x.of)
			return cu.Success
		})
	}
	d.MemSetAccess = func(p device.Ptr, bytes uint64, desc *cu.MemAccessDesc, _ uint64) cu.Result {
		return m.Do("cuMemSetAccess", func(int) cu.Result {
			// Of whole mappings, one or several side by side.
			for at, end := p, p.Add(int64(bytes)); at != end; {
				x := m.mapped[at]
				if x == nil || at.Add(int64(x.bytes)) > end {
					return m.Violation("cuMemSetAccess of %d bytes at %s", bytes, p)
				}
				x.access[int(desc.Location.ID)] = true
				at = at.Add(int64(x.bytes))
			}
			return cu.Success
		})
	}
	d.MemRetainAllocationHandle = func(h *cu.MemHandle, p device.Ptr) cu.Result {
		return m.Do("cuMemRetainAllocationHandle", func(int) cu.Result {
			if _, x := m.at(p); x != nil && !x.of.legacy {
				*h = m.handle(x.of)
				return cu.Success
			}
			return cu.InvalidValue
		})
	}
	d.MemGetAllocationPropertiesFromHandle = func(prop *cu.MemAllocationProp, h cu.MemHandle) cu.Result {
		return m.Do("cuMemGetAllocationPropertiesFromHandle", func(int) cu.Result {
			*prop = m.handles[h].prop
			return cu.Success
		})
	}
	d.MemAlloc = func(p *device.Ptr, bytes uint64) cu.Result {
		return m.Do("cuMemAlloc", func(gpu int) cu.Result {
			of := m.newPhysical(gpu, bytes)
			of.legacy, of.refs = true, 1
			*p = device.Ptr(m.number())
			m.mapped[*p] = &fakeMapping{of: of, bytes: bytes}
			return cu.Success
		})
	}
	d.MemFree = func(p device.Ptr) cu.Result {
		return m.Do("cuMemFree", func(int) cu.Result {
			x := m.mapped[p]
			if x == nil || !x.of.legacy {
				return cu.InvalidValue
			}
			delete(m.mapped, p)
			m.drop(x.of)
			return cu.Success
		})
	}
}

func (m *machine) sharing(d *cu.Driver) {
	d.MemExportFD = func(fd *int32, h cu.MemHandle, _ cu.HandleType, _ uint64) cu.Result {
		return m.Do("cuMemExportToShareableHandle", func(int) cu.Result {
			p := m.handles[h]
			if p == nil {
				return m.Violation("export of no handle")
			}
			n, err := unix.MemfdCreate("fake GPU memory", unix.MFD_CLOEXEC)
			if err != nil {
				return cu.OperatingSystem
			}
			if _, err := unix.Pwrite(n, binary.LittleEndian.AppendUint64(nil, p.id), 0); err != nil {
				return cu.OperatingSystem
			}
			m.exported[p.id] = p
			*fd = int32(n)
			return cu.Success
		})
	}
	byID := func(id uint64, h *cu.MemHandle) cu.Result {
		for _, p := range m.handles {
			if p.id == id {
				*h = m.handle(p)
				return cu.Success
			}
		}
		if p := m.exported[id]; p != nil {
			if p.cast { // it is gone with its last handle, and the driver does not say so (PyTorch #195596)
				m.live++
				*h = m.handle(&physical{id: m.number(), bytes: p.bytes, cast: true, ranks: p.ranks, added: map[int]bool{}, bound: map[int]bool{}})
				return cu.Success
			}
			if p.refs == 0 {
				m.used[p.gpu] += p.bytes
			}
			*h = m.handle(p)
			return cu.Success
		}
		return m.Violation("import of memory that nobody holds")
	}
	d.MemImportFD = func(h *cu.MemHandle, fd uintptr, _ cu.HandleType) cu.Result {
		return m.Do("cuMemImportFromShareableHandle", func(int) cu.Result {
			var id [8]byte
			if n, err := unix.Pread(int(fd), id[:], 0); err != nil || n != 8 {
				return cu.InvalidValue
			}
			return byID(binary.LittleEndian.Uint64(id[:]), h)
		})
	}
	d.MemExportFabric = func(f *cu.FabricHandle, h cu.MemHandle, _ cu.HandleType, _ uint64) cu.Result {
		return m.Do("cuMemExportToShareableHandle", func(int) cu.Result {
			binary.LittleEndian.PutUint64(f[:], m.handles[h].id)
			return cu.Success
		})
	}
	d.MemImportFabric = func(h *cu.MemHandle, f *cu.FabricHandle, _ cu.HandleType) cu.Result {
		return m.Do("cuMemImportFromShareableHandle", func(int) cu.Result { return byID(binary.LittleEndian.Uint64(f[:]), h) })
	}
	d.IPCGetMemHandle = func(h *cu.IPCMemHandle, p device.Ptr) cu.Result {
		return m.Do("cuIpcGetMemHandle", func(int) cu.Result {
			base, x := m.at(p)
			if x == nil || !x.of.legacy {
				return cu.InvalidValue
			}
			h.Reserved[0] = uint64(base)
			return cu.Success
		})
	}
	d.IPCOpenMemHandle = func(p *device.Ptr, h cu.IPCMemHandle, _ uint32) cu.Result {
		return m.Do("cuIpcOpenMemHandle", func(int) cu.Result { return cu.InvalidContext }) // the fake has one process
	}
	d.IPCCloseMemHandle = func(device.Ptr) cu.Result { return cu.InvalidContext }
}

func (m *machine) work(d *cu.Driver) {
	d.MemcpyHtoDAsync = func(dst device.Ptr, src unsafe.Pointer, n uint64, s cu.StreamHandle) cu.Result {
		return m.Do("cuMemcpyHtoDAsync", func(int) cu.Result {
			from := unsafe.Slice((*byte)(src), n)
			return m.bytes(m.Streams[s], dst, n, func(of *physical, off, n uint64) { from = from[copy(of.data()[off:off+n], from):] })
		})
	}
	d.MemcpyDtoHAsync = func(dst unsafe.Pointer, src device.Ptr, n uint64, s cu.StreamHandle) cu.Result {
		return m.Do("cuMemcpyDtoHAsync", func(int) cu.Result {
			to := unsafe.Slice((*byte)(dst), n)
			return m.bytes(m.Streams[s], src, n, func(of *physical, off, n uint64) { to = to[copy(to, of.data()[off:off+n]):] })
		})
	}
	d.MemsetD8Async = func(p device.Ptr, value uint8, n uint64, s cu.StreamHandle) cu.Result {
		return m.Do("cuMemsetD8Async", func(int) cu.Result {
			if value != 0 {
				return cu.NotSupported
			}
			return m.bytes(m.Streams[s], p, n, func(of *physical, off, n uint64) {
				if n == of.bytes {
					of.forget()
					of.dirty = false
				} else {
					clear(of.data()[off : off+n])
				}
			})
		})
	}
}

// resolve returns the multicast functions.
func (m *machine) resolve() (*cu.Multicast, error) {
	m.Mu.Lock()
	m.resolved++
	m.Mu.Unlock()
	object := func(h cu.MemHandle) *physical {
		if p := m.handles[h]; p != nil && p.cast {
			return p
		}
		return nil
	}
	return &cu.Multicast{
		Create: func(h *cu.MemHandle, prop *cu.MulticastObjectProp) cu.Result {
			return m.Do("cuMulticastCreate", func(int) cu.Result {
				if m.objects > 0 && m.live == m.objects {
					return cu.OutOfMemory
				}
				m.created++
				m.live++
				*h = m.handle(&physical{id: m.number(), bytes: prop.Size, cast: true, ranks: int(prop.NumDevices),
					added: map[int]bool{}, bound: map[int]bool{}})
				return cu.Success
			})
		},
		AddDevice: func(h cu.MemHandle, dev cu.DeviceOrdinal) cu.Result {
			return m.Do("cuMulticastAddDevice", func(int) cu.Result {
				o := object(h)
				if o == nil || o.added[int(dev)] {
					return m.Violation("cuMulticastAddDevice of GPU %d", dev)
				}
				o.added[int(dev)] = true
				return cu.Success
			})
		},
		BindMem: func(h cu.MemHandle, offset uint64, mem cu.MemHandle, memOffset, bytes, _ uint64) cu.Result {
			return m.Do("cuMulticastBindMem", func(gpu int) cu.Result {
				o, p := object(h), m.handles[mem]
				switch {
				case o == nil || p == nil || offset != 0 || memOffset != 0 || bytes > o.bytes || bytes > p.bytes:
					return m.Violation("cuMulticastBindMem of %d bytes", bytes)
				case len(o.added) < o.ranks:
					return m.Violation("cuMulticastBindMem would block: %d of %d devices were added", len(o.added), o.ranks)
				}
				o.bound[gpu] = true
				return cu.Success
			})
		},
		Unbind: func(h cu.MemHandle, dev cu.DeviceOrdinal, _, _ uint64) cu.Result {
			return m.Do("cuMulticastUnbind", func(int) cu.Result {
				o := object(h)
				if o == nil || !o.bound[int(dev)] {
					return m.Violation("cuMulticastUnbind of what is not bound")
				}
				for _, x := range m.mapped {
					if x.of == o && x.access[int(dev)] {
						return m.Violation("cuMulticastUnbind of what is mapped")
					}
				}
				delete(o.bound, int(dev))
				return cu.Success
			})
		},
		GetGranularity: func(n *uint64, _ *cu.MulticastObjectProp, _ cu.Granularity) cu.Result {
			return m.Do("cuMulticastGetGranularity", func(int) cu.Result { *n = 2 * granule; return cu.Success })
		},
	}, nil
}
