package simcuda

import (
	"slices"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/symmem/symmem/device"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/ptxvm"
)

// stream is a queue of work.
type stream struct {
	handle  cu.StreamHandle
	gpu     *gpu
	context int32                   // of the GPU's contexts, the one that it was made in
	pending atomic.Int64            // work that has not ended
	capture atomic.Pointer[capture] // what it takes part in

	queue     []*work // the oldest first
	flight    int     // of them, kernels that were handed to the machine
	lane      *lane   // for kernels
	deps      []*node // in a capture: what comes next comes after these
	active    bool    // it is in the machine's list
	destroyed bool
}

// lane is a stream of the machine that runs kernels.
type lane struct {
	vm    *ptxvm.Stream
	users int
}

func (g *gpu) takeLane(behind ptxvm.Order) *lane {
	for i := len(g.lanes) - 1; i >= 0; i-- {
		l := g.lanes[i]
		if g.machine.weak != nil && !l.vm.Fits(behind) {
			continue
		}
		g.lanes = slices.Delete(g.lanes, i, i+1)
		l.users = 1
		return l
	}
	return &lane{vm: g.vm.NewStream(g.ordinal), users: 1}
}

func (g *gpu) dropLane(l *lane) {
	if l.users--; l.users == 0 && g.vm != nil {
		g.lanes = append(g.lanes, l)
	}
}

// mostQueued is how much work the queue of a stream holds: enqueueing more waits for room (seen on H200, driver 580).
const mostQueued = 1000

// opKind says what a piece of work does.
type opKind uint8

const (
	opKernel opKind = iota
	opCopy
	opFill
	opMemory
	opRecord
	opWait
	opHost
	opGraph
	opLibrary
	opNothing
)

// op is a piece of work as it was enqueued or captured. It does not change.
type op struct {
	kind     opKind
	launch   *ptxvm.Launch
	dst, src device.Ptr
	to, from unsafe.Pointer // memory of the host that the driver need not know, instead of dst or src
	bytes    uint64
	value    uint8
	batch    []cu.BatchMemOp
	stamp    *stamp
	data     uintptr // of a host function
	exec     *exec
	library  func() Step
}

// work is a run of an op.
type work struct {
	op     *op
	at     uint64 // how far it has come
	begun  bool
	ended  atomic.Bool // a host function
	lane   *lane
	run    *run
	step   Step
	node   int // of a graph
	ticket int // among the launches of a graph

	// With weak memory.
	behind ptxvm.Order // what the host was behind
	order  ptxvm.Order // what it is behind, and when it has ended what is behind it
	placed bool        // order is known
	agent  *ptxvm.Agent
}

// stream finds a stream, and says what ended its context.
func (m *Machine) stream(h cu.StreamHandle) (*stream, cu.Result) {
	x, ok := m.streams.Load(h)
	if !ok {
		m.lock()
		defer m.mu.Unlock()
		return nil, m.violation(cu.InvalidHandle, "a call for a stream that is not there: %#x", h)
	}
	s := x.(*stream)
	if s.context != s.gpu.context.Load() {
		m.lock()
		defer m.mu.Unlock()
		return nil, m.violation(cu.InvalidHandle, "a call for a stream whose context was destroyed: %#x", h)
	}
	return s, s.gpu.result()
}

// enqueue puts work on a stream, or into its capture.
func (m *Machine) enqueue(h cu.StreamHandle, make func(s *stream) (*op, cu.Result)) cu.Result {
	s, r := m.stream(h)
	if r != cu.Success {
		return r
	}
	m.lock()
	defer m.mu.Unlock()
	// Others wait for a call that waits for the GPU; a full queue has no room.
	for s.capture.Load() == nil && (s.gpu.draining > 0 || len(s.queue) >= mostQueued) && s.gpu.result() == cu.Success {
		m.moved.Wait()
	}
	if r := s.gpu.result(); r != cu.Success {
		return r
	}
	if s.destroyed {
		return m.violation(cu.InvalidHandle, "work for a stream that was destroyed")
	}
	o, r := make(s)
	if r != cu.Success || o == nil {
		return r
	}
	if c := s.capture.Load(); c != nil {
		switch o.kind {
		case opRecord, opWait, opGraph:
			return m.violation(captureUnsupported, "an operation that cannot be captured")
		}
		s.deps = []*node{c.graph.add(s.gpu, o, s.deps)}
		return cu.Success
	}
	m.append(s, &work{op: o})
	return cu.Success
}

// append puts work on a stream that does not capture.
func (m *Machine) append(s *stream, w *work) {
	if len(s.queue) == 0 {
		s.gpu.busy++
	}
	w.behind = m.host()
	s.queue = append(s.queue, w)
	s.pending.Add(1)
	if !s.active {
		s.active = true
		m.active = append(m.active, s)
	}
	m.start()
}

func (m *Machine) streamCalls(d *cu.Driver) {
	create := func(h *cu.StreamHandle, flags uint32) cu.Result {
		return m.on(func(g *gpu) cu.Result {
			if flags&^cu.StreamNonBlocking != 0 {
				return cu.InvalidValue
			}
			s := &stream{handle: cu.StreamHandle(m.number()), gpu: g, context: g.context.Load(), lane: g.takeLane(m.host())}
			m.streams.Store(s.handle, s)
			*h = s.handle
			return cu.Success
		})
	}
	d.StreamCreate = create
	d.StreamCreateWithPriority = func(h *cu.StreamHandle, flags uint32, _ int32) cu.Result { return create(h, flags) }
	// CUDA driver API, cuStreamDestroy: "In case the device is still doing work in the stream hStream when cuStreamDestroy() is called, the function
	// will return immediately and the resources associated with hStream will be released automatically once the device has completed all work".
	d.StreamDestroy = func(h cu.StreamHandle) cu.Result {
		x, ok := m.streams.LoadAndDelete(h)
		return m.do(func() cu.Result {
			if !ok {
				return m.violation(cu.InvalidHandle, "cuStreamDestroy of no stream")
			}
			s := x.(*stream)
			if c := s.capture.Load(); c != nil {
				c.end()
			}
			s.destroyed = true
			if len(s.queue) == 0 {
				s.gpu.dropLane(s.lane)
			}
			return s.gpu.result()
		})
	}
	query := func(h cu.StreamHandle) cu.Result {
		s, r := m.stream(h)
		switch {
		case r != cu.Success:
			return r
		case s.capture.Load() != nil:
			return m.do(func() cu.Result { return m.violation(captureUnsupported, "cuStreamQuery of a stream that captures") })
		case s.pending.Load() > 0:
			return cu.NotReady
		case m.config.Weak:
			m.lock()
			defer m.mu.Unlock()
			if s.pending.Load() == 0 && s.gpu.vm != nil && !s.destroyed {
				m.tell(s.lane.vm.Order())
			}
		}
		return s.gpu.result()
	}
	d.StreamQuery = query
	d.StreamSynchronize = func(h cu.StreamHandle) cu.Result {
		for {
			if r := query(h); r != cu.NotReady {
				return r
			}
			m.lock()
			if s, _ := m.streams.Load(h); s != nil && s.(*stream).pending.Load() > 0 {
				m.moved.Wait()
			}
			m.mu.Unlock()
		}
	}
	d.MemcpyHtoDAsync = func(dst device.Ptr, src unsafe.Pointer, n uint64, h cu.StreamHandle) cu.Result {
		return m.copy(h, &op{kind: opCopy, dst: dst, from: src, bytes: n})
	}
	d.MemcpyDtoHAsync = func(dst unsafe.Pointer, src device.Ptr, n uint64, h cu.StreamHandle) cu.Result {
		return m.copy(h, &op{kind: opCopy, to: dst, src: src, bytes: n})
	}
	d.MemcpyDtoDAsync = func(dst, src device.Ptr, n uint64, h cu.StreamHandle) cu.Result {
		return m.copy(h, &op{kind: opCopy, dst: dst, src: src, bytes: n})
	}
	d.MemsetD8Async = func(p device.Ptr, value uint8, n uint64, h cu.StreamHandle) cu.Result {
		return m.copy(h, &op{kind: opFill, dst: p, value: value, bytes: n})
	}
	d.StreamWriteValue32 = func(h cu.StreamHandle, p device.Ptr, value, flags uint32) cu.Result {
		return m.batch(h, []cu.BatchMemOp{{Op: cu.MemOpWrite32, Address: uint64(p), Value: uint64(value), Flags: flags}})
	}
	d.StreamBatchMemOp = func(h cu.StreamHandle, count uint32, ops *cu.BatchMemOp, flags uint32) cu.Result {
		if count == 0 || count >= 256 || flags != 0 { // CUDA driver API, cuStreamBatchMemOp: "count: the number of operations in the array. Must be less than 256."
			return cu.InvalidValue
		}
		return m.batch(h, slices.Clone(unsafe.Slice(ops, count)))
	}
	d.LaunchHostFunc = func(h cu.StreamHandle, _, data uintptr) cu.Result {
		return m.enqueue(h, func(*stream) (*op, cu.Result) { return &op{kind: opHost, data: data}, cu.Success })
	}
	m.captureCalls(d)
}

// copy enqueues a copy or a fill. The driver looks at the addresses when it is called: one that it does not know is CUDA_ERROR_INVALID_VALUE.
func (m *Machine) copy(h cu.StreamHandle, o *op) cu.Result {
	return m.enqueue(h, func(*stream) (*op, cu.Result) {
		for _, p := range []device.Ptr{o.dst, o.src} {
			if p != 0 && m.at(p) == nil {
				return nil, cu.InvalidValue
			}
		}
		if o.dst == 0 && o.to == nil || o.kind == opCopy && o.src == 0 && o.from == nil {
			return nil, cu.InvalidValue
		}
		if o.bytes == 0 {
			return nil, cu.Success
		}
		return o, cu.Success
	})
}

// batch enqueues memory operations, which run one after the other.
func (m *Machine) batch(h cu.StreamHandle, ops []cu.BatchMemOp) cu.Result {
	return m.enqueue(h, func(*stream) (*op, cu.Result) {
		for _, o := range ops {
			// CUDA driver API, stream memory operations: the address must be of a word, in memory that the driver knows. Flags: see internal/cuda.
			if o.Op != cu.MemOpWrite32 && o.Op != cu.MemOpWait32 || o.Flags != 0 {
				return nil, cu.NotSupported
			}
			if o.Address%4 != 0 || m.at(device.Ptr(o.Address)) == nil {
				return nil, cu.InvalidValue
			}
		}
		return &op{kind: opMemory, batch: ops}, cu.Success
	})
}

// stamp is one record of an event.
type stamp struct {
	done  atomic.Bool
	at    time.Time
	order ptxvm.Order // with weak memory: what the stream was behind
}

type event struct {
	gpu     *gpu
	context int32 // of the GPU's contexts, the one that it was made in
	timing  bool
	last    atomic.Pointer[stamp] // nil if it was never recorded
	cast    atomic.Bool           // the latest record is in a capture

	capture *capture
	deps    []*node
}

func (m *Machine) event(h cu.EventHandle) (*event, cu.Result) {
	x, ok := m.events.Load(h)
	if !ok {
		m.lock()
		defer m.mu.Unlock()
		return nil, m.violation(cu.InvalidHandle, "a call for an event that is not there: %#x", h)
	}
	e := x.(*event)
	if e.context != e.gpu.context.Load() {
		m.lock()
		defer m.mu.Unlock()
		return nil, m.violation(cu.InvalidHandle, "a call for an event whose context was destroyed: %#x", h)
	}
	return e, e.gpu.result()
}

func (m *Machine) eventCalls(d *cu.Driver) {
	d.EventCreate = func(h *cu.EventHandle, flags uint32) cu.Result {
		return m.on(func(g *gpu) cu.Result {
			if flags&^cu.EventDisableTiming != 0 {
				return cu.InvalidValue
			}
			*h = cu.EventHandle(m.number())
			m.events.Store(*h, &event{gpu: g, context: g.context.Load(), timing: flags&cu.EventDisableTiming == 0})
			return cu.Success
		})
	}
	d.EventDestroy = func(h cu.EventHandle) cu.Result {
		if _, ok := m.events.LoadAndDelete(h); !ok {
			return m.do(func() cu.Result { return m.violation(cu.InvalidHandle, "cuEventDestroy of no event") })
		}
		return cu.Success
	}
	d.EventRecord = func(h cu.EventHandle, on cu.StreamHandle) cu.Result {
		e, r := m.event(h)
		if r != cu.Success {
			return r
		}
		return m.enqueue(on, func(s *stream) (*op, cu.Result) {
			// CUDA driver API, cuEventRecord: event and stream "must be from the same CUDA context".
			if s.gpu != e.gpu {
				return nil, m.violation(cu.InvalidHandle, "cuEventRecord of an event of GPU %d on a stream of GPU %d", e.gpu.ordinal, s.gpu.ordinal)
			}
			if c := s.capture.Load(); c != nil {
				e.capture, e.deps = c, slices.Clone(s.deps)
				e.cast.Store(true)
				return nil, cu.Success
			}
			e.capture, e.deps = nil, nil
			e.cast.Store(false)
			x := &stamp{}
			e.last.Store(x)
			return &op{kind: opRecord, stamp: x}, cu.Success
		})
	}
	d.StreamWaitEvent = func(on cu.StreamHandle, h cu.EventHandle, flags uint32) cu.Result {
		e, r := m.event(h)
		if r != cu.Success && (e == nil || e.gpu.result() == cu.Success) {
			return r
		}
		return m.enqueue(on, func(s *stream) (*op, cu.Result) {
			c := s.capture.Load()
			switch {
			case e.cast.Load():
				// CUDA C++ programming guide, cross-stream dependencies: a stream that waits for an event of a capture joins it.
				if e.capture.over {
					return nil, m.violation(capturedEvent, "cuStreamWaitEvent for an event of a capture that has ended")
				}
				if c != nil && c != e.capture {
					return nil, m.violation(captureMerge, "cuStreamWaitEvent would join two captures")
				}
				if c == nil {
					e.capture.streams = append(e.capture.streams, s)
					s.capture.Store(e.capture)
					s.deps = nil
				}
				for _, n := range e.deps {
					if !slices.Contains(s.deps, n) {
						s.deps = append(s.deps, n)
					}
				}
				return nil, cu.Success
			case c != nil:
				return nil, m.violation(captureIsolation, "cuStreamWaitEvent, in a capture, for an event from before it")
			case e.last.Load() == nil: // never recorded: CUDA driver API, cuStreamWaitEvent: "this call acts as if the record has already completed"
				return nil, cu.Success
			}
			return &op{kind: opWait, stamp: e.last.Load()}, cu.Success
		})
	}
	d.EventQuery = func(h cu.EventHandle) cu.Result {
		e, r := m.event(h)
		switch {
		case r != cu.Success:
			return r
		case e.cast.Load():
			return m.do(func() cu.Result { return m.violation(capturedEvent, "cuEventQuery of an event of a capture") })
		}
		x := e.last.Load()
		if x != nil && !x.done.Load() {
			return cu.NotReady
		}
		if x != nil && m.config.Weak {
			m.lock()
			defer m.mu.Unlock()
			m.tell(x.order)
		}
		return e.gpu.result()
	}
	d.EventElapsedTime = func(ms *float32, start, end cu.EventHandle) cu.Result {
		a, r := m.event(start)
		if r != cu.Success {
			return r
		}
		b, r := m.event(end)
		if r != cu.Success {
			return r
		}
		return m.do(func() cu.Result {
			x, y := a.last.Load(), b.last.Load()
			switch {
			case a.cast.Load() || b.cast.Load():
				return m.violation(capturedEvent, "cuEventElapsedTime of an event of a capture")
			case x == nil || y == nil || !a.timing || !b.timing:
				return cu.InvalidHandle
			case !x.done.Load() || !y.done.Load():
				return cu.NotReady
			}
			*ms = float32(y.at.Sub(x.at).Seconds() * 1000)
			return cu.Success
		})
	}
}
