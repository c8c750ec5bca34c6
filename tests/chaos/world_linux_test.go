package chaos

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// worldTimeout bounds a world of processes whatever befalls it.
const worldTimeout = 90 * time.Second

// worker is one rank of a world, as the test sees it.
type worker struct {
	rank    int
	cmd     *exec.Cmd
	control *os.File
	noise   bytes.Buffer // standard output and error
	last    *said        // nil if it did not come to its end
	again   *said        // the end of the second time, if there was one
	err     error        // of Wait
	left    string       // what it held when it should hold nothing
	watched error        // what went wrong with the trap
	took    time.Duration
	ended   func() // is called when it has come to the end of the job, or is gone
}

// runWorld runs the job on size processes, lets the fault befall its victim, and waits for all of them.
func runWorld(size int, f *fault) (world []*worker, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), worldTimeout)
	defer cancel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	defer l.Close()
	socket, err := l.(*net.TCPListener).File()
	if err != nil {
		return nil, err
	}
	defer socket.Close()
	env := slices.DeleteFunc(os.Environ(), func(v string) bool {
		return strings.HasPrefix(v, "SYMMEM_") || strings.HasPrefix(v, "GODEBUG=")
	})
	env = append(env, workerVariable+"=1", "SYMMEM_BACKEND=host", "SYMMEM_RENDEZVOUS_ADDR="+l.Addr().String(), "SYMMEM_TOKEN="+rand.Text(),
		"SYMMEM_JOB=chaos", "SYMMEM_WORLD_SIZE="+strconv.Itoa(size), "SYMMEM_LOCAL_WORLD_SIZE="+strconv.Itoa(size),
		"SYMMEM_TIMEOUT="+f.timeout().String(), "SYMMEM_KERNEL_TIMEOUT="+f.timeout().String())
	next, err := f.second(size)
	if err != nil {
		return nil, err
	}
	defer next.close()
	f.release = make(chan struct{})
	var others atomic.Int32 // that have not come to the end of the job
	others.Store(int32(size) - 1)
	if f.again {
		env = append(env, briefVariable+"=1")
	}
	var wg sync.WaitGroup
	began := time.Now()
	for r := range size {
		w := &worker{rank: r, ended: func() {}}
		if r != f.victim {
			w.ended = sync.OnceFunc(func() {
				if others.Add(-1) == 0 {
					close(f.release)
				}
			})
		}
		world = append(world, w)
		pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			cancel()
			wg.Wait()
			return nil, err
		}
		theirs := os.NewFile(uintptr(pair[1]), "control")
		w.control = os.NewFile(uintptr(pair[0]), "control")
		w.cmd = exec.CommandContext(ctx, os.Args[0], "-test.run=^$")
		w.cmd.Env = append(slices.Clone(env), fmt.Sprintf("SYMMEM_RANK=%d", r), fmt.Sprintf("SYMMEM_LOCAL_RANK=%d", r))
		w.cmd.ExtraFiles = []*os.File{theirs}
		if r == 0 {
			w.cmd.ExtraFiles = append(w.cmd.ExtraFiles, socket)
			w.cmd.Env = append(w.cmd.Env, "SYMMEM_RENDEZVOUS_FD=4")
		}
		if r == f.victim {
			w.cmd.Env = append(w.cmd.Env, f.environ()...)
		}
		next.prepare(w.cmd, r)
		w.cmd.Stdout, w.cmd.Stderr = &w.noise, &w.noise
		// Each is in a process group of its own. When the shell that started the tests in its background ends while one that it has stopped
		// is in the tests' group, the kernel sends SIGHUP to all of that group: the tests would end without a word.
		w.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
		// One that hangs says where.
		w.cmd.Cancel = func() error { return w.cmd.Process.Signal(syscall.SIGQUIT) }
		w.cmd.WaitDelay = 5 * time.Second
		if err := errors.Join(w.cmd.Start(), theirs.Close()); err != nil {
			cancel()
			wg.Wait()
			return nil, errors.Join(err, w.control.Close())
		}
		wg.Go(func() {
			w.attend(f, next)
			w.ended()
			w.err = w.cmd.Wait()
			w.took = time.Since(began)
			_ = w.control.Close()
		})
	}
	// The listening socket is the first rank's alone: with it, it goes.
	if err := errors.Join(socket.Close(), l.Close(), next.close()); err != nil {
		cancel()
	}
	wg.Wait()
	return world, nil
}

// attend answers a worker until it has ended.
func (w *worker) attend(f *fault, next *second) {
	var watching sync.WaitGroup
	defer watching.Wait()
	lines := bufio.NewScanner(w.control)
	var before held
	for lines.Scan() {
		var s said
		if err := json.Unmarshal(lines.Bytes(), &s); err != nil {
			w.watched = errors.Join(w.watched, err)
			return
		}
		switch s.Stage {
		case startStage:
			if s.Listener != 0 {
				taken, err := takeFile(w.cmd.Process.Pid, s.Listener)
				if err != nil {
					w.watched = err
					return
				}
				watching.Go(func() {
					w.watched = errors.Join(w.watched, watch(taken, func(n *notification) (unix.Errno, <-chan struct{}) { return f.atCall(w.cmd.Process, n) }))
				})
			}
			before = w.holds()
			if s.Listener != 0 {
				before.files-- // the worker's own of its trap
			}
			if w.rank == 0 {
				before.files-- // the listening socket, which is the service's
			}
		case endStage:
			if w.rank == f.victim {
				f.over.Store(true)
			}
			w.ended()
			w.last = &s
			w.left = w.settles(before)
			if next.serves(w.rank) {
				before.files-- // the second listening socket
			}
		case againStage:
			w.again = &s
			if left := w.settles(before); w.left == "" && left != "" {
				w.left = "the second time, " + left
			}
		default:
			if w.rank == f.victim {
				f.atStage(w.cmd.Process, s.Stage)
			}
		}
		if _, err := w.control.Write([]byte{1}); err != nil {
			return // it has died
		}
	}
}

// held is what a process holds.
type held struct{ files, mappings int }

// holds looks at what the worker, which waits for an answer, holds.
func (w *worker) holds() held {
	at := filepath.Join("/proc", strconv.Itoa(w.cmd.Process.Pid))
	files, err := os.ReadDir(filepath.Join(at, "fd"))
	if err != nil {
		return held{}
	}
	maps, err := os.ReadFile(filepath.Join(at, "maps"))
	if err != nil {
		return held{}
	}
	return held{files: len(files), mappings: bytes.Count(maps, []byte("memfd:symmem"))}
}

// settles waits a little until the worker holds no more than before, and says what it holds too much.
func (w *worker) settles(before held) string {
	var now held
	for range 100 {
		if now = w.holds(); now.files <= before.files && now.mappings <= before.mappings {
			return ""
		}
		time.Sleep(20 * time.Millisecond)
	}
	return fmt.Sprintf("%d files where %d were, %d mappings of shared memory where %d were", now.files, before.files, now.mappings, before.mappings)
}
