package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/symmem/symmem/cmd/symmem/internal/build"
	"github.com/symmem/symmem/cmd/symmem/internal/exit"
	"github.com/symmem/symmem/cmd/symmem/internal/process"
	"github.com/symmem/symmem/cmd/symmem/internal/suggest"
	"github.com/symmem/symmem/cmd/symmem/internal/terminal"
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
	root := a.rootCommand()
	root.SetArgs(append([]string{}, args...)) // never nil, for which cobra takes os.Args
	root.SetIn(in)
	cobras := &keptError{w: out} // who does not look at what writing a help has come to
	root.SetOut(cobras)
	root.SetErr(errOut)
	refuseUnknown(root) // cobra's own commands write to the output that there is now
	command, err := root.ExecuteContextC(ctx)
	if _, ours := errors.AsType[*exit.Error](err); cobras.err != nil && !ours {
		err = &exit.Error{Status: exit.Failure, Err: cobras.err}
	}
	if err == nil {
		return exit.OK
	}
	// Whatever cobra itself refuses is a mistake in the command line: the errors of the sub-commands have a status.
	ending, ok := errors.AsType[*exit.Error](err)
	if !ok {
		ending = &exit.Error{Status: exit.Usage, Err: err}
	}
	if ending.Err != nil {
		fmt.Fprintf(errOut, "%s %v\n", terminal.PainterFor(errOut, a.Getenv).Bad("symmem:"), err)
		if ending.Status == exit.Usage {
			fmt.Fprintf(errOut, "Run '%s --help' for usage.\n", command.CommandPath())
		}
	}
	return ending.Status
}

// keptError keeps the first error of a writer.
type keptError struct {
	w   io.Writer
	err error
}

func (k *keptError) Write(p []byte) (int, error) {
	n, err := k.w.Write(p)
	if k.err == nil {
		k.err = err
	}
	return n, err
}

func (a app) rootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:                        "symmem",
		Version:                    build.Read().String(),
		Short:                      "Start, check and measure programs on symmetric memory",
		SilenceErrors:              true,
		SilenceUsage:               true,
		SuggestionsMinimumDistance: suggest.MaxTypos,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return nil
			}
			if meant := cmd.SuggestionsFor(args[0]); len(meant) > 0 {
				return exit.Usagef("there is no command %q (did you mean %s?)", args[0], strings.Join(meant, " or "))
			}
			return exit.Usagef("there is no command %q", args[0])
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			fmt.Fprint(a.Err, cmd.UsageString())
			return exit.Usagef("a command is missing")
		},
	}
	root.SetVersionTemplate("{{.Version}}\n")
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error { return exit.UsageError(suggest.Flag(cmd, err)) })
	root.AddCommand(a.doctorCommand(), a.runCommand(), a.rendezvousCommand(), a.verifyCommand(), a.benchCommand(), a.tuneCommand(), a.versionCommand(),
		a.verifyRankCommand(), a.benchRankCommand(), a.tuneRankCommand(), a.probeCommand())
	for _, cmd := range root.Commands() {
		a.completeValues(cmd)
	}
	return root
}

// refuseUnknown makes what cobra's own commands do not know a mistake: they would print a help that nobody has asked for, and succeed.
func refuseUnknown(root *cobra.Command) {
	root.InitDefaultHelpCmd()
	root.InitDefaultCompletionCmd()
	for _, cmd := range root.Commands() {
		switch cmd.Name() {
		case "help":
			cmd.Args = func(_ *cobra.Command, args []string) error {
				_, rest, err := root.Find(args)
				if err != nil {
					return err
				}
				if len(rest) > 0 {
					return exit.Usagef("there is no command %q to help with", strings.Join(args, " "))
				}
				return nil
			}
		case "completion": // it takes no arguments, which cobra looks at only where a command runs
			cmd.RunE = func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
		}
	}
}

// failing makes any error without a status of its own a failure with status 1.
func failing(f func(cmd *cobra.Command, args []string) error) func(cmd *cobra.Command, args []string) error {
	return func(cmd *cobra.Command, args []string) error {
		err := f(cmd, args)
		if _, ok := errors.AsType[*exit.Error](err); err == nil || ok {
			return err
		}
		return &exit.Error{Status: exit.Failure, Err: err}
	}
}

// noArgs refuses arguments.
func noArgs(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return exit.Usagef("%s takes no arguments, and %q was given", cmd.Name(), args[0])
	}
	return nil
}

// jsonUsage is what --json says on every command that has it: it means the same on all.
const jsonUsage = "print the results as JSON on the standard output, instead of text"
