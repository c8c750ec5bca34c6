package backend

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/options"
	"github.com/symmem/symmem/internal/typo"
)

// Auto is the name that stands for every registered backend, best first.
const Auto = "auto"

// Factory opens a backend. Both methods may be called at any time and from several goroutines.
type Factory interface {
	// Probe finds out whether the backend can be opened here, without lasting effect. The error of one that cannot is
	// ErrUnavailable (something is not installed or not there) or ErrUnsupported, and says what to do.
	Probe(ctx context.Context, env *Env) (Capabilities, error)
	// Open opens the backend for this rank of env.Group. Collective.
	Open(ctx context.Context, env *Env) (Backend, error)
}

// Networked is a Factory whose backend opens ports that its library does not protect, even when all ranks are on one host.
type Networked interface {
	// Unprotected says what is opened, and who can reach it.
	Unprotected() string
}

// Preferred is a Factory that says how its backend ranks among others when the choice is left to this module.
type Preferred interface {
	// Preference returns how much [Auto] prefers the backend. Auto tries backends with a higher preference first, and equal ones by name. onHost asks
	// for the preference where the backend would work on the CPU's memory, because there is no GPU or none is wanted. The result must not change.
	// This module's backends have 500 (native), 400 (nccl), 300 (nvshmem), 200 (nixl; -100 for the CPU's memory) and 0 (host). A backend that is not
	// Preferred has 100, and -100 for the CPU's memory.
	Preference(onHost bool) int
}

// preference returns how much Auto prefers a backend.
func preference(f Factory, onHost bool) int {
	if p, ok := f.(Preferred); ok {
		return p.Preference(onHost)
	}
	if onHost {
		return -100
	}
	return 100
}

var registry = struct {
	sync.RWMutex
	factories map[string]Factory
}{factories: map[string]Factory{}}

// Register makes a backend known under name, with its options if it is [Configurable]. It is meant for the init of the backend's package. A mistake
// there is the program's and not its user's, so Register panics, with the *ArgumentError of package symmem, which is ErrInvalid and has the value and
// what is allowed. It panics if f is nil; if name is taken, is "auto", "all" or "test", or is not made of at most 32 small letters, digits and single
// hyphens with a letter first; and if an option has no such name, has a default that it does not allow, or has the key or the variable of a setting
// of symmem or of another backend's option. Nothing is registered then.
func Register(name string, f Factory) {
	if err := register(name, f); err != nil {
		panic(err)
	}
}

func register(name string, f Factory) error {
	const op = "backend.Register"
	switch {
	case !options.GoodName(name):
		return errs.Invalid(op, "name", fmt.Sprintf("%q", name), options.NameForm)
	case name == Auto || name == "all" || name == "test": // all is every backend in the command, and SYMMEM_TEST_ begins the variables of tests
		return errs.Invalid(op, "name", fmt.Sprintf("%q", name), "a name that does not stand for something else")
	case errs.IsNil(f):
		return errs.Invalid(op, "factory of "+name, "nil", "a Factory")
	}
	others := Names()
	if slices.Contains(others, name) {
		return errs.Invalid(op, "name", fmt.Sprintf("%q", name), "any but "+strings.Join(others, ", "))
	}
	var list []options.Option
	if c, ok := f.(Configurable); ok {
		for _, o := range c.Options() {
			list = append(list, options.Option(o))
		}
	}
	// A backend is asked without the lock, since it may be made of others, and look them up.
	registry.Lock()
	defer registry.Unlock()
	if _, taken := registry.factories[name]; taken { // just now
		return errs.Invalid(op, "name", fmt.Sprintf("%q", name), "a name that no other has")
	}
	if err := options.Declare(name, list); err != nil {
		return err
	}
	registry.factories[name] = f
	return nil
}

// Names lists the registered backends in the order in which Auto tries them.
func Names() []string {
	registry.RLock()
	all := maps.Clone(registry.factories)
	registry.RUnlock()
	return slices.SortedFunc(maps.Keys(all), func(a, b string) int {
		return cmp.Or(cmp.Compare(preference(all[b], false), preference(all[a], false)), strings.Compare(a, b))
	})
}

// Lookup returns the backend registered under name, or an error that lists the known names.
func Lookup(name string) (Factory, error) {
	registry.RLock()
	f := registry.factories[name]
	registry.RUnlock()
	if f != nil {
		return f, nil
	}
	known := append(Names(), Auto)
	return nil, errs.Advised("backend", "name", fmt.Sprintf("%q", name), strings.Join(known, ", "), unknown(name, known))
}

// ofModule are the backends of this module.
var ofModule = []string{"native", "nccl", "nvshmem", "nixl", "host"}

// unknown says what to do about a name that is none of those known: which of them may be meant, and what to import, unless all of this module's are there.
func unknown(name string, known []string) string {
	var all []string
	near, fewest := "", 0
	for _, k := range known {
		if n, like := typo.Slips(name, k); like && (near == "" || n < fewest) {
			near, fewest = k, n
		}
	}
	if near != "" {
		all = append(all, near+" is the nearest that is known")
	}
	switch missing := slices.ContainsFunc(ofModule, func(b string) bool { return !slices.Contains(known, b) }); {
	case missing:
		all = append(all, fmt.Sprintf("to have all backends of this module, import _ %q", "github.com/symmem/symmem/backend/all"))
	case near == "":
		all = append(all, "if it is meant for another backend, import its package")
	}
	return strings.Join(all, "; ")
}
