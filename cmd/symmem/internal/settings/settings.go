// Package settings reads the configuration of a command, and turns it into what the ranks that it starts are given.
package settings

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/symmem/symmem/cmd/symmem/internal/exit"
	"github.com/symmem/symmem/cmd/symmem/internal/suggest"
	"github.com/symmem/symmem/config"
)

// Load reads the configuration that the flags of a command, the environment and the file give. An error is a mistake of the user's,
// with a suggestion where a flag's value is like one that is allowed.
func Load(flags *pflag.FlagSet, environ []string) (config.Config, error) {
	cfg, err := config.Load(&config.LoadOptions{Flags: flags, Environ: func() []string { return environ }})
	if err != nil {
		for name, values := range map[string][]string{"multicast": Multicasts, "log-level": LogLevels} {
			if f := flags.Lookup(name); f != nil && f.Changed {
				err = fmt.Errorf("%w%s", err, suggest.DidYouMean(f.Value.String(), values))
			}
		}
	}
	return cfg, exit.UsageError(err)
}

// The values of settings that take only some.
var (
	Multicasts = []string{config.MulticastAuto, config.MulticastOn, config.MulticastOff}
	LogLevels  = []string{"debug", "info", "warn", "error"}
)

// PlaceKeys are the settings that the launcher gives each rank itself.
var PlaceKeys = []string{"rank", "world-size", "local-rank", "local-world-size", "launcher", "rendezvous-addr", "rendezvous-fd",
	"restart"}

// AddForRanks adds the settings that a launching command takes for its ranks to its flags. Those that it refuses are known, for the
// sake of a better error, and not shown.
func AddForRanks(flags *pflag.FlagSet) {
	config.AddFlags(flags)
	for _, name := range PlaceKeys {
		_ = flags.MarkHidden(name) // it is there
	}
}

// Ranks is what the configuration of a launching command means for its ranks.
type Ranks struct {
	Job, Token string   // "" lets the launcher make them
	Vars       []string // the settings that were given as flags, as NAME=value: ranks know no flags, but they read variables
}

// ForRanks turns the flags of a launching command and the configuration that Load gave into what its ranks are given. What the environment and the file say,
// the ranks read for themselves. An error is a mistake in the command line: --rank and the like are not for a launching command.
func ForRanks(command string, flags *pflag.FlagSet, cfg config.Config) (Ranks, error) {
	var s Ranks
	for _, key := range config.Keys() {
		if cfg.Source(key.Name).Kind != config.SourceFlag {
			continue
		}
		switch {
		case slices.Contains(PlaceKeys, key.Name):
			return s, exit.Usagef("--%s is not for %s, which gives each rank its place itself", key.Name, command)
		case key.Name == "job":
			s.Job = cfg.Job
		case key.Name == "token":
			s.Token = cfg.Token.Reveal()
		default:
			s.Vars = append(s.Vars, key.Env+"="+Text(cfg.Value(key.Name)))
		}
	}
	if f := flags.Lookup("config"); f != nil && f.Changed {
		s.Vars = append(s.Vars, "SYMMEM_CONFIG="+f.Value.String())
	}
	return s, nil
}

// Text gives a value as the configuration reads it.
func Text(value any) string {
	switch v := value.(type) {
	case []string:
		return strings.Join(v, ",")
	case time.Duration:
		return v.String()
	}
	return fmt.Sprint(value)
}
