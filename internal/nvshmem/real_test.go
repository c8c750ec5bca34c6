package nvshmem

import (
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/testneed"
)

// TestRealLibrary calls what needs no GPU and ends no process, where the library is installed.
func TestRealLibrary(t *testing.T) {
	clean(t)
	l, err := Load(nil)
	if err != nil {
		require.ErrorIs(t, err, errs.ErrUnavailable)
		testneed.Missing(t, "nvshmem", err)
	}
	t.Logf("NVSHMEM %s at %s", l.Version(), l.Path())
	assert.EqualValues(t, 3, l.Version().Major)
	assert.Equal(t, filepath.Join(filepath.Dir(l.Path()), bootstrapName), l.Bootstrap())
	for dtype := range typeNames {
		for op := range opNames {
			for _, what := range []string{Reduce, ReduceScatter} {
				_, err := l.Collective(what, dtype, op)
				assert.NoErrorf(t, err, "%s %s %s", what, dtype, op)
			}
		}
	}
	for _, what := range moves {
		for _, dtype := range []string{"u8", "u32"} {
			_, err := l.Collective(what, dtype, "")
			assert.NoErrorf(t, err, "%s %s", what, dtype)
		}
	}
	_, err = l.Collective(Reduce, "f32", "avg")
	require.ErrorIs(t, err, errs.ErrUnsupported)
	assert.Equal(t, NotStarted, l.call.initStatus())

	id, err := l.NewUniqueID()
	require.NoError(t, err)
	assert.EqualValues(t, uniqueIDVersion, id.Version)
	same, err := ParseUniqueID(id.Bytes())
	require.NoError(t, err)
	assert.Equal(t, id, same)
	assert.NotEqual(t, make([]byte, 124), id.Internal[:])

	// Everything else would end the process.
	_, err = l.Align(4096, 1)
	require.ErrorIs(t, err, errs.ErrClosed)
	require.ErrorIs(t, l.Finalize(), errs.ErrClosed)
}
