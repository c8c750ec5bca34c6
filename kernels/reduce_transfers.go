package kernels

import (
	"context"
	"fmt"

	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/device"
)

// lapForm is how a reduction by transfers is cut, alike on every rank: each owner's shard of the message into laps, which the others put into
// the owner's workspace. That is
//
//	slots  [transferSlots, or 1 if there is one lap][world-1] of span bytes each. Of the writers, the next rank's comes first
//
// What is in a slot begins behind its beginning, on a GPU as the owner's shard of the input does behind a multiple of 16.
//
// A reduce of a large message between many ranks goes on: each rank owns a shard, and its results are put on to root.
//
// Between two GPUs each lap has a place of its own, and is half as long as the one before it: so copies go one right behind the other, and little is left to
// reduce when the last has come. Of a writer the slot is the whole shard then.
type lapForm struct {
	*reduction
	forward bool
	apart   bool    // each lap has a place of its own
	ends    []int64 // apart: where the laps of the longest shard end
	shard   int64   // forward: bytes of a shard; the last ones may be shorter, or empty
	lap     int64   // bytes of a lap
	laps    int     // of the longest shard
	lead    int64   // of the input, see leadOf
}

func (r *reduction) newLapForm() lapForm {
	f := lapForm{reduction: r, lead: leadOf(r.in)}
	size, bytes := int64(r.in.WorldSize()), r.in.Bytes()
	longest := bytes
	switch {
	case r.scatter:
		longest = shareElements(r.in.NumElements(), int(size)) * r.in.DType().Bytes()
	case size >= reduceForwardRanks && bytes >= viaAllBytes(r.in.Device().Kind(), r.far()):
		f.forward = true
		f.shard = alignUp((bytes+size-1)/size, shardAlign)
		longest = f.shard
	}
	if !f.forward && copyEngines(r.in) && longest*(size-1) <= apartMostBytes {
		f.setApart(longest, apartLeastBytes)
		return f
	}
	small, lap := transferGeometry(r.in.Device().Kind(), r.far(), longest*size, int(size))
	if f.lap, f.laps = lap, int((longest+lap-1)/lap); small {
		f.lap, f.laps = longest, 1
	}
	return f
}

// apartMostBytes bounds the workspace of a reduction with a place for each lap, and apartLeastBytes is how short its last laps are at least: each more costs
// more than the reduction that it hides (docs/hardware.md).
var (
	apartMostBytes  = int64(512 << 20)
	apartLeastBytes = int64(32 << 20)
)

// setApart cuts shards, of which the longest has so many bytes, into laps that halve.
func (f *lapForm) setApart(longest, least int64) {
	f.apart, f.lap, f.ends = true, longest, nil
	for end, rest := int64(0), longest; end < longest; rest = longest - end {
		end += alignUp(max((rest+1)/2, least), shardAlign)
		if longest-end < least {
			end = longest
		}
		f.ends = append(f.ends, min(end, longest))
	}
	f.laps = max(len(f.ends), 1)
}

// reduceForwardRanks is from how many ranks on these share the work of a large reduce: root then gets the message once or twice, and not once
// from every other rank. It is the count of bytes on the wire, and was not measured.
const reduceForwardRanks = 4

func (f lapForm) slots() int {
	if f.apart {
		return 1
	}
	return min(f.laps, transferSlots)
}

func (f lapForm) span() int64 { return alignUp(f.lap+15, shardAlign) }

func (f lapForm) workspaceBytes() int64 { return int64(f.slots()*(f.in.WorldSize()-1)) * f.span() }

// whole is the range of bytes of owner's shard in the message.
func (f lapForm) whole(owner int) (lo, hi int64) {
	if f.forward {
		n := f.in.Bytes()
		return min(int64(owner)*f.shard, n), min(int64(owner+1)*f.shard, n)
	}
	lo, hi = f.share(owner)
	width := f.in.DType().Bytes()
	return lo * width, hi * width
}

// piece is the range of bytes of owner's lap in the message.
func (f lapForm) piece(owner, lap int) (lo, hi int64) {
	lo, hi = f.whole(owner)
	if f.apart {
		from, to := f.bounds(lap)
		return min(lo+from, hi), min(lo+to, hi)
	}
	lo = min(lo+int64(lap)*f.lap, hi)
	return lo, min(lo+f.lap, hi)
}

// bounds is where a lap that has a place of its own begins and ends in the longest shard.
func (f lapForm) bounds(lap int) (from, to int64) {
	if lap > 0 {
		from = f.ends[lap-1]
	}
	if lap < len(f.ends) { // there is none of a shard without a byte
		to = f.ends[lap]
	}
	return from, to
}

// slot is where in owner's workspace writer's lap goes.
func (f lapForm) slot(owner, writer, lap int) int64 {
	size := f.in.WorldSize()
	index := lap%f.slots()*(size-1) + (writer-owner+size)%size - 1
	begin, _ := f.whole(owner)
	at := int64(index)*f.span() + (f.lead+begin)%16
	if f.apart {
		from, _ := f.bounds(lap)
		at += from
	}
	return at
}

// signalLap says that a lap has come. Behind it comes one signal for each slot, that the peer has room in it again, and, if results go on to
// root, has put these there.
const (
	signalLap = iota
	signalRoom
)

func (r *reduction) byTransfers(s *collective.Spec) {
	f := r.newLapForm()
	size := r.in.WorldSize()
	s.Parameters += fmt.Sprintf(", laps of %d bytes, forward %t, ends %d, first byte at %d of 16", f.lap, f.forward, f.ends, f.lead)
	s.Program = &collective.Program{Build: func(_ context.Context, b *collective.Builder) error {
		reduce, err := newLocalReduce(b, f.in.Device(), f.in.DType(), f.op, size, f.maxBlocks)
		if err != nil {
			return err
		}
		f.build(lapBuilder{f, b, reduce})
		return nil
	}}
	if size > 1 {
		s.Workspace = f.workspaceBytes()
		s.Program.Signals = signalRoom + f.slots()
		if !f.forward {
			s.Program.Granted = f.slots() // the peers have room for the first laps
		}
		// A goroutine that copies and reduces gains nothing by another.
		s.Program.Lane = f.laps > 1 && (r.in.Device().Kind() == device.CUDA || r.far())
	}
}

// lapSteps takes the steps of a run.
type lapSteps interface {
	send(lap int)      // the lane puts a lap to every owner, with the signal behind it
	put(lap int)       // the same without the signal
	announce()         // the plan's stream gives that
	wait(signal int)   // the lane waits for a signal of every peer
	finish(signal int) // the plan's stream does, and is told what has failed
	room(lap int)      // the lane tells that a lap's slot is free, and puts its result on if that is to go on
	reduce(lap int)    // the plan's stream reduces a lap
	fork()             // the lane goes on only when the plan's stream has come here
	join()             // the plan's stream goes on only when the lane has come here
}

// build adds the steps of one run. They may run one after the other in this order, on one stream, or in any other that keeps what forks, joins
// and streams demand. Each wait is for what every rank has sent in an earlier step: so nobody waits in a circle. Room for the laps of
// the next run is waited for there, unless root must have all results first.
func (f lapForm) build(s lapSteps) {
	if f.in.WorldSize() == 1 {
		s.reduce(0)
		return
	}
	if f.apart {
		f.buildApart(s)
		return
	}
	slots := f.slots()
	send := func(lap int) {
		if !f.forward || lap >= slots {
			s.wait(signalRoom + lap%slots)
		}
		s.send(lap)
	}
	s.fork()
	send(0)
	for l := range f.laps {
		last := l+1 == f.laps
		if last && !f.forward {
			s.join() // both may go by one queue, in which this wait must not be in front of what was sent
			s.finish(signalLap)
		} else {
			s.wait(signalLap)
			s.join()
		}
		if !last {
			send(l + 1)
		}
		s.reduce(l)
		s.fork()
		s.room(l)
	}
	if !f.forward {
		s.join()
		return
	}
	if first := max(f.laps-slots, 0); first+1 < f.laps {
		s.wait(signalRoom + first%slots)
	}
	s.join()
	s.finish(signalRoom + (f.laps-1)%slots)
}

// buildApart adds the steps where each lap has a place of its own: the lane copies one lap after the other, once all peers have room for a run, while the
// plan's stream waits for what has come, behind its own copy of the same lap, and reduces it.
func (f lapForm) buildApart(s lapSteps) {
	s.fork()
	s.wait(signalRoom)
	s.put(0)
	for l := range f.laps {
		s.join()
		if l+1 < f.laps {
			s.put(l + 1)
		}
		s.announce()
		s.finish(signalLap)
		s.reduce(l)
	}
	s.fork()
	s.room(f.laps - 1)
	s.join()
}

// lapBuilder makes the steps those of a plan.
type lapBuilder struct {
	lapForm
	*collective.Builder
	localReduce localReduce
}

func (b lapBuilder) wait(signal int)   { b.Wait(signal) }
func (b lapBuilder) finish(signal int) { b.Finish(signal) }
func (b lapBuilder) reduce(lap int)    { b.localReduce(b.sources(b.Builder, lap)) }
func (b lapBuilder) fork()             { b.Fork() }
func (b lapBuilder) join()             { b.Join() }

func (b lapBuilder) send(lap int) { b.Send(signalLap, b.toOwners(lap)...) }
func (b lapBuilder) put(lap int)  { b.Put(signalLap, b.toOwners(lap)...) }
func (b lapBuilder) announce()    { b.Announce(signalLap) }

// toOwners is the puts of a lap of every peer's shard to its owner.
func (b lapBuilder) toOwners(lap int) (puts []collective.Put) {
	rank, size := b.in.Rank(), b.in.WorldSize()
	for k := 1; k < size; k++ {
		owner := (rank + k) % size
		lo, hi := b.piece(owner, lap)
		puts = append(puts, collective.Put{Peer: owner, Tensor: collective.ToWorkspace, Offset: b.slot(owner, rank, lap), Local: b.in.Ptr().Add(lo), Bytes: hi - lo})
	}
	return puts
}

func (b lapBuilder) room(lap int) {
	signal := signalRoom + lap%b.slots()
	rank := b.in.Rank()
	if !b.forward || rank == b.root {
		b.Signal(signal)
		return
	}
	lo, hi := b.piece(rank, lap)
	b.Send(signal, collective.Put{Peer: b.root, Tensor: b.specOut(), Offset: lo, Local: b.result(b.Builder, lap), Bytes: hi - lo})
}

// sumAt is where in its workspace a rank has its lap of the result that goes on to root: where root's part of it was. Root is told of the room there
// when it has the result. Any other rank may be told while that is still on its way, and would put the next lap over it.
func (f lapForm) sumAt(rank, lap int) int64 { return f.slot(rank, f.root, lap) }

// result is where this rank's lap of the result goes: to its output, or, if it goes on to root, to its workspace.
func (f lapForm) result(b *collective.Builder, lap int) device.Ptr {
	rank := f.in.Rank()
	if f.forward && rank != f.root {
		return b.Workspace(rank).Add(f.sumAt(rank, lap))
	}
	begin, _ := f.whole(rank)
	lo, _ := f.piece(rank, lap)
	if f.forward {
		begin = 0 // root has the whole message
	}
	return f.out.Ptr().Add(lo - begin)
}

// sources says where every rank's part of a lap of this rank's shard is, by rank, and where the result goes; all of them are n bytes.
func (f lapForm) sources(b *collective.Builder, lap int) (srcs []device.Ptr, dst device.Ptr, n int64) {
	rank := f.in.Rank()
	lo, hi := f.piece(rank, lap)
	for r := range f.in.WorldSize() {
		if r == rank {
			srcs = append(srcs, f.in.Ptr().Add(lo))
			continue
		}
		srcs = append(srcs, b.Workspace(rank).Add(f.slot(rank, r, lap)))
	}
	return srcs, f.result(b, lap), hi - lo
}
