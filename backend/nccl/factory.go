package nccl

import (
	"context"
	"errors"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/internal/fromenv"
	"github.com/symmem/symmem/device/cuda"
	"github.com/symmem/symmem/internal/multicast"
)

// factory opens the backend by name.
type factory struct{}

// Unprotected says what NCCL opens.
func (factory) Unprotected() string {
	return "NCCL listens on ports of a network interface (NCCL_SOCKET_IFNAME) without authentication"
}

// Probe loads the library, opens the GPU, checks what the backend needs, and closes the GPU again. It makes no communicator.
func (factory) Probe(_ context.Context, env *backend.Env) (backend.Capabilities, error) {
	o, err := options(env)
	if err != nil {
		return backend.Capabilities{}, err
	}
	o.fill()
	return probe(o)
}

func probe(o *Options) (backend.Capabilities, error) {
	policy, err := multicast.NewPolicy("nccl.New", o.Multicast, o.Getenv)
	if err != nil {
		return backend.Capabilities{}, err
	}
	lib, err := loadLibrary(o, policy, true)
	if err != nil {
		return backend.Capabilities{}, err
	}
	var found *cuda.Found
	if d := o.Opened; d != nil {
		found = &cuda.Found{Driver: d.Driver(), Index: d.Index(), Ordinal: d.Ordinal(), UUID: d.UUID()}
	} else {
		gpu, err := o.gpu()
		if err == nil {
			found, err = cuda.Find(gpu)
		}
		if err != nil {
			return backend.Capabilities{}, err
		}
	}
	if err := usable(found.Driver, found.Ordinal, found.UUID, o.Getenv); err != nil {
		return backend.Capabilities{}, err
	}
	c := capabilities(lib)
	if policy.Forbidden != "" {
		c.Why["multicast"] = policy.Forbidden
	}
	return c, nil
}

func (factory) Open(ctx context.Context, env *backend.Env) (backend.Backend, error) {
	o, err := options(env)
	if err != nil {
		// The other ranks are in New already, or will call it, so they must be told.
		b := &Backend{group: env.Group}
		return nil, b.meet(ctx, &Options{}, err)
	}
	b, err := New(ctx, env.Group, o)
	if err != nil {
		return nil, err
	}
	return b, nil
}

// Preference puts the backend after native, which depends on less.
func (factory) Preference(bool) int { return 400 }

// Options returns the library and the kind of window.
func (factory) Options() []backend.Option {
	return []backend.Option{
		fromenv.Library("libnccl.so.2"),
		{
			Name: "window", Default: plainWindow, Values: []string{plainWindow, symmetricWindow},
			Usage: "kind of window: " + plainWindow + ", or " + symmetricWindow + ", which lets NCCL take its symmetric kernels; the same on all ranks",
		},
	}
}

// Takes reports whether v is an *Options.
func (factory) Takes(v any) bool { _, ok := v.(*Options); return ok }

// options returns the Options for env.
func options(env *backend.Env) (*Options, error) {
	o, err := fromenv.Options[Options](Name, env)
	if err != nil {
		return nil, err
	}
	if o.Parent != nil {
		o.Library, o.Comm = o.Parent.lib.Path(), 0 // the communicator that the program gave is that of the whole group
	}
	return o, errors.Join(fromenv.Text(&o.Library, Name, env, "library"), fromenv.Text(&o.Window, Name, env, "window"))
}
