package config

import (
	"errors"
	"fmt"
	"os"
	"reflect"
	"strings"

	"github.com/symmem/symmem/internal/errs"
)

// Resolve returns the settings that c stands for, and validates them. It is what opening symmetric memory begins with.
//
//   - The zero Config stands for what [Load] finds without options, in the environment, the file and the defaults.
//   - Any other Config stands for itself: it must be valid, and no variable and no file changes a setting. A Config that leaves the place to
//     meet to the launcher (RendezvousAddr is "") leaves to it what belongs to that place as well: where Token is empty it is
//     SYMMEM_TOKEN, and where RendezvousFD is -1 it is SYMMEM_RENDEZVOUS_FD.
//
// environ gives the environment as "NAME=value"; nil is os.Environ. All errors are ErrInvalid, but for those of reading the file.
func Resolve(c Config, environ func() []string) (Config, error) {
	if reflect.ValueOf(c).IsZero() {
		return Load(&LoadOptions{Environ: environ})
	}
	var bad error
	if c.RendezvousAddr == "" {
		bad = c.takeMeeting(environ)
	}
	if err := errors.Join(append([]error{bad}, c.problems()...)...); err != nil {
		return Config{}, err
	}
	return c, nil
}

// takeMeeting takes the token and the inherited socket from the environment, where c leaves them open.
func (c *Config) takeMeeting(environ func() []string) error {
	if environ == nil {
		environ = os.Environ
	}
	sources := make(map[string]Source, len(specs))
	for _, k := range Keys() {
		sources[k.Name] = c.Source(k.Name)
	}
	vars := map[string]string{}
	for _, entry := range environ() {
		name, value, _ := strings.Cut(entry, "=")
		vars[name] = strings.TrimSpace(value)
	}
	var bad error
	if name := lookup("token").env(); c.Token.IsZero() && vars[name] != "" {
		c.Token, sources["token"] = NewSecret(vars[name]), Source{SourceEnv, name}
	}
	if name := lookup("rendezvous-fd").env(); c.RendezvousFD == -1 && vars[name] != "" {
		if fd, err := wholeNumber(vars[name]); err == nil {
			c.RendezvousFD, sources["rendezvous-fd"] = fd, Source{SourceEnv, name}
		} else {
			bad = fmt.Errorf("%s: %w", Source{SourceEnv, name}, errs.Invalid(op, "rendezvous-fd", vars[name], allowedForm(err)))
		}
	}
	c.remember(sources)
	return bad
}

// leftOut lists the keys that must have a value and have none in a Config that was written as a literal, or is empty for any other.
// Descriptor 0 tells it: Default has -1 there, and 0 is never valid.
func (c *Config) leftOut() []string {
	if c.RendezvousFD != 0 {
		return nil
	}
	var names []string
	defaults := Default()
	for _, s := range specs {
		empty := reflect.ValueOf(s.field(c)).Elem().IsZero()
		if neverZero := !reflect.ValueOf(s.field(&defaults)).Elem().IsZero() && s.name != "rank" && s.name != "local-rank"; empty && neverZero {
			names = append(names, s.name)
		}
	}
	if len(names) == 1 { // rendezvous-fd alone is a wrong value like others
		return nil
	}
	return names
}
