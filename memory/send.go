package memory

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
)

// SendPut is one write of a [PreparedSend]: of Bytes from Local, which is symmetric memory of this rank, to the place at Offset of Peer's
// copy of Window.
type SendPut struct {
	Peer   int
	Window *Window // nil is that of the workspace that the signals are in, whose places count from its beginning
	Offset int64   // bytes
	Local  device.Ptr
	Bytes  int64 // 0 writes nothing
}

// PreparedSend is puts to some peers, and a signal to every peer after its put, prepared once for a plan. Unlike a [Transfer] it has no
// state that the host can ask for. It may be enqueued again while earlier runs of it are queued, as long as streams and events order
// them.
type PreparedSend struct {
	signals   *Signals
	channel   int
	transfers []*Transfer
	silent    bool       // no signals: whoever enqueues it signals later
	copies    []WorkCopy // to peers whose memory has an address, unless the work does them
	work      *sendWork  // where a peer's memory or signal has none
	computed  *computed  // unless the puts are known before it runs
}

// PrepareSend prepares puts, one a peer at most, and a signal to every peer of the channel. Local. Its errors are those of
// [Memory.PrepareTransfer]; ErrInvalid also for a channel that does not exist, a put to this rank or to one that the channel does not reach, and two puts to one peer. A put that
// fails when it runs makes the plan fail: its peer gets no signal, the next wait of these signals returns the error, and the peers get no
// signals any more.
func (p *Signals) PrepareSend(channel int, puts ...SendPut) (*PreparedSend, error) {
	return p.prepareSend(channel, false, puts)
}

// PreparePuts is PrepareSend without the signals: the caller enqueues these, by [Signals.SignalAll], on a stream that has waited for the puts.
// ErrUnsupported where a peer's memory has no address here, since what moves it signals too.
func (p *Signals) PreparePuts(channel int, puts ...SendPut) (*PreparedSend, error) {
	return p.prepareSend(channel, true, puts)
}

func (p *Signals) prepareSend(channel int, silent bool, puts []SendPut) (_ *PreparedSend, err error) {
	if err := p.usable("PrepareSend", channel); err != nil {
		return nil, err
	}
	send := &PreparedSend{signals: p, channel: channel, silent: silent}
	defer func() {
		if err != nil {
			err = errors.Join(err, send.Close())
		}
	}()
	moves := make([]backend.PreparedTransfer, p.memory.group.Size()) // by peer
	taken := make([]bool, len(moves))
	_, onHost := p.memory.device.(device.HostMemory)
	flags, byFlags := p.signals.(*flagSignals)
	far := byFlags
	for _, put := range puts {
		t, err := p.prepare(channel, put, taken)
		if err != nil {
			return nil, err
		}
		send.transfers = append(send.transfers, t)
		switch m := t.prepared.(type) {
		case *copyTransfer:
			send.copies = append(send.copies, m.copies...)
		case *workTransfer:
			moves[put.Peer], far = m, true
		}
	}
	switch {
	case !far:
		return send, nil
	case silent:
		return nil, fmt.Errorf("puts without signals to memory without addresses: %w", errs.ErrUnsupported)
	case !byFlags && !onHost:
		return nil, fmt.Errorf("a plan on %s with puts to memory without addresses, whose signals are in memory with them: %w", p.memory.device.Name(), errs.ErrUnsupported)
	case onHost: // the work does everything, so that no peer waits for another's put
		send.copies = nil
		for i, put := range puts {
			if m, near := send.transfers[i].prepared.(*copyTransfer); near {
				moves[put.Peer] = &nearMove{memory: p.memory, sides: send.transfers[i].sides, copies: m.copies}
			}
		}
	}
	if send.work, err = newSendWork(p, flags, channel, moves); err != nil {
		return nil, err
	}
	return send, nil
}

// prepare prepares one put of a send, and notes in taken that its peer has one.
func (p *Signals) prepare(channel int, put SendPut, taken []bool) (*Transfer, error) {
	b, err := p.place(channel, put)
	if err != nil {
		return nil, err
	}
	t, err := p.memory.prepareTransfer(backend.Write, put.Peer, false, []TransferBlock{b})
	if err != nil {
		return nil, err
	}
	if taken[put.Peer] {
		return nil, errors.Join(twoPuts(put.Peer), t.Close())
	}
	taken[put.Peer] = true
	return t, nil
}

// place says where a put of a send goes.
func (p *Signals) place(channel int, put SendPut) (b TransferBlock, err error) {
	const call = "PrepareSend"
	if put.Peer == p.memory.group.Rank() {
		return b, errs.Invalid(call, "Peer", put.Peer, "another rank than this one")
	}
	if !p.user.has(channel, put.Peer) {
		return b, errs.Invalid(call, "Peer", put.Peer, fmt.Sprintf("a rank that the signals of channel %d reach: %s", channel, errs.Ranks(p.user.Peers[channel])))
	}
	b = TransferBlock{Local: put.Local, Window: put.Window, Offset: put.Offset, Bytes: put.Bytes}
	if b.Window == nil {
		if p.workspace.closed.Load() {
			return b, fmt.Errorf("workspace: %w", errs.ErrClosed)
		}
		if b.Offset < 0 || b.Bytes > p.workspace.Bytes()-b.Offset {
			return b, errs.Invalid(call, "Offset", b.Offset, fmt.Sprintf("0 to %d, so that %d bytes fit in the workspace", p.workspace.Bytes()-b.Bytes, b.Bytes))
		}
		b.Window, b.Offset = p.workspace.block.window, p.workspace.span.start+b.Offset
	}
	return b, nil
}

func twoPuts(peer int) error {
	return errs.Invalid("PrepareSend", "puts", fmt.Sprintf("two to rank %d", peer), "one a peer at most")
}

// made refuses a send that no signals have prepared.
func (p *PreparedSend) made(call string) error {
	if p == nil || p.signals == nil {
		return errs.Invalid(call, "send", "the zero PreparedSend", "one that PrepareSend gave")
	}
	return nil
}

// Enqueue enqueues the send on s, or records it: it begins when all earlier work of s has ended. Later work of s runs when everything
// is written. It returns at once and allocates nothing. ErrInvalid for a stream of another device; ErrClosed once the signals were closed.
func (p *PreparedSend) Enqueue(s device.Stream) error {
	if err := p.made("Enqueue"); err != nil {
		return err
	}
	if err := p.signals.enqueues("Enqueue", s, p.channel); err != nil {
		return err
	}
	if p.work != nil {
		for _, c := range p.copies { // before the work, which signals
			if err := s.Copy(c.Dst, c.Src, c.Bytes); err != nil {
				return err
			}
		}
		if err := device.EnqueueHostWork(s, p.work); err != nil || p.work.signals {
			return err
		}
		return p.signals.SignalAll(s, p.channel)
	}
	if _, ok := s.Device().(device.HostMemory); ok {
		if err := launch(s, (*hostSend)(p)); err != nil || p.silent {
			return err
		}
		return p.signals.SignalAll(s, p.channel)
	}
	for _, c := range p.copies {
		if err := s.Copy(c.Dst, c.Src, c.Bytes); err != nil {
			return err
		}
	}
	if p.silent {
		return nil
	}
	return p.signals.SignalAll(s, p.channel)
}

// Close releases the send; nothing of it may be queued any more.
func (p *PreparedSend) Close() error {
	if err := p.made("Close"); err != nil {
		return err
	}
	var err error
	for _, t := range p.transfers {
		err = errors.Join(err, t.Close())
	}
	if p.computed != nil {
		err = errors.Join(err, p.computed.close())
	}
	return err
}

// hostSend is the copies of a send on the host device. They look first whether the plan has failed: a peer that was waited for in vain has its memory to itself.
// A graph runs them at any time, so that the memory may be somebody else's by then. Some are known only then.
type hostSend PreparedSend

// RunKernel copies, unless the plan has failed or was closed. What goes wrong is a failure of the plan's: its peers, to which the stream signals next, must not take
// what is not there.
func (r *hostSend) RunKernel() error {
	user := r.signals.user
	if user.failedBefore() {
		return nil
	}
	returned := false
	defer func() {
		if !returned { // the stream has the panic
			user.failLater(errors.New("its copies have panicked"))
		}
	}()
	err := r.copy()
	returned = true
	if err != nil {
		user.failLater(err)
	}
	return nil
}

// copy copies, unless memory was freed.
func (r *hostSend) copy() error {
	hm := r.signals.memory.device.(device.HostMemory)
	if r.computed != nil {
		return r.computed.copy(hm)
	}
	for _, t := range r.transfers {
		if err := freedSides(t.sides); err != nil {
			return err
		}
	}
	return copyOnHost(hm, r.copies)
}

// copyOnHost copies between addresses of the host device, on the goroutine that asks.
func copyOnHost(hm device.HostMemory, copies []WorkCopy) error {
	for _, c := range copies {
		if c.Bytes == 0 {
			continue
		}
		dst, err := hm.Bytes(c.Dst, c.Bytes)
		if err != nil {
			return err
		}
		src, err := hm.Bytes(c.Src, c.Bytes)
		if err != nil {
			return err
		}
		copy(dst, src)
	}
	return nil
}

// nearMove is copies to or from a peer whose memory has an address, as work of the CPU, on the host device.
type nearMove struct {
	memory *Memory
	sides  []side
	copies []WorkCopy
}

// Start copies. The run has ended then.
func (n *nearMove) Start() (device.HostProgress, error) {
	if err := freedSides(n.sides); err != nil {
		return nil, err
	}
	return nothing{}, copyOnHost(n.memory.device.(device.HostMemory), n.copies)
}

// Close does nothing: the send closes its transfers.
func (n *nearMove) Close() error { return nil }

func (r *hostSend) String() string { return "send" }

// sendWork is a send that the backend carries out: all puts at once, and each peer's signal as soon as its put has ended. A failure is
// the plan's, not that of the stream that the work happens to be on.
type sendWork struct {
	user     *signalUser
	computed *computed                  // gives the parts' puts, unless it is nil
	signals  bool                       // the work signals each peer; otherwise that is done when all of it has ended
	kill     func() device.HostProgress // keeps kernels behind the work from signalling after a failure; nil where there are none

	mu      sync.Mutex          // two streams may come to it at once, which is found here
	parts   []sendPart          // by how far behind this rank the peer is
	killing device.HostProgress // under way; nil if it is not
}

// sendPart is what goes to one peer.
type sendPart struct {
	peer int
	put  backend.PreparedTransfer // nil without one
	lane *flagLane                // nil if the work does not signal
	run  device.HostProgress      // the put or the signal under way; nil when the part has ended
	sent bool                     // the run is the signal
}

// newSendWork makes the work of a send that moves what moves has, by peer. It signals if the signals are flags; else f is nil.
func newSendWork(p *Signals, f *flagSignals, channel int, moves []backend.PreparedTransfer) (*sendWork, error) {
	w := &sendWork{user: p.user, signals: f != nil}
	me, size := p.memory.group.Rank(), p.memory.group.Size()
	for k := 1; k < size; k++ {
		part := sendPart{peer: (me + k) % size}
		if !p.user.has(channel, part.peer) {
			continue
		}
		part.put = moves[part.peer]
		if f != nil {
			var err error
			if part.lane, err = f.lane(channel, padSignal, part.peer); err != nil {
				return nil, fmt.Errorf("preparing signals to rank %d: %w", part.peer, err)
			}
		}
		w.parts = append(w.parts, part)
	}
	return w, nil
}

// Start begins a run.
func (w *sendWork) Start() (device.HostProgress, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.ended() { // a run that was cut off
		w.user.failLater(errs.ErrInProgress)
	}
	if w.user.failedBefore() {
		return w.left(), nil
	}
	if w.computed != nil {
		if err := w.compute(); err != nil {
			w.user.failLater(err)
			return w.left(), nil
		}
	}
	// What goes far is under way while the CPU copies what is near.
	for _, near := range []bool{false, true} {
		for i := range w.parts {
			part := &w.parts[i]
			if _, copied := part.put.(*nearMove); copied == near {
				w.begin(part)
			}
		}
	}
	return w, nil
}

// left is what is left to do of a run that puts nothing.
func (w *sendWork) left() device.HostProgress {
	if w.kill == nil {
		return nothing{}
	}
	return w
}

// begin begins a part.
func (w *sendWork) begin(part *sendPart) {
	if part.sent = part.put == nil; part.sent {
		w.signal(part)
		return
	}
	run, err := part.put.Start()
	if part.run = run; err != nil {
		w.fail(part, err)
	}
}

// ended reports whether all parts have.
func (w *sendWork) ended() bool {
	return !slices.ContainsFunc(w.parts, func(p sendPart) bool { return p.run != nil })
}

// signal begins the signal of a part whose put has ended, if the work signals.
func (w *sendWork) signal(part *sendPart) {
	if part.lane == nil {
		part.run = nil
		return
	}
	run, err := part.lane.Start()
	if part.run, part.sent = run, true; err != nil {
		w.fail(part, err)
	}
}

// fail ends a part, and makes the plan fail.
func (w *sendWork) fail(part *sendPart, err error) {
	w.user.failLater(err)
	part.run = nil
}

// Poll drives on what has not ended. After a failure the other puts run to their end all the same, and nobody gets a signal.
func (w *sendWork) Poll() (bool, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for i := range w.parts {
		part := &w.parts[i]
		for part.run != nil {
			ended, err := part.run.Poll()
			if err != nil {
				w.fail(part, err)
				break
			}
			if !ended {
				break
			}
			if part.sent {
				part.run = nil
				break
			}
			w.signal(part)
		}
	}
	return w.ended() && w.killed(), nil
}

// killed reports whether nothing signals behind a run that has failed.
func (w *sendWork) killed() bool {
	if w.kill == nil || !w.user.dead.Load() {
		return true
	}
	if w.killing == nil {
		w.killing = w.kill()
	}
	ended, err := w.killing.Poll()
	if ended || err != nil {
		w.killing = nil
		return true
	}
	return false
}

// Failed makes the plan fail before anything behind this run can signal: the stream, which may have had to go on without it, is not one
// whose errors anybody looks for.
func (w *sendWork) Failed(err error) { w.user.failLater(err) }

func (w *sendWork) String() string { return "send" }
