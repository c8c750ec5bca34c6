package nccl

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/nccl"
)

// withCast are plain options with a setting of multicast.
func (m *machine) withCast(rank int, setting string) *Options {
	o := m.plain(rank)
	o.Multicast = setting
	return o
}

// TestMulticastIsMadeWhenAskedFor: NCCL is asked for an address only by EnableMulticast, and then makes one object for all windows.
func TestMulticastIsMadeWhenAskedFor(t *testing.T) {
	for _, version := range []nccl.Version{22902, 23007, 23203} {
		for _, setting := range []string{"auto", "on"} {
			m := newMachine(2)
			m.version, m.nvls = version, true
			backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
				return withMemory(ctx, g, m.withCast(g.Rank(), setting), func(b *Backend, mem *backend.Memory) error {
					if c := b.Capabilities(); !c.Multicast {
						return fmt.Errorf("capabilities: %+v", c)
					}
					if err := backendtest.TryWindow(ctx, mem, granule); err != nil {
						return err
					}
					objects := func(want int) error {
						if err := g.Barrier(ctx, "counting"); err != nil {
							return err
						}
						m.Mu.Lock()
						made := m.objects
						m.Mu.Unlock()
						if made != want {
							return fmt.Errorf("%d multicast objects, expected %d", made, want)
						}
						return g.Barrier(ctx, "counted")
					}
					for i := range 2 {
						if err := objects(i); err != nil {
							return err
						}
						err := backendtest.WithWindow(ctx, mem, granule, func(w *backend.Window) error {
							if _, err := w.Multicast(0); !errors.Is(err, backend.ErrNoMulticast) {
								return fmt.Errorf("before: %w", err)
							}
							if err := errors.Join(mem.EnableMulticast(ctx, w, nil), mem.EnableMulticast(ctx, w, nil)); err != nil {
								return err
							}
							base, _, err := w.Contiguous(0)
							p, castErr := w.Multicast(16)
							if err = errors.Join(err, castErr); err != nil || p != castAt|base.Add(16) {
								return fmt.Errorf("multicast at %s of %s: %w", p, base, err)
							}
							return nil
						})
						if err != nil {
							return err
						}
					}
					return objects(1)
				})
			}))
			m.requireClean(t)
		}
	}
}

// TestMulticastThatNCCLLacks: what NCCL says of the communicator is the capability, and an error of opening where multicast must be.
func TestMulticastThatNCCLLacks(t *testing.T) {
	for version, why := range map[nccl.Version]string{22809: "2.29.2 or newer", 22902: "no NVLink multicast", 23203: "no NVLink multicast"} {
		m := newMachine(2)
		m.version = version
		backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
			return withMemory(ctx, g, m.withCast(g.Rank(), "auto"), func(b *Backend, mem *backend.Memory) error {
				if c := b.Capabilities(); c.Multicast || !strings.Contains(c.Why["multicast"], why) {
					return fmt.Errorf("capabilities: %+v", c)
				}
				return backendtest.WithWindow(ctx, mem, 64, func(w *backend.Window) error {
					if err := mem.EnableMulticast(ctx, w, nil); !errors.Is(err, backend.ErrUnsupported) || !strings.Contains(err.Error(), why) {
						return fmt.Errorf("enabling: %w", err)
					}
					return nil
				})
			})
		}))
		for _, err := range backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
			return withMemory(ctx, g, m.withCast(g.Rank(), "on"), func(*Backend, *backend.Memory) error { return nil })
		}) {
			require.ErrorIs(t, err, backend.ErrUnsupported)
			assert.ErrorContains(t, err, "multicast is on")
			assert.ErrorContains(t, err, why)
		}
		assert.Zero(t, m.objects)
		m.requireClean(t)
	}
}

// TestMulticastFailsInNCCL: NCCL leaves the others waiting when it fails on one rank. Their wait is bounded, all are told, and everything
// closes.
func TestMulticastFailsInNCCL(t *testing.T) {
	m := newMachine(2)
	m.version, m.nvls = 22902, true
	m.fail = func(call string, rank, _ int) nccl.Result {
		if call == "ncclGetLsaMultimemDevicePointer" && rank == 1 {
			return nccl.UnhandledCudaError
		}
		return nccl.Success
	}
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		o := m.withCast(g.Rank(), "auto")
		o.KernelTimeout = 300 * time.Millisecond
		return withMemory(ctx, g, o, func(b *Backend, mem *backend.Memory) error {
			return backendtest.WithWindow(ctx, mem, 64, func(w *backend.Window) error {
				err := mem.EnableMulticast(ctx, w, nil)
				if !errors.Is(err, backend.ErrUnsupported) || !strings.Contains(err.Error(), "rank 1") || !strings.Contains(err.Error(), "UnhandledCudaError") {
					return fmt.Errorf("enabling: %w", err)
				}
				if c := b.Capabilities(); c.Multicast || !strings.Contains(c.Why["multicast"], "rank 1") {
					return fmt.Errorf("capabilities: %+v", c)
				}
				return nil
			})
		})
	}))
	m.requireClean(t)
}

// TestMulticastOfDifferentOffsets: one multicast address reaches the same offset in every rank's window, so that adopted memory which is
// elsewhere on each rank has none, and NCCL is not asked.
func TestMulticastOfDifferentOffsets(t *testing.T) {
	m := newMachine(2)
	m.version, m.nvls = 23007, true
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		return withMemory(ctx, g, m.withCast(g.Rank(), "on"), func(b *Backend, mem *backend.Memory) error {
			p := m.memoryOf(g.Rank(), 4*granule, true)
			defer m.drop(p)
			enable := func(offset int64) (device.Ptr, error) {
				a, err := mem.Register(ctx, p.Add(offset), granule, "")
				if err != nil {
					return 0, err
				}
				w, err := mem.Rendezvous(ctx, a, backend.Record{})
				if err != nil {
					return 0, err
				}
				err = mem.EnableMulticast(ctx, w, nil)
				at, castErr := w.Multicast(0)
				if (err == nil) != (castErr == nil) {
					err = fmt.Errorf("the address is %s, %w, after %w", at, castErr, err)
				}
				return at, errors.Join(err, mem.Free(ctx, a))
			}
			at, err := enable(4096 * int64(1+g.Rank()))
			if !errors.Is(err, backend.ErrUnsupported) || !strings.Contains(err.Error(), "4096 on rank 0, 8192 on rank 1") {
				return fmt.Errorf("memory at different offsets has %s: %w", at, err)
			}
			if c := b.Capabilities(); !c.Multicast {
				return fmt.Errorf("capabilities: %+v", c)
			}
			m.Mu.Lock()
			made := m.objects
			m.Mu.Unlock()
			if made != 0 {
				return fmt.Errorf("%d multicast objects were made", made)
			}
			if err := g.Barrier(ctx, "none was made"); err != nil {
				return err
			}
			_, err = enable(2 * granule)
			return err
		})
	}))
	m.requireClean(t)
}
