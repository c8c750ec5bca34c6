package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/tests/suite"
)

// discard is the logger of what nobody wants to hear.
var discard = slog.New(slog.DiscardHandler)

// allBackends stands, in the flag --backend of verify and bench, for every backend in turn.
const allBackends = "all"

// rankGrace is how long a rank of verify or bench may take to end: there is nothing that it must bring to safety.
const rankGrace = 3 * time.Second

// message is what a rank of verify or bench tells the parent, one line of JSON each.
type message struct {
	Opened  string        `json:"opened,omitempty"`  // the backend that was chosen
	Device  device.Kind   `json:"device,omitempty"`  // and the kind of its device
	Refused string        `json:"refused,omitempty"` // why no backend of the list can be used
	Result  *suite.Result `json:"result,omitempty"`
	Rows    int           `json:"rows,omitempty"` // how many rows there will be, those of peers apart
	Row     *benchRow     `json:"row,omitempty"`
	Error   string        `json:"error,omitempty"` // why the rank failed
	Done    bool          `json:"done,omitempty"`
}

// reporter writes messages to the parent. One goroutine uses it.
type reporter struct{ to *os.File }

func openReporter(fd int) (*reporter, error) {
	if fd < 3 {
		return nil, usagef("--report-fd is %d; this command is started by symmem itself", fd)
	}
	f := os.NewFile(uintptr(fd), "report pipe")
	if f == nil {
		return nil, usagef("--report-fd is %d, which is not open", fd)
	}
	return &reporter{to: f}, nil
}

func (r *reporter) tell(m message) error {
	if err := json.NewEncoder(r.to).Encode(m); err != nil {
		return fmt.Errorf("reporting to the parent: %w", err)
	}
	return nil
}

// rankMain is what a rank of verify or bench does around its work: it opens the backend that the configuration names, and
// tells the parent what becomes of it.
func (a *app) rankMain(cmd *cobra.Command, fd int, work func(ctx context.Context, r *symmem.Rank, rep *reporter) error) error {
	rep, err := openReporter(fd)
	if err != nil {
		return err
	}
	ctx := cmd.Context()
	err = func() error {
		cfg, err := a.load(cmd)
		if err != nil {
			return err
		}
		r, err := symmem.Open(ctx, cfg, &symmem.Options{Environ: func() []string { return a.environ }})
		if err != nil {
			if refused, ok := errors.AsType[*backend.RefusedError](err); ok && !a.probeFails(ctx, refused) {
				return rep.tell(message{Refused: refused.Error(), Done: true})
			}
			return err
		}
		if r.Rank() == 0 {
			if err := rep.tell(message{Opened: r.Backend(), Device: r.Device().Kind()}); err != nil {
				return errors.Join(err, r.Close(ctx))
			}
		}
		// When the work failed the ranks may be at different places, and the process ends anyway.
		if err := work(ctx, r, rep); err != nil {
			return err
		}
		if err := r.Close(ctx); err != nil {
			return err
		}
		return rep.tell(message{Done: true})
	}()
	if err == nil {
		return nil
	}
	// The parent prints it with the rank's number.
	if tellErr := rep.tell(message{Error: err.Error()}); tellErr != nil {
		return errors.Join(err, tellErr)
	}
	return &exitError{status: exitFailure}
}

// probeFails reports whether one of the refused backends was refused because its probe failed here, and not because something
// is missing: that is a failure.
func (a *app) probeFails(ctx context.Context, refused *backend.RefusedError) bool {
	return slices.ContainsFunc(refused.Tried, func(name string) bool {
		f, err := backend.Lookup(name)
		if err != nil {
			return true
		}
		_, err = f.Probe(ctx, a.probeEnv())
		return err != nil && !errors.Is(err, backend.ErrUnavailable) && !errors.Is(err, backend.ErrUnsupported)
	})
}

// fleet starts the ranks of verify and bench on one backend after the other.
type fleet struct {
	app      *app
	command  string   // the hidden sub-command of a rank
	args     []string // of it
	ranks    int
	settings rankSettings
	opening  time.Duration // without any message for that long at the begin, the ranks hang
	stall    time.Duration // and without one for that long later
	signals  <-chan os.Signal
}

// fleetEnd is how the ranks ended on one backend.
type fleetEnd struct {
	backend     string // that was chosen, or asked for if none was
	refused     string // why the backend cannot be used, "" if it can
	failure     string // what went wrong with the ranks themselves, "" if nothing
	interrupted os.Signal
}

// run starts the ranks on a list of preferred backends (nil leaves it to the configuration) and blocks until they have ended.
// hear gets what rank 0 tells, one call at a time.
func (f *fleet) run(ctx context.Context, preferences []string, hear func(message)) (*fleetEnd, error) {
	path, err := self()
	if err != nil {
		return nil, err
	}
	extra := slices.Clone(f.settings.vars)
	end := &fleetEnd{backend: "auto"}
	if preferences != nil {
		end.backend = strings.Join(preferences, ",")
		extra = append(extra, "SYMMEM_BACKEND="+end.backend)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	watch := time.AfterFunc(f.opening, func() { cancel(errStalled) })
	defer watch.Stop()

	var mu sync.Mutex // guards what follows, and serialises hear
	texts := make([]string, f.ranks)
	done := make([]bool, f.ranks)
	l := &launcher{
		ranks: f.ranks, program: path, environ: f.app.environ, extra: extra, job: f.settings.job, token: f.settings.token,
		args: func(_, report int) []string {
			return append([]string{f.command, "--report-fd", strconv.Itoa(report)}, f.args...)
		},
		report: func(rank int, r io.Reader) {
			d := json.NewDecoder(r)
			for {
				var m message
				if err := d.Decode(&m); err != nil {
					return // the end; a rank that was cut off in a line has not told that it is done
				}
				watch.Reset(f.stall)
				mu.Lock()
				texts[rank] += m.Error
				done[rank] = done[rank] || m.Done
				if rank == 0 {
					if m.Opened != "" {
						end.backend = m.Opened
					}
					end.refused += m.Refused
					hear(m)
				}
				mu.Unlock()
			}
		},
		stdout: f.app.err, stderr: f.app.err, grace: rankGrace,
	}
	result, err := l.run(ctx, f.signals)
	if err != nil {
		return nil, err
	}
	end.interrupted = result.signal
	end.failure = describe(result, texts, done, errors.Is(context.Cause(ctx), errStalled))
	if end.failure == "" && ctx.Err() != nil {
		end.failure = context.Cause(ctx).Error()
	}
	return end, nil
}

// errStalled is why the ranks are ended when they hang. It makes the launcher ask each where it is.
var errStalled = errors.New("nothing was heard from the ranks for too long")

// openingTime bounds opening: joining, choosing and opening are one collective call each or a few, and between them native
// libraries are loaded.
func openingTime(cfg config.Config) time.Duration { return 4*cfg.Timeout + 15*time.Second }

// describe says what went wrong with the ranks, or "" if nothing did: who died first, who hung, and what each said.
func describe(result *outcome, texts []string, done []bool, stalled bool) string {
	var parts []string
	if stalled {
		var hung []int
		for rank := range result.ranks {
			if e := &result.ranks[rank]; e.asked && texts[rank] == "" && !done[rank] {
				hung = append(hung, rank)
			}
		}
		parts = append(parts, fmt.Sprintf("ranks %v hang: %v", hung, errStalled))
	}
	// A rank that died makes the others fail: it comes first.
	for rank := range result.ranks {
		e := &result.ranks[rank]
		if texts[rank] == "" && (e.failed() && !e.asked || e.died() && !stalled) {
			parts = append(parts, e.String())
		}
	}
	for rank, text := range texts {
		if text != "" {
			parts = append(parts, fmt.Sprintf("rank %d: %s", rank, text))
		}
	}
	for rank := range result.ranks {
		e := &result.ranks[rank]
		switch {
		case e.failed() && e.asked && texts[rank] == "" && !stalled && len(parts) == 0:
			parts = append(parts, e.String())
		case !e.failed() && !done[rank]:
			parts = append(parts, fmt.Sprintf("rank %d ended without having finished", rank))
		}
	}
	return strings.Join(parts, "; ")
}

// backendChoice is the flag --backend of verify and bench.
type backendChoice struct {
	runs     [][]string // the preferences of each run; nil leaves them to the configuration
	required bool       // each run must find its backend: all are, but those of "all"
}

// chooseBackends reads the flag --backend; given is false where it was not used.
func chooseBackends(text string, given bool) (backendChoice, error) {
	if !given {
		return backendChoice{runs: [][]string{nil}, required: true}, nil
	}
	names, err := backendNames("--backend", text, config.BackendAuto, allBackends)
	if err != nil {
		return backendChoice{}, err
	}
	if len(names) == 1 && names[0] == allBackends {
		var c backendChoice
		for _, name := range backend.Names() {
			c.runs = append(c.runs, []string{name})
		}
		return c, nil
	}
	c := backendChoice{required: true}
	for _, name := range names {
		if name == allBackends {
			return c, usagef("--backend is %s; %s stands alone", text, allBackends)
		}
		c.runs = append(c.runs, []string{name})
	}
	return c, nil
}

// backendNames splits a list of backends, and refuses names that are neither registered nor in also.
func backendNames(flag, text string, also ...string) ([]string, error) {
	var names []string
	for name := range strings.SplitSeq(text, ",") {
		name = strings.TrimSpace(name)
		known := append(backend.Names(), also...)
		switch {
		case !slices.Contains(known, name):
			return nil, usagef("%s is %q; allowed are %s%s", flag, text, strings.Join(known, ", "), didYouMean(name, known))
		case slices.Contains(names, name):
			return nil, usagef("%s is %q, which has %s twice", flag, text, name)
		}
		names = append(names, name)
	}
	return names, nil
}
