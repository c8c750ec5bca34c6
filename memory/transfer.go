package memory

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
)

// TransferBlock is one piece of a transfer: Bytes at Local on this rank and at Offset of the peer's copy of Window. A block of
// 0 bytes is nothing, and needs neither.
type TransferBlock struct {
	Local  device.Ptr
	Window *Window
	Offset int64
	Bytes  int64
}

// TransferState is how far a transfer has come.
type TransferState int

// The states of a transfer.
const (
	TransferPrepared   TransferState = iota + 1 // never posted
	TransferInProgress                          // posted, not yet ended
	TransferDone                                // the last post has ended; it may be posted again
)

// String returns the state's name.
func (s TransferState) String() string {
	switch s {
	case TransferPrepared:
		return "prepared"
	case TransferInProgress:
		return "in progress"
	case TransferDone:
		return "done"
	}
	return fmt.Sprintf("TransferState(%d)", int(s))
}

// Transfer is a one-sided transfer that was prepared once and may be posted many times. The peer does nothing for it. It is
// safe for use by several goroutines.
type Transfer struct {
	memory   *Memory
	op       backend.TransferOp
	peer     int
	sides    []side // whose memory must still be there
	prepared mover

	enqueuing sync.Mutex // taken before mu, and held by Post and WaitOn, which may wait for room in a stream's queue

	mu       sync.Mutex
	posting  bool // a Post is under way
	state    TransferState
	captured bool // the last post was recorded in a graph, whose launches the host does not see
	err      error
	cut      error // of a post that has begun all the same
	closed   bool
}

// PrepareTransfer prepares moving blocks between this rank and peer. Local. ErrNotSymmetric if the local side of a block is not inside
// one allocation of this memory; ErrNoRendezvous if a block has no window; ErrInvalid for an empty list, a negative size, a range outside
// of a window, another memory's window, or an op or a peer that does not exist; ErrClosed once memory of either side was freed.
func (m *Memory) PrepareTransfer(op backend.TransferOp, peer int, blocks []TransferBlock) (*Transfer, error) {
	if err := m.made("PrepareTransfer"); err != nil {
		return nil, err
	}
	return m.prepareTransfer(op, peer, true, blocks)
}

// prepareTransfer is PrepareTransfer, also for one that is never posted but is a part of something else.
func (m *Memory) prepareTransfer(op backend.TransferOp, peer int, posted bool, blocks []TransferBlock) (*Transfer, error) {
	const name = "PrepareTransfer"
	if err := m.Err(); err != nil {
		return nil, fmt.Errorf("preparing a transfer: %w", err)
	}
	if op != backend.Read && op != backend.Write {
		return nil, errs.Invalid(name, "op", op, "Read or Write")
	}
	if err := m.checkRank(name, peer); err != nil {
		return nil, err
	}
	if len(blocks) == 0 {
		return nil, errs.Invalid(name, "blocks", "an empty list", "at least one block")
	}
	var sides []side
	locals := make([]*entry, len(blocks)) // nil of empty ones
	near := true
	for i, b := range blocks {
		e, err := m.block(i, b)
		if err != nil {
			return nil, err
		}
		if e == nil {
			continue
		}
		locals[i] = e
		arg := blockName(i)
		sides = addSide(addSide(sides, e, arg, "local"), b.Window.entry, arg, "remote")
		near = near && b.Window.near[peer]
	}
	// The backend must have the memory while it prepares.
	if err := useSides(sides); err != nil {
		return nil, fmt.Errorf("preparing a transfer: %w", err)
	}
	defer unuseSides(sides)
	t := &Transfer{memory: m, op: op, peer: peer, sides: sides, state: TransferPrepared}
	var err error
	if own, ok := m.transferrer(near); ok {
		t.prepared, err = newWorkTransfer(m, own, op, peer, blocks, locals, sides)
	} else {
		t.prepared, err = newCopyTransfer(m, op, peer, blocks, sides)
	}
	if err == nil && posted {
		if err = t.prepared.prepare(m.device); err != nil {
			err = errors.Join(err, t.prepared.Close())
		}
	}
	if err != nil {
		return nil, fmt.Errorf("preparing a %s of rank %d: %w", op, peer, err)
	}
	return t, nil
}

// block checks the block at i of a transfer, and gives the memory on this rank that it is in; nil for an empty one. It allocates nothing.
func (m *Memory) block(i int, b TransferBlock) (*entry, error) {
	const name = "PrepareTransfer"
	arg := blockName(i)
	switch {
	case b.Window == nil && b.Bytes == 0:
		return nil, nil
	case b.Window == nil:
		return nil, fmt.Errorf("preparing a transfer: %s has no window: %w", arg, errs.ErrNoRendezvous)
	case b.Window.memory != m:
		return nil, errs.Invalid(name, arg+".Window", "a window of another group", "a window of the memory that prepares the transfer")
	case b.Window.Err() != nil:
		return nil, fmt.Errorf("preparing a transfer: %s: %w", arg, b.Window.Err())
	case b.Bytes < 0 || b.Bytes > b.Window.Bytes():
		return nil, errs.Invalid(name, arg+".Bytes", b.Bytes, fmt.Sprintf("0 to %d, the size of the window", b.Window.Bytes()))
	case b.Offset < 0 || b.Offset > b.Window.Bytes()-b.Bytes:
		return nil, errs.Invalid(name, arg+".Offset", b.Offset, fmt.Sprintf("0 to %d, so that %d bytes fit in the window", b.Window.Bytes()-b.Bytes, b.Bytes))
	case b.Bytes == 0:
		return nil, nil
	}
	return m.local(name, arg, b.Local, b.Bytes)
}

// blockName is what errors call the block at i.
func blockName(i int) string {
	if i == 0 {
		return "blocks[0]" // that of a put, which allocates nothing
	}
	return fmt.Sprintf("blocks[%d]", i)
}

// made refuses a transfer that PrepareTransfer did not make.
func (t *Transfer) made(call string) error {
	if t == nil || t.memory == nil {
		return errs.Invalid(call, "transfer", "the zero Transfer", "one that PrepareTransfer gave")
	}
	return nil
}

// Post enqueues the transfer on s: it begins when all earlier work of s has ended. Later work of s may run before the transfer has
// ended, unless [Transfer.WaitOn] orders it. ErrInProgress if the last post has not ended, ErrClosed once memory of either side was freed. In
// a capturing stream the post is recorded; then the streams on which the graph is launched tell when it has ended, not this object. If the stream
// fails when some of the transfer has been enqueued, that is in progress all the same, and the error is that of the post when it has ended.
func (t *Transfer) Post(s device.Stream) error {
	if err := t.made("Post"); err != nil {
		return err
	}
	t.enqueuing.Lock()
	defer t.enqueuing.Unlock()
	if err := t.memory.checkStream("Post", s); err != nil {
		return err
	}
	if err := t.beginPost(); err != nil {
		return err
	}
	defer t.endPost()
	if err := useSides(t.sides); err != nil {
		return fmt.Errorf("posting a transfer: %w", err)
	}
	defer unuseSides(t.sides)
	begun, err := t.prepared.Post(s)
	captured := s.Capturing()
	if err != nil {
		err = fmt.Errorf("posting a transfer: %w", err)
		if !begun || captured {
			return err
		}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.captured, t.err, t.cut = captured, nil, err
	if !captured {
		t.state = TransferInProgress
	}
	return err
}

// beginPost notes that a Post is under way, unless there must be none. endPost ends it.
func (t *Transfer) beginPost() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := t.usable(); err != nil {
		return fmt.Errorf("posting a transfer: %w", err)
	}
	if t.refresh(); t.state == TransferInProgress {
		return fmt.Errorf("posting a transfer: wait for its last post first: %w", errs.ErrInProgress)
	}
	t.posting = true
	return nil
}

func (t *Transfer) endPost() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.posting = false
}

// WaitOn holds the later work of s up until the last post has ended. It returns at once. ErrNotPosted before the first post, and outside of its
// capture for one that was recorded in a graph.
func (t *Transfer) WaitOn(s device.Stream) error {
	if err := t.made("WaitOn"); err != nil {
		return err
	}
	t.enqueuing.Lock()
	defer t.enqueuing.Unlock()
	if err := t.memory.checkStream("WaitOn", s); err != nil {
		return err
	}
	t.mu.Lock()
	asked := t.posted()
	captured := t.captured
	t.mu.Unlock()
	if asked != nil {
		return fmt.Errorf("waiting for a transfer: %w", asked)
	}
	err := t.prepared.WaitOn(s)
	if _, outside := errors.AsType[*device.CaptureError](err); outside && captured {
		return fmt.Errorf("waiting for a transfer: %w (%w)", errRecorded, err)
	}
	return err
}

// errRecorded says that nothing outside of a graph can tell when what it has posted ends.
var errRecorded = fmt.Errorf("the last post was recorded in a graph; synchronize the stream that launches it: %w", errs.ErrNotPosted)

// Status says without waiting how far the transfer has come, and the error of its last post if that has ended in one.
func (t *Transfer) Status() (TransferState, error) {
	if err := t.made("Status"); err != nil {
		return 0, err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return 0, fmt.Errorf("transfer: %w", errs.ErrClosed)
	}
	if t.posting {
		return TransferInProgress, nil
	}
	t.refresh()
	return t.state, t.err
}

// Wait blocks until the last post has ended, or ctx has, and returns its error. ErrNotPosted before the first post and for
// posts that were recorded in a graph.
func (t *Transfer) Wait(ctx context.Context) error {
	if err := errors.Join(t.made("Wait"), errs.Given("Wait", "ctx", ctx, "a context")); err != nil {
		return err
	}
	t.mu.Lock()
	err := t.posted()
	if err == nil && t.captured {
		err = errRecorded
	}
	t.mu.Unlock()
	if err != nil {
		return fmt.Errorf("waiting for a transfer: %w", err)
	}
	if err := t.prepared.Wait(ctx); err != nil {
		return fmt.Errorf("waiting for a %s of rank %d: %w", t.op, t.peer, err)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.refresh()
	return t.err
}

// Close releases the transfer. ErrInProgress, and nothing is closed, while a post is under way; twice is ErrClosed.
func (t *Transfer) Close() error {
	if err := t.made("Close"); err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return fmt.Errorf("closing a transfer: %w", errs.ErrClosed)
	}
	if t.refresh(); t.posting || t.state == TransferInProgress {
		return fmt.Errorf("closing a transfer: wait for it first: %w", errs.ErrInProgress)
	}
	t.closed = true
	return t.prepared.Close()
}

// usable says why the transfer cannot be posted, whatever its state.
func (t *Transfer) usable() error {
	if t.closed {
		return errs.ErrClosed
	}
	return t.memory.Err()
}

func (t *Transfer) posted() error {
	switch {
	case t.closed:
		return errs.ErrClosed
	case t.state == TransferPrepared && !t.captured:
		return errs.ErrNotPosted
	}
	return nil
}

// refresh looks whether a post in progress has ended.
func (t *Transfer) refresh() {
	if t.state != TransferInProgress {
		return
	}
	if done, err := t.prepared.Done(); done || err != nil {
		t.state, t.err = TransferDone, cmp.Or(err, t.cut)
	}
}

// transferrer gives the backend's own way to move blocks to and from a peer. Where the peer's memory is near, which this rank's own always is, there
// is none: its addresses do.
func (m *Memory) transferrer(near bool) (backend.Transferrer, bool) {
	own, ok := backend.TransferrerOf(m.backend)
	return own, ok && !near
}

// side is memory that a transfer reads or writes on this rank, or on the peer, which frees it with this rank.
type side struct {
	*entry
	arg, what string // "blocks[0]", "local"
}

// addSide adds a side, once.
func addSide(sides []side, e *entry, arg, what string) []side {
	if slices.ContainsFunc(sides, func(s side) bool { return s.entry == e }) {
		return sides
	}
	return append(sides, side{e, arg, what})
}

// freed is the error of a side that was freed.
func (s side) freed() error {
	return fmt.Errorf("the %s side of %s was freed: %w", s.what, s.arg, errs.ErrClosed)
}

// freedSides is an error if memory of any side was freed.
func freedSides(sides []side) error {
	for _, s := range sides {
		if s.released() {
			return s.freed()
		}
	}
	return nil
}

// useSides begins enqueueing work on all sides, or on none if one is being freed. unuseSides ends it.
func useSides(sides []side) error {
	for i, s := range sides {
		if s.use() != nil {
			unuseSides(sides[:i])
			return s.freed()
		}
	}
	return nil
}

func unuseSides(sides []side) {
	for _, s := range sides {
		s.unuse()
	}
}

// mover is what carries a transfer out.
type mover interface {
	// prepare makes it one that can be posted.
	prepare(d device.Device) error
	// Post starts the transfer when s comes to it. begun says of a post with an error whether some of it was enqueued before.
	Post(s device.Stream) (begun bool, err error)
	// WaitOn holds s up until the last post has ended.
	WaitOn(s device.Stream) error
	// Done reports whether the last post has ended, and its error.
	Done() (bool, error)
	// Wait blocks until the last post has ended, or ctx has.
	Wait(ctx context.Context) error
	// Close releases everything; no post is in progress.
	Close() error
}

// copyTransfer is a transfer by copies between addresses of this process: for every backend that gives peer pointers.
type copyTransfer struct {
	nearMove
	name string
	posts
}

// posts is what posting a transfer needs; without a device's event it is none that is posted.
type posts struct {
	ended    device.Event
	unmarked atomic.Pointer[unmarkedPost] // the last post, if the event does not tell of its end
}

// unmarkedPost is a post that is in a stream with no event behind it.
type unmarkedPost struct {
	stream device.Stream
	err    error // why there is none
}

// mark records the end of a post.
func (p *posts) mark(s device.Stream) error {
	err := s.Record(p.ended)
	if err != nil {
		p.unmarked.Store(&unmarkedPost{s, err})
	} else if p.unmarked.Load() != nil {
		p.unmarked.Store(nil)
	}
	return err
}

// WaitOn holds s up until the last post has ended.
func (p *posts) WaitOn(s device.Stream) error {
	if u := p.unmarked.Load(); u != nil {
		return fmt.Errorf("no event tells when the transfer ends: %w", u.err)
	}
	return s.WaitEvent(p.ended)
}

// Wait blocks until the last post has ended, or ctx has.
func (p *posts) Wait(ctx context.Context) error {
	u := p.unmarked.Load()
	if u == nil {
		return p.ended.Synchronize(ctx)
	}
	for pause := 20 * time.Microsecond; ; pause = min(2*pause, time.Millisecond) {
		if done, err := u.done(); done || err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(pause):
		}
	}
}

// Done reports whether the last post has ended.
func (p *posts) Done() (bool, error) {
	if u := p.unmarked.Load(); u != nil {
		return u.done()
	}
	return p.ended.Query()
}

// done reports whether all work of the stream has ended. A closed stream has waited for it, and one that is capturing does not say.
func (u *unmarkedPost) done() (bool, error) {
	done, err := u.stream.Query()
	if _, capturing := errors.AsType[*device.CaptureError](err); capturing {
		return false, nil
	}
	if errors.Is(err, errs.ErrClosed) {
		return true, nil
	}
	return done, err
}

func (p *posts) prepare(d device.Device) (err error) {
	p.ended, err = d.NewEvent()
	return err
}

func (p *posts) close() error {
	if p.ended == nil {
		return nil
	}
	return p.ended.Close()
}

func newCopyTransfer(m *Memory, op backend.TransferOp, peer int, blocks []TransferBlock, sides []side) (*copyTransfer, error) {
	c := &copyTransfer{nearMove: nearMove{memory: m, sides: sides}, name: copyName(op, peer)}
	for _, b := range blocks {
		if b.Bytes == 0 {
			continue
		}
		remote, err := b.Window.Peer(peer, b.Offset)
		if err != nil {
			return nil, err
		}
		switch {
		case remote == b.Local: // already there
		case op == backend.Write:
			c.copies = append(c.copies, WorkCopy{Dst: remote, Src: b.Local, Bytes: b.Bytes})
		default:
			c.copies = append(c.copies, WorkCopy{Dst: b.Local, Src: remote, Bytes: b.Bytes})
		}
	}
	return c, nil
}

func (c *copyTransfer) Post(s device.Stream) (begun bool, err error) {
	if c.memory.keeps(s) {
		if err := device.EnqueueHostWork(s, &keptCopy{nearMove: c.nearMove, name: c.name}); err != nil {
			return false, err
		}
		return true, c.mark(s)
	}
	for _, b := range c.copies {
		if err := s.Copy(b.Dst, b.Src, b.Bytes); err != nil {
			if begun {
				err = errors.Join(err, c.mark(s))
			}
			return begun, err
		}
		begun = true
	}
	return begun, c.mark(s)
}

func (c *copyTransfer) Close() error { return c.close() }

// copyName is what errors call a copy or transfer that runs.
func copyName(op backend.TransferOp, peer int) string { return fmt.Sprintf("%s of rank %d", op, peer) }

// workTransfer is a transfer that a backend carries out. It is a PreparedTransfer itself, which knows when its memory was freed: a graph
// may launch it at any time.
type workTransfer struct {
	work  backend.PreparedTransfer
	name  string
	sides []side
	posts

	mu     sync.Mutex
	closed bool
	run    device.HostProgress // the latest
	err    error               // of the latest run
}

func newWorkTransfer(
	m *Memory, b backend.Transferrer, op backend.TransferOp, peer int, blocks []TransferBlock, locals []*entry, sides []side,
) (mover, error) {
	var pieces []backend.Block
	for i, x := range blocks {
		if x.Bytes > 0 {
			pieces = append(pieces, backend.Block{Alloc: locals[i].alloc, Local: x.Local, Remote: x.Window.mapping, Offset: x.Offset, Bytes: x.Bytes})
		}
	}
	if len(pieces) == 0 {
		return newCopyTransfer(m, op, peer, nil, nil)
	}
	work, err := b.PrepareTransfer(op, peer, pieces)
	if err != nil {
		return nil, err
	}
	return &workTransfer{work: work, name: copyName(op, peer), sides: sides}, nil
}

func (t *workTransfer) Post(s device.Stream) (begun bool, err error) {
	if err := device.EnqueueHostWork(s, t); err != nil {
		return false, err
	}
	return true, t.mark(s)
}

// Start begins a run, whose progress is the transfer itself: two runs never overlap.
func (t *workTransfer) Start() (device.HostProgress, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	run, err := t.start()
	if t.err = err; err != nil {
		return nil, err // one that was cut off may still be asked for
	}
	t.run = run
	return t, nil
}

// start begins a run, unless there is nothing left to move; t.mu is held.
func (t *workTransfer) start() (device.HostProgress, error) {
	if t.closed {
		return nil, fmt.Errorf("transfer: %w", errs.ErrClosed)
	}
	if err := freedSides(t.sides); err != nil {
		return nil, err
	}
	return t.work.Start()
}

func (t *workTransfer) Poll() (bool, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	ended, err := t.run.Poll()
	t.err = err
	return ended, err
}

// Close releases the transfer. A graph that holds it has nothing to run any more.
func (t *workTransfer) Close() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return nil
	}
	t.closed = true
	return errors.Join(t.close(), t.work.Close())
}

func (t *workTransfer) String() string { return t.name }

// Done reports whether the last post has ended, and its error.
func (t *workTransfer) Done() (bool, error) {
	done, err := t.posts.Done()
	if !done || err != nil {
		return done, err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	return true, t.err
}

// PutSignal is Copy to the peer with Signal behind it: when peer has waited for the signal, it sees the data. What either refuses it
// refuses, and enqueues nothing then. Where the CPU signals behind a copy that the backend carries out, or that a graph keeps, one that fails when it runs is followed by no signal: the
// peer goes on waiting, and both can be enqueued again.
func (m *Memory) PutSignal(s device.Stream, peer int, w *Window, offset int64, local device.Ptr, bytes int64, channel int) error {
	if err := m.made("PutSignal"); err != nil {
		return err
	}
	return m.putSignal("PutSignal", s, peer, w, offset, local, bytes, channel, nobody)
}

// PutSignalWait is PutSignal with Wait for rank from behind it, on the same channel: what a rank of a ring does in one step. It is one launch, of up to 512
// threads that stay on the device until the signal has come, for up to 64 KiB between GPUs whose memory has addresses on each other, and else
// what the two calls are. What either refuses it refuses, and enqueues nothing then; it is bounded as they are.
func (m *Memory) PutSignalWait(s device.Stream, peer int, w *Window, offset int64, local device.Ptr, bytes int64, from, channel int) error {
	if err := m.made("PutSignalWait"); err != nil {
		return err
	}
	const call = "PutSignalWait"
	if err := m.checkStream(call, s); err != nil {
		return err
	}
	if err := m.checkRankOf(call, "from", from); err != nil {
		return err
	}
	return m.putSignal(call, s, peer, w, offset, local, bytes, channel, from)
}

// putSignal is PutSignal, and PutSignalWait unless it is to wait for nobody.
func (m *Memory) putSignal(call string, s device.Stream, peer int, w *Window, offset int64, local device.Ptr, bytes int64, channel, awaited int) error {
	out, err := m.signalsFor(call, s, peer, channel)
	if err != nil {
		return err
	}
	defer m.enqueuing.unuse()
	in := out
	if x, ok := out.(*mixedSignals); ok {
		if out = x.of(peer); awaited != nobody {
			in = x.of(awaited)
		}
	}
	d, kernels := out.(*deviceSignals)
	if near, ok := in.(*deviceSignals); ok && awaited != nobody {
		if err := near.reaches(awaited); err != nil {
			return fmt.Errorf("%s: %w", call, err)
		}
	}
	one := kernels && bytes <= putSignalBytes && (awaited == nobody || in == out)
	signalled := false
	behind := func() (work device.HostWork, err error) {
		work, err = workOf(out, peer, channel)
		signalled = work != nil
		return work, err
	}
	err = m.copy(s, backend.Write, peer, w, offset, local, bytes, behind, func(to, from device.Ptr) error {
		if one {
			signalled = true
			return d.putSignal(s, putKey{peer: peer, channel: channel, awaited: awaited, to: to, from: from, bytes: bytes})
		}
		return s.Copy(to, from, bytes)
	})
	switch {
	case err != nil || signalled && (one || awaited == nobody):
		return err
	case signalled:
		return in.wait(s, awaited, channel)
	case one && awaited != nobody: // there was nothing to copy
		if err := d.reaches(peer); err != nil {
			return err
		}
		return d.putSignal(s, putKey{peer: peer, channel: channel, awaited: awaited})
	}
	if err := out.signal(s, peer, channel); err != nil || awaited == nobody {
		return err
	}
	return in.wait(s, awaited, channel)
}

// workOf gives a signal as work of the CPU; nil where a kernel of the device signals.
func workOf(out signals, peer, channel int) (device.HostWork, error) {
	switch x := out.(type) {
	case *flagSignals:
		l, err := x.lane(channel, padSignal, peer)
		if err != nil {
			return nil, fmt.Errorf("preparing signals to rank %d: %w", peer, err)
		}
		return l, nil
	case *hostSignals:
		return &x.signals[channel*x.size+peer], nil
	}
	return nil, nil
}

// Copy enqueues one transfer of bytes between local, an address of symmetric memory of this rank, and the place at offset
// of peer's copy of w. It is what Put and Get of a tensor do; it returns at once, and later work of s runs after it. What is freed on
// either side is ErrClosed, or ErrNotSymmetric if nothing else is at local; freed later, it is ErrClosed in the stream of a graph that has the copy, unless a GPU
// copies by itself. To or from this rank itself, ranges that overlap in part are ErrInvalid.
func (m *Memory) Copy(s device.Stream, op backend.TransferOp, peer int, w *Window, offset int64, local device.Ptr, bytes int64) error {
	if err := m.made("Copy"); err != nil {
		return err
	}
	alone := func() (device.HostWork, error) { return nil, nil }
	return m.copy(s, op, peer, w, offset, local, bytes, alone, func(to, from device.Ptr) error { return s.Copy(to, from, bytes) })
}

// callOf is what errors of a copy name: the call of a tensor that most copies are.
func callOf(op backend.TransferOp) string {
	if op == backend.Read {
		return "Get"
	}
	return "Put"
}

// copy is Copy, with what enqueues it where the peer's memory has an address, and is not what it is copied to, and with what follows it where it is work of
// the CPU.
func (m *Memory) copy(
	s device.Stream, op backend.TransferOp, peer int, w *Window, offset int64, local device.Ptr, bytes int64,
	behind func() (device.HostWork, error), enqueue func(to, from device.Ptr) error,
) error {
	if op != backend.Read && op != backend.Write {
		return errs.Invalid("Copy", "op", op, "Read or Write")
	}
	call := callOf(op)
	if err := m.checkStream(call, s); err != nil {
		return err
	}
	if w == nil {
		return errs.Invalid(call, "window", nil, "a window of this memory")
	}
	if err := errors.Join(m.Err(), w.Err()); err != nil {
		return fmt.Errorf("%s: %w", call, err)
	}
	if w.memory != m {
		return errs.Invalid(call, "window", "a window of another group", "a window of the memory that copies")
	}
	if bytes == 0 {
		return m.checkRank(call, peer)
	}
	if bytes < 0 || offset < 0 || bytes > w.Bytes()-offset {
		return errs.Invalid(call, "range", fmt.Sprintf("%d bytes at offset %d", bytes, offset),
			fmt.Sprintf("inside the window of %d bytes", w.Bytes()))
	}
	if err := m.checkRank(call, peer); err != nil {
		return err
	}
	e, err := m.local(call, "the copy", local, bytes)
	if err != nil {
		return err
	}
	sides := [2]side{{e, "the copy", "local"}, {w.entry, "the copy", "remote"}}
	if err := useSides(sides[:]); err != nil {
		return fmt.Errorf("%s: %w", call, err)
	}
	defer unuseSides(sides[:])
	key := copyKey{op: op, peer: peer, window: w, offset: offset, local: local, bytes: bytes}
	if own, ok := m.transferrer(w.near[peer]); ok {
		follows, err := behind()
		if err != nil {
			return err
		}
		return m.copies.enqueue(s, own, e, key, follows)
	}
	remote, err := w.Peer(peer, offset)
	if err != nil {
		return fmt.Errorf("%s: %w", call, err)
	}
	if remote == local {
		return nil
	}
	if remote < local.Add(bytes) && local < remote.Add(bytes) { // a kernel would copy what it has written itself
		return errs.Invalid(call, "range", fmt.Sprintf("%d bytes at %s, and as many at %s", bytes, local, remote), "two ranges of this rank's memory that do not overlap, or one and the same")
	}
	to, from := remote, local
	if op == backend.Read {
		to, from = local, remote
	}
	if !m.keeps(s) {
		return enqueue(to, from)
	}
	follows, err := behind()
	if err != nil {
		return err
	}
	move := nearMove{memory: m, sides: slices.Clone(sides[:]), copies: []WorkCopy{{Dst: to, Src: from, Bytes: bytes}}}
	return device.EnqueueHostWork(s, &keptCopy{nearMove: move, behind: follows, name: key.String()})
}
