package native

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/internal/fromenv"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/cuda"
	"github.com/symmem/symmem/group"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/multicast"
	_ "github.com/symmem/symmem/kernels/ptx/images" // for its CUDA devices
)

// Name is the name that the backend is registered under.
const Name = "native"

func init() { backend.Register(Name, factory{}) }

// Options sets what New makes. Nil or zero values mean the defaults.
type Options struct {
	// Device says which GPU: an index among those this process sees, or a UUID. "" takes the one whose index is LocalRank.
	Device string
	// LocalRank is the number of this rank on its host, from 0. It only counts when Device is "".
	LocalRank int
	// Opened, unless nil, is an open device to use instead; it stays open when the backend closes.
	Opened *cuda.Device
	// Driver is the table of driver functions; nil loads the driver. It does not count when Opened is set.
	Driver *cu.Driver
	// ShareDevice allows several ranks on one GPU. All ranks of the GPU must allow it. A local rank beyond the last GPU then
	// counts on from the first.
	ShareDevice bool
	// Multicast is "auto", "on" or "off"; "" is "auto".
	Multicast string
	// KernelTimeout bounds what streams of the device wait for by themselves (WaitValue32); default 2 minutes. Signals and plans wait for as long as
	// KernelTimeout of [github.com/symmem/symmem/memory.Options] says, which Open of package symmem takes from the setting kernel-timeout.
	KernelTimeout time.Duration
	// Getenv reads the environment for switches of other libraries that forbid multicast; default os.Getenv.
	Getenv func(string) string
	// Logger takes events; default: none are logged.
	Logger *slog.Logger
}

// defaultTimeout is the KernelTimeout unless the options say otherwise.
const defaultTimeout = 2 * time.Minute

// Backend is one rank's side of the native backend.
type Backend struct {
	device  *cuda.Device
	drv     *cu.Driver
	owned   bool
	group   *group.Group
	log     *slog.Logger
	timeout time.Duration

	found       *finding
	granularity int64            // of all ranks' memory, in bytes
	peers       []member         // by rank
	islands     *group.Islands   // of the ranks that can pass each other files
	unreachable string           // which pairs of ranks cannot reach each other; "" if all can
	multicast   *cu.Multicast    // nil unless all ranks agreed to use it
	mustCast    bool             // the policy of some rank is "on"
	stream      device.Stream    // fills new memory with zeros
	cudaDevices map[string]int32 // the ordinals of the GPUs that this process sees, by UUID

	mu          sync.Mutex
	noMulticast string // why there is no multicast, the same on all ranks; "" if there is
	kept        []undo // memory that the GPU still worked on when it was to be given back

	early atomic.Int32 // allocations that exportEarly has exported and no rendezvous has had
}

var _ backend.Backend = (*Backend)(nil)

// New opens the native backend for this rank of g; nil options are the defaults. Collective: it blocks until every rank has
// come. A rank that cannot take part makes it fail on every rank. Without a driver or a GPU the error is ErrUnavailable and says
// what to do; two ranks on one GPU are ErrInvalid on every rank.
func New(ctx context.Context, g *group.Group, opts *Options) (*Backend, error) {
	var o Options
	if opts != nil {
		o = *opts
	}
	o.KernelTimeout = cmp.Or(o.KernelTimeout, defaultTimeout)
	if o.Getenv == nil {
		o.Getenv = os.Getenv
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	b := &Backend{group: g, log: o.Logger.With("backend", Name, "rank", g.Rank()), timeout: o.KernelTimeout}
	err := b.open(&o)
	if err = b.meet(ctx, &o, err); err != nil {
		return nil, errors.Join(err, b.Close(context.WithoutCancel(ctx)))
	}
	b.log.Debug("native backend opened", "device", b.device.UUID(), "granularity", b.granularity,
		"handles", b.found.prop.RequestedHandleTypes, "capabilities", b.Capabilities().String(), "no_multicast", b.whyNoMulticast(), "unreachable", b.unreachable)
	return b, nil
}

// open opens the device and finds out what works on it. What it opened is closed by Close, also after an error.
func (b *Backend) open(o *Options) error {
	policy, err := multicast.NewPolicy("native.New", o.Multicast, o.Getenv)
	if err != nil {
		return err
	}
	if b.device = o.Opened; b.device == nil {
		if b.device, err = openDevice(o, b.group.Err); err != nil {
			return err
		}
		b.owned = true
	}
	b.drv = b.device.Driver()
	if b.found, err = find(b.device, policy, b.group.Size()); err != nil {
		return err
	}
	if b.stream, err = b.device.NewStream(); err != nil {
		return err
	}
	b.cudaDevices, err = visible(b.drv)
	return err
}

// openDevice opens the GPU that the options name.
func openDevice(o *Options, lost func() error) (*cuda.Device, error) {
	c := cuda.Options{
		Driver: o.Driver, Device: o.Device, LocalRank: o.LocalRank, Logger: o.Logger, WaitTimeout: o.KernelTimeout, Err: lost,
	}
	if c.Driver == nil {
		var err error
		if c.Driver, err = cu.Load(&cu.LoadOptions{Logger: o.Logger}); err != nil {
			return nil, fmt.Errorf("opening the CUDA device: %w", err)
		}
	}
	if o.ShareDevice && c.Device == "" {
		// There are more ranks than GPUs, so the GPUs are dealt out in turn. Open says better what is wrong with them.
		var count int32
		if c.Driver.Init != nil && c.Driver.DeviceGetCount != nil && c.Driver.Init(0) == cu.Success &&
			c.Driver.DeviceGetCount(&count) == cu.Success && count > 0 && c.LocalRank > 0 {
			c.LocalRank %= int(count)
		}
	}
	return cuda.Open(&c)
}

// visible returns the ordinals of the GPUs that this process sees, by UUID.
func visible(drv *cu.Driver) (map[string]int32, error) {
	var count int32
	if err := drv.Check("cuDeviceGetCount", drv.DeviceGetCount(&count)); err != nil {
		return nil, err
	}
	ordinals := make(map[string]int32, count)
	for i := range count {
		var dev cu.DeviceOrdinal
		var id cu.UUID
		if err := drv.Check("cuDeviceGet", drv.DeviceGet(&dev, i)); err != nil {
			return nil, err
		}
		if err := drv.Check("cuDeviceGetUuid", drv.DeviceGetUUID(&id, dev)); err != nil {
			return nil, err
		}
		ordinals[id.String()] = int32(dev)
	}
	return ordinals, nil
}

// Name returns "native".
func (b *Backend) Name() string { return Name }

// Device returns the GPU of this rank.
func (b *Backend) Device() device.Device { return b.device }

// Capabilities says what works between the ranks of the group. Multicast may be found not to work when it is first enabled;
// the bit is then off, on all ranks.
func (b *Backend) Capabilities() backend.Capabilities {
	c := b.found.capabilities()
	if b.unreachable != "" {
		c.PeerPointers = false
		c.Why["peer_pointers"] = b.unreachable
	}
	why := b.whyNoMulticast()
	if c.Multicast = why == ""; c.Multicast {
		delete(c.Why, "multicast")
	} else {
		c.Why["multicast"] = why
	}
	return c
}

// whyNoMulticast says why there is no multicast; "" if there is.
func (b *Backend) whyNoMulticast() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.noMulticast
}

// Close closes the device, unless it was given by the caller. It waits until the GPU has filled memory whose allocation was given up, but no longer
// than KernelTimeout.
func (b *Backend) Close(context.Context) error {
	var err error
	if b.stream != nil {
		err = b.stream.Close()
	}
	if err == nil { // else the GPU may still work on what was kept
		b.mu.Lock()
		err = b.giveBackKept()
		b.mu.Unlock()
	}
	if b.owned {
		err = errors.Join(err, b.device.Close())
	}
	if err != nil {
		return fmt.Errorf("closing backend %s: %w", Name, err)
	}
	return nil
}

// factory opens the backend by name.
type factory struct{}

// Probe opens the GPU, tries on it what the backend needs, and closes it again.
func (factory) Probe(_ context.Context, env *backend.Env) (backend.Capabilities, error) {
	o, err := options(env)
	if err != nil {
		return backend.Capabilities{}, err
	}
	policy, err := multicast.NewPolicy("native.New", o.Multicast, o.Getenv)
	if err != nil {
		return backend.Capabilities{}, err
	}
	d := o.Opened
	if d == nil {
		if d, err = openDevice(o, nil); err != nil {
			return backend.Capabilities{}, err
		}
	}
	f, err := find(d, policy, 0)
	if o.Opened == nil {
		err = errors.Join(err, d.Close())
	}
	if err != nil {
		return backend.Capabilities{}, err
	}
	return f.capabilities(), nil
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

// Preference puts the backend first: it needs no library but the driver.
func (factory) Preference(bool) int { return 500 }

// Options returns nil: all that users may set is a setting of symmem.
func (factory) Options() []backend.Option { return nil }

// Takes reports whether v is an *Options.
func (factory) Takes(v any) bool { _, ok := v.(*Options); return ok }

// options returns the Options for env.
func options(env *backend.Env) (*Options, error) { return fromenv.Options[Options](Name, env) }
