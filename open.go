package symmem

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/symmem/symmem/backend"
	_ "github.com/symmem/symmem/backend/host" // the backend that needs nothing
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
)

// Options are what Open takes besides settings. Nil or zero values mean the defaults.
type Options struct {
	// Logger takes events: which backend was chosen, each registration with address, bytes and time, leaks. Default: none are
	// logged, unless the configuration has a log level; then they go to the standard error as text.
	Logger *slog.Logger
	// Getenv reads the environment that the launcher set; default os.Getenv.
	Getenv func(string) string
	// BootID pretends that this rank is on another machine, for tests of what cannot be shared between hosts.
	BootID string
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

// Open joins this process to its group as one rank, and opens a device and a backend for it. Rank, world size and the place
// to meet come from cfg or, where it leaves them open, from the launcher; a process that no launcher started is a world of
// one rank. The ranks pick the first backend of cfg.Backend that all of them can use. Collective: it blocks until all ranks
// have come, at most until ctx ends or for cfg.Timeout, and either gives every rank its Rank or fails on all. Close the Rank.
func Open(ctx context.Context, cfg config.Config, opts *Options) (*Rank, error) {
	if err := errs.Given("Open", "ctx", ctx, "a context"); err != nil {
		return nil, err
	}
	if opts == nil {
		opts = &Options{}
	}
	if err := cfg.Validate(); err != nil {
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
	getenv := opts.Getenv
	if getenv == nil {
		getenv = os.Getenv
	}
	launch, err := group.DetectLaunch(getenv, &group.LaunchOptions{
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
		Rank: launch.Rank, WorldSize: launch.WorldSize, LocalRank: max(launch.LocalRank, 0), Addr: launch.Addr, Job: launch.Job, Restart: launch.Restart,
		Token: cfg.Token.Reveal(), Timeout: cfg.Timeout, LivenessTimeout: cfg.LivenessTimeout, BootID: opts.BootID, Logger: log,
	}
	if cfg.RendezvousFD >= 0 && launch.Rank == 0 {
		f := os.NewFile(uintptr(cfg.RendezvousFD), "rendezvous socket")
		gopts.Listener, err = net.FileListener(f)
		if err = errors.Join(err, f.Close()); err != nil {
			return nil, errs.Invalid("Open", "rendezvous-fd", cfg.RendezvousFD, fmt.Sprintf("an inherited listening socket (%v)", err))
		}
	}
	return gopts, nil
}

// OpenLocal gives n ranks in this process, each to be used by a goroutine of its own: the same semantics as n processes,
// without a network. It takes the place, size and rank settings of cfg from n instead. Close every rank, at the same time.
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
	if err := cfg.Validate(); err != nil {
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
	getenv := opts.Getenv
	if getenv == nil {
		getenv = os.Getenv
	}
	env := backend.Env{
		Group: g, LocalRank: g.Members()[g.Rank()].LocalRank, Device: cfg.Device, ShareDevice: cfg.ShareDevice, Multicast: cfg.Multicast,
		NetDevices: cfg.NetDevices, UnprotectedNetwork: cfg.UnprotectedNetwork, Rendezvous: rendezvous, KernelTimeout: cfg.KernelTimeout, Getenv: getenv, Logger: log,
	}
	memOpts := backend.MemoryOptions{Channels: cfg.Channels, KernelTimeout: cfg.KernelTimeout, Logger: log}
	name, refusals, err := backend.Choose(ctx, g, cfg.Backend, &env)
	var m *backend.Memory
	if err == nil {
		m, err = backend.Open(ctx, name, &env, &memOpts)
	}
	if err != nil {
		err = because(ctx, err)
		ctx, cancel := afterwards(ctx, cfg.Timeout)
		defer cancel()
		return nil, fmt.Errorf("opening symmetric memory: %w", errors.Join(err, g.Close(ctx)))
	}
	for _, r := range refusals {
		log.Info("backend passed over", "backend", r.Name, "rank", r.Rank, "reason", r.Err)
	}
	log.Info("opened", "backend", name, "rank", g.Rank(), "world size", g.Size(), "device", m.Device().Name())
	return &Rank{group: g, memory: m, name: name, refusals: refusals, env: env, memOpts: memOpts, log: log, timeout: cfg.Timeout}, nil
}

// because gives err the condition of a context that has ended, which is why it failed, whatever the step that noticed makes of it: a
// backend that cannot be tried any more counts as one that cannot be used.
func because(ctx context.Context, err error) error {
	if ended := ctx.Err(); ended != nil && !errors.Is(err, ended) {
		return fmt.Errorf("%w: %w", ended, err)
	}
	return err
}

// afterwards is a context for giving back what a failed call holds: it goes on when ctx has ended, but not for ever.
func afterwards(ctx context.Context, timeout time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), timeout)
}
