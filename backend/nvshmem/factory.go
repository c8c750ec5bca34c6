package nvshmem

import (
	"context"
	"fmt"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/internal/fromenv"
	"github.com/symmem/symmem/backend/internal/survey"
	"github.com/symmem/symmem/internal/multicast"
	"github.com/symmem/symmem/internal/nvshmem"
	_ "github.com/symmem/symmem/kernels/ptx/images" // for its CUDA devices
)

func init() { backend.Register(Name, factory{}) }

// factory opens the backend by name.
type factory struct{}

var (
	_ backend.Libraries   = factory{}
	_ backend.Preflighter = factory{}
)

// Unprotected says what NVSHMEM opens.
func (factory) Unprotected() string {
	return "NVSHMEM's bootstrap listens on ports of the loopback interface (NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME) without authentication"
}

// Preference puts the backend after native and nccl, which depend on less.
func (factory) Preference(bool) int { return 300 }

// Options returns the library and the arena.
func (factory) Options() []backend.Option {
	return []backend.Option{fromenv.Library("libnvshmem_host.so.3"), arenaOption}
}

// Takes reports whether v is an *Options.
func (factory) Takes(v any) bool { _, ok := v.(*Options); return ok }

// Probe opens the GPU and closes it again, and loads the library. It does not start the library, and leaves its environment alone.
func (factory) Probe(_ context.Context, env *backend.Env) (backend.Capabilities, error) {
	o, err := probing(env)
	if err != nil {
		return backend.Capabilities{}, err
	}
	policy, err := multicast.NewPolicy("nvshmem.New", o.Multicast, o.Getenv)
	if err != nil {
		return backend.Capabilities{}, err
	}
	d := o.Opened
	if d == nil {
		if d, err = openDevice(&o, nil); err != nil {
			return backend.Capabilities{}, err
		}
	}
	c := capabilities(o.home.own)
	if why := whyNoRegister(d.Driver()); why != "" {
		c.Register, c.Why["register"] = false, why
	}
	if policy.Forbidden != "" {
		c.Why["multicast"] = policy.Forbidden
	}
	if o.Opened == nil {
		err = d.Close()
	}
	if err == nil {
		_, err = o.load(&nvshmem.Options{Path: o.Library, Multicast: policy.Forbidden == "", Look: true, Logger: o.Logger})
	}
	if err != nil {
		return backend.Capabilities{}, err
	}
	return c, nil
}

// probing returns the options of a probe.
func probing(env *backend.Env) (Options, error) {
	o, err := options(env)
	if err != nil {
		return Options{}, err
	}
	return o.withDefaults()
}

func (factory) Open(ctx context.Context, env *backend.Env) (backend.Backend, error) {
	o, err := options(env)
	if err != nil {
		// The other ranks are in New already, or will call it, so they must be told.
		_, err = backend.Tell(ctx, env.Group, "opening backend nvshmem", member{}, err)
		return nil, err
	}
	b, err := New(ctx, env.Group, o)
	if err != nil {
		return nil, err
	}
	return b, nil
}

// Preflight starts the library in this process as the only PE, uses it and finalizes it.
func (factory) Preflight(ctx context.Context, env *backend.Env) error {
	o, err := options(env)
	if err != nil {
		return err
	}
	return Preflight(ctx, o)
}

// Libraries reports on NVSHMEM and on the plugin through which its processes meet.
func (factory) Libraries(_ context.Context, env *backend.Env) []backend.Library {
	o, err := probing(env)
	found := backend.Library{Name: "NVSHMEM", State: "usable"}
	plugin := backend.Library{Name: "NVSHMEM's bootstrap plugin", State: "usable"}
	if err != nil {
		found.State, found.Reason = "unusable", err.Error()
		return []backend.Library{found}
	}
	policy, err := multicast.NewPolicy("nvshmem.New", o.Multicast, o.Getenv)
	if err != nil {
		policy = &policyOff
	}
	l, err := nvshmem.Load(&nvshmem.Options{Path: o.Library, Multicast: policy.Forbidden == "", Logger: o.Logger})
	switch {
	case l == nil:
		return []backend.Library{survey.Failed(found.Name, err, "install NVSHMEM 3.4.5 or newer, of major version 3")}
	case err != nil:
		plugin.State, plugin.Reason = "missing", err.Error()
		plugin.Fix = "install the whole of NVSHMEM: the plugin is in the library's folder"
	}
	found.Path, found.Version, plugin.Path = l.Path(), l.Version().String(), l.Bootstrap()
	for _, s := range l.Settings() {
		by := "the environment"
		if s.Ours {
			by = "symmem"
		}
		found.Details = append(found.Details, backend.Detail{Name: s.Name, Value: fmt.Sprintf("%s (set by %s)", s.Value, by)})
	}
	transports := "peer pointers on one host"
	if t := setting(l, "NVSHMEM_REMOTE_TRANSPORT"); t != "none" {
		transports += ", and " + t + " for what has none"
	}
	found.Details = append(found.Details, backend.Detail{Name: "transports", Value: transports})
	plugin.Details = []backend.Detail{{Name: "network interface", Value: setting(l, "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME")}}
	return []backend.Library{found, plugin}
}

// policyOff is the policy where there is no other.
var policyOff = multicast.Policy{Forbidden: "it is switched off"}

// setting returns the value of a variable as the library sees it.
func setting(l *nvshmem.Library, name string) string {
	for _, s := range l.Settings() {
		if s.Name == name {
			return s.Value
		}
	}
	return "NVSHMEM's choice"
}
