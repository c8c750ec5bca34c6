package native

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
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
	"github.com/symmem/symmem/memory"
)

// onGPU returns the options of a rank of a real machine. Multicast is never tried.
func onGPU(rank int) *Options {
	return &Options{LocalRank: rank, ShareDevice: true, Multicast: "off", KernelTimeout: 30 * time.Second}
}

func TestConformanceOnGPU(t *testing.T) {
	t.Logf("%d GPUs", gpus(t))
	backendtest.Run(t, backendtest.Harness{
		Open: func(ctx context.Context, g *group.Group) (backend.Backend, error) {
			return New(ctx, g, onGPU(g.Rank()))
		},
		WorldSizes: []int{1, 2, 4},
		Adoptable:  adoptable("virtual"), AdoptAlign: adoptAlign,
	})
}

func TestProbe(t *testing.T) {
	gpus(t)
	began := time.Now()
	c, err := factory{}.Probe(t.Context(), &backend.Env{Multicast: "off"})
	require.NoError(t, err)
	t.Logf("took %v: %s; %v", time.Since(began).Round(time.Millisecond), c, c.Why)
	assert.True(t, c.PeerPointers && c.Contiguous && c.Register && c.RanksInOneProcess)
	assert.False(t, c.Multicast)
	_, err = factory{}.Probe(t.Context(), &backend.Env{Multicast: "off", Device: "99"})
	assert.ErrorIs(t, err, errs.ErrInvalid)
}

// virtualSize returns how many bytes of addresses this process has.
func virtualSize() (int64, error) {
	f, err := os.Open("/proc/self/status")
	if err != nil {
		return 0, err
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if rest, ok := strings.CutPrefix(lines.Text(), "VmSize:"); ok {
			kb, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 10, 64)
			return kb << 10, err
		}
	}
	return 0, errors.New("no VmSize in /proc/self/status")
}

// TestThousandRoundsOnGPU: memory, addresses and descriptors are the same after many rounds.
func TestThousandRoundsOnGPU(t *testing.T) {
	count := gpus(t)
	size := max(2, min(count, 4))
	type state struct {
		free, addresses int64
		files           int
	}
	states := make([][2]state, size)
	backendtest.RequireAll(t, backendtest.OnRanks(t, size, nil, func(ctx context.Context, g *group.Group) error {
		return withMemory(ctx, g, onGPU(g.Rank()), func(b *Backend, m *memory.Memory) error {
			rounds := func(n int) error {
				for i := range n {
					if err := backendtest.WithWindow(ctx, m, int64(1+i%7)*granule, nil); err != nil {
						return err
					}
				}
				return nil
			}
			if err := rounds(20); err != nil {
				return err
			}
			look := func() (s state, err error) {
				if err := g.Barrier(ctx, "before looking"); err != nil {
					return s, err
				}
				if s.free, _, err = b.device.MemInfo(); err != nil {
					return s, err
				}
				if g.Rank() == 0 {
					var filesErr error
					s.addresses, err = virtualSize()
					s.files, filesErr = backendtest.OpenFiles()
					err = errors.Join(err, filesErr)
				}
				return s, errors.Join(err, g.Barrier(ctx, "after looking"))
			}
			before, err := look()
			if err != nil {
				return err
			}
			began := time.Now()
			if err := rounds(1000); err != nil {
				return err
			}
			if g.Rank() == 0 {
				t.Logf("%d goroutines: 1000 rounds took %v", size, time.Since(began))
			}
			after, err := look()
			states[g.Rank()] = [2]state{before, after}
			return err
		})
	}))
	for r, s := range states {
		t.Logf("rank %d: %+v before, %+v after", r, s[0], s[1])
		assert.Equal(t, s[0].free, s[1].free, "free memory on rank %d", r)
	}
	assert.Equal(t, states[0][0].files, states[0][1].files)
	// The Go heap and the driver's own tables may grow a little; a leak of one range a round would be 2 GiB and more.
	assert.LessOrEqual(t, states[0][1].addresses-states[0][0].addresses, int64(1<<30))
}

func TestOutOfMemoryOnGPU(t *testing.T) {
	gpus(t)
	backendtest.RequireAll(t, backendtest.OnRanks(t, 1, nil, func(ctx context.Context, g *group.Group) error {
		return withMemory(ctx, g, onGPU(0), func(b *Backend, m *memory.Memory) error {
			free, total, err := b.device.MemInfo()
			if err != nil {
				return err
			}
			for _, n := range []int64{1 << 50, total + 1, total - 1} {
				_, err := m.Allocate(ctx, n, "")
				if !errors.Is(err, errs.ErrNoMemory) {
					return fmt.Errorf("%d bytes: %w", n, err)
				}
				t.Log(err)
			}
			most, err := m.Allocate(ctx, free-1<<30, "")
			if err != nil {
				return err
			}
			if _, err := m.Allocate(ctx, 2<<30, ""); !errors.Is(err, errs.ErrNoMemory) {
				return fmt.Errorf("more than is left: %w", err)
			}
			if err := backendtest.TryWindow(ctx, m, 64<<20); err != nil {
				return fmt.Errorf("a smaller allocation: %w", err)
			}
			return m.Free(ctx, most)
		})
	}))
}

func TestRegisterOnGPU(t *testing.T) {
	count := gpus(t)
	backendtest.RequireAll(t, backendtest.OnRanks(t, max(2, min(count, 4)), nil, func(ctx context.Context, g *group.Group) error {
		return withMemory(ctx, g, onGPU(g.Rank()), func(b *Backend, m *memory.Memory) error {
			for _, kind := range []string{"virtual", "legacy"} {
				if err := adoptAll(ctx, b, m, kind); err != nil {
					return err
				}
			}
			return nil
		})
	}))
}

func TestRegisterErrorsOnGPU(t *testing.T) {
	count := gpus(t)
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
			var failed error
			for _, kind := range []string{"virtual", "legacy"} {
				p, free, err := foreignMemory(b, kind, 4*granule)
				if err != nil {
					return err
				}
				failed = errors.Join(failed, want(kind+" odd", p.Add(8), 64, "not a multiple of 16"),
					want(kind+" too large", p.Add(granule), 4*granule, "behind the end"), free(), want(kind+" freed", p, 64, "it was freed"))
			}
			failed = errors.Join(failed, want("nothing", 1<<40, 64, "never allocated"))

			// Two allocations side by side are two.
			var u undo
			err := b.device.WithContext(func() error {
				base, err := reserve(b.drv, 2*granule, granule, &u)
				for i := int64(0); i < 2 && err == nil; i++ {
					var h cu.MemHandle
					if h, err = create(b.drv, granule, &b.found.prop, &u); err == nil {
						if err = mapAt(b.drv, base.Add(i*granule), granule, h, &u); err == nil {
							err = allow(b.device, base.Add(i*granule), granule)
						}
					}
				}
				if err != nil {
					return err
				}
				return errors.Join(want("two allocations", base.Add(granule-64), 128, "behind the end"),
					adoptOnly(ctx, b, base.Add(granule), granule))
			})
			failed = errors.Join(failed, err, b.device.WithContext(u.run))

			private := b.found.prop
			private.RequestedHandleTypes = 0
			twin := &Backend{device: b.device, drv: b.drv, granularity: granule, found: &finding{prop: private}}
			a := &allocation{backend: twin, span: granule}
			if err := b.device.WithContext(a.make); err != nil {
				return errors.Join(failed, err)
			}
			failed = errors.Join(failed, want("private", a.ptr, 64, "POSIX_FILE_DESCRIPTOR"), a.Release(ctx))

			if count > 1 {
				other, err := cuda.Open(&cuda.Options{Driver: b.drv, Device: "1"})
				if err != nil {
					return err
				}
				p, err := other.Alloc(granule)
				if err != nil {
					return err
				}
				failed = errors.Join(failed, want("another GPU", p, 64, "this rank's is"), other.Close())
			}
			return failed
		})
	}))
}

// adoptOnly registers memory and lets go of it.
func adoptOnly(ctx context.Context, b *Backend, p device.Ptr, bytes int64) error {
	a, err := b.Register(ctx, p, bytes)
	if err != nil {
		return err
	}
	return a.Release(ctx)
}

// TestEnqueueingDoesNotWaitOnGPU: the first signals, waits and barriers of a new group return although a host function holds the stream
// up, for which the driver waits when it loads kernels.
func TestEnqueueingDoesNotWaitOnGPU(t *testing.T) {
	size := max(2, min(gpus(t), 4))
	backendtest.RequireAll(t, backendtest.OnRanks(t, size, nil, func(ctx context.Context, g *group.Group) error {
		return withMemory(ctx, g, onGPU(g.Rank()), func(b *Backend, _ *memory.Memory) (err error) {
			all := make([]int, size)
			for i := range all {
				all[i] = i
			}
			sub, err := g.Sub(ctx, all)
			if err != nil {
				return err
			}
			defer func() { err = errors.Join(err, sub.Close(ctx)) }()
			env := &backend.Env{Group: sub, Opened: b.Device(), Parent: b, ShareDevice: true, Multicast: "off", Getenv: os.Getenv}
			m, err := memory.Open(ctx, Name, env, &memory.Options{Channels: 2, KernelTimeout: 30 * time.Second})
			if err != nil {
				return err
			}
			defer func() { err = errors.Join(err, m.Close(ctx)) }()
			return backendtest.WithWindow(ctx, m, 4096, func(*memory.Window) error { return enqueueBehind(ctx, m) })
		})
	}))
}

// enqueueBehind enqueues everything behind a host function that ends when all of it was enqueued.
func enqueueBehind(ctx context.Context, m *memory.Memory) (err error) {
	s, err := m.Device().NewStream()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	enqueued, gaveUp := make(chan struct{}), false
	if err := s.HostFunc(func() {
		select {
		case <-enqueued:
		case <-time.After(10 * time.Second):
			gaveUp = true
		}
	}); err != nil {
		return err
	}
	size, me := m.Group().Size(), m.Group().Rank()
	failed := errors.Join(m.Signal(s, (me+1)%size, 0), m.Wait(s, (me+size-1)%size, 0), m.Barrier(s, 0), m.Barrier(s, 1))
	close(enqueued)
	if err := errors.Join(failed, s.Synchronize(ctx)); err != nil {
		return err
	}
	if gaveUp {
		return errors.New("enqueueing waited for the host function before it")
	}
	return nil
}

// TestSharedGPU: two ranks on one GPU are refused without the option.
func TestSharedGPU(t *testing.T) {
	gpus(t)
	for _, err := range backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		o := onGPU(0)
		o.Device, o.ShareDevice = "0", false
		return withMemory(ctx, g, o, func(*Backend, *memory.Memory) error { return nil })
	}) {
		require.ErrorIs(t, err, errs.ErrInvalid)
		assert.ErrorContains(t, err, "on rank 0 and on rank 1")
	}
}
