package simcuda_test

import (
	"encoding/binary"
	"fmt"
	"math"
	"reflect"
	"runtime"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"golang.org/x/sys/unix"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/cuda"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/ptxvm"
	"github.com/symmem/symmem/internal/simcuda"
)

// kernels are small: load copies a word, await waits until a word is not 0, sum reduces behind a multicast address.
const kernelText = `.version 8.0
.target sm_90
.address_size 64
.visible .entry load(.param .u64 from, .param .u64 to)
{
	.reg .b64 %rd<3>;
	.reg .b32 %r<2>;
	ld.param.u64 %rd1, [from];
	ld.param.u64 %rd2, [to];
	ld.global.u32 %r1, [%rd1];
	st.global.u32 [%rd2], %r1;
	ret;
}
.visible .entry await(.param .u64 from, .param .u64 to)
{
	.reg .b64 %rd<3>;
	.reg .b32 %r<2>;
	.reg .pred %p<2>;
	ld.param.u64 %rd1, [from];
	ld.param.u64 %rd2, [to];
$again:
	ld.acquire.sys.global.u32 %r1, [%rd1];
	setp.eq.u32 %p1, %r1, 0;
	@%p1 bra $again;
	st.global.u32 [%rd2], %r1;
	ret;
}
.visible .entry sum(.param .u64 from, .param .u64 to)
{
	.reg .b64 %rd<3>;
	.reg .f32 %f<2>;
	ld.param.u64 %rd1, [from];
	ld.param.u64 %rd2, [to];
	multimem.ld_reduce.relaxed.sys.global.add.f32 %f1, [%rd1];
	st.global.f32 [%rd2], %f1;
	ret;
}
`

const granule = 2 << 20

// rig is one thread that calls the driver.
type rig struct {
	t      *testing.T
	m      *simcuda.Machine
	d      *cu.Driver
	module []cu.ModuleHandle // by GPU
	stream []cu.StreamHandle
}

// newRig makes GPUs with a context, a stream and the kernels on each, and leaves the context of GPU 0 current.
func newRig(t *testing.T, c simcuda.Config) *rig {
	runtime.LockOSThread()
	t.Cleanup(runtime.UnlockOSThread)
	m, err := simcuda.New(c)
	require.NoError(t, err)
	r := &rig{t: t, m: m, d: m.Driver()}
	for g := range max(c.GPUs, 1) {
		var ctx cu.ContextHandle
		r.ok(r.d.PrimaryCtxRetain(&ctx, cu.DeviceOrdinal(g)))
		r.ok(r.d.CtxPushCurrent(ctx))
		var s cu.StreamHandle
		r.ok(r.d.StreamCreate(&s, cu.StreamNonBlocking))
		r.stream = append(r.stream, s)
		text := append([]byte(kernelText), 0)
		var h cu.ModuleHandle
		r.ok(r.d.ModuleLoadDataEx(&h, unsafe.Pointer(&text[0]), 0, nil, nil))
		r.module = append(r.module, h)
		r.ok(r.d.CtxPopCurrent(nil))
	}
	r.ok(r.d.CtxPushCurrent(1))
	return r
}

func (r *rig) ok(got cu.Result) {
	r.t.Helper()
	require.Equal(r.t, cu.Success, got)
}

// memory makes a granule of GPU g that the GPUs given may use.
func (r *rig) memory(g int, users ...int) (cu.MemHandle, device.Ptr) {
	r.t.Helper()
	prop := property(g)
	var h cu.MemHandle
	r.ok(r.d.MemCreate(&h, granule, &prop, 0))
	return h, r.mapped(h, granule, users...)
}

func property(g int) cu.MemAllocationProp {
	return cu.MemAllocationProp{Type: cu.AllocationPinned, RequestedHandleTypes: cu.HandleFD, Location: cu.MemLocation{Type: cu.LocationDevice, ID: int32(g)}}
}

func (r *rig) mapped(h cu.MemHandle, bytes uint64, users ...int) device.Ptr {
	r.t.Helper()
	var p device.Ptr
	r.ok(r.d.MemAddressReserve(&p, bytes, 0, 0, 0))
	r.ok(r.d.MemMap(p, bytes, 0, h, 0))
	for _, u := range users {
		access := cu.MemAccessDesc{Location: cu.MemLocation{Type: cu.LocationDevice, ID: int32(u)}, Flags: cu.AccessReadWrite}
		r.ok(r.d.MemSetAccess(p, bytes, &access, 1))
	}
	return p
}

// pinned is a word of the host.
func (r *rig) pinned() (*uint32, device.Ptr) {
	r.t.Helper()
	var p unsafe.Pointer
	r.ok(r.d.MemHostAlloc(&p, 8, cu.HostAllocPortable|cu.HostAllocDeviceMap))
	var q device.Ptr
	r.ok(r.d.MemHostGetDevicePointer(&q, p, 0))
	return (*uint32)(p), q
}

// launch runs a kernel of one thread.
func (r *rig) launch(g int, name string, from, to device.Ptr) cu.Result {
	r.t.Helper()
	var f cu.FunctionHandle
	r.ok(r.d.CtxPushCurrent(cu.ContextHandle(g + 1)))
	got := r.d.ModuleGetFunction(&f, r.module[g], name)
	r.ok(r.d.CtxPopCurrent(nil))
	if got != cu.Success {
		return got
	}
	params := []unsafe.Pointer{unsafe.Pointer(&from), unsafe.Pointer(&to)}
	return r.d.LaunchKernelEx(&cu.LaunchConfig{Grid: [3]uint32{1, 1, 1}, Block: [3]uint32{1, 1, 1}, Stream: r.stream[g]}, f, &params[0], nil)
}

// settled waits for a stream.
func (r *rig) settled(g int) cu.Result {
	end := time.Now().Add(20 * time.Second)
	for time.Now().Before(end) {
		if got := r.d.StreamQuery(r.stream[g]); got != cu.NotReady {
			return got
		}
		time.Sleep(100 * time.Microsecond)
	}
	return cu.NotReady
}

func (r *rig) write(p device.Ptr, value uint32) {
	r.t.Helper()
	b := binary.LittleEndian.AppendUint32(nil, value)
	r.ok(r.d.MemcpyHtoDAsync(p, unsafe.Pointer(&b[0]), 4, r.stream[0]))
	r.ok(r.settled(0))
}

// TestTable: a table that was not loaded has every function.
func TestTable(t *testing.T) {
	m, err := simcuda.New(simcuda.Config{})
	require.NoError(t, err)
	require.Empty(t, m.Driver().Missing())
	require.NoError(t, m.Driver().Start())
	require.Empty(t, m.Left())
	cast, err := m.Driver().ResolveMulticast()
	require.NoError(t, err)
	v := reflect.ValueOf(cast).Elem()
	for i := range v.NumField() {
		require.False(t, v.Field(i).IsNil())
	}
}

// TestIllegalAddress: an access without right, after the mapping, behind the end or by an ordinary instruction to a multicast address ends the context
// of the kernel's GPU, and no other one.
func TestIllegalAddress(t *testing.T) {
	for name, from := range map[string]func(r *rig) device.Ptr{
		"no right": func(r *rig) device.Ptr { _, p := r.memory(1, 1); return p },
		"unmapped": func(r *rig) device.Ptr {
			_, p := r.memory(0, 0)
			r.ok(r.d.MemUnmap(p, granule))
			return p
		},
		"behind the end": func(r *rig) device.Ptr { _, p := r.memory(0, 0); return p + granule },
		"multicast":      func(r *rig) device.Ptr { _, p, _ := r.multicast(2); return p },
		"another's cuMemAlloc": func(r *rig) device.Ptr {
			r.ok(r.d.CtxPushCurrent(2))
			var p device.Ptr
			r.ok(r.d.MemAlloc(&p, 100))
			r.ok(r.d.CtxPopCurrent(nil))
			return p
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, simcuda.Config{GPUs: 2, Multicast: true})
			_, to := r.pinned()
			p := from(r)
			require.Empty(t, r.m.Violations())
			r.ok(r.launch(0, "load", p, to))
			require.Equal(t, cu.IllegalAddress, r.settled(0))
			require.Len(t, r.m.Violations(), 1)
			require.Contains(t, r.m.Violations()[0], "module.ptx:")
			// It stays so.
			require.Equal(t, cu.IllegalAddress, r.launch(0, "load", to, to))
			require.Equal(t, cu.IllegalAddress, r.d.MemAlloc(new(device.Ptr), 1))
			_, q := r.memory(1, 1)
			r.ok(r.launch(1, "load", q, to))
			r.ok(r.settled(1))
		})
	}
}

// TestCopyWithoutRight: a copy from memory that the stream's GPU has no right to ends its context, too.
func TestCopyWithoutRight(t *testing.T) {
	r := newRig(t, simcuda.Config{GPUs: 2})
	_, from := r.memory(1, 1)
	_, to := r.pinned()
	r.ok(r.d.MemcpyDtoDAsync(to, from, 4, r.stream[0]))
	require.Equal(t, cu.IllegalAddress, r.settled(0))
}

// TestMisaligned: so does an address that is no multiple of what is loaded.
func TestMisaligned(t *testing.T) {
	r := newRig(t, simcuda.Config{})
	_, to := r.pinned()
	r.ok(r.launch(0, "load", to+2, to))
	require.Equal(t, cu.MisalignedAddress, r.settled(0))
}

// TestPeerAccess: cuMemAlloc's memory is for its own GPU until another one's context enables access to it.
func TestPeerAccess(t *testing.T) {
	r := newRig(t, simcuda.Config{GPUs: 2})
	var p device.Ptr
	r.ok(r.d.MemAlloc(&p, 100))
	r.write(p, 7)
	r.ok(r.d.CtxPushCurrent(2))
	r.ok(r.d.CtxEnablePeerAccess(1, 0))
	require.Equal(t, cu.PeerAccessAlreadyEnabled, r.d.CtxEnablePeerAccess(1, 0))
	r.ok(r.d.CtxPopCurrent(nil))
	word, to := r.pinned()
	r.ok(r.launch(1, "load", p, to))
	r.ok(r.settled(1))
	require.Equal(t, uint32(7), *word)
}

// multicast makes an object over n GPUs, and gives it, its address for GPU 0, and those of the memories.
func (r *rig) multicast(n int) (cu.MemHandle, device.Ptr, []device.Ptr) {
	r.t.Helper()
	cast, err := r.d.ResolveMulticast()
	require.NoError(r.t, err)
	var h cu.MemHandle
	r.ok(cast.Create(&h, &cu.MulticastObjectProp{NumDevices: uint32(n), Size: granule, HandleTypes: uint64(cu.HandleFD)}))
	each, mem := make([]device.Ptr, n), make([]cu.MemHandle, n)
	for g := range n {
		r.ok(cast.AddDevice(h, cu.DeviceOrdinal(g)))
		mem[g], each[g] = r.memory(g, 0)
	}
	p := r.mapped(h, granule, 0)
	for g := range n {
		r.ok(cast.BindMem(h, 0, mem[g], 0, granule, 0))
	}
	return h, p, each
}

// TestMulticast: a multicast address reaches all memories that are bound, and adds them in an order that changes.
func TestMulticast(t *testing.T) {
	r := newRig(t, simcuda.Config{GPUs: 3, Multicast: true, Seed: 3})
	_, p, each := r.multicast(3)
	for g, x := range []float32{1e8, 1, -1e8} {
		r.write(each[g], math.Float32bits(x))
	}
	word, to := r.pinned()
	found := map[float32]bool{}
	for range 50 {
		r.ok(r.launch(0, "sum", p, to))
		r.ok(r.settled(0))
		found[math.Float32frombits(*word)] = true
	}
	require.Equal(t, map[float32]bool{0: true, 1: true}, found)
	require.Empty(t, r.m.Violations())
}

// TestNotBound: as long as a GPU has bound nothing, or no longer, an access to the multicast address ends the context.
func TestNotBound(t *testing.T) {
	r := newRig(t, simcuda.Config{GPUs: 2, Multicast: true})
	cast, err := r.d.ResolveMulticast()
	require.NoError(t, err)
	h, p, _ := r.multicast(2)
	_, to := r.pinned()
	r.ok(r.launch(0, "sum", p, to))
	r.ok(r.settled(0))
	r.ok(cast.Unbind(h, 1, 0, granule)) // which has not mapped it
	r.ok(r.launch(0, "sum", p, to))
	require.Equal(t, cu.IllegalAddress, r.settled(0))
}

// TestBindWaits: binding blocks until every GPU was added.
func TestBindWaits(t *testing.T) {
	r := newRig(t, simcuda.Config{GPUs: 2, Multicast: true})
	cast, err := r.d.ResolveMulticast()
	require.NoError(t, err)
	var h cu.MemHandle
	r.ok(cast.Create(&h, &cu.MulticastObjectProp{NumDevices: 2, Size: granule}))
	r.ok(cast.AddDevice(h, 0))
	mem, _ := r.memory(0)
	bound := make(chan cu.Result, 1)
	go func() { bound <- cast.BindMem(h, 0, mem, 0, granule, 0) }()
	select {
	case <-bound:
		t.Fatal("bound before all GPUs were added")
	case <-time.After(50 * time.Millisecond):
	}
	r.ok(cast.AddDevice(h, 1))
	r.ok(<-bound)
	require.Empty(t, r.m.Violations())
}

// TestSlots: there are so many multicast objects, and one that was given back makes room.
func TestSlots(t *testing.T) {
	r := newRig(t, simcuda.Config{GPUs: 2, Multicast: true, MulticastObjects: 2})
	cast, err := r.d.ResolveMulticast()
	require.NoError(t, err)
	prop := &cu.MulticastObjectProp{NumDevices: 2, Size: granule}
	var a, b, c cu.MemHandle
	r.ok(cast.Create(&a, prop))
	r.ok(cast.Create(&b, prop))
	require.Equal(t, cu.OutOfMemory, cast.Create(&c, prop))
	r.ok(r.d.MemRelease(a))
	r.ok(cast.Create(&c, prop))
}

// TestExport: memory comes back from a descriptor, which keeps it when nothing else does.
func TestExport(t *testing.T) {
	r := newRig(t, simcuda.Config{})
	h, p := r.memory(0, 0)
	r.write(p, 9)
	var fd int32
	r.ok(r.d.MemExportFD(&fd, h, cu.HandleFD, 0))
	defer closeFD(t, fd)
	r.ok(r.d.MemUnmap(p, granule))
	r.ok(r.d.MemRelease(h))
	r.ok(r.d.MemImportFD(&h, uintptr(fd), cu.HandleFD))
	q := r.mapped(h, granule, 0)
	r.ok(r.d.MemRelease(h)) // the mapping keeps it
	word, to := r.pinned()
	r.ok(r.launch(0, "load", q, to))
	r.ok(r.settled(0))
	require.Equal(t, uint32(9), *word)
	require.Empty(t, r.m.Violations())
}

// TestWrongUse: what a real driver refuses or does not survive is refused with its code, and noted.
func TestWrongUse(t *testing.T) {
	prop := property(0)
	for name, wrong := range map[string]func(r *rig) cu.Result{
		"release twice": func(r *rig) cu.Result {
			h, _ := r.memory(0)
			r.ok(r.d.MemRelease(h))
			return r.d.MemRelease(h)
		},
		"half a granule":       func(r *rig) cu.Result { return r.d.MemCreate(new(cu.MemHandle), granule/2, &prop, 0) },
		"map over something":   func(r *rig) cu.Result { h, p := r.memory(0); return r.d.MemMap(p, granule, 0, h, 0) },
		"map where nothing is": func(r *rig) cu.Result { h, p := r.memory(0); return r.d.MemMap(p+1<<32, granule, 0, h, 0) },
		"free what is mapped":  func(r *rig) cu.Result { _, p := r.memory(0); return r.d.MemAddressFree(p, granule) },
		"unmap a part":         func(r *rig) cu.Result { _, p := r.memory(0); return r.d.MemUnmap(p, granule/2) },
		"unmap twice": func(r *rig) cu.Result {
			_, p := r.memory(0)
			r.ok(r.d.MemUnmap(p, granule))
			return r.d.MemUnmap(p, granule)
		},
		"access to nothing": func(r *rig) cu.Result { return r.d.MemSetAccess(1<<44, granule, &cu.MemAccessDesc{}, 1) },
		"free twice":        func(r *rig) cu.Result { return r.d.MemFree(1 << 44) },
		"free the host's twice": func(r *rig) cu.Result {
			p, _ := r.pinned()
			r.ok(r.d.MemFreeHost(unsafe.Pointer(p)))
			return r.d.MemFreeHost(unsafe.Pointer(p))
		},
		"destroy an event twice": func(r *rig) cu.Result { return r.d.EventDestroy(77) },
		"a stream that is gone": func(r *rig) cu.Result {
			r.ok(r.d.StreamDestroy(r.stream[0]))
			return r.d.StreamWriteValue32(r.stream[0], 8, 0, 0)
		},
		"unbind what is mapped": func(r *rig) cu.Result {
			h, _, _ := r.multicast(2)
			cast, err := r.d.ResolveMulticast()
			require.NoError(t, err)
			return cast.Unbind(h, 0, 0, granule)
		},
		"add a GPU twice": func(r *rig) cu.Result {
			cast, err := r.d.ResolveMulticast()
			require.NoError(t, err)
			var h cu.MemHandle
			r.ok(cast.Create(&h, &cu.MulticastObjectProp{NumDevices: 2, Size: granule}))
			r.ok(cast.AddDevice(h, 0))
			return cast.AddDevice(h, 0)
		},
		"query in a capture": func(r *rig) cu.Result {
			r.ok(r.d.StreamBeginCapture(r.stream[0], cu.CaptureRelaxed))
			return r.d.StreamQuery(r.stream[0])
		},
		"the time of an event of a capture": func(r *rig) cu.Result {
			var e cu.EventHandle
			r.ok(r.d.EventCreate(&e, cu.EventDefault))
			r.ok(r.d.StreamBeginCapture(r.stream[0], cu.CaptureRelaxed))
			r.ok(r.d.EventRecord(e, r.stream[0]))
			return r.d.EventElapsedTime(new(float32), e, e)
		},
		"push a context that nobody retains": func(r *rig) cu.Result {
			r.ok(r.d.PrimaryCtxRelease(1))
			return r.d.CtxPushCurrent(2)
		},
		"a stream of a context that was destroyed": func(r *rig) cu.Result {
			r.ok(r.d.PrimaryCtxRelease(1))
			r.ok(r.d.PrimaryCtxRetain(new(cu.ContextHandle), 1))
			return r.d.StreamQuery(r.stream[1])
		},
		"an event of a context that was destroyed": func(r *rig) cu.Result {
			var e cu.EventHandle
			r.ok(r.d.EventCreate(&e, cu.EventDefault))
			r.ok(r.d.PrimaryCtxRelease(0))
			return r.d.EventQuery(e)
		},
		"pop nothing": func(r *rig) cu.Result { r.ok(r.d.CtxPopCurrent(nil)); return r.d.CtxPopCurrent(nil) },
		"export what was not made for it": func(r *rig) cu.Result {
			own := prop
			own.RequestedHandleTypes = 0
			var h cu.MemHandle
			r.ok(r.d.MemCreate(&h, granule, &own, 0))
			return r.d.MemExportFD(new(int32), h, cu.HandleFD, 0)
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, simcuda.Config{GPUs: 2, Multicast: true})
			got := wrong(r)
			assert.NotEqual(t, cu.Success, got)
			assert.Len(t, r.m.Violations(), 1)
		})
	}
}

// TestKernelWaits: a kernel that waits for the host goes on when the host writes, and does not keep a core busy until then; calls that wait for the
// GPU return when it has ended, and other calls go on meanwhile.
func TestKernelWaits(t *testing.T) {
	r := newRig(t, simcuda.Config{GPUs: 2})
	flag, at := r.pinned()
	word, to := r.pinned()
	r.ok(r.launch(0, "await", at, to))
	time.Sleep(30 * time.Millisecond)
	before := r.m.Stats().Instructions
	time.Sleep(200 * time.Millisecond)
	// One core executes some ten million in that time.
	require.Less(t, r.m.Stats().Instructions-before, uint64(2_000_000))
	freed := make(chan cu.Result, 1)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		_ = r.d.CtxPushCurrent(1)
		text := append([]byte(kernelText), 0)
		freed <- r.d.ModuleLoadDataEx(new(cu.ModuleHandle), unsafe.Pointer(&text[0]), 0, nil, nil)
	}()
	select {
	case <-freed:
		t.Fatal("a module was loaded while a kernel ran")
	case <-time.After(50 * time.Millisecond):
	}
	_, far := r.pinned()
	r.ok(r.launch(1, "load", far, far)) // another GPU does not wait
	r.ok(r.settled(1))
	*flag = 5
	r.ok(r.settled(0))
	r.ok(<-freed)
	require.Equal(t, uint32(5), *word)
}

// TestFirstLoad: loading a kernel waits for what its GPU has under way, and nothing when it is loaded.
func TestFirstLoad(t *testing.T) {
	r := newRig(t, simcuda.Config{})
	var f cu.FunctionHandle
	r.ok(r.d.ModuleGetFunction(&f, r.module[0], "load"))
	word, at := r.pinned()
	r.ok(r.d.StreamBatchMemOp(r.stream[0], 1, &cu.BatchMemOp{Op: cu.MemOpWait32, Address: uint64(at), Value: 1}, 0))
	loaded := make(chan cu.Result, 1)
	go func() { loaded <- r.d.FuncLoad(f) }()
	select {
	case <-loaded:
		require.FailNow(t, "it did not wait")
	case <-time.After(20 * time.Millisecond):
	}
	atomic.StoreUint32(word, 1)
	r.ok(<-loaded)
	atomic.StoreUint32(word, 0)
	r.ok(r.d.StreamBatchMemOp(r.stream[0], 1, &cu.BatchMemOp{Op: cu.MemOpWait32, Address: uint64(at), Value: 1}, 0))
	r.ok(r.d.ModuleGetFunction(&f, r.module[0], "load"))
	r.ok(r.d.FuncLoad(f))
	atomic.StoreUint32(word, 1)
	r.ok(r.settled(0))
}

// TestTrace: every access of a kernel is told, with its GPU and its line.
func TestTrace(t *testing.T) {
	var seen []string
	r := newRig(t, simcuda.Config{GPUs: 2, Trace: func(t ptxvm.Thread, p ptxvm.Place) {
		seen = append(seen, fmt.Sprint(t.Device, " ", t.Function, " ", p.Instruction))
	}})
	_, to := r.pinned()
	r.ok(r.launch(1, "load", to, to))
	r.ok(r.settled(1))
	require.Empty(t, r.m.Violations()) // under whose lock the trace was called
	require.Equal(t, []string{"1 load ld.global.u32 %r1, [%rd1];", "1 load st.global.u32 [%rd2], %r1;"}, seen)
}

// TestUnjoined: a stream that joined a capture must be joined back.
func TestUnjoined(t *testing.T) {
	r := newRig(t, simcuda.Config{})
	var e cu.EventHandle
	var other cu.StreamHandle
	r.ok(r.d.EventCreate(&e, cu.EventDisableTiming))
	r.ok(r.d.StreamCreate(&other, 0))
	_, to := r.pinned()
	r.ok(r.d.StreamBeginCapture(r.stream[0], cu.CaptureRelaxed))
	r.ok(r.d.EventRecord(e, r.stream[0]))
	r.ok(r.d.StreamWaitEvent(other, e, 0))
	r.ok(r.d.StreamWriteValue32(other, to, 1, 0))
	var g cu.GraphHandle
	require.Equal(t, cu.CaptureUnjoined, r.d.StreamEndCapture(r.stream[0], &g))
	r.ok(r.d.StreamQuery(other)) // it captures no more
	require.Empty(t, r.m.Violations())
}

// TestGraph: launches of a graph follow each other, also from different streams, and its branches run beside each other.
func TestGraph(t *testing.T) {
	r := newRig(t, simcuda.Config{})
	var fork, join cu.EventHandle
	var other cu.StreamHandle
	r.ok(r.d.EventCreate(&fork, cu.EventDisableTiming))
	r.ok(r.d.EventCreate(&join, cu.EventDisableTiming))
	r.ok(r.d.StreamCreate(&other, 0))
	flag, at := r.pinned()
	s := r.stream[0]
	// One branch waits for what the other writes.
	r.ok(r.d.StreamBeginCapture(s, cu.CaptureRelaxed))
	r.ok(r.d.EventRecord(fork, s))
	r.ok(r.d.StreamWaitEvent(other, fork, 0))
	wait := cu.BatchMemOp{Op: cu.MemOpWait32, Address: uint64(at), Value: 1}
	r.ok(r.d.StreamBatchMemOp(s, 1, &wait, 0))
	r.ok(r.d.StreamWriteValue32(other, at, 1, 0))
	r.ok(r.d.EventRecord(join, other))
	r.ok(r.d.StreamWaitEvent(s, join, 0))
	r.ok(r.d.StreamWriteValue32(s, at+4, 0, 0))
	var g cu.GraphHandle
	r.ok(r.d.StreamEndCapture(s, &g))
	var x cu.GraphExecHandle
	r.ok(r.d.GraphInstantiateWithFlags(&x, g, 0))
	r.ok(r.d.GraphLaunch(x, s))
	r.ok(r.d.GraphLaunch(x, other))
	r.ok(r.settled(0))
	require.Equal(t, uint32(1), *flag)
	for r.d.StreamQuery(other) == cu.NotReady {
		time.Sleep(time.Millisecond)
	}
	r.ok(r.d.GraphExecDestroy(x))
	r.ok(r.d.GraphDestroy(g))
	require.Empty(t, r.m.Violations())
}

// TestUnequal: GPUs differ in what they are, and an image for a newer one is refused by an older one.
func TestUnequal(t *testing.T) {
	m, err := simcuda.New(simcuda.Config{GPUs: 2, Each: []simcuda.GPU{{}, {Capability: 80, Memory: 4 << 20}}, Peers: func(gpu, peer int) bool { return gpu == 0 }})
	require.NoError(t, err)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	d := m.Driver()
	var ctx cu.ContextHandle
	require.Equal(t, cu.Success, d.PrimaryCtxRetain(&ctx, 1))
	require.Equal(t, cu.Success, d.CtxPushCurrent(ctx))
	text := append([]byte(kernelText), 0)
	log := make([]byte, 1<<17) // too large for a stack, which moves
	options, values := []cu.JITOption{cu.JITErrorLogBuffer, cu.JITErrorLogBufferSize}, []uintptr{uintptr(unsafe.Pointer(&log[0])), uintptr(len(log))}
	require.Equal(t, cu.NoBinaryForGPU, d.ModuleLoadDataEx(new(cu.ModuleHandle), unsafe.Pointer(&text[0]), 2, &options[0], &values[0]))
	require.Contains(t, cu.GoString(&log[0], len(log)), "capability 90")
	runtime.KeepAlive(log)
	bad := []byte(".version 8.0\n.target sm_80\n.visible .entry x() { frobnicate; }\x00")
	require.Equal(t, cu.InvalidPTX, d.ModuleLoadDataEx(new(cu.ModuleHandle), unsafe.Pointer(&bad[0]), 2, &options[0], &values[0]))
	require.Contains(t, cu.GoString(&log[0], len(log)), "frobnicate")
	require.Equal(t, cu.OutOfMemory, d.MemAlloc(new(device.Ptr), 5<<20))
	var can int32
	require.Equal(t, cu.Success, d.DeviceCanAccessPeer(&can, 1, 0))
	require.Zero(t, can)
	require.Equal(t, cu.Success, d.CtxPopCurrent(nil))
	require.Equal(t, cu.Success, d.PrimaryCtxRelease(1))
	require.Empty(t, m.Left())
	require.Empty(t, m.Violations())
}

func closeFD(t *testing.T, fd int32) { require.NoError(t, unix.Close(int(fd))) }

// TestCallsOfTheirOwn: no function calls another through the table, where a test may have put one that fails.
func TestCallsOfTheirOwn(t *testing.T) {
	r := newRig(t, simcuda.Config{GPUs: 2})
	r.d.DeviceCanAccessPeer = func(*int32, cu.DeviceOrdinal, cu.DeviceOrdinal) cu.Result { return cu.Unknown }
	var have int32
	r.ok(r.d.DeviceGetP2PAttribute(&have, cu.P2PNativeAtomics, 0, 1))
	require.EqualValues(t, 1, have)
}

// TestCluster: a launch has whole clusters, which are not larger than every GPU runs, and for which there is room.
func TestCluster(t *testing.T) {
	for _, c := range []struct {
		size, processors int
		grid, threads    uint32
		want             cu.Result
	}{
		{2, 1, 4, 32, cu.Success}, {8, 2, 8, 256, cu.Success}, {2, 1, 3, 32, cu.InvalidValue}, {2, 1, 1, 32, cu.InvalidValue}, {16, 16, 16, 32, cu.InvalidValue}, {8, 1, 8, 256, cu.InvalidValue},
	} {
		t.Run(fmt.Sprintf("size=%d/processors=%d/grid=%d/threads=%d", c.size, c.processors, c.grid, c.threads), func(t *testing.T) {
			r := newRig(t, simcuda.Config{Each: []simcuda.GPU{{Multiprocessors: c.processors}}})
			text := append(fmt.Appendf(nil, `.version 8.0
.target sm_90
.address_size 64
.visible .entry ranks(.param .u64 to)
.explicitcluster
.reqnctapercluster %d, 1, 1
{
	.reg .b64 %%rd<3>;
	.reg .b32 %%r<5>;
	.shared .align 4 .b8 box[4];
	ld.param.u64 %%rd1, [to];
	mov.u32 %%r1, %%cluster_ctarank;
	barrier.cluster.arrive.relaxed.aligned;
	barrier.cluster.wait.acquire.aligned;
	xor.b32 %%r2, %%r1, 1;
	mapa.shared::cluster.u32 %%r3, box, %%r2;
	st.relaxed.cluster.shared::cluster.u32 [%%r3], %%r1;
	barrier.cluster.arrive.release.aligned;
	barrier.cluster.wait.acquire.aligned;
	ld.shared.u32 %%r4, [box];
	mov.u32 %%r2, %%ctaid.x;
	mul.wide.u32 %%rd2, %%r2, 4;
	add.u64 %%rd2, %%rd1, %%rd2;
	st.relaxed.gpu.global.u32 [%%rd2], %%r4;
	ret;
}
`, c.size), 0)
			var h cu.ModuleHandle
			r.ok(r.d.ModuleLoadDataEx(&h, unsafe.Pointer(&text[0]), 0, nil, nil))
			var f cu.FunctionHandle
			r.ok(r.d.ModuleGetFunction(&f, h, "ranks"))
			_, p := r.memory(0, 0)
			params := []unsafe.Pointer{unsafe.Pointer(&p)}
			got := r.d.LaunchKernelEx(&cu.LaunchConfig{Grid: [3]uint32{c.grid, 1, 1}, Block: [3]uint32{c.threads, 1, 1}, Stream: r.stream[0]}, f, &params[0], nil)
			require.Equal(t, c.want, got)
			r.ok(r.settled(0))
			if c.want != cu.Success {
				assert.Len(t, r.m.Violations(), 1)
				return
			}
			assert.Empty(t, r.m.Violations())
			out := make([]uint32, c.grid)
			r.ok(r.d.MemcpyDtoHAsync(unsafe.Pointer(&out[0]), p, uint64(4*c.grid), r.stream[0]))
			r.ok(r.settled(0))
			for i, x := range out {
				assert.Equal(t, uint32(i%c.size^1), x, "block %d", i)
			}
		})
	}
}

// TestLimitsOfCalls: what a driver does not take is refused, and what it takes is not called a misuse.
func TestLimitsOfCalls(t *testing.T) {
	r := newRig(t, simcuda.Config{})
	_, at := r.pinned()
	ops := make([]cu.BatchMemOp, 256)
	for i := range ops {
		ops[i] = cu.BatchMemOp{Op: cu.MemOpWrite32, Address: uint64(at), Value: uint64(i)}
	}
	r.ok(r.d.StreamBatchMemOp(r.stream[0], 255, &ops[0], 0))
	require.Equal(t, cu.InvalidValue, r.d.StreamBatchMemOp(r.stream[0], 256, &ops[0], 0), "fewer than 256")
	r.ok(r.settled(0))

	d, err := cuda.Open(&cuda.Options{Driver: r.d})
	require.NoError(t, err)
	for _, bytes := range []int64{1 << 40, math.MaxInt64} {
		_, err = d.NewHostBuffer(bytes)
		require.ErrorIs(t, err, device.ErrNoMemory)
	}
	require.NoError(t, d.Close())
	require.Empty(t, r.m.Violations())
}
