package memory

import (
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
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
