package devicetest

import (
	"context"
	"encoding/binary"
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

func graphReplays(t *testing.T, h Harness) {
	d := h.open(t)
	s := newStream(t, d)
	a, b := alloc(t, d, 64), alloc(t, d, 64)
	var order []int
	g := capture(t, s, func() {
		assert.True(t, s.Capturing())
		require.NoError(t, s.Fill(a, 5, 64))
		require.NoError(t, s.HostFunc(func() { order = append(order, 1) }))
		require.NoError(t, s.Copy(b, a, 64))
		require.NoError(t, enqueue(s, func() error { order = append(order, 2); return nil }))
		require.NoError(t, s.WriteValue32(a, 9))
		require.NoError(t, s.WaitValue32(a, 9))
		require.NoError(t, d.CopyFromHost(b, []byte{1}), "memory may be moved past a capture")
		p, err := d.Alloc(100)
		require.NoError(t, err, "and allocated")
		require.NoError(t, d.Free(p))
	})
	assert.False(t, s.Capturing())
	assert.Equal(t, 1, h.Held(d).Graphs)
	synchronize(t, s)
	require.Empty(t, order, "a capture runs nothing")
	assert.Equal(t, []byte{1, 0}, read(t, d, b, 2))
	runtime.GC()
	for range 3 {
		require.NoError(t, g.Launch(s))
	}
	synchronize(t, s)
	assert.Equal(t, []int{1, 2, 1, 2, 1, 2}, order)
	assert.Equal(t, []byte{5, 5}, read(t, d, b, 2))
	require.NoError(t, g.Close())
	require.ErrorIs(t, g.Close(), device.ErrClosed)
	require.ErrorIs(t, g.Launch(s), device.ErrClosed)
	assert.Zero(t, h.Held(d).Graphs)
}

func graphReplaysManyTimes(t *testing.T, h Harness) {
	d := h.open(t)
	s := newStream(t, d)
	p, q := alloc(t, d, 4), alloc(t, d, 4)
	var c counter
	g := capture(t, s, func() {
		for range 3 {
			require.NoError(t, s.Copy(q, p, 4))
			require.NoError(t, enqueue(s, c.RunKernel))
		}
	})
	launches := h.many(300, 100000)
	for range launches {
		if err := g.Launch(s); err != nil {
			require.NoError(t, err)
		}
	}
	synchronize(t, s)
	assert.EqualValues(t, 3*launches, c.runs.Load())
	require.NoError(t, g.Launch(s))
	synchronize(t, s)
}

func emptyGraph(t *testing.T, h Harness) {
	d := h.open(t)
	s := newStream(t, d)
	g := capture(t, s, func() {})
	require.NoError(t, g.Launch(s))
	synchronize(t, s)
}

func closedGraphStillRunsWhatWasLaunched(t *testing.T, h Harness) {
	d := h.open(t)
	s := newStream(t, d)
	hold := newGate(t, d)
	var c counter
	g := capture(t, s, func() { require.NoError(t, enqueue(s, c.RunKernel)) })
	outer := capture(t, s, func() { require.NoError(t, g.Launch(s)) })
	hold.hold(t, s)
	require.NoError(t, g.Launch(s))
	require.NoError(t, g.Launch(s))
	require.NoError(t, g.Close())
	hold.open(t)
	synchronize(t, s)
	assert.EqualValues(t, 2, c.runs.Load())
	require.NoError(t, outer.Launch(s), "a graph keeps what it was made of")
	synchronize(t, s)
	assert.EqualValues(t, 3, c.runs.Load())
}

func graphLaunchesNeverOverlap(t *testing.T, h Harness) {
	d := h.open(t)
	streams := []device.Stream{newStream(t, d), newStream(t, d), newStream(t, d)}
	var inside, overlaps atomic.Int32
	var order []int // safe only if launches never overlap
	inner := capture(t, streams[0], func() {
		require.NoError(t, enqueue(streams[0], func() error {
			if inside.Add(1) != 1 {
				overlaps.Add(1)
			}
			time.Sleep(100 * time.Microsecond)
			return nil
		}))
		require.NoError(t, streams[0].HostFunc(func() { inside.Add(-1) }))
	})
	other := capture(t, streams[0], func() { require.NoError(t, streams[0].HostFunc(func() { order = append(order, 1) })) })
	require.NoError(t, inner.Launch(streams[1]), "a launch from before it is part of another")
	// both contains the two others, so that its launches must not overlap with theirs either.
	both := capture(t, streams[0], func() {
		require.NoError(t, other.Launch(streams[0]))
		require.NoError(t, inner.Launch(streams[0]))
		require.NoError(t, inner.Launch(streams[0]))
	})
	graphs := []device.Graph{inner, both, other}
	each := h.many(30, 60)
	var wg sync.WaitGroup
	errsOf := make([]error, len(streams))
	for i, s := range streams {
		wg.Go(func() {
			for n := range each {
				errsOf[i] = errors.Join(errsOf[i], graphs[(i+n)%3].Launch(s))
			}
			errsOf[i] = errors.Join(errsOf[i], s.Synchronize(context.Background()))
		})
	}
	wg.Wait()
	require.NoError(t, errors.Join(errsOf...))
	assert.Zero(t, overlaps.Load())
	assert.Len(t, order, 2*each)
}

func graphLaunchesRunInTheOrderOfTheirCalls(t *testing.T, h Harness) {
	d := h.open(t)
	a, b := newStream(t, d), newStream(t, d)
	hold := newGate(t, d)
	order := make(chan string, 2)
	name := ""
	g := capture(t, a, func() { require.NoError(t, a.HostFunc(func() { order <- name })) })
	hold.hold(t, a) // the first launch is stuck behind this
	require.NoError(t, a.HostFunc(func() { name = "first" }))
	require.NoError(t, g.Launch(a))
	require.NoError(t, g.Launch(b)) // and nothing is in the way of the second
	require.NoError(t, b.HostFunc(func() { name = "later" }))
	hold.await(t)
	time.Sleep(10 * time.Millisecond)
	done, err := b.Query()
	require.NoError(t, err)
	assert.False(t, done)
	assert.Empty(t, order)
	hold.open(t)
	synchronize(t, b)
	assert.Equal(t, "first", <-order)
	assert.Equal(t, "first", <-order)
}

// Two streams launch a graph and the one it is part of, ordered against each other by an event: no launch may wait for one
// that waits for it.
func nestedLaunchesDoNotDeadlock(t *testing.T, h Harness) {
	d := h.open(t)
	a, b := newStream(t, d), newStream(t, d)
	e := newEvent(t, d)
	var c counter
	inner := capture(t, a, func() { require.NoError(t, enqueue(a, c.RunKernel)) })
	require.NoError(t, inner.Launch(a))
	outer := capture(t, a, func() { require.NoError(t, inner.Launch(a)) })
	turns := h.many(50, 200)
	for range turns {
		require.NoError(t, outer.Launch(a))
		require.NoError(t, a.Record(e))
		require.NoError(t, b.WaitEvent(e))
		require.NoError(t, inner.Launch(b))
		require.NoError(t, outer.Launch(b))
		require.NoError(t, b.Record(e))
		require.NoError(t, a.WaitEvent(e))
		require.NoError(t, inner.Launch(a))
	}
	synchronize(t, a)
	synchronize(t, b)
	assert.EqualValues(t, 4*turns+1, c.runs.Load())
}

// The graph becomes part of another one while the stream of its launch is in that one's capture.
func graphInAGraphAwaitsLaunchesOnForks(t *testing.T, h Harness) {
	d := h.open(t)
	origin, fork, other := newStream(t, d), newStream(t, d), newStream(t, d)
	forked, joined := newEvent(t, d), newEvent(t, d)
	var c counter
	inner := capture(t, origin, func() { require.NoError(t, origin.HostFunc(c.run)) })
	g := newGate(t, d)
	g.hold(t, fork)
	require.NoError(t, inner.Launch(fork))
	g.await(t)
	outer := capture(t, origin, func() {
		require.NoError(t, origin.Record(forked))
		require.NoError(t, fork.WaitEvent(forked))
		require.NoError(t, inner.Launch(origin))
		require.NoError(t, fork.Record(joined))
		require.NoError(t, origin.WaitEvent(joined))
	})
	awaitsTheFirst(t, g, &c, outer, other)
	synchronize(t, fork)
}

// awaitsTheFirst launches outer, in which a graph is that counts its runs and whose first launch the gate holds: the second waits for that.
func awaitsTheFirst(t *testing.T, g *gate, c *counter, outer device.Graph, s device.Stream) {
	t.Helper()
	require.NoError(t, outer.Launch(s))
	short, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	assert.ErrorIs(t, s.Synchronize(short), context.DeadlineExceeded)
	assert.Zero(t, c.runs.Load(), "launches of a graph do not overlap")
	g.open(t)
	synchronize(t, s)
	assert.EqualValues(t, 2, c.runs.Load())
}

// The graph becomes part of another one while the stream of its launch is being closed.
func graphInAGraphAwaitsLaunchesOnClosedStreams(t *testing.T, h Harness) {
	d := h.open(t)
	origin, closing, other := newStream(t, d), newStream(t, d), newStream(t, d)
	var c counter
	inner := capture(t, origin, func() { require.NoError(t, origin.HostFunc(c.run)) })
	g := newGate(t, d)
	g.hold(t, closing)
	require.NoError(t, inner.Launch(closing))
	g.await(t)
	closed := make(chan error, 1)
	go func() { closed <- closing.Close() }()
	require.Eventually(t, func() bool {
		_, err := closing.Query()
		return errors.Is(err, device.ErrClosed)
	}, patience, time.Millisecond)
	outer := capture(t, origin, func() { require.NoError(t, inner.Launch(origin)) })
	awaitsTheFirst(t, g, &c, outer, other)
	require.NoError(t, <-closed)
}

func captureForksAndJoins(t *testing.T, h Harness) {
	d := h.open(t)
	origin, left, right := newStream(t, d), newStream(t, d), newStream(t, d)
	fork, leftDone, rightDone := newEvent(t, d), newEvent(t, d), newEvent(t, d)
	p := alloc(t, d, 16)
	var order []string
	step := func(name string) func() { return func() { order = append(order, name) } }
	require.NoError(t, origin.BeginCapture())
	require.NoError(t, origin.HostFunc(step("begin")))
	require.NoError(t, origin.Record(fork))
	require.NoError(t, left.WaitEvent(fork))
	require.NoError(t, right.WaitEvent(fork))
	assert.True(t, left.Capturing())
	require.NoError(t, left.HostFunc(step("left")))
	require.NoError(t, right.WriteValue32(p, 3)) // the device may run it at the same time as left's work
	require.NoError(t, left.Record(leftDone))
	require.NoError(t, right.WaitEvent(leftDone))
	require.NoError(t, right.HostFunc(step("right again")))
	require.NoError(t, right.Record(rightDone))
	require.NoError(t, origin.WaitEvent(rightDone), "left is joined through right")
	require.NoError(t, origin.HostFunc(step("end")))

	_, err := left.EndCapture()
	var refused *device.CaptureError
	require.ErrorAs(t, err, &refused, "only the stream that began may end")
	_, err = fork.Query()
	require.ErrorAs(t, err, &refused)
	require.ErrorAs(t, fork.Synchronize(bounded(t)), &refused)
	_, err = fork.Since(leftDone)
	require.ErrorAs(t, err, &refused)

	g, err := origin.EndCapture()
	require.NoError(t, err)
	assert.False(t, left.Capturing())
	assert.False(t, right.Capturing())
	require.ErrorAs(t, left.WaitEvent(fork), &refused, "a record of a capture that has ended")
	require.NoError(t, left.Record(fork), "recorded again it is of use")
	require.NoError(t, right.WaitEvent(fork))
	synchronize(t, right)
	require.Empty(t, order)
	require.NoError(t, g.Launch(right))
	synchronize(t, right)
	assert.Equal(t, []string{"begin", "left", "right again", "end"}, order)
	assert.EqualValues(t, 3, binary.LittleEndian.Uint32(read(t, d, p, 4)))
}

func unjoinedForkIsAnError(t *testing.T, h Harness) {
	for name, body := range map[string]func(t *testing.T, origin, fork device.Stream, e device.Event){
		"never joined": func(t *testing.T, _, fork device.Stream, _ device.Event) {
			require.NoError(t, fork.HostFunc(func() {}))
		},
		"work behind the join": func(t *testing.T, origin, fork device.Stream, e device.Event) {
			require.NoError(t, fork.HostFunc(func() {}))
			require.NoError(t, fork.Record(e))
			require.NoError(t, fork.HostFunc(func() {}))
			require.NoError(t, origin.WaitEvent(e))
		},
	} {
		t.Run(name, func(t *testing.T) {
			d := h.open(t)
			origin, fork := newStream(t, d), newStream(t, d)
			e := newEvent(t, d)
			require.NoError(t, origin.BeginCapture())
			require.NoError(t, origin.HostFunc(func() {}))
			require.NoError(t, origin.Record(e))
			require.NoError(t, fork.WaitEvent(e))
			body(t, origin, fork, e)
			_, err := origin.EndCapture()
			var refused *device.CaptureError
			require.ErrorAs(t, err, &refused)
			require.ErrorIs(t, err, device.ErrInvalid)
			require.ErrorContains(t, err, "joined back")
			assert.False(t, origin.Capturing(), "the capture has ended all the same")
			var c counter
			require.NoError(t, enqueue(fork, c.RunKernel))
			assert.False(t, fork.Capturing())
			synchronize(t, fork)
			synchronize(t, origin)
			assert.EqualValues(t, 1, c.runs.Load())
			assert.Equal(t, Held{Streams: 2, Events: 1}, h.Held(d))
		})
	}
}

func callsThatCaptureRefuses(t *testing.T, h Harness) {
	d := h.open(t)
	s, other := newStream(t, d), newStream(t, d)
	outside, unused := newEvent(t, d), newEvent(t, d)
	require.NoError(t, other.Record(outside))
	_, err := s.EndCapture()
	var refused *device.CaptureError
	require.ErrorAs(t, err, &refused, "not capturing")

	var before counter
	require.NoError(t, s.HostFunc(func() { time.Sleep(20 * time.Millisecond); before.run() }))
	require.NoError(t, s.BeginCapture())
	_, queryErr := s.Query()
	for i, err := range []error{s.BeginCapture(), queryErr, s.Synchronize(bounded(t)), s.Close(), s.WaitEvent(outside)} {
		require.ErrorAs(t, err, &refused, "call %d", i)
		require.ErrorIs(t, err, device.ErrInvalid)
	}
	require.NoError(t, s.WaitEvent(unused), "an event that was never recorded holds nothing up")
	require.NoError(t, d.Synchronize(bounded(t)), "the capture is no work")
	assert.EqualValues(t, 1, before.runs.Load(), "but what was enqueued before it is")

	// Two captures do not mix.
	inside := newEvent(t, d)
	require.NoError(t, s.Record(inside))
	require.NoError(t, other.BeginCapture())
	require.ErrorAs(t, other.WaitEvent(inside), &refused)
	foreign := newStream(t, h.Other(t))
	require.ErrorAs(t, foreign.WaitEvent(inside), &refused, "a graph holds work of one device")
	assert.False(t, foreign.Capturing())
	_, err = other.EndCapture()
	require.NoError(t, err)

	var c counter
	require.NoError(t, enqueue(s, c.RunKernel), "the capture goes on after refused calls")
	g, err := s.EndCapture()
	require.NoError(t, err)
	require.NoError(t, g.Launch(s))
	synchronize(t, s)
	assert.EqualValues(t, 1, c.runs.Load())
}
