package cuda

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/symmem/symmem/device"
	cu "github.com/symmem/symmem/internal/cuda"
)

const (
	// watchEvery is the time between two looks at what streams wait for.
	watchEvery = 20 * time.Millisecond
	// watchLonger is how many looks the watcher takes with nothing to see before it ends.
	watchLonger = 50

	// progressPage is the size of the blocks of pinned memory that progress words come from.
	progressPage = 4096
	// fewProgress is the least number of free progress words for a new stream.
	fewProgress = 64
)

// progress is two words of pinned memory, in which the GPU reports when it begins a wait and when it has ended it: each wait of a stream has a
// number, and while the words differ, the GPU is in the wait whose number began holds. For waits in graphs see graphWait.
type progress struct {
	began, ended *uint32
	at           device.Ptr // of began; ended is behind it
}

// waiting reports which wait the GPU is in, if it is in any.
func (p *progress) waiting() (id uint32, is bool) {
	ended := atomic.LoadUint32(p.ended)
	began := atomic.LoadUint32(p.began)
	return began, began != ended
}

// wait is a WaitValue32 that was enqueued.
type wait struct {
	id    uint32
	p     device.Ptr
	value uint32
}

// sight is what the watcher has seen of a queue of waits. Only the watcher touches it.
type sight struct {
	seen   uint32    // the wait that was under way at the last look
	since  time.Time // since when; zero if none was
	failed bool      // its failure is noted, and it must be ended
	warned bool      // that this could not be done
}

// waits are those of a stream that may not have ended. They have a lock of their own because that of the stream may be held
// by a call that one of the waits holds up.
type waits struct {
	mu    sync.Mutex
	words *progress // nil until there is a wait
	last  uint32    // the number of the latest
	queue []wait    // in order; the ended ones are taken out by and by
	sight sight

	endBy atomic.Pointer[time.Time] // when they end because the stream is being closed; nil while it is open
}

// What the word began of a graph's wait holds. The GPU writes 1 at each replay, and the watcher makes it 2 when it sees the wait: one that is
// under way when the word is 1 is another one than those that the watcher has seen.
const (
	waitBegun = 1
	waitSeen  = 2
)

// graphWait is a WaitValue32 in a graph. It has words of its own, since graphs run in parallel to their streams' waits. They are the same at
// each replay: ended is 0 while the GPU is in the wait, and else 1, but before the first replay, when began is 0.
type graphWait struct {
	wait
	words *progress
	sight sight
}

// under reports whether the GPU is in the wait, and forgets what was seen of the wait of an earlier replay. Only the watcher calls it.
//
// The words are memory of the host, so that a write of the GPU comes either before the swap or behind it. If the GPU writes 1 for the next replay just before the
// swap, the mark counts for that wait, which begins just now, as the time does that is taken with the mark. If it writes behind the swap, the next look takes the
// wait for a new one, which it is, a tick late. The GPU writes 1 before it makes ended 0, and a look reads them the other way round: it never finds a new wait with an
// old mark.
func (w *graphWait) under() bool {
	if atomic.LoadUint32(w.words.ended) != 0 || atomic.LoadUint32(w.words.began) == 0 {
		return false
	}
	if atomic.CompareAndSwapUint32(w.words.began, waitBegun, waitSeen) {
		w.sight = sight{}
	}
	return true
}

// enqueueWait enqueues a wait, with a write of a progress word before and after it. The stream is locked and the context is current.
func (s *Stream) enqueueWait(call string, p device.Ptr, value uint32) error {
	d := s.dev
	if c := s.recording(); c != nil {
		words, err := d.takeProgress()
		if err != nil {
			return fmt.Errorf("%s: %w", call, err)
		}
		w := &graphWait{wait: wait{id: 1, p: p, value: value}, words: words}
		// In this order, for under.
		s.ops = [...]cu.BatchMemOp{tell(words.at, waitBegun), tell(words.at+4, 0), waitFor(p, value), tell(words.at+4, 1)}
		if r := s.batch(4); r != cu.Success {
			d.dropProgress(words)
			return d.check(call, "cuStreamBatchMemOp", r)
		}
		c.addWait(w)
		return nil
	}
	if err := d.watcher.start(); err != nil {
		return err
	}
	w := &s.waits
	w.mu.Lock()
	if w.words == nil {
		words, err := d.takeProgress()
		if err != nil {
			w.mu.Unlock()
			return fmt.Errorf("%s: %w", call, err)
		}
		w.words = words
		w.last = 0
	}
	words := w.words
	w.last++
	id := w.last
	w.trim()
	w.queue = append(w.queue, wait{id: id, p: p, value: value})
	w.mu.Unlock()
	s.ops = [...]cu.BatchMemOp{tell(words.at, id), waitFor(p, value), tell(words.at+4, id), {}}
	if r := s.batch(3); r != cu.Success {
		w.mu.Lock()
		defer w.mu.Unlock()
		// Nothing of it was enqueued, and nobody else can have added a wait: the stream is locked.
		if n := len(w.queue); n > 0 && w.queue[n-1].id == id {
			w.queue = w.queue[:n-1]
		}
		w.last--
		return d.check(call, "cuStreamBatchMemOp", r)
	}
	return nil
}

// batch enqueues the first n of the stream's operations, all or nothing.
func (s *Stream) batch(n uint32) cu.Result {
	return s.dev.drv.StreamBatchMemOp(s.handle, n, &s.ops[0], 0)
}

// tell returns the operation that writes a progress word.
func tell(at device.Ptr, value uint32) cu.BatchMemOp {
	return cu.BatchMemOp{Op: cu.MemOpWrite32, Address: uint64(at), Value: uint64(value), Flags: cu.WriteValueDefault}
}

// waitFor returns the operation that waits.
func waitFor(p device.Ptr, value uint32) cu.BatchMemOp {
	return cu.BatchMemOp{Op: cu.MemOpWait32, Address: uint64(p), Value: uint64(value), Flags: cu.WaitValueGEQ}
}

// trim takes the waits that have ended out of the queue. The lock is held.
func (w *waits) trim() {
	if len(w.queue) == 0 {
		return
	}
	ended := atomic.LoadUint32(w.words.ended)
	n := 0
	for n < len(w.queue) && int32(ended-w.queue[n].id) >= 0 {
		n++
	}
	w.queue = append(w.queue[:0], w.queue[n:]...)
}

// end returns the waits until deadline.
func (w *waits) end(deadline time.Time) { w.endBy.Store(&deadline) }

// ends tells when the waits end because the stream is being closed; zero while it is open. It takes no lock.
func (w *waits) ends() time.Time {
	if by := w.endBy.Load(); by != nil {
		return *by
	}
	return time.Time{}
}

// now returns the waits that have not ended, and which of them the GPU is in, if it is in one.
func (w *waits) now() (pending bool, current wait, is bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.trim()
	if len(w.queue) == 0 {
		return false, wait{}, false
	}
	if id, waiting := w.words.waiting(); waiting {
		for _, one := range w.queue {
			if one.id == id {
				return true, one, true
			}
		}
	}
	return true, wait{}, false
}

// clear frees the words. The work of the stream has ended.
func (w *waits) clear(d *Device) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.words != nil {
		d.dropProgress(w.words)
	}
	w.words, w.queue = nil, nil
}

// needProgress makes sure that there are progress words to take while enqueueing: making more waits for the GPU. The context is current.
func (d *Device) needProgress() error {
	d.mu.Lock()
	have := len(d.progress)
	d.mu.Unlock()
	if have >= fewProgress {
		return nil
	}
	return d.growProgress()
}

// takeProgress returns two progress words that are 0. The context is current.
func (d *Device) takeProgress() (*progress, error) {
	d.mu.Lock()
	if len(d.progress) == 0 {
		d.mu.Unlock() // the driver may be calling back just now, for somebody who needs the lock
		if err := d.growProgress(); err != nil {
			return nil, err
		}
		d.mu.Lock()
	}
	defer d.mu.Unlock()
	if len(d.progress) == 0 {
		return nil, fmt.Errorf("%w: hundreds of new streams wait at the same moment", device.ErrNoMemory)
	}
	n := len(d.progress) - 1
	p := d.progress[n]
	d.progress = d.progress[:n]
	atomic.StoreUint32(p.began, 0)
	atomic.StoreUint32(p.ended, 0)
	return p, nil
}

// growProgress makes more progress words.
func (d *Device) growProgress() error {
	var mem unsafe.Pointer
	r := d.drv.MemHostAlloc(&mem, progressPage, cu.HostAllocPortable|cu.HostAllocDeviceMap)
	if err := d.drv.Check("cuMemHostAlloc", r); err != nil {
		return err
	}
	var at device.Ptr
	if err := d.drv.Check("cuMemHostGetDevicePointer", d.drv.MemHostGetDevicePointer(&at, mem, 0)); err != nil {
		return errors.Join(err, d.retire(retired{host: mem}))
	}
	words := unsafe.Slice((*uint32)(mem), progressPage/4)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.pages = append(d.pages, mem)
	for i := 0; i < len(words); i += 2 {
		d.progress = append(d.progress, &progress{began: &words[i], ended: &words[i+1], at: at.Add(int64(4 * i))})
	}
	return nil
}

// dropProgress returns words to the pool that nothing enqueued writes any more.
func (d *Device) dropProgress(p *progress) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.pages != nil { // else the device was closed
		d.progress = append(d.progress, p)
	}
}

// watcher looks at what the streams and graphs of a device wait for, from a goroutine that runs only while there is anything.
type watcher struct {
	dev *Device

	mu      sync.Mutex
	stopped bool
	quit    chan struct{} // closed to end the goroutine; nil when none runs
	ended   chan struct{} // closed when it has ended
}

// start makes the goroutine run if it does not.
func (w *watcher) start() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case w.stopped:
		return closed("WaitValue32", "device")
	case w.quit == nil:
		w.quit, w.ended = make(chan struct{}), make(chan struct{})
		go w.run(w.quit, w.ended)
	}
	return nil
}

// stop ends the goroutine for good and waits for it.
func (w *watcher) stop() {
	w.mu.Lock()
	w.stopped = true
	quit, ended := w.quit, w.ended
	w.mu.Unlock()
	if quit != nil {
		close(quit)
		<-ended
	}
}

// run is the goroutine.
func (w *watcher) run(quit, ended chan struct{}) {
	defer close(ended)
	ticks := time.NewTicker(watchEvery)
	defer ticks.Stop()
	for quiet := 0; ; {
		select {
		case <-quit:
			return
		case <-ticks.C:
			// Not the time of the tick, which is from before if the last look was held up: a wait would seem to have lasted as long.
			if w.dev.watch(time.Now()) {
				quiet = 0
			} else {
				quiet++
			}
		}
		if quiet >= watchLonger && w.retire() {
			return
		}
	}
}

// retire makes the next start begin another goroutine, unless there is something to see again.
func (w *watcher) retire() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.stopped || w.dev.watchable() {
		return false
	}
	w.quit, w.ended = nil, nil
	return true
}

// watchable reports whether there is anything to look at.
func (d *Device) watchable() bool {
	for _, s := range d.openStreams() {
		if pending, _, _ := s.waits.now(); pending {
			return true
		}
	}
	return len(d.launchedParts()) > 0 || d.proxy.watchLanes(time.Now())
}

// launchedParts returns the parts of graphs that have waits and were launched.
func (d *Device) launchedParts() []*graphParts {
	d.mu.Lock()
	defer d.mu.Unlock()
	var all []*graphParts
	for p := range d.parts {
		if p.stream.Load() != nil {
			all = append(all, p)
		}
	}
	return all
}

// watch looks at everything once, and reports whether there was anything. Only the watcher calls it.
func (d *Device) watch(now time.Time) bool {
	var lost error
	if d.lost != nil {
		lost = d.lost()
	}
	found := d.proxy.watchLanes(now)
	for _, s := range d.openStreams() {
		pending, current, is := s.waits.now()
		found = found || pending
		s.look(&s.waits.sight, nil, current, is, s.waits.ends(), now, lost)
	}
	for _, p := range d.launchedParts() {
		found = true
		endBy := p.ends(d)
		for _, w := range p.waits {
			p.stream.Load().look(&w.sight, p, w.wait, w.under(), endBy, now, lost)
		}
	}
	return found
}

// look ends the wait that the GPU is in, if it is in one that must end, at endBy if that is not zero. parts are those of the graph that the wait is in, or nil.
func (s *Stream) look(w *sight, parts *graphParts, current wait, is bool, endBy, now time.Time, lost error) {
	if !is {
		w.since, w.failed, w.warned = time.Time{}, false, false
		return
	}
	if w.since.IsZero() || w.seen != current.id {
		w.seen, w.since, w.failed, w.warned = current.id, now, false, false
	}
	d := s.dev
	var why error
	switch {
	case w.failed: // the store has failed before
	case lost != nil:
		why = lost
	case !endBy.IsZero() && now.After(endBy):
		why = errClosing
	case now.Sub(w.since) >= d.waitTimeout:
		why = fmt.Errorf("nobody has written %d there in %v: %w", current.value, d.waitTimeout, os.ErrDeadlineExceeded)
	default:
		return
	}
	if why != nil {
		// The failure is stored first: whoever finds that the stream has ended must also find the failure.
		failed := &device.WorkError{Op: "WaitValue32", Addr: current.p, Err: why}
		if parts != nil {
			parts.fail(d, failed)
		} else {
			s.fail(failed)
		}
		w.failed = true
	}
	if err := d.lane.store(current.p, current.value); err != nil {
		if !w.warned { // with a context that is lost it goes on for ever
			d.log.Warn("ending a wait failed; it is tried again", "address", current.p, "error", err)
		}
		w.warned = true
		return
	}
	// If the wait is in a graph that is launched again at once, that is another wait.
	w.since, w.failed, w.warned = time.Time{}, false, false
}

// fail keeps the error of work for the next Synchronize.
func (s *Stream) fail(e *device.WorkError) {
	s.dev.log.Debug("work failed", "op", e.Op, "address", e.Addr, "error", e.Err)
	s.failures.add(e)
}
