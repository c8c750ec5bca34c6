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
