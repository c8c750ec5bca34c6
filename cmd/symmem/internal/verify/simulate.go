package verify

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"

	"github.com/spf13/pflag"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/cmd/symmem/internal/exit"
	"github.com/symmem/symmem/cmd/symmem/internal/launch"
	"github.com/symmem/symmem/cmd/symmem/internal/process"
	"github.com/symmem/symmem/cmd/symmem/internal/settings"
	"github.com/symmem/symmem/cmd/symmem/internal/terminal"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/tests/suite"
)

// Simulator makes simulated GPUs.
type Simulator interface {
	// Backend is the name of the backend that works on them.
	Backend() string
	// Start makes a GPU for each rank. multicast is the setting of that name.
	Start(ranks int, seed uint64, multicast string) (Simulation, error)
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

// simulate runs the suite on simulated GPUs, with ranks that are goroutines of this process.
func simulate(ctx context.Context, p *process.Process, flags *pflag.FlagSet, o Options) error {
	if simulator == nil {
		return exit.Usagef("--simulate: this program has no simulated GPUs; the command symmem has")
	}
	name := simulator.Backend()
	if flags.Changed("backend") && o.Backends != name && o.Backends != config.BackendAuto {
		return exit.Usagef("--backend is %s; with --simulate only %s is allowed", o.Backends, name)
	}
	if o.Require != "" {
		return exit.Usagef("--require is %s; not allowed with --simulate, which needs nothing", o.Require)
	}
	o.Short = true
	opts, err := o.suiteOptions(name, device.CUDA, o.Ranks)
	if err != nil {
		return err
	}
	opts.Simulated = true
	cases := suite.Cases(opts)
	if len(cases) == 0 {
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
	b := BackendResult{Name: name, Status: suite.Passed, Results: []suite.Result{}}
	ended := make(chan error, 1)
	results := make(chan suite.Result)
	go func() { ended <- onSimulated(ctx, p, cfg, o, opts, cases, func(r suite.Result) { results <- r }) }()
	show := terminal.NewProgress(p.Err)
	show.Say("simulating %d GPUs", o.Ranks)
	var interrupted os.Signal
	for done := false; !done; {
		select {
		case r := <-results:
			if b.Results = append(b.Results, r); r.Status == suite.Failed {
				b.Status = suite.Failed
			}
			if n := len(b.Results); n < len(cases) {
				show.Show(name+", simulated", n, len(cases), cases[n].Name)
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
	show.Clear()
	v := Verification{Ranks: o.Ranks, Simulated: true, Seed: o.Seed, Backends: []BackendResult{b}}
	return v.conclude(p, o, interrupted)
}

// onSimulated opens the ranks, runs the cases and closes the ranks. report is called with each result.
func onSimulated(ctx context.Context, p *process.Process, own config.Config, o Options, opts *suite.Options, cases []suite.Case, report func(suite.Result)) error {
	s, err := simulator.Start(o.Ranks, o.Seed, own.Multicast)
	if err != nil {
		return err
	}
	cfg := config.Default()
	cfg.Backend, cfg.Multicast = []string{simulator.Backend()}, own.Multicast
	cfg.KernelTimeout, cfg.Timeout, cfg.LogLevel, cfg.Channels, cfg.MaxBlocks = own.KernelTimeout, own.Timeout, own.LogLevel, own.Channels, own.MaxBlocks
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
			_, err := suite.Run(ctx, r, slices.Values(cases), opts, tell)
			if err = errors.Join(err, r.Close(ctx)); err != nil {
				failed[i] = fmt.Errorf("rank %d: %w", i, err)
			}
		})
	}
	wg.Wait()
	return errors.Join(append(failed, s.Err())...)
}
