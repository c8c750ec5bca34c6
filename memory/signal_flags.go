package memory

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
)

// flagSignals is signal, wait and barrier over words that the backend writes in the peers' host memory. The pad is laid out as
// that of hostSignals, and counts in the same way: a counter has one writer and only grows, a waiter keeps what it has consumed,
// and both are advanced when the work runs, so that it may be captured once and replayed any number of times.
//
// Each word holds its counter twice, in both halves. One whose halves differ is being written at this moment.
type flagSignals struct {
	memory   *Memory
	user     *signalUser // of a plan; nil for the memory's own
	size     int
	flags    backend.Flags
	failer   backend.FlagsFailer // nil if they fail only with a rank
	words    []atomic.Uint64
	consumed []atomic.Uint32 // by pad index: what this rank has waited for
	epochs   []atomic.Uint32 // by channel: the barriers that this rank has come to

	life   sync.RWMutex // is held by who reads or writes words, of which close takes the memory
	closed bool

	mu    sync.Mutex
	lanes []atomic.Pointer[flagLane] // by channel, kind and peer, made at first use

	channels []flagChannel // what is enqueued is made once, and so is what runs, as far as runs are not under way together
	awaits   spares[flagAwaited]
	runs     spares[flagRuns]
	meetings spares[flagMeeting]
}

// flagChannel is the work of a channel's waits, signals and barriers.
type flagChannel struct {
	waits     []flagWait // by peer
	signalAll flagSignalAll
	waitAll   flagWaitAll
	beside    flagWaitBeside
	barrier   flagBarrier
}

// spares are runs that have ended, for those to come.
type spares[T any] struct {
	mu   sync.Mutex
	free []*T
}

// take gives one that has ended, or a new one.
func (s *spares[T]) take() *T {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := len(s.free)
	if n == 0 {
		return new(T)
	}
	x := s.free[n-1]
	s.free = s.free[:n-1]
	return x
}

// give takes one back that nobody polls any more.
func (s *spares[T]) give(x *T) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.free = append(s.free, x)
}

// agreeOnFlags compares the number of channels, which what names in errors, by which every rank's words are laid out: a rank writes the words of the others. A failure is every rank's. Collective;
// the caller holds m.collective.
func (m *Memory) agreeOnFlags(ctx context.Context, what string, channels int, failure error) error {
	all, err := backend.Tell(group.Heard(ctx), m.group, "signals", channels, failure)
	if err != nil {
		return err
	}
	return backend.Alike(what, all, func(channels *int) int { return *channels })
}

// newFlagSignals makes the pad. Collective; the caller holds m.collective.
func newFlagSignals(ctx context.Context, m *Memory, f backend.Flagger, channels int, user *signalUser) (*flagSignals, error) {
	size := m.group.Size()
	n := channels * padKinds * size
	flags, err := f.NewFlags(group.Heard(ctx), n)
	if err != nil {
		return nil, err
	}
	s := &flagSignals{
		memory: m, user: user, size: size, flags: flags, words: flags.Words(),
		consumed: make([]atomic.Uint32, n), epochs: make([]atomic.Uint32, channels), lanes: make([]atomic.Pointer[flagLane], n),
		channels: make([]flagChannel, channels),
	}
	s.failer, _ = flags.(backend.FlagsFailer)
	for c := range s.channels {
		all := flagWaitAll{s, c}
		s.channels[c] = flagChannel{signalAll: flagSignalAll{s, c}, waitAll: all, beside: flagWaitBeside{all}, barrier: flagBarrier{s, c}}
		for peer := range size {
			s.channels[c].waits = append(s.channels[c].waits, flagWait{s, peer, c})
		}
	}
	if user != nil {
		for c := range channels {
			for writer := range size {
				i := s.index(c, padSignal, writer)
				s.words[i].Store(twice(user.begin(c)))
				s.consumed[i].Store(user.First)
			}
		}
	}
	return s, nil
}

// index is the place in a pad of the counter that writer writes.
func (f *flagSignals) index(channel, kind, writer int) int {
	return (channel*padKinds+kind)*f.size + writer
}

// count reads a counter of this rank; false while it is being written.
func (f *flagSignals) count(index int) (uint32, bool) {
	w := f.words[index].Load()
	return uint32(w), uint32(w) == uint32(w>>32)
}

// twice is the word of a counter.
func twice(count uint32) uint64 { return uint64(count)<<32 | uint64(count) }

func (f *flagSignals) signal(s device.Stream, peer, channel int) error {
	l, err := f.lane(channel, padSignal, peer)
	if err != nil {
		return fmt.Errorf("preparing signals to rank %d: %w", peer, err)
	}
	return device.EnqueueHostWork(s, l)
}

func (f *flagSignals) wait(s device.Stream, peer, channel int) error {
	return device.EnqueueHostWork(s, &f.channels[channel].waits[peer])
}

func (f *flagSignals) barrier(s device.Stream, channel int) error {
	for peer := range f.size {
		if _, err := f.lane(channel, padBarrier, peer); err != nil {
			return fmt.Errorf("preparing barriers with rank %d: %w", peer, err)
		}
	}
	return device.EnqueueHostWork(s, &f.channels[channel].barrier)
}

func (f *flagSignals) signalAll(s device.Stream, channel int) error {
	for peer := range f.size {
		if !f.user.has(channel, peer) {
			continue
		}
		if _, err := f.lane(channel, padSignal, peer); err != nil {
			return fmt.Errorf("preparing signals to rank %d: %w", peer, err)
		}
	}
	return device.EnqueueHostWork(s, &f.channels[channel].signalAll)
}

func (f *flagSignals) waitAll(s device.Stream, channel int, beside bool) error {
	if beside {
		return device.EnqueueHostWork(s, &f.channels[channel].beside)
	}
	return device.EnqueueHostWork(s, &f.channels[channel].waitAll)
}

// open keeps the words there until done is called, or is ErrClosed. A wait that its stream has cut off is polled until it ends by itself, and the memory may be
// closed meanwhile.
func (f *flagSignals) open() error {
	f.life.RLock()
	if f.closed {
		f.life.RUnlock()
		return fmt.Errorf("signals: %w", errs.ErrClosed)
	}
	return nil
}

// done ends what open has begun.
func (f *flagSignals) done() { f.life.RUnlock() }

func (f *flagSignals) close() error {
	f.life.Lock()
	defer f.life.Unlock()
	f.closed = true
	var err error
	for i := range f.lanes {
		if l := f.lanes[i].Swap(nil); l != nil {
			err = errors.Join(err, l.close())
		}
	}
	return errors.Join(err, f.flags.Close())
}

// lane gives the lane to a counter of peer.
func (f *flagSignals) lane(channel, kind, peer int) (*flagLane, error) {
	slot := &f.lanes[f.index(channel, kind, peer)]
	if l := slot.Load(); l != nil {
		return l, nil
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if l := slot.Load(); l != nil {
		return l, nil
	}
	me := f.memory.group.Rank()
	l := &flagLane{signals: f, channel: channel, peer: peer}
	if f.user != nil && kind == padSignal {
		l.sent = f.user.begin(channel)
		l.delivered = l.sent
	}
	if peer == me {
		l.own = &f.words[f.index(channel, kind, me)]
	} else {
		var err error
		if l.store, err = f.flags.PrepareStore(peer, f.index(channel, kind, me)); err != nil {
			return nil, err
		}
	}
	slot.Store(l)
	return l, nil
}

// waitOn lets arrive what a wait is for that began then; it is the error of one that may go on no longer.
func (f *flagSignals) waitOn(began time.Time) error {
	f.flags.Progress()
	if err := f.memory.group.Err(); err != nil {
		return err
	}
	if f.failer != nil {
		if err := f.failer.Err(); err != nil {
			return err
		}
	}
	if limit := f.memory.opts.KernelTimeout; time.Since(began) >= limit {
		return fmt.Errorf("it did not come in %v (kernel-timeout): %w", limit, os.ErrDeadlineExceeded)
	}
	return nil
}

// flagLane is this rank's counter in the pad of one peer. It is the work of a signal.
type flagLane struct {
	signals       *flagSignals
	channel, peer int
	own           *atomic.Uint64 // the counter itself, when the peer is this rank
	store         backend.FlagStore

	mu        sync.Mutex
	sent      uint32 // how often the counter was to be advanced
	flying    uint32 // the value that is being written
	busy      bool   // whether one is
	delivered uint32 // the value that has arrived

	sends spares[flagSent]
}

// send advances the counter by one and says what it comes to.
func (l *flagLane) send() uint32 {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.sent++
	return l.sent
}

// reached drives the lane on and reports whether the counter has come to count. Several that are under way go as one write.
func (l *flagLane) reached(count uint32) (bool, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for {
		if l.busy {
			ended, err := l.store.Poll()
			if !ended && err == nil {
				return false, nil
			}
			l.busy = false
			if err != nil {
				return false, err // the next write brings the count all the same
			}
			l.delivered = l.flying
		}
		if int32(l.delivered-count) >= 0 {
			return true, nil
		}
		if l.own != nil {
			l.own.Store(twice(l.sent))
			l.delivered = l.sent
			continue
		}
		if err := l.store.Post(twice(l.sent)); err != nil {
			return false, err
		}
		l.flying, l.busy = l.sent, true
	}
}

func (l *flagLane) close() error {
	if l.store == nil {
		return nil
	}
	return l.store.Close()
}

// Start sends a signal.
func (l *flagLane) Start() (device.HostProgress, error) {
	if err := l.signals.memory.kept(); err != nil {
		return nil, err
	}
	if l.signals.user.failedBefore() {
		return nothing{}, nil // what the peer waits for may not be there
	}
	run := l.sends.take()
	*run = flagSent{lane: l, count: l.send(), began: time.Now()}
	return run, nil
}

func (l *flagLane) String() string { return "signal" }

// flagSent is a signal under way.
type flagSent struct {
	lane  *flagLane
	count uint32
	began time.Time
}

func (r *flagSent) Poll() (bool, error) {
	l := r.lane
	if err := l.signals.open(); err != nil {
		return false, err
	}
	defer l.signals.done()
	ended, err := l.reached(r.count)
	if !ended && err == nil {
		err = l.signals.waitOn(r.began)
	}
	if ended || err != nil {
		l.sends.give(r)
	}
	if err != nil {
		err = &device.WaitError{Op: "signal", Channel: l.channel, Peer: l.peer, Err: err}
		if u := l.signals.user; u != nil {
			u.failLater(err)
			return true, nil
		}
	}
	return ended, err
}

// flagWait is the work of a wait.
type flagWait struct {
	signals       *flagSignals
	peer, channel int
}

func (w flagWait) Start() (device.HostProgress, error) {
	if err := w.signals.memory.kept(); err != nil {
		return nil, err
	}
	if w.signals.user.failedBefore() {
		return nothing{}, w.signals.user.tell()
	}
	i := w.signals.index(w.channel, padSignal, w.peer)
	run := w.signals.awaits.take()
	*run = flagAwaited{flagWait: w, index: i, count: w.signals.consumed[i].Add(1), began: time.Now()}
	return run, nil
}

func (w flagWait) String() string { return "wait" }

// flagAwaited is a wait under way.
type flagAwaited struct {
	flagWait
	index int
	count uint32
	began time.Time
}

func (r *flagAwaited) Poll() (bool, error) {
	f := r.signals
	if err := f.open(); err != nil {
		return false, err
	}
	defer f.done()
	if have, whole := f.count(r.index); whole && int32(have-r.count) >= 0 {
		f.awaits.give(r)
		return true, nil
	}
	if err := f.waitOn(r.began); err != nil {
		return false, f.user.failure(&device.WaitError{Op: "wait", Channel: r.channel, Peer: r.peer, Err: err})
	}
	return false, nil
}

// flagSignalAll is the work of a signal to every peer, and flagWaitAll that of a wait for one of every peer.
type (
	flagSignalAll struct {
		signals *flagSignals
		channel int
	}
	flagWaitAll struct {
		signals *flagSignals
		channel int
	}
)

// flagRuns are runs under way at the same time, which have ended when all have.
type flagRuns struct {
	of    *flagSignals
	under []device.HostProgress
}

func (w flagSignalAll) Start() (device.HostProgress, error) {
	if err := w.signals.memory.kept(); err != nil {
		return nil, err
	}
	if w.signals.user.failedBefore() {
		return nothing{}, nil // it may have no lanes any more
	}
	return w.signals.startAll(w.channel, (*flagSignals).startSignal)
}

// startSignal starts a signal to a peer.
func (f *flagSignals) startSignal(peer, channel int) (device.HostProgress, error) {
	l, err := f.lane(channel, padSignal, peer)
	if err != nil {
		return nil, err
	}
	return l.Start()
}

// startWait starts a wait for a peer.
func (f *flagSignals) startWait(peer, channel int) (device.HostProgress, error) {
	return f.channels[channel].waits[peer].Start()
}

func (w flagWaitAll) Start() (device.HostProgress, error) {
	if err := w.signals.memory.kept(); err != nil {
		return nothing{}, err
	}
	if w.signals.user.failedBefore() { // also where there is no peer to wait for
		return nothing{}, w.signals.user.tell()
	}
	return w.signals.startAll(w.channel, (*flagSignals).startWait)
}

// startAll starts a run for every peer of a channel, from the next rank on.
func (f *flagSignals) startAll(channel int, start func(f *flagSignals, peer, channel int) (device.HostProgress, error)) (device.HostProgress, error) {
	runs := f.runs.take()
	runs.of, runs.under = f, runs.under[:0]
	for k := 1; k < f.size; k++ {
		peer := (f.memory.group.Rank() + k) % f.size
		if !f.user.has(channel, peer) {
			continue
		}
		run, err := start(f, peer, channel)
		if err != nil {
			return nothing{}, err
		}
		runs.under = append(runs.under, run)
	}
	return runs, nil
}

// Poll drives on those that have not ended.
func (r *flagRuns) Poll() (bool, error) {
	under := r.under[:0]
	for _, run := range r.under {
		ended, err := run.Poll()
		if err != nil {
			return false, err
		}
		if !ended {
			under = append(under, run)
		}
	}
	if r.under = under; len(under) == 0 {
		r.of.runs.give(r)
		return true, nil
	}
	return false, nil
}

// flagWaitBeside is flagWaitAll on a stream whose errors nobody looks for: the plan has kept them.
type flagWaitBeside struct{ flagWaitAll }

func (w flagWaitBeside) Start() (device.HostProgress, error) {
	run, err := w.flagWaitAll.Start()
	if runs, ok := run.(*flagRuns); ok && err == nil {
		return (*flagBeside)(runs), nil
	}
	return nothing{}, nil
}

// Failed makes the plan fail, whose stream is not told.
func (w flagWaitBeside) Failed(err error) { w.signals.user.failLater(err) }

// flagBeside is such a wait under way.
type flagBeside flagRuns

func (b *flagBeside) Poll() (bool, error) {
	ended, err := (*flagRuns)(b).Poll()
	return ended || err != nil, nil
}

func (w flagSignalAll) String() string { return "signal" }
func (w flagWaitAll) String() string   { return "wait" }

// nothing is a run that has ended.
type nothing struct{}

func (nothing) Poll() (bool, error) { return true, nil }

// flagBarrier is the work of a barrier.
type flagBarrier struct {
	signals *flagSignals
	channel int
}

func (b flagBarrier) Start() (device.HostProgress, error) {
	if err := b.signals.memory.kept(); err != nil {
		return nil, err
	}
	run := b.signals.meetings.take()
	*run = flagMeeting{flagBarrier: b, epoch: b.signals.epochs[b.channel].Add(1), began: time.Now(), peers: run.peers[:0]}
	for peer := range b.signals.size {
		l, err := b.signals.lane(b.channel, padBarrier, peer)
		if err != nil {
			return nil, err
		}
		run.peers = append(run.peers, meeting{lane: l, sent: l.send()})
	}
	return run, nil
}

func (b flagBarrier) String() string { return "barrier" }

// flagMeeting is a barrier under way.
type flagMeeting struct {
	flagBarrier
	epoch uint32
	began time.Time
	peers []meeting // by rank
}

// meeting is a barrier with one rank.
type meeting struct {
	lane *flagLane
	sent uint32 // what the counter comes to in that rank's pad
	over bool   // that rank knows that this one has come, and has come itself
}

func (r *flagMeeting) Poll() (bool, error) {
	f := r.signals
	if err := f.open(); err != nil {
		return false, err
	}
	defer f.done()
	late := -1
	for peer := range r.peers {
		m := &r.peers[peer]
		if m.over {
			continue
		}
		told, err := m.lane.reached(m.sent)
		if err != nil {
			return false, r.failed(peer, err)
		}
		have, whole := f.count(f.index(r.channel, padBarrier, peer))
		if m.over = told && whole && int32(have-r.epoch) >= 0; !m.over {
			late = peer
		}
	}
	if late < 0 {
		f.meetings.give(r)
		return true, nil
	}
	if err := f.waitOn(r.began); err != nil {
		return false, r.failed(late, err)
	}
	return false, nil
}

func (r *flagMeeting) failed(peer int, err error) error {
	return &device.WaitError{Op: "barrier", Channel: r.channel, Peer: peer, Err: err}
}
