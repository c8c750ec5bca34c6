package host

import (
	"context"
	"fmt"
	"runtime"
	"runtime/debug"
	"sync/atomic"
	"time"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/futex"
)

const (
	// An idle worker looks for new work, with yields to other goroutines, for 5 us or so before it parks.
	pollLoads  = 200
	pollRounds = 30

	// keepWork is the most entries of a queue whose memory is kept for reuse; a queue that grew beyond is given back.
	keepWork = 1 << 16
)

// opKind is a kind of work.
type opKind uint8

const (
	opKernel opKind = iota + 1
	opWork
	opFunc
	opCopy
	opFill
	opWrite
	opWait
	opRecord
	opWaitEvent
	opTakeTurn
	opGraph
	opAwait
)

// String is the name of the call that enqueues such work.
func (k opKind) String() string {
	switch k {
	case opKernel, opWork:
		return "Launch"
	case opFunc:
		return "HostFunc"
	case opCopy:
		return "Copy"
	case opFill:
		return "Fill"
	case opWrite:
		return "WriteValue32"
	case opWait:
		return "WaitValue32"
	case opRecord:
		return "Record"
	case opWaitEvent:
		return "WaitEvent"
	case opTakeTurn, opGraph, opAwait:
		return "Graph.Launch"
	}
	return fmt.Sprintf("opKind(%d)", uint8(k))
}

// op is one work of a queue or a graph. It is a plain value, so that enqueueing it makes no garbage, and as long as a cache line; which fields
// count depends on the kind.
type op struct {
	kind  opKind
	value uint32     // opFill: the byte; opWrite, opWait: the word; opAwait: the branch
	dst   device.Ptr // opCopy, opFill, opWrite, opWait
	src   device.Ptr // opCopy
	n     uint64     // opCopy, opFill: bytes; opWaitEvent: how much work of the stream must have ended; opTakeTurn, opGraph: the turn in the line; opAwait: how much of the branch

	kernel device.HostKernel // opKernel
	what   any               // opWork: a device.HostWork; opFunc: a func(); opRecord: *Event; opWaitEvent: *Stream; opTakeTurn: *line; opGraph: *Graph
}

// work is the goroutine of the stream: it runs what is enqueued until the stream is closed and its queue is empty.
func (s *Stream) work() {
	debug.SetPanicOnFault(true) // memory that is not there becomes an error of the work instead of the end of the process
	returned := false
	defer func() {
		if returned {
			return
		}
		// A kernel or host function called runtime.Goexit, and perform has noted its failure. This goroutine cannot be
		// kept from ending, so another goes on behind the work that did it.
		if n := len(s.frames); n > 0 {
			s.step(n - 1)
		} else {
			s.complete()
		}
		go s.work()
	}()
	for s.next() {
		if o := &s.batch[s.at]; o.kind == opGraph {
			s.replay(o)
		} else {
			s.perform(o)
		}
		s.complete()
	}
	returned = true
	close(s.exited)
}

// next reports whether s.batch[s.at] is work to run, after waiting for some. It is false when there will be no more.
func (s *Stream) next() bool {
	if s.at < len(s.batch) {
		return true
	}
	for {
		if s.filled.Load() != s.taken || s.poll() {
			s.take()
			return true
		}
		s.mu.Lock()
		switch {
		case len(s.queue) > 0:
			s.mu.Unlock()
			continue
		case s.closed:
			s.mu.Unlock()
			return false
		}
		s.parked = true
		s.mu.Unlock()
		<-s.wake
	}
}

// poll looks for new work for a while and reports whether there is some.
func (s *Stream) poll() bool {
	loads := 1
	if severalProcessors() {
		loads = pollLoads
	}
	for range pollRounds {
		runtime.Gosched()
		for range loads {
			if s.filled.Load() != s.taken {
				return true
			}
		}
	}
	return false
}

// take makes all that is queued the batch that the worker runs, and the memory of the last batch the new queue.
func (s *Stream) take() {
	empty := s.batch[:0]
	if cap(empty) > keepWork {
		empty = nil
	}
	s.mu.Lock()
	s.batch, s.queue = s.queue, empty
	s.taken = s.filled.Load()
	s.mu.Unlock()
	s.at = 0
}

// complete ends the current work, and wakes those who wait for it.
func (s *Stream) complete() {
	s.batch[s.at] = op{} // nothing is kept alive by work that has run
	s.at++
	s.done.advance(s.done.value.Load() + 1)
}

// replay runs a launch of a graph when it is its turn.
func (s *Stream) replay(o *op) {
	g := o.what.(*Graph)
	s.turn(&g.lines[0].served, o.n)
	s.replayGraph(g, 0)
	for _, l := range g.lines {
		l.served.advance(l.served.value.Load() + 1)
	}
}

// frame is how far the replay of a branch has come, so that after a runtime.Goexit the next goroutine finds its place again.
type frame struct {
	graph  *Graph
	branch int
	replay uint64 // how many replays of the graph there were before
	at     int    // the current work
}

// replayGraph runs the work of g, which is nested depth deep: its first branch here, and the others on goroutines of their own, so that
// one may wait for what another rank does behind what it does in another branch.
func (s *Stream) replayGraph(g *Graph, depth int) {
	if len(s.frames) == depth {
		g.replaying.Lock()
		s.frames = append(s.frames, frame{graph: g, replay: g.replays})
		for i, side := range g.sides {
			if len(g.branches[i+1]) == 0 {
				continue // of a stream that joined and recorded nothing: nobody would wait for the end of its goroutine
			}
			side.launcher.Store(s)
			side.frames = append(side.frames[:0], frame{graph: g, branch: i + 1, replay: g.replays})
			go side.side()
		}
		g.replays++
	}
	s.replayBranch(depth)
	s.frames = s.frames[:depth]
	g.replaying.Unlock()
}

// replaySide runs a branch that is not the first on the goroutine that it begins.
func (s *Stream) replaySide() {
	debug.SetPanicOnFault(true)
	returned := false
	defer func() {
		if returned {
			return
		}
		// Behind the work that called runtime.Goexit. A graph inside of the branch may have come to its end with it, which leaves the branch to go on.
		if depth := len(s.frames) - 1; s.step(depth) || depth > 0 {
			go s.replaySide()
		}
	}()
	s.replayBranch(0)
	returned = true
}

// replayBranch runs the branch at depth from where it is.
func (s *Stream) replayBranch(depth int) {
	f := s.frames[depth]
	for more := f.at < len(f.graph.branches[f.branch]); more; more = s.step(depth) {
		switch o := &f.graph.branches[f.branch][s.frames[depth].at]; o.kind {
		case opGraph:
			s.replayGraph(o.what.(*Graph), depth+1)
		case opAwait:
			s.turn(&f.graph.ran[o.value], f.replay*uint64(len(f.graph.branches[o.value]))+o.n)
			if o.value > 0 {
				// What has failed there comes before what fails here. The first branch awaits all others before it ends.
				s.failures.adopt(s.done.value.Load()+1, &f.graph.sides[o.value-1].failures)
			}
		default:
			s.perform(o)
		}
	}
}

// step notes that the current work of the branch at depth has ended, and reports whether there is more. When there is not, whoever
// waits for the branch goes on, and may begin the next replay: nothing of the branch is touched then.
func (s *Stream) step(depth int) (more bool) {
	f := &s.frames[depth]
	f.at++
	n := len(f.graph.branches[f.branch])
	more = f.at < n
	if len(f.graph.branches) > 1 {
		f.graph.ran[f.branch].advance(f.replay*uint64(n) + uint64(f.at))
	}
	return more
}

// perform runs any work but a graph, and notes its failure.
func (s *Stream) perform(o *op) {
	ended := false
	defer func() {
		if ended {
			return
		}
		if v := recover(); v != nil {
			s.fail(o, &device.PanicError{Value: v, Stack: string(debug.Stack())})
		} else {
			s.fail(o, errGoexit)
		}
		s.pinned.release()
	}()
	if err := s.dispatch(o); err != nil {
		s.fail(o, err)
	}
	ended = true
}

// dispatch runs o.
func (s *Stream) dispatch(o *op) error {
	switch o.kind {
	case opKernel:
		return o.kernel.RunKernel()
	case opWork:
		return workKernel{o.what.(device.HostWork)}.RunKernel()
	case opFunc:
		o.what.(func())()
		return nil
	case opCopy:
		return s.runCopy(o)
	case opFill:
		b, err := s.pin("dst", o.dst, int64(o.n))
		if err != nil {
			return err
		}
		fill(b, byte(o.value))
		s.pinned.release()
		return nil
	case opWrite:
		b, err := s.pin("p", o.dst, 4)
		if err != nil {
			return err
		}
		futex.Publish(word(b), o.value)
		s.pinned.release()
		return nil
	case opWait:
		b, err := s.pin("p", o.dst, 4)
		if err != nil {
			return err
		}
		err = s.waitWord(word(b), o.value)
		s.pinned.release()
		return err
	case opRecord:
		o.what.(*Event).complete(s, s.done.value.Load()+1)
		return nil
	case opWaitEvent:
		s.turn(&o.what.(*Stream).done, o.n)
		return nil
	case opTakeTurn:
		s.turn(&o.what.(*line).served, o.n)
		return nil
	}
	return fmt.Errorf("unknown work %v", o.kind)
}

// turn waits until another stream, or another launch, has come as far as target. It waits for work that was enqueued before, so it ends if that work
// ends; no other bound is needed.
func (s *Stream) turn(p *progress, target uint64) {
	// The background context never ends, so there is no error to return.
	_ = p.wait(context.Background(), target)
}

// runCopy runs an opCopy.
func (s *Stream) runCopy(o *op) error {
	dst, err := s.pin("dst", o.dst, int64(o.n))
	if err != nil {
		return err
	}
	src, err := s.pin("src", o.src, int64(o.n))
	if err == nil {
		copy(dst, src)
	}
	s.pinned.release()
	return err
}

// waitWord waits until the word is v or beyond it.
func (s *Stream) waitWord(addr *uint32, v uint32) error {
	if int32(atomic.LoadUint32(addr)-v) >= 0 {
		return nil
	}
	return futex.WaitAtLeast(addr, v, futex.Bound{Deadline: time.Now().Add(s.dev.waitTimeout), Err: s.waitErr})
}

// whyStop is the Err of the bound of waitWord: it returns an error if the wait that is under way must end now.
func (s *Stream) whyStop() error {
	if s.pinned.gone() {
		return errUnmapped
	}
	if at := s.closingBy(); at != 0 && time.Since(s.dev.opened) >= time.Duration(at) {
		return errClosing
	}
	if s.dev.lost != nil {
		return s.dev.lost()
	}
	return nil
}

// closingBy is when the waits of the stream end because it is closed, or, of the branch of a graph, the stream that launched it.
func (s *Stream) closingBy() int64 {
	if l := s.launcher.Load(); l != nil {
		return l.closingBy()
	}
	return s.closeBy.Load()
}

// pins are the mappings that the current work has pinned: two at most.
type pins struct {
	held [2]*mapping
	n    int
}

// release unpins all.
func (p *pins) release() {
	for i := range p.n {
		p.held[i].release()
		p.held[i] = nil
	}
	p.n = 0
}

// gone reports whether somebody waits to unmap one of them.
func (p *pins) gone() bool {
	for i := range p.n {
		if p.held[i].gone.Load() {
			return true
		}
	}
	return false
}

// pin returns the n bytes at p, which stay mapped until s.pinned is released.
func (s *Stream) pin(arg string, p device.Ptr, n int64) ([]byte, error) {
	m, b, err := s.dev.space.pin("running", arg, p, n)
	if err != nil {
		return nil, err
	}
	s.pinned.held[s.pinned.n] = m
	s.pinned.n++
	return b, nil
}

// fail keeps the error of o for the next Synchronize.
func (s *Stream) fail(o *op, err error) {
	e := &device.WorkError{Op: o.kind.String(), Addr: o.dst, Err: err}
	if o.kind == opWork {
		e.Op = fmt.Sprintf("HostWork(%v)", workKernel{o.what.(device.HostWork)})
	} else if o.kind == opKernel {
		if named, ok := o.kernel.(fmt.Stringer); ok {
			e.Op = fmt.Sprintf("Launch(%v)", named)
		} else {
			e.Op = fmt.Sprintf("Launch(%T)", o.kernel)
		}
	}
	s.dev.log.Debug("work failed", "op", e.Op, "address", e.Addr, "error", err)
	s.failures.add(s.done.value.Load()+1, e)
}
