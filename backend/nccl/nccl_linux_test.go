package nccl

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/backend/backendtest/fakecuda"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/cuda"
	"github.com/symmem/symmem/group"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/dl"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/nccl"
	"github.com/symmem/symmem/memory"
)

func TestConformance(t *testing.T) {
	for _, version := range []nccl.Version{22803, 22809, 22907} {
		t.Run(version.String(), func(t *testing.T) {
			m := newMachine(4)
			m.version = version
			backendtest.Run(t, backendtest.Harness{
				Open: func(ctx context.Context, g *group.Group) (backend.Backend, error) {
					return open(ctx, g, m.plain(g.Rank()))
				},
				WorldSizes: []int{1, 2, 4},
				Adoptable: func(_ backend.Backend, rank int, bytes int64) (device.Ptr, func() error, error) {
					p := m.memoryOf(rank, bytes, true)
					return p, func() error { m.drop(p); return nil }, nil
				},
				AdoptAlign: nccl.WindowAlignment, AllReduces: []string{plainForm, symmetricForm},
			})
			m.requireClean(t)
		})
	}
}

// fails opens the backend on size ranks, changed by change, and wants the same condition and text on each.
func fails(t *testing.T, m *machine, size int, change func(rank int, o *Options), is error, texts ...string) {
	t.Helper()
	for r, err := range backendtest.OnRanks(t, size, nil, func(ctx context.Context, g *group.Group) error {
		o := m.plain(g.Rank())
		change(g.Rank(), o)
		return withMemory(ctx, g, o, func(*Backend, *memory.Memory) error { return nil })
	}) {
		require.Error(t, err, "rank %d", r)
		if is != nil {
			assert.ErrorIs(t, err, is, "rank %d", r)
		}
		for _, text := range texts {
			assert.ErrorContains(t, err, text, "rank %d", r)
		}
	}
	m.requireClean(t)
}

// TestOpeningFails: what is wrong on one rank is an error on all that says what to do, and everything is closed.
func TestOpeningFails(t *testing.T) {
	load := func(lib *nccl.Library, err error) func(*nccl.Options) (*nccl.Library, error) {
		return func(*nccl.Options) (*nccl.Library, error) { return lib, err }
	}
	old := newMachine(1)
	old.version = 22707
	oldLibrary, err := nccl.New("/old/libnccl.so.2", old.library())
	require.NoError(t, err)
	for name, tt := range map[string]struct {
		change func(m *machine, o *Options)
		is     error // on the rank itself
		text   string
	}{
		"no library": {func(_ *machine, o *Options) {
			o.load = load(nil, &dl.LoadError{Library: "NCCL", Attempts: []dl.Attempt{{Path: "/nowhere"}}, Hint: "install NCCL"})
		}, errs.ErrUnavailable, "install NCCL"},
		"another library": {func(_ *machine, o *Options) {
			o.load = load(nil, &dl.SymbolError{Library: "NCCL (/lib/other.so)", Symbols: []string{"ncclGetVersion"},
				Hint: "NCCL 2.23.4"})
		}, errs.ErrUnsupported, "ncclGetVersion"},
		"windows without addresses": {func(_ *machine, o *Options) { o.load = load(oldLibrary, nil) }, errs.ErrUnsupported,
			"2.28.3 or newer"},
		"no such device": {func(_ *machine, o *Options) { o.Device = "7" }, errs.ErrInvalid, "0 to 1"},
		"bad policy": {func(_ *machine, o *Options) { o.Multicast = "perhaps" }, errs.ErrInvalid,
			"auto, on or off"},
		"bad kind of window": {func(_ *machine, o *Options) { o.Window = "round" }, errs.ErrInvalid, "plain or symmetric"},
		"windows switched off": {func(_ *machine, o *Options) {
			o.Getenv = func(name string) string { return map[string]string{"NCCL_WIN_ENABLE": "0"}[name] }
		}, errs.ErrUnsupported, "NCCL_WIN_ENABLE=0"},
		"virtual memory switched off": {func(_ *machine, o *Options) {
			o.Getenv = func(name string) string { return map[string]string{"NCCL_CUMEM_ENABLE": "0"}[name] }
		}, errs.ErrUnsupported, "NCCL_CUMEM_ENABLE=0"},
		"no virtual memory": {func(_ *machine, o *Options) {
			o.Driver.DeviceGetAttribute = func(v *int32, a cu.DeviceAttribute, d cu.DeviceOrdinal) cu.Result {
				if *v = 1; a == cu.AttrVMM {
					*v = 0
				}
				return cu.Success
			}
		}, errs.ErrUnsupported, "virtual memory management"},
		"old driver": {func(_ *machine, o *Options) { o.Driver.MemRetainAllocationHandle = nil }, errs.ErrUnsupported,
			"cuMemRetainAllocationHandle"},
		"multicast on": {func(_ *machine, o *Options) { o.Multicast = "on" }, errs.ErrUnsupported, "multicast is on"},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(2)
			failed := backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
				o := m.plain(g.Rank())
				if g.Rank() == 1 {
					tt.change(m, o)
				}
				return withMemory(ctx, g, o, func(*Backend, *memory.Memory) error { return nil })
			})
			for r, err := range failed {
				require.Error(t, err, "rank %d", r)
				assert.ErrorContains(t, err, tt.text)
			}
			assert.ErrorIs(t, failed[1], tt.is)
			m.requireClean(t)
		})
	}
}

func TestRanksMustFit(t *testing.T) {
	m := newMachine(3)
	fails(t, m, 3, func(rank int, o *Options) { o.Device = fmt.Sprint(rank % 2) }, errs.ErrInvalid, "on rank 0 and on rank 2",
		"share-device")
	fails(t, m, 2, func(rank int, o *Options) { o.Window = []string{plainWindow, symmetricWindow}[rank] }, errs.ErrMismatch,
		windowEnv, "symmetric")
	fails(t, m, 2, func(rank int, o *Options) {
		f := m.library()
		if rank == 1 {
			f.GetVersion = func(v *int32) nccl.Result { *v = 22803; return nccl.Success }
		}
		lib, err := nccl.New("/lib", f)
		o.load = func(*nccl.Options) (*nccl.Library, error) { return lib, err }
	}, errs.ErrMismatch, "2.28.3", "2.28.9", libraryEnv)
	m.requireClean(t)
}

// TestSilence: a library that says success and has made no window is found out, and the error lists what may be the reason.
func TestSilence(t *testing.T) {
	for name, handle := range map[string]nccl.WindowHandle{"nothing": 0, "memory of the host": 0x8000,
		"memory that is none": 1 << 50} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(2)
			m.silent = &handle
			fails(t, m, 2, func(_ int, o *Options) {
				o.Getenv = func(name string) string { return map[string]string{"NCCL_P2P_DISABLE": "1"}[name] }
			}, errs.ErrUnsupported, "no symmetric windows here", "NCCL_P2P_DISABLE=1", "NCCL_WIN_ENABLE is not set", "NCCL_CUMEM_ENABLE")
		})
	}
}

func TestPlainMemoryIsNoWindow(t *testing.T) {
	m := newMachine(2)
	m.cuMemOff = true
	fails(t, m, 2, func(int, *Options) {}, nil, "plain memory", "NCCL_CUMEM_ENABLE=0")
}

// TestAnotherStructure: a window whose structure is not as it is known is not used.
func TestAnotherStructure(t *testing.T) {
	for name, spoil := range map[string]func(b []byte){
		"no base":      func(b []byte) { clear(b[8:16]) },
		"no stride":    func(b []byte) { clear(b[24:28]) },
		"another rank": func(b []byte) { binary.LittleEndian.PutUint32(b[20:], 5) },
		"another team": func(b []byte) { binary.LittleEndian.PutUint32(b[16:], 0); binary.LittleEndian.PutUint32(b[20:], 1) },
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(2)
			m.apart = spoil
			fails(t, m, 2, func(int, *Options) {}, nil, "structure")
		})
	}
	t.Run("another place", func(t *testing.T) {
		m := newMachine(2)
		var elsewhere device.Ptr
		m.apart = func(b []byte) {
			if elsewhere.IsNil() {
				elsewhere, _ = m.allocate(0, 4*granule, true)
			}
			binary.LittleEndian.PutUint64(b[8:], uint64(elsewhere))
			binary.LittleEndian.PutUint32(b[24:], 0x7fff) // rank 1 then is where nothing is
		}
		failed := backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
			return withMemory(ctx, g, m.plain(g.Rank()), func(*Backend, *memory.Memory) error { return nil })
		})
		for _, err := range failed {
			require.ErrorContains(t, err, "does not show the memory that was registered")
		}
	})
}

// TestInitCanBeRepeated: an opening that failed half way, at any of NCCL's calls on any rank, is an error on all ranks, and the
// next one works.
func TestInitCanBeRepeated(t *testing.T) {
	for _, call := range []string{"ncclCommInitRankScalable", "ncclMemAlloc", "ncclCommWindowRegister",
		"ncclCommWindowDeregister"} {
		for _, victim := range []int{0, 1} {
			t.Run(fmt.Sprintf("%s/rank=%d", call, victim), func(t *testing.T) {
				m := newMachine(2)
				var failing atomic.Bool
				failing.Store(true)
				m.fail = func(c string, rank, _ int) nccl.Result {
					if failing.Load() && c == call && rank == victim {
						return nccl.SystemError
					}
					return nccl.Success
				}
				for r, err := range backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
					o := m.plain(g.Rank())
					o.KernelTimeout = 2 * time.Second
					_, err := New(ctx, g, o)
					if err == nil {
						return errors.New("opened")
					}
					if e := g.Barrier(ctx, "failed"); e != nil {
						return e
					}
					failing.Store(false)
					return errors.Join(withMemory(ctx, g, m.plain(g.Rank()), func(_ *Backend, mem *memory.Memory) error {
						return backendtest.TryWindow(ctx, mem, 4096)
					}), fmt.Errorf("first: %w", err))
				}) {
					require.ErrorContains(t, err, "first: ", "rank %d", r)
					assert.ErrorContains(t, err, call, "rank %d", r)
					assert.NotContains(t, err.Error(), "opened")
				}
				if call != "ncclCommWindowDeregister" { // what could not be deregistered is left, rightly
					m.requireClean(t)
				}
			})
		}
	}
}

// TestRankStaysAway: a rank that never comes to a call of NCCL's ends those that did after the timeout, and the communicator is
// aborted.
func TestRankStaysAway(t *testing.T) {
	for _, call := range []string{"ncclCommInitRankScalable", "ncclCommWindowRegister"} {
		t.Run(call, func(t *testing.T) {
			m := newMachine(2)
			m.absent = func(c string, rank int) bool { return c == call && rank == 1 }
			began := time.Now()
			for r, err := range backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
				o := m.plain(g.Rank())
				o.KernelTimeout = 200 * time.Millisecond
				return withMemory(ctx, g, o, func(*Backend, *memory.Memory) error { return nil })
			}) {
				require.Error(t, err, "rank %d", r)
				assert.ErrorIs(t, err, context.DeadlineExceeded, "rank %d", r)
			}
			assert.Less(t, time.Since(began), 20*time.Second)
			assert.Positive(t, m.aborted)
			m.requireClean(t)
		})
	}
}

// TestLossEndsWaiting: the loss of a member ends what NCCL waits for at once, with its name.
func TestLossEndsWaiting(t *testing.T) {
	m := newMachine(2)
	began := time.Now()
	failed := backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		o := m.plain(g.Rank())
		o.KernelTimeout = time.Minute
		b, err := New(ctx, g, o)
		if err != nil {
			return err
		}
		a, err := b.Allocate(ctx, 4096)
		if err := errors.Join(err, g.Barrier(ctx, "open")); err != nil {
			return err
		}
		if g.Rank() == 1 {
			for !m.inCall() && ctx.Err() == nil {
				time.Sleep(time.Millisecond)
			}
			g.Abort("it had enough")
			return errors.Join(a.Release(ctx), b.Close(ctx))
		}
		_, err = b.register(ctx, a.(*allocation).base, a.(*allocation).span)
		if !b.comm.Stuck() {
			err = errors.Join(err, errors.New("the communicator is not stuck"))
		}
		if _, e := b.Rendezvous(ctx, a); e == nil {
			err = errors.Join(err, errors.New("a rendezvous after the loss"))
		}
		return errors.Join(err, b.Close(ctx), a.Release(ctx))
	})
	require.ErrorIs(t, failed[0], errs.ErrPeerLost)
	assert.ErrorContains(t, failed[0], "rank 1")
	require.NoError(t, failed[1])
	assert.Less(t, time.Since(began), 20*time.Second)
	assert.Equal(t, 2, m.aborted)
}

// memoryOf makes memory outside of the backend.
func (m *machine) memoryOf(gpu int, bytes int64, virtual bool) device.Ptr {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	p, _ := m.allocate(gpu, bytes, virtual)
	return p
}

func (m *machine) drop(p device.Ptr) {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	m.free(p)
}

func TestRegister(t *testing.T) {
	m := newMachine(2)
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		return withMemory(ctx, g, m.plain(g.Rank()), func(b *Backend, mem *memory.Memory) error {
			p := m.memoryOf(g.Rank(), 4*granule, true)
			defer m.drop(p)
			// Each rank has its part elsewhere; the two parts share the window.
			first, err := mem.Register(ctx, p.Add(4096*int64(1+g.Rank())), granule, "")
			if err != nil {
				return err
			}
			second, err := mem.Register(ctx, p.Add(2*granule), granule, "")
			if err != nil {
				return err
			}
			w1, err := mem.Rendezvous(ctx, first, memory.Record{})
			if err != nil {
				return err
			}
			w2, err := mem.Rendezvous(ctx, second, memory.Record{})
			if err != nil {
				return err
			}
			err = errors.Join(backendtest.ExchangeBytes(ctx, mem, w1), backendtest.ExchangeBytes(ctx, mem, w2))
			if _, _, e := w1.Contiguous(0); !errors.Is(e, errs.ErrUnsupported) || !strings.Contains(e.Error(),
				"4096 on rank 0, 8192 on rank 1") {
				err = errors.Join(err, fmt.Errorf("contiguous view of different offsets: %w", e))
			}
			if _, _, e := w2.Contiguous(0); e != nil {
				err = errors.Join(err, e)
			}
			h1, at1, e1 := w1.Handle(5)
			h2, at2, e2 := w2.Handle(0)
			if h1 == 0 || h1 != h2 || at1 != 4096*int64(1+g.Rank())+5 || at2 != 2*granule {
				err = errors.Join(err, fmt.Errorf("handles %#x at %d and %#x at %d", h1, at1, h2, at2), e1, e2)
			}
			if len(b.windows) != 2 { // and that of the workspace
				err = errors.Join(err, fmt.Errorf("%d windows", len(b.windows)))
			}
			if _, found, offset, e := mem.Find(p.Add(2*granule + 77)); e != nil || found != w2 || offset != 77 {
				err = errors.Join(err, fmt.Errorf("found at %d: %w", offset, e))
			}
			return errors.Join(err, mem.Free(ctx, first), mem.Free(ctx, second))
		})
	}))
	m.requireClean(t)
}

func TestRegisterErrors(t *testing.T) {
	m := newMachine(2)
	backendtest.RequireAll(t, backendtest.OnRanks(t, 1, nil, func(ctx context.Context, g *group.Group) error {
		return withMemory(ctx, g, m.plain(0), func(b *Backend, mem *memory.Memory) error {
			virtual, plain, other := m.memoryOf(0, granule, true), m.memoryOf(0, granule, false), m.memoryOf(1, granule, true)
			defer m.drop(virtual)
			defer m.drop(plain)
			defer m.drop(other)
			m.Mu.Lock()
			private := *m.memory[virtual]
			private.prop.RequestedHandleTypes = 0
			m.memory[1<<60] = &private
			m.Mu.Unlock()
			defer func() {
				m.Mu.Lock()
				delete(m.memory, 1<<60)
				m.Mu.Unlock()
			}()
			var failed error
			want := func(p device.Ptr, bytes int64, texts ...string) {
				_, err := b.Register(ctx, p, bytes)
				var bad *cuda.MemoryError
				if !errors.As(err, &bad) || !errors.Is(err, errs.ErrInvalid) {
					failed = errors.Join(failed, fmt.Errorf("%s: not refused: %w", texts, err))
					return
				}
				for _, text := range texts {
					if !strings.Contains(err.Error(), text) {
						failed = errors.Join(failed, fmt.Errorf("%q lacks %q", err, text))
					}
				}
			}
			want(virtual.Add(100), granule, "begins 100 bytes after", "multiples of 4096", "100 bytes behind the end")
			want(plain.Add(16), 64, "cudaMalloc", "multiples of 4096")
			want(other, 64, "GPU with index 1")
			want(1<<50, 64, "never allocated")
			want(0x8000, 64, "memory of the host")
			want(1<<60, 64, "POSIX_FILE_DESCRIPTOR")
			for _, n := range []int64{0, -1} {
				if _, err := b.Register(ctx, virtual, n); !errors.Is(err, errs.ErrInvalid) {
					failed = errors.Join(failed, fmt.Errorf("%d bytes: %w", n, err))
				}
			}
			return failed
		})
	}))
	m.requireClean(t)
}

// TestRegistrationsMustFit: allocations of different sizes are refused on all ranks, before NCCL hears of them.
func TestRegistrationsMustFit(t *testing.T) {
	m := newMachine(2)
	for _, err := range backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		return withMemory(ctx, g, m.plain(g.Rank()), func(b *Backend, mem *memory.Memory) error {
			p := m.memoryOf(g.Rank(), granule*int64(1+g.Rank()), true)
			defer m.drop(p)
			a, err := mem.Register(ctx, p, 4096, "")
			if err != nil {
				return err
			}
			_, err = mem.Rendezvous(ctx, a, memory.Record{})
			return errors.Join(err, mem.Free(ctx, a))
		})
	}) {
		require.ErrorIs(t, err, errs.ErrMismatch)
		assert.ErrorContains(t, err, "size in bytes of the allocation")
		assert.ErrorContains(t, err, fmt.Sprint(2*granule))
	}
	m.requireClean(t)
}

// TestEveryWindowFails lets each of NCCL's calls fail once on one rank: all ranks get an error, everything is undone, and the
// next window works, but after a registration that only some came to.
func TestEveryWindowFails(t *testing.T) {
	for _, call := range []string{"ncclMemAlloc", "ncclCommWindowDeregister"} {
		m := newMachine(2)
		var failing atomic.Bool
		m.fail = func(c string, rank, _ int) nccl.Result {
			if c == call && rank == 1 && failing.CompareAndSwap(true, false) {
				return nccl.SystemError
			}
			return nccl.Success
		}
		backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
			return withMemory(ctx, g, m.plain(g.Rank()), func(b *Backend, mem *memory.Memory) error {
				if err := backendtest.WithWindow(ctx, mem, 64, nil); err != nil { // the workspace is there
					return err
				}
				if err := g.Barrier(ctx, "made"); err != nil {
					return err
				}
				failing.Store(true)
				if err := g.Barrier(ctx, "failing"); err != nil {
					return err
				}
				err := backendtest.WithWindow(ctx, mem, 64, nil)
				if (g.Rank() == 1 || call == "ncclMemAlloc") && err == nil {
					return errors.New("no error")
				}
				return backendtest.TryWindow(ctx, mem, 64)
			})
		}))
		if call != "ncclCommWindowDeregister" { // what could not be deregistered is left, rightly
			m.requireClean(t)
		}
	}
}

// TestFailedRegistration: where one rank's registration fails, the other's never ends, and both give the communicator up.
func TestFailedRegistration(t *testing.T) {
	m := newMachine(2)
	var failing atomic.Bool
	m.fail = func(c string, rank, _ int) nccl.Result {
		if c == "ncclCommWindowRegister" && rank == 1 && failing.CompareAndSwap(true, false) {
			return nccl.UnhandledCudaError
		}
		return nccl.Success
	}
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		o := m.plain(g.Rank())
		o.KernelTimeout = time.Minute // the rank that failed tells the other
		return withMemory(ctx, g, o, func(b *Backend, mem *memory.Memory) error {
			if err := backendtest.WithWindow(ctx, mem, 64, nil); err != nil {
				return err
			}
			failing.Store(true)
			if err := g.Barrier(ctx, "failing"); err != nil {
				return err
			}
			err := backendtest.WithWindow(ctx, mem, 64, nil)
			if err == nil || !strings.Contains(err.Error(), "ncclUnhandledCudaError") {
				return fmt.Errorf("registering: %w", err)
			}
			if again := backendtest.WithWindow(ctx, mem, 64, nil); !strings.Contains(fmt.Sprint(again), "given up") {
				return fmt.Errorf("registering again: %w", again)
			}
			return nil
		})
	}))
	m.requireClean(t)
}

func TestSubGroups(t *testing.T) {
	m := newMachine(3)
	backendtest.RequireAll(t, backendtest.OnRanks(t, 3, nil, func(ctx context.Context, g *group.Group) error {
		return withMemory(ctx, g, m.plain(g.Rank()), func(parent *Backend, mem *memory.Memory) error {
			sub := func(ranks []int, split bool) error {
				s, err := g.Sub(ctx, ranks)
				if err != nil {
					return err
				}
				env := &backend.Env{Group: s, Opened: parent.device, Parent: parent, Multicast: "off", KernelTimeout: 5 * time.Second,
					Getenv: func(string) string { return "" }, Logger: slog.New(slog.DiscardHandler)}
				o, err := options(env)
				if err != nil {
					return err
				}
				o.load = func(*nccl.Options) (*nccl.Library, error) { return parent.lib, nil }
				err = withMemory(ctx, s, o, func(b *Backend, mem *memory.Memory) error {
					if b.split != split || o.Library != "/fake/libnccl.so.2" {
						return fmt.Errorf("%v: split is %t, library %s", ranks, b.split, o.Library)
					}
					return backendtest.TryWindow(ctx, mem, 4096)
				})
				return errors.Join(err, s.Close(ctx))
			}
			if err := sub([]int{0, 1, 2}, true); err != nil {
				return err
			}
			if g.Rank() != 1 {
				if err := sub([]int{0, 2}, false); err != nil {
					return err
				}
			}
			return sub([]int{g.Rank()}, false)
		})
	}))
	assert.Equal(t, 3, m.split)
	m.requireClean(t)
}

func TestOptionsOfEnv(t *testing.T) {
	vars := map[string]string{libraryEnv: "/a", windowEnv: symmetricWindow}
	env := &backend.Env{Getenv: func(name string) string { return vars[name] }, Device: "2"}
	o, err := options(env)
	require.NoError(t, err)
	require.Equal(t, []string{"/a", symmetricWindow, "2"}, []string{o.Library, o.Window, o.Device})
	env.Options = map[string]string{"nccl-library": "/b"}
	env.Given = &Options{Window: plainWindow, Comm: 5}
	o, err = options(env)
	require.NoError(t, err)
	require.Equal(t, []any{"/b", plainWindow, "2", uintptr(5)}, []any{o.Library, o.Window, o.Device, o.Comm})
	env.Given, vars[windowEnv] = nil, "round"
	_, err = options(env)
	require.ErrorIs(t, err, errs.ErrInvalid)
	require.ErrorContains(t, err, `environment variable SYMMEM_NCCL_WINDOW is "round"; allowed: plain, symmetric`)
}

func TestGivenCommunicator(t *testing.T) {
	m := newMachine(2)
	lib, err := nccl.New("/fake/libnccl.so.2", m.library())
	require.NoError(t, err)
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		d, err := cuda.Open(&cuda.Options{Driver: m.driver(), LocalRank: g.Rank()})
		if err != nil {
			return err
		}
		for _, config := range []*nccl.Config{nil, {NonBlocking: true}} {
			comm, err := lib.NewComm(ctx, &nccl.CommOptions{Ranks: 2, Rank: g.Rank(),
				ID:     nccl.UniqueID{byte(1 + len(fmt.Sprint(config)))},
				Config: config, Scope: d.WithContext})
			if err != nil {
				return err
			}
			o := m.plain(g.Rank())
			o.Comm, o.Opened = uintptr(comm.Handle()), d
			use := func(b *Backend, mem *memory.Memory) error {
				if b.Comm() != uintptr(comm.Handle()) {
					return errors.New("another communicator")
				}
				return backendtest.TryWindow(ctx, mem, 4096)
			}
			if err := withMemory(ctx, g, o, use); err != nil {
				return err
			}
			// By the backend's name: what the program gives comes to the factory, and a sub-group has a communicator of its own.
			env := &backend.Env{Group: g, Given: o, LocalRank: 7, Multicast: "on", Logger: slog.New(slog.DiscardHandler), Getenv: func(string) string { return "" }}
			opened, err := factory{}.Open(ctx, env)
			if err != nil {
				return err
			}
			b := opened.(*Backend)
			err = backendtest.WithMemory(ctx, g, b, func(mem *memory.Memory) error {
				inner := *env
				inner.Opened, inner.Parent = b.Device(), b
				s, err := g.Sub(ctx, []int{0, 1})
				if err != nil {
					return err
				}
				inner.Group = s
				sub, err := factory{}.Open(ctx, &inner)
				if err != nil {
					return errors.Join(err, s.Close(ctx))
				}
				if sub.(*Backend).Comm() == uintptr(comm.Handle()) {
					err = errors.New("the sub-group has the communicator of the whole group")
				}
				return errors.Join(err, use(b, mem), sub.Close(ctx), s.Close(ctx))
			})
			if err != nil {
				return err
			}
			if err := comm.Destroy(ctx); err != nil {
				return err
			}
		}
		return d.Close()
	}))
	m.requireClean(t)

	// One that does not fit is refused on every rank, and stays.
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		d, err := cuda.Open(&cuda.Options{Driver: m.driver(), LocalRank: g.Rank()})
		if err != nil {
			return err
		}
		comm, err := lib.NewComm(ctx, &nccl.CommOptions{Ranks: 1, ID: nccl.UniqueID{byte(100 + g.Rank())}, Scope: d.WithContext})
		if err != nil {
			return err
		}
		o := m.plain(g.Rank())
		o.Comm, o.Opened = uintptr(comm.Handle()), d
		_, err = New(ctx, g, o)
		if err == nil || !strings.Contains(err.Error(), "rank 0 of 1 on GPU 0") {
			return fmt.Errorf("a communicator of one: %w", err)
		}
		return errors.Join(comm.Destroy(ctx), d.Close())
	}))
	m.requireClean(t)
}

// reduceBy prepares the library's all-reduce of n f32 and runs it.
func reduceBy(ctx context.Context, g *group.Group, mem *memory.Memory, form string, n int64,
	run func(p backend.PreparedAllReduce, s device.Stream) error) error {
	return backendtest.WithWindow(ctx, mem, 4*n, func(w *memory.Window) error {
		in := memory.Place{Window: w}
		p, err := mem.PrepareAllReduce(ctx, form, in, in, n, 4*n, "f32", "sum")
		if err := g.Vote(ctx, "plan", err); err != nil {
			return err
		}
		s, err := mem.Device().NewStream()
		if err != nil {
			return err
		}
		return errors.Join(run(p, s), s.Close(), p.Close())
	})
}

func TestAllReduce(t *testing.T) {
	for _, form := range []string{plainForm, symmetricForm} {
		t.Run(form, func(t *testing.T) {
			m := newMachine(3)
			backendtest.RequireAll(t, backendtest.OnRanks(t, 3, nil, func(ctx context.Context, g *group.Group) error {
				return withMemory(ctx, g, m.plain(g.Rank()), func(b *Backend, mem *memory.Memory) error {
					for range 2 { // the second time, all is there already
						if err := reduceBy(ctx, g, mem, form, 1000, func(p backend.PreparedAllReduce, s device.Stream) error {
							at := device.Ptr(p.(*reduction).calls[0].Send)
							mine := binary.LittleEndian.AppendUint32(nil, []uint32{0x3f800000, 0x40000000, 0x40400000}[g.Rank()]) // 1, 2, 3
							if err := mem.Device().CopyFromHost(at, mine); err != nil {
								return err
							}
							if err := errors.Join(p.Enqueue(s), s.Synchronize(ctx)); err != nil {
								return err
							}
							got := make([]byte, 4)
							if err := mem.Device().CopyToHost(got, at); err != nil {
								return err
							}
							if sum := binary.LittleEndian.Uint32(got); sum != 0x40c00000 { // 6
								return fmt.Errorf("1, 2 and 3 make %#x", sum)
							}
							return nil
						}); err != nil {
							return err
						}
					}
					if len(b.reducers) != 1 || len(b.reducers[form].windows) != 0 {
						return fmt.Errorf("%d reducers, and windows of memory that was freed", len(b.reducers))
					}
					return nil
				})
			}))
			assert.Equal(t, 3, m.split, "one communicator for all plans of a form")
			m.requireClean(t)
		})
	}
}

func TestAllReduceErrors(t *testing.T) {
	m := newMachine(2)
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		return withMemory(ctx, g, m.plain(g.Rank()), func(b *Backend, mem *memory.Memory) error {
			return backendtest.WithWindow(ctx, mem, 4096, func(w *memory.Window) error {
				var failed error
				want := func(r backend.AllReduce, is error, text string) {
					r.In, r.Out = w.Allocation(), w.Allocation()
					_, err := b.PrepareAllReduce(ctx, &r)
					if !errors.Is(err, is) || !strings.Contains(err.Error(), text) {
						failed = errors.Join(failed, fmt.Errorf("%+v: %w", r, err))
					}
				}
				want(backend.AllReduce{Name: plainForm, Count: 1, DType: "i16", Op: "sum"}, errs.ErrUnsupported, "no i16")
				want(backend.AllReduce{Name: plainForm, Count: 1, DType: "f32", Op: "xor"}, errs.ErrUnsupported, "no operation xor")
				want(backend.AllReduce{Name: "ring", Count: 1, DType: "f32", Op: "sum"}, errs.ErrUnsupported, "nccl_symmetric")
				want(backend.AllReduce{Name: symmetricForm, Count: 1, DType: "i32", Op: "sum"}, errs.ErrUnsupported, "use nccl")
				want(backend.AllReduce{Name: symmetricForm, Count: 1, DType: "f32", Op: "max"}, errs.ErrUnsupported, "use nccl")
				want(backend.AllReduce{Name: plainForm, Count: 0, DType: "f32", Op: "sum"}, errs.ErrInvalid, "count")
				// Places that differ are refused on both ranks by the form that cannot do with that.
				want(backend.AllReduce{Name: symmetricForm, Count: 1, DType: "f32", Op: "sum", OutOffset: int64(64 * g.Rank())},
					errs.ErrMismatch, "use algorithm nccl")
				p, err := b.PrepareAllReduce(ctx, &backend.AllReduce{Name: plainForm, In: w.Allocation(), Out: w.Allocation(), OutOffset: int64(64 * g.Rank()),
					Count: 1, DType: "f32", Op: "sum"})
				if err != nil {
					return errors.Join(failed, err)
				}
				other, err := cuda.Open(&cuda.Options{Driver: b.drv, LocalRank: g.Rank()})
				if err != nil {
					return errors.Join(failed, err)
				}
				s, err := other.NewStream()
				if err != nil {
					return errors.Join(failed, err)
				}
				if err := p.Enqueue(s); !errors.Is(err, errs.ErrInvalid) {
					failed = errors.Join(failed, fmt.Errorf("another device's stream: %w", err))
				}
				return errors.Join(failed, s.Close(), other.Close(), p.Close())
			})
		})
	}))
	m.requireClean(t)
}

// TestOddPlaces: what NCCL would reduce wrongly is refused, on all ranks alike.
func TestOddPlaces(t *testing.T) {
	for _, version := range []nccl.Version{22809, 23003} {
		m := newMachine(2)
		m.version = version
		backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
			return withMemory(ctx, g, m.plain(g.Rank()), func(b *Backend, mem *memory.Memory) error {
				return backendtest.WithWindow(ctx, mem, 4096, func(w *memory.Window) error {
					for _, at := range []int64{0, 2} {
						refused := at == 2 && version < 23003
						for _, form := range []string{plainForm, symmetricForm} {
							_, err := b.PrepareAllReduce(ctx, &backend.AllReduce{Name: form, In: w.Allocation(), InOffset: at, Out: w.Allocation(), OutOffset: at, Count: 8,
								DType: "f16", Op: "sum"})
							if refused && form == symmetricForm {
								if !errors.Is(err, errs.ErrUnsupported) || !strings.Contains(err.Error(), "2.30.3") {
									return fmt.Errorf("%s at %d: %w", form, at, err)
								}
							} else if err != nil {
								return fmt.Errorf("%s at %d: %w", form, at, err)
							}
						}
					}
					return nil
				})
			})
		}))
		m.requireClean(t)
	}
}

// TestOneRankNeedsNoWindow: the versions that make none for a rank that is alone serve it all the same.
func TestOneRankNeedsNoWindow(t *testing.T) {
	m := newMachine(1)
	m.version = 22803
	backendtest.RequireAll(t, backendtest.OnRanks(t, 1, nil, func(ctx context.Context, g *group.Group) error {
		return withMemory(ctx, g, m.plain(0), func(b *Backend, mem *memory.Memory) error {
			if err := reduceBy(ctx, g, mem, symmetricForm, 10, func(p backend.PreparedAllReduce,
				s device.Stream) error {
				return p.Enqueue(s)
			}); err != nil {
				return err
			}
			return backendtest.WithWindow(ctx, mem, 4096, func(w *memory.Window) error {
				if _, _, err := w.Handle(0); !errors.Is(err, errs.ErrUnsupported) {
					return fmt.Errorf("the handle of no window: %w", err)
				}
				return backendtest.ExchangeBytes(ctx, mem, w)
			})
		})
	}))
	o := m.plain(0)
	o.fill()
	l := examine(t.Context(), o)
	assert.Equal(t, "usable", l.State, l.Reason)
	m.requireClean(t)
}

// TestLossEndsAllReduce: a rank in NCCL's all-reduce is freed when another is lost, with that as the error.
func TestLossEndsAllReduce(t *testing.T) {
	m := newMachine(2)
	var inside sync.WaitGroup
	inside.Add(1)
	failed := backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		b, err := New(ctx, g, m.plain(g.Rank()))
		if err != nil {
			return err
		}
		mem := memory.New(b, g, &memory.Options{Channels: 2})
		err = reduceBy(ctx, g, mem, plainForm, 10, func(p backend.PreparedAllReduce, s device.Stream) error {
			if g.Rank() == 1 {
				inside.Wait()
				time.Sleep(20 * time.Millisecond)
				g.Abort("it had enough")
				return nil
			}
			inside.Done()
			return p.Enqueue(s)
		})
		if e := mem.Close(ctx); e != nil && !errors.Is(e, errs.ErrPeerLost) {
			err = errors.Join(err, e)
		}
		return err
	})
	require.ErrorIs(t, failed[0], errs.ErrPeerLost)
	assert.ErrorContains(t, failed[0], "rank 1")
	assert.Empty(t, m.comms)
}

// TestLossIsTheOutcome: when kernels of NCCL's were ended because a rank is lost, the stream says so, though they report
// nothing.
func TestLossIsTheOutcome(t *testing.T) {
	m := newMachine(1)
	backendtest.RequireAll(t, backendtest.OnRanks(t, 1, nil, func(ctx context.Context, g *group.Group) error {
		return withMemory(ctx, g, m.plain(0), func(b *Backend, mem *memory.Memory) error {
			return reduceBy(ctx, g, mem, plainForm, 10, func(p backend.PreparedAllReduce, s device.Stream) error {
				if err := p.Enqueue(s); err != nil {
					return err
				}
				m.Mu.Lock()
				m.hangs = true
				m.Mu.Unlock()
				if err := b.giveUpAll(ctx, fmt.Errorf("rank 7: %w", errs.ErrPeerLost)); err != nil {
					return err
				}
				if err := s.Synchronize(ctx); !errors.Is(err, errs.ErrPeerLost) || !strings.Contains(err.Error(), "rank 7") {
					return fmt.Errorf("after the loss: %w", err)
				}
				return s.Synchronize(ctx) // it is told once
			})
		})
	}))
	m.requireClean(t)
}

// TestAsyncErrors: what NCCL reports by itself ends the library's all-reduces, and is their error.
func TestAsyncErrors(t *testing.T) {
	m := newMachine(1)
	backendtest.RequireAll(t, backendtest.OnRanks(t, 1, nil, func(ctx context.Context, g *group.Group) error {
		return withMemory(ctx, g, m.plain(0), func(b *Backend, mem *memory.Memory) error {
			return reduceBy(ctx, g, mem, plainForm, 10, func(p backend.PreparedAllReduce, s device.Stream) error {
				m.Mu.Lock()
				m.comms[b.reducers[plainForm].comm.Handle()].result = nccl.SystemError
				m.Mu.Unlock()
				for range 200 {
					if err := p.Enqueue(s); err != nil {
						if !errors.Is(err, errs.ErrClosed) || !strings.Contains(err.Error(), "ncclSystemError") {
							return fmt.Errorf("after it was reported: %w", err)
						}
						if err := s.Synchronize(ctx); err == nil || !strings.Contains(err.Error(), "ncclSystemError") {
							return fmt.Errorf("the stream with the runs: %w", err)
						}
						return s.Synchronize(ctx) // it is told once
					}
					time.Sleep(10 * time.Millisecond)
				}
				return errors.New("nobody noticed")
			})
		})
	}))
	m.requireClean(t)
}

// TestAsyncErrorOfOneRank: what NCCL reports on one rank alone ends the run that the others wait in, and they say whose it was.
func TestAsyncErrorOfOneRank(t *testing.T) {
	m := newMachine(2)
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		return withMemory(ctx, g, m.plain(g.Rank()), func(b *Backend, mem *memory.Memory) error {
			return reduceBy(ctx, g, mem, plainForm, 10, func(p backend.PreparedAllReduce, s device.Stream) error {
				if g.Rank() == 1 {
					m.Mu.Lock()
					m.comms[b.reducers[plainForm].comm.Handle()].result = nccl.SystemError
					m.Mu.Unlock()
					for b.reducers[plainForm].given() == nil && ctx.Err() == nil {
						time.Sleep(10 * time.Millisecond)
					}
					return ctx.Err() // it takes no part in the run
				}
				err := errors.Join(p.Enqueue(s), s.Synchronize(ctx))
				if err == nil || !strings.Contains(err.Error(), "ncclSystemError") || !strings.Contains(err.Error(), "rank 1") {
					return fmt.Errorf("the run that rank 1 has left: %w", err)
				}
				return nil
			})
		})
	}))
	m.requireClean(t)
}

// TestGivenUpByOne: when one rank has given up the communicator of a form, the next plan makes a new one on all.
func TestGivenUpByOne(t *testing.T) {
	for _, form := range []string{plainForm, symmetricForm} {
		m := newMachine(2)
		backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
			return withMemory(ctx, g, m.plain(g.Rank()), func(b *Backend, mem *memory.Memory) error {
				run := func(p backend.PreparedAllReduce, s device.Stream) error { return p.Enqueue(s) }
				if err := reduceBy(ctx, g, mem, form, 10, run); err != nil {
					return err
				}
				if g.Rank() == 1 {
					if err := b.giveUpAll(ctx, errors.New("a fault")); err != nil {
						return err
					}
				}
				return reduceBy(ctx, g, mem, form, 10, run)
			})
		}))
		assert.Equal(t, 4, m.split)
		m.requireClean(t)
	}
}

// TestWarmUpFails: an all-reduce that cannot be run is an error of the plan on all ranks, and the next plan works.
func TestWarmUpFails(t *testing.T) {
	for _, call := range []string{"ncclAllReduce", "ncclCommSplit", "ncclMemAlloc"} {
		m := newMachine(2)
		var failing atomic.Bool
		m.fail = func(c string, rank, _ int) nccl.Result {
			if c == call && rank == 1 && failing.CompareAndSwap(true, false) {
				return nccl.SystemError
			}
			return nccl.Success
		}
		backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
			o := m.plain(g.Rank())
			o.KernelTimeout = 2 * time.Second
			return withMemory(ctx, g, o, func(b *Backend, mem *memory.Memory) error {
				return backendtest.WithWindow(ctx, mem, 64, func(w *memory.Window) error {
					prepare := func() error {
						in := memory.Place{Window: w}
						_, err := mem.PrepareAllReduce(ctx, plainForm, in, in, 10, 40, "f32", "sum")
						return err
					}
					if err := g.Barrier(ctx, "before"); err != nil {
						return err
					}
					failing.Store(true)
					if err := g.Barrier(ctx, "failing"); err != nil {
						return err
					}
					if err := prepare(); err == nil {
						return errors.New("no error")
					}
					if call == "ncclCommSplit" {
						return nil // the communicator is given up with the call that the others made
					}
					return prepare()
				})
			})
		}))
		m.requireClean(t)
	}
}

// TestNoMemoryToTry: a plan for whose trial one rank has no memory left is ErrNoMemory on all ranks, though NCCL knows no such result.
func TestNoMemoryToTry(t *testing.T) {
	m := newMachine(2)
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		return withMemory(ctx, g, m.plain(g.Rank()), func(_ *Backend, mem *memory.Memory) error {
			return backendtest.WithWindow(ctx, mem, 64, func(w *memory.Window) error {
				use := func(bytes int64) {
					m.Mu.Lock()
					defer m.Mu.Unlock()
					m.used[g.Rank()] += bytes
				}
				in := memory.Place{Window: w}
				prepare := func() error {
					p, err := mem.PrepareAllReduce(ctx, plainForm, in, in, 10, 40, "f32", "sum")
					if err == nil {
						err = p.Close()
					}
					return err
				}
				var others int64 // all that is free
				if g.Rank() == 1 {
					m.Mu.Lock()
					others = fakecuda.TotalMemory - m.used[1]
					m.Mu.Unlock()
				}
				use(others)
				err := prepare()
				use(-others)
				if !errors.Is(err, errs.ErrNoMemory) || !strings.Contains(err.Error(), "0 of 1073741824 bytes are free") {
					return fmt.Errorf("a plan without memory to try it: %w", err)
				}
				return prepare()
			})
		})
	}))
	m.requireClean(t)
}

// TestLittleMemoryLeft: memory comes in whole granules, so that less than one that is free is none, also for who asks for less than that.
func TestLittleMemoryLeft(t *testing.T) {
	m := newMachine(1)
	backendtest.RequireAll(t, backendtest.OnRanks(t, 1, nil, func(ctx context.Context, g *group.Group) error {
		return withMemory(ctx, g, m.plain(0), func(b *Backend, _ *memory.Memory) error {
			var others int64
			m.set(func() {
				others = fakecuda.TotalMemory - m.used[0] - granule/2
				m.used[0] += others
			})
			_, err := b.Allocate(ctx, granule/4)
			m.set(func() { m.used[0] -= others })
			if !errors.Is(err, errs.ErrNoMemory) {
				return fmt.Errorf("a quarter of a granule where there is half of one: %w", err)
			}
			return nil
		})
	}))
	m.requireClean(t)
}

// TestEvents: each registration is an event, with communicator, address, size and milliseconds.
func TestEvents(t *testing.T) {
	m := newMachine(1)
	var said bytes.Buffer
	backendtest.RequireAll(t, backendtest.OnRanks(t, 1, nil, func(ctx context.Context, g *group.Group) error {
		o := m.plain(0)
		o.Logger = slog.New(slog.NewTextHandler(&said, nil))
		return withMemory(ctx, g, o, func(b *Backend, mem *memory.Memory) error {
			if err := backendtest.WithWindow(ctx, mem, 64, nil); err != nil {
				return err
			}
			said.Reset()
			return backendtest.WithWindow(ctx, mem, 4*granule, func(w *memory.Window) error {
				for _, part := range []string{`msg="window registered"`, "communicator=" + b.handle(),
					"address=" + w.Allocation().Ptr().String(),
					fmt.Sprintf("bytes=%d", 4*granule), "milliseconds=", "backend=nccl", "rank=0"} {
					if !strings.Contains(said.String(), part) {
						return fmt.Errorf("%q lacks %s", said.String(), part)
					}
				}
				return nil
			})
		})
	}))
}

func TestDeviceCommunicator(t *testing.T) {
	m := newMachine(2)
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		return withMemory(ctx, g, m.plain(g.Rank()), func(b *Backend, mem *memory.Memory) error {
			d, err := b.NewDevComm(ctx, 4)
			if err != nil {
				return err
			}
			if len(d.Bytes()) != 200 || d.Bytes()[0] != 1 {
				return fmt.Errorf("%d bytes", len(d.Bytes()))
			}
			if err := d.Close(ctx); err != nil {
				return err
			}
			if err := d.Close(ctx); !errors.Is(err, errs.ErrClosed) {
				return fmt.Errorf("closing twice: %w", err)
			}
			if _, err := b.NewDevComm(ctx, -1); !errors.Is(err, errs.ErrInvalid) {
				return fmt.Errorf("-1 barriers: %w", err)
			}
			_, err = b.NewDevComm(ctx, 1) // which is left to the backend
			return err
		})
	}))
	m.requireClean(t)
}

// TestDeviceCommunicatorsAreAlike: ranks that ask for other numbers of barriers all hear of it, before NCCL is asked, whose communicator goes on. There is none
// once the backend was closed.
func TestDeviceCommunicatorsAreAlike(t *testing.T) {
	m := newMachine(2)
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		var closed *Backend
		err := withMemory(ctx, g, m.plain(g.Rank()), func(b *Backend, mem *memory.Memory) error {
			closed = b
			for _, barriers := range [][]int{{4, 8}, {4, -1}} {
				if _, err := b.NewDevComm(ctx, barriers[g.Rank()]); !errors.Is(err, errs.ErrMismatch) {
					return fmt.Errorf("%v barriers: %w", barriers, err)
				}
			}
			d, err := b.NewDevComm(ctx, 4)
			if err != nil {
				return err
			}
			return d.Close(ctx)
		})
		if err != nil {
			return err
		}
		if _, err := closed.NewDevComm(ctx, 4); !errors.Is(err, errs.ErrClosed) {
			return fmt.Errorf("of a backend that was closed: %w", err)
		}
		return nil
	}))
	m.requireClean(t)
}

// TestMulticastIsNotLookedUp where the policy forbids it.
func TestMulticastIsNotLookedUp(t *testing.T) {
	for setting, env := range map[string]string{"off": "", "auto": "0"} {
		m := newMachine(2)
		var asked atomic.Bool
		backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
			o := m.plain(g.Rank())
			o.Multicast = setting
			o.Getenv = func(name string) string { return map[string]string{"NCCL_NVLS_ENABLE": env}[name] }
			load := o.load
			o.load = func(lo *nccl.Options) (*nccl.Library, error) {
				if lo.Multicast {
					asked.Store(true)
				}
				return load(lo)
			}
			return withMemory(ctx, g, o, func(b *Backend, mem *memory.Memory) error {
				if c := b.Capabilities(); c.Multicast || c.Why["multicast"] == "" {
					return fmt.Errorf("capabilities: %+v", c)
				}
				return backendtest.WithWindow(ctx, mem, 64, func(w *memory.Window) error {
					if _, err := w.Multicast(0); !errors.Is(err, errs.ErrUnsupported) || !strings.Contains(err.Error(), "off") {
						return fmt.Errorf("multicast: %w", err)
					}
					return nil
				})
			})
		}))
		assert.False(t, asked.Load(), "the library would have been loaded with its multicast")
		m.requireClean(t)
	}
}

func TestLibraries(t *testing.T) {
	m := newMachine(2)
	find := func(l backend.Library, name string) string {
		for _, d := range l.Details {
			if d.Name == name {
				return d.Value
			}
		}
		return ""
	}
	o := m.plain(0)
	o.fill()
	l := examine(t.Context(), o)
	assert.Equal(t, "usable", l.State, l.Reason)
	assert.Equal(t, "2.28.9", l.Version)
	assert.Equal(t, "/fake/libnccl.so.2", l.Path)
	assert.Contains(t, find(l, "symmetric windows"), "yes")
	assert.Contains(t, find(l, "peer access"), "between all")
	assert.Contains(t, find(l, "functions that it lacks"), "ncclGetPeerDevicePointer")

	o.Driver.DeviceCanAccessPeer = func(can *int32, a, b cu.DeviceOrdinal) cu.Result { *can = 0; return cu.Success }
	o.Getenv = func(name string) string { return map[string]string{"NCCL_WIN_ENABLE": "0"}[name] }
	l = examine(t.Context(), o)
	assert.Equal(t, "unusable", l.State)
	assert.Contains(t, l.Reason, "NCCL_WIN_ENABLE=0")
	assert.Equal(t, "0", find(l, "NCCL_WIN_ENABLE"))
	assert.Contains(t, find(l, "peer access"), "0 and 1")
	assert.Contains(t, find(l, "symmetric windows"), "no: ")

	m.version = 22707
	l = examine(t.Context(), o)
	assert.Equal(t, "unusable", l.State)
	assert.Contains(t, l.Reason, "2.28.3")

	o.load = func(*nccl.Options) (*nccl.Library, error) {
		return nil, &dl.LoadError{Library: "NCCL", Attempts: []dl.Attempt{{Path: "libnccl.so.2"}, {Path: "/a/libnccl.so.2"}}}
	}
	l = examine(t.Context(), o)
	assert.Equal(t, "missing", l.State)
	assert.Equal(t, []string{"libnccl.so.2", "/a/libnccl.so.2"}, l.Tried)
	assert.NotEmpty(t, l.Fix)
	m.requireClean(t)
}

func TestProbe(t *testing.T) {
	m := newMachine(1)
	o := m.plain(0)
	o.fill()
	c, err := probe(o)
	require.NoError(t, err)
	assert.True(t, c.PeerPointers && c.Contiguous && c.Register && c.RanksInOneProcess && c.Graphs && c.Transfers)
	assert.True(t, c.SeveralHosts && c.OnRequest)
	assert.False(t, c.Multicast)
	m.version = 22304
	_, err = probe(o)
	require.ErrorIs(t, err, errs.ErrUnsupported)
	m.requireClean(t)
}
