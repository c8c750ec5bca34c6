package simcuda

import (
	"errors"
	"fmt"
	"sync/atomic"
	"unsafe"

	"github.com/symmem/symmem/device"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/ptxvm"
)

// Weak memory: one machine of package ptxvm runs the kernels of all GPUs, which have address spaces of their own. What is no kernel, copies and the
// like, accesses memory as an agent of that machine. What the driver's calls order, orders the views of these:
//
//   - Work of a stream is behind the work before it. CUDA C++ programming guide, streams: "a sequence of commands … that execute in order". A kernel that is
//     launched with programmatic serialization may begin before, and is behind by griddepcontrol.wait alone. PTX ISA, griddepcontrol: with .wait the thread waits "until all
//     prerequisite grids in flight have completed and all the memory operations from the prerequisite grids are performed and made visible to the current grid".
//   - cuEventRecord notes what the stream is behind, and who waits for the event or asks whether it is done is behind that. CUDA driver API, cuStreamWaitEvent:
//     "Makes all future work submitted to hStream wait for all work captured in hEvent."
//   - A node of a graph is behind those that it depends on, a root behind the stream and the launches before: CUDA driver API, cuGraphLaunch.
//   - All work is behind what the host was behind when it was enqueued, as the CUDA C++ programming guide's programs suppose, which fill memory and launch. A host
//     that has waited for a stream or an event is behind what it has waited for: CUDA driver API, cuStreamSynchronize: "Waits until the device has completed all operations in
//     the stream". So it is behind all of a GPU when a call has waited for that.
//   - cuStreamWriteValue32 is a release at system scope, cuStreamWaitValue32 an acquire. CUDA driver API, cuStreamWriteValue32, of the flag that is not given here: "Normally,
//     cuStreamWriteValue32 will provide a memory fence before the write, which has semantics similar to __threadfence_system()".
//   - A host function is behind the stream, and what comes next on the stream is behind what the host is behind then.
//   - Kernels and multicast: PTX ISA, multimem, and CUDA C++ programming guide, virtual aliasing support: "Writes to one proxy of the allocation … are considered inconsistent
//     and incoherent with any other proxy of the same memory until the writing device operation (grid launch, memcpy, memset, and so on) completes."
//
// The threads of the host are one: what orders them is not seen here. Memory of the host is as in package ptxvm: accesses take place at once, and no race is found there.

// beginWeak makes the machine for all GPUs, if there is none, and gives a GPU its address space.
func (m *Machine) beginWeak(g *gpu, config ptxvm.Config) *ptxvm.Machine {
	if m.weak == nil {
		config.Weak, config.Keep, config.Turn = true, true, 0
		m.weak = ptxvm.New(ptxvm.NewMemory(), config)
	}
	m.weak.Space(g.ordinal, g.space)
	return m.weak
}

// endWeak takes the address space of a GPU away, and the machine with the last one.
func (m *Machine) endWeak(g *gpu) {
	m.weak.Space(g.ordinal, nil)
	for _, o := range m.gpus {
		if o != g && o.vm != nil {
			return
		}
	}
	m.stats.Instructions += m.weak.Steps()
	m.weak = nil
}

// allocation is the memory as the weak machine knows it.
func (p *physical) allocation() *ptxvm.Allocation {
	if p.cells == nil {
		p.cells = ptxvm.NewAllocation(p.mem)
	}
	return p.cells
}

// tell makes the host be behind something.
func (m *Machine) tell(o ptxvm.Order) {
	if m.weak != nil {
		m.weak.Tell(o)
		m.settle()
	}
}

// tellAll makes the host be behind all that a GPU has done.
func (m *Machine) tellAll(g *gpu) {
	if m.weak != nil {
		m.weak.TellAll(g.ordinal)
		m.settle()
	}
}

// settle lets the machine forget what everybody is behind, if nothing is enqueued.
func (m *Machine) settle() {
	if len(m.active) == 0 {
		m.weak.Settle()
	}
}

// host is what the host is behind.
func (m *Machine) host() (o ptxvm.Order) {
	if m.weak != nil {
		o = m.weak.Host()
	}
	return o
}

// floor tells the machine what all that has not begun is behind: what the host was behind is more with each call, so the oldest of each stream counts.
func (m *Machine) floor() {
	low := m.weak.Host()
	for _, s := range m.active {
		if len(s.queue) > 0 && !s.queue[0].behind.After(low) {
			low = s.queue[0].behind
		}
	}
	m.weak.Floor(low)
}

// join is what is behind both.
func (m *Machine) join(a, b ptxvm.Order) ptxvm.Order {
	if m.weak == nil {
		return ptxvm.Order{}
	}
	return m.weak.Join(a, b)
}

// agent is who does a piece of work that is no kernel.
func (m *Machine) agent(g *gpu, w *work, what string) *ptxvm.Agent {
	if w.agent == nil {
		w.agent = m.weak.Agent(g.ordinal, what, w.order)
	}
	return w.agent
}

// finish ends it.
func (m *Machine) finish(w *work) {
	if w.agent != nil {
		w.order, w.agent = w.agent.End(), nil
	}
}

// name is what a race calls a copy or a fill.
func (o *op) name() string {
	switch {
	case o.kind == opFill:
		return fmt.Sprintf("cuMemsetD8Async of %d bytes at %s", o.bytes, o.dst)
	case o.from != nil:
		return fmt.Sprintf("cuMemcpyHtoDAsync of %d bytes to %s", o.bytes, o.dst)
	case o.to != nil:
		return fmt.Sprintf("cuMemcpyDtoHAsync of %d bytes from %s", o.bytes, o.src)
	}
	return fmt.Sprintf("cuMemcpyDtoDAsync of %d bytes from %s to %s", o.bytes, o.src, o.dst)
}

// moves says to the machine what a stretch of a copy or a fill reads and writes. The bytes are not moved yet.
func (m *Machine) moves(g *gpu, w *work, n uint64) (err error) {
	o := w.op
	a := m.agent(g, w, o.name())
	each := func(p device.Ptr, f func(x *mapping, of *ptxvm.Allocation, at, done uint64, b []byte) error) {
		done := uint64(0)
		m.pieces(g, p.Add(int64(w.at)), n, func(x *mapping, at uint64, b []byte) {
			if x.of != nil && err == nil {
				err = f(x, x.of.allocation(), at, done, b)
			}
			done += uint64(len(b))
		})
	}
	if o.kind == opCopy && o.src != 0 {
		each(o.src, func(x *mapping, of *ptxvm.Allocation, at, _ uint64, b []byte) error {
			if o.to != nil {
				return a.Look(of, at, uint64(x.base)+at, uint64(len(b)))
			}
			return a.Read(of, at, uint64(x.base)+at, uint64(len(b)))
		})
	}
	if o.dst != 0 && err == nil {
		var from [][]byte
		if o.kind == opCopy {
			if from, err = m.side(g, o.src, o.from, w.at, n); err != nil {
				return err
			}
		}
		value := func(i uint64) byte {
			if o.kind == opFill {
				return o.value
			}
			for _, b := range from {
				if i < uint64(len(b)) {
					return b[i]
				}
				i -= uint64(len(b))
			}
			return 0
		}
		each(o.dst, func(x *mapping, of *ptxvm.Allocation, at, done uint64, b []byte) error {
			return a.Write(of, at, uint64(x.base)+at, uint64(len(b)), func(i uint64) byte { return value(done + i) })
		})
	}
	return err
}

// memoryOp does a memory operation, and says whether it is done.
func (m *Machine) memoryOp(g *gpu, w *work, x *cu.BatchMemOp) (done bool, err error) {
	at := m.at(device.Ptr(x.Address))
	if at == nil || at.mem == nil || !g.reaches(at) {
		return false, fmt.Errorf("a memory operation at %s: %w", device.Ptr(x.Address), ptxvm.ErrAddress)
	}
	off := x.Address - uint64(at.base)
	what := fmt.Sprintf("cuStreamWriteValue32 of %d to %#x", x.Value, x.Address)
	if x.Op != cu.MemOpWrite32 {
		what = fmt.Sprintf("cuStreamWaitValue32 for %d at %#x", x.Value, x.Address)
	}
	var v uint32
	switch {
	case at.of == nil: // of the host
		m.finish(w)
		word := (*uint32)(unsafe.Pointer(&at.mem[off]))
		if x.Op == cu.MemOpWrite32 {
			m.weak.Tell(w.order)
			atomic.StoreUint32(word, uint32(x.Value))
			return true, nil
		}
		v = atomic.LoadUint32(word)
		w.order = m.join(w.order, m.host())
	case x.Op == cu.MemOpWrite32:
		a := m.agent(g, w, what)
		a.Name(what)
		return true, a.Store(at.of.allocation(), off, x.Address, uint32(x.Value))
	default:
		a := m.agent(g, w, what)
		a.Name(what)
		if v, err = a.Load(at.of.allocation(), off, x.Address); err != nil {
			return false, err
		}
	}
	return int32(v-uint32(x.Value)) >= 0, nil
}

// failWeak ends all contexts: their kernels run on one machine, which has ended.
func (m *Machine) failWeak(r cu.Result, why error) {
	first := m.gpus[0]
	if e := (*ptxvm.Error)(nil); errors.As(why, &e) && e.Thread != nil {
		first = m.gpus[e.Thread.Device]
	}
	m.fail(first, r, why)
	for _, g := range m.gpus {
		if g != first && g.vm != nil && g.result() == cu.Success {
			m.fail(g, r, fmt.Errorf("with weak memory a failure of one GPU, here of GPU %d, ends the contexts of all", first.ordinal))
		}
	}
}

// foreign refuses what another process has made. Its kernels run on a machine of its own.
func (m *Machine) foreign() cu.Result {
	return m.violation(cu.NotSupported, "weak memory is of one process: what another one has made cannot be used")
}
