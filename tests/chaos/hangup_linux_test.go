package chaos

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestPausesOutliveTheShell ends a shell while the tests that it has started in its background have stopped a rank. They go on to
// their end.
func TestPausesOutliveTheShell(t *testing.T) {
	requireTraps(t)
	// A rank that waits at a trapped call does not count as stopped: it must be one before a stage, and for long.
	s := uint64(1)
	for f := stopped(attackRand(s, pauses, 1), worldSize); f.stage == "" || f.pause < 3*time.Second; s++ {
		f = stopped(attackRand(s+1, pauses, 1), worldSize)
	}
	ctx, cancel := context.WithTimeout(t.Context(), worldTimeout+10*time.Second)
	defer cancel()
	read, write, err := os.Pipe()
	require.NoError(t, err)
	defer read.Close()
	shell := exec.CommandContext(ctx, "sh", "-c", `"$@" & echo $!; read line`, "sh", os.Args[0], "-test.v", "-test.timeout=2m",
		"-test.run=^TestPauses$", "-chaos.only=1", fmt.Sprintf("-chaos.seed=%d", s))
	shell.Stdout, shell.Stderr = write, write
	shell.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL} // a group, as shells make one for each job
	stdin, err := shell.StdinPipe()
	require.NoError(t, err)
	require.NoError(t, shell.Start())
	require.NoError(t, write.Close())
	out := bufio.NewReader(read)
	line, err := out.ReadString('\n')
	require.NoError(t, err)
	tests, err := strconv.Atoi(strings.TrimSpace(line))
	require.NoError(t, err, line)
	ended := make(chan string)
	go func() {
		text, _ := io.ReadAll(out)
		ended <- string(text)
	}()
	defer func() {
		select {
		case <-ended:
		default: // the tests live, and so does their group
			_ = syscall.Kill(-shell.Process.Pid, syscall.SIGKILL)
			<-ended
		}
	}()
	require.Eventually(t, func() bool { return hasStoppedChild(tests) }, 30*time.Second, 20*time.Millisecond, "no rank is stopped")
	require.NoError(t, stdin.Close())
	_ = shell.Wait() // its status is that of read at the end of its input
	select {
	case text := <-ended:
		close(ended)
		assert.Contains(t, text, "--- PASS: TestPauses", "the tests have ended without a word, or have failed")
	case <-ctx.Done():
		t.Error("the tests do not end")
	}
}

// attackRand gives the random numbers of an attack.
func attackRand(seed, kind uint64, number int) *rand.Rand {
	return rand.New(rand.NewPCG(seed, kind<<32|uint64(number)))
}

// hasStoppedChild reports whether a child of the process is stopped.
func hasStoppedChild(parent int) bool {
	paths, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, path := range paths {
		stat, err := os.ReadFile(path)
		if err != nil {
			continue // it has ended
		}
		_, after, _ := strings.Cut(string(stat), ") ") // behind the name: state, parent
		fields := strings.Fields(after)
		if len(fields) > 1 && fields[0] == "T" && fields[1] == strconv.Itoa(parent) {
			return true
		}
	}
	return false
}
