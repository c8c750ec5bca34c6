package main

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/symmem/symmem/config"
)

// placeKeys are the settings that the launcher gives each rank itself.
var placeKeys = []string{"rank", "world-size", "local-rank", "local-world-size", "launcher", "rendezvous-addr", "rendezvous-fd",
	"restart"}

// addRankFlags adds the settings that a launching command takes for its ranks to its flags. Those that it refuses are known, for the
// sake of a better error, and not shown.
func addRankFlags(flags *pflag.FlagSet) {
	config.AddFlags(flags)
	for _, name := range placeKeys {
		_ = flags.MarkHidden(name) // it is there
	}
}

// rankSettings is what the configuration of a launching command means for its ranks.
type rankSettings struct {
	job, token string   // "" lets the launcher make them
	vars       []string // the settings that were given as flags, as NAME=value: ranks know no flags, but they read variables
}

// settingsForRanks turns the flags of a launching command into what its ranks are given. What the environment and the file say,
// the ranks read for themselves.
func settingsForRanks(cmd *cobra.Command, cfg config.Config) (rankSettings, error) {
	var s rankSettings
	for _, key := range config.Keys() {
		if cfg.Source(key.Name).Kind != config.SourceFlag {
			continue
		}
		switch {
		case slices.Contains(placeKeys, key.Name):
			return s, usagef("--%s is not for %s, which gives each rank its place itself", key.Name, cmd.Name())
		case key.Name == "job":
			s.job = cfg.Job
		case key.Name == "token":
			s.token = cfg.Token.Reveal()
		default:
			s.vars = append(s.vars, key.Env+"="+settingText(cfg.Value(key.Name)))
		}
	}
	if f := cmd.Flags().Lookup("config"); f != nil && f.Changed {
		s.vars = append(s.vars, "SYMMEM_CONFIG="+f.Value.String())
	}
	return s, nil
}

// settingText gives a value as the configuration reads it.
func settingText(value any) string {
	switch v := value.(type) {
	case []string:
		return strings.Join(v, ",")
	case time.Duration:
		return v.String()
	}
	return fmt.Sprint(value)
}
