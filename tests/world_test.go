package tests

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/symmem/symmem/config"
)

// workerVariable makes the test binary a rank: its value is the job to run.
const workerVariable = "SYMMEM_TEST_WORKER"

// jobs are what worker processes run, by name; the rest of the job's name after a colon is the argument.
var jobs = map[string]func(ctx context.Context, cfg config.Config, arg string, say func(any)) error{
	"suite": suiteJob,
	"kill":  killJob,
	"speed": speedJob,
}

func TestMain(m *testing.M) {
	if job := os.Getenv(workerVariable); job != "" {
		os.Exit(work(job))
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
	lines []json.RawMessage // what it said, its last line apart
	end   ended
	noise bytes.Buffer // standard output and error
	err   error        // of Wait
}

// hosts are places other than this one for the ranks of a world.
type hosts struct {
	// addr is where rank 0 opens the rendezvous service.
	addr string
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
	ctx, cancel := context.WithTimeout(t.Context(), worldTimeout)
	defer cancel()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	socket, err := listener.(*net.TCPListener).File()
	require.NoError(t, err)
	addr := listener.Addr().String()
	if on != nil {
		addr = on.addr
	}
	env := append(ownEnviron(), workerVariable+"="+job, "SYMMEM_RENDEZVOUS_ADDR="+addr, "SYMMEM_TOKEN="+rand.Text(),
		"SYMMEM_MULTICAST="+multicastSetting(), "SYMMEM_JOB="+t.Name(), "SYMMEM_WORLD_SIZE="+strconv.Itoa(size), "SYMMEM_LOCAL_WORLD_SIZE="+strconv.Itoa(size))
	env = append(env, extra...)
	world := make([]*process, size)
	var wg sync.WaitGroup
	for rank := range world {
		p := &process{rank: rank}
		world[rank] = p
		read, write, err := os.Pipe()
		require.NoError(t, err)
		p.cmd = exec.CommandContext(ctx, os.Args[0], "-test.run=^$")
		p.cmd.Env = append(slices.Clone(env), fmt.Sprintf("SYMMEM_RANK=%d", rank), fmt.Sprintf("SYMMEM_LOCAL_RANK=%d", rank))
		p.cmd.ExtraFiles = []*os.File{write}
		if on != nil {
			p.cmd.Env = append(p.cmd.Env, on.env(rank)...)
			whole := append(on.command(rank), p.cmd.Args...)
			p.cmd.Path, err = exec.LookPath(whole[0])
			require.NoError(t, err)
			p.cmd.Args = whole
		} else if rank == 0 {
			p.cmd.ExtraFiles = append(p.cmd.ExtraFiles, socket)
			p.cmd.Env = append(p.cmd.Env, "SYMMEM_RENDEZVOUS_FD=4")
		}
		p.cmd.Stdout, p.cmd.Stderr = &p.noise, &p.noise
		p.cmd.WaitDelay = 5 * time.Second
		endWithParent(p.cmd)
		require.NoError(t, p.cmd.Start())
		require.NoError(t, write.Close())
		wg.Go(func() {
			lines := bufio.NewScanner(read)
			lines.Buffer(nil, 16<<20)
			for lines.Scan() {
				line := slices.Clone(lines.Bytes())
				var end ended
				if json.Unmarshal(line, &end) == nil && end.Done {
					p.end = end
					continue
				}
				p.lines = append(p.lines, line)
			}
			p.err = p.cmd.Wait()
			_ = read.Close()
		})
	}
	require.NoError(t, socket.Close())
	require.NoError(t, listener.Close())
	wg.Wait()
	for _, p := range world {
		if noise := strings.TrimSpace(p.noise.String()); noise != "" {
			t.Logf("rank %d: %s", p.rank, noise)
		}
	}
	return world
}
