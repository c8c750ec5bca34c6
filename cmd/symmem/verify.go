package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/tests/suite"
)

// verifyOptions are the flags of verify.
type verifyOptions struct {
	backends, filter, require string
	ranks                     int
	short, json               bool
}

// verification is what verify finds out; its JSON form is what --json prints.
type verification struct {
	Ranks    int             `json:"ranks"`
	Backends []backendResult `json:"backends"`
	Summary  verifySummary   `json:"summary"`
}

type verifySummary struct {
	Passed  int `json:"passed"`
	Failed  int `json:"failed"`
	Skipped int `json:"skipped"`
}

// backendResult is the suite on one backend.
type backendResult struct {
	Name    string         `json:"name"`
	Status  suite.Status   `json:"status"`           // skipped: the backend cannot be used here
	Reason  string         `json:"reason,omitempty"` // why it cannot be used, or what ended the run
	Results []suite.Result `json:"results"`
}

// runFailure is the name under which a run that could not go on counts as a failed case.
const runFailure = "run"

func (a *app) verifyCommand() *cobra.Command {
	var o verifyOptions
	cmd := &cobra.Command{
		Use:   "verify",
		Short: "Run the correctness suite on this machine",
		Long: `Verify starts ranks on this machine and runs the correctness suite on one backend, or on several in turn. A rank that dies
or hangs is a failure that names it. The last line is the count of cases that passed, failed and were skipped; a backend of
"all" that cannot be used counts as one skipped case. A backend that was asked for by name, or with --require, must be there.

The exit status is 1 if anything failed.`,
		Example: "  symmem verify --backend all --require host -n 4",
		Args:    noArgs,
	}
	cmd.RunE = failing(func(cmd *cobra.Command, _ []string) error { return a.verify(cmd, o) })
	flags := cmd.Flags()
	flags.StringVar(&o.backends, "backend", config.BackendAuto,
		"names with commas between them, each in turn; auto takes the best that works, all takes every one")
	flags.IntVarP(&o.ranks, "ranks", "n", 4, fmt.Sprintf("number of ranks, 1 to %d", maxRanks))
	flags.StringVar(&o.filter, "filter", "", "regular expression that the names of the cases must match")
	flags.StringVar(&o.require, "require", "", "names of backends that must be there, with commas between them")
	flags.BoolVar(&o.short, "short", false, "leave out large sizes and do fewer rounds")
	flags.BoolVar(&o.json, "json", false, jsonUsage)
	addRankFlags(flags)
	return cmd
}

func (a *app) verify(cmd *cobra.Command, o verifyOptions) error {
	choice, err := chooseBackends(o.backends, cmd.Flags().Changed("backend"))
	if err != nil {
		return err
	}
	var required []string
	if o.require != "" {
		if required, err = backendNames("--require", o.require); err != nil {
			return err
		}
	}
	// Which device a backend has is known once it is open; a filter that matches on none is refused now.
	if _, err := chooseCases(o, "", device.Host, o.ranks); err != nil {
		if _, onGPU := chooseCases(o, "", device.CUDA, o.ranks); onGPU != nil {
			return err
		}
	}
	if o.ranks < 1 || o.ranks > maxRanks {
		return usagef("--ranks is %d; 1 to %d are allowed", o.ranks, maxRanks)
	}
	cfg, err := a.load(cmd)
	if err != nil {
		return err
	}
	settings, err := settingsForRanks(cmd, cfg)
	if err != nil {
		return err
	}

	signals, stop := catch()
	defer stop()
	f := &fleet{
		app: a, command: verifyRank, args: o.rankArgs(), ranks: o.ranks, settings: settings, signals: signals,
		opening: openingTime(cfg),
		stall:   3*suite.CaseTimeout + cfg.Timeout, // two waits of a case are bounded by CaseTimeout, and one by Timeout
	}
	v := verification{Ranks: o.ranks, Backends: []backendResult{}}
	var interrupted os.Signal
	for i := 0; i < len(choice.runs) && interrupted == nil; i++ {
		var b backendResult
		b, interrupted, err = a.verifyBackend(cmd.Context(), f, choice.runs[i], o)
		if err != nil {
			return err
		}
		must := slices.Contains(required, b.Name)
		if b.Status == suite.Skipped && (must || choice.required) {
			b.fail("a required backend cannot be used: " + b.Reason)
		}
		v.Backends = append(v.Backends, b)
		// What is required and was not run yet, because auto took another, is run by name.
		if i == len(choice.runs)-1 {
			for _, name := range required {
				if !slices.ContainsFunc(v.Backends, func(b backendResult) bool { return b.Name == name }) {
					choice.runs = append(choice.runs, []string{name})
				}
			}
		}
	}
	v.count()
	if o.json {
		err = writeJSON(a.out, v)
	} else {
		err = v.write(a.out, a.painterFor(a.out))
	}
	switch {
	case err != nil:
		return err
	case interrupted != nil:
		return &exitError{status: 128 + signalNumber(interrupted)}
	case v.Summary.Failed > 0:
		return &exitError{status: exitFailure}
	}
	return nil
}

// chooseCases gives the cases for a backend, its kind of device and a world size, the same that each rank finds.
func chooseCases(o verifyOptions, name string, kind device.Kind, ranks int) ([]suite.Case, error) {
	opts, err := o.suiteOptions(name, kind, ranks)
	if err != nil {
		return nil, err
	}
	cases := suite.Cases(opts)
	if len(cases) == 0 {
		return nil, usagef("--filter is %q, which no case matches", o.filter)
	}
	return cases, nil
}

func (o *verifyOptions) suiteOptions(name string, kind device.Kind, ranks int) (*suite.Options, error) {
	opts := &suite.Options{Backend: name, Device: kind, World: ranks, Short: o.short}
	if o.filter != "" {
		filter, err := regexp.Compile(o.filter)
		if err != nil {
			return nil, usagef("--filter: %w", err)
		}
		opts.Filter = filter
	}
	return opts, nil
}

func (o *verifyOptions) rankArgs() []string {
	return []string{"--filter=" + o.filter, fmt.Sprintf("--short=%t", o.short)}
}

// verifyBackend runs the suite on one backend.
func (a *app) verifyBackend(
	ctx context.Context, f *fleet, preferences []string, o verifyOptions,
) (result backendResult, interrupted os.Signal, err error) {
	b := backendResult{Status: suite.Passed, Results: []suite.Result{}}
	if why := a.preflight(ctx, preferences); why != "" {
		b.Name, b.Status, b.Reason = preferences[0], suite.Skipped, why
		return b, nil, nil
	}
	show := newProgress(a.err)
	show.say("starting %d ranks", f.ranks)
	name, opened := strings.Join(preferences, ","), false
	var cases []suite.Case
	end, err := f.run(ctx, preferences, func(m message) {
		if m.Opened != "" {
			name, opened = m.Opened, true
			cases, _ = chooseCases(o, m.Opened, m.Device, f.ranks) // the filter was tried before
		}
		if m.Result != nil {
			b.Results = append(b.Results, *m.Result)
			if m.Result.Status == suite.Failed {
				b.Status = suite.Failed
			}
		}
		if n := len(b.Results); n < len(cases) {
			show.show(name, n, len(cases), cases[n].Name)
		}
	})
	show.clear()
	if err != nil {
		return b, nil, err
	}
	b.Name = end.backend
	switch {
	case end.interrupted != nil:
		b.fail("interrupted")
	case end.failure != "":
		where := ""
		if n := len(b.Results); n < len(cases) && opened {
			where = " in " + cases[n].Name
		}
		b.fail(end.failure + where)
	case end.refused != "":
		b.Status, b.Reason = suite.Skipped, end.refused
	case len(b.Results) != len(cases):
		b.fail(fmt.Sprintf("%d of %d cases were run", len(b.Results), len(cases)))
	}
	return b, end.interrupted, nil
}

// fail notes that the run itself failed, as one failed case more.
func (b *backendResult) fail(reason string) {
	b.Status, b.Reason = suite.Failed, reason
	b.Results = append(b.Results, suite.Result{Case: runFailure, Status: suite.Failed, Reason: reason})
}

// count sums up. A backend that cannot be used is one skipped case.
func (v *verification) count() {
	var sum suite.Summary
	for _, b := range v.Backends {
		if b.Status == suite.Skipped {
			sum.Skipped++
		}
		for _, r := range b.Results {
			sum.Add(r)
		}
	}
	v.Summary = verifySummary{Passed: sum.Passed, Failed: sum.Failed, Skipped: sum.Skipped}
}

// write prints a row for each backend and group of cases, with why some were skipped, then what failed, then the line with the sums.
func (v *verification) write(w io.Writer, paint painter) error {
	var table bytes.Buffer
	t := tabwriter.NewWriter(&table, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "backend\tcases\tpassed\tfailed\tskipped\ttime\twhy skipped")
	failed := []bool{false} // by line
	row := func(bad bool, format string, args ...any) {
		fmt.Fprintf(t, format+"\n", args...)
		failed = append(failed, bad)
	}
	for _, b := range v.Backends {
		if b.Status == suite.Skipped {
			row(false, "%s\tnone\t0\t0\t1\t\t%s", b.Name, oneLine(b.Reason))
			continue
		}
		for _, g := range b.groups() {
			why := append(g.reasons(), "")
			row(g.sum.Failed > 0, "%s\t%s\t%d\t%d\t%d\t%.1fs\t%s", b.Name, g.name, g.sum.Passed, g.sum.Failed, g.sum.Skipped, g.took.Seconds(), why[0])
			for _, more := range why[1:max(len(why)-1, 1)] {
				row(false, "\t\t\t\t\t\t%s", more)
			}
		}
	}
	if err := t.Flush(); err != nil {
		return err
	}
	var out bytes.Buffer
	line := 0
	for text := range strings.Lines(table.String()) {
		text = strings.TrimRight(text, " \n")
		if failed[line] {
			text = paint.bad(text)
		}
		fmt.Fprintln(&out, text)
		line++
	}
	for _, b := range v.Backends {
		for _, r := range b.Results {
			if r.Status == suite.Failed {
				fmt.Fprintf(&out, "\n%s %s: %s: %s\n", paint.bad("failed:"), b.Name, r.Case, r.Reason)
			}
		}
	}
	sums := suite.Summary(v.Summary).String()
	if v.Summary.Failed > 0 {
		sums = paint.bad(sums)
	} else {
		sums = paint.good(sums)
	}
	fmt.Fprintf(&out, "\n%s\n", sums)
	_, err := out.WriteTo(w)
	return err
}

// groupResult is what became of the cases of one group.
type groupResult struct {
	name    string
	sum     suite.Summary
	took    time.Duration
	skipped map[string]int // by reason
}

// groups gives the groups in the order in which they were run.
func (b *backendResult) groups() []*groupResult {
	var all []*groupResult
	for _, r := range b.Results {
		name := suite.Case{Name: r.Case}.Group()
		i := slices.IndexFunc(all, func(g *groupResult) bool { return g.name == name })
		if i < 0 {
			i, all = len(all), append(all, &groupResult{name: name, skipped: map[string]int{}})
		}
		all[i].sum.Add(r)
		all[i].took += r.Took
		if r.Status == suite.Skipped {
			all[i].skipped[r.Reason]++
		}
	}
	return all
}

// reasons says why cases were skipped, the reason of most first, and of how many, unless it is that of all.
func (g *groupResult) reasons() []string {
	reasons := slices.Sorted(maps.Keys(g.skipped))
	slices.SortStableFunc(reasons, func(a, b string) int { return g.skipped[b] - g.skipped[a] })
	for i, why := range reasons {
		reasons[i] = oneLine(why)
		if len(reasons) > 1 {
			reasons[i] = fmt.Sprintf("%d: %s", g.skipped[why], oneLine(why))
		}
	}
	return reasons
}

// verifyRank is the hidden command that a rank of verify runs.
const verifyRank = "verify-rank"

func (a *app) verifyRankCommand() *cobra.Command {
	var o verifyOptions
	fd := -1
	cmd := &cobra.Command{Use: verifyRank, Short: "Be one rank of verify", Hidden: true, Args: noArgs}
	cmd.RunE = failing(func(cmd *cobra.Command, _ []string) error {
		return a.rankMain(cmd, fd, func(ctx context.Context, r *symmem.Rank, rep *reporter) error {
			cases, err := chooseCases(o, r.Backend(), r.Device().Kind(), r.WorldSize())
			if err != nil {
				return err
			}
			var lost error
			_, err = suite.Run(ctx, r, cases, &suite.Options{Short: o.short}, func(res suite.Result) {
				if r.Rank() == 0 && lost == nil {
					lost = rep.tell(message{Result: &res})
				}
			})
			if err != nil {
				return err
			}
			return lost
		})
	})
	cmd.Flags().StringVar(&o.filter, "filter", "", "regular expression that the names of the cases must match")
	cmd.Flags().BoolVar(&o.short, "short", false, "leave out large sizes and do fewer rounds")
	cmd.Flags().IntVar(&fd, "report-fd", fd, "descriptor of the pipe to report to")
	return cmd
}

// preflight tries a backend whose library may end the process that it is started in, in a process of its own, before ranks are started
// over it. It says why the backend cannot be used, or "".
func (a *app) preflight(ctx context.Context, preferences []string) string {
	if len(preferences) != 1 {
		return ""
	}
	f, err := backend.Lookup(preferences[0])
	if _, ends := f.(backend.Preflighter); err != nil || !ends {
		return "" // auto, or a backend that ends no process
	}
	if b := a.probeApart(ctx, preferences[0]); !b.Available {
		return b.Reason
	}
	return ""
}
