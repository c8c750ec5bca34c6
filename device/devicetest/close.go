package devicetest

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/device"
)

func streamClose(t *testing.T, h Harness) {
	d := h.open(t)
	s := newStream(t, d)
	e := newEvent(t, d)
	p := alloc(t, d, 64)
	var c counter
	n := h.many(100, 1000)
	require.NoError(t, s.HostFunc(func() { time.Sleep(10 * time.Millisecond) }))
	for range n {
		require.NoError(t, enqueue(s, c.RunKernel))
	}
	require.NoError(t, s.Record(e))
	g := capture(t, s, func() { require.NoError(t, s.Fill(p, 1, 8)) })
	require.NoError(t, s.Close())
	assert.EqualValues(t, n, c.runs.Load(), "Close runs what is queued")
	assert.Equal(t, Held{Events: 1, Graphs: 1, Allocations: 1, Bytes: 64}, h.Held(d))

	_, queryErr := s.Query()
	_, endErr := s.EndCapture()
	for i, err := range []error{
		s.Close(), enqueue(s, c.RunKernel), s.HostFunc(func() {}), s.Copy(p, p.Add(32), 8), s.Copy(0, 0, 0), s.Copy(0, 0, 8),
		s.Fill(p, 1, 8), s.Fill(p, 1, 0), s.WriteValue32(p, 1), s.WriteValue32(0, 1), s.WaitValue32(p, 0), s.Record(e),
		s.WaitEvent(e), s.BeginCapture(), endErr, queryErr, s.Synchronize(bounded(t)), g.Launch(s),
	} {
		assert.ErrorIs(t, err, device.ErrClosed, "call %d", i)
	}
	assert.False(t, s.Capturing())
	done, err := e.Query()
	require.NoError(t, err)
	assert.True(t, done, "the event outlives its stream")
	require.NoError(t, newStream(t, d).Close(), "a stream that never worked")
}

func closeReturnsErrorsNobodyAskedFor(t *testing.T, h Harness) {
	d := h.open(t)
	s := newStream(t, d)
	boom := errors.New("boom")
	require.NoError(t, enqueue(s, failing(boom)))
	require.ErrorIs(t, s.Close(), boom, "an error nobody asked for is not lost")
	require.ErrorIs(t, s.Close(), device.ErrClosed)
	other := newStream(t, d)
	require.NoError(t, other.HostFunc(runtime.Goexit))
	require.ErrorContains(t, other.Close(), "Goexit")
}

func deviceClose(t *testing.T, h Harness) {
	d := h.open(t)
	streams := []device.Stream{newStream(t, d), newStream(t, d), newStream(t, d)}
	e := newEvent(t, d)
	p := alloc(t, d, 1<<20)
	boom := errors.New("boom")
	var c counter
	var entered atomic.Bool
	opened := make(chan struct{})
	require.NoError(t, enqueue(streams[0], func() error {
		entered.Store(true)
		select {
		case <-opened:
			return nil
		case <-time.After(patience):
			return errors.New("nobody lets the work go on")
		}
	}))
	for range 100 {
		require.NoError(t, enqueue(streams[0], c.RunKernel))
	}
	require.NoError(t, streams[0].Record(e))
	require.NoError(t, streams[1].WaitEvent(e))
	require.NoError(t, streams[1].Fill(p, 3, 1<<20))
	require.NoError(t, enqueue(streams[1], failing(boom)))
	g := capture(t, streams[1], func() { require.NoError(t, enqueue(streams[1], c.RunKernel)) })
	require.NoError(t, streams[2].BeginCapture(), "a capture that nobody ends")
	require.NoError(t, enqueue(streams[2], c.RunKernel))
	time.AfterFunc(50*time.Millisecond, func() { close(opened) })
	awaitWork(t, streams[0], &entered)
	require.ErrorIs(t, d.Close(), boom)
	assert.EqualValues(t, 100, c.runs.Load())
	assert.Equal(t, Held{}, h.Held(d))

	_, allocErr := d.Alloc(1)
	_, streamErr := d.NewStream()
	_, eventErr := d.NewEvent()
	_, queryErr := e.Query()
	for i, err := range []error{
		d.Close(), allocErr, streamErr, eventErr, queryErr, d.Free(p), d.CopyFromHost(p, []byte{1}), d.CopyToHost(make([]byte, 1), p),
		d.CopyToHost(nil, p), d.Synchronize(bounded(t)), e.Close(), e.Synchronize(bounded(t)), g.Close(), g.Launch(streams[0]),
		streams[0].Close(), enqueue(streams[2], c.RunKernel), streams[0].Record(e), streams[1].Copy(p, p.Add(8), 1),
	} {
		assert.ErrorIs(t, err, device.ErrClosed, "call %d", i)
	}
}

func deviceCloseRacesWithEverything(t *testing.T, h Harness) {
	h.open(t) // where devices share something that takes long to make, it stays
	for range h.many(5, 30) {
		d := h.open(t)
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				for range h.many(30, 50) {
					s, err := d.NewStream()
					if err != nil {
						assert.ErrorIs(t, err, device.ErrClosed)
						return
					}
					p, err := d.Alloc(64)
					if err == nil {
						_ = s.Fill(p, 1, 64)
						_ = s.WriteValue32(p, 1)
						_ = s.WaitValue32(p, 1)
						if s.Synchronize(context.Background()) == nil { // else the work may be under way still, and needs it
							_ = d.Free(p)
						}
					}
					_ = s.Close()
				}
			})
		}
		assert.NoError(t, d.Close())
		wg.Wait()
		assert.Equal(t, Held{}, h.Held(d))
	}
}
