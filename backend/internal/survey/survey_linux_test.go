//go:build amd64 || arm64

package survey

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/internal/dl"
)

// TestFailedToLoad asks the real loader for a file that is not there, and for one that is no library.
func TestFailedToLoad(t *testing.T) {
	dir := t.TempDir()
	search := dl.Search{Library: "L", Names: []string{"libsymmemnotthere.so.1"}, Folders: []string{dir, filepath.Join(dir, "x*")}, Hint: "install it"}
	_, err := dl.Open(search)
	require.Error(t, err)
	l := Failed("L", err, "other")
	assert.Equal(t, "missing", l.State)
	assert.Equal(t, "install it", l.Fix)
	assert.Empty(t, l.Reason)
	require.Len(t, l.Tried, 3)
	assert.Contains(t, l.Tried[0], "libsymmemnotthere.so.1")
	assert.Contains(t, l.Tried[2], filepath.Join(dir, "x*"))

	file := filepath.Join(dir, "libsymmemnotthere.so.1")
	require.NoError(t, os.WriteFile(file, []byte("this is no library, however long it is: "+string(make([]byte, 4096))), 0o600))
	_, err = dl.Open(search)
	require.Error(t, err)
	l = Failed("L", err, "other")
	assert.Equal(t, "unusable", l.State)
	assert.Equal(t, file, l.Path)
	assert.Contains(t, l.Reason, "invalid ELF header")
	assert.Equal(t, "replace or remove "+file+", which cannot be loaded, or install it", l.Fix)
}
