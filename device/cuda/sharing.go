package cuda

import (
	"slices"
	"sync"

	cu "github.com/symmem/symmem/internal/cuda"
)

// sharing is the devices on one primary context. The driver frees a context's memory when all of the context's work has ended, whichever of them that is of. Ranks of one process that
// share a GPU would wait for each other there, and the one that waits inside the driver could not do what the other waits for.
type sharing struct {
	mu      sync.Mutex // held while memory is given back, and while kernels are loaded; taken before the locks of the devices
	devices []*Device  // that may have work

	users int // devices, and those that were closed with work in them; under the lock of contexts
}

// contextKey tells the primary contexts of a process apart. A process has one driver, but for tests.
type contextKey struct {
	driver any
	handle cu.ContextHandle
}

// contexts are the primary contexts of this process that devices are open on.
var contexts = struct {
	mu  sync.Mutex
	all map[contextKey]*sharing
}{all: make(map[contextKey]*sharing)}

// contextKey is that of the device's context.
func (d *Device) contextKey() contextKey {
	if d.drv.Origin == nil {
		return contextKey{d.drv, d.ctx}
	}
	return contextKey{d.drv.Origin, d.ctx}
}

// share notes that the device is open on its context, which it has retained.
func (d *Device) share() {
	contexts.mu.Lock()
	c := contexts.all[d.contextKey()]
	if c == nil {
		c = &sharing{}
		contexts.all[d.contextKey()] = c
	}
	c.users++
	contexts.mu.Unlock()
	c.mu.Lock() // which somebody may hold who waits for the GPU
	defer c.mu.Unlock()
	c.devices = append(c.devices, d)
	d.sharing = c
}

// whileIdle calls f if no stream of any device has work, and makes sure that none gets any meanwhile; otherwise busy is true. So it is while a copy between host and
// device is under way whose call has failed. The lock is held, and the context is current.
func (c *sharing) whileIdle(f func() error) (busy bool, err error) {
	if slices.ContainsFunc(c.devices, func(d *Device) bool { return !d.lane.idle() }) {
		return true, nil
	}
	return whileAll(c.devices, (*Stream).idle, f)
}

// bequeath takes the device, which is being closed and has no work, off its context, and gives back what it held: to the driver, or while others have work, to one of these, which does that when none
// has. It reports whether it could: where work has outlasted all others, what it may use is left to it. The context is current.
func (d *Device) bequeath(all []retired, note func(error)) bool {
	c := d.sharing
	c.mu.Lock()
	defer c.mu.Unlock()
	c.devices = slices.DeleteFunc(c.devices, func(x *Device) bool { return x == d })
	d.mu.Lock()
	all = append(all, d.retired...) // what another one has left it meanwhile, too
	d.retired = nil
	d.mu.Unlock()
	contexts.mu.Lock()
	if c.users--; c.users == 0 {
		delete(contexts.all, d.contextKey())
	}
	contexts.mu.Unlock()
	busy, _ := c.whileIdle(func() error {
		for _, r := range all {
			note(d.give(r))
		}
		return nil
	})
	if !busy || len(all) == 0 {
		return true
	}
	heir := slices.IndexFunc(c.devices, func(x *Device) bool { return !x.stays })
	if heir < 0 {
		return false
	}
	for _, r := range all {
		c.devices[heir].keep(r)
	}
	return true
}

// stay notes that the device was closed with work in it, for which the others look.
func (d *Device) stay() {
	d.sharing.mu.Lock()
	defer d.sharing.mu.Unlock()
	d.stays = true
}

// working returns the streams that may have work: those that are not closed, and those that were closed with work in them.
func (d *Device) working() []*Stream {
	d.mu.Lock()
	defer d.mu.Unlock()
	all := slices.Clone(d.remains)
	for s := range d.streams {
		all = append(all, s)
	}
	return all
}
