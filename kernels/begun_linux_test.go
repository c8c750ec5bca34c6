package kernels

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/backend/host"
	"github.com/symmem/symmem/backend/native"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/simcuda"
	"github.com/symmem/symmem/memory"
)

// TestBegunRunHoldsItsStream: a run that has begun on the device and waits for late peers has not ended, whatever it has sent and kept already: no plan of any
// kind, in any form, moves to another stream meanwhile. Where a rank waits for nobody, as the root of a broadcast, the run may have ended.
func TestBegunRunHoldsItsStream(t *testing.T) {
	const size = 2
	for _, where := range []string{"host", "far", "gpu"} {
		t.Run(where, func(t *testing.T) {
			open := func(g *group.Group) (backend.Backend, error) {
				b, err := host.New(g, nil)
				if err == nil && where == "far" {
					return backendtest.Far(b, g, nil), nil
				}
				return b, err
			}
			if where == "gpu" {
				machine, err := simcuda.New(simcuda.Config{GPUs: size, Seed: 1})
				require.NoError(t, err)
				defer func() { assert.NoError(t, machine.Err()) }()
				open = func(g *group.Group) (backend.Backend, error) {
					return native.New(t.Context(), g, &native.Options{Driver: machine.Driver(), LocalRank: g.Rank(), Multicast: config.MulticastOff, KernelTimeout: time.Minute})
				}
			}
			var runs atomic.Int64 // of the first rank
			backendtest.RequireAll(t, backendtest.OnRanks(t, size, nil, func(ctx context.Context, g *group.Group) error {
				b, err := open(g)
				if err != nil {
					return err
				}
				m := memory.New(b, g, &memory.Options{KernelTimeout: time.Minute})
				var failed error
				for _, k := range planKinds {
					for _, a := range k.forms(m.Device().Kind()) {
						if a.NeedsMulticast() || a.NeedsPeerPointers() && where == "far" {
							continue
						}
						if err := begunRun(ctx, m, k, a, &runs); err != nil {
							failed = errors.Join(failed, fmt.Errorf("%s, %s: %w", k.name, a, err))
						}
					}
				}
				return errors.Join(failed, m.Close(ctx))
			}))
		})
	}
}

// begunRun has the first rank run a plan on one stream, and try to run it on another one while its peers have not come. Collective.
func begunRun(ctx context.Context, m *memory.Memory, k planKind, a Algorithm, runs *atomic.Int64) error {
	tensors := &planTensors{m: m}
	p, err := k.make(ctx, tensors, 128, a) // whole vectors, also of lists
	if err := errors.Join(append(tensors.errs, err)...); err != nil {
		return err
	}
	s, err := m.Device().NewStream()
	if err != nil {
		return err
	}
	other, err := m.Device().NewStream()
	if err != nil {
		return err
	}
	var found error
	if m.Group().Rank() == 0 {
		runs.Store(1)
		found = p.Run(s)
		for deadline := time.Now().Add(30 * time.Millisecond); found == nil && runs.Load() == 1 && time.Now().Before(deadline); time.Sleep(time.Millisecond) {
			switch err := p.Run(other); {
			case err == nil:
				runs.Add(1)
				found = ended(ctx, s)
			case !errors.Is(err, errs.ErrTwoStreams):
				found = err
			}
		}
	}
	err = m.Group().Barrier(ctx, "begun")
	if m.Group().Rank() != 0 {
		for range runs.Load() {
			err = errors.Join(err, p.Run(s))
		}
	}
	err = errors.Join(found, err, s.Synchronize(ctx), other.Synchronize(ctx), m.Group().Barrier(ctx, "ran"))
	return errors.Join(err, p.Close(ctx), s.Close(), other.Close(), tensors.close(ctx))
}

// ended returns an error unless the work of a stream ends without anybody else.
func ended(ctx context.Context, s device.Stream) error {
	within, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	if err := s.Synchronize(within); err != nil {
		return fmt.Errorf("the plan runs on a second stream, and the run on the first has not ended: %w", err)
	}
	return nil
}
