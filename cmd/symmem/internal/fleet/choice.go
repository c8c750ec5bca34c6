package fleet

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/cmd/symmem/internal/exit"
	"github.com/symmem/symmem/cmd/symmem/internal/suggest"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/group"
)

// All stands, in the flag --backend of verify and bench, for every backend in turn.
const All = "all"

// Choice is the meaning of the flag --backend of verify and bench.
type Choice struct {
	Runs     [][]string // the preferences of each run; nil leaves them to the configuration
	Required bool       // each run must find its backend: all are, but those of "all"
}

// Choose parses the value of the flag --backend; given is false if the flag was not used, and the configuration decides. An error is an *exit.Error
// that says what is allowed.
func Choose(text string, given bool, cfg config.Config) (Choice, error) {
	if !given {
		if unknown := UnknownBackend(cfg); unknown != "" { // each rank would find out for itself
			return Choice{}, exit.UsageError(errors.New(unknown))
		}
		return Choice{Runs: [][]string{nil}, Required: true}, nil
	}
	names, err := Names("--backend", text, config.BackendAuto, All)
	if err != nil {
		return Choice{}, err
	}
	if len(names) == 1 && names[0] == All {
		var c Choice
		for _, name := range backend.Names() {
			c.Runs = append(c.Runs, []string{name})
		}
		return c, nil
	}
	c := Choice{Required: true}
	for _, name := range names {
		if name == All {
			return c, exit.Usagef("--backend is %s; %s stands alone", text, All)
		}
		c.Runs = append(c.Runs, []string{name})
	}
	return c, nil
}

// UnknownBackend says which of the preferences of a configuration is no backend, where that comes from and which there are; "" if all are backends.
func UnknownBackend(cfg config.Config) string {
	known := append(backend.Names(), config.BackendAuto)
	for _, name := range cfg.Backend {
		if !slices.Contains(known, name) {
			return fmt.Sprintf("there is no backend %s (%s); there are %s%s", name, cfg.Source("backend"), strings.Join(known, ", "), suggest.DidYouMean(name, known))
		}
	}
	return ""
}

// Launchers returns the values of the setting launcher.
func Launchers() (names []string) {
	for _, l := range group.Launchers(func(string) string { return "" }, nil)[1:] { // the first is what is given explicitly, which is no launcher
		names = append(names, l.Launcher)
	}
	return names
}

// UnknownLauncher says that the setting launcher names none, where that comes from and which there are; "" if it does, or is empty.
func UnknownLauncher(cfg config.Config) string {
	known := Launchers()
	if cfg.Launcher == "" || slices.ContainsFunc(known, func(name string) bool { return strings.EqualFold(name, cfg.Launcher) }) {
		return ""
	}
	return fmt.Sprintf("there is no launcher %s (%s); there are %s%s", cfg.Launcher, cfg.Source("launcher"), strings.Join(known, ", "), suggest.DidYouMean(cfg.Launcher, known))
}

// Names splits a list of backends, the value of flag. Names that are neither registered nor in also are refused with an *exit.Error,
// and so are names that occur twice.
func Names(flag, text string, also ...string) ([]string, error) {
	var names []string
	for name := range strings.SplitSeq(text, ",") {
		name = strings.TrimSpace(name)
		known := append(backend.Names(), also...)
		switch {
		case !slices.Contains(known, name):
			return nil, exit.Usagef("%s is %q; allowed are %s%s", flag, text, strings.Join(known, ", "), suggest.DidYouMean(name, known))
		case slices.Contains(names, name):
			return nil, exit.Usagef("%s is %q, which has %s twice", flag, text, name)
		}
		names = append(names, name)
	}
	return names, nil
}
