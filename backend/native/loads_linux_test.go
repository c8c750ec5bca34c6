package native

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/kernels/ptx"
	"github.com/symmem/symmem/memory"
)

// TestSignalsLoadNothing: what signals, waits and barriers need is loaded by the first rendezvous, and for further groups not again:
// loading waits for all that the GPU has under way.
func TestSignalsLoadNothing(t *testing.T) {
	m := newMachine(2)
	m.signalKernels()
	var sealed atomic.Bool
	var loads []string // of calls that wait for the GPU, under Mu
	m.Call = func(name string, gpu int) cu.Result {
		if sealed.Load() && (strings.HasPrefix(name, "cuModule") || name == "cuFuncLoad" || name == "cuMemHostAlloc") {
			loads = append(loads, name)
		}
		return m.called(name, gpu)
	}
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		return withMemory(ctx, g, m.plain(g.Rank()), func(b *Backend, mem *memory.Memory) error {
			var streams [4]device.Stream
			for i := range streams {
				s, err := b.Device().NewStream()
				if err != nil {
					return err
				}
				defer s.Close()
				streams[i] = s
			}
			if err := backendtest.WithWindow(ctx, mem, 4096, nil); err != nil {
				return err
			}
			if err := g.Barrier(ctx, "made"); err != nil {
				return err
			}
			sealed.Store(true)
			for _, s := range streams {
				for channel := range mem.Channels() {
					for peer := range g.Size() {
						if err := mem.Signal(s, peer, channel); err != nil {
							return err
						}
					}
					for peer := range g.Size() {
						if err := mem.Wait(s, peer, channel); err != nil {
							return err
						}
					}
					if err := mem.Barrier(s, channel); err != nil {
						return err
					}
				}
				if err := s.Synchronize(ctx); err != nil {
					return err
				}
			}
			if err := g.Barrier(ctx, "used"); err != nil {
				return err
			}
			sealed.Store(false) // closing unloads
			return nil
		})
	}))
	assert.Empty(t, loads)
	m.Mu.Lock()
	defer m.Mu.Unlock()
	assert.Positive(t, m.counts[fmt.Sprint("cuModuleLoadDataEx", 0)])
	require.Positive(t, m.counts[fmt.Sprint("cuFuncLoad", 0)], "a driver that loads at the first launch is told to load")
	for _, k := range []ptx.Kernel{ptx.Barrier, ptx.Signal, ptx.SignalAll, ptx.Wait, ptx.WaitAll} {
		assert.Contains(t, m.Sharing, k.Name, "kernels with shared memory find a place beside it while it waits")
	}
}

// TestKernelsAreLoadedOnce: a sub-group's memory, too, finds the kernels that its device has loaded.
func TestKernelsAreLoadedOnce(t *testing.T) {
	m := newMachine(1)
	m.signalKernels()
	backendtest.RequireAll(t, backendtest.OnRanks(t, 1, nil, func(ctx context.Context, g *group.Group) error {
		return withMemory(ctx, g, m.plain(0), func(b *Backend, mem *memory.Memory) error {
			if err := backendtest.WithWindow(ctx, mem, 4096, nil); err != nil {
				return err
			}
			sub, err := g.Sub(ctx, []int{0})
			if err != nil {
				return err
			}
			env := &backend.Env{Group: sub, Opened: b.Device(), Parent: b, Multicast: "off", Getenv: noEnv}
			second, err := memory.Open(ctx, Name, env, &memory.Options{Channels: 2})
			if err != nil {
				return err
			}
			err = backendtest.WithWindow(ctx, second, 4096, func(*memory.Window) error {
				s, err := b.Device().NewStream()
				if err != nil {
					return err
				}
				return errors.Join(second.Barrier(s, 0), s.Synchronize(ctx), s.Close())
			})
			if err := errors.Join(err, second.Close(ctx), sub.Close(ctx)); err != nil {
				return err
			}
			m.Mu.Lock()
			defer m.Mu.Unlock()
			if n := m.counts[fmt.Sprint("cuModuleLoadDataEx", 0)]; n != 1 {
				return fmt.Errorf("the same file was loaded %d times", n)
			}
			return nil
		})
	}))
}

// TestLaunchesWithSeveralParameters: each parameter of a kernel of a user's comes to the driver, in order, and as long as the driver says.
func TestLaunchesWithSeveralParameters(t *testing.T) {
	m := newMachine(1)
	sizes := map[string][]int{"three": {8, 1, 12}, "none": {}}
	m.Params = func(name string) []int { return sizes[name] }
	got := map[string][][]byte{}
	m.Kernel = func(_ int, name string, params []unsafe.Pointer) {
		got[name] = [][]byte{}
		for i, p := range params {
			got[name] = append(got[name], bytes.Clone(unsafe.Slice((*byte)(p), sizes[name][i])))
		}
	}
	backendtest.RequireAll(t, backendtest.OnRanks(t, 1, nil, func(ctx context.Context, g *group.Group) error {
		return withMemory(ctx, g, m.plain(0), func(b *Backend, _ *memory.Memory) error {
			module, err := b.Device().(device.KernelLoader).LoadModule([]byte(".version 7.0"))
			if err != nil {
				return err
			}
			s, err := b.Device().NewStream()
			if err != nil {
				return err
			}
			given := map[string][][]byte{"three": {[]byte("12345678"), {9}, []byte("abcdefghijkl")}, "none": {}}
			for name, params := range given {
				f, err := module.Function(name)
				if err != nil {
					return err
				}
				if _, err := f.Prepare(device.Launch{Params: append(params, []byte{1})}); !errors.Is(err, device.ErrInvalid) {
					return fmt.Errorf("one parameter too many for %s: %w", name, err)
				}
				l, err := f.Prepare(device.Launch{Params: params})
				if err != nil {
					return err
				}
				if err := errors.Join(l.Launch(s), s.Synchronize(ctx), l.Close()); err != nil {
					return err
				}
			}
			assert.Equal(t, given, got)
			return errors.Join(s.Close(), module.Close())
		})
	}))
	assert.Empty(t, m.left())
}
