package devicetest

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/device"
)

// job is work of the CPU that ends when its gate is open, or at once without one, and then does something.
type job struct {
	name  string
	gate  func() bool
	do    func() error
	fails error // of Start

	runs, polls atomic.Int64
}

func (j *job) Start() (device.HostProgress, error) {
	j.runs.Add(1)
	if j.fails != nil {
		return nil, j.fails
	}
	return j, nil
}

func (j *job) Poll() (bool, error) {
	j.polls.Add(1)
	if j.gate != nil && !j.gate() {
		return false, nil
	}
	if j.do != nil {
		if err := j.do(); err != nil {
			return false, err
		}
	}
	return true, nil
}

func (j *job) String() string { return j.name }

// hostWork enqueues w.
func hostWork(t testing.TB, s device.Stream, w device.HostWork) {
	t.Helper()
	h, ok := s.(device.HostWorker)
	require.True(t, ok, "streams can wait for work of the CPU")
	require.NoError(t, h.HostWork(w))
}

// hostWorkHoldsUp: the stream waits for the work, and the work for the stream; enqueueing does not wait for either.
func hostWorkHoldsUp(t *testing.T, h Harness) {
	d := h.open(t)
	s := newStream(t, d)
	p := alloc(t, d, 8)
	var open, ran atomic.Bool
	var before atomic.Int32
	gate := make(chan struct{})
	require.NoError(t, s.HostFunc(func() { <-gate; before.Store(1) }))
	w := &job{gate: open.Load, do: func() error { assert.EqualValues(t, 1, before.Load()); return nil }}
	hostWork(t, s, w)
	require.NoError(t, s.HostFunc(func() { ran.Store(true) }))
	require.NoError(t, s.Fill(p, 7, 8))
	time.Sleep(20 * time.Millisecond)
	assert.Zero(t, w.runs.Load(), "work begins when the stream has come to it")
	close(gate)
	for began := time.Now(); w.polls.Load() < 10; time.Sleep(time.Millisecond) {
		require.Less(t, time.Since(began), patience)
		idle, err := s.Query()
		require.NoError(t, err)
		require.False(t, idle)
	}
	assert.False(t, ran.Load(), "the stream waits for its end")
	open.Store(true)
	synchronize(t, s)
	assert.True(t, ran.Load())
	assert.EqualValues(t, 1, w.runs.Load())
	assert.Equal(t, byte(7), read(t, d, p, 8)[7])
	require.ErrorIs(t, s.(device.HostWorker).HostWork(nil), device.ErrInvalid)
	require.NoError(t, s.Close())
	require.ErrorIs(t, s.(device.HostWorker).HostWork(w), device.ErrClosed)
}

// hostWorkInOrder: many works of two streams, each in its stream's order.
func hostWorkInOrder(t *testing.T, h Harness) {
	d := h.open(t)
	streams := []device.Stream{newStream(t, d), newStream(t, d)}
	turns := h.many(50, 300)
	var done [2]atomic.Int64
	for i := range turns {
		for k, s := range streams {
			polls := 0
			hostWork(t, s, &job{gate: func() bool { polls++; return polls > i%3 }, do: func() error {
				if n := done[k].Add(1); n != int64(i+1) {
					return errors.New("out of order")
				}
				return nil
			}})
		}
	}
	for k, s := range streams {
		synchronize(t, s)
		assert.EqualValues(t, turns, done[k].Load())
	}
}

// toldJob is a job that is told of failures.
type toldJob struct {
	job
	told atomic.Pointer[error]
}

func (j *toldJob) Failed(err error) { j.told.Store(&err) }

// hostWorkFails: an error or a panic is the stream's, once, and the work's that wants to know; the stream goes on then.
func hostWorkFails(t *testing.T, h Harness) {
	d := h.open(t)
	s := newStream(t, d)
	bad := errors.New("bad")
	for _, w := range []*job{
		{name: "a start", fails: bad},
		{name: "a poll", do: func() error { return bad }},
	} {
		hostWork(t, s, w)
		ran := false
		require.NoError(t, s.HostFunc(func() { ran = true }))
		err := s.Synchronize(bounded(t))
		require.ErrorIs(t, err, bad)
		var failed *device.WorkError
		require.ErrorAs(t, err, &failed)
		assert.Equal(t, "HostWork("+w.name+")", failed.Op)
		assert.True(t, ran, "later work still runs")
		synchronize(t, s)
	}
	hostWork(t, s, &job{do: func() error { panic("oh") }})
	var panicked *device.PanicError
	require.ErrorAs(t, s.Synchronize(bounded(t)), &panicked)
	synchronize(t, s)
	for name, w := range map[string]*toldJob{
		"start": {job: job{fails: bad}}, "poll": {job: job{do: func() error { return bad }}}, "panic": {job: job{do: func() error { panic("oh") }}},
	} {
		hostWork(t, s, w)
		var before bool
		require.NoError(t, s.HostFunc(func() { before = w.told.Load() != nil }))
		require.Error(t, s.Synchronize(bounded(t)))
		assert.True(t, before, "%s: the work is told before the stream goes on", name)
		if told := w.told.Load(); told != nil && name != "panic" {
			assert.ErrorIs(t, *told, bad)
		}
	}
	fine := &toldJob{}
	hostWork(t, s, fine)
	synchronize(t, s)
	assert.Nil(t, fine.told.Load())
	nothing := &nothingToDo{}
	hostWork(t, s, nothing)
	synchronize(t, s)
	assert.EqualValues(t, 1, nothing.runs.Load())
	assert.Nil(t, nothing.told.Load(), "work that has nothing to do has not failed")
}

// nothingToDo is work that has ended when it begins.
type nothingToDo struct{ toldJob }

func (w *nothingToDo) Start() (device.HostProgress, error) {
	w.runs.Add(1)
	return nil, nil
}

// hostWorkInAGraph: recorded work runs at each launch, and holds each up.
func hostWorkInAGraph(t *testing.T, h Harness) {
	d := h.open(t)
	s, other := newStream(t, d), newStream(t, d)
	var runs, after atomic.Int64
	polls := 0
	first := &job{gate: func() bool { polls++; return polls%3 == 0 }, do: func() error { runs.Add(1); return nil }}
	fail := errors.New("bad")
	var failing atomic.Bool
	second := &job{name: "second", do: func() error {
		if failing.Load() {
			return fail
		}
		runs.Add(1)
		return nil
	}}
	require.NoError(t, s.BeginCapture())
	hostWork(t, s, first)
	hostWork(t, s, second)
	require.NoError(t, s.HostFunc(func() { after.Store(runs.Load()) }))
	g, err := s.EndCapture()
	require.NoError(t, err)
	assert.Zero(t, runs.Load())
	for i := range 100 {
		on := s
		if i%2 == 1 {
			on = other
		}
		require.NoError(t, g.Launch(on))
		if i%10 == 0 {
			synchronize(t, on)
			assert.EqualValues(t, 2*(i+1), after.Load())
		}
	}
	synchronize(t, s)
	synchronize(t, other)
	assert.EqualValues(t, 200, runs.Load())
	failing.Store(true)
	require.NoError(t, g.Launch(other))
	require.ErrorIs(t, other.Synchronize(bounded(t)), fail)
	failing.Store(false)

	// In a graph that is part of another one, with work of the stream's own beside it.
	require.NoError(t, s.BeginCapture())
	require.NoError(t, g.Launch(s))
	outer, err := s.EndCapture()
	require.NoError(t, err)
	runs.Store(0)
	for range 5 {
		require.NoError(t, outer.Launch(s))
		hostWork(t, s, &job{})
	}
	synchronize(t, s)
	assert.EqualValues(t, 10, runs.Load())
	require.NoError(t, outer.Close())
	require.NoError(t, g.Close())
}

// hostWorkIsCheap: enqueueing returns at once though each work lasts long.
func hostWorkIsCheap(t *testing.T, h Harness) {
	d := h.open(t)
	s := newStream(t, d)
	const n = 50
	var open atomic.Bool
	late := time.AfterFunc(patience, func() { open.Store(true) })
	start := time.Now()
	for range n {
		hostWork(t, s, &job{gate: open.Load})
	}
	t.Logf("enqueueing work takes %v", time.Since(start)/n)
	over, err := s.Query()
	require.NoError(t, err, "enqueueing does not wait until the work is cut off")
	assert.False(t, over, "nor until it has ended")
	late.Stop()
	open.Store(true)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	require.NoError(t, s.Synchronize(ctx))
}
