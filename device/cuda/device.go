package cuda

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/symmem/symmem/device"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/errs"
)

// LibraryEnv names the environment variable with the driver library's path; without it the driver is looked for where the system
// keeps libraries.
const LibraryEnv = cu.LibraryEnv

// MinVersion is the oldest driver API that a device can be opened with: CUDA 12.4, of the driver series 550.
const MinVersion = cu.MinVersion

// DefaultWaitTimeout is how long a WaitValue32 may last, and Close may wait for work, unless the options say otherwise.
const DefaultWaitTimeout = 2 * time.Minute

// longestWait bounds WaitTimeout, so that what is added to it does not wrap around: whoever wants no bound gives the longest Duration there is.
const longestWait time.Duration = math.MaxInt64 / 16

// Options are the options of Open. Nil or zero values are the defaults.
type Options struct {
	// Driver is the table of driver functions, whose type is internal to this module; nil loads the driver.
	Driver *cu.Driver
	// Device says which GPU: an index among those this process sees ("2"), or a UUID ("GPU-5a1e..."; its beginning is enough
	// if it fits only one). "" takes the GPU whose index is LocalRank, or the only one if no more are visible.
	Device string
	// LocalRank is the number of this rank on its host, from 0. It only counts when Device is "".
	LocalRank int
	// Logger receives what happens, at debug level. Nil logs nothing.
	Logger *slog.Logger
	// WaitTimeout is how long one WaitValue32 may last, and how long Close waits for work; 0 is DefaultWaitTimeout.
	WaitTimeout time.Duration
	// Err, unless nil, is called fifty times a second, from one goroutine, while a stream may be in a WaitValue32. If it returns an error, the waits
	// that streams are in end with it: so a lost peer ends the waits for it.
	Err func() error
}

// Device is one GPU as one rank uses it. It implements [device.Device], [device.KernelLoader] and [device.FaultReporter]. All
// methods may be called from several goroutines at once. Several devices may be opened on one GPU; they share its primary
// context.
type Device struct {
	drv         *cu.Driver
	log         *slog.Logger
	ordinal     cu.DeviceOrdinal
	index       int
	name        string
	uuid        string
	pci         string
	ctx         cu.ContextHandle
	limits      limits
	waitTimeout time.Duration
	lost        func() error

	scoped  atomic.Bool // enqueueing work needs the context to be current; see try
	closing atomic.Bool
	uses    atomic.Int64  // 1, plus 1 for each call under way; at 0 the context may be given back
	unused  chan struct{} // closed at 0

	lane    lane
	watcher watcher
	proxy   proxy

	launching sync.Mutex // makes launches of graphs that contain each other take their places one by one; taken first of all

	loading sync.Mutex // held while modules are loaded and unloaded; guards images
	images  map[[sha256.Size]byte]*image

	faultMu    sync.Mutex       // guards the debts of streams and graphs, and what follows; taken last
	cells      []*faultCell     // not in use at the moment
	faultPages []unsafe.Pointer // pinned memory of fault cells

	ran order // work of the CPU

	making sync.Mutex // held while a stream is made, and while none may get work

	mu       sync.Mutex
	streams  map[*Stream]struct{}
	events   map[*Event]struct{}
	graphs   map[*Graph]struct{}
	modules  map[*Module]struct{}
	faults   map[*FaultWord]struct{}
	stops    map[*StopWord]struct{}
	buffers  map[*HostBuffer]struct{}
	allocs   map[device.Ptr]int64
	bytes    int64
	parts    map[*graphParts]struct{} // of graphs that have waits
	pages    []unsafe.Pointer         // pinned memory of progress words
	progress []*progress              // not in use at the moment
	marks    []cu.EventHandle         // events for waiting, not in use at the moment
	shared   map[cu.EventHandle]int   // events for waiting that have so many owners besides one
	kept     []cu.EventHandle         // events of streams that were closed with work in them
	retired  []retired                // memory that was freed while streams had work
	reaping  bool                     // a goroutine frees it when they have none
	remains  []*Stream                // that had work when the device was closed

	over    atomic.Bool // it was closed and has no work
	sharing *sharing    // with the other devices on the context
	stays   bool        // it was closed with work in it; under the lock of sharing
}

// limits are the attributes of the GPU that arguments are checked against.
type limits struct {
	processors  int
	capability  int // 90 for 9.0
	maxThreads  int
	maxBlock    [3]int
	maxGrid     [3]int
	maxShared   int // bytes of dynamic and static shared memory a block
	plainShared int // what a block may have without asking
}

var (
	_ device.Device         = (*Device)(nil)
	_ device.KernelLoader   = (*Device)(nil)
	_ device.FaultReporter  = (*Device)(nil)
	_ device.PeerAtomics    = (*Device)(nil)
	_ device.Stream         = (*Stream)(nil)
	_ device.HostWorker     = (*Stream)(nil)
	_ device.Event          = (*Event)(nil)
	_ device.Graph          = (*Graph)(nil)
	_ device.Module         = (*Module)(nil)
	_ device.Function       = (*Function)(nil)
	_ device.PreparedLaunch = (*PreparedLaunch)(nil)
	_ device.FaultWord      = (*FaultWord)(nil)
	_ device.StopWord       = (*StopWord)(nil)
)

// Open loads the driver, chooses a GPU and retains its primary context; nil options are the defaults. Creating the context
// takes some tenths of a second. Without a driver, with one that is too old, and without a GPU the error is ErrUnavailable and
// says what to do.
func Open(opts *Options) (*Device, error) {
	const op = "cuda.Open"
	var o Options
	if opts != nil {
		o = *opts
	}
	if o.WaitTimeout < 0 {
		return nil, errs.Invalid(op, "WaitTimeout", o.WaitTimeout, "0 for the default, or more")
	}
	if o.LocalRank < 0 {
		return nil, errs.Invalid(op, "LocalRank", o.LocalRank, "0 and more")
	}
	if o.WaitTimeout == 0 {
		o.WaitTimeout = DefaultWaitTimeout
	}
	o.WaitTimeout = min(o.WaitTimeout, longestWait)
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if err := o.load("opening the CUDA device"); err != nil {
		return nil, err
	}
	d, err := open(&o)
	if err != nil {
		return nil, fmt.Errorf("opening the CUDA device: %w", err)
	}
	d.log.Debug("CUDA device opened", "name", d.name, "uuid", d.uuid, "index", d.index, "pci", d.pci,
		"compute_capability", d.limits.capability, "driver", o.Driver.Path, "wait_timeout", d.waitTimeout)
	return d, nil
}

// open is Open with complete options.
func open(o *Options) (*Device, error) {
	drv := o.Driver
	chosen, err := find(o)
	if err != nil {
		return nil, err
	}
	d := &Device{
		drv:         drv,
		log:         o.Logger,
		ordinal:     chosen.ordinal,
		index:       chosen.index,
		uuid:        chosen.uuid,
		waitTimeout: o.WaitTimeout,
		lost:        o.Err,
		unused:      make(chan struct{}),
		streams:     make(map[*Stream]struct{}),
		events:      make(map[*Event]struct{}),
		graphs:      make(map[*Graph]struct{}),
		modules:     make(map[*Module]struct{}),
		images:      make(map[[sha256.Size]byte]*image),
		faults:      make(map[*FaultWord]struct{}),
		stops:       make(map[*StopWord]struct{}),
		buffers:     make(map[*HostBuffer]struct{}),
		allocs:      make(map[device.Ptr]int64),
		parts:       make(map[*graphParts]struct{}),
		shared:      make(map[cu.EventHandle]int),
	}
	d.uses.Store(1)
	d.lane.dev, d.watcher.dev, d.proxy.dev = d, d, d
	if err := d.identify(); err != nil {
		return nil, err
	}
	if err := drv.Check("cuDevicePrimaryCtxRetain", drv.PrimaryCtxRetain(&d.ctx, d.ordinal)); err != nil {
		return nil, err
	}
	d.share()
	return d, nil
}

// Found is a GPU that nobody has opened yet.
type Found struct {
	Driver  *cu.Driver
	Index   int
	Ordinal cu.DeviceOrdinal
	UUID    string
}

// Find returns the GPU that Open would open, and its errors, but makes no context: it takes some milliseconds at most, and leaves nothing behind but
// the driver. It uses only the options Driver, Device, LocalRank and Logger.
func Find(opts *Options) (*Found, error) {
	var o Options
	if opts != nil {
		o = *opts
	}
	if o.LocalRank < 0 {
		return nil, errs.Invalid("cuda.Find", "LocalRank", o.LocalRank, "0 and more")
	}
	if err := o.load("finding the CUDA device"); err != nil {
		return nil, err
	}
	g, err := find(&o)
	if err != nil {
		return nil, fmt.Errorf("finding the CUDA device: %w", err)
	}
	return &Found{Driver: o.Driver, Index: g.index, Ordinal: g.ordinal, UUID: g.uuid}, nil
}

// load loads the driver, unless the options have one. what says in errors what was going on.
func (o *Options) load(what string) error {
	if o.Driver != nil {
		return nil
	}
	drv, err := cu.Load(&cu.LoadOptions{Logger: o.Logger})
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	o.Driver = drv
	return nil
}

// find initialises the driver and returns the GPU that the options select.
func find(o *Options) (gpu, error) {
	if err := o.Driver.Start(); err != nil {
		return gpu{}, err
	}
	all, err := visible(o.Driver)
	if err != nil {
		return gpu{}, err
	}
	return choose(all, o.Device, o.LocalRank)
}

// identify asks for what can be known about the GPU without a context.
func (d *Device) identify() error {
	var name [256]byte
	if err := d.drv.Check("cuDeviceGetName", d.drv.DeviceGetName(&name[0], int32(len(name)), d.ordinal)); err != nil {
		return err
	}
	d.name = cu.GoString(&name[0], len(name))
	var pci [32]byte
	if err := d.drv.Check("cuDeviceGetPCIBusId", d.drv.DeviceGetPCIBusID(&pci[0], int32(len(pci)), d.ordinal)); err != nil {
		return err
	}
	d.pci = cu.GoString(&pci[0], len(pci))
	major, minor := 0, 0
	for _, a := range []struct {
		value *int
		attr  cu.DeviceAttribute
	}{
		{&d.limits.processors, cu.AttrMultiprocessors},
		{&major, cu.AttrComputeCapabilityMajor},
		{&minor, cu.AttrComputeCapabilityMinor},
		{&d.limits.maxThreads, cu.AttrMaxThreadsPerBlock},
		{&d.limits.maxBlock[0], cu.AttrMaxBlockDimX},
		{&d.limits.maxBlock[1], cu.AttrMaxBlockDimY},
		{&d.limits.maxBlock[2], cu.AttrMaxBlockDimZ},
		{&d.limits.maxGrid[0], cu.AttrMaxGridDimX},
		{&d.limits.maxGrid[1], cu.AttrMaxGridDimY},
		{&d.limits.maxGrid[2], cu.AttrMaxGridDimZ},
		{&d.limits.maxShared, cu.AttrMaxSharedPerBlockOptin},
		{&d.limits.plainShared, cu.AttrMaxSharedPerBlock},
	} {
		var value int32
		if err := d.drv.Check("cuDeviceGetAttribute", d.drv.DeviceGetAttribute(&value, a.attr, d.ordinal)); err != nil {
			return err
		}
		*a.value = int(value)
	}
	d.limits.capability = 10*major + minor
	return nil
}

// Kind returns device.CUDA.
func (d *Device) Kind() device.Kind { return device.CUDA }

// Index returns the ordinal among the GPUs that this process sees.
func (d *Device) Index() int { return d.index }

// Name returns what the vendor calls the GPU: "NVIDIA H200".
func (d *Device) Name() string { return d.name }

// UUID returns the UUID of the GPU, as nvidia-smi prints it: "GPU-5a1e...".
func (d *Device) UUID() string { return d.uuid }

// PCIBusID returns where the GPU is: "0000:1B:00.0".
func (d *Device) PCIBusID() string { return d.pci }

// Driver returns the table of driver functions that the device calls, for the backends of this module; its type is internal.
func (d *Device) Driver() *cu.Driver { return d.drv }

// Ordinal returns the number of the GPU for the driver.
func (d *Device) Ordinal() cu.DeviceOrdinal { return d.ordinal }

// Context returns the GPU's primary context, a CUcontext, which the device holds until Close.
func (d *Device) Context() uintptr { return uintptr(d.ctx) }

// ComputeCapability returns ten times the major number plus the minor one: 90 for 9.0.
func (d *Device) ComputeCapability() int { return d.limits.capability }

// Multiprocessors returns how many multiprocessors the GPU has.
func (d *Device) Multiprocessors() int { return d.limits.processors }

// Attribute asks the driver for an attribute of the GPU by its number, a CUdevice_attribute. One that the driver does not know is an [*Error].
func (d *Device) Attribute(attr int) (int, error) {
	const call = "Attribute"
	if err := d.use(call); err != nil {
		return 0, err
	}
	defer d.unuse()
	var value int32
	if err := d.drv.Check("cuDeviceGetAttribute", d.drv.DeviceGetAttribute(&value, cu.DeviceAttribute(attr), d.ordinal)); err != nil {
		return 0, fmt.Errorf("asking for attribute %d: %w", attr, err)
	}
	return int(value), nil
}

// MemInfo returns how much memory the GPU has free and in all, in bytes.
func (d *Device) MemInfo() (free, total int64, err error) {
	if err := d.made("MemInfo"); err != nil {
		return 0, 0, err
	}
	if d.drv.MemGetInfo == nil {
		return 0, 0, d.drv.Require("cuMemGetInfo_v2")
	}
	var f, t uint64
	err = d.WithContext(func() error { return d.drv.Check("cuMemGetInfo", d.drv.MemGetInfo(&f, &t)) })
	return int64(f), int64(t), err
}

// Synchronize waits until the work that was enqueued on all streams before the call has ended, or until ctx ends. Errors of that work stay with their
// streams. For a capturing stream that means what was enqueued before its capture. It also waits for a copy between host and device whose call has
// failed; if the driver cannot say whether such a copy has ended, that is the error.
func (d *Device) Synchronize(ctx context.Context) error {
	const call = "Synchronize"
	if ctx == nil {
		return errs.Invalid(call, "ctx", nil, "a context")
	}
	if err := d.use(call); err != nil {
		return err
	}
	defer d.unuse()
	var marks []mark
	defer func() {
		for _, m := range marks {
			m.drop(d)
		}
	}()
	for _, s := range d.openStreams() {
		m, err := s.mark(ctx)
		if err != nil {
			return fmt.Errorf("synchronizing the CUDA device: %w", err)
		}
		marks = append(marks, m)
	}
	for _, m := range marks {
		if err := d.await(ctx, m.event, time.Time{}); err != nil {
			return fmt.Errorf("synchronizing the CUDA device: %w", err)
		}
	}
	if err := d.lane.drain(ctx); err != nil {
		return fmt.Errorf("synchronizing the CUDA device: %w", err)
	}
	return nil
}

// openStreams returns the streams that are not closed.
func (d *Device) openStreams() []*Stream {
	d.mu.Lock()
	defer d.mu.Unlock()
	all := make([]*Stream, 0, len(d.streams))
	for s := range d.streams {
		all = append(all, s)
	}
	return all
}

// Stats is what a device holds at one moment.
type Stats struct {
	Streams     int   // streams not closed
	Events      int   // events not closed
	Graphs      int   // graphs not closed
	Modules     int   // modules not closed
	FaultWords  int   // fault words not closed
	StopWords   int   // stop words not closed
	HostBuffers int   // host buffers not closed
	HostFuncs   int   // host functions that have not run, or are part of a graph
	Allocations int   // pieces of memory that Alloc gave and Free did not take back
	Bytes       int64 // the sum of the allocations, as asked for
}

// Stats returns what the device holds. The driver drops host functions of a closed graph some time after its last launch has ended. A closed device
// holds nothing.
func (d *Device) Stats() Stats {
	d.mu.Lock()
	defer d.mu.Unlock()
	return Stats{
		Streams:     len(d.streams),
		Events:      len(d.events),
		Graphs:      len(d.graphs),
		Modules:     len(d.modules),
		FaultWords:  len(d.faults),
		StopWords:   len(d.stops),
		HostBuffers: len(d.buffers),
		HostFuncs:   callbacks.count(d),
		Allocations: len(d.allocs),
		Bytes:       d.bytes,
	}
}

// Close waits for the work of all streams, no longer than WaitTimeout, and releases streams, events, graphs, modules and memory, and the primary
// context. It returns the errors of work that no Synchronize has returned. What the GPU still works on after WaitTimeout is not released, and that is
// an error. Where another device on the context has work, which frees wait for in the driver, memory and modules are released when that has ended. Close must not be called inside WithContext. A second Close returns ErrClosed.
func (d *Device) Close() error {
	if err := d.made("Close"); err != nil {
		return err
	}
	if d.closing.Swap(true) {
		return closed("Close", "device")
	}
	held := d.Stats()
	err := d.close()
	d.log.Debug("CUDA device closed", "uuid", d.uuid, "streams", held.Streams, "events", held.Events, "graphs", held.Graphs,
		"modules", held.Modules, "fault_words", held.FaultWords, "stop_words", held.StopWords,
		"host_buffers", held.HostBuffers, "allocations", held.Allocations, "bytes", held.Bytes, "error", err)
	if err != nil {
		return fmt.Errorf("closing the CUDA device: %w", err)
	}
	return nil
}

// Over reports whether the device was closed and none of its work is left: not while Close waits for some, nor after it has given that up.
func (d *Device) Over() bool { return d.over.Load() }

// close releases everything.
func (d *Device) close() error {
	var failed []error
	note := func(err error) {
		// A lost context fails every call; once is enough.
		if err != nil && !(errors.Is(err, cu.ErrContextLost) && errors.Is(errors.Join(failed...), cu.ErrContextLost)) {
			failed = append(failed, err)
		}
	}
	deadline := time.Now().Add(d.waitTimeout)
	away := false // it is off its context
	defer func() {
		if !away {
			d.stay()
		}
	}()

	idle := d.closeStreams(deadline, note)
	// Calls under way now end soon, except WithContext and Close of a stream, which may last.
	if d.uses.Add(-1) > 0 {
		select {
		case <-d.unused:
		case <-time.After(time.Until(deadline)):
			d.uses.Add(1)
			d.watcher.stop()
			d.proxy.stop(0)
			return errors.Join(append(failed, errCallsLeft)...)
		}
	}
	// One of those calls may have made a stream.
	idle = d.closeStreams(deadline, note) && idle
	note(d.awaitGone(deadline))
	d.watcher.stop()
	if !d.proxy.stop(d.waitTimeout) {
		note(errCallsLeft)
		idle = false
	}
	if err := d.lane.drainBy(deadline); err != nil {
		note(err)
		idle = false
	}

	d.mu.Lock()
	d.remains = slices.Collect(maps.Keys(d.streams))
	idle = idle && len(d.remains) == 0
	events, graphs, modules, faults, stops, buffers := d.events, d.graphs, d.modules, d.faults, d.stops, d.buffers
	allocs := d.allocs
	d.streams, d.events, d.graphs = map[*Stream]struct{}{}, map[*Event]struct{}{}, map[*Graph]struct{}{}
	d.modules, d.faults, d.stops = map[*Module]struct{}{}, map[*FaultWord]struct{}{}, map[*StopWord]struct{}{}
	d.allocs, d.buffers = map[device.Ptr]int64{}, map[*HostBuffer]struct{}{}
	pages := d.pages
	d.faultMu.Lock()
	pages = append(pages, d.faultPages...)
	d.faultPages, d.cells = nil, nil
	d.faultMu.Unlock()
	d.bytes, d.pages, d.progress = 0, nil, nil
	d.mu.Unlock()

	if err := d.push(); err != nil {
		note(err)
	} else {
		for e := range events {
			note(e.destroy())
		}
		for g := range graphs {
			note(g.destroy())
		}
		d.mu.Lock()
		marks := d.marks // with those of the graphs
		d.marks = nil
		if idle { // else other devices on the context ask them when the work has ended
			marks = append(marks, d.kept...)
			d.kept = nil
		}
		d.mu.Unlock()
		for _, m := range marks {
			note(d.drv.Check("cuEventDestroy", d.drv.EventDestroy(m)))
		}
		if idle {
			var all []retired
			add := func(r retired) error { all = append(all, r); return nil }
			for m := range modules {
				note(m.destroy(add))
			}
			for f := range faults {
				note(f.destroy(add))
			}
			for w := range stops {
				note(w.destroy(add))
			}
			for b := range buffers {
				note(b.destroy(add))
			}
			for p := range allocs {
				all = append(all, retired{ptr: p})
			}
			for _, p := range pages {
				all = append(all, retired{host: p})
			}
			note(d.lane.close(add))
			away = true
			d.over.Store(true)
			if !d.bequeath(all, note) {
				note(fmt.Errorf("another device on the GPU was closed with work in it: %w", errWorkLeft))
			}
		}
		d.pop()
	}
	callbacks.drop(d)
	if !idle {
		// Freeing memory, unloading code and destroying the context would wait for the GPU, perhaps for ever.
		return errors.Join(append(failed, errWorkLeft)...)
	}
	note(d.drv.Check("cuDevicePrimaryCtxRelease", d.drv.PrimaryCtxRelease(d.ordinal)))
	return errors.Join(failed...)
}

// closeStreams closes the streams that are open, and reports whether their work had ended by the deadline.
func (d *Device) closeStreams(deadline time.Time, note func(error)) (idle bool) {
	var mine []*Stream
	// All streams stop taking work before any is waited for: they may wait for each other.
	for _, s := range d.openStreams() {
		switch err := s.beginClose(deadline, true); {
		case err == nil:
			mine = append(mine, s)
		case !errors.Is(err, device.ErrClosed): // else its own Close is under way, or it was not idle before
			note(err)
		}
	}
	idle = true
	for _, s := range mine {
		done, err := s.finishClose(deadline)
		idle = idle && done
		note(err)
	}
	return idle
}
