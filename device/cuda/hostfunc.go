package cuda

import (
	"runtime/debug"
	"sync"
	"sync/atomic"

	"github.com/symmem/symmem/device"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/errs"
)

// callbacks holds what the driver may call back. There is one table for the whole process because there is one C function for the whole process: the
// number of C callbacks that Go functions can be made into is small, and they are never freed.
var callbacks = callbackTable{entries: make(map[uintptr]callback)}

// callback is one entry: exactly one of fn and set is there.
type callback struct {
	dev *Device
	// fn is a host function. It runs once for stream, or as often as the graphs that it is part of are launched.
	fn     func()
	stream *Stream
	of     *graphParts
	// set is the parts of a graph, which are dropped when the driver has dropped the graph.
	set *graphParts
}

// graphParts holds what the driver does not keep of a graph. Graphs that the graph was launched into, and launches under way, share it.
type graphParts struct {
	ids    []uintptr              // of the host functions
	waits  []*graphWait           // those enqueued in it, not those of graphs in it
	works  []*workLane            // the same of work of the CPU
	cells  []*faultCell           // of the launches in it that report failures
	words  []*FaultWord           // that launches in it write when they give up
	stream atomic.Pointer[Stream] // of the latest launch
	before *Stream                // of the launch before that

	// Under the device's faultMu.
	debtors []*Stream // that it was launched on and that were not synchronized since
}

// empty reports whether there is nothing that could fail, fault words aside.
func (g *graphParts) empty() bool { return len(g.ids)+len(g.waits)+len(g.works)+len(g.cells) == 0 }

// launched notes that a launch on s is about to begin, in which so many copies of the graph run. The stream is locked.
func (g *graphParts) launched(s *Stream, copies int) {
	g.before = g.stream.Swap(s)
	s.oweGraph(g)
	for _, l := range g.works {
		l.launched(copies)
	}
}

// unlaunched undoes launched, for a launch that was not made.
func (g *graphParts) unlaunched(copies int) {
	g.stream.Store(g.before)
	for _, l := range g.works {
		l.unlaunched(copies)
	}
}

// watch makes the device look at the waits and the works.
func (g *graphParts) watch(d *Device) error {
	if len(g.works) > 0 {
		if err := d.proxy.watch(g.works...); err != nil {
			return err
		}
	}
	if len(g.waits)+len(g.works) == 0 {
		return nil
	}
	return d.watcher.start()
}

// drop releases what the parts hold, when nothing of the graph is left.
func (g *graphParts) drop(d *Device) {
	callbacks.remove(g.ids...)
	d.mu.Lock()
	delete(d.parts, g)
	d.mu.Unlock()
	for _, w := range g.waits {
		d.dropProgress(w.words)
	}
	for _, l := range g.works {
		l.drop(d)
	}
	g.leave(d)
}

// callbackTable numbers callbacks; the driver carries the numbers as user data. No number is used twice.
type callbackTable struct {
	mu      sync.Mutex
	last    uintptr
	entries map[uintptr]callback
}

// add keeps c and returns its number, which is not 0.
func (t *callbackTable) add(c callback) uintptr {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.last++
	t.entries[t.last] = c
	return t.last
}

// take returns the callback, and forgets it unless it may be called again.
func (t *callbackTable) take(id uintptr) (callback, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	c, ok := t.entries[id]
	if ok && c.of == nil {
		delete(t.entries, id)
	}
	return c, ok
}

// remove forgets callbacks.
func (t *callbackTable) remove(ids ...uintptr) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, id := range ids {
		delete(t.entries, id)
	}
}

// count returns the number of host functions of d.
func (t *callbackTable) count(d *Device) int {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := 0
	for _, c := range t.entries {
		if c.dev == d && c.fn != nil {
			n++
		}
	}
	return n
}

// drop forgets all callbacks of d. If the driver still calls one back, nothing happens.
func (t *callbackTable) drop(d *Device) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for id, c := range t.entries {
		if c.dev == d {
			delete(t.entries, id)
		}
	}
}

// RunHostFunc runs the host function that was given to Driver.LaunchHostFunc or Driver.UserObjectCreate with this data, and
// returns when it has ended. The driver calls it through a C function; only a simulator of the driver needs to call it. It is
// safe for use by several goroutines at once.
func RunHostFunc(data uintptr) {
	c, ok := callbacks.take(data)
	switch {
	case !ok: // the device was closed
	case c.set != nil:
		c.set.drop(c.dev)
	default:
		// On a goroutine of its own: this one may be the driver's thread, which runtime.Goexit must not end and whose stack is limited.
		ended := make(chan struct{})
		go c.run(ended)
		<-ended
		c.dev.ran.end()
	}
}

// run runs the function and keeps its failure.
func (c callback) run(ended chan<- struct{}) {
	defer close(ended)
	runFunc(c.fn, func(err error) {
		failed := &device.WorkError{Op: opHostFunc, Err: err}
		if c.of != nil {
			c.of.fail(c.dev, failed)
			return
		}
		c.stream.fail(failed)
	})
}

// opHostFunc is the name of host functions in errors.
const opHostFunc = "HostFunc"

// runFunc runs fn, and calls failed if it does not return, while the goroutine is still there.
func runFunc(fn func(), failed func(error)) {
	returned := false
	defer func() {
		if returned {
			return
		}
		if v := recover(); v != nil {
			failed(&device.PanicError{Value: v, Stack: string(debug.Stack())})
			return
		}
		failed(errGoexit)
	}()
	fn()
	returned = true
}

// hostCall is a host function as work of the CPU, which it is as soon as the device has a proxy. The driver carries out few host functions
// at a time: the call that enqueues one too many waits until another has run, and holds a lock meanwhile that copies between GPUs need.
// Such a copy may be what the stream, and so the other function, waits for (seen with NIXL on 2 H200, driver 580).
type hostCall func()

// Start runs the function on a goroutine of its own.
func (f hostCall) Start() (device.HostProgress, error) {
	run := make(hostCallRun, 1)
	go func() {
		defer close(run)
		runFunc(f, func(err error) { run <- err })
	}()
	return run, nil
}

// hostCallRun carries the failure, if there is one, and is closed when the function has ended.
type hostCallRun chan error

func (r hostCallRun) Poll() (ended bool, err error) {
	select {
	case err := <-r:
		return true, err
	default:
		return false, nil
	}
}

// HostFunc enqueues a call of fn on some goroutine; the stream goes on when it has returned. fn must not call anything of this
// device, and nothing else of CUDA. A panic of it becomes the error of the next Synchronize: of this stream, or for a graph of
// the streams that the graph was launched on and that were not synchronized since.
func (s *Stream) HostFunc(fn func()) error {
	const call = "HostFunc"
	if fn == nil {
		return errs.Invalid(call, "fn", nil, "a function")
	}
	behind, err := s.lockBehind(call)
	if err != nil {
		return err
	}
	defer s.unlock()
	if s.dev.proxy.serves.Load() {
		return s.addWork(call, hostCall(fn), behind)
	}
	entry := callback{dev: s.dev, fn: fn, stream: s}
	c := s.recording()
	if c != nil {
		entry.of = c.parts
	}
	id := callbacks.add(entry)
	if r := s.dev.drv.LaunchHostFunc(s.handle, hostFuncAddress(), id); r != cu.Success {
		callbacks.remove(id)
		return s.dev.check(call, "cuLaunchHostFunc", r)
	}
	if c != nil {
		c.addFunc(id)
	}
	return nil
}
