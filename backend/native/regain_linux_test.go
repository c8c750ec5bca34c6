package native

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/simcuda"
)

// TestAllocateWaitsForFreedMemory: memory of the device that was freed while a stream had work is there for symmetric memory as soon as the stream has none.
func TestAllocateWaitsForFreedMemory(t *testing.T) {
	const most = 64 << 20
	machine, err := simcuda.New(simcuda.Config{Each: []simcuda.GPU{{Memory: most}}, Seed: 1})
	require.NoError(t, err)
	backendtest.RequireAll(t, backendtest.OnRanks(t, 1, nil, func(ctx context.Context, g *group.Group) error {
		b, err := New(ctx, g, &Options{Driver: machine.Driver(), Multicast: config.MulticastOff, KernelTimeout: time.Minute})
		if err != nil {
			return err
		}
		d := b.device
		s, err := d.NewStream()
		if err != nil {
			return err
		}
		word, wordErr := d.Alloc(4)
		p, err := d.Alloc(most / 2)
		if err = errors.Join(err, wordErr, s.WaitValue32(word, 1), d.Free(p)); err != nil {
			return err
		}
		time.Sleep(200 * time.Millisecond) // until the device looks less often
		if err := errors.Join(d.CopyFromHost(word, []byte{1, 0, 0, 0}), s.Synchronize(ctx)); err != nil {
			return err
		}
		a, err := b.Allocate(ctx, most*3/4)
		if err == nil {
			err = a.Release(ctx)
		}
		return errors.Join(err, d.Free(word), s.Close(), b.Close(ctx))
	}))
	require.NoError(t, machine.Err())
}
