package simcuda

import (
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/cuda"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/ptxvm"
)

// The scheduler is one goroutine, which runs while there is work: in turn it does for each GPU what its streams can do, and steps its kernels. A
// kernel that waits for what the host does, or another process, only looks again and again, which shows in that no thread stores anything. When
// that is so for all GPUs, and nothing else moves, it pauses, a little longer each time, until a call of the driver or the end of the pause.

const (
	firstPause   = 20 * time.Microsecond
	longestPause = time.Millisecond
	copyStretch  = 1 << 20 // bytes that a copy moves before others have their turn
)

// start makes the scheduler run, and soon. mu is held.
func (m *Machine) start() {
	if !m.running {
		m.running = true
		go m.schedule()
		return
	}
	select {
	case m.wake <- struct{}{}:
	default:
	}
}

// schedule is the goroutine.
func (m *Machine) schedule() {
	quiet := 0 // turns since something has moved
	pause := firstPause
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for k := 0; ; k++ {
		m.mu.Lock()
		later := m.later
		m.later = nil
		if len(m.active) == 0 && len(later) == 0 {
			m.running = false
			m.mu.Unlock()
			return
		}
		moved, turns := m.turn(m.gpus[k%len(m.gpus)])
		m.mu.Unlock()
		for _, data := range later {
			go cuda.RunHostFunc(data)
		}
		if m.callers.Load() > 0 {
			runtime.Gosched()
		}
		if moved {
			quiet, pause = 0, firstPause
			continue
		}
		quiet += turns + 1
		if quiet < len(m.gpus)*(4*m.mostReady()+16) {
			continue
		}
		timer.Reset(pause)
		select {
		case <-m.wake:
			pause = firstPause
		case <-timer.C:
			pause = min(2*pause, longestPause)
		}
		// Enough turns that each thread has looked again.
		quiet = len(m.gpus) * 3 * m.mostReady()
	}
}

// mostReady is how many threads of a GPU can go on, of that which has most.
func (m *Machine) mostReady() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	most := 0
	for _, g := range m.gpus {
		if g.vm != nil {
			most = max(most, g.vm.Ready())
		}
	}
	return most
}

// turn lets a GPU go on, and says whether anything has moved, and how many turns threads had.
func (m *Machine) turn(g *gpu) (moved bool, turns int) {
	if g.busy == 0 {
		return false, 0
	}
	for _, c := range m.shared {
		c.look()
	}
	for i := 0; i < len(m.active); i++ {
		s := m.active[i]
		if s.gpu != g {
			continue
		}
		moved = m.advance(s) || moved
		if len(s.queue) == 0 {
			m.active[i] = m.active[len(m.active)-1]
			m.active = m.active[:len(m.active)-1]
			i--
			s.active = false
		}
	}
	if g.vm == nil || g.result() != cu.Success {
		return moved, 0
	}
	if m.weak != nil {
		m.floor()
	}
	turns = 16 + min(16+m.rand.IntN(512), 8*g.vm.Ready())
	if _, err := g.vm.Step(turns); err != nil {
		if m.weak != nil {
			m.failWeak(resultOf(err), err)
		} else {
			m.fail(g, resultOf(err), err)
		}
		return true, turns
	}
	if n := g.vm.Stores(); n != g.stores {
		g.stores, moved = n, true
	}
	return moved, turns
}

// resultOf is what the driver says of a kernel's failure.
func resultOf(err error) cu.Result {
	switch {
	case errors.Is(err, ptxvm.ErrAddress):
		return cu.IllegalAddress
	case errors.Is(err, ptxvm.ErrAlignment):
		return cu.MisalignedAddress
	}
	return cu.LaunchFailed
}

// fail ends a context. CUDA driver API, CUDA_ERROR_ILLEGAL_ADDRESS: "This leaves the process in an inconsistent state and any further CUDA work will
// return the same error." Nothing of it runs on, and nothing waits for it.
func (m *Machine) fail(g *gpu, r cu.Result, why error) {
	m.violations = append(m.violations, fmt.Sprintf("GPU %d: %s: %v", g.ordinal, names[r], why))
	g.failed.Store(int32(r))
	for _, s := range m.active {
		if s.gpu != g {
			continue
		}
		for _, w := range s.queue {
			switch w.op.kind {
			case opRecord:
				w.op.stamp.at = time.Now()
				w.op.stamp.done.Store(true)
			case opGraph:
				w.op.exec.ended++
				m.release(1, w.op.exec.users...)
			}
		}
		s.queue, s.flight = nil, 0
		s.pending.Store(0)
	}
	g.busy = 0
	m.moved.Broadcast()
}

// drain waits until the GPU has nothing to do. mu is held, and given up meanwhile.
func (m *Machine) drain(g *gpu) {
	g.draining++
	for g.busy > 0 {
		m.moved.Wait()
	}
	g.draining--
	m.tellAll(g)
	m.moved.Broadcast()
}

// advance does what a stream can do now, and says whether that was anything.
func (m *Machine) advance(s *stream) (moved bool) {
	for len(s.queue) > 0 {
		w := s.queue[0]
		if s.flight > 0 {
			if s.lane.vm.Idle() {
				for ; s.flight > 0; s.flight-- {
					m.ended(s)
				}
				moved = true
				continue
			}
			if s.flight == len(s.queue) || s.flight == 8 || s.queue[s.flight].op.kind != opKernel {
				return moved
			}
			w = s.queue[s.flight]
		}
		if w.op.kind == opKernel {
			m.hand(s.gpu, s.lane, w.op.launch, w.behind)
			s.flight++
			moved = true
			continue
		}
		if m.weak != nil && !w.placed {
			w.order, w.placed = m.join(s.lane.vm.Order(), w.behind), true
		}
		done, more, err := m.perform(s.gpu, w)
		moved = moved || more || done
		if err != nil {
			m.broken(s.gpu, err)
			return true
		}
		if !done {
			return moved
		}
		if m.weak != nil {
			m.finish(w)
			s.lane.vm.Follow(w.order)
		}
		m.ended(s)
	}
	return moved
}

// hand gives a kernel to the machine.
func (m *Machine) hand(g *gpu, l *lane, launch *ptxvm.Launch, behind ptxvm.Order) {
	if m.stats.Launches == nil {
		m.stats.Launches = map[string]int{}
	}
	m.stats.Launches[launch.Function.Name]++
	now := *launch
	now.Behind = behind
	if err := l.vm.Launch(now); err != nil {
		panic(err) // it was checked
	}
}

// ended takes the oldest work off a stream.
func (m *Machine) ended(s *stream) {
	s.queue[0] = nil
	s.queue = s.queue[1:]
	s.pending.Add(-1)
	if len(s.queue) == 0 {
		s.queue = nil
		s.gpu.busy--
		if s.destroyed {
			s.gpu.dropLane(s.lane)
		}
	}
	m.moved.Broadcast()
}

// perform does what it can of work that is no kernel. more says that it has come further.
func (m *Machine) perform(g *gpu, w *work) (done, more bool, err error) {
	o := w.op
	switch o.kind {
	case opNothing:
		return true, true, nil
	case opCopy, opFill:
		return m.move(g, w)
	case opMemory:
		for ; w.at < uint64(len(o.batch)); w.at++ {
			x := &o.batch[w.at]
			if m.weak != nil {
				done, err := m.memoryOp(g, w, x)
				if err != nil || !done {
					return false, more, err
				}
				more = true
				continue
			}
			word, err := m.word(g, x.Address)
			if err != nil {
				return false, more, err
			}
			if x.Op == cu.MemOpWrite32 {
				atomic.StoreUint32(word, uint32(x.Value))
			} else if int32(atomic.LoadUint32(word)-uint32(x.Value)) < 0 {
				return false, more, nil
			}
			more = true
		}
		return true, more, nil
	case opRecord:
		o.stamp.at, o.stamp.order = time.Now(), w.order
		o.stamp.done.Store(true)
		return true, true, nil
	case opWait:
		if o.stamp.done.Load() {
			w.order = m.join(w.order, o.stamp.order)
		}
		return o.stamp.done.Load(), false, nil
	case opHost:
		if !w.begun {
			w.begun = true
			m.tell(w.order)
			go func() {
				cuda.RunHostFunc(o.data)
				m.lock()
				w.order = m.join(w.order, m.host())
				w.ended.Store(true)
				m.start()
				m.mu.Unlock()
			}()
			return false, true, nil
		}
		return w.ended.Load(), false, nil
	case opLibrary:
		if w.step == nil {
			w.step, more = o.library(), true
		}
		done, moved, err := w.step(&Access{machine: m, gpu: g})
		return done, more || moved, err
	case opGraph:
		if w.run == nil {
			if o.exec.ended != w.ticket {
				return false, false, nil
			}
			w.run = newRun(o.exec)
			w.run.order = m.join(w.order, o.exec.order)
			more = true
		}
		moved, err := m.follow(w.run)
		if err == nil && w.run.left == 0 {
			o.exec.ended++
			for _, last := range w.run.orders {
				w.order = m.join(w.order, last)
			}
			w.order = m.join(w.order, w.run.order)
			o.exec.order = w.order
			m.release(1, o.exec.users...)
			return true, true, nil
		}
		return false, more || moved, err
	}
	return true, true, nil
}

// word is the word at an address, for the stream of a GPU.
func (m *Machine) word(g *gpu, address uint64) (p *uint32, err error) {
	r := m.pieces(g, device.Ptr(address), 4, func(_ *mapping, _ uint64, b []byte) { p = (*uint32)(unsafe.Pointer(&b[0])) })
	if r != cu.Success {
		return nil, fmt.Errorf("a memory operation at %s: %w", device.Ptr(address), ptxvm.ErrAddress)
	}
	return p, nil
}

// move does a stretch of a copy or a fill.
func (m *Machine) move(g *gpu, w *work) (done, more bool, err error) {
	o := w.op
	if w.at == 0 {
		m.stats.Copies++
	}
	n := min(o.bytes-w.at, copyStretch)
	if o.kind == opFill {
		n = o.bytes
		if m.weak != nil {
			if err := m.moves(g, w, n); err != nil {
				return false, false, err
			}
		}
		r := m.pieces(g, o.dst, n, func(x *mapping, at uint64, b []byte) {
			switch {
			case o.value != 0:
				for i := range b {
					b[i] = o.value
				}
			case x.of != nil:
				x.of.zero(at, uint64(len(b)))
			default:
				clear(b)
			}
		})
		if r != cu.Success {
			return false, false, fmt.Errorf("a fill of %d bytes at %s: %w", o.bytes, o.dst, ptxvm.ErrAddress)
		}
		return true, true, nil
	}
	// The two sides may be cut into pieces differently.
	from, err := m.side(g, o.src, o.from, w.at, n)
	if err != nil {
		return false, false, err
	}
	to, err := m.side(g, o.dst, o.to, w.at, n)
	if err != nil {
		return false, false, err
	}
	if m.weak != nil {
		if err := m.moves(g, w, n); err != nil {
			return false, false, err
		}
	}
	for len(to) > 0 {
		k := copy(to[0], from[0])
		if to[0] = to[0][k:]; len(to[0]) == 0 {
			to = to[1:]
		}
		if from[0] = from[0][k:]; len(from[0]) == 0 {
			from = from[1:]
		}
	}
	w.at += n
	return w.at == o.bytes, true, nil
}

// side is one side of a copy.
func (m *Machine) side(g *gpu, p device.Ptr, host unsafe.Pointer, at, n uint64) (all [][]byte, err error) {
	if host != nil {
		return [][]byte{unsafe.Slice((*byte)(unsafe.Add(host, at)), n)}, nil
	}
	r := m.pieces(g, p.Add(int64(at)), n, func(_ *mapping, _ uint64, b []byte) { all = append(all, b) })
	if r != cu.Success {
		return nil, fmt.Errorf("a copy of %d bytes at %s: %w", n, p.Add(int64(at)), ptxvm.ErrAddress)
	}
	return all, nil
}

// run is a launch of a graph.
type run struct {
	exec    *exec
	missing []int   // how many nodes each node waits for; -1: it has begun
	open    []*work // nodes that can begin or have begun
	left    int
	order   ptxvm.Order   // with weak memory: what its first nodes are behind
	orders  []ptxvm.Order // by node: what is behind it
}

func newRun(x *exec) *run {
	r := &run{exec: x, missing: make([]int, len(x.nodes)), left: len(x.nodes), orders: make([]ptxvm.Order, len(x.nodes))}
	for i, n := range x.nodes {
		if r.missing[i] = len(n.deps); r.missing[i] == 0 {
			r.open = append(r.open, &work{op: n.op, node: i})
		}
	}
	return r
}

// place says what a node is behind.
func (m *Machine) place(r *run, w *work) {
	if w.placed {
		return
	}
	w.order, w.placed = r.order, true
	for _, dep := range r.exec.nodes[w.node].deps {
		w.order = m.join(w.order, r.orders[r.exec.number[dep]])
	}
}

// broken ends the context of a GPU whose work has failed, or with weak memory all.
func (m *Machine) broken(g *gpu, err error) {
	r := cu.IllegalAddress
	if race := (*ptxvm.Race)(nil); errors.As(err, &race) {
		r = cu.LaunchFailed
	}
	if m.weak != nil {
		m.failWeak(r, err)
	} else {
		m.fail(g, r, err)
	}
}

// follow does what the nodes of a graph can do now.
func (m *Machine) follow(r *run) (moved bool, err error) {
	for i := 0; i < len(r.open); i++ {
		w := r.open[i]
		n := r.exec.nodes[w.node]
		done := false
		switch {
		case w.op.kind == opKernel && !w.begun:
			if w.lane == nil {
				m.place(r, w)
				w.lane = n.gpu.takeLane(w.order)
			}
			w.begun, moved = true, true
			m.hand(n.gpu, w.lane, w.op.launch, w.order)
			// A launch with programmatic serialization behind one alone may begin before that ends.
			for _, k := range r.exec.after[w.node] {
				if next := r.exec.nodes[k]; next.op.kind == opKernel && next.op.launch.Overlap && len(next.deps) == 1 {
					w.lane.users++
					r.missing[k] = -1
					r.open = append(r.open, &work{op: next.op, node: k, lane: w.lane})
				}
			}
		case w.op.kind == opKernel:
			if done = w.lane.vm.Idle(); done {
				w.order = w.lane.vm.Order()
				n.gpu.dropLane(w.lane)
			}
		default:
			m.place(r, w)
			var more bool
			if done, more, err = m.perform(n.gpu, w); err != nil {
				return moved, err
			}
			moved = moved || more
		}
		if !done {
			continue
		}
		moved = true
		m.finish(w)
		r.orders[w.node] = w.order
		r.left--
		r.open = append(r.open[:i], r.open[i+1:]...)
		i--
		for _, k := range r.exec.after[w.node] {
			if r.missing[k] > 0 {
				if r.missing[k]--; r.missing[k] == 0 {
					r.open = append(r.open, &work{op: r.exec.nodes[k].op, node: k})
				}
			}
		}
	}
	return moved, nil
}
