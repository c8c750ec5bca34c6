package survey

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/internal/dl"
)

func TestFailed(t *testing.T) {
	lacking := &dl.SymbolError{Library: "L (/x/libl.so)", Symbols: []string{"f"}, Hint: "version 2 has it"}
	assert.Equal(t, backend.Library{Name: "L", State: backend.LibraryUnusable, Reason: "binding: L (/x/libl.so) does not have f", Fix: "version 2 has it"},
		Failed("L", fmt.Errorf("binding: %w", lacking), "other"))
	call := &dl.Error{Library: "L", Call: "start", Code: 3, Hint: "start the service"}
	assert.Equal(t, backend.Library{Name: "L", State: backend.LibraryUnusable, Reason: "L: start returned 3", Fix: "start the service"}, Failed("L", call, "other"))
	assert.Equal(t, backend.Library{Name: "L", State: backend.LibraryUnusable, Reason: "too old", Fix: "install a newer one"},
		Failed("L", errors.New("too old"), "install a newer one"))
}

// TestFailedToLoad asks the real loader for a file that is not there, and for one that is no library.
func TestFailedToLoad(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("libraries are loaded on linux only")
	}
	dir := t.TempDir()
	search := dl.Search{Library: "L", Names: []string{"libsymmemnotthere.so.1"}, Folders: []string{dir, filepath.Join(dir, "x*")}, Hint: "install it"}
	_, err := dl.Open(search)
	require.Error(t, err)
	l := Failed("L", err, "other")
	assert.Equal(t, backend.LibraryMissing, l.State)
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
	assert.Equal(t, backend.LibraryUnusable, l.State)
	assert.Equal(t, file, l.Path)
	assert.Contains(t, l.Reason, "invalid ELF header")
	assert.Equal(t, "install it", l.Fix)
}
