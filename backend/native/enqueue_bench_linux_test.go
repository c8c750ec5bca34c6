package native

import (
	"context"
	"errors"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/simcuda"
	"github.com/symmem/symmem/memory"
)

// BenchmarkEnqueueing is what this module adds to the driver's calls when a put with a signal behind it, a signal, a wait and a copy are enqueued: those calls do
// nothing here.
func BenchmarkEnqueueing(b *testing.B) {
	machine, err := simcuda.New(simcuda.Config{GPUs: 1, Seed: 1})
	require.NoError(b, err)
	backendtest.RequireAll(b, backendtest.OnRanks(b, 1, nil, func(ctx context.Context, g *group.Group) error {
		driver := machine.Driver()
		n, err := New(ctx, g, &Options{Driver: driver, Multicast: config.MulticastOff, KernelTimeout: time.Minute})
		if err != nil {
			return err
		}
		m := memory.New(n, g, &memory.Options{Channels: 1, KernelTimeout: time.Minute})
		err = backendtest.WithWindow(ctx, m, 1<<20, func(w *memory.Window) error {
			own, err := w.Peer(0, 0)
			if err != nil {
				return err
			}
			s, err := m.Device().NewStream()
			if err != nil {
				return err
			}
			signal, wait := func() error { return m.Signal(s, 0, 0) }, func() error { return m.Wait(s, 0, 0) }
			put := func() error { return s.Copy(own.Add(4096), own, 1024) }
			both := func() error { return m.PutSignal(s, 0, w, 4096, own, 1024, 0) }
			for _, c := range []struct {
				name             string
				enqueue, partner func() error // what waits for what is prepared for the first run, or signals it
			}{{"put with signal", both, wait}, {"signal", signal, wait}, {"wait", wait, signal}, {"put", put, put}} {
				b.Run(c.name, func(b *testing.B) {
					if c.name == "wait" {
						require.NoError(b, errors.Join(c.partner(), c.enqueue()))
					} else {
						require.NoError(b, errors.Join(c.enqueue(), c.partner()))
					}
					require.NoError(b, s.Synchronize(ctx))
					launch, copies := driver.LaunchKernelEx, driver.MemcpyDtoDAsync
					driver.LaunchKernelEx = func(*cu.LaunchConfig, cu.FunctionHandle, *unsafe.Pointer, *unsafe.Pointer) cu.Result {
						return cu.Success
					}
					driver.MemcpyDtoDAsync = func(device.Ptr, device.Ptr, uint64, cu.StreamHandle) cu.Result { return cu.Success }
					defer func() { driver.LaunchKernelEx, driver.MemcpyDtoDAsync = launch, copies }()
					b.ReportAllocs()
					for b.Loop() {
						if err := c.enqueue(); err != nil {
							b.Fatal(err)
						}
					}
				})
			}
			return s.Close()
		})
		return errors.Join(err, m.Close(ctx))
	}))
}
