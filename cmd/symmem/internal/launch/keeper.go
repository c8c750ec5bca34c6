package launch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime/debug"
	"slices"
	"sync"
	"time"

	"github.com/symmem/symmem/cmd/symmem/internal/exit"
	"github.com/symmem/symmem/cmd/symmem/internal/process"
	"github.com/symmem/symmem/cmd/symmem/internal/terminal"
)

// On Linux, where orphans can be handed to an ancestor that asks for them, `symmem run` is two processes: the one that the user
// started, and the launcher, which it starts in a process group of its own. When one is killed, the other ends everything that is
// left. The launcher is an ancestor of everything that the ranks start, and a pipe tells it when the first process is gone. The first
// process inherits what a killed launcher leaves behind. It leaves alone the children that it had before it was the command, which a script
// that ends with exec may have started; of what those leave behind it cannot tell that it is not a rank's.

// sweepTime bounds killing what is left. Only a process that the kernel cannot kill at the moment takes longer.
const sweepTime = 10 * time.Second

// KeeperFlag is the hidden flag that makes `symmem run` the launcher. Its value is the descriptor of a pipe that is closed when the
// process that the user started ends.
const KeeperFlag = "keeper-fd"

// Keep runs the launcher as a process of its own: this executable with KeeperFlag and the arguments of p, in which name is the
// sub-command. It passes signals on to the launcher and blocks until it has ended. If it failed, the error is an *exit.Error with its
// status. When ctx is done, the launcher is asked to end, and is killed if that takes much longer than grace, the time that its ranks
// have.
func Keep(ctx context.Context, p *process.Process, name string, grace time.Duration) error {
	path, err := process.Executable()
	if err != nil {
		return err
	}
	earlier := knownChildren()
	if err := adoptOrphans(); err != nil {
		return err
	}
	theirs, mine, err := os.Pipe()
	if err != nil {
		return fmt.Errorf("making a pipe: %w", err)
	}
	defer func() { _ = mine.Close() }()
	args := p.Args[slices.Index(p.Args, name)+1:]
	cmd := exec.Command(path, append([]string{name, "--" + KeeperFlag + "=3"}, args...)...)
	cmd.Env, cmd.Stdout, cmd.Stderr = p.Environ, p.Out, p.Err
	cmd.ExtraFiles = []*os.File{theirs}
	cmd.SysProcAttr = ownGroup()
	cmd.WaitDelay = drainTime
	feed, err := feedInput(cmd, p.In)
	if err != nil {
		return errors.Join(err, theirs.Close())
	}
	signals, stop := CatchSignals()
	defer stop()
	if err := errors.Join(cmd.Start(), theirs.Close()); err != nil {
		return fmt.Errorf("starting the launcher: %w", err)
	}
	feed()

	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	for done := ctx.Done(); ; {
		select {
		case sig := <-signals:
			_ = cmd.Process.Signal(sig) // one that has ended needs none
		case <-done:
			done = nil
			_ = cmd.Process.Signal(terminate)
			// It ends its ranks within the grace, and then itself.
			hangs := time.AfterFunc(grace+sweepTime+drainTime, func() { _ = cmd.Process.Kill() })
			defer hangs.Stop()
		case err := <-ended:
			return launcherEnd(cmd, err, earlier)
		}
	}
}

// launcherEnd turns the end of the launcher into that of this command. The launcher has reported its own errors, unless it was killed. earlier are the children that
// this process had before.
func launcherEnd(cmd *exec.Cmd, err error, earlier known) error {
	if cmd.ProcessState == nil {
		return fmt.Errorf("waiting for the launcher: %w", err)
	}
	code, sig := exitOf(cmd.ProcessState)
	_, isStatus := errors.AsType[*exec.ExitError](err)
	switch {
	case sig != nil:
		sweep(nil, earlier)
		return &exit.Error{Status: SignalStatus(sig),
			Err: fmt.Errorf("the launcher (process %d) was ended by signal %d (%v); what it had started was ended", cmd.Process.Pid, signalNumber(sig), sig)}
	case err != nil && !isStatus:
		return fmt.Errorf("passing on what the launcher writes: %w", err)
	case code != 0:
		return &exit.Error{Status: code}
	}
	return nil
}

// Kept prepares this process, the launcher, to end everything that it has started when the process at the other end of the pipe fd is
// gone. Children is for the job; release ends what is left of it. The error is an *exit.Error if fd is not such a pipe.
func Kept(fd int) (children *Family, release func(), err error) {
	pipe := os.NewFile(uintptr(fd), "keeper pipe")
	if fd < 3 || pipe == nil {
		return nil, nil, exit.Usagef("--%s is %d; this flag is for symmem itself", KeeperFlag, fd)
	}
	if err := errors.Join(closeOnExec(fd), adoptOrphans()); err != nil {
		return nil, nil, err
	}
	keepWriting()
	// A launcher that crashes must be seen to: it ends by a signal, not with a status as ranks have them, and what it leaves is ended.
	debug.SetTraceback("crash")
	children = &Family{own: map[int]bool{}}
	ended := make(chan struct{})
	go func() {
		_, err := io.Copy(io.Discard, pipe)
		select {
		case <-ended: // closed from here
			return
		default:
		}
		if err != nil {
			return // nobody can tell when that process goes; its own sweep is left
		}
		children.mu.Lock() // nothing is started any more
		sweep(children, known{})
		os.Exit(exit.Failure) // the ranks are gone, and nobody waits for an answer
	}()
	stopReaping := children.reap()
	return children, func() {
		close(ended)
		_ = pipe.Close()
		stopReaping()
		children.mu.Lock()
		sweep(children, known{})
		children.mu.Unlock()
	}, nil
}

// Family holds the children of the launcher: those that it started, which package exec waits for, and the orphans that it inherited
// from them. A nil Family tracks nothing.
type Family struct {
	mu  sync.Mutex // held while one is started, so that no child is taken for an orphan in between
	own map[int]bool
}

// start starts a process that the caller waits for.
func (f *Family) start(cmd *exec.Cmd) error {
	if f == nil {
		return cmd.Start()
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	err := cmd.Start()
	if err == nil {
		f.own[cmd.Process.Pid] = true
	}
	return err
}

// waited notes that a process has been waited for. Its number may now belong to another.
func (f *Family) waited(pid int) {
	if f == nil {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.own, pid)
}

// has reports whether the child was started here, so that its starter waits for it. The caller holds mu.
func (f *Family) has(pid int) bool { return f != nil && f.own[pid] }

// feedInput makes stdin the input of a command. The caller calls started once the command has been started.
func feedInput(cmd *exec.Cmd, stdin io.Reader) (started func(), err error) {
	if stdin == nil {
		return func() {}, nil
	}
	// A background process group that reads from the terminal is stopped, so this process reads for it, while it is in the foreground itself.
	if f, ok := stdin.(*os.File); ok && !terminal.Is(f) {
		cmd.Stdin = f
		return func() {}, nil
	} else if ok {
		stdin = foregroundReader(f)
	}
	feed, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	return func() {
		go func() {
			// This ends with the input, or when the command ends and Wait closes the pipe. A read from a terminal on which
			// nobody types blocks until this process ends.
			_, _ = io.Copy(feed, stdin)
			_ = feed.Close()
		}()
	}, nil
}
