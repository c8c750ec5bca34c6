package host_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/host"
)

func TestEventOrdersStreams(t *testing.T) {
	d := open(t, nil)
	a, b := newStream(t, d), newStream(t, d)
	e := newEvent(t, d)
	g := newGate()
	var order []string
	require.NoError(t, a.Launch(g))
	require.NoError(t, a.HostFunc(func() { order = append(order, "a") }))
	require.NoError(t, a.Record(e))
	require.NoError(t, b.WaitEvent(e))
	require.NoError(t, b.HostFunc(func() { order = append(order, "b") }))
	done, err := e.Query()
	require.NoError(t, err)
	assert.False(t, done)
	done, err = b.Query()
	require.NoError(t, err)
	assert.False(t, done)
	g.open()
	require.NoError(t, e.Synchronize(bounded(t)))
	done, err = e.Query()
	require.NoError(t, err)
	assert.True(t, done)
	synchronize(t, b)
	assert.Equal(t, []string{"a", "b"}, order)
}

func TestEventAcrossDevices(t *testing.T) {
	d, other := open(t, nil), open(t, nil)
	a, b := newStream(t, d), newStream(t, other)
	e := newEvent(t, d)
	g := newGate()
	var seen, c counter
	require.NoError(t, a.Launch(g))
	require.NoError(t, a.Launch(&seen))
	require.NoError(t, a.Record(e))
	require.NoError(t, b.WaitEvent(e))
	require.NoError(t, b.Launch(kernel(func() error { c.runs.Store(10 + seen.runs.Load()); return nil })))
	g.open()
	synchronize(t, b)
	assert.EqualValues(t, 11, c.runs.Load())
}

func TestEventNeverRecorded(t *testing.T) {
	d := open(t, nil)
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
func TestWaitEventMeansTheRecordAtItsCall(t *testing.T) {
	d := open(t, nil)
	a, b := newStream(t, d), newStream(t, d)
	e := newEvent(t, d)
	early, late := newGate(), newGate()
	require.NoError(t, a.Launch(early))
	require.NoError(t, a.Record(e))
	require.NoError(t, b.WaitEvent(e))
	require.NoError(t, a.Launch(late))
	require.NoError(t, a.Record(e))
	early.open()
	synchronize(t, b) // would lose patience if it meant the second record
	done, err := e.Query()
	require.NoError(t, err)
	assert.False(t, done, "Query means the latest record")
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, e.Synchronize(ctx), context.DeadlineExceeded)
	late.open()
	require.NoError(t, e.Synchronize(bounded(t)))
}

func TestEventSince(t *testing.T) {
	d := open(t, nil)
	s := newStream(t, d)
	begin, end := newEvent(t, d), newEvent(t, d)
	g := newGate()
	const pause = 20 * time.Millisecond
	require.NoError(t, s.Record(begin))
	require.NoError(t, s.HostFunc(func() { time.Sleep(pause) }))
	require.NoError(t, s.Launch(g))
	require.NoError(t, s.Record(end))
	_, err := end.Since(begin)
	require.ErrorIs(t, err, device.ErrInvalid, "not complete yet")
	g.open()
	synchronize(t, s)
	took, err := end.Since(begin)
	require.NoError(t, err)
	assert.GreaterOrEqual(t, took, pause)
	back, err := begin.Since(end)
	require.NoError(t, err)
	assert.Equal(t, -took, back)
	same, err := end.Since(end)
	require.NoError(t, err)
	assert.Zero(t, same)
	_, err = end.Since(nil)
	require.ErrorIs(t, err, device.ErrInvalid)
}

func TestEventClose(t *testing.T) {
	d := open(t, nil)
	s, other := newStream(t, d), newStream(t, d)
	e := newEvent(t, d)
	g := newGate()
	var c counter
	require.NoError(t, s.Launch(g))
	require.NoError(t, s.Record(e))
	require.NoError(t, other.WaitEvent(e))
	require.NoError(t, other.Launch(&c))
	require.NoError(t, e.Close())
	_, queryErr := e.Query()
	_, sinceErr := e.Since(newEvent(t, d))
	for i, err := range []error{e.Close(), queryErr, sinceErr, e.Synchronize(bounded(t)), s.Record(e), s.WaitEvent(e)} {
		assert.ErrorIs(t, err, device.ErrClosed, "call %d", i)
	}
	assert.Zero(t, c.runs.Load())
	g.open()
	synchronize(t, other)
	assert.EqualValues(t, 1, c.runs.Load(), "the wait outlives the event")
}

// TestOrderModel enqueues random work, records and waits on several streams, and checks that each work ran once, after all
// that had to run before it.
func TestOrderModel(t *testing.T) {
	const streams, events = 3, 4
	rapid.Check(t, func(t *rapid.T) {
		d, err := host.New(nil)
		if err != nil {
			t.Fatal(err)
		}
		defer func() {
			if err := d.Close(); err != nil {
				t.Fatal(err)
			}
		}()
		ok := func(err error) {
			if err != nil {
				t.Fatal(err)
			}
		}
		var ss [streams]device.Stream
		var es [events]device.Event
		for i := range ss {
			ss[i], err = d.NewStream()
			ok(err)
		}
		for i := range es {
			es[i], err = d.NewEvent()
			ok(err)
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
				ok(es[e].Synchronize(context.Background()))
				for j := range recorded[e] {
					if int(progress[j].runs.Load()) < recorded[e][j] {
						t.Fatal("the event was complete too early")
					}
				}
			case 9:
				ok(ss[i].Synchronize(context.Background()))
				if got := int(progress[i].runs.Load()); got != enqueued[i] {
					t.Fatalf("stream %d: %d of %d ran", i, got, enqueued[i])
				}
			}
		}
		ok(d.Synchronize(context.Background()))
		for i := range ss {
			ok(ss[i].Synchronize(context.Background()))
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
