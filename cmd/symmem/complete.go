package main

import (
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/tensor"
)

// The values that flags take of which there are only some.
var (
	multicastValues = []string{config.MulticastAuto, config.MulticastOn, config.MulticastOff}
	logLevels       = []string{"debug", "info", "warn", "error"}
	benchModes      = []string{"eager", "graph"}
	benchPlaces     = []string{"in", "out"}
	benchPeers      = []string{peerAuto, peerNCCL, peerNVSHMEM, peerNone}
)

func texts[T interface{ String() string }](all []T) []string {
	names := make([]string, len(all))
	for i, a := range all {
		names[i] = a.String()
	}
	return names
}

func dtypeNames() []string { return texts(tensor.DTypes()) }

func opNames() []string { return texts(kernels.Ops()) }

// algorithmNames gives the forms of all-reduce on every device and backend, and all.
func algorithmNames() []string {
	names := []string{"all"}
	for a := kernels.Auto; ; a++ {
		if _, err := kernels.ParseAlgorithm(a.String()); err != nil {
			return names
		}
		names = append(names, a.String())
	}
}

// backendValues gives what the flag --backend of a command may have in its list.
func backendValues(command string) []string {
	names := append(backend.Names(), config.BackendAuto)
	if command == "verify" || command == "bench" {
		names = append(names, allBackends)
	}
	return names
}

// completeValues lets shells complete the values of a command's flags, and no file names where none are meant.
func (a *app) completeValues(cmd *cobra.Command) {
	launchers := func() (names []string) {
		for _, l := range group.Launchers(a.getenv) {
			names = append(names, l.Launcher)
		}
		return names
	}
	lists := map[string]func() []string{
		"backend": func() []string { return backendValues(cmd.Name()) }, "require": backend.Names, "kind": func() []string { return benchKinds },
	}
	words := map[string]func() []string{
		"dtype": dtypeNames, "op": opNames, "algorithm": algorithmNames, "launcher": launchers,
		"mode": func() []string { return benchModes }, "place": func() []string { return benchPlaces }, "peer": func() []string { return benchPeers },
		"multicast": func() []string { return multicastValues }, "log-level": func() []string { return logLevels },
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
