package command

import (
	"context"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"github.com/symmem/symmem/cmd/symmem/internal/build"
	"github.com/symmem/symmem/cmd/symmem/internal/cli"
	"github.com/symmem/symmem/cmd/symmem/internal/exit"
	"github.com/symmem/symmem/cmd/symmem/internal/process"
	"github.com/symmem/symmem/cmd/symmem/internal/rendezvous"
	"github.com/symmem/symmem/cmd/symmem/internal/suggest"
)

// Main runs the command with the arguments, streams and environment of this process, and ends the process with the status that the command
// symmem is documented to have. It does not return.
func Main() {
	os.Exit(run(context.Background(), os.Args[1:], os.Stdin, os.Stdout, os.Stderr, os.Environ()))
}

// app is what the sub-commands share.
type app struct{ *process.Process }

// run is the whole command: it takes what a process is started with and returns its exit status. It blocks until the command has ended, which is at
// the latest soon after ctx ends, and leaves nothing behind.
func run(ctx context.Context, args []string, in io.Reader, out, errOut io.Writer, environ []string) int {
	a := app{&process.Process{Args: args, In: in, Out: out, Err: errOut, Environ: environ}}
	return cli.Run(ctx, a.Process, a.rootCommand())
}

func (a app) rootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:     "symmem",
		Version: build.Read().String(),
		Short:   "Start, check and measure programs on symmetric memory",
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return nil
			}
			var names []string
			for _, c := range cmd.Commands() {
				if c.IsAvailableCommand() {
					names = append(names, c.Name())
				}
			}
			return exit.Usagef("there is no command %q%s", args[0], suggest.DidYouMean(args[0], names))
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			fmt.Fprint(a.Err, cmd.UsageString())
			return exit.Usagef("a command is missing")
		},
	}
	root.AddCommand(a.doctorCommand(), a.runCommand(), rendezvous.Command(a.Process), a.verifyCommand(), a.benchCommand(), a.tuneCommand(), a.versionCommand(),
		a.verifyRankCommand(), a.benchRankCommand(), a.tuneRankCommand(), a.probeCommand())
	for _, cmd := range root.Commands() {
		a.completeValues(cmd)
	}
	return root
}

// jsonUsage is what --json says on every command that has it: it means the same on all.
const jsonUsage = "print the results as JSON on the standard output, instead of text"
