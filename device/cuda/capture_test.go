package cuda_test

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
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

// TestAskingAForkWhileItsCaptureEnds: until the driver has ended a capture, the streams that joined it capture. Whoever asks them meanwhile, for the work that they have or
// for memory that is freed, must not ask the driver: it would throw the capture away.
func TestAskingAForkWhileItsCaptureEnds(t *testing.T) {
	f := newFake(1)
	drv := f.driver()
	var captures atomic.Uintptr // the fork, while the driver has not ended the capture
	var invalidated atomic.Bool
	end, query, record := drv.StreamEndCapture, drv.StreamQuery, drv.EventRecord
	drv.StreamQuery = func(s cu.StreamHandle) cu.Result {
		if uintptr(s) == captures.Load() {
			invalidated.Store(true)
		}
		return query(s)
	}
	drv.EventRecord = func(e cu.EventHandle, s cu.StreamHandle) cu.Result {
		if uintptr(s) == captures.Load() {
			invalidated.Store(true) // what is recorded for a wait is recorded in the capture
		}
		return record(e, s)
	}
	var during func()
	drv.StreamEndCapture = func(s cu.StreamHandle, g *cu.GraphHandle) cu.Result {
		if during != nil {
			during()
		}
		return end(s, g)
	}
	d, err := cuda.Open(&cuda.Options{Driver: drv})
	require.NoError(t, err)
	closeInTheEnd(t, d)
	for what, ask := range map[string]func(fork *cuda.Stream){
		"Query":              func(fork *cuda.Stream) { _, _ = fork.Query() },
		"Synchronize":        func(fork *cuda.Stream) { _ = fork.Synchronize(bounded(t)) },
		"Close":              func(fork *cuda.Stream) { _ = fork.Close() },
		"Free":               func(*cuda.Stream) { require.NoError(t, d.Free(alloc(t, d, 4))) },
		"a graph's launches": nil, // see below
	} {
		t.Run(what, func(t *testing.T) {
			origin, fork := newStream(t, d), newStream(t, d)
			other := newStream(t, d)
			forked, joined := newEvent(t, d), newEvent(t, d)
			inner := capture(t, other, func() {})
			require.NoError(t, inner.Launch(fork))
			if ask == nil {
				ask = func(*cuda.Stream) { capture(t, other, func() { require.NoError(t, inner.Launch(other)) }) }
			}
			require.NoError(t, origin.BeginCapture())
			require.NoError(t, origin.Record(forked))
			require.NoError(t, fork.WaitEvent(forked))
			require.NoError(t, fork.Record(joined))
			require.NoError(t, origin.WaitEvent(joined))
			invalidated.Store(false)
			captures.Store(fork.Handle())
			during = func() {
				during = nil
				ask(fork)
				captures.Store(0)
			}
			g, err := origin.EndCapture()
			require.NoError(t, err)
			require.False(t, invalidated.Load(), "the driver was asked")
			require.NoError(t, fork.HostFunc(func() {}))
			require.NoError(t, fork.Synchronize(bounded(t)))
			require.NoError(t, g.Close())
			require.NoError(t, inner.Close())
		})
	}
}

// TestAskingAForkWhileTheDeviceCloses: the same where it is the close of the device that ends the capture, and a call from before it asks the streams.
func TestAskingAForkWhileTheDeviceCloses(t *testing.T) {
	f := newFake(1)
	drv := f.driver()
	var captured sync.Map // the forks, while the driver has not ended the capture
	var asked, ends atomic.Bool
	query, end, pop := drv.StreamQuery, drv.StreamEndCapture, drv.CtxPopCurrent
	drv.StreamQuery = func(s cu.StreamHandle) cu.Result {
		if _, is := captured.Load(s); is {
			asked.Store(true)
		}
		return query(s)
	}
	looked, left := make(chan struct{}, 1), make(chan struct{})
	drv.StreamEndCapture = func(s cu.StreamHandle, g *cu.GraphHandle) cu.Result {
		ends.Store(true)
		for range 50 { // in orders of their own
			select {
			case <-looked:
			case <-left: // on one processor there may be fewer in its time
			}
		}
		captured.Clear()
		return end(s, g)
	}
	drv.CtxPopCurrent = func(c *cu.ContextHandle) cu.Result {
		if ends.Load() {
			select {
			case looked <- struct{}{}:
			default:
			}
		}
		return pop(c)
	}
	d, err := cuda.Open(&cuda.Options{Driver: drv})
	require.NoError(t, err)
	closeInTheEnd(t, d)
	origin, forked := newStream(t, d), newEvent(t, d)
	require.NoError(t, origin.BeginCapture())
	require.NoError(t, origin.Record(forked))
	for range 16 { // some of which are closed before the stream that began
		fork := newStream(t, d)
		require.NoError(t, fork.WaitEvent(forked))
		captured.Store(cu.StreamHandle(fork.Handle()), true)
	}
	stop := make(chan struct{})
	inside := make(chan struct{})
	go func() {
		defer close(left)
		// Within a call that began before the close, whose own end the close waits for.
		assert.NoError(t, d.WithContext(func() error {
			close(inside)
			for {
				select {
				case <-stop:
					return nil
				default:
					cuda.AskStreams(d)
				}
			}
		}))
	}()
	<-inside
	time.AfterFunc(100*time.Millisecond, func() { close(stop) })
	require.NoError(t, d.Close())
	<-left
	require.False(t, asked.Load(), "the driver was asked")
}
