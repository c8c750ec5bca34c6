package kernels

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/assert"
)

// TestPassedChunk: what is passed on at a time is whole vectors of all threads, between more than three ranks never less of longer pieces, and the kernel's counter has room for the chunks of a piece.
func TestPassedChunk(t *testing.T) {
	for _, size := range []int{3, 4, 8, 9} {
		for _, blocks := range []int{1, 16, 132} {
			before := int64(0)
			for longest := int64(16); longest < 1<<38; longest = longest*3/2 + 8 {
				chunk := passedChunk(longest, blocks, size)
				at := fmt.Sprintf("%d bytes by %d blocks between %d ranks", longest, blocks, size)
				assert.Zero(t, chunk%(16*pullThreads), at)
				assert.Positive(t, chunk, at)
				assert.LessOrEqual(t, (longest+chunk-1)/chunk, int64(1)<<32-1, at)
				if size > 3 {
					assert.LessOrEqual(t, before, chunk, at)
				}
				before = chunk
			}
		}
	}
}

// TestPassingBlocks: between more than three ranks a piece is passed on in one round while blocks last, of chunks of a vector a thread.
func TestPassingBlocks(t *testing.T) {
	const most = 132
	for _, size := range []int{4, 5, 8, 9} {
		for longest := int64(16); longest < 64<<20; longest += 4080 {
			blocks := passingBlocks(longest, size, most)
			at := fmt.Sprintf("%d bytes between %d ranks", longest, size)
			assert.LessOrEqual(t, blocks, most, at)
			if longest > most*passedRow {
				assert.Equal(t, most, blocks, at)
				continue
			}
			chunk := passedChunk(longest, blocks, size)
			assert.Equal(t, int64(passedRow), chunk, at)
			assert.Equal(t, int64(blocks), (longest+chunk-1)/chunk, at)
		}
	}
	assert.Zero(t, passingBlocks(1<<20, 3, most))
}
