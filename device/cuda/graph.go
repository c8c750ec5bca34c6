package cuda

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/symmem/symmem/device"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/errs"
)

// Graph is recorded work. It implements [device.Graph]. All methods may be called from several goroutines at once.
type Graph struct {
	dev    *Device
	parts  *graphParts
	nested []*Graph // the graphs that are part of it, and those in them
	copies []int    // how often each of those is

	mu     sync.Mutex // taken before that of a stream, and held during the driver's calls
	closed bool
	handle cu.GraphHandle     // what other graphs get a copy of
	exec   cu.GraphExecHandle // what is launched

	// The driver lets launches of one graph follow each other. It does not know that a graph is part of others: for that
	// their launches record tail and wait for it. These fields are under the device's launching.
	tail cu.EventHandle // complete when the latest launch has ended; 0 for a graph that is part of none, and once nobody needs it
	told bool           // tail was recorded; before, it may stand for something else that it was used for
	last *Stream        // the stream of its latest launch, unless that recorded tail
	past mark           // complete when the launches from before tail was there have ended

	involved atomic.Bool // it is part of another graph, or has parts

	uses int // 1 until it is closed, and 1 for each graph or capture that has copies of it and so needs tail; under the device's mu
}

// use notes that a capture, and then its graph, has copies of g.
func (g *Graph) use() {
	g.dev.mu.Lock()
	defer g.dev.mu.Unlock()
	g.uses++
}

// unuse ends what use began. When nobody is left who could launch g, by itself or as a part, its tail is for other waits.
func (g *Graph) unuse() {
	g.dev.mu.Lock()
	defer g.dev.mu.Unlock()
	if g.uses--; g.uses == 0 && g.tail != 0 {
		g.dev.marks = append(g.dev.marks, g.tail)
		g.tail = 0
		g.past.dropLocked(g.dev)
		g.past = mark{}
	}
}

// newGraph makes a graph of what c has recorded. The stream is locked and the context is current.
func (s *Stream) newGraph(c *capture, handle cu.GraphHandle) (*Graph, error) {
	d := s.dev
	drv := d.drv
	g := &Graph{dev: d, parts: c.parts, nested: c.nested, copies: c.copies, handle: handle, uses: 1}
	g.involved.Store(len(g.nested) > 0)
	discard := func(err error) error {
		return errors.Join(err, drv.Check("cuGraphDestroy", drv.GraphDestroy(handle)))
	}
	if !c.parts.empty() {
		if len(c.parts.waits) > 0 {
			d.mu.Lock()
			d.parts[c.parts] = struct{}{}
			d.mu.Unlock()
		}
		// The driver tells by the object's end that neither the graph nor a copy nor a launch of it is left.
		var object cu.UserObject
		id := callbacks.add(callback{dev: d, set: c.parts})
		r := drv.UserObjectCreate(&object, id, hostFuncAddress(), 1, cu.UserObjectNoDestructorSync)
		if err := drv.Check("cuUserObjectCreate", r); err != nil {
			callbacks.remove(id)
			c.parts.drop(d)
			return nil, discard(err)
		}
		if err := drv.Check("cuGraphRetainUserObject", drv.GraphRetainUserObject(handle, object, 1, cu.GraphUserObjectMove)); err != nil {
			return nil, discard(errors.Join(err, drv.Check("cuUserObjectRelease", drv.UserObjectRelease(object, 1))))
		}
	}
	if err := drv.Check("cuGraphInstantiateWithFlags", drv.GraphInstantiateWithFlags(&g.exec, handle, 0)); err != nil {
		return nil, discard(err)
	}
	if drv.GraphUpload != nil {
		if err := drv.Check("cuGraphUpload", drv.GraphUpload(g.exec, s.handle)); err != nil {
			return nil, discard(errors.Join(err, drv.Check("cuGraphExecDestroy", drv.GraphExecDestroy(g.exec))))
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.graphs[g] = struct{}{}
	return g, nil
}

// Launch enqueues all of the recorded work on s, a stream of the same device. It begins when the launches enqueued before it,
// on whichever streams, have ended. It allocates nothing unless it is part of other graphs or has
// parts. If s is capturing, a copy of the graph becomes part of that capture.
func (g *Graph) Launch(s device.Stream) error {
	const call = "Graph.Launch"
	st, ok := s.(*Stream)
	if !ok || st == nil {
		return errs.Invalid(call, "s", fmt.Sprintf("%T", s), "a stream of a CUDA device")
	}
	if st.dev != g.dev {
		return errs.Invalid(call, "s", st.dev.uuid, "a stream of the device that the graph was captured on")
	}
	for {
		involved := g.involved.Load()
		if involved || st.Capturing() {
			g.dev.launching.Lock()
			err := g.launchInvolved(call, st)
			g.dev.launching.Unlock()
			return err
		}
		again, err := g.launchAlone(call, st)
		if !again {
			return err
		}
	}
}

// launchAlone launches a graph that shares nothing with other graphs, and reports whether it found that this is no longer so.
func (g *Graph) launchAlone(call string, st *Stream) (again bool, err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return false, closed(call, "graph")
	}
	expected := false
	var refused error
	err = st.enqueue(call, "cuGraphLaunch", func() cu.Result {
		if again = st.recording() != nil || g.involved.Load(); again {
			return cu.Success
		}
		if !expected { // this may be called twice
			if refused = g.expect(st); refused != nil {
				return cu.Success
			}
			expected = true
		}
		g.last = st
		return g.dev.drv.GraphLaunch(g.exec, st.handle)
	})
	if expected && (err != nil || again) {
		g.unexpect()
	}
	return again, errors.Join(err, refused)
}

// expect makes sure that the waits of a launch on st that is to follow will end, and that its work of the CPU is done: the driver may return from the
// launch only when the GPU is in the middle of it. If the launch fails, unexpect undoes this. The graph is locked.
func (g *Graph) expect(st *Stream) error {
	g.parts.launched(st, 1)
	for i, n := range g.nested {
		n.parts.launched(st, g.copies[i])
	}
	err := g.watch()
	if err != nil {
		g.unexpect()
	}
	return err
}

// unexpect undoes expect.
func (g *Graph) unexpect() {
	g.parts.unlaunched(1)
	for i, n := range g.nested {
		n.parts.unlaunched(g.copies[i])
	}
}

// watch makes the device look at what the graph waits for. The graph is locked.
func (g *Graph) watch() error {
	if err := g.parts.watch(g.dev); err != nil {
		return err
	}
	for _, n := range g.nested {
		if err := n.parts.watch(g.dev); err != nil {
			return err
		}
	}
	return nil
}

// launchInvolved launches a graph that is part of others or has others as parts, or launches one into a capture. The device's launching is held, so
// that the launches of such graphs take their places one by one, and no two can wait for each other.
func (g *Graph) launchInvolved(call string, st *Stream) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return closed(call, "graph")
	}
	// Launches from before a graph became part of others have recorded nothing; their streams are marked now.
	related := append([]*Graph{g}, g.nested...)
	for _, one := range related {
		if err := one.catchUp(); err != nil {
			return fmt.Errorf("%s: %w", call, err)
		}
	}
	if err := st.lock(call); err != nil {
		return err
	}
	defer st.unlock()
	drv := g.dev.drv
	if c := st.recording(); c != nil {
		g.involved.Store(true)
		return g.include(call, c, st)
	}
	for _, one := range related {
		for _, e := range [...]cu.EventHandle{one.tail, one.past.event} {
			if e == 0 || e == one.tail && !one.told {
				continue
			}
			if r := drv.StreamWaitEvent(st.handle, e, 0); r != cu.Success {
				return g.dev.check(call, "cuStreamWaitEvent", r)
			}
		}
	}
	if err := g.expect(st); err != nil {
		return err
	}
	if r := drv.GraphLaunch(g.exec, st.handle); r != cu.Success {
		g.unexpect()
		return g.dev.check(call, "cuGraphLaunch", r)
	}
	for _, one := range related {
		if r := drv.EventRecord(one.tail, st.handle); r != cu.Success {
			return g.dev.check(call, "cuEventRecord", r)
		}
		one.told = true
		one.past.drop(g.dev)
		one.past = mark{}
	}
	return nil
}

// catchUp makes tail complete no earlier than the latest launch. The device's launching is held, and no stream is locked.
func (g *Graph) catchUp() error {
	if err := g.dev.push(); err != nil {
		return err
	}
	defer g.dev.pop()
	drv := g.dev.drv
	if g.tail == 0 {
		m, err := g.dev.takeMark()
		if err != nil {
			return err
		}
		g.tail = m
	}
	last := g.last
	if last == nil {
		return nil
	}
	last.mu.Lock()
	defer last.mu.Unlock()
	switch {
	case last.handle == 0:
		g.past = mark{event: last.left, borrowed: true} // which is complete, unless the stream was destroyed with work in it
	case last.recording() == nil:
		if err := drv.Check("cuEventRecord", drv.EventRecord(g.tail, last.handle)); err != nil {
			return err
		}
		g.told = true
	default:
		// The stream came to the capture after the launch, and before was recorded between them. It is not recorded again for something else, which may wait for the
		// next launch.
		g.past = g.dev.shareMark(last.before)
	}
	g.last = nil
	return nil
}

// include puts a copy of the graph into the capture of the stream. It and the stream are locked, and the context is current.
func (g *Graph) include(call string, c *capture, st *Stream) error {
	drv := g.dev.drv
	err := drv.Require("cuStreamGetCaptureInfo_v3", "cuStreamUpdateCaptureDependencies", "cuGraphAddChildGraphNode")
	if err != nil {
		return fmt.Errorf("%s into a capture: %w", call, err)
	}
	var status int32
	var id, count uint64
	var parent cu.GraphHandle
	var deps *cu.GraphNodeHandle
	var edges *cu.GraphEdgeData
	if r := drv.StreamGetCaptureInfo(st.handle, &status, &id, &parent, &deps, &edges, &count); r != cu.Success {
		return g.dev.check(call, "cuStreamGetCaptureInfo", r)
	}
	if status != cu.CaptureStatusActive {
		return &device.CaptureError{Op: call, Reason: "the driver has invalidated the capture; call EndCapture and begin again"}
	}
	// Launches of a graph never overlap, and so do copies of it in one capture.
	all := append([]cu.GraphNodeHandle(nil), unsafe.Slice(deps, count)...)
	for _, node := range c.earlier(g) {
		if !slices.Contains(all, node) {
			all = append(all, node)
		}
	}
	var node cu.GraphNodeHandle
	if r := drv.GraphAddChildGraphNode(&node, parent, unsafe.SliceData(all), uint64(len(all)), g.handle); r != cu.Success {
		return g.dev.check(call, "cuGraphAddChildGraphNode", r)
	}
	c.addGraph(g, node) // the node stays, whatever fails next, and what is in it is waited for
	if r := drv.StreamUpdateCaptureDependencies(st.handle, &node, 1, cu.CaptureSetDependencies); r != cu.Success {
		return g.dev.check(call, "cuStreamUpdateCaptureDependencies", r)
	}
	return nil
}

// Close releases the graph. Launches already enqueued still run, and so do graphs that it is part of. A second Close returns ErrClosed.
func (g *Graph) Close() error {
	const call = "Close"
	d := g.dev
	if err := d.enter(call); err != nil {
		return err
	}
	defer d.leave()
	d.mu.Lock()
	_, open := d.graphs[g]
	delete(d.graphs, g)
	d.mu.Unlock()
	if !open {
		return closed(call, "graph")
	}
	return g.destroy()
}

// destroy closes the graph if it is open; the context is current. A launch under way keeps what it needs.
func (g *Graph) destroy() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return nil
	}
	g.closed = true
	for _, n := range g.nested {
		n.unuse()
	}
	g.unuse()
	drv := g.dev.drv
	return errors.Join(
		drv.Check("cuGraphExecDestroy", drv.GraphExecDestroy(g.exec)),
		drv.Check("cuGraphDestroy", drv.GraphDestroy(g.handle)))
}
