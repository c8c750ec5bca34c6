package backend

import (
	"fmt"
	"os"
	"strings"

	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/options"
)

// Option is an option of one backend that users may set. Its key is the backend's name and its own, "nccl-window": so it stands in the configuration
// file and, after two dashes, as a flag, and its variable is SYMMEM_NCCL_WINDOW. Package config reads it with the settings of symmem, and refuses
// what the option does not allow. A value is text, as the user has written it. It must not be a secret, since it is printed.
type Option struct {
	// Name is the option's name: small letters, digits and single hyphens, a letter first, 32 at the most.
	Name string
	// Default is the value where the user sets none; "" if the backend chooses then.
	Default string
	// Values, unless nil, are the values that are allowed.
	Values []string
	// Form says in words what a value must be, "a number of bytes, as 64M", where Values is nil.
	Form string
	// Check, unless nil, reports whether a value is allowed. It may be called from several goroutines.
	Check func(value string) bool
	// Usage says in one phrase what the option is.
	Usage string
}

// Configurable is a Factory whose backend has options of its own.
type Configurable interface {
	// Options lists the options that users may set as text. It is called once, when the backend is registered.
	Options() []Option
	// Takes reports whether v is of the type in which programs give the backend's options: *nccl.Options, say. Such a value comes as
	// Env.Given. A backend that has no such type takes nothing.
	Takes(v any) bool
}

// Option returns the value of an option that the named backend has declared: that in e.Options, or else that of its variable as e.Getenv reads it, or
// else the default. The error is ErrInvalid, with the value and what is allowed.
func (e *Env) Option(backend, name string) (string, error) {
	d := options.Lookup(backend + "-" + name)
	if d == nil || d.Backend != backend {
		var known []string
		for _, o := range options.Of(backend) {
			known = append(known, o.Name)
		}
		return "", errs.Invalid("Env.Option", "option of backend "+backend, fmt.Sprintf("%q", name), "what it has declared: "+strings.Join(known, ", "))
	}
	if value := e.Options[d.Key()]; value != "" {
		return value, d.Problem("backend "+backend, d.Key(), value)
	}
	getenv := e.Getenv
	if getenv == nil {
		getenv = os.Getenv
	}
	if value := strings.TrimSpace(getenv(d.Env())); value != "" {
		return value, d.Problem("backend "+backend, "environment variable "+d.Env(), value)
	}
	return d.Default, nil
}

// takers lists the registered backends that take options of v's type, in the order of Auto.
func takers(v any) []string {
	var all []string
	for _, name := range Names() {
		if f, err := Lookup(name); err == nil && takes(f, v) {
			all = append(all, name)
		}
	}
	return all
}

func takes(f Factory, v any) bool {
	c, ok := f.(Configurable)
	return ok && c.Takes(v)
}
