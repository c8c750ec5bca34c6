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
	"github.com/symmem/symmem/device"
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
}

// Verification is what verify finds out; its JSON form is what --json prints.
type Verification struct {
	Ranks int `json:"ranks"`
	// Simulated says that there were no GPUs: they were simulated, from this seed.
	Simulated bool            `json:"simulated,omitempty"`
	Seed      uint64          `json:"seed,omitempty"`
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

// Run starts the ranks, runs the suite on each backend in turn and prints the results. flags are all flags of the command, the settings
// of the configuration among them. Run blocks until all ranks have ended. The error is an *exit.Error with status 1 if a case failed, 2
// after a mistake in the command line, and that of a shell after a signal.
func Run(ctx context.Context, p *process.Process, flags *pflag.FlagSet, o Options) error {
	if flags.Changed("seed") && !o.Simulate {
		return exit.Usagef("--seed is of the simulated GPUs of --simulate")
	}
	if o.Ranks < 1 || o.Ranks > launch.MaxRanks {
		return exit.Usagef("--ranks is %d; 1 to %d are allowed", o.Ranks, launch.MaxRanks)
	}
	if o.Simulate {
		return simulate(ctx, p, flags, o)
	}
	choice, err := fleet.Choose(o.Backends, flags.Changed("backend"))
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
	cfg, err := settings.Load(flags, p.Environ)
	if err != nil {
		return err
	}
	forRanks, err := settings.ForRanks("verify", flags, cfg)
	if err != nil {
		return err
	}

	signals, stop := launch.CatchSignals()
	defer stop()
	f := &fleet.Fleet{
		Process: p, Command: RankCommand, Args: o.rankArgs(), Ranks: o.Ranks, Settings: forRanks, Signals: signals,
		Opening: fleet.OpeningTime(cfg),
		Stall:   3*suite.CaseTimeout + cfg.Timeout, // two waits of a case are bounded by CaseTimeout, and one by Timeout
	}
	v := Verification{Ranks: o.Ranks, Backends: []BackendResult{}}
	var interrupted os.Signal
	for i := 0; i < len(choice.Runs) && interrupted == nil; i++ {
		var b BackendResult
		b, interrupted, err = verifyBackend(ctx, f, choice.Runs[i], o)
		if err != nil {
			return err
		}
		must := slices.Contains(required, b.Name)
		if b.Status == suite.Skipped && (must || choice.Required) {
			b.fail("a required backend cannot be used: " + b.Reason)
		}
		v.Backends = append(v.Backends, b)
		// A required backend that was not run, because auto took another, is run by name.
		if i == len(choice.Runs)-1 {
			for _, name := range required {
				if !slices.ContainsFunc(v.Backends, func(b BackendResult) bool { return b.Name == name }) {
					choice.Runs = append(choice.Runs, []string{name})
				}
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

// verifyBackend runs the suite on one backend.
func verifyBackend(
	ctx context.Context, f *fleet.Fleet, preferences []string, o Options,
) (result BackendResult, interrupted os.Signal, err error) {
	b := BackendResult{Status: suite.Passed, Results: []suite.Result{}}
	if why := preflight(ctx, f.Process, preferences); why != "" {
		b.Name, b.Status, b.Reason = preferences[0], suite.Skipped, why
		return b, nil, nil
	}
	show := terminal.NewProgress(f.Process.Err)
	show.Say("starting %d ranks", f.Ranks)
	name, opened := strings.Join(preferences, ","), false
	var cases []suite.Case
	end, err := f.Run(ctx, preferences, func(m fleet.Message) {
		if m.Opened != "" {
			name, opened = m.Opened, true
			cases, _ = chooseCases(o, m.Opened, m.Device, f.Ranks) // the filter was tried before
		}
		var r suite.Result
		if len(m.Work) > 0 && json.Unmarshal(m.Work, &r) == nil { // a result that is missing fails below
			b.Results = append(b.Results, r)
			if r.Status == suite.Failed {
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
// backend cannot be used, or "".
func preflight(ctx context.Context, p *process.Process, preferences []string) string {
	if len(preferences) != 1 {
		return ""
	}
	f, err := backend.Lookup(preferences[0])
	if _, ends := f.(backend.Preflighter); err != nil || !ends {
		return "" // auto, or a backend that ends no process
	}
	if b := probe.Apart(ctx, p, preferences[0]); !b.Available {
		return b.Reason
	}
	return ""
}

// Rank is one rank of verify. All ranks run the same cases, and rank 0 reports each result on the descriptor fd. It blocks until all
// cases have been run.
func Rank(ctx context.Context, p *process.Process, flags *pflag.FlagSet, fd int, o Options) error {
	return fleet.Rank(ctx, p, flags, fd, func(ctx context.Context, r *symmem.Rank, rep *fleet.Reporter) error {
		cases, err := chooseCases(o, r.Backend(), r.Device().Kind(), r.WorldSize())
		if err != nil {
			return err
		}
		var lost error
		_, err = suite.Run(ctx, r, slices.Values(cases), &suite.Options{Short: o.Short}, func(res suite.Result) {
			if r.Rank() == 0 && lost == nil {
				lost = rep.Work(res)
			}
		})
		if err != nil {
			return err
		}
		return lost
	})
}
