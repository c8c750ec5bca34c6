package host

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
)

// DefaultWaitTimeout is how long a WaitValue32 may last unless the options say otherwise.
const DefaultWaitTimeout = 2 * time.Minute

// longestWait bounds WaitTimeout, so that what is added to it does not wrap around: whoever wants no bound gives the longest Duration there is.
const longestWait time.Duration = math.MaxInt64 / 16

// Options are the options of New. Nil or zero values are the defaults.
type Options struct {
	// Logger receives what happens, at debug level. Nil logs nothing.
	Logger *slog.Logger
	// Index is the device's ordinal, for programs that open several in one process and want to tell them apart.
	Index int
	// WaitTimeout is how long one WaitValue32 may last; 0 is DefaultWaitTimeout.
	WaitTimeout time.Duration
	// Err, unless nil, is called during a WaitValue32, up to a thousand times a second and from several goroutines at once. If it returns an error,
	// the wait ends with it: so a lost peer ends the waits for it.
	Err func() error
}

// Device is the CPU as one rank uses it. It implements [device.Device] and [device.HostMemory]. All methods may be called
// from several goroutines at once.
type Device struct {
	log         *slog.Logger
	index       int
	name        string
	uuid        string
	waitTimeout time.Duration
	lost        func() error
	opened      time.Time // time stamps of events count from here

	space  space
	closed atomic.Bool // set under mu

	// launching makes a launch of a graph take its places in all queues at once; taken before any other lock.
	launching sync.Mutex

	mu      sync.Mutex
	streams map[*Stream]struct{}
	events  map[*Event]struct{}
	graphs  map[*Graph]struct{}
}

var (
	_ device.Device       = (*Device)(nil)
	_ device.HostMemory   = (*Device)(nil)
	_ device.Stream       = (*Stream)(nil)
	_ device.HostLauncher = (*Stream)(nil)
	_ device.HostWorker   = (*Stream)(nil)
	_ device.Event        = (*Event)(nil)
	_ device.Graph        = (*Graph)(nil)
)

// New opens the host device; nil options are the defaults. It starts no goroutine. Several devices in one process are
// independent of each other.
func New(opts *Options) (*Device, error) {
	const op = "host.New"
	var o Options
	if opts != nil {
		o = *opts
	}
	if o.Index < 0 {
		return nil, errs.Invalid(op, "Index", o.Index, "0 and more")
	}
	if o.WaitTimeout < 0 {
		return nil, errs.Invalid(op, "WaitTimeout", o.WaitTimeout, "0 for the default, or more")
	}
	if o.WaitTimeout == 0 {
		o.WaitTimeout = DefaultWaitTimeout
	}
	o.WaitTimeout = min(o.WaitTimeout, longestWait)
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	boot, err := bootID()
	if err != nil {
		return nil, fmt.Errorf("identifying the host: %w", err)
	}
	d := &Device{
		log:         o.Logger,
		index:       o.Index,
		name:        cpuName(),
		uuid:        "host-" + boot,
		waitTimeout: o.WaitTimeout,
		lost:        o.Err,
		opened:      time.Now(),
		streams:     make(map[*Stream]struct{}),
		events:      make(map[*Event]struct{}),
		graphs:      make(map[*Graph]struct{}),
	}
	if d.name == "" {
		d.name = "host CPU"
	}
	if d.index > 0 {
		d.uuid = fmt.Sprintf("%s-%d", d.uuid, d.index)
	}
	d.log.Debug("host device opened", "name", d.name, "uuid", d.uuid, "index", d.index, "wait_timeout", d.waitTimeout)
	return d, nil
}

// made refuses a device that New did not give.
func (d *Device) made(call string) error {
	if d.log == nil {
		return errs.Invalid(call, "device", "the zero Device", "one that New gave")
	}
	return nil
}

// Kind returns device.Host.
func (d *Device) Kind() device.Kind { return device.Host }

// Index returns the Index of the options.
func (d *Device) Index() int { return d.index }

// Name returns what the CPU calls itself, or "host CPU".
func (d *Device) Name() string { return d.name }

// UUID returns an id that is the same for all processes of the host until it boots again (on systems other than Linux: until it gets another name).
// Where the system hides which boot it is, it is the same for all devices of this process. Devices with an index above 0 have the index appended.
func (d *Device) UUID() string { return d.uuid }

// NewStream returns a new stream. It starts no goroutine before there is work.
func (d *Device) NewStream() (device.Stream, error) {
	if err := d.made("NewStream"); err != nil {
		return nil, err
	}
	s := newStream(d)
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed.Load() {
		return nil, closed("NewStream", "device")
	}
	d.streams[s] = struct{}{}
	return s, nil
}

// NewEvent returns a new event, not yet recorded.
func (d *Device) NewEvent() (device.Event, error) {
	if err := d.made("NewEvent"); err != nil {
		return nil, err
	}
	e := &Event{dev: d}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed.Load() {
		return nil, closed("NewEvent", "device")
	}
	d.events[e] = struct{}{}
	return e, nil
}

// Synchronize waits until the work that was enqueued on all streams before the call has ended, or until ctx ends. Errors of that work stay with their
// streams. For a capturing stream that means what was enqueued before its capture. Work of this device must not call it.
func (d *Device) Synchronize(ctx context.Context) error {
	const call = "Synchronize"
	if err := d.made(call); err != nil {
		return err
	}
	if ctx == nil {
		return errs.Invalid(call, "ctx", nil, "a context")
	}
	type place struct {
		stream *Stream
		target uint64
	}
	d.mu.Lock()
	if d.closed.Load() {
		d.mu.Unlock()
		return closed(call, "device")
	}
	places := make([]place, 0, len(d.streams))
	for s := range d.streams {
		places = append(places, place{stream: s})
	}
	d.mu.Unlock()
	for i := range places {
		s := places[i].stream
		s.mu.Lock()
		places[i].target = s.enqueued
		s.mu.Unlock()
	}
	for _, p := range places {
		if err := p.stream.done.wait(ctx, p.target); err != nil {
			return fmt.Errorf("synchronizing the host device: %w", err)
		}
	}
	return nil
}

// Stats is what a device holds at one moment.
type Stats struct {
	Streams     int   // streams not closed
	Events      int   // events not closed
	Graphs      int   // graphs not closed
	Allocations int   // pieces of memory that Alloc gave and Free did not take back
	Mappings    int   // pieces of memory that Map was told of and that were not unmapped
	Bytes       int64 // the sum of the allocations, as asked for; memory of Map is not counted
}

// Stats returns what the device holds. A closed device holds nothing.
func (d *Device) Stats() Stats {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.space.mu.Lock()
	defer d.space.mu.Unlock()
	return Stats{
		Streams:     len(d.streams),
		Events:      len(d.events),
		Graphs:      len(d.graphs),
		Allocations: d.space.allocations,
		Mappings:    d.space.mappings,
		Bytes:       d.space.bytes,
	}
}

// Close waits for the work of all streams, as long as the package's comment says, and releases streams, events, graphs and memory. Memory of Map
// stays the caller's. It returns the errors of work that no Synchronize has returned. A second Close returns ErrClosed.
func (d *Device) Close() error {
	if err := d.made("Close"); err != nil {
		return err
	}
	d.mu.Lock()
	if d.closed.Load() {
		d.mu.Unlock()
		return closed("Close", "device")
	}
	d.closed.Store(true)
	held := Stats{Streams: len(d.streams), Events: len(d.events), Graphs: len(d.graphs)}
	streams := make([]*Stream, 0, len(d.streams))
	for s := range d.streams {
		streams = append(streams, s)
	}
	events, graphs := d.events, d.graphs
	d.events, d.graphs = make(map[*Event]struct{}), make(map[*Graph]struct{})
	d.mu.Unlock()

	// All streams stop taking work before any is waited for: they may wait for each other.
	var failed []error
	mine := streams[:0:0]
	for _, s := range streams {
		if s.beginClose(true) == nil {
			mine = append(mine, s)
		} else {
			<-s.exited // its Close is under way
		}
	}
	for _, s := range mine {
		if err := s.finishClose(); err != nil {
			failed = append(failed, err)
		}
	}
	for e := range events {
		e.markClosed()
	}
	for g := range graphs {
		g.closed.Store(true)
	}
	var err error
	if held.Allocations, held.Mappings, err = d.space.close(); err != nil {
		failed = append(failed, err)
	}
	d.log.Debug("host device closed", "uuid", d.uuid, "streams", held.Streams, "events", held.Events, "graphs", held.Graphs,
		"allocations", held.Allocations, "mappings", held.Mappings)
	if err := errors.Join(failed...); err != nil {
		return fmt.Errorf("closing the host device: %w", err)
	}
	return nil
}
