// Package bench starts ranks that measure, and reports what they found: as a table, as JSON and as a picture.
package bench

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/pflag"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/cmd/symmem/internal/build"
	"github.com/symmem/symmem/cmd/symmem/internal/bytesize"
	"github.com/symmem/symmem/cmd/symmem/internal/exit"
	"github.com/symmem/symmem/cmd/symmem/internal/fleet"
	"github.com/symmem/symmem/cmd/symmem/internal/launch"
	"github.com/symmem/symmem/cmd/symmem/internal/machine"
	"github.com/symmem/symmem/cmd/symmem/internal/measure"
	"github.com/symmem/symmem/cmd/symmem/internal/outfile"
	"github.com/symmem/symmem/cmd/symmem/internal/process"
	"github.com/symmem/symmem/cmd/symmem/internal/settings"
	"github.com/symmem/symmem/cmd/symmem/internal/terminal"
	"github.com/symmem/symmem/config"
)

// RankCommand is the hidden sub-command of the ranks, which calls Rank. The value of its flag SpecFlag is a measure.Spec in
// JSON.
const (
	RankCommand = "bench-rank"
	SpecFlag    = "spec"
)

// Run starts the ranks, unless this process is a rank of a launcher's job, measures each backend in turn and writes the results, in a job on rank 0. flags are all flags of the command, the settings of the
// configuration among them; the report records those that were used, after command. Run blocks until all ranks have ended. If something
// fails, what was measured before is still written, and the error says what failed; if nothing was measured, files that were there stay as they were.
func Run(ctx context.Context, p *process.Process, command string, flags *pflag.FlagSet, o Options) error {
	spec, err := o.spec(flags.Changed)
	if err != nil {
		return err
	}
	cfg, err := settings.Load(flags, p.Environ)
	if err != nil {
		return err
	}
	choice, err := fleet.Choose(o.Backends, flags.Changed("backend"), cfg)
	if err != nil {
		return err
	}
	forRanks, err := settings.ForRanks("bench", flags, cfg)
	if err != nil {
		return err
	}
	if spec.Peer != nil {
		spec.Peer.Multicast, spec.Peer.Timeout = cfg.Multicast == config.MulticastOn, cfg.Timeout
	}
	specText, err := json.Marshal(spec)
	if err != nil {
		return err
	}
	stall := fleet.StallTime(cfg, 10*time.Minute) // one row takes a moment, but for very large messages on a slow machine
	job, err := fleet.FindJob("bench", flags, p, cfg)
	if err != nil {
		return err
	}
	if job != nil {
		if err := job.Several(len(choice.Runs)); err != nil {
			return err
		}
		job.Stall, o.Ranks, p = stall, job.Launch.WorldSize, job.Quiet()
		if job.Launch.Rank != 0 {
			o.OutputFile, o.PlotFile = "", "" // rank 0 writes them
		}
	}
	// If a file cannot be written, the time to say so is before measuring. In a job the others hear of it when they meet: if rank 0 only ended, they would wait for it.
	outputs, unwritable := planOutputs(o)
	if unwritable != nil && job == nil {
		return unwritable
	}

	report := Report{Version: build.Read(), Date: time.Now().UTC().Truncate(time.Second), Machine: machine.Read(),
		Command: settings.CommandLine(command, flags), Rows: []measure.Row{}}
	show := terminal.NewProgress(p.Err)
	var refused error // on every rank of a job, if rank 0 cannot write the files
	measured := func(preferences []string, hear func(fleet.Message)) (*fleet.End, error) {
		return job.Run(ctx, preferences, hear, func(ctx context.Context, r *symmem.Rank, rep *fleet.Reporter) error {
			var err error
			if refused, err = job.Agree(ctx, r, "writing the results", unwritable); err != nil {
				return err
			}
			return measure.Run(ctx, r, spec, teller{rep})
		})
	}
	if job != nil {
		report.Launcher = job.Launch.Source
	} else {
		if err := settings.HeardByRanks(flags, p.Environ, cfg); err != nil {
			return err
		}
		signals, stop := launch.CatchSignals()
		defer stop()
		f := &fleet.Fleet{
			Process: p, Command: RankCommand, Args: []string{"--" + SpecFlag, string(specText)}, Ranks: o.Ranks, Settings: forRanks, Signals: signals,
			Opening: fleet.OpeningTime(cfg), Stall: stall,
		}
		measured = func(preferences []string, hear func(fleet.Message)) (*fleet.End, error) {
			show.Say("starting %d ranks", o.Ranks)
			return f.Run(ctx, preferences, hear)
		}
	}
	for _, preferences := range choice.Runs {
		total, done, where := 0, 0, ""
		end, err := measured(preferences, func(m fleet.Message) {
			var found finding
			if len(m.Work) > 0 {
				_ = json.Unmarshal(m.Work, &found) // the same program has written it
			}
			where, total = cmp.Or(m.Opened, where), total+found.Rows
			switch row := found.Row; {
			case row == nil:
				show.Show(where, done, total, "")
			case row.Iterations == 0:
				who := row.Backend
				if row.Beside != "" {
					who += " beside " + row.Beside
				} else {
					done++
				}
				report.Skipped = append(report.Skipped, Skipped{Backend: who, Reason: terminal.OneLine(row.Note)})
			default:
				report.Rows = append(report.Rows, *row)
				if row.Beside == "" {
					done++
				}
				show.Show(where, done, total, fmt.Sprintf("%s of %s", row.Kind, bytesize.Text(row.Bytes)))
			}
		})
		show.Clear()
		switch {
		case err != nil:
		case end.Interrupted != nil:
			err = &exit.Error{Status: launch.SignalStatus(end.Interrupted), Err: errors.New("interrupted")}
		case refused != nil:
			err = exit.UsageError(fmt.Errorf("rank %d: %w", job.Launch.Rank, refused))
		case end.Failure != "" && job != nil:
			err = job.Fail(fmt.Sprintf("measuring backend %s: %s", end.Backend, end.Failure))
		case end.Failure != "":
			err = fmt.Errorf("measuring backend %s: %s", end.Backend, end.Failure)
		case end.Refused != "" && choice.Required && job != nil:
			err = job.Fail(end.Refused)
		case end.Refused != "" && choice.Required:
			err = errors.New(end.Refused)
		case end.Refused != "":
			report.Skipped = append(report.Skipped, Skipped{Backend: end.Backend, Reason: terminal.OneLine(end.Refused)})
		}
		if err != nil {
			if len(report.Rows) == 0 || job != nil && job.Launch.Rank != 0 {
				return err
			}
			// What was measured took long, and is not thrown away.
			report.Incomplete = terminal.OneLine(err.Error())
			return errors.Join(err, report.write(p.Out, o, outputs))
		}
	}
	if job != nil && job.Launch.Rank != 0 {
		return nil
	}
	if unwritable != nil { // no backend could be used, so the ranks have not met
		return unwritable
	}
	return report.write(p.Out, o, outputs)
}

// outputFiles are the files that bench writes at the end; nil where none was asked for.
type outputFiles struct{ json, plot *outfile.File }

// planOutputs sees that the files can be written.
func planOutputs(o Options) (f outputFiles, err error) {
	if o.OutputFile != "" {
		if f.json, err = outfile.Plan(o.OutputFile); err != nil {
			return f, exit.UsageError(fmt.Errorf("--output: %w", err))
		}
	}
	if o.PlotFile != "" {
		if f.plot, err = outfile.Plan(o.PlotFile); err != nil {
			return f, exit.UsageError(fmt.Errorf("--plot: %w", err))
		}
	}
	if f.json != nil && f.plot != nil && f.json.Same(f.plot) {
		return f, exit.Usagef("--output is %q and --plot is %q, which are one file; name two", o.OutputFile, o.PlotFile)
	}
	return f, nil
}

// finding is what rank 0 reports to the parent: one or the other.
type finding struct {
	Rows int          `json:"rows,omitempty"` // how many rows there will be, those of peers apart
	Row  *measure.Row `json:"row,omitempty"`
}

// teller reports to the parent. It is a measure.Reporter.
type teller struct{ to *fleet.Reporter }

func (t teller) Rows(n int) error           { return t.to.Work(finding{Rows: n}) }
func (t teller) Row(row measure.Row) error  { return t.to.Work(finding{Row: &row}) }
func (t teller) Refuse(reason string) error { return t.to.Refuse(reason) }

// Rank is one rank of bench. spec, the value of SpecFlag, is what it measures. It reports on the descriptor fd, and blocks until it has
// finished.
func Rank(ctx context.Context, p *process.Process, flags *pflag.FlagSet, fd int, spec string) error {
	var s measure.Spec
	if err := json.Unmarshal([]byte(spec), &s); err != nil {
		return exit.Usagef("--%s: %w", SpecFlag, err)
	}
	return fleet.Rank(ctx, p, flags, fd, nil, func(ctx context.Context, r *symmem.Rank, rep *fleet.Reporter) error {
		return measure.Run(ctx, r, s, teller{rep})
	})
}
