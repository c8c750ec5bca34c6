package config_test

import (
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/config"
)

// hiddenVariable makes the test binary the other user's program of TestHiddenDirectory; its value is whether symmem.yaml can be seen.
const hiddenVariable = "SYMMEM_TEST_CONFIG_HIDDEN"

// TestHiddenDirectory: a program that was begun in a directory which its user may not search, as by sudo in the home of who calls, has no symmem.yaml there. One that it sees and may
// not read, or that was named, is an error.
func TestHiddenDirectory(t *testing.T) {
	if state := os.Getenv(hiddenVariable); state != "" {
		hiddenProgram(t, state)
		return
	}
	needRoot(t)
	for state, mode := range map[string]fs.FileMode{"hidden": 0o700, "seen": 0o755} {
		t.Run(state, func(t *testing.T) {
			dir := t.TempDir()
			require.NoError(t, os.WriteFile(filepath.Join(dir, "symmem.yaml"), []byte("channels: 7"), 0o600))
			require.NoError(t, os.Chmod(dir, mode))
			self, err := os.Executable()
			require.NoError(t, err)
			cmd := exec.CommandContext(t.Context(), self, "-test.run=^TestHiddenDirectory$")
			cmd.Dir, cmd.Env = dir, append(os.Environ(), hiddenVariable+"="+state)
			cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
			out, err := cmd.CombinedOutput()
			require.NoError(t, err, "%s", out)
		})
	}
}

// hiddenProgram becomes another user's, and looks for its configuration.
func hiddenProgram(t *testing.T, state string) {
	require.NoError(t, syscall.Setgroups(nil))
	require.NoError(t, syscall.Setgid(somebody))
	require.NoError(t, syscall.Setuid(somebody))
	c, err := config.Load(&config.LoadOptions{Environ: environ()})
	if state == "seen" {
		require.ErrorIs(t, err, fs.ErrPermission)
	} else {
		require.NoError(t, err)
		assert.Equal(t, config.Default().Channels, c.Channels)
		_, err = config.Load(&config.LoadOptions{File: "symmem.yaml", Environ: environ()})
		require.ErrorIs(t, err, fs.ErrPermission)
	}
	if !t.Failed() {
		os.Exit(0) // before the test binary writes what it has counted, for which this user may have no folder
	}
}
