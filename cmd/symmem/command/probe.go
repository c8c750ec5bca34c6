package command

import (
	"encoding/json"

	"github.com/spf13/cobra"

	"github.com/symmem/symmem/cmd/symmem/internal/cli"
	"github.com/symmem/symmem/cmd/symmem/internal/exit"
	"github.com/symmem/symmem/cmd/symmem/internal/probe"
)

// probeCommand is what probes run in processes of their own.
func (a app) probeCommand() *cobra.Command {
	var libraries bool
	cmd := &cobra.Command{
		Use:    probe.Command + " BACKEND",
		Short:  "Probe one backend and print the finding as a line of JSON",
		Hidden: true,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 {
				return exit.Usagef("the backend to probe is missing")
			}
			return nil
		},
		RunE: cli.Failing(func(cmd *cobra.Command, args []string) error {
			var found any
			var err error
			if libraries {
				found, err = probe.LibrariesHere(cmd.Context(), a.Process, args[0])
			} else {
				found, err = probe.Here(cmd.Context(), a.Process, args[0])
			}
			if err != nil {
				return exit.UsageError(err)
			}
			return json.NewEncoder(a.Out).Encode(found)
		}),
	}
	cmd.Flags().BoolVar(&libraries, probe.LibrariesFlag, false, "what was found of the native libraries that it stands on")
	return cmd
}
