package simcuda

import (
	"slices"
	"unsafe"

	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/ptxvm"
)

// graph is recorded work.
type graph struct {
	handle cu.GraphHandle
	nodes  []*node // each behind those that it depends on
	users  []*userObject
	next   func() uintptr
}

type node struct {
	handle cu.GraphNodeHandle
	gpu    *gpu
	op     *op
	deps   []*node
}

// add appends a node.
func (g *graph) add(on *gpu, o *op, deps []*node) *node {
	n := &node{handle: cu.GraphNodeHandle(g.next()), gpu: on, op: o, deps: slices.Clone(deps)}
	g.nodes = append(g.nodes, n)
	return n
}

// capture is a graph that is being recorded.
type capture struct {
	graph   *graph
	origin  *stream
	streams []*stream
	told    []cu.GraphNodeHandle // what cuStreamGetCaptureInfo has pointed to
	over    bool
}

// end makes the streams capture no more.
func (c *capture) end() {
	c.over = true
	for _, s := range c.streams {
		s.capture.Store(nil)
		s.deps = nil
	}
}

// joined says whether all nodes are before the last ones of the stream that began.
func (c *capture) joined() bool {
	seen := map[*node]bool{}
	var visit func(all []*node)
	visit = func(all []*node) {
		for _, n := range all {
			if !seen[n] {
				seen[n] = true
				visit(n.deps)
			}
		}
	}
	visit(c.origin.deps)
	return len(seen) == len(c.graph.nodes)
}

// userObject has a function that is called when nothing refers to it any more.
type userObject struct {
	handle cu.UserObject
	refs   int
	data   uintptr
}

// release drops references. The function is called on a thread of the driver's: CUDA driver API, cuUserObjectCreate.
func (m *Machine) release(n int, all ...*userObject) {
	for _, u := range all {
		if u.refs -= n; u.refs == 0 {
			delete(m.users, u.handle)
			m.later = append(m.later, u.data)
			m.start()
		}
	}
}

// exec is a graph that can be launched. Its launches do not overlap: CUDA driver API, cuGraphLaunch: "Each launch is ordered behind both any
// previous work in hStream and any previous launches of hGraphExec".
type exec struct {
	nodes    []*node
	number   map[*node]int
	after    [][]int // nodes that depend on each
	users    []*userObject
	launched int
	ended    int
	order    ptxvm.Order // with weak memory: what is behind the launches that have ended
}

func (m *Machine) captureCalls(d *cu.Driver) {
	d.StreamBeginCapture = func(h cu.StreamHandle, mode int32) cu.Result {
		s, r := m.stream(h)
		if r != cu.Success {
			return r
		}
		return m.do(func() cu.Result {
			if s.capture.Load() != nil || mode != cu.CaptureRelaxed {
				return m.violation(cu.InvalidValue, "cuStreamBeginCapture of a stream that captures, or in mode %d", mode)
			}
			g := &graph{handle: cu.GraphHandle(m.number()), next: m.number}
			m.graphs[g.handle] = g
			s.deps = nil
			s.capture.Store(&capture{graph: g, origin: s, streams: []*stream{s}})
			return cu.Success
		})
	}
	d.StreamEndCapture = func(h cu.StreamHandle, out *cu.GraphHandle) cu.Result {
		s, r := m.stream(h)
		if r != cu.Success {
			return r
		}
		return m.do(func() cu.Result {
			*out = 0
			c := s.capture.Load()
			switch {
			case c == nil:
				return m.violation(cu.InvalidValue, "cuStreamEndCapture of a stream that does not capture")
			case c.origin != s:
				return m.violation(captureUnmatched, "cuStreamEndCapture of a stream that joined")
			}
			joined := c.joined()
			c.end()
			if !joined {
				delete(m.graphs, c.graph.handle)
				m.release(1, c.graph.users...)
				return cu.CaptureUnjoined
			}
			*out = c.graph.handle
			return cu.Success
		})
	}
	d.StreamGetCaptureInfo = func(h cu.StreamHandle, status *int32, id *uint64, g *cu.GraphHandle, deps **cu.GraphNodeHandle, edges **cu.GraphEdgeData, n *uint64) cu.Result {
		s, r := m.stream(h)
		if r != cu.Success {
			return r
		}
		return m.do(func() cu.Result {
			c := s.capture.Load()
			if *status = 0; c == nil {
				return cu.Success
			}
			c.told = nil
			for _, x := range s.deps {
				c.told = append(c.told, x.handle)
			}
			*status, *id, *g, *deps, *edges, *n = cu.CaptureStatusActive, uint64(c.graph.handle), c.graph.handle, unsafe.SliceData(c.told), nil, uint64(len(c.told))
			return cu.Success
		})
	}
	d.StreamUpdateCaptureDependencies = func(h cu.StreamHandle, deps *cu.GraphNodeHandle, n uint64, flags uint32) cu.Result {
		s, r := m.stream(h)
		if r != cu.Success {
			return r
		}
		return m.do(func() cu.Result {
			c := s.capture.Load()
			if c == nil || flags != cu.CaptureSetDependencies {
				return m.violation(cu.InvalidValue, "cuStreamUpdateCaptureDependencies of a stream that does not capture, or with flags %#x", flags)
			}
			all, ok := c.graph.find(deps, n)
			if !ok {
				return m.violation(cu.InvalidValue, "cuStreamUpdateCaptureDependencies with a node of another graph")
			}
			s.deps = all
			return cu.Success
		})
	}
}

// find gives nodes by their handles.
func (g *graph) find(handles *cu.GraphNodeHandle, n uint64) (all []*node, ok bool) {
	for _, h := range unsafe.Slice(handles, n) {
		i := slices.IndexFunc(g.nodes, func(x *node) bool { return x.handle == h })
		if i < 0 {
			return nil, false
		}
		all = append(all, g.nodes[i])
	}
	return all, true
}

func (m *Machine) graphCalls(d *cu.Driver) {
	d.GraphInstantiateWithFlags = func(h *cu.GraphExecHandle, of cu.GraphHandle, flags uint64) cu.Result {
		return m.on(func(*gpu) cu.Result {
			g := m.graphs[of]
			if g == nil || flags != 0 {
				return m.violation(cu.InvalidValue, "cuGraphInstantiate of no graph")
			}
			x := &exec{nodes: slices.Clone(g.nodes), number: map[*node]int{}, after: make([][]int, len(g.nodes)), users: slices.Clone(g.users)}
			for i, n := range x.nodes {
				x.number[n] = i
				for _, dep := range n.deps {
					x.after[x.number[dep]] = append(x.after[x.number[dep]], i)
				}
			}
			for _, u := range x.users {
				u.refs++
			}
			*h = cu.GraphExecHandle(m.number())
			m.execs[*h] = x
			return cu.Success
		})
	}
	d.GraphUpload = func(h cu.GraphExecHandle, on cu.StreamHandle) cu.Result {
		return m.enqueue(on, func(*stream) (*op, cu.Result) {
			if m.execs[h] == nil {
				return nil, m.violation(cu.InvalidValue, "cuGraphUpload of no graph")
			}
			return &op{kind: opNothing}, cu.Success
		})
	}
	d.GraphLaunch = func(h cu.GraphExecHandle, on cu.StreamHandle) cu.Result {
		return m.enqueue(on, func(s *stream) (*op, cu.Result) {
			x := m.execs[h]
			if x == nil {
				return nil, m.violation(cu.InvalidValue, "cuGraphLaunch of no graph")
			}
			if s.capture.Load() != nil {
				return &op{kind: opGraph}, cu.Success // which enqueue refuses
			}
			for _, u := range x.users { // a launch keeps what the graph needs, also when that is destroyed
				u.refs++
			}
			m.append(s, &work{op: &op{kind: opGraph, exec: x}, ticket: x.launched})
			x.launched++
			return nil, cu.Success
		})
	}
	d.GraphExecDestroy = func(h cu.GraphExecHandle) cu.Result {
		return m.do(func() cu.Result {
			x := m.execs[h]
			if x == nil {
				return m.violation(cu.InvalidValue, "cuGraphExecDestroy of no graph")
			}
			delete(m.execs, h)
			m.release(1, x.users...)
			return cu.Success
		})
	}
	d.GraphDestroy = func(h cu.GraphHandle) cu.Result {
		return m.do(func() cu.Result {
			g := m.graphs[h]
			if g == nil {
				return m.violation(cu.InvalidValue, "cuGraphDestroy of no graph")
			}
			delete(m.graphs, h)
			m.release(1, g.users...)
			return cu.Success
		})
	}
	// CUDA driver API, cuGraphAddChildGraphNode: "The child graph is cloned in this call."
	d.GraphAddChildGraphNode = func(out *cu.GraphNodeHandle, parent cu.GraphHandle, deps *cu.GraphNodeHandle, n uint64, child cu.GraphHandle) cu.Result {
		return m.do(func() cu.Result {
			g, c := m.graphs[parent], m.graphs[child]
			if g == nil || c == nil || g == c {
				return m.violation(cu.InvalidValue, "cuGraphAddChildGraphNode of no graph")
			}
			before, ok := g.find(deps, n)
			if !ok {
				return m.violation(cu.InvalidValue, "cuGraphAddChildGraphNode behind a node of another graph")
			}
			copies, leaf := map[*node]*node{}, map[*node]bool{}
			for _, x := range c.nodes {
				under := before
				if len(x.deps) > 0 {
					under = nil
				}
				for _, y := range x.deps {
					under = append(under, copies[y])
					delete(leaf, copies[y])
				}
				copies[x] = g.add(x.gpu, x.op, under)
				leaf[copies[x]] = true
			}
			last := slices.Clone(before)
			for _, x := range g.nodes {
				if leaf[x] {
					last = append(last, x)
				}
			}
			*out = g.add(nil, &op{kind: opNothing}, last).handle
			for _, u := range c.users {
				u.refs++
				g.users = append(g.users, u)
			}
			return cu.Success
		})
	}
	d.UserObjectCreate = func(o *cu.UserObject, data, _ uintptr, count, flags uint32) cu.Result {
		return m.do(func() cu.Result {
			if count == 0 || flags != cu.UserObjectNoDestructorSync {
				return cu.InvalidValue
			}
			u := &userObject{handle: cu.UserObject(m.number()), refs: int(count), data: data}
			m.users[u.handle] = u
			*o = u.handle
			return cu.Success
		})
	}
	d.UserObjectRelease = func(o cu.UserObject, n uint32) cu.Result {
		return m.do(func() cu.Result {
			u := m.users[o]
			if u == nil || int(n) > u.refs {
				return m.violation(cu.InvalidValue, "cuUserObjectRelease of no object")
			}
			m.release(int(n), u)
			return cu.Success
		})
	}
	d.GraphRetainUserObject = func(h cu.GraphHandle, o cu.UserObject, n, flags uint32) cu.Result {
		return m.do(func() cu.Result {
			g, u := m.graphs[h], m.users[o]
			if g == nil || u == nil || n != 1 {
				return m.violation(cu.InvalidValue, "cuGraphRetainUserObject of no graph or no object")
			}
			if flags != cu.GraphUserObjectMove {
				u.refs++
			}
			g.users = append(g.users, u)
			return cu.Success
		})
	}
}
