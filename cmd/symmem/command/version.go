package command

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/symmem/symmem/cmd/symmem/internal/build"
	"github.com/symmem/symmem/cmd/symmem/internal/cli"
)

func (a app) versionCommand() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Say which build this is",
		Args:  cli.NoArgs,
		RunE: cli.Failing(func(*cobra.Command, []string) error {
			if asJSON {
				return a.PrintJSON(build.Read())
			}
			_, err := fmt.Fprintln(a.Out, build.Read())
			return err
		}),
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, jsonUsage)
	return cmd
}
