package cuda_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/cuda"
	cu "github.com/symmem/symmem/internal/cuda"
)

// TestEndCaptureWhileAForkRecords: what another goroutine enqueues on a stream that has joined a capture is either in the capture when that ends, or not at
// all: what would run at once, taken for recorded, nobody would look after.
func TestEndCaptureWhileAForkRecords(t *testing.T) {
	for what, enqueue := range map[string]func(s *cuda.Stream, p device.Ptr) error{
		"WaitValue32": func(s *cuda.Stream, p device.Ptr) error { return s.WaitValue32(p, 1) },
		"HostWork":    func(s *cuda.Stream, _ device.Ptr) error { return s.HostWork(&jobOf{}) },
	} {
		t.Run(what, func(t *testing.T) {
			drv := newFake(1).driver()
			batch := drv.StreamBatchMemOp
			var during func()
			drv.StreamBatchMemOp = func(s cu.StreamHandle, n uint32, ops *cu.BatchMemOp, flags uint32) cu.Result {
				if f := during; f != nil {
					during = nil
					f()
				}
				return batch(s, n, ops, flags)
			}
			d, err := cuda.Open(&cuda.Options{Driver: drv, WaitTimeout: 100 * time.Millisecond})
			require.NoError(t, err)
			closeInTheEnd(t, d)
			origin, fork := newStream(t, d), newStream(t, d)
			forked, joined := newEvent(t, d), newEvent(t, d)
			p := alloc(t, d, 4)
			require.NoError(t, origin.BeginCapture())
			require.NoError(t, origin.Record(forked))
			require.NoError(t, fork.WaitEvent(forked))
			require.NoError(t, fork.Record(joined))
			require.NoError(t, origin.WaitEvent(joined))
			ended := make(chan error, 1)
			during = func() {
				go func() {
					_, err := origin.EndCapture()
					ended <- err
				}()
				time.Sleep(50 * time.Millisecond) // most often it has ended by now, or waits
			}
			require.NoError(t, enqueue(fork, p))
			var unjoined *device.CaptureError
			require.ErrorAs(t, <-ended, &unjoined)
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			require.NoError(t, fork.Synchronize(ctx))
		})
	}
}
