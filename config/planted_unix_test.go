//go:build unix

package config_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/internal/testneed"
)

// somebody is a user and a group that are not this process's.
const somebody = 54321

// plant writes symmem.yaml into a new working directory. A user or a group of -1 is left as it is.
func plant(t *testing.T, mode fs.FileMode, user, group int) {
	t.Helper()
	t.Chdir(t.TempDir())
	require.NoError(t, os.WriteFile("symmem.yaml", []byte("channels: 7"), 0o600))
	require.NoError(t, os.Chown("symmem.yaml", user, group))
	require.NoError(t, os.Chmod("symmem.yaml", mode))
}

// refusedFile asserts that symmem.yaml is refused, with these texts, and is read where it is named.
func refusedFile(t *testing.T, texts ...string) {
	t.Helper()
	_, err := config.Load(&config.LoadOptions{Environ: environ()})
	require.ErrorIs(t, err, config.ErrInvalid)
	whole, failed := filepath.Abs("symmem.yaml")
	require.NoError(t, failed)
	given := refusals(t, err)["file"]
	require.NotNil(t, given, err)
	assert.Contains(t, given.Value, whole)
	for _, text := range append(texts, "--config", "SYMMEM_CONFIG", "user "+strconv.Itoa(owner(t))) {
		assert.ErrorContains(t, err, text)
	}
	for _, opts := range []*config.LoadOptions{
		{File: "symmem.yaml", Environ: environ()},
		{Flags: parsed(t, "--config", "symmem.yaml"), Environ: environ()},
		{Environ: environ("SYMMEM_CONFIG=symmem.yaml")},
	} {
		c, err := config.Load(opts)
		require.NoError(t, err, "a file that is named is meant")
		assert.Equal(t, 7, c.Channels)
	}
}

// owner returns whose symmem.yaml, or the link of that name, is.
func owner(t *testing.T) int {
	t.Helper()
	info, err := os.Lstat("symmem.yaml")
	require.NoError(t, err)
	return int(info.Sys().(*syscall.Stat_t).Uid)
}

// needRoot skips a test that gives files to others.
func needRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		testneed.Missing(t, "root", "only root can give files to others")
	}
}

// TestPlantedFile: a file that others may have put into the working directory is not obeyed, unless it is named.
func TestPlantedFile(t *testing.T) {
	t.Run("all may write it", func(t *testing.T) {
		plant(t, 0o666, -1, os.Getegid())
		refusedFile(t, "mode 0666", "chmod go-w it")
	})
	t.Run("of another user", func(t *testing.T) {
		needRoot(t)
		plant(t, 0o644, somebody, -1)
		refusedFile(t, "user 54321", "mode 0644", "chown it")
	})
	t.Run("another group may write it", func(t *testing.T) {
		needRoot(t)
		plant(t, 0o664, -1, somebody)
		refusedFile(t, "mode 0664", "chmod go-w it")
	})
	t.Run("a link of another user", func(t *testing.T) {
		needRoot(t)
		plant(t, 0o600, -1, -1)
		require.NoError(t, os.Rename("symmem.yaml", "mine.yaml"))
		require.NoError(t, os.Symlink("mine.yaml", "symmem.yaml"))
		require.NoError(t, os.Lchown("symmem.yaml", somebody, -1))
		refusedFile(t, "a link of user 54321", "chown it")
	})
}

// TestOwnFile: what only this user, or the user's own group, may write is read without being named.
func TestOwnFile(t *testing.T) {
	read := func(t *testing.T) {
		t.Helper()
		c, err := config.Load(&config.LoadOptions{Environ: environ()})
		require.NoError(t, err)
		assert.Equal(t, 7, c.Channels)
	}
	for _, mode := range []fs.FileMode{0o600, 0o644, 0o664} {
		t.Run(mode.String(), func(t *testing.T) {
			plant(t, mode, -1, os.Getegid())
			read(t)
		})
	}
	t.Run("a link", func(t *testing.T) {
		plant(t, 0o600, -1, os.Getegid())
		require.NoError(t, os.Rename("symmem.yaml", "mine.yaml"))
		require.NoError(t, os.Symlink("mine.yaml", "symmem.yaml"))
		read(t)
	})
}

// TestFIFO: a FIFO that nobody writes to is no file, named or not, and holds up nobody.
func TestFIFO(t *testing.T) {
	t.Chdir(t.TempDir())
	require.NoError(t, syscall.Mkfifo("symmem.yaml", 0o600))
	for name, opts := range map[string]*config.LoadOptions{"found": {Environ: environ()}, "named": {File: "symmem.yaml", Environ: environ()}} {
		t.Run(name, func(t *testing.T) {
			loaded := make(chan error, 1)
			go func() {
				_, err := config.Load(opts)
				loaded <- err
			}()
			select {
			case err := <-loaded:
				require.ErrorIs(t, err, config.ErrInvalid)
				assert.ErrorContains(t, err, "a regular file")
			case <-time.After(20 * time.Second):
				w, err := os.OpenFile("symmem.yaml", os.O_WRONLY|syscall.O_NONBLOCK, 0) // lets the reader go
				require.NoError(t, err)
				require.NoError(t, w.Close())
				<-loaded
				t.Fatal("it was held up")
			}
		})
	}
}
