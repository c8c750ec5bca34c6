package fleet

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime/pprof"
	"slices"
	"syscall"
	"time"

	"github.com/spf13/pflag"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/cmd/symmem/internal/exit"
	"github.com/symmem/symmem/cmd/symmem/internal/launch"
	"github.com/symmem/symmem/cmd/symmem/internal/probe"
	"github.com/symmem/symmem/cmd/symmem/internal/process"
	"github.com/symmem/symmem/cmd/symmem/internal/settings"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
)

// Job is the job of a launcher that has started this process as one of its ranks. Run is Fleet.Run for it: nothing is started, and this process does
// the work of its rank.
type Job struct {
	Launch  group.Launch
	Config  config.Config
	Process *process.Process
	Opening time.Duration // how long opening a backend may take before this rank counts as hung
	Stall   time.Duration // and, on rank 0, each message after it

	file string // of the configuration, that flags name
	runs int    // that have begun
}

// FindJob returns the job that this process is a rank of, nil if it is to start the ranks itself: because no launcher has started it, or because the
// job has one rank and --ranks asks for more. flags are those of the command, ranks among them; an error is an *exit.Error with status 2, and
// ErrInvalid. It says what contradicts what where --ranks is not the number of the job's ranks.
func FindJob(command string, flags *pflag.FlagSet, p *process.Process, cfg config.Config) (*Job, error) {
	l, err := detect(p, cfg)
	asked, err2 := flags.GetInt("ranks")
	if err2 != nil {
		return nil, err2
	}
	if !flags.Changed("ranks") {
		asked = 0
	}
	switch {
	case err != nil && asked > 0 && !started(p):
		return nil, nil // it only looks as if something should have started this process, and the user says what is wanted
	case err != nil && !started(p):
		return nil, exit.UsageError(fmt.Errorf("%w; or say with --ranks how many %s is to start itself", err, command))
	case err != nil:
		return nil, exit.UsageError(err)
	case l.Source == "none", l.WorldSize == 1 && asked > 1:
		return nil, nil
	case asked > 0 && asked != l.WorldSize:
		return nil, exit.UsageError(errs.Advised(command, "--ranks", asked, fmt.Sprintf("%d, the ranks of the job that this process is rank %d of (%s)",
			l.WorldSize, l.Rank, l.Source), "leave --ranks out, or start the command without the launcher, or with SYMMEM_LAUNCHER=none and no SYMMEM_RANK, to have ranks of its own"))
	}
	return &Job{Launch: l, Config: cfg, Process: p, Opening: OpeningTime(cfg), file: settings.File(flags)}, nil
}

// detect finds this process's place in its job.
func detect(p *process.Process, cfg config.Config) (group.Launch, error) {
	return group.DetectLaunch(p.Getenv, LaunchOptions(cfg))
}

// LaunchOptions are those with which the settings have this process's place looked for.
func LaunchOptions(cfg config.Config) *group.LaunchOptions {
	return &group.LaunchOptions{
		Launcher: cfg.Launcher,
		Explicit: &group.Launch{
			Rank: cfg.Rank, WorldSize: cfg.WorldSize, LocalRank: cfg.LocalRank, LocalWorldSize: cfg.LocalWorldSize, NodeRank: -1,
			Addr: cfg.RendezvousAddr, Job: cfg.Job, Restart: cfg.Restart,
		},
	}
}

// AloneHere returns an error, an *exit.Error with status 2 and ErrInvalid, if a launcher has started this process as one of several on this host: a command
// that starts all ranks itself would be there several times at once.
func AloneHere(command string, p *process.Process, cfg config.Config) error {
	l, err := detect(p, cfg)
	if err != nil || l.WorldSize == 1 || l.LocalWorldSize == 1 { // a place that is not known is that of no job
		return nil
	}
	return exit.UsageError(errs.Advised(command, "the job", fmt.Sprintf("one of %d ranks, of which this process is rank %d (%s)", l.WorldSize, l.Rank, l.Source),
		"one process a host, since it starts its ranks itself", "start it once, without the launcher, or with SYMMEM_LAUNCHER=none and no SYMMEM_RANK"))
}

// started reports whether a launcher says that it has started this process, however much it has told.
func started(p *process.Process) bool {
	for _, r := range group.Launchers(p.Getenv, nil) {
		if r.Launcher != "none" && r.Started {
			return true
		}
	}
	return p.Getenv("SYMMEM_RANK") != "" || p.Getenv("SYMMEM_WORLD_SIZE") != ""
}

// Quiet returns the process as the rank is to use it: ranks other than 0 print nothing but their errors, which are for who calls.
func (j *Job) Quiet() *process.Process {
	if j.Launch.Rank == 0 {
		return j.Process
	}
	q := *j.Process
	q.Out, q.Err = io.Discard, io.Discard
	return &q
}

// Several returns an error, on every rank alike, if the ranks of the job cannot meet n times one after the other. Without a job they can.
func (j *Job) Several(n int) error {
	if j != nil && n > 1 && (j.Config.RendezvousServed || j.Config.RendezvousFD >= 0) {
		return exit.UsageError(errs.Advised("--backend", "the number of backends", n, "1 where the rendezvous is served outside of the ranks, since that ends with the first",
			"run the job once for each backend"))
	}
	return nil
}

// named puts the number of this rank before an error.
func (j *Job) named(err error) error { return fmt.Errorf("rank %d: %w", j.Launch.Rank, err) }

// Fail makes of what went wrong the error that ends this rank: with its number, unless it is rank 0, which has printed it.
func (j *Job) Fail(failure string) error {
	return &exit.Error{Status: exit.Failure, Err: j.named(errors.New(failure))}
}

// Agree tells the ranks of the job, which have opened r, whether one of them has found a mistake, such as a file that it cannot write. If so, refused is the error of all
// of them, and r is closed; err is that, or why the ranks could not agree. Every rank calls it.
func (j *Job) Agree(ctx context.Context, r *symmem.Rank, what string, mistake error) (refused, err error) {
	err = r.Group().Vote(ctx, what, mistake)
	if _, voted := errors.AsType[*group.VoteError](err); voted {
		return err, errors.Join(err, r.Close(ctx)) // the ranks are at one place; if rank 0 went now, others might not hear why
	}
	return nil, err
}

// Run opens the first of the preferred backends that all ranks of the job can use, calls work, and closes the backend. Every rank does. Without
// preferences the configuration decides. hear is called with what this rank reports. What goes wrong is in End; the job cannot be used any more then.
// It blocks until work has returned. On rank 0 a signal that asks to end it ends the context of work, so that what was found until then can be printed; a second one ends the
// process, and on other ranks the first does. If the rank hangs, the stacks of its goroutines are printed and the process ends with status 1.
func (j *Job) Run(ctx context.Context, preferences []string, hear func(Message), work func(context.Context, *symmem.Rank, *Reporter) error) (*End, error) {
	cfg := j.Config
	if preferences != nil {
		cfg.Backend = slices.Clone(preferences)
	}
	end := &End{Backend: settings.Text(cfg.Backend)}
	// A rank that is still in an earlier run does not come into this one.
	cfg.Restart = j.Launch.Restart + j.runs
	j.runs++
	watch := time.AfterFunc(j.Opening, j.hung)
	defer watch.Stop()
	rep := &Reporter{send: func(m Message) error {
		if j.Launch.Rank == 0 {
			watch.Reset(j.Stall)
		}
		if m.Opened != "" {
			end.Backend = m.Opened
		}
		end.Refused += m.Refused
		hear(m)
		return nil
	}}
	ctx, interrupted := j.interruptible(ctx)
	if err := j.run(ctx, cfg, rep, watch, work); err != nil {
		end.Failure = err.Error()
	}
	end.Interrupted = interrupted()
	return end, nil
}

// interruptible returns a context that ends with the first signal that asks rank 0 to end. What it returns beside that is called at the end, once, and gives the signal, nil if
// there was none.
func (j *Job) interruptible(ctx context.Context) (_ context.Context, interrupted func() os.Signal) {
	ctx, cancel := context.WithCancel(ctx)
	signals, over := make(chan os.Signal, 1), make(chan struct{})
	if j.Launch.Rank == 0 {
		signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	}
	var got os.Signal
	go func() {
		defer close(over)
		select {
		case got = <-signals:
			signal.Stop(signals) // the next one ends this process
			cancel()
		case <-ctx.Done():
		}
	}()
	return ctx, func() os.Signal {
		cancel()
		<-over
		signal.Stop(signals)
		return got
	}
}

func (j *Job) run(ctx context.Context, cfg config.Config, rep *Reporter, watch *time.Timer, work func(context.Context, *symmem.Rank, *Reporter) error) error {
	r, err := j.open(ctx, cfg)
	if err != nil {
		if refused, ok := errors.AsType[*backend.RefusedError](err); ok && !probe.Failed(ctx, probe.With(j.Process, j.file, cfg), refused) {
			return rep.Refuse(refused.Error())
		}
		return err
	}
	if err := rep.tell(Message{Opened: r.Backend(), Device: r.Device().Kind()}); err != nil {
		return errors.Join(err, r.Close(ctx))
	}
	if j.Launch.Rank != 0 {
		watch.Stop() // it reports nothing more, and ends with rank 0
	}
	// After a failure the ranks may be at different places, so nothing is closed: the process ends anyway.
	if err := work(ctx, r, rep); err != nil {
		return err
	}
	return r.Close(ctx)
}

// open opens the rank. The service of the run before may still be there for a moment, and other ranks may still be in that run.
func (j *Job) open(ctx context.Context, cfg config.Config) (*symmem.Rank, error) {
	const pause = 100 * time.Millisecond
	ctx, cancel := context.WithTimeout(ctx, 4*bounded(cfg.Timeout))
	defer cancel()
	for {
		r, err := symmem.Open(ctx, cfg, &symmem.Options{Environ: func() []string { return j.Process.Environ }})
		refused, ok := errors.AsType[*group.RefusedError](err)
		if !ok || j.runs < 2 || refused.Reason != group.RefusedLate && refused.Reason != group.RefusedRestart {
			return r, err
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return nil, err
		}
	}
}

// hung ends this process, which nobody else watches.
func (j *Job) hung() {
	fmt.Fprintf(j.Process.Err, "symmem: %v\n", j.named(launch.ErrStalled))
	_ = pprof.Lookup("goroutine").WriteTo(j.Process.Err, 2) // the process ends, whether it can be written or not
	os.Exit(exit.Failure)
}
