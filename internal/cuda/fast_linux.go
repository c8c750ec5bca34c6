//go:build amd64 || arm64

package cuda

import (
	"unsafe"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/dl"
)

// call is [dl.Call] for the functions of the driver that bindFast binds, none of which has more arguments.
//
//go:uintptrescapes
func call(fn uintptr, n int, a, b, c, d, e, f uintptr) Result {
	return Result(int32(dl.Call(fn, n, a, b, c, d, e, f, 0)))
}

// bindFast binds the functions that are called again and again with call, which is faster.
func bindFast(lib *dl.Library, d *Driver) {
	address := func(name string) uintptr {
		p, err := lib.Symbol(name)
		if err != nil {
			return 0 // a missing capability; the table's function stays nil
		}
		return p
	}
	if p := address("cuCtxPushCurrent_v2"); p != 0 {
		d.CtxPushCurrent = func(ctx ContextHandle) Result { return call(p, 1, uintptr(ctx), 0, 0, 0, 0, 0) }
	}
	if p := address("cuCtxPopCurrent_v2"); p != 0 {
		d.CtxPopCurrent = func(ctx *ContextHandle) Result {
			return call(p, 1, uintptr(unsafe.Pointer(ctx)), 0, 0, 0, 0, 0)
		}
	}
	if p := address("cuStreamQuery"); p != 0 {
		d.StreamQuery = func(s StreamHandle) Result { return call(p, 1, uintptr(s), 0, 0, 0, 0, 0) }
	}
	if p := address("cuStreamWaitEvent"); p != 0 {
		d.StreamWaitEvent = func(s StreamHandle, e EventHandle, flags uint32) Result {
			return call(p, 3, uintptr(s), uintptr(e), uintptr(flags), 0, 0, 0)
		}
	}
	if p := address("cuEventRecord"); p != 0 {
		d.EventRecord = func(e EventHandle, s StreamHandle) Result {
			return call(p, 2, uintptr(e), uintptr(s), 0, 0, 0, 0)
		}
	}
	if p := address("cuEventQuery"); p != 0 {
		d.EventQuery = func(e EventHandle) Result { return call(p, 1, uintptr(e), 0, 0, 0, 0, 0) }
	}
	if p := address("cuMemcpyDtoDAsync_v2"); p != 0 {
		d.MemcpyDtoDAsync = func(dst, src device.Ptr, bytes uint64, s StreamHandle) Result {
			return call(p, 4, uintptr(dst), uintptr(src), uintptr(bytes), uintptr(s), 0, 0)
		}
	}
	if p := address("cuMemcpyHtoDAsync_v2"); p != 0 {
		d.MemcpyHtoDAsync = func(dst device.Ptr, src unsafe.Pointer, bytes uint64, s StreamHandle) Result {
			return call(p, 4, uintptr(dst), uintptr(src), uintptr(bytes), uintptr(s), 0, 0)
		}
	}
	if p := address("cuMemcpyDtoHAsync_v2"); p != 0 {
		d.MemcpyDtoHAsync = func(dst unsafe.Pointer, src device.Ptr, bytes uint64, s StreamHandle) Result {
			return call(p, 4, uintptr(dst), uintptr(src), uintptr(bytes), uintptr(s), 0, 0)
		}
	}
	if p := address("cuMemsetD8Async"); p != 0 {
		d.MemsetD8Async = func(q device.Ptr, value uint8, count uint64, s StreamHandle) Result {
			return call(p, 4, uintptr(q), uintptr(value), uintptr(count), uintptr(s), 0, 0)
		}
	}
	if p := address("cuStreamWriteValue32_v2"); p != 0 {
		d.StreamWriteValue32 = func(s StreamHandle, q device.Ptr, value, flags uint32) Result {
			return call(p, 4, uintptr(s), uintptr(q), uintptr(value), uintptr(flags), 0, 0)
		}
	}
	if p := address("cuStreamBatchMemOp_v2"); p != 0 {
		d.StreamBatchMemOp = func(s StreamHandle, count uint32, ops *BatchMemOp, flags uint32) Result {
			return call(p, 4, uintptr(s), uintptr(count), uintptr(unsafe.Pointer(ops)), uintptr(flags), 0, 0)
		}
	}
	if p := address("cuLaunchHostFunc"); p != 0 {
		d.LaunchHostFunc = func(s StreamHandle, fn, data uintptr) Result {
			return call(p, 3, uintptr(s), fn, data, 0, 0, 0)
		}
	}
	if p := address("cuLaunchKernelEx"); p != 0 {
		d.LaunchKernelEx = func(config *LaunchConfig, f FunctionHandle, params, extra *unsafe.Pointer) Result {
			return call(p, 4, uintptr(unsafe.Pointer(config)), uintptr(f), uintptr(unsafe.Pointer(params)),
				uintptr(unsafe.Pointer(extra)), 0, 0)
		}
	}
	if p := address("cuGraphLaunch"); p != 0 {
		d.GraphLaunch = func(exec GraphExecHandle, s StreamHandle) Result {
			return call(p, 2, uintptr(exec), uintptr(s), 0, 0, 0, 0)
		}
	}
}
