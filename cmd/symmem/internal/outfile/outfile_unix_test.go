//go:build unix

package outfile

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func content(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	return string(text)
}

// only sees that a folder has these files and no others.
func only(t *testing.T, dir string, names ...string) {
	t.Helper()
	files, err := os.ReadDir(dir)
	require.NoError(t, err)
	var all []string
	for _, f := range files {
		all = append(all, f.Name())
	}
	assert.ElementsMatch(t, names, all)
}

// TestWrite: a file is there with all that was written, or as it was, whatever it is.
func TestWrite(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "new")
	f, err := Plan(path)
	require.NoError(t, err)
	assert.False(t, f.Regular())
	only(t, dir)
	require.NoError(t, f.Write([]byte("one")))
	assert.Equal(t, "one", content(t, path))
	only(t, dir, "new")

	require.NoError(t, os.Chmod(path, 0o600))
	require.NoError(t, os.Symlink("new", filepath.Join(dir, "link")))
	f, err = Plan(filepath.Join(dir, "link"))
	require.NoError(t, err)
	assert.True(t, f.Regular())
	assert.Equal(t, "one", content(t, path), "nothing changes before it is written")
	require.NoError(t, f.Write([]byte("2")))
	assert.Equal(t, "2", content(t, path))
	only(t, dir, "new", "link")
	info, err := os.Lstat(filepath.Join(dir, "link"))
	require.NoError(t, err)
	assert.NotZero(t, info.Mode()&os.ModeSymlink, "a link stays one")
	info, err = os.Stat(path)
	require.NoError(t, err)
	assert.Equal(t, os.FileMode(0o600), info.Mode().Perm(), "and nobody may read it who could not")
}

// TestErrorsNameTheFile: an error names the file that was asked for, and none that nobody knows.
func TestErrorsNameTheFile(t *testing.T) {
	dir := t.TempDir()
	gone := filepath.Join(dir, "gone")
	_, err := Plan(filepath.Join(gone, "x"))
	require.ErrorIs(t, err, os.ErrNotExist)
	assert.EqualError(t, err, "open "+gone+"/x: no such file or directory")

	require.NoError(t, os.Mkdir(gone, 0o700))
	path := filepath.Join(gone, "y")
	f, err := Plan(path)
	require.NoError(t, err)
	require.NoError(t, os.Mkdir(path, 0o700)) // a file cannot take the place of a folder
	err = f.Write([]byte("one"))
	require.ErrorContains(t, err, path)
	assert.NotContains(t, err.Error(), ".symmem-")
	only(t, gone, "y")
	require.NoError(t, os.RemoveAll(gone))
	for _, err := range []error{f.Write(nil), f.Update(time.Second, func(string) ([]byte, error) { return nil, nil })} {
		require.ErrorContains(t, err, path)
		assert.NotContains(t, err.Error(), ".symmem-")
	}
}

// TestLinkToNothing: where links lead to a file that is not there yet, that is made, and they stay.
func TestLinkToNothing(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, os.Mkdir(filepath.Join(dir, "far"), 0o700))
	require.NoError(t, os.Symlink("far/second", filepath.Join(dir, "first")))
	require.NoError(t, os.Symlink("new", filepath.Join(dir, "far", "second")))
	f, err := Plan(filepath.Join(dir, "first"))
	require.NoError(t, err)
	only(t, filepath.Join(dir, "far"), "second")
	require.NoError(t, f.Write([]byte("one")))
	only(t, dir, "first", "far")
	only(t, filepath.Join(dir, "far"), "second", "new")
	for _, name := range []string{"first", "far/second"} {
		info, err := os.Lstat(filepath.Join(dir, name))
		require.NoError(t, err)
		assert.NotZero(t, info.Mode()&os.ModeSymlink, name)
		assert.Equal(t, "one", content(t, filepath.Join(dir, name)))
	}
	require.NoError(t, os.Symlink("none/x", filepath.Join(dir, "astray")))
	_, err = Plan(filepath.Join(dir, "astray"))
	require.ErrorIs(t, err, os.ErrNotExist, "it would be refused at the end")
}

// TestRefused: what cannot be written is refused before the work.
func TestRefused(t *testing.T) {
	dir := t.TempDir()
	_, err := Plan(dir)
	require.ErrorContains(t, err, "is a directory")
	_, err = Plan(filepath.Join(dir, "none", "x"))
	require.ErrorIs(t, err, os.ErrNotExist)
	_, err = Plan(filepath.Join(dir, "x", ""))
	require.NoError(t, err)
	only(t, dir)
}

// TestPipe: what is no file is written to, and stays what it is.
func TestPipe(t *testing.T) {
	path := filepath.Join(t.TempDir(), "pipe")
	require.NoError(t, syscall.Mkfifo(path, 0o600))
	f, err := Plan(path)
	require.NoError(t, err)
	assert.False(t, f.Regular())
	read := make(chan string, 1)
	go func() {
		var text []byte
		if pipe, err := os.Open(path); err == nil {
			text, _ = io.ReadAll(pipe)
			_ = pipe.Close()
		}
		read <- string(text)
	}()
	require.NoError(t, f.Write([]byte("through")))
	assert.Equal(t, "through", <-read)
	info, err := os.Stat(path)
	require.NoError(t, err)
	assert.NotZero(t, info.Mode()&os.ModeNamedPipe)
	null, err := Plan(os.DevNull)
	require.NoError(t, err)
	require.NoError(t, null.Write([]byte("gone")))
	info, err = os.Stat(os.DevNull)
	require.NoError(t, err)
	assert.NotZero(t, info.Mode()&os.ModeCharDevice)
}

// TestFullDisk: a file that has no room leaves the one that was there.
func TestFullDisk(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "x")
	require.NoError(t, os.WriteFile(path, []byte("precious"), 0o600))
	f, err := Plan(path)
	require.NoError(t, err)
	var was syscall.Rlimit
	require.NoError(t, syscall.Getrlimit(syscall.RLIMIT_FSIZE, &was))
	require.NoError(t, syscall.Setrlimit(syscall.RLIMIT_FSIZE, &syscall.Rlimit{Cur: 100, Max: was.Max}))
	err = f.Write(make([]byte, 1000))
	require.NoError(t, syscall.Setrlimit(syscall.RLIMIT_FSIZE, &was))
	require.ErrorIs(t, err, syscall.EFBIG)
	assert.Equal(t, "precious", content(t, path))
	only(t, dir, "x")
}

// TestUpdate: several that update one file at once lose nothing of each other's, whether it was there before or not, and a link to it stays one.
func TestUpdate(t *testing.T) {
	const writers, rounds = 4, 8
	for name, before := range map[string]bool{"new": false, "there": true} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			path, link := filepath.Join(dir, "x"), filepath.Join(dir, "link")
			require.NoError(t, os.Symlink("x", link))
			if before {
				require.NoError(t, os.WriteFile(path, []byte("first\n"), 0o600))
			}
			errs := make(chan error, writers)
			for i := range writers {
				f, err := Plan(link)
				require.NoError(t, err)
				go func() {
					var err error
					for n := 0; n < rounds && err == nil; n++ {
						err = f.Update(time.Minute, func(path string) ([]byte, error) {
							if path == "" {
								return fmt.Appendf(nil, "%d %d\n", i, n), nil
							}
							old, err := os.ReadFile(path)
							return fmt.Appendf(old, "%d %d\n", i, n), err
						})
					}
					errs <- err
				}()
			}
			for range writers {
				require.NoError(t, <-errs)
			}
			lines := strings.Fields(strings.ReplaceAll(content(t, link), " ", "."))
			for i := range writers {
				for n := range rounds {
					assert.Contains(t, lines, fmt.Sprintf("%d.%d", i, n))
				}
			}
			only(t, dir, "x", "link")
		})
	}
}

// TestUpdateBusy: a lock that is not given back is waited for within bounds, and nothing is written.
func TestUpdateBusy(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "x")
	require.NoError(t, os.WriteFile(path, []byte("precious"), 0o600))
	f, err := Plan(path)
	require.NoError(t, err)
	held, err := os.Open(path)
	require.NoError(t, err)
	defer func() { _ = held.Close() }()
	require.NoError(t, syscall.Flock(int(held.Fd()), syscall.LOCK_EX))
	err = f.Update(20*time.Millisecond, func(string) ([]byte, error) { return []byte("worthless"), nil })
	var busy *BusyError
	require.ErrorAs(t, err, &busy)
	assert.ErrorContains(t, err, path+" is locked by another process, and was for 20ms")
	assert.Equal(t, "precious", content(t, path))
	only(t, dir, "x")
}
