package main

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"
)

func (a *app) runCommand() *cobra.Command {
	var ranks int
	var grace time.Duration
	keeper := -1
	cmd := &cobra.Command{
		Use:   "run -n N [flags] [--] PROGRAM [ARGS...]",
		Short: "Start N ranks of a program on this machine",
		Long: `Run starts N processes of a program on this machine and tells each its place through SYMMEM_RANK, SYMMEM_WORLD_SIZE and
the others that symmetric memory reads, and through RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE. Settings given as
flags reach the ranks as variables too.

Each line that a rank writes comes out with its number in front: "[3] ...". The standard input goes to rank 0. Interrupts
and other signals are passed on to all ranks. When a rank fails, the others are ended. What a rank has started and not ended
goes with it, on Linux also what has made a session of its own, at the latest when run ends, and however run ends. The exit status is that of the first rank that failed, 128 and the signal's number if a signal ended it.`,
		Example: "  symmem run -n 4 -- ./train --epochs 3",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 || args[0] == "" {
				return usagef("the program to start is missing")
			}
			return nil
		},
	}
	cmd.RunE = failing(func(cmd *cobra.Command, args []string) error {
		if !cmd.Flags().Changed("ranks") {
			return usagef("-n, the number of ranks, is missing")
		}
		if grace <= 0 {
			return usagef("--grace is %v; more than 0 is allowed, like 10s", grace)
		}
		cfg, err := a.load(cmd)
		if err != nil {
			return err
		}
		settings, err := settingsForRanks(cmd, cfg)
		if err != nil {
			return err
		}
		if ranks < 1 || ranks > maxRanks {
			return usagef("-n is %d; 1 to %d are allowed", ranks, maxRanks)
		}
		if keepsDescendants && keeper < 0 {
			return a.keep(cmd.Context(), cmd.Name(), grace)
		}
		var children *family
		if keeper >= 0 {
			var release func()
			if children, release, err = kept(keeper); err != nil {
				return err
			}
			defer release()
		}
		l := &launcher{
			children: children,
			ranks:    ranks, program: args[0], args: func(int, int) []string { return args[1:] },
			environ: a.environ, extra: settings.vars, job: settings.job, token: settings.token,
			stdin: a.in, stdout: a.out, stderr: a.err, grace: grace, say: a.say,
		}
		signals, stop := catch()
		defer stop()
		result, err := l.run(cmd.Context(), signals)
		if err != nil {
			return err
		}
		if result.first != nil {
			return &exitError{status: result.first.status()}
		}
		return nil
	})
	flags := cmd.Flags()
	flags.SetInterspersed(false) // what follows the program is the program's
	flags.IntVarP(&ranks, "ranks", "n", 0, fmt.Sprintf("number of ranks, 1 to %d", maxRanks))
	flags.DurationVar(&grace, "grace", defaultGrace, "how long ranks may take to end before they are killed")
	flags.IntVar(&keeper, keeperFlag, keeper, "descriptor of the pipe that ends with the process that has started the launcher")
	_ = flags.MarkHidden(keeperFlag) // it is there
	addRankFlags(flags)
	return cmd
}

// say tells the user what goes on.
func (a *app) say(format string, args ...any) { fmt.Fprintf(a.err, "symmem: "+format+"\n", args...) }
