package command

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/symmem/symmem/cmd/symmem/internal/exit"
)

// patience bounds every wait; a machine that does other things needs most of it.
const patience = 90 * time.Second

func sortedLines(text string) []string {
	lines := strings.Split(strings.TrimSuffix(text, "\n"), "\n")
	slices.Sort(lines)
	return lines
}

// TestRunWithoutFolder: a name is looked for in PATH, and the error of one that is only in the working directory says how to write that.
func TestRunWithoutFolder(t *testing.T) {
	t.Chdir(t.TempDir())
	require.NoError(t, os.WriteFile("train", []byte("#!/bin/sh\n"), 0o700))
	r := call(t, "", environ(), "run", "-n", "2", "--", "train")
	assert.Equal(t, 127, r.status)
	assert.Contains(t, r.err, "there is one in the working directory: ./train")
	r = call(t, "", environ(), "run", "-n", "2", "--", "./train")
	assert.Equal(t, 0, r.status, r.err)
}

func TestRunStatus(t *testing.T) {
	notExecutable := filepath.Join(t.TempDir(), "plain")
	require.NoError(t, os.WriteFile(notExecutable, []byte("text"), 0o600))
	for name, tt := range map[string]struct {
		program []string
		status  int
		says    string
	}{
		"all well":         {[]string{"true"}, 0, ""},
		"all fail":         {[]string{"sh", "-c", "exit 3"}, 3, "exited with status 3"},
		"the last fails":   {[]string{"sh", "-c", "[ $RANK = 2 ] && exit 7; sleep 300"}, 7, "rank 2 (process"},
		"one is killed":    {[]string{"sh", "-c", "[ $RANK = 1 ] && kill -9 $$; sleep 300"}, 137, "rank 1 (process"},
		"one ends by TERM": {[]string{"sh", "-c", "[ $RANK = 0 ] && kill $$; sleep 300"}, 143, "signal 15"},
		"not there":        {[]string{"no-such-program-at-all"}, 127, "no-such-program-at-all"},
		"not there either": {[]string{"/no/such/program"}, 127, "/no/such/program"},
		"not executable":   {[]string{notExecutable}, 126, "permission denied"},
		"not a program":    {[]string{"/"}, 126, "/"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := call(t, "", environ(), append([]string{"run", "-n", "3", "--"}, tt.program...)...)
			assert.Equal(t, tt.status, r.status, r.err)
			assert.Contains(t, r.err, tt.says)
			if tt.status == 0 {
				assert.Empty(t, r.err)
			}
		})
	}
}

// TestRunLetsRanksSayWhatTheyKnow: what another rank prints about a failure just after the first rank has gone comes out, and ranks that go by
// themselves are not ended.
func TestRunLetsRanksSayWhatTheyKnow(t *testing.T) {
	for name, tt := range map[string]struct {
		then string // what rank 1 does at last
		says string
	}{
		"and goes":  {"exit 4", `exited with status 3\n`},
		"and stays": {"sleep 300", `exited with status 3; ending the other ranks\n`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			fifo := filepath.Join(t.TempDir(), "fifo")
			require.NoError(t, unix.Mkfifo(fifo, 0o600))
			// Rank 1 reads to the end of the pipe, which is the end of rank 0.
			script := `if [ $RANK = 0 ]; then exec 3>"$1"; exit 3; fi; read x <"$1"; sleep 0.05; echo the cause >&2; ` + tt.then
			r := call(t, "", environ(), "run", "-n", "2", "sh", "-c", script, "sh", fifo)
			assert.Equal(t, 3, r.status, r.err)
			assert.Contains(t, r.err, "[1] the cause\n")
			assert.Regexp(t, tt.says, r.err)
		})
	}
}

// TestRunPassesBackendsOptions: a backend's option that is given as a flag reaches the ranks as its variable, and that of a backend that only
// the program may have is none of run's business; a typing error is.
func TestRunPassesBackendsOptions(t *testing.T) {
	file := filepath.Join(t.TempDir(), "settings.yaml")
	require.NoError(t, os.WriteFile(file, []byte("toy-colour: red\n"), 0o600))
	r := call(t, "", environ("SYMMEM_TOY_SIZE=7", "SYMMEM_CONFIG="+file), "run", "-n", "1", "--picky-last-device", "4", "sh", "-c",
		`echo "$SYMMEM_PICKY_LAST_DEVICE $SYMMEM_TOY_SIZE"`)
	require.Equal(t, exit.OK, r.status, r.err)
	assert.Equal(t, "[0] 4 7\n", r.out)
	r = call(t, "", environ("SYMMEM_PICKY_LAST_DEVISE=7"), "run", "-n", "1", "true")
	assert.Equal(t, exit.Usage, r.status)
	assert.Contains(t, r.err, "SYMMEM_PICKY_LAST_DEVICE is the nearest")
}

// TestEmptyFlags: a flag that is empty wins over a variable. Over the file it cannot where ranks read that, which is said, and not passed over.
func TestEmptyFlags(t *testing.T) {
	file := filepath.Join(t.TempDir(), "settings.yaml")
	require.NoError(t, os.WriteFile(file, []byte("log-level: debug\n"), 0o600))
	show := []string{"run", "-n", "1", "--log-level=", "sh", "-c", `echo "level=$SYMMEM_LOG_LEVEL"`}
	r := call(t, "", environ("SYMMEM_LOG_LEVEL=debug"), show...)
	require.Equal(t, exit.OK, r.status, r.err)
	assert.Equal(t, "[0] level=\n", r.out)
	for name, args := range map[string][]string{
		"run":    show,
		"verify": {"verify", "-n", "2", "--backend", "host", "--filter", "^agreement/size$", "--log-level="},
		"bench":  {"bench", "-n", "2", "--backend", "host", "--kind", "put", "--sizes", "64", "--reps", "1", "--log-level="},
		"tune":   {"tune", "-n", "2", "--backend", "host", "--kind", "broadcast", "--sizes", "1K", "--reps", "3", "--log-level="},
	} {
		r := call(t, "", environ("SYMMEM_CONFIG="+file), args...)
		assert.Equal(t, exit.Usage, r.status, name)
		assert.Contains(t, r.err, "--log-level is empty, and ranks would take the value that the file "+file+" has", name)
	}
	// A variable that names a file counts where the flag names none, for the ranks too.
	r = call(t, "", environ("SYMMEM_CONFIG="+file), "run", "-n", "1", "--config=", "sh", "-c", `echo "$SYMMEM_CONFIG"`)
	require.Equal(t, exit.OK, r.status, r.err)
	assert.Equal(t, "[0] "+file+"\n", r.out)
}

func TestRunPrefixesLines(t *testing.T) {
	r := call(t, "", environ(), "run", "-n", "3", "sh", "-c", `echo "out $RANK"; echo "err $SYMMEM_RANK" >&2; printf "no end"`)
	require.Equal(t, exit.OK, r.status, r.err)
	assert.Equal(t, []string{"[0] no end", "[0] out 0", "[1] no end", "[1] out 1", "[2] no end", "[2] out 2"}, sortedLines(r.out))
	assert.Equal(t, []string{"[0] err 0", "[1] err 1", "[2] err 2"}, sortedLines(r.err))
}

func TestRunKeepsWholeLines(t *testing.T) {
	const write = `i=0; while [ $i -lt 500 ]; do echo "line $i of rank $RANK"; i=$((i+1)); done`
	r := call(t, "", environ(), "run", "-n", "4", "sh", "-c", write)
	require.Equal(t, exit.OK, r.status, r.err)
	next := map[string]int{}
	for _, line := range strings.Split(strings.TrimSuffix(r.out, "\n"), "\n") {
		rank := line[1:2]
		require.Equal(t, fmt.Sprintf("[%s] line %d of rank %s", rank, next[rank], rank), line)
		next[rank]++
	}
	assert.Equal(t, map[string]int{"0": 500, "1": 500, "2": 500, "3": 500}, next)
}

func TestRunGivesPlaces(t *testing.T) {
	const show = `echo $SYMMEM_RANK/$SYMMEM_WORLD_SIZE $SYMMEM_LOCAL_RANK/$SYMMEM_LOCAL_WORLD_SIZE ` +
		`$RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE served=$SYMMEM_RENDEZVOUS_SERVED fd=$SYMMEM_RENDEZVOUS_FD master=$MASTER_ADDR:$MASTER_PORT ` +
		`token=${#SYMMEM_TOKEN} timeout=$SYMMEM_TIMEOUT backend=$SYMMEM_BACKEND job=$SYMMEM_JOB "$@"`
	env := environ("SYMMEM_RENDEZVOUS_FD=7", "SYMMEM_RANK=5", "SYMMEM_WORLD_SIZE=9", "MASTER_ADDR=far", "MASTER_PORT=1", "RANK=5", "SYMMEM_TIMEOUT=7s")
	r := call(t, "", env, "run", "-n", "2", "--backend", "host,auto", "--job", "mine", "sh", "-c", show, "sh", "-n", "--bogus")
	require.Equal(t, exit.OK, r.status, r.err)
	assert.Equal(t, []string{
		"[0] 0/2 0/2 0/2 0/2 served=true fd=-1 master=: token=64 timeout=7s backend=host,auto job=mine -n --bogus",
		"[1] 1/2 1/2 1/2 1/2 served=true fd=-1 master=: token=64 timeout=7s backend=host,auto job=mine -n --bogus",
	}, sortedLines(r.out))
}

func TestRunGivesInputToRankZero(t *testing.T) {
	r := call(t, "one\ntwo\n", environ(), "run", "-n", "2", "sh", "-c", "while read x; do echo got $x; done")
	require.Equal(t, exit.OK, r.status, r.err)
	assert.Equal(t, []string{"[0] got one", "[0] got two"}, sortedLines(r.out))
}

// TestRunOfRanksThatMeet is a whole job: open, allocate, rendezvous, close.
func TestRunOfRanksThatMeet(t *testing.T) {
	path, err := os.Executable()
	require.NoError(t, err)
	r := call(t, "", environ(roleVar+"="), "run", "-n", "3", "env", roleVar+"=exit", path)
	require.Equal(t, exit.OK, r.status, r.err)
	assert.Equal(t, 3, strings.Count(r.out, "] ready 127.0.0.1:"))
}

// TestRunKeepGoing: ranks go on without those that fail, if that is asked for, and run says who failed and with what.
func TestRunKeepGoing(t *testing.T) {
	// Run has heard of the end of a process that is there no more, not even as a zombie.
	r := call(t, "", environ(), "run", "-n", "4", "--keep-going", "sh", "-c", `
		gone() { until [ -s "$1" ] && ! [ -e "/proc/$(cat "$1")" ]; do sleep 0.05; done; sleep 0.3; }
		echo $$ >"$1/$RANK"
		if [ $RANK = 1 ]; then kill -9 $$; fi
		gone "$1/1"
		if [ $RANK = 2 ]; then exit 5; fi
		gone "$1/2"; echo went on`, "sh", t.TempDir())
	assert.Equal(t, 137, r.status, "the first that failed counts: %s", r.err)
	assert.Equal(t, 2, strings.Count(r.out, "] went on"), r.out)
	assert.Regexp(t, `rank 1 \(process \d+\) was ended by signal 9 \(killed\); 3 of the ranks go on`, r.err)
	assert.Regexp(t, `rank 2 \(process \d+\) exited with status 5; 2 of the ranks go on`, r.err)

	// Rank 0 is one of them: run serves the rendezvous.
	path, err := os.Executable()
	require.NoError(t, err)
	r = call(t, "", environ(roleVar+"="), "run", "-n", "3", "--keep-going", "--backend", "host", "env", roleVar+"=outlive", path)
	assert.Equal(t, 137, r.status, r.err)
	assert.Equal(t, 2, strings.Count(r.out, "] went on with 2"), "%s%s", r.out, r.err)

	r = call(t, "", environ(), "run", "-n", "2", "--keep-going", "sh", "-c", "exit 3")
	assert.Equal(t, 3, r.status)
	assert.Equal(t, 2, strings.Count(r.err, "exited with status 3"), r.err)
}

// TestRunWithAFileOfAnotherPlace: what the configuration file says of a place is of another job.
func TestRunWithAFileOfAnotherPlace(t *testing.T) {
	file := filepath.Join(t.TempDir(), "settings.yaml")
	require.NoError(t, os.WriteFile(file, []byte("rank: 5\nworld-size: 9\nlocal-rank: 3\nlocal-world-size: 4\nlauncher: slurm\nrendezvous-addr: far:1\nrendezvous-fd: 7\njob: other\nrestart: 3\n"), 0o600))
	path, err := os.Executable()
	require.NoError(t, err)
	r := call(t, "", environ(roleVar+"=", "SYMMEM_CONFIG="+file), "run", "-n", "2", "env", roleVar+"=exit", path)
	require.Equal(t, exit.OK, r.status, r.err)
	assert.Equal(t, 2, strings.Count(r.out, "] ready 127.0.0.1:"))
}

func TestRunKillsWhoWillNotEnd(t *testing.T) {
	dir := t.TempDir()
	r := call(t, "", environ(), "run", "-n", "3", "--grace", "300ms", "sh", "-c", `
		if [ $RANK = 1 ]; then until [ -e "$1/0" ] && [ -e "$1/2" ]; do sleep 0.05; done; exit 4; fi
		trap "" TERM; touch "$1/$RANK"; while :; do sleep 1; done`, "sh", dir)
	assert.Equal(t, 4, r.status, "the first that failed counts: %s", r.err)
	assert.Contains(t, r.err, "rank 1 (process")
	assert.Contains(t, r.err, "ranks [0 2] have not ended within 300ms")
}

func TestRunEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	var out, errOut syncBuffer
	status := make(chan int, 1)
	go func() {
		status <- run(ctx, []string{"run", "-n", "2", "sh", "-c", "echo ready; sleep 300"}, nil, &out, &errOut, environ())
	}()
	require.Eventually(t, func() bool { return strings.Count(out.String(), "ready") == 2 }, patience, 10*time.Millisecond)
	cancel()
	select {
	case s := <-status:
		assert.Equal(t, 143, s)
	case <-time.After(patience):
		t.Fatal("run did not end")
	}
}

// TestRunEndsWhatARankLeavesBehind starts a process in the background that holds the output open.
func TestRunEndsWhatARankLeavesBehind(t *testing.T) {
	mark := marker()
	began := time.Now()
	r := call(t, "", environ(mark), "run", "-n", "2", "sh", "-c", "sleep 300 & echo started")
	assert.Equal(t, exit.OK, r.status, r.err)
	assert.Equal(t, 2, strings.Count(r.out, "started"))
	assert.Less(t, time.Since(began), 250*time.Second)
	assertGone(t, mark)
}

// fullWriter takes nothing.
type fullWriter struct{}

func (fullWriter) Write([]byte) (int, error) { return 0, errors.New("full") }

func TestRunWithoutAReader(t *testing.T) {
	var errOut syncBuffer
	status := run(t.Context(), []string{"run", "-n", "1", "echo", "hello"}, nil, fullWriter{}, &errOut, environ())
	assert.Equal(t, exit.Failure, status)
	assert.Contains(t, errOut.String(), "full")
}

// TestRunWhoseReaderLeaves: as in symmem run ... | head. The ranks are asked to end and have the grace for it, and nothing is left.
func TestRunWhoseReaderLeaves(t *testing.T) {
	for name, both := range map[string]bool{"output": false, "output and errors": true} {
		t.Run(name, func(t *testing.T) {
			dir, mark := t.TempDir(), marker()
			path, err := os.Executable()
			require.NoError(t, err)
			// A rank says more, and takes some time for what it does at its end.
			cmd := exec.Command(path, "run", "-n", "2", "--grace", "1h", "sh", "-c", `
				trap 'sleep 0.3; echo ended >"$1/$RANK"; exit 0' TERM
				while :; do echo more; sleep 0.02; done`, "sh", dir)
			reader, writer, err := os.Pipe()
			require.NoError(t, err)
			var said syncBuffer
			cmd.Env, cmd.Stdout, cmd.Stderr = environ(mark), writer, &said
			if both {
				cmd.Stderr = writer
			}
			cmd.WaitDelay = patience
			require.NoError(t, cmd.Start())
			t.Cleanup(func() {
				if cmd.ProcessState == nil {
					_ = cmd.Process.Kill()
				}
			})
			require.NoError(t, writer.Close())
			_, err = bufio.NewReader(reader).ReadString('\n')
			require.NoError(t, err)
			require.NoError(t, reader.Close())
			ended := make(chan error, 1)
			go func() { ended <- cmd.Wait() }()
			select {
			case err = <-ended:
			case <-time.After(patience):
				t.Fatal("the command did not end")
			}
			state, ok := cmd.ProcessState.Sys().(syscall.WaitStatus)
			require.True(t, ok)
			require.True(t, state.Exited() && state.ExitStatus() == exit.Failure, "%v: %s", err, &said)
			for rank := range 2 {
				assert.FileExists(t, filepath.Join(dir, strconv.Itoa(rank)), "rank %d had no time to end", rank)
			}
			if !both {
				assert.Contains(t, said.String(), "nobody reads what the ranks write")
			}
			assertGone(t, mark)
		})
	}
}

// command is the command as a process of its own, which can be sent signals.
type command struct {
	cmd      *exec.Cmd
	out, err *syncBuffer
	ended    chan error
}

func startCommand(t *testing.T, env []string, args ...string) *command {
	t.Helper()
	path, err := os.Executable()
	require.NoError(t, err)
	return startProgram(t, env, path, args...)
}

// startProgram is startCommand for a program that becomes the command.
func startProgram(t *testing.T, env []string, path string, args ...string) *command {
	t.Helper()
	c := &command{cmd: exec.Command(path, args...), out: &syncBuffer{}, err: &syncBuffer{}, ended: make(chan error, 1)}
	c.cmd.Env, c.cmd.Stdout, c.cmd.Stderr = env, c.out, c.err
	c.cmd.WaitDelay = patience
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // as a shell does it
	require.NoError(t, c.cmd.Start())
	go func() { c.ended <- c.cmd.Wait() }()
	t.Cleanup(func() {
		if c.cmd.ProcessState == nil {
			_ = c.cmd.Process.Kill()
		}
	})
	return c
}

// interrupted is a command with 2 ranks that an interrupt has ended in its work, with the status of one, and of which nothing is left.
func interrupted(t *testing.T, args ...string) *command {
	t.Helper()
	mark := marker()
	c := startCommand(t, environ(mark), args...)
	require.Eventually(t, func() bool { return len(marked(t, mark)) == 3 }, patience, 10*time.Millisecond)
	time.Sleep(50 * time.Millisecond) // somewhere in the work, wherever that is
	require.NoError(t, c.cmd.Process.Signal(os.Interrupt))
	assert.Equal(t, 130, c.status(t))
	assertGone(t, mark)
	return c
}

func (c *command) awaitOutput(t *testing.T, text string, times int) {
	t.Helper()
	require.Eventually(t, func() bool { return strings.Count(c.out.String(), text) >= times }, patience, 10*time.Millisecond,
		"%s\n%s", c.out, c.err)
}

func (c *command) status(t *testing.T) int {
	t.Helper()
	select {
	case err := <-c.ended:
		status, ok := c.cmd.ProcessState.Sys().(syscall.WaitStatus)
		require.True(t, ok)
		require.True(t, status.Exited(), "it was ended by a signal: %v", err)
		return status.ExitStatus()
	case <-time.After(patience):
		t.Fatalf("the command did not end:\n%s\n%s", c.out, c.err)
		return -1
	}
}

// marker makes an environment entry that no other process has.
func marker() string { return "SYMMEM_TEST_MARK=" + rand.Text() }

// marked lists the processes that have inherited the mark.
func marked(t *testing.T, mark string) []int {
	t.Helper()
	entries, err := os.ReadDir("/proc")
	require.NoError(t, err)
	var pids []int
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		// Processes end while this reads; those of others cannot be read.
		if env, err := os.ReadFile(filepath.Join("/proc", e.Name(), "environ")); err == nil && bytes.Contains(env, []byte(mark)) {
			pids = append(pids, pid)
		}
	}
	return pids
}

func assertGone(t *testing.T, mark string) {
	t.Helper()
	assert.Eventually(t, func() bool { return len(marked(t, mark)) == 0 }, patience, 20*time.Millisecond)
}

func TestRunPassesSignalsOn(t *testing.T) {
	mark := marker()
	c := startCommand(t, environ(mark), "run", "-n", "2", "sh", "-c", `
		trap "echo got USR1" USR1; trap "echo got TERM; exit 5" TERM
		echo ready; while :; do sleep 0.05; done`)
	c.awaitOutput(t, "ready", 2)
	require.NoError(t, c.cmd.Process.Signal(syscall.SIGUSR1))
	c.awaitOutput(t, "got USR1", 2)
	require.NoError(t, c.cmd.Process.Signal(syscall.SIGTERM))
	assert.Equal(t, 5, c.status(t))
	assert.Equal(t, 2, strings.Count(c.out.String(), "got TERM"))
	assertGone(t, mark)
}

// TestRunWithNoHangup: a hangup that run was started to ignore, as by nohup, ends no rank.
func TestRunWithNoHangup(t *testing.T) {
	path, err := os.Executable()
	require.NoError(t, err)
	mark := marker()
	c := startProgram(t, environ(mark), "sh", "-c", `trap "" HUP; exec "$0" "$@"`, path, "run", "-n", "2", "sh", "-c", `
		trap "exit 0" USR1; echo ready; while :; do sleep 0.05; done`)
	c.awaitOutput(t, "ready", 2)
	require.NoError(t, c.cmd.Process.Signal(syscall.SIGHUP))
	require.NoError(t, c.cmd.Process.Signal(syscall.SIGUSR1))
	assert.Equal(t, exit.OK, c.status(t), c.err)
	assertGone(t, mark)
}

func TestRunSecondInterruptKills(t *testing.T) {
	mark := marker()
	c := startCommand(t, environ(mark), "run", "-n", "2", "--grace", "1h", "sh", "-c", `
		trap "echo no" INT; echo ready; while :; do sleep 0.05; done`)
	c.awaitOutput(t, "ready", 2)
	require.NoError(t, c.cmd.Process.Signal(os.Interrupt))
	c.awaitOutput(t, "no", 2)
	require.NoError(t, c.cmd.Process.Signal(os.Interrupt))
	assert.Equal(t, 137, c.status(t))
	assertGone(t, mark)
}

// TestRunSecondInterruptNeedsNoReader: what ranks write may have nobody who takes it, which keeps neither them nor run from being ended.
func TestRunSecondInterruptNeedsNoReader(t *testing.T) {
	for name, tt := range map[string]struct {
		program    string
		interrupts int
		status     int
	}{
		"ranks that write on":         {`trap 'touch "$1/told.$RANK"' INT; touch "$1/ready.$RANK"; while :; do yes; done`, 2, 137},
		"ranks that end by a signal":  {`touch "$1/ready.$RANK"; exec yes`, 2, 130},
		"ranks that end when told to": {`trap 'touch "$1/told.$RANK"; exit 5' INT; touch "$1/ready.$RANK"; yes & while :; do sleep 0.05; done`, 2, 5},
		// What run itself has to say finds no reader either, and the others are ended all the same.
		"a rank that fails": {`[ $RANK = 0 ] && { sleep 1; exit 3; }; exec yes`, 1, 3},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			path, err := os.Executable()
			require.NoError(t, err)
			read, write, err := os.Pipe()
			require.NoError(t, err)
			defer func() { require.NoError(t, read.Close()) }()
			dir, mark := t.TempDir(), marker()
			c := &command{cmd: exec.Command(path, "run", "-n", "2", "--grace", "1h", "sh", "-c", tt.program, "sh", dir), out: &syncBuffer{}, err: &syncBuffer{}, ended: make(chan error, 1)}
			c.cmd.Env, c.cmd.Stdout, c.cmd.Stderr = environ(mark), write, write
			require.NoError(t, errors.Join(c.cmd.Start(), write.Close()))
			go func() { c.ended <- c.cmd.Wait() }()
			full, err := unix.FcntlInt(read.Fd(), unix.F_GETPIPE_SZ, 0)
			require.NoError(t, err)
			require.Eventually(t, func() bool {
				held, err := unix.IoctlGetInt(int(read.Fd()), unix.TIOCINQ)
				return err == nil && held > full-1<<12
			}, patience, 10*time.Millisecond)
			ended := func() bool { return len(marked(t, mark)) == 2 } // the ranks have
			all := func(are string) bool {
				ranks, err := filepath.Glob(filepath.Join(dir, are+".*"))
				return err == nil && len(ranks) == 2
			}
			if tt.interrupts == 1 {
				require.Eventually(t, ended, patience, 10*time.Millisecond)
			} else {
				require.Eventually(t, func() bool { return all("ready") }, patience, 10*time.Millisecond)
			}
			for i := range tt.interrupts {
				if i > 0 { // two that come at once are one
					require.Eventually(t, func() bool { return all("told") || ended() }, patience, 10*time.Millisecond)
					time.Sleep(300 * time.Millisecond) // who ends then has ended
				}
				require.NoError(t, c.cmd.Process.Signal(os.Interrupt))
			}
			assert.Equal(t, tt.status, c.status(t))
			assertGone(t, mark)
		})
	}
}

// TestInterruptLeavesNothing interrupts ranks that hold symmetric memory.
func TestInterruptLeavesNothing(t *testing.T) {
	path, err := os.Executable()
	require.NoError(t, err)
	before, err := os.ReadDir("/dev/shm")
	require.NoError(t, err)
	mark := marker()
	c := startCommand(t, environ(mark, roleVar+"="), "run", "-n", "3", "env", roleVar+"=idle", path)
	c.awaitOutput(t, "ready", 3)
	_, addr, ok := strings.Cut(c.out.String(), "ready ")
	require.True(t, ok)
	addr = strings.Fields(addr)[0]
	conn, err := net.Dial("tcp", addr)
	require.NoError(t, err, "rank 0 serves there as long as it lives")
	require.NoError(t, conn.Close())

	require.NoError(t, c.cmd.Process.Signal(os.Interrupt))
	assert.Equal(t, 130, c.status(t))
	assertGone(t, mark)
	_, err = net.DialTimeout("tcp", addr, time.Second)
	assert.Error(t, err, "the socket is gone")
	after, err := os.ReadDir("/dev/shm")
	require.NoError(t, err)
	for _, e := range after {
		if strings.Contains(e.Name(), "symmem") {
			assert.True(t, slices.ContainsFunc(before, func(b os.DirEntry) bool { return b.Name() == e.Name() }), e.Name())
		}
	}
}

// TestRanksDieWithTheLauncher kills the launcher, which can clean up nothing then.
func TestRanksDieWithTheLauncher(t *testing.T) {
	mark := marker()
	c := startCommand(t, environ(mark), "run", "-n", "3", "sh", "-c", "echo ready; exec sleep 300")
	c.awaitOutput(t, "ready", 3)
	require.Len(t, marked(t, mark), 5, "the command, the launcher and three ranks")
	require.NoError(t, c.cmd.Process.Kill())
	assertGone(t, mark)
	<-c.ended
}

// processState reads the state and the parent of a process from its file in /proc. ok is false if it is gone.
func processState(path string) (state string, parent int, ok bool) {
	text, err := os.ReadFile(path)
	if err != nil {
		return "", 0, false
	}
	fields := strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:])) // behind the name of the program
	if len(fields) < 2 {
		return "", 0, false
	}
	parent, err = strconv.Atoi(fields[1])
	return fields[0], parent, err == nil
}

// launcherOf returns the launcher that a command has started.
func launcherOf(t *testing.T, c *command, mark string) int {
	t.Helper()
	for _, pid := range marked(t, mark) {
		if _, parent, ok := processState(fmt.Sprintf("/proc/%d/stat", pid)); ok && parent == c.cmd.Process.Pid {
			return pid
		}
	}
	t.Fatal("the command has no child")
	return 0
}

// TestRunLeavesNoGrandchildren: whatever ends the command, all goes that its ranks have started, also what is in a session of its
// own and what has lost its parents.
func TestRunLeavesNoGrandchildren(t *testing.T) {
	const program = `sleep 300 &
		setsid sleep 301 &
		(setsid sh -c "sleep 302 & sleep 303" &)
		echo ready
		wait`
	for name, tt := range map[string]struct {
		end    func(t *testing.T, c *command, launcher int)
		status int // 128 and a signal's number, if one ended the command itself
	}{
		"the command is killed": {func(t *testing.T, c *command, _ int) { require.NoError(t, c.cmd.Process.Kill()) }, 137},
		"its process group is killed": {func(t *testing.T, c *command, _ int) {
			require.NoError(t, syscall.Kill(-c.cmd.Process.Pid, syscall.SIGKILL))
		}, 137},
		"the launcher is killed":           {func(t *testing.T, _ *command, pid int) { require.NoError(t, syscall.Kill(pid, syscall.SIGKILL)) }, 137},
		"the launcher is stopped, and all": {stopAndKill, 137},
		// Go turns this into the end of a program that crashes.
		"the launcher crashes": {func(t *testing.T, _ *command, pid int) { require.NoError(t, syscall.Kill(pid, syscall.SIGABRT)) }, 134},
		"it is interrupted":    {func(t *testing.T, c *command, _ int) { require.NoError(t, c.cmd.Process.Signal(os.Interrupt)) }, 130},
		"a rank is killed": {func(t *testing.T, c *command, _ int) {
			_, pid, _ := strings.Cut(c.out.String(), "pid 0 ")
			number, err := strconv.Atoi(strings.Fields(pid)[0])
			require.NoError(t, err)
			require.NoError(t, syscall.Kill(number, syscall.SIGKILL))
		}, 137},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			mark := marker()
			c := startCommand(t, environ(mark), "run", "-n", "2", "sh", "-c", "echo pid $RANK $$;"+program)
			c.awaitOutput(t, "ready", 2)
			require.Eventually(t, func() bool { return len(marked(t, mark)) == 2+2*6 }, patience, 10*time.Millisecond)
			tt.end(t, c, launcherOf(t, c, mark))
			select {
			case <-c.ended:
			case <-time.After(patience):
				t.Fatalf("the command did not end: %s", c.err)
			}
			status, isStatus := c.cmd.ProcessState.Sys().(syscall.WaitStatus)
			require.True(t, isStatus)
			code := status.ExitStatus()
			if status.Signaled() {
				code = 128 + int(status.Signal())
			}
			assert.Equal(t, tt.status, code, c.err)
			assertGone(t, mark)
		})
	}
}

// TestRunSparesEarlierChildren: a killed launcher takes with it what its ranks have started, and nothing that the process had started before it became the command.
func TestRunSparesEarlierChildren(t *testing.T) {
	path, err := os.Executable()
	require.NoError(t, err)
	mark, early := marker(), marker()
	// The shell starts another program in the background, and becomes the command.
	c := startProgram(t, environ(mark), "sh", "-c", `env "$2" sleep 300 >/dev/null 2>&1 & exec "$1" run -n 1 sh -c "echo ready; exec sleep 300"`, "sh", path, early)
	c.awaitOutput(t, "ready", 1)
	require.Eventually(t, func() bool { return len(marked(t, early)) == 1 }, patience, 5*time.Millisecond)
	server := marked(t, early)[0]
	defer func() { _ = syscall.Kill(server, syscall.SIGKILL) }()
	require.NoError(t, syscall.Kill(launcherOf(t, c, mark), syscall.SIGKILL))
	assert.Equal(t, 137, c.status(t))
	assert.Equal(t, []int{server}, marked(t, early), "it is still there")
	assertGone(t, mark)
}

// stopAndKill lets the launcher see only after everything has happened that the command is gone.
func stopAndKill(t *testing.T, c *command, launcher int) {
	require.NoError(t, syscall.Kill(launcher, syscall.SIGSTOP))
	require.NoError(t, c.cmd.Process.Kill())
	require.Eventually(t, func() bool {
		state, _, ok := processState(fmt.Sprintf("/proc/%d/stat", c.cmd.Process.Pid))
		return !ok || state == "Z"
	}, patience, 5*time.Millisecond)
	require.NoError(t, syscall.Kill(launcher, syscall.SIGCONT))
}

// TestRunEndsSessionsThatARankLeaves: ranks that end well leave nothing either.
func TestRunEndsSessionsThatARankLeaves(t *testing.T) {
	mark := marker()
	r := call(t, "", environ(mark), "run", "-n", "2", "sh", "-c", "setsid sleep 300 >/dev/null 2>&1 & echo started")
	assert.Equal(t, exit.OK, r.status, r.err)
	assert.Equal(t, 2, strings.Count(r.out, "started"))
	assert.Empty(t, marked(t, mark))
}

// TestLauncherCollectsOrphans: what ranks leave behind and ends while they run does not stay in the table of processes.
func TestLauncherCollectsOrphans(t *testing.T) {
	mark := marker()
	c := startCommand(t, environ(mark), "run", "-n", "1", "sh", "-c",
		`for i in 1 2 3 4 5 6 7 8; do (setsid sh -c "exit 0" &); done; echo ready; exec sleep 300`)
	c.awaitOutput(t, "ready", 1)
	launcher := launcherOf(t, c, mark)
	children := func() (all []string) {
		paths, err := filepath.Glob("/proc/[0-9]*/stat")
		require.NoError(t, err)
		for _, path := range paths {
			if state, parent, ok := processState(path); ok && parent == launcher {
				all = append(all, state)
			}
		}
		return all
	}
	require.Eventually(t, func() bool { all := children(); return len(all) == 1 && all[0] != "Z" }, patience, 20*time.Millisecond)
	require.NoError(t, c.cmd.Process.Signal(syscall.SIGTERM))
	assert.Equal(t, 143, c.status(t))
	assertGone(t, mark)
}

func TestKeeperFlagIsNotForUsers(t *testing.T) {
	r := call(t, "", environ(), "run", "--keeper-fd", "1", "-n", "1", "true")
	assert.Equal(t, exit.Usage, r.status)
	assert.Contains(t, r.err, "for symmem itself")
	assert.NotContains(t, call(t, "", environ(), "run", "--help").out, "keeper")
}

// TestARankDiesInAJob kills one of several ranks that hold symmetric memory: all end, and the status says why.
func TestARankDiesInAJob(t *testing.T) {
	path, err := os.Executable()
	require.NoError(t, err)
	mark := marker()
	const rank = `echo "pid $RANK $$"; ` + roleVar + `=idle exec "$0"`
	c := startCommand(t, environ(mark, roleVar+"="), "run", "-n", "3", "sh", "-c", rank, path)
	c.awaitOutput(t, "ready", 3)
	_, pid, ok := strings.Cut(c.out.String(), "pid 1 ")
	require.True(t, ok)
	number, err := strconv.Atoi(strings.Fields(pid)[0])
	require.NoError(t, err)
	require.NoError(t, syscall.Kill(number, syscall.SIGKILL))
	assert.Equal(t, 137, c.status(t))
	assert.Contains(t, c.err.String(), fmt.Sprintf("rank 1 (process %d) was ended by signal 9", number))
	assertGone(t, mark)
}
