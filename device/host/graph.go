package host

import (
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
)

// line is a queue of launches that must not overlap, in the order in which they were enqueued.
type line struct {
	next   uint64   // the turn of the next launch; under the device's launching
	served progress // how many launches have ended
}

// Graph is recorded work. It implements [device.Graph]. All methods may be called from several goroutines at once.
type Graph struct {
	dev      *Device
	branches []branch // never changed
	closed   atomic.Bool

	replaying sync.Mutex // a graph launched in two branches of another runs in one after the other
	replays   uint64     // guarded by replaying
	ran       []progress // of each branch, how many works have ended in all replays
	sides     []*Stream  // what the branches but the first run on

	// lines are those that a launch has to queue up in: the graph's own first, then those of the graphs launched in it.
	lines []*line
}

// newGraph makes a graph of d out of recorded work; nested are the lines of the graphs in it.
func newGraph(d *Device, branches []branch, nested []*line) (*Graph, error) {
	g := &Graph{dev: d, branches: branches, lines: append([]*line{new(line)}, nested...), ran: make([]progress, len(branches))}
	for range branches[1:] {
		side := newStream(d)
		side.side = side.replaySide
		g.sides = append(g.sides, side)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed.Load() {
		return nil, closed("EndCapture", "device")
	}
	d.graphs[g] = struct{}{}
	return g, nil
}

// Launch enqueues all of the recorded work on s, a stream of the same device, as one work. It begins when the launches
// enqueued before it, on whichever streams, have ended. It allocates nothing. If s is capturing, the work becomes part of
// that capture.
func (g *Graph) Launch(s device.Stream) error {
	const call = "Graph.Launch"
	st, ok := s.(*Stream)
	if !ok || st == nil {
		return errs.Invalid(call, "s", fmt.Sprintf("%T", s), "a stream of a host device")
	}
	if st.dev != g.dev {
		return errs.Invalid(call, "s", st.dev.UUID(), "a stream of the device that the graph was captured on")
	}
	// Turns in all lines are taken at once, together with the place in the stream. So every launch waits only for launches
	// and work that were enqueued before it, and no two can wait for each other.
	g.dev.launching.Lock()
	defer g.dev.launching.Unlock()
	if g.closed.Load() {
		return closed(call, "graph")
	}
	st.mu.Lock()
	if st.closed {
		st.mu.Unlock()
		return closed(call, "stream")
	}
	if c := st.capture.Load(); c != nil && st.record(c, &op{kind: opGraph, what: g}) {
		st.mu.Unlock()
		return nil
	}
	unpark := false
	for _, l := range g.lines[1:] {
		unpark = st.put(&op{kind: opTakeTurn, what: l, n: l.next}) || unpark
		l.next++
	}
	own := g.lines[0]
	unpark = st.put(&op{kind: opGraph, what: g, n: own.next}) || unpark
	own.next++
	st.mu.Unlock()
	if unpark {
		st.wake <- struct{}{}
	}
	return nil
}

// Close releases the graph. Launches already enqueued still run, and so do graphs that it is part of. A second Close returns ErrClosed.
func (g *Graph) Close() error {
	if g.closed.Swap(true) {
		return closed("Close", "graph")
	}
	g.dev.mu.Lock()
	defer g.dev.mu.Unlock()
	delete(g.dev.graphs, g)
	return nil
}
