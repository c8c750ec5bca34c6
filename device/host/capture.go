package host

import (
	"fmt"
	"maps"
	"slices"
	"sync"

	"github.com/symmem/symmem/device"
)

// clock says for each stream of a capture how many of its entries are ordered before some place.
type clock map[*Stream]int

// capture is a graph that is being recorded.
type capture struct {
	origin *Stream // the stream that began it

	mu       sync.Mutex // taken after those of streams
	ended    bool
	streams  []*Stream // that take part, the origin first
	branches []branch  // what each of them has recorded
	lines    []*line   // of the graphs launched in it

	// entries counts what each stream has recorded, its joining included; clocks say what each one's next work comes after, and awaited
	// what of that its branch has waited for.
	entries clock
	clocks  map[*Stream]clock
	awaited map[*Stream]clock
	reached map[*Stream][]int // the length of the branch at each entry
}

// branch is the work of one stream of a capture, with waits for others' where the events say so.
type branch []op

// newCapture begins a capture in origin.
func newCapture(origin *Stream) *capture {
	c := &capture{
		origin: origin, entries: clock{}, clocks: map[*Stream]clock{}, awaited: map[*Stream]clock{}, reached: map[*Stream][]int{},
	}
	c.enter(origin)
	return c
}

// enter makes s a part of the capture.
func (c *capture) enter(s *Stream) {
	c.streams, c.branches = append(c.streams, s), append(c.branches, nil)
	c.clocks[s], c.awaited[s] = clock{}, clock{}
}

// await records in branch i waits for what the next work of its stream comes after.
func (c *capture) await(i int) {
	s := c.streams[i]
	for j, t := range c.streams {
		n := c.clocks[s][t]
		if t == s || n <= c.awaited[s][t] {
			continue
		}
		c.awaited[s][t] = n
		if at := c.reached[t][n-1]; at > 0 {
			c.branches[i] = append(c.branches[i], op{kind: opAwait, value: uint32(j), n: uint64(at)})
		}
	}
}

// over reports whether the capture has ended.
func (c *capture) over() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.ended
}

// count counts an entry of s; the lock is held.
func (c *capture) count(s *Stream) {
	c.entries[s]++
	c.clocks[s][s] = c.entries[s]
	c.reached[s] = append(c.reached[s], len(c.branches[slices.Index(c.streams, s)]))
}

// add records o, enqueued in s, and reports false if the capture has ended.
func (c *capture) add(s *Stream, o *op) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended {
		return false
	}
	i := slices.Index(c.streams, s)
	c.await(i)
	c.branches[i] = append(c.branches[i], *o)
	if o.kind == opGraph {
		for _, l := range o.what.(*Graph).lines {
			if !slices.Contains(c.lines, l) {
				c.lines = append(c.lines, l)
			}
		}
	}
	c.count(s)
	return true
}

// clockOf returns what work recorded in s from now on comes after, and false if the capture has ended.
func (c *capture) clockOf(s *Stream) (clock, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended {
		return nil, false
	}
	return maps.Clone(c.clocks[s]), true
}

// join orders what s records from now on after before; s becomes part of the capture if it is not. It reports false if the
// capture has ended.
func (c *capture) join(s *Stream, before clock) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended {
		return false
	}
	mine, known := c.clocks[s]
	if !known {
		c.enter(s)
		mine = c.clocks[s]
		c.count(s) // so that even a stream that records nothing else must be joined back
	}
	for t, n := range before {
		mine[t] = max(mine[t], n)
	}
	return true
}

// end ends the capture and returns its work, that of the origin first, which ends last. It is an error if the work of some stream is not ordered before the end of the
// origin's.
func (c *capture) end() (branches []branch, lines []*line, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ended = true
	unjoined := 0
	for s, n := range c.entries {
		if c.clocks[c.origin][s] < n {
			unjoined++
		}
	}
	if unjoined == 0 {
		c.await(0)
	}
	branches, lines = c.branches, c.lines
	c.streams, c.branches, c.lines, c.entries, c.clocks, c.awaited, c.reached = nil, nil, nil, nil, nil, nil, nil
	if unjoined > 0 {
		reason := fmt.Sprintf("%d stream(s) that joined the capture were not joined back, so it is discarded; before EndCapture "+
			"record an event behind the last work of each, and wait for it in the stream that began", unjoined)
		return nil, nil, &device.CaptureError{Op: "EndCapture", Reason: reason}
	}
	return branches, lines, nil
}

// BeginCapture makes the stream record what is enqueued instead of running it. Work that was enqueued before runs as usual.
func (s *Stream) BeginCapture() error {
	const call = "BeginCapture"
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return closed(call, "stream")
	}
	if s.recording() != nil {
		return &device.CaptureError{Op: call, Reason: "the stream is capturing already; call EndCapture first"}
	}
	s.capture.Store(newCapture(s))
	return nil
}

// EndCapture ends recording, in this stream and in those that joined, and returns the graph. On the stream that began the capture it ends the capture
// even if it returns an error.
func (s *Stream) EndCapture() (device.Graph, error) {
	const call = "EndCapture"
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return nil, closed(call, "stream")
	}
	c := s.recording()
	if c == nil {
		s.mu.Unlock()
		return nil, &device.CaptureError{Op: call, Reason: "the stream is not capturing; call BeginCapture first"}
	}
	if c.origin != s {
		s.mu.Unlock()
		return nil, &device.CaptureError{Op: call, Reason: "the stream joined a capture that another stream began; call EndCapture there"}
	}
	s.capture.Store(nil)
	branches, lines, err := c.end()
	s.mu.Unlock()
	if err != nil {
		return nil, err
	}
	g, err := newGraph(s.dev, branches, lines)
	if err != nil {
		return nil, err
	}
	return g, nil
}
