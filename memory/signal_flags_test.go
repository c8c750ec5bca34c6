package memory

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
)

// TestHalfWrittenFlag: a word whose halves differ is no count yet.
func TestHalfWrittenFlag(t *testing.T) {
	f := &flagSignals{words: make([]atomic.Uint64, 2)}
	for _, count := range []uint32{0, 1, 255, 256, 1<<32 - 1} {
		f.words[1].Store(twice(count))
		have, whole := f.count(1)
		assert.True(t, whole, "%d", count)
		assert.Equal(t, count, have)
		// From 255 to 256, byte by byte from either end.
		next := twice(count + 1)
		for bytes := 1; bytes < 8; bytes++ {
			low := uint64(1)<<(8*bytes) - 1
			for _, word := range []uint64{next&low | twice(count)&^low, twice(count)&low | next&^low} {
				f.words[1].Store(word)
				have, whole := f.count(1)
				assert.True(t, !whole || have == count || have == count+1, "of %d a word %#x is taken for %d", count, word, have)
			}
		}
	}
}

// slowStore is a store whose writes end when a test says so.
type slowStore struct {
	posted []uint64
	ended  bool
}

func (s *slowStore) Post(value uint64) error {
	s.posted, s.ended = append(s.posted, value), false
	return nil
}

func (s *slowStore) Poll() (bool, error) { return s.ended, nil }
func (s *slowStore) Close() error        { return nil }

// TestSignalsUnderWay: of signals that are sent while another is being written, none has arrived with that one; they go together.
func TestSignalsUnderWay(t *testing.T) {
	store := &slowStore{}
	l := &flagLane{store: store}
	reached := func(count uint32) bool {
		ok, err := l.reached(count)
		require.NoError(t, err)
		return ok
	}
	first := l.send()
	assert.False(t, reached(first))
	second, third := l.send(), l.send()
	assert.False(t, reached(second))
	store.ended = true
	assert.True(t, reached(first))
	assert.False(t, reached(second), "it was sent while the first was written")
	assert.False(t, reached(third))
	assert.Equal(t, []uint64{twice(1), twice(3)}, store.posted)
	store.ended = true
	assert.True(t, reached(third))
	assert.True(t, reached(second))
	assert.Len(t, store.posted, 2)
}

// takenFlags take the words away when they are closed.
type takenFlags struct {
	backend.Flags
	of     *flagSignals
	closed atomic.Bool
}

func (t *takenFlags) Close() error {
	t.closed.Store(true)
	t.of.words = nil
	return nil
}

// heldStore is a store of which a poll takes until a test says so.
type heldStore struct {
	slowStore
	polled, release chan struct{}
}

func (s *heldStore) Poll() (bool, error) {
	close(s.polled)
	<-s.release
	return false, nil
}

// TestRunsAfterClose: a run that its stream has cut off is polled until it ends, also when the words have gone meanwhile: it is ErrClosed then, and nobody reads where they were.
func TestRunsAfterClose(t *testing.T) {
	store := &heldStore{polled: make(chan struct{}), release: make(chan struct{})}
	f := &flagSignals{size: 2, words: make([]atomic.Uint64, 8), consumed: make([]atomic.Uint32, 8)}
	flags := &takenFlags{of: f}
	f.flags = flags
	lane := &flagLane{signals: f, peer: 1, store: store}
	require.NoError(t, store.Post(twice(1)))
	lane.flying, lane.busy = 1, true
	f.lanes = make([]atomic.Pointer[flagLane], 8)
	f.lanes[0].Store(lane)
	sent := &flagSent{lane: lane, count: 1, began: time.Now()}

	closed := make(chan error, 1)
	polls := make(chan struct{})
	f.memory = &Memory{} // whose group is nil: a poll that comes to it panics
	go func() {
		defer close(polls)
		defer func() { _ = recover() }()
		_, _ = sent.Poll()
	}()
	<-store.polled
	go func() { closed <- f.close() }()
	time.Sleep(50 * time.Millisecond)
	assert.False(t, flags.closed.Load(), "the words were taken from a poll")
	close(store.release)
	<-polls
	require.NoError(t, <-closed)
	assert.True(t, flags.closed.Load())
	for what, run := range map[string]device.HostProgress{
		"a signal":  sent,
		"a wait":    &flagAwaited{flagWait: flagWait{f, 1, 0}, index: 1, count: 1, began: time.Now()},
		"a barrier": &flagMeeting{flagBarrier: flagBarrier{f, 0}, epoch: 1, began: time.Now(), peers: make([]meeting, 2)},
		"several":   &flagRuns{of: f, under: []device.HostProgress{sent}},
	} {
		_, err := run.Poll()
		assert.ErrorIs(t, err, errs.ErrClosed, what)
	}
}
