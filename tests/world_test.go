package tests

import (
	"bufio"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/group"
)

// workerVariable makes the test binary a rank: its value is the job to run.
const workerVariable = "SYMMEM_TEST_WORKER"

// servedVariable is true for a world whose rendezvous the test serves, on another host too, and not rank 0.
const servedVariable = "SYMMEM_RENDEZVOUS_SERVED"

// jobs are what worker processes run, by name; the rest of the job's name after a colon is the argument.
var jobs = map[string]func(ctx context.Context, cfg config.Config, arg string, say func(any)) error{
	"suite":      suiteJob,
	"goroutines": goroutinesJob,
	"simulated":  simulatedJob,

	"simulated_process": simulatedProcessJob,
	"kill":              killJob,
	"kill_collectives":  killCollectivesJob,
	"speed":             speedJob,
}

func TestMain(m *testing.M) {
	if job := os.Getenv(workerVariable); job != "" {
		os.Exit(work(job))
	}
	flag.Parse()
	if !slices.ContainsFunc(os.Args[1:], func(a string) bool { return strings.HasPrefix(a, "-test.parallel") }) {
		// Ranks wait more than they work.
		_ = flag.Set("test.parallel", strconv.Itoa(runtime.GOMAXPROCS(0)+1))
	}
	goleak.VerifyTestMain(m)
}

// work is the main function of a worker: it runs the job and writes what the job says, and how it ended, as JSON lines to
// descriptor 3. Rank 0 finds the socket of the rendezvous at descriptor 4.
func work(job string) int {
	ctx, cancel := context.WithTimeout(context.Background(), worldTimeout)
	defer cancel()
	out := json.NewEncoder(os.NewFile(3, "results"))
	var mu sync.Mutex
	say := func(v any) {
		mu.Lock()
		defer mu.Unlock()
		_ = out.Encode(v) // a parent that no longer reads has given up on this process
	}
	cfg, err := config.Load(nil)
	if err == nil {
		name, arg, _ := strings.Cut(job, ":")
		err = jobs[name](ctx, cfg, arg, say)
	}
	end := ended{Done: true}
	if err != nil {
		end.Error = err.Error()
	}
	say(end)
	return 0
}

// ended is a worker's last line.
type ended struct {
	Done  bool
	Error string
}

// worldTimeout bounds a world of processes.
const worldTimeout = 8 * time.Minute

// process is one worker.
type process struct {
	rank  int
	cmd   *exec.Cmd
	stdin *os.File          // its other end is the worker's standard input
	lines []json.RawMessage // what it said, its last line apart, unless somebody listens
	end   ended
	noise *os.File // standard output and error
	told  int64    // how many bytes of noise the test has shown
	err   error    // of Wait
}

// news is what the worker has written to its standard output and error since it was last asked.
func (p *process) news() (string, error) {
	text, err := io.ReadAll(io.NewSectionReader(p.noise, p.told, math.MaxInt64-p.told))
	p.told += int64(len(text))
	return strings.TrimSpace(string(text)), err
}

// world is a job on worker processes.
type world struct {
	processes []*process
	ended     chan struct{} // closed when all have ended
}

// showNews shows in the log of t what the workers have written since they were last asked. A file has all that a worker wrote before it
// said something, which a pipe might still be on the way with.
func (w *world) showNews(t *testing.T) {
	t.Helper()
	for _, p := range w.processes {
		text, err := p.news()
		assert.NoError(t, err)
		if text != "" {
			t.Logf("rank %d: %s", p.rank, text)
		}
	}
}

// hosts are places other than this one for the ranks of a world.
type hosts struct {
	// addr is where rank 0 opens the rendezvous service, or the test serves it.
	addr string
	// listen gives the test a socket at addr.
	listen func() (net.Listener, error)
	// command is what starts a program at the place of a rank.
	command func(rank int) []string
	// env are variables of a rank, after all others.
	env func(rank int) []string
}

// ownEnviron is this process's environment without settings, but for those of tests and the places of libraries.
func ownEnviron() []string {
	return slices.DeleteFunc(os.Environ(), func(v string) bool {
		name, _, _ := strings.Cut(v, "=")
		return strings.HasPrefix(name, "SYMMEM_") && !strings.HasPrefix(name, "SYMMEM_TEST_") && !strings.HasSuffix(name, "_LIBRARY")
	})
}

// runWorld runs a job on size worker processes and waits for them. It fails the test if a process that is not among the
// victims does not end by itself.
func runWorld(t *testing.T, size int, job string, extra ...string) []*process {
	t.Helper()
	return runWorldOn(t, nil, size, job, extra...)
}

// runWorldOn is runWorld on other hosts; nil is here.
func runWorldOn(t *testing.T, on *hosts, size int, job string, extra ...string) []*process {
	t.Helper()
	w := startWorld(t, on, size, job, nil, extra...)
	w.wait(t)
	return w.processes
}

// startWorld starts a job on size worker processes, which the end of t kills; nil hosts are here. What a worker says goes to hear, at the
// same time as what others say, or to its lines if that is nil.
func startWorld(t *testing.T, on *hosts, size int, job string, hear func(rank int, line json.RawMessage), extra ...string) *world {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), worldTimeout)
	token, served := rand.Text(), slices.Contains(extra, servedVariable+"=true")
	listen := func() (net.Listener, error) { return net.Listen("tcp", "127.0.0.1:0") }
	if on != nil && served {
		listen = on.listen
	}
	listener, err := listen()
	require.NoError(t, err)
	socket, err := listener.(*net.TCPListener).File()
	require.NoError(t, err)
	addr := listener.Addr().String()
	if on != nil {
		addr = on.addr
	}
	env := append(ownEnviron(), workerVariable+"="+job, "SYMMEM_RENDEZVOUS_ADDR="+addr, "SYMMEM_TOKEN="+token,
		"SYMMEM_MULTICAST="+multicastSetting(), "SYMMEM_JOB="+t.Name(), "SYMMEM_WORLD_SIZE="+strconv.Itoa(size), "SYMMEM_LOCAL_WORLD_SIZE="+strconv.Itoa(size))
	env = append(env, extra...)
	w := &world{processes: make([]*process, size), ended: make(chan struct{})}
	var wg sync.WaitGroup
	t.Cleanup(func() {
		cancel()
		wg.Wait()
	})
	noise := t.TempDir()
	for rank := range w.processes {
		p := &process{rank: rank}
		w.processes[rank] = p
		read, write, err := os.Pipe()
		require.NoError(t, err)
		stdin, feed, err := os.Pipe()
		require.NoError(t, err)
		p.stdin = feed
		t.Cleanup(func() { _ = feed.Close() })
		p.noise, err = os.OpenFile(filepath.Join(noise, strconv.Itoa(rank)), os.O_CREATE|os.O_RDWR|os.O_APPEND, 0o600)
		require.NoError(t, err)
		t.Cleanup(func() { _ = p.noise.Close() })
		p.cmd = exec.CommandContext(ctx, os.Args[0], "-test.run=^$")
		p.cmd.Env = append(slices.Clone(env), fmt.Sprintf("SYMMEM_RANK=%d", rank), fmt.Sprintf("SYMMEM_LOCAL_RANK=%d", rank))
		p.cmd.ExtraFiles = []*os.File{write}
		if on != nil {
			p.cmd.Env = append(p.cmd.Env, on.env(rank)...)
			self, err := os.Executable() // which may have been started by a path from a folder that is not there
			require.NoError(t, err)
			whole := append(on.command(rank), append([]string{self}, p.cmd.Args[1:]...)...)
			p.cmd.Path, err = exec.LookPath(whole[0])
			require.NoError(t, err)
			p.cmd.Args = whole
		} else if rank == 0 && !served {
			p.cmd.ExtraFiles = append(p.cmd.ExtraFiles, socket)
			p.cmd.Env = append(p.cmd.Env, "SYMMEM_RENDEZVOUS_FD=4")
		}
		p.cmd.Stdin, p.cmd.Stdout, p.cmd.Stderr = stdin, p.noise, p.noise
		p.cmd.WaitDelay = 5 * time.Second
		endWithParent(p.cmd)
		require.NoError(t, p.cmd.Start())
		require.NoError(t, errors.Join(write.Close(), stdin.Close()))
		wg.Go(func() {
			lines := bufio.NewScanner(read)
			lines.Buffer(nil, 16<<20)
			for lines.Scan() {
				line := slices.Clone(lines.Bytes())
				var end ended
				if json.Unmarshal(line, &end) == nil && end.Done {
					p.end = end
				} else if hear != nil {
					hear(rank, line)
				} else {
					p.lines = append(p.lines, line)
				}
			}
			p.err = p.cmd.Wait()
			_ = read.Close()
		})
	}
	require.NoError(t, socket.Close())
	if served {
		wg.Go(func() {
			assert.NoError(t, group.Serve(ctx, &group.Options{Listener: listener, WorldSize: size, Job: t.Name(), Token: token}))
		})
	} else {
		require.NoError(t, listener.Close())
	}
	go func() {
		wg.Wait()
		close(w.ended)
	}()
	return w
}

// wait closes what the workers read, waits until all have ended, and shows what they wrote.
func (w *world) wait(t *testing.T) {
	t.Helper()
	for _, p := range w.processes {
		_ = p.stdin.Close()
	}
	<-w.ended
	w.showNews(t)
}
