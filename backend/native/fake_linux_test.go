package native

import (
	"encoding/binary"
	"fmt"
	"reflect"
	"strings"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/cuda"
)

const (
	granule   = 2 << 20
	fakeTotal = 1 << 30 // memory of a GPU in bytes
)

// machine is a host with some GPUs, as far as this backend asks the driver for it: physical memory with handles, addresses, mappings
// with access rights, contexts, and streams whose work runs at once. It notes what a real driver would not survive.
type machine struct {
	gpus        int
	fabric      int // the attribute
	fabricWorks bool
	multicast   int // the attribute
	noPeers     func(dev, peer int) bool
	// fail, unless nil, is asked at each call, with the GPU whose context is current and how often the call was made on it.
	fail func(call string, gpu, n int) cuda.Result

	mu         sync.Mutex
	counts     map[string]int
	current    map[int][]int // the stack of contexts of a thread, by its id
	contexts   []int         // references of the primary contexts
	used       []uint64
	next       uint64
	handles    map[cuda.MemHandle]*physical
	reserved   map[device.Ptr]uint64
	mapped     map[device.Ptr]*fakeMapping
	streams    map[cuda.StreamHandle]int
	pinned     map[unsafe.Pointer][]byte
	peers      map[[2]int]bool
	resolved   int // how often multicast was looked up
	violations []string
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
	return &machine{
		gpus: gpus, counts: map[string]int{}, current: map[int][]int{}, contexts: make([]int, gpus), used: make([]uint64, gpus),
		next: 1 << 40, handles: map[cuda.MemHandle]*physical{}, reserved: map[device.Ptr]uint64{}, mapped: map[device.Ptr]*fakeMapping{},
		streams: map[cuda.StreamHandle]int{}, pinned: map[unsafe.Pointer][]byte{}, peers: map[[2]int]bool{},
	}
}

// failing makes the nth call of that name on the GPU return r; n of 0 is every call.
func (m *machine) failing(call string, gpu, nth int, r cuda.Result) {
	m.mu.Lock()
	defer m.mu.Unlock()
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
	m.mu.Lock()
	defer m.mu.Unlock()
	m.fail = nil
	return m.counts[fmt.Sprint(call, gpu)] >= nth
}

// left says what is not given back.
func (m *machine) left() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	var b strings.Builder
	for what, n := range map[string]int{"handles": len(m.handles), "ranges": len(m.reserved), "mappings": len(m.mapped),
		"streams": len(m.streams), "pinned buffers": len(m.pinned)} {
		if n > 0 {
			fmt.Fprintf(&b, "%d %s ", n, what)
		}
	}
	for g := range m.gpus {
		if m.used[g] != 0 || m.contexts[g] != 0 {
			fmt.Fprintf(&b, "GPU %d: %d bytes, %d references of the context ", g, m.used[g], m.contexts[g])
		}
	}
	for _, v := range m.violations {
		fmt.Fprintf(&b, "%s ", v)
	}
	return b.String()
}

// call begins a call of the driver, with the machine locked: it gives the GPU whose context is current, -1 if none is, and what the
// call is to fail with. The caller unlocks.
func (m *machine) call(name string) (gpu int, r cuda.Result) {
	m.mu.Lock()
	gpu = -1
	if s := m.current[unix.Gettid()]; len(s) > 0 {
		gpu = s[len(s)-1]
	}
	key := fmt.Sprint(name, gpu)
	m.counts[key]++
	if m.fail != nil {
		r = m.fail(name, gpu, m.counts[key])
	}
	return gpu, r
}

// do is a call that needs no more than the GPU.
func (m *machine) do(name string, f func(gpu int) cuda.Result) cuda.Result {
	gpu, r := m.call(name)
	defer m.mu.Unlock()
	if r != cuda.Success {
		return r
	}
	return f(gpu)
}

func (m *machine) violation(format string, args ...any) cuda.Result {
	m.violations = append(m.violations, fmt.Sprintf(format, args...))
	return cuda.InvalidValue
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
	if p.refs--; p.refs == 0 && !p.cast {
		m.used[p.gpu] -= p.bytes
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
			return m.violation("GPU %d has no access to %d bytes at %s", gpu, n, p)
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
	d := &cuda.Driver{Path: "fake"}
	m.basics(d)
	m.memory(d)
	m.sharing(d)
	m.work(d)
	d.MulticastSource = m.resolve
	v := reflect.ValueOf(d).Elem()
	for i := range v.NumField() {
		f := v.Field(i)
		if strings.HasSuffix(v.Type().Field(i).Tag.Get("cuda"), ",required") && f.IsNil() {
			f.Set(reflect.MakeFunc(f.Type(), func([]reflect.Value) []reflect.Value {
				return []reflect.Value{reflect.ValueOf(cuda.NotSupported)}
			}))
		}
	}
	return d
}

func text(p *byte, size int32, s string) cuda.Result {
	to := unsafe.Slice(p, size)
	to[copy(to[:size-1], s)] = 0
	return cuda.Success
}

func (m *machine) basics(d *cuda.Driver) {
	d.Init = func(uint32) cuda.Result { return m.do("cuInit", func(int) cuda.Result { return cuda.Success }) }
	d.DriverGetVersion = func(v *int32) cuda.Result { *v = 13000; return cuda.Success }
	d.DeviceGetCount = func(n *int32) cuda.Result { *n = int32(m.gpus); return cuda.Success }
	d.DeviceGet = func(dev *cuda.DeviceOrdinal, i int32) cuda.Result { *dev = cuda.DeviceOrdinal(i); return cuda.Success }
	d.DeviceGetName = func(p *byte, n int32, _ cuda.DeviceOrdinal) cuda.Result { return text(p, n, "Fake GPU") }
	d.DeviceGetUUID = func(u *cuda.UUID, dev cuda.DeviceOrdinal) cuda.Result {
		*u = cuda.UUID{0: 0xfa, 15: byte(dev)}
		return cuda.Success
	}
	d.DeviceGetPCIBusID = func(p *byte, n int32, dev cuda.DeviceOrdinal) cuda.Result {
		return text(p, n, fmt.Sprintf("0000:%02X:00.0", dev))
	}
	d.DeviceGetAttribute = func(v *int32, a cuda.DeviceAttribute, _ cuda.DeviceOrdinal) cuda.Result {
		return m.do(fmt.Sprint("attribute", a), func(int) cuda.Result {
			switch *v = 1; a {
			case cuda.AttrMulticast:
				*v = int32(m.multicast)
			case cuda.AttrHandleFabric:
				*v = int32(m.fabric)
			}
			return cuda.Success
		})
	}
	d.DeviceTotalMem = func(n *uint64, _ cuda.DeviceOrdinal) cuda.Result { *n = fakeTotal; return cuda.Success }
	d.DeviceCanAccessPeer = func(can *int32, dev, peer cuda.DeviceOrdinal) cuda.Result {
		*can = 1
		if m.noPeers != nil && m.noPeers(int(dev), int(peer)) {
			*can = 0
		}
		return cuda.Success
	}
	d.PrimaryCtxRetain = func(c *cuda.ContextHandle, dev cuda.DeviceOrdinal) cuda.Result {
		return m.do("cuDevicePrimaryCtxRetain", func(int) cuda.Result {
			m.contexts[dev]++
			*c = cuda.ContextHandle(dev) + 1
			return cuda.Success
		})
	}
	d.PrimaryCtxRelease = func(dev cuda.DeviceOrdinal) cuda.Result {
		return m.do("cuDevicePrimaryCtxRelease", func(int) cuda.Result { m.contexts[dev]--; return cuda.Success })
	}
	d.CtxPushCurrent = func(c cuda.ContextHandle) cuda.Result {
		return m.do("cuCtxPushCurrent", func(int) cuda.Result {
			m.current[unix.Gettid()] = append(m.current[unix.Gettid()], int(c)-1)
			return cuda.Success
		})
	}
	d.CtxPopCurrent = func(*cuda.ContextHandle) cuda.Result {
		return m.do("cuCtxPopCurrent", func(int) cuda.Result {
			s := m.current[unix.Gettid()]
			m.current[unix.Gettid()] = s[:len(s)-1]
			return cuda.Success
		})
	}
	d.CtxEnablePeerAccess = func(c cuda.ContextHandle, _ uint32) cuda.Result {
		return m.do("cuCtxEnablePeerAccess", func(gpu int) cuda.Result {
			pair := [2]int{gpu, int(c) - 1}
			if m.peers[pair] {
				return cuda.PeerAccessAlreadyEnabled
			}
			m.peers[pair] = true
			return cuda.Success
		})
	}
	d.MemGetInfo = func(free, total *uint64) cuda.Result {
		return m.do("cuMemGetInfo", func(gpu int) cuda.Result {
			*free, *total = fakeTotal-m.used[max(gpu, 0)], fakeTotal
			return cuda.Success
		})
	}
}

func (m *machine) memory(d *cuda.Driver) {
	d.MemGetAllocationGranularity = func(n *uint64, _ *cuda.MemAllocationProp, _ cuda.Granularity) cuda.Result {
		return m.do("cuMemGetAllocationGranularity", func(int) cuda.Result { *n = granule; return cuda.Success })
	}
	d.MemCreate = func(h *cuda.MemHandle, bytes uint64, prop *cuda.MemAllocationProp, _ uint64) cuda.Result {
		return m.do("cuMemCreate", func(gpu int) cuda.Result {
			switch {
			case bytes == 0 || bytes%granule != 0:
				return m.violation("cuMemCreate of %d bytes", bytes)
			case prop.RequestedHandleTypes&cuda.HandleFabric != 0 && !m.fabricWorks:
				return cuda.NotPermitted
			case m.used[prop.Location.ID]+bytes > fakeTotal:
				return cuda.OutOfMemory
			}
			p := m.newPhysical(int(prop.Location.ID), bytes)
			p.prop = *prop
			*h = m.handle(p)
			return cuda.Success
		})
	}
	d.MemRelease = func(h cuda.MemHandle) cuda.Result {
		return m.do("cuMemRelease", func(int) cuda.Result {
			p := m.handles[h]
			if p == nil {
				return m.violation("cuMemRelease of no handle")
			}
			delete(m.handles, h)
			m.drop(p)
			return cuda.Success
		})
	}
	d.MemAddressReserve = func(p *device.Ptr, bytes, _ uint64, _ device.Ptr, _ uint64) cuda.Result {
		return m.do("cuMemAddressReserve", func(int) cuda.Result {
			m.next = (m.next + granule - 1) / granule * granule
			*p = device.Ptr(m.next)
			m.next += bytes + granule
			m.reserved[*p] = bytes
			return cuda.Success
		})
	}
	d.MemAddressFree = func(p device.Ptr, bytes uint64) cuda.Result {
		return m.do("cuMemAddressFree", func(int) cuda.Result {
			if m.reserved[p] != bytes {
				return m.violation("cuMemAddressFree of %d bytes at %s", bytes, p)
			}
			for base := range m.mapped {
				if base >= p && base < p.Add(int64(bytes)) {
					return m.violation("cuMemAddressFree of mapped addresses")
				}
			}
			delete(m.reserved, p)
			return cuda.Success
		})
	}
	d.MemMap = func(p device.Ptr, bytes, offset uint64, h cuda.MemHandle, _ uint64) cuda.Result {
		return m.do("cuMemMap", func(int) cuda.Result {
			of := m.handles[h]
			if of == nil || offset != 0 || bytes > of.bytes || bytes%granule != 0 || p%granule != 0 {
				return m.violation("cuMemMap of %d bytes at %s", bytes, p)
			}
			of.refs++
			m.mapped[p] = &fakeMapping{of: of, bytes: bytes, access: map[int]bool{}}
			return cuda.Success
		})
	}
	d.MemUnmap = func(p device.Ptr, bytes uint64) cuda.Result {
		return m.do("cuMemUnmap", func(int) cuda.Result {
			x := m.mapped[p]
			if x == nil || x.bytes != bytes {
				return m.violation("cuMemUnmap of %d bytes at %s", bytes, p)
			}
			delete(m.mapped, p)
			m.drop(x.of)
			return cuda.Success
		})
	}
	d.MemSetAccess = func(p device.Ptr, bytes uint64, desc *cuda.MemAccessDesc, _ uint64) cuda.Result {
		return m.do("cuMemSetAccess", func(int) cuda.Result {
			// Of whole mappings, one or several side by side.
			for at, end := p, p.Add(int64(bytes)); at != end; {
				x := m.mapped[at]
				if x == nil || at.Add(int64(x.bytes)) > end {
					return m.violation("cuMemSetAccess of %d bytes at %s", bytes, p)
				}
				x.access[int(desc.Location.ID)] = true
				at = at.Add(int64(x.bytes))
			}
			return cuda.Success
		})
	}
	d.MemRetainAllocationHandle = func(h *cuda.MemHandle, p device.Ptr) cuda.Result {
		return m.do("cuMemRetainAllocationHandle", func(int) cuda.Result {
			if _, x := m.at(p); x != nil && !x.of.legacy {
				*h = m.handle(x.of)
				return cuda.Success
			}
			return cuda.InvalidValue
		})
	}
	d.MemGetAllocationPropertiesFromHandle = func(prop *cuda.MemAllocationProp, h cuda.MemHandle) cuda.Result {
		return m.do("cuMemGetAllocationPropertiesFromHandle", func(int) cuda.Result { *prop = m.handles[h].prop; return cuda.Success })
	}
	d.MemGetAddressRange = func(base *device.Ptr, bytes *uint64, p device.Ptr) cuda.Result {
		return m.do("cuMemGetAddressRange", func(int) cuda.Result {
			at, x := m.at(p)
			if x == nil {
				return cuda.NotFound
			}
			*base, *bytes = at, x.bytes
			return cuda.Success
		})
	}
	d.PointerGetAttribute = func(v unsafe.Pointer, a cuda.PointerAttribute, p device.Ptr) cuda.Result {
		return m.do("cuPointerGetAttribute", func(int) cuda.Result {
			_, x := m.at(p)
			switch {
			case p < 1<<20: // stands for pinned memory of the host
				*(*cuda.MemoryType)(v) = cuda.MemoryHost
			case x == nil:
				return cuda.InvalidValue
			case a == cuda.PointerMemoryType:
				*(*cuda.MemoryType)(v) = cuda.MemoryDevice
			case a == cuda.PointerDeviceOrdinal:
				*(*int32)(v) = int32(x.of.gpu)
			default:
				return cuda.InvalidValue
			}
			return cuda.Success
		})
	}
	d.MemAlloc = func(p *device.Ptr, bytes uint64) cuda.Result {
		return m.do("cuMemAlloc", func(gpu int) cuda.Result {
			of := m.newPhysical(gpu, bytes)
			of.legacy, of.refs = true, 1
			*p = device.Ptr(m.number())
			m.mapped[*p] = &fakeMapping{of: of, bytes: bytes}
			return cuda.Success
		})
	}
	d.MemFree = func(p device.Ptr) cuda.Result {
		return m.do("cuMemFree", func(int) cuda.Result {
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
		return m.do("cuMemExportToShareableHandle", func(int) cuda.Result {
			p := m.handles[h]
			if p == nil {
				return m.violation("export of no handle")
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
		return m.violation("import of memory that nobody holds")
	}
	d.MemImportFD = func(h *cuda.MemHandle, fd uintptr, _ cuda.HandleType) cuda.Result {
		return m.do("cuMemImportFromShareableHandle", func(int) cuda.Result {
			var id [8]byte
			if n, err := unix.Pread(int(fd), id[:], 0); err != nil || n != 8 {
				return cuda.InvalidValue
			}
			return byID(binary.LittleEndian.Uint64(id[:]), h)
		})
	}
	d.MemExportFabric = func(f *cuda.FabricHandle, h cuda.MemHandle, _ cuda.HandleType, _ uint64) cuda.Result {
		return m.do("cuMemExportToShareableHandle", func(int) cuda.Result {
			binary.LittleEndian.PutUint64(f[:], m.handles[h].id)
			return cuda.Success
		})
	}
	d.MemImportFabric = func(h *cuda.MemHandle, f *cuda.FabricHandle, _ cuda.HandleType) cuda.Result {
		return m.do("cuMemImportFromShareableHandle", func(int) cuda.Result { return byID(binary.LittleEndian.Uint64(f[:]), h) })
	}
	d.IPCGetMemHandle = func(h *cuda.IPCMemHandle, p device.Ptr) cuda.Result {
		return m.do("cuIpcGetMemHandle", func(int) cuda.Result {
			base, x := m.at(p)
			if x == nil || !x.of.legacy {
				return cuda.InvalidValue
			}
			h.Reserved[0] = uint64(base)
			return cuda.Success
		})
	}
	d.IPCOpenMemHandle = func(p *device.Ptr, h cuda.IPCMemHandle, _ uint32) cuda.Result {
		return m.do("cuIpcOpenMemHandle", func(int) cuda.Result { return cuda.InvalidContext }) // the fake has one process
	}
	d.IPCCloseMemHandle = func(device.Ptr) cuda.Result { return cuda.InvalidContext }
}

func (m *machine) work(d *cuda.Driver) {
	d.StreamCreate = func(s *cuda.StreamHandle, _ uint32) cuda.Result {
		return m.do("cuStreamCreate", func(gpu int) cuda.Result {
			*s = cuda.StreamHandle(m.number())
			m.streams[*s] = gpu
			return cuda.Success
		})
	}
	d.StreamDestroy = func(s cuda.StreamHandle) cuda.Result {
		return m.do("cuStreamDestroy", func(int) cuda.Result { delete(m.streams, s); return cuda.Success })
	}
	d.StreamQuery = func(cuda.StreamHandle) cuda.Result {
		return m.do("cuStreamQuery", func(int) cuda.Result { return cuda.Success })
	}
	d.EventCreate = func(e *cuda.EventHandle, _ uint32) cuda.Result { *e = 1; return cuda.Success }
	d.EventDestroy = func(cuda.EventHandle) cuda.Result { return cuda.Success }
	d.EventRecord = func(cuda.EventHandle, cuda.StreamHandle) cuda.Result { return cuda.Success }
	d.EventQuery = func(cuda.EventHandle) cuda.Result {
		return m.do("cuEventQuery", func(int) cuda.Result { return cuda.Success })
	}
	d.MemHostAlloc = func(p *unsafe.Pointer, bytes uint64, _ uint32) cuda.Result {
		return m.do("cuMemHostAlloc", func(int) cuda.Result {
			b := make([]byte, bytes)
			*p = unsafe.Pointer(&b[0])
			m.pinned[*p] = b
			return cuda.Success
		})
	}
	d.MemHostGetDevicePointer = func(dev *device.Ptr, p unsafe.Pointer, _ uint32) cuda.Result {
		return m.do("cuMemHostGetDevicePointer", func(int) cuda.Result { *dev = device.Ptr(uintptr(p)); return cuda.Success })
	}
	d.MemFreeHost = func(p unsafe.Pointer) cuda.Result {
		return m.do("cuMemFreeHost", func(int) cuda.Result { delete(m.pinned, p); return cuda.Success })
	}
	d.MemcpyHtoDAsync = func(dst device.Ptr, src unsafe.Pointer, n uint64, s cuda.StreamHandle) cuda.Result {
		return m.do("cuMemcpyHtoDAsync", func(int) cuda.Result {
			from := unsafe.Slice((*byte)(src), n)
			return m.bytes(m.streams[s], dst, n, func(of *physical, off, n uint64) { from = from[copy(of.data()[off:off+n], from):] })
		})
	}
	d.MemcpyDtoHAsync = func(dst unsafe.Pointer, src device.Ptr, n uint64, s cuda.StreamHandle) cuda.Result {
		return m.do("cuMemcpyDtoHAsync", func(int) cuda.Result {
			to := unsafe.Slice((*byte)(dst), n)
			return m.bytes(m.streams[s], src, n, func(of *physical, off, n uint64) { to = to[copy(to, of.data()[off:off+n]):] })
		})
	}
	d.MemsetD8Async = func(p device.Ptr, value uint8, n uint64, s cuda.StreamHandle) cuda.Result {
		return m.do("cuMemsetD8Async", func(int) cuda.Result {
			if value != 0 {
				return cuda.NotSupported
			}
			return m.bytes(m.streams[s], p, n, func(of *physical, off, n uint64) {
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
	m.mu.Lock()
	m.resolved++
	m.mu.Unlock()
	object := func(h cuda.MemHandle) *physical {
		if p := m.handles[h]; p != nil && p.cast {
			return p
		}
		return nil
	}
	return &cuda.Multicast{
		Create: func(h *cuda.MemHandle, prop *cuda.MulticastObjectProp) cuda.Result {
			return m.do("cuMulticastCreate", func(int) cuda.Result {
				*h = m.handle(&physical{id: m.number(), bytes: prop.Size, cast: true, ranks: int(prop.NumDevices),
					added: map[int]bool{}, bound: map[int]bool{}})
				return cuda.Success
			})
		},
		AddDevice: func(h cuda.MemHandle, dev cuda.DeviceOrdinal) cuda.Result {
			return m.do("cuMulticastAddDevice", func(int) cuda.Result {
				o := object(h)
				if o == nil || o.added[int(dev)] {
					return m.violation("cuMulticastAddDevice of GPU %d", dev)
				}
				o.added[int(dev)] = true
				return cuda.Success
			})
		},
		BindMem: func(h cuda.MemHandle, offset uint64, mem cuda.MemHandle, memOffset, bytes, _ uint64) cuda.Result {
			return m.do("cuMulticastBindMem", func(gpu int) cuda.Result {
				o, p := object(h), m.handles[mem]
				switch {
				case o == nil || p == nil || offset != 0 || memOffset != 0 || bytes > o.bytes || bytes > p.bytes:
					return m.violation("cuMulticastBindMem of %d bytes", bytes)
				case len(o.added) < o.ranks:
					return m.violation("cuMulticastBindMem would block: %d of %d devices were added", len(o.added), o.ranks)
				}
				o.bound[gpu] = true
				return cuda.Success
			})
		},
		Unbind: func(h cuda.MemHandle, dev cuda.DeviceOrdinal, _, _ uint64) cuda.Result {
			return m.do("cuMulticastUnbind", func(int) cuda.Result {
				o := object(h)
				if o == nil || !o.bound[int(dev)] {
					return m.violation("cuMulticastUnbind of what is not bound")
				}
				for _, x := range m.mapped {
					if x.of == o && x.access[int(dev)] {
						return m.violation("cuMulticastUnbind of what is mapped")
					}
				}
				delete(o.bound, int(dev))
				return cuda.Success
			})
		},
		GetGranularity: func(n *uint64, _ *cuda.MulticastObjectProp, _ cuda.Granularity) cuda.Result {
			return m.do("cuMulticastGetGranularity", func(int) cuda.Result { *n = 2 * granule; return cuda.Success })
		},
	}, nil
}
