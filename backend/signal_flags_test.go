package backend

import (
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
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
