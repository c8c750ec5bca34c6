package kernels

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/memory"
)

// Transfers is an all-reduce that never follows a pointer to a peer: data and results travel by prepared puts, which every
// backend with transfers has, and each rank reduces what has come to its own part of the channel.
//
// A small message is put whole to every peer, and every rank reduces everything. A large one is cut into shards, one a rank, and
// shards into laps: laps of every input are put to the shard's owner, who reduces them and puts the result to every output, while
// the next lap is under way. All ranks send the same thing at the same time, and go on when everybody's has come: so each link carries one
// copy at a time. (Ranks that run ahead of others send to one peer with them, and all links of a GPU then go as slowly as the one that is
// shared.) It also says that a lap's place is free again, and, for the next run, that all are: neither form has a state that the host
// changes from run to run.

// transferSlots is how many laps of one writer an owner has room for: one that comes, and one that is being reduced.
const transferSlots = 2

// shardAlign is what shards and laps are cut at, in bytes: whole cache lines, and vectors of every kernel.
const shardAlign = 128

// The signals of a plan.
const (
	signalData    = iota // a lap, or the whole message, has come
	signalResults        // large: an owner's lap of results has come; small: the peer has room again
	transferSignals
)

// transferForm is how the plan cuts the message, alike on every rank:
//
//	pads   of the signals
//	slots  [transferSlots, or 1 if there is one lap][world-1] of span bytes each. Of the writers, the next rank's comes first
//
// What is in a slot begins lead bytes behind its beginning, as the input does behind a multiple of 16.
type transferForm struct {
	plan  *Plan
	rank  int
	size  int
	far   bool  // peers have no pointers
	bytes int64 // of the message
	small bool
	shard int64 // bytes of a shard; the last ones may be shorter, or empty
	lap   int64 // bytes of a lap
	laps  int   // of a shard
	lead  int64
	pads  int64 // bytes
}

func newTransferForm(p *Plan) transferForm {
	f := transferForm{plan: p, rank: p.in.Rank(), size: p.in.WorldSize(), bytes: p.in.Bytes(), lead: int64(p.in.Local().Ptr() % 16)}
	f.far = !p.in.Memory().Backend().Capabilities().PeerPointers
	f.small, f.lap = transferGeometry(p.device.Kind(), f.far, f.bytes, f.size)
	f.shard, f.laps = f.bytes, 1
	if f.small {
		f.lap = f.bytes
	} else {
		f.shard = alignUp((f.bytes+int64(f.size)-1)/int64(f.size), shardAlign)
		f.laps = int(max((f.shard+f.lap-1)/f.lap, 1))
	}
	f.pads = alignUp(p.in.Memory().SignalsBytes(transferSignals), shardAlign)
	return f
}

func alignUp(n, to int64) int64 { return (n + to - 1) / to * to }

func (f transferForm) purpose() string {
	return fmt.Sprintf(", small %t, shards of %d bytes in laps of %d, first byte at %d of 16", f.small, f.shard, f.lap, f.lead)
}

func (f transferForm) slots() int {
	return min(f.laps, transferSlots)
}

// span is the size of a slot.
func (f transferForm) span() int64 { return alignUp(f.lap+f.lead, shardAlign) }

func (f transferForm) channelBytes() int64 { return f.pads + int64(f.slots()*(f.size-1))*f.span() + 1 }

// slot is where in owner's part of the channel writer's lap goes.
func (f transferForm) slot(owner, writer, lap int) int64 {
	writers := f.size - 1
	index := lap%f.slots()*writers + (writer-owner+f.size)%f.size - 1
	return f.pads + int64(index)*f.span() + f.lead
}

// piece is the range of bytes of owner's lap in the message.
func (f transferForm) piece(owner, lap int) (lo, hi int64) {
	if f.small {
		return 0, f.bytes
	}
	end := min(int64(owner+1)*f.shard, f.bytes)
	lo = min(int64(owner)*f.shard+int64(lap)*f.lap, end)
	return lo, min(lo+f.lap, end)
}

// transferWork is a plan's work by transfers.
type transferWork struct {
	plan    *Plan
	signals *memory.Signals
	reduce  transferReduce
	steps   []transferStep

	// The stream that sends and waits beside the plan's, which reduces, or nil.
	lane   device.Stream
	forked device.Event // the plan's stream has come so far
	joined device.Event // the lane has

	ended    device.Event // the last run that was not recorded
	captured atomic.Bool
}

// transferReduce reduces on one kind of device what has come.
type transferReduce interface {
	// enqueue enqueues reducing a lap of this rank's shard.
	enqueue(s device.Stream, lap int) error
	close() error
}

// transferStep is one call of a run.
type transferStep struct {
	kind   transferKind
	lap    int // stepSend, stepReduce
	signal int // the channel
	send   *memory.PreparedSend
}

// transferKind tells steps apart.
type transferKind uint8

const (
	stepSend   transferKind = iota + 1 // the lane puts a lap to every peer, with a signal behind it
	stepWait                           // the lane waits for a signal of every peer
	stepEnd                            // the plan's stream does, and is told what has failed
	stepGrant                          // the lane signals every peer
	stepReduce                         // the plan's stream reduces a lap
	stepFork                           // the lane goes on only when the plan's stream has come here
	stepJoin                           // the plan's stream goes on only when the lane has come here
)

// program is the steps of one run. They may run one after the other in this order, on one stream, or in any other that keeps what forks,
// joins and streams demand. What every rank has sent is waited for next, one after the other: so nobody waits in a circle. The last wait is
// the plan's stream's, whose user looks for errors.
func (f transferForm) program() []transferStep {
	var steps []transferStep
	add := func(s ...transferStep) { steps = append(steps, s...) }
	send := func(signal, lap int) transferStep { return transferStep{kind: stepSend, signal: signal, lap: lap} }
	wait := func(signal int) transferStep { return transferStep{kind: stepWait, signal: signal} }
	end := func(signal int) transferStep { return transferStep{kind: stepEnd, signal: signal} }
	reduce := func(lap int) transferStep { return transferStep{kind: stepReduce, lap: lap} }
	fork, join := transferStep{kind: stepFork}, transferStep{kind: stepJoin}
	switch {
	case f.size == 1:
		add(reduce(0))
		return steps
	case f.small:
		add(wait(signalResults), send(signalData, 0), end(signalData), reduce(0), transferStep{kind: stepGrant, signal: signalResults})
		return steps
	}
	add(fork, send(signalData, 0), wait(signalData), join)
	for l := range f.laps {
		if l+1 < f.laps {
			add(send(signalData, l+1))
		}
		add(reduce(l), fork) // before the wait: what follows it need not wait for the GPU then
		if l+1 < f.laps {
			add(wait(signalData), join)
		}
		add(send(signalResults, l))
		if l+1 < f.laps {
			add(wait(signalResults))
		}
	}
	add(join, end(signalResults))
	return steps
}

func (f transferForm) prepare(ctx context.Context, p *Plan, op Op, firstEpoch uint32) (_ work, err error) {
	w := &transferWork{plan: p}
	defer func() {
		if err != nil {
			err = errors.Join(err, w.close())
		}
	}()
	o := memory.SignalsOptions{Channels: transferSignals, First: firstEpoch, Op: p.name, Failed: p.fail}
	if f.small {
		o.Granted = 1 // the peers have room for the first run
	}
	if w.signals, err = p.channel.Signals(ctx, 0, &o); err != nil {
		return nil, err
	}
	if f.bytes == 0 {
		return w, nil
	}
	if w.reduce, err = f.newReduce(op); err != nil {
		return nil, err
	}
	if w.ended, err = p.device.NewEvent(); err != nil {
		return nil, err
	}
	if err = w.makeLane(f); err != nil {
		return nil, err
	}
	if err = w.prepareSends(f); err != nil {
		return nil, err
	}
	return w, nil
}

// makeLane makes the stream for sending where that lets transfers and reductions overlap.
func (w *transferWork) makeLane(f transferForm) (err error) {
	d := w.plan.device
	if f.small || f.size == 1 || d.Kind() != device.CUDA && !f.far {
		return nil // a goroutine that copies and reduces gains nothing by another
	}
	if w.lane, err = d.NewStream(); err != nil {
		return err
	}
	if w.forked, err = d.NewEvent(); err != nil {
		return err
	}
	w.joined, err = d.NewEvent()
	return err
}

// prepareSends makes the steps, and prepares every send: of a lap of every peer's shard to its owner, or of results to every output.
func (w *transferWork) prepareSends(f transferForm) error {
	p := w.plan
	in := p.in.Ptr()
	window, offset, err := p.out.Window()
	if err != nil {
		return err
	}
	w.steps = f.program()
	for i := range w.steps {
		step := &w.steps[i]
		if step.kind != stepSend {
			continue
		}
		var puts []memory.SendPut
		for k := 1; k < f.size; k++ {
			peer := (f.rank + k) % f.size
			put := memory.SendPut{Peer: peer}
			if step.signal == signalResults {
				lo, hi := f.piece(f.rank, step.lap)
				put.Window, put.Offset, put.Local, put.Bytes = window, offset+lo, p.out.Ptr().Add(lo), hi-lo
			} else {
				lo, hi := f.piece(peer, step.lap)
				put.Offset, put.Local, put.Bytes = f.slot(peer, f.rank, step.lap), in.Add(lo), hi-lo
			}
			if put.Bytes > 0 {
				puts = append(puts, put)
			}
		}
		if step.send, err = w.signals.PrepareSend(step.signal, puts...); err != nil {
			return err
		}
	}
	return nil
}

func (w *transferWork) enqueue(s device.Stream, recorded bool) error {
	if w.reduce == nil {
		return nil
	}
	if !recorded && w.lane != nil && w.lane.Capturing() {
		return fmt.Errorf("another stream records it; end that capture first: %w", ErrTwoStreams)
	}
	if recorded {
		w.captured.Store(true)
	}
	for i := range w.steps {
		if err := w.step(s, &w.steps[i]); err != nil {
			if i > 0 && !recorded {
				return w.plan.fail(err) // the others do all of the run
			}
			return err
		}
	}
	if recorded {
		return nil
	}
	return s.Record(w.ended)
}

// step enqueues one step of a run on s, or on the lane if it is the lane's.
func (w *transferWork) step(s device.Stream, t *transferStep) error {
	lane := w.lane
	if lane == nil {
		lane = s
	}
	switch t.kind {
	case stepSend:
		return t.send.Enqueue(lane)
	case stepWait:
		if w.lane != nil {
			return w.signals.WaitAllBeside(lane, t.signal)
		}
		return w.signals.WaitAll(s, t.signal)
	case stepEnd:
		return w.signals.WaitAll(s, t.signal)
	case stepGrant:
		return w.signals.SignalAll(lane, t.signal)
	case stepReduce:
		return w.reduce.enqueue(s, t.lap)
	}
	switch {
	case w.lane == nil:
		return nil
	case t.kind == stepFork:
		return follow(lane, s, w.forked)
	}
	return follow(s, lane, w.joined)
}

// follow lets a stream go on when another has come to where it is now.
func follow(s, other device.Stream, e device.Event) error {
	if err := other.Record(e); err != nil {
		return err
	}
	return s.WaitEvent(e)
}

func (w *transferWork) settled() (bool, error) {
	if w.reduce == nil {
		return true, nil
	}
	return w.ended.Query()
}

func (w *transferWork) close() error {
	var err error
	if w.lane != nil {
		err = w.lane.Close()
	}
	for _, e := range []device.Event{w.forked, w.joined, w.ended} {
		if e != nil {
			err = errors.Join(err, e.Close())
		}
	}
	for _, step := range w.steps {
		if step.send != nil {
			err = errors.Join(err, step.send.Close())
		}
	}
	if w.reduce != nil {
		err = errors.Join(err, w.reduce.close())
	}
	if w.signals != nil {
		err = errors.Join(err, w.signals.Close())
	}
	if errors.Is(err, ErrClosed) {
		return nil // the device has gone, and all of this with it
	}
	return err
}
