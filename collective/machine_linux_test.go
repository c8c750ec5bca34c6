package collective_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest/fakecuda"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/cuda"
	"github.com/symmem/symmem/group"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/kernels/ptx"
	_ "github.com/symmem/symmem/kernels/ptx/images" // this module's own kernels, which are loaded for signals and never run here
)

// machine is a host with a pretended GPU for each rank. Their memory is this process's, so that an address of theirs is one of ours, and a
// kernel is a Go function.
type machine struct {
	*fakecuda.GPUs
	resident int               // blocks that a multiprocessor runs at the same time
	kernels  map[string]fake   // by name
	launched []cu.LaunchConfig // the latest launch, by GPU; Mu guards it, and what follows
	busy     bool              // no stream is idle
	late     bool              // no event has come
	copies   int               // to the host
	memory   map[device.Ptr][]byte
}

// fake is a kernel: the sizes of its parameters, and what it does with them.
type fake struct {
	sizes []int
	run   func(grid cu.LaunchConfig, params []unsafe.Pointer)
}

const (
	processors = 32 // of each GPU
	image      = ".version 8.0"
)

func newMachine(gpus int, kernels map[string]fake) *machine {
	m := &machine{GPUs: fakecuda.New(gpus), resident: 2, kernels: kernels, launched: make([]cu.LaunchConfig, gpus), memory: map[device.Ptr][]byte{}}
	own := []int{int(unsafe.Sizeof(ptx.Params{}))}
	m.Params = func(name string) []int {
		if k, ok := m.kernels[name]; ok {
			return k.sizes
		}
		return own
	}
	m.Kernel = func(gpu int, name string, params []unsafe.Pointer) {
		m.Mu.Lock()
		c := m.launched[gpu]
		m.Mu.Unlock()
		m.kernels[name].run(c, params)
	}
	m.Find = func(p device.Ptr) (fakecuda.Memory, bool) {
		b := m.memory[p]
		return fakecuda.Memory{Base: p, Bytes: uint64(len(b))}, b != nil
	}
	m.Call = func(name string, _ int) cu.Result {
		if m.busy && name == "cuStreamQuery" || m.late && name == "cuEventQuery" {
			return cu.NotReady
		}
		return cu.Success
	}
	return m
}

// at is the pointer that an address of a GPU is.
func at(p device.Ptr) unsafe.Pointer { return *(*unsafe.Pointer)(unsafe.Pointer(&p)) }

func bytesAt(p device.Ptr, n uint64) []byte { return unsafe.Slice((*byte)(at(p)), n) }

func (m *machine) driver() *cu.Driver {
	d := m.GPUs.Driver()
	d.DeviceGetAttribute = func(v *int32, a cu.DeviceAttribute, _ cu.DeviceOrdinal) cu.Result {
		switch *v = fakecuda.Attribute(a); a {
		case cu.AttrMultiprocessors:
			*v = processors
		case cu.AttrComputeCapabilityMajor:
			*v = 9
		}
		return cu.Success
	}
	d.ModuleGetFunction = func(get func(*cu.FunctionHandle, cu.ModuleHandle, string) cu.Result) func(*cu.FunctionHandle, cu.ModuleHandle, string) cu.Result {
		return func(f *cu.FunctionHandle, h cu.ModuleHandle, name string) cu.Result {
			if _, ok := m.kernels[name]; !ok && !strings.HasPrefix(name, "symmem_") {
				return cu.NotFound
			}
			return get(f, h, name)
		}
	}(d.ModuleGetFunction)
	d.OccupancyMaxActiveBlocks = func(n *int32, _ cu.FunctionHandle, threads int32, shared uint64) cu.Result {
		*n = int32(m.resident)
		return cu.Success
	}
	d.StreamWaitEvent = func(cu.StreamHandle, cu.EventHandle, uint32) cu.Result { return cu.Success } // all work ends at once
	launch := d.LaunchKernelEx
	d.LaunchKernelEx = func(c *cu.LaunchConfig, f cu.FunctionHandle, params, extra *unsafe.Pointer) cu.Result {
		m.Mu.Lock()
		m.launched[m.Streams[c.Stream]] = *c
		m.Mu.Unlock()
		return launch(c, f, params, extra)
	}
	d.MemAlloc = func(p *device.Ptr, bytes uint64) cu.Result {
		return m.Do("cuMemAlloc", func(int) cu.Result {
			b := make([]byte, bytes+256)
			for i := range b {
				b[i] = 0xa5
			}
			*p = (device.Ptr(uintptr(unsafe.Pointer(&b[0]))) + 255) &^ 255
			m.memory[*p] = b
			return cu.Success
		})
	}
	d.MemFree = func(p device.Ptr) cu.Result {
		return m.Do("cuMemFree", func(int) cu.Result {
			if m.memory[p] == nil {
				return m.Violation("cuMemFree of %s", p)
			}
			delete(m.memory, p)
			return cu.Success
		})
	}
	d.MemcpyHtoDAsync = func(dst device.Ptr, src unsafe.Pointer, n uint64, _ cu.StreamHandle) cu.Result {
		copy(bytesAt(dst, n), unsafe.Slice((*byte)(src), n))
		return cu.Success
	}
	d.MemcpyDtoHAsync = func(dst unsafe.Pointer, src device.Ptr, n uint64, _ cu.StreamHandle) cu.Result {
		m.Mu.Lock()
		m.copies++
		m.Mu.Unlock()
		copy(unsafe.Slice((*byte)(dst), n), bytesAt(src, n))
		return cu.Success
	}
	d.MemcpyDtoDAsync = func(dst, src device.Ptr, n uint64, _ cu.StreamHandle) cu.Result {
		copy(bytesAt(dst, n), bytesAt(src, n))
		return cu.Success
	}
	d.MemsetD8Async = func(p device.Ptr, v uint8, n uint64, _ cu.StreamHandle) cu.Result {
		b := bytesAt(p, n)
		for i := range b {
			b[i] = v
		}
		return cu.Success
	}
	return d
}

// open is the opener of the machine's ranks.
func (m *machine) open(g *group.Group, near backend.Backend) (backend.Backend, error) {
	d, err := cuda.Open(&cuda.Options{Driver: m.driver(), LocalRank: g.Rank() % m.Count})
	return &gpuBackend{near, d}, err
}

// left says what a machine whose ranks have gone still has.
func (m *machine) left() []string {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	return m.Left(map[string]int{"pieces of memory": len(m.memory)})
}

// gpuBackend is the host backend over a pretended GPU.
type gpuBackend struct {
	backend.Backend
	device *cuda.Device
}

func (b *gpuBackend) Device() device.Device { return b.device }

func (b *gpuBackend) Close(ctx context.Context) error {
	return errors.Join(b.device.Close(), b.Backend.Close(ctx))
}

// comm is a symmem::Comm as a kernel's block 0 uses it: what symmem.cuh does, for pretended kernels.
type comm struct {
	*ptx.Comm
	blocks int
}

func commAt(p unsafe.Pointer, c cu.LaunchConfig) comm { return comm{(*ptx.Comm)(p), int(c.Grid[0])} }

// workspace is where rank's begins.
func (c comm) workspace(rank int) device.Ptr {
	if c.World > ptx.Inline {
		return device.Ptr(*(*uint64)(at(device.Ptr(c.Table).Add(int64(8 * rank)))))
	}
	return device.Ptr(c.Workspace[rank])
}

// data is where the Spec's workspace begins.
func (c comm) data(rank int) device.Ptr {
	return c.workspace(rank).Add(ptx.ControlBytes(c.blocks, int(c.World)))
}

// count begins a run: it counts it in every block's record, and gives its epoch.
func (c comm) count() uint32 {
	record := ptx.ControlBytes(1, int(c.World))
	var epoch uint32
	for b := range c.blocks {
		epoch = (*atomic.Uint32)(at(c.workspace(int(c.Rank)).Add(int64(b) * record))).Add(1)
	}
	return epoch
}

// barrier tells every rank's first block that this one is in a run, and waits for all.
func (c comm) barrier(epoch uint32) error {
	flag := func(owner, writer int) *atomic.Uint32 {
		return (*atomic.Uint32)(at(c.workspace(owner).Add(32 + 4*int64(writer))))
	}
	for r := range int(c.World) {
		flag(r, int(c.Rank)).Store(epoch)
	}
	end := time.Now().Add(time.Duration(c.Timeout))
	for r := range int(c.World) {
		for int32(flag(int(c.Rank), r).Load()-epoch) < 0 {
			if time.Now().After(end) {
				c.fail(ptx.FaultTimeout, r)
				return fmt.Errorf("rank %d does not come", r)
			}
			time.Sleep(20 * time.Microsecond)
		}
	}
	return nil
}

// fail gives up because of a peer.
func (c comm) fail(why uint64, peer int) {
	(*atomic.Uint32)(at(device.Ptr(c.Dead))).Store(1)
	(*atomic.Uint64)(at(device.Ptr(c.Fault))).CompareAndSwap(0, why<<56|uint64(ptx.FaultUser)<<48|uint64(peer)<<32)
}
