package devicetest

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/symmem/symmem/device"
)

func eventOrdersStreams(t *testing.T, h Harness) {
	d := h.open(t)
	a, b := newStream(t, d), newStream(t, d)
	e := newEvent(t, d)
	g := newGate(t, d)
	var order []string
	g.hold(t, a)
	require.NoError(t, a.HostFunc(func() { order = append(order, "a") }))
	require.NoError(t, a.Record(e))
	require.NoError(t, b.WaitEvent(e))
	require.NoError(t, b.HostFunc(func() { order = append(order, "b") }))
	for _, q := range []interface{ Query() (bool, error) }{e, b} {
		done, err := q.Query()
		require.NoError(t, err)
		assert.False(t, done)
	}
	g.open(t)
	require.NoError(t, e.Synchronize(bounded(t)))
	done, err := e.Query()
	require.NoError(t, err)
	assert.True(t, done)
	synchronize(t, b)
	assert.Equal(t, []string{"a", "b"}, order)
}

func eventNeverRecorded(t *testing.T, h Harness) {
	d := h.open(t)
	s := newStream(t, d)
	e, f := newEvent(t, d), newEvent(t, d)
	require.NoError(t, s.WaitEvent(e))
	require.NoError(t, e.Synchronize(bounded(t)))
	done, err := e.Query()
	require.NoError(t, err)
	assert.True(t, done)
	_, err = e.Since(f)
	require.ErrorIs(t, err, device.ErrInvalid)
	synchronize(t, s)
}

// A wait means the record that was the latest when the wait was called, even if the event was recorded again since.
func waitEventMeansTheRecordAtItsCall(t *testing.T, h Harness) {
	d := h.open(t)
	a, b := newStream(t, d), newStream(t, d)
	e := newEvent(t, d)
	early, late := newGate(t, d), newGate(t, d)
	early.hold(t, a)
	require.NoError(t, a.Record(e))
	require.NoError(t, b.WaitEvent(e))
	late.hold(t, a)
	require.NoError(t, a.Record(e))
	early.open(t)
	synchronize(t, b) // would lose patience if it meant the second record
	done, err := e.Query()
	require.NoError(t, err)
	assert.False(t, done, "Query means the latest record")
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, e.Synchronize(ctx), context.DeadlineExceeded)
	late.open(t)
	require.NoError(t, e.Synchronize(bounded(t)))
}

func eventSince(t *testing.T, h Harness) {
	d := h.open(t)
	s := newStream(t, d)
	begin, end := newEvent(t, d), newEvent(t, d)
	g := newGate(t, d)
	const pause = 20 * time.Millisecond
	require.NoError(t, s.Record(begin))
	require.NoError(t, s.HostFunc(func() { time.Sleep(pause) }))
	g.hold(t, s)
	require.NoError(t, s.Record(end))
	_, err := end.Since(begin)
	require.ErrorIs(t, err, device.ErrInvalid, "not complete yet")
	g.open(t)
	synchronize(t, s)
	took, err := end.Since(begin)
	require.NoError(t, err)
	assert.GreaterOrEqual(t, took, pause-h.Slack)
	back, err := begin.Since(end)
	require.NoError(t, err)
	assert.InDelta(t, float64(took), -float64(back), float64(h.Resolution))
	same, err := end.Since(end)
	require.NoError(t, err)
	assert.Zero(t, same)
	_, err = end.Since(nil)
	require.ErrorIs(t, err, device.ErrInvalid)
}

func eventClose(t *testing.T, h Harness) {
	d := h.open(t)
	s, other := newStream(t, d), newStream(t, d)
	e := newEvent(t, d)
	g := newGate(t, d)
	var c counter
	g.hold(t, s)
	require.NoError(t, s.Record(e))
	require.NoError(t, other.WaitEvent(e))
	require.NoError(t, enqueue(other, c.RunKernel))
	require.NoError(t, e.Close())
	_, queryErr := e.Query()
	_, sinceErr := e.Since(newEvent(t, d))
	for i, err := range []error{e.Close(), queryErr, sinceErr, e.Synchronize(bounded(t)), s.Record(e), s.WaitEvent(e)} {
		assert.ErrorIs(t, err, device.ErrClosed, "call %d", i)
	}
	assert.Zero(t, c.runs.Load())
	g.open(t)
	synchronize(t, other)
	assert.EqualValues(t, 1, c.runs.Load(), "the wait outlives the event")
}

// orderModel enqueues random work, records and waits on several streams, and checks that each work ran once, after all that
// had to run before it.
func orderModel(t *testing.T, h Harness) {
	const streams, events = 3, 4
	d := h.open(t)
	rapid.Check(t, func(t *rapid.T) {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		ok := func(err error) {
			if err != nil {
				t.Fatal(err)
			}
		}
		var ss [streams]device.Stream
		var es [events]device.Event
		defer func() {
			for _, s := range ss {
				if s != nil {
					if err := s.Close(); err != nil {
						t.Error(err)
					}
				}
			}
			for _, e := range es {
				if e != nil {
					if err := e.Close(); err != nil {
						t.Error(err)
					}
				}
			}
		}()
		for i := range ss {
			s, err := d.NewStream()
			ok(err)
			ss[i] = s
		}
		for i := range es {
			e, err := d.NewEvent()
			ok(err)
			es[i] = e
		}
		// marks are how much work of each stream is known to have run at some place.
		type marks [streams]int
		var enqueued marks       // how much each stream has been given
		var known [streams]marks // what the next work of each stream comes after
		var recorded [events]marks
		var ran [streams][]marks // for each work that ran, what had run before; written by its stream only
		var progress [streams]counter

		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			i := rapid.IntRange(0, streams-1).Draw(t, "stream")
			e := rapid.IntRange(0, events-1).Draw(t, "event")
			switch rapid.IntRange(0, 9).Draw(t, "action") {
			case 0, 1, 2, 3:
				must := known[i]
				ok(ss[i].HostFunc(func() {
					var now marks
					for j := range progress {
						now[j] = int(progress[j].runs.Load())
					}
					for j := range now {
						if now[j] < must[j] {
							panic("work ran before what it had to wait for")
						}
					}
					ran[i] = append(ran[i], now)
					progress[i].runs.Add(1)
				}))
				enqueued[i]++
				known[i][i] = enqueued[i]
			case 4, 5:
				ok(ss[i].Record(es[e]))
				recorded[e] = known[i]
			case 6, 7:
				ok(ss[i].WaitEvent(es[e]))
				for j := range known[i] {
					known[i][j] = max(known[i][j], recorded[e][j])
				}
			case 8:
				ok(es[e].Synchronize(ctx))
				for j := range recorded[e] {
					if int(progress[j].runs.Load()) < recorded[e][j] {
						t.Fatal("the event was complete too early")
					}
				}
			case 9:
				ok(ss[i].Synchronize(ctx))
				if got := int(progress[i].runs.Load()); got != enqueued[i] {
					t.Fatalf("stream %d: %d of %d ran", i, got, enqueued[i])
				}
			}
		}
		ok(d.Synchronize(ctx))
		for i := range ss {
			ok(ss[i].Synchronize(ctx))
			if len(ran[i]) != enqueued[i] {
				t.Fatalf("stream %d: %d of %d ran", i, len(ran[i]), enqueued[i])
			}
			for n, now := range ran[i] {
				if now[i] != n {
					t.Fatalf("stream %d: work %d ran when %d had run", i, n, now[i])
				}
			}
		}
	})
}
