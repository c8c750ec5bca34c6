package group

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// workerReport is what a worker process prints when its role has ended.
type workerReport struct {
	Rank   int
	Text   string // of the error
	Lost   int    // the rank of the *PeerLostError, -1 if it is none
	When   int64  // when it came, Unix time in nanoseconds
	Closed string // the error of Close
}

// runWorker returns the main function of a worker process: it joins, does what its role says, and reports.
func runWorker(role string) int {
	if err := work(role); err != nil {
		fmt.Fprintln(os.Stderr, role, err)
		return 1
	}
	return 0
}

func work(role string) error {
	if role == "flooded" || role == "full" {
		return runFlooded(role == "full")
	}
	if role == "exiting" {
		return runExiting()
	}
	if role == "impostor" {
		return runImpostor()
	}
	if role == "crowded" {
		return runCrowded()
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	rank, err := strconv.Atoi(os.Getenv("SYMMEM_TEST_RANK"))
	if err != nil {
		return err
	}
	size, err := strconv.Atoi(os.Getenv("SYMMEM_TEST_SIZE"))
	if err != nil {
		return err
	}
	o := &Options{Rank: rank, WorldSize: size, Addr: os.Getenv("SYMMEM_TEST_ADDR"), Token: "token", Timeout: 90 * time.Second}
	if role == "stop" {
		o.LivenessTimeout = 2 * time.Second
	}
	if rank == 0 {
		f := os.NewFile(3, "listener")
		l, err := net.FileListener(f)
		if err = errors.Join(err, f.Close()); err != nil {
			return err
		}
		o.Listener = l
	}
	g, err := Join(ctx, o)
	if err != nil {
		return err
	}
	fmt.Println("ready")
	if os.Getenv("SYMMEM_TEST_VICTIM") == strconv.Itoa(rank) {
		_, err := io.ReadAll(os.Stdin) // until it is killed, or the test is
		return err
	}
	report := workerReport{Rank: rank, Lost: -1}
	switch role {
	case "all-gather", "stop":
		_, err = g.AllGather(ctx, "wait", nil)
	case "get":
		_, err = g.Store().Get(ctx, "never")
	case "exchange":
		_, err = g.ExchangeFile(ctx, "wait", os.Stdin)
	case "lost":
		<-g.Lost()
		err = g.Err()
	case "files":
		err = exchangePipes(ctx, g)
	case "processors":
		report.Text = fmt.Sprintf("oversubscribed: %v", g.Oversubscribed())
	case "islands":
		var islands *Islands
		if islands, err = g.Islands(ctx); err == nil {
			report.Text = islands.String() + " " + islands.Why()
		}
	default:
		return fmt.Errorf("no role %q", role)
	}
	report.When = time.Now().UnixNano()
	var lost *PeerLostError
	if err != nil {
		report.Text = err.Error()
	}
	if errors.As(err, &lost) {
		report.Lost = lost.Rank
	}
	// What comes later ends at once too, and a group of the survivors works, unless the service itself is gone.
	if later := g.Barrier(ctx, "later"); report.Lost >= 0 && !errors.Is(later, ErrPeerLost) {
		return fmt.Errorf("a later barrier gave %w", later)
	}
	if report.Lost > 0 {
		var survivors []int
		for r := range size {
			if r != report.Lost {
				survivors = append(survivors, r)
			}
		}
		sub, err := g.Sub(ctx, survivors)
		if err != nil {
			return err
		}
		if err := sub.Barrier(ctx, "survivors"); err != nil {
			return err
		}
	}
	if err := g.Close(ctx); err != nil {
		report.Closed = err.Error()
	}
	return json.NewEncoder(os.Stdout).Encode(report)
}

// worker is one running worker process.
type worker struct {
	cmd    *exec.Cmd
	stdin  io.WriteCloser
	stdout *bufio.Reader
	stderr *strings.Builder
}

// startWorkers starts a process a rank, all in one role, and waits until they are joined.
func startWorkers(t *testing.T, role string, size, victim int) []*worker {
	t.Helper()
	return startWorkersBy(t, role, size, victim, func(_ int, cmd *exec.Cmd) error { return cmd.Start() })
}

// startWorkersBy is startWorkers with a function that starts each process.
func startWorkersBy(t *testing.T, role string, size, victim int, start func(rank int, cmd *exec.Cmd) error) []*worker {
	t.Helper()
	l := listenLoopback(t).(*net.TCPListener)
	f, err := l.File()
	require.NoError(t, err)
	workers := make([]*worker, size)
	for rank := range workers {
		cmd := exec.CommandContext(testContext(t), os.Args[0])
		cmd.Env = append(os.Environ(), "SYMMEM_TEST_GROUP_WORKER="+role, "SYMMEM_TEST_RANK="+strconv.Itoa(rank),
			"SYMMEM_TEST_SIZE="+strconv.Itoa(size), "SYMMEM_TEST_ADDR="+l.Addr().String(), "SYMMEM_TEST_VICTIM="+strconv.Itoa(victim))
		// Each is in a process group of its own, so that none is stopped in the tests' group: that would send SIGHUP to all of it when
		// the shell that started the tests in its background ends.
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
		if rank == 0 {
			cmd.ExtraFiles = []*os.File{f}
		}
		w := &worker{cmd: cmd, stderr: new(strings.Builder)}
		cmd.Stderr = w.stderr
		w.stdin, err = cmd.StdinPipe()
		require.NoError(t, err)
		out, err := cmd.StdoutPipe()
		require.NoError(t, err)
		w.stdout = bufio.NewReader(out)
		require.NoError(t, start(rank, cmd))
		workers[rank] = w
		t.Cleanup(func() {
			if cmd.ProcessState == nil {
				assert.NoError(t, cmd.Process.Kill())
				_ = cmd.Wait() // it was killed, and says so
			}
		})
	}
	require.NoError(t, f.Close())
	require.NoError(t, l.Close())
	for rank, w := range workers {
		line, err := w.stdout.ReadString('\n')
		require.NoErrorf(t, err, "rank %d: %s", rank, w.stderr)
		require.Equal(t, "ready\n", line)
	}
	return workers
}

// reports returns what the workers other than the victim print, in any order.
func reports(t *testing.T, workers []*worker, victim int) []workerReport {
	t.Helper()
	all, failures := make([]workerReport, len(workers)), make([]error, len(workers))
	var wait sync.WaitGroup
	for rank, w := range workers {
		if rank == victim {
			continue
		}
		wait.Go(func() {
			err := json.NewDecoder(w.stdout).Decode(&all[rank])
			failures[rank] = errors.Join(err, w.cmd.Wait())
		})
	}
	wait.Wait()
	for rank, err := range failures {
		require.NoErrorf(t, err, "rank %d: %s", rank, workers[rank].stderr)
	}
	return all
}

// TestKill kills a rank while the others wait for it, and sees how long it takes until they know.
func TestKill(t *testing.T) {
	for _, role := range []string{"all-gather", "get", "exchange", "islands", "lost"} {
		for _, victim := range []int{2, 0} {
			t.Run(fmt.Sprintf("%s/victim=%d", role, victim), func(t *testing.T) {
				t.Parallel()
				workers := startWorkers(t, role, 4, victim)
				time.Sleep(100 * time.Millisecond) // so that most of them wait; it holds if they do not
				killed := time.Now()
				require.NoError(t, workers[victim].cmd.Process.Kill())
				require.Error(t, workers[victim].cmd.Wait())
				for rank, r := range reports(t, workers, victim) {
					if rank == victim {
						continue
					}
					assert.Equalf(t, victim, r.Lost, "rank %d: %s", rank, r.Text)
					assert.Empty(t, r.Closed)
					took := time.Unix(0, r.When).Sub(killed)
					assert.Less(t, took, 8*time.Second) // and not when it has been silent for too long
					t.Logf("rank %d after %v: %s", rank, took.Round(10*time.Microsecond), r.Text)
				}
			})
		}
	}
}

// TestSilence stops a rank without ending its process: its connection stands, and it is lost all the same.
func TestSilence(t *testing.T) {
	for _, victim := range []int{2, 0} {
		t.Run(fmt.Sprintf("victim=%d", victim), func(t *testing.T) {
			t.Parallel()
			workers := startWorkers(t, "stop", 3, victim)
			require.NoError(t, workers[victim].cmd.Process.Signal(syscall.SIGSTOP))
			for rank, r := range reports(t, workers, victim) {
				if rank != victim {
					assert.Equalf(t, victim, r.Lost, "rank %d: %s", rank, r.Text)
					assert.Contains(t, r.Text, "silent")
				}
			}
		})
	}
}

// TestFilesBetweenProcesses passes pipes between processes and writes through them.
func TestFilesBetweenProcesses(t *testing.T) {
	workers := startWorkers(t, "files", 4, -1)
	for rank, r := range reports(t, workers, -1) {
		assert.Emptyf(t, r.Text, "rank %d", rank)
		assert.Emptyf(t, r.Closed, "rank %d", rank)
	}
}
