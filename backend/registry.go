package backend

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/symmem/symmem/internal/errs"
)

// Auto is the name that stands for every registered backend, best first.
const Auto = "auto"

// autoOrder is the order in which Auto tries: direct load and store first, the library that needs least around it before the
// others, the CPU last. A backend that is not named here comes just before the CPU.
var autoOrder = []string{"native", "nccl", "nvshmem", "nixl", "host"}

// Factory opens a backend. Both methods may be called at any time and from several goroutines.
type Factory interface {
	// Probe finds out whether the backend can be opened here, without lasting effect. The error of one that cannot is
	// ErrUnavailable (something is not installed or not there) or ErrUnsupported, and says what to do.
	Probe(ctx context.Context, env *Env) (Capabilities, error)
	// Open opens the backend for this rank of env.Group. Collective.
	Open(ctx context.Context, env *Env) (Backend, error)
}

// Networked is a Factory whose backend opens ports, on one host too, that its library does not protect.
type Networked interface {
	// Unprotected says what is opened, and who can reach it.
	Unprotected() string
}

var registry = struct {
	sync.RWMutex
	factories map[string]Factory
}{factories: map[string]Factory{}}

// Register makes a backend known under name. It is meant for the init of the backend's package, and panics if name is
// empty or taken, or f is nil: that is a mistake in the program, not of its user.
func Register(name string, f Factory) {
	registry.Lock()
	defer registry.Unlock()
	if name == "" || name == Auto || f == nil {
		panic(fmt.Sprintf("backend: Register(%q, %v)", name, f))
	}
	if _, taken := registry.factories[name]; taken {
		panic("backend: Register called twice for " + name)
	}
	registry.factories[name] = f
}

// Names lists the registered backends in the order in which Auto tries them.
func Names() []string {
	registry.RLock()
	defer registry.RUnlock()
	names := make([]string, 0, len(registry.factories))
	for name := range registry.factories {
		names = append(names, name)
	}
	place := func(name string) int {
		if i := slices.Index(autoOrder, name); i >= 0 {
			return 2 * i
		}
		return 2*len(autoOrder) - 3 // between nixl and host
	}
	slices.SortFunc(names, func(a, b string) int {
		if d := place(a) - place(b); d != 0 {
			return d
		}
		return strings.Compare(a, b)
	})
	return names
}

// Lookup gives the backend registered under name, or an error that lists the known names.
func Lookup(name string) (Factory, error) {
	registry.RLock()
	f := registry.factories[name]
	registry.RUnlock()
	if f != nil {
		return f, nil
	}
	return nil, errs.Advised("backend", "name", fmt.Sprintf("%q", name), strings.Join(append(Names(), Auto), ", "),
		fmt.Sprintf("to have all backends of this module, import _ %q", "github.com/symmem/symmem/backend/all"))
}
