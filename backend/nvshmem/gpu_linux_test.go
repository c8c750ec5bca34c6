package nvshmem

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/cuda"
	"github.com/symmem/symmem/group"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/nvshmem"
	"github.com/symmem/symmem/internal/testneed"
	"github.com/symmem/symmem/memory"
)

const workerVariable = "SYMMEM_TEST_NVSHMEM_WORKER"

func TestMain(m *testing.M) {
	if os.Getenv(workerVariable) != "" {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
		defer cancel()
		if err := worker(ctx); err != nil {
			fmt.Println("failed:", err)
			os.Exit(1)
		}
		return
	}
	goleak.VerifyTestMain(m)
}

// TestOnGPUs runs a process for each of two GPUs through everything that only the real library can show, and prints what it
// took.
func TestOnGPUs(t *testing.T) {
	if _, err := (factory{}).Probe(t.Context(), &backend.Env{Multicast: "off", Getenv: os.Getenv}); err != nil {
		require.ErrorIs(t, err, errs.ErrUnavailable)
		testneed.Missing(t, Name, err)
	}
	const size = 2
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	f, err := l.(*net.TCPListener).File()
	require.NoError(t, err)
	defer f.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	said, failed := make([]string, size), make([]error, size)
	var wg sync.WaitGroup
	for rank := range size {
		cmd := exec.CommandContext(ctx, os.Args[0])
		cmd.Env = append(os.Environ(), workerVariable+"="+strconv.Itoa(rank), "SYMMEM_TEST_ADDR="+l.Addr().String())
		if rank == 0 {
			cmd.ExtraFiles = []*os.File{f}
		}
		wg.Go(func() {
			out, err := cmd.CombinedOutput()
			said[rank], failed[rank] = string(out), err
		})
	}
	wg.Wait()
	for rank := range size {
		t.Logf("rank %d:\n%s", rank, said[rank])
	}
	backendtest.RequireAll(t, failed)
}

// worker is one rank's process.
func worker(ctx context.Context) error {
	rank, err := strconv.Atoi(os.Getenv(workerVariable))
	if err != nil {
		return err
	}
	o := &group.Options{Rank: rank, WorldSize: 2, LocalRank: rank, Addr: os.Getenv("SYMMEM_TEST_ADDR"), Token: "token", Timeout: 30 * time.Second}
	if rank == 0 {
		f := os.NewFile(3, "listener")
		l, err := net.FileListener(f)
		if err = errors.Join(err, f.Close()); err != nil {
			return err
		}
		o.Listener = l
	}
	g, err := group.Join(ctx, o)
	if err != nil {
		return err
	}
	for round := range 2 { // the library can be started again
		began := time.Now()
		b, err := New(ctx, g, &Options{LocalRank: rank, Multicast: "off", KernelTimeout: 20 * time.Second})
		if err != nil {
			return err
		}
		fmt.Printf("start %d took %v\n", round, time.Since(began).Round(time.Millisecond))
		m := memory.New(b, g, &memory.Options{Channels: 2})
		for _, step := range []struct {
			name string
			run  func(ctx context.Context, b *Backend, m *memory.Memory) error
		}{
			{"layout", layoutOnGPU}, {"too large", tooLargeOnGPU}, {"times", timesOnGPU}, {"put", putOnGPU}, {"register", registerOnGPU},
			{"reduce", reduceOnGPU}, {"barrier", barrierOnGPU}, {"arena", arenaOnGPU},
		} {
			if round > 0 && step.name != "register" {
				continue
			}
			if err := step.run(ctx, b, m); err != nil {
				return fmt.Errorf("%s: %w", step.name, err)
			}
		}
		if err := errors.Join(m.Close(ctx), b.home.usable()); err != nil {
			return err
		}
	}
	return g.Close(ctx)
}

// layoutOnGPU shows where the heaps are.
func layoutOnGPU(_ context.Context, b *Backend, _ *memory.Memory) error {
	fmt.Printf("heaps at %v; regions", b.world.peers)
	for _, r := range b.world.heap.regions {
		fmt.Printf(" %#x+%d", r.start, r.bytes)
	}
	fmt.Printf("; %s; %v\n", b.world.lib.Version(), b.world.lib.Settings())
	return nil
}

func tooLargeOnGPU(ctx context.Context, b *Backend, m *memory.Memory) error {
	free, total, err := b.device.MemInfo()
	if err != nil {
		return err
	}
	for _, n := range []int64{total + 1, total - 1, free} {
		if _, err := m.Allocate(ctx, n, ""); !errors.Is(err, errs.ErrNoMemory) {
			return fmt.Errorf("%d bytes: %w", n, err)
		}
	}
	return backendtest.TryWindow(ctx, m, 4096)
}

// timesOnGPU times allocation and rendezvous together.
func timesOnGPU(ctx context.Context, _ *Backend, m *memory.Memory) error {
	for _, n := range []int64{64 << 20, 600 << 20, 3 << 30} {
		var took []time.Duration
		for range 8 {
			if err := m.Group().Barrier(ctx, "begin"); err != nil {
				return err
			}
			began := time.Now()
			a, err := m.Allocate(ctx, n, "")
			if err != nil {
				return err
			}
			w, err := m.Rendezvous(ctx, a, memory.Record{})
			if err != nil {
				return err
			}
			took = append(took, time.Since(began))
			if err := errors.Join(backendtest.ExchangeBytes(ctx, m, w), copyAll(ctx, m, w, n), m.Free(ctx, a)); err != nil {
				return fmt.Errorf("%d bytes: %w", n, err)
			}
		}
		later := slices.Sorted(slices.Values(took[1:]))
		fmt.Printf("allocate and rendezvous of %d MiB: first %v, later median %v, worst %v\n", n>>20, took[0].Round(time.Microsecond),
			later[len(later)/2].Round(time.Microsecond), later[len(later)-1].Round(time.Microsecond))
	}
	return nil
}

// copyAll copies the peer's whole memory onto itself: the driver refuses what lies across two pieces.
func copyAll(ctx context.Context, m *memory.Memory, w *memory.Window, n int64) error {
	s, err := m.Device().NewStream()
	if err != nil {
		return err
	}
	own, err := w.Peer(m.Group().Rank(), 0)
	if err != nil {
		return err
	}
	if m.Group().Rank() == 0 {
		err = m.Copy(s, backend.Write, 1, w, 0, own, n)
	}
	return errors.Join(err, s.Synchronize(ctx), s.Close())
}

// timed returns the median time in microseconds of one of n things that are enqueued together.
func timed(ctx context.Context, s device.Stream, n int, enqueue func() error) (float64, error) {
	var all []float64
	for range 7 {
		began := time.Now()
		for range n {
			if err := enqueue(); err != nil {
				return 0, err
			}
		}
		if err := s.Synchronize(ctx); err != nil {
			return 0, err
		}
		all = append(all, float64(time.Since(began).Nanoseconds())/1e3/float64(n))
	}
	slices.Sort(all)
	return all[len(all)/2], nil
}

// putOnGPU compares copies to a peer: of plain memory, of the heap's, and by NVSHMEM; and records NVSHMEM's in a graph.
func putOnGPU(ctx context.Context, b *Backend, m *memory.Memory) error {
	const n = 256 << 20
	src, err := m.Allocate(ctx, n, "")
	if err != nil {
		return err
	}
	dst, err := m.Allocate(ctx, n, "")
	if err != nil {
		return err
	}
	w, err := m.Rendezvous(ctx, dst, memory.Record{})
	if err != nil {
		return err
	}
	s, err := b.device.NewStream()
	if err != nil {
		return err
	}
	put := func(bytes int64) func() error {
		return func() error {
			return b.device.WithContext(func() error {
				return b.world.lib.(*nvshmem.Library).Put(uint64(dst.Ptr()), uint64(src.Ptr()), bytes, 1, uintptr(s.(*cuda.Stream).Handle()))
			})
		}
	}
	if b.group.Rank() == 0 {
		plain, err := b.device.Alloc(n)
		if err != nil {
			return err
		}
		peer, err := w.Peer(1, 0)
		if err != nil {
			return err
		}
		for _, bytes := range []int64{8, 64 << 10, 1 << 20, n} {
			line := fmt.Sprintf("put of %d bytes:", bytes)
			for _, c := range []struct {
				name    string
				enqueue func() error
			}{
				{"plain", func() error { return s.Copy(peer, plain, bytes) }},
				{"heap", func() error { return m.Copy(s, backend.Write, 1, w, 0, src.Ptr(), bytes) }},
				{"NVSHMEM", put(bytes)},
			} {
				us, err := timed(ctx, s, 10, c.enqueue)
				if err != nil {
					return err
				}
				line += fmt.Sprintf(" %s %.2f us (%.1f GB/s)", c.name, us, float64(bytes)/us/1e3)
			}
			fmt.Println(line)
		}
		if err := b.device.CopyFromHost(src.Ptr(), []byte("recorded")); err != nil {
			return err
		}
		if err := s.BeginCapture(); err != nil {
			return err
		}
		if err := put(8)(); err != nil {
			return err
		}
		graph, err := s.EndCapture()
		if err != nil {
			return err
		}
		if err := errors.Join(graph.Launch(s), s.Synchronize(ctx), graph.Close(), b.device.Free(plain)); err != nil {
			return err
		}
	}
	if err := b.group.Barrier(ctx, "put"); err != nil {
		return err
	}
	if b.group.Rank() == 1 {
		got := make([]byte, 8)
		if err := b.device.CopyToHost(got, dst.Ptr()); err != nil || string(got) != "recorded" {
			return fmt.Errorf("a recorded put brought %q: %w", got, err)
		}
	}
	return errors.Join(s.Close(), m.Free(ctx, dst), m.Free(ctx, src))
}

// registerOnGPU registers memory of cuMemCreate at different offsets.
func registerOnGPU(ctx context.Context, b *Backend, m *memory.Memory) error {
	const n = 6 << 20
	p, free, err := virtual(b, n)
	if err != nil {
		return err
	}
	at := p.Add(int64(4096 * (1 + b.group.Rank())))
	for range 3 {
		began := time.Now()
		a, err := m.Register(ctx, at, 4<<20, "")
		if err != nil {
			return err
		}
		w, err := m.Rendezvous(ctx, a, memory.Record{})
		if err != nil {
			return err
		}
		fmt.Printf("registered %s as %s in %v\n", at, b.inHeap(at), time.Since(began).Round(time.Microsecond))
		if err := errors.Join(backendtest.ExchangeBytes(ctx, m, w), copyAll(ctx, m, w, 4<<20), m.Free(ctx, a)); err != nil {
			return err
		}
	}
	plain, err := b.device.Alloc(4 << 20)
	if err != nil {
		return err
	}
	_, err = m.Register(ctx, plain, 4096, "")
	var bad *cuda.MemoryError
	if !errors.As(err, &bad) {
		return fmt.Errorf("plain memory: %w", err)
	}
	fmt.Println(err)
	if err := backendtest.TryWindow(ctx, m, 4096); err != nil { // what was registered leaves the heap
		return err
	}
	return errors.Join(b.device.Free(plain), free())
}

// virtual makes memory of cuMemCreate.
func virtual(b *Backend, bytes int64) (p device.Ptr, free func() error, err error) {
	drv := b.drv
	prop := cu.MemAllocationProp{Type: cu.AllocationPinned, RequestedHandleTypes: cu.HandleFD,
		Location: cu.MemLocation{Type: cu.LocationDevice, ID: int32(b.device.Ordinal())}}
	access := cu.MemAccessDesc{Location: prop.Location, Flags: cu.AccessReadWrite}
	var h cu.MemHandle
	err = b.device.WithContext(func() error {
		for _, step := range []func() cu.Result{
			func() cu.Result { return drv.MemCreate(&h, uint64(bytes), &prop, 0) },
			func() cu.Result { return drv.MemAddressReserve(&p, uint64(bytes), 0, 0, 0) },
			func() cu.Result { return drv.MemMap(p, uint64(bytes), 0, h, 0) },
			func() cu.Result { return drv.MemSetAccess(p, uint64(bytes), &access, 1) },
		} {
			if err := drv.Check("making virtual memory", step()); err != nil {
				return err
			}
		}
		return nil
	})
	return p, func() error {
		return b.device.WithContext(func() error {
			return errors.Join(drv.Check("unmap", drv.MemUnmap(p, uint64(bytes))), drv.Check("free", drv.MemAddressFree(p, uint64(bytes))),
				drv.Check("release", drv.MemRelease(h)))
		})
	}, err
}

// reduceOnGPU adds up by NVSHMEM, on a stream and in a graph, with two reductions on two streams at once.
func reduceOnGPU(ctx context.Context, b *Backend, m *memory.Memory) error {
	const count = 1 << 18
	var streams [2]device.Stream
	var allocs [2]backend.Allocation
	var reductions [2]backend.PreparedAllReduce
	for i := range streams {
		var err error
		if streams[i], err = b.device.NewStream(); err != nil {
			return err
		}
		if allocs[i], err = m.Allocate(ctx, 2*4*count, ""); err != nil {
			return err
		}
		w, err := m.Rendezvous(ctx, allocs[i], memory.Record{})
		if err != nil {
			return err
		}
		mine := make([]byte, 4*count)
		for j := range count {
			binary.LittleEndian.PutUint32(mine[4*j:], uint32(j*(1+b.group.Rank())+i))
		}
		if err := b.device.CopyFromHost(allocs[i].Ptr(), mine); err != nil {
			return err
		}
		reductions[i], err = m.PrepareAllReduce(ctx, Name, memory.Place{Window: w}, memory.Place{Window: w, Offset: 4 * count}, count, 4*count, "u32", "sum")
		if err != nil {
			return err
		}
	}
	for range 20 {
		for i, s := range streams {
			if err := reductions[i].Enqueue(s); err != nil {
				return err
			}
		}
	}
	if err := streams[1].Synchronize(ctx); err != nil {
		return err
	}
	if err := streams[1].BeginCapture(); err != nil {
		return err
	}
	if err := reductions[1].Enqueue(streams[1]); err != nil {
		return err
	}
	graph, err := streams[1].EndCapture()
	if err != nil {
		return err
	}
	if err := errors.Join(graph.Launch(streams[1]), streams[0].Synchronize(ctx), streams[1].Synchronize(ctx), graph.Close()); err != nil {
		return err
	}
	for i := range streams {
		got := make([]byte, 4*count)
		if err := b.device.CopyToHost(got, allocs[i].Ptr().Add(4*count)); err != nil {
			return err
		}
		for j := range count {
			if sum := binary.LittleEndian.Uint32(got[4*j:]); sum != uint32(3*j+2*i) {
				return fmt.Errorf("reduction %d: element %d is %d, expected %d", i, j, sum, 3*j+2*i)
			}
		}
	}
	us, err := timed(ctx, streams[0], 20, func() error { return reductions[0].Enqueue(streams[0]) })
	if err != nil {
		return err
	}
	fmt.Printf("NVSHMEM's sum of 1 MiB: %.1f us; teams %v\n", us, b.world.heap.made)
	for i := range streams {
		if err := errors.Join(reductions[i].Close(), streams[i].Close(), m.Free(ctx, allocs[i])); err != nil {
			return err
		}
	}
	return nil
}

// barrierOnGPU compares NVSHMEM's barrier on a stream with this module's.
func barrierOnGPU(ctx context.Context, b *Backend, m *memory.Memory) error {
	s, err := b.device.NewStream()
	if err != nil {
		return err
	}
	theirs, err := timed(ctx, s, 100, func() error {
		return b.device.WithContext(func() error {
			return b.world.lib.(*nvshmem.Library).Barrier(nvshmem.TeamWorld, uintptr(s.(*cuda.Stream).Handle()))
		})
	})
	if err != nil {
		return err
	}
	ours, err := timed(ctx, s, 100, func() error { return m.Barrier(s, 0) })
	if err != nil {
		return err
	}
	fmt.Printf("barrier on a stream: NVSHMEM's %.2f us, ours %.2f us\n", theirs, ours)
	return s.Close()
}

// arenaOnGPU uses groups of one rank, in which only the arena is.
func arenaOnGPU(ctx context.Context, b *Backend, _ *memory.Memory) error {
	o := &Options{Multicast: "off"}
	for range 5 {
		err := sub(ctx, b, []int{b.group.Rank()}, o, func(_ *Backend, m *memory.Memory) error {
			return backendtest.TryWindow(ctx, m, 1<<20)
		})
		if err != nil {
			return err
		}
	}
	return nil
}
