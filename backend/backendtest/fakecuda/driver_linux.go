package fakecuda

import (
	"fmt"
	"reflect"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/cuda"
)

// Driver is a new table over the GPUs, for the caller to add to. Their attributes are those of [Attribute], and each reaches all others.
// Required functions that this package does not have answer that they are not supported.
func (g *GPUs) Driver() *cuda.Driver {
	d := &cuda.Driver{Path: "fake"}
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
func notSupported(d *cuda.Driver) {
	v := reflect.ValueOf(d).Elem()
	for i := range v.NumField() {
		f := v.Field(i)
		if strings.HasSuffix(v.Type().Field(i).Tag.Get("cuda"), ",required") && f.IsNil() {
			f.Set(reflect.MakeFunc(f.Type(), func([]reflect.Value) []reflect.Value {
				return []reflect.Value{reflect.ValueOf(cuda.NotSupported)}
			}))
		}
	}
}

func (g *GPUs) devices(d *cuda.Driver) {
	d.Init = func(uint32) cuda.Result { return g.Do("cuInit", done) }
	d.DriverGetVersion = func(v *int32) cuda.Result { *v = 13000; return cuda.Success }
	d.DeviceGetCount = func(n *int32) cuda.Result { *n = int32(g.Count); return cuda.Success }
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
		*v = Attribute(a)
		return cuda.Success
	}
	d.DeviceTotalMem = func(n *uint64, _ cuda.DeviceOrdinal) cuda.Result { *n = TotalMemory; return cuda.Success }
	d.DeviceCanAccessPeer = func(can *int32, _, _ cuda.DeviceOrdinal) cuda.Result { *can = 1; return cuda.Success }
}

// done is a call that has nothing to do.
func done(int) cuda.Result { return cuda.Success }

// text writes s as C does into size bytes at p.
func text(p *byte, size int32, s string) cuda.Result {
	to := unsafe.Slice(p, size)
	to[copy(to[:size-1], s)] = 0
	return cuda.Success
}

// contexts: a primary context's handle is its GPU's ordinal and one.
func (g *GPUs) contexts(d *cuda.Driver) {
	d.PrimaryCtxRetain = func(c *cuda.ContextHandle, dev cuda.DeviceOrdinal) cuda.Result {
		return g.Do("cuDevicePrimaryCtxRetain", func(int) cuda.Result {
			g.Contexts[dev]++
			*c = cuda.ContextHandle(dev) + 1
			return cuda.Success
		})
	}
	d.PrimaryCtxRelease = func(dev cuda.DeviceOrdinal) cuda.Result {
		return g.Do("cuDevicePrimaryCtxRelease", func(int) cuda.Result { g.Contexts[dev]--; return cuda.Success })
	}
	d.CtxPushCurrent = func(c cuda.ContextHandle) cuda.Result {
		return g.Do("cuCtxPushCurrent", func(int) cuda.Result {
			g.stacks[unix.Gettid()] = append(g.stacks[unix.Gettid()], int(c)-1)
			return cuda.Success
		})
	}
	d.CtxPopCurrent = func(*cuda.ContextHandle) cuda.Result {
		return g.Do("cuCtxPopCurrent", func(int) cuda.Result {
			s := g.stacks[unix.Gettid()]
			g.stacks[unix.Gettid()] = s[:len(s)-1]
			return cuda.Success
		})
	}
}

func (g *GPUs) streams(d *cuda.Driver) {
	d.StreamCreate = func(s *cuda.StreamHandle, _ uint32) cuda.Result {
		return g.Do("cuStreamCreate", func(gpu int) cuda.Result {
			g.latest++
			*s = g.latest
			g.Streams[*s] = gpu
			return cuda.Success
		})
	}
	d.StreamDestroy = func(s cuda.StreamHandle) cuda.Result {
		return g.Do("cuStreamDestroy", func(int) cuda.Result { delete(g.Streams, s); return cuda.Success })
	}
	d.StreamQuery = func(cuda.StreamHandle) cuda.Result { return g.Do("cuStreamQuery", done) }
	d.EventCreate = func(e *cuda.EventHandle, _ uint32) cuda.Result { *e = 1; return cuda.Success }
	d.EventDestroy = func(cuda.EventHandle) cuda.Result { return cuda.Success }
	d.EventRecord = func(cuda.EventHandle, cuda.StreamHandle) cuda.Result { return cuda.Success }
	d.EventQuery = func(cuda.EventHandle) cuda.Result { return g.Do("cuEventQuery", done) }
}

func (g *GPUs) hostMemory(d *cuda.Driver) {
	d.MemHostAlloc = func(p *unsafe.Pointer, bytes uint64, _ uint32) cuda.Result {
		return g.Do("cuMemHostAlloc", func(int) cuda.Result {
			b := make([]byte, bytes)
			*p = unsafe.Pointer(&b[0])
			g.pinned[*p] = b
			return cuda.Success
		})
	}
	d.MemHostGetDevicePointer = func(dev *device.Ptr, p unsafe.Pointer, _ uint32) cuda.Result {
		return g.Do("cuMemHostGetDevicePointer", func(int) cuda.Result { *dev = device.Ptr(uintptr(p)); return cuda.Success })
	}
	d.MemFreeHost = func(p unsafe.Pointer) cuda.Result {
		return g.Do("cuMemFreeHost", func(int) cuda.Result { delete(g.pinned, p); return cuda.Success })
	}
}

// lowestMemory is where memory of GPUs begins at the lowest: what is below stands for pinned memory of the host.
const lowestMemory = 1 << 20

func (g *GPUs) pointers(d *cuda.Driver) {
	d.MemGetAddressRange = func(base *device.Ptr, bytes *uint64, p device.Ptr) cuda.Result {
		return g.Do("cuMemGetAddressRange", func(int) cuda.Result {
			m, ok := g.Find(p)
			if !ok {
				return cuda.NotFound
			}
			*base, *bytes = m.Base, m.Bytes
			return cuda.Success
		})
	}
	d.PointerGetAttribute = func(v unsafe.Pointer, a cuda.PointerAttribute, p device.Ptr) cuda.Result {
		return g.Do("cuPointerGetAttribute", func(int) cuda.Result {
			m, ok := g.Find(p)
			switch {
			case p < lowestMemory:
				*(*cuda.MemoryType)(v) = cuda.MemoryHost
			case !ok:
				return cuda.InvalidValue
			case a == cuda.PointerMemoryType:
				*(*cuda.MemoryType)(v) = cuda.MemoryDevice
			case a == cuda.PointerDeviceOrdinal:
				*(*int32)(v) = int32(m.GPU)
			default:
				return cuda.InvalidValue
			}
			return cuda.Success
		})
	}
}
