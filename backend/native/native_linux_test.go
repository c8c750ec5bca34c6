package native

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/backend/backendtest/fakecuda"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/cuda"
	"github.com/symmem/symmem/group"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/memory"
)

func TestMain(m *testing.M) {
	if role := os.Getenv("SYMMEM_TEST_NATIVE_WORKER"); role != "" {
		os.Exit(runWorker(role))
	}
	goleak.VerifyTestMain(m)
}

// noEnv returns an empty environment.
func noEnv(string) string { return "" }

// plain returns the options of a rank of a fake machine.
func (m *machine) plain(rank int) *Options {
	return &Options{Driver: m.driver(), LocalRank: rank, Multicast: "off", Getenv: noEnv, KernelTimeout: 10 * time.Second}
}

// withMemory opens the backend, runs f over its memory, and closes it.
func withMemory(ctx context.Context, g *group.Group, o *Options, f func(b *Backend, m *memory.Memory) error) error {
	b, err := New(ctx, g, o)
	if err != nil {
		return err
	}
	return backendtest.WithMemory(ctx, g, b, func(m *memory.Memory) error { return f(b, m) })
}

func TestConformanceOnFakeDriver(t *testing.T) {
	for _, share := range []bool{false, true} {
		t.Run(fmt.Sprintf("share=%t", share), func(t *testing.T) {
			m := newMachine(4)
			m.fabric = 1
			if share {
				m = newMachine(2)
			}
			backendtest.Run(t, backendtest.Harness{
				Open: func(ctx context.Context, g *group.Group) (backend.Backend, error) {
					o := m.plain(g.Rank())
					o.ShareDevice = share
					return New(ctx, g, o)
				},
				WorldSizes: []int{1, 2, 4},
				Adoptable:  adoptable("virtual"), AdoptAlign: adoptAlign,
			})
			assert.Empty(t, m.left())
		})
	}
}

// TestConformanceOverMulticast: with multicast, the rest works as before.
func TestConformanceOverMulticast(t *testing.T) {
	m := newMachine(3)
	m.multicast = 1
	backendtest.Run(t, backendtest.Harness{
		Open: func(ctx context.Context, g *group.Group) (backend.Backend, error) {
			o := m.plain(g.Rank())
			o.Multicast = "on"
			return New(ctx, g, o)
		},
		WorldSizes: []int{2, 3},
		Adoptable:  adoptable("legacy"), AdoptAlign: adoptAlign,
	})
	assert.Empty(t, m.left())
}

// steps are the driver's calls of allocating and mapping.
var steps = []string{
	"cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess", "cuMemExportToShareableHandle",
	"cuMemImportFromShareableHandle", "cuMemsetD8Async", "cuMemRelease",
}

// castSteps are those of multicast.
var castSteps = []string{"cuMulticastCreate", "cuMulticastAddDevice", "cuMulticastBindMem"}

// TestEveryStepFails lets each call of allocating and mapping fail once on one rank. All ranks get an error or none does, everything
// is undone, and afterwards all works.
func TestEveryStepFails(t *testing.T) {
	for _, multicast := range []string{"off", "auto", "on"} {
		calls := steps
		if multicast != "off" {
			calls = append(castSteps, steps...)
		}
		for _, call := range calls {
			for _, victim := range []int{0, 1} {
				t.Run(fmt.Sprintf("%s/%s/rank=%d", multicast, call, victim), func(t *testing.T) {
					for nth := 1; failOnce(t, multicast, call, victim, nth); nth++ {
						require.Less(t, nth, 40)
					}
				})
			}
		}
	}
}

// enable gives w a multicast address, or an error that is ErrUnsupported, ErrNoMemory or ErrUnavailable on every rank.
func enable(ctx context.Context, mem *memory.Memory, w *memory.Window) error {
	err := mem.EnableMulticast(ctx, w, nil)
	if err != nil && !errors.Is(err, errs.ErrUnsupported) && !errors.Is(err, errs.ErrNoMemory) && !errors.Is(err, errs.ErrUnavailable) {
		err = fmt.Errorf("an error of no condition: %w", err)
	}
	return err
}

// failOnce lets the nth call fail, and reports whether there was one.
func failOnce(t *testing.T, multicast, call string, victim, nth int) bool {
	t.Helper()
	const ranks = 3
	m := newMachine(ranks)
	m.multicast = 1
	before, err := backendtest.OpenFiles()
	require.NoError(t, err)
	var made sync.WaitGroup // until every rank has opened its backend
	made.Add(ranks)
	var once sync.Once
	outcomes := make([]error, ranks)
	var reached bool
	backendtest.RequireAll(t, backendtest.OnRanks(t, ranks, nil, func(ctx context.Context, g *group.Group) error {
		o := m.plain(g.Rank())
		o.Multicast = multicast
		return withMemory(ctx, g, o, func(b *Backend, mem *memory.Memory) error {
			// The workspace is there before, so that the calls are those of one allocation.
			if err := backendtest.WithWindow(ctx, mem, 64, nil); err != nil {
				return err
			}
			made.Done()
			made.Wait()
			once.Do(func() { m.failing(call, victim, nth, cu.Result(999)) })
			if err := g.Barrier(ctx, "failing"); err != nil {
				return err
			}
			outcomes[g.Rank()] = backendtest.WithWindow(ctx, mem, 3*granule, func(w *memory.Window) error {
				if multicast == "off" {
					return nil
				}
				return enable(ctx, mem, w)
			})
			if err := g.Barrier(ctx, "failed"); err != nil {
				return err
			}
			if g.Rank() == 0 {
				reached = m.working(call, victim, nth)
			}
			if err := g.Barrier(ctx, "working"); err != nil {
				return err
			}
			return backendtest.WithWindow(ctx, mem, 3*granule, func(w *memory.Window) error {
				if b.Capabilities().Multicast {
					if err := enable(ctx, mem, w); err != nil {
						return err
					}
				}
				return backendtest.ExchangeBytes(ctx, mem, w)
			})
		})
	}))
	if call != "cuMemRelease" { // what could not be released is left, rightly
		assert.Empty(t, m.left())
	}
	_, err = backendtest.FilesLeft(before)
	assert.NoError(t, err)
	if !reached {
		backendtest.RequireAll(t, outcomes)
		return false
	}
	failedRanks := 0
	for _, err := range outcomes {
		if err != nil {
			failedRanks++
		}
	}
	switch {
	case call == "cuMemRelease" && (failedRanks >= 1 || multicast != "off"): // perhaps while giving back, which is local, or what nobody needs
	default:
		assert.Equal(t, ranks, failedRanks, "%s %d: %v", call, nth, outcomes)
	}
	return true
}

func TestTwoRanksOnOneDevice(t *testing.T) {
	m := newMachine(2)
	for name, share := range map[string][]bool{"nobody allows it": {false, false, false}, "one allows it": {true, false, false}} {
		t.Run(name, func(t *testing.T) {
			failed := backendtest.OnRanks(t, 3, nil, func(ctx context.Context, g *group.Group) error {
				o := m.plain(0)
				o.Device = []string{"0", "1", "0"}[g.Rank()]
				o.ShareDevice = share[g.Rank()]
				return withMemory(ctx, g, o, func(*Backend, *memory.Memory) error { return nil })
			})
			for _, err := range failed {
				require.ErrorIs(t, err, errs.ErrInvalid)
				assert.ErrorContains(t, err, "rank 0 and on rank 2")
				assert.ErrorContains(t, err, "share-device")
			}
			assert.Empty(t, m.left())
		})
	}
	backendtest.RequireAll(t, backendtest.OnRanks(t, 5, nil, func(ctx context.Context, g *group.Group) error {
		o := m.plain(g.Rank())
		o.ShareDevice = true
		return withMemory(ctx, g, o, func(b *Backend, mem *memory.Memory) error {
			if b.device.Index() != g.Rank()%2 {
				return fmt.Errorf("rank %d has device %d", g.Rank(), b.device.Index())
			}
			return backendtest.TryWindow(ctx, mem, 100)
		})
	}))
	assert.Empty(t, m.left())
}

// TestOpeningFails: what is wrong on one rank is an error on all, and everything is closed.
func TestOpeningFails(t *testing.T) {
	for name, tt := range map[string]struct {
		change func(m *machine, o *Options)
		is     error
		text   string
	}{
		"no such device": {func(_ *machine, o *Options) { o.Device = "7" }, errs.ErrInvalid, "0 to 1"},
		"bad policy":     {func(_ *machine, o *Options) { o.Multicast = "perhaps" }, errs.ErrInvalid, "auto, on or off"},
		"no GPU": {func(m *machine, o *Options) {
			o.Driver.DeviceGetCount = func(n *int32) cu.Result { *n = 0; return 0 }
		}, errs.ErrUnavailable, "no GPU"},
		"old driver": {func(m *machine, o *Options) {
			o.Driver.DriverGetVersion = func(v *int32) cu.Result { *v = 11080; return 0 }
		}, errs.ErrUnavailable, "12.4"},
		"no VMM functions": {func(m *machine, o *Options) { o.Driver.MemMap = nil }, errs.ErrUnsupported, "cuMemMap"},
		"no VMM": {func(m *machine, o *Options) {
			own := o.Driver.DeviceGetAttribute
			o.Driver.DeviceGetAttribute = func(v *int32, a cu.DeviceAttribute, d cu.DeviceOrdinal) cu.Result {
				r := own(v, a, d)
				if a == cu.AttrVMM {
					*v = 0
				}
				return r
			}
		}, errs.ErrUnsupported, "virtual memory management"},
		"nothing can be created": {func(m *machine, o *Options) {
			o.Driver.MemCreate = func(*cu.MemHandle, uint64, *cu.MemAllocationProp, uint64) cu.Result { return cu.NotSupported }
		}, errs.ErrUnsupported, "cuMemCreate"},
		"no memory left": {func(m *machine, o *Options) {
			o.Driver.MemCreate = func(*cu.MemHandle, uint64, *cu.MemAllocationProp, uint64) cu.Result { return cu.OutOfMemory }
		}, errs.ErrNoMemory, "bytes are free"},
		"export fails": {func(m *machine, o *Options) {
			o.Driver.MemExportFD = func(*int32, cu.MemHandle, cu.HandleType, uint64) cu.Result { return cu.OperatingSystem }
		}, nil, "cuMemExportToShareableHandle"},
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
				assert.ErrorContains(t, err, "rank 1: ")
				assert.ErrorContains(t, err, tt.text)
			}
			if tt.is != nil {
				assert.ErrorIs(t, failed[1], tt.is)
			}
			assert.Empty(t, m.left())
		})
	}
}

func TestNoPeerAccess(t *testing.T) {
	m := newMachine(3)
	m.noPeers = func(dev, peer int) bool { return dev == 0 && peer == 2 }
	failed := backendtest.OnRanks(t, 3, nil, func(ctx context.Context, g *group.Group) error {
		return withMemory(ctx, g, m.plain(g.Rank()), func(b *Backend, mem *memory.Memory) error {
			if c := b.Capabilities(); c.PeerPointers || c.Why["peer_pointers"] == "" {
				return fmt.Errorf("capabilities: %+v", c)
			}
			return backendtest.WithWindow(ctx, mem, 100, nil)
		})
	})
	for _, err := range failed {
		require.ErrorIs(t, err, errs.ErrNotReachable)
		assert.ErrorContains(t, err, "(rank 0) has no peer access to")
		assert.ErrorContains(t, err, "(rank 2)")
	}
	assert.Empty(t, m.left())
}

// TestAccessRefused: a device that says that it can and then cannot is an error that names the pair.
func TestAccessRefused(t *testing.T) {
	m := newMachine(2)
	failed := backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		return withMemory(ctx, g, m.plain(g.Rank()), func(b *Backend, mem *memory.Memory) error {
			a, err := mem.Allocate(ctx, 100, "")
			if err := g.Vote(ctx, "allocated", err); err != nil {
				return err
			}
			if g.Rank() == 0 {
				m.failing("cuMemSetAccess", 1, 0, cu.InvalidDevice)
			}
			if err := g.Barrier(ctx, "failing"); err != nil {
				return err
			}
			mapped, err := b.Rendezvous(ctx, a)
			err = g.Vote(ctx, "mapping", err)
			if mapped != nil {
				err = errors.Join(err, mapped.Unmap(ctx))
			}
			return errors.Join(err, mem.Free(ctx, a))
		})
	})
	require.ErrorIs(t, failed[1], errs.ErrNotReachable)
	for _, err := range failed {
		assert.ErrorContains(t, err, "bytes of rank 0 (GPU GPU-fa")
		assert.ErrorContains(t, err, "no peer access")
	}
	assert.Empty(t, m.left())
}

// TestTwoHosts: between hosts, and between containers of one host, memory is passed by fabric handles or not at all.
func TestTwoHosts(t *testing.T) {
	for i, hosts := range []*group.LocalOptions{
		{BootIDs: []string{"", "", "another"}}, {BootIDs: []string{"", "", "another"}}, {Islands: []string{"", "", "another"}}, {Islands: []string{"", "", "another"}},
	} {
		works := i%2 == 1
		t.Run(fmt.Sprintf("fabric=%t/containers=%t", works, hosts.Islands != nil), func(t *testing.T) {
			m := newMachine(3)
			m.fabric, m.fabricWorks = 1, works
			failed := backendtest.OnRanks(t, 3, hosts, func(ctx context.Context, g *group.Group) error {
				return withMemory(ctx, g, m.plain(g.Rank()), func(b *Backend, mem *memory.Memory) error {
					if c := b.Capabilities(); c.SeveralHosts != works || !works && !strings.Contains(c.Why["several_hosts"], "IMEX") {
						return fmt.Errorf("capabilities: %+v", c)
					}
					return backendtest.TryWindow(ctx, mem, 100)
				})
			})
			for _, err := range failed {
				if works {
					require.NoError(t, err)
				} else {
					require.ErrorIs(t, err, errs.ErrNotReachable)
					assert.ErrorContains(t, err, map[bool]string{false: "rank 0 is on", true: "rank 0 cannot pass memory to rank 2: a test pretends"}[hosts.Islands != nil])
				}
			}
			assert.Empty(t, m.left())
		})
	}
}

// TestOutOfMemory: too much is an error with the numbers, and then a smaller allocation works.
func TestOutOfMemory(t *testing.T) {
	m := newMachine(1)
	backendtest.RequireAll(t, backendtest.OnRanks(t, 1, nil, func(ctx context.Context, g *group.Group) error {
		return withMemory(ctx, g, m.plain(0), func(b *Backend, mem *memory.Memory) error {
			for _, n := range []int64{1 << 50, 1<<63 - 1, fakecuda.TotalMemory + 1, fakecuda.TotalMemory - granule} {
				if n == fakecuda.TotalMemory-granule { // there is so much, but not free
					held, err := b.Allocate(ctx, 2*granule)
					if err != nil {
						return err
					}
					defer held.Release(ctx)
				}
				_, err := mem.Allocate(ctx, n, "")
				if !errors.Is(err, errs.ErrNoMemory) || !strings.Contains(err.Error(), fmt.Sprint(fakecuda.TotalMemory)) {
					return fmt.Errorf("%d bytes: %w", n, err)
				}
			}
			m.failing("cuMemMap", 0, 0, cu.OutOfMemory)
			_, err := mem.Allocate(ctx, 100, "")
			m.working("", 0, 0)
			if !errors.Is(err, errs.ErrNoMemory) || !strings.Contains(err.Error(), "bytes are free") {
				return fmt.Errorf("mapping: %w", err)
			}
			return backendtest.WithWindow(ctx, mem, 100, nil)
		})
	}))
	assert.Empty(t, m.left())
}

// TestUnknownGPU: memory that the GPU may still fill, since the driver does not say, is kept until it does, and as long as it cannot be given back.
func TestUnknownGPU(t *testing.T) {
	m := newMachine(1)
	set := func(fail func(call string, gpu, nth int) cu.Result) (used uint64) {
		m.Mu.Lock()
		defer m.Mu.Unlock()
		m.fail = fail
		return m.used[0]
	}
	backendtest.RequireAll(t, backendtest.OnRanks(t, 1, nil, func(ctx context.Context, g *group.Group) error {
		return withMemory(ctx, g, m.plain(0), func(b *Backend, mem *memory.Memory) error {
			set(func(call string, _, _ int) cu.Result {
				if call == "cuStreamQuery" {
					return cu.Unknown
				}
				return cu.Success
			})
			if _, err := b.Allocate(ctx, 100); err == nil || !strings.Contains(err.Error(), "given back later") {
				return fmt.Errorf("a GPU that cannot be asked: %w", err)
			}
			pushes := 0
			used := set(func(call string, _, _ int) cu.Result {
				if call == "cuCtxPushCurrent" {
					if pushes++; pushes == 2 { // after that for the query
						return cu.OperatingSystem
					}
				}
				return cu.Success
			})
			if used != granule {
				return fmt.Errorf("%d bytes are kept", used)
			}
			if _, err := b.Allocate(ctx, 100); err == nil || !strings.Contains(err.Error(), "cuCtxPushCurrent") {
				return fmt.Errorf("giving back without a context: %w", err)
			}
			if used := set(nil); used != granule {
				return fmt.Errorf("%d bytes are kept after it", used)
			}
			a, err := b.Allocate(ctx, 100)
			if err != nil {
				return err
			}
			if used := set(nil); used != granule {
				return fmt.Errorf("%d bytes are used after the GPU had ended", used)
			}
			return a.Release(ctx)
		})
	}))
	assert.Empty(t, m.left())
}

// TestBusyGPU: memory that the GPU still fills when the context ends is kept until it has.
func TestBusyGPU(t *testing.T) {
	m := newMachine(1)
	backendtest.RequireAll(t, backendtest.OnRanks(t, 1, nil, func(ctx context.Context, g *group.Group) error {
		return withMemory(ctx, g, m.plain(0), func(b *Backend, mem *memory.Memory) error {
			m.Mu.Lock()
			m.fail = func(call string, _, _ int) cu.Result {
				if call == "cuEventQuery" || call == "cuStreamQuery" {
					return cu.NotReady
				}
				return cu.Success
			}
			m.Mu.Unlock()
			for range 2 {
				short, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
				_, err := b.Allocate(short, 100)
				cancel()
				if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "given back later") {
					return fmt.Errorf("a busy GPU: %w", err)
				}
			}
			m.Mu.Lock()
			m.fail = nil
			used := m.used[0]
			m.Mu.Unlock()
			if used != 2*granule {
				return fmt.Errorf("%d bytes are kept", used)
			}
			a, err := b.Allocate(ctx, 100)
			if err != nil {
				return err
			}
			m.Mu.Lock()
			used = m.used[0]
			m.Mu.Unlock()
			if used != granule {
				return fmt.Errorf("%d bytes are used after the GPU had ended", used)
			}
			done, cancel := context.WithCancel(ctx)
			cancel()
			if _, err := b.Allocate(done, 100); !errors.Is(err, context.Canceled) {
				return fmt.Errorf("a context that has ended: %w", err)
			}
			return a.Release(ctx)
		})
	}))
	assert.Empty(t, m.left())
}

func TestPolicy(t *testing.T) {
	for _, tt := range []struct {
		setting string
		env     map[string]string
		may     bool
	}{
		{"", nil, true},
		{"auto", nil, true},
		{"auto", map[string]string{"NCCL_NVLS_ENABLE": "2", "NVSHMEM_DISABLE_NVLS": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "false"}, true},
		{"auto", map[string]string{"NCCL_NVLS_ENABLE": "0"}, false},
		{"auto", map[string]string{"NCCL_NVLS_ENABLE": " 0 "}, false},
		{"auto", map[string]string{"NVSHMEM_DISABLE_NVLS": "1"}, false},
		{"auto", map[string]string{"NVSHMEM_DISABLE_NVLS": "true"}, false},
		{"auto", map[string]string{"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}, false},
		{"on", map[string]string{"NCCL_NVLS_ENABLE": "0"}, true},
		{"off", nil, false},
	} {
		m := newMachine(2)
		m.multicast = 1
		backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
			o := m.plain(g.Rank())
			o.Multicast, o.Getenv = tt.setting, func(name string) string { return tt.env[name] }
			return withMemory(ctx, g, o, func(b *Backend, mem *memory.Memory) error {
				c := b.Capabilities()
				if c.Multicast != tt.may {
					return fmt.Errorf("capabilities: %+v", c)
				}
				for name, value := range tt.env {
					if why := c.Why["multicast"]; !tt.may && tt.setting == "auto" && !strings.Contains(why, name+"="+strings.TrimSpace(value)) {
						return fmt.Errorf("why: %s", why)
					}
				}
				return backendtest.WithWindow(ctx, mem, 100, func(w *memory.Window) error {
					if err := mem.EnableMulticast(ctx, w, nil); tt.may != (err == nil) || !tt.may && !errors.Is(err, errs.ErrUnsupported) {
						return fmt.Errorf("enabling multicast: %w", err)
					}
					p, err := w.Multicast(16)
					if tt.may && (err != nil || p%16 != 0) || !tt.may && !errors.Is(err, errs.ErrUnsupported) {
						return fmt.Errorf("multicast pointer %s: %w", p, err)
					}
					return nil
				})
			})
		}))
		assert.Equal(t, tt.may, m.resolved > 0, "%+v: the functions were looked up %d times", tt, m.resolved)
		assert.Empty(t, m.left())
	}
}

// TestMulticastIsMadeWhenAskedFor: switches have few multicast objects, so that neither the workspace nor memory that nobody asks it
// for takes one.
func TestMulticastIsMadeWhenAskedFor(t *testing.T) {
	for _, setting := range []string{"auto", "on"} {
		m := newMachine(2)
		m.multicast = 1
		backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
			o := m.plain(g.Rank())
			o.Multicast = setting
			return withMemory(ctx, g, o, func(b *Backend, mem *memory.Memory) error {
				return backendtest.TryWindow(ctx, mem, 3*granule)
			})
		}))
		assert.Zero(t, m.created, setting)
		assert.Empty(t, m.left())
	}
}

// withMulticast runs f on ranks of a machine with multicast, each with a GPU of its own, and sees that nothing is left.
func withMulticast(t *testing.T, m *machine, ranks int, f func(ctx context.Context, g *group.Group, b *Backend, mem *memory.Memory) error) {
	t.Helper()
	m.multicast = 1
	backendtest.RequireAll(t, backendtest.OnRanks(t, ranks, nil, func(ctx context.Context, g *group.Group) error {
		o := m.plain(g.Rank())
		o.Multicast = "auto"
		return withMemory(ctx, g, o, func(b *Backend, mem *memory.Memory) error { return f(ctx, g, b, mem) })
	}))
	assert.Empty(t, m.left())
	assert.Zero(t, m.live, "multicast objects")
}

// lives reports how many multicast objects there are, at a moment at which every rank is here.
func lives(ctx context.Context, g *group.Group, m *machine, want int) error {
	if err := g.Barrier(ctx, "counting"); err != nil {
		return err
	}
	m.Mu.Lock()
	live := m.live
	m.Mu.Unlock()
	if live != want {
		return fmt.Errorf("there are %d multicast objects, expected %d", live, want)
	}
	return g.Barrier(ctx, "counted")
}

// TestContextFailsWhereMulticastIsMade: a rank whose context cannot be made current at any place where it opens or enables multicast does not go on
// without it: all ranks have the error. The one place where all of them have the address already is none, and leaves nothing behind.
func TestContextFailsWhereMulticastIsMade(t *testing.T) {
	for rank := range 2 {
		silent := 0
		var pushes atomic.Int32
		for nth := int32(1); pushes.Load() == nth-1; nth++ { // until there are no more places
			m := newMachine(2)
			m.multicast = 1
			var armed atomic.Bool
			armed.Store(true)
			pushes.Store(0)
			failed := make([]error, 2)
			backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
				o := m.plain(g.Rank())
				o.Multicast = "auto"
				if g.Rank() == rank {
					d := m.driver()
					push := d.CtxPushCurrent
					d.CtxPushCurrent = func(c cu.ContextHandle) cu.Result {
						if armed.Load() && pushes.Load() < nth && pushes.Add(1) == nth {
							return cu.NotSupported
						}
						return push(c)
					}
					o.Driver = d
				}
				b, err := New(ctx, g, o)
				if failed[g.Rank()] = err; err != nil {
					return nil
				}
				mem := memory.New(b, g, nil)
				a, err := mem.Allocate(ctx, 100, "")
				err = g.Vote(ctx, "memory", err)
				var w *memory.Window
				if err == nil {
					w, err = mem.Rendezvous(ctx, a, memory.Record{})
				}
				if err == nil {
					err = mem.EnableMulticast(ctx, w, nil)
				}
				failed[g.Rank()] = err
				if err := g.Barrier(ctx, "tried"); err != nil {
					return err
				}
				armed.Store(false)
				return mem.Close(ctx)
			}))
			for _, err := range failed {
				require.Equal(t, failed[0] == nil, err == nil, "push %d: %v", nth, failed)
			}
			switch struck := pushes.Load() == nth; {
			case struck && failed[0] == nil:
				silent++
			case struck:
				for _, err := range failed {
					require.ErrorContains(t, err, "cuCtxPushCurrent")
					require.ErrorContains(t, err, fmt.Sprintf("rank %d", rank))
				}
			}
			assert.Empty(t, m.left(), "push %d", nth)
		}
		assert.Equal(t, 1-rank, silent, "places without an error on rank %d", rank)
		assert.GreaterOrEqual(t, pushes.Load(), int32(8), "places")
	}
}

func TestEnableMulticast(t *testing.T) {
	m := newMachine(3)
	withMulticast(t, m, 3, func(ctx context.Context, g *group.Group, b *Backend, mem *memory.Memory) error {
		err := backendtest.WithWindow(ctx, mem, 3*granule, func(w *memory.Window) error {
			if _, err := w.Multicast(0); !errors.Is(err, errs.ErrNoMulticast) {
				return fmt.Errorf("before: %w", err)
			}
			var first device.Ptr
			for range 2 { // the second time is nothing
				if err := mem.EnableMulticast(ctx, w, nil); err != nil {
					return err
				}
				p, err := w.Multicast(4096)
				if err != nil || p.IsNil() || !first.IsNil() && p != first {
					return fmt.Errorf("%s after %s: %w", p, first, err)
				}
				first = p
			}
			if err := lives(ctx, g, m, 1); err != nil {
				return err
			}
			return backendtest.ExchangeBytes(ctx, mem, w)
		})
		return errors.Join(err, lives(ctx, g, m, 0))
	})
	assert.Equal(t, 1, m.created)
}

// TestMulticastImportedLate: a rank that imports the object when the creator has let go of it, and so gets another, does not wait in it.
func TestMulticastImportedLate(t *testing.T) {
	m := newMachine(2)
	m.multicast = 1
	var late atomic.Bool
	importing, gaveUp := make(chan struct{}), make(chan struct{})
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		o := m.plain(g.Rank())
		o.Multicast, o.Driver = "auto", m.driver()
		if own := o.Driver.MemImportFD; g.Rank() != creator {
			o.Driver.MemImportFD = func(h *cu.MemHandle, fd uintptr, what cu.HandleType) cu.Result {
				if late.CompareAndSwap(true, false) {
					close(importing)
					<-gaveUp
				}
				return own(h, fd, what)
			}
		}
		return withMemory(ctx, g, o, func(b *Backend, mem *memory.Memory) error {
			return backendtest.WithWindow(ctx, mem, granule, func(w *memory.Window) error {
				bounded, cancel := context.WithCancel(ctx)
				defer cancel()
				if g.Rank() == creator {
					go func() {
						defer cancel()
						select {
						case <-importing:
						case <-ctx.Done():
						}
					}()
				} else {
					late.Store(true)
				}
				err := mem.EnableMulticast(bounded, w, nil)
				if g.Rank() == creator {
					close(gaveUp)
					if !errors.Is(err, context.Canceled) {
						return fmt.Errorf("the creator: %w", err)
					}
				} else if abandoned, ok := errors.AsType[*group.AbandonedError](err); !ok || abandoned.Rank != creator {
					return fmt.Errorf("the rank that is late: %w", err)
				}
				return errors.Join(lives(ctx, g, m, 0), mem.EnableMulticast(ctx, w, nil), lives(ctx, g, m, 1))
			})
		})
	}))
	assert.Empty(t, m.left()) // among that, a call to bind that would block
	assert.Equal(t, 2, m.created)
}

// TestMulticastNotReady: what the driver may do in a moment is tried again, by all ranks together, and not for ever.
func TestMulticastNotReady(t *testing.T) {
	old := notReadyPauses
	notReadyPauses = []time.Duration{time.Millisecond, time.Millisecond, time.Millisecond}
	t.Cleanup(func() { notReadyPauses = old })
	for _, call := range castSteps {
		for _, gpu := range []int{0, 1} {
			for refusals := 1; refusals <= 4; refusals++ {
				if call == "cuMulticastCreate" && gpu != creator {
					continue
				}
				m := newMachine(2)
				withMulticast(t, m, 2, func(ctx context.Context, g *group.Group, b *Backend, mem *memory.Memory) error {
					return backendtest.WithWindow(ctx, mem, granule, func(w *memory.Window) error {
						m.Mu.Lock()
						m.fail = func(c string, at, n int) cu.Result {
							if c == call && at == gpu && n <= refusals {
								return cu.SystemNotReady
							}
							return cu.Success
						}
						m.Mu.Unlock()
						if err := g.Barrier(ctx, "not ready"); err != nil {
							return err
						}
						err := mem.EnableMulticast(ctx, w, nil)
						if refusals <= 3 {
							return err
						}
						if !errors.Is(err, errs.ErrUnavailable) || !strings.Contains(err.Error(), "not ready at 4 attempts") || !strings.Contains(err.Error(), call) {
							return fmt.Errorf("%s refused %d times: %w", call, refusals, err)
						}
						if _, err := w.Multicast(0); !errors.Is(err, errs.ErrUnavailable) {
							return fmt.Errorf("the address: %w", err)
						}
						if c := b.Capabilities(); !c.Multicast {
							return fmt.Errorf("capabilities: %+v", c)
						}
						return errors.Join(lives(ctx, g, m, 0), mem.EnableMulticast(ctx, w, nil)) // now it is ready
					})
				})
			}
		}
	}
}

// TestMulticastExhausted: when the switches have no object left, all ranks are told, and one that is given back is used again.
func TestMulticastExhausted(t *testing.T) {
	m := newMachine(2)
	m.objects = 1
	withMulticast(t, m, 2, func(ctx context.Context, g *group.Group, b *Backend, mem *memory.Memory) error {
		return backendtest.WithWindow(ctx, mem, granule, func(second *memory.Window) error {
			err := backendtest.WithWindow(ctx, mem, granule, func(first *memory.Window) error {
				if err := mem.EnableMulticast(ctx, first, nil); err != nil {
					return err
				}
				if err := mem.EnableMulticast(ctx, second, nil); !errors.Is(err, errs.ErrNoMemory) || !strings.Contains(err.Error(), "rank 0") {
					return fmt.Errorf("a second object: %w", err)
				}
				return nil
			})
			return errors.Join(err, mem.EnableMulticast(ctx, second, nil), lives(ctx, g, m, 1))
		})
	})
}

// TestMulticastRefused: what does not work once is not tried for every window, and the capability goes on every rank.
func TestMulticastRefused(t *testing.T) {
	for _, call := range castSteps {
		m := newMachine(2)
		withMulticast(t, m, 2, func(ctx context.Context, g *group.Group, b *Backend, mem *memory.Memory) error {
			return backendtest.WithWindow(ctx, mem, granule, func(w *memory.Window) error {
				m.Mu.Lock()
				m.fail = func(c string, gpu, _ int) cu.Result {
					if c == call && gpu == 0 {
						return cu.NotSupported
					}
					return cu.Success
				}
				m.Mu.Unlock()
				if err := g.Barrier(ctx, "refusing"); err != nil {
					return err
				}
				for range 2 {
					err := mem.EnableMulticast(ctx, w, nil)
					if _, e := w.Multicast(0); !errors.Is(err, errs.ErrUnsupported) || !errors.Is(e, errs.ErrUnsupported) ||
						!strings.Contains(err.Error(), call) || !strings.Contains(e.Error(), call) {
						return fmt.Errorf("%w, and the address: %w", err, e)
					}
				}
				if c := b.Capabilities(); c.Multicast || !strings.Contains(c.Why["multicast"], call) {
					return fmt.Errorf("capabilities: %+v", c)
				}
				return backendtest.ExchangeBytes(ctx, mem, w)
			})
		})
		assert.LessOrEqual(t, m.created, 1, call)
	}
}

// TestMulticastDegrades: what prevents multicast on one rank leaves all without it under auto, and is an error under on.
func TestMulticastDegrades(t *testing.T) {
	for name, prepare := range map[string]func(m *machine, rank int, o *Options){
		"one rank is off": func(_ *machine, rank int, o *Options) {
			if rank == 1 {
				o.Multicast = "off"
			}
		},
		"no functions": func(_ *machine, rank int, o *Options) {
			if rank == 1 {
				o.Driver.MulticastSource = nil
			}
		},
		"one device": func(_ *machine, _ int, o *Options) { o.Device, o.ShareDevice = "0", true },
	} {
		for _, policy := range []string{"auto", "on"} {
			t.Run(name+"/"+policy, func(t *testing.T) {
				m := newMachine(2)
				m.multicast = 1
				failed := backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
					o := m.plain(g.Rank())
					o.Multicast = policy
					prepare(m, g.Rank(), o)
					return withMemory(ctx, g, o, func(b *Backend, mem *memory.Memory) error {
						for range 2 {
							err := backendtest.WithWindow(ctx, mem, 100, func(w *memory.Window) error {
								_, err := w.Multicast(0)
								for _, err := range []error{mem.EnableMulticast(ctx, w, nil), err} {
									if !errors.Is(err, errs.ErrUnsupported) || !strings.Contains(err.Error(), b.Capabilities().Why["multicast"]) {
										return fmt.Errorf("multicast: %w", err)
									}
								}
								return backendtest.ExchangeBytes(ctx, mem, w)
							})
							if err != nil {
								return err
							}
						}
						if c := b.Capabilities(); c.Multicast || c.Why["multicast"] == "" {
							return fmt.Errorf("capabilities: %+v", c)
						}
						return nil
					})
				})
				for _, err := range failed {
					if policy == "auto" {
						require.NoError(t, err)
					} else {
						require.ErrorContains(t, err, "set it to auto or off")
						require.ErrorIs(t, err, errs.ErrUnsupported)
					}
				}
				assert.Empty(t, m.left())
			})
		}
	}
}

// TestRegister adopts memory of cuMemCreate and of cuMemAlloc at an offset that differs between the ranks, or not.
func TestRegister(t *testing.T) {
	for _, kind := range []string{"virtual", "legacy"} {
		for _, same := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s/same=%t", kind, same), func(t *testing.T) {
				m := newMachine(3)
				backendtest.RequireAll(t, backendtest.OnRanks(t, 3, nil, func(ctx context.Context, g *group.Group) error {
					return withMemory(ctx, g, m.plain(g.Rank()), func(b *Backend, mem *memory.Memory) error {
						offset := int64(4096)
						if !same {
							offset = int64(g.Rank()) * (granule + 16)
						}
						p, free, err := foreignMemory(b, kind, 8*granule)
						if err != nil {
							return err
						}
						for _, at := range []int64{0, granule / 2, 2 * granule} { // where caching allocators have cut it
							err = errors.Join(err, adoptAndUse(ctx, mem, p.Add(at+offset), granule, kind == "virtual" && same))
						}
						return errors.Join(err, free())
					})
				}))
				assert.Empty(t, m.left())
			})
		}
	}
}

// foreignMemory makes memory as somebody else would.
func foreignMemory(b *Backend, kind string, bytes int64) (p device.Ptr, free func() error, err error) {
	if kind == "legacy" {
		p, err = b.device.Alloc(bytes)
		return p, func() error { return b.device.Free(p) }, err
	}
	a := &allocation{backend: b, span: bytes}
	if err := b.device.WithContext(a.make); err != nil {
		return 0, nil, err
	}
	return a.ptr, func() error { return a.Release(context.Background()) }, nil
}

// adoptable returns foreignMemory as the conformance suite wants it.
func adoptable(kind string) func(backend.Backend, int, int64) (device.Ptr, func() error, error) {
	return func(b backend.Backend, _ int, bytes int64) (device.Ptr, func() error, error) {
		return foreignMemory(b.(*Backend), kind, bytes)
	}
}

// adoptAndUse registers memory, maps it, and writes and reads it through every peer pointer.
func adoptAndUse(ctx context.Context, m *memory.Memory, p device.Ptr, bytes int64, contiguous bool) error {
	a, err := m.Register(ctx, p, bytes, "adopted")
	if err != nil {
		return err
	}
	w, err := m.Rendezvous(ctx, a, memory.Record{})
	if err == nil {
		if _, _, viewErr := w.Contiguous(0); contiguous != (viewErr == nil) || viewErr != nil && !errors.Is(viewErr, errs.ErrUnsupported) {
			err = fmt.Errorf("contiguous view: %w", viewErr)
		}
		err = errors.Join(err, backendtest.ExchangeBytes(ctx, m, w))
	}
	return errors.Join(err, m.Free(ctx, a))
}

// TestRegisterErrors: everything that is wrong with memory is told at once.
func TestRegisterErrors(t *testing.T) {
	m := newMachine(2)
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		return withMemory(ctx, g, m.plain(g.Rank()), func(b *Backend, mem *memory.Memory) error {
			other, err := cuda.Open(&cuda.Options{Driver: b.drv, Device: fmt.Sprint(1 - g.Rank())})
			if err != nil {
				return err
			}
			defer other.Close()
			elsewhere, err := other.Alloc(granule)
			if err != nil {
				return err
			}
			var odd []undo
			create := func(change func(p *cu.MemAllocationProp)) (device.Ptr, error) {
				prop := b.found.prop
				change(&prop)
				twin := &Backend{device: b.device, drv: b.drv, granularity: b.granularity, found: &finding{prop: prop}}
				a := &allocation{backend: twin, span: granule}
				err := b.device.WithContext(a.make)
				odd = append(odd, a.undo)
				return a.ptr, err
			}
			private, err := create(func(p *cu.MemAllocationProp) { p.RequestedHandleTypes = 0 })
			if err != nil {
				return err
			}
			loose, err := create(func(p *cu.MemAllocationProp) { p.Type = 0 })
			if err != nil {
				return err
			}
			freed, free, err := foreignMemory(b, "legacy", granule)
			if err != nil {
				return err
			}
			if err := free(); err != nil {
				return err
			}
			for _, tt := range []struct {
				p     device.Ptr
				bytes int64
				texts []string
			}{
				{elsewhere, 64, []string{"this rank's is"}},
				{elsewhere.Add(8), granule, []string{"not a multiple of 16", "this rank's is"}},
				{private, granule + 1, []string{"CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR", "1 bytes behind the end"}},
				{loose.Add(2), 64, []string{"not pinned", "not a multiple of 16"}},
				{freed, 64, []string{"it was freed, or never allocated"}},
				{4096, 64, []string{"memory of the host"}},
			} {
				_, err := mem.Register(ctx, tt.p, tt.bytes, "")
				var bad *cuda.MemoryError
				if !errors.As(err, &bad) || !errors.Is(err, errs.ErrInvalid) || len(bad.Problems) != len(tt.texts) {
					return fmt.Errorf("%d bytes at %s: %w", tt.bytes, tt.p, err)
				}
				for _, text := range tt.texts {
					if !strings.Contains(err.Error(), text) {
						return fmt.Errorf("%d bytes at %s: %q is not told: %w", tt.bytes, tt.p, text, err)
					}
				}
			}
			for _, n := range []int64{0, -1, 1<<63 - 1} {
				if _, err := b.Register(ctx, 1<<63+1<<62, n); !errors.Is(err, errs.ErrInvalid) {
					return fmt.Errorf("%d bytes: %w", n, err)
				}
			}
			return b.device.WithContext(func() error {
				var err error
				for _, u := range odd {
					err = errors.Join(err, u.run())
				}
				return err
			})
		})
	}))
	assert.Empty(t, m.left())
}

// TestNeverMapped: memory that is freed before any rendezvous leaves neither a descriptor nor memory, nor does what a rank could not export.
func TestNeverMapped(t *testing.T) {
	for _, fails := range []bool{false, true} {
		t.Run(fmt.Sprintf("fails=%t", fails), func(t *testing.T) {
			m := newMachine(2)
			before, err := backendtest.OpenFiles()
			require.NoError(t, err)
			failed := backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
				return withMemory(ctx, g, m.plain(g.Rank()), func(b *Backend, mem *memory.Memory) error {
					if fails && g.Rank() == 1 {
						m.failing("cuMemExportToShareableHandle", 1, 1, cu.Result(999))
					}
					var all []backend.Allocation
					for range 3 * mostEarly {
						a, err := mem.Allocate(ctx, 3*granule, "")
						if err != nil {
							return err
						}
						all = append(all, a)
					}
					if err := g.Barrier(ctx, "allocated"); err != nil {
						return err
					}
					open, err := backendtest.OpenFiles()
					if most := before + 2*mostEarly + 10; err == nil && open > most {
						err = fmt.Errorf("%d descriptors are open, and at most %d may be", open, most)
					}
					err = errors.Join(err, g.Barrier(ctx, "counted"))
					for _, a := range all {
						err = errors.Join(err, mem.Free(ctx, a))
					}
					return err
				})
			})
			backendtest.RequireAll(t, failed)
			assert.Empty(t, m.left())
			_, err = backendtest.FilesLeft(before)
			assert.NoError(t, err)
		})
	}
}

// TestFreedBeforeRendezvous: adopted memory that the caller has freed is an error on every rank, and nothing hangs.
func TestFreedBeforeRendezvous(t *testing.T) {
	m := newMachine(2)
	failed := backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		return withMemory(ctx, g, m.plain(g.Rank()), func(b *Backend, mem *memory.Memory) error {
			p, free, err := foreignMemory(b, "legacy", granule)
			if err != nil {
				return err
			}
			a, err := mem.Register(ctx, p, 64, "")
			if err != nil {
				return err
			}
			if g.Rank() == 1 {
				err = free()
			}
			_, failed := mem.Rendezvous(ctx, a, memory.Record{})
			if g.Rank() == 0 {
				err = errors.Join(err, free())
			}
			return errors.Join(failed, err, mem.Free(ctx, a))
		})
	})
	for _, err := range failed {
		require.ErrorContains(t, err, "was it freed?")
	}
	assert.Empty(t, m.left())
}

// TestDifferentKinds: one rank brings memory of cuMemCreate and another of cuMemAlloc.
func TestDifferentKinds(t *testing.T) {
	m := newMachine(2)
	failed := backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		return withMemory(ctx, g, m.plain(g.Rank()), func(b *Backend, mem *memory.Memory) error {
			p, free, err := foreignMemory(b, []string{"virtual", "legacy"}[g.Rank()], granule)
			if err != nil {
				return err
			}
			return errors.Join(adoptAndUse(ctx, mem, p, granule, true), free())
		})
	})
	for _, err := range failed {
		require.ErrorIs(t, err, errs.ErrMismatch)
		assert.ErrorContains(t, err, "cuMemAlloc")
	}
	assert.Empty(t, m.left())
}

// TestLegacyBetweenHosts: memory of cuMemAlloc has no handle that means anything on another host, or in a container apart, so that every rank refuses it. Between
// ranks that share memory it is adopted all the same.
func TestLegacyBetweenHosts(t *testing.T) {
	for _, hosts := range []*group.LocalOptions{{BootIDs: []string{"", "another"}}, {Islands: []string{"", "another"}}, {BootIDs: []string{"another", "another"}}} {
		apart := hosts.BootIDs == nil || hosts.BootIDs[0] != hosts.BootIDs[1]
		m := newMachine(2)
		m.fabric, m.fabricWorks = 1, true
		failed := backendtest.OnRanks(t, 2, hosts, func(ctx context.Context, g *group.Group) error {
			return withMemory(ctx, g, m.plain(g.Rank()), func(b *Backend, mem *memory.Memory) error {
				p, free, err := foreignMemory(b, "legacy", granule)
				if err != nil {
					return err
				}
				return errors.Join(adoptAndUse(ctx, mem, p, granule, false), free())
			})
		})
		for _, err := range failed {
			if !apart {
				assert.NoError(t, err)
				continue
			}
			require.ErrorIs(t, err, errs.ErrNotReachable)
			var bad *cuda.MemoryError
			require.ErrorAs(t, err, &bad)
			assert.ErrorContains(t, err, "CU_MEM_HANDLE_TYPE_FABRIC")
		}
		assert.Empty(t, m.left())
	}
}

// TestPeerLost: when a rank has gone, the others' mappings are undone all the same.
func TestPeerLost(t *testing.T) {
	m := newMachine(3)
	failed := backendtest.OnRanks(t, 3, nil, func(ctx context.Context, g *group.Group) error {
		return withMemory(ctx, g, m.plain(g.Rank()), func(b *Backend, mem *memory.Memory) error {
			a, err := mem.Allocate(ctx, 100, "")
			if err != nil {
				return err
			}
			if _, err := mem.Rendezvous(ctx, a, memory.Record{}); err != nil {
				return err
			}
			if g.Rank() == 1 {
				g.Abort("test")
			}
			<-g.Lost()
			_, err = mem.Rendezvous(ctx, a, memory.Record{})
			return errors.Join(err, mem.Free(ctx, a))
		})
	})
	for _, err := range failed {
		require.ErrorIs(t, err, errs.ErrPeerLost)
	}
	assert.Empty(t, m.left())
}

// TestOpenedDevice: a device that is already open is used and stays open.
func TestOpenedDevice(t *testing.T) {
	m := newMachine(1)
	d, err := cuda.Open(&cuda.Options{Driver: m.driver()})
	require.NoError(t, err)
	backendtest.RequireAll(t, backendtest.OnRanks(t, 1, nil, func(ctx context.Context, g *group.Group) error {
		b, err := factory{}.Open(ctx, &backend.Env{Group: g, Opened: d, Multicast: "off", Getenv: noEnv})
		if err != nil {
			return err
		}
		if b.Device() != device.Device(d) {
			return errors.New("another device was opened")
		}
		if _, err := (factory{}).Probe(ctx, &backend.Env{Opened: d, Multicast: "off", Getenv: noEnv}); err != nil {
			return err
		}
		return b.Close(ctx)
	}))
	_, err = d.Alloc(64)
	require.NoError(t, err)
	require.NoError(t, d.Close())
	assert.Empty(t, m.left())
}
