// Package tune starts ranks that measure every form of the collectives, and makes a table of the fastest ones.
package tune

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
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
	"github.com/symmem/symmem/kernels/tuning"
)

// RankCommand is the hidden sub-command of the ranks, which calls Rank. The value of its flag SpecFlag is a measure.TuneSpec in JSON.
const (
	RankCommand = "tune-rank"
	SpecFlag    = "spec"
)

// Run starts the ranks, measures, prints what was found beside the table in use, and writes the new table to a file. flags are all flags of the command, the settings of
// the configuration among them; the table records those that were used, after command. It blocks until all ranks have ended. If something fails, or the user interrupts, what was
// measured before is printed, with why it is not all, no file is written, and one that was there stays as it was.
func Run(ctx context.Context, p *process.Process, command string, flags *pflag.FlagSet, o Options) error {
	spec, err := o.spec()
	if err != nil {
		return err
	}
	cfg, err := settings.Load(flags, p.Environ)
	if err != nil {
		return err
	}
	choice, err := fleet.Choose(o.Backend, flags.Changed("backend"), cfg)
	if err == nil && len(choice.Runs) != 1 {
		err = exit.Usagef("--backend is %s; one name, or auto, is allowed: a table is of one backend's devices", o.Backend)
	}
	if err != nil {
		return err
	}
	if flags.Changed("tuning") {
		return exit.Usagef("--tuning is not for tune, which compares with the table that would be used without one; --output names the file to write")
	}
	forRanks, err := settings.ForRanks("tune", flags, cfg)
	if err != nil {
		return err
	}
	if err := settings.HeardByRanks(flags, p.Environ, cfg); err != nil {
		return err
	}
	if err := fleet.AloneHere("tune", p, cfg); err != nil {
		return err
	}
	output, old, err := kept(o.OutputFile)
	if err != nil {
		return err
	}
	specText, err := json.Marshal(spec)
	if err != nil {
		return err
	}
	signals, stop := launch.CatchSignals()
	defer stop()
	f := &fleet.Fleet{
		Process: p, Command: RankCommand, Args: []string{"--" + SpecFlag, string(specText)}, Ranks: o.Ranks, Settings: forRanks, Signals: signals,
		Opening: fleet.OpeningTime(cfg),
		Stall:   fleet.StallTime(cfg, 10*time.Minute), // one size takes a moment, but for very large messages on a slow machine
	}
	show := terminal.NewProgress(p.Err)
	show.Say("starting %d ranks", o.Ranks)
	var where *measure.TunedMachine
	var points []measure.Point
	late := ""
	var other error // the file is of another machine
	measuring, giveUp := context.WithCancel(ctx)
	defer giveUp()
	end, err := f.Run(measuring, choice.Runs[0], func(m fleet.Message) {
		var found measure.Tuned
		if len(m.Work) > 0 {
			_ = json.Unmarshal(m.Work, &found) // the same program has written it
		}
		switch {
		case found.Machine != nil:
			where = found.Machine
			if old != nil {
				if other = sameMachine(old, where.Devices, where.Link); other != nil {
					giveUp() // now: measuring takes long
				}
			}
		case found.Point != nil:
			points = append(points, *found.Point)
		case found.Late != "":
			late = found.Late
		}
		if where != nil && len(points) > 0 {
			last := points[len(points)-1]
			show.Show(where.Backend, len(points), where.Points, fmt.Sprintf("%s of %s of %s", last.Collective, bytesize.Text(last.Bytes), last.DType))
		}
	})
	show.Clear()
	if other != nil {
		return fmt.Errorf("--output: %w", other)
	}
	switch {
	case err != nil:
	case end.Interrupted != nil:
		err = &exit.Error{Status: launch.SignalStatus(end.Interrupted), Err: errors.New("interrupted; no table was written")}
	case end.Failure != "":
		err = fmt.Errorf("tuning backend %s: %s", end.Backend, end.Failure)
	case end.Refused != "":
		err = errors.New(end.Refused)
	}
	if where == nil || len(points) == 0 {
		if err == nil {
			err = errors.New("the ranks have measured nothing")
			if late != "" {
				err = fmt.Errorf("%w: %s before the first size", err, late)
			}
		}
		return err
	}
	table := tableOf(where, points)
	table.Machine, table.Date, table.Command = describe(where), time.Now().UTC().Format(time.DateOnly), strings.Join(settings.CommandLine(command, flags), " ")
	table.Notes = append(table.Notes, "Made by "+build.Read().String()+".")
	missing := unmeasured(late, len(points), where.Points)
	if missing != "" {
		table.Notes = append(table.Notes, missing+"; rules without a measurement are as they were.")
	}
	for i := range table.Rules {
		if table.Rules[i].Source == "" {
			table.Rules[i].Source = tuning.Estimated
		}
	}
	var text []byte // of the table, with the rules of the file that stay
	merged := func(path string) (_ []byte, err error) {
		table := table
		if path != "" {
			old, _, err := tuning.Read(path)
			if err != nil {
				return nil, err
			}
			if err := sameMachine(old, table.Devices, table.Link); err != nil { // written since
				return nil, err
			}
			table = old.Merge(table)
		}
		if text, err = table.Text(); err == nil {
			_, err = tuning.Parse("that was made", text) // nobody gets a file that would be refused
		}
		return text, err
	}
	whole, incomplete := err == nil, ""
	if !whole {
		incomplete = fmt.Sprintf("%s; %d of %d sizes were measured", terminal.OneLine(err.Error()), len(points), where.Points)
	}
	if whole && output != nil { // first: where nobody reads the standard output any more, writing to it ends the process
		if err = output.Update(lockTime, merged); err != nil {
			err = fmt.Errorf("--output: %w", err)
		}
	}
	if whole && text == nil { // without a file, or where that cannot be had: what was measured took long, and is not thrown away
		var textErr error
		if _, textErr = merged(""); textErr != nil {
			return errors.Join(err, textErr)
		}
	}
	written := whole && err == nil && output != nil
	switch {
	case !o.JSON:
		err = errors.Join(err, write(p.Out, where, points, incomplete))
	case whole:
		_, printErr := p.Out.Write(text)
		err = errors.Join(err, printErr)
	default:
		err = errors.Join(err, writeIncomplete(p.Out, table, incomplete))
	}
	if whole && missing != "" {
		fmt.Fprintln(p.Err, missing)
	}
	if written {
		fmt.Fprintf(p.Err, "wrote %s; SYMMEM_TUNING=%s uses it\n", o.OutputFile, o.OutputFile)
	}
	return err
}

// unmeasured says that only n of all sizes were measured, and why; "" if all were. late says that the time was over.
func unmeasured(late string, n, all int) string {
	switch {
	case late != "":
		return fmt.Sprintf("%s: %d of %d sizes were measured", late, n, all)
	case n < all:
		return fmt.Sprintf("%d of %d sizes were measured: for the others a rank had no memory, or there was no form", n, all)
	}
	return ""
}

// describe says on what was measured.
func describe(m *measure.TunedMachine) string {
	host := machine.Read()
	return fmt.Sprintf("%d ranks of %s, %s with %s, %s %s, backend %s", m.Ranks, strings.Join(m.Devices, " and "), host.Processor(), host.CoreCount(), host.OS, host.Kernel, m.Backend)
}

// lockTime is how long tune waits for another one that writes the same file, which takes a moment.
const lockTime = 30 * time.Second

// kept sees that the table that is in the file already can be read, whose rules for other numbers of ranks stay, and that a file can be written there. If not, the time to
// say so is before measuring. It returns that table too, or nil.
func kept(path string) (*outfile.File, *tuning.Table, error) {
	if path == "" {
		return nil, nil, nil
	}
	var old *tuning.Table
	to, err := outfile.Plan(path)
	if err == nil && to.Regular() {
		old, _, err = tuning.Read(path)
	}
	if err != nil {
		return nil, nil, exit.UsageError(fmt.Errorf("--output: %w", err))
	}
	return to, old, nil
}

// sameMachine refuses the table of a file whose rules cannot be in one table with those of a machine with these devices and this link.
func sameMachine(old *tuning.Table, devices []string, link string) error {
	if slices.Equal(old.Devices, devices) && old.Link == link {
		return nil
	}
	return fmt.Errorf("it is a table of %q over %s, and this machine has %q over %s: name another file", old.Devices, old.Link, devices, link)
}

// teller reports to the parent. It is a measure.TuneReporter.
type teller struct{ to *fleet.Reporter }

func (t teller) Tuned(found measure.Tuned) error { return t.to.Work(found) }
func (t teller) Refuse(reason string) error      { return t.to.Refuse(reason) }

// Rank is one rank of tune. spec, the value of SpecFlag, is what it measures. It reports on the descriptor fd, and blocks until it has finished.
func Rank(ctx context.Context, p *process.Process, flags *pflag.FlagSet, fd int, spec string) error {
	var s measure.TuneSpec
	if err := json.Unmarshal([]byte(spec), &s); err != nil {
		return exit.Usagef("--%s: %w", SpecFlag, err)
	}
	// What is compared with is what there is without a file.
	without := func(cfg *config.Config) { cfg.Tuning = "" }
	return fleet.Rank(ctx, p, flags, fd, without, func(ctx context.Context, r *symmem.Rank, rep *fleet.Reporter) error {
		return measure.Tune(ctx, r, s, teller{rep})
	})
}
