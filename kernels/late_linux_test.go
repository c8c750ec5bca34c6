package kernels

import (
	"bytes"
	"context"
	"errors"
	"fmt"
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
	"github.com/symmem/symmem/internal/simcuda"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// TestLateRankKeepsItsMemory: while a rank has not come to a run, its tensors are its own. Peers that give up waiting for it write nothing to them, in plans of any
// kind and in any form, but those of Transfers between GPUs: copies that are enqueued on a GPU cannot be held back.
func TestLateRankKeepsItsMemory(t *testing.T) {
	const size = 2
	for _, where := range []string{"host", "far", "gpu"} {
		t.Run(where, func(t *testing.T) {
			elements := []int64{100, 300_000}
			open := func(g *group.Group) (backend.Backend, error) {
				b, err := host.New(g, nil)
				if err == nil && where == "far" {
					return backendtest.Far(b, g, nil), nil
				}
				return b, err
			}
			if where == "gpu" {
				elements = []int64{128}
				machine, err := simcuda.New(simcuda.Config{GPUs: size, Seed: 1})
				require.NoError(t, err)
				defer func() { assert.NoError(t, machine.Err()) }()
				open = func(g *group.Group) (backend.Backend, error) {
					return native.New(t.Context(), g, &native.Options{Driver: machine.Driver(), LocalRank: g.Rank(), Multicast: config.MulticastOff, KernelTimeout: time.Minute})
				}
			}
			backendtest.RequireAll(t, backendtest.OnRanks(t, size, nil, func(ctx context.Context, g *group.Group) error {
				b, err := open(g)
				if err != nil {
					return err
				}
				m := memory.New(b, g, &memory.Options{KernelTimeout: 10 * time.Millisecond})
				var failed error
				for _, k := range planKinds {
					for _, a := range k.forms(m.Device().Kind()) {
						if a.NeedsMulticast() || a.NeedsPeerPointers() && where == "far" || a == Transfers && where == "gpu" {
							continue
						}
						for _, n := range elements {
							if err := lateRank(ctx, m, k, a, n); err != nil {
								failed = errors.Join(failed, fmt.Errorf("%s, %s, %d elements: %w", k.name, a, n, err))
							}
						}
					}
				}
				return errors.Join(failed, m.Close(ctx))
			}))
		})
	}
}

// lateRank has the first rank run a plan to which the other one does not come, and looks at the other's tensors. Collective.
func lateRank(ctx context.Context, m *memory.Memory, k planKind, a Algorithm, n int64) error {
	tensors := &planTensors{m: m}
	p, err := k.make(ctx, tensors, n, a)
	if err := errors.Join(append(tensors.errs, err)...); err != nil {
		return err
	}
	s, err := m.Device().NewStream()
	if err != nil {
		return err
	}
	late := m.Group().Rank() == 1
	var had [][]byte
	for _, t := range tensors.all {
		if !late && t.DType() == tensor.Float32 {
			err = errors.Join(err, m.Device().CopyFromHost(t.Ptr(), bytes.Repeat([]byte{0x3f}, int(t.Bytes()))))
		}
		b := make([]byte, t.Bytes())
		err = errors.Join(err, m.Device().CopyToHost(b, t.Ptr()))
		had = append(had, b)
	}
	err = errors.Join(err, m.Group().Barrier(ctx, "filled"))
	if !late && err == nil {
		err = p.Run(s)
		// A root that waits for nobody may have done its part.
		if e := s.Synchronize(ctx); e != nil {
			if _, ok := errors.AsType[*device.WaitError](e); !ok {
				err = errors.Join(err, e)
			}
		}
	}
	err = errors.Join(err, m.Group().Barrier(ctx, "given up"))
	for i, t := range tensors.all {
		if !late {
			break
		}
		b := make([]byte, t.Bytes())
		err = errors.Join(err, m.Device().CopyToHost(b, t.Ptr()))
		if !bytes.Equal(b, had[i]) {
			err = errors.Join(err, fmt.Errorf("tensor %d of a rank that has not come to the run was written", i))
		}
	}
	return errors.Join(err, p.Close(ctx), s.Close(), tensors.close(ctx))
}
