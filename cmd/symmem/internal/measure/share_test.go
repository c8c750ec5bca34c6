package measure

import (
	"testing"

	"github.com/stretchr/testify/assert"
)

// TestShareOf: the message is at least as long as was asked, and no share of a vector or more is broken: a figure of a message in pieces that begin
// anywhere says nothing of those of programs, and a table made of such figures chooses the wrong forms.
func TestShareOf(t *testing.T) {
	for _, w := range []int64{1, 2, 3, 4, 5, 6, 7, 8, 11} {
		for _, width := range []int64{1, 2, 4, 8} {
			for _, bytes := range []int64{1, 7, 16, 31, 100, 1 << 10, 1<<20 + 3, 1 << 30} {
				share := shareOf(bytes, w, width)
				assert.GreaterOrEqual(t, share*w*width, bytes)
				assert.Less(t, share*w*width, bytes+w*16)
				if share*width >= 16 {
					assert.Zero(t, share*width%16, "%d bytes between %d", bytes, w)
				}
			}
		}
	}
	assert.Equal(t, int64(2), shareOf(4, 2, 1), "what is shorter is as it is")
	assert.Equal(t, int64(352), shareOf(1<<10, 3, 1))
	assert.Equal(t, int64(256), shareOf(1<<10, 4, 1))
}
