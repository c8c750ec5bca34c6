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
	cu "github.com/symmem/symmem/internal/cuda"
)

// fake is a driver for tests of what this package does itself. Its work runs when somebody asks whether it has ended.
type fake struct {
	old     bool // it knows no clusters
	gpus    int
	version int32

	needsContext bool // for enqueueing work, too

	mu     sync.Mutex
	inject map[string]cu.Result // what calls of these symbols return
	calls  map[string]int
	next   uint64
	mem    map[device.Ptr][]byte // device memory and pinned memory
	pinned map[device.Ptr]bool
	pushed int
	ctxs   int

	streams map[cu.StreamHandle]*fakeStream
	leaving []*fakeStream // that were destroyed with work in them
	events  map[cu.EventHandle]*fakeEvent
	graphs  map[cu.GraphHandle]*fakeGraph
	execs   map[cu.GraphExecHandle]*fakeGraph
	modules int
	names   map[cu.FunctionHandle]string
	params  map[string][]int // bytes of the parameters of each kernel that there is
	objects map[cu.UserObject]*fakeObject
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
		inject: map[string]cu.Result{}, calls: map[string]int{},
		mem: map[device.Ptr][]byte{}, pinned: map[device.Ptr]bool{},
		streams: map[cu.StreamHandle]*fakeStream{}, events: map[cu.EventHandle]*fakeEvent{},
		graphs: map[cu.GraphHandle]*fakeGraph{}, execs: map[cu.GraphExecHandle]*fakeGraph{},
		objects: map[cu.UserObject]*fakeObject{}, names: map[cu.FunctionHandle]string{},
		params: map[string][]int{
			"kernel": {16}, "clustered": {}, "giveup": {16}, "none": {}, "report": {4, 1, 24}, "mixed": {1, 2, 4, 8, 4, 8, 8, 12, 16},
			"many": append([]int{8}, slices.Repeat([]int{4}, manyParams)...),
		},
	}
}

// failing makes calls of the symbol return r, until it is Success again.
func (f *fake) failing(symbol string, r cu.Result) {
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

// find returns the n bytes at p.
func (f *fake) find(p device.Ptr, n uint64) []byte {
	for base, b := range f.mem {
		if p >= base && uint64(p-base) <= uint64(len(b)) && n <= uint64(len(b))-uint64(p-base) {
			return b[p-base:][:n]
		}
	}
	return nil
}

// handle returns a number that was not used yet.
func (f *fake) handle() uint64 {
	f.next += 0x10
	return f.next
}

// progress runs what can run.
func (f *fake) progress() {
	for moved := true; moved; {
		moved = false
		for _, s := range append(slices.Collect(maps.Values(f.streams)), f.leaving...) {
			for len(s.queue) > 0 && s.queue[0]() {
				s.queue = s.queue[1:]
				moved = true
			}
		}
	}
}

// enqueue puts work into a stream, or into its capture.
func (f *fake) enqueue(h cu.StreamHandle, work func() bool) cu.Result {
	s := f.streams[h]
	if s == nil {
		return cu.InvalidHandle
	}
	if s.graph != nil {
		s.graph.work = append(s.graph.work, work)
		s.graph.clocks[s][s]++
		return cu.Success
	}
	s.queue = append(s.queue, work)
	return cu.Success
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

// word returns the word at p, or one that nobody sees if that was freed meanwhile.
func (f *fake) word(p device.Ptr) []byte {
	if b := f.find(p, 4); b != nil {
		return b
	}
	return make([]byte, 4)
}

func putText(p *byte, size int32, text string) {
	copy(unsafe.Slice(p, size), text+"\x00")
}

// driver returns the table.
func (f *fake) driver() *cu.Driver {
	d := &cu.Driver{Path: "fake", Origin: f}
	d.Init = func(uint32) cu.Result { return cu.Success }
	d.DriverGetVersion = func(v *int32) cu.Result { *v = f.version; return cu.Success }
	name := []byte("CUDA_ERROR_FAKE\x00")
	d.GetErrorName = func(r cu.Result, p **byte) cu.Result { *p = &name[0]; return cu.Success }
	d.DeviceGetCount = func(n *int32) cu.Result { *n = int32(f.gpus); return cu.Success }
	d.DeviceGet = func(dev *cu.DeviceOrdinal, i int32) cu.Result { *dev = cu.DeviceOrdinal(i); return cu.Success }
	d.DeviceGetName = func(p *byte, n int32, _ cu.DeviceOrdinal) cu.Result {
		putText(p, n, "Fake GPU")
		return cu.Success
	}
	d.DeviceGetUUID = func(u *cu.UUID, dev cu.DeviceOrdinal) cu.Result {
		*u = cu.UUID{0xab, 0xcd, byte(dev), 15: 1}
		return cu.Success
	}
	d.DeviceGetPCIBusID = func(p *byte, n int32, _ cu.DeviceOrdinal) cu.Result {
		putText(p, n, "0000:1B:00.0")
		return cu.Success
	}
	d.DeviceGetAttribute = func(v *int32, a cu.DeviceAttribute, _ cu.DeviceOrdinal) cu.Result {
		values := map[cu.DeviceAttribute]int32{
			cu.AttrMultiprocessors: 132, cu.AttrComputeCapabilityMajor: 9, cu.AttrMaxThreadsPerBlock: 1024,
			cu.AttrMaxBlockDimX: 1024, cu.AttrMaxBlockDimY: 1024, cu.AttrMaxBlockDimZ: 64, cu.AttrMaxGridDimX: 1<<31 - 1,
			cu.AttrMaxGridDimY: 65535, cu.AttrMaxGridDimZ: 65535, cu.AttrMaxSharedPerBlock: 48 << 10,
			cu.AttrMaxSharedPerBlockOptin: 227 << 10,
		}
		*v = values[a]
		return cu.Success
	}
	d.PrimaryCtxRetain = func(c *cu.ContextHandle, dev cu.DeviceOrdinal) cu.Result {
		*c = cu.ContextHandle(dev) + 1
		f.ctxs++
		return cu.Success
	}
	d.PrimaryCtxRelease = func(cu.DeviceOrdinal) cu.Result { f.ctxs--; return cu.Success }
	d.CtxPushCurrent = func(cu.ContextHandle) cu.Result { f.pushed++; return cu.Success }
	d.CtxPopCurrent = func(*cu.ContextHandle) cu.Result { f.pushed--; return cu.Success }
	d.CtxGetStreamPriorityRange = func(least, greatest *int32) cu.Result { *least, *greatest = 0, -5; return cu.Success }
	d.MemGetInfo = func(free, total *uint64) cu.Result { *free, *total = 1<<30, 2<<30; return cu.Success }

	d.MemAlloc = func(p *device.Ptr, n uint64) cu.Result {
		if n > 1<<32 {
			return cu.OutOfMemory
		}
		f.next = (f.next + 1<<21) &^ (1<<21 - 1)
		*p = device.Ptr(f.next)
		f.next += (n + 1<<21) &^ (1<<21 - 1)
		f.mem[*p] = bytes.Repeat([]byte{0xee}, int(n))
		return cu.Success
	}
	free := func(p device.Ptr, pinned bool) cu.Result {
		if _, ok := f.mem[p]; !ok || f.pinned[p] != pinned {
			return cu.InvalidValue
		}
		delete(f.mem, p)
		delete(f.pinned, p)
		return cu.Success
	}
	d.MemFree = func(p device.Ptr) cu.Result { return free(p, false) }
	d.MemHostAlloc = func(p *unsafe.Pointer, n uint64, _ uint32) cu.Result {
		words := make([]uint64, (n+7)/8)
		*p = unsafe.Pointer(&words[0])
		at := device.Ptr(uintptr(*p))
		f.mem[at], f.pinned[at] = unsafe.Slice((*byte)(*p), n), true
		return cu.Success
	}
	d.MemFreeHost = func(p unsafe.Pointer) cu.Result { return free(device.Ptr(uintptr(p)), true) }
	d.MemHostGetDevicePointer = func(q *device.Ptr, p unsafe.Pointer, _ uint32) cu.Result {
		*q = device.Ptr(uintptr(p))
		return cu.Success
	}
	move := func(dst, src device.Ptr, n uint64, s cu.StreamHandle) cu.Result {
		if f.find(dst, n) == nil || f.find(src, n) == nil {
			return cu.InvalidValue
		}
		return f.enqueue(s, once(func() { copy(f.find(dst, n), f.find(src, n)) }))
	}
	d.MemcpyDtoDAsync = move
	d.MemcpyHtoDAsync = func(dst device.Ptr, src unsafe.Pointer, n uint64, s cu.StreamHandle) cu.Result {
		return move(dst, device.Ptr(uintptr(src)), n, s)
	}
	d.MemcpyDtoHAsync = func(dst unsafe.Pointer, src device.Ptr, n uint64, s cu.StreamHandle) cu.Result {
		return move(device.Ptr(uintptr(dst)), src, n, s)
	}
	d.MemsetD8Async = func(p device.Ptr, value uint8, n uint64, s cu.StreamHandle) cu.Result {
		if f.find(p, n) == nil {
			return cu.InvalidValue
		}
		return f.enqueue(s, once(func() { f.memset(p, value, n) }))
	}

	d.StreamCreate = func(s *cu.StreamHandle, _ uint32) cu.Result {
		*s = cu.StreamHandle(f.handle())
		f.streams[*s] = &fakeStream{}
		return cu.Success
	}
	d.StreamCreateWithPriority = func(s *cu.StreamHandle, flags uint32, _ int32) cu.Result {
		*s = cu.StreamHandle(f.handle())
		f.streams[*s] = &fakeStream{}
		return cu.Success
	}
	d.StreamDestroy = func(s cu.StreamHandle) cu.Result {
		if f.progress(); len(f.streams[s].queue) > 0 {
			f.leaving = append(f.leaving, f.streams[s])
		}
		delete(f.streams, s)
		return cu.Success
	}
	d.StreamQuery = func(s cu.StreamHandle) cu.Result {
		f.progress()
		if len(f.streams[s].queue) > 0 {
			return cu.NotReady
		}
		return cu.Success
	}
	d.StreamWaitEvent = func(h cu.StreamHandle, e cu.EventHandle, _ uint32) cu.Result {
		ev, s := f.events[e], f.streams[h]
		if ev.graph != nil {
			if s.graph == nil {
				s.graph = ev.graph
				s.graph.clocks[s] = map[*fakeStream]int{s: 1}
			}
			for t, n := range ev.clock {
				s.graph.clocks[s][t] = max(s.graph.clocks[s][t], n)
			}
			return cu.Success
		}
		target := ev.pending
		waited := ev
		return f.enqueue(h, func() bool { return waited.pending == 0 || waited.pending > target })
	}
	d.StreamBeginCapture = func(h cu.StreamHandle, mode int32) cu.Result {
		s := f.streams[h]
		s.graph = &fakeGraph{clocks: map[*fakeStream]map[*fakeStream]int{s: {s: 1}}}
		s.origin = true
		return cu.Success
	}
	d.StreamEndCapture = func(h cu.StreamHandle, out *cu.GraphHandle) cu.Result {
		s := f.streams[h]
		g := s.graph
		joined := true
		for t, clock := range g.clocks {
			joined = joined && g.clocks[s][t] >= clock[t]
			t.graph = nil
		}
		s.origin = false
		if !joined {
			f.release(g)
			return cu.CaptureUnjoined
		}
		*out = cu.GraphHandle(f.handle())
		f.graphs[*out] = g
		return cu.Success
	}
	wait := func(s cu.StreamHandle, p device.Ptr, value, _ uint32) cu.Result {
		if f.find(p, 4) == nil {
			return cu.InvalidValue
		}
		return f.enqueue(s, func() bool { return int32(atomic.LoadUint32((*uint32)(unsafe.Pointer(&f.word(p)[0])))-value) >= 0 })
	}
	write := func(s cu.StreamHandle, p device.Ptr, value, _ uint32) cu.Result {
		if f.find(p, 4) == nil {
			return cu.InvalidValue
		}
		return f.enqueue(s, once(func() { atomic.StoreUint32((*uint32)(unsafe.Pointer(&f.word(p)[0])), value) }))
	}
	d.StreamWriteValue32 = write
	d.StreamBatchMemOp = func(s cu.StreamHandle, n uint32, ops *cu.BatchMemOp, _ uint32) cu.Result {
		all := slices.Clone(unsafe.Slice(ops, n))
		for _, o := range all {
			if f.find(device.Ptr(o.Address), 4) == nil || o.Flags != 0 {
				return cu.InvalidValue
			}
		}
		for _, o := range all {
			switch o.Op {
			case cu.MemOpWrite32:
				write(s, device.Ptr(o.Address), uint32(o.Value), 0)
			case cu.MemOpWait32:
				wait(s, device.Ptr(o.Address), uint32(o.Value), 0)
			default:
				return cu.NotSupported
			}
		}
		return cu.Success
	}
	d.LaunchHostFunc = func(s cu.StreamHandle, _, data uintptr) cu.Result {
		return f.enqueue(s, once(func() { cuda.RunHostFunc(data) }))
	}

	d.EventCreate = func(e *cu.EventHandle, _ uint32) cu.Result {
		*e = cu.EventHandle(f.handle())
		f.events[*e] = &fakeEvent{}
		return cu.Success
	}
	d.EventDestroy = func(e cu.EventHandle) cu.Result { delete(f.events, e); return cu.Success }
	d.EventRecord = func(e cu.EventHandle, h cu.StreamHandle) cu.Result {
		s := f.streams[h]
		if s == nil || f.events[e] == nil {
			return cu.InvalidHandle
		}
		ev := f.events[e]
		if s.graph != nil {
			ev.graph, ev.clock = s.graph, maps.Clone(s.graph.clocks[s])
			return cu.Success
		}
		// What waits for an earlier record keeps the old event.
		now := &fakeEvent{pending: 1}
		f.events[e] = now
		return f.enqueue(h, once(func() { now.pending, now.at = 0, time.Now() }))
	}
	d.EventQuery = func(e cu.EventHandle) cu.Result {
		f.progress()
		if f.events[e].pending > 0 {
			return cu.NotReady
		}
		return cu.Success
	}
	d.EventElapsedTime = func(ms *float32, a, b cu.EventHandle) cu.Result {
		*ms = float32(f.events[b].at.Sub(f.events[a].at).Seconds() * 1000)
		return cu.Success
	}

	d.ModuleLoadDataEx = func(m *cu.ModuleHandle, image unsafe.Pointer, _ uint32, options *cu.JITOption, values *uintptr) cu.Result {
		f.modules++
		*m = cu.ModuleHandle(f.handle())
		return cu.Success
	}
	d.ModuleUnload = func(cu.ModuleHandle) cu.Result { f.modules--; return cu.Success }
	d.ModuleGetFunction = func(h *cu.FunctionHandle, _ cu.ModuleHandle, name string) cu.Result {
		if f.params[name] == nil {
			return cu.NotFound
		}
		*h = cu.FunctionHandle(f.handle())
		f.names[*h] = name
		return cu.Success
	}
	d.FuncGetAttribute = func(v *int32, a cu.FuncAttribute, h cu.FunctionHandle) cu.Result {
		if a == cu.FuncClusterWidth || a == cu.FuncClusterHeight || a == cu.FuncClusterDepth {
			if f.old {
				return cu.InvalidValue
			}
			if *v = 0; f.names[h] == "clustered" {
				*v = map[cu.FuncAttribute]int32{cu.FuncClusterWidth: 4, cu.FuncClusterHeight: 2, cu.FuncClusterDepth: 1}[a]
			}
			return cu.Success
		}
		*v = map[cu.FuncAttribute]int32{cu.FuncMaxThreadsPerBlock: 512, cu.FuncSharedBytes: 1024}[a]
		return cu.Success
	}
	d.FuncSetAttribute = func(cu.FunctionHandle, cu.FuncAttribute, int32) cu.Result { return cu.Success }
	d.FuncGetParamInfo = func(h cu.FunctionHandle, i uint64, _, n *uint64) cu.Result {
		sizes := f.params[f.names[h]]
		if i >= uint64(len(sizes)) {
			return cu.InvalidValue
		}
		*n = uint64(sizes[i])
		return cu.Success
	}
	d.OccupancyMaxActiveBlocks = func(n *int32, _ cu.FunctionHandle, threads int32, _ uint64) cu.Result {
		*n = 2048 / threads
		return cu.Success
	}
	d.OccupancyMaxActiveClusters = func(n *int32, _ cu.FunctionHandle, c *cu.LaunchConfig) cu.Result {
		a := c.Attrs
		if c.NumAttrs != 1 || a.ID != cu.LaunchClusterDimension || [3]uint32(a.Value[:3]) != [3]uint32{4, 2, 1} || c.Grid != [3]uint32{4, 2, 1} {
			return cu.InvalidValue
		}
		*n = int32(fakeClusters)
		return cu.Success
	}
	d.LaunchKernelEx = func(c *cu.LaunchConfig, h cu.FunctionHandle, params, _ *unsafe.Pointer) cu.Result {
		sizes := f.params[f.names[h]]
		if (params == nil) != (len(sizes) == 0) {
			return cu.InvalidValue
		}
		args := make([][]byte, len(sizes)) // what the kernel gets
		for i, at := range unsafe.Slice(params, len(sizes)) {
			if uintptr(at)%16 != 0 {
				return cu.InvalidValue // a real driver would not mind; the package promises itself that they are
			}
			args[i] = slices.Clone(unsafe.Slice((*byte)(at), sizes[i]))
		}
		giveUp := func(at []byte, why []byte) cu.Result {
			return f.enqueue(c.Stream, once(func() {
				if cell := f.find(device.Ptr(binary.LittleEndian.Uint64(at)), 16); cell != nil {
					x := (*device.FaultCell)(unsafe.Pointer(&cell[0]))
					if x.GaveUp == atomic.LoadUint32(&x.Told) {
						atomic.StoreUint64(&x.Fault, uint64(binary.LittleEndian.Uint32(why)))
					}
					atomic.AddUint32(&x.GaveUp, 1)
				}
			}))
		}
		switch f.names[h] {
		case "none":
			return f.enqueue(c.Stream, once(func() {}))
		case "giveup":
			return giveUp(args[0], args[0][8:])
		case "report":
			return giveUp(args[2][16:], args[0])
		case "mixed":
			return f.enqueue(c.Stream, once(func() {
				out := f.find(device.Ptr(binary.LittleEndian.Uint64(args[6])), mixedBytes)
				for i, at := range mixedAt {
					copy(out[at:], args[i])
				}
			}))
		case "many":
			return f.enqueue(c.Stream, once(func() {
				sum := uint32(0)
				for _, p := range args[1:] {
					sum = sum*31 + binary.LittleEndian.Uint32(p)
				}
				binary.LittleEndian.PutUint32(f.word(device.Ptr(binary.LittleEndian.Uint64(args[0]))), sum)
			}))
		}
		block := args[0]
		// The kernel adds its value to the word at its pointer, once for each block.
		blocks := c.Grid[0] * c.Grid[1] * c.Grid[2]
		return f.enqueue(c.Stream, once(func() {
			word := f.word(device.Ptr(binary.LittleEndian.Uint64(block)))
			add := binary.LittleEndian.Uint32(block[8:]) * blocks
			binary.LittleEndian.PutUint32(word, binary.LittleEndian.Uint32(word)+add)
		}))
	}

	d.GraphInstantiateWithFlags = func(x *cu.GraphExecHandle, h cu.GraphHandle, _ uint64) cu.Result {
		g := f.graphs[h]
		*x = cu.GraphExecHandle(f.handle())
		f.execs[*x] = &fakeGraph{work: g.work, objects: g.objects}
		for _, o := range g.objects {
			o.refs++
		}
		return cu.Success
	}
	d.GraphLaunch = func(x cu.GraphExecHandle, s cu.StreamHandle) cu.Result {
		return f.enqueue(s, f.replay(f.execs[x]))
	}
	d.GraphExecDestroy = func(x cu.GraphExecHandle) cu.Result {
		f.release(f.execs[x])
		delete(f.execs, x)
		return cu.Success
	}
	d.GraphDestroy = func(h cu.GraphHandle) cu.Result {
		f.release(f.graphs[h])
		delete(f.graphs, h)
		return cu.Success
	}
	d.StreamGetCaptureInfo = func(s cu.StreamHandle, status *int32, id *uint64, g *cu.GraphHandle, _ **cu.GraphNodeHandle, _ **cu.GraphEdgeData, n *uint64) cu.Result {
		if *status = 0; f.streams[s].graph == nil {
			return cu.Success
		}
		*status = cu.CaptureStatusActive
		*g = cu.GraphHandle(s) // the graph has no handle yet; GraphAddChildGraphNode knows
		return cu.Success
	}
	d.GraphAddChildGraphNode = func(_ *cu.GraphNodeHandle, parent cu.GraphHandle, _ *cu.GraphNodeHandle, _ uint64, child cu.GraphHandle) cu.Result {
		s := f.streams[cu.StreamHandle(parent)]
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
		return cu.Success
	}
	d.StreamUpdateCaptureDependencies = func(cu.StreamHandle, *cu.GraphNodeHandle, uint64, uint32) cu.Result { return cu.Success }
	d.UserObjectCreate = func(o *cu.UserObject, data, _ uintptr, refs, _ uint32) cu.Result {
		*o = cu.UserObject(f.handle())
		f.objects[*o] = &fakeObject{refs: int(refs), data: data}
		return cu.Success
	}
	d.UserObjectRelease = func(o cu.UserObject, n uint32) cu.Result {
		if f.objects[o].refs -= int(n); f.objects[o].refs == 0 {
			cuda.RunHostFunc(f.objects[o].data)
		}
		return cu.Success
	}
	d.GraphRetainUserObject = func(g cu.GraphHandle, o cu.UserObject, n, flags uint32) cu.Result {
		f.graphs[g].objects = append(f.graphs[g].objects, f.objects[o])
		return cu.Success
	}
	f.guard(d)
	return d
}

// contextual are the calls that drivers may or may not want a current context for.
var contextual = []string{"cuMemcpyDtoDAsync_v2", "cuMemsetD8Async", "cuStreamWriteValue32_v2", "cuLaunchKernelEx", "cuGraphLaunch",
	"cuEventRecord", "cuStreamWaitEvent"}

// guard wraps every function of the table: one call at a time, counted, and failing where a test says so.
func (f *fake) guard(d *cu.Driver) {
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
				return []reflect.Value{reflect.ValueOf(cu.InvalidContext)}
			}
			if r := f.inject[symbol]; r != cu.Success {
				return []reflect.Value{reflect.ValueOf(r)}
			}
			return inner.Call(args)
		}))
	}
}
