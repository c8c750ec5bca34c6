package ptxvm

import (
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/kernels/ptx/images"
)

// takesPushParams is the names of kernels that take ptx.PushParams, and how many ranks these are of.
var takesPushParams = regexp.MustCompile(`^symmem_(?:.*_push_(?:whole|long|longer)_.*|lines_.*|scatter_(?:whole|root)_.*)_w(\d)$`)

// TestImages: every kernel of the module is PTX as the machine knows it.
func TestImages(t *testing.T) {
	files, err := images.Files()
	require.NoError(t, err)
	require.NotEmpty(t, files)
	largest := 0
	for _, file := range files {
		text, err := images.Image(file)
		require.NoError(t, err)
		m, err := Parse(file, text)
		require.NoError(t, err)
		require.NotEmpty(t, m.Functions())
		for _, f := range m.Functions() {
			require.Same(t, f, m.Function(f.Name))
			var sizes []int
			switch {
			case f.Name == "symmem_cast":
				sizes = []int{128, 96} // ptx.Comm, ptx.CastParams
			case f.Name == "symmem_pull":
				sizes = []int{128, 288} // ptx.Comm, and the pieces
			case file == "signals.ptx", file == "multimem.ptx", strings.HasPrefix(file, "any_"), strings.HasPrefix(file, "pull_"), strings.HasPrefix(file, "push_"):
				sizes = []int{304} // ptx.Params
			case file == "many_copy.ptx":
				sizes = []int{24} // ptx.Many
			case strings.HasPrefix(file, "many_"):
				sizes = []int{304, 24}
			}
			if whole := takesPushParams.FindStringSubmatch(f.Name); whole != nil {
				n, err := strconv.Atoi(whole[1])
				require.NoError(t, err)
				if sizes = []int{80 + 8*n}; strings.Contains(f.Name, "_many_") {
					sizes = append(sizes, 1552) // ptx.WholeMany
				}
			}
			if sizes == nil { // which package ptx compares with its own structs
				require.NotEmpty(t, f.Params)
				continue
			}
			require.Len(t, f.Params, len(sizes))
			for i, size := range sizes {
				require.Equal(t, size, f.Params[i].Size)
			}
			largest = max(largest, f.stack)
		}
	}
	require.Less(t, largest, 512, "words of registers of a thread")
	t.Log("words of a thread:", largest)
}
