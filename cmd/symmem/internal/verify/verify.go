// Package verify runs the correctness suite on ranks of this machine and sums up the results.
package verify

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"

	"github.com/spf13/pflag"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/cmd/symmem/internal/exit"
	"github.com/symmem/symmem/cmd/symmem/internal/fleet"
	"github.com/symmem/symmem/cmd/symmem/internal/launch"
	"github.com/symmem/symmem/cmd/symmem/internal/probe"
	"github.com/symmem/symmem/cmd/symmem/internal/process"
	"github.com/symmem/symmem/cmd/symmem/internal/settings"
	"github.com/symmem/symmem/cmd/symmem/internal/terminal"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/tests/suite"
)

// RankCommand is the hidden sub-command of the ranks, which calls Rank.
const RankCommand = "verify-rank"

// Options are the flags of verify, except for the settings of the configuration. A rank has only Filter and Short.
type Options struct {
	Backends string // names with commas between them, auto or all
	Filter   string // regular expression for the names of cases; "" is all
	Require  string // names of backends with commas between them, or ""
	Ranks    int
	Short    bool // leave out large sizes and do fewer rounds
	JSON     bool // print JSON instead of text
	Simulate bool // on simulated GPUs
	Seed     uint64
	Weak     bool
}

// Verification is what verify finds out; its JSON form is what --json prints.
type Verification struct {
	Ranks int `json:"ranks"`
	// Simulated says that there were no GPUs: they were simulated, from this seed.
	Simulated bool            `json:"simulated,omitempty"`
	Seed      uint64          `json:"seed,omitempty"`
	Weak      bool            `json:"weak,omitempty"` // with weak memory
	Backends  []BackendResult `json:"backends"`
	Summary   Summary         `json:"summary"`
}

// Summary counts cases.
type Summary struct {
	Passed  int `json:"passed"`
	Failed  int `json:"failed"`
	Skipped int `json:"skipped"`
}

// BackendResult is the result of the suite on one backend.
type BackendResult struct {
	Name    string         `json:"name"`
	Status  suite.Status   `json:"status"`           // skipped: the backend cannot be used here
	Reason  string         `json:"reason,omitempty"` // why it cannot be used, or what ended the run
	Results []suite.Result `json:"results"`
}

// runFailure is the name under which a run that could not go on counts as a failed case.
const runFailure = "run"

// Run starts the ranks, unless this process is a rank of a launcher's job, runs the suite on each backend in turn and prints the results, in a job
// on rank 0. flags are all flags of the command, the settings
// of the configuration among them. Run blocks until all ranks have ended. The error is an *exit.Error with status 1 if a case failed, 2
// after a mistake in the command line, and that of a shell after a signal.
func Run(ctx context.Context, p *process.Process, flags *pflag.FlagSet, o Options) error {
	if o.Weak && !o.Simulate {
		return exit.Usagef("--weak is of the simulated GPUs of --simulate")
	}
	if flags.Changed("seed") && !o.Simulate {
		return exit.Usagef("--seed is of the simulated GPUs of --simulate")
	}
	if o.Ranks < 1 || o.Ranks > launch.MaxRanks {
		return exit.Usagef("--ranks is %d; 1 to %d are allowed", o.Ranks, launch.MaxRanks)
	}
	cfg, err := settings.Load(flags, p.Environ)
	if err != nil {
		return err
	}
	var forRanks settings.Ranks
	if o.Simulate {
		err = simulatedSettings(cfg)
	} else {
		forRanks, err = settings.ForRanks("verify", flags, cfg)
	}
	if err != nil {
		return err
	}
	job, err := fleet.FindJob("verify", flags, p, cfg)
	switch {
	case err != nil:
		return err
	case o.Simulate && job != nil && job.Launch.WorldSize > 1:
		return exit.UsageError(errs.Advised("verify", "--simulate", true, "outside of jobs, since all its ranks are in one process",
			fmt.Sprintf("this is rank %d of %d (%s); start it without the launcher", job.Launch.Rank, job.Launch.WorldSize, job.Launch.Source)))
	case o.Simulate:
		return simulate(ctx, p, flags, o)
	case job != nil:
		o.Ranks, p = job.Launch.WorldSize, job.Quiet()
	}
	choice, err := fleet.Choose(o.Backends, flags.Changed("backend"), cfg)
	if err != nil {
		return err
	}
	var required []string
	if o.Require != "" {
		if required, err = fleet.Names("--require", o.Require); err != nil {
			return err
		}
	}
	// The device of a backend is known once the backend is open, but a filter that matches on no device is refused now.
	if _, err := chooseCases(o, "", device.Host, o.Ranks); err != nil {
		if _, onGPU := chooseCases(o, "", device.CUDA, o.Ranks); onGPU != nil {
			return err
		}
	}
	stall := fleet.StallTime(cfg, 3*suite.CaseTimeout) // two waits of a case are bounded by CaseTimeout, and one by Timeout
	r := runner{process: p, options: o, config: cfg, file: settings.File(flags), job: job}
	if job != nil {
		job.Stall = stall
		if err := job.Several(len(choice.Runs)); err != nil {
			return err
		}
	} else {
		if err := settings.HeardByRanks(flags, p.Environ, cfg); err != nil {
			return err
		}
		signals, stop := launch.CatchSignals()
		defer stop()
		r.fleet = &fleet.Fleet{
			Process: p, Command: RankCommand, Args: o.rankArgs(), Ranks: o.Ranks, Settings: forRanks, Signals: signals,
			Opening: fleet.OpeningTime(cfg), Stall: stall,
		}
	}
	v := Verification{Ranks: o.Ranks, Backends: []BackendResult{}}
	var interrupted os.Signal
	for i := 0; i < len(choice.Runs) && interrupted == nil; i++ {
		var b BackendResult
		b, interrupted, err = r.verify(ctx, choice.Runs[i])
		if err != nil {
			return err
		}
		must := slices.Contains(required, b.Name)
		if b.Status == suite.Skipped && (must || choice.Required) {
			b.fail("a required backend cannot be used: " + b.Reason)
		}
		v.Backends = append(v.Backends, b)
		if job != nil && b.broken() {
			// The ranks may be at different places, so they cannot go on to another backend.
			err := v.conclude(p, o, interrupted)
			switch {
			case job.Launch.Rank != 0:
				return job.Fail(b.Reason)
			case interrupted != nil:
				return err
			}
			return &exit.Error{Status: exit.Failure} // whatever else is
		}
		// A required backend that was not run, because auto took another, is run by name.
		if i == len(choice.Runs)-1 {
			for _, name := range required {
				if !slices.ContainsFunc(v.Backends, func(b BackendResult) bool { return b.Name == name }) {
					choice.Runs = append(choice.Runs, []string{name})
				}
			}
			if err := job.Several(len(choice.Runs)); err != nil {
				return err
			}
		}
	}
	return v.conclude(p, o, interrupted)
}

// conclude prints what was found, and makes it the command's status. interrupted is the signal that ended it, or nil.
func (v *Verification) conclude(p *process.Process, o Options, interrupted os.Signal) error {
	v.count()
	var err error
	if o.JSON {
		err = p.PrintJSON(*v)
	} else {
		err = v.write(p.Out, terminal.PainterFor(p.Out, p.Getenv))
	}
	switch {
	case err != nil:
		return err
	case interrupted != nil:
		return &exit.Error{Status: launch.SignalStatus(interrupted)}
	case v.Summary.Failed > 0:
		return &exit.Error{Status: exit.Failure}
	}
	return nil
}

// chooseCases returns the cases for a backend, a kind of device and a world size. Every rank finds the same.
func chooseCases(o Options, name string, kind device.Kind, ranks int) ([]suite.Case, error) {
	opts, err := o.suiteOptions(name, kind, ranks)
	if err != nil {
		return nil, err
	}
	cases := suite.Cases(opts)
	if len(cases) == 0 {
		return nil, exit.Usagef("--filter is %q, which no case matches", o.Filter)
	}
	return cases, nil
}

func (o *Options) suiteOptions(name string, kind device.Kind, ranks int) (*suite.Options, error) {
	opts := &suite.Options{Backend: name, Device: kind, World: ranks, Short: o.Short}
	if o.Filter != "" {
		filter, err := regexp.Compile(o.Filter)
		if err != nil {
			return nil, exit.Usagef("--filter: %w", err)
		}
		opts.Filter = filter
	}
	return opts, nil
}

func (o *Options) rankArgs() []string {
	return []string{"--filter=" + o.Filter, fmt.Sprintf("--short=%t", o.Short)}
}

// runner runs the suite on ranks that it starts, or as a rank of a job.
type runner struct {
	process *process.Process
	options Options
	config  config.Config
	file    string // of the configuration, that flags name
	fleet   *fleet.Fleet
	job     *fleet.Job // nil if fleet starts the ranks
}

// start runs the ranks, or this rank, on the first of the preferred backends that can be used.
func (r *runner) start(ctx context.Context, show *terminal.Progress, preferences []string, hear func(fleet.Message)) (*fleet.End, error) {
	if r.job != nil {
		return r.job.Run(ctx, preferences, hear, func(ctx context.Context, rank *symmem.Rank, rep *fleet.Reporter) error {
			return runSuite(ctx, rank, r.options, rep.Work)
		})
	}
	show.Say("starting %d ranks", r.fleet.Ranks)
	return r.fleet.Run(ctx, preferences, hear)
}

// verify runs the suite on one backend.
func (r *runner) verify(ctx context.Context, preferences []string) (result BackendResult, interrupted os.Signal, err error) {
	o := r.options
	b := BackendResult{Status: suite.Passed, Results: []suite.Result{}}
	switch why, interrupted := r.preflight(ctx, preferences); {
	case interrupted != nil:
		b.Name = preferences[0]
		b.fail("interrupted")
		return b, interrupted, nil
	case why != "":
		b.Name, b.Status, b.Reason = preferences[0], suite.Skipped, why
		return b, nil, nil
	}
	show := terminal.NewProgress(r.process.Err)
	name, opened := strings.Join(preferences, ","), false
	var cases []suite.Case
	end, err := r.start(ctx, show, preferences, func(m fleet.Message) {
		if m.Opened != "" {
			name, opened = m.Opened, true
			cases, _ = chooseCases(o, m.Opened, m.Device, o.Ranks) // the filter was tried before
		}
		var res suite.Result
		if len(m.Work) > 0 && json.Unmarshal(m.Work, &res) == nil { // a result that is missing fails below
			b.Results = append(b.Results, res)
			if res.Status == suite.Failed {
				b.Status = suite.Failed
			}
		}
		if n := len(b.Results); n < len(cases) {
			show.Show(name, n, len(cases), cases[n].Name)
		}
	})
	show.Clear()
	if err != nil {
		return b, nil, err
	}
	b.Name = end.Backend
	switch {
	case end.Interrupted != nil:
		b.fail("interrupted")
	case end.Failure != "":
		where := ""
		if n := len(b.Results); n < len(cases) && opened {
			where = " in " + cases[n].Name
		}
		b.fail(end.Failure + where)
	case end.Refused != "":
		b.Status, b.Reason = suite.Skipped, end.Refused
	case len(b.Results) != len(cases):
		b.fail(fmt.Sprintf("%d of %d cases were run", len(b.Results), len(cases)))
	}
	return b, end.Interrupted, nil
}

// preflight tries a backend whose library may end its process, in a process of its own, before ranks are started. It returns why the
// backend cannot be used, or "", and the signal that ended it, or nil. In a job it tries nothing, since the ranks might come to know different things.
func (r *runner) preflight(ctx context.Context, preferences []string) (why string, interrupted os.Signal) {
	if len(preferences) != 1 || r.job != nil {
		return "", nil
	}
	f, err := backend.Lookup(preferences[0])
	if _, ends := f.(backend.Preflighter); err != nil || !ends {
		return "", nil // auto, or a backend that ends no process
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	found := make(chan probe.Finding, 1)
	go func() { found <- probe.Apart(ctx, probe.With(r.process, r.file, r.config), preferences[0]) }()
	for {
		select {
		case b := <-found:
			if !b.Available {
				return b.Reason, nil
			}
			return "", nil
		case sig := <-r.fleet.Signals:
			if launch.AsksToEnd(sig) {
				cancel()
				<-found
				return "", sig
			}
		}
	}
}

// Rank is one rank of verify. All ranks run the same cases, and rank 0 reports each result on the descriptor fd. It blocks until all
// cases have been run.
func Rank(ctx context.Context, p *process.Process, flags *pflag.FlagSet, fd int, o Options) error {
	return fleet.Rank(ctx, p, flags, fd, nil, func(ctx context.Context, r *symmem.Rank, rep *fleet.Reporter) error {
		return runSuite(ctx, r, o, func(found any) error {
			if r.Rank() != 0 {
				return nil
			}
			return rep.Work(found)
		})
	})
}

// runSuite runs the cases on this rank. tell is called with each suite.Result, which is the same on every rank.
func runSuite(ctx context.Context, r *symmem.Rank, o Options, tell func(found any) error) error {
	cases, err := chooseCases(o, r.Backend(), r.Device().Kind(), r.WorldSize())
	if err != nil {
		return err
	}
	var lost error
	_, err = suite.Run(ctx, r, slices.Values(cases), &suite.Options{Short: o.Short}, func(res suite.Result) {
		if lost == nil {
			lost = tell(res)
		}
	})
	if err != nil {
		return err
	}
	return lost
}
