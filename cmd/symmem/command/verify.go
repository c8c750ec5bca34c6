package command

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/symmem/symmem/cmd/symmem/internal/cli"
	"github.com/symmem/symmem/cmd/symmem/internal/fleet"
	"github.com/symmem/symmem/cmd/symmem/internal/launch"
	"github.com/symmem/symmem/cmd/symmem/internal/settings"
	"github.com/symmem/symmem/cmd/symmem/internal/verify"
	"github.com/symmem/symmem/config"
)

func (a app) verifyCommand() *cobra.Command {
	var o verify.Options
	cmd := &cobra.Command{
		Use:   "verify",
		Short: "Run the correctness suite",
		Long: `Verify starts ranks on this machine and runs the correctness suite on one backend, or on several in turn. A rank that dies
or hangs is a failure that names it. The last line is the count of cases that passed, failed and were skipped; a backend of
"all" that cannot be used counts as one skipped case. A backend that was asked for by name, or with --require, must be there.

In a job that torchrun, mpirun, srun or Kubernetes has started, each process is one rank of the job instead: all are given the same flags without
--ranks, rank 0 prints, and every rank has the same exit status. An error of another rank is on its standard error, with its number.

With --simulate there are no GPUs and no driver: simulated ones run the kernels' PTX, and every line says simulated. The seed makes a
run alike, not the same: when work is enqueued is up to this machine. With --weak their memory is as weak as PTX lets it be.

The exit status is 1 if anything failed.`,
		Example: "  symmem verify --backend all --require host -n 4\n  mpiexec -n 4 symmem verify",
		Args:    cli.NoArgs,
	}
	cmd.RunE = cli.Failing(func(cmd *cobra.Command, _ []string) error {
		return verify.Run(cmd.Context(), a.Process, cmd.Flags(), o)
	})
	flags := cmd.Flags()
	flags.StringVar(&o.Backends, "backend", config.BackendAuto,
		"names with commas between them, each in turn; auto takes the best that works, all takes every one")
	flags.IntVarP(&o.Ranks, "ranks", "n", 4, fmt.Sprintf("number of ranks to start, 1 to %d", launch.MaxRanks))
	flags.StringVar(&o.Filter, "filter", "", "regular expression that the names of the cases must match")
	flags.StringVar(&o.Require, "require", "", "names of backends that must be there, with commas between them")
	flags.BoolVar(&o.Short, "short", false, "leave out large sizes and do fewer rounds")
	flags.BoolVar(&o.JSON, "json", false, jsonUsage)
	flags.BoolVar(&o.Simulate, "simulate", false, "run the short form on simulated GPUs with multicast, in one process: on native, or on nccl or nvshmem with a simulated library")
	flags.Uint64Var(&o.Seed, "seed", 1, "of the simulated GPUs: what their schedules and the order of additions come from")
	flags.BoolVar(&o.Weak, "weak", false, "give the simulated GPUs weak memory, so that a race is an error: slow; on native, with a --filter")
	settings.AddForRanks(flags)
	return cmd
}

// verifyRankCommand is what a rank of verify runs.
func (a app) verifyRankCommand() *cobra.Command {
	var o verify.Options
	fd := -1
	cmd := &cobra.Command{Use: verify.RankCommand, Short: "Be one rank of verify", Hidden: true, Args: cli.NoArgs}
	cmd.RunE = cli.Failing(func(cmd *cobra.Command, _ []string) error {
		return verify.Rank(cmd.Context(), a.Process, cmd.Flags(), fd, o)
	})
	cmd.Flags().StringVar(&o.Filter, "filter", "", "regular expression that the names of the cases must match")
	cmd.Flags().BoolVar(&o.Short, "short", false, "leave out large sizes and do fewer rounds")
	cmd.Flags().IntVar(&fd, fleet.ReportFlag, fd, "descriptor of the pipe to report to")
	return cmd
}
