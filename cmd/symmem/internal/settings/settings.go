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

// Load reads the configuration from the flags of a command, the environment and the file. An error is an *exit.Error with status 2. It
// has a suggestion if the value of a flag is like one that is allowed.
func Load(flags *pflag.FlagSet, environ []string) (config.Config, error) {
	return load(&config.LoadOptions{Flags: flags, Environ: func() []string { return environ }})
}

// LoadForProgram is Load for a command that starts a program of the user's: options of backends that are not in the command, but may be in
// the program, are left to it.
func LoadForProgram(flags *pflag.FlagSet, environ []string) (config.Config, error) {
	return load(&config.LoadOptions{Flags: flags, Environ: func() []string { return environ }, Foreign: true})
}

func load(opts *config.LoadOptions) (config.Config, error) {
	flags := opts.Flags
	cfg, err := config.Load(opts)
	if err != nil {
		for name, values := range map[string][]string{"multicast": Multicasts, "log-level": LogLevels} {
			if f := flags.Lookup(name); f != nil && f.Changed {
				err = fmt.Errorf("%w%s", err, suggest.DidYouMean(f.Value.String(), values))
			}
		}
	}
	return cfg, exit.UsageError(err)
}

// The values of the settings multicast and log-level.
var (
	Multicasts = []string{config.MulticastAuto, config.MulticastOn, config.MulticastOff}
	LogLevels  = []string{"debug", "info", "warn", "error"}
)

// PlaceKeys are the settings that tell a rank its place. The launcher gives them to each rank.
var PlaceKeys = []string{"rank", "world-size", "local-rank", "local-world-size", "launcher", "rendezvous-addr", "rendezvous-served", "rendezvous-fd",
	"rendezvous-store", "restart"}

// AddForRanks adds the settings to the flags of a command that starts ranks. PlaceKeys are hidden among them: the command refuses them,
// with a better error than that of an unknown flag.
func AddForRanks(flags *pflag.FlagSet) {
	config.AddFlags(flags)
	for _, name := range PlaceKeys {
		_ = flags.MarkHidden(name) // it is there
	}
}

// Ranks is what the configuration of a command means for the ranks that it starts.
type Ranks struct {
	Backend    string   // that the configuration prefers, with commas between several
	Job, Token string   // "" lets the launcher make them
	Vars       []string // the settings that were given as flags, as NAME=value: ranks read variables, not flags

	Timeout, LivenessTimeout time.Duration // of the rendezvous service
}

// ForRanks returns what the ranks of a command are given, from its flags and the configuration that Load returned. The ranks read the environment and
// the file themselves. If one of PlaceKeys was given as a flag, the error is an *exit.Error with status 2.
func ForRanks(command string, flags *pflag.FlagSet, cfg config.Config) (Ranks, error) {
	s := Ranks{Backend: Text(cfg.Backend), Timeout: cfg.Timeout, LivenessTimeout: cfg.LivenessTimeout}
	for _, key := range config.Keys() {
		if cfg.Source(key.Name).Flag == "" {
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
	if file := File(flags); file != "" {
		s.Vars = append(s.Vars, "SYMMEM_CONFIG="+file)
	}
	return s, nil
}

// File returns the configuration file that the flags name; "" if they name none.
func File(flags *pflag.FlagSet) string {
	f := flags.Lookup("config")
	if f == nil || !f.Changed {
		return ""
	}
	return f.Value.String()
}

// CommandLine returns a command with the flags that were given to it, as it can be given again, without the token.
func CommandLine(command string, flags *pflag.FlagSet) []string {
	args := strings.Fields(command)
	flags.Visit(func(f *pflag.Flag) {
		if f.Name == "token" {
			return
		}
		text := f.Value.String()
		if list, ok := f.Value.(pflag.SliceValue); ok { // whose text has brackets, which are no part of a name
			text = strings.Join(list.GetSlice(), ",")
		}
		args = append(args, "--"+f.Name+"="+text)
	})
	return args
}

// HeardByRanks returns an error, an *exit.Error with status 2, if a flag is empty and the file has a value for its setting. Ranks are given variables, of which
// an empty one counts as unset, and would take that value.
func HeardByRanks(flags *pflag.FlagSet, environ []string, cfg config.Config) error {
	for _, key := range config.Keys() {
		if cfg.Source(key.Name).Flag == "" || slices.Contains([]string{"job", "token"}, key.Name) || Text(cfg.Value(key.Name)) != "" {
			continue
		}
		theirs, err := config.Load(&config.LoadOptions{File: File(flags), Foreign: true, Environ: func() []string { return append(slices.Clip(environ), key.Env+"=") }})
		if file := theirs.Source(key.Name).File; err == nil && file != "" {
			return exit.Usagef("--%s is empty, and ranks would take the value that the file %s has; take it out of the file, or name another one with --config", key.Name, file)
		}
	}
	return nil
}

// Text returns the value of a setting in the form in which the configuration reads it.
func Text(value any) string {
	switch v := value.(type) {
	case []string:
		return strings.Join(v, ",")
	case time.Duration:
		return v.String()
	}
	return fmt.Sprint(value)
}
