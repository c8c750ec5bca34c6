package kernels

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/tensor"
)

// Transfers is an all-reduce that never follows a pointer to a peer: data and results travel by prepared puts, which every
// backend with transfers has, and each rank reduces what has come to its own part of the channel.
//
// A small message is put whole to every peer, and every rank reduces everything. A large one is cut into shards, one a rank, and
// shards into laps: laps of every input are put to the shard's owner, who reduces them and puts the result to every output, while
// the next laps are under way. A rank may be transferSlots laps ahead of an owner: that an owner's result of a lap has come says that
// the lap's place is free again, and, for the next run, that all are. So neither form has a state that the host changes from run to run.

// transferSlots is how many laps of one writer an owner has room for. At least 4, or ranks whose streams run one after the other
// could wait for each other: see [transferForm.program].
const transferSlots = 4

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
//	slots  [transferSlots][world-1] of span bytes each; [1][world-1] if small. Of the writers, the next rank's comes first
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
	if f.small {
		return 1
	}
	return transferSlots
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
	signals *tensor.Signals
	reduce  transferReduce
	puts    []*tensor.PreparedPut
	steps   []transferStep

	// Where what moves the data works beside the plan's stream, puts have streams of their own. The first of them signals.
	lanes  []device.Stream
	sent   []device.Event // the lane of the same number has come so far
	forked device.Event   // the plan's stream has come so far

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
	kind transferKind
	put  *tensor.PreparedPut // stepPut
	lane int                 // stepPut
	n    int                 // stepReduce: the lap; signals: the channel
}

// transferKind tells steps apart.
type transferKind uint8

const (
	stepWait   transferKind = iota + 1 // the plan's stream waits for a signal of every peer
	stepGrant                          // the plan's stream signals every peer
	stepReduce                         // the plan's stream reduces a lap
	stepPut                            // a lane puts to a peer
	stepTell                           // the first lane signals every peer when all lanes have come to where they are now
	stepFork                           // lanes go on only when the plan's stream has come here
	stepMark                           // where the first lane is now is what the next join means
	stepJoin                           // the plan's stream goes on only when the first lane has come to the mark
)

// program is the steps of one run. Run one after the other on a single stream, in this order or in any other that keeps what
// forks, joins and streams demand, they never make ranks wait for each other in a circle. Only the plan's stream waits for peers; and
// before it waits for lap n of the data, it joins the first lane behind the signal of lap n, which is behind that of result n-2. So
// what a rank is waited for is on its way before it waits itself for what can come only later, as long as the results that free a
// slot are older than that: transferSlots is 4.
func (f transferForm) program(put func(result bool, peer, lap int) *tensor.PreparedPut) []transferStep {
	var steps []transferStep
	add := func(s ...transferStep) { steps = append(steps, s...) }
	send := func(result bool, lap, signal int) {
		for k := 1; k < f.size; k++ {
			if p := put(result, (f.rank+k)%f.size, lap); p != nil {
				add(transferStep{kind: stepPut, put: p, lane: k - 1})
			}
		}
		add(transferStep{kind: stepTell, n: signal})
	}
	wait := func(signal int) transferStep { return transferStep{kind: stepWait, n: signal} }
	reduce := func(lap int) transferStep { return transferStep{kind: stepReduce, n: lap} }
	fork, mark, join := transferStep{kind: stepFork}, transferStep{kind: stepMark}, transferStep{kind: stepJoin}
	switch {
	case f.size == 1:
		add(reduce(0))
		return steps
	case f.small:
		add(wait(signalResults), fork)
		send(false, 0, signalData)
		add(mark, join, wait(signalData), reduce(0), transferStep{kind: stepGrant, n: signalResults})
		return steps
	}
	add(fork)
	for l := range f.laps + 1 {
		if l > 0 {
			add(join)
		}
		if l < f.laps {
			send(false, l, signalData)
			add(mark)
		}
		if l == 0 {
			continue
		}
		add(wait(signalData), reduce(l-1), fork)
		send(true, l-1, signalResults)
		if next := l + 1; next < f.laps && next >= transferSlots {
			add(wait(signalResults), fork)
		}
	}
	add(mark, join)
	for range min(f.laps, transferSlots) {
		add(wait(signalResults))
	}
	return steps
}

func (f transferForm) prepare(ctx context.Context, p *Plan, op Op, firstEpoch uint32) (_ work, err error) {
	w := &transferWork{plan: p}
	defer func() {
		if err != nil {
			err = errors.Join(err, w.close())
		}
	}()
	o := tensor.SignalsOptions{Channels: transferSignals, First: firstEpoch, Op: p.name, Failed: p.fail}
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
	if err = w.makeLanes(f); err != nil {
		return nil, err
	}
	if err = w.preparePuts(f); err != nil {
		return nil, err
	}
	return w, nil
}

// makeLanes makes streams for puts where that lets transfers and reductions overlap.
func (w *transferWork) makeLanes(f transferForm) (err error) {
	n := transferLanes(w.plan.device.Kind(), f.far, f.size)
	if n == 0 || f.small && (!f.far || n == 1) {
		return nil // a small message gains nothing by it, unless puts to several peers take long
	}
	d := w.plan.device
	for range n {
		s, err := d.NewStream()
		if err != nil {
			return err
		}
		w.lanes = append(w.lanes, s)
		e, err := d.NewEvent()
		if err != nil {
			return err
		}
		w.sent = append(w.sent, e)
	}
	w.forked, err = d.NewEvent()
	return err
}

// preparePuts prepares every put, and makes the steps.
func (w *transferWork) preparePuts(f transferForm) error {
	p := w.plan
	out := p.out.Local().Ptr()
	_, window, offset, err := p.in.Memory().Find(out)
	if err != nil {
		return err
	}
	w.steps = f.program(func(result bool, peer, lap int) *tensor.PreparedPut {
		if err != nil {
			return nil
		}
		var put *tensor.PreparedPut
		if result {
			if lo, hi := f.piece(f.rank, lap); lo < hi {
				put, err = w.signals.PreparePut(peer, window, offset+lo, out.Add(lo), hi-lo)
			}
		} else if lo, hi := f.piece(peer, lap); lo < hi {
			put, err = w.signals.PrepareChannelPut(peer, f.slot(peer, f.rank, lap), p.in.Local().Ptr().Add(lo), hi-lo)
		}
		if put != nil {
			w.puts = append(w.puts, put)
		}
		return put
	})
	return err
}

func (w *transferWork) enqueue(s device.Stream, recorded bool) error {
	if w.reduce == nil {
		return nil
	}
	if !recorded && len(w.lanes) > 0 && w.lanes[0].Capturing() {
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

// step enqueues one step of a run on s, or on the stream that it belongs to.
func (w *transferWork) step(s device.Stream, t *transferStep) error {
	alone := len(w.lanes) == 0 // everything is on s
	switch t.kind {
	case stepWait:
		return w.signals.WaitAll(s, t.n)
	case stepGrant:
		return w.signals.SignalAll(s, t.n)
	case stepReduce:
		return w.reduce.enqueue(s, t.n)
	case stepPut:
		if alone {
			return t.put.Enqueue(s)
		}
		return t.put.Enqueue(w.lanes[t.lane%len(w.lanes)])
	case stepTell:
		if alone {
			return w.signals.SignalAll(s, t.n)
		}
		for i := 1; i < len(w.lanes); i++ {
			if err := errors.Join(w.lanes[i].Record(w.sent[i]), w.lanes[0].WaitEvent(w.sent[i])); err != nil {
				return err
			}
		}
		return w.signals.SignalAll(w.lanes[0], t.n)
	}
	if alone {
		return nil
	}
	switch t.kind {
	case stepFork:
		if err := s.Record(w.forked); err != nil {
			return err
		}
		for _, l := range w.lanes {
			if err := l.WaitEvent(w.forked); err != nil {
				return err
			}
		}
	case stepMark:
		return w.lanes[0].Record(w.sent[0])
	case stepJoin:
		return s.WaitEvent(w.sent[0])
	}
	return nil
}

func (w *transferWork) settled() (bool, error) {
	if w.reduce == nil {
		return true, nil
	}
	return w.ended.Query()
}

func (w *transferWork) close() error {
	var err error
	for _, l := range w.lanes {
		err = errors.Join(err, l.Close())
	}
	for _, e := range append(w.sent, w.forked, w.ended) {
		if e != nil {
			err = errors.Join(err, e.Close())
		}
	}
	for _, p := range w.puts {
		err = errors.Join(err, p.Close())
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
