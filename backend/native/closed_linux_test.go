package native

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/device/cuda"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/simcuda"
	"github.com/symmem/symmem/memory"
)

// TestDeviceClosedBefore: a program that closes its device before the memory on it is told, and nothing of the memory stays.
func TestDeviceClosedBefore(t *testing.T) {
	machine, err := simcuda.New(simcuda.Config{GPUs: 2, Seed: 1, Multicast: true})
	require.NoError(t, err)
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		d, err := cuda.Open(&cuda.Options{Driver: machine.Driver(), LocalRank: g.Rank()})
		if err != nil {
			return err
		}
		b, err := New(ctx, g, &Options{Opened: d, Multicast: config.MulticastOn})
		if err != nil {
			return err
		}
		m := memory.New(b, g, nil)
		a, err := m.Allocate(ctx, 1<<20, "")
		if err != nil {
			return err
		}
		w, err := m.Rendezvous(ctx, a, memory.Record{})
		if err == nil {
			err = m.EnableMulticast(ctx, w, nil)
		}
		if _, alone := m.Allocate(ctx, 1<<20, "without a window"); alone != nil {
			err = errors.Join(err, alone)
		}
		if err = errors.Join(err, d.Close()); err != nil {
			return err
		}
		if err := m.Close(ctx); !errors.Is(err, errs.ErrClosed) {
			return fmt.Errorf("closing the memory behind the device: %v", err)
		}
		return nil
	}))
	require.NoError(t, machine.Err())
}
