package verify

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"

	"github.com/spf13/pflag"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/cmd/symmem/internal/exit"
	"github.com/symmem/symmem/cmd/symmem/internal/fleet"
	"github.com/symmem/symmem/cmd/symmem/internal/launch"
	"github.com/symmem/symmem/cmd/symmem/internal/process"
	"github.com/symmem/symmem/cmd/symmem/internal/settings"
	"github.com/symmem/symmem/cmd/symmem/internal/terminal"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/tests/suite"
)

// Simulator makes simulated GPUs.
type Simulator interface {
	// Backends are the names of the backends that work on them, the one that auto takes first.
	Backends() []string
	// Start makes a GPU for each rank, for one of the backends. multicast is the setting of that name. weak gives them weak memory, which is for the first backend
	// alone.
	Start(backend string, ranks int, seed uint64, multicast string, weak bool) (Simulation, error)
}

// Simulation is some simulated GPUs.
type Simulation struct {
	Options any          // of the backend
	Err     func() error // what was used in a way that a real driver does not survive, or was not given back
}

// simulator is that of this program; nil if it has none.
var simulator Simulator

// SetSimulator gives this program simulated GPUs. A package's init calls it.
func SetSimulator(s Simulator) { simulator = s }

// simulatedKeys are the settings that simulated GPUs and their ranks have.
var simulatedKeys = []string{"multicast", "timeout", "kernel-timeout", "channels", "max-blocks", "log-level"}

// simulatedSettings refuses the settings that were given as flags and would do nothing.
func simulatedSettings(cfg config.Config) error {
	for _, key := range config.Keys() {
		if cfg.Source(key.Name).Flag != "" && !slices.Contains(simulatedKeys, key.Name) {
			return exit.Usagef("--%s is not for --simulate, which has of the settings %s", key.Name, strings.Join(simulatedKeys, ", "))
		}
	}
	return nil
}

// simulate runs the suite on simulated GPUs, with ranks that are goroutines of this process.
func simulate(ctx context.Context, p *process.Process, flags *pflag.FlagSet, o Options) error {
	if simulator == nil {
		return exit.Usagef("--simulate: this program has no simulated GPUs; the command symmem has")
	}
	names, err := simulated(flags.Changed("backend"), o.Backends)
	if err == nil && o.Weak {
		err = weakOn(names)
	}
	if err != nil {
		return err
	}
	if o.Require != "" {
		return exit.Usagef("--require is %s; not allowed with --simulate, which needs nothing", o.Require)
	}
	o.Short = true
	runs := make([]simulatedRun, len(names))
	some := false
	for i, name := range names {
		opts, err := o.suiteOptions(name, device.CUDA, o.Ranks)
		if err != nil {
			return err
		}
		opts.Simulated = true
		runs[i] = simulatedRun{name, opts, suite.Cases(opts)}
		some = some || len(runs[i].cases) > 0
	}
	if !some {
		return exit.Usagef("--filter is %q, which no case matches", o.Filter)
	}
	cfg, err := settings.Load(flags, p.Environ)
	if err != nil {
		return err
	}
	// A variable that keeps real switches from being used says nothing about simulated ones.
	if !flags.Changed("multicast") {
		cfg.Multicast = config.MulticastOn
	}
	if o.Ranks == 1 {
		cfg.Multicast = config.MulticastOff
	}

	signals, stop := launch.CatchSignals()
	defer stop()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	v := Verification{Ranks: o.Ranks, Simulated: true, Seed: o.Seed, Weak: o.Weak}
	var interrupted os.Signal
	for i := 0; i < len(runs) && interrupted == nil; i++ {
		var b BackendResult
		b, interrupted = runs[i].verify(ctx, p, cfg, o, signals)
		v.Backends = append(v.Backends, b)
	}
	return v.conclude(p, o, interrupted)
}

// simulated says which backends are run on simulated GPUs.
func simulated(given bool, text string) ([]string, error) {
	all := simulator.Backends()
	switch {
	case !given || text == config.BackendAuto:
		return all[:1], nil
	case text == fleet.All:
		return all, nil
	}
	names, err := fleet.Names("--backend", text, config.BackendAuto, fleet.All)
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		if !slices.Contains(all, name) {
			return nil, exit.UsageError(errs.Advised("verify", "--backend", text, strings.Join(all, ", ")+", auto and all with --simulate",
				name+" is not simulated, or not in a list; leave it out, or run it without --simulate"))
		}
	}
	return names, nil
}

// weakOn fails if there is a backend without weak memory.
func weakOn(names []string) error {
	able := simulator.Backends()[0]
	for _, name := range names {
		if name != able {
			return exit.UsageError(errs.Advised("verify", "--backend", name, able+" and auto with --weak", "what libraries do has no weak memory; leave out one of the two"))
		}
	}
	return nil
}

// simulatedRun is the suite on one backend.
type simulatedRun struct {
	name  string
	opts  *suite.Options
	cases []suite.Case
}

// verify runs it.
func (run *simulatedRun) verify(ctx context.Context, p *process.Process, cfg config.Config, o Options, signals <-chan os.Signal) (b BackendResult, interrupted os.Signal) {
	b = BackendResult{Name: run.name, Status: suite.Passed, Results: []suite.Result{}}
	cases := run.cases
	ended := make(chan error, 1)
	results := make(chan suite.Result)
	go func() { ended <- run.start(ctx, p, cfg, o, func(r suite.Result) { results <- r }) }()
	show := terminal.NewProgress(p.Err)
	defer show.Clear()
	show.Say("simulating %d GPUs", o.Ranks)
	for done := false; !done; {
		select {
		case r := <-results:
			if b.Results = append(b.Results, r); r.Status == suite.Failed {
				b.Status = suite.Failed
			}
			if n := len(b.Results); n < len(cases) {
				show.Show(run.name+", simulated", n, len(cases), cases[n].Name)
			}
		case interrupted = <-signals:
			b.fail("interrupted")
			done = true // the goroutines end with the process
		case err := <-ended:
			if err != nil {
				b.fail(err.Error())
			}
			done = true
		}
	}
	return b, interrupted
}

// start opens the ranks, runs the cases and closes the ranks. report is called with each result.
func (run *simulatedRun) start(ctx context.Context, p *process.Process, own config.Config, o Options, report func(suite.Result)) error {
	s, err := simulator.Start(run.name, o.Ranks, o.Seed, own.Multicast, o.Weak)
	if err != nil {
		return err
	}
	cfg := config.Default()
	cfg.Backend, cfg.Multicast = []string{run.name}, own.Multicast
	cfg.KernelTimeout, cfg.Timeout, cfg.LogLevel, cfg.Channels, cfg.MaxBlocks = own.KernelTimeout, own.Timeout, own.LogLevel, own.Channels, own.MaxBlocks
	cfg.RankOrder = own.RankOrder
	ranks, err := symmem.OpenLocal(ctx, o.Ranks, cfg, &symmem.Options{Backend: s.Options, Environ: func() []string { return p.Environ }})
	if err != nil {
		return err
	}
	failed := make([]error, len(ranks))
	var wg sync.WaitGroup
	for i, r := range ranks {
		wg.Go(func() {
			tell := report
			if i > 0 {
				tell = nil
			}
			_, err := suite.Run(ctx, r, slices.Values(run.cases), run.opts, tell)
			if err = errors.Join(err, r.Close(ctx)); err != nil {
				failed[i] = fmt.Errorf("rank %d: %w", i, err)
			}
		})
	}
	wg.Wait()
	return errors.Join(append(failed, s.Err())...)
}
