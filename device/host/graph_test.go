package host_test

import (
	"errors"
	"runtime"
	"sync"
	"testing"
	"time"

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

// Branches of a graph run side by side, each time, and what the events order runs in that order.
func TestBranchesReplaySideBySide(t *testing.T) {
	d := open(t, nil)
	origin, left, right := newStream(t, d), newStream(t, d), newStream(t, d)
	fork, leftDone, rightDone := newEvent(t, d), newEvent(t, d), newEvent(t, d)
	var mu sync.Mutex
	var order []string
	step := func(name string) func() {
		return func() {
			mu.Lock()
			defer mu.Unlock()
			order = append(order, name)
		}
	}
	there, back := make(chan struct{}, 1), make(chan struct{}, 1)
	g := capture(t, origin, func() {
		require.NoError(t, origin.HostFunc(step("begin")))
		require.NoError(t, origin.Record(fork))
		require.NoError(t, left.WaitEvent(fork))
		require.NoError(t, right.WaitEvent(fork))
		// Each needs the other to have begun.
		require.NoError(t, left.HostFunc(func() { there <- struct{}{}; <-back; step("left")() }))
		require.NoError(t, right.HostFunc(func() { <-there; back <- struct{}{} }))
		require.NoError(t, left.Record(leftDone))
		require.NoError(t, right.WaitEvent(leftDone))
		require.NoError(t, right.HostFunc(step("right")))
		require.NoError(t, right.Record(rightDone))
		require.NoError(t, origin.WaitEvent(rightDone))
		require.NoError(t, origin.HostFunc(step("end")))
	})
	for range 100 {
		order = nil
		require.NoError(t, g.Launch(right))
		require.NoError(t, g.Launch(right))
		synchronize(t, right)
		assert.Equal(t, []string{"begin", "left", "right", "end", "begin", "left", "right", "end"}, order)
	}
}

// What fails in any branch is told by the stream that launched, and a branch goes on behind work that panics or ends its goroutine.
func TestFailuresOfBranches(t *testing.T) {
	d := open(t, nil)
	origin, side, other := newStream(t, d), newStream(t, d), newStream(t, d)
	fork, join := newEvent(t, d), newEvent(t, d)
	boom := errors.New("boom")
	var c counter
	g := capture(t, origin, func() {
		require.NoError(t, origin.Record(fork))
		require.NoError(t, side.WaitEvent(fork))
		require.NoError(t, side.Launch(kernel(func() error { return boom })))
		require.NoError(t, side.HostFunc(func() { panic("no") }))
		require.NoError(t, side.Launch(&c))
		require.NoError(t, side.HostFunc(runtime.Goexit)) // the last of the branch
		require.NoError(t, side.Record(join))
		require.NoError(t, origin.WaitEvent(join))
		require.NoError(t, origin.HostFunc(runtime.Goexit))
		require.NoError(t, origin.Launch(&c))
	})
	for i := range 3 {
		require.NoError(t, g.Launch(other))
		err := other.Synchronize(bounded(t))
		require.ErrorIs(t, err, boom)
		var work *device.WorkError
		require.ErrorAs(t, err, &work)
		assert.Equal(t, 3, work.More)
		assert.EqualValues(t, 2*(i+1), c.runs.Load())
		require.NoError(t, side.Synchronize(bounded(t)), "it was not launched there")
	}
}

// A graph that is part of two branches of another one runs twice, one after the other.
func TestGraphInTwoBranches(t *testing.T) {
	d := open(t, nil)
	origin, side := newStream(t, d), newStream(t, d)
	fork, join := newEvent(t, d), newEvent(t, d)
	branches := func(work func(s *host.Stream)) device.Graph {
		return capture(t, origin, func() {
			require.NoError(t, origin.Record(fork))
			require.NoError(t, side.WaitEvent(fork))
			work(origin)
			work(side)
			require.NoError(t, side.Record(join))
			require.NoError(t, origin.WaitEvent(join))
		})
	}
	var c counter
	inner := branches(func(s *host.Stream) { require.NoError(t, s.Launch(&c)) })
	outer := branches(func(s *host.Stream) { require.NoError(t, inner.Launch(s)) })
	for range 50 {
		require.NoError(t, outer.Launch(side))
	}
	synchronize(t, side)
	assert.EqualValues(t, 50*2*2, c.runs.Load())
}

// Closing the stream that launched ends the waits of all branches.
func TestCloseEndsWaitsOfBranches(t *testing.T) {
	d := open(t, &host.Options{WaitTimeout: 100 * time.Millisecond})
	origin, side, other := newStream(t, d), newStream(t, d), newStream(t, d)
	fork, join := newEvent(t, d), newEvent(t, d)
	p := alloc(t, d, 64)
	g := capture(t, origin, func() {
		require.NoError(t, origin.Record(fork))
		require.NoError(t, side.WaitEvent(fork))
		for range 5 {
			require.NoError(t, side.WaitValue32(p, 1))
		}
		require.NoError(t, side.Record(join))
		require.NoError(t, origin.WaitEvent(join))
	})
	require.NoError(t, g.Launch(other))
	require.Error(t, other.Close())
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
			var refused *device.CaptureError
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
	var work *device.WorkError
	require.ErrorAs(t, err, &work)
	assert.Equal(t, 1, work.More, "the copy out of freed memory")
	assert.EqualValues(t, 2, c.runs.Load())
}

// A graph that is launched inside of a branch may end with work that ends its goroutine: the branch goes on behind it, as the stream does.
func TestGoexitEndsGraphInsideOfBranch(t *testing.T) {
	d := open(t, nil)
	origin, side := newStream(t, d), newStream(t, d)
	fork, join := newEvent(t, d), newEvent(t, d)
	ran := 0
	inner := capture(t, origin, func() { require.NoError(t, origin.HostFunc(runtime.Goexit)) })
	for _, more := range []bool{false, true} { // behind it, in the branch
		g := capture(t, origin, func() {
			require.NoError(t, origin.Record(fork))
			require.NoError(t, side.WaitEvent(fork))
			require.NoError(t, inner.Launch(side))
			if more {
				require.NoError(t, side.HostFunc(func() { ran++ }))
			}
			require.NoError(t, side.Record(join))
			require.NoError(t, origin.WaitEvent(join))
		})
		for range 3 {
			require.NoError(t, g.Launch(origin))
			require.ErrorContains(t, origin.Synchronize(bounded(t)), "Goexit", "more %t", more)
		}
	}
	require.Equal(t, 3, ran)
	require.NoError(t, inner.Launch(origin), "nobody holds it any more")
	require.ErrorContains(t, origin.Synchronize(bounded(t)), "Goexit")
}

// A stream that joined a capture and recorded nothing has no goroutine that a launch would leave behind, at work on what the next one sets.
func TestBranchWithoutWork(t *testing.T) {
	d := open(t, nil)
	s, fork := newStream(t, d), newStream(t, d)
	forked, joined := newEvent(t, d), newEvent(t, d)
	n := 0
	g := capture(t, s, func() {
		require.NoError(t, s.Record(forked))
		require.NoError(t, fork.WaitEvent(forked))
		require.NoError(t, fork.Record(joined))
		require.NoError(t, s.WaitEvent(joined))
		require.NoError(t, s.HostFunc(func() { n++ }))
	})
	for range 1000 {
		require.NoError(t, g.Launch(s))
	}
	require.NoError(t, s.Synchronize(bounded(t)))
	require.Equal(t, 1000, n)
}
