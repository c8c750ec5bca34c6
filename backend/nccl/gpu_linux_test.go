package nccl

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/cuda"
	"github.com/symmem/symmem/group"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/nccl"
	"github.com/symmem/symmem/internal/testneed"
	"github.com/symmem/symmem/memory"
)

// gpus counts the GPUs, and skips the test without one or without the library. Under SYMMEM_TEST_REQUIRE with nccl among its
// names that is a failure.
func gpus(t *testing.T) int {
	t.Helper()
	c, err := factory{}.Probe(t.Context(), &backend.Env{Multicast: "off"})
	if errors.Is(err, errs.ErrUnavailable) || errors.Is(err, errs.ErrUnsupported) {
		testneed.Missing(t, Name, err)
	}
	require.NoError(t, err)
	require.True(t, c.PeerPointers)
	drv, err := cu.Load(nil)
	require.NoError(t, err)
	require.Equal(t, cu.Success, drv.Init(0))
	var count int32
	require.Equal(t, cu.Success, drv.DeviceGetCount(&count))
	return int(count)
}

// onGPU returns the options of a rank of a real machine. Multicast is never tried.
func onGPU(rank int) *Options {
	return &Options{LocalRank: rank, Multicast: "off", KernelTimeout: 30 * time.Second}
}

// sizes returns the world sizes to run at: each rank has a GPU of its own.
func sizes(count int) []int {
	return slices.DeleteFunc([]int{1, 2, 4}, func(n int) bool { return n > count })
}

func TestConformanceOnGPU(t *testing.T) {
	count := gpus(t)
	for _, kind := range []string{plainWindow, symmetricWindow} {
		t.Run(kind, func(t *testing.T) {
			backendtest.Run(t, backendtest.Harness{
				Open: func(ctx context.Context, g *group.Group) (backend.Backend, error) {
					o := onGPU(g.Rank())
					o.Window = kind
					return open(ctx, g, o)
				},
				WorldSizes: sizes(count),
				Adoptable:  ofNCCL, AdoptAlign: nccl.WindowAlignment, AllReduces: []string{plainForm, symmetricForm},
			})
		})
	}
}

// ofNCCL returns memory that NCCL has allocated.
func ofNCCL(b backend.Backend, _ int, bytes int64) (device.Ptr, func() error, error) {
	return foreign(b.(*Backend), true, bytes)
}

// TestWindowsOnGPU tells what windows cost, and where they are.
func TestWindowsOnGPU(t *testing.T) {
	size := min(gpus(t), 4)
	backendtest.RequireAll(t, backendtest.OnRanks(t, size, nil, func(ctx context.Context, g *group.Group) error {
		return withMemory(ctx, g, onGPU(g.Rank()), func(b *Backend, m *memory.Memory) error {
			for i := range 6 {
				began := time.Now()
				if err := backendtest.WithWindow(ctx, m, 64<<20, func(w *memory.Window) error {
					took := time.Since(began)
					base, stride, err := w.Contiguous(0)
					if err != nil {
						return err
					}
					handle, at, err := w.Handle(100)
					if err != nil || handle == 0 || at != 100 {
						return fmt.Errorf("handle %#x at %d: %w", handle, at, err)
					}
					if g.Rank() == 0 {
						t.Logf("window %d of 64 MiB: %v; contiguous from %s, %d GiB apart; handle %#x", i, took, base, stride>>30, handle)
					}
					return backendtest.ExchangeBytes(ctx, m, w)
				}); err != nil {
					return err
				}
			}
			return nil
		})
	}))
}

// TestRoundsOnGPU: device memory and descriptors are the same after many rounds.
func TestRoundsOnGPU(t *testing.T) {
	size := min(gpus(t), 2)
	backendtest.RequireAll(t, backendtest.OnRanks(t, size, nil, func(ctx context.Context, g *group.Group) error {
		return withMemory(ctx, g, onGPU(g.Rank()), func(b *Backend, m *memory.Memory) error {
			rounds := func(n int) error {
				for i := range n {
					if err := backendtest.WithWindow(ctx, m, int64(1+i%7)<<21, nil); err != nil {
						return err
					}
				}
				return g.Barrier(ctx, "rounds")
			}
			look := func() (free int64, files int, err error) {
				if free, _, err = b.device.MemInfo(); err == nil {
					files, err = backendtest.OpenFiles()
				}
				return free, files, errors.Join(err, g.Barrier(ctx, "looked"))
			}
			if err := rounds(20); err != nil {
				return err
			}
			free, files, err := look()
			if err != nil {
				return err
			}
			if err := rounds(300); err != nil {
				return err
			}
			free2, files2, err := look()
			if g.Rank() == 0 {
				t.Logf("free %d and %d, descriptors %d and %d", free, free2, files, files2)
			}
			if free-free2 > 8<<20 || files2 > files+2 { // one that NCCL opened late is no leak of 300 rounds
				err = errors.Join(err, fmt.Errorf("free memory went from %d to %d, descriptors from %d to %d", free, free2, files, files2))
			}
			return err
		})
	}))
}

// TestSubGroupsLeaveNothingOnGPU: a sub-group that is closed leaves its communicators to the next one of the same ranks, and nothing else.
// Descriptors and threads are counted, and the memory of the process is bounded: what NCCL keeps of one round must not be kept of each.
func TestSubGroupsLeaveNothingOnGPU(t *testing.T) {
	size := min(gpus(t), 4)
	const warm, rounds = 4, 16
	const mostMemory = 64 << 20 // of all rounds together
	backendtest.RequireAll(t, backendtest.OnRanks(t, size, nil, func(ctx context.Context, g *group.Group) error {
		return withMemory(ctx, g, onGPU(g.Rank()), func(parent *Backend, m *memory.Memory) error {
			round := func(ranks []int, again bool) error {
				s, err := g.Sub(ctx, ranks)
				if err != nil {
					return err
				}
				o := onGPU(g.Rank())
				o.Opened, o.Parent, o.Library = parent.device, parent, parent.lib.Path()
				err = withMemory(ctx, s, o, func(b *Backend, m *memory.Memory) error {
					if split := len(ranks) == size; b.split != split || b.reused != again {
						return fmt.Errorf("ranks %v: split is %t, kept %t", ranks, b.split, b.reused)
					}
					return errors.Join(backendtest.TryWindow(ctx, m, 1<<20), reduceBy(ctx, s, m, plainForm, 1000,
						func(p backend.PreparedAllReduce, s device.Stream) error {
							return errors.Join(p.Enqueue(s), s.Synchronize(ctx))
						}))
				})
				return errors.Join(err, s.Close(ctx))
			}
			all := make([]int, size)
			for r := range all {
				all[r] = r
			}
			kinds := map[string][]int{"split from the parent's": all}
			if size > 1 {
				kinds["of its own"] = []int{g.Rank()}
			}
			for _, name := range slices.Sorted(maps.Keys(kinds)) {
				var before, after held
				for i := range warm + rounds {
					if i == warm {
						var err error
						if before, err = look(ctx, g); err != nil {
							return err
						}
					}
					if err := round(kinds[name], i > 0); err != nil {
						return fmt.Errorf("a communicator %s, round %d: %w", name, i, err)
					}
				}
				var err error
				if after, err = look(ctx, g); err != nil {
					return err
				}
				if g.Rank() == 0 {
					t.Logf("a communicator %s, %d rounds: %+v before, %+v after", name, rounds, before, after)
				}
				if after.files > before.files+2 || after.threads > before.threads+4 || after.resident > before.resident+mostMemory {
					return fmt.Errorf("a communicator %s: %d rounds took %+v to %+v", name, rounds, before, after)
				}
			}
			return nil
		})
	}))
}

// held is what the process holds.
type held struct {
	files, threads int
	resident       int64 // bytes
}

// look says what the process holds, at a moment at which no rank does anything.
func look(ctx context.Context, g *group.Group) (h held, err error) {
	if err := g.Barrier(ctx, "looking"); err != nil {
		return h, err
	}
	runtime.GC() // so that what Go has not yet given back does not count
	debug.FreeOSMemory()
	if h.files, err = backendtest.OpenFiles(); err != nil {
		return h, err
	}
	threads, err := os.ReadDir("/proc/self/task")
	if err != nil {
		return h, err
	}
	h.threads = len(threads)
	statm, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		return h, err
	}
	var total, pages int64
	if _, err := fmt.Sscan(string(statm), &total, &pages); err != nil {
		return h, err
	}
	h.resident = pages * int64(os.Getpagesize())
	return h, g.Barrier(ctx, "looked")
}

// foreign makes memory outside of the backend, as another library would.
func foreign(b *Backend, virtual bool, bytes int64) (p device.Ptr, free func() error, err error) {
	if !virtual {
		p, err = b.device.Alloc(bytes)
		return p, func() error { return b.device.Free(p) }, err
	}
	err = b.device.WithContext(func() error {
		q, err := b.lib.MemAlloc(bytes)
		p = device.Ptr(q)
		return err
	})
	return p, func() error { return b.device.WithContext(func() error { return b.lib.MemFree(uint64(p)) }) }, err
}

func TestRegisterOnGPU(t *testing.T) {
	size := min(gpus(t), 4)
	backendtest.RequireAll(t, backendtest.OnRanks(t, size, nil, func(ctx context.Context, g *group.Group) error {
		return withMemory(ctx, g, onGPU(g.Rank()), func(b *Backend, m *memory.Memory) error {
			p, free, err := foreign(b, true, 8<<20)
			if err != nil {
				return err
			}
			// Two parts of one allocation share its window.
			var parts []backend.Allocation
			for i, at := range []int64{4096, 4 << 20} {
				a, err := m.Register(ctx, p.Add(at), 1<<20, "part")
				if err != nil {
					return err
				}
				parts = append(parts, a)
				w, err := m.Rendezvous(ctx, a, memory.Record{})
				if err != nil {
					return err
				}
				if err := backendtest.ExchangeBytes(ctx, m, w); err != nil {
					return fmt.Errorf("part %d: %w", i, err)
				}
			}
			b.mu.Lock()
			users := b.windows[p].users
			b.mu.Unlock()
			if users != 2 {
				return fmt.Errorf("the window has %d users", users)
			}
			return errors.Join(m.Free(ctx, parts[0]), m.Free(ctx, parts[1]), free())
		})
	}))
}

func TestRegisterErrorsOnGPU(t *testing.T) {
	gpus(t)
	backendtest.RequireAll(t, backendtest.OnRanks(t, 1, nil, func(ctx context.Context, g *group.Group) error {
		return withMemory(ctx, g, onGPU(0), func(b *Backend, m *memory.Memory) error {
			want := func(what string, p device.Ptr, bytes int64, text string) error {
				_, err := b.Register(ctx, p, bytes)
				var bad *cuda.MemoryError
				if !errors.As(err, &bad) || !strings.Contains(err.Error(), text) {
					return fmt.Errorf("%s: %w", what, err)
				}
				t.Log(what, ":", err)
				return nil
			}
			p, free, err := foreign(b, true, 8<<20)
			if err != nil {
				return err
			}
			q, freePlain, err := foreign(b, false, 8<<20)
			if err != nil {
				return err
			}
			return errors.Join(want("odd", p.Add(512), 64, "multiples of 4096"), want("too large", p.Add(4<<20), 8<<20,
				"behind the end"),
				want("plain", q, 64, "cudaMalloc"), free(), freePlain(), want("freed", p, 64, "it was freed"))
		})
	}))
}

// TestGivenCommunicatorOnGPU: a communicator from elsewhere serves, and goes on afterwards.
func TestGivenCommunicatorOnGPU(t *testing.T) {
	size := min(gpus(t), 2)
	backendtest.RequireAll(t, backendtest.OnRanks(t, size, nil, func(ctx context.Context, g *group.Group) error {
		return withMemory(ctx, g, onGPU(g.Rank()), func(first *Backend, m *memory.Memory) error {
			for _, config := range []*nccl.Config{nil, {NonBlocking: true}} {
				comm, err := first.comm.Split(ctx, config)
				if err := g.Vote(ctx, "split", err); err != nil {
					return err
				}
				o := onGPU(g.Rank())
				o.Comm, o.Opened = uintptr(comm.Handle()), first.device
				if err := withMemory(ctx, g, o, func(b *Backend, m *memory.Memory) error {
					return backendtest.TryWindow(ctx, m, 1<<20)
				}); err != nil {
					return fmt.Errorf("config %+v: %w", config, err)
				}
				if err := errors.Join(comm.Err(), comm.Destroy(ctx)); err != nil {
					return fmt.Errorf("config %+v: %w", config, err)
				}
			}
			return nil
		})
	}))
}

func TestDevCommOnGPU(t *testing.T) {
	size := min(gpus(t), 2)
	lib, err := nccl.Load(nil)
	require.NoError(t, err)
	backendtest.RequireAll(t, backendtest.OnRanks(t, size, nil, func(ctx context.Context, g *group.Group) error {
		return withMemory(ctx, g, onGPU(g.Rank()), func(b *Backend, m *memory.Memory) error {
			d, err := b.NewDevComm(ctx, 4)
			if lib.Version() >= 23100 { // whose device communicators are not known
				if !errors.Is(err, errs.ErrUnsupported) {
					return fmt.Errorf("a device communicator of NCCL %s: %w", lib.Version(), err)
				}
				return nil
			}
			if err != nil {
				return err
			}
			if g.Rank() == 0 {
				t.Logf("%d bytes: % x", len(d.Bytes()), d.Bytes()[:48])
			}
			if err := d.Close(ctx); err != nil {
				return err
			}
			if err := d.Close(ctx); !errors.Is(err, errs.ErrClosed) {
				return fmt.Errorf("closing twice: %w", err)
			}
			_, err = b.NewDevComm(ctx, 1) // the backend closes it
			return err
		})
	}))
}

// TestSharedGPU: two ranks on one GPU are refused before NCCL hears of it.
func TestSharedGPU(t *testing.T) {
	gpus(t)
	for _, err := range backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		o := onGPU(0)
		o.Device = "0"
		return withMemory(ctx, g, o, func(*Backend, *memory.Memory) error { return nil })
	}) {
		require.ErrorIs(t, err, errs.ErrInvalid)
		assert.ErrorContains(t, err, "on rank 0 and on rank 1")
	}
}

// TestShareDeviceOnGPU: with a library that can, ranks that all allow it share one GPU.
func TestShareDeviceOnGPU(t *testing.T) {
	gpus(t)
	lib, err := nccl.Load(nil)
	require.NoError(t, err)
	if !lib.SharesGPUs() {
		testneed.Missing(t, "nccl-share-device", fmt.Sprintf("NCCL %s cannot have several ranks on one GPU, and 2.30.3 or newer can", lib.Version()))
	}
	backendtest.Run(t, backendtest.Harness{
		Open: func(ctx context.Context, g *group.Group) (backend.Backend, error) {
			o := onGPU(0)
			o.Device, o.ShareDevice = "0", true
			return open(ctx, g, o)
		},
		WorldSizes: []int{2, 4},
		Adoptable:  ofNCCL, AdoptAlign: nccl.WindowAlignment, AllReduces: []string{plainForm, symmetricForm},
	})
}

// TestRankStaysAwayOnGPU: a rank that does not come to a registration is an error of those that did, in time, and everything
// closes.
func TestRankStaysAwayOnGPU(t *testing.T) {
	size := min(gpus(t), 2)
	if size < 2 {
		testneed.MissingGPUs(t, 2, "two ranks need two GPUs, and there is one")
	}
	failed := backendtest.OnRanks(t, size, nil, func(ctx context.Context, g *group.Group) error {
		o := onGPU(g.Rank())
		o.KernelTimeout = 3 * time.Second
		b, err := New(ctx, g, o)
		if err != nil {
			return err
		}
		a, err := b.Allocate(ctx, 4096)
		if err != nil {
			return err
		}
		if g.Rank() == 0 {
			began := time.Now()
			_, err = b.register(ctx, a.(*allocation).base, a.(*allocation).span)
			t.Logf("after %v: %v", time.Since(began), err)
			if !b.comm.Stuck() {
				err = errors.Join(err, errors.New("the communicator is not stuck"))
			}
		}
		if e := g.Barrier(ctx, "stayed away"); e != nil {
			return e
		}
		began := time.Now()
		closed := b.Close(ctx)
		t.Logf("rank %d: closing took %v: %v", g.Rank(), time.Since(began), closed)
		return err
	})
	var stuck *nccl.StuckError
	require.ErrorAs(t, failed[0], &stuck)
	require.ErrorIs(t, failed[0], context.DeadlineExceeded)
	require.NoError(t, failed[1])
	// Afterwards all works.
	backendtest.RequireAll(t, backendtest.OnRanks(t, size, nil, func(ctx context.Context, g *group.Group) error {
		return withMemory(ctx, g, onGPU(g.Rank()), func(b *Backend, m *memory.Memory) error {
			return backendtest.TryWindow(ctx, m, 1<<20)
		})
	}))
}

// TestLogOnGPU: what NCCL says comes to the logger.
func TestLogOnGPU(t *testing.T) {
	gpus(t)
	const alone = "SYMMEM_TEST_NCCL_LOG"
	if os.Getenv(alone) == "" {
		// NCCL decides once in a process what it says, and where: an earlier test or the caller may have seen to that already.
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
		defer cancel()
		cmd := exec.CommandContext(ctx, os.Args[0], "-test.run=^TestLogOnGPU$", "-test.v")
		cmd.Env = append(slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "NCCL_DEBUG") }), alone+"=1")
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, string(out))
		return
	}
	var said strings.Builder
	log := slog.New(slog.NewTextHandler(&said, &slog.HandlerOptions{Level: slog.LevelDebug}))
	backendtest.RequireAll(t, backendtest.OnRanks(t, 1, nil, func(ctx context.Context, g *group.Group) error {
		o := onGPU(0)
		o.Logger = log
		return withMemory(ctx, g, o, func(*Backend, *memory.Memory) error { return nil })
	}))
	assert.Contains(t, said.String(), "window registered")
	assert.Contains(t, said.String(), "library=NCCL")
	t.Log(said.String()[:min(2000, said.Len())])
}
