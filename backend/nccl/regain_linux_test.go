package nccl

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/simcuda"
	"github.com/symmem/symmem/internal/simlib"
	"github.com/symmem/symmem/memory"
)

// TestAllocateWaitsForFreedMemory: memory of the device that was freed while a stream had work is there for NCCL's as soon as the stream has none.
func TestAllocateWaitsForFreedMemory(t *testing.T) {
	const most = 64 << 20
	machine, err := simcuda.New(simcuda.Config{Each: []simcuda.GPU{{Memory: most}}, Seed: 1})
	require.NoError(t, err)
	lib := simlib.NewNCCL(machine)
	backendtest.RequireAll(t, backendtest.OnRanks(t, 1, nil, func(ctx context.Context, g *group.Group) error {
		o := &Options{Driver: machine.Driver(), Functions: lib.Functions(), Multicast: "off", KernelTimeout: time.Minute}
		return withMemory(ctx, g, o, func(b *Backend, _ *memory.Memory) error {
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
			return errors.Join(err, d.Free(word), s.Close())
		})
	}))
	assert.Empty(t, lib.Left())
	require.NoError(t, machine.Err())
}
