package command

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/symmem/symmem/cmd/symmem/internal/cli"
	"github.com/symmem/symmem/cmd/symmem/internal/exit"
	"github.com/symmem/symmem/cmd/symmem/internal/launch"
	"github.com/symmem/symmem/cmd/symmem/internal/settings"
)

func (a app) runCommand() *cobra.Command {
	var ranks int
	var grace time.Duration
	var keepGoing bool
	keeper := -1
	cmd := &cobra.Command{
		Use:   "run -n N [flags] [--] PROGRAM [ARGS...]",
		Short: "Start N ranks of a program on this machine",
		Long: `Run starts N processes of a program on this machine and tells each its place through SYMMEM_RANK, SYMMEM_WORLD_SIZE and
the others that symmetric memory reads, and through RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE. Settings given as
flags reach the ranks as variables too.

Each line that a rank writes comes out with its number in front: "[3] ...". The standard input goes to rank 0. Interrupts
and other signals are passed on to all ranks. When a rank fails, the others are ended, unless --keep-going is given, and all are when
nobody reads their output any more. What a rank has started and not ended
goes with it, on Linux also what has made a session of its own, at the latest when run ends, and however run ends. The exit status is that of the first rank that failed, 128 and the signal's number if a signal ended it.`,
		Example: "  symmem run -n 4 -- ./train --epochs 3",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 || args[0] == "" {
				return exit.Usagef("the program to start is missing")
			}
			return nil
		},
	}
	cmd.RunE = cli.Failing(func(cmd *cobra.Command, args []string) error {
		if !cmd.Flags().Changed("ranks") {
			return exit.Usagef("-n, the number of ranks, is missing")
		}
		if grace <= 0 {
			return exit.Usagef("--grace is %v; more than 0 is allowed, like 10s", grace)
		}
		cfg, err := settings.LoadForProgram(cmd.Flags(), a.Environ)
		if err != nil {
			return err
		}
		forRanks, err := settings.ForRanks(cmd.Name(), cmd.Flags(), cfg)
		if err != nil {
			return err
		}
		if err := settings.HeardByRanks(cmd.Flags(), a.Environ, cfg); err != nil {
			return err
		}
		if ranks < 1 || ranks > launch.MaxRanks {
			return exit.Usagef("-n is %d; 1 to %d are allowed", ranks, launch.MaxRanks)
		}
		if launch.KeepsDescendants && keeper < 0 {
			return launch.Keep(cmd.Context(), a.Process, cmd.Name(), grace)
		}
		var children *launch.Family
		if keeper >= 0 {
			var release func()
			if children, release, err = launch.Kept(keeper); err != nil {
				return err
			}
			defer release()
		}
		job := &launch.Job{
			Ranks: ranks, Program: args[0], Args: func(int, int) []string { return args[1:] },
			Environ: a.Environ, Extra: forRanks.Vars, Name: forRanks.Job, Token: forRanks.Token, Timeout: forRanks.Timeout, LivenessTimeout: forRanks.LivenessTimeout,
			KeepGoing: keepGoing, Children: children, Stdin: a.In, Stdout: a.Out, Stderr: a.Err, Grace: grace, Say: a.Say,
		}
		signals, stop := launch.CatchSignals()
		defer stop()
		result, err := job.Run(cmd.Context(), signals)
		if err != nil {
			return err
		}
		if result.First != nil {
			return &exit.Error{Status: result.First.Status()}
		}
		return nil
	})
	flags := cmd.Flags()
	flags.SetInterspersed(false) // what follows the program is the program's
	flags.IntVarP(&ranks, "ranks", "n", 0, fmt.Sprintf("number of ranks, 1 to %d", launch.MaxRanks))
	flags.DurationVar(&grace, "grace", launch.DefaultGrace, "how long ranks may take to end before they are killed")
	flags.BoolVar(&keepGoing, "keep-going", false, "let the other ranks go on when one fails, for programs that live with a loss; the exit status stays that of the first that failed")
	flags.IntVar(&keeper, launch.KeeperFlag, keeper, "descriptor of the pipe that ends with the process that has started the launcher")
	_ = flags.MarkHidden(launch.KeeperFlag) // it is there
	settings.AddForRanks(flags)
	return cmd
}
