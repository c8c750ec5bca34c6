package tests

import (
	"bytes"
	"encoding/json"
	"errors"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/config"
)

// TestReadmeProgram runs the program of the README, as two processes, on backends with and without peer pointers.
func TestReadmeProgram(t *testing.T) {
	readme, err := os.ReadFile("../README.md")
	if errors.Is(err, fs.ErrNotExist) {
		skipWithout(t, "checkout", "this is not run in a checkout: the README and its program are not here")
	}
	require.NoError(t, err)
	shown := regexp.MustCompile("(?s)```go\n(.*?)```").FindSubmatch(readme)
	require.NotNil(t, shown, "the README shows a program")
	program, err := os.ReadFile("../examples/start/main.go")
	require.NoError(t, err)
	_, program, _ = bytes.Cut(program, []byte("\n")) // its comment
	require.Equal(t, string(shown[1]), string(program), "the README shows examples/start, which is compiled")

	path := buildReadmeProgram(t)
	for name, pointers := range map[string]bool{"host": true, farName: false, "nixl": true} {
		t.Run("backend="+name, func(t *testing.T) {
			requireBackend(t, name)
			requireGPUs(t, name, 2)
			for _, out := range runReadmeProgram(t, path, name) {
				assert.Equal(t, pointers, strings.Contains(out, "the last rank's copy is at"), out)
			}
		})
	}
}

// buildReadmeProgram compiles the program together with the backend far of these tests.
func buildReadmeProgram(t *testing.T) (path string) {
	t.Helper()
	dir := t.TempDir()
	far, err := os.ReadFile("far_test.go")
	require.NoError(t, err)
	own := filepath.Join(dir, "far.go")
	require.NoError(t, os.WriteFile(own, bytes.Replace(far, []byte("package tests"), []byte("package main"), 1), 0o600))
	place, err := filepath.Abs("../examples/start/far.go")
	require.NoError(t, err)
	overlay, err := json.Marshal(map[string]any{"Replace": map[string]string{place: own}})
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "overlay.json"), overlay, 0o600))
	path = filepath.Join(dir, "start.exe")
	out, err := exec.Command("go", "build", "-overlay", filepath.Join(dir, "overlay.json"), "-o", path, "../examples/start").CombinedOutput()
	require.NoError(t, err, "%s", out)
	return path
}

// runReadmeProgram gives what two ranks of the program print.
func runReadmeProgram(t *testing.T, path, name string) (outs [2]string) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	socket, err := listener.(*net.TCPListener).File()
	require.NoError(t, err)
	var cmds [2]*exec.Cmd
	var noise [2]bytes.Buffer
	for rank := range cmds {
		cmd := exec.CommandContext(t.Context(), path)
		cmd.Env = append(ownEnviron(), "SYMMEM_BACKEND="+name, "SYMMEM_RENDEZVOUS_ADDR="+listener.Addr().String(), "SYMMEM_WORLD_SIZE=2",
			"SYMMEM_LOCAL_WORLD_SIZE=2", "SYMMEM_RANK="+strconv.Itoa(rank), "SYMMEM_LOCAL_RANK="+strconv.Itoa(rank), "SYMMEM_MULTICAST="+multicastSetting())
		if rank == 0 {
			cmd.ExtraFiles = []*os.File{socket}
			cmd.Env = append(cmd.Env, "SYMMEM_RENDEZVOUS_FD=3")
		}
		cmd.Stdout, cmd.Stderr = &noise[rank], &noise[rank]
		cmd.WaitDelay = 5 * time.Second
		endWithParent(cmd)
		require.NoError(t, cmd.Start())
		cmds[rank] = cmd
	}
	require.NoError(t, socket.Close())
	require.NoError(t, listener.Close())
	for rank, cmd := range cmds {
		err := cmd.Wait()
		outs[rank] = noise[rank].String()
		assert.NoError(t, err, "rank %d: %s", rank, outs[rank])
	}
	return outs
}

// TestReadmeDefaults holds the README's table of settings to the configuration.
func TestReadmeDefaults(t *testing.T) {
	readme, err := os.ReadFile("../README.md")
	if errors.Is(err, fs.ErrNotExist) {
		skipWithout(t, "checkout", "this is not run in a checkout: the README is not here")
	}
	require.NoError(t, err)
	keys := map[string]config.Key{}
	for _, k := range config.Keys() {
		keys[k.Name] = k
	}
	rows := regexp.MustCompile("(?m)^\\| `([a-z-]+)`[^|]* \\| `(SYMMEM_[A-Z_]+)`[^|]* \\| (?:`([^`]+)`|[a-z ]+) \\|").FindAllStringSubmatch(string(readme), -1)
	require.Greater(t, len(rows), 8)
	for _, row := range rows {
		key, ok := keys[row[1]]
		require.True(t, ok, row[1])
		assert.Equal(t, key.Env, row[2])
		want := row[3]
		if d, err := time.ParseDuration(want); err == nil {
			want = d.String()
		}
		if want != "" {
			assert.Equal(t, key.Default, want, row[1])
		}
	}
}
