package nixl

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strconv"
	"time"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/internal/fromenv"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/nixl"
	_ "github.com/symmem/symmem/kernels/ptx/images" // for its CUDA devices
)

// Name is the name that the backend is registered under.
const Name = "nixl"

func init() { backend.Register(Name, factory{}) }

// hostDevice stands in Options.Device for the CPU and its memory.
const hostDevice = "host"

// Options sets what New makes. Nil or zero values mean the defaults.
type Options struct {
	// Library is the library's file or folder; "" searches for it. A process uses one library.
	Library string
	// Device says whose memory it is: "host", the CPU's, or that of a GPU, by its index among those this process sees or by its UUID.
	// "" takes the GPU whose index is LocalRank, or the CPU if there is no driver.
	Device string
	// LocalRank is the number of this rank on its host, from 0. It only counts when Device is "".
	LocalRank int
	// Opened, unless nil, is an open device to use instead; it stays open when the backend closes.
	Opened device.Device
	// Parent, unless nil, is the backend of a group that this rank's group is a part of. Its agent and its device are used.
	Parent *Backend
	// ShareDevice allows several ranks on one GPU. All ranks of the GPU must allow it.
	ShareDevice bool
	// NetDevices names the network devices that data may go over between hosts, as UCX does: "eth0", "mlx5_0:1". Empty takes the interface that leads
	// to Rendezvous, with the RDMA adapter behind it if it has one; "all", alone, takes every device. The ranks of one host use none, or loopback
	// where they must. The variables UCX_TLS and UCX_NET_DEVICES, if one of them is set, decide instead.
	NetDevices []string
	// UnprotectedNetwork says what to do where data goes over a network, loopback included, since UCX neither authenticates nor
	// encrypts. "warn" logs a warning that says who can reach the memory, "allow" only a note, and with "refuse" opening the backend is
	// ErrUnsupported. "" is "warn".
	UnprotectedNetwork string
	// Islands says whether ranks that can share memory, of the CPU or of GPUs that reach each other, do. "auto" finds out which can: what is between
	// them goes by address, and only the rest through the library. With "off", from any rank, the library moves everything. "" is "auto".
	Islands string
	// Rendezvous is a host:port that is reached over the network that leads to the other hosts, such as that of the rendezvous service. Nothing is
	// sent there.
	Rendezvous string
	// LivenessTimeout is how long a peer on another host may be silent before it counts as lost. One second later TCP gives up a connection over which
	// nothing that was sent has been acknowledged, but not in less than 2 seconds: the transfers over it end, and so does what waits for them, such as Close.
	// The variable UCX_TCP_USER_TIMEOUT, if it is set, decides about that instead. Default 10 seconds.
	LivenessTimeout time.Duration
	// KernelTimeout bounds every run of a transfer; default 2 minutes.
	KernelTimeout time.Duration
	// Getenv reads the environment; default os.Getenv.
	Getenv func(string) string
	// Logger takes events; default: none are logged.
	Logger *slog.Logger

	// engine, unless nil, makes a substitute for the library's agent, which may move memory of GPUs within a process too; Opened is the device.
	engine func(name string) (engine, error)
	// version is that of the substitute, "" if it does not say.
	version string
	// pads gives memory of the CPU pads too.
	pads bool
	// drive makes the node drive the engine.
	drive bool
	// greetTimeout, unless 0, is used in place of the constant.
	greetTimeout time.Duration
	// shareFlags makes ranks share the memory of their flags as those with GPUs do.
	shareFlags bool
}

// defaultTimeout is the KernelTimeout unless the options say otherwise.
const defaultTimeout = 2 * time.Minute

// Backend is one rank's side of the NIXL backend.
type Backend struct {
	group       *group.Group
	log         *slog.Logger
	timeout     time.Duration
	patience    time.Duration // with peers that are to be reached for the first time
	device      device.Device
	owned       bool          // whether Close closes the device
	lib         *nixl.Library // nil for a sub-group
	alone       bool          // the library works without a network
	node        *node
	ownsNode    bool           // whether Close closes the node
	peers       []member       // by rank
	substitute  bool           // for the library: Options.engine, of this backend or its parent
	sharing     bool           // the ranks share the memory of their flags
	islands     *group.Islands // unless no rank maps memory
	apart       string         // why the ranks of this one's island do not map each other's memory; "" if they do
	whys        []string       // what apart is on all ranks, each once
	granularity int64          // of memory in bytes, where ranks map it; else 0
	isle        *isle          // the ranks whose memory this one maps; nil for none
}

var (
	_ backend.Backend     = (*Backend)(nil)
	_ backend.Transferrer = (*Backend)(nil)
	_ backend.Flagger     = (*Backend)(nil)
	_ backend.Quiescer    = (*Backend)(nil)
)

// New opens the NIXL backend for this rank of g; nil options are the defaults. Collective: it blocks until every rank has
// come. A rank that cannot take part makes it fail on every rank. ErrUnavailable, with what to install, without the library;
// ErrUnsupported if UCX cannot reach the device's memory, or if unprotected networks are refused and one is needed; ErrMismatch if
// the ranks bring different kinds of device; ErrInvalid for two ranks on one GPU without ShareDevice, and for network devices that are not
// there.
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
	b := &Backend{group: g, log: o.Logger.With("backend", Name, "rank", g.Rank()), timeout: o.KernelTimeout,
		patience: cmp.Or(o.greetTimeout, greetTimeout)}
	where, err := b.locate(ctx, &o, b.open(ctx, &o))
	if err != nil {
		return nil, errors.Join(err, b.Close(context.WithoutCancel(ctx)))
	}
	if err = b.settle(ctx, &o, where); err == nil && o.Parent == nil {
		err = b.join(ctx, &o, where)
	}
	if err = b.meet(ctx, &o, err); err != nil {
		return nil, errors.Join(err, b.Close(context.WithoutCancel(ctx)))
	}
	if b.ownsNode && b.whole() {
		b.node.driver.rest()
	}
	b.log.Debug("NIXL backend opened", "device", b.device.UUID(), "agent", b.node.name)
	return b, nil
}

// open opens the device and tries the library. Close closes what it opened, also after an error.
func (b *Backend) open(ctx context.Context, o *Options) error {
	if o.Islands != "" && o.Islands != islandsAuto && o.Islands != islandsOff {
		return errs.Invalid("opening backend nixl", "islands", strconv.Quote(o.Islands), islandsAuto+", "+islandsOff)
	}
	if o.Parent != nil {
		b.device, b.node, b.substitute = o.Parent.device, o.Parent.node, o.Parent.substitute
		return nil
	}
	if o.engine != nil {
		b.device, b.alone, b.substitute = o.Opened, true, true
		return nil
	}
	p, err := choosePlace(o)
	if err != nil {
		return err
	}
	if b.lib, err = load(o.Library, p.cuda, o.Logger); err != nil {
		return err
	}
	if b.device = o.Opened; b.device == nil {
		if b.device, err = p.open(o, b.group.Err); err != nil {
			return err
		}
		b.owned = true
	}
	b.alone, err = probe(ctx, b.lib, b.device)
	return err
}

// join makes the agent, on the network that leads to the other ranks. Close closes what it made, also after an error.
func (b *Backend) join(ctx context.Context, o *Options, where []location) error {
	on, err := choose(ctx, o, b.group, where)
	if err != nil {
		return err
	}
	if err := b.judge(o, on); err != nil {
		return err
	}
	name := newName(b.group)
	if o.engine != nil {
		e, err := o.engine(name)
		if err != nil {
			return err
		}
		return b.own(e, name, o.pads, o.drive)
	}
	thread := needsThread(b.device, b.group.Members(), b.whole())
	a, err := makeAgent(ctx, b.lib, b.device, name, on, thread)
	if err != nil {
		return err
	}
	b.log.Debug("agent made", "library", b.lib.Path(), "name", name, "memory", memoryOf(b.device).String(), "thread", thread, "network", on.devices)
	return b.own(agent{a}, name, memoryOf(b.device) == nixl.VRAM, !thread)
}

// own makes this rank's node over e, with pads and a driver as asked for. Close closes it.
func (b *Backend) own(e engine, name string, pads, drive bool) error {
	b.node, b.ownsNode = newNode(e, name, b.device), true
	b.node.pads = pads
	if drive {
		b.node.drive()
	}
	return b.node.makeScratch()
}

// Name returns "nixl".
func (b *Backend) Name() string { return Name }

// Device returns the CPU, or the GPU of this rank.
func (b *Backend) Device() device.Device { return b.device }

// Capabilities says what works on the device.
func (b *Backend) Capabilities() backend.Capabilities {
	c := capabilities(b.device.Kind())
	b.shareCapabilities(&c)
	return c
}

// capabilities says what works on a kind of device.
func capabilities(kind device.Kind) backend.Capabilities {
	c := backend.Capabilities{
		Register:          true,
		Transfers:         true,
		Graphs:            true,
		RanksInOneProcess: true,
		SeveralHosts:      true,
		OnHost:            kind == device.Host,
		Why: map[string]string{
			"peer_pointers": "the library moves memory and maps none; where load and store can reach, use native, nccl or nvshmem",
			"contiguous":    "peers' memory has no addresses in this process",
			"multicast":     "the library moves memory from one rank to one other",
		},
	}
	if kind == device.CUDA {
		c.RanksInOneProcess = false
		c.Why["ranks_in_one_process"] = "UCX moves GPU memory between processes only; start a process for each rank"
	}
	return c
}

// Close releases the agent, and closes the device unless it was given by the caller or the parent.
func (b *Backend) Close(ctx context.Context) error {
	err := b.isle.close(ctx)
	if b.ownsNode {
		err = errors.Join(err, b.node.close(ctx))
	}
	if b.owned {
		err = errors.Join(err, b.device.Close())
	}
	if err != nil {
		return fmt.Errorf("closing backend %s: %w", Name, err)
	}
	return nil
}

// Quiesce waits until the library no longer works on anything that was given up, for at most KernelTimeout.
func (b *Backend) Quiesce(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, b.timeout)
	defer cancel()
	if err := b.endRuns(ctx); err != nil {
		return err
	}
	return b.node.quiesce(ctx)
}

// factory opens the backend by name.
type factory struct{}

// Probe looks for the library and the device, and tries with one byte whether UCX can reach the device's memory.
func (factory) Probe(ctx context.Context, env *backend.Env) (backend.Capabilities, error) {
	o, err := options(env)
	if err != nil {
		return backend.Capabilities{}, err
	}
	p, err := choosePlace(o)
	if err != nil {
		return backend.Capabilities{}, err
	}
	lib, err := load(o.Library, p.cuda, o.Logger)
	if err != nil {
		return backend.Capabilities{}, err
	}
	d := o.Opened
	if d == nil {
		if d, err = p.open(o, nil); err != nil {
			return backend.Capabilities{}, err
		}
	}
	_, err = probe(ctx, lib, d)
	if o.Opened == nil {
		err = errors.Join(err, d.Close())
	}
	if err != nil {
		return backend.Capabilities{}, err
	}
	return capabilities(p.kind), nil
}

func (factory) Open(ctx context.Context, env *backend.Env) (backend.Backend, error) {
	o, err := options(env)
	if err != nil {
		// The other ranks are in New already, or will call it, so they must be told.
		_, err = (&Backend{group: env.Group}).locate(ctx, &Options{}, err)
		return nil, err
	}
	b, err := New(ctx, env.Group, o)
	if err != nil {
		return nil, err
	}
	return b, nil
}

// Preference puts the backend after those that map memory and, for the memory of the CPU, after host.
func (factory) Preference(onHost bool) int {
	if onHost {
		return -100
	}
	return 200
}

// Options returns the library, and whether ranks share memory.
func (factory) Options() []backend.Option {
	return []backend.Option{fromenv.Library("libnixl_capi.so"), {
		Name: "islands", Values: []string{islandsAuto, islandsOff}, Default: islandsAuto,
		Usage: "ranks that can share memory do, and only the rest goes through the library; off: everything does",
	}}
}

// Takes reports whether v is an *Options.
func (factory) Takes(v any) bool { _, ok := v.(*Options); return ok }

// options returns the Options for env.
func options(env *backend.Env) (*Options, error) {
	o, err := fromenv.Options[Options](Name, env)
	if err != nil {
		return nil, err
	}
	return o, errors.Join(fromenv.Text(&o.Library, Name, env, "library"), fromenv.Text(&o.Islands, Name, env, "islands"))
}
