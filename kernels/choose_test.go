package kernels

import (
	"testing"

	"github.com/stretchr/testify/assert"
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
