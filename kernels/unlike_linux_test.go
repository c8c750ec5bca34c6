package kernels

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/backend/native"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/simcuda"
	"github.com/symmem/symmem/memory"
)

// TestUnlikeGPUs: between GPUs of which some have kernels of their own and others not, every plan of every kind is made in every form, with one kernel on all ranks, and runs.
func TestUnlikeGPUs(t *testing.T) {
	machine, err := simcuda.New(simcuda.Config{GPUs: 2, Each: []simcuda.GPU{{Capability: 90}, {Capability: 80}}, Seed: 1})
	require.NoError(t, err)
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		b, err := native.New(ctx, g, &native.Options{Driver: machine.Driver(), LocalRank: g.Rank(), Multicast: config.MulticastOff, KernelTimeout: time.Minute})
		if err != nil {
			return err
		}
		m := memory.New(b, g, &memory.Options{KernelTimeout: time.Minute})
		s, err := m.Device().NewStream()
		if err != nil {
			return err
		}
		for _, k := range planKinds {
			for _, a := range append(k.forms(device.CUDA), Auto) {
				if a.NeedsMulticast() {
					continue
				}
				if err := unlikeRun(ctx, m, s, k, a); err != nil {
					return fmt.Errorf("%s, %s: %w", k.name, a, err)
				}
			}
		}
		return errors.Join(s.Close(), m.Close(ctx))
	}))
	assert.NoError(t, machine.Err())
}

func unlikeRun(ctx context.Context, m *memory.Memory, s device.Stream, k planKind, a Algorithm) error {
	tensors := &planTensors{m: m}
	p, err := k.make(ctx, tensors, 128, a) // whole vectors, also of lists
	err = errors.Join(append(tensors.errs, err)...)
	if err == nil {
		err = errors.Join(p.Run(s), s.Synchronize(ctx), p.Close(ctx))
	}
	return errors.Join(err, tensors.close(ctx))
}

// TestBarrierFirst: a barrier that is the first thing between GPUs of which some have kernels of their own, and others not, has one kernel on all ranks; and ranks with other options are told so.
func TestBarrierFirst(t *testing.T) {
	machine, err := simcuda.New(simcuda.Config{GPUs: 2, Each: []simcuda.GPU{{Capability: 90}, {Capability: 80}}, Seed: 1})
	require.NoError(t, err)
	for _, differ := range []bool{false, true} {
		backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
			b, err := native.New(ctx, g, &native.Options{Driver: machine.Driver(), LocalRank: g.Rank(), Multicast: config.MulticastOff, KernelTimeout: time.Minute})
			if err != nil {
				return err
			}
			m := memory.New(b, g, &memory.Options{KernelTimeout: time.Minute})
			s, err := m.Device().NewStream()
			if err != nil {
				return err
			}
			if differ {
				_, err := NewBarrier(ctx, m, &Options{Algorithm: []Algorithm{OneShot, Transfers}[g.Rank()]})
				if !errors.Is(err, errs.ErrMismatch) {
					return fmt.Errorf("other forms: %w", err)
				}
				_, err = NewBarrier(ctx, m, &Options{MaxBlocks: -g.Rank()})
				if !errors.Is(err, errs.ErrInvalid) {
					return fmt.Errorf("blocks of rank 1 that there are not: %w", err)
				}
			}
			for range 2 {
				p, err := NewBarrier(ctx, m, nil)
				if err == nil {
					err = errors.Join(p.Run(s), s.Synchronize(ctx), p.Close(ctx))
				}
				if err != nil {
					return err
				}
			}
			return errors.Join(s.Close(), m.Close(ctx))
		}))
	}
	assert.NoError(t, machine.Err())
}
