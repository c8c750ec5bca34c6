package nccl

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/cuda"
	"github.com/symmem/symmem/group"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/multicast"
	"github.com/symmem/symmem/internal/nccl"
	_ "github.com/symmem/symmem/kernels/ptx/images" // for its CUDA devices
)

// Name is the name that the backend is registered under.
const Name = "nccl"

// The environment variables of Options.Library and Options.Window.
const (
	libraryEnv = nccl.LibraryEnv
	windowEnv  = "SYMMEM_NCCL_WINDOW"
)

// The values of Options.Window.
const (
	plainWindow     = "plain"
	symmetricWindow = "symmetric"
)

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
	// Functions is the table of NCCL's functions; nil loads the library.
	Functions *nccl.Functions
	// Library is the file of libnccl.so.2, or the folder it is in; "" looks at SYMMEM_NCCL_LIBRARY, then where the loader and
	// Python's package managers keep it.
	Library string
	// Window is the kind of window, the same on all ranks. "plain" leaves NCCL's collectives on the communicator as they are;
	// "symmetric" (NCCL_WIN_COLL_SYMMETRIC) also lets NCCL take its symmetric kernels for them. Both have peer pointers. "" looks at
	// SYMMEM_NCCL_WINDOW, and is "plain" if that is not set.
	Window string
	// Comm, unless 0, is an ncclComm_t that the caller has made with the same library, of the same ranks in the same order, each on its device. The
	// backend uses it instead of making one, and never ends it. Nobody else may use it meanwhile. Either all ranks give one, or none.
	Comm uintptr
	// Parent, unless nil, is the backend of a group that this one is a sub-group of.
	Parent *Backend
	// ShareDevice allows several ranks on one GPU, with NCCL 2.30.3 or newer; all ranks of the GPU must allow it. A local rank beyond the
	// last GPU then counts on from the first. These ranks have no multicast.
	ShareDevice bool
	// Multicast is "auto", "on" or "off"; "" is "auto".
	Multicast string
	// KernelTimeout bounds every wait for other ranks in calls of NCCL, and what streams of the device wait for by themselves; default 2 minutes. Signals and plans wait for as long as
	// KernelTimeout of [github.com/symmem/symmem/memory.Options] says, which Open of package symmem takes from the setting kernel-timeout.
	KernelTimeout time.Duration
	// Getenv reads the environment; default os.Getenv. NCCL itself reads that of the process.
	Getenv func(string) string
	// Logger takes events, NCCL's own log lines among them unless NCCL_DEBUG or NCCL_DEBUG_FILE is set; default: none are logged.
	Logger *slog.Logger

	load func(*nccl.Options) (*nccl.Library, error) // nccl.Load; tests have their own
}

// defaultTimeout is the KernelTimeout unless the options say otherwise.
const defaultTimeout = 2 * time.Minute

// Backend is one rank's side of the NCCL backend.
type Backend struct {
	device  *cuda.Device
	drv     *cu.Driver
	owned   bool // the device is closed with the backend
	group   *group.Group
	log     *slog.Logger
	timeout time.Duration
	getenv  func(string) string

	lib       *nccl.Library
	comm      *nccl.Comm // of all ranks of the group
	near      *nccl.Comm // of those that windows have addresses of, which have them: comm, if these are all
	isle      *isle      // those ranks; nil before they are known
	split     bool       // the communicator was split from the parent's
	opened    bool       // on all ranks
	lending   lending
	flags     nccl.WindowFlags
	total     int64 // memory of the GPU in bytes; 0 if not known
	mustCast  bool
	noCast    string          // why there is no multicast, the same on all ranks; "" if it may be asked for
	multicast *nccl.Multicast // nil unless noCast is ""
	stream    device.Stream   // fills new memory with zeros, and tries the library's collectives
	reach     reach           // what the trial window has shown

	shelf     *shelf // of the backend without a parent that this one comes from
	inherited bool   // the shelf is another's
	keeps     bool   // all ranks can keep the communicators
	link      *link  // what the communicators are kept as; nil for a group that is no sub-group
	reused    bool   // they were kept
	pending   []*link
	handed    atomic.Bool // the caller has the communicator's handle, and may leave on it what nobody knows

	mu       sync.Mutex
	windows  map[device.Ptr]*window      // by the base of the allocation that is registered
	reducers map[string]*reducer         // by algorithm
	asked    map[*reduction]func() error // whether the plans that they are of have given up
	puts     *puts                       // to ranks without addresses; nil where there are none, or NCCL cannot
	noPuts   string                      // why it cannot; "" if it can, or there are none
	spare    map[string]*nccl.Comm       // communicators that were kept with the first, by algorithm, that are no reducers yet
	words    []*cuda.FaultWord           // of all reducers that there ever were
	kept     []*allocation               // memory that the GPU still worked on when it was to be given back
	devComms []*DevComm
	late     []*lateCall // calls of NCCL's that were given up and have not ended
	spreads  []string    // keys under which this rank has told of failures

	topic string        // what the keys begin with, the same on all ranks and unique to this opening
	calls atomic.Uint64 // calls of NCCL's that take all ranks, which all make in the same order

	watching sync.WaitGroup
	watched  context.Context // ends when the watchers need not watch any more; nil without any
	unwatch  context.CancelFunc
}

var (
	_ backend.Backend    = (*Backend)(nil)
	_ backend.AllReducer = (*Backend)(nil)
)

// New opens the NCCL backend for this rank of g. Nil options are the defaults. Collective: it blocks until every rank has come. A rank that cannot
// take part makes it fail on every rank. Without a driver, a GPU or the library the error is ErrUnavailable and says what to do; a library or a
// machine without windows that have addresses is ErrUnsupported; two ranks on one GPU are ErrInvalid. After an error what was begun is undone, so New
// can be called again.
func New(ctx context.Context, g *group.Group, opts *Options) (*Backend, error) {
	var o Options
	if opts != nil {
		o = *opts
	}
	o.fill()
	b := &Backend{
		group: g, log: o.Logger.With("backend", Name, "rank", g.Rank()), timeout: o.KernelTimeout, getenv: o.Getenv,
		windows: map[device.Ptr]*window{}, reducers: map[string]*reducer{}, asked: map[*reduction]func() error{},
	}
	began := time.Now()
	err := b.open(&o)
	if err = b.meet(ctx, &o, err); err != nil {
		return nil, errors.Join(err, b.Close(context.WithoutCancel(ctx)))
	}
	b.opened = true
	b.log.Info("NCCL communicator ready", "version", b.lib.Version().String(), "library", b.lib.Path(), "communicator", b.handle(),
		"device", b.device.UUID(), "split", b.split, "kept", b.reused, "took", time.Since(began), "capabilities", b.Capabilities().String())
	return b, nil
}

// fill sets the defaults.
func (o *Options) fill() {
	o.KernelTimeout = cmp.Or(o.KernelTimeout, defaultTimeout)
	if o.Getenv == nil {
		o.Getenv = os.Getenv
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	o.Library = cmp.Or(o.Library, o.Getenv(libraryEnv))
	o.Window = cmp.Or(o.Window, o.Getenv(windowEnv), plainWindow)
	switch {
	case o.load != nil:
	case o.Functions != nil:
		table := *o.Functions
		o.load = func(*nccl.Options) (*nccl.Library, error) {
			return nccl.New(cmp.Or(o.Library, "given by the program"), table)
		}
	default:
		o.load = nccl.Load
	}
}

// open loads the library and opens the device. What it opened is closed by Close, also after an error.
func (b *Backend) open(o *Options) error {
	policy, err := multicast.NewPolicy("nccl.New", o.Multicast, o.Getenv)
	if err != nil {
		return err
	}
	switch o.Window {
	case plainWindow:
	case symmetricWindow:
		b.flags = nccl.WindowSymmetric
	default:
		return errs.Invalid("nccl.New", "window ("+windowEnv+")", strconv.Quote(o.Window), plainWindow+" or "+symmetricWindow)
	}
	if b.lib, err = loadLibrary(o, policy, false); err != nil {
		return err
	}
	b.noCast, b.mustCast = policy.Forbidden, policy.Must
	if b.device = o.Opened; b.device == nil {
		if b.device, err = openDevice(o, b.group.Err); err != nil {
			return err
		}
		b.owned = true
	}
	b.drv = b.device.Driver()
	if err := usable(b.drv, b.device.Ordinal(), b.device.UUID(), o.Getenv); err != nil {
		return err
	}
	var total uint64
	if b.drv.DeviceTotalMem != nil && b.drv.DeviceTotalMem(&total, b.device.Ordinal()) == cu.Success {
		b.total = int64(total)
	}
	b.shelf, b.inherited = &shelf{device: b.device}, o.Parent != nil
	if b.inherited {
		b.shelf = o.Parent.shelf
	}
	b.stream, err = b.device.NewStream()
	return err
}

// loadLibrary loads NCCL, with its multicast switched off unless the policy allows it, and finds out whether it can serve; with look, it leaves
// nothing behind but the loaded library.
func loadLibrary(o *Options, policy *multicast.Policy, look bool) (*nccl.Library, error) {
	lib, err := o.load(&nccl.Options{
		Path: o.Library, Multicast: policy.Forbidden == "", ShareGPU: o.ShareDevice, Look: look, Logger: o.Logger,
	})
	if err != nil {
		return nil, err
	}
	return lib, serves(lib)
}

// serves returns an error if the library lacks what the backend needs.
func serves(lib *nccl.Library) error {
	err := lib.Require("ncclMemAlloc", "ncclMemFree", "ncclCommWindowRegister", "ncclCommWindowDeregister")
	if err == nil && lib.Version() < oldest {
		err = fmt.Errorf("%s %s (%s) has windows, but they have no addresses; %s or newer has: %w", "NCCL", lib.Version(),
			lib.Path(), oldest,
			errs.ErrUnsupported)
	}
	return err
}

// oldest is the first version whose windows have addresses.
const oldest nccl.Version = 22803

// openDevice opens the GPU that the options name.
func openDevice(o *Options, lost func() error) (*cuda.Device, error) {
	c, err := o.gpu()
	if err != nil {
		return nil, fmt.Errorf("opening the CUDA device: %w", err)
	}
	c.WaitTimeout, c.Err = o.KernelTimeout, lost
	return cuda.Open(c)
}

// gpu says which GPU the options name. Where ranks may share GPUs, more ranks than GPUs are dealt out in turn.
func (o *Options) gpu() (*cuda.Options, error) {
	c := &cuda.Options{Driver: o.Driver, Device: o.Device, LocalRank: o.LocalRank, Logger: o.Logger}
	if !o.ShareDevice || c.Device != "" || c.LocalRank <= 0 {
		return c, nil
	}
	if c.Driver == nil {
		var err error
		if c.Driver, err = cu.Load(&cu.LoadOptions{Logger: o.Logger}); err != nil {
			return nil, err
		}
	}
	// Opening a GPU says better what is wrong with it.
	var count int32
	if c.Driver.Init != nil && c.Driver.DeviceGetCount != nil && c.Driver.Init(0) == cu.Success &&
		c.Driver.DeviceGetCount(&count) == cu.Success && count > 0 {
		c.LocalRank %= int(count)
	}
	return c, nil
}

// The driver functions that the backend needs besides those that every device needs.
var needed = []string{
	"cuMemRetainAllocationHandle", "cuMemGetAllocationPropertiesFromHandle", "cuMemGetAddressRange_v2",
	"cuPointerGetAttribute", "cuMemRelease",
}

// usable says why windows cannot be had on a GPU, as far as that can be known before they are tried. It needs no context.
func usable(drv *cu.Driver, gpu cu.DeviceOrdinal, uuid string, getenv func(string) string) error {
	if err := drv.Require(needed...); err != nil {
		return err
	}
	for _, a := range []struct {
		attr cu.DeviceAttribute
		what string
	}{
		{cu.AttrVMM, "virtual memory management"},
		{cu.AttrHandlePosixFD, "memory that can be passed to other processes as a file descriptor"},
	} {
		var have int32
		if err := drv.Check("cuDeviceGetAttribute", drv.DeviceGetAttribute(&have, a.attr, gpu)); err != nil {
			return err
		} else if have == 0 {
			return fmt.Errorf("%s has no %s, which NCCL's windows need: use backend host: %w", uuid, a.what, errs.ErrUnsupported)
		}
	}
	if why := switchedOff(getenv); why != "" {
		return fmt.Errorf("%s: unset it: %w", why, errs.ErrUnsupported)
	}
	return nil
}

// switchedOff says by which variable of NCCL's its windows are switched off; "" if by none.
func switchedOff(getenv func(string) string) string {
	for _, name := range []string{"NCCL_CUMEM_ENABLE", "NCCL_WIN_ENABLE"} {
		if getenv(name) == "0" {
			return name + "=0 in the environment switches NCCL's windows off"
		}
	}
	return ""
}

// Name returns "nccl".
func (b *Backend) Name() string { return Name }

// Device returns the GPU of this rank.
func (b *Backend) Device() device.Device { return b.device }

// Comm returns the ncclComm_t of all ranks of the group, for calls of the caller's own with the library at Library; 0 after Close. The caller must not
// end it, nor use it while a collective call of this backend is under way. Windows are registered with [Backend.WindowComm].
func (b *Backend) Comm() uintptr {
	if b.comm == nil {
		return 0
	}
	b.handed.Store(true)
	return uintptr(b.comm.Handle())
}

// WindowComm is Comm for the communicator that windows are registered with: that of the ranks which have addresses of each other's memory. It is the
// same one unless the group is on several hosts.
func (b *Backend) WindowComm() uintptr {
	if b.near == nil {
		return 0
	}
	b.handed.Store(true)
	return uintptr(b.near.Handle())
}

// Library returns the file of the library, and its version.
func (b *Backend) Library() (path, version string) { return b.lib.Path(), b.lib.Version().String() }

// handle returns the communicator for the log.
func (b *Backend) handle() string { return fmt.Sprintf("%#x", uintptr(b.comm.Handle())) }

// Capabilities says what works between the ranks of the group.
func (b *Backend) Capabilities() backend.Capabilities {
	c := capabilities(b.lib)
	if b.reach.notContiguous != "" {
		c.Contiguous, c.Why["contiguous"] = false, b.reach.notContiguous
	}
	if b.reach.unreachable != "" {
		c.PeerPointers, c.Why["peer_pointers"] = false, b.reach.unreachable
		c.PointerPeers = max(b.reach.ranks-1, 0)
	}
	if b.isle != nil && !b.isle.whole() { // gets are copies by address, and puts too where NCCL has none
		c.Transfers, c.Why["transfers"] = false, b.isle.why()+"; "+b.farWhy()
	}
	b.mu.Lock()
	why := b.noCast
	b.mu.Unlock()
	if c.Multicast = why == ""; c.Multicast {
		delete(c.Why, "multicast")
	} else {
		c.Why["multicast"] = why
	}
	return c
}

// capabilities returns what works with the library, as far as that can be known without peers.
func capabilities(lib *nccl.Library) backend.Capabilities {
	return backend.Capabilities{
		PeerPointers: true, Contiguous: true, Register: true, Transfers: true, Graphs: true, RanksInOneProcess: true,
		SeveralHosts: true, OnRequest: true,
		Why: map[string]string{
			"multicast": "NCCL " + lib.Version().String() + " gives no multicast address on the host; 2.29.2 or newer does",
		},
	}
}

// bounded returns ctx with a bound: the timeout, or the loss of a member of the group, which is then the context's cause.
func (b *Backend) bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	within, _, release := b.bound(ctx)
	return within, release
}

// bound is bounded with a function that ends the context for another cause.
func (b *Backend) bound(ctx context.Context) (_ context.Context, fail context.CancelCauseFunc, release context.CancelFunc) {
	within, end := context.WithTimeout(ctx, b.timeout)
	within, cancel := context.WithCancelCause(within)
	stop := make(chan struct{})
	go func() {
		select {
		case <-b.group.Lost():
			cancel(b.group.Err())
		case <-within.Done():
		case <-stop:
		}
	}()
	return within, cancel, func() {
		close(stop)
		cancel(context.Canceled)
		end()
	}
}

// Close ends the communicators, the library's own first, and closes the device, unless it was given by the caller. All mappings and allocations must
// have been released before. It waits no longer than KernelTimeout, and does not wait for lost ranks: if there are any, the communicators are
// aborted.
func (b *Backend) Close(ctx context.Context) error {
	err := b.closeWork(ctx)
	b.closeNews(ctx)
	err = errors.Join(err, b.closeLate(ctx))
	if b.owned {
		err = errors.Join(err, b.device.Close())
	}
	if b.lib != nil {
		b.lib.Log()
	}
	if err != nil {
		return fmt.Errorf("closing backend %s: %w", Name, err)
	}
	return nil
}

// closeWork releases everything but the device.
func (b *Backend) closeWork(ctx context.Context) error {
	b.stopWatching()
	err := b.closeWindows(ctx)
	if b.puts != nil {
		err = errors.Join(err, b.forget(ctx, b.puts.stage.base))
	}
	var kept bool
	if b.comm != nil {
		for _, d := range b.takeDevComms() {
			err = errors.Join(err, d.comm.Close(ctx))
		}
		kept = b.keep(ctx)
	}
	err = errors.Join(err, b.closeReducers(ctx))
	if b.puts != nil {
		err = errors.Join(err, b.puts.release(ctx))
	}
	if b.stream != nil {
		streamErr := b.stream.Close()
		if streamErr == nil { // else the GPU may still work on what was kept
			streamErr = b.giveBackKept()
		}
		err = errors.Join(err, streamErr)
		b.stream = nil
	}
	err = errors.Join(err, b.endKept(ctx))
	comm, near, apart := b.comm, b.near, b.apart()
	b.comm, b.near = nil, nil
	if comm == nil || kept {
		return err
	}
	if b.link != nil {
		b.shelf.remove(b.link)
		b.link = nil
	}
	if apart {
		err = errors.Join(err, b.endComm(ctx, near))
	}
	err = errors.Join(err, b.endComm(ctx, comm))
	return errors.Join(err, b.awaitProcess(ctx))
}

// closeWindows deregisters the windows that are left.
func (b *Backend) closeWindows(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), b.timeout)
	defer cancel()
	var err error
	for _, red := range b.allReducers() {
		for base, w := range red.windows {
			err = errors.Join(err, b.remove(ctx, red.comm, w, base))
		}
	}
	b.mu.Lock()
	windows := b.windows
	b.windows = map[device.Ptr]*window{}
	b.mu.Unlock()
	for base, w := range windows {
		err = errors.Join(err, b.deregister(ctx, w, base))
	}
	return err
}

// awaitProcess waits for the other ranks of this process, if there are any: NCCL releases what all of them hold when the last of them has destroyed
// its communicator (commReclaim in init.cc), and their contexts must exist until then.
func (b *Backend) awaitProcess(ctx context.Context) error {
	members := b.group.Members()
	same := 0
	for _, m := range members {
		if m.Process == members[b.group.Rank()].Process {
			same++
		}
	}
	if same == 1 || !b.opened || b.group.Err() != nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), min(b.timeout, awaitTime))
	defer cancel()
	return b.group.Barrier(ctx, "closing backend "+Name)
}

// awaitTime is how long a rank waits for others of its process that close.
const awaitTime = 20 * time.Second

// endComm destroys a communicator, or aborts it when ranks are lost or a call has not ended.
func (b *Backend) endComm(ctx context.Context, comm *nccl.Comm) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), b.timeout)
	defer cancel()
	if comm.Handle() == 0 {
		return nil
	}
	if lost := b.group.Err(); lost != nil && errors.Is(lost, errs.ErrPeerLost) {
		return comm.Abort(ctx, lost)
	}
	return comm.Destroy(ctx)
}
