package kernels

import (
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/symmem/symmem/kernels/ptx"
)

// TestPushGeometry: the kernels for whole vectors have whole warps, a warp for every peer even where a plan may have one block only, and no
// more threads than they were compiled for.
func TestPushGeometry(t *testing.T) {
	for _, a := range []Algorithm{OneShotPush, TwoShotPush} {
		for size := 2; size <= 8; size++ {
			for bytes := int64(16); bytes <= 64<<20; bytes *= 2 {
				for _, processors := range []int{1, 16, 78, 132, 148} {
					g := pushGeometry(a, bytes, size, processors)
					assert.Zero(t, g.threads%32)
					assert.LessOrEqual(t, g.threads, 256)
					assert.Positive(t, g.blocks)
					if one := g.atMost(1); a == TwoShotPush {
						assert.GreaterOrEqual(t, one.threads/32, size-1, "%d bytes between %d ranks", bytes, size)
					}
				}
			}
		}
	}
}

// TestAllReducePushGeometry: an all-reduce in one shot has as many blocks as have work, or 4, but for the least between two ranks; and the threads of other collectives, and never more
// blocks.
func TestAllReducePushGeometry(t *testing.T) {
	for _, c := range []struct {
		size   int
		bytes  int64
		blocks int
	}{
		{2, 16, 32}, {2, 4<<10 - 16, 32}, {2, 4 << 10, 4}, {4, 16, 4}, {4, 1 << 10, 4}, {4, 16 << 10, 16}, {4, 16<<10 + 16, 17}, {8, 64 << 10, 64}, {2, 4 << 20, 1056},
	} {
		assert.Equal(t, c.blocks, allReducePushGeometry(OneShotPush, c.bytes, c.size, 132).blocks, "%d bytes between %d", c.bytes, c.size)
	}
	for size := 2; size <= 8; size++ {
		for bytes := int64(16); bytes <= 64<<20; bytes *= 2 {
			for _, processors := range []int{1, 16, 78, 132, 148} {
				for _, a := range []Algorithm{OneShotPush, TwoShotPush} {
					g, most := allReducePushGeometry(a, bytes, size, processors), pushGeometry(a, bytes, size, processors)
					assert.Equal(t, most.threads, g.threads)
					assert.Positive(t, g.blocks)
					assert.LessOrEqual(t, g.blocks, most.blocks)
					if a == TwoShotPush {
						assert.Equal(t, most, g)
					}
				}
			}
		}
	}
}

// TestFlowGeometry: blocks of a reduce-scatter, or reduce, in chunks are pairs, no more than there are chunks nor than multiprocessors, and have half the threads where each has
// few chunks.
func TestFlowGeometry(t *testing.T) {
	for size := 2; size <= 8; size++ {
		for bytes := int64(16); bytes <= 256<<20; bytes *= 2 {
			for _, processors := range []int{1, 16, 78, 132, 148} {
				g := flowGeometry(bytes, size, processors)
				assert.Equal(t, flowThreads(bytes, size), g.threads)
				assert.Zero(t, g.blocks%2)
				assert.Positive(t, g.blocks)
				assert.LessOrEqual(t, g.blocks, max(processors, 2))
				assert.LessOrEqual(t, int64(g.blocks/2), ptx.ScatterFlowChunks(bytes, size, g.threads))
			}
		}
	}
	assert.Equal(t, launchGeometry{blocks: 132, threads: 256}, flowGeometry(16<<20, 4, 132))
	assert.Equal(t, launchGeometry{blocks: 132, threads: 128}, flowGeometry(16<<20/3, 4, 132))
	assert.Equal(t, 256, flowThreads(1<<20, 2), "between two the first and the last chunk are few of all")
}
