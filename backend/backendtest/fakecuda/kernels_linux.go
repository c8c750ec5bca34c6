package fakecuda

import (
	"unsafe"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/cuda"
)

// Attribute is what each GPU says of an attribute: of the size of launches what real ones say, and else 1.
func Attribute(a cuda.DeviceAttribute) int32 {
	switch a {
	case cuda.AttrMaxThreadsPerBlock, cuda.AttrMaxBlockDimX, cuda.AttrMaxBlockDimY:
		return 1024
	case cuda.AttrMaxBlockDimZ:
		return 64
	case cuda.AttrMaxGridDimX, cuda.AttrMaxGridDimY, cuda.AttrMaxGridDimZ:
		return 65535
	case cuda.AttrMaxSharedPerBlock, cuda.AttrMaxSharedPerBlockOptin:
		return 48 << 10
	}
	return 1
}

// kernels: every module has whatever function it is asked for.
func (g *GPUs) kernels(d *cuda.Driver) {
	d.ModuleLoadDataEx = func(m *cuda.ModuleHandle, _ unsafe.Pointer, _ uint32, _ *cuda.JITOption, _ *uintptr) cuda.Result {
		return g.Do("cuModuleLoadDataEx", func(int) cuda.Result {
			g.Modules++
			*m = cuda.ModuleHandle(g.Modules)
			return cuda.Success
		})
	}
	d.ModuleUnload = func(cuda.ModuleHandle) cuda.Result {
		return g.Do("cuModuleUnload", func(int) cuda.Result { g.Modules--; return cuda.Success })
	}
	d.ModuleGetFunction = func(f *cuda.FunctionHandle, _ cuda.ModuleHandle, name string) cuda.Result {
		return g.Do("cuModuleGetFunction", func(int) cuda.Result {
			g.functions = append(g.functions, name)
			*f = cuda.FunctionHandle(len(g.functions))
			return cuda.Success
		})
	}
	d.FuncLoad = func(cuda.FunctionHandle) cuda.Result { return g.Do("cuFuncLoad", done) }
	d.FuncGetAttribute = func(v *int32, a cuda.FuncAttribute, _ cuda.FunctionHandle) cuda.Result {
		return g.Do("cuFuncGetAttribute", func(int) cuda.Result {
			if *v = 0; a == cuda.FuncMaxThreadsPerBlock {
				*v = 1024
			}
			return cuda.Success
		})
	}
	d.FuncSetAttribute = func(f cuda.FunctionHandle, a cuda.FuncAttribute, value int32) cuda.Result {
		return g.Do("cuFuncSetAttribute", func(int) cuda.Result {
			if a == cuda.FuncSharedCarveout && value == 100 {
				g.Sharing = append(g.Sharing, g.functions[f-1])
			}
			return cuda.Success
		})
	}
	d.LaunchKernelEx = func(c *cuda.LaunchConfig, f cuda.FunctionHandle, params, _ *unsafe.Pointer) cuda.Result {
		var name string
		var gpu int
		r := g.Do("cuLaunchKernelEx", func(int) cuda.Result {
			if g.Kernel == nil {
				return cuda.NotSupported
			}
			name, gpu = g.functions[f-1], g.Streams[c.Stream]
			return cuda.Success
		})
		if r == cuda.Success {
			g.Kernel(gpu, name, *params)
		}
		return r
	}
}

// Pinned gives the bytes from p on of memory of the host that the driver gave, or nil. Mu is held.
func (g *GPUs) Pinned(p device.Ptr) []byte {
	for base, b := range g.pinned {
		if at := device.Ptr(uintptr(base)); p >= at && p < at.Add(int64(len(b))) {
			return b[p-at:]
		}
	}
	return nil
}
