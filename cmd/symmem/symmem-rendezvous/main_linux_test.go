package main

import (
	"bufio"
	"context"
	"debug/elf"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/group"
)

// built builds the command as its documentation says.
func built(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "symmem-rendezvous")
	cmd := exec.Command("go", "build", "-o", path, ".")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	said, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", said)
	return path
}

// TestStatic: the binary asks for no loader and no library, ranks meet at it, and it ends with the last of them.
func TestStatic(t *testing.T) {
	path := built(t)
	f, err := elf.Open(path)
	require.NoError(t, err)
	defer f.Close()
	for _, p := range f.Progs {
		assert.NotContains(t, []elf.ProgType{elf.PT_INTERP, elf.PT_DYNAMIC}, p.Type)
	}

	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	const token = "0123456789abcdef"
	cmd := exec.CommandContext(ctx, path, "--listen", "127.0.0.1:0", "--world-size", "2", "--job", "alone")
	cmd.Env = []string{"SYMMEM_TOKEN=" + token}
	var said strings.Builder
	cmd.Stderr = &said
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	line, err := bufio.NewReader(out).ReadString('\n')
	require.NoError(t, err, "%s", &said)
	addr, ok := strings.CutPrefix(strings.TrimSpace(line), "rendezvous at ")
	require.True(t, ok, line)
	errs := make([]error, 2)
	var wait sync.WaitGroup
	for rank := range errs {
		wait.Go(func() {
			g, err := group.Join(ctx, &group.Options{Rank: rank, WorldSize: 2, Addr: addr, Served: true, Job: "alone", Token: token})
			if err == nil {
				err = errors.Join(g.Barrier(ctx, "here"), g.Close(ctx))
			}
			errs[rank] = err
		})
	}
	wait.Wait()
	require.NoError(t, errors.Join(errs...))
	require.NoError(t, cmd.Wait(), "%s", &said)
}

// TestUsage: what is missing or mistyped is named, with the status and the name of this command.
func TestUsage(t *testing.T) {
	path := built(t)
	for _, c := range []struct{ args, want string }{
		{"", "--listen, the address to serve on, is missing"},
		{"--listen 127.0.0.1:0 --restart 1", "whose number of ranks, --world-size, is missing"},
		{"--listen 127.0.0.1:0 --world-sise 2", "did you mean --world-size"},
		{"--listen 127.0.0.1:0 --world-size 2 now", `symmem-rendezvous takes no arguments, and "now" was given`},
		{"--listen 127.0.0.1:0 --world-size 2 --backend host", "--backend is for ranks"},
		{"completion nonsense", `symmem-rendezvous takes no arguments, and "completion" was given`},
	} {
		cmd := exec.Command(path, strings.Fields(c.args)...)
		cmd.Env = []string{}
		said, err := cmd.CombinedOutput()
		var exit *exec.ExitError
		require.ErrorAs(t, err, &exit, "%s: %s", c.args, said)
		assert.Equal(t, 2, exit.ExitCode(), "%s: %s", c.args, said)
		assert.Contains(t, string(said), c.want)
		assert.Contains(t, string(said), "symmem-rendezvous: ")
		assert.Contains(t, string(said), "Run 'symmem-rendezvous --help' for usage.")
	}
	said, err := exec.Command(path, "--help").CombinedOutput()
	require.NoError(t, err)
	assert.Contains(t, string(said), "symmem-rendezvous --listen 10.0.0.1:29400")
}
