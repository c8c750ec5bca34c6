package simcuda

import (
	"crypto/sha256"
	"debug/elf"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"unsafe"

	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/ptxvm"
)

// module is an image that was loaded into a context.
type module struct {
	gpu       *gpu
	ptx       *ptxvm.Module
	functions []cu.FunctionHandle
	loaded    map[*ptxvm.Function]bool
}

// function is a kernel of a module.
type function struct {
	module  *module
	f       *ptxvm.Function
	dynamic int32 // bytes of shared memory that a block may have besides
}

// parsed are images, by their hash: a driver keeps what it has compiled, too.
var parsed sync.Map

type parsing struct {
	sync.Once
	module *ptxvm.Module
	target int
	err    error
}

var target = regexp.MustCompile(`(?m)^\.target\s+sm_(\d+)`)

func parse(image string) *parsing {
	found, _ := parsed.LoadOrStore(sha256.Sum256([]byte(image)), &parsing{})
	p := found.(*parsing)
	p.Do(func() {
		if t := target.FindStringSubmatch(image); t != nil {
			p.target, _ = strconv.Atoi(t[1])
		}
		p.module, p.err = ptxvm.Parse("module.ptx", []byte(image))
	})
	return p
}

// mostImage bounds the search for the end of an image.
const mostImage = 64 << 20

func (m *Machine) moduleCalls(d *cu.Driver) {
	d.ModuleLoadDataEx = func(h *cu.ModuleHandle, image unsafe.Pointer, count uint32, options *cu.JITOption, values *uintptr) cu.Result {
		say := func(r cu.Result, format string, args ...any) cu.Result {
			var log *byte
			var size int32
			for i, o := range unsafe.Slice(options, count) {
				switch v := unsafe.Slice(values, count)[i]; o {
				case cu.JITErrorLogBuffer:
					log = *(**byte)(unsafe.Pointer(&unsafe.Slice(values, count)[i]))
				case cu.JITErrorLogBufferSize:
					size = int32(v)
				}
			}
			if log != nil {
				text(log, size, fmt.Sprintf(format, args...))
			}
			return r
		}
		if cu.GoString((*byte)(image), 4) == elf.ELFMAG || *(*uint32)(image) == 0xba55ed50 {
			return say(cu.InvalidImage, "simulated GPUs run PTX, not compiled code")
		}
		p := parse(cu.GoString((*byte)(image), mostImage))
		return m.on(func(g *gpu) cu.Result {
			switch {
			case p.err != nil:
				return say(cu.InvalidPTX, "%v", p.err)
			case p.target > g.Capability: // CUDA C++ programming guide, PTX compatibility
				return say(cu.NoBinaryForGPU, "the image is for compute capability %d, and the GPU has %d", p.target, g.Capability)
			}
			// CUDA C++ programming guide, lazy loading: "loading a kernel may require context synchronization".
			m.drain(g)
			*h = cu.ModuleHandle(m.number())
			m.modules[*h] = &module{gpu: g, ptx: p.module, loaded: map[*ptxvm.Function]bool{}}
			return cu.Success
		})
	}
	d.ModuleUnload = func(h cu.ModuleHandle) cu.Result {
		return m.on(func(g *gpu) cu.Result {
			m.drain(g)
			x := m.modules[h]
			if x == nil || x.gpu != g {
				return m.violation(cu.InvalidHandle, "cuModuleUnload of no module of the context")
			}
			delete(m.modules, h)
			for _, f := range x.functions {
				delete(m.functions, f)
			}
			return cu.Success
		})
	}
	d.ModuleGetFunction = func(h *cu.FunctionHandle, of cu.ModuleHandle, name string) cu.Result {
		return m.on(func(*gpu) cu.Result {
			x := m.modules[of]
			if x == nil {
				return m.violation(cu.InvalidHandle, "cuModuleGetFunction of no module")
			}
			f := x.ptx.Function(strings.TrimRight(name, "\x00"))
			if f == nil {
				return cu.NotFound
			}
			*h = cu.FunctionHandle(m.number())
			m.functions[*h] = &function{module: x, f: f}
			x.functions = append(x.functions, *h)
			return cu.Success
		})
	}
	kernel := func(call string, h cu.FunctionHandle, do func(f *function) cu.Result) cu.Result {
		return m.do(func() cu.Result {
			f := m.functions[h]
			if f == nil {
				return m.violation(cu.InvalidHandle, "%s of no function", call)
			}
			if r := f.module.gpu.result(); r != cu.Success {
				return r
			}
			return do(f)
		})
	}
	d.FuncLoad = func(h cu.FunctionHandle) cu.Result {
		return kernel("cuFuncLoad", h, func(f *function) cu.Result {
			if !f.module.loaded[f.f] { // lazy loading, as above
				f.module.loaded[f.f] = true
				m.drain(f.module.gpu)
			}
			return cu.Success
		})
	}
	d.FuncGetAttribute = func(v *int32, a cu.FuncAttribute, h cu.FunctionHandle) cu.Result {
		return kernel("cuFuncGetAttribute", h, func(f *function) cu.Result {
			switch a {
			case cu.FuncMaxThreadsPerBlock:
				if *v = 1024; f.f.MaxThreads > 0 {
					*v = int32(f.f.MaxThreads)
				}
			case cu.FuncSharedBytes:
				*v = int32(f.module.ptx.Shared())
			case cu.FuncClusterWidth:
				if *v = 0; f.f.Cluster > 1 {
					*v = int32(f.f.Cluster)
				}
			case cu.FuncClusterHeight, cu.FuncClusterDepth:
				if *v = 0; f.f.Cluster > 1 {
					*v = 1
				}
			case cu.FuncMaxDynamicSharedBytes:
				*v = max(f.dynamic, 48<<10-int32(f.module.ptx.Shared()))
			default:
				return cu.InvalidValue
			}
			return cu.Success
		})
	}
	d.FuncSetAttribute = func(h cu.FunctionHandle, a cu.FuncAttribute, v int32) cu.Result {
		return kernel("cuFuncSetAttribute", h, func(f *function) cu.Result {
			switch {
			case a == cu.FuncMaxDynamicSharedBytes && v >= 0 && int(v)+f.module.ptx.Shared() <= mostBlockBytes:
				f.dynamic = v
			case a == cu.FuncSharedCarveout && v >= -1 && v <= 100:
			default:
				return cu.InvalidValue
			}
			return cu.Success
		})
	}
	d.FuncGetParamInfo = func(h cu.FunctionHandle, index uint64, offset, bytes *uint64) cu.Result {
		return kernel("cuFuncGetParamInfo", h, func(f *function) cu.Result {
			if index >= uint64(len(f.f.Params)) {
				return cu.InvalidValue
			}
			at := uint64(0)
			for i, p := range f.f.Params[:index+1] {
				align := uint64(max(p.Align, 1))
				at = (at + align - 1) / align * align
				if uint64(i) < index {
					at += uint64(p.Size)
				}
			}
			*offset, *bytes = at, uint64(f.f.Params[index].Size)
			return cu.Success
		})
	}
	d.OccupancyMaxActiveBlocks = func(blocks *int32, h cu.FunctionHandle, threads int32, shared uint64) cu.Result {
		return kernel("cuOccupancyMaxActiveBlocksPerMultiprocessor", h, func(f *function) cu.Result {
			if threads < 1 {
				return cu.InvalidValue
			}
			*blocks = f.resident(threads, shared)
			return cu.Success
		})
	}
	d.OccupancyMaxActiveClusters = func(clusters *int32, h cu.FunctionHandle, c *cu.LaunchConfig) cu.Result {
		return kernel("cuOccupancyMaxActiveClusters", h, func(f *function) cu.Result {
			n := int32(max(f.f.Cluster, 1))
			attrs := unsafe.Slice(c.Attrs, c.NumAttrs)
			if len(attrs) != 1 || attrs[0].ID != cu.LaunchClusterDimension || attrs[0].Value[0] != uint32(n) || attrs[0].Value[1] != 1 || attrs[0].Value[2] != 1 || c.Grid[0]%uint32(n) != 0 {
				return m.violation(cu.InvalidValue, "cuOccupancyMaxActiveClusters of clusters that the kernel was not compiled for")
			}
			*clusters = f.resident(int32(c.Block[0]*c.Block[1]*c.Block[2]), uint64(c.SharedBytes)) * int32(f.module.gpu.Multiprocessors) / n
			return cu.Success
		})
	}
	d.LaunchKernelEx = m.launch
}

// resident is how many blocks of so many threads, each with so many bytes of dynamic shared memory, a multiprocessor runs at a time.
func (f *function) resident(threads int32, shared uint64) int32 {
	if threads > 1024 || f.f.MaxThreads > 0 && int(threads) > f.f.MaxThreads {
		return 0
	}
	warps := (threads + 31) / 32
	return min(mostThreads/32/warps, mostRegisters/registers/32/warps, mostBlocks, int32(mostShared/(uint64(f.module.ptx.Shared())+shared+1<<10)))
}

// portableCluster is how many blocks a cluster may have if the function has not the attribute for more, which nobody sets here. CUDA C++ programming guide, thread block clusters.
const portableCluster = 8

// launch is cuLaunchKernelEx. The parameters are copied before it returns.
func (m *Machine) launch(c *cu.LaunchConfig, h cu.FunctionHandle, params, extra *unsafe.Pointer) cu.Result {
	return m.enqueue(c.Stream, func(s *stream) (*op, cu.Result) {
		f := m.functions[h]
		switch {
		case f == nil:
			return nil, m.violation(cu.InvalidHandle, "cuLaunchKernelEx of no function")
		case f.module.gpu != s.gpu:
			return nil, m.violation(cu.InvalidContext, "cuLaunchKernelEx of a function of GPU %d on a stream of GPU %d", f.module.gpu.ordinal, s.gpu.ordinal)
		case extra != nil || len(f.f.Params) > 0 && params == nil:
			return nil, cu.InvalidValue
		}
		threads, blocks := uint64(1), uint64(1)
		for i := range 3 {
			if c.Grid[i] == 0 || c.Block[i] == 0 {
				return nil, m.violation(cu.InvalidValue, "cuLaunchKernelEx of %v blocks of %v threads", c.Grid, c.Block)
			}
			threads, blocks = threads*uint64(c.Block[i]), blocks*uint64(c.Grid[i])
		}
		if threads > 1024 || f.f.MaxThreads > 0 && threads > uint64(f.f.MaxThreads) || blocks > 1<<20 {
			return nil, m.violation(cu.InvalidValue, "cuLaunchKernelEx of %d blocks of %d threads", blocks, threads)
		}
		if most := max(int(f.dynamic), 48<<10-f.module.ptx.Shared()); int(c.SharedBytes) > most {
			return nil, m.violation(cu.InvalidValue, "cuLaunchKernelEx with %d bytes of shared memory, of %d", c.SharedBytes, most)
		}
		if n := f.f.Cluster; n > 1 {
			fit := int(f.resident(int32(threads), uint64(c.SharedBytes)))
			switch {
			case int(c.Grid[0])%n != 0:
				return nil, m.violation(cu.InvalidValue, "cuLaunchKernelEx of %v blocks in clusters of %d", c.Grid, n)
			case n > portableCluster:
				return nil, m.violation(cu.InvalidValue, "cuLaunchKernelEx in clusters of %d blocks, of at most %d", n, portableCluster)
			case n > fit*s.gpu.Multiprocessors:
				return nil, m.violation(cu.InvalidValue, "cuLaunchKernelEx in clusters of %d blocks of %d threads, for which GPU %d has no room", n, threads, s.gpu.ordinal)
			}
		}
		l := &ptxvm.Launch{Function: f.f, Grid: c.Grid, Block: c.Block}
		for i, p := range f.f.Params {
			at := unsafe.Slice(params, len(f.f.Params))[i]
			l.Params = append(l.Params, append([]byte(nil), unsafe.Slice((*byte)(at), p.Size)...))
		}
		for _, a := range unsafe.Slice(c.Attrs, c.NumAttrs) {
			switch {
			case a.ID != cu.LaunchProgrammaticStreamSerialization:
				return nil, cu.NotSupported
			case s.gpu.Capability < 90: // CUDA C++ programming guide, programmatic dependent launch
				return nil, m.violation(cu.InvalidValue, "programmatic stream serialization on compute capability %d", s.gpu.Capability)
			}
			l.Overlap = a.Value[0] != 0
		}
		return &op{kind: opKernel, launch: l}, cu.Success
	})
}
