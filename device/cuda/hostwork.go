package cuda

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/symmem/symmem/device"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/futex"
)

const (
	// How many looks at its lanes the proxy takes between two looks at everything else: as long as nothing moves, and at most.
	looksABatch = 32
	mostLooks   = 1024
	// While there is work to come or under way it looks without pause for so long after anything has happened, and then with
	// pauses that double from the first to the longest.
	lookingFor       = 5 * time.Millisecond
	firstProxyPause  = 20 * time.Microsecond
	longestProxyLook = 200 * time.Microsecond
	// workGrace is how much longer than the device's WaitTimeout a job may last before it is cut off: work that waits for a peer has the same bound, often, and knows
	// for whom it waited, and what has failed with it.
	workGrace = time.Second
	// idleLook is the pause between looks for launches of graphs that it does not know of: a graph launched by another one.
	idleLook = time.Millisecond
	// mostFollowing is how many works one after the other the CPU goes on with by itself. Then the GPU writes its word again: numbers are compared modulo 2^32, and a
	// word that falls behind by half of that seems to be ahead.
	mostFollowing = 1 << 30
)

// workLane is where one stream, or one branch of a graph, passes work to the CPU, one job after the other: the GPU writes the word go, and waits for
// the word done.
//
// In a stream the words hold the number of the work, which only grows. In a graph they are the same at each replay: the GPU sets
// done to 0 and go to 1, which the proxy sets back when it begins, and waits until done is the work's number in the lane.
//
// For work that directly follows other work the CPU does not wait for go: it continues by itself, which saves the way to the GPU and back.
//
// When the stream is being closed, and some time after the device's WaitTimeout, a job that has not ended is cut off: its stream goes on, while the run is
// polled until it ends. The watcher cuts jobs off, not the proxy, since it may be the proxy's call that lasts. The run itself has to notice that a
// peer is lost: the ranks that are left may go on using this device.
type workLane struct {
	dev     *Device
	words   *progress // began is go, and ended done
	parts   *graphParts
	owner   *Stream // without parts
	watched bool    // by the proxy, under whose lock this is

	mu      sync.Mutex
	gone    bool
	last    uint32    // the number of the latest job of a stream
	told    uint32    // that of the latest one for which the GPU writes its word
	jobs    []workJob // those of a stream that have not ended, behind some that have, or all of a graph
	next    int       // the present job, or the next; 0 if a stream has none
	pending int       // runs of the graph, by itself or as a copy in another one, that were launched and have not ended
	began   time.Time // when the present job did; zero without one
	cut     bool      // the present job was cut off

	run device.HostProgress // of the present job, or nil; only the proxy touches it
}

// workJob is one piece of work.
type workJob struct {
	id      uint32
	follows bool // it begins when the job before it has ended
	work    device.HostWork
}

// call reports whether the work is a host function.
func (j workJob) call() bool {
	_, call := j.work.(hostCall)
	return call
}

// laneState is what a look at a lane has found.
type laneState int

const (
	laneIdle    laneState = iota // nothing is expected of it
	laneWaiting                  // the GPU has not come to its work yet, or the work is under way
	laneMoved                    // something has begun or ended
)

// look checks whether the GPU has come to a job, begins it, polls it, and tells the GPU when it has ended. Only the proxy calls it. The lane is not
// locked while the work runs, so that enqueueing more does not wait for that. A run that was cut off is returned as left.
func (l *workLane) look() (state laneState, left device.HostProgress) {
	for {
		if l.run == nil {
			job, come := l.come()
			if come != laneMoved {
				return max(state, come), nil
			}
			if l.closing(time.Now()) {
				l.end(errClosing)
			} else {
				l.start(job.work)
				return laneMoved, nil
			}
		} else {
			if l.isCut() {
				left = l.run
				l.end(nil)
				return laneMoved, left
			}
			ended, err := l.poll()
			if !ended && err == nil {
				return max(state, laneWaiting), nil
			}
			l.end(err)
		}
		state = laneMoved
	}
}

// come returns the next job, and laneMoved if it may begin, which it then does.
func (l *workLane) come() (workJob, laneState) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.gone || len(l.jobs) == 0 {
		return workJob{}, laneIdle
	}
	job := l.jobs[l.next]
	if !job.follows {
		here := atomic.LoadUint32(l.words.began)
		switch {
		case l.parts == nil && int32(here-job.id) < 0, l.parts != nil && here == 0 && l.pending > 0:
			return job, laneWaiting
		case l.parts != nil && here == 0:
			return job, laneIdle
		case l.parts != nil:
			atomic.StoreUint32(l.words.began, 0)
		}
	}
	l.began, l.cut = time.Now(), false
	return job, laneMoved
}

// closing reports whether the time in which the stream's work had to end is over, or that of a stream that the graph was launched on.
func (l *workLane) closing(now time.Time) bool {
	var endBy time.Time
	if l.parts != nil {
		endBy = l.parts.ends(l.dev)
	} else {
		endBy = l.owner.waits.ends()
	}
	return !endBy.IsZero() && now.After(endBy)
}

// isCut reports whether the present job was cut off.
func (l *workLane) isCut() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.cut
}

// watch cuts the present job off if it must not go on, and reports whether there is anything to watch. The watcher calls it.
func (l *workLane) watch(now time.Time) bool {
	closing := l.closing(now)
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.gone {
		return false
	}
	var why error
	switch {
	case l.began.IsZero() || l.cut:
	case l.jobs[l.next].call(): // it lasts as long as it lasts
	case closing:
		why = errClosing
	case now.Sub(l.began) >= l.dev.waitTimeout+workGrace:
		why = fmt.Errorf("it has not ended in %v: %w", l.dev.waitTimeout, os.ErrDeadlineExceeded)
	}
	if why != nil {
		job := l.jobs[l.next]
		l.fail(job, why)
		l.cut = true
		atomic.StoreUint32(l.words.ended, job.id)
	}
	if l.parts != nil {
		return l.parts.stream.Load() != nil
	}
	return len(l.jobs) > 0
}

// end ends the present job and lets the GPU go on, unless it was cut off. The failure is stored first: whoever finds that the stream has ended must
// also find the failure.
func (l *workLane) end(err error) {
	l.run = nil
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.gone {
		return
	}
	job, cut := l.jobs[l.next], l.cut
	if err != nil && !cut {
		l.fail(job, err)
	}
	l.began, l.cut = time.Time{}, false
	if l.parts == nil {
		l.jobs[l.next] = workJob{}
		l.next++
		l.trim()
	} else if l.next++; l.next == len(l.jobs) {
		l.next = 0
		l.expect(-1)
	}
	if !cut {
		l.dev.ran.end()
		atomic.StoreUint32(l.words.ended, job.id)
	}
}

// fail keeps the error for the stream that the work is of, and tells the work.
func (l *workLane) fail(job workJob, err error) {
	if f, ok := job.work.(device.HostWorkFailer); ok {
		f.Failed(err)
	}
	name := fmt.Sprintf("%T", job.work)
	if named, ok := job.work.(fmt.Stringer); ok {
		name = named.String()
	}
	failed := &device.WorkError{Op: "HostWork(" + name + ")", Err: err}
	if job.call() {
		failed.Op = opHostFunc
	}
	if l.parts != nil {
		l.parts.fail(l.dev, failed)
	} else {
		l.owner.fail(failed)
	}
}

// atOnce is a run that has ended.
type atOnce struct{ err error }

func (a atOnce) Poll() (bool, error) { return a.err == nil, a.err }

// goneOn is a run whose work has ended the goroutine by runtime.Goexit. It stands in for every run while that is called, and so is made once.
var goneOn device.HostProgress = atOnce{errGoexit}

// start begins a run. If it cannot begin, it returns a run that has ended with the error.
func (l *workLane) start(w device.HostWork) {
	defer l.catch()
	l.run = goneOn // unless it returns
	run, err := w.Start()
	if err != nil || run == nil {
		run = atOnce{err}
	}
	l.run = run
}

// poll makes progress with the run.
func (l *workLane) poll() (ended bool, err error) {
	defer l.catch()
	run := l.run
	l.run = goneOn
	ended, err = run.Poll()
	l.run = run
	return ended, err
}

// catch turns a panic of the work into the end of its run, which the next look finds.
func (l *workLane) catch() {
	if v := recover(); v != nil {
		l.run = atOnce{&device.PanicError{Value: v, Stack: string(debug.Stack())}}
	}
}

// trim gives the places of a stream's jobs that have ended to those to come, so that enqueueing makes no garbage. The lane is locked.
func (l *workLane) trim() {
	switch {
	case l.next == len(l.jobs):
		l.jobs, l.next = l.jobs[:0], 0
	case l.next >= 64 && l.next >= len(l.jobs)/2: // which is as much to move as has ended, at most
		l.jobs, l.next = slices.Delete(l.jobs, 0, l.next), 0
	}
}

// push adds work with the next number.
func (l *workLane) push(w device.HostWork, follows bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.last++
	if !follows {
		l.told = l.last
	}
	l.jobs = append(l.jobs, workJob{id: l.last, follows: follows, work: w})
}

// ended reports whether a stream's lane has no job that has not ended.
func (l *workLane) ended() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.jobs) == 0
}

// unpush removes the latest work, which was not enqueued, unless it has begun. Its number is not used again.
func (l *workLane) unpush() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if left := len(l.jobs) - l.next; left > 1 || left == 1 && l.began.IsZero() {
		l.jobs = l.jobs[:len(l.jobs)-1]
		l.trim()
	}
}

// expect counts runs of the graph; the lane is locked.
func (l *workLane) expect(n int) {
	n = max(n, -l.pending) // graphs that it is part of are launched without this lane being told
	l.pending += n
	l.dev.proxy.pending.Add(int64(n))
}

// launched notes a launch that runs the graph that the lane is in so many times.
func (l *workLane) launched(times int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.expect(times)
}

// unlaunched undoes launched.
func (l *workLane) unlaunched(times int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.expect(-times)
}

// drop frees the words. Nothing enqueued writes them any more.
func (l *workLane) drop(d *Device) {
	d.proxy.forget(l)
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.gone {
		l.gone = true
		l.expect(-l.pending)
		d.dropProgress(l.words)
	}
}

// HostWork enqueues w, or records it. When the GPU comes to the work, it writes a word of pinned memory and waits for another one. A goroutine
// of the device watches the first words, runs the work with the device's context current, and writes the second ones. It polls without
// pause while something happens and for some milliseconds after, and then up to five thousand times a second. If the run does not end by
// itself, the stream goes on when it is being closed, or a second after WaitTimeout is over.
func (s *Stream) HostWork(w device.HostWork) error {
	const call = "HostWork"
	if w == nil {
		return errs.Invalid(call, "w", nil, "work")
	}
	behind, err := s.lockBehind(call)
	if err != nil {
		return err
	}
	defer s.unlock()
	return s.addWork(call, w, behind)
}

// addWork enqueues work or records it; the stream is locked.
func (s *Stream) addWork(call string, w device.HostWork, behind *workLane) error {
	if c := s.recording(); c != nil {
		return s.recordWork(call, c, w, behind)
	}
	return s.enqueueWork(call, w, behind)
}

// enqueueWork enqueues work; the stream is locked.
func (s *Stream) enqueueWork(call string, w device.HostWork, behind *workLane) error {
	d := s.dev
	if s.work == nil {
		words, err := d.takeProgress()
		if err != nil {
			return fmt.Errorf("%s: %w", call, err)
		}
		s.work = &workLane{dev: d, words: words, owner: s}
	}
	l := s.work
	if err := errors.Join(d.proxy.watch(l), d.watcher.start()); err != nil {
		return err
	}
	done := l.words.at + 4
	if behind == l && l.last-l.told < mostFollowing {
		// The CPU must not begin before the wait is enqueued, which may fail.
		s.ops[0] = waitFor(done, l.last+1)
		if r := s.batch(1); r != cu.Success {
			return d.check(call, "cuStreamBatchMemOp", r)
		}
		l.push(w, true)
		d.proxy.awake() // which may have looked in vain meanwhile
	} else {
		// The CPU must know of it before the GPU comes to it: the driver may return from the call later than that.
		l.push(w, false)
		d.proxy.awake() // which may have looked in vain meanwhile
		s.ops = [...]cu.BatchMemOp{tell(l.words.at, l.last), waitFor(done, l.last), {}, {}}
		if r := s.batch(2); r != cu.Success {
			l.unpush()
			return d.check(call, "cuStreamBatchMemOp", r)
		}
	}
	s.ends = l
	return nil
}

// recordWork records work; the stream is locked.
func (s *Stream) recordWork(call string, c *capture, w device.HostWork, behind *workLane) error {
	d := s.dev
	if l := behind; l != nil && l.parts == c.parts {
		s.ops[0] = waitFor(l.words.at+4, l.last+1)
		if r := s.batch(1); r != cu.Success {
			return d.check(call, "cuStreamBatchMemOp", r)
		}
		l.push(w, true)
		s.ends = l
		return nil
	}
	words, err := d.takeProgress()
	if err != nil {
		return fmt.Errorf("%s: %w", call, err)
	}
	l := &workLane{dev: d, words: words, parts: c.parts}
	l.push(w, false)
	s.ops = [...]cu.BatchMemOp{tell(words.at+4, 0), tell(words.at, 1), waitFor(words.at+4, 1), {}}
	if r := s.batch(3); r != cu.Success {
		d.dropProgress(words)
		return d.check(call, "cuStreamBatchMemOp", r)
	}
	c.addWork(l)
	s.ends = l
	return nil
}

// proxy does the work of the CPU that streams wait for, on one goroutine.
type proxy struct {
	dev *Device

	pending atomic.Int64  // runs of graphs, once for each of their lanes, that were launched and have not ended
	changes atomic.Uint64 // of lanes
	serves  atomic.Bool   // there was work: the goroutine runs, or ran

	left []device.HostProgress // runs that were cut off; only the goroutine touches them, and the timer
	idle *time.Timer           // for pauses between looks

	mu      sync.Mutex
	lanes   []*workLane // replaced as a whole, never changed
	dropped []*workLane // that are looked at no more, but may have runs under way
	stopped bool
	wake    chan struct{} // holds one; nil until the goroutine runs
	ended   chan struct{} // closed when it has ended
}

// watch makes the proxy look at the lanes, and soon.
func (p *proxy) watch(lanes ...*workLane) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.stopped {
		return closed("HostWork", "device")
	}
	first := 0
	for first < len(lanes) && lanes[first].watched {
		first++
	}
	if first < len(lanes) {
		all := slices.Clip(p.lanes)
		for _, l := range lanes[first:] {
			if !l.watched {
				l.watched = true
				all = append(all, l)
			}
		}
		p.lanes = all
		p.changes.Add(1)
	}
	if p.wake == nil {
		p.wake, p.ended = make(chan struct{}, 1), make(chan struct{})
		p.serves.Store(true)
		go p.run()
	}
	p.awake()
	return nil
}

// awake makes the proxy look soon; it was made to watch something before.
func (p *proxy) awake() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// forget makes the proxy stop looking at the lane. A run of it that was cut off is polled to its end all the same.
func (p *proxy) forget(l *workLane) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if l.watched {
		p.dropped = append(p.dropped, l)
	}
	p.lanes = slices.DeleteFunc(slices.Clone(p.lanes), func(m *workLane) bool { return m == l })
	p.changes.Add(1)
}

// stop ends the goroutine for good and waits for its end; false if it is in work that does not return.
func (p *proxy) stop(within time.Duration) bool {
	p.mu.Lock()
	p.stopped = true
	ended := p.ended
	if p.wake != nil {
		p.awake()
	}
	p.mu.Unlock()
	if ended == nil {
		return true
	}
	select {
	case <-ended:
		return true
	case <-time.After(within):
		return false
	}
}

// run is the goroutine.
func (p *proxy) run() {
	stopped := false
	defer func() {
		if stopped {
			close(p.ended)
			return
		}
		go p.run() // work has ended the goroutine by runtime.Goexit
	}()
	moved := time.Now()
	pause := firstProxyPause
	var s sights
	for {
		p.mu.Lock()
		lanes, changes := p.lanes, p.changes.Load()
		p.takeOver(p.dropped)
		p.dropped = nil
		stopped = p.stopped
		p.mu.Unlock()
		if stopped {
			return
		}
		if s.changes != changes {
			s = newSights(lanes, changes)
		}
		state := p.look(&s)
		switch {
		case state == laneMoved:
			moved, pause = time.Now(), firstProxyPause
		case state == laneIdle:
			p.rest(lanes)
			moved, pause = time.Now(), firstProxyPause
		case time.Since(moved) < lookingFor:
			runtime.Gosched()
		default:
			futex.Doze(pause)
			pause = min(2*pause, longestProxyLook)
		}
	}
}

// sights are the lanes as the proxy looks at them: those whose work is under way and those of streams, which are few, at each look;
// those of graphs, which may be thousands, when their word says that the GPU has come there.
type sights struct {
	changes uint64
	running []*workLane
	streams []*workLane
	graphs  []*workLane
	words   []*uint32 // go, of graphs
}

func newSights(lanes []*workLane, changes uint64) sights {
	s := sights{changes: changes}
	for _, l := range lanes {
		if l.midway() {
			s.running = append(s.running, l)
		}
		if l.parts == nil {
			s.streams = append(s.streams, l)
		} else {
			s.graphs, s.words = append(s.graphs, l), append(s.words, l.words.began)
		}
	}
	return s
}

// midway reports whether the lane must be looked at whatever its word says: a job is under way, or the next one of a graph follows directly, for which
// the GPU writes no word. The second may be without the first where a job was cut off. Only the proxy calls it.
func (l *workLane) midway() bool { return l.run != nil || l.parts != nil && l.next > 0 }

// lookOnce looks at each lane once.
func (p *proxy) lookOnce(s *sights) laneState {
	state := p.finish()
	look := func(l *workLane) {
		seen, left := l.look()
		state = max(state, seen)
		if left != nil {
			p.left = append(p.left, left)
		}
	}
	kept := s.running[:0]
	for _, l := range s.running {
		if look(l); l.midway() {
			kept = append(kept, l)
		}
	}
	s.running = kept
	first := func(l *workLane) {
		if l.midway() {
			return // it was looked at
		}
		if look(l); l.midway() {
			s.running = append(s.running, l)
		}
	}
	for _, l := range s.streams {
		first(l)
	}
	for i, w := range s.words {
		if atomic.LoadUint32(w) != 0 {
			first(s.graphs[i])
		}
	}
	return state
}

// takeOver takes over what lanes that were dropped have under way: the proxy was in a call of it when it was cut off.
func (p *proxy) takeOver(dropped []*workLane) {
	for _, l := range dropped {
		if l.run != nil {
			p.left, l.run = append(p.left, l.run), nil
		}
	}
}

// finish polls what was cut off. How it ends no longer matters.
func (p *proxy) finish() laneState {
	if len(p.left) == 0 {
		return laneIdle
	}
	p.left = slices.DeleteFunc(p.left, func(run device.HostProgress) bool {
		l := workLane{run: run}
		ended, err := l.poll()
		_, panicked := l.run.(atOnce)
		return ended || err != nil || panicked
	})
	return laneWaiting
}

// look looks at the lanes until nothing has moved for a batch of looks, and returns the liveliest state. The context is pushed once.
func (p *proxy) look(s *sights) laneState {
	if err := p.dev.push(); err != nil {
		p.dev.log.Debug("the context for work of the CPU cannot be made current", "error", err)
		return laneWaiting
	}
	defer p.dev.pop()
	best := laneIdle
	for quiet, looks := 0, 0; quiet < looksABatch && looks < mostLooks; looks++ {
		state := p.lookOnce(s)
		if state == laneIdle && p.pending.Load() > 0 {
			state = laneWaiting
		}
		best = max(best, state)
		if state == laneIdle || p.changes.Load() != s.changes {
			return best
		}
		if quiet++; state == laneMoved {
			quiet = 0
		}
	}
	return best
}

// watchLanes cuts off what must not go on, and reports whether there is anything to watch.
func (p *proxy) watchLanes(now time.Time) bool {
	p.mu.Lock()
	lanes := p.lanes
	p.mu.Unlock()
	found := false
	for _, l := range lanes {
		found = l.watch(now) || found
	}
	return found
}

// rest waits for something to do. Lanes of graphs may be used at any time by launches of other graphs that they are part of.
func (p *proxy) rest(lanes []*workLane) {
	if slices.ContainsFunc(lanes, func(l *workLane) bool { return l.parts != nil && l.parts.stream.Load() != nil }) {
		if p.idle == nil {
			p.idle = time.NewTimer(idleLook)
		} else {
			p.idle.Reset(idleLook)
		}
		select {
		case <-p.wake:
		case <-p.idle.C:
		}
		return
	}
	<-p.wake
}
