// Package rendezvous is the sub-command rendezvous of symmem, and the command symmem-rendezvous: the service by which the ranks of a job meet, outside of its ranks.
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
)

// keys are the settings of the service.
var keys = []string{"rendezvous-addr", "rendezvous-store", "world-size", "job", "restart", "token", "timeout", "liveness-timeout", "log-level"}

// Command is the sub-command of a process that was started so.
func Command(p *process.Process) *cobra.Command {
	var listen string
	cmd := &cobra.Command{
		Use:   "rendezvous --listen ADDR --world-size N [flags]",
		Short: "Host the rendezvous of a job outside of its ranks",
		Long: `Rendezvous hosts the service by which the ranks of one job meet and agree, so that the job can lose any of its ranks, rank 0 too. The
ranks find it at SYMMEM_RENDEZVOUS_ADDR, and SYMMEM_RENDEZVOUS_SERVED=true tells each of them that it is there. The number of ranks, the job's
name, attempt and token are theirs. Beyond loopback addresses a token is needed.

It prints the address that it listens on, which has the port if ADDR has port 0, and ends by itself when every rank has come and gone. If some have
gone and the others do not come within the timeout, it ends with status 1. Ranks that symmem run starts need none: run hosts their rendezvous.

With --rendezvous-store it keeps the state of the job in etcd, and when it has ended before the job, one that is started with the same flags at the
same address goes on with it. The ranks look for it for their timeout, and are not told of anything that it would not know.`,
		Example: "  symmem rendezvous --listen 10.0.0.1:29400 --world-size 16 --job train\n" +
			"  symmem rendezvous --listen 10.0.0.1:29400 --world-size 16 --job train --rendezvous-store etcd://10.0.0.2:2379/symmem",
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
		addr := listen
		if addr == "" {
			addr = cfg.RendezvousAddr
		}
		if addr == "" {
			return exit.Usagef("--listen, the address to serve on, is missing")
		}
		if cfg.WorldSize < 1 {
			return exit.Usagef("--world-size, the number of ranks, is missing")
		}
		return serve(cmd.Context(), p, cfg, addr)
	})
	flags := cmd.Flags()
	flags.StringVar(&listen, "listen", "", "host:port to serve on; port 0 takes a free one; empty takes rendezvous-addr")
	config.AddFlags(flags)
	for _, key := range config.Keys() {
		if !slices.Contains(keys, key.Name) {
			_ = flags.MarkHidden(key.Name) // it is there
		}
	}
	return cmd
}

// serve serves the rendezvous of a job at addr until the job is over, or a signal asks to end.
func serve(ctx context.Context, p *process.Process, cfg config.Config, addr string) error {
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
	l, err := config.Listen(ctx, "tcp", addr)
	if err != nil {
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
	opts := &group.Options{
		WorldSize: cfg.WorldSize, Listener: said, Job: cfg.Job, Restart: cfg.Restart, Token: cfg.Token.Reveal(), Timeout: cfg.Timeout, LivenessTimeout: cfg.LivenessTimeout,
		Logger: logger, Store: cfg.RendezvousStore.Reveal(),
	}
	err = group.Serve(ctx, opts) // no accept goes on behind it
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
