package command

import (
	"github.com/spf13/cobra"

	"github.com/symmem/symmem/cmd/symmem/internal/cli"
	"github.com/symmem/symmem/cmd/symmem/internal/doctor"
	"github.com/symmem/symmem/cmd/symmem/internal/exit"
	"github.com/symmem/symmem/cmd/symmem/internal/terminal"
	"github.com/symmem/symmem/config"
)

func (a app) doctorCommand() *cobra.Command {
	var asJSON, verbose bool
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Say what works on this machine, and what to do about what does not",
		Long: `Doctor probes every backend, each in a process of its own, looks for the native libraries that they stand on, and checks
the configuration. With --verbose it also shows what each backend can do, where libraries were looked for, what launchers this
process would see, which limits the system sets, and every setting with its source.

The last line is the verdict: whether a program could begin here. --backend, SYMMEM_BACKEND or the configuration file name the
backends that it may take; by default any will do. The exit status is 1 if none of them can be used or the configuration is not
valid.`,
		Example: "  symmem doctor --backend nccl\n  symmem doctor --verbose",
		Args:    cli.NoArgs,
	}
	cmd.RunE = cli.Failing(func(cmd *cobra.Command, _ []string) error {
		d := doctor.Diagnose(cmd.Context(), a.Process, cmd.Flags())
		var err error
		if asJSON {
			err = a.PrintJSON(d)
		} else {
			err = d.Write(a.Out, verbose, terminal.PainterFor(a.Out, a.Getenv))
		}
		if err != nil {
			return err
		}
		if !d.Verdict.OK {
			return &exit.Error{Status: exit.Failure}
		}
		return nil
	})
	cmd.Flags().BoolVar(&asJSON, "json", false, jsonUsage)
	cmd.Flags().BoolVarP(&verbose, "verbose", "v", false, "show everything that was found, also what is as it should be")
	config.AddFlags(cmd.Flags())
	return cmd
}
