package nccl

import (
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/symmem/symmem/backend/backendtest/fakecuda"
	"github.com/symmem/symmem/device"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/nccl"
)

const (
	granule = 2 << 20
	stride  = 35 << 32 // between the ranks' copies in the fake library's range
)

// machine is a host with some GPUs and NCCL on it, as far as this backend asks the two. The ranks are goroutines of one
// process. It notes what the real ones would not survive.
type machine struct {
	*fakecuda.GPUs
	version nccl.Version
	// fail, unless nil, is asked at each call of NCCL's with the rank that makes it and how often it was made.
	fail func(call string, rank, n int) nccl.Result
	// silent is what registering gives where there are no windows: nothing, or a handle of something else.
	silent *nccl.WindowHandle
	// apart spoils the structure of windows.
	apart func(b []byte)
	// absent ranks never come to what takes all ranks.
	absent func(call string, rank int) bool
	// hangs makes all GPUs busy until a communicator is aborted.
	hangs bool
	// holds makes all-reduces stay on their streams until their communicator is aborted.
	holds bool
	// inReduce, unless nil, is called by each all-reduce that is not recorded, before it is on its stream.
	inReduce func()
	// afterAbort, unless nil, is called when a communicator's kernels were ended, before the call returns that did it.
	afterAbort func()
	// joint makes the end of a communicator wait until all of its ranks end it, as NCCL does with ranks in different processes.
	joint bool
	// shares says that NCCL was told to have several ranks on one GPU.
	shares bool
	// nvls says that the GPUs have multicast.
	nvls bool
	// lsaTeam is the most ranks of a team, as NCCL_LSA_TEAM_SIZE says from 2.29.7 on; 0 is no bound.
	lsaTeam int
	// gin says that GPUs can send over the network of themselves, which windows over several teams need from 2.29.2 on.
	gin bool
	// clique says that the hosts share a domain of NVLink.
	clique bool
	// unputtable ranks get no puts any more.
	unputtable func(rank int) bool
	// putDelay is how long puts take.
	putDelay time.Duration
	// patience is the ranks' KernelTimeout.
	patience time.Duration

	counts   map[string]int
	used     []int64
	next     uint64
	memory   map[device.Ptr]*piece
	handles  map[cu.MemHandle]*piece
	roots    map[nccl.UniqueID]int // for each id, a thread with a socket until its ranks have come: how many have
	worlds   map[nccl.UniqueID]*world
	comms    map[nccl.CommHandle]*fakeComm
	cuMemOff bool
	aborted  int
	split    int
	refused  int                       // registrations over several teams that made no window
	teams    map[nccl.WindowHandle]int // how many ranks a window has addresses of
	objects  int                       // multicast objects that were made
	modes    []int32                   // nvlsHostMode of each communicator that was made

	wins     map[nccl.WindowHandle]*fakeWindow
	flights  map[cu.StreamHandle]*flight
	marked   map[cu.EventHandle]putMark
	groups   int                   // that are open
	messages map[int][]fakeMessage // in one, by thread
	puts     int                   // that have arrived

	held      map[cu.StreamHandle][]*fakeComm // what all-reduces hold the streams up
	marks     map[cu.EventHandle][]*fakeComm  // and the events
	recording map[cu.StreamHandle]*[]*fakeComm
	graphs    map[cu.GraphHandle]*[]*fakeComm
	execs     map[cu.GraphExecHandle]*[]*fakeComm
}

// piece is memory at an address: an allocation, or NCCL's second address of one.
type piece struct {
	gpu     int
	bytes   []byte
	virtual bool
	prop    cu.MemAllocationProp
	alias   bool
}

// world is what the communicators of some ranks share.
type world struct {
	size  int
	steps map[int]*step
	flat  uint64 // the next address in the range of windows
	cast  bool   // it has its multicast object
	gpus  map[string]bool
	hosts map[int]string // by rank
	ended int            // ranks that have ended it
}

// step is something that takes all ranks.
type step struct {
	call string
	came map[int]*fakeComm
	args map[int]any
	done chan struct{}
}

// fakeComm is a rank's communicator.
type fakeComm struct {
	world    *world
	rank     int
	gpu      int
	host     string
	blocking bool
	seq      int
	pending  *step
	result   nccl.Result
	aborted  chan struct{}
	windows  map[nccl.WindowHandle][]device.Ptr // what a window has put into the memory
}

func newMachine(gpus int) *machine {
	m := &machine{
		GPUs: fakecuda.New(gpus), version: 22809, counts: map[string]int{}, used: make([]int64, gpus), next: 1 << 40,
		memory: map[device.Ptr]*piece{}, handles: map[cu.MemHandle]*piece{}, worlds: map[nccl.UniqueID]*world{},
		comms: map[nccl.CommHandle]*fakeComm{}, roots: map[nccl.UniqueID]int{}, teams: map[nccl.WindowHandle]int{},
		held: map[cu.StreamHandle][]*fakeComm{}, marks: map[cu.EventHandle][]*fakeComm{},
		recording: map[cu.StreamHandle]*[]*fakeComm{}, graphs: map[cu.GraphHandle]*[]*fakeComm{},
		execs: map[cu.GraphExecHandle]*[]*fakeComm{}, wins: map[nccl.WindowHandle]*fakeWindow{}, flights: map[cu.StreamHandle]*flight{},
		marked: map[cu.EventHandle]putMark{}, messages: map[int][]fakeMessage{}, putDelay: 100 * time.Microsecond, patience: 5 * time.Second,
	}
	m.Find = func(p device.Ptr) (fakecuda.Memory, bool) {
		base, x := m.at(p)
		if x == nil {
			return fakecuda.Memory{}, false
		}
		return fakecuda.Memory{GPU: x.gpu, Base: base, Bytes: uint64(len(x.bytes))}, true
	}
	return m
}

// plain returns the options of a rank of the machine.
func (m *machine) plain(rank int) *Options {
	return m.onHost("", rank)
}

// onHost returns the options of a rank of the machine that NCCL takes for one on the host of that name; "" is the machine's own.
func (m *machine) onHost(host string, gpu int) *Options {
	return &Options{
		Driver: m.driver(), LocalRank: gpu, Multicast: "off", KernelTimeout: m.patience,
		Getenv: func(name string) string { return map[string]string{hostEnv: host}[name] },
		load: func(o *nccl.Options) (*nccl.Library, error) {
			m.Mu.Lock()
			m.shares = m.shares || o.ShareGPU
			m.Mu.Unlock()
			return nccl.New("/fake/libnccl.so.2", m.libraryOf(host))
		},
	}
}

// requireClean fails the test if something is not given back.
func (m *machine) requireClean(t *testing.T) {
	t.Helper()
	if left := m.left(); left != "" {
		t.Errorf("left: %s", left)
	}
}

// left says what is not given back.
func (m *machine) left() string {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	left := m.GPUs.Left(map[string]int{
		"handles": len(m.handles), "pieces of memory": len(m.memory), "communicators": len(m.comms),
		"threads and sockets that wait for ranks": len(m.roots), "graphs": len(m.graphs) + len(m.execs),
	})
	for g, n := range m.used {
		if n != 0 {
			left = append(left, fmt.Sprintf("%d bytes of GPU %d", n, g))
		}
	}
	return strings.Join(left, ", ")
}

// number returns a new address or handle, with room behind it.
func (m *machine) number(room int64) uint64 {
	n := m.next
	m.next += uint64(room+granule-1)/granule*granule + granule
	return n
}

// at finds the memory at p.
func (m *machine) at(p device.Ptr) (device.Ptr, *piece) {
	for base, x := range m.memory {
		if p >= base && uint64(p-base) < uint64(len(x.bytes)) {
			return base, x
		}
	}
	return 0, nil
}

// span returns n bytes at p.
func (m *machine) span(p device.Ptr, n uint64) []byte {
	base, x := m.at(p)
	if x == nil || uint64(p-base)+n > uint64(len(x.bytes)) {
		m.Violation("no %d bytes at %s", n, p)
		return make([]byte, n)
	}
	return x.bytes[p-base:][:n]
}

// allocate makes a piece of memory.
func (m *machine) allocate(gpu int, bytes int64, virtual bool) (device.Ptr, bool) {
	if virtual {
		bytes = (bytes + granule - 1) / granule * granule
	}
	if m.used[gpu]+bytes > fakecuda.TotalMemory {
		return 0, false
	}
	m.used[gpu] += bytes
	x := &piece{gpu: gpu, bytes: make([]byte, bytes), virtual: virtual, prop: cu.MemAllocationProp{Type: cu.AllocationPinned,
		RequestedHandleTypes: cu.HandleFD, Location: cu.MemLocation{Type: cu.LocationDevice, ID: int32(gpu)}}}
	for i := 0; i < len(x.bytes); i += 1021 {
		x.bytes[i] = 0xa5
	}
	p := device.Ptr(m.number(bytes))
	m.memory[p] = x
	return p, true
}

func (m *machine) free(p device.Ptr) bool {
	x := m.memory[p]
	if x == nil || x.alias {
		return false
	}
	delete(m.memory, p)
	m.used[x.gpu] -= int64(len(x.bytes))
	return true
}

// idle is what a stream or an event answers that work of these communicators was enqueued on or recorded behind: that all is done, unless
// a kernel of NCCL's is to seem stuck.
func (m *machine) idle(held func() []*fakeComm) cu.Result {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	if m.hangs && m.aborted == 0 {
		return cu.NotReady
	}
	for _, c := range held() {
		select {
		case <-c.aborted:
		default:
			return cu.NotReady
		}
	}
	return cu.Success
}

// made returns how many communicators were made, one for each rank of each.
func (m *machine) made() int {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	return len(m.modes)
}

// set changes the machine.
func (m *machine) set(change func()) {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	change()
}

// driver returns a table for the machine. Functions that nothing here calls are not supported.
func (m *machine) driver() *cu.Driver {
	d := m.GPUs.Driver()
	m.basics(d)
	m.pointers(d)
	m.work(d)
	m.recordings(d)
	return d
}

// recordings returns graphs of all-reduces.
func (m *machine) recordings(d *cu.Driver) {
	d.StreamBeginCapture = func(s cu.StreamHandle, _ int32) cu.Result {
		return m.Do("cuStreamBeginCapture", func(int) cu.Result { m.recording[s] = new([]*fakeComm); return cu.Success })
	}
	d.StreamEndCapture = func(s cu.StreamHandle, g *cu.GraphHandle) cu.Result {
		return m.Do("cuStreamEndCapture", func(int) cu.Result {
			*g = cu.GraphHandle(m.number(0))
			m.graphs[*g] = m.recording[s]
			delete(m.recording, s)
			return cu.Success
		})
	}
	d.GraphInstantiateWithFlags = func(x *cu.GraphExecHandle, g cu.GraphHandle, _ uint64) cu.Result {
		return m.Do("cuGraphInstantiate", func(int) cu.Result {
			*x = cu.GraphExecHandle(m.number(0))
			m.execs[*x] = m.graphs[g]
			return cu.Success
		})
	}
	d.GraphUpload = nil
	d.GraphLaunch = func(x cu.GraphExecHandle, s cu.StreamHandle) cu.Result {
		return m.Do("cuGraphLaunch", func(int) cu.Result {
			if m.holds {
				m.held[s] = append(m.held[s], *m.execs[x]...)
			}
			return cu.Success
		})
	}
	d.GraphExecDestroy = func(x cu.GraphExecHandle) cu.Result {
		return m.Do("cuGraphExecDestroy", func(int) cu.Result { delete(m.execs, x); return cu.Success })
	}
	d.GraphDestroy = func(g cu.GraphHandle) cu.Result {
		return m.Do("cuGraphDestroy", func(int) cu.Result { delete(m.graphs, g); return cu.Success })
	}
}

func (m *machine) basics(d *cu.Driver) {
	d.MemGetInfo = func(free, total *uint64) cu.Result {
		return m.Do("cuMemGetInfo", func(gpu int) cu.Result {
			*free, *total = uint64(fakecuda.TotalMemory-m.used[max(gpu, 0)]), fakecuda.TotalMemory
			return cu.Success
		})
	}
}

func (m *machine) pointers(d *cu.Driver) {
	d.MemRelease = func(h cu.MemHandle) cu.Result {
		return m.Do("cuMemRelease", func(int) cu.Result {
			if m.handles[h] == nil {
				m.Violation("cuMemRelease of no handle")
			}
			delete(m.handles, h)
			return cu.Success
		})
	}
	d.MemRetainAllocationHandle = func(h *cu.MemHandle, p device.Ptr) cu.Result {
		return m.Do("cuMemRetainAllocationHandle", func(int) cu.Result {
			_, x := m.at(p)
			if x == nil || !x.virtual {
				return cu.InvalidValue
			}
			*h = cu.MemHandle(m.number(0))
			m.handles[*h] = x
			return cu.Success
		})
	}
	d.MemGetAllocationPropertiesFromHandle = func(prop *cu.MemAllocationProp, h cu.MemHandle) cu.Result {
		return m.Do("cuMemGetAllocationPropertiesFromHandle", func(int) cu.Result {
			*prop = m.handles[h].prop
			return cu.Success
		})
	}
	d.MemAlloc = func(p *device.Ptr, bytes uint64) cu.Result {
		return m.Do("cuMemAlloc", func(gpu int) cu.Result {
			var ok bool
			if *p, ok = m.allocate(gpu, int64(bytes), false); !ok {
				return cu.OutOfMemory
			}
			return cu.Success
		})
	}
	d.MemFree = func(p device.Ptr) cu.Result {
		return m.Do("cuMemFree", func(int) cu.Result {
			if !m.free(p) {
				return cu.InvalidValue
			}
			return cu.Success
		})
	}
}

func (m *machine) work(d *cu.Driver) {
	d.StreamQuery = func(s cu.StreamHandle) cu.Result {
		if m.flying(s) {
			return cu.NotReady
		}
		return m.idle(func() []*fakeComm { return m.held[s] })
	}
	d.EventQuery = func(e cu.EventHandle) cu.Result {
		if m.flyingBefore(e) {
			return cu.NotReady
		}
		return m.idle(func() []*fakeComm { return m.marks[e] })
	}
	d.EventCreate = func(e *cu.EventHandle, _ uint32) cu.Result {
		return m.Do("cuEventCreate", func(int) cu.Result { *e = cu.EventHandle(m.number(0)); return cu.Success })
	}
	d.EventRecord = func(e cu.EventHandle, s cu.StreamHandle) cu.Result {
		return m.Do("cuEventRecord", func(int) cu.Result {
			m.marks[e] = slices.Clone(m.held[s])
			m.markPuts(e, s)
			return cu.Success
		})
	}
	d.MemcpyHtoDAsync = func(dst device.Ptr, src unsafe.Pointer, n uint64, _ cu.StreamHandle) cu.Result {
		return m.Do("cuMemcpyHtoDAsync", func(int) cu.Result {
			copy(m.span(dst, n), unsafe.Slice((*byte)(src), n))
			return cu.Success
		})
	}
	d.MemcpyDtoHAsync = func(dst unsafe.Pointer, src device.Ptr, n uint64, _ cu.StreamHandle) cu.Result {
		return m.Do("cuMemcpyDtoHAsync", func(int) cu.Result {
			copy(unsafe.Slice((*byte)(dst), n), m.span(src, n))
			return cu.Success
		})
	}
	d.MemsetD8Async = func(p device.Ptr, value uint8, n uint64, _ cu.StreamHandle) cu.Result {
		return m.Do("cuMemsetD8Async", func(int) cu.Result {
			b := m.span(p, n)
			for filled := copy(b, []byte{value}); filled < len(b); { // a loop over bytes took most of the tests' time
				filled += copy(b[filled:], b[:filled])
			}
			return cu.Success
		})
	}
}

// library returns NCCL's table for the machine.
func (m *machine) library() nccl.Functions { return m.libraryOf("") }

// libraryOf returns NCCL's table for the ranks of a host.
func (m *machine) libraryOf(host string) nccl.Functions {
	f := nccl.Functions{
		GetVersion:     func(v *int32) nccl.Result { *v = int32(m.version); return nccl.Success },
		GetErrorString: func(r nccl.Result) string { return "text of " + r.String() },
		GetLastError:   func(nccl.CommHandle) string { return "" },
		GetUniqueID: func(id *nccl.UniqueID) nccl.Result {
			m.Mu.Lock()
			defer m.Mu.Unlock()
			binary.LittleEndian.PutUint64(id[:], m.number(0))
			m.roots[*id] = 0
			return nccl.Success
		},
		CommInitRankScalable: func(h *nccl.CommHandle, ranks, rank, ids int32, id *nccl.UniqueID, config *nccl.ConfigLayout) nccl.Result {
			return m.initRank(host, h, ranks, rank, ids, id, config)
		},
		CommSplit: m.splitComm, CommAsyncError: m.asyncError, CommFinalize: m.finalize,
		CommDestroy: func(h nccl.CommHandle) nccl.Result { return m.end(h, false) },
		CommAbort:   func(h nccl.CommHandle) nccl.Result { return m.end(h, true) },
		CommCount: func(h nccl.CommHandle, n *int32) nccl.Result {
			return m.comm(h, func(c *fakeComm) nccl.Result { *n = int32(c.world.size); return nccl.Success })
		},
		CommUserRank: func(h nccl.CommHandle, n *int32) nccl.Result {
			return m.comm(h, func(c *fakeComm) nccl.Result { *n = int32(c.rank); return nccl.Success })
		},
		CommCuDevice: func(h nccl.CommHandle, n *int32) nccl.Result {
			return m.comm(h, func(c *fakeComm) nccl.Result { *n = int32(c.gpu); return nccl.Success })
		},
		AllReduce: m.allReduce,
		Broadcast: func(send, recv uint64, count uintptr, t nccl.DataType, root int32, h nccl.CommHandle, stream uintptr) nccl.Result {
			return m.collective(h, "ncclBroadcast", stream, send, recv, int64(count)*t.Bytes(), 1, func(_, _ int, ins [][]byte) []byte { return ins[root] })
		},
		Reduce: func(send, recv uint64, count uintptr, t nccl.DataType, _ nccl.Op, root int32, h nccl.CommHandle, stream uintptr) nccl.Result {
			return m.collective(h, "ncclReduce", stream, send, recv, int64(count)*t.Bytes(), 1, func(rank, _ int, ins [][]byte) []byte {
				if rank != int(root) {
					return nil
				}
				return added(ins)
			})
		},
		AllGather: func(send, recv uint64, count uintptr, t nccl.DataType, h nccl.CommHandle, stream uintptr) nccl.Result {
			return m.collective(h, "ncclAllGather", stream, send, recv, int64(count)*t.Bytes(), 1, func(_, _ int, ins [][]byte) []byte { return slices.Concat(ins...) })
		},
		ReduceScatter: func(send, recv uint64, count uintptr, t nccl.DataType, _ nccl.Op, h nccl.CommHandle, stream uintptr) nccl.Result {
			bytes := int64(count) * t.Bytes()
			return m.collective(h, "ncclReduceScatter", stream, send, recv, bytes, 0, func(rank, _ int, ins [][]byte) []byte {
				return added(ins)[int64(rank)*bytes:][:bytes]
			})
		},
		AllToAll: func(send, recv uint64, count uintptr, t nccl.DataType, h nccl.CommHandle, stream uintptr) nccl.Result {
			bytes := int64(count) * t.Bytes()
			return m.collective(h, "ncclAlltoAll", stream, send, recv, bytes, 0, func(rank, _ int, ins [][]byte) (out []byte) {
				for _, in := range ins {
					out = append(out, in[int64(rank)*bytes:][:bytes]...)
				}
				return out
			})
		},
		Send: m.message(true), Recv: m.message(false), GroupStart: m.groupStart, GroupEnd: m.groupEnd,
		MemAlloc:           m.memAlloc,
		MemFree:            m.memFree,
		CommWindowRegister: m.register, CommWindowDeregister: m.deregister,
		TeamLsa: func(h nccl.CommHandle) (team nccl.Team) {
			m.comm(h, func(c *fakeComm) nccl.Result {
				ranks := m.team(c.world)
				team = nccl.Team{Ranks: int32(ranks), Rank: int32(c.rank % ranks), Stride: 1}
				return 0
			})
			return team
		},
		DevCommCreate: func(h nccl.CommHandle, _, out *byte) nccl.Result {
			return m.together(h, "ncclDevCommCreate", nil, func(*step) { *out = 1 })
		},
		DevCommDestroy: func(nccl.CommHandle, *byte) nccl.Result { return nccl.Success },
	}
	if m.version >= 22902 {
		f.GetPeerDevicePointer = func(w nccl.WindowHandle, offset uintptr, rank int32, p *uint64) nccl.Result {
			m.Mu.Lock()
			defer m.Mu.Unlock()
			b := m.span(device.Ptr(w), 32)
			first := int32(binary.LittleEndian.Uint32(b[20:])) - int32(binary.LittleEndian.Uint32(b[16:]))
			if rank -= first; rank < 0 || rank >= int32(m.teams[w]) {
				*p = 0 // outside of the team
				return nccl.Success
			}
			*p = binary.LittleEndian.Uint64(b[8:]) + uint64(rank)*stride + uint64(offset)
			return nccl.Success
		}
		f.CommQueryProperties = func(h nccl.CommHandle, props *byte) nccl.Result {
			return m.comm(h, func(c *fakeComm) nccl.Result {
				if r := m.refuse("ncclCommQueryProperties", c.rank); r != nccl.Success {
					return r
				}
				b := unsafe.Slice(props, 40)
				if m.version >= 22907 && binary.LittleEndian.Uint64(b) == 56 {
					return m.rmaProperties(c, unsafe.Slice(props, 56))
				}
				if m.canPut(c) {
					b[34] = 2
				}
				if binary.LittleEndian.Uint64(b) != 40 || binary.LittleEndian.Uint32(b[8:]) != 0xcafebeef || binary.LittleEndian.Uint32(b[12:]) != 22902 {
					m.Violation("the properties' header is % x", b[:16])
				}
				if m.nvls {
					b[33] = 1
				}
				return nccl.Success
			})
		}
		f.PutSignal = m.putSignal
		f.MulticastSource = func() (*nccl.Multicast, error) {
			return &nccl.Multicast{GetLsaMultimemDevicePointer: m.multimem}, nil
		}
	}
	return f
}

// comm calls f with a communicator, if there is one.
func (m *machine) comm(h nccl.CommHandle, f func(c *fakeComm) nccl.Result) nccl.Result {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	c := m.comms[h]
	if c == nil {
		m.Violation("a communicator that does not exist was used")
		return nccl.InvalidArgument
	}
	if m.Current() != c.gpu {
		m.Violation("the communicator of GPU %d was used with the context of GPU %d", c.gpu, m.Current())
	}
	return f(c)
}

// refuse returns the result that a call is to fail with.
func (m *machine) refuse(call string, rank int) nccl.Result {
	key := fmt.Sprint(call, rank)
	m.counts[key]++
	if m.fail != nil {
		return m.fail(call, rank, m.counts[key])
	}
	return nccl.Success
}

// newComm makes a communicator; the machine is locked.
func (m *machine) newComm(w *world, rank, gpu int, host string, config *nccl.ConfigLayout) nccl.CommHandle {
	// As NCCL reads it: not beyond what the caller has filled in, and not what the version does not know.
	mode := int32(math.MinInt32)
	if config.Size >= unsafe.Offsetof(config.NvlsHostMode)+4 && m.version >= 23200 && config.Version >= 23200 {
		mode = config.NvlsHostMode
	}
	m.modes = append(m.modes, mode)
	if w.gpus == nil {
		w.gpus, w.hosts = map[string]bool{}, map[int]string{}
	}
	at := fmt.Sprint(host, " ", gpu)
	if w.gpus[at] && (m.version < 23003 || !m.shares) { // NCCL looks on each host alone
		m.Violation("two ranks of NCCL %s on GPU %d", m.version, gpu)
	}
	w.gpus[at], w.hosts[rank] = true, host
	h := nccl.CommHandle(m.number(0))
	m.comms[h] = &fakeComm{world: w, rank: rank, gpu: gpu, host: host, blocking: config.Blocking != 0, aborted: make(chan struct{}),
		windows: map[nccl.WindowHandle][]device.Ptr{}}
	return h
}

func (m *machine) initRank(host string, h *nccl.CommHandle, ranks, rank, _ int32, id *nccl.UniqueID,
	config *nccl.ConfigLayout) (r nccl.Result) {
	defer func() {
		if r != nccl.Success && r != nccl.InProgress {
			m.Mu.Lock()
			delete(m.comms, *h)
			*h = 0
			m.Mu.Unlock()
		}
	}()
	m.Mu.Lock()
	if came, made := m.roots[*id]; made {
		if m.roots[*id]++; came+1 == int(ranks) {
			delete(m.roots, *id)
		}
	}
	if m.worlds[*id] == nil {
		m.worlds[*id] = &world{size: int(ranks), steps: map[int]*step{}, flat: m.number(int64(ranks) * stride)}
	}
	*h = m.newComm(m.worlds[*id], int(rank), m.Current(), host, config)
	m.Mu.Unlock()
	return m.together(*h, "ncclCommInitRankScalable", nil, func(*step) {})
}

func (m *machine) splitComm(parent nccl.CommHandle, color, key int32, h *nccl.CommHandle, config *nccl.ConfigLayout) nccl.Result {
	m.Mu.Lock()
	m.split++
	m.Mu.Unlock()
	return m.together(parent, "ncclCommSplit", [2]int32{color, key}, func(s *step) {
		size, rank := 0, 0
		for r := range s.came {
			if theirs := s.args[r].([2]int32); theirs[0] == color {
				size++
				if theirs[1] < key {
					rank++
				}
			}
		}
		w, _ := s.args[-1-int(color)].(*world) // the first of the color that comes here makes it for all
		if w == nil {
			w = &world{size: size, steps: map[int]*step{}, flat: m.number(int64(size) * stride)}
			s.args[-1-int(color)] = w
		}
		if c := m.comms[parent]; c != nil {
			*h = m.newComm(w, rank, c.gpu, c.host, config)
		}
	})
}

// severalHosts reports whether the ranks are on several hosts; the machine is locked.
func (w *world) severalHosts() bool {
	for _, host := range w.hosts {
		if host != w.hosts[0] {
			return true
		}
	}
	return false
}

// team returns how many ranks each LSA team has: as 2.28.7 and later count, the greatest number by which all runs of ranks of one host can be divided. The
// machine is locked.
func (m *machine) team(w *world) int {
	size, run := 0, 0
	for r := range w.size {
		if run++; r+1 == w.size || w.hosts[r+1] != w.hosts[r] && !m.clique {
			for a, b := size, run; ; a, b = b, a%b {
				if size = a; b == 0 {
					break
				}
			}
			run = 0
		}
	}
	if most := m.lsaTeam; most > 0 && m.version >= 22907 && size > most {
		size = most
	}
	return size
}

// together does something that takes all ranks: it is begun here, and at once done if all have come. after is called on each
// rank, with the machine locked, when it is.
func (m *machine) together(h nccl.CommHandle, call string, arg any, after func(s *step)) nccl.Result {
	m.Mu.Lock()
	c := m.comms[h]
	if c == nil {
		m.Violation("%s: no communicator", call)
		m.Mu.Unlock()
		return nccl.InvalidArgument
	}
	if c.pending != nil {
		m.Violation("%s: the last call was not waited for", call)
	}
	if r := m.refuse(call, c.rank); r != nccl.Success {
		m.Mu.Unlock()
		return r
	}
	s := c.world.steps[c.seq]
	if s == nil {
		s = &step{call: call, came: map[int]*fakeComm{}, args: map[int]any{}, done: make(chan struct{})}
		c.world.steps[c.seq] = s
	}
	c.seq++
	if s.call != call {
		m.Violation("rank %d calls %s where others call %s", c.rank, call, s.call)
	}
	if m.absent != nil && m.absent(call, c.rank) {
		c.pending = s
		m.Mu.Unlock()
		return nccl.Success
	}
	s.came[c.rank], s.args[c.rank] = c, arg
	all := len(s.came) == c.world.size
	if all {
		close(s.done)
	}
	c.pending = s
	m.Mu.Unlock()
	go func() {
		select {
		case <-s.done:
			m.Mu.Lock()
			defer m.Mu.Unlock()
			after(s)
			c.pending = nil
		case <-c.aborted:
		}
	}()
	if !c.blocking {
		if call == "ncclCommWindowRegister" || call == "ncclDevCommCreate" || call == "ncclCommSplit" {
			return nccl.Success // as NCCL does
		}
		return nccl.InProgress
	}
	for began := time.Now(); ; {
		m.Mu.Lock()
		done := c.pending == nil
		m.Mu.Unlock()
		select {
		case <-c.aborted:
			return nccl.InternalError
		default:
		}
		if !done && time.Since(began) > forGood {
			return m.endless(call, c)
		}
		if done {
			return nccl.Success
		}
		time.Sleep(20 * time.Microsecond)
	}
}

// inCall reports whether a rank waits for others in a call.
func (m *machine) inCall() bool {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	for _, c := range m.comms {
		if c.pending != nil {
			return true
		}
	}
	return false
}

// forGood is after how long a wait is held to be one that would not end, which nothing bounds in NCCL.
const forGood = 30 * time.Second

// endless notes a wait that would not have ended.
func (m *machine) endless(call string, c *fakeComm) nccl.Result {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	m.Violation("%s on rank %d waits for ever for ranks that do not come, and nobody aborts it", call, c.rank)
	return nccl.InternalError
}

// asyncError needs no context.
func (m *machine) asyncError(h nccl.CommHandle, r *nccl.Result) nccl.Result {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	c := m.comms[h]
	if c == nil {
		m.Violation("a communicator that does not exist was asked")
		return nccl.InvalidArgument
	}
	if *r = c.result; c.pending != nil {
		*r = nccl.InProgress
	}
	return nccl.Success
}

func (m *machine) finalize(h nccl.CommHandle) nccl.Result {
	return m.comm(h, func(c *fakeComm) nccl.Result {
		if c.pending != nil {
			return nccl.InvalidArgument
		}
		return m.refuse("ncclCommFinalize", c.rank)
	})
}

func (m *machine) end(h nccl.CommHandle, abort bool) nccl.Result {
	var w *world
	began := time.Now()
	defer func() {
		m.Mu.Lock()
		after := m.afterAbort
		m.Mu.Unlock()
		if abort && after != nil {
			after()
		}
		for w != nil {
			m.Mu.Lock()
			all := !m.joint || w.ended == w.size
			m.Mu.Unlock()
			if all {
				return
			}
			if time.Since(began) > forGood {
				m.Mu.Lock()
				m.Violation("the end of a communicator waits for ever for ranks that do not end theirs")
				m.Mu.Unlock()
				return
			}
			time.Sleep(100 * time.Microsecond)
		}
	}()
	return m.comm(h, func(c *fakeComm) nccl.Result {
		w = c.world
		w.ended++
		if abort {
			m.aborted++
			close(c.aborted)
		} else if len(c.windows) > 0 {
			m.Violation("a communicator was destroyed with %d windows", len(c.windows))
		}
		for w := range c.windows {
			m.unmap(c, w)
		}
		delete(m.comms, h)
		return nccl.Success
	})
}

func (m *machine) memAlloc(p *uint64, bytes uintptr) nccl.Result {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	gpu := m.Current()
	if r := m.refuse("ncclMemAlloc", gpu); r != nccl.Success {
		return r
	}
	q, ok := m.allocate(gpu, int64(bytes), !m.cuMemOff)
	if !ok {
		return nccl.UnhandledCudaError
	}
	*p = uint64(q)
	return nccl.Success
}

func (m *machine) memFree(p uint64) nccl.Result {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	for _, c := range m.comms {
		for _, w := range c.windows {
			if mine := m.memory[w[c.rank%(len(w)-1)]]; m.memory[device.Ptr(p)] != nil && &mine.bytes[0] == &m.memory[device.Ptr(p)].bytes[0] {
				m.Violation("memory was freed that is a window")
			}
		}
	}
	if !m.free(device.Ptr(p)) {
		m.Violation("ncclMemFree of nothing")
	}
	return nccl.Success
}

// registered is what a rank brings to a registration.
type registered struct {
	at    *piece
	base  device.Ptr
	bytes int
}

func (m *machine) register(h nccl.CommHandle, p uint64, bytes uintptr, w *nccl.WindowHandle, flags nccl.WindowFlags) nccl.Result {
	m.Mu.Lock()
	base, x := m.at(device.Ptr(p))
	switch {
	case x == nil || !x.virtual:
		m.Violation("registration of memory that is none")
		m.Mu.Unlock()
		return nccl.InvalidArgument
	case uint64(device.Ptr(p)-base)%4096 != 0 || bytes == 0:
		m.Violation("registration of %d bytes at %d", bytes, device.Ptr(p)-base)
	}
	silent := m.silent
	if c := m.comms[h]; c != nil {
		none := c.world.size == 1 && m.version < 22809 || c.world.severalHosts() && m.version < 22807
		if none {
			silent = new(nccl.WindowHandle)
			*silent = 0x8000 // a handle of something else
		} else if m.team(c.world) < c.world.size && m.version >= 22902 && !m.gin {
			silent = new(nccl.WindowHandle)
		}
		if silent != nil && m.team(c.world) < c.world.size {
			m.refused++
		}
	}
	m.Mu.Unlock()
	if silent != nil {
		*w = *silent
		return nccl.Success
	}
	return m.together(h, "ncclCommWindowRegister", registered{x, base, int(bytes)}, func(s *step) {
		c := m.comms[h]
		if c == nil {
			return
		}
		// Each rank has a range of its own; here they are in one space, so that the rank is part of the address.
		offset, _ := s.args[-1].(uint64)
		if offset == 0 {
			offset = c.world.flat
			s.args[-1] = offset
			c.world.flat += uint64(len(x.bytes)) + granule
		}
		mine := m.number(stride * int64(c.world.size+1))
		put := []device.Ptr{}
		team := m.team(c.world)
		first := c.rank / team * team
		for r := range team {
			theirs := s.args[first+r].(registered)
			if len(theirs.at.bytes) != len(x.bytes) {
				m.Violation("rank %d registers %d bytes, rank %d %d", r, len(theirs.at.bytes), c.rank, len(x.bytes))
			}
			at := device.Ptr(mine + uint64(r)*stride)
			m.memory[at] = &piece{gpu: theirs.at.gpu, bytes: theirs.at.bytes, alias: true}
			put = append(put, at)
		}
		b := make([]byte, 88)
		binary.LittleEndian.PutUint64(b[8:], mine)
		binary.LittleEndian.PutUint32(b[16:], uint32(c.rank-first))
		binary.LittleEndian.PutUint32(b[20:], uint32(c.rank))
		binary.LittleEndian.PutUint32(b[24:], stride>>32)
		if m.apart != nil {
			m.apart(b)
		}
		handle := device.Ptr(m.number(0))
		m.memory[handle] = &piece{gpu: c.gpu, bytes: b, alias: true}
		m.teams[nccl.WindowHandle(handle)] = team
		c.windows[nccl.WindowHandle(handle)] = append(put, handle)
		m.wins[nccl.WindowHandle(handle)] = &fakeWindow{comm: c, step: s, at: device.Ptr(p), piece: x, symmetric: flags&nccl.WindowSymmetric != 0}
		*w = nccl.WindowHandle(handle)
	})
}

// castAt is where windows are in the range of multicast addresses.
const castAt = 1 << 60

// multimem returns the multicast address of a window. The first call of a communicator makes the object with the other ranks, and returns when
// they have come.
func (m *machine) multimem(w nccl.WindowHandle, offset uintptr, p *uint64) nccl.Result {
	m.Mu.Lock()
	var h nccl.CommHandle
	var c *fakeComm
	for handle, comm := range m.comms {
		if comm.windows[w] != nil {
			h, c = handle, comm
		}
	}
	if c == nil {
		m.Violation("the multicast address of no window")
		m.Mu.Unlock()
		return nccl.InvalidArgument
	}
	flat := binary.LittleEndian.Uint64(m.span(device.Ptr(w), 32)[8:])
	have := c.world.cast
	m.Mu.Unlock()
	if !have {
		made := make(chan struct{})
		r := m.together(h, "ncclGetLsaMultimemDevicePointer", nil, func(*step) {
			if !c.world.cast {
				c.world.cast = true
				m.objects++
			}
			close(made)
		})
		if r != nccl.Success && r != nccl.InProgress {
			return r
		}
		select {
		case <-made:
		case <-c.aborted:
			return nccl.InternalError
		case <-time.After(forGood):
			return m.endless("ncclGetLsaMultimemDevicePointer", c)
		}
	}
	*p = castAt | flat + uint64(offset)
	return nccl.Success
}

// unmap takes a window away; the machine is locked.
func (m *machine) unmap(c *fakeComm, w nccl.WindowHandle) {
	for _, p := range c.windows[w] {
		delete(m.memory, p)
	}
	delete(m.wins, w)
	delete(c.windows, w)
}

func (m *machine) deregister(h nccl.CommHandle, w nccl.WindowHandle) nccl.Result {
	return m.comm(h, func(c *fakeComm) nccl.Result {
		if r := m.refuse("ncclCommWindowDeregister", c.rank); r != nccl.Success {
			return r
		}
		if c.windows[w] == nil {
			if m.silent != nil || w == 0x8000 {
				return nccl.Success
			}
			m.Violation("deregistration of no window")
			return nccl.InvalidArgument
		}
		m.unmap(c, w)
		return nccl.Success
	})
}

// collective is one of the others: every rank sends so many bytes, or, with each 0, so many for every rank, and what comes of all that is sent is
// received. Like allReduce it waits for all ranks.
func (m *machine) collective(h nccl.CommHandle, name string, stream uintptr, send, recv uint64, bytes int64, each int, of func(rank, size int, ins [][]byte) []byte) nccl.Result {
	m.Mu.Lock()
	c := m.comms[h]
	if c == nil {
		m.Mu.Unlock()
		return nccl.InvalidArgument
	}
	if _, ok := m.Streams[cu.StreamHandle(stream)]; !ok {
		m.Violation("%s on no stream", name)
	}
	if each == 0 {
		bytes *= int64(c.world.size)
	}
	mine := slices.Clone(m.span(device.Ptr(send), uint64(bytes)))
	rank, size := c.rank, c.world.size
	m.Mu.Unlock()
	return m.together(h, name, mine, func(s *step) {
		var ins [][]byte
		for r := range size {
			ins = append(ins, s.args[r].([]byte))
		}
		out := of(rank, size, ins)
		copy(m.span(device.Ptr(recv), uint64(len(out))), out)
	})
}

// added is the sum of f32.
func added(ins [][]byte) (out []byte) {
	for i := 0; i+4 <= len(ins[0]); i += 4 {
		var sum float32
		for _, in := range ins {
			sum += math.Float32frombits(binary.LittleEndian.Uint32(in[i:]))
		}
		out = binary.LittleEndian.AppendUint32(out, math.Float32bits(sum))
	}
	return out
}

// reduced is what a rank brings to an all-reduce.
type reduced struct {
	send  []byte
	count uintptr
	t     nccl.DataType
	op    nccl.Op
}

// allReduce waits for all ranks, where a real one only enqueues: streams run their work at once here. It adds f32.
func (m *machine) allReduce(send, recv uint64, count uintptr, t nccl.DataType, op nccl.Op, h nccl.CommHandle,
	stream uintptr) nccl.Result {
	bytes := uint64(int64(count) * t.Bytes())
	m.Mu.Lock()
	if _, ok := m.Streams[cu.StreamHandle(stream)]; !ok {
		m.Violation("an all-reduce on no stream")
	}
	mine := slices.Clone(m.span(device.Ptr(send), bytes))
	c, recording, inReduce := m.comms[h], m.recording[cu.StreamHandle(stream)], m.inReduce
	if c != nil && recording != nil {
		*recording = append(*recording, c)
		m.Mu.Unlock()
		return nccl.Success
	}
	m.Mu.Unlock()
	if inReduce != nil {
		inReduce()
	}
	m.Mu.Lock()
	if c != nil && m.holds {
		m.held[cu.StreamHandle(stream)] = append(m.held[cu.StreamHandle(stream)], c)
		m.Mu.Unlock()
		return nccl.Success
	}
	m.Mu.Unlock()
	return m.together(h, "ncclAllReduce", reduced{mine, count, t, op}, func(s *step) {
		if t != nccl.Float32 || op != nccl.Sum {
			return
		}
		out := m.span(device.Ptr(recv), bytes)
		for i := range int(count) {
			var sum float32
			for r := range len(s.came) {
				sum += math.Float32frombits(binary.LittleEndian.Uint32(s.args[r].(reduced).send[4*i:]))
			}
			binary.LittleEndian.PutUint32(out[4*i:], math.Float32bits(sum))
		}
	})
}
