package fakecuda

import (
	"fmt"
	"reflect"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/symmem/symmem/device"
	cu "github.com/symmem/symmem/internal/cuda"
)

// Driver returns a new table over the GPUs, for the caller to add to. Their attributes are those of [Attribute], and each reaches all others.
// Required functions that this package does not have answer that they are not supported.
func (g *GPUs) Driver() *cu.Driver {
	d := &cu.Driver{Path: "fake"}
	g.devices(d)
	g.contexts(d)
	g.streams(d)
	g.hostMemory(d)
	g.pointers(d)
	g.kernels(d)
	notSupported(d)
	return d
}

// notSupported fills the gaps of the table that no real driver has.
func notSupported(d *cu.Driver) {
	v := reflect.ValueOf(d).Elem()
	for i := range v.NumField() {
		f := v.Field(i)
		if strings.HasSuffix(v.Type().Field(i).Tag.Get("cuda"), ",required") && f.IsNil() {
			f.Set(reflect.MakeFunc(f.Type(), func([]reflect.Value) []reflect.Value {
				return []reflect.Value{reflect.ValueOf(cu.NotSupported)}
			}))
		}
	}
}

func (g *GPUs) devices(d *cu.Driver) {
	d.Init = func(uint32) cu.Result { return g.Do("cuInit", done) }
	d.DriverGetVersion = func(v *int32) cu.Result { *v = 13000; return cu.Success }
	d.DeviceGetCount = func(n *int32) cu.Result { *n = int32(g.Count); return cu.Success }
	d.DeviceGet = func(dev *cu.DeviceOrdinal, i int32) cu.Result { *dev = cu.DeviceOrdinal(i); return cu.Success }
	d.DeviceGetName = func(p *byte, n int32, _ cu.DeviceOrdinal) cu.Result { return text(p, n, "Fake GPU") }
	d.DeviceGetUUID = func(u *cu.UUID, dev cu.DeviceOrdinal) cu.Result {
		*u = cu.UUID{0: 0xfa, 15: byte(dev)}
		return cu.Success
	}
	d.DeviceGetPCIBusID = func(p *byte, n int32, dev cu.DeviceOrdinal) cu.Result {
		return text(p, n, fmt.Sprintf("0000:%02X:00.0", dev))
	}
	d.DeviceGetAttribute = func(v *int32, a cu.DeviceAttribute, _ cu.DeviceOrdinal) cu.Result {
		*v = Attribute(a)
		return cu.Success
	}
	d.DeviceTotalMem = func(n *uint64, _ cu.DeviceOrdinal) cu.Result { *n = TotalMemory; return cu.Success }
	d.DeviceCanAccessPeer = func(can *int32, _, _ cu.DeviceOrdinal) cu.Result { *can = 1; return cu.Success }
}

// done is a call that has nothing to do.
func done(int) cu.Result { return cu.Success }

// text writes s as C does into size bytes at p.
func text(p *byte, size int32, s string) cu.Result {
	to := unsafe.Slice(p, size)
	to[copy(to[:size-1], s)] = 0
	return cu.Success
}

// contexts: a primary context's handle is its GPU's ordinal and one.
func (g *GPUs) contexts(d *cu.Driver) {
	d.PrimaryCtxRetain = func(c *cu.ContextHandle, dev cu.DeviceOrdinal) cu.Result {
		return g.Do("cuDevicePrimaryCtxRetain", func(int) cu.Result {
			g.Contexts[dev]++
			*c = cu.ContextHandle(dev) + 1
			return cu.Success
		})
	}
	d.PrimaryCtxRelease = func(dev cu.DeviceOrdinal) cu.Result {
		return g.Do("cuDevicePrimaryCtxRelease", func(int) cu.Result { g.Contexts[dev]--; return cu.Success })
	}
	d.CtxPushCurrent = func(c cu.ContextHandle) cu.Result {
		return g.Do("cuCtxPushCurrent", func(int) cu.Result {
			g.stacks[unix.Gettid()] = append(g.stacks[unix.Gettid()], int(c)-1)
			return cu.Success
		})
	}
	d.CtxPopCurrent = func(*cu.ContextHandle) cu.Result {
		return g.Do("cuCtxPopCurrent", func(int) cu.Result {
			s := g.stacks[unix.Gettid()]
			g.stacks[unix.Gettid()] = s[:len(s)-1]
			return cu.Success
		})
	}
}

func (g *GPUs) streams(d *cu.Driver) {
	d.StreamCreate = func(s *cu.StreamHandle, _ uint32) cu.Result {
		return g.Do("cuStreamCreate", func(gpu int) cu.Result {
			g.latest++
			*s = g.latest
			g.Streams[*s] = gpu
			return cu.Success
		})
	}
	d.StreamDestroy = func(s cu.StreamHandle) cu.Result {
		return g.Do("cuStreamDestroy", func(int) cu.Result { delete(g.Streams, s); return cu.Success })
	}
	d.StreamQuery = func(cu.StreamHandle) cu.Result { return g.Do("cuStreamQuery", done) }
	d.EventCreate = func(e *cu.EventHandle, _ uint32) cu.Result { *e = 1; return cu.Success }
	d.EventDestroy = func(cu.EventHandle) cu.Result { return cu.Success }
	d.EventRecord = func(cu.EventHandle, cu.StreamHandle) cu.Result { return cu.Success }
	d.EventQuery = func(cu.EventHandle) cu.Result { return g.Do("cuEventQuery", done) }
}

func (g *GPUs) hostMemory(d *cu.Driver) {
	d.MemHostAlloc = func(p *unsafe.Pointer, bytes uint64, _ uint32) cu.Result {
		return g.Do("cuMemHostAlloc", func(int) cu.Result {
			b := make([]byte, bytes)
			*p = unsafe.Pointer(&b[0])
			g.pinned[*p] = b
			return cu.Success
		})
	}
	d.MemHostGetDevicePointer = func(dev *device.Ptr, p unsafe.Pointer, _ uint32) cu.Result {
		return g.Do("cuMemHostGetDevicePointer", func(int) cu.Result { *dev = device.Ptr(uintptr(p)); return cu.Success })
	}
	d.MemFreeHost = func(p unsafe.Pointer) cu.Result {
		return g.Do("cuMemFreeHost", func(int) cu.Result { delete(g.pinned, p); return cu.Success })
	}
}

// lowestMemory is where memory of GPUs begins at the lowest: what is below stands for pinned memory of the host.
const lowestMemory = 1 << 20

func (g *GPUs) pointers(d *cu.Driver) {
	d.MemGetAddressRange = func(base *device.Ptr, bytes *uint64, p device.Ptr) cu.Result {
		return g.Do("cuMemGetAddressRange", func(int) cu.Result {
			m, ok := g.Find(p)
			if !ok {
				return cu.NotFound
			}
			*base, *bytes = m.Base, m.Bytes
			return cu.Success
		})
	}
	d.PointerGetAttribute = func(v unsafe.Pointer, a cu.PointerAttribute, p device.Ptr) cu.Result {
		return g.Do("cuPointerGetAttribute", func(int) cu.Result {
			m, ok := g.Find(p)
			switch {
			case p < lowestMemory:
				*(*cu.MemoryType)(v) = cu.MemoryHost
			case !ok:
				return cu.InvalidValue
			case a == cu.PointerMemoryType:
				*(*cu.MemoryType)(v) = cu.MemoryDevice
			case a == cu.PointerDeviceOrdinal:
				*(*int32)(v) = int32(m.GPU)
			default:
				return cu.InvalidValue
			}
			return cu.Success
		})
	}
}
