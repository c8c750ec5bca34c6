// Package fleet starts the ranks of verify and bench, which are this same executable, and receives what they report. Where a launcher has started
// this process as one of several ranks, it is that rank instead.
package fleet

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/spf13/pflag"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/cmd/symmem/internal/exit"
	"github.com/symmem/symmem/cmd/symmem/internal/launch"
	"github.com/symmem/symmem/cmd/symmem/internal/probe"
	"github.com/symmem/symmem/cmd/symmem/internal/process"
	"github.com/symmem/symmem/cmd/symmem/internal/settings"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/device"
)

// rankGrace is how long a rank of verify or bench may take to end. It has nothing to save.
const rankGrace = 3 * time.Second

// Message is what a rank reports to the parent, as one line of JSON.
type Message struct {
	Opened  string          `json:"opened,omitempty"`  // the backend that was chosen
	Device  device.Kind     `json:"device,omitempty"`  // and the kind of its device
	Refused string          `json:"refused,omitempty"` // why no backend of the list can be used
	Work    json.RawMessage `json:"work,omitempty"`    // what the work reports: verify and bench know its form
	Error   string          `json:"error,omitempty"`   // why the rank failed
	Done    bool            `json:"done,omitempty"`
}

// Reporter takes a rank's messages to whoever prints: the parent, or this process itself as a rank of a launcher's job. One goroutine uses it.
type Reporter struct{ send func(Message) error }

// openReporter takes over the descriptor that the parent passed.
func openReporter(fd int) (*Reporter, error) {
	if fd < 3 {
		return nil, exit.Usagef("--%s is %d; this command is started by symmem itself", ReportFlag, fd)
	}
	f := os.NewFile(uintptr(fd), "report pipe")
	if f == nil {
		return nil, exit.Usagef("--%s is %d, which is not open", ReportFlag, fd)
	}
	return &Reporter{send: func(m Message) error {
		if err := json.NewEncoder(f).Encode(m); err != nil {
			return fmt.Errorf("reporting to the parent: %w", err)
		}
		return nil
	}}, nil
}

// Work reports what the work has found. It arrives as Message.Work, in JSON.
func (r *Reporter) Work(found any) error {
	text, err := json.Marshal(found)
	if err != nil {
		return err
	}
	return r.tell(Message{Work: text})
}

// Refuse reports why the backend cannot be used. This does not make the rank fail.
func (r *Reporter) Refuse(reason string) error { return r.tell(Message{Refused: reason}) }

func (r *Reporter) tell(m Message) error { return r.send(m) }

// ReportFlag is the flag of the hidden sub-commands of ranks whose value is the descriptor of the report pipe.
const ReportFlag = "report-fd"

// Rank is the main function of a rank of verify, bench or tune. It opens the backend that the flags and the environment of p name, with the settings
// that adjust, which may be nil, makes of theirs, calls work,
// closes the backend, and reports all of that to the parent on the descriptor fd. It blocks until work has returned. An error goes to
// the parent, which prints it; the one that Rank returns is then an *exit.Error without text.
func Rank(ctx context.Context, p *process.Process, flags *pflag.FlagSet, fd int, adjust func(*config.Config),
	work func(ctx context.Context, r *symmem.Rank, rep *Reporter) error) error {
	rep, err := openReporter(fd)
	if err != nil {
		return err
	}
	err = func() error {
		cfg, err := settings.Load(flags, p.Environ)
		if err != nil {
			return err
		}
		if adjust != nil {
			adjust(&cfg)
		}
		r, err := symmem.Open(ctx, cfg, &symmem.Options{Environ: func() []string { return p.Environ }})
		if err != nil {
			if refused, ok := errors.AsType[*backend.RefusedError](err); ok && !probe.Failed(ctx, p, refused) {
				return rep.tell(Message{Refused: refused.Error(), Done: true})
			}
			return err
		}
		if r.Rank() == 0 {
			if err := rep.tell(Message{Opened: r.Backend(), Device: r.Device().Kind()}); err != nil {
				return errors.Join(err, r.Close(ctx))
			}
		}
		// After a failure the ranks may be at different places, so nothing is closed: the process ends anyway.
		if err := work(ctx, r, rep); err != nil {
			return err
		}
		if err := r.Close(ctx); err != nil {
			return err
		}
		return rep.tell(Message{Done: true})
	}()
	if err == nil {
		return nil
	}
	// The parent prints the error with the number of the rank.
	if tellErr := rep.tell(Message{Error: err.Error()}); tellErr != nil {
		return errors.Join(err, tellErr)
	}
	return &exit.Error{Status: exit.Failure}
}

// Fleet starts the ranks of verify and bench on one backend after the other.
type Fleet struct {
	Process  *process.Process
	Command  string   // the hidden sub-command of a rank, which calls Rank
	Args     []string // of it
	Ranks    int
	Settings settings.Ranks
	Opening  time.Duration // how long the first message may take before the ranks count as hung
	Stall    time.Duration // and every later one
	Signals  <-chan os.Signal
}

// End is how the ranks ended on one backend.
type End struct {
	Backend     string    // that was chosen, or asked for if none was
	Refused     string    // why the backend cannot be used, "" if it can
	Failure     string    // what went wrong with the ranks themselves, "" if nothing
	Interrupted os.Signal // the signal that ended the ranks, or nil
}

// Run starts the ranks on the first of the preferred backends that can be used, and blocks until they have ended. Without preferences
// the configuration decides. hear is called with what rank 0 reports, one call at a time. An error means that the ranks could not be
// started; what goes wrong later is in End.
func (f *Fleet) Run(ctx context.Context, preferences []string, hear func(Message)) (*End, error) {
	path, err := process.Executable()
	if err != nil {
		return nil, err
	}
	extra := slices.Clone(f.Settings.Vars)
	end := &End{Backend: f.Settings.Backend}
	if preferences != nil {
		end.Backend = strings.Join(preferences, ",")
		extra = append(extra, "SYMMEM_BACKEND="+end.Backend)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	watch := time.AfterFunc(f.Opening, func() { cancel(launch.ErrStalled) })
	defer watch.Stop()

	var mu sync.Mutex // guards what follows, and serialises hear
	texts := make([]string, f.Ranks)
	done := make([]bool, f.Ranks)
	job := &launch.Job{
		Ranks: f.Ranks, Program: path, Environ: f.Process.Environ, Extra: extra, Name: f.Settings.Job, Token: f.Settings.Token,
		Timeout: f.Settings.Timeout, LivenessTimeout: f.Settings.LivenessTimeout,
		Args: func(_, report int) []string {
			return append([]string{f.Command, "--" + ReportFlag, strconv.Itoa(report)}, f.Args...)
		},
		Report: func(rank int, r io.Reader) {
			d := json.NewDecoder(r)
			for {
				var m Message
				if err := d.Decode(&m); err != nil {
					return // the end; a rank that was cut off in a line has not told that it is done
				}
				watch.Reset(f.Stall)
				mu.Lock()
				texts[rank] += m.Error
				done[rank] = done[rank] || m.Done
				if rank == 0 {
					if m.Opened != "" {
						end.Backend = m.Opened
					}
					end.Refused += m.Refused
					hear(m)
				}
				mu.Unlock()
			}
		},
		Stdout: f.Process.Err, Stderr: f.Process.Err, Grace: rankGrace,
	}
	result, err := job.Run(ctx, f.Signals)
	if err != nil {
		return nil, err
	}
	end.Interrupted = result.Signal
	end.Failure = describe(result, texts, done, errors.Is(context.Cause(ctx), launch.ErrStalled))
	if end.Failure == "" && ctx.Err() != nil {
		end.Failure = context.Cause(ctx).Error()
	}
	return end, nil
}

// OpeningTime returns how long the ranks may take to open a backend. Joining, choosing and opening are a few collective calls each, and
// native libraries are loaded between them.
func OpeningTime(cfg config.Config) time.Duration { return 4*bounded(cfg.Timeout) + 15*time.Second }

// StallTime returns how long ranks may say nothing while they do work that takes so long, and meet once.
func StallTime(cfg config.Config, work time.Duration) time.Duration {
	return bounded(cfg.Timeout) + work
}

// bounded is a timeout of which some may be added up. Whoever wants none gives the longest that there is.
func bounded(timeout time.Duration) time.Duration { return min(timeout, math.MaxInt64/16) }

// describe returns what went wrong with the ranks: which died first, which hung, and what each reported. It is "" if nothing did.
func describe(result *launch.Outcome, texts []string, done []bool, stalled bool) string {
	var parts []string
	if stalled {
		var hung []int
		for rank := range result.Ranks {
			if e := &result.Ranks[rank]; e.Asked && texts[rank] == "" && !done[rank] {
				hung = append(hung, rank)
			}
		}
		parts = append(parts, fmt.Sprintf("ranks %v hang: %v", hung, launch.ErrStalled))
	}
	// A rank that died makes the others fail: it comes first.
	for rank := range result.Ranks {
		e := &result.Ranks[rank]
		if texts[rank] == "" && (e.Failed() && !e.Asked || e.Died() && !stalled) {
			parts = append(parts, e.String())
		}
	}
	for rank, text := range texts {
		if text != "" {
			parts = append(parts, fmt.Sprintf("rank %d: %s", rank, text))
		}
	}
	for rank := range result.Ranks {
		e := &result.Ranks[rank]
		switch {
		case e.Failed() && e.Asked && texts[rank] == "" && !stalled && len(parts) == 0:
			parts = append(parts, e.String())
		case !e.Failed() && !done[rank]:
			parts = append(parts, fmt.Sprintf("rank %d ended without having finished", rank))
		}
	}
	return strings.Join(parts, "; ")
}
