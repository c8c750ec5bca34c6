package kernels

import (
	"context"
	"fmt"
	"slices"

	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/device"
)

// What every rank gets from some, in the form Hierarchical: an all-gather, where each rank brings a share, and a broadcast, where the ranks of root's island bring a shard each, which they
// have copied from root. Who brings something stores it to the outputs of its island, and puts it to one rank of each other island, which carries it: it stores it to the outputs
// there. So a byte crosses the network once for an island. What is brought goes in laps: while one is on the network, the one before is stored.
//
// Where there are more than two islands, a large broadcast cuts each lap into parts. Root's island puts one to each other island, and these exchange them: so what leaves it is the message
// once, and not once for every island.

// The signals of a plan. Ranks of an island exchange the second and the third, and those that are linked the last two; the first goes to both.
const (
	islandReady   = iota // the peer's output may be written, and its input is there
	islandDone           // nobody of the island touches inputs and outputs any more; where some have no rail, also before, that all of the island have come
	islandLap            // a lap has come to the peer, from all that it is linked with
	islandData           // a lap has come
	islandRelayed        // the other parts of a lap have come
)

// islandMovement is how it is cut, alike on every rank. It needs no workspace: what is put comes to the outputs.
type islandMovement struct {
	*maker
	islandPlace
	share func(rank int) (lo, hi int64) // what rank brings, in bytes of the output
	root  int                           // whose input it is; -1 is that each brings its own
	lap   int64                         // bytes of a lap
	laps  int                           // of the longest share
	relay bool                          // laps go in parts
}

// cut decides how shares of so many bytes at most are cut.
func (f *islandMovement) cut(longest, lap int64) { f.lap, f.laps = evenLaps(longest, lap) }

// byIslands makes the spec that of the form Hierarchical.
func (a *allGather) byIslands(s *collective.Spec) {
	n, size, width := a.out.NumElements(), a.out.WorldSize(), a.out.DType().Bytes()
	f := &islandMovement{maker: a.maker, root: -1, islandPlace: newIslandPlace(a.in.Rank(), islandRanks(a.in.Memory().Islands()), false)}
	f.share = func(rank int) (lo, hi int64) {
		lo, hi = shareOf(n, size, rank)
		return lo * width, hi * width
	}
	longest := shareElements(n, size) * width
	f.cut(longest, longLap(longest, hierarchicalLapBytes))
	f.spec(s)
}

func (f *islandMovement) spec(s *collective.Spec) {
	s.Parameters += fmt.Sprintf(", islands %v, laps of %d bytes, in parts %t", f.islands, f.lap, f.relay)
	s.Program = &collective.Program{
		Signals: islandData + 1,
		Lane:    f.crosses() && f.laps > 1,
		Build:   func(_ context.Context, b *collective.Builder) error { f.build(islandMover{f, b}); return nil },
	}
	links := f.links()
	s.Program.Peers = [][]int{append(f.near(), links...), f.near(), f.near(), links}
	if f.relay {
		s.Program.Signals++
		s.Program.Peers = append(s.Program.Peers, links)
	}
}

// brought is a lap of what rank brings.
func (f *islandMovement) brought(rank, lap int) (lo, hi int64) {
	first, end := f.share(rank)
	lo = min(first+int64(lap)*f.lap, end)
	return lo, min(lo+f.lap, end)
}

// part is what of a lap of rank's, on another island, goes to this island first.
func (f *islandMovement) part(rank, from, to, lap int) (lo, hi int64) {
	lo, hi = f.brought(rank, lap)
	if !f.relay {
		return lo, hi
	}
	others := int64(len(f.islands) - 1)
	each := alignUp((f.lap+others-1)/others, shardAlign)
	lo = min(lo+int64((to-from+len(f.islands))%len(f.islands)-1)*each, hi)
	return lo, min(lo+each, hi)
}

// islandSteps takes the steps of a run.
type islandSteps interface {
	load(lap int)      // the plan's stream stores a lap of what this rank brings to the outputs of the island
	send(lap int)      // the lane puts a lap to those that carry it, with the signal behind it
	pass(lap int)      // the lane puts the part of a lap that has come to the others that carry it, with the signal behind it
	spread(lap int)    // the plan's stream stores a lap of what this rank carries to the other outputs of the island
	signal(signal int) // the lane signals every peer of the signal
	wait(signal int)   // the lane waits for a signal of each of them
	finish(signal int) // the plan's stream does, and is told what has failed
	fork()             // the lane goes on only when the plan's stream has come here
	join()             // the plan's stream goes on only when the lane has come here
}

// build adds the steps of one run. They may run one after the other in this order, on one stream, or in any other that keeps what forks, joins and streams demand. Each wait is for what
// the peers of the signal have sent in an earlier step: so nobody waits in a circle.
func (f *islandMovement) build(s islandSteps) {
	s.fork()
	s.signal(islandReady)
	s.wait(islandReady)
	for range f.greetings() - 1 {
		s.signal(islandDone)
		s.wait(islandDone)
	}
	s.join()
	if f.crosses() {
		f.buildLaps(s)
	} else {
		for l := range f.laps {
			s.load(l)
		}
	}
	s.fork()
	s.signal(islandDone)
	s.join()
	s.finish(islandDone)
}

// buildLaps adds the steps of the laps, where there is another island.
func (f *islandMovement) buildLaps(s islandSteps) {
	s.load(0)
	s.fork()
	s.send(0)
	if f.laps > 1 {
		s.load(1)
	}
	for l := range f.laps {
		s.wait(islandData)
		if f.relay {
			s.pass(l)
		}
		s.join()
		if l+1 < f.laps {
			s.fork()
			s.send(l + 1)
		}
		if f.relay {
			s.wait(islandRelayed)
			s.join()
		}
		if f.laps > 1 {
			s.signal(islandLap)
		}
		s.spread(l)
		if l+2 < f.laps {
			s.load(l + 2)
		}
	}
	if f.laps == 1 {
		return
	}
	for range f.laps { // one at a time: others of the island may be slower, and a run take longer than a wait lasts
		s.wait(islandLap)
	}
}

// islandMover makes the steps those of a plan.
type islandMover struct {
	*islandMovement
	*collective.Builder
}

func (b islandMover) signal(signal int) { b.Signal(signal) }
func (b islandMover) wait(signal int)   { b.Wait(signal) }
func (b islandMover) finish(signal int) { b.Finish(signal) }
func (b islandMover) fork()             { b.Fork() }
func (b islandMover) join()             { b.Join() }

// output is a rank's output between two bytes.
func (b islandMover) output(rank int, lo, hi int64) []byte {
	return b.Bytes(b.Tensor(b.specOut(), rank).Add(lo), hi-lo)
}

// copies adds a step that copies a few bytes after the other: what was loaded is in the cache then.
func (b islandMover) copies(src []byte, dsts [][]byte) {
	if len(src) == 0 || len(dsts) == 0 {
		return
	}
	b.Host(func() error {
		for at := 0; at < len(src); at += hierarchicalPiece {
			end := min(at+hierarchicalPiece, len(src))
			for _, dst := range dsts {
				copy(dst[at:end], src[at:end])
			}
		}
		return nil
	})
}

func (b islandMover) load(lap int) {
	lo, hi := b.brought(b.Rank(), lap)
	if lo == hi {
		return
	}
	from := b.Rank()
	if b.root >= 0 {
		from = b.root
	}
	var src []byte
	if b.root >= 0 || b.inPlace() {
		src = b.output(from, lo, hi) // the one tensor is the whole
	} else {
		first, _ := b.share(from)
		src = b.Bytes(b.in.Ptr().Add(lo-first), hi-lo)
	}
	var dsts [][]byte
	for _, r := range append(b.near(), b.Rank()) {
		if r != from || b.root < 0 && !b.inPlace() {
			dsts = append(dsts, b.output(r, lo, hi))
		}
	}
	b.copies(src, dsts)
}

// put is one of bytes of this rank's output to the same place of a peer's.
func (b islandMover) put(peer int, lo, hi int64) collective.Put {
	var local device.Ptr
	if lo < hi {
		local = b.Tensor(b.specOut(), b.Rank()).Add(lo)
	}
	return collective.Put{Peer: peer, Tensor: b.specOut(), Offset: lo, Local: local, Bytes: hi - lo}
}

func (b islandMover) send(lap int) {
	var puts []collective.Put
	for _, i := range b.otherIslands() {
		if !b.owns() {
			break
		}
		if lo, hi := b.part(b.Rank(), b.island, i, lap); lo < hi {
			puts = append(puts, b.put(b.carrier(i), lo, hi))
		}
	}
	b.Send(islandData, puts...)
}

func (b islandMover) pass(lap int) {
	var puts []collective.Put
	for _, i := range b.otherIslands() {
		for _, r := range b.carried(i) {
			lo, hi := b.part(r, i, b.island, lap)
			for _, k := range b.otherIslands() {
				if k != i && lo < hi {
					puts = append(puts, b.put(b.carrier(k), lo, hi))
				}
			}
		}
	}
	b.Send(islandRelayed, puts...)
}

func (b islandMover) spread(lap int) {
	for _, i := range b.otherIslands() {
		for _, r := range b.carried(i) {
			lo, hi := b.brought(r, lap)
			if lo == hi {
				continue
			}
			var dsts [][]byte
			for _, n := range b.near() {
				dsts = append(dsts, b.output(n, lo, hi))
			}
			b.copies(b.output(b.Rank(), lo, hi), dsts)
		}
	}
}

// byIslands makes the spec that of the form Hierarchical. The ranks of root's island bring a shard each, as many as the smallest island has ranks.
func (b *broadcast) byIslands(s *collective.Spec) {
	islands := islandRanks(b.in.Memory().Islands())
	f := &islandMovement{maker: b.maker, root: b.root, islandPlace: newIslandPlace(b.in.Rank(), islands, true)}
	bytes := b.in.Bytes()
	shard := alignUp(shareElements(bytes, f.rails), shardAlign)
	first := islands[newIslandPlace(b.root, islands, true).island]
	f.share = func(rank int) (lo, hi int64) {
		place := slices.Index(first, rank)
		if place < 0 || place >= f.rails {
			return 0, 0
		}
		lo = min(int64(place)*shard, bytes)
		return lo, min(lo+shard, bytes)
	}
	f.relay = len(islands) > 2 && shard > hierarchicalDirectBytes
	f.cut(shard, longLap(shard, hierarchicalLapBytes))
	f.spec(s)
}
