package command

import (
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/symmem/symmem/cmd/symmem/internal/cli"
	"github.com/symmem/symmem/cmd/symmem/internal/launch"
	"github.com/symmem/symmem/cmd/symmem/internal/measure"
	"github.com/symmem/symmem/cmd/symmem/internal/settings"
	"github.com/symmem/symmem/cmd/symmem/internal/tune"
	"github.com/symmem/symmem/config"
)

func (a app) tuneCommand() *cobra.Command {
	var o tune.Options
	cmd := &cobra.Command{
		Use:   "tune",
		Short: "Measure which forms of collectives are the fastest here, and make a table of them",
		Long: `Tune starts ranks on this machine and measures every form of the collectives at each size, and several numbers of blocks and lengths of
laps of the fastest ones: those of copy engines too, and those of multicast where the setting multicast allows it. It prints what it found beside the
table in use without it, the one that comes with symmem or an estimate.

A form replaces the one in use only where it is faster by more than noise, twice. Its time is the median of the repetitions, of the slowest rank; on GPUs
runs are replayed from a graph.

With --output the table goes to a file. Programs use it where the setting tuning names it (SYMMEM_TUNING). Rules that the file has for other
numbers of ranks stay in it, also those that came in while tune measured, so it may be called for each number of ranks in turn. What was not measured is as in the table in use. On an interrupt
no file is written, and what is printed says that it is incomplete. As one of several processes that a launcher has started on a host, tune is refused: they would measure each other.`,
		Example: "  symmem tune --backend native -n 4 --output tuning.json\n" +
			"  SYMMEM_TUNING=tuning.json symmem bench --backend native -n 4 --kind all_reduce",
		Args: cli.NoArgs,
	}
	cmd.RunE = cli.Failing(func(cmd *cobra.Command, _ []string) error {
		return tune.Run(cmd.Context(), a.Process, cmd.CommandPath(), cmd.Flags(), o)
	})
	flags := cmd.Flags()
	flags.StringVar(&o.Backend, "backend", config.BackendAuto, "name of the backend; auto takes the best that works")
	flags.IntVarP(&o.Ranks, "ranks", "n", 4, fmt.Sprintf("number of ranks, 2 to %d", launch.MaxRanks))
	flags.StringVar(&o.Sizes, "sizes", "1K:256M", "bytes of a message: a range that doubles, or sizes with commas between them")
	flags.StringVar(&o.Kinds, "kind", strings.Join(measure.TuneKinds, ","), "collectives, with commas between")
	flags.StringVar(&o.DTypes, "dtype", "bf16,f32,i32", "types of the elements of reductions, one of each width and kind that is used, with commas between")
	flags.IntVar(&o.Reps, "reps", 7, "repetitions of each measurement")
	flags.DurationVar(&o.Time, "time", 10*time.Minute, "after which no further size is begun; 0 for no bound")
	flags.BoolVar(&o.JSON, "json", false, jsonUsage)
	flags.StringVarP(&o.OutputFile, "output", "o", "", "file for the table")
	settings.AddForRanks(flags)
	return cmd
}

// tuneRankCommand is what a rank of tune runs.
func (a app) tuneRankCommand() *cobra.Command {
	return a.measuringRankCommand("tune", tune.RankCommand, tune.SpecFlag, tune.Rank)
}
