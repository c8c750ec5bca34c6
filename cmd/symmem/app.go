package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"

	"github.com/spf13/cobra"

	_ "github.com/symmem/symmem/backend/all" // every backend can be named
	"github.com/symmem/symmem/config"
)

// The exit statuses that do not come from a rank.
const (
	exitOK      = 0
	exitFailure = 1
	exitUsage   = 2
)

// exitError is an error with the status that it ends the command with. err may be nil: then all was said before.
type exitError struct {
	status int
	err    error
}

func (e *exitError) Error() string {
	if e.err == nil {
		return fmt.Sprintf("exit status %d", e.status)
	}
	return e.err.Error()
}

func (e *exitError) Unwrap() error { return e.err }

// usageError marks a mistake in the command line or the configuration.
func usageError(err error) error {
	if err == nil {
		return nil
	}
	return &exitError{status: exitUsage, err: err}
}

// usagef is usageError of a text.
func usagef(format string, args ...any) error { return usageError(fmt.Errorf(format, args...)) }

// app is what the sub-commands share: what the process was started with.
type app struct {
	args     []string // the first is the sub-command
	in       io.Reader
	out, err io.Writer
	environ  []string
}

// run is the whole command: it takes what a process is started with and gives its exit status. It blocks until the command
// has ended, at the latest soon after ctx has, and leaves nothing behind.
func run(ctx context.Context, args []string, in io.Reader, out, errOut io.Writer, environ []string) int {
	a := &app{args: args, in: in, out: out, err: errOut, environ: environ}
	root := a.rootCommand()
	root.SetArgs(append([]string{}, args...)) // never nil, for which cobra takes os.Args
	root.SetIn(in)
	root.SetOut(out)
	root.SetErr(errOut)
	command, err := root.ExecuteContextC(ctx)
	if err == nil {
		return exitOK
	}
	// Whatever cobra itself refuses is a mistake in the command line: the sub-commands give exitErrors.
	exit, ok := errors.AsType[*exitError](err)
	if !ok {
		exit = &exitError{status: exitUsage, err: err}
	}
	if exit.err != nil {
		fmt.Fprintf(errOut, "%s %v\n", a.painterFor(errOut).bad("symmem:"), err)
		if exit.status == exitUsage {
			fmt.Fprintf(errOut, "Run '%s --help' for usage.\n", command.CommandPath())
		}
	}
	return exit.status
}

func (a *app) rootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:                        "symmem",
		Version:                    readBuild().String(),
		Short:                      "Start, check and measure programs on symmetric memory",
		SilenceErrors:              true,
		SilenceUsage:               true,
		SuggestionsMinimumDistance: maxTypos,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return nil
			}
			if meant := cmd.SuggestionsFor(args[0]); len(meant) > 0 {
				return usagef("there is no command %q (did you mean %s?)", args[0], strings.Join(meant, " or "))
			}
			return usagef("there is no command %q", args[0])
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			fmt.Fprint(a.err, cmd.UsageString())
			return usagef("a command is missing")
		},
	}
	root.SetVersionTemplate("{{.Version}}\n")
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error { return usageError(suggestFlag(cmd, err)) })
	root.AddCommand(a.doctorCommand(), a.runCommand(), a.verifyCommand(), a.benchCommand(), a.versionCommand(),
		a.verifyRankCommand(), a.benchRankCommand(), a.probeCommand())
	for _, cmd := range root.Commands() {
		a.completeValues(cmd)
	}
	return root
}

// failing makes any error that is not an exitError a failure with status 1.
func failing(f func(cmd *cobra.Command, args []string) error) func(cmd *cobra.Command, args []string) error {
	return func(cmd *cobra.Command, args []string) error {
		err := f(cmd, args)
		if _, ok := errors.AsType[*exitError](err); err == nil || ok {
			return err
		}
		return &exitError{status: exitFailure, err: err}
	}
}

// noArgs refuses arguments.
func noArgs(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return usagef("%s takes no arguments, and %q was given", cmd.Name(), args[0])
	}
	return nil
}

// load reads the configuration that the command's flags, the environment and the file give.
func (a *app) load(cmd *cobra.Command) (config.Config, error) {
	cfg, err := config.Load(&config.LoadOptions{Flags: cmd.Flags(), Environ: func() []string { return a.environ }})
	if err != nil {
		for name, values := range map[string][]string{"multicast": multicastValues, "log-level": logLevels} {
			if f := cmd.Flags().Lookup(name); f != nil && f.Changed {
				err = fmt.Errorf("%w%s", err, didYouMean(f.Value.String(), values))
			}
		}
	}
	return cfg, usageError(err)
}

// getenv reads a variable of the environment that the command was started with.
func (a *app) getenv(name string) string {
	value := ""
	for _, entry := range a.environ {
		if n, v, ok := strings.Cut(entry, "="); ok && n == name {
			value = v
		}
	}
	return value
}

// self is the path of this executable, to start ranks from.
func self() (string, error) {
	path, err := os.Executable()
	if err != nil {
		return "", fmt.Errorf("finding this executable, to start ranks from: %w", err)
	}
	return path, nil
}

// catch gives the signals that a launcher passes on, until stop is called.
func catch() (signals <-chan os.Signal, stop func()) {
	c := make(chan os.Signal, 16)
	signal.Notify(c, forwarded...)
	return c, func() { signal.Stop(c) }
}
