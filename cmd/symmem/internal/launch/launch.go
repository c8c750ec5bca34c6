// Package launch starts the ranks of a job as processes on this machine, passes signals and output on, and leaves nothing behind.
package launch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"time"

	"github.com/symmem/symmem/cmd/symmem/internal/exit"
)

const (
	// DefaultGrace is how long ranks have to end, once asked, before they are killed.
	DefaultGrace = 10 * time.Second
	// lingerTime is how long the other ranks have, once one has exited with an error, before they are asked to end. One failure often
	// reaches several ranks at almost the same time, and the one that knows the cause need not be the first to go.
	lingerTime = 200 * time.Millisecond
	// MaxRanks bounds the ranks of one machine. Each costs a process, three pipes and a share of every exchange.
	MaxRanks = 1024
)

// ErrStalled, as the cause of a canceled context, means that the ranks hang. Run then makes each rank print its stacks.
var ErrStalled = errors.New("nothing was heard from the ranks for too long")

// Job describes the ranks to start on this machine. Each rank leads a process group of its own, so that Ctrl-C on a terminal reaches
// the launcher alone, which passes it on.
type Job struct {
	Ranks   int
	Program string   // path, or a name to look for in PATH
	Environ []string // what the ranks inherit, except for variables that another launcher has set
	Extra   []string // NAME=value; takes precedence over Environ
	Name    string   // of the job; "" makes a random one
	Token   string   // "" makes a random one

	// Timeout and LivenessTimeout are those of the rendezvous service, which Run hosts; 0 are the defaults.
	Timeout, LivenessTimeout time.Duration

	// Args returns the arguments of a rank. report is the descriptor of its report pipe, or -1 if there is none.
	Args func(rank, report int) []string
	// Report, if not nil, reads from the report pipe of a rank until its end. It is called on one goroutine for each rank.
	Report func(rank int, r io.Reader)

	KeepGoing bool // the others are not ended when a rank fails

	Children *Family // tracks the ranks; may be nil

	Stdin          io.Reader                        // of rank 0; may be nil
	Stdout, Stderr io.Writer                        // receive the ranks' lines, each with a prefix; may be the same
	Grace          time.Duration                    // from asking the ranks to end until they are killed
	Say            func(format string, args ...any) // reports what the launcher does, line by line; may be nil
}

// RankEnd is how a rank ended.
type RankEnd struct {
	Rank, PID int
	Code      int       // the exit status, if no signal ended it
	Signal    os.Signal // that ended it, or nil
	Asked     bool      // the launcher had asked it to end before
	Err       error     // why nobody knows how it ended, or that its output could not be written
}

// Failed reports whether the rank ended other than with status 0.
func (e *RankEnd) Failed() bool { return e.Code != 0 || e.Signal != nil || e.Err != nil }

// Died reports whether the rank failed by itself, even if it was asked to end at about the same time.
func (e *RankEnd) Died() bool {
	switch {
	case !e.Failed() || !e.Asked:
		return e.Failed()
	case e.Signal != nil:
		return e.Signal != terminate && e.Signal != os.Kill
	}
	return e.Code != 0 && e.Code != exit.Failure
}

// Status returns the exit status as shells define it.
func (e *RankEnd) Status() int {
	switch {
	case e.Signal != nil:
		return SignalStatus(e.Signal)
	case e.Code == 0 && e.Err != nil:
		return exit.Failure
	}
	return e.Code
}

// String describes how the rank ended.
func (e *RankEnd) String() string {
	switch {
	case e.Signal != nil:
		return fmt.Sprintf("rank %d (process %d) was ended by signal %d (%v)", e.Rank, e.PID, signalNumber(e.Signal), e.Signal)
	case e.Code == 0 && e.Err != nil:
		return fmt.Sprintf("rank %d (process %d): %v", e.Rank, e.PID, e.Err)
	}
	return fmt.Sprintf("rank %d (process %d) exited with status %d", e.Rank, e.PID, e.Code)
}

// Outcome is how a job ended.
type Outcome struct {
	Ranks  []RankEnd // by rank
	First  *RankEnd  // the first rank that failed, nil if none did
	Signal os.Signal // the first signal that asked the launcher to end, or nil
}

// Run starts all ranks and blocks until all have ended and their output is written. When a rank fails and the job is not to keep going, or ctx is done, the others
// are asked to end, and are killed after the grace. After a rank that has exited by itself they first have a moment to say what they know. Signals are passed on to all ranks. The first one that asks to end starts the
// grace, and the second one cuts it short. Once the ranks are killed, Run does not wait for a reader that takes nothing of what they
// have written. If nobody reads their output any more, which for others is the end of a program, they are asked to end as well. An error means that not all ranks could be started, and that none is left; it is an
// *exit.Error if shells define a status for it.
func (l *Job) Run(ctx context.Context, signals <-chan os.Signal) (*Outcome, error) {
	if l.Ranks < 1 || l.Ranks > MaxRanks {
		return nil, exit.Usagef("%d ranks were asked for; 1 to %d are allowed", l.Ranks, MaxRanks)
	}
	defer holdBrokenPipes()()
	ends, abandon, unread := make(chan RankEnd, l.Ranks), make(chan struct{}), make(chan struct{}, 1)
	ranks, release, err := l.start(ends, abandon, func() {
		select {
		case unread <- struct{}{}:
		default: // it is known
		}
	})
	defer release()
	if err != nil {
		time.AfterFunc(abandonTime, func() { close(abandon) })
		for _, r := range ranks {
			r.signal(os.Kill, true)
		}
		for range ranks {
			<-ends
		}
		return nil, err
	}
	s := supervisor{job: l, ranks: ranks, ends: ends, signals: signals, unread: unread, abandon: abandon}
	quiet := s.speak()
	defer quiet()
	return s.wait(ctx), nil
}

func (l *Job) tell(format string, args ...any) {
	if l.Say != nil {
		l.Say(format, args...)
	}
}

// supervisor waits for the ranks of a job.
type supervisor struct {
	job     *Job
	ranks   []*rankProcess
	ends    <-chan RankEnd
	signals <-chan os.Signal
	unread  <-chan struct{} // nobody reads the ranks' output any more

	kill <-chan time.Time // ends the grace; nil as long as nobody was asked to end

	lines   chan string   // what is to be said
	abandon chan struct{} // is closed a while after the ranks were killed: what nobody reads is given up then
	killed  bool
}

// speak says what tell is given, on a goroutine of its own, so that a reader who takes nothing keeps no rank from being ended. quiet
// returns when all is said.
func (s *supervisor) speak() (quiet func()) {
	s.lines = make(chan string, 8+len(s.ranks)) // more than are said of one job
	said := make(chan struct{})
	go func() {
		defer close(said)
		for line := range s.lines {
			s.job.tell("%s", line)
		}
	}()
	return func() {
		close(s.lines)
		select {
		case <-said:
		case <-s.abandon:
		}
	}
}

func (s *supervisor) tell(format string, args ...any) { s.lines <- fmt.Sprintf(format, args...) }

func (s *supervisor) wait(ctx context.Context) *Outcome {
	result := &Outcome{Ranks: make([]RankEnd, len(s.ranks))}
	running := make(map[int]bool, len(s.ranks))
	for rank := range s.ranks {
		running[rank] = true
	}
	var linger <-chan time.Time // after it the failure of the first rank is said, and the others are ended; nil if there is none to say
	done := ctx.Done()
	for len(running) > 0 {
		select {
		case e := <-s.ends:
			delete(running, e.Rank)
			result.Ranks[e.Rank] = e
			if !e.Failed() || result.First != nil && !s.job.KeepGoing {
				continue
			}
			failed := &result.Ranks[e.Rank]
			if result.First == nil {
				result.First = failed
			}
			switch {
			case s.kill != nil: // it was asked to
			case len(running) == 0:
				s.tell("%v", failed)
			case s.job.KeepGoing:
				s.tell("%v; %d of the ranks go on", failed, len(running))
			case failed.Code != 0 && failed.Signal == nil:
				linger = time.After(lingerTime)
			default:
				s.tell("%v; ending the other ranks", failed)
				s.end(terminate)
			}
		case <-linger:
			linger = nil
			if s.kill != nil { // something else has ended them meanwhile
				s.tell("%v", result.First)
			} else {
				s.tell("%v; ending the other ranks", result.First)
				s.end(terminate)
			}
		case sig := <-s.signals:
			switch {
			case !AsksToEnd(sig):
				for _, r := range s.ranks {
					r.signal(sig, false)
				}
			case s.kill != nil:
				s.end(os.Kill)
			default:
				s.end(sig)
			}
			if AsksToEnd(sig) && result.Signal == nil {
				result.Signal = sig
			}
		case <-s.unread:
			if s.kill == nil {
				s.tell("nobody reads what the ranks write any more; ending them")
				s.end(terminate)
			}
		case <-done:
			done = nil
			if errors.Is(context.Cause(ctx), ErrStalled) {
				s.end(dumpStacks)
			} else {
				s.end(terminate)
			}
		case <-s.kill:
			var left []int
			for rank := range s.ranks {
				if running[rank] {
					left = append(left, rank)
				}
			}
			s.tell("ranks %v have not ended within %v; killing them", left, s.job.Grace)
			s.end(os.Kill)
		}
	}
	if linger != nil { // the others have ended meanwhile
		s.tell("%v", result.First)
	}
	return result
}

// end sends sig to all ranks that still run, and starts the grace if it has not started.
func (s *supervisor) end(sig os.Signal) {
	for _, r := range s.ranks {
		r.signal(sig, true)
	}
	if s.kill == nil {
		s.kill = time.After(s.job.Grace)
	}
	if sig == os.Kill && !s.killed {
		s.killed = true
		time.AfterFunc(abandonTime, func() { close(s.abandon) })
	}
}

// Output runs a command and returns what it has written to its standard output. On Linux what it starts, unless that makes a group of its own, is
// killed with it when its context ends, and it is when this process ends; signals from a terminal go to this process alone.
func Output(cmd *exec.Cmd) ([]byte, error) {
	if KeepsDescendants {
		runtime.LockOSThread() // for the kernel, this thread is the parent
		defer runtime.UnlockOSThread()
		cmd.SysProcAttr = groupLeader()
		cmd.Cancel = func() error {
			signalGroup(cmd.Process, os.Kill)
			return nil
		}
	}
	return cmd.Output()
}
