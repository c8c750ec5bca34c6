// Package cli runs a command of cobra's as the commands of this module run: with the statuses that they are documented to have, and without anything global.
package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/symmem/symmem/cmd/symmem/internal/exit"
	"github.com/symmem/symmem/cmd/symmem/internal/process"
	"github.com/symmem/symmem/cmd/symmem/internal/suggest"
	"github.com/symmem/symmem/cmd/symmem/internal/terminal"
)

// Run runs root with what the process was started with, says on its standard error what has failed, and returns the exit status. It blocks until the command has
// ended.
func Run(ctx context.Context, p *process.Process, root *cobra.Command) int {
	root.SilenceErrors, root.SilenceUsage = true, true
	root.SetVersionTemplate("{{.Version}}\n")
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error { return exit.UsageError(suggest.Flag(cmd, err)) })
	root.SetArgs(append([]string{}, p.Args...)) // never nil, for which cobra takes os.Args
	root.SetIn(p.In)
	cobras := &keptError{w: p.Out} // who does not look at what writing a help has come to
	root.SetOut(cobras)
	root.SetErr(p.Err)
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
		fmt.Fprintf(p.Err, "%s %v\n", terminal.PainterFor(p.Err, p.Getenv).Bad(root.Name()+":"), err)
		if ending.Status == exit.Usage {
			fmt.Fprintf(p.Err, "Run '%s --help' for usage.\n", command.CommandPath())
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

// Failing makes any error without a status of its own a failure with status 1.
func Failing(f func(cmd *cobra.Command, args []string) error) func(cmd *cobra.Command, args []string) error {
	return func(cmd *cobra.Command, args []string) error {
		err := f(cmd, args)
		if _, ok := errors.AsType[*exit.Error](err); err == nil || ok {
			return err
		}
		return &exit.Error{Status: exit.Failure, Err: err}
	}
}

// NoArgs refuses arguments.
func NoArgs(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return exit.Usagef("%s takes no arguments, and %q was given", cmd.Name(), args[0])
	}
	return nil
}
