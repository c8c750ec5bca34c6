package fakecuda

import (
	"fmt"
	"slices"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/symmem/symmem/device"
	cu "github.com/symmem/symmem/internal/cuda"
)

// TotalMemory is how many bytes of memory each GPU says it has.
const TotalMemory = 1 << 30

// GPUs are the pretended GPUs of one host. Set Call and Find before the driver is used, and Params before Driver is called.
type GPUs struct {
	// Count is how many there are, with the ordinals from 0.
	Count int
	// Call, unless nil, is asked at the beginning of each call that goes through Do, with the driver's name for it and the GPU
	// whose context is current, or -1. Unless it answers Success, the call does nothing but return that answer. Mu is held.
	Call func(name string, gpu int) cu.Result
	// Find returns the memory of a GPU that p is in. Mu is held.
	Find func(p device.Ptr) (m Memory, ok bool)
	// Params gives the sizes in bytes of the parameters of the kernel of that name, in order. Mu is held. Nil: the driver does not tell
	// them, as those before CUDA 12.4, and every kernel has one.
	Params func(name string) []int
	// Kernel is what launching the kernel of that name does, at once, on a stream of the GPU; params are where its parameters are, which
	// it must not write or keep. Mu is not held. Nil: the GPUs load kernels but run none.
	Kernel func(gpu int, name string, params []unsafe.Pointer)

	// Mu guards what follows, and what the machine that these GPUs belong to has besides.
	Mu sync.Mutex
	// Contexts are the references of the primary contexts, by GPU.
	Contexts []int
	// Streams are those that are open, with the GPU of each.
	Streams map[cu.StreamHandle]int
	// Modules is how many are loaded.
	Modules int
	// Sharing are the kernels that leave a multiprocessor's shared memory to others.
	Sharing []string

	stacks     map[int][]int // the GPUs of the contexts that were pushed, by the thread's id
	latest     cu.StreamHandle
	pinned     map[unsafe.Pointer][]byte
	functions  []string // the names, by handle-1
	violations []string
}

// Memory is a piece of a GPU's memory.
type Memory struct {
	GPU   int
	Base  device.Ptr
	Bytes uint64
}

// New returns count GPUs.
func New(count int) *GPUs {
	return &GPUs{
		Count: count, Contexts: make([]int, count), Streams: map[cu.StreamHandle]int{}, stacks: map[int][]int{},
		latest: 0x100, // the first ones stand for streams that are always there
		pinned: map[unsafe.Pointer][]byte{},
	}
}

// Do is a call of the driver: it runs f with Mu held and the GPU whose context is current, or -1, unless Call lets it fail.
func (g *GPUs) Do(name string, f func(gpu int) cu.Result) cu.Result {
	g.Mu.Lock()
	defer g.Mu.Unlock()
	gpu := g.Current()
	if g.Call != nil {
		if r := g.Call(name, gpu); r != cu.Success {
			return r
		}
	}
	return f(gpu)
}

// Current returns the GPU whose context is current on the calling thread, or -1. Mu is held.
func (g *GPUs) Current() int {
	if s := g.stacks[unix.Gettid()]; len(s) > 0 {
		return s[len(s)-1]
	}
	return -1
}

// Violation notes something that a real driver or library would not survive. Mu is held.
func (g *GPUs) Violation(format string, args ...any) cu.Result {
	g.violations = append(g.violations, fmt.Sprintf(format, args...))
	return cu.InvalidValue
}

// Left says what was not given back, of the GPUs and of what the machine has besides, which is counted by name, and what
// violations there were. Mu is held.
func (g *GPUs) Left(besides map[string]int) []string {
	var left []string
	count := func(what string, n int) {
		if n != 0 {
			left = append(left, fmt.Sprintf("%d %s", n, what))
		}
	}
	count("streams", len(g.Streams))
	count("pinned buffers", len(g.pinned))
	count("modules", g.Modules)
	for gpu, n := range g.Contexts {
		count(fmt.Sprintf("references of the context of GPU %d", gpu), n)
	}
	for what, n := range besides {
		count(what, n)
	}
	return append(left, g.violations...)
}

// Violations returns what a real driver or library would not have survived.
func (g *GPUs) Violations() []string {
	g.Mu.Lock()
	defer g.Mu.Unlock()
	return slices.Clone(g.violations)
}
