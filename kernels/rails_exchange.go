package kernels

import (
	"fmt"
	"slices"

	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/kernels/ptx"
	"github.com/symmem/symmem/memory"
)

// An all-to-all over rails. Inside islands each rank loads what is for it. Between islands, short blocks go as in an exchange of islands of CPUs (hierarchical_exchange.go): what the ranks of
// an island have for one rank of another one, one of them loads into its workspace, from their inputs, and puts to that rank's workspace as one pack, from where that one takes it to its
// output. Whoever has taken a pack says that there is room for the next one. Long blocks go straight to the outputs, each by a put of its own, when all these ranks have said that
// theirs may be written; meanwhile the island's own are loaded.
//
// NCCL's sends and receives take the place of puts, all of a lap in one group, among the ranks that packs link, or, of blocks that go straight, all. Nobody says then that there is room, or that an
// output may be written: a rank's memory is written when its own stream has come to the group.
//
// Packs go in laps only where their rooms would be too large, which takes hundreds of ranks.

// railExchangeBytes is the most bytes of the rooms of a lap of packs, unless there were more than railMostLaps.
var railExchangeBytes = int64(32 << 20)

// railExchange is how blocks go over rails, alike on every rank. For packs a lap of the workspace has
//
//	packs  [packed] rooms, each for a lap of a block: what goes to each rank that this one carries for, by the rank of the island that it is from
//	slots  [world] rooms: what has come, by island and the rank there that it is from
type railExchange struct {
	block    int64
	packed   int
	straight bool
}

// byRails makes the spec that of an all-to-all over rails.
func (a *allToAll) byRails(s *collective.Spec) {
	f := a.newRails(s, 0, nil)
	if f == nil {
		return
	}
	x := &railExchange{block: a.blockBytes(), straight: !a.packs() || !severalIslands(f.islands)}
	f.exchanges(x)
	if !x.straight {
		s.Workspace = int64(min(f.laps, railSlots)) * int64(f.rooms) * f.lap
	}
	s.Parameters += fmt.Sprintf(", straight %t", x.straight)
	f.moves = railMoves{
		loads:  func(at *collective.Addresses, lap int) []ptx.Piece { return f.exchanged(x, at, lap) },
		calls:  func(lap int, own device.Ptr) []memory.LibraryCall { return f.exchangeCalls(x, own, lap) },
		leaves: func(at *collective.Addresses, lap int) []ptx.Piece { return f.unpacked(x, at.Workspace(f.local), lap) },
	}
	f.spec(s)
}

// goesStraight reports whether blocks are exchanged straight between inputs and outputs.
func (f *railForm) goesStraight() bool { return f.exchange != nil && f.exchange.straight }

// exchanges makes rails those of an exchange: every rank brings something, and laps are of blocks.
func (f *railForm) exchanges(x *railExchange) {
	f.exchange = x
	f.islandPlace = newIslandPlace(f.islands[f.island][f.local], f.islands, false)
	size := 0
	for _, ranks := range f.islands {
		size += len(ranks)
	}
	x.packed = packedBlocks(f.islands)
	f.shards, f.rooms = nil, x.packed+size
	f.most, f.lap, f.laps = x.block, alignUp(x.block, shardAlign), 1
	if !x.straight && f.crosses() {
		n := min((int64(f.rooms)*f.lap+railExchangeBytes-1)/railExchangeBytes, railMostLaps)
		f.lap = alignUp((x.block+n-1)/n, shardAlign)
		f.laps = int((x.block + f.lap - 1) / f.lap)
	}
	f.moved = f.lap * int64(size)
}

// part is a lap of the block at a number of a tensor.
func (f *railForm) part(x *railExchange, number, lap int) stretch {
	first := int64(number) * x.block
	return stretch{first + int64(lap)*f.lap, first + min(int64(lap+1)*f.lap, x.block)}
}

// packAt is where in the workspace the pack of a lap for the index-th of the ranks is that this one carries for, and slotAt where in that of any rank comes what is from an island.
func (f *railForm) packAt(lap, index int) int64 {
	return f.roomAt(lap, index*len(f.islands[f.island]))
}

func (f *railForm) slotAt(x *railExchange, lap, island int) int64 {
	room := x.packed
	for _, ranks := range f.islands[:island] {
		room += len(ranks)
	}
	return f.roomAt(lap, room)
}

// packBytes is the size of a lap of a pack of what an island has for one rank.
func (f *railForm) packBytes(x *railExchange, lap, island int) int64 {
	return int64(len(f.islands[island])-1)*f.lap + f.part(x, 0, lap).bytes()
}

// exchanged is what this rank loads from its island: what is for it, to its output, and what goes into packs.
func (f *railForm) exchanged(x *railExchange, at *collective.Addresses, lap int) (all []ptx.Piece) {
	ranks := f.islands[f.island]
	for k := range ranks {
		place := (f.local + k) % len(ranks)
		load := func(number int, to device.Ptr) {
			b := f.part(x, number, lap)
			all = append(all, b.piece(at.Tensor(specIn, place).Add(b.lo), to))
		}
		load(ranks[f.local], f.out.Ptr().Add(f.part(x, ranks[place], lap).lo))
		if x.straight {
			continue
		}
		for index, t := range f.carriesFor() {
			load(t.rank, at.Workspace(f.local).Add(f.packAt(lap, index)+int64(place)*f.lap))
		}
	}
	return all
}

// unpacked is what goes from slots to the output.
func (f *railForm) unpacked(x *railExchange, own device.Ptr, lap int) (all []ptx.Piece) {
	if x.straight {
		return nil
	}
	for _, island := range f.otherIslands() {
		for place, r := range f.islands[island] {
			b := f.part(x, r, lap)
			all = append(all, b.piece(own.Add(f.slotAt(x, lap, island)+int64(place)*f.lap), f.out.Ptr().Add(b.lo)))
		}
	}
	return all
}

// sent is the puts of a lap.
func (f *railForm) sent(x *railExchange, own device.Ptr, lap int) (all []collective.Put) {
	ranks := f.islands[f.island]
	if !x.straight {
		for index, t := range f.carriesFor() {
			all = append(all, collective.Put{
				Peer: t.rank, Tensor: collective.ToWorkspace, Offset: f.slotAt(x, lap, f.island), Local: own.Add(f.packAt(lap, index)),
				Bytes: f.packBytes(x, lap, f.island),
			})
		}
		return all
	}
	to := f.part(x, ranks[f.local], lap)
	for _, r := range f.far() {
		all = append(all, collective.Put{Peer: r, Tensor: f.specOut, Offset: to.lo, Local: f.in.Ptr().Add(f.part(x, r, lap).lo), Bytes: to.bytes()})
	}
	return all
}

// exchangeCalls is what NCCL sends and receives of a lap: what other ranks get, and what comes of them in turn.
func (f *railForm) exchangeCalls(x *railExchange, own device.Ptr, lap int) (all []memory.LibraryCall) {
	for _, put := range f.sent(x, own, lap) {
		all = append(all, sendCall(put.Peer, put.Local, put.Bytes))
	}
	if x.straight {
		for _, r := range f.far() {
			from := f.part(x, r, lap)
			all = append(all, receiveCall(r, f.out.Ptr().Add(from.lo), from.bytes()))
		}
		return all
	}
	for _, island := range f.otherIslands() {
		all = append(all, receiveCall(f.carrier(island), own.Add(f.slotAt(x, lap, island)), f.packBytes(x, lap, island)))
	}
	return all
}

// exchangeParts says by rank with which others it exchanges blocks, directly or by way of others, by the lowest of them.
func (f *railForm) exchangeParts() []int {
	parts := make([]int, len(slices.Concat(f.islands...)))
	if f.exchange.straight {
		return parts // all with all
	}
	for r := range parts {
		parts[r] = r
	}
	for r := range parts {
		for _, other := range newIslandPlace(r, f.islands, false).links() {
			first, last := min(parts[r], parts[other]), max(parts[r], parts[other])
			for k, part := range parts {
				if part == last {
					parts[k] = first
				}
			}
		}
	}
	return parts
}

// far is the ranks of other islands, those of the next one first; where others have as many, each rank begins with another one.
func (p islandPlace) far() (all []int) {
	for _, island := range p.otherIslands() {
		ranks := p.islands[island]
		for k := range ranks {
			all = append(all, ranks[(p.local+k)%len(ranks)])
		}
	}
	return all
}

// buildStraight adds the steps of a run in which blocks go straight to the outputs. While they are on their way, the island's own are loaded. The last kernel loads nothing: ranks of an island whose
// blocks have come give up with one whose have not.
func (f *railForm) buildStraight(s railSteps) {
	s.fork()
	s.signal(railReady)
	s.wait(railReady)
	s.send(0)
	s.enter(0)
	s.join()
	s.finish(0)
	s.combine(0)
	s.leave(0)
}
