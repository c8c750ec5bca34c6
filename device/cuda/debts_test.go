package cuda_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/cuda"
)

var errGaveUp = errors.New("gave up")

// newFault makes a fault word whose errors have the value in them.
func newFault(t testing.TB, d *cuda.Device) *cuda.FaultWord {
	t.Helper()
	w, err := d.NewFaultWord(func(word uint64) error { return fmt.Errorf("%w because of %d", errGaveUp, word) })
	require.NoError(t, err)
	return w.(*cuda.FaultWord)
}

// givesUp makes a launch that gives up for the reason, and reports it in cells.
func givesUp(t testing.TB, d *cuda.Device, w device.FaultWord, reason uint32) device.PreparedLaunch {
	t.Helper()
	l, err := function(t, d, "giveup").Prepare(device.Launch{Params: params(0, reason), FaultCell: &device.FaultCellParam{Word: w}})
	require.NoError(t, err)
	return l
}

// told requires that the stream tells of that reason, once.
func told(t testing.TB, s *cuda.Stream, reason int, more string) {
	t.Helper()
	err := s.Synchronize(bounded(t))
	require.ErrorIs(t, err, errGaveUp)
	require.ErrorContains(t, err, fmt.Sprintf("because of %d", reason))
	require.ErrorContains(t, err, more)
	synchronize(t, s)
}

// Each stream tells of its own launches that gave up, and of nothing else; then all goes on.
func TestEachStreamTellsItsOwnFaults(t *testing.T) {
	onEach(t, nil, func(t *testing.T, d *cuda.Device) {
		w, other := newFault(t, d), newFault(t, d)
		a, b, c := newStream(t, d), newStream(t, d), newStream(t, d)
		seven, eight := givesUp(t, d, w, 7), givesUp(t, d, w, 8)
		require.NoError(t, seven.Launch(a))
		require.NoError(t, eight.Launch(a))
		require.NoError(t, eight.Launch(b))
		require.NoError(t, d.Synchronize(bounded(t)), "errors of the work stay with the streams")
		synchronize(t, c)
		told(t, b, 8, "")
		told(t, a, 7, "(and 1 later failures)")
		require.NoError(t, eight.Launch(a))
		told(t, a, 8, "")

		// Of several words at once it tells all.
		require.NoError(t, seven.Launch(a))
		require.NoError(t, givesUp(t, d, other, 9).Launch(a))
		err := a.Synchronize(bounded(t))
		require.ErrorContains(t, err, "because of 7")
		require.ErrorContains(t, err, "because of 9")
		synchronize(t, a)

		// What was not told when the stream or the word is closed is told all the same.
		require.NoError(t, seven.Launch(a))
		require.NoError(t, eight.Launch(b))
		require.ErrorIs(t, a.Close(), errGaveUp)
		require.NoError(t, d.Synchronize(bounded(t)))
		require.NoError(t, w.Close())
		told(t, b, 8, "")
		assert.Equal(t, 1, d.Stats().FaultWords)
	})
}

// A graph's launches that give up are told by the streams that the graph was launched on, whichever they were recorded on.
func TestGraphsTellFaultsWhereTheyAreLaunched(t *testing.T) {
	onEach(t, nil, func(t *testing.T, d *cuda.Device) {
		w := newFault(t, d)
		a, b, c := newStream(t, d), newStream(t, d), newStream(t, d)
		l := givesUp(t, d, w, 5)
		g := capture(t, a, func() {
			require.NoError(t, l.Launch(a))
			require.NoError(t, l.Launch(a))
		})
		synchronize(t, a)
		require.NoError(t, g.Launch(b))
		told(t, b, 5, "")
		require.NoError(t, g.Launch(b))
		require.NoError(t, g.Launch(b))
		told(t, b, 5, "(and 1 later failures)")
		synchronize(t, a)

		// On several streams before any is asked: none says that nothing has failed.
		require.NoError(t, g.Launch(b))
		require.NoError(t, g.Launch(c))
		told(t, c, 5, "")
		told(t, b, 5, "")
		synchronize(t, a)

		// As part of another graph, and after both were closed.
		outer := capture(t, a, func() { require.NoError(t, g.Launch(a)) })
		synchronize(t, a)
		require.NoError(t, outer.Launch(c))
		told(t, c, 5, "")
		require.NoError(t, outer.Launch(c))
		require.NoError(t, g.Launch(b))
		require.NoError(t, outer.Close())
		require.NoError(t, g.Close())
		require.NoError(t, d.Synchronize(bounded(t)))
		told(t, c, 5, "")
		told(t, b, 5, "")
		require.NoError(t, w.Close())
	})
}

// Each run of a launch that shares a word which stays what it is fails, and so tells every stream that ran it.
func TestNamedFaultWord(t *testing.T) {
	onEach(t, nil, func(t *testing.T, d *cuda.Device) {
		w := newFault(t, d)
		name := "store"
		if d.Driver().Path == "fake" {
			name = "kernel"
		}
		writes, err := function(t, d, name).Prepare(device.Launch{Params: params(w.Ptr(), 3), Fault: w})
		require.NoError(t, err)
		dead, err := function(t, d, "kernel").Prepare(device.Launch{Params: params(alloc(t, d, 4), 1), Fault: w})
		require.NoError(t, err)
		a, b, c := newStream(t, d), newStream(t, d), newStream(t, d)
		require.NoError(t, dead.Launch(a))
		synchronize(t, a)
		require.NoError(t, writes.Launch(a))
		require.NoError(t, d.Synchronize(bounded(t)))
		synchronize(t, b)
		told(t, a, 3, "")
		require.NoError(t, dead.Launch(b))
		told(t, b, 3, "")
		synchronize(t, a)
		g := capture(t, a, func() { require.NoError(t, dead.Launch(a)) })
		require.NoError(t, g.Launch(c))
		told(t, c, 3, "")
		require.NoError(t, g.Launch(c))
		told(t, c, 3, "")
		synchronize(t, a)
		require.NoError(t, dead.Launch(a))
		require.NoError(t, w.Close())
		told(t, a, 3, "")
	})
}

// Work that was enqueued past this package is told of where Watch says.
func TestWatchedFaultWord(t *testing.T) {
	onEach(t, nil, func(t *testing.T, d *cuda.Device) {
		w := newFault(t, d)
		a, b, c := newStream(t, d), newStream(t, d), newStream(t, d)
		w.Watch(a)
		synchronize(t, a)
		w.Watch(a)
		g := capture(t, c, func() { w.Watch(c) })
		w.Store(4)
		synchronize(t, b)
		synchronize(t, c)
		told(t, a, 4, "")
		require.NoError(t, g.Launch(b))
		told(t, b, 4, "")
		require.NoError(t, w.Close())
	})
}

// Host functions, too, are told by every stream that a graph was launched on and that was not asked since.
func TestGraphOnTwoStreams(t *testing.T) {
	onEach(t, nil, func(t *testing.T, d *cuda.Device) {
		a, b, c := newStream(t, d), newStream(t, d), newStream(t, d)
		g := capture(t, a, func() { require.NoError(t, a.HostFunc(func() { panic(errGaveUp) })) })
		require.NoError(t, g.Launch(b))
		require.NoError(t, g.Launch(c))
		require.NoError(t, d.Synchronize(bounded(t)))
		require.ErrorIs(t, b.Synchronize(bounded(t)), errGaveUp)
		require.ErrorIs(t, c.Synchronize(bounded(t)), errGaveUp)
		synchronize(t, a)
		synchronize(t, b)
		synchronize(t, c)
	})
}

// Cells are used again when their stream, word or graph has gone.
func TestFaultCellsAreUsedAgain(t *testing.T) {
	f := newFake(1)
	d := openFake(t, f, nil)
	for range 20 {
		w := newFault(t, d)
		l := givesUp(t, d, w, 1)
		for range 50 {
			s := newStream(t, d)
			require.NoError(t, l.Launch(s))
			told(t, s, 1, "")
			g := capture(t, s, func() {
				require.NoError(t, l.Launch(s))
				require.NoError(t, l.Launch(s))
			})
			require.NoError(t, g.Launch(s))
			require.NoError(t, g.Close())
			told(t, s, 1, "")
			require.NoError(t, s.Close())
		}
		require.NoError(t, w.Close())
	}
	assert.LessOrEqual(t, f.calls["cuMemHostAlloc"], 20+2, "a word each, and some for all cells")
	require.NoError(t, d.Close())
	f.assertEmpty(t)
}

func TestBadFaultLaunches(t *testing.T) {
	onEach(t, nil, func(t *testing.T, d *cuda.Device) {
		f := function(t, d, "kernel")
		w := newFault(t, d)
		foreign := newFault(t, openFake(t, newFake(1), nil))
		for i, l := range []device.Launch{
			{Fault: foreign}, {Fault: (*cuda.FaultWord)(nil)},
			{FaultCell: &device.FaultCellParam{}}, {FaultCell: &device.FaultCellParam{Word: foreign}},
			{FaultCell: &device.FaultCellParam{Word: w, Offset: -8}}, {FaultCell: &device.FaultCellParam{Word: w, Offset: 4}},
			{FaultCell: &device.FaultCellParam{Word: w, Offset: 16}},
		} {
			l.Params = params(0, 1)
			_, err := f.Prepare(l)
			require.ErrorIs(t, err, device.ErrInvalid, "launch %d", i)
		}
	})
}

// Synchronize answers for what was enqueued before it, and leaves what came later to the next.
func TestFaultsBehindSynchronize(t *testing.T) {
	for _, what := range []string{"graph", "word", "word in a graph"} {
		t.Run(what, func(t *testing.T) {
			f := newFake(1)
			d := openFake(t, f, nil)
			w := newFault(t, d)
			p := alloc(t, d, 8)
			require.NoError(t, d.CopyFromHost(p, make([]byte, 8)))
			s, other := newStream(t, d), newStream(t, d)
			launch := givesUp(t, d, w, 6)
			if what != "graph" {
				var err error
				launch, err = function(t, d, "kernel").Prepare(device.Launch{Params: params(w.Ptr(), 6), Fault: w})
				require.NoError(t, err)
			}
			later := launch.Launch
			if what != "word" {
				g := capture(t, other, func() { require.NoError(t, launch.Launch(other)) })
				later = g.Launch
			}
			require.NoError(t, s.WaitValue32(p, 1))
			records := func() int {
				f.mu.Lock()
				defer f.mu.Unlock()
				return f.calls["cuEventRecord"]
			}
			before, first := records(), make(chan error, 1)
			go func() { first <- s.Synchronize(bounded(t)) }()
			require.Eventually(t, func() bool { return records() > before }, patience, time.Millisecond)
			require.NoError(t, s.WaitValue32(p.Add(4), 1))
			require.NoError(t, later(s))
			require.NoError(t, other.WriteValue32(p, 1))
			require.NoError(t, <-first)
			require.NoError(t, other.WriteValue32(p.Add(4), 1))
			told(t, s, 6, "")
			synchronize(t, other)
		})
	}
}

// A stream keeps the errors of a word that is closed, which are made then.
func TestClosedFaultWord(t *testing.T) {
	f := newFake(1)
	d := openFake(t, f, nil)
	s := newStream(t, d)
	const words = 20
	for range words {
		made := false
		w, err := d.NewFaultWord(func(uint64) error { made = true; return errGaveUp })
		require.NoError(t, err)
		require.NoError(t, givesUp(t, d, w, 1).Launch(s))
		require.NoError(t, d.Synchronize(bounded(t)))
		require.NoError(t, w.Close())
		require.True(t, made)
		require.ErrorIs(t, s.Synchronize(bounded(t)), errGaveUp)
	}
}
