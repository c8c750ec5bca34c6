package cuda_test

import (
	"bytes"
	"encoding/binary"
	"maps"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/assert"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/cuda"
)

// fake is a driver for tests of what this package does itself. Its work runs when somebody asks whether it has ended.
type fake struct {
	gpus    int
	version int32

	needsContext bool // for enqueueing work, too

	mu     sync.Mutex
	inject map[string]cuda.Result // what calls of these symbols return
	calls  map[string]int
	next   uint64
	mem    map[device.Ptr][]byte // device memory and pinned memory
	pinned map[device.Ptr]bool
	pushed int
	ctxs   int

	streams map[cuda.StreamHandle]*fakeStream
	events  map[cuda.EventHandle]*fakeEvent
	graphs  map[cuda.GraphHandle]*fakeGraph
	execs   map[cuda.GraphExecHandle]*fakeGraph
	modules int
	names   map[cuda.FunctionHandle]string
	objects map[cuda.UserObject]*fakeObject
}

type fakeStream struct {
	queue  []func() bool // each is asked again until it says that it has ended
	graph  *fakeGraph    // in a capture
	origin bool
}

type fakeEvent struct {
	pending int
	at      time.Time
	graph   *fakeGraph
	clock   map[*fakeStream]int
}

type fakeGraph struct {
	work    []func() bool
	clocks  map[*fakeStream]map[*fakeStream]int
	objects []*fakeObject

	launched, ended int // launches run one after the other, in the order of their calls
}

type fakeObject struct {
	refs int
	data uintptr
}

// newFake makes a driver that sees so many GPUs.
func newFake(gpus int) *fake {
	return &fake{
		gpus: gpus, version: 13000, next: 0x1000,
		inject: map[string]cuda.Result{}, calls: map[string]int{},
		mem: map[device.Ptr][]byte{}, pinned: map[device.Ptr]bool{},
		streams: map[cuda.StreamHandle]*fakeStream{}, events: map[cuda.EventHandle]*fakeEvent{},
		graphs: map[cuda.GraphHandle]*fakeGraph{}, execs: map[cuda.GraphExecHandle]*fakeGraph{},
		objects: map[cuda.UserObject]*fakeObject{}, names: map[cuda.FunctionHandle]string{},
	}
}

// failing makes calls of the symbol return r, until it is Success again.
func (f *fake) failing(symbol string, r cuda.Result) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.inject[symbol] = r
}

// assertEmpty checks that everything was given back.
func (f *fake) assertEmpty(t testing.TB) {
	t.Helper()
	f.mu.Lock()
	defer f.mu.Unlock()
	assert.Empty(t, f.mem, "memory")
	assert.Empty(t, f.streams, "streams")
	assert.Empty(t, f.events, "events")
	assert.Empty(t, f.graphs, "graphs")
	assert.Empty(t, f.execs, "executable graphs")
	for _, o := range f.objects {
		assert.Zero(t, o.refs, "user objects")
	}
	assert.Zero(t, f.modules, "modules")
	assert.Zero(t, f.pushed, "contexts that were pushed and not popped")
	assert.Zero(t, f.ctxs, "contexts that were retained and not released")
}

// find gives the n bytes at p.
func (f *fake) find(p device.Ptr, n uint64) []byte {
	for base, b := range f.mem {
		if p >= base && uint64(p-base) <= uint64(len(b)) && n <= uint64(len(b))-uint64(p-base) {
			return b[p-base:][:n]
		}
	}
	return nil
}

// handle gives a number that was not used yet.
func (f *fake) handle() uint64 {
	f.next += 0x10
	return f.next
}

// progress runs what can run.
func (f *fake) progress() {
	for moved := true; moved; {
		moved = false
		for _, s := range f.streams {
			for len(s.queue) > 0 && s.queue[0]() {
				s.queue = s.queue[1:]
				moved = true
			}
		}
	}
}

// enqueue puts work into a stream, or into its capture.
func (f *fake) enqueue(h cuda.StreamHandle, work func() bool) cuda.Result {
	s := f.streams[h]
	if s == nil {
		return cuda.InvalidHandle
	}
	if s.graph != nil {
		s.graph.work = append(s.graph.work, work)
		s.graph.clocks[s][s]++
		return cuda.Success
	}
	s.queue = append(s.queue, work)
	return cuda.Success
}

// once makes work that always ends.
func once(fn func()) func() bool { return func() bool { fn(); return true } }

// replay makes work of a graph: it runs its work in order, after all launches before it.
func (f *fake) replay(g *fakeGraph) func() bool {
	for _, o := range g.objects {
		o.refs++
	}
	turn, at := g.launched, 0
	g.launched++
	return func() bool {
		if g.ended != turn {
			return false
		}
		for at < len(g.work) {
			if !g.work[at]() {
				return false
			}
			at++
		}
		g.ended++
		f.release(g)
		return true
	}
}

// release drops a reference to the objects of a graph.
func (f *fake) release(g *fakeGraph) {
	for _, o := range g.objects {
		if o.refs--; o.refs == 0 {
			cuda.RunHostFunc(o.data)
		}
	}
}

func (f *fake) memset(p device.Ptr, value byte, n uint64) {
	copy(f.find(p, n), bytes.Repeat([]byte{value}, int(n)))
}

// word gives the word at p, or one that nobody sees if that was freed meanwhile.
func (f *fake) word(p device.Ptr) []byte {
	if b := f.find(p, 4); b != nil {
		return b
	}
	return make([]byte, 4)
}

func putText(p *byte, size int32, text string) {
	copy(unsafe.Slice(p, size), text+"\x00")
}

// driver gives the table.
func (f *fake) driver() *cuda.Driver {
	d := &cuda.Driver{Path: "fake"}
	d.Init = func(uint32) cuda.Result { return cuda.Success }
	d.DriverGetVersion = func(v *int32) cuda.Result { *v = f.version; return cuda.Success }
	name := []byte("CUDA_ERROR_FAKE\x00")
	d.GetErrorName = func(r cuda.Result, p **byte) cuda.Result { *p = &name[0]; return cuda.Success }
	d.DeviceGetCount = func(n *int32) cuda.Result { *n = int32(f.gpus); return cuda.Success }
	d.DeviceGet = func(dev *cuda.DeviceOrdinal, i int32) cuda.Result { *dev = cuda.DeviceOrdinal(i); return cuda.Success }
	d.DeviceGetName = func(p *byte, n int32, _ cuda.DeviceOrdinal) cuda.Result {
		putText(p, n, "Fake GPU")
		return cuda.Success
	}
	d.DeviceGetUUID = func(u *cuda.UUID, dev cuda.DeviceOrdinal) cuda.Result {
		*u = cuda.UUID{0xab, 0xcd, byte(dev), 15: 1}
		return cuda.Success
	}
	d.DeviceGetPCIBusID = func(p *byte, n int32, _ cuda.DeviceOrdinal) cuda.Result {
		putText(p, n, "0000:1B:00.0")
		return cuda.Success
	}
	d.DeviceGetAttribute = func(v *int32, a cuda.DeviceAttribute, _ cuda.DeviceOrdinal) cuda.Result {
		values := map[cuda.DeviceAttribute]int32{
			cuda.AttrMultiprocessors: 132, cuda.AttrComputeCapabilityMajor: 9, cuda.AttrMaxThreadsPerBlock: 1024,
			cuda.AttrMaxBlockDimX: 1024, cuda.AttrMaxBlockDimY: 1024, cuda.AttrMaxBlockDimZ: 64, cuda.AttrMaxGridDimX: 1<<31 - 1,
			cuda.AttrMaxGridDimY: 65535, cuda.AttrMaxGridDimZ: 65535, cuda.AttrMaxSharedPerBlock: 48 << 10,
			cuda.AttrMaxSharedPerBlockOptin: 227 << 10,
		}
		*v = values[a]
		return cuda.Success
	}
	d.PrimaryCtxRetain = func(c *cuda.ContextHandle, dev cuda.DeviceOrdinal) cuda.Result {
		*c = cuda.ContextHandle(dev) + 1
		f.ctxs++
		return cuda.Success
	}
	d.PrimaryCtxRelease = func(cuda.DeviceOrdinal) cuda.Result { f.ctxs--; return cuda.Success }
	d.CtxPushCurrent = func(cuda.ContextHandle) cuda.Result { f.pushed++; return cuda.Success }
	d.CtxPopCurrent = func(*cuda.ContextHandle) cuda.Result { f.pushed--; return cuda.Success }
	d.CtxGetStreamPriorityRange = func(least, greatest *int32) cuda.Result { *least, *greatest = 0, -5; return cuda.Success }
	d.MemGetInfo = func(free, total *uint64) cuda.Result { *free, *total = 1<<30, 2<<30; return cuda.Success }

	d.MemAlloc = func(p *device.Ptr, n uint64) cuda.Result {
		if n > 1<<32 {
			return cuda.OutOfMemory
		}
		f.next = (f.next + 1<<21) &^ (1<<21 - 1)
		*p = device.Ptr(f.next)
		f.next += (n + 1<<21) &^ (1<<21 - 1)
		f.mem[*p] = bytes.Repeat([]byte{0xee}, int(n))
		return cuda.Success
	}
	free := func(p device.Ptr, pinned bool) cuda.Result {
		if _, ok := f.mem[p]; !ok || f.pinned[p] != pinned {
			return cuda.InvalidValue
		}
		delete(f.mem, p)
		delete(f.pinned, p)
		return cuda.Success
	}
	d.MemFree = func(p device.Ptr) cuda.Result { return free(p, false) }
	d.MemHostAlloc = func(p *unsafe.Pointer, n uint64, _ uint32) cuda.Result {
		words := make([]uint64, (n+7)/8)
		*p = unsafe.Pointer(&words[0])
		at := device.Ptr(uintptr(*p))
		f.mem[at], f.pinned[at] = unsafe.Slice((*byte)(*p), n), true
		return cuda.Success
	}
	d.MemFreeHost = func(p unsafe.Pointer) cuda.Result { return free(device.Ptr(uintptr(p)), true) }
	d.MemHostGetDevicePointer = func(q *device.Ptr, p unsafe.Pointer, _ uint32) cuda.Result {
		*q = device.Ptr(uintptr(p))
		return cuda.Success
	}
	move := func(dst, src device.Ptr, n uint64, s cuda.StreamHandle) cuda.Result {
		if f.find(dst, n) == nil || f.find(src, n) == nil {
			return cuda.InvalidValue
		}
		return f.enqueue(s, once(func() { copy(f.find(dst, n), f.find(src, n)) }))
	}
	d.MemcpyDtoDAsync = move
	d.MemcpyHtoDAsync = func(dst device.Ptr, src unsafe.Pointer, n uint64, s cuda.StreamHandle) cuda.Result {
		return move(dst, device.Ptr(uintptr(src)), n, s)
	}
	d.MemcpyDtoHAsync = func(dst unsafe.Pointer, src device.Ptr, n uint64, s cuda.StreamHandle) cuda.Result {
		return move(device.Ptr(uintptr(dst)), src, n, s)
	}
	d.MemsetD8Async = func(p device.Ptr, value uint8, n uint64, s cuda.StreamHandle) cuda.Result {
		if f.find(p, n) == nil {
			return cuda.InvalidValue
		}
		return f.enqueue(s, once(func() { f.memset(p, value, n) }))
	}

	d.StreamCreate = func(s *cuda.StreamHandle, _ uint32) cuda.Result {
		*s = cuda.StreamHandle(f.handle())
		f.streams[*s] = &fakeStream{}
		return cuda.Success
	}
	d.StreamCreateWithPriority = func(s *cuda.StreamHandle, flags uint32, _ int32) cuda.Result {
		*s = cuda.StreamHandle(f.handle())
		f.streams[*s] = &fakeStream{}
		return cuda.Success
	}
	d.StreamDestroy = func(s cuda.StreamHandle) cuda.Result { delete(f.streams, s); return cuda.Success }
	d.StreamQuery = func(s cuda.StreamHandle) cuda.Result {
		f.progress()
		if len(f.streams[s].queue) > 0 {
			return cuda.NotReady
		}
		return cuda.Success
	}
	d.StreamWaitEvent = func(h cuda.StreamHandle, e cuda.EventHandle, _ uint32) cuda.Result {
		ev, s := f.events[e], f.streams[h]
		if ev.graph != nil {
			if s.graph == nil {
				s.graph = ev.graph
				s.graph.clocks[s] = map[*fakeStream]int{s: 1}
			}
			for t, n := range ev.clock {
				s.graph.clocks[s][t] = max(s.graph.clocks[s][t], n)
			}
			return cuda.Success
		}
		target := ev.pending
		waited := ev
		return f.enqueue(h, func() bool { return waited.pending == 0 || waited.pending > target })
	}
	d.StreamBeginCapture = func(h cuda.StreamHandle, mode int32) cuda.Result {
		s := f.streams[h]
		s.graph = &fakeGraph{clocks: map[*fakeStream]map[*fakeStream]int{s: {s: 1}}}
		s.origin = true
		return cuda.Success
	}
	d.StreamEndCapture = func(h cuda.StreamHandle, out *cuda.GraphHandle) cuda.Result {
		s := f.streams[h]
		g := s.graph
		joined := true
		for t, clock := range g.clocks {
			joined = joined && g.clocks[s][t] >= clock[t]
			t.graph = nil
		}
		s.origin = false
		if !joined {
			return cuda.CaptureUnjoined
		}
		*out = cuda.GraphHandle(f.handle())
		f.graphs[*out] = g
		return cuda.Success
	}
	wait := func(s cuda.StreamHandle, p device.Ptr, value, _ uint32) cuda.Result {
		if f.find(p, 4) == nil {
			return cuda.InvalidValue
		}
		return f.enqueue(s, func() bool { return int32(atomic.LoadUint32((*uint32)(unsafe.Pointer(&f.word(p)[0])))-value) >= 0 })
	}
	write := func(s cuda.StreamHandle, p device.Ptr, value, _ uint32) cuda.Result {
		if f.find(p, 4) == nil {
			return cuda.InvalidValue
		}
		return f.enqueue(s, once(func() { atomic.StoreUint32((*uint32)(unsafe.Pointer(&f.word(p)[0])), value) }))
	}
	d.StreamWaitValue32, d.StreamWriteValue32 = wait, write
	d.StreamBatchMemOp = func(s cuda.StreamHandle, n uint32, ops *cuda.BatchMemOp, _ uint32) cuda.Result {
		all := slices.Clone(unsafe.Slice(ops, n))
		for _, o := range all {
			if f.find(device.Ptr(o.Address), 4) == nil || o.Flags != 0 {
				return cuda.InvalidValue
			}
		}
		for _, o := range all {
			switch o.Op {
			case cuda.MemOpWrite32:
				write(s, device.Ptr(o.Address), uint32(o.Value), 0)
			case cuda.MemOpWait32:
				wait(s, device.Ptr(o.Address), uint32(o.Value), 0)
			default:
				return cuda.NotSupported
			}
		}
		return cuda.Success
	}
	d.LaunchHostFunc = func(s cuda.StreamHandle, _, data uintptr) cuda.Result {
		return f.enqueue(s, once(func() { cuda.RunHostFunc(data) }))
	}

	d.EventCreate = func(e *cuda.EventHandle, _ uint32) cuda.Result {
		*e = cuda.EventHandle(f.handle())
		f.events[*e] = &fakeEvent{}
		return cuda.Success
	}
	d.EventDestroy = func(e cuda.EventHandle) cuda.Result { delete(f.events, e); return cuda.Success }
	d.EventRecord = func(e cuda.EventHandle, h cuda.StreamHandle) cuda.Result {
		s := f.streams[h]
		if s == nil || f.events[e] == nil {
			return cuda.InvalidHandle
		}
		ev := f.events[e]
		if s.graph != nil {
			ev.graph, ev.clock = s.graph, maps.Clone(s.graph.clocks[s])
			return cuda.Success
		}
		// What waits for an earlier record keeps the old event.
		now := &fakeEvent{pending: 1}
		f.events[e] = now
		return f.enqueue(h, once(func() { now.pending, now.at = 0, time.Now() }))
	}
	d.EventQuery = func(e cuda.EventHandle) cuda.Result {
		f.progress()
		if f.events[e].pending > 0 {
			return cuda.NotReady
		}
		return cuda.Success
	}
	d.EventElapsedTime = func(ms *float32, a, b cuda.EventHandle) cuda.Result {
		*ms = float32(f.events[b].at.Sub(f.events[a].at).Seconds() * 1000)
		return cuda.Success
	}

	d.ModuleLoadDataEx = func(m *cuda.ModuleHandle, image unsafe.Pointer, _ uint32, options *cuda.JITOption, values *uintptr) cuda.Result {
		f.modules++
		*m = cuda.ModuleHandle(f.handle())
		return cuda.Success
	}
	d.ModuleUnload = func(cuda.ModuleHandle) cuda.Result { f.modules--; return cuda.Success }
	d.ModuleGetFunction = func(h *cuda.FunctionHandle, _ cuda.ModuleHandle, name string) cuda.Result {
		if name != "kernel" && name != "giveup" {
			return cuda.NotFound
		}
		*h = cuda.FunctionHandle(f.handle())
		f.names[*h] = name
		return cuda.Success
	}
	d.FuncGetAttribute = func(v *int32, a cuda.FuncAttribute, _ cuda.FunctionHandle) cuda.Result {
		*v = map[cuda.FuncAttribute]int32{cuda.FuncMaxThreadsPerBlock: 512, cuda.FuncSharedBytes: 1024}[a]
		return cuda.Success
	}
	d.FuncSetAttribute = func(cuda.FunctionHandle, cuda.FuncAttribute, int32) cuda.Result { return cuda.Success }
	d.FuncGetParamInfo = func(_ cuda.FunctionHandle, i uint64, offset, n *uint64) cuda.Result {
		if i > 0 {
			return cuda.InvalidValue
		}
		*offset, *n = 0, 16
		return cuda.Success
	}
	d.OccupancyMaxActiveBlocks = func(n *int32, _ cuda.FunctionHandle, threads int32, _ uint64) cuda.Result {
		*n = 2048 / threads
		return cuda.Success
	}
	d.LaunchKernelEx = func(c *cuda.LaunchConfig, h cuda.FunctionHandle, params, _ *unsafe.Pointer) cuda.Result {
		block := slices.Clone(unsafe.Slice((*byte)(*params), 16))
		if f.names[h] == "giveup" {
			return f.enqueue(c.Stream, once(func() {
				if cell := f.find(device.Ptr(binary.LittleEndian.Uint64(block)), 16); cell != nil {
					x := (*device.FaultCell)(unsafe.Pointer(&cell[0]))
					if x.GaveUp == atomic.LoadUint32(&x.Told) {
						atomic.StoreUint64(&x.Fault, uint64(binary.LittleEndian.Uint32(block[8:])))
					}
					atomic.AddUint32(&x.GaveUp, 1)
				}
			}))
		}
		// The kernel adds its value to the word at its pointer, once for each block.
		blocks := c.Grid[0] * c.Grid[1] * c.Grid[2]
		return f.enqueue(c.Stream, once(func() {
			word := f.word(device.Ptr(binary.LittleEndian.Uint64(block)))
			add := binary.LittleEndian.Uint32(block[8:]) * blocks
			binary.LittleEndian.PutUint32(word, binary.LittleEndian.Uint32(word)+add)
		}))
	}

	d.GraphInstantiateWithFlags = func(x *cuda.GraphExecHandle, h cuda.GraphHandle, _ uint64) cuda.Result {
		g := f.graphs[h]
		*x = cuda.GraphExecHandle(f.handle())
		f.execs[*x] = &fakeGraph{work: g.work, objects: g.objects}
		for _, o := range g.objects {
			o.refs++
		}
		return cuda.Success
	}
	d.GraphLaunch = func(x cuda.GraphExecHandle, s cuda.StreamHandle) cuda.Result {
		return f.enqueue(s, f.replay(f.execs[x]))
	}
	d.GraphExecDestroy = func(x cuda.GraphExecHandle) cuda.Result {
		f.release(f.execs[x])
		delete(f.execs, x)
		return cuda.Success
	}
	d.GraphDestroy = func(h cuda.GraphHandle) cuda.Result {
		f.release(f.graphs[h])
		delete(f.graphs, h)
		return cuda.Success
	}
	d.StreamGetCaptureInfo = func(s cuda.StreamHandle, status *int32, id *uint64, g *cuda.GraphHandle, _ **cuda.GraphNodeHandle, _ **cuda.GraphEdgeData, n *uint64) cuda.Result {
		*status = cuda.CaptureStatusActive
		*g = cuda.GraphHandle(s) // the graph has no handle yet; GraphAddChildGraphNode knows
		return cuda.Success
	}
	d.GraphAddChildGraphNode = func(_ *cuda.GraphNodeHandle, parent cuda.GraphHandle, _ *cuda.GraphNodeHandle, _ uint64, child cuda.GraphHandle) cuda.Result {
		s := f.streams[cuda.StreamHandle(parent)]
		clone := &fakeGraph{work: f.graphs[child].work, objects: f.graphs[child].objects}
		var run func() bool
		s.graph.work = append(s.graph.work, func() bool {
			if run == nil {
				run = f.replay(clone)
			}
			if !run() {
				return false
			}
			run = nil
			return true
		})
		s.graph.objects = append(s.graph.objects, clone.objects...)
		for _, o := range clone.objects {
			o.refs++
		}
		s.graph.clocks[s][s]++
		return cuda.Success
	}
	d.StreamUpdateCaptureDependencies = func(cuda.StreamHandle, *cuda.GraphNodeHandle, uint64, uint32) cuda.Result { return cuda.Success }
	d.UserObjectCreate = func(o *cuda.UserObject, data, _ uintptr, refs, _ uint32) cuda.Result {
		*o = cuda.UserObject(f.handle())
		f.objects[*o] = &fakeObject{refs: int(refs), data: data}
		return cuda.Success
	}
	d.UserObjectRelease = func(o cuda.UserObject, n uint32) cuda.Result {
		if f.objects[o].refs -= int(n); f.objects[o].refs == 0 {
			cuda.RunHostFunc(f.objects[o].data)
		}
		return cuda.Success
	}
	d.GraphRetainUserObject = func(g cuda.GraphHandle, o cuda.UserObject, n, flags uint32) cuda.Result {
		f.graphs[g].objects = append(f.graphs[g].objects, f.objects[o])
		return cuda.Success
	}
	f.guard(d)
	return d
}

// contextual are the calls that drivers may or may not want a current context for.
var contextual = []string{"cuMemcpyDtoDAsync_v2", "cuMemsetD8Async", "cuStreamWriteValue32_v2", "cuLaunchKernelEx", "cuGraphLaunch",
	"cuEventRecord", "cuStreamWaitEvent"}

// guard wraps every function of the table: one call at a time, counted, and failing where a test says so.
func (f *fake) guard(d *cuda.Driver) {
	v := reflect.ValueOf(d).Elem()
	for i := range v.NumField() {
		tag, ok := v.Type().Field(i).Tag.Lookup("cuda")
		field := v.Field(i)
		if !ok || field.IsNil() {
			continue
		}
		symbol, _, _ := strings.Cut(tag, ",")
		inner := reflect.ValueOf(field.Interface())
		field.Set(reflect.MakeFunc(field.Type(), func(args []reflect.Value) []reflect.Value {
			f.mu.Lock()
			defer f.mu.Unlock()
			f.calls[symbol]++
			if f.needsContext && f.pushed == 0 && slices.Contains(contextual, symbol) {
				return []reflect.Value{reflect.ValueOf(cuda.InvalidContext)}
			}
			if r := f.inject[symbol]; r != cuda.Success {
				return []reflect.Value{reflect.ValueOf(r)}
			}
			return inner.Call(args)
		}))
	}
}
