package simcuda_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/backend/native"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/device"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/simcuda"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/tensor"
)

// TestWeakAllReduce: with weak memory every form gives the sum, and nothing races.
func TestWeakAllReduce(t *testing.T) {
	_, ranks := open(t, 2, simcuda.Config{Seed: 1, Multicast: true, Weak: true})
	for _, alg := range kernels.Algorithms(device.CUDA) {
		t.Run(alg.String(), func(t *testing.T) {
			require.True(t, kernels.Supported(ranks[0].Device().Kind(), alg, tensor.Float32, kernels.Sum, 2))
			each(t, ranks, func(r *symmem.Rank) error { return sum(t, r, alg, 1000) })
		})
	}
}

// weakText: move copies a word. post is move and then a flag behind the parameters' second word, by a release; careless by a relaxed store. early lets the next
// launch begin and then moves; late waits for the launch before and then moves. ring sets a flag, and nothing else.
var weakText = ".version 8.0\n.target sm_90\n.address_size 64\n" +
	weakKernel("move", "", "") +
	weakKernel("post", "", "\tmov.u32 %r2, 1;\n\tst.release.sys.global.u32 [%rd2+4], %r2;\n") +
	weakKernel("careless", "", "\tmov.u32 %r2, 1;\n\tst.relaxed.sys.global.u32 [%rd2+4], %r2;\n") +
	weakKernel("early", "\tgriddepcontrol.launch_dependents;\n", "") +
	weakKernel("late", "\tgriddepcontrol.wait;\n", "") +
	".visible .entry ring(.param .u64 from, .param .u64 to)\n{\n\t.reg .b64 %rd<2>;\n\t.reg .b32 %r<2>;\n" +
	"\tld.param.u64 %rd1, [to];\n\tmov.u32 %r1, 1;\n\tst.relaxed.sys.global.u32 [%rd1], %r1;\n\tret;\n}\n"

func weakKernel(name, before, after string) string {
	return ".visible .entry " + name + "(.param .u64 from, .param .u64 to)\n{\n\t.reg .b64 %rd<3>;\n\t.reg .b32 %r<3>;\n" +
		"\tld.param.u64 %rd1, [from];\n\tld.param.u64 %rd2, [to];\n" + before +
		"\tld.global.u32 %r1, [%rd1];\n\tst.global.u32 [%rd2], %r1;\n" + after + "\tret;\n}\n"
}

// weakRig is two GPUs with weak memory, words on GPU 0 that both reach, and a second stream of GPU 0.
type weakRig struct {
	*rig
	a, b, c, flag device.Ptr // b's flag is behind it
	second        cu.StreamHandle
	host          *[8]byte
}

func newWeakRig(t *testing.T) *weakRig {
	r := &weakRig{rig: newRig(t, simcuda.Config{GPUs: 2, Weak: true, Seed: 1}), host: new([8]byte)}
	_, p := r.memory(0, 0, 1)
	r.a, r.b, r.flag, r.c = p, p+64, p+68, p+128
	for g := range 2 {
		text := append([]byte(weakText), 0)
		r.ok(r.d.CtxPushCurrent(cu.ContextHandle(g + 1)))
		r.ok(r.d.ModuleLoadDataEx(&r.module[g], unsafe.Pointer(&text[0]), 0, nil, nil))
		r.ok(r.d.CtxPopCurrent(nil))
	}
	r.ok(r.d.StreamCreate(&r.second, cu.StreamNonBlocking))
	// What everybody is behind is forgotten; what follows is not.
	r.ok(r.d.MemsetD8Async(p, 0, 256, r.stream[0]))
	r.ok(r.settled(0))
	return r
}

func (r *weakRig) event(from, to cu.StreamHandle) {
	r.t.Helper()
	var e cu.EventHandle
	r.ok(r.d.EventCreate(&e, cu.EventDisableTiming))
	r.ok(r.d.EventRecord(e, from))
	r.ok(r.d.StreamWaitEvent(to, e, 0))
}

// run launches on a stream of GPU 0. overlap: with programmatic stream serialization.
func (r *weakRig) run(s cu.StreamHandle, name string, from, to device.Ptr, overlap bool) {
	r.t.Helper()
	var f cu.FunctionHandle
	r.ok(r.d.ModuleGetFunction(&f, r.module[0], name))
	params := []unsafe.Pointer{unsafe.Pointer(&from), unsafe.Pointer(&to)}
	c := &cu.LaunchConfig{Grid: [3]uint32{1, 1, 1}, Block: [3]uint32{1, 1, 1}, Stream: s}
	attr := cu.LaunchAttribute{ID: cu.LaunchProgrammaticStreamSerialization, Value: [16]uint32{1}}
	if overlap {
		c.Attrs, c.NumAttrs = &attr, 1
	}
	r.ok(r.d.LaunchKernelEx(c, f, &params[0], nil))
}

func (r *weakRig) await(s cu.StreamHandle, p device.Ptr) {
	r.t.Helper()
	op := cu.BatchMemOp{Op: cu.MemOpWait32, Address: uint64(p), Value: 1}
	r.ok(r.d.StreamBatchMemOp(s, 1, &op, 0))
}

// graph launches what f records on stream 0, and on the second one if it joins.
func (r *weakRig) graph(f func()) {
	r.t.Helper()
	r.ok(r.d.StreamBeginCapture(r.stream[0], cu.CaptureRelaxed))
	f()
	var g cu.GraphHandle
	r.ok(r.d.StreamEndCapture(r.stream[0], &g))
	var x cu.GraphExecHandle
	r.ok(r.d.GraphInstantiateWithFlags(&x, g, 0))
	r.ok(r.d.GraphLaunch(x, r.stream[0]))
	// Behind the first one, which may have ended in a race by now.
	got := r.d.GraphLaunch(x, r.stream[0])
	require.True(r.t, got == cu.Success || got == cu.LaunchFailed && len(r.m.Violations()) > 0, "%d: %v", got, r.m.Violations())
}

// TestWeakOrder: what nothing orders is a race, which names both places, and each of what CUDA orders by is enough.
func TestWeakOrder(t *testing.T) {
	const load, store = "ld.global.u32 %r1, [%rd1]", "st.global.u32 [%rd2], %r1"
	for name, c := range map[string]struct {
		do    func(r *weakRig)
		races []string // in what the violation says; none: there is none
	}{
		"one stream": {func(r *weakRig) {
			r.ok(r.launch(0, "move", r.a, r.b))
			r.ok(r.launch(0, "move", r.b, r.c))
			r.ok(r.d.MemcpyDtoHAsync(unsafe.Pointer(r.host), r.c, 4, r.stream[0]))
		}, nil},
		"two streams": {func(r *weakRig) {
			r.ok(r.launch(0, "move", r.a, r.b))
			r.ok(r.launch(1, "move", r.b, r.c))
		}, []string{load, store, "device 0, stream", "device 1, stream"}},
		"an event": {func(r *weakRig) {
			r.ok(r.launch(0, "move", r.a, r.b))
			r.event(r.stream[0], r.stream[1])
			r.ok(r.launch(1, "move", r.b, r.c))
		}, nil},
		"an event before": {func(r *weakRig) {
			r.event(r.stream[0], r.stream[1])
			r.ok(r.launch(0, "move", r.a, r.b))
			r.ok(r.launch(1, "move", r.b, r.c))
		}, []string{load, store}},
		"the host waits": {func(r *weakRig) {
			r.ok(r.launch(0, "move", r.a, r.b))
			r.ok(r.d.StreamSynchronize(r.stream[0]))
			r.ok(r.launch(1, "move", r.b, r.c))
		}, nil},
		"the host passes on what it has waited for": {func(r *weakRig) {
			r.await(r.stream[1], r.flag)
			r.ok(r.launch(1, "move", r.b, r.c))
			r.ok(r.launch(0, "move", r.a, r.b))
			r.ok(r.d.StreamSynchronize(r.stream[0]))
			r.ok(r.d.StreamWriteValue32(r.second, r.flag, 1, 0))
			r.ok(r.d.StreamSynchronize(r.second))
		}, nil}, // the kernel was enqueued before, but the write was not
		"a copy": {func(r *weakRig) {
			r.ok(r.launch(0, "move", r.a, r.b))
			r.ok(r.d.MemcpyDtoHAsync(unsafe.Pointer(r.host), r.b, 4, r.second))
		}, []string{"cuMemcpyDtoHAsync of 4 bytes", store}},
		"a look at a flag": {func(r *weakRig) {
			r.ok(r.launch(0, "ring", r.a, r.flag))
			r.ok(r.d.MemcpyDtoHAsync(unsafe.Pointer(r.host), r.b, 8, r.second))
		}, nil},
		"a copy of a flag": {func(r *weakRig) {
			r.ok(r.launch(0, "ring", r.a, r.flag))
			r.ok(r.d.MemcpyDtoDAsync(r.c, r.b, 8, r.second))
		}, []string{"cuMemcpyDtoDAsync of 8 bytes", "st.relaxed.sys"}},
		"a copy behind a kernel that posts": {func(r *weakRig) {
			r.await(r.second, r.flag)
			r.ok(r.launch(0, "post", r.a, r.b))
			r.ok(r.d.MemcpyDtoHAsync(unsafe.Pointer(r.host), r.b, 8, r.second))
		}, nil},
		"a copy behind a kernel that posts carelessly": {func(r *weakRig) {
			r.await(r.second, r.flag)
			r.ok(r.launch(0, "careless", r.a, r.b))
			r.ok(r.d.MemcpyDtoHAsync(unsafe.Pointer(r.host), r.b, 8, r.second))
		}, []string{"cuMemcpyDtoHAsync of 8 bytes", store}},
		"a large copy": {func(r *weakRig) {
			r.ok(r.d.MemcpyDtoDAsync(r.a+4096, r.a+8192+2, 3000, r.second))
			r.ok(r.launch(0, "move", r.a, r.a+4096+2996))
		}, []string{"cuMemcpyDtoDAsync of 3000 bytes", store}},
		"a copy's source": {func(r *weakRig) {
			r.ok(r.d.MemcpyDtoDAsync(r.a+4096, r.a+8192, 3000, r.second))
			r.ok(r.launch(0, "move", r.a, r.a+8192+2992))
		}, []string{"cuMemcpyDtoDAsync of 3000 bytes", store}},
		"two that read": {func(r *weakRig) {
			r.ok(r.d.MemcpyDtoHAsync(unsafe.Pointer(r.host), r.b, 8, r.second))
			r.ok(r.launch(0, "move", r.b, r.c))
		}, nil},
		"a copy behind an event": {func(r *weakRig) {
			r.ok(r.launch(0, "move", r.a, r.b))
			r.event(r.stream[0], r.second)
			r.ok(r.d.MemcpyDtoHAsync(unsafe.Pointer(r.host), r.b, 4, r.second))
		}, nil},
		"a fill": {func(r *weakRig) {
			r.ok(r.d.MemsetD8Async(r.b, 1, 64, r.second))
			r.ok(r.launch(0, "move", r.b, r.c))
		}, []string{"cuMemsetD8Async of 64 bytes", load}},
		"values of streams": {func(r *weakRig) {
			r.ok(r.launch(0, "move", r.a, r.b))
			r.ok(r.d.StreamWriteValue32(r.stream[0], r.flag, 1, 0))
			r.await(r.stream[1], r.flag)
			r.ok(r.launch(1, "move", r.b, r.c))
		}, nil},
		"a kernel that posts": {func(r *weakRig) {
			r.ok(r.launch(0, "post", r.a, r.b))
			r.await(r.stream[1], r.flag)
			r.ok(r.launch(1, "move", r.b, r.c))
		}, nil},
		"a kernel that posts carelessly": {func(r *weakRig) {
			r.ok(r.launch(0, "careless", r.a, r.b))
			r.await(r.stream[1], r.flag)
			r.ok(r.launch(1, "move", r.b, r.c))
		}, []string{load, store}},
		"overlap": {func(r *weakRig) {
			r.await(r.stream[0], r.flag)
			r.run(r.stream[0], "early", r.a, r.b, false)
			r.run(r.stream[0], "move", r.b, r.c, true)
			r.ok(r.d.StreamWriteValue32(r.second, r.flag, 1, 0))
		}, []string{load, store}},
		"overlap and wait": {func(r *weakRig) {
			r.await(r.stream[0], r.flag)
			r.run(r.stream[0], "early", r.a, r.b, false)
			r.run(r.stream[0], "late", r.b, r.c, true)
			r.ok(r.d.StreamWriteValue32(r.second, r.flag, 1, 0))
		}, nil},
		"a graph": {func(r *weakRig) {
			r.graph(func() {
				r.run(r.stream[0], "move", r.a, r.b, false)
				r.event(r.stream[0], r.second)
				r.run(r.second, "move", r.b, r.c, false)
				r.event(r.second, r.stream[0])
				r.ok(r.d.MemsetD8Async(r.c, 0, 4, r.stream[0]))
			})
			r.ok(r.launch(0, "move", r.c, r.a))
		}, nil},
		"a graph's nodes": {func(r *weakRig) {
			r.graph(func() {
				r.event(r.stream[0], r.second)
				r.run(r.stream[0], "move", r.a, r.b, false)
				r.run(r.second, "move", r.b, r.c, false)
				r.event(r.second, r.stream[0])
			})
		}, []string{load, store}},
	} {
		t.Run(name, func(t *testing.T) {
			r := newWeakRig(t)
			c.do(r)
			for _, s := range []cu.StreamHandle{r.stream[0], r.second, r.stream[1]} {
				got := r.d.StreamSynchronize(s)
				require.True(t, got == cu.Success || len(c.races) > 0 && got == cu.LaunchFailed, "%d: %v", got, r.m.Violations())
			}
			all := r.m.Violations()
			if len(c.races) == 0 {
				require.Empty(t, all)
				return
			}
			require.NotEmpty(t, all, "no race was found")
			require.Contains(t, all[0], "race at global address")
			for _, says := range c.races {
				require.Contains(t, all[0], says)
			}
		})
	}
}

// TestWeakIsOfOneProcess: what another process has made is refused, and so are libraries.
func TestWeakIsOfOneProcess(t *testing.T) {
	other := newRig(t, simcuda.Config{GPUs: 2})
	h, _ := other.memory(0, 0)
	var fd int32
	other.ok(other.d.MemExportFD(&fd, h, cu.HandleFD, 0))
	r := newWeakRig(t)
	require.Equal(t, cu.NotSupported, r.d.MemImportFD(&h, uintptr(fd), cu.HandleFD))
	require.Contains(t, strings.Join(r.m.Violations(), " "), "weak memory is of one process")
	require.Equal(t, cu.NotSupported, r.m.EnqueueLibrary(r.stream[0], func(bool) func() simcuda.Step { return nil }))
	require.Contains(t, fmt.Sprint(r.m.Violations()), "no libraries")
	own, _ := r.memory(0, 0)
	r.ok(r.d.MemExportFD(&fd, own, cu.HandleFD, 0))
	r.ok(r.d.MemImportFD(&own, uintptr(fd), cu.HandleFD))
}

// TestWeakFindsWhatKernelsLack: this module's own kernels, whose releases at system scope are made relaxed or whose fences are left out as they are loaded, race.
// With strong memory nothing would show.
func TestWeakFindsWhatKernelsLack(t *testing.T) {
	release := strings.NewReplacer(".release.sys", ".relaxed.sys", "fence.acq_rel.sys;", "")
	for _, weak := range []bool{false, true} {
		t.Run(fmt.Sprintf("weak=%t", weak), func(t *testing.T) {
			m, err := simcuda.New(simcuda.Config{GPUs: 2, Seed: 1, Weak: weak})
			require.NoError(t, err)
			d := m.Driver()
			load, replaced := d.ModuleLoadDataEx, atomic.Int32{}
			d.ModuleLoadDataEx = func(h *cu.ModuleHandle, image unsafe.Pointer, n uint32, options *cu.JITOption, values *uintptr) cu.Result {
				text := cu.GoString((*byte)(image), 64<<20)
				worse := release.Replace(text)
				if worse != text {
					replaced.Add(1)
				}
				b := append([]byte(worse), 0)
				return load(h, unsafe.Pointer(&b[0]), n, options, values)
			}
			cfg := config.Default()
			cfg.Backend, cfg.Multicast, cfg.KernelTimeout = []string{native.Name}, config.MulticastOff, 30*time.Second
			ranks, err := symmem.OpenLocal(t.Context(), 2, cfg, &symmem.Options{Backend: &native.Options{Driver: d}})
			if err == nil {
				err = errors.Join(backendtest.OnAll(ranks, func(r *symmem.Rank) error { return sum(t, r, kernels.OneShotPull, 1000) })...)
				_ = backendtest.OnAll(ranks, func(r *symmem.Rank) error { return r.Close(context.WithoutCancel(t.Context())) }) // some have failed
			}
			require.Positive(t, replaced.Load())
			if !weak {
				require.NoError(t, err)
				require.NoError(t, m.Err())
				return
			}
			require.Error(t, err)
			require.Contains(t, fmt.Sprint(m.Violations()), "race at global address")
		})
	}
}
