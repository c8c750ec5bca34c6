//go:build amd64 || arm64

package dl_test

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/internal/dl"
	"github.com/symmem/symmem/internal/errs"
)

// libc returns a library that every system here has.
func libc(t *testing.T) *dl.Library {
	t.Helper()
	l, err := dl.Open(dl.Search{Library: "the C library", Names: []string{"libc.so.6"}})
	require.NoError(t, err)
	return l
}

func TestOpenAndBind(t *testing.T) {
	l := libc(t)
	assert.Equal(t, "the C library", l.Name())
	assert.Equal(t, "libc.so.6", l.Path())
	file, err := l.File("getpid")
	require.NoError(t, err)
	assert.True(t, filepath.IsAbs(file), file)

	var getpid func() int32
	require.NoError(t, l.Bind(&getpid, "getpid"))
	assert.EqualValues(t, os.Getpid(), getpid())
	var length func(s string) uintptr
	require.NoError(t, l.Bind(&length, "strlen"))
	assert.EqualValues(t, 9, length("symmetric"))
	assert.True(t, l.Has("getpid", "strlen"))
	assert.False(t, l.Has("getpid", "cuInit"))
}

func TestMissingSymbolIsAMissingCapability(t *testing.T) {
	l := libc(t)
	var fn func()
	err := l.Bind(&fn, "cuMemCreate")
	var missing *dl.SymbolError
	require.ErrorAs(t, err, &missing)
	assert.Equal(t, []string{"cuMemCreate"}, missing.Symbols)
	require.ErrorIs(t, err, errs.ErrUnsupported)
	assert.Nil(t, fn)
	_, err = l.Symbol("cuMemCreate")
	require.ErrorAs(t, err, &missing)
	_, err = l.File("cuMemCreate")
	require.ErrorAs(t, err, &missing)
}

func TestBindRefusesWhatCannotBeCalled(t *testing.T) {
	l := libc(t)
	var number int
	var none *func()
	for _, bad := range []any{nil, 3, &number, func() {}, none} {
		require.ErrorIs(t, l.Bind(bad, "getpid"), errs.ErrInvalid, "%T", bad)
	}
	var channel func(chan int)
	require.ErrorContains(t, l.Bind(&channel, "getpid"), "getpid")
	assert.Nil(t, channel)
}

func TestEveryAttemptIsListed(t *testing.T) {
	dir := t.TempDir()
	broken := filepath.Join(dir, "libsymmem-none.so.1")
	require.NoError(t, os.WriteFile(broken, []byte("no library"), 0o600))
	_, err := dl.Open(dl.Search{
		Library: "the none library",
		Names:   []string{"libsymmem-none.so.1", "libsymmem-none.so"},
		Folders: []string{dir, filepath.Join(dir, "*", "lib"), "[", "~/symmem-none"},
		Hint:    "install it",
	})
	require.ErrorIs(t, err, errs.ErrUnavailable)
	var failed *dl.LoadError
	require.ErrorAs(t, err, &failed)
	var tried []string
	for _, a := range failed.Attempts {
		tried = append(tried, a.Path)
		assert.NotEmpty(t, a.Text, a.Path)
	}
	assert.Subset(t, tried, []string{"libsymmem-none.so.1", "libsymmem-none.so", broken,
		filepath.Join(dir, "libsymmem-none.so"), filepath.Join(dir, "*", "lib", "libsymmem-none.so"), "[/libsymmem-none.so"})
	for _, part := range []string{"loading the none library", broken, "file too short", "none of 7 places", "install it"} {
		assert.ErrorContains(t, err, part)
	}
	assert.Contains(t, failed.Attempts[0].Text, "cannot open shared object file")
}

func TestNamedLibraryIsTheOnlyOneTried(t *testing.T) {
	dir := t.TempDir()
	const variable = "SYMMEM_TEST_LIBRARY"
	t.Setenv(variable, filepath.Join(dir, "from-env.so"))
	search := dl.Search{Library: "C", Env: variable, Names: []string{"libc.so.6"}}
	tried := func(s dl.Search) []dl.Attempt {
		_, err := dl.Open(s)
		var failed *dl.LoadError
		require.ErrorAs(t, err, &failed)
		return failed.Attempts
	}
	attempts := tried(search)
	require.Len(t, attempts, 1)
	assert.Equal(t, filepath.Join(dir, "from-env.so"), attempts[0].Path)

	search.Path = filepath.Join(dir, "explicit.so")
	attempts = tried(search)
	require.Len(t, attempts, 1)
	assert.Equal(t, search.Path, attempts[0].Path, "the path goes before the environment")

	search.Path = dir
	attempts = tried(search)
	require.Len(t, attempts, 1)
	assert.Equal(t, filepath.Join(dir, "libc.so.6"), attempts[0].Path, "a folder is looked in")

	t.Setenv(variable, "")
	search.Path = ""
	_, err := dl.Open(search)
	require.NoError(t, err, "an empty variable is none")
}

func TestFolders(t *testing.T) {
	file, err := libc(t).File("getpid")
	require.NoError(t, err)
	root := t.TempDir()
	for _, version := range []string{"v1", "v2"} {
		require.NoError(t, os.MkdirAll(filepath.Join(root, version, "lib"), 0o700))
		require.NoError(t, os.Symlink(file, filepath.Join(root, version, "lib", "libc.so.6")))
	}
	search := dl.Search{Library: "C", Names: []string{"libc.so.6"}, Folders: []string{filepath.Join(root, "*", "lib")}}
	l, err := dl.Open(search)
	require.NoError(t, err)
	assert.Equal(t, "libc.so.6", l.Path(), "the loader goes first")
	search.FoldersFirst = true
	var log bytes.Buffer
	search.Logger = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	l, err = dl.Open(search)
	require.NoError(t, err)
	assert.Equal(t, filepath.Join(root, "v2", "lib", "libc.so.6"), l.Path(), "the last in the alphabet")
	assert.Contains(t, log.String(), "library loaded")
	assert.NotContains(t, log.String(), "signal")
}

func TestSeveralGoroutinesLoad(t *testing.T) {
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 20 {
				l, err := dl.Open(dl.Search{Library: "C", Names: []string{"libc.so.6"}, Global: true})
				if !assert.NoError(t, err) {
					return
				}
				var getpid func() int32
				assert.NoError(t, l.Bind(&getpid, "getpid"))
				assert.EqualValues(t, os.Getpid(), getpid())
				assert.False(t, l.Has("symmem_none")) // the loader's error texts must not get mixed up either
			}
		})
	}
	wg.Wait()
}
