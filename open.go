package symmem

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/symmem/symmem/backend"
	_ "github.com/symmem/symmem/backend/host" // the backend that needs nothing
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/options"
	"github.com/symmem/symmem/memory"
)

// Options are the arguments of Open that are not settings. Nil or zero values mean the defaults.
type Options struct {
	// Logger takes events: which backend was chosen, each registration with address, bytes and time, leaks. Default: none are
	// logged, unless the configuration has a log level; then they go to the standard error as text.
	Logger *slog.Logger
	// Environ returns the environment as "NAME=value"; of two entries of one name the last counts. It is asked for the variables of the
	// launcher and of native libraries, and where the Config is zero for those of the settings and of backends' options. Default: os.Environ.
	Environ func() []string
	// Backend, unless nil, are options of one backend in that backend's own type, for what no setting can say:
	//
	//	&nccl.Options{Comm: comm} // a communicator of the program's own
	//
	// Only the backend that takes the type can be opened then. Open returns ErrUnavailable if the setting backend leaves that backend out, and
	// ErrInvalid if no backend of the program takes the type. What is set in them takes precedence over the settings, for what the backend
	// and its device do: a KernelTimeout there is not that of signals and plans, which is the setting. A sub-group uses them too,
	// except for the device and for what belongs to the whole group, such as a communicator.
	Backend any
	// BootID, if set, makes this rank appear to be on another machine, for tests of what cannot be shared between hosts.
	BootID string
}

// getenv returns the value of a variable, "" if it is not set.
func (o *Options) getenv() func(string) string {
	if o.Environ == nil {
		return os.Getenv
	}
	vars := map[string]string{}
	for _, entry := range o.Environ() {
		name, value, _ := strings.Cut(entry, "=")
		vars[name] = value
	}
	return func(name string) string { return vars[name] }
}

func (o *Options) logger(cfg config.Config) *slog.Logger {
	if o.Logger != nil {
		return o.Logger
	}
	if level, ok := cfg.Level(); ok {
		return slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level}))
	}
	return slog.New(slog.DiscardHandler)
}

// Open joins this process to its group as one rank, and opens a device and a backend for it. The ranks pick the first backend of the setting backend
// that all of them can use. Collective: it blocks until all ranks have come, at most until ctx ends or for the setting timeout. Either every rank
// gets its Rank, or Open fails on all. Close the Rank.
//
// # Settings
//
// The zero Config stands for what the user of the program has set: the SYMMEM_* variables, then symmem.yaml or the file that SYMMEM_CONFIG names,
// then the defaults, as [config.Load] finds them. Load them yourself to add flags or values of the program. With any other Config, which comes from
// config.Load, config.FromViper or config.Default, each setting and each option of a backend is what cfg says, and neither a variable nor a file is
// read for it. Only the file of a native library still comes from its variable where Config.BackendOptions does not name it, because it belongs to
// the machine ([config.Config.Resolve]). A Config of which only some fields were set is refused.
//
// # The place of this process
//
// The launcher knows which rank this process is, whichever Config is given. Each of Rank, WorldSize, LocalRank, LocalWorldSize, Launcher,
// RendezvousAddr, Job and Restart that cfg leaves open (-1, 0 or "") comes from its variable (SYMMEM_RANK and so on) or else from torchrun, mpirun,
// srun, or what else has started this process: see [group.DetectLaunch]. If RendezvousAddr is left open, so are the Token ("", then SYMMEM_TOKEN),
// RendezvousServed (false, then SYMMEM_RENDEZVOUS_SERVED) and RendezvousFD (-1, then SYMMEM_RENDEZVOUS_FD), which belong to it. A process that nothing has started is a world of one rank. Several ranks on one
// host need no token; ranks on several hosts need one.
//
// A rank is in an attempt of a job once. Where rank 0 serves the rendezvous the ranks may all close and open again, but for a RendezvousFD, which the first Open takes; as another world
// and as the next attempt too, as they may where a service of any number of jobs does. Where a service of one job does, as that of symmem run, what has left is a group.RefusedError, as is another attempt: it takes
// a service of that attempt, which the setting restart counts.
//
// # Errors
//
// ErrInvalid: settings, variables, or a file with unknown or bad values; all of them are in the error, each with what is allowed; a table of the setting
// tuning that is for other devices or numbers of ranks. fs.ErrNotExist: a
// file that was asked for is not there. group.ConnectError, group.RefusedError, group.MissingRanksError: the ranks did not meet. ErrMismatch: they do
// not ask for the same thing. ErrUnavailable, with a backend.RefusedError: no backend can be used.
func Open(ctx context.Context, cfg config.Config, opts *Options) (*Rank, error) {
	if err := errs.Given("Open", "ctx", ctx, "a context"); err != nil {
		return nil, err
	}
	if opts == nil {
		opts = &Options{}
	}
	cfg, err := cfg.Resolve(opts.Environ)
	if err != nil {
		return nil, fmt.Errorf("opening symmetric memory: %w", err)
	}
	log := opts.logger(cfg)
	gopts, err := joinOptions(cfg, opts, log)
	if err != nil {
		return nil, fmt.Errorf("opening symmetric memory: %w", err)
	}
	g, err := group.Join(ctx, gopts)
	if err != nil {
		return nil, fmt.Errorf("opening symmetric memory: joining the group: %w", err)
	}
	return open(ctx, g, cfg, opts, gopts.Addr, log)
}

// joinOptions finds out which rank of which job this process is.
func joinOptions(cfg config.Config, opts *Options, log *slog.Logger) (*group.Options, error) {
	launch, err := group.DetectLaunch(opts.getenv(), &group.LaunchOptions{
		Launcher: cfg.Launcher,
		Explicit: &group.Launch{
			Rank: cfg.Rank, WorldSize: cfg.WorldSize, LocalRank: cfg.LocalRank, LocalWorldSize: cfg.LocalWorldSize, NodeRank: -1,
			Addr: cfg.RendezvousAddr, Job: cfg.Job, Restart: cfg.Restart,
		},
	})
	if err != nil {
		return nil, err
	}
	log.Info("launched", "by", launch.Source, "rank", launch.Rank, "world size", launch.WorldSize, "address", launch.Addr)
	gopts := &group.Options{
		Rank: launch.Rank, WorldSize: launch.WorldSize, LocalRank: max(launch.LocalRank, 0), Addr: launch.Addr, Ports: launch.Ports, Job: launch.Job, Restart: launch.Restart,
		Served: cfg.RendezvousServed, Token: cfg.Token.Reveal(), Timeout: cfg.Timeout, LivenessTimeout: cfg.LivenessTimeout, BootID: opts.BootID, Logger: log,
	}
	if cfg.RendezvousFD >= 0 && launch.Rank == 0 {
		if gopts.Listener, err = inheritedListener(cfg.RendezvousFD, launch.Addr, launch.Ports); err != nil {
			return nil, fmt.Errorf("%w: %w", errs.Invalid("Open", "rendezvous-fd", cfg.RendezvousFD, "the descriptor of an inherited socket that listens at rendezvous-addr"), err)
		}
	}
	return gopts, nil
}

// OpenLocal returns n ranks in this process, each to be used by a goroutine of its own: the same semantics as n processes,
// without a network. The settings are those of cfg, as for Open: the zero Config stands for what config.Load finds. Who the ranks are
// and where they meet comes from n alone, whatever cfg and a launcher say. Close every rank, at the same time.
func OpenLocal(ctx context.Context, n int, cfg config.Config, opts *Options) ([]*Rank, error) {
	if err := errs.Given("OpenLocal", "ctx", ctx, "a context"); err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil { // no rank is there yet that would have to be told
		return nil, fmt.Errorf("opening symmetric memory: %w", err)
	}
	if opts == nil {
		opts = &Options{}
	}
	cfg, err := cfg.Resolve(opts.Environ)
	if err != nil {
		return nil, fmt.Errorf("opening symmetric memory: %w", err)
	}
	log := opts.logger(cfg)
	groups, err := group.Local(n, &group.LocalOptions{Timeout: cfg.Timeout, Logger: log})
	if err != nil {
		return nil, fmt.Errorf("opening symmetric memory: %w", err)
	}
	ranks := make([]*Rank, n)
	var wg errgroup.Group
	for i, g := range groups {
		wg.Go(func() error {
			var err error
			ranks[i], err = open(ctx, g, cfg, opts, "", log)
			return err
		})
	}
	if err := wg.Wait(); err != nil {
		// open fails on all ranks or on none, but for a context that ended in between.
		ctx, cancel := afterwards(ctx, cfg.Timeout)
		defer cancel()
		for _, r := range ranks {
			if r != nil {
				err = errors.Join(err, r.Close(ctx))
			}
		}
		return nil, err
	}
	return ranks, nil
}

// open chooses and opens the backend for a rank that has joined its group, at that address of the rendezvous service if there is one.
func open(ctx context.Context, g *group.Group, cfg config.Config, opts *Options, rendezvous string, log *slog.Logger) (*Rank, error) {
	env := backend.Env{
		Group: g, LocalRank: g.Members()[g.Rank()].LocalRank, Device: cfg.Device, ShareDevice: cfg.ShareDevice, Multicast: cfg.Multicast,
		NetDevices: slices.Clone(cfg.NetDevices), UnprotectedNetwork: cfg.UnprotectedNetwork, Rendezvous: rendezvous, LivenessTimeout: cfg.LivenessTimeout, KernelTimeout: cfg.KernelTimeout, Options: maps.Clone(cfg.BackendOptions), Given: opts.Backend,
		Getenv: withoutOptions(opts.getenv()), Logger: log,
	}
	memOpts := memory.Options{Channels: cfg.Channels, KernelTimeout: cfg.KernelTimeout, MaxBlocks: cfg.MaxBlocks, RankOrder: cfg.RankOrder, Logger: log}
	name, refusals, err := backend.Choose(ctx, g, cfg.Backend, &env)
	var m *memory.Memory
	if err == nil {
		m, err = memory.Open(ctx, name, &env, &memOpts)
	}
	var tables *tuned
	if err == nil {
		if tables, err = tune(ctx, m, cfg.Tuning, log); err != nil {
			ctx, cancel := afterwards(ctx, cfg.Timeout)
			defer cancel()
			err = errors.Join(err, m.Close(ctx))
		}
	}
	if err != nil {
		err = because(ctx, err)
		ctx, cancel := afterwards(ctx, cfg.Timeout)
		defer cancel()
		return nil, fmt.Errorf("opening symmetric memory: %w", errors.Join(err, g.Close(ctx)))
	}
	logRefusals(log, refusals)
	log.Info("opened", "backend", name, "rank", g.Rank(), "world size", g.Size(), "device", m.Device().Name())
	return &Rank{group: g, memory: m, name: name, refusals: refusals, env: env, memOpts: memOpts, log: log, timeout: cfg.Timeout, tuned: tables, calls: newPlanCache(m)}, nil
}

// logRefusals says why backends were passed over: once for all ranks that have the same reason.
func logRefusals(log *slog.Logger, refusals []backend.Refusal) {
	type reason struct{ name, err string }
	ranks := map[reason][]int{}
	for _, r := range refusals {
		ranks[reason{r.Name, r.Err}] = append(ranks[reason{r.Name, r.Err}], r.Rank)
	}
	for _, r := range refusals {
		why := reason{r.Name, r.Err}
		if all := ranks[why]; all != nil {
			log.Info("backend passed over", "backend", r.Name, "on", errs.Ranks(all), "reason", r.Err)
			delete(ranks, why)
		}
	}
}

// withoutOptions hides the variables of backends' options from backends: the configuration has read those that count.
func withoutOptions(getenv func(string) string) func(string) string {
	return func(name string) string {
		if slices.ContainsFunc(options.All(), func(d *options.Declared) bool { return d.Env() == name }) {
			return ""
		}
		return getenv(name)
	}
}

// because joins the error of a context that has ended to err: the context is why the step failed, whatever the step makes of it. A
// backend that cannot be tried any more counts as one that cannot be used.
func because(ctx context.Context, err error) error {
	if ended := ctx.Err(); ended != nil && !errors.Is(err, ended) {
		return fmt.Errorf("%w: %w", ended, err)
	}
	return err
}

// afterwards returns a context for releasing what a failed call holds: it goes on when ctx has ended, for at most timeout.
func afterwards(ctx context.Context, timeout time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), timeout)
}
