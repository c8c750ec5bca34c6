package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"
)

const (
	// defaultGrace is how long ranks that were asked to end may take before they are killed.
	defaultGrace = 10 * time.Second
	// maxRanks bounds the ranks of one machine: each costs a process, three pipes and its share of every exchange.
	maxRanks = 1024
)

// launcher starts the ranks of one job on this machine, as processes, and sees to it that all of them end. Each rank leads a
// process group of its own, so that a terminal's Ctrl-C comes to the launcher alone, which passes it on.
type launcher struct {
	ranks   int
	program string   // path, or a name to look for in PATH
	environ []string // what the ranks inherit, but for the variables that another launcher has set
	extra   []string // NAME=value, over environ
	job     string   // "" makes a random one
	token   string   // "" makes a random one

	// args gives the arguments of a rank. report is the descriptor of its report pipe, or -1 if there is none.
	args func(rank, report int) []string
	// report, unless nil, reads what a rank writes to its report pipe, to the end. It runs on a goroutine for each rank.
	report func(rank int, r io.Reader)

	children *family // that the ranks are put into; nil is none

	stdin          io.Reader // of rank 0; nil is none
	stdout, stderr io.Writer // take the ranks' lines, each with a prefix; they may be the same
	grace          time.Duration
	say            func(format string, args ...any) // takes what the launcher has to tell, line by line; nil drops it
}

// rankEnd is how a rank ended.
type rankEnd struct {
	rank, pid int
	code      int       // the exit status, if no signal ended it
	signal    os.Signal // that ended it, or nil
	asked     bool      // the launcher had asked it to end before
	err       error     // why nobody knows how it ended, or that its output could not be written
}

// failed reports whether the rank did not end well.
func (e *rankEnd) failed() bool { return e.code != 0 || e.signal != nil || e.err != nil }

// died reports whether the rank failed in a way of its own, even if it was asked to end at about that time.
func (e *rankEnd) died() bool {
	switch {
	case !e.failed() || !e.asked:
		return e.failed()
	case e.signal != nil:
		return e.signal != terminate && e.signal != os.Kill
	}
	return e.code != 0 && e.code != exitFailure
}

// status is the exit status as a shell gives it.
func (e *rankEnd) status() int {
	switch {
	case e.signal != nil:
		return 128 + signalNumber(e.signal)
	case e.code == 0 && e.err != nil:
		return exitFailure
	}
	return e.code
}

// String says how the rank ended.
func (e *rankEnd) String() string {
	switch {
	case e.signal != nil:
		return fmt.Sprintf("rank %d (process %d) was ended by signal %d (%v)", e.rank, e.pid, signalNumber(e.signal), e.signal)
	case e.code == 0 && e.err != nil:
		return fmt.Sprintf("rank %d (process %d): %v", e.rank, e.pid, e.err)
	}
	return fmt.Sprintf("rank %d (process %d) exited with status %d", e.rank, e.pid, e.code)
}

// outcome is how a job ended.
type outcome struct {
	ranks  []rankEnd // by rank
	first  *rankEnd  // the first rank that failed, nil if none did
	signal os.Signal // the first signal that asked the launcher to end, or nil
}

// run starts all ranks and blocks until all have ended and their output is written. When a rank fails, or ctx ends, the others
// are asked to end and, after the grace, killed. Signals are passed on to all ranks; one that asks to end starts the grace,
// and the next one ends it. An error means that not all ranks could be started, and that none is left.
func (l *launcher) run(ctx context.Context, signals <-chan os.Signal) (*outcome, error) {
	if l.ranks < 1 || l.ranks > maxRanks {
		return nil, usagef("%d ranks were asked for; 1 to %d are allowed", l.ranks, maxRanks)
	}
	ends := make(chan rankEnd, l.ranks)
	ranks, release, err := l.start(ends)
	defer release()
	if err != nil {
		for _, r := range ranks {
			r.signal(os.Kill, true)
		}
		for range ranks {
			<-ends
		}
		return nil, err
	}
	s := supervisor{launcher: l, ranks: ranks, ends: ends, signals: signals}
	return s.wait(ctx), nil
}

func (l *launcher) tell(format string, args ...any) {
	if l.say != nil {
		l.say(format, args...)
	}
}

// supervisor waits for the ranks of one job.
type supervisor struct {
	launcher *launcher
	ranks    []*rankProcess
	ends     <-chan rankEnd
	signals  <-chan os.Signal

	kill <-chan time.Time // ends the grace; nil as long as nobody was asked to end
}

func (s *supervisor) wait(ctx context.Context) *outcome {
	result := &outcome{ranks: make([]rankEnd, len(s.ranks))}
	running := make(map[int]bool, len(s.ranks))
	for rank := range s.ranks {
		running[rank] = true
	}
	done := ctx.Done()
	for len(running) > 0 {
		select {
		case e := <-s.ends:
			delete(running, e.rank)
			result.ranks[e.rank] = e
			if !e.failed() || result.first != nil {
				continue
			}
			result.first = &result.ranks[e.rank]
			switch {
			case s.kill != nil: // it was asked to
			case len(running) > 0:
				s.launcher.tell("%v; ending the other ranks", result.first)
				s.end(terminate)
			default:
				s.launcher.tell("%v", result.first)
			}
		case sig := <-s.signals:
			switch {
			case !asksToEnd(sig):
				for _, r := range s.ranks {
					r.signal(sig, false)
				}
			case s.kill != nil:
				s.end(os.Kill)
			default:
				s.end(sig)
			}
			if asksToEnd(sig) && result.signal == nil {
				result.signal = sig
			}
		case <-done:
			done = nil
			if errors.Is(context.Cause(ctx), errStalled) {
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
			s.launcher.tell("ranks %v have not ended within %v; killing them", left, s.launcher.grace)
			s.end(os.Kill)
		}
	}
	return result
}

// end sends sig to all ranks that still run, and begins the grace unless it has begun.
func (s *supervisor) end(sig os.Signal) {
	for _, r := range s.ranks {
		r.signal(sig, true)
	}
	if s.kill == nil {
		s.kill = time.After(s.launcher.grace)
	}
}
