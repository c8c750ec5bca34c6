package kernels

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/symmem/symmem/kernels/ptx"
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

// TestStoredTogether: pieces are stored together if all are whole vectors that an index of 32 bits counts, and are loaded once if they are the same bytes.
func TestStoredTogether(t *testing.T) {
	const base = 1 << 30
	pieces := func(n int, change func(*ptx.Piece)) []ptx.Piece {
		var out []ptx.Piece
		for i := range n {
			out = append(out, ptx.Piece{From: base, To: base * uint64(i+2), Bytes: 4096})
		}
		if change != nil {
			change(&out[n-1])
		}
		return out
	}
	for _, c := range []struct {
		what   string
		change func(*ptx.Piece)
		want   uint32
	}{
		{"the same bytes", nil, ptx.StoredTogether | ptx.AlikePieces},
		{"other bytes", func(c *ptx.Piece) { c.From += 4096 }, ptx.StoredTogether},
		{"fewer bytes", func(c *ptx.Piece) { c.Bytes = 16 }, ptx.StoredTogether},
		{"a byte too many", func(c *ptx.Piece) { c.Bytes++ }, 0},
		{"not aligned where they come from", func(c *ptx.Piece) { c.From += 8 }, 0},
		{"not aligned where they go", func(c *ptx.Piece) { c.To += 4 }, 0},
		{"the most vectors", func(c *ptx.Piece) { c.Bytes = 16 * (1<<31 - 1) }, ptx.StoredTogether},
		{"one more", func(c *ptx.Piece) { c.Bytes = 16 << 31 }, 0},
	} {
		assert.Equal(t, c.want, storedTogether(pieces(3, c.change)), c.what)
	}
	assert.Equal(t, uint32(ptx.StoredTogether|ptx.AlikePieces), storedTogether(pieces(1, nil)))
}
