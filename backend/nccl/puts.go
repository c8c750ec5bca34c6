package nccl

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/cuda"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/nccl"
)

// NCCL's windows have no addresses between hosts, but NCCL can write there: ncclPutSignal (2.29.2) takes windows of all ranks. So where there are several
// isles, and NCCL can, every allocation is registered once more, with a communicator of all ranks that does nothing but put. What is near keeps its
// addresses.
//
// A put runs when the CPU starts it, on a stream of the backend's own, and not on the user's:
//   - NCCL counts the puts to a peer, and their turn, in words that have one order, so that they must all be on one stream.
//   - It counts the signals of recorded puts in another place than those of others. Here none is recorded: graphs hold work of the CPU.
//   - A put to a rank that has died holds its stream up, perhaps for ever. The user's goes on with an error.
//
// NCCL's own signals are counters, one for each peer, for which a stream waits without an end. Ours have channels, values, and an end. So they are words of
// a window, which are put when the put before them has ended (flags.go), and NCCL's counters are left alone. A put ends here when NCCL has the answer to
// the signal that follows the data, which the network carries behind it: the data is there.

// putForm is the communicator of the puts among the reducers, which have all that one needs: it is watched, given up, and kept.
const putForm = "put"

// stageBytes is the size of the memory that puts go through from memory that is no window yet.
const stageBytes = 1 << 20

// puts are this rank's means to put.
type puts struct {
	red    *reducer
	stream *cuda.Stream
	stage  *allocation
	spans  map[device.Ptr]int64 // the size of each window's allocation, by its base; under the backend's mu

	mu sync.Mutex // the order of what is put on the stream
}

var (
	_ backend.Transferrer = (*Backend)(nil)
	_ backend.Flagger     = (*Backend)(nil)
	_ backend.Quiescer    = (*Backend)(nil)
	_ backend.Mover       = (*Backend)(nil)
)

// Moves reports whether the ranks have no addresses of some others, and NCCL can put to these.
func (b *Backend) Moves() bool { return b.puts != nil }

// lacksPuts says why NCCL cannot put between hosts, and what to do; "" if it can. The error is that of a communicator which could not be asked, or has lost a peer.
func (b *Backend) lacksPuts() (string, error) {
	has, err := b.comm.PutSupport()
	v := b.lib.Version()
	if errors.Is(err, errs.ErrUnsupported) {
		return fmt.Sprintf("NCCL %s cannot put to ranks without addresses (ncclPutSignal), and 2.29.2 or newer can: name its file in %s", v, libraryEnv), nil
	}
	if err != nil {
		if answer, ok := errors.AsType[*errs.CallError](err); !ok || answer.Library != "NCCL" || answer.Err != nil {
			return "", fmt.Errorf("asking NCCL %s whether it can put to ranks without addresses: %w", v, err)
		}
		return fmt.Sprintf("NCCL %s does not say whether it can put to ranks without addresses: %s", v, errs.Text(err)), nil
	}
	if has {
		return "", nil
	}
	if v >= ginOverSockets {
		return fmt.Sprintf("NCCL %s cannot put to ranks without addresses, because it has no GIN here (NCCL_GIN_ENABLE, NICs that it can use for it, peer access between "+
			"the GPUs of a host); NCCL_GIN_TYPE=2 takes sockets for it, with GDRCopy (/dev/gdrdrv)", v), nil
	}
	return fmt.Sprintf("NCCL %s cannot put to ranks without addresses, because it has no GIN here (NCCL_GIN_ENABLE, NICs that it can use for it, peer access between "+
		"the GPUs of a host); 2.32 or newer can take sockets for it, with NCCL_GIN_TYPE=2 and GDRCopy (/dev/gdrdrv)", v), nil
}

// ginOverSockets is the first version with GIN over sockets.
const ginOverSockets nccl.Version = 23200

// openPuts finds out whether NCCL can put to the ranks without addresses, and makes what that takes. If it cannot, that is no error, and noPuts says why.
// Collective.
func (b *Backend) openPuts(ctx context.Context) error {
	if b.puts, b.noPuts = nil, ""; b.isle.whole() {
		return nil
	}
	type found struct {
		Why  string
		Live bool
	}
	why, failure := b.lacksPuts()
	all, err := backend.Tell(ctx, b.group, opening+": puts", found{why, b.live(putForm)}, failure)
	if err != nil {
		return err
	}
	live := true
	for _, f := range all {
		if live = live && f.Live; f.Why != "" {
			b.noPuts = f.Why
			return nil
		}
	}
	red, err := b.reducer(ctx, putForm, nccl.Part{Ranks: b.group.Size(), Rank: b.group.Rank()}, live)
	if err != nil {
		return err
	}
	p := &puts{red: red, spans: map[device.Ptr]int64{}}
	err = b.tryPuts(ctx, p)
	if err == nil {
		b.puts = p
		return nil
	}
	// All ranks know that it has failed on some.
	if up := b.giveUp(context.WithoutCancel(ctx), red, err); up != nil {
		b.log.Warn("aborting an NCCL communicator failed", "error", up)
	}
	b.mu.Lock()
	delete(b.reducers, putForm)
	b.mu.Unlock()
	closed := p.release(ctx)
	if _, all := errors.AsType[*group.VoteError](err); !all {
		return errors.Join(err, closed)
	}
	b.noPuts = fmt.Sprintf("NCCL %s has said that it can put to ranks without addresses, and it failed when it was tried: %s", b.lib.Version(), errs.Text(err))
	b.log.Warn("NCCL's puts between hosts do not work here", "error", err)
	return closed
}

// tryPuts makes the memory that puts go through, and puts a word into that of a rank without an address. NCCL makes its connections for the first put,
// for which it may take all ranks.
func (b *Backend) tryPuts(ctx context.Context, p *puts) error {
	s, err := b.device.NewStream()
	if err == nil {
		p.stream = s.(*cuda.Stream)
		var a backend.Allocation
		if a, err = b.Allocate(ctx, stageBytes); err == nil {
			p.stage = a.(*allocation)
		}
	}
	if err := b.group.Vote(ctx, opening+": memory to put", err); err != nil {
		return err
	}
	if err := b.registerFar(ctx, p, p.stage); err != nil {
		return err
	}
	me, size := b.group.Rank(), b.group.Size()
	word := func(rank int) []byte {
		return binary.LittleEndian.AppendUint64(nil, 0x7075740000000000|uint64(rank)<<8|0xa5)
	}
	next := func(rank int) int { // the first behind it that is on another isle
		for k := 1; ; k++ {
			if to := (rank + k) % size; b.isle.firsts[to] != b.isle.firsts[rank] {
				return to
			}
		}
	}
	// The words that come stand behind the one that goes.
	first, end := b.together(ctx, "trying a put") // all ranks come to it
	if err = b.device.CopyFromHost(p.stage.ptr, word(me)); err == nil {
		_, err = nccl.Bound(first, "trying a put", func() (struct{}, error) {
			return struct{}{}, b.device.WithContext(func() error {
				return p.red.comm.Put(uintptr(p.stream.Handle()), nccl.Put{Peer: next(me), Window: p.red.windows[p.stage.base],
					Offset: p.stage.offset + int64(8*(1+me)), Local: uint64(p.stage.ptr), Bytes: 8})
			})
		})
		if err == nil {
			err = p.stream.Synchronize(first)
		}
		b.givenUp(err, p.stage.base)
	}
	err = end(err)
	if err := b.group.Vote(ctx, opening+": trying a put", err); err != nil {
		return err
	}
	for r := range size {
		got := make([]byte, 8)
		if err = errors.Join(err, b.device.CopyToHost(got, p.stage.ptr.Add(int64(8*(1+r))))); err == nil && next(r) == me && string(got) != string(word(r)) {
			err = fmt.Errorf("rank %d has put %x here, and %x is there: %w", r, word(r), got, errs.ErrUnsupported)
		}
	}
	return b.group.Vote(ctx, opening+": what was put", err)
}

// registerFar makes the allocation a window of all ranks, which has no addresses. Collective.
func (b *Backend) registerFar(ctx context.Context, p *puts, a *allocation) error {
	if err := b.registerSymmetric(ctx, p.red, a); err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	p.spans[a.base] = a.span
	return nil
}

// release releases what puts take beside the communicator, which has no window any more.
func (p *puts) release(ctx context.Context) error {
	var err error
	if p.stream != nil {
		err = p.stream.Close()
	}
	if p.stage != nil {
		err = errors.Join(err, p.stage.Release(ctx))
	}
	return err
}

// window returns the window of all ranks that the bytes at at are in, or nil.
func (p *puts) window(b *Backend, at device.Ptr, bytes int64) *nccl.Window {
	b.mu.Lock()
	defer b.mu.Unlock()
	for base, w := range p.red.windows {
		if at >= base && int64(at-base) <= p.spans[base]-bytes {
			return w
		}
	}
	return nil
}

// source reports whether puts may read a block's memory where it is: it is in a window, which the block's own allocation keeps. Another allocation that has the
// same memory may be released first, and its window with it.
func (p *puts) source(b *Backend, x *backend.Block) bool {
	a, ok := x.Alloc.(*allocation)
	if !ok || p.window(b, x.Local, x.Bytes) == nil {
		return false
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return a.backend == b && a.mapped > 0
}

// transfer is some puts to one rank that are started as one.
type transfer struct {
	backend *Backend
	by      *puts
	peer    int
	steps   []putStep
	ended   device.Event
	call    func() error // enqueue, made once because a method value allocates

	mu      sync.Mutex
	running bool
	began   time.Time
}

func newTransfer(b *Backend, by *puts, peer int) *transfer {
	t := &transfer{backend: b, by: by, peer: peer}
	t.call = t.enqueue
	return t
}

// putStep is puts that NCCL can do at once, or one from memory that is no window, which goes through the stage.
type putStep struct {
	puts  []nccl.Put
	local device.Ptr // of the memory that is no window; nil otherwise
}

// PrepareTransfer prepares writing blocks. ErrNotReachable for reading: NCCL has no call for it.
func (b *Backend) PrepareTransfer(op backend.TransferOp, peer int, blocks []backend.Block) (backend.PreparedTransfer, error) {
	p := b.puts
	switch {
	case p == nil:
		return nil, fmt.Errorf("%s: %w", b.noPuts, errs.ErrNotReachable)
	case op != backend.Write:
		return nil, fmt.Errorf("NCCL has no call that gets from a rank without an address, and rank %d has none of rank %d (%s); let that rank put: %w",
			b.group.Rank(), peer, b.isle, errs.ErrNotReachable)
	}
	t := newTransfer(b, p, peer)
	for _, x := range blocks {
		m := mappingOf(x.Remote)
		if m == nil || m.backend != b {
			return nil, errs.Invalid("transfer", "window", "of another backend", "a window of backend "+Name)
		}
		if m.window == nil {
			return nil, fmt.Errorf("preparing a transfer: the window is %w", errs.ErrClosed)
		}
		to := p.window(b, m.alloc.base, 1)
		if to == nil {
			return nil, fmt.Errorf("the window is none of all ranks, because the communicator of the puts had been given up when it was made; close the rank and open it again: %w",
				errs.ErrNotReachable)
		}
		t.add(nccl.Put{Peer: peer, Window: to, Offset: m.offsets[peer] + x.Offset, Local: uint64(x.Local), Bytes: x.Bytes}, p.source(b, &x))
	}
	var err error
	if t.ended, err = b.device.NewEvent(); err != nil {
		return nil, err
	}
	return t, nil
}

// add adds a put, which can be made as it is if its memory is a window.
func (t *transfer) add(put nccl.Put, direct bool) {
	if direct {
		if n := len(t.steps); n == 0 || !t.steps[n-1].local.IsNil() {
			t.steps = append(t.steps, putStep{})
		}
		last := &t.steps[len(t.steps)-1]
		last.puts = append(last.puts, put)
		return
	}
	stage := t.by.stage
	for at := int64(0); at < put.Bytes; at += stageBytes {
		piece := put
		piece.Local, piece.Offset, piece.Bytes = uint64(stage.ptr), put.Offset+at, min(stageBytes, put.Bytes-at)
		t.steps = append(t.steps, putStep{puts: []nccl.Put{piece}, local: device.Ptr(put.Local).Add(at)})
	}
}

// mappingOf returns this backend's side of a mapping, or nil.
func mappingOf(m backend.Mapping) *mapping {
	switch x := m.(type) {
	case *mapping:
		return x
	case wholeMapping:
		return x.mapping
	}
	return nil
}

// Start enqueues the puts.
func (t *transfer) Start() (device.HostProgress, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := t.ready(); err != nil {
		return nil, err
	}
	return t.start()
}

// ready is the error of a start now; t.mu is held.
func (t *transfer) ready() error {
	if t.running { // or a run was given up, which nobody polls any more
		if ended, err := t.ended.Query(); !ended {
			return fmt.Errorf("starting a transfer: %w", errors.Join(errs.ErrInProgress, err))
		}
		t.running = false
	}
	if lost := t.backend.group.Err(); lost != nil {
		return lost // the communicator is given up soon
	}
	return t.by.red.given()
}

// start is Start of what is ready; t.mu is held.
func (t *transfer) start() (device.HostProgress, error) {
	b, p := t.backend, t.by
	if err := b.device.WithContext(t.call); err != nil {
		err = b.named(err)
		b.giveUpBeside(p.red, err)
		return nil, err
	}
	t.running, t.began = true, time.Now()
	return t, nil
}

// enqueue enqueues the puts, with the device's context current.
func (t *transfer) enqueue() error {
	p := t.by
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, step := range t.steps {
		if !step.local.IsNil() { // the stream has come past the last put from there
			if err := p.stream.Copy(p.stage.ptr, step.local, step.puts[0].Bytes); err != nil {
				return err
			}
		}
		if err := p.red.comm.Put(uintptr(p.stream.Handle()), step.puts...); err != nil {
			return err
		}
	}
	return p.stream.Record(t.ended)
}

// Poll asks whether the puts have ended. A run that is given up may still move data, until the communicator is.
func (t *transfer) Poll() (bool, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	b := t.backend
	if !t.running {
		return true, nil
	}
	ended, err := t.ended.Query()
	lost := b.group.Err()
	given := t.by.red.given()
	switch {
	case err != nil: // of the device
	case lost != nil:
		err = lost
	case given != nil: // what ended meanwhile may have ended by that
		err = given
	case ended:
		t.running = false
		return true, nil
	case time.Since(t.began) >= b.timeout:
		err = fmt.Errorf("puts to rank %d have not ended in %v: %w", t.peer, b.timeout, os.ErrDeadlineExceeded)
	default:
		return false, nil
	}
	t.running = !ended && given == nil && lost == nil
	return false, err
}

// Close releases the event.
func (t *transfer) Close() error { return t.ended.Close() }

// Quiesce waits until no puts are under way. Those of a communicator that was given up are over when NCCL has released it.
func (b *Backend) Quiesce(ctx context.Context) error {
	p := b.puts
	if p == nil {
		return nil
	}
	for pause := 20 * time.Microsecond; ; pause = min(2*pause, time.Millisecond) {
		if p.red.comm.Over() {
			return nil
		}
		idle, err := p.stream.Query()
		if errors.Is(err, cuda.ErrContextLost) {
			return nil // it does nothing any more, and never will
		}
		if idle || err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("waiting for puts: %w", context.Cause(ctx))
		case <-time.After(pause):
		}
	}
}

// farWhy says how ranks without addresses can be reached.
func (b *Backend) farWhy() string {
	if b.puts != nil {
		return "puts and signals reach all ranks, by NCCL's own calls, and it has none for gets"
	}
	return b.noPuts
}

// putting reports whether a window can be made for puts: the communicator was not given up on this rank.
func (b *Backend) putting() bool { return b.puts != nil && b.live(putForm) }

// allPut reports whether all ranks said that in their offers.
func allPut(offers []offer) bool {
	return !slices.ContainsFunc(offers, func(o offer) bool { return !o.Puts })
}
