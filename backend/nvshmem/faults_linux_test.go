package nvshmem

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/backend/backendtest/fakecuda"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/cuda"
	"github.com/symmem/symmem/group"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/dl"
	"github.com/symmem/symmem/internal/nvshmem"
)

// What a call of NVSHMEM may fail with: a status, no address, or, where it returns nothing, no way.
var (
	statuses = []backendtest.Code{
		{Name: "NVSHMEMX_ERROR_INTERNAL", Value: 7}, {Name: "NVSHMEMX_ERROR_OUT_OF_MEMORY", Value: 2}, {Name: "NVSHMEMX_ERROR_INVALID_VALUE", Value: 1},
	}
	noAddress = []backendtest.Code{{Name: "NULL"}}
)

// faultyLib lets calls go wrong. What takes all PEs takes the one on which it fails as well: one that did not come would be one that hangs.
type faultyLib struct {
	library
	calls *backendtest.Calls
}

// failure is the error of a call that is to fail.
func (l *faultyLib) failure(call string) error {
	if code, refused := l.calls.Enter(call, statuses...); refused {
		return &dl.Error{Library: "NVSHMEM", Call: call, Code: code.Value, Name: code.Name}
	}
	return nil
}

// first is the error of the two that counts.
func first(a, b error) error {
	if a != nil {
		return a
	}
	return b
}

// nothing reports whether a call is to give no address.
func (l *faultyLib) nothing(call string) bool {
	_, refused := l.calls.Enter(call, noAddress...)
	return refused
}

func (l *faultyLib) NewUniqueID() (*nvshmem.UniqueID, error) {
	if err := l.failure("nvshmemx_get_uniqueid"); err != nil {
		return nil, err
	}
	return l.library.NewUniqueID()
}

func (l *faultyLib) Start(pes, pe int, id *nvshmem.UniqueID) error {
	err := l.failure("nvshmemx_hostlib_init_attr")
	return first(err, l.library.Start(pes, pe, id))
}

func (l *faultyLib) Finalize() error {
	l.calls.Enter("nvshmemx_hostlib_finalize")
	return l.library.Finalize()
}

func (l *faultyLib) Align(alignment, bytes int64) (uint64, error) {
	none := l.nothing("nvshmem_align")
	p, err := l.library.Align(alignment, bytes)
	if none {
		p = 0
	}
	return p, err
}

func (l *faultyLib) Ptr(p uint64, pe int) (uint64, error) {
	if l.nothing("nvshmem_ptr") {
		return 0, nil
	}
	return l.library.Ptr(p, pe)
}

func (l *faultyLib) Register(p uint64, bytes int64) (uint64, error) {
	none := l.nothing("nvshmemx_buffer_register_symmetric")
	alias, err := l.library.Register(p, bytes)
	if none {
		alias = 0
	}
	return alias, err
}

func (l *faultyLib) Unregister(alias uint64, bytes int64) error {
	err := l.failure("nvshmemx_buffer_unregister_symmetric")
	return first(err, l.library.Unregister(alias, bytes))
}

func (l *faultyLib) NewTeam() (nvshmem.Team, error) {
	err := l.failure("nvshmem_team_split_strided")
	team, other := l.library.NewTeam()
	return team, first(err, other)
}

func (l *faultyLib) Barrier(team nvshmem.Team, stream uintptr) error {
	err := l.failure("nvshmemx_barrier_on_stream")
	return first(err, l.library.Barrier(team, stream))
}

func (l *faultyLib) Collective(what, dtype, op string) (nvshmem.Collective, error) {
	collective, err := l.library.Collective(what, dtype, op)
	if err != nil {
		return nil, err
	}
	return func(team nvshmem.Team, dst, src uint64, count int64, root int, stream uintptr) error {
		err := l.failure(fmt.Sprintf("nvshmemx_%s_%s_%s_on_stream", map[string]string{"f32": "float"}[dtype], op, what))
		return first(err, collective(team, dst, src, count, root, stream))
	}, nil
}

func (l *faultyLib) MulticastPtr(p uint64) (uint64, error) {
	if l.nothing("nvshmemx_mc_ptr") {
		return 0, nil
	}
	return l.library.MulticastPtr(p)
}

// complete gives the machine's driver what else there is to do with memory: copies, graphs, and kernels that do nothing.
func (m *machine) complete() (*cu.Driver, func() int) {
	d := m.driver()
	d.MemcpyDtoDAsync = func(dst, src device.Ptr, n uint64, s cu.StreamHandle) cu.Result {
		return m.Do("cuMemcpyDtoDAsync", func(int) cu.Result {
			copy(m.at(m.Streams[s], dst, n), m.at(m.Streams[s], src, n))
			return cu.Success
		})
	}
	one, all := d.DeviceGetAttribute, m.GPUs.Driver().DeviceGetAttribute
	d.DeviceGetAttribute = func(v *int32, a cu.DeviceAttribute, dev cu.DeviceOrdinal) cu.Result {
		if r := all(v, a, dev); r != cu.Success || *v != 0 && a != cu.AttrComputeCapabilityMajor { // which says how large blocks can be
			return r
		}
		return one(v, a, dev)
	}
	return d, m.Recordings(d)
}

// spent reports whether the library is given up in a process of the machine.
func (m *machine) spent() bool {
	for _, h := range m.homes {
		if h.usable() != nil {
			return true
		}
	}
	return false
}

// processes are those of the ranks: where the library was given up in one, or a rank is lost, the next attempt is that of new ones, as the errors say.
type processes struct {
	mu       sync.Mutex
	machines []*machine
	graphs   [][]func() int
	opened   int
}

// machine returns where the next rank of so many opens the backend.
func (p *processes) machine(ranks int) *machine {
	p.mu.Lock()
	defer p.mu.Unlock()
	last := len(p.machines) - 1
	if p.opened++; p.opened == 1 || p.opened == p.machines[0].pes+1 && (p.machines[last].spent() || p.machines[last].pes != ranks) {
		m := newMachine(ranks)
		m.job.multi, m.job.limit = true, 64<<20
		m.Kernel = func(int, string, []unsafe.Pointer) {} // before any driver of the machine is in use
		p.machines, p.graphs, last = append(p.machines, m), append(p.graphs, nil), last+1
	}
	return p.machines[last]
}

// driver returns a driver of a machine.
func (p *processes) driver(m *machine) *cu.Driver {
	d, left := m.complete()
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range p.machines {
		if p.machines[i] == m {
			p.graphs[i] = append(p.graphs[i], left)
		}
	}
	return d
}

// left says what was not given back. What a process has left in which the library was given up goes with the process.
func (p *processes) left() string {
	var left []string
	for i, m := range p.machines {
		m.release()
		if m.spent() {
			left = append(left, m.Violations()...)
			continue
		}
		if l := m.left(); l != "" {
			left = append(left, l)
		}
		for _, count := range p.graphs[i] {
			if n := count(); n != 0 {
				left = append(left, fmt.Sprintf("%d graphs", n))
			}
		}
	}
	return strings.Join(left, ", ")
}

// TestFaults lets every call of the driver and of NVSHMEM go wrong.
func TestFaults(t *testing.T) {
	const (
		keeps  = "it is the call that gives it back"
		notVMM = "so the driver says that memory is not of cuMemCreate"
	)
	backendtest.Faults{
		Polls: []string{"cuEventQuery", "cuStreamQuery"},
		Unheard: map[string]string{
			"nvshmem_ptr in nvshmem.(*allocation).adopt":          "so the library says that memory which is adopted is not of its heap",
			"nvshmemx_mc_ptr in nvshmem.(*mapping).findMulticast": "the memory has no multicast address then, which whoever asks for it is told",
			"cuCtxPopCurrent": "it is logged; the thread is given away", "cuStreamQuery in cuda.(*Stream).idle": "memory that goes with it is freed when the driver has answered",
		},
		Unnamed: map[string]string{
			"cuMemRetainAllocationHandle:CUDA_ERROR_INVALID_VALUE": notVMM, "cuMemRetainAllocationHandle:CUDA_ERROR_NOT_SUPPORTED": notVMM,
		},
		Keeps: map[string]string{
			"cuDevicePrimaryCtxRelease": keeps, "cuGraphDestroy": keeps, "cuGraphExecDestroy": keeps, "cuMemFreeHost": keeps,
			"cuModuleUnload": keeps, "cuStreamDestroy": keeps,
			"cuCtxPushCurrent in cuda.(*Stream).finishClose": keeps, "cuCtxPushCurrent in cuda.(*Device).close": keeps,
		},
		Machine: func() backendtest.FaultMachine {
			p := &processes{}
			return backendtest.FaultMachine{
				Open: func(ctx context.Context, g *group.Group, parent backend.Backend, calls *backendtest.Calls) (backend.Backend, error) {
					if parent != nil {
						b := parent.(*Backend)
						o := &Options{Parent: b, Opened: b.Device().(*cuda.Device), home: b.home}
						return New(ctx, g, o)
					}
					m := p.machine(g.Size())
					o := m.options(g.Rank())
					o.Multicast, o.Chunk, o.Arena, o.KernelTimeout = "auto", 12<<20, 1<<20, 5*time.Second
					o.Driver = fakecuda.Between(p.driver(m), calls)
					load := o.load
					o.load = func(n *nvshmem.Options) (library, error) {
						l, err := load(n)
						return &faultyLib{l, calls}, err
					}
					return New(ctx, g, o)
				},
				Adopt: func(b backend.Backend, _ int, bytes int64) (device.Ptr, func() error, error) {
					p.mu.Lock()
					m := p.machines[len(p.machines)-1]
					p.mu.Unlock()
					at := m.allocate(int(b.Device().(*cuda.Device).Ordinal()), bytes, nil)
					return at, func() error { m.free(at); return nil }, nil
				},
				AllReduces: []string{Name},
				Left:       p.left,
			}
		},
	}.Run(t)
}
