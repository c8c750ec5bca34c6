package measure

import (
	"testing"

	"github.com/stretchr/testify/assert"
)

// TestNearFastest: what comes near the fastest of the first tries is measured for longer, the fastest first, but no more than five.
func TestNearFastest(t *testing.T) {
	assert.Empty(t, nearFastest(nil))
	assert.Equal(t, []int{0}, nearFastest([]float64{3}))
	assert.Equal(t, []int{2, 0}, nearFastest([]float64{1.05, 2, 1, 1.2}))
	assert.Equal(t, []int{0, 1, 2, 3, 4}, nearFastest([]float64{1, 1, 1, 1, 1, 1}))
}

// TestSGLangShapes: something is tried at every size that is measured, on every GPU, between any number of ranks.
func TestSGLangShapes(t *testing.T) {
	for _, most := range []int{78, 108, 132, 148} {
		for world := 2; world <= 8; world++ {
			for vectors := int64(64); vectors <= 256<<20/16; vectors *= 2 {
				n := 0
				for _, shape := range sglangShapes(most) {
					if shape.fits(vectors, world) {
						n++
					}
				}
				assert.Positive(t, n, "%d vectors between %d ranks with %d multiprocessors", vectors, world, most)
			}
		}
	}
}
