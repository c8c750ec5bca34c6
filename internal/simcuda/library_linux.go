package simcuda

import (
	"fmt"

	"github.com/symmem/symmem/device"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/ptxvm"
)

// What libraries besides the driver need of the machine: package simlib is written on it, and on the driver's table.

// Step is a run of a library's own work on a stream, as its kernel would do it. It is called again and again, until it says that it is done, and never
// waits; moved says that it has come further. It must not call the driver. An error ends the context, as an access that is not allowed does.
type Step func(a *Access) (done, moved bool, err error)

// Access reaches memory for a step.
type Access struct {
	machine *Machine
	gpu     *gpu
}

// Bytes are the n bytes at an address, as they lie in neighbouring mappings. A GPU that has no right to them has an error of it.
func (a *Access) Bytes(p device.Ptr, n int64) (all [][]byte, err error) {
	r := a.machine.pieces(a.gpu, p, uint64(n), func(_ *mapping, _ uint64, b []byte) { all = append(all, b) })
	if r != cu.Success {
		return nil, fmt.Errorf("%d bytes at %s, by a library's kernel: %w", n, p, ptxvm.ErrAddress)
	}
	return all, nil
}

// EnqueueLibrary puts a library's work on a stream, or records it. prepare is called before it returns, with whether the stream records; what
// it gives is called for each run of the work, when its turn has come.
func (m *Machine) EnqueueLibrary(on cu.StreamHandle, prepare func(recorded bool) func() Step) cu.Result {
	return m.enqueue(on, func(s *stream) (*op, cu.Result) {
		if m.config.Weak {
			return nil, m.violation(cu.NotSupported, "with weak memory there are no libraries")
		}
		return &op{kind: opLibrary, library: prepare(s.capture.Load() != nil)}, cu.Success
	})
}

// Current is the GPU whose context is current on the calling thread, or -1.
func (m *Machine) Current() int {
	if g := m.current(); g != nil {
		return g.ordinal
	}
	return -1
}

// GPUs is how many there are.
func (m *Machine) GPUs() int { return len(m.gpus) }

// Multicast reports whether a GPU has multicast.
func (m *Machine) Multicast(gpu int) bool { return m.config.Multicast && m.gpus[gpu].Capability >= 90 }

// Violation notes a use of a library that a real one would not survive. It may be called in a step.
func (m *Machine) Violation(format string, args ...any) {
	m.noted.Lock()
	defer m.noted.Unlock()
	m.misuse = append(m.misuse, fmt.Sprintf(format, args...))
}

// Write puts bytes at an address of a GPU, as a library does before it hands out what it has made.
func (m *Machine) Write(gpu int, p device.Ptr, b []byte) cu.Result {
	return m.do(func() cu.Result {
		return m.pieces(m.gpus[gpu], p, uint64(len(b)), func(_ *mapping, _ uint64, to []byte) { b = b[copy(to, b):] })
	})
}
