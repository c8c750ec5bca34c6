package fakecuda

import (
	"unsafe"

	"github.com/symmem/symmem/device"
	cu "github.com/symmem/symmem/internal/cuda"
)

// Attribute returns what each GPU says of an attribute: of the size of launches what real ones say, and else 1.
func Attribute(a cu.DeviceAttribute) int32 {
	switch a {
	case cu.AttrMaxThreadsPerBlock, cu.AttrMaxBlockDimX, cu.AttrMaxBlockDimY:
		return 1024
	case cu.AttrMaxBlockDimZ:
		return 64
	case cu.AttrMaxGridDimX, cu.AttrMaxGridDimY, cu.AttrMaxGridDimZ:
		return 65535
	case cu.AttrMaxSharedPerBlock, cu.AttrMaxSharedPerBlockOptin:
		return 48 << 10
	}
	return 1
}

// Clustered is a function whose blocks come in clusters of 4.
const Clustered = "clustered"

// kernels: every module has whatever function it is asked for.
func (g *GPUs) kernels(d *cu.Driver) {
	d.ModuleLoadDataEx = func(m *cu.ModuleHandle, _ unsafe.Pointer, _ uint32, _ *cu.JITOption, _ *uintptr) cu.Result {
		return g.Do("cuModuleLoadDataEx", func(int) cu.Result {
			g.Modules++
			*m = cu.ModuleHandle(g.Modules)
			return cu.Success
		})
	}
	d.ModuleUnload = func(cu.ModuleHandle) cu.Result {
		return g.Do("cuModuleUnload", func(int) cu.Result { g.Modules--; return cu.Success })
	}
	d.ModuleGetFunction = func(f *cu.FunctionHandle, _ cu.ModuleHandle, name string) cu.Result {
		return g.Do("cuModuleGetFunction", func(int) cu.Result {
			g.functions = append(g.functions, name)
			*f = cu.FunctionHandle(len(g.functions))
			return cu.Success
		})
	}
	d.FuncLoad = func(cu.FunctionHandle) cu.Result { return g.Do("cuFuncLoad", done) }
	d.FuncGetAttribute = func(v *int32, a cu.FuncAttribute, f cu.FunctionHandle) cu.Result {
		return g.Do("cuFuncGetAttribute", func(int) cu.Result {
			switch *v = 0; {
			case a == cu.FuncMaxThreadsPerBlock:
				*v = 1024
			case a == cu.FuncClusterWidth && g.functions[f-1] == Clustered:
				*v = 4
			}
			return cu.Success
		})
	}
	d.FuncSetAttribute = func(f cu.FunctionHandle, a cu.FuncAttribute, value int32) cu.Result {
		return g.Do("cuFuncSetAttribute", func(int) cu.Result {
			if a == cu.FuncSharedCarveout && value == 100 {
				g.Sharing = append(g.Sharing, g.functions[f-1])
			}
			return cu.Success
		})
	}
	if g.Params != nil {
		d.FuncGetParamInfo = func(f cu.FunctionHandle, index uint64, _, size *uint64) cu.Result {
			return g.Do("cuFuncGetParamInfo", func(int) cu.Result {
				sizes := g.Params(g.functions[f-1])
				if index >= uint64(len(sizes)) {
					return cu.InvalidValue
				}
				*size = uint64(sizes[index])
				return cu.Success
			})
		}
	}
	d.LaunchKernelEx = func(c *cu.LaunchConfig, f cu.FunctionHandle, params, _ *unsafe.Pointer) cu.Result {
		var name string
		var gpu int
		count := 1
		r := g.Do("cuLaunchKernelEx", func(int) cu.Result {
			if g.Kernel == nil {
				return cu.NotSupported
			}
			name, gpu = g.functions[f-1], g.Streams[c.Stream]
			if g.Params != nil {
				count = len(g.Params(name))
			}
			if count > 0 && params == nil {
				return cu.InvalidValue
			}
			return cu.Success
		})
		if r == cu.Success {
			g.Kernel(gpu, name, unsafe.Slice(params, count))
		}
		return r
	}
}

// Pinned returns the bytes from p on of memory of the host that the driver gave, or nil. Mu is held.
func (g *GPUs) Pinned(p device.Ptr) []byte {
	for base, b := range g.pinned {
		if at := device.Ptr(uintptr(base)); p >= at && p < at.Add(int64(len(b))) {
			return b[p-at:]
		}
	}
	return nil
}
