package host

import (
	"cmp"
	"context"
	"log/slog"
	"time"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	devhost "github.com/symmem/symmem/device/host"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
)

// Name is the name that the backend is registered under.
const Name = "host"

func init() { backend.Register(Name, factory{}) }

// Options sets what New makes. Zero values mean the defaults.
type Options struct {
	// KernelTimeout bounds what streams of the device wait for by themselves (WaitValue32); default 2 minutes. Signals and plans wait for as long as
	// KernelTimeout of [github.com/symmem/symmem/memory.Options] says, which Open of package symmem takes from the setting kernel-timeout.
	KernelTimeout time.Duration
	// Device, unless nil, is an open host device to use; it stays open when the backend closes.
	Device *devhost.Device
	// Logger takes the device's events; default: none are logged.
	Logger *slog.Logger
}

// Backend is one rank's side of the host backend.
type Backend struct {
	device *devhost.Device
	owned  bool
	group  *group.Group
}

var _ backend.Backend = (*Backend)(nil)

// New opens the host backend for this rank of g; nil options are the defaults. Local. The error is ErrUnsupported on systems other than Linux.
func New(g *group.Group, opts *Options) (*Backend, error) {
	if err := supported(); err != nil {
		return nil, err
	}
	if opts == nil {
		opts = &Options{}
	}
	if opts.Device != nil {
		return &Backend{device: opts.Device, group: g}, nil
	}
	d, err := devhost.New(&devhost.Options{WaitTimeout: opts.KernelTimeout, Err: g.Err, Logger: opts.Logger})
	if err != nil {
		return nil, err
	}
	return &Backend{device: d, owned: true, group: g}, nil
}

// Name returns "host".
func (b *Backend) Name() string { return Name }

// Device returns the CPU.
func (b *Backend) Device() device.Device { return b.device }

// Capabilities says what works: everything but multicast and adopting memory.
func (b *Backend) Capabilities() backend.Capabilities { return capabilities }

var capabilities = backend.Capabilities{
	PeerPointers:      true,
	Contiguous:        true,
	Transfers:         true,
	Graphs:            true,
	RanksInOneProcess: true,
	OnHost:            true,
	Why: map[string]string{
		"multicast":     "a CPU has no store that reaches several ranks' memory at once",
		"register":      "memory of a process can be shared with others only if it was allocated for that: allocate it here",
		"several_hosts": "shared memory ends at the host: use nixl",
	},
}

// Close closes the device, unless it was given by the caller.
func (b *Backend) Close(context.Context) error {
	if !b.owned {
		return nil
	}
	return b.device.Close()
}

// factory opens the backend by name.
type factory struct{}

func (factory) Probe(context.Context, *backend.Env) (backend.Capabilities, error) {
	if err := supported(); err != nil {
		return backend.Capabilities{}, err
	}
	return capabilities, nil
}

// Preference puts the backend last, but before others that move the CPU's memory.
func (factory) Preference(bool) int { return 0 }

// Options returns nil.
func (factory) Options() []backend.Option { return nil }

// Takes reports whether v is an *Options.
func (factory) Takes(v any) bool { _, ok := v.(*Options); return ok }

func (factory) Open(_ context.Context, env *backend.Env) (backend.Backend, error) {
	opts := &Options{}
	if given, ok := env.Given.(*Options); ok && given != nil {
		*opts = *given
	}
	opts.KernelTimeout = cmp.Or(opts.KernelTimeout, env.KernelTimeout)
	if opts.Logger == nil {
		opts.Logger = env.Logger
	}
	if env.Opened != nil {
		d, ok := env.Opened.(*devhost.Device)
		if !ok {
			return nil, errs.Invalid("host.New", "device", env.Opened.Name(), "the host device")
		}
		opts.Device = d
	}
	b, err := New(env.Group, opts)
	if err != nil {
		return nil, err // a nil *Backend would be a backend
	}
	return b, nil
}
