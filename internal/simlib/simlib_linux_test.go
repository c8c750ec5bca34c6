package simlib_test

import (
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/device"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/nccl"
	"github.com/symmem/symmem/internal/nvshmem"
	"github.com/symmem/symmem/internal/simcuda"
	"github.com/symmem/symmem/internal/simlib"
)

const granule = 2 << 20

// rig is a machine with the contexts of its GPUs.
type rig struct {
	*testing.T
	m *simcuda.Machine
	d *cu.Driver
}

func newRig(t *testing.T, gpus int) *rig {
	m, err := simcuda.New(simcuda.Config{GPUs: gpus, Seed: 1, Multicast: true})
	require.NoError(t, err)
	r := &rig{t, m, m.Driver()}
	for g := range gpus {
		require.Equal(t, cu.Success, r.d.PrimaryCtxRetain(new(cu.ContextHandle), cu.DeviceOrdinal(g)))
	}
	return r
}

// each runs f for every GPU at the same time, with its context.
func (r *rig) each(gpus int, f func(g int)) {
	var wg sync.WaitGroup
	for g := range gpus {
		wg.Go(func() {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			assert.Equal(r, cu.Success, r.d.CtxPushCurrent(cu.ContextHandle(g+1)))
			defer func() { assert.Equal(r, cu.Success, r.d.CtxPopCurrent(nil)) }()
			f(g)
		})
	}
	wg.Wait()
}

// noted fails the test unless just one wrong use was noted, which says so.
func (r *rig) noted(says string) {
	r.Helper()
	wrong := r.m.Violations()
	require.NotEmpty(r, wrong)
	require.Contains(r, strings.Join(wrong, "\n"), says)
}

// comms makes a communicator that blocks, of all GPUs.
func (r *rig) comms(f *nccl.Functions, gpus int) []nccl.CommHandle {
	r.Helper()
	var id nccl.UniqueID
	require.Equal(r, nccl.Success, f.GetUniqueID(&id))
	all := make([]nccl.CommHandle, gpus)
	r.each(gpus, func(g int) {
		assert.Equal(r, nccl.Success, f.CommInitRankScalable(&all[g], int32(gpus), int32(g), 1, &id, &nccl.ConfigLayout{Blocking: 1}))
	})
	return all
}

// windows registers memory of ncclMemAlloc on each GPU.
func (r *rig) windows(f *nccl.Functions, comms []nccl.CommHandle) (mem []uint64, all []nccl.WindowHandle) {
	r.Helper()
	mem, all = make([]uint64, len(comms)), make([]nccl.WindowHandle, len(comms))
	r.each(len(comms), func(g int) {
		assert.Equal(r, nccl.Success, f.MemAlloc(&mem[g], 1000))
		assert.Equal(r, nccl.Success, f.CommWindowRegister(comms[g], mem[g], granule, &all[g], 0))
	})
	return mem, all
}

// settled waits for a stream.
func (r *rig) settled(s cu.StreamHandle) cu.Result {
	for end := time.Now().Add(15 * time.Second); time.Now().Before(end); time.Sleep(100 * time.Microsecond) {
		if got := r.d.StreamQuery(s); got != cu.NotReady {
			return got
		}
	}
	return cu.NotReady
}

// word copies a word to or from an address, on a stream of the GPU's, and says what the driver says.
func (r *rig) word(g int, p uint64, to *uint32, v uint32) (result cu.Result) {
	r.Helper()
	r.each(g+1, func(this int) {
		if this != g {
			return
		}
		var s cu.StreamHandle
		assert.Equal(r, cu.Success, r.d.StreamCreate(&s, cu.StreamNonBlocking))
		if to != nil {
			result = r.d.MemcpyDtoHAsync(unsafe.Pointer(to), device.Ptr(p), 4, s)
		} else {
			result = r.d.MemcpyHtoDAsync(device.Ptr(p), unsafe.Pointer(&v), 4, s)
		}
		if end := r.settled(s); result == cu.Success {
			result = end
		}
		r.d.StreamDestroy(s)
	})
	return result
}

// TestNCCLWindow: each rank has the memory of all at addresses of its own, one stride apart; a window that was deregistered is there no more; and in the end
// nothing is left.
func TestNCCLWindow(t *testing.T) {
	r := newRig(t, 2)
	lib := simlib.NewNCCL(r.m)
	f := lib.Functions()
	comms := r.comms(f, 2)
	mem, windows := r.windows(f, comms)
	peer := func(rank, of int) (p uint64) {
		require.Equal(t, nccl.Success, f.GetPeerDevicePointer(windows[rank], 0, int32(of), &p))
		return p
	}
	require.Equal(t, cu.Success, r.word(1, mem[1], nil, 42))
	var got uint32
	require.Equal(t, cu.Success, r.word(0, peer(0, 1), &got, 0))
	require.Equal(t, uint32(42), got)
	require.Equal(t, peer(0, 1)-peer(0, 0), peer(1, 1)-peer(1, 0))
	require.NotEqual(t, peer(0, 0), peer(1, 0))
	old := peer(0, 1)

	cast, err := f.MulticastSource()
	require.NoError(t, err)
	at := make([]uint64, 2)
	r.each(2, func(g int) {
		assert.Equal(t, nccl.Success, cast.GetLsaMultimemDevicePointer(windows[g], 64, &at[g]))
	})
	require.NotZero(t, at[0])
	require.NotEqual(t, at[0], at[1])

	r.each(1, func(g int) { assert.Equal(t, nccl.Success, f.CommWindowDeregister(comms[g], windows[g])) })
	require.NotEqual(t, cu.Success, r.word(0, old, &got, 0), "it is mapped no more")
	require.Equal(t, cu.Success, r.word(1, peer(1, 0), &got, 0), "the other has its side still")
	require.NotEmpty(t, lib.Left())
	r.each(2, func(g int) {
		if g == 1 {
			assert.Equal(t, nccl.Success, f.CommWindowDeregister(comms[g], windows[g]))
		}
		assert.Equal(t, nccl.Success, f.MemFree(mem[g]))
		assert.Equal(t, nccl.Success, f.CommFinalize(comms[g]))
		assert.Equal(t, nccl.Success, f.CommDestroy(comms[g]))
		assert.Equal(t, cu.Success, r.d.PrimaryCtxRelease(cu.DeviceOrdinal(g)))
	})
	require.Empty(t, lib.Left())
	require.NoError(t, r.m.Err())
}

// TestNCCLMisuse: what NCCL does not survive, or accepts in silence, is noted.
func TestNCCLMisuse(t *testing.T) {
	for name, tt := range map[string]struct {
		do   func(r *rig, f *nccl.Functions, comms []nccl.CommHandle, mem []uint64, windows []nccl.WindowHandle)
		says string
	}{
		"window freed early": {func(r *rig, f *nccl.Functions, _ []nccl.CommHandle, mem []uint64, _ []nccl.WindowHandle) {
			r.each(1, func(int) { f.MemFree(mem[0]) })
		}, "ncclMemFree of memory that is a window"},
		"freed twice": {func(r *rig, f *nccl.Functions, _ []nccl.CommHandle, _ []uint64, _ []nccl.WindowHandle) {
			r.each(1, func(int) { f.MemFree(1 << 20) })
		}, "which ncclMemAlloc has not given"},
		"destroyed with a window": {func(r *rig, f *nccl.Functions, comms []nccl.CommHandle, _ []uint64, _ []nccl.WindowHandle) {
			r.each(1, func(int) { f.CommDestroy(comms[0]) })
		}, "with 1 windows"},
		"another context": {func(r *rig, f *nccl.Functions, comms []nccl.CommHandle, _ []uint64, _ []nccl.WindowHandle) {
			r.each(1, func(int) { f.CommFinalize(comms[1]) })
		}, "with the context of GPU 0"},
		"not aligned": {func(r *rig, f *nccl.Functions, comms []nccl.CommHandle, mem []uint64, _ []nccl.WindowHandle) {
			r.each(1, func(int) { f.CommWindowRegister(comms[0], mem[0]+16, 100, new(nccl.WindowHandle), 0) })
		}, "ncclCommWindowRegister of 100 bytes"},
		"memory of cuMemAlloc": {func(r *rig, f *nccl.Functions, comms []nccl.CommHandle, _ []uint64, _ []nccl.WindowHandle) {
			r.each(1, func(int) {
				var p device.Ptr
				r.d.MemAlloc(&p, granule)
				f.CommWindowRegister(comms[0], uint64(p), granule, new(nccl.WindowHandle), 0)
			})
		}, "ncclCommWindowRegister of 2097152 bytes"},
		"sizes that differ": {func(r *rig, f *nccl.Functions, comms []nccl.CommHandle, mem []uint64, _ []nccl.WindowHandle) {
			r.each(2, func(g int) { f.CommWindowRegister(comms[g], mem[g], uintptr(4096*(g+1)), new(nccl.WindowHandle), 0) })
		}, "a window of 4096 bytes at 0"},
		"different calls": {func(r *rig, f *nccl.Functions, comms []nccl.CommHandle, mem []uint64, _ []nccl.WindowHandle) {
			r.each(2, func(g int) {
				if g == 0 {
					assert.Equal(r, nccl.InternalError, f.CommWindowRegister(comms[g], mem[g], 4096, new(nccl.WindowHandle), 0))
				} else {
					assert.Equal(r, nccl.InternalError, f.CommSplit(comms[g], 0, int32(g), new(nccl.CommHandle), &nccl.ConfigLayout{Blocking: 1}))
				}
			})
		}, "and others"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, 2)
			f := simlib.NewNCCL(r.m).Functions()
			comms := r.comms(f, 2)
			mem, windows := r.windows(f, comms)
			require.Empty(t, r.m.Violations())
			tt.do(r, f, comms, mem, windows)
			r.noted(tt.says)
		})
	}
}

// TestNCCLCollectives: ranks that run different collectives, or reduce memory that was freed, are noted, and their contexts end; an aborted communicator's
// work ends without the other ranks.
// TestNCCLSplit: ranks of one color are a communicator, in the order of their keys and else in their own; one without a color has none. Windows and teams end at
// the host, and a collective is among the ranks of its communicator.
func TestNCCLSplit(t *testing.T) {
	r := newRig(t, 4)
	lib := simlib.NewNCCL(r.m)
	lib.Spread(2)
	f := lib.Functions()
	comms := r.comms(f, 4)
	var mem [4]uint64
	var windows [4]nccl.WindowHandle
	rails := make([]nccl.CommHandle, 4)
	r.each(4, func(g int) {
		team := f.TeamLsa(comms[g])
		assert.Equal(t, nccl.Team{Ranks: 2, Rank: int32(g % 2), Stride: 1}, team)
		assert.Equal(t, nccl.Success, f.MemAlloc(&mem[g], 1000))
		assert.Equal(t, nccl.Success, f.CommWindowRegister(comms[g], mem[g], granule, &windows[g], 0))
		assert.Zero(t, windows[g], "a window of two hosts")

		color := int32(g % 2)
		if g == 3 {
			color = -1
		}
		assert.Equal(t, nccl.Success, f.CommSplit(comms[g], color, int32(-g), &rails[g], &nccl.ConfigLayout{Blocking: 1}))
		if g == 3 {
			assert.Zero(t, rails[g], "a rank without a color")
			return
		}
		var count, rank int32
		assert.Equal(t, nccl.Success, f.CommCount(rails[g], &count))
		assert.Equal(t, nccl.Success, f.CommUserRank(rails[g], &rank))
		if want := map[int][2]int32{0: {2, 1}, 1: {1, 0}, 2: {2, 0}}[g]; count != want[0] || rank != want[1] {
			t.Errorf("GPU %d is rank %d of %d", g, rank, count)
		}
		assert.Equal(t, cu.Success, r.word(g, mem[g], nil, uint32(10+g)))
	})
	r.each(3, func(g int) {
		var s cu.StreamHandle
		assert.Equal(t, cu.Success, r.d.StreamCreate(&s, cu.StreamNonBlocking))
		assert.Equal(t, nccl.Success, f.AllReduce(mem[g], mem[g], 1, nccl.Uint32, nccl.Sum, rails[g], uintptr(s)))
		assert.Equal(t, cu.Success, r.settled(s))
		var got uint32
		assert.Equal(t, cu.Success, r.word(g, mem[g], &got, 0))
		assert.Equal(t, []uint32{22, 11, 22}[g], got)
	})
	r.each(4, func(g int) {
		if rails[g] != 0 {
			assert.Equal(t, nccl.Success, f.CommDestroy(rails[g]))
		}
		assert.Equal(t, nccl.Success, f.CommDestroy(comms[g]))
		assert.Equal(t, nccl.Success, f.MemFree(mem[g]))
	})
	assert.Empty(t, r.m.Violations())
	assert.Empty(t, lib.Left())
}

func TestNCCLCollectives(t *testing.T) {
	stream := func(r *rig) (s cu.StreamHandle) {
		assert.Equal(r, cu.Success, r.d.StreamCreate(&s, cu.StreamNonBlocking))
		return s
	}
	t.Run("different", func(t *testing.T) {
		r := newRig(t, 2)
		f := simlib.NewNCCL(r.m).Functions()
		comms := r.comms(f, 2)
		mem, _ := r.windows(f, comms)
		first := make(chan struct{})
		r.each(2, func(g int) {
			s := stream(r)
			if g == 1 {
				<-first
			}
			assert.Equal(t, nccl.Success, f.AllReduce(mem[g], mem[g], uintptr(10+g), nccl.Float32, nccl.Sum, comms[g], uintptr(s)))
			if g == 0 {
				close(first)
				return // it would wait for ever
			}
			assert.NotEqual(t, cu.Success, r.settled(s))
		})
		r.noted("and others ncclAllReduce of 1")
		r.each(2, func(g int) { assert.Equal(t, nccl.Success, f.CommAbort(comms[g])) })
	})
	t.Run("aborted", func(t *testing.T) {
		r := newRig(t, 2)
		f := simlib.NewNCCL(r.m).Functions()
		comms := r.comms(f, 2)
		mem, _ := r.windows(f, comms)
		r.each(1, func(g int) {
			s := stream(r)
			assert.Equal(t, nccl.Success, f.AllReduce(mem[g], mem[g], 10, nccl.Float32, nccl.Sum, comms[g], uintptr(s)))
			assert.Equal(t, cu.NotReady, r.d.StreamQuery(s))
			assert.Equal(t, nccl.Success, f.CommAbort(comms[g]))
			assert.Equal(t, cu.Success, r.settled(s))
		})
		require.Empty(t, r.m.Violations())
	})
	t.Run("freed", func(t *testing.T) {
		r := newRig(t, 1)
		f := simlib.NewNCCL(r.m).Functions()
		comms := r.comms(f, 1)
		r.each(1, func(g int) {
			s := stream(r)
			assert.Equal(t, nccl.Success, f.AllReduce(1<<45, 1<<45, 10, nccl.Float32, nccl.Sum, comms[g], uintptr(s)))
			assert.Equal(t, cu.IllegalAddress, r.settled(s))
		})
		r.noted("by a library's kernel")
	})
}

// TestNCCLMessages: what ranks send each other in one group comes, the n-th of two ranks to the n-th, whatever the order of calls; a rank that has begun it waits for the others. Outside of a
// group two ranks that send before they receive wait for each other. Lengths that differ, a rank that is none and a group's end without a beginning are noted or refused, and of a group
// with a call that was refused nothing comes.
func TestNCCLMessages(t *testing.T) {
	const ranks = 3
	r := newRig(t, ranks)
	lib := simlib.NewNCCL(r.m)
	f := lib.Functions()
	comms := r.comms(f, ranks)
	mem := make([]uint64, ranks)
	streams := make([]uintptr, ranks)
	at := func(g, word int) uint64 { return mem[g] + uint64(4*word) }
	r.each(ranks, func(g int) {
		assert.Equal(t, nccl.Success, f.MemAlloc(&mem[g], 1000))
		var s cu.StreamHandle
		assert.Equal(t, cu.Success, r.d.StreamCreate(&s, cu.StreamNonBlocking))
		streams[g] = uintptr(s)
	})
	words := func(f func(g, other int)) {
		for g := range ranks {
			for other := range ranks {
				if other != g {
					f(g, other)
				}
			}
		}
	}
	send := func(g, to, word int) nccl.Result {
		return f.Send(at(g, word), 1, nccl.Uint32, int32(to), comms[g], streams[g])
	}
	receive := func(g, from, word int) nccl.Result {
		return f.Recv(at(g, word), 1, nccl.Uint32, int32(from), comms[g], streams[g])
	}
	words(func(g, other int) {
		require.Equal(t, cu.Success, r.word(g, at(g, other), nil, uint32(100*g+other)))
		require.Equal(t, cu.Success, r.word(g, at(g, 10+other), nil, uint32(1000*g+other)))
	})
	begun := make(chan struct{})
	r.each(ranks, func(g int) {
		if g == 2 {
			<-begun
		}
		assert.Equal(t, nccl.Success, f.GroupStart())
		for other := range ranks {
			if other == g {
				continue
			}
			all := []func() nccl.Result{
				func() nccl.Result { return send(g, other, other) }, func() nccl.Result { return send(g, other, 10+other) },
				func() nccl.Result { return receive(g, other, 20+other) }, func() nccl.Result { return receive(g, other, 30+other) },
			}
			if g == 1 {
				all = append(all[2:], all[:2]...)
			}
			for _, call := range all {
				assert.Equal(t, nccl.Success, call())
			}
		}
		assert.Equal(t, nccl.Success, f.GroupEnd())
		if g == 0 {
			time.Sleep(20 * time.Millisecond)
			assert.Equal(t, cu.NotReady, r.d.StreamQuery(cu.StreamHandle(streams[0])), "GPU 2 has not come")
			close(begun)
		}
		assert.Equal(t, cu.Success, r.settled(cu.StreamHandle(streams[g])))
	})
	words(func(g, other int) {
		var got, second uint32
		require.Equal(t, cu.Success, r.word(g, at(g, 20+other), &got, 0))
		require.Equal(t, cu.Success, r.word(g, at(g, 30+other), &second, 0))
		require.Equal(t, [2]uint32{uint32(100*other + g), uint32(1000*other + g)}, [2]uint32{got, second}, "of %d, on %d", other, g)
	})
	require.Empty(t, r.m.Violations())

	r.each(1, func(int) {
		assert.Equal(t, nccl.InvalidArgument, send(0, ranks, 0))
		assert.Equal(t, nccl.InvalidArgument, receive(0, -1, 0))
		assert.Equal(t, nccl.Success, f.Send(at(0, 0), 0, nccl.Uint32, 1, comms[0], streams[0]), "nothing is sent")
		assert.Equal(t, nccl.Success, f.GroupStart())
		assert.Equal(t, nccl.Success, send(0, 1, 0))
		assert.Equal(t, nccl.InvalidArgument, receive(0, ranks, 0))
		assert.Equal(t, nccl.InvalidArgument, f.GroupEnd())
		assert.Equal(t, cu.Success, r.settled(cu.StreamHandle(streams[0])))
		assert.Empty(t, r.m.Violations())
		assert.Equal(t, nccl.InvalidUsage, f.GroupEnd())
	})
	r.noted("ncclGroupEnd without ncclGroupStart")
	r.each(2, func(g int) {
		assert.Equal(t, nccl.Success, send(g, 1-g, 0))
		assert.Equal(t, nccl.Success, receive(g, 1-g, 1))
	})
	time.Sleep(20 * time.Millisecond)
	r.each(2, func(g int) {
		assert.Equal(t, cu.NotReady, r.d.StreamQuery(cu.StreamHandle(streams[g])), "each waits for the other to receive")
	})
	r.each(ranks, func(g int) {
		assert.Equal(t, nccl.Success, f.CommAbort(comms[g]))
		assert.Equal(t, cu.Success, r.settled(cu.StreamHandle(streams[g])))
	})
	comms = r.comms(f, ranks)
	r.each(2, func(g int) {
		if g == 0 {
			assert.Equal(t, nccl.Success, send(0, 1, 0))
		} else {
			assert.Equal(t, nccl.Success, f.Recv(at(1, 0), 2, nccl.Uint32, 0, comms[1], streams[1]))
			assert.NotEqual(t, cu.Success, r.settled(cu.StreamHandle(streams[1])))
		}
	})
	r.noted("rank 1 receives 8 bytes of rank 0, which sends 4")
}

// TestNCCLAbortsItsOwn: a rank that aborts its communicator ends what it has on its stream, and no other rank's: that waits until its own is aborted.
func TestNCCLAbortsItsOwn(t *testing.T) {
	r := newRig(t, 2)
	lib := simlib.NewNCCL(r.m)
	f := lib.Functions()
	comms := r.comms(f, 2)
	mem, windows := r.windows(f, comms)
	streams := make([]cu.StreamHandle, 2)
	r.each(2, func(g int) {
		assert.Equal(t, cu.Success, r.d.StreamCreate(&streams[g], cu.StreamNonBlocking))
		assert.Equal(t, nccl.Success, f.CommWindowDeregister(comms[g], windows[g]))
	})
	r.each(2, func(g int) {
		if g == 1 {
			assert.Equal(t, nccl.Success, f.AllReduce(mem[1], mem[1], 4, nccl.Uint32, nccl.Max, comms[1], uintptr(streams[1])))
			return
		}
		assert.Equal(t, nccl.Success, f.CommAbort(comms[0]))
	})
	time.Sleep(20 * time.Millisecond)
	r.each(2, func(g int) {
		if g == 1 {
			assert.Equal(t, cu.NotReady, r.d.StreamQuery(streams[1]))
			assert.Equal(t, nccl.Success, f.CommAbort(comms[1]))
			assert.Equal(t, cu.Success, r.settled(streams[1]))
		}
		assert.Equal(t, cu.Success, r.d.StreamDestroy(streams[g]))
		assert.Equal(t, nccl.Success, f.MemFree(mem[g]))
	})
	require.Empty(t, r.m.Violations())
	require.Empty(t, lib.Left())
}

// TestNVSHMEMMisuse: what ends a process with NVSHMEM, or tears its heap down, is noted, and the calls return.
func TestNVSHMEMMisuse(t *testing.T) {
	for name, tt := range map[string]struct {
		do   func(r *rig, g int, pe nvshmem.Calls)
		says string
	}{
		"two sizes": {func(_ *rig, g int, pe nvshmem.Calls) { _, _ = pe.Align(4096, int64(4096*(g+1))) }, "and others nvshmem_align of"},
		"part of an allocation": {func(r *rig, g int, pe nvshmem.Calls) {
			var h cu.MemHandle
			r.d.MemCreate(&h, 2*granule, &cu.MemAllocationProp{Type: cu.AllocationPinned, RequestedHandleTypes: cu.HandleFD, Location: cu.MemLocation{
				Type: cu.LocationDevice, ID: int32(g)}}, 0)
			var p device.Ptr
			r.d.MemAddressReserve(&p, 2*granule, 0, 0, 0)
			r.d.MemMap(p, 2*granule, 0, h, 0)
			_, _ = pe.Register(uint64(p), granule)
		}, "the heap would be gone"},
		"too much": {func(r *rig, _ int, pe nvshmem.Calls) {
			p, err := pe.Align(4096, 4<<30)
			assert.Zero(r, p)
			assert.NoError(r, err)
		}, "torn its heap down"},
		"outside of the heap": {func(r *rig, g int, pe nvshmem.Calls) {
			team, err := pe.NewTeam()
			assert.NoError(r, err)
			reduce, err := pe.Collective(nvshmem.Reduce, "f32", "sum")
			assert.NoError(r, err)
			assert.ErrorIs(r, reduce(team, 4096, 4096, 1, 0, 0), errs.ErrInvalid)
		}, "from 0x1000 to 0x1000"},
		"no barrier": {func(r *rig, g int, pe nvshmem.Calls) {
			team, err := pe.NewTeam()
			assert.NoError(r, err)
			p, err := pe.Align(4096, 4096)
			assert.NoError(r, err)
			var s cu.StreamHandle
			assert.Equal(r, cu.Success, r.d.StreamCreate(&s, cu.StreamNonBlocking))
			move, err := pe.Collective(nvshmem.Broadcast, "u32", "")
			assert.NoError(r, err)
			assert.NoError(r, move(team, p, p, 1, 1, uintptr(s)))
			assert.Equal(r, cu.Success, r.settled(s))
		}, "without a barrier in front"},
		"nothing to unregister": {func(r *rig, _ int, pe nvshmem.Calls) {
			p, err := pe.Align(4096, 4096)
			assert.NoError(r, err)
			_ = pe.Unregister(p, granule)
		}, "which are not registered"},
		"after the end": {func(r *rig, _ int, pe nvshmem.Calls) {
			assert.NoError(r, pe.Finalize())
			_, err := pe.Align(4096, 4096)
			assert.ErrorIs(r, err, errs.ErrClosed)
		}, "nvshmem_align before the start"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, 2)
			lib := simlib.NewNVSHMEM(r.m)
			var id *nvshmem.UniqueID
			all := make([]nvshmem.Calls, 2)
			for g := range all {
				var err error
				all[g], err = lib.Load(&nvshmem.Options{Multicast: true})
				require.NoError(t, err)
			}
			id, err := all[0].NewUniqueID()
			require.NoError(t, err)
			r.each(2, func(g int) { assert.NoError(t, all[g].Start(2, g, id)) })
			require.Empty(t, r.m.Violations())
			r.each(2, func(g int) { tt.do(r, g, all[g]) })
			r.noted(tt.says)
		})
	}
}
