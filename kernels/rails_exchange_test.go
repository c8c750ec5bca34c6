package kernels

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestExchangeParts: ranks that NCCL carries packs between are in one part, which has the number of its lowest rank, no part can be cut in two, and blocks that go straight have all in one.
func TestExchangeParts(t *testing.T) {
	for _, islands := range append([][][]int{{{0, 1}, {2, 3, 4}, {5, 6, 7, 8}}, {{8, 1}, {2, 7, 4}, {5, 6, 3, 0}}}, hierarchicalIslands...) {
		if len(islands) == 1 {
			continue
		}
		size := len(slices.Concat(islands...))
		form := func(rank int, straight bool) *railForm {
			f := &railForm{islandPlace: newIslandPlace(rank, islands, true)}
			f.exchanges(&railExchange{block: shardAlign, straight: straight})
			return f
		}
		require.Equal(t, make([]int, size), form(0, true).parts(), "%v", islands)
		parts := form(0, false).parts()
		joined := make([]bool, size) // with the lowest of its part, over links
		for r := range size {
			require.Equal(t, parts, form(r, false).parts())
			require.LessOrEqual(t, parts[r], r)
			require.Equal(t, parts[r], parts[parts[r]])
			joined[r] = parts[r] == r
		}
		for range size {
			for r := range size {
				for _, other := range form(r, false).links() {
					require.Equal(t, parts[r], parts[other], "%v: %d and %d", islands, r, other)
					joined[r] = joined[r] || joined[other]
				}
			}
		}
		require.NotContains(t, joined, false, "%v: %v", islands, parts)
	}
}
