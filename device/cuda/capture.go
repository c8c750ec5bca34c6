package cuda

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/symmem/symmem/device"
	cu "github.com/symmem/symmem/internal/cuda"
)

// capture is a graph that is being recorded. The driver records the work; capture holds what the driver does not keep.
type capture struct {
	origin *Stream // the stream that began it

	// enqueuing is held for reading while a stream that has joined enqueues: if the capture ended in the middle of that, work could run at once that
	// is noted as recorded, and that nobody would look after. Taken after the locks of streams.
	enqueuing sync.RWMutex

	mu     sync.Mutex // taken after those of streams
	ended  bool
	parts  *graphParts // the host functions and waits recorded in it
	nested []*Graph    // the graphs launched in it, and those in them
	copies []int       // how often it has each of those

	children []child // a node for each launch of a graph in it
}

// child is a copy of a graph in a capture.
type child struct {
	graph *Graph
	node  cu.GraphNodeHandle
}

// shares reports whether some graph is part of both graphs, or one of them part of the other.
func (c child) shares(g *Graph) bool {
	for _, one := range append([]*Graph{g}, g.nested...) {
		if one == c.graph || slices.Contains(c.graph.nested, one) {
			return true
		}
	}
	return false
}

// earlier returns the nodes of copies that must have ended before one of g begins.
func (c *capture) earlier(g *Graph) []cu.GraphNodeHandle {
	c.mu.Lock()
	defer c.mu.Unlock()
	var nodes []cu.GraphNodeHandle
	for _, one := range c.children {
		if one.shares(g) {
			nodes = append(nodes, one.node)
		}
	}
	return nodes
}

// over reports whether the capture has ended.
func (c *capture) over() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.ended
}

// addFunc notes a host function.
func (c *capture) addFunc(id uintptr) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.parts.ids = append(c.parts.ids, id)
}

// addWait notes a wait.
func (c *capture) addWait(w *graphWait) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.parts.waits = append(c.parts.waits, w)
}

// addCell notes a fault cell of a launch.
func (c *capture) addCell(cell *faultCell) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.parts.cells = append(c.parts.cells, cell)
}

// addWord notes that a launch writes the fault word f.
func (c *capture) addWord(f *FaultWord) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !slices.Contains(c.parts.words, f) {
		c.parts.words = append(c.parts.words, f)
	}
}

// addWork notes work of the CPU.
func (c *capture) addWork(l *workLane) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.parts.works = append(c.parts.works, l)
}

// addGraph notes that g is part of the graph now, as the node.
func (c *capture) addGraph(g *Graph, node cu.GraphNodeHandle) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.children = append(c.children, child{g, node})
	add := func(one *Graph, copies int) {
		i := slices.Index(c.nested, one)
		if i < 0 {
			i = len(c.nested)
			one.use()
			c.nested, c.copies = append(c.nested, one), append(c.copies, 0)
		}
		c.copies[i] += copies
	}
	add(g, 1)
	for i, one := range g.nested {
		add(one, g.copies[i])
	}
}

// drop releases what the capture holds, of which no graph is made.
func (c *capture) drop(d *Device) {
	c.parts.drop(d)
	c.dropGraphs()
}

// dropGraphs ends the use of the graphs that were launched in it.
func (c *capture) dropGraphs() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, n := range c.nested {
		n.unuse()
	}
	c.nested, c.copies = nil, nil
}

// pin keeps the capture that the stream has joined, if it has, from ending until unpin; the stream is locked. That of the stream's own it keeps by its lock.
func (s *Stream) pin() *capture {
	c := s.capture
	if c == nil || c.origin == s {
		return nil
	}
	c.enqueuing.RLock()
	return c
}

// unpin ends what pin began.
func (c *capture) unpin() {
	if c != nil {
		c.enqueuing.RUnlock()
	}
}

// end marks the end.
func (c *capture) end() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ended = true
}

// BeginCapture makes the stream record what is enqueued instead of running it. Work that was enqueued before runs as usual.
func (s *Stream) BeginCapture() error {
	const call = "BeginCapture"
	if err := s.lock(call); err != nil {
		return err
	}
	defer s.unlock()
	if s.recording() != nil {
		return &device.CaptureError{Op: call, Reason: "the stream is capturing already; call EndCapture first"}
	}
	if err := s.leaveMark(call); err != nil {
		return err
	}
	// Relaxed, because a goroutine does not stay on one thread, and the other modes belong to threads.
	if r := s.dev.drv.StreamBeginCapture(s.handle, cu.CaptureRelaxed); r != cu.Success {
		return s.dev.check(call, "cuStreamBeginCapture", r)
	}
	s.capture = &capture{origin: s, parts: new(graphParts)}
	return nil
}

// join makes the stream wait for an event of a capture, in which it takes part from then on. Enqueuing of the event is held.
func (s *Stream) join(call string, e *Event) error {
	if err := s.lock(call); err != nil {
		return err
	}
	defer s.unlock()
	joins := s.recording() == nil
	if joins { // one that is in another capture is refused, and must not keep two from ending
		e.capture.enqueuing.RLock()
		defer e.capture.unpin()
	}
	if refused := e.refusal(s); refused != "" {
		return &device.CaptureError{Op: call, Reason: refused}
	}
	if joins {
		if err := s.leaveMark(call); err != nil {
			return err
		}
	}
	if r := s.dev.drv.StreamWaitEvent(s.handle, e.handle, 0); r != cu.Success {
		return s.dev.check(call, "cuStreamWaitEvent", r)
	}
	s.capture = e.capture
	return nil
}

// leaveMark records before: while the stream captures, nothing that is enqueued can tell when the work from before has ended. The stream is locked and
// the context is current.
func (s *Stream) leaveMark(call string) error {
	if s.before != 0 && s.dev.markShared(s.before) {
		s.dev.dropMark(s.before)
		s.before = 0
	}
	if s.before == 0 {
		m, err := s.dev.takeMark()
		if err != nil {
			return fmt.Errorf("%s: %w", call, err)
		}
		s.before = m
	}
	return s.dev.check(call, "cuEventRecord", s.dev.drv.EventRecord(s.before, s.handle))
}

// EndCapture ends recording, in this stream and in those that joined, and returns the graph, on its way to the device. On the stream that began the
// capture it ends the capture even if it returns an error.
func (s *Stream) EndCapture() (device.Graph, error) {
	const call = "EndCapture"
	if err := s.lock(call); err != nil {
		return nil, err
	}
	defer s.unlock()
	c := s.recording()
	if c == nil {
		return nil, &device.CaptureError{Op: call, Reason: "the stream is not capturing; call BeginCapture first"}
	}
	if c.origin != s {
		return nil, &device.CaptureError{Op: call, Reason: "the stream joined a capture that another stream began; call EndCapture there"}
	}
	s.capture = nil
	handle, r, left := s.endCapture(c)
	if r != cu.Success {
		c.drop(s.dev)
		reason := "the capture is discarded"
		if r == cu.CaptureUnjoined {
			reason = "a stream that joined the capture was not joined back, so it is discarded; before EndCapture record an event " +
				"behind the last work of each such stream, and wait for it in the stream that began"
		}
		return nil, &device.CaptureError{Op: call, Reason: reason, Err: errors.Join(s.dev.drv.Check("cuStreamEndCapture", r), left)}
	}
	g, err := s.newGraph(c, handle)
	if err != nil {
		c.dropGraphs()
		return nil, fmt.Errorf("%s: %w", call, err)
	}
	return g, nil
}

// endCapture has the driver end the capture of the stream, and discards it if that fails; left is why it could not. The streams that joined count as capturing until
// the driver has ended it: a question about their work would make it throw the capture away, and a mark behind that work would be recorded. The stream is locked and the
// context is current.
func (s *Stream) endCapture(c *capture) (handle cu.GraphHandle, r cu.Result, left error) {
	c.enqueuing.Lock()
	defer c.enqueuing.Unlock()
	defer c.end()
	if r = s.dev.drv.StreamEndCapture(s.handle, &handle); r != cu.Success && s.captures() {
		left = s.discardCapture()
	}
	return handle, r, left
}

// abandon ends the capture of a stream that is being closed. The stream is locked.
func (s *Stream) abandon(c *capture) {
	if c.origin != s {
		return // the capture is of another stream, and so is its end
	}
	c.enqueuing.Lock()
	defer c.enqueuing.Unlock()
	defer c.end()
	c.drop(s.dev)
	if err := s.dev.push(); err != nil {
		s.dev.log.Debug("abandoning a capture failed", "error", err)
		return
	}
	defer s.dev.pop()
	if err := s.discardCapture(); err != nil {
		s.dev.log.Debug("abandoning a capture failed", "error", err)
	}
}

// captures reports whether the driver says that the stream still captures, after a call that should have ended it. A stream that went on so could neither
// be waited for nor closed.
func (s *Stream) captures() bool {
	ask := s.dev.drv.StreamGetCaptureInfo
	if ask == nil {
		return false
	}
	var status int32
	var id, count uint64
	var graph cu.GraphHandle
	var deps *cu.GraphNodeHandle
	var edges *cu.GraphEdgeData
	return ask(s.handle, &status, &id, &graph, &deps, &edges, &count) == cu.Success && status != 0
}

// discardCapture ends the capture, and destroys the graph if there is one. The device's context is current.
func (s *Stream) discardCapture() error {
	drv := s.dev.drv
	var handle cu.GraphHandle
	err := drv.Check("cuStreamEndCapture", drv.StreamEndCapture(s.handle, &handle))
	if handle != 0 {
		err = errors.Join(err, drv.Check("cuGraphDestroy", drv.GraphDestroy(handle)))
	}
	return err
}
