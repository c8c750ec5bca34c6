package cuda_test

import (
	"context"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/cuda"
	cu "github.com/symmem/symmem/internal/cuda"
)

// capture records what body enqueues.
func capture(t testing.TB, s *cuda.Stream, body func()) device.Graph {
	t.Helper()
	require.NoError(t, s.BeginCapture())
	body()
	g, err := s.EndCapture()
	require.NoError(t, err)
	return g
}

// noHostFuncs waits until the driver has dropped the host functions of closed graphs, which it does by and by.
func noHostFuncs(t testing.TB, d *cuda.Device) {
	t.Helper()
	require.Eventually(t, func() bool {
		assert.NoError(t, d.Synchronize(context.Background()))
		return d.Stats().HostFuncs == 0
	}, patience, 5*time.Millisecond)
}

// A graph keeps its host functions for as long as something may launch them.
func TestGraphsGiveHostFuncsBack(t *testing.T) {
	onEach(t, nil, func(t *testing.T, d *cuda.Device) {
		s := newStream(t, d)
		var c counter
		g := capture(t, s, func() {
			require.NoError(t, s.HostFunc(c.run))
			require.NoError(t, s.HostFunc(c.run))
		})
		assert.Equal(t, 2, d.Stats().HostFuncs)
		runtime.GC()
		for range 3 {
			require.NoError(t, g.Launch(s))
		}
		synchronize(t, s)
		assert.EqualValues(t, 6, c.runs.Load())
		require.NoError(t, g.Close())
		noHostFuncs(t, d)

		inner := capture(t, s, func() { require.NoError(t, s.HostFunc(c.run)) })
		outer := capture(t, s, func() { require.NoError(t, inner.Launch(s)) })
		require.NoError(t, inner.Launch(s))
		require.NoError(t, inner.Close())
		require.NoError(t, outer.Launch(s))
		synchronize(t, s)
		assert.EqualValues(t, 8, c.runs.Load())
		assert.Equal(t, 1, d.Stats().HostFuncs)
		require.NoError(t, outer.Close())
		noHostFuncs(t, d)
	})
}

// TestGraphThatWasHalfIncluded: the driver keeps the copy of a graph though the call that puts it in its place in the capture has failed. Its work of the
// CPU is done then, as nothing else would end the launch.
func TestGraphThatWasHalfIncluded(t *testing.T) {
	f := newFake(1)
	d := openFake(t, f, nil)
	s := newStream(t, d)
	inner := capture(t, s, func() { require.NoError(t, s.HostWork(&jobOf{})) })
	outer := capture(t, s, func() {
		f.failing("cuStreamUpdateCaptureDependencies", cu.InvalidValue)
		require.Error(t, inner.Launch(s))
		f.failing("cuStreamUpdateCaptureDependencies", cu.Success)
	})
	require.NoError(t, outer.Launch(s))
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	require.NoError(t, s.Synchronize(ctx))
}

// TestNestedGraphsGiveEventsBack: what orders the launches of graphs that are part of others is used again when no graph is left that has them, however the captures ended.
func TestNestedGraphsGiveEventsBack(t *testing.T) {
	f := newFake(1)
	d := openFake(t, f, nil)
	s, fork := newStream(t, d), newStream(t, d)
	forked := newEvent(t, d)
	events := func() int {
		f.mu.Lock()
		defer f.mu.Unlock()
		return len(f.events)
	}
	most := 0
	for i := range 50 {
		var c counter
		inner := capture(t, s, func() { require.NoError(t, s.HostFunc(c.run)) })
		middle := capture(t, s, func() {
			require.NoError(t, inner.Launch(s))
			require.NoError(t, inner.Launch(s))
		})
		outer := capture(t, s, func() {
			require.NoError(t, middle.Launch(s))
			require.NoError(t, inner.Launch(s))
			require.NoError(t, inner.Close(), "a graph keeps what it was made of")
		})
		require.NoError(t, s.BeginCapture())
		require.NoError(t, middle.Launch(s))
		if i%2 == 0 {
			require.NoError(t, s.Record(forked))
			require.NoError(t, fork.WaitEvent(forked))
			require.NoError(t, fork.HostFunc(c.run))
		} else {
			f.failing("cuGraphInstantiateWithFlags", cu.InvalidValue)
		}
		_, err := s.EndCapture()
		require.Error(t, err)
		f.failing("cuGraphInstantiateWithFlags", cu.Success)
		require.NoError(t, middle.Launch(s))
		require.NoError(t, middle.Close())
		for range 2 {
			require.NoError(t, outer.Launch(s))
			require.NoError(t, outer.Launch(fork))
		}
		synchronize(t, s)
		synchronize(t, fork)
		assert.EqualValues(t, 2+4*3, c.runs.Load())
		require.NoError(t, outer.Close())
		if i == 0 {
			most = events()
		}
		assert.LessOrEqual(t, events(), most+2)
	}
	// A device that is closed with graphs and a capture gives them back, too.
	inner := capture(t, s, func() {})
	outer := capture(t, s, func() { require.NoError(t, inner.Launch(s)) })
	require.NoError(t, outer.Launch(s))
	require.NoError(t, s.BeginCapture())
	require.NoError(t, outer.Launch(s))
	require.NoError(t, d.Close())
	f.assertEmpty(t)
}

// TestNestedGraphWaitsForItsOwnLaunches: a graph that became part of another one while the stream of its launch was in the capture waits for that launch, and not for what
// the stream, or another one, was asked to mark since.
func TestNestedGraphWaitsForItsOwnLaunches(t *testing.T) {
	for name, again := range map[string]func(d *cuda.Device, fork *cuda.Stream, word device.Ptr){
		"the stream is closed": func(d *cuda.Device, fork *cuda.Stream, word device.Ptr) {
			require.NoError(t, fork.Close())
			other := newStream(t, d)
			require.NoError(t, other.WaitValue32(word, 1))
			short, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
			defer cancel()
			require.ErrorIs(t, other.Synchronize(short), context.DeadlineExceeded)
		},
		"the stream captures again": func(_ *cuda.Device, fork *cuda.Stream, word device.Ptr) {
			require.NoError(t, fork.WaitValue32(word, 1))
			capture(t, fork, func() {})
		},
	} {
		t.Run(name, func(t *testing.T) {
			d := openFake(t, newFake(1), &cuda.Options{WaitTimeout: 2 * time.Second})
			s, fork, word := newStream(t, d), newStream(t, d), alloc(t, d, 4)
			forked, joined := newEvent(t, d), newEvent(t, d)
			inner := capture(t, s, func() { require.NoError(t, s.HostFunc(func() {})) })
			require.NoError(t, inner.Launch(fork))
			outer := capture(t, s, func() {
				require.NoError(t, s.Record(forked))
				require.NoError(t, fork.WaitEvent(forked))
				require.NoError(t, inner.Launch(s))
				require.NoError(t, fork.Record(joined))
				require.NoError(t, s.WaitEvent(joined))
			})
			again(d, fork, word)
			require.NoError(t, outer.Launch(s))
			require.NoError(t, s.WriteValue32(word, 1))
			synchronize(t, s)
			require.NoError(t, d.Synchronize(bounded(t)))
			require.NoError(t, d.Close(), "nobody waited in vain")
		})
	}
}
