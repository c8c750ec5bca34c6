package nccl

import (
	"context"
	"os"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device/cuda"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/multicast"
)

// factory opens the backend by name.
type factory struct{}

// Unprotected says what NCCL opens.
func (factory) Unprotected() string {
	return "NCCL listens on ports of a network interface (NCCL_SOCKET_IFNAME) without authentication"
}

// Probe loads the library, opens the GPU, looks at what the backend stands on, and closes the GPU again. It makes no
// communicator.
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
		// The others are in New already, or will come to it: they must be told.
		b := &Backend{group: env.Group}
		return nil, b.meet(ctx, &Options{}, err)
	}
	b, err := New(ctx, env.Group, o)
	if err != nil {
		return nil, err
	}
	return b, nil
}

// options are what env says.
func options(env *backend.Env) (*Options, error) {
	o := &Options{
		Device: env.Device, LocalRank: env.LocalRank, ShareDevice: env.ShareDevice, Multicast: env.Multicast, KernelTimeout: env.KernelTimeout, Getenv: env.Getenv,
		Logger: env.Logger,
	}
	if o.Getenv == nil {
		o.Getenv = os.Getenv
	}
	if env.Opened != nil {
		d, ok := env.Opened.(*cuda.Device)
		if !ok {
			return nil, errs.Invalid("nccl.New", "device", env.Opened.Name(), "a CUDA device")
		}
		o.Opened = d
	}
	if parent, ok := env.Parent.(*Backend); ok {
		o.Parent = parent
		o.Library = parent.lib.Path()
	}
	return o, nil
}
