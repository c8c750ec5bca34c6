package launch

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/symmem/symmem/cmd/symmem/internal/exit"
	"github.com/symmem/symmem/group"
)

// drainTime is how long the output of a rank is read after it has ended. Only a process that the rank left behind in a session of its
// own can keep the pipe open for longer.
const drainTime = 2 * time.Second

// abandonTime is how long after the ranks were killed their output may wait for a reader, which may never come back.
const abandonTime = 2 * drainTime

// rankProcess is a rank that was started.
type rankProcess struct {
	rank  int
	cmd   *exec.Cmd
	pipes []*os.File // this side of its output and report pipes
	lines []*lineWriter

	output, report sync.WaitGroup // the readers of the pipes

	mu    sync.Mutex
	ended bool // it was reaped: its number may mean another process now
	asked bool
}

// signal sends sig to the process group of the rank, unless the rank has ended. end means that the rank is asked to end.
func (r *rankProcess) signal(sig os.Signal, end bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.ended {
		return
	}
	r.asked = r.asked || end
	signalGroup(r.cmd.Process, sig)
}

// start starts the ranks. How each ends is sent to ends, which has room for all; when abandon is closed, output that nobody takes is given
// up. unread is called when nobody reads it any more. Even with an error it returns the ranks that were
// started. The caller calls release once all of them have ended.
func (l *Job) start(ends chan<- RankEnd, abandon <-chan struct{}, unread func()) (ranks []*rankProcess, release func(), err error) {
	release = func() {}
	if err := launchSupported(); err != nil {
		return nil, release, err
	}
	path, err := exec.LookPath(l.Program)
	if err != nil && !errors.Is(err, exec.ErrDot) {
		return nil, release, fmt.Errorf("starting the ranks: %w", startError(notFound(l.Program, err)))
	}
	if err != nil {
		path = l.Program // found in the working directory, which PATH names: shells run it too
	}
	place, err := newMeetingPlace(cmp.Or(l.Name, "run-"+randomHex(8)), cmp.Or(l.Token, randomHex(32)))
	if err != nil {
		return nil, release, err
	}

	// For the kernel, a child's parent has died when the thread that started the child ends. So one thread starts all ranks, and
	// stays.
	type started struct {
		ranks []*rankProcess
		err   error
	}
	result, hold := make(chan started), make(chan struct{})
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		var s started
		var output sync.Mutex
		for rank := range l.Ranks {
			r, err := l.startRank(rank, path, place, &output, unread)
			if err != nil {
				s.err = fmt.Errorf("starting rank %d: %w", rank, err)
				break
			}
			s.ranks = append(s.ranks, r)
		}
		result <- s
		<-hold
	}()
	s := <-result
	for _, r := range s.ranks {
		go func() { ends <- r.wait(l.Children, abandon) }()
	}
	if s.err != nil {
		return s.ranks, func() { close(hold) }, errors.Join(s.err, place.listener.Close())
	}
	stop := l.serve(place)
	return s.ranks, func() { stop(); close(hold) }, nil
}

// serve serves the rendezvous of the ranks until stop is called. So the job can lose any rank.
func (l *Job) serve(place *meetingPlace) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		err := group.Serve(ctx, &group.Options{
			WorldSize: l.Ranks, Listener: place.listener, Job: place.job, Token: place.token, Timeout: l.Timeout, LivenessTimeout: l.LivenessTimeout,
		})
		var missing *group.MissingRanksError
		if err != nil && !errors.As(err, &missing) { // of ranks that are missing, the others tell
			l.tell("serving the rendezvous: %v", err)
		}
	}()
	return func() { cancel(); <-ended }
}

// startRank starts one rank and the readers of its output.
func (l *Job) startRank(rank int, path string, place *meetingPlace, output *sync.Mutex, unread func()) (*rankProcess, error) {
	r := &rankProcess{rank: rank}
	var theirs []*os.File
	defer func() {
		for _, f := range theirs {
			_ = f.Close() // the child has its own, or there is none
		}
	}()
	pipe := func() (mine, child *os.File, err error) {
		mine, child, err = os.Pipe()
		if err != nil {
			return nil, nil, fmt.Errorf("making a pipe (with many ranks, raise ulimit -n): %w", err)
		}
		r.pipes = append(r.pipes, mine)
		theirs = append(theirs, child)
		return mine, child, nil
	}
	fail := func(err error) (*rankProcess, error) {
		for _, f := range r.pipes {
			err = errors.Join(err, f.Close())
		}
		return nil, err
	}

	outRead, outWrite, err := pipe()
	if err != nil {
		return fail(err)
	}
	errRead, errWrite, err := pipe()
	if err != nil {
		return fail(err)
	}
	cmd := &exec.Cmd{Path: path, Stdout: outWrite, Stderr: errWrite, SysProcAttr: groupLeader()}
	var reportRead *os.File
	report := -1
	if l.Report != nil {
		var reportWrite *os.File
		if reportRead, reportWrite, err = pipe(); err != nil {
			return fail(err)
		}
		report = 3 + len(cmd.ExtraFiles) // the descriptors of ExtraFiles begin at 3
		cmd.ExtraFiles = append(cmd.ExtraFiles, reportWrite)
	}
	cmd.Args = append([]string{l.Program}, l.Args(rank, report)...)
	cmd.Env = rankEnviron(l.Environ, append(slices.Clone(l.Extra), place.variables(rank, l.Ranks)...))

	feed := func() {}
	if rank == 0 {
		if feed, err = feedInput(cmd, l.Stdin); err != nil {
			return fail(err)
		}
	}
	if err := l.Children.start(cmd); err != nil {
		return fail(startError(err))
	}
	r.cmd = cmd
	feed()
	prefix := fmt.Sprintf("[%d] ", rank)
	r.copyLines(outRead, &lineWriter{mu: output, to: l.Stdout, prefix: prefix, gone: unread})
	r.copyLines(errRead, &lineWriter{mu: output, to: l.Stderr, prefix: prefix, gone: unread})
	if reportRead != nil {
		r.report.Go(func() {
			l.Report(rank, reportRead)
			_, _ = io.Copy(io.Discard, reportRead) // so that the rank is never held up
		})
	}
	return r, nil
}

// copyLines copies the pipe line by line.
func (r *rankProcess) copyLines(from *os.File, to *lineWriter) {
	r.lines = append(r.lines, to)
	r.output.Go(func() {
		_, _ = io.Copy(to, from) // it ends with the pipe, or by the deadline that wait sets; writing never fails
		to.flush()
	})
}

// wait blocks until the rank has ended and its output is written, or given up, and says how it ended.
func (r *rankProcess) wait(children *Family, abandon <-chan struct{}) RankEnd {
	e := RankEnd{Rank: r.rank, PID: r.cmd.Process.Pid}
	reaped := !awaitExit(e.PID)
	var err error
	if reaped {
		err = r.cmd.Wait()
	}
	r.mu.Lock()
	// What the rank started and left behind is killed. Until the rank is reaped, the number of its group cannot belong to
	// another.
	signalGroup(r.cmd.Process, os.Kill)
	if !reaped {
		err = r.cmd.Wait()
	}
	r.ended = true
	children.waited(e.PID)
	e.Asked = r.asked
	r.mu.Unlock()
	if state := r.cmd.ProcessState; state != nil {
		e.Code, e.Signal = exitOf(state)
	}
	if _, status := errors.AsType[*exec.ExitError](err); err != nil && !status {
		e.Err = fmt.Errorf("waiting for it: %w", err)
	}
	for _, f := range r.pipes {
		if err := f.SetReadDeadline(time.Now().Add(drainTime)); err != nil {
			e.Err = errors.Join(e.Err, err)
		}
	}
	r.report.Wait()
	written := make(chan struct{})
	go func() {
		defer close(written)
		r.output.Wait()
	}()
	select {
	case <-written:
	case <-abandon:
		// The readers are left where they are, and with them the pipes and the lines.
		e.Err = errors.Join(e.Err, errors.New("writing its output: nobody takes it"))
		return e
	}
	for _, f := range r.pipes {
		e.Err = errors.Join(e.Err, f.Close())
	}
	for _, w := range r.lines {
		if w.err != nil {
			e.Err = errors.Join(e.Err, fmt.Errorf("writing its output: %w", w.err))
		}
	}
	return e
}

// notFound adds to the error of a name that is nowhere in PATH that a file in the working directory has it: go build leaves programs there.
func notFound(name string, err error) error {
	if info, statErr := os.Stat(name); errors.Is(err, exec.ErrNotFound) && statErr == nil && info.Mode().IsRegular() {
		return fmt.Errorf("%w; there is one in the working directory: ./%s", err, name)
	}
	return err
}

// startError wraps the error of a program that could not be started, with the status that shells define for it.
func startError(err error) error {
	status := 126
	if errors.Is(err, exec.ErrNotFound) || errors.Is(err, os.ErrNotExist) {
		status = 127
	}
	return &exit.Error{Status: status, Err: err}
}

// meetingPlace is what the ranks of a job share: the secrets, and the socket of the rendezvous service, which is open before any rank
// runs, so that no other process can take the port.
type meetingPlace struct {
	listener   net.Listener
	addr       string
	job, token string
}

func newMeetingPlace(job, token string) (*meetingPlace, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		var err6 error
		if l, err6 = net.Listen("tcp", "[::1]:0"); err6 != nil {
			return nil, fmt.Errorf("opening the socket of the rendezvous service: %w", errors.Join(err, err6))
		}
	}
	return &meetingPlace{listener: l, addr: l.Addr().String(), job: job, token: token}, nil
}

// variables returns the variables that tell a rank its place. torchrun's names are among them, for programs that know only those; all
// four of them together can only be read as counting processes. MASTER_ADDR and MASTER_PORT are not, because a program that reads them
// expects a store with another protocol there.
func (p *meetingPlace) variables(rank, ranks int) []string {
	vars := []string{
		"SYMMEM_LAUNCHER=none", // so that nothing of a launcher further out fills a gap
		"SYMMEM_RENDEZVOUS_ADDR=" + p.addr,
		"SYMMEM_RENDEZVOUS_SERVED=true",
		"SYMMEM_RENDEZVOUS_FD=-1", // whatever a configuration file says of another job
		"SYMMEM_JOB=" + p.job,
		"SYMMEM_RESTART=0", // the same
		"SYMMEM_TOKEN=" + p.token,
	}
	for _, prefix := range []string{"SYMMEM_", ""} {
		vars = append(vars,
			prefix+"RANK="+strconv.Itoa(rank), prefix+"WORLD_SIZE="+strconv.Itoa(ranks),
			prefix+"LOCAL_RANK="+strconv.Itoa(rank), prefix+"LOCAL_WORLD_SIZE="+strconv.Itoa(ranks))
	}
	return vars
}

// outer are the variables with which an outer launcher tells a process its place. In a rank they would describe another job.
var outer = []string{"SYMMEM_RANK", "SYMMEM_WORLD_SIZE", "SYMMEM_LOCAL_RANK", "SYMMEM_LOCAL_WORLD_SIZE", "SYMMEM_LAUNCHER",
	"SYMMEM_RENDEZVOUS_ADDR", "SYMMEM_RENDEZVOUS_SERVED", "SYMMEM_RENDEZVOUS_FD", "SYMMEM_JOB", "SYMMEM_RESTART", "SYMMEM_TOKEN",
	"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
	"GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"}

// rankEnviron returns environ without the variables that describe other jobs, and with set.
func rankEnviron(environ, set []string) []string {
	names := make(map[string]bool, len(set))
	for _, entry := range set {
		name, _, _ := strings.Cut(entry, "=")
		names[name] = true
	}
	env := make([]string, 0, len(environ)+len(set))
	for _, entry := range environ {
		name, _, _ := strings.Cut(entry, "=")
		if !names[name] && !slices.Contains(outer, name) && !strings.HasPrefix(name, "TORCHELASTIC_") {
			env = append(env, entry)
		}
	}
	return append(env, set...)
}

// randomHex returns n random bytes in hexadecimal.
func randomHex(n int) string {
	b := make([]byte, n)
	rand.Read(b) // it never fails
	return hex.EncodeToString(b)
}
