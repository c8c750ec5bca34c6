package kernels

import (
	"context"
	"fmt"

	"github.com/symmem/symmem/collective"
)

// Hierarchical is an all-reduce over islands, whose ranks have addresses of each other's memory, and which reach each other by puts only. The message is
// cut into as many shards as the smallest island has ranks. The n-th ranks of all islands are a rail, and have the n-th shard: each loads it from the
// inputs of its island and sums it up, the ranks of the rail all-reduce these sums by puts, and each stores the result to the outputs of its island. So a byte
// crosses the network once for an island, and not once for a rank. Ranks behind the last rail only have inputs and outputs.
//
// A shard goes in laps: while one is on the network, the next is summed up, and the one before is stored to the outputs.
//
// Between two islands, and where shards are short, a rail exchanges whole laps, and each of its ranks reduces them (direct). Otherwise each rank of a rail
// owns a part of each lap, which it gets from the others, reduces, and puts to their outputs, as the form Transfers does.
//
// The order is that of the sums: those of an island in the order of its ranks, and then those of the islands, in the order of their lowest ranks. What an island has summed up is rounded to
// the dtype, except for averages of f16, which it might not hold.

// The most bytes of a shard that a rail of more than two ranks exchanges whole, and of a lap. Of long shards laps are longer: four, of 8 times as much at most. More of them
// overlap no better, and each costs ranks that have few cores: docs/hardware.md.
var (
	hierarchicalDirectBytes = int64(64 << 10)
	hierarchicalLapBytes    = int64(1 << 20)
	hierarchicalFewLaps     = int64(4)
)

// hierarchicalPiece is how much of a result is reduced before it is copied to the outputs of the island, in bytes: it is still in the cache then.
const hierarchicalPiece = 32 << 10

// The signals of a plan. Ranks of an island exchange the first three, and those of a rail the others.
const (
	hierarchicalReady   = iota // the inputs are there, and the outputs may be written
	hierarchicalDone           // nobody's inputs and outputs are touched any more
	hierarchicalLap            // a lap is over on the peer's rail
	hierarchicalData           // a lap has come
	hierarchicalResults        // an owner's part of the results of a lap has come; direct: a slot is free again, one signal for each
)

// hierarchicalForm is how the message is cut, alike on every rank. The workspace is
//
//	partials  [slots] of span bytes each: what this rank's island has summed up of a lap
//	slots     [slots][islands-1] of slotSpan bytes each: what others have. Of the writers, the next island's comes first
type hierarchicalForm struct {
	*allReduce
	islandPlace
	bytes  int64
	shard  int64 // bytes of a shard; the last ones may be shorter, or empty
	lap    int64 // bytes of a lap
	laps   int   // of a shard
	part   int64 // bytes of a lap that one rank of a rail reduces
	direct bool  // which is all of it
	wide   int64 // how many times as long partials are
}

func (a *allReduce) newHierarchicalForm() hierarchicalForm {
	f := hierarchicalForm{allReduce: a, bytes: a.in.Bytes(), wide: 1}
	if widens(a.in.DType(), a.op) {
		f.wide = 2
	}
	f.place(a.in.Rank(), islandRanks(a.in.Memory().Islands()))
	f.cut(longLap(f.shardBytes(), hierarchicalLapBytes), hierarchicalDirectBytes)
	return f
}

// place says where a rank is.
func (f *hierarchicalForm) place(rank int, islands [][]int) {
	f.islandPlace = newIslandPlace(rank, islands, true)
}

// longLap is how long laps are of what is so many bytes at most, if those of what is short are lap bytes.
func longLap(longest, lap int64) int64 { return max(lap, min(longest/hierarchicalFewLaps, 8*lap)) }

// evenLaps cuts bytes into laps that are as long, of lap bytes at most but for alignment. Of none there is one.
func evenLaps(longest, lap int64) (each int64, laps int) {
	n := max((longest+lap-1)/lap, 1)
	each = max(alignUp((longest+n-1)/n, shardAlign), shardAlign)
	return each, int(max((longest+each-1)/each, 1))
}

func (f *hierarchicalForm) shardBytes() int64 {
	return alignUp((f.bytes+int64(f.rails)-1)/int64(f.rails), shardAlign)
}

// cut decides how the message is cut.
func (f *hierarchicalForm) cut(lap, direct int64) {
	f.shard = f.shardBytes()
	f.lap, f.laps = evenLaps(f.shard, lap)
	f.direct = len(f.islands) <= 2 || f.shard <= direct
	if f.part = f.lap; !f.direct {
		f.part = alignUp((f.lap+int64(len(f.islands))-1)/int64(len(f.islands)), shardAlign)
	}
}

// byHierarchy makes the spec that of the form Hierarchical.
func (a *allReduce) byHierarchy(s *collective.Spec) {
	f := a.newHierarchicalForm()
	s.Parameters += fmt.Sprintf(", islands %v, shards of %d bytes in laps of %d, %d bytes of a lap reduced by one rank", f.islands, f.shard, f.lap, f.part)
	s.Workspace = f.workspaceBytes()
	s.Program = &collective.Program{
		Signals: hierarchicalResults + 1,
		// A goroutine that sums up gains by another only where that one waits for the network.
		Lane:  f.crosses() && f.laps > 1,
		Build: func(_ context.Context, b *collective.Builder) error { return f.addTo(b) },
	}
	if f.direct {
		s.Program.Signals, s.Program.Granted = hierarchicalResults+f.slots(), f.slots() // the rail has room for the first laps
	}
	s.Program.Peers = f.signalPeers(s.Program.Signals)
}

// rail is the other ranks of the rail, from the next island on; not nil.
func (f hierarchicalForm) rail() []int { return f.links() }

// signalPeers says who exchanges which signals.
func (f hierarchicalForm) signalPeers(signals int) [][]int {
	peers := make([][]int, signals)
	for s := range peers {
		peers[s] = f.peersOf(s)
	}
	return peers
}

// peersOf says who exchanges a signal.
func (f hierarchicalForm) peersOf(signal int) []int {
	if signal < hierarchicalData {
		return f.near()
	}
	return f.rail()
}

func (f hierarchicalForm) slots() int { return min(f.laps, transferSlots) }

// span is the size of a partial sum of a lap, and slotSpan that of a slot.
func (f hierarchicalForm) span() int64     { return f.lap * f.wide }
func (f hierarchicalForm) slotSpan() int64 { return f.part * f.wide }

func (f hierarchicalForm) workspaceBytes() int64 {
	if !f.crosses() {
		return 0
	}
	return int64(f.slots()) * (f.span() + int64(len(f.islands)-1)*f.slotSpan())
}

// partialAt is where in the workspace the partial sum of a lap is, and slot where in that of owner's island writer's comes to.
func (f hierarchicalForm) partialAt(lap int) int64 { return int64(lap%f.slots()) * f.span() }

func (f hierarchicalForm) slot(owner, writer, lap int) int64 {
	others := len(f.islands) - 1
	index := lap%f.slots()*others + (writer-owner+len(f.islands))%len(f.islands) - 1
	return int64(f.slots())*f.span() + int64(index)*f.slotSpan()
}

// piece is the range of bytes in the message of a lap of this rank's shard, and owned what of it the rank of the rail on an island reduces.
func (f hierarchicalForm) piece(lap int) (lo, hi int64) {
	end := min(int64(f.local+1)*f.shard, f.bytes)
	lo = min(int64(f.local)*f.shard+int64(lap)*f.lap, end)
	return lo, min(lo+f.lap, end)
}

func (f hierarchicalForm) owned(island, lap int) (lo, hi int64) {
	lo, hi = f.piece(lap)
	if f.direct {
		return lo, hi
	}
	lo = min(lo+int64(island)*f.part, hi)
	return lo, min(lo+f.part, hi)
}

// hierarchicalSteps takes the steps of a run.
type hierarchicalSteps interface {
	hierarchicalDirectSteps
	spread(lap int)    // the plan's stream stores the results of a lap to the other outputs of the island
	reduceAlone()      // the plan's stream reduces the shard of the only island, and stores it to all outputs
	results(lap int)   // the lane puts the results of what this rank owns of a lap to the rail, with the signal behind it
	finish(signal int) // the plan's stream does, and is told what has failed
}

// hierarchicalDirectSteps takes those of laps that are exchanged whole.
type hierarchicalDirectSteps interface {
	sum(lap int)       // the plan's stream sums up the island's inputs of a lap of this rank's shard
	combine(lap int)   // the plan's stream reduces the islands' sums of what this rank owns of a lap; direct: and stores it to the island's outputs
	send(lap int)      // the lane puts the sum of a lap to the rail, with the signal behind it
	signal(signal int) // the lane signals every peer of the signal
	wait(signal int)   // the lane waits for a signal of each of them
	fork()             // the lane goes on only when the plan's stream has come here
	join()             // the plan's stream goes on only when the lane has come here
}

// build adds the steps of one run. They may run one after the other in this order, on one stream, or in any other that keeps what forks, joins and
// streams demand. Each wait is for what the peers of the signal have sent in an earlier step: so nobody waits in a circle.
func (f hierarchicalForm) build(s hierarchicalSteps) {
	s.fork()
	for range f.greetings() {
		s.signal(hierarchicalReady)
		s.wait(hierarchicalReady)
	}
	s.join()
	switch {
	case !f.owns():
		f.tellLaps(s)
	case !f.crosses():
		s.reduceAlone()
	case f.direct:
		f.buildDirect(s)
	default:
		f.buildOwned(s)
	}
	f.awaitLaps(s)
	s.fork()
	s.signal(hierarchicalDone)
	s.join()
	s.finish(hierarchicalDone)
}

// tellLap tells the island that a lap is over here, and awaitLaps waits until all laps are on the island's other rails, for one at a time: these may be slower, or the only ones that there are, and a run may take
// longer than a wait lasts.
func (f hierarchicalForm) tellLap(s hierarchicalDirectSteps) {
	if f.crosses() && f.laps > 1 {
		s.signal(hierarchicalLap)
	}
}

func (f hierarchicalForm) awaitLaps(s hierarchicalDirectSteps) {
	if f.crosses() && f.laps > 1 {
		for range f.laps {
			s.wait(hierarchicalLap)
		}
	}
}

// tellLaps is for a rank that is on no rail.
func (f hierarchicalForm) tellLaps(s hierarchicalDirectSteps) {
	for range f.laps {
		f.tellLap(s)
	}
}

// buildDirect adds the steps of a shard whose laps the rail exchanges whole. A sum is overwritten by that of two laps later when it was sent and combined.
func (f hierarchicalForm) buildDirect(s hierarchicalDirectSteps) {
	send := func(lap int) {
		s.wait(hierarchicalResults + lap%f.slots())
		s.send(lap)
	}
	s.sum(0)
	s.fork()
	send(0)
	if f.laps > 1 {
		s.sum(1)
	}
	for l := range f.laps {
		s.wait(hierarchicalData)
		s.join()
		if l+1 < f.laps {
			s.fork()
			send(l + 1)
		}
		s.combine(l)
		s.fork()
		s.signal(hierarchicalResults + l%f.slots())
		f.tellLap(s)
		if l+2 < f.laps {
			s.sum(l + 2)
		}
	}
}

// buildOwned adds the steps of a shard of which each rank of the rail reduces a part. Whoever has got the results of a lap knows that its slots are free.
func (f hierarchicalForm) buildOwned(s hierarchicalSteps) {
	s.sum(0)
	s.fork()
	s.send(0)
	if f.laps > 1 {
		s.sum(1)
	}
	s.wait(hierarchicalData)
	s.join()
	for l := range f.laps {
		more := l+1 < f.laps
		if more {
			s.fork()
			s.send(l + 1)
		}
		s.combine(l)
		s.fork()
		if l+2 < f.laps {
			s.sum(l + 2)
		}
		if l >= 2 {
			s.spread(l - 2)
		}
		if more {
			s.wait(hierarchicalData)
			s.join() // the results of the lap before have come too
		}
		s.results(l)
		s.wait(hierarchicalResults)
		f.tellLap(s)
	}
	s.join()
	for l := max(f.laps-2, 0); l < f.laps; l++ {
		s.spread(l)
	}
}

// hierarchicalBuilder makes the steps those of a plan.
type hierarchicalBuilder struct {
	hierarchicalForm
	*collective.Builder
	inner, outer reducer // of an island's inputs, and of the islands' sums
}

// addTo adds the steps of a run to a program.
func (f hierarchicalForm) addTo(b *collective.Builder) error {
	h := hierarchicalBuilder{hierarchicalForm: f, Builder: b}
	h.inner, h.outer = islandReducers(f.in.DType(), f.op, f.in.WorldSize(), f.crosses())
	f.build(h)
	return nil
}

func (b hierarchicalBuilder) signal(signal int) { b.Signal(signal) }
func (b hierarchicalBuilder) wait(signal int)   { b.Wait(signal) }
func (b hierarchicalBuilder) finish(signal int) { b.Finish(signal) }
func (b hierarchicalBuilder) fork()             { b.Fork() }
func (b hierarchicalBuilder) join()             { b.Join() }

// own is n bytes of this rank's workspace.
func (b hierarchicalBuilder) own(at, n int64) []byte {
	return b.Bytes(b.Workspace(b.Rank()).Add(at), n)
}

// inputs is every input of the island between two bytes of the message, by rank, and outputs the other ranks' outputs.
func (b hierarchicalBuilder) inputs(lo, hi int64) [][]byte {
	var ins [][]byte
	for _, r := range b.islands[b.island] {
		ins = append(ins, b.Bytes(b.Tensor(specIn, r).Add(lo), hi-lo))
	}
	return ins
}

func (b hierarchicalBuilder) outputs(lo, hi int64) [][]byte {
	var outs [][]byte
	for _, r := range b.near() {
		outs = append(outs, b.Bytes(b.Tensor(specOut, r).Add(lo), hi-lo))
	}
	return outs
}

// output is this rank's output between two bytes.
func (b hierarchicalBuilder) output(lo, hi int64) []byte { return b.Bytes(b.out.Ptr().Add(lo), hi-lo) }

func (b hierarchicalBuilder) sum(lap int) {
	lo, hi := b.piece(lap)
	if lo == hi {
		return
	}
	n := (hi - lo) / b.in.DType().Bytes()
	sum, ins := b.own(b.partialAt(lap), (hi-lo)*b.wide), b.inputs(lo, hi)
	b.Host(func() error {
		b.inner(sum, ins, 0, n)
		return nil
	})
}

// reduceTo adds a step that reduces to this rank's output between two bytes, and copies that to others.
func (b hierarchicalBuilder) reduceTo(reduce reducer, srcs [][]byte, lo, hi int64, others [][]byte) {
	out, width := b.output(lo, hi), b.in.DType().Bytes()
	b.Host(func() error {
		for at := int64(0); at < hi-lo; at += hierarchicalPiece {
			end := min(at+hierarchicalPiece, hi-lo)
			reduce(out, srcs, at/width, end/width)
			for _, other := range others {
				copy(other[at:end], out[at:end])
			}
		}
		return nil
	})
}

func (b hierarchicalBuilder) reduceAlone() {
	lo, hi := min(int64(b.local)*b.shard, b.bytes), min(int64(b.local+1)*b.shard, b.bytes)
	if lo < hi {
		b.reduceTo(b.inner, b.inputs(lo, hi), lo, hi, b.outputs(lo, hi))
	}
}

func (b hierarchicalBuilder) combine(lap int) {
	lo, hi := b.owned(b.island, lap)
	if lo == hi {
		return
	}
	var srcs [][]byte // in the order of the islands
	for i := range b.islands {
		at := b.slot(b.island, i, lap)
		if i == b.island {
			begin, _ := b.piece(lap)
			at = b.partialAt(lap) + (lo-begin)*b.wide
		}
		srcs = append(srcs, b.own(at, (hi-lo)*b.wide))
	}
	var others [][]byte
	if b.direct {
		others = b.outputs(lo, hi)
	}
	b.reduceTo(b.outer, srcs, lo, hi, others)
}

func (b hierarchicalBuilder) spread(lap int) {
	lo, hi := b.piece(lap)
	if lo == hi {
		return
	}
	out, others := b.output(lo, hi), b.outputs(lo, hi)
	b.Host(func() error {
		for _, other := range others {
			copy(other, out)
		}
		return nil
	})
}

func (b hierarchicalBuilder) send(lap int) {
	begin, _ := b.piece(lap)
	var puts []collective.Put
	for _, i := range b.otherIslands() {
		lo, hi := b.owned(i, lap)
		puts = append(puts, collective.Put{
			Peer: b.islands[i][b.local], Tensor: collective.ToWorkspace, Offset: b.slot(i, b.island, lap),
			Local: b.Workspace(b.Rank()).Add(b.partialAt(lap) + (lo-begin)*b.wide), Bytes: (hi - lo) * b.wide,
		})
	}
	b.Send(hierarchicalData, puts...)
}

func (b hierarchicalBuilder) results(lap int) {
	lo, hi := b.owned(b.island, lap)
	var puts []collective.Put
	for _, peer := range b.rail() {
		puts = append(puts, collective.Put{Peer: peer, Tensor: specOut, Offset: lo, Local: b.out.Ptr().Add(lo), Bytes: hi - lo})
	}
	b.Send(hierarchicalResults, puts...)
}

// sum16 adds up 16-bit floats to float32, and average16 makes the average of size ranks of such sums, rounded once.
func sum16(load func(dst []float32, src []uint16)) reducer {
	next := make([]float32, chunk)
	combine := newCombiner[float32](Sum)
	return func(dst []byte, srcs [][]byte, lo, hi int64) {
		out := slice[float32](dst)
		for at := lo; at < hi; at += chunk {
			end := min(at+chunk, hi)
			a, n := out[at:end], next[:end-at]
			load(a, slice[uint16](srcs[0])[at:end])
			for _, src := range srcs[1:] {
				load(n, slice[uint16](src)[at:end])
				combine(a, a, n)
			}
		}
	}
}

func average16(size int, store func(dst []uint16, src []float32)) reducer {
	acc := make([]float32, chunk)
	combine := newCombiner[float32](Sum)
	return func(dst []byte, srcs [][]byte, lo, hi int64) {
		out := slice[uint16](dst)
		for at := lo; at < hi; at += chunk {
			end := min(at+chunk, hi)
			a := acc[:end-at]
			copy(a, slice[float32](srcs[0])[at:end])
			for _, src := range srcs[1:] {
				combine(a, a, slice[float32](src)[at:end])
			}
			average(a, size)
			store(out[at:end], a)
		}
	}
}
