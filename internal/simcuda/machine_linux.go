package simcuda

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/symmem/symmem/device"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/ptxvm"
)

// Machine is some simulated GPUs and their driver, as one process sees them. Its methods, and the functions of its driver, may be called from several
// goroutines at once.
type Machine struct {
	config  Config
	callers atomic.Int32 // that wait for mu, so that the scheduler lets them
	stacks  sync.Map     // of contexts that are current, by thread; a thread's own only
	streams sync.Map     // *stream by handle
	events  sync.Map     // *event by handle

	mu         sync.Mutex
	moved      *sync.Cond // something has ended
	gpus       []*gpu
	rand       *rand.Rand
	last       uintptr // handle
	next       device.Ptr
	running    bool          // the scheduler
	wake       chan struct{} // ends a pause of the scheduler
	spaces     []*mapping    // by address
	reserved   map[device.Ptr]uint64
	handles    map[cu.MemHandle]*handle
	physicals  map[file]*physical // those that are known here
	objects    map[file]*cast
	shared     []*cast // that other processes may have
	modules    map[cu.ModuleHandle]*module
	functions  map[cu.FunctionHandle]*function
	graphs     map[cu.GraphHandle]*graph
	execs      map[cu.GraphExecHandle]*exec
	users      map[cu.UserObject]*userObject
	active     []*stream      // that have work
	weak       *ptxvm.Machine // with weak memory: that of all GPUs, nil while none has a context
	later      []uintptr      // user objects whose functions are to be called
	violations []string
	stats      Stats

	noted  sync.Mutex // held without mu, or within it
	misuse []string   // of libraries
}

// gpu is one GPU and its primary context.
type gpu struct {
	GPU
	machine *Machine
	ordinal int
	used    uint64

	// Of the context.
	refs     atomic.Int32 // changes under mu
	context  atomic.Int32 // a number that no other has had
	failed   atomic.Int32 // the result that ended it, 0 while it works
	vm       *ptxvm.Machine
	space    *ptxvm.Memory
	lanes    []*lane // of no stream
	peers    map[int]bool
	busy     int // streams with work
	draining int // calls that wait until there is none
	stores   uint64
}

// New makes a machine whose GPUs nobody uses.
func New(config Config) (*Machine, error) {
	m := &Machine{
		config: config.complete(), next: firstAddress, reserved: map[device.Ptr]uint64{}, handles: map[cu.MemHandle]*handle{},
		physicals: map[file]*physical{}, objects: map[file]*cast{}, modules: map[cu.ModuleHandle]*module{}, functions: map[cu.FunctionHandle]*function{},
		graphs: map[cu.GraphHandle]*graph{}, execs: map[cu.GraphExecHandle]*exec{}, users: map[cu.UserObject]*userObject{}, wake: make(chan struct{}, 1),
	}
	m.moved = sync.NewCond(&m.mu)
	m.rand = rand.New(rand.NewPCG(m.config.Seed, 0x51))
	for i := range m.config.GPUs {
		m.gpus = append(m.gpus, &gpu{GPU: m.config.Each[i], machine: m, ordinal: i})
	}
	return m, nil
}

// lock begins a call.
func (m *Machine) lock() {
	m.callers.Add(1)
	m.mu.Lock()
	m.callers.Add(-1)
}

// do is a call that holds mu.
func (m *Machine) do(f func() cu.Result) cu.Result {
	m.lock()
	defer m.mu.Unlock()
	return f()
}

// on is a call that needs a current context that still works.
func (m *Machine) on(f func(g *gpu) cu.Result) cu.Result {
	g := m.current()
	if g == nil {
		return cu.InvalidContext
	}
	m.lock()
	defer m.mu.Unlock()
	if r := g.result(); r != cu.Success {
		return r
	}
	return f(g)
}

// result is what ended the context. CUDA driver API, result codes: after errors such as CUDA_ERROR_ILLEGAL_ADDRESS "any further CUDA work will
// return the same error".
func (g *gpu) result() cu.Result { return cu.Result(g.failed.Load()) }

// stack is the contexts that were pushed on a thread. Only the thread touches it; the lock tells the goroutines that it runs one after the other apart.
type stack struct {
	mu   sync.Mutex
	gpus []*gpu
}

// current is the GPU whose context is current on the calling thread, or nil.
func (m *Machine) current() *gpu {
	if s, ok := m.stacks.Load(unix.Gettid()); ok {
		x := s.(*stack)
		x.mu.Lock()
		defer x.mu.Unlock()
		if len(x.gpus) > 0 {
			return x.gpus[len(x.gpus)-1]
		}
	}
	return nil
}

// handle returns a number that was not used yet.
func (m *Machine) number() uintptr {
	m.last++
	return 0x51000000 + m.last*0x10
}

// violation notes a use of the driver that a real one would not survive, or whose outcome it does not define.
func (m *Machine) violation(r cu.Result, format string, args ...any) cu.Result {
	m.violations = append(m.violations, fmt.Sprintf(format, args...))
	return r
}

// Violations lists the uses of the driver so far that a real one would not survive, or whose outcome it does not define, and failures of kernels.
func (m *Machine) Violations() []string {
	m.lock()
	defer m.mu.Unlock()
	m.noted.Lock()
	defer m.noted.Unlock()
	return slices.Concat(m.violations, m.misuse)
}

// Left lists what was made and not given back.
func (m *Machine) Left() []string {
	m.lock()
	defer m.mu.Unlock()
	var left []string
	count := func(what string, n int) {
		if n != 0 {
			left = append(left, fmt.Sprintf("%d %s", n, what))
		}
	}
	size := func(all *sync.Map) (n int) {
		all.Range(func(any, any) bool { n++; return true })
		return n
	}
	legacy, host := 0, 0
	for _, x := range m.spaces {
		switch {
		case x.host:
			host++
		case x.legacy:
			legacy++
		}
	}
	count("streams", size(&m.streams))
	count("events", size(&m.events))
	count("modules", len(m.modules))
	count("graphs", len(m.graphs))
	count("executable graphs", len(m.execs))
	count("user objects", len(m.users))
	count("handles of memory", len(m.handles))
	count("ranges of addresses", len(m.reserved))
	count("mappings", len(m.spaces)-legacy-host)
	count("allocations of cuMemAlloc", legacy)
	count("allocations of cuMemHostAlloc", host)
	count("multicast objects", len(m.objects))
	for _, g := range m.gpus {
		count(fmt.Sprintf("references of the context of GPU %d", g.ordinal), int(g.refs.Load()))
		if g.used != 0 {
			left = append(left, fmt.Sprintf("%d bytes of GPU %d", g.used, g.ordinal))
		}
	}
	return left
}

// Err says what was used wrongly, or, if nothing was, what was not given back; nil if neither is so.
func (m *Machine) Err() error {
	if wrong := m.Violations(); len(wrong) > 0 {
		return fmt.Errorf("the simulated GPUs were used wrongly: %s", strings.Join(wrong, "; "))
	}
	if left := m.Left(); len(left) > 0 {
		return fmt.Errorf("the simulated GPUs still have %s", strings.Join(left, ", "))
	}
	return nil
}

// Stats is what has run so far.
func (m *Machine) Stats() Stats {
	m.lock()
	defer m.mu.Unlock()
	s := m.stats
	s.Launches = maps.Clone(s.Launches)
	if m.weak != nil {
		s.Instructions += m.weak.Steps()
		return s
	}
	for _, g := range m.gpus {
		if g.vm != nil {
			s.Instructions += g.vm.Steps()
		}
	}
	return s
}
