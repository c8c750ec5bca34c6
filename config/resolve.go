package config

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"reflect"
	"strings"

	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/options"
)

// Resolve returns the settings that c stands for, and validates them. Opening symmetric memory begins with it.
//
//   - The zero Config stands for what [Load] finds without options, in the environment, the file and the defaults.
//   - Any other Config stands for itself. It must be valid, and neither a variable nor a file changes a setting or an option of a backend.
//
// Two things are left to the environment even then, where c does not set them. If RendezvousAddr is "", the launcher says where the ranks
// meet, and Token ("", then SYMMEM_TOKEN), RendezvousServed (false, then SYMMEM_RENDEZVOUS_SERVED) and RendezvousFD (-1, then
// SYMMEM_RENDEZVOUS_FD) go with that place. And the file of a
// backend's native library, such as nccl-library, comes from its variable, because it belongs to the machine.
//
// environ returns the environment as "NAME=value"; nil is os.Environ. All errors are ErrInvalid, but for those of reading the file.
func (c Config) Resolve(environ func() []string) (Config, error) {
	if reflect.ValueOf(c).IsZero() {
		return Load(&LoadOptions{Environ: environ})
	}
	bad := c.takeOpen(environ)
	if err := errors.Join(append(bad, c.problems()...)...); err != nil {
		return Config{}, err
	}
	return c, nil
}

// takeOpen takes from the environment what c leaves open and Resolve leaves to it: what belongs to the place to meet, and the files of
// native libraries.
func (c *Config) takeOpen(environ func() []string) []error {
	if environ == nil {
		environ = os.Environ
	}
	vars := map[string]string{}
	for _, entry := range environ() {
		name, value, _ := strings.Cut(entry, "=")
		vars[name] = strings.TrimSpace(value)
	}
	taken := map[string]Source{}
	var bad []error
	if c.RendezvousAddr == "" {
		if name := lookup("token").env(); c.Token.IsZero() && vars[name] != "" {
			c.Token, taken["token"] = NewSecret(vars[name]), Source{Env: name}
		}
		if name := lookup("rendezvous-served").env(); !c.RendezvousServed && vars[name] != "" {
			if served, err := truth(vars[name]); err == nil {
				c.RendezvousServed, taken["rendezvous-served"] = served, Source{Env: name}
			} else {
				bad = append(bad, fmt.Errorf("%s: %w", Source{Env: name}, errs.Invalid(op, "rendezvous-served", vars[name], allowedForm(err))))
			}
		}
		if name := lookup("rendezvous-fd").env(); c.RendezvousFD == -1 && vars[name] != "" {
			if fd, err := wholeNumber(vars[name]); err == nil {
				c.RendezvousFD, taken["rendezvous-fd"] = fd, Source{Env: name}
			} else {
				bad = append(bad, fmt.Errorf("%s: %w", Source{Env: name}, errs.Invalid(op, "rendezvous-fd", vars[name], allowedForm(err))))
			}
		}
	}
	libraries := map[string]string{}
	for _, d := range options.All() {
		if value := vars[d.Env()]; d.Name == options.Library && c.BackendOptions[d.Key()] == "" && value != "" {
			libraries[d.Key()], taken[d.Key()] = value, Source{Env: d.Env()}
		}
	}
	if len(taken) == 0 {
		return bad
	}
	sources := make(map[string]Source, len(specs))
	for _, k := range Keys() {
		sources[k.Name] = c.Source(k.Name)
	}
	maps.Copy(sources, taken)
	if len(libraries) > 0 {
		all := map[string]string{} // the caller's map is not changed
		maps.Copy(all, c.BackendOptions)
		maps.Copy(all, libraries)
		c.BackendOptions = all
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
