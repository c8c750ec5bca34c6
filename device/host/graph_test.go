package host_test

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/host"
)

// capture records what body enqueues.
func capture(t testing.TB, s *host.Stream, body func()) device.Graph {
	t.Helper()
	require.NoError(t, s.BeginCapture())
	body()
	g, err := s.EndCapture()
	require.NoError(t, err)
	return g
}

// The host replays even streams that are not ordered against each other in the order in which they were recorded.
func TestForksReplayInTheRecordedOrder(t *testing.T) {
	d := open(t, nil)
	origin, left, right := newStream(t, d), newStream(t, d), newStream(t, d)
	fork, leftDone, rightDone := newEvent(t, d), newEvent(t, d), newEvent(t, d)
	var order []string
	step := func(name string) func() { return func() { order = append(order, name) } }
	g := capture(t, origin, func() {
		require.NoError(t, origin.HostFunc(step("begin")))
		require.NoError(t, origin.Record(fork))
		require.NoError(t, left.WaitEvent(fork))
		require.NoError(t, right.WaitEvent(fork))
		require.NoError(t, left.HostFunc(step("left")))
		require.NoError(t, right.HostFunc(step("right")))
		require.NoError(t, left.Record(leftDone))
		require.NoError(t, right.WaitEvent(leftDone))
		require.NoError(t, right.HostFunc(step("right again")))
		require.NoError(t, right.Record(rightDone))
		require.NoError(t, origin.WaitEvent(rightDone))
		require.NoError(t, origin.HostFunc(step("end")))
	})
	require.NoError(t, g.Launch(right))
	synchronize(t, right)
	assert.Equal(t, []string{"begin", "left", "right", "right again", "end"}, order)
}

// A stream that joined must be joined back even if it recorded nothing, and the error counts those that were not.
func TestUnjoinedForkIsCounted(t *testing.T) {
	for name, body := range map[string]func(origin, fork *host.Stream, e *host.Event) error{
		"no work":      func(*host.Stream, *host.Stream, *host.Event) error { return nil },
		"never joined": func(_, fork *host.Stream, _ *host.Event) error { return fork.HostFunc(func() {}) },
		"work behind the join": func(origin, fork *host.Stream, e *host.Event) error {
			return errors.Join(fork.HostFunc(func() {}), fork.Record(e), fork.HostFunc(func() {}), origin.WaitEvent(e))
		},
	} {
		t.Run(name, func(t *testing.T) {
			d := open(t, nil)
			origin, fork := newStream(t, d), newStream(t, d)
			e := newEvent(t, d)
			require.NoError(t, origin.BeginCapture())
			require.NoError(t, origin.Record(e))
			require.NoError(t, fork.WaitEvent(e))
			require.NoError(t, body(origin, fork, e))
			_, err := origin.EndCapture()
			var refused *host.CaptureError
			require.ErrorAs(t, err, &refused)
			require.ErrorIs(t, err, device.ErrInvalid)
			assert.Contains(t, err.Error(), "1 stream(s)")
			assert.False(t, origin.Capturing(), "the capture has ended all the same")
			var c counter
			require.NoError(t, fork.Launch(&c))
			assert.False(t, fork.Capturing())
			synchronize(t, fork)
			assert.EqualValues(t, 1, c.runs.Load())
			assert.Zero(t, d.Stats().Graphs)
		})
	}
}

// Copies are checked when they are recorded, and again whenever they run.
func TestGraphOfFreedMemory(t *testing.T) {
	d := open(t, nil)
	s := newStream(t, d)
	p, q := alloc(t, d, 64), alloc(t, d, 64)
	boom := errors.New("boom")
	var c counter
	g := capture(t, s, func() {
		require.NoError(t, s.Launch(kernel(func() error { return boom })))
		require.NoError(t, s.Copy(p, q, 64))
		require.NoError(t, s.Launch(&c))
		require.ErrorIs(t, s.Copy(p, q, 65), device.ErrInvalid, "checked when it is recorded, too")
	})
	require.NoError(t, g.Launch(s))
	require.ErrorIs(t, s.Synchronize(bounded(t)), boom)
	require.NoError(t, d.Free(q))
	require.NoError(t, g.Launch(s))
	err := s.Synchronize(bounded(t))
	var work *host.WorkError
	require.ErrorAs(t, err, &work)
	assert.Equal(t, 1, work.More, "the copy out of freed memory")
	assert.EqualValues(t, 2, c.runs.Load())
}
