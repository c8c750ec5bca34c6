package devicetest

import (
	"errors"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/device"
)

// failing is work that fails with err.
func failing(err error) kernel { return func() error { return err } }

func errorsAreReturnedOnce(t *testing.T, h Harness) {
	d := h.open(t)
	s := newStream(t, d)
	boom := errors.New("peer died")
	var after counter
	require.NoError(t, enqueue(s, failing(boom)))
	require.NoError(t, enqueue(s, failing(errors.New("second"))))
	require.NoError(t, enqueue(s, after.RunKernel))
	require.NoError(t, d.Synchronize(bounded(t)), "errors stay with their streams")

	err := s.Synchronize(bounded(t))
	require.ErrorIs(t, err, boom)
	var work *device.WorkError
	require.ErrorAs(t, err, &work)
	assert.Equal(t, opOf(s), work.Op)
	assert.Equal(t, 1, work.More)
	assert.EqualValues(t, 1, after.runs.Load(), "later work still runs")
	synchronize(t, s)

	require.NoError(t, enqueue(s, failing(boom)))
	require.ErrorIs(t, s.Synchronize(bounded(t)), boom, "a new failure is returned again")
}

// The target of a Synchronize is fixed when it is called; what fails behind it is another one's to return.
func errorOfLaterWorkIsLeftForLater(t *testing.T, h Harness) {
	d := h.open(t)
	s := newStream(t, d)
	g := newGate(t, d)
	boom := errors.New("later")
	g.hold(t, s)
	g.await(t)
	ctx := bounded(t)
	require.NoError(t, s.Record(newEvent(t, d)))
	result := make(chan error, 1)
	var called atomic.Bool
	go func() { called.Store(true); result <- s.Synchronize(ctx) }()
	require.Eventually(t, called.Load, patience, time.Millisecond)
	time.Sleep(20 * time.Millisecond)
	require.NoError(t, enqueue(s, failing(boom)))
	g.open(t)
	first := <-result
	second := s.Synchronize(ctx)
	if first != nil { // the other goroutine was slow, and the failure belonged to its call
		require.ErrorIs(t, first, boom)
		require.NoError(t, second)
	} else {
		require.ErrorIs(t, second, boom)
	}
}

func manyFailuresAreCounted(t *testing.T, h Harness) {
	d := h.open(t)
	s := newStream(t, d)
	first := errors.New("first")
	require.NoError(t, enqueue(s, failing(first)))
	for range 999 {
		require.NoError(t, enqueue(s, failing(errors.New("more"))))
	}
	err := s.Synchronize(bounded(t))
	require.ErrorIs(t, err, first)
	var work *device.WorkError
	require.ErrorAs(t, err, &work)
	assert.Equal(t, 999, work.More)
	synchronize(t, s)
}

func panicsBecomeErrors(t *testing.T, h Harness) {
	d := h.open(t)
	s := newStream(t, d)
	cause := errors.New("index of doom")
	var after counter
	for _, work := range []struct {
		op      string
		enqueue func() error
	}{
		{opOf(s), func() error { return enqueue(s, func() error { panic(cause) }) }},
		{"HostFunc", func() error { return s.HostFunc(func() { panic(cause) }) }},
	} {
		require.NoError(t, work.enqueue())
		require.NoError(t, enqueue(s, after.RunKernel))
		err := s.Synchronize(bounded(t))
		require.ErrorIs(t, err, cause)
		var failed *device.WorkError
		require.ErrorAs(t, err, &failed)
		assert.Equal(t, work.op, failed.Op)
		var p *device.PanicError
		require.ErrorAs(t, err, &p)
		assert.Contains(t, p.Stack, "devicetest/failures.go")
		synchronize(t, s)
	}
	if l, ok := s.(device.HostLauncher); ok {
		var none *counter
		require.NoError(t, l.Launch(none), "a kernel that will panic")
		require.Error(t, s.Synchronize(bounded(t)))
	}
	assert.EqualValues(t, 2, after.runs.Load())
}

func goexitDoesNotStopTheStream(t *testing.T, h Harness) {
	d := h.open(t)
	s := newStream(t, d)
	var before, after counter
	require.NoError(t, enqueue(s, before.RunKernel))
	require.NoError(t, s.HostFunc(runtime.Goexit))
	require.NoError(t, enqueue(s, after.RunKernel))
	require.ErrorContains(t, s.Synchronize(bounded(t)), "Goexit")
	assert.EqualValues(t, 1, before.runs.Load())
	assert.EqualValues(t, 1, after.runs.Load())

	// Behind a panic it is one failure more.
	cause := errors.New("index of doom")
	require.NoError(t, s.HostFunc(func() { panic(cause) }))
	require.NoError(t, s.HostFunc(runtime.Goexit))
	err := s.Synchronize(bounded(t))
	require.ErrorIs(t, err, cause)
	var work *device.WorkError
	require.ErrorAs(t, err, &work)
	assert.Equal(t, 1, work.More)

	// And inside of a graph within a graph, where the place must be found again.
	inner := capture(t, s, func() {
		require.NoError(t, enqueue(s, before.RunKernel))
		require.NoError(t, s.HostFunc(runtime.Goexit))
		require.NoError(t, enqueue(s, after.RunKernel))
	})
	outer := capture(t, s, func() {
		require.NoError(t, inner.Launch(s))
		require.NoError(t, enqueue(s, before.RunKernel))
		require.NoError(t, inner.Launch(s))
	})
	for range 3 {
		require.NoError(t, outer.Launch(s))
	}
	err = s.Synchronize(bounded(t))
	require.ErrorAs(t, err, &work)
	assert.Equal(t, 5, work.More)
	assert.EqualValues(t, 1+9, before.runs.Load())
	assert.EqualValues(t, 1+6, after.runs.Load())
}

func errorsInGraphs(t *testing.T, h Harness) {
	d := h.open(t)
	s, other := newStream(t, d), newStream(t, d)
	boom := errors.New("boom")
	var c counter
	g := capture(t, s, func() {
		require.NoError(t, enqueue(s, failing(boom)))
		require.NoError(t, enqueue(s, c.RunKernel))
	})
	require.NoError(t, g.Launch(other))
	require.ErrorIs(t, other.Synchronize(bounded(t)), boom, "of the stream that it was launched on")
	synchronize(t, s)
	require.NoError(t, g.Launch(s))
	require.NoError(t, g.Launch(s))
	err := s.Synchronize(bounded(t))
	require.ErrorIs(t, err, boom)
	var work *device.WorkError
	require.ErrorAs(t, err, &work)
	assert.Equal(t, 1, work.More)
	assert.EqualValues(t, 3, c.runs.Load())
}
