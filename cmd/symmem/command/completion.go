package command

import (
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/cmd/symmem/internal/bench"
	"github.com/symmem/symmem/cmd/symmem/internal/fleet"
	"github.com/symmem/symmem/cmd/symmem/internal/measure"
	"github.com/symmem/symmem/cmd/symmem/internal/settings"
	"github.com/symmem/symmem/config"
)

// backendValues returns what the flag --backend of a command may have in its list.
func backendValues(command string) []string {
	names := append(backend.Names(), config.BackendAuto)
	if command == "verify" || command == "bench" {
		names = append(names, fleet.All)
	}
	return names
}

// completeValues lets shells complete the values of a command's flags, and no file names where none are meant.
func (a app) completeValues(cmd *cobra.Command) {
	lists := map[string]func() []string{
		"backend": func() []string { return backendValues(cmd.Name()) }, "require": backend.Names, "kind": func() []string { return measure.Kinds },
	}
	if cmd.Name() == "tune" { // which has lists where bench has one
		lists["kind"] = func() []string { return measure.TuneKinds }
		lists["dtype"] = bench.DTypes
	}
	words := map[string]func() []string{
		"dtype": bench.DTypes, "op": bench.Ops, "algorithm": bench.Algorithms, "launcher": fleet.Launchers,
		"mode": func() []string { return bench.Modes }, "place": func() []string { return bench.Places }, "peer": func() []string { return bench.Peers },
		"multicast": func() []string { return settings.Multicasts }, "log-level": func() []string { return settings.LogLevels },
	}
	register := func(name string, f cobra.CompletionFunc) {
		if cmd.Flags().Lookup(name) != nil {
			_ = cmd.RegisterFlagCompletionFunc(name, f) // it is there, and once
		}
	}
	for name, values := range lists {
		register(name, func(_ *cobra.Command, _ []string, begun string) ([]string, cobra.ShellCompDirective) {
			return completeList(begun, values()), cobra.ShellCompDirectiveNoFileComp | cobra.ShellCompDirectiveNoSpace
		})
	}
	for name, values := range words {
		if lists[name] != nil {
			continue
		}
		register(name, func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
			return values(), cobra.ShellCompDirectiveNoFileComp
		})
	}
	if cmd.Name() != "run" { // whose first argument is a program
		cmd.ValidArgsFunction = cobra.NoFileCompletions
	}
}

// completeList completes the last entry of a list with commas between its entries by those that it has not yet.
func completeList(begun string, values []string) []string {
	had := begun[:strings.LastIndexByte(begun, ',')+1]
	entries := strings.Split(had, ",")
	var all []string
	for _, v := range values {
		if !slices.Contains(entries, v) {
			all = append(all, had+v)
		}
	}
	return all
}
