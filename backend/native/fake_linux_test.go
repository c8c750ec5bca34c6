package native

import (
	"encoding/binary"
	"fmt"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/symmem/symmem/backend/backendtest/fakecuda"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/cuda"
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
	fail func(call string, gpu, n int) cuda.Result

	counts   map[string]int
	used     []uint64
	next     uint64
	handles  map[cuda.MemHandle]*physical
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
	prop   cuda.MemAllocationProp
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
		handles: map[cuda.MemHandle]*physical{}, reserved: map[device.Ptr]uint64{}, mapped: map[device.Ptr]*fakeMapping{},
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
func (m *machine) failing(call string, gpu, nth int, r cuda.Result) {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	m.counts = map[string]int{}
	m.fail = func(c string, g, n int) cuda.Result {
		if c == call && g == gpu && (nth == 0 || n == nth) {
			return r
		}
		return cuda.Success
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

// called counts the calls, and gives what the call is to fail with.
func (m *machine) called(name string, gpu int) cuda.Result {
	key := fmt.Sprint(name, gpu)
	m.counts[key]++
	if m.fail != nil {
		return m.fail(name, gpu, m.counts[key])
	}
	return cuda.Success
}

// number gives a new address or handle, with room behind it.
func (m *machine) number() uint64 {
	n := m.next
	m.next += 64 * granule
	return n
}

func (m *machine) newPhysical(gpu int, bytes uint64) *physical {
	m.used[gpu] += bytes
	return &physical{id: m.number(), gpu: gpu, bytes: bytes, dirty: true}
}

func (m *machine) handle(p *physical) cuda.MemHandle {
	h := cuda.MemHandle(m.number())
	p.refs++
	m.handles[h] = p
	return h
}

// data gives the bytes of the memory.
func (p *physical) data() []byte {
	if p.mem == nil {
		p.mem = make([]byte, p.bytes)
		for i := 0; p.dirty && i < len(p.mem); i += 1021 {
			p.mem[i] = 0xa5
		}
	}
	return p.mem
}

// drop gives one reference back.
func (m *machine) drop(p *physical) {
	if p.refs--; p.refs > 0 {
		return
	}
	if !p.cast {
		m.used[p.gpu] -= p.bytes
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

// bytes gives what the GPU finds at p, piece by piece, as pieces lie in neighbouring mappings.
func (m *machine) bytes(gpu int, p device.Ptr, n uint64, f func(of *physical, off, n uint64)) cuda.Result {
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
	return cuda.Success
}

// driver is a table for the machine. Functions that nothing here calls are not supported.
func (m *machine) driver() *cuda.Driver {
	d := m.GPUs.Driver()
	m.basics(d)
	m.memory(d)
	m.sharing(d)
	m.work(d)
	d.MulticastSource = m.resolve
	return d
}

func (m *machine) basics(d *cuda.Driver) {
	d.DeviceGetAttribute = func(v *int32, a cuda.DeviceAttribute, _ cuda.DeviceOrdinal) cuda.Result {
		return m.Do(fmt.Sprint("attribute", a), func(int) cuda.Result {
			switch *v = fakecuda.Attribute(a); a {
			case cuda.AttrMulticast:
				*v = int32(m.multicast)
			case cuda.AttrHandleFabric:
				*v = int32(m.fabric)
			}
			return cuda.Success
		})
	}
	d.DeviceCanAccessPeer = func(can *int32, dev, peer cuda.DeviceOrdinal) cuda.Result {
		*can = 1
		if m.noPeers != nil && m.noPeers(int(dev), int(peer)) {
			*can = 0
		}
		return cuda.Success
	}
	d.CtxEnablePeerAccess = func(c cuda.ContextHandle, _ uint32) cuda.Result {
		return m.Do("cuCtxEnablePeerAccess", func(gpu int) cuda.Result {
			pair := [2]int{gpu, int(c) - 1}
			if m.peers[pair] {
				return cuda.PeerAccessAlreadyEnabled
			}
			m.peers[pair] = true
			return cuda.Success
		})
	}
	d.MemGetInfo = func(free, total *uint64) cuda.Result {
		return m.Do("cuMemGetInfo", func(gpu int) cuda.Result {
			*free, *total = fakecuda.TotalMemory-m.used[max(gpu, 0)], fakecuda.TotalMemory
			return cuda.Success
		})
	}
}

func (m *machine) memory(d *cuda.Driver) {
	d.MemGetAllocationGranularity = func(n *uint64, _ *cuda.MemAllocationProp, _ cuda.Granularity) cuda.Result {
		return m.Do("cuMemGetAllocationGranularity", func(int) cuda.Result { *n = granule; return cuda.Success })
	}
	d.MemCreate = func(h *cuda.MemHandle, bytes uint64, prop *cuda.MemAllocationProp, _ uint64) cuda.Result {
		return m.Do("cuMemCreate", func(gpu int) cuda.Result {
			switch {
			case bytes == 0 || bytes%granule != 0:
				return m.Violation("cuMemCreate of %d bytes", bytes)
			case prop.RequestedHandleTypes&cuda.HandleFabric != 0 && !m.fabricWorks:
				return cuda.NotPermitted
			case m.used[prop.Location.ID]+bytes > fakecuda.TotalMemory:
				return cuda.OutOfMemory
			}
			p := m.newPhysical(int(prop.Location.ID), bytes)
			p.prop = *prop
			*h = m.handle(p)
			return cuda.Success
		})
	}
	d.MemRelease = func(h cuda.MemHandle) cuda.Result {
		return m.Do("cuMemRelease", func(int) cuda.Result {
			p := m.handles[h]
			if p == nil {
				return m.Violation("cuMemRelease of no handle")
			}
			delete(m.handles, h)
			m.drop(p)
			return cuda.Success
		})
	}
	d.MemAddressReserve = func(p *device.Ptr, bytes, _ uint64, _ device.Ptr, _ uint64) cuda.Result {
		return m.Do("cuMemAddressReserve", func(int) cuda.Result {
			m.next = (m.next + granule - 1) / granule * granule
			*p = device.Ptr(m.next)
			m.next += bytes + granule
			m.reserved[*p] = bytes
			return cuda.Success
		})
	}
	d.MemAddressFree = func(p device.Ptr, bytes uint64) cuda.Result {
		return m.Do("cuMemAddressFree", func(int) cuda.Result {
			if m.reserved[p] != bytes {
				return m.Violation("cuMemAddressFree of %d bytes at %s", bytes, p)
			}
			for base := range m.mapped {
				if base >= p && base < p.Add(int64(bytes)) {
					return m.Violation("cuMemAddressFree of mapped addresses")
				}
			}
			delete(m.reserved, p)
			return cuda.Success
		})
	}
	d.MemMap = func(p device.Ptr, bytes, offset uint64, h cuda.MemHandle, _ uint64) cuda.Result {
		return m.Do("cuMemMap", func(int) cuda.Result {
			of := m.handles[h]
			if of == nil || offset != 0 || bytes > of.bytes || bytes%granule != 0 || p%granule != 0 {
				return m.Violation("cuMemMap of %d bytes at %s", bytes, p)
			}
			if bytes != of.bytes {
				return cuda.NotSupported // the driver maps whole allocations only
			}
			of.refs++
			m.mapped[p] = &fakeMapping{of: of, bytes: bytes, access: map[int]bool{}}
			return cuda.Success
		})
	}
	d.MemUnmap = func(p device.Ptr, bytes uint64) cuda.Result {
		return m.Do("cuMemUnmap", func(int) cuda.Result {
			x := m.mapped[p]
			if x == nil || x.bytes != bytes {
				return m.Violation("cuMemUnmap of %d bytes at %s", bytes, p)
			}
			delete(m.mapped, p)
			m.drop(x.of)
			return cuda.Success
		})
	}
	d.MemSetAccess = func(p device.Ptr, bytes uint64, desc *cuda.MemAccessDesc, _ uint64) cuda.Result {
		return m.Do("cuMemSetAccess", func(int) cuda.Result {
			// Of whole mappings, one or several side by side.
			for at, end := p, p.Add(int64(bytes)); at != end; {
				x := m.mapped[at]
				if x == nil || at.Add(int64(x.bytes)) > end {
					return m.Violation("cuMemSetAccess of %d bytes at %s", bytes, p)
				}
				x.access[int(desc.Location.ID)] = true
				at = at.Add(int64(x.bytes))
			}
			return cuda.Success
		})
	}
	d.MemRetainAllocationHandle = func(h *cuda.MemHandle, p device.Ptr) cuda.Result {
		return m.Do("cuMemRetainAllocationHandle", func(int) cuda.Result {
			if _, x := m.at(p); x != nil && !x.of.legacy {
				*h = m.handle(x.of)
				return cuda.Success
			}
			return cuda.InvalidValue
		})
	}
	d.MemGetAllocationPropertiesFromHandle = func(prop *cuda.MemAllocationProp, h cuda.MemHandle) cuda.Result {
		return m.Do("cuMemGetAllocationPropertiesFromHandle", func(int) cuda.Result {
			*prop = m.handles[h].prop
			return cuda.Success
		})
	}
	d.MemAlloc = func(p *device.Ptr, bytes uint64) cuda.Result {
		return m.Do("cuMemAlloc", func(gpu int) cuda.Result {
			of := m.newPhysical(gpu, bytes)
			of.legacy, of.refs = true, 1
			*p = device.Ptr(m.number())
			m.mapped[*p] = &fakeMapping{of: of, bytes: bytes}
			return cuda.Success
		})
	}
	d.MemFree = func(p device.Ptr) cuda.Result {
		return m.Do("cuMemFree", func(int) cuda.Result {
			x := m.mapped[p]
			if x == nil || !x.of.legacy {
				return cuda.InvalidValue
			}
			delete(m.mapped, p)
			m.drop(x.of)
			return cuda.Success
		})
	}
}

func (m *machine) sharing(d *cuda.Driver) {
	d.MemExportFD = func(fd *int32, h cuda.MemHandle, _ cuda.HandleType, _ uint64) cuda.Result {
		return m.Do("cuMemExportToShareableHandle", func(int) cuda.Result {
			p := m.handles[h]
			if p == nil {
				return m.Violation("export of no handle")
			}
			n, err := unix.MemfdCreate("fake GPU memory", unix.MFD_CLOEXEC)
			if err != nil {
				return cuda.OperatingSystem
			}
			if _, err := unix.Pwrite(n, binary.LittleEndian.AppendUint64(nil, p.id), 0); err != nil {
				return cuda.OperatingSystem
			}
			*fd = int32(n)
			return cuda.Success
		})
	}
	byID := func(id uint64, h *cuda.MemHandle) cuda.Result {
		for _, p := range m.handles {
			if p.id == id {
				*h = m.handle(p)
				return cuda.Success
			}
		}
		return m.Violation("import of memory that nobody holds")
	}
	d.MemImportFD = func(h *cuda.MemHandle, fd uintptr, _ cuda.HandleType) cuda.Result {
		return m.Do("cuMemImportFromShareableHandle", func(int) cuda.Result {
			var id [8]byte
			if n, err := unix.Pread(int(fd), id[:], 0); err != nil || n != 8 {
				return cuda.InvalidValue
			}
			return byID(binary.LittleEndian.Uint64(id[:]), h)
		})
	}
	d.MemExportFabric = func(f *cuda.FabricHandle, h cuda.MemHandle, _ cuda.HandleType, _ uint64) cuda.Result {
		return m.Do("cuMemExportToShareableHandle", func(int) cuda.Result {
			binary.LittleEndian.PutUint64(f[:], m.handles[h].id)
			return cuda.Success
		})
	}
	d.MemImportFabric = func(h *cuda.MemHandle, f *cuda.FabricHandle, _ cuda.HandleType) cuda.Result {
		return m.Do("cuMemImportFromShareableHandle", func(int) cuda.Result { return byID(binary.LittleEndian.Uint64(f[:]), h) })
	}
	d.IPCGetMemHandle = func(h *cuda.IPCMemHandle, p device.Ptr) cuda.Result {
		return m.Do("cuIpcGetMemHandle", func(int) cuda.Result {
			base, x := m.at(p)
			if x == nil || !x.of.legacy {
				return cuda.InvalidValue
			}
			h.Reserved[0] = uint64(base)
			return cuda.Success
		})
	}
	d.IPCOpenMemHandle = func(p *device.Ptr, h cuda.IPCMemHandle, _ uint32) cuda.Result {
		return m.Do("cuIpcOpenMemHandle", func(int) cuda.Result { return cuda.InvalidContext }) // the fake has one process
	}
	d.IPCCloseMemHandle = func(device.Ptr) cuda.Result { return cuda.InvalidContext }
}

func (m *machine) work(d *cuda.Driver) {
	d.MemcpyHtoDAsync = func(dst device.Ptr, src unsafe.Pointer, n uint64, s cuda.StreamHandle) cuda.Result {
		return m.Do("cuMemcpyHtoDAsync", func(int) cuda.Result {
			from := unsafe.Slice((*byte)(src), n)
			return m.bytes(m.Streams[s], dst, n, func(of *physical, off, n uint64) { from = from[copy(of.data()[off:off+n], from):] })
		})
	}
	d.MemcpyDtoHAsync = func(dst unsafe.Pointer, src device.Ptr, n uint64, s cuda.StreamHandle) cuda.Result {
		return m.Do("cuMemcpyDtoHAsync", func(int) cuda.Result {
			to := unsafe.Slice((*byte)(dst), n)
			return m.bytes(m.Streams[s], src, n, func(of *physical, off, n uint64) { to = to[copy(to, of.data()[off:off+n]):] })
		})
	}
	d.MemsetD8Async = func(p device.Ptr, value uint8, n uint64, s cuda.StreamHandle) cuda.Result {
		return m.Do("cuMemsetD8Async", func(int) cuda.Result {
			if value != 0 {
				return cuda.NotSupported
			}
			return m.bytes(m.Streams[s], p, n, func(of *physical, off, n uint64) {
				if n == of.bytes {
					of.mem, of.dirty = nil, false
				} else {
					clear(of.data()[off : off+n])
				}
			})
		})
	}
}

// resolve gives the multicast functions.
func (m *machine) resolve() (*cuda.Multicast, error) {
	m.Mu.Lock()
	m.resolved++
	m.Mu.Unlock()
	object := func(h cuda.MemHandle) *physical {
		if p := m.handles[h]; p != nil && p.cast {
			return p
		}
		return nil
	}
	return &cuda.Multicast{
		Create: func(h *cuda.MemHandle, prop *cuda.MulticastObjectProp) cuda.Result {
			return m.Do("cuMulticastCreate", func(int) cuda.Result {
				if m.objects > 0 && m.live == m.objects {
					return cuda.OutOfMemory
				}
				m.created++
				m.live++
				*h = m.handle(&physical{id: m.number(), bytes: prop.Size, cast: true, ranks: int(prop.NumDevices),
					added: map[int]bool{}, bound: map[int]bool{}})
				return cuda.Success
			})
		},
		AddDevice: func(h cuda.MemHandle, dev cuda.DeviceOrdinal) cuda.Result {
			return m.Do("cuMulticastAddDevice", func(int) cuda.Result {
				o := object(h)
				if o == nil || o.added[int(dev)] {
					return m.Violation("cuMulticastAddDevice of GPU %d", dev)
				}
				o.added[int(dev)] = true
				return cuda.Success
			})
		},
		BindMem: func(h cuda.MemHandle, offset uint64, mem cuda.MemHandle, memOffset, bytes, _ uint64) cuda.Result {
			return m.Do("cuMulticastBindMem", func(gpu int) cuda.Result {
				o, p := object(h), m.handles[mem]
				switch {
				case o == nil || p == nil || offset != 0 || memOffset != 0 || bytes > o.bytes || bytes > p.bytes:
					return m.Violation("cuMulticastBindMem of %d bytes", bytes)
				case len(o.added) < o.ranks:
					return m.Violation("cuMulticastBindMem would block: %d of %d devices were added", len(o.added), o.ranks)
				}
				o.bound[gpu] = true
				return cuda.Success
			})
		},
		Unbind: func(h cuda.MemHandle, dev cuda.DeviceOrdinal, _, _ uint64) cuda.Result {
			return m.Do("cuMulticastUnbind", func(int) cuda.Result {
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
				return cuda.Success
			})
		},
		GetGranularity: func(n *uint64, _ *cuda.MulticastObjectProp, _ cuda.Granularity) cuda.Result {
			return m.Do("cuMulticastGetGranularity", func(int) cuda.Result { *n = 2 * granule; return cuda.Success })
		},
	}, nil
}
