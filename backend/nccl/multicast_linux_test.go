package nccl

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/nccl"
	"github.com/symmem/symmem/memory"
)

// withCast returns plain options with a setting of multicast.
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
				return withMemory(ctx, g, m.withCast(g.Rank(), setting), func(b *Backend, mem *memory.Memory) error {
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
						err := backendtest.WithWindow(ctx, mem, granule, func(w *memory.Window) error {
							if _, err := w.Multicast(0); !errors.Is(err, errs.ErrNoMulticast) {
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
			return withMemory(ctx, g, m.withCast(g.Rank(), "auto"), func(b *Backend, mem *memory.Memory) error {
				if c := b.Capabilities(); c.Multicast || !strings.Contains(c.Why["multicast"], why) {
					return fmt.Errorf("capabilities: %+v", c)
				}
				return backendtest.WithWindow(ctx, mem, 64, func(w *memory.Window) error {
					if err := mem.EnableMulticast(ctx, w, nil); !errors.Is(err, errs.ErrUnsupported) || !strings.Contains(err.Error(), why) {
						return fmt.Errorf("enabling: %w", err)
					}
					return nil
				})
			})
		}))
		for _, err := range backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
			return withMemory(ctx, g, m.withCast(g.Rank(), "on"), func(*Backend, *memory.Memory) error { return nil })
		}) {
			require.ErrorIs(t, err, errs.ErrUnsupported)
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
		o.KernelTimeout = 2 * time.Second
		return withMemory(ctx, g, o, func(b *Backend, mem *memory.Memory) error {
			return backendtest.WithWindow(ctx, mem, 64, func(w *memory.Window) error {
				err := mem.EnableMulticast(ctx, w, nil)
				if !errors.Is(err, errs.ErrUnsupported) || !strings.Contains(err.Error(), "rank 1") || !strings.Contains(err.Error(), "UnhandledCudaError") {
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

// TestMulticastWithoutCommunicator: a rank that cannot ask NCCL any more tells the others before they wait for it inside of NCCL.
func TestMulticastWithoutCommunicator(t *testing.T) {
	m := newMachine(2)
	m.version, m.nvls = 22902, true
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		return withMemory(ctx, g, m.withCast(g.Rank(), "auto"), func(b *Backend, mem *memory.Memory) error {
			return backendtest.WithWindow(ctx, mem, 64, func(w *memory.Window) error {
				if g.Rank() == 1 {
					if err := b.comm.Abort(ctx, errors.New("it was enough")); err != nil {
						return err
					}
				}
				err := mem.EnableMulticast(ctx, w, nil)
				if err == nil || !strings.Contains(err.Error(), "rank 1") || g.Rank() == 1 && !errors.Is(err, errs.ErrClosed) {
					return fmt.Errorf("enabling: %w", err)
				}
				return nil
			})
		})
	}))
	for r := range 2 {
		assert.Zero(t, m.counts[fmt.Sprint("ncclGetLsaMultimemDevicePointer", r)], "rank %d asked NCCL", r)
	}
	m.requireClean(t)
}

// TestMulticastOfDifferentOffsets: one multicast address reaches the same offset in every rank's window, so that adopted memory which is
// elsewhere on each rank has none, and NCCL is not asked.
func TestMulticastOfDifferentOffsets(t *testing.T) {
	m := newMachine(2)
	m.version, m.nvls = 23007, true
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		return withMemory(ctx, g, m.withCast(g.Rank(), "on"), func(b *Backend, mem *memory.Memory) error {
			p := m.memoryOf(g.Rank(), 4*granule, true)
			defer m.drop(p)
			enable := func(offset int64) (device.Ptr, error) {
				a, err := mem.Register(ctx, p.Add(offset), granule, "")
				if err != nil {
					return 0, err
				}
				w, err := mem.Rendezvous(ctx, a, memory.Record{})
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
			if !errors.Is(err, errs.ErrUnsupported) || !strings.Contains(err.Error(), "4096 on rank 0, 8192 on rank 1") {
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

// TestCommunicatorsAreTold: where multicast is off, NCCL 2.32 hears so for each communicator, those of its own all-reduces too; an older one
// is given the structure that it knows.
func TestCommunicatorsAreTold(t *testing.T) {
	for version, modes := range map[nccl.Version]map[string]int32{
		22809: {"off": math.MinInt32, "auto": math.MinInt32},
		23102: {"off": math.MinInt32, "auto": math.MinInt32},
		23203: {"off": math.MaxInt32, "auto": math.MinInt32},
	} {
		for setting, want := range modes {
			m := newMachine(2)
			m.version, m.nvls = version, true
			backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
				return withMemory(ctx, g, m.withCast(g.Rank(), setting), func(b *Backend, mem *memory.Memory) error {
					return reduceBy(ctx, g, mem, plainForm, 10, func(p backend.PreparedAllReduce, s device.Stream) error { return p.Enqueue(s) })
				})
			}))
			m.requireClean(t)
			assert.Equal(t, slices.Repeat([]int32{want}, 4), m.modes, "NCCL %s, multicast %s", version, setting)
		}
	}
}

// TestSharedDevice: ranks share a GPU where NCCL can and all of them allow it; else no communicator is made of them.
func TestSharedDevice(t *testing.T) {
	for name, tt := range map[string]struct {
		version nccl.Version
		refuses int // the rank that does not allow it; -1 for none
		env     string
		setting string
		text    string // of the error; "" if it works
	}{
		"too old":          {22907, -1, "", "off", "NCCL 2.29.7 cannot share a GPU, and 2.30.3 or newer can"},
		"one forbids it":   {23003, 2, "", "off", "share-device (SYMMEM_SHARE_DEVICE=true)"},
		"NCCL's own says":  {23003, -1, "0", "off", "NCCL_MULTI_RANK_GPU_ENABLE=0"},
		"multicast must":   {23003, -1, "", "on", "several ranks share a device"},
		"the first":        {23003, -1, "", "auto", ""},
		"said by NCCL too": {23203, -1, "1", "off", ""},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(2)
			m.version, m.nvls = tt.version, true
			failed := backendtest.OnRanks(t, 3, nil, func(ctx context.Context, g *group.Group) error {
				o := m.withCast(g.Rank(), tt.setting)
				o.ShareDevice = g.Rank() != tt.refuses
				if !o.ShareDevice {
					o.Device = "0" // there is no third one
				}
				o.Getenv = func(name string) string { return map[string]string{nccl.ShareGPUEnv: tt.env}[name] }
				return withMemory(ctx, g, o, func(b *Backend, mem *memory.Memory) error {
					if b.device.Index() != g.Rank()%2 {
						return fmt.Errorf("rank %d has GPU %d", g.Rank(), b.device.Index())
					}
					if c := b.Capabilities(); c.Multicast || c.Why["multicast"] == "" {
						return fmt.Errorf("capabilities: %+v", c)
					}
					return backendtest.TryWindow(ctx, mem, granule)
				})
			})
			if tt.text == "" {
				backendtest.RequireAll(t, failed)
			}
			for _, err := range failed {
				if tt.text == "" {
					break
				}
				require.ErrorContains(t, err, tt.text)
				if tt.setting == "on" {
					require.ErrorIs(t, err, errs.ErrUnsupported)
				} else {
					require.ErrorIs(t, err, errs.ErrInvalid)
					require.ErrorContains(t, err, "on rank 0 and on rank 2")
				}
			}
			m.requireClean(t)
		})
	}
}

// TestLossEndsSymmetricKernels from the version on whose kernels look at the abort flag. Before, an abort would wait for them for ever.
func TestLossEndsSymmetricKernels(t *testing.T) {
	for version, ends := range map[nccl.Version]bool{22809: false, 22903: false, 22907: true, 23203: true} {
		m := newMachine(1)
		m.version = version
		backendtest.RequireAll(t, backendtest.OnRanks(t, 1, nil, func(ctx context.Context, g *group.Group) error {
			return withMemory(ctx, g, m.plain(0), func(b *Backend, mem *memory.Memory) error {
				return reduceBy(ctx, g, mem, symmetricForm, 10, func(p backend.PreparedAllReduce, s device.Stream) error {
					if err := p.Enqueue(s); err != nil {
						return err
					}
					m.setHangs(true)
					err := b.giveUpAll(ctx, errors.New("rank 7 is lost"))
					m.setHangs(false)
					m.Mu.Lock()
					aborted := m.aborted
					m.Mu.Unlock()
					if (aborted == 1) != ends {
						return fmt.Errorf("NCCL %s: %d communicators were aborted: %w", version, aborted, err)
					}
					if told := s.Synchronize(ctx); told == nil || !strings.Contains(told.Error(), "rank 7 is lost") {
						return fmt.Errorf("the stream says %w", told)
					}
					return err
				})
			})
		}))
		m.requireClean(t)
	}
}

func (m *machine) setHangs(on bool) {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	m.hangs = on
}
