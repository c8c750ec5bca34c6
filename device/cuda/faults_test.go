package cuda_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/cuda"
	cu "github.com/symmem/symmem/internal/cuda"
)

// Each call of the driver fails in turn, while everything is done once. Whatever comes of it, nothing crashes, and when the
// call works again everything can be given back.
func TestEveryCallMayFail(t *testing.T) {
	everything := func(d *cuda.Device) error {
		ctx, cancel := context.WithTimeout(context.Background(), 500*time.Millisecond) // a failure may leave a wait behind
		defer cancel()
		s, err := d.NewStream()
		if err != nil {
			return err
		}
		var failed []error
		note := func(err error) {
			if err != nil {
				failed = append(failed, err)
			}
		}
		defer func() { _ = s.Close() }()
		p, err := d.Alloc(4096)
		note(err)
		if err == nil {
			note(d.CopyFromHost(p, make([]byte, 4096)))
			note(d.CopyToHost(make([]byte, 4096), p))
			note(s.Fill(p, 1, 64))
			note(s.Copy(p, p.Add(64), 64))
			note(s.WriteValue32(p, 1))
			note(s.WaitValue32(p, 1))
		}
		e, err := d.NewEvent()
		note(err)
		if err == nil {
			note(s.Record(e))
			note(s.WaitEvent(e))
			note(e.Synchronize(ctx))
			_, err := e.Since(e)
			note(err)
			note(e.Close())
		}
		note(s.HostFunc(func() {}))
		if err := s.BeginCapture(); err != nil {
			note(err)
		} else {
			note(s.HostFunc(func() {}))
			g, err := s.EndCapture()
			note(err)
			if err == nil {
				note(g.Launch(s))
				if err := s.BeginCapture(); err != nil {
					note(err)
				} else {
					note(g.Launch(s))
					outer, err := s.EndCapture()
					note(err)
					if err == nil {
						note(outer.Launch(s))
						note(outer.Close())
					}
				}
				note(g.Close())
			}
		}
		m, err := d.LoadModule([]byte(ptx))
		note(err)
		if err == nil {
			f, err := m.Function("kernel")
			note(err)
			if err == nil && p != 0 {
				_, err := f.MaxBlocks(32, 100<<10)
				note(err)
				l, err := f.Prepare(device.Launch{Params: params(p, 1), SharedBytes: 100 << 10})
				note(err)
				if err == nil {
					note(l.Launch(s))
				}
			}
		}
		w, err := d.NewFaultWord(func(uint64) error { return nil })
		note(err)
		if err == nil {
			note(w.Close())
		}
		_, err = s.Query()
		note(err)
		note(s.Synchronize(ctx))
		note(d.Synchronize(ctx))
		if p != 0 {
			note(d.Free(p))
		}
		return errors.Join(failed...)
	}

	f := newFake(1)
	d := openFake(t, f, nil)
	require.NoError(t, everything(d))
	require.NoError(t, d.Close())
	f.assertEmpty(t)

	for symbol := range f.calls {
		t.Run(symbol, func(t *testing.T) {
			for _, r := range []cu.Result{cu.InvalidValue, cu.OutOfMemory, cu.IllegalAddress} {
				f := newFake(1)
				d, err := cuda.Open(&cuda.Options{Driver: f.driver(), WaitTimeout: 200 * time.Millisecond})
				require.NoError(t, err)
				f.failing(symbol, r)
				err = everything(d)
				f.failing(symbol, cu.Success)
				switch symbol {
				case "cuInit", "cuDriverGetVersion", "cuGetErrorName", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetUuid_v2",
					"cuDeviceGetName", "cuDeviceGetPCIBusId", "cuDeviceGetAttribute", "cuDevicePrimaryCtxRetain",
					"cuDevicePrimaryCtxRelease_v2", "cuModuleUnload",
					"cuCtxPopCurrent_v2", "cuStreamDestroy_v2", "cuEventElapsedTime", "cuEventQuery":
					// not called here, or its failure is logged, or there is another way
				default:
					require.Error(t, err, "%v", r)
				}
				if r == cu.IllegalAddress && err != nil && symbol != "cuGetErrorName" {
					assert.ErrorIs(t, err, cuda.ErrContextLost)
				}
				_ = d.Close() // may report what became of the streams
				assert.Equal(t, cuda.Stats{}, d.Stats())
			}
		})
	}
}

// TestContextLost: whatever ends a context is told from what does not.
func TestContextLost(t *testing.T) {
	f := newFake(1)
	d := openFake(t, f, nil)
	s, p := newStream(t, d), alloc(t, d, 8)
	for r, advice := range map[cu.Result]string{cu.IllegalAddress: "compute-sanitizer", cu.TensorMemoryLeak: "compute-sanitizer", cu.ExternalDevice: "compute-sanitizer", cu.MPSClientTerminated: "MPS server", cu.NotSupported: ""} {
		f.failing("cuMemsetD8Async", r)
		err := s.Fill(p, 1, 8)
		require.Error(t, err, r)
		assert.Equal(t, advice != "", errors.Is(err, cuda.ErrContextLost), "%v", err)
		assert.ErrorContains(t, err, advice)
	}
	f.failing("cuMemsetD8Async", cu.Success)
}

// A call that fails names itself, with the driver's code, name and text, and keeps the sort of failure.
func TestErrorsNameTheCall(t *testing.T) {
	f := newFake(1)
	d := openFake(t, f, nil)
	s := newStream(t, d)
	p := alloc(t, d, 8)
	f.failing("cuMemsetD8Async", cu.LaunchFailed)
	err := s.Fill(p, 1, 8)
	f.failing("cuMemsetD8Async", cu.Success)
	require.ErrorIs(t, err, cuda.ErrContextLost)
	var failed *cuda.Error
	require.ErrorAs(t, err, &failed)
	assert.Equal(t, "cuMemsetD8Async", failed.Call)
	assert.Equal(t, 719, failed.Code)
	require.ErrorContains(t, err, "compute-sanitizer")

	f.failing("cuEventQuery", cu.IllegalAddress)
	f.failing("cuStreamQuery", cu.NotReady)
	require.ErrorIs(t, s.Synchronize(bounded(t)), cuda.ErrContextLost)
	require.ErrorIs(t, d.Synchronize(bounded(t)), cuda.ErrContextLost)
	f.failing("cuEventQuery", cu.Success)
	f.failing("cuStreamQuery", cu.Success)
}

// Synchronize waits for a copy whose call has failed, since nothing may free its memory before; and it says when it cannot tell whether the copy has
// ended.
func TestSynchronizeWaitsForFailedCopies(t *testing.T) {
	f := newFake(1)
	d := openFake(t, f, nil)
	p := alloc(t, d, 8)
	data := make([]byte, 8)
	f.failing("cuEventRecord", cu.Unknown)
	require.ErrorContains(t, d.CopyFromHost(p, data), "cuEventRecord")
	f.failing("cuEventRecord", cu.Success)

	f.failing("cuStreamQuery", cu.NotReady)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	err := d.Synchronize(ctx)
	require.ErrorIs(t, err, context.DeadlineExceeded, "the copy is under way")
	require.ErrorContains(t, err, "copy")
	require.ErrorContains(t, d.CopyToHost(data, p), "cuEventRecord", "so no other can begin")

	f.failing("cuStreamQuery", cu.Unknown)
	require.ErrorContains(t, d.Synchronize(bounded(t)), "cuStreamQuery")
	f.failing("cuStreamQuery", cu.IllegalAddress)
	require.ErrorIs(t, d.Synchronize(bounded(t)), cuda.ErrContextLost)

	f.failing("cuStreamQuery", cu.Success)
	require.NoError(t, d.Synchronize(bounded(t)))
	require.NoError(t, d.CopyToHost(data, p))
	f.failing("cuStreamQuery", cu.NotReady) // nobody asks any more
	require.NoError(t, d.Synchronize(bounded(t)))
	f.failing("cuStreamQuery", cu.Success)
}
