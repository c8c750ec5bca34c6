// Package rendezvous is the sub-command rendezvous of symmem, and the command symmem-rendezvous: the service by which the ranks of jobs meet, outside of them.
package rendezvous

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/symmem/symmem/cmd/symmem/internal/cli"
	"github.com/symmem/symmem/cmd/symmem/internal/exit"
	"github.com/symmem/symmem/cmd/symmem/internal/launch"
	"github.com/symmem/symmem/cmd/symmem/internal/process"
	"github.com/symmem/symmem/cmd/symmem/internal/settings"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
)

// keys are the settings of the service.
var keys = []string{"rendezvous-addr", "rendezvous-store", "world-size", "job", "restart", "token", "timeout", "liveness-timeout", "log-level"}

// Command is the sub-command of a process that was started so.
func Command(p *process.Process) *cobra.Command {
	var listen string
	var stay bool
	cmd := &cobra.Command{
		Use:   "rendezvous --listen ADDR [flags]",
		Short: "Host the rendezvous of jobs outside of their ranks",
		Long: `Rendezvous hosts the service by which the ranks of jobs meet and agree, so that a job can lose any of its ranks, rank 0 too. The ranks
find it at SYMMEM_RENDEZVOUS_ADDR, and SYMMEM_RENDEZVOUS_SERVED=true tells each of them that it is there. A job begins with the first of its ranks;
jobs that are there at the same time need names (SYMMEM_JOB). Beyond loopback addresses a token is needed, and whoever has it may join any of the jobs.

It prints the address that it listens on, which has the port if ADDR has port 0, and ends by itself when jobs have begun and all of them are over: when
every rank has come and gone. With --stay it ends by a signal alone. If ranks of a job have gone and the others do not come within the timeout, that job is
over, and the status is 1. Ranks that symmem run starts need none: run hosts their rendezvous.

With --world-size it is for one job, and refuses the ranks of any other: the number of ranks, the job's name and its attempt are theirs.

With --rendezvous-store it keeps the state of the jobs in etcd, and when it has ended before them, one that is started with the same flags at the
same address goes on with them. The ranks look for it for their timeout, and are not told of anything that it would not know. A service with a store
does not end before the ranks of all its jobs have had the time to come back: --liveness-timeout and some seconds from its start.`,
		Example: "  symmem rendezvous --listen 10.0.0.1:29400\n" +
			"  symmem rendezvous --listen 10.0.0.1:29400 --stay --rendezvous-store etcd://10.0.0.2:2379/symmem\n" +
			"  symmem rendezvous --listen 10.0.0.1:29400 --world-size 16 --job train",
		Args: cli.NoArgs,
	}
	cmd.RunE = cli.Failing(func(cmd *cobra.Command, _ []string) error {
		cfg, err := settings.LoadForProgram(cmd.Flags(), p.Environ)
		if err != nil {
			return err
		}
		for _, key := range config.Keys() {
			if cfg.Source(key.Name).Flag != "" && !slices.Contains(keys, key.Name) {
				return exit.Usagef("--%s is for ranks, and the rendezvous has none", key.Name)
			}
		}
		addr := address{text: listen, of: "--listen"}
		if listen == "" {
			addr = address{text: cfg.RendezvousAddr, of: named("rendezvous-addr", cfg)}
		}
		if addr.text == "" {
			return exit.Usagef("--listen, the address to serve on, is missing")
		}
		one := cfg.WorldSize > 0
		if !one && cfg.Source("world-size").Flag != "" {
			return exit.Usagef("--world-size is %d, which is no number of ranks; leave it out for any number of jobs", cfg.WorldSize)
		}
		for _, key := range []string{"job", "restart"} {
			if !one && cfg.Source(key).Flag != "" {
				return exit.Usagef("--%s is of one job, whose number of ranks, --world-size, is missing", key)
			}
		}
		if one && stay {
			return exit.Usagef("--stay is for any number of jobs, and %s, which is %d, for one", named("world-size", cfg), cfg.WorldSize)
		}
		opts := &group.Options{
			Token: cfg.Token.Reveal(), Timeout: cfg.Timeout, LivenessTimeout: cfg.LivenessTimeout, Store: cfg.RendezvousStore.Reveal(), Stay: stay,
		}
		if !one {
			return serve(cmd.Context(), p, cfg, addr, opts, group.ServeJobs)
		}
		opts.WorldSize, opts.Job, opts.Restart = cfg.WorldSize, cfg.Job, cfg.Restart
		return serve(cmd.Context(), p, cfg, addr, opts, group.Serve)
	})
	flags := cmd.Flags()
	flags.StringVar(&listen, "listen", "", "host:port to serve on; port 0 takes a free one; empty takes rendezvous-addr")
	flags.BoolVar(&stay, "stay", false, "go on when no job is left, until a signal")
	config.AddFlags(flags)
	for _, key := range config.Keys() {
		if !slices.Contains(keys, key.Name) {
			_ = flags.MarkHidden(key.Name) // it is there
		}
	}
	return cmd
}

// address is where to serve.
type address struct {
	text string
	of   string // what gave it, for errors
}

// named is a setting as errors name it.
func named(key string, cfg config.Config) string { return fmt.Sprintf("%s (%s)", key, cfg.Source(key)) }

// optionKeys are the settings that options of package group come from.
var optionKeys = map[string]string{
	"WorldSize": "world-size", "Restart": "restart", "Timeout": "timeout", "LivenessTimeout": "liveness-timeout", "Store": "rendezvous-store",
	"len(Job)": "job", "len(Token)": "token",
}

// refused makes of an error of package group about its options one about what the user has given for them, an *exit.Error with status 2. Any other is returned unchanged.
func refused(err error, addr address, cfg config.Config) error {
	wrong, ok := errors.AsType[*errs.ArgumentError](err)
	switch {
	case !ok:
		return err
	case wrong.Op == "opening a store":
		return exit.UsageError(fmt.Errorf("%s: %w", named("rendezvous-store", cfg), err))
	case wrong.Op != "Serve" && wrong.Op != "ServeJobs":
		return err
	}
	told := *wrong
	told.Op = "rendezvous"
	told.Allowed = strings.ReplaceAll(told.Allowed, "Listener", addr.of)
	switch key := optionKeys[wrong.Arg]; {
	case wrong.Arg == "Listener":
		told.Arg, told.Value = addr.of, addr.text
	case strings.HasPrefix(wrong.Arg, "len("):
		told.Arg = "the length of " + named(key, cfg)
	case key != "":
		told.Arg = named(key, cfg)
	}
	return exit.UsageError(&told)
}

// serve serves the rendezvous at addr by a call of package group until that ends, or a signal asks to end.
func serve(ctx context.Context, p *process.Process, cfg config.Config, addr address, opts *group.Options, call func(context.Context, *group.Options) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var ended atomic.Pointer[os.Signal]
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	defer signal.Stop(signals)
	go func() {
		select {
		case sig := <-signals:
			ended.Store(&sig)
			cancel()
		case <-ctx.Done():
		}
	}()
	var config net.ListenConfig
	l, err := config.Listen(ctx, "tcp", addr.text)
	if err != nil {
		err = fmt.Errorf("%s: %w", addr.of, err)
		if _, malformed := errors.AsType[*net.AddrError](err); malformed {
			err = exit.UsageError(err)
		}
		return err
	}
	logger := slog.New(slog.DiscardHandler)
	if level, ok := cfg.Level(); ok {
		logger = slog.New(slog.NewTextHandler(p.Err, &slog.HandlerOptions{Level: level}))
	}
	said := &announced{Listener: l}
	said.say = func() {
		if _, said.err = fmt.Fprintf(p.Out, "rendezvous at %s\n", l.Addr()); said.err != nil {
			cancel()
		}
	}
	opts.Listener, opts.Logger = said, logger
	err = refused(call(ctx, opts), addr, cfg) // no accept goes on behind the call
	if said.err != nil {
		return errors.Join(said.err, err)
	}
	if sig := ended.Load(); sig != nil {
		return &exit.Error{Status: launch.SignalStatus(*sig), Err: err}
	}
	return err
}

// announced is a listener that calls say when the first connection is to be accepted: whoever reads the address then finds the service there, and
// one that is refused has said nothing.
type announced struct {
	net.Listener
	once sync.Once
	say  func()
	err  error // of say
}

func (l *announced) Accept() (net.Conn, error) {
	l.once.Do(l.say)
	return l.Listener.Accept()
}
