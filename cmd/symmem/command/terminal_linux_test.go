package command

import (
	"context"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/cheggaaa/pb/v3"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/cmd/symmem/internal/exit"
	"github.com/symmem/symmem/cmd/symmem/internal/terminal/terminaltest"
)

var (
	quickVerify = []string{"verify", "-n", "2", "--backend", "host", "--short", "--filter", fewCases}
	quickBench  = []string{"bench", "-n", "2", "--backend", "host", "--kind", "put", "--sizes", "64,128", "--reps", "1"}
)

// TestProgressOfCommands: on a terminal a command shows how much of how much is done, never in more columns than there are, and
// nothing of it is in the results.
func TestProgressOfCommands(t *testing.T) {
	const columns = 44
	for _, args := range [][]string{quickVerify, quickBench} {
		t.Run(args[0], func(t *testing.T) {
			tty, written := terminaltest.Open(t, columns)
			var out syncBuffer
			status := run(t.Context(), args, nil, &out, tty, environ("TERM=xterm"))
			shown := written()
			assert.Equal(t, exit.OK, status, shown)
			assert.Contains(t, shown, "starting 2 ranks")
			assert.Regexp(t, `host \d+ of \d+`, shown)
			assert.NotContains(t, shown, "\n", "it is one line")
			for part := range strings.SplitSeq(shown, "\r") {
				assert.Less(t, pb.CellCount(part), columns, "%q", part)
			}
			assert.NotContains(t, out.String(), "starting")
			assert.NotContains(t, out.String(), "\r")
		})
	}
}

// TestColours: results are coloured on a terminal, unless NO_COLOR says otherwise or it knows no colours, and never in a pipe.
func TestColours(t *testing.T) {
	const green = "\x1b[32m"
	for name, tt := range map[string]struct {
		env    []string
		colour bool
	}{
		"a terminal": {[]string{"TERM=xterm", "NO_COLOR="}, true},
		"NO_COLOR":   {[]string{"TERM=xterm", "NO_COLOR=1"}, false},
		"a dumb one": {[]string{"TERM=dumb", "NO_COLOR="}, false},
	} {
		for _, args := range [][]string{quickVerify, {"doctor"}} {
			t.Run(args[0]+" on "+name, func(t *testing.T) {
				tty, written := terminaltest.Open(t, 60)
				status := run(t.Context(), args, nil, tty, tty, environ(tt.env...))
				out := written()
				assert.Equal(t, exit.OK, status, out)
				assert.Equal(t, tt.colour, strings.Contains(out, green), "%q", out)
				assert.Equal(t, tt.colour, strings.Contains(out, "\x1b"), "%q", out)
			})
		}
	}
	for _, args := range [][]string{quickVerify, {"doctor"}, {"dance"}} {
		t.Run(args[0]+" in a pipe", func(t *testing.T) {
			read, write, err := os.Pipe()
			require.NoError(t, err)
			text := make(chan string, 1)
			go func() {
				all, _ := io.ReadAll(read) // what is missing fails below
				text <- string(all)
			}()
			run(t.Context(), args, nil, write, write, environ("TERM=xterm", "NO_COLOR="))
			require.NoError(t, write.Close())
			out := <-text
			require.NoError(t, read.Close())
			assert.NotEmpty(t, out)
			assert.NotContains(t, out, "\x1b")
			assert.NotContains(t, out, "\r", "progress is for terminals")
		})
	}
}

// atTerminal runs a script of the shell that rules a terminal, which has the command as $0, with something typed. It returns what was shown.
func atTerminal(t *testing.T, script, typed string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	self, err := os.Executable()
	require.NoError(t, err)
	mark := marker()
	master, tty := terminaltest.Pair(t, 80)
	cmd := exec.CommandContext(ctx, "sh", "-c", script, self)
	cmd.Env, cmd.Stdin, cmd.Stdout, cmd.Stderr = environ(mark), tty, tty, tty
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	require.NoError(t, cmd.Start())
	require.NoError(t, tty.Close())
	var shown syncBuffer
	read := make(chan struct{})
	go func() {
		defer close(read)
		_, _ = io.Copy(&shown, master) // it ends with an error when nobody has the terminal any more
	}()
	_, err = io.WriteString(master, typed)
	require.NoError(t, err)
	ended := cmd.Wait()
	require.NoError(t, ctx.Err(), "%s", &shown)
	<-read
	require.NoError(t, master.Close())
	assert.NoError(t, ended, "%s", &shown)
	assertGone(t, mark)
	return shown.String()
}

// TestRunAtATerminal: what is typed goes to rank 0, as long as run is in the foreground. In the background it goes on, and is not stopped for what it would read.
func TestRunAtATerminal(t *testing.T) {
	shown := atTerminal(t, `"$0" run -n 2 -- sh -c 'read x; echo "got $x."'`, "one\n")
	assert.Contains(t, shown, "[0] got one.")
	assert.Contains(t, shown, "[1] got .")
	shown = atTerminal(t, `set -m; "$0" run -n 2 -- echo hello & wait $!; echo "status $?"`, "")
	assert.Contains(t, shown, "[1] hello")
	assert.Contains(t, shown, "status 0")
}

// TestRunAtATerminalThatStops: a terminal may stop what writes to it in the background, and the launcher always is there.
func TestRunAtATerminalThatStops(t *testing.T) {
	shown := atTerminal(t, `stty tostop; "$0" run -n 2 -- echo hello`, "")
	assert.Contains(t, shown, "[1] hello")
}
