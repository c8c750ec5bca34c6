package kernels

import (
	"context"
	"fmt"

	"github.com/symmem/symmem/collective"
)

// An all-to-all in the form Hierarchical. What the ranks of an island have for one rank of another island, one of them puts together in its workspace, from their inputs, and puts to that rank's
// workspace as one pack; that rank stores it to its output. So a rank exchanges with one rank of each other island, and not with all. Whoever has stored a pack says that there is room for the next one:
// nobody waits for the other island to come to the run before it sends. Inside the island blocks go straight to the outputs.
//
// All of it is for the sake of blocks that are short, of which each transfer takes as long as a longer one. Blocks that are not go straight to the outputs everywhere, as in the form Transfers: the
// same bytes cross the network, and to put them together would only cost copies.

// hierarchicalPackBytes is the most bytes of a block of an all-to-all that is put together with others. It is the same between islands of GPUs, where nothing was measured.
var hierarchicalPackBytes = int64(128 << 10)

// The signals of a plan. Ranks of an island exchange the first, those that are linked the last, and both the second.
const (
	exchangeReady = iota // the peer's input is there, and its output may be written
	exchangeData         // a block, or a pack of them, has come, and the peer's blocks were taken
	exchangeRoom         // a pack was stored to the output
	exchangeSignals
)

// islandExchange is how it is cut, alike on every rank. The workspace is
//
//	packs  [packed] of block bytes each: what goes to each rank that this one carries for, by the rank of the island that it is from
//	slots  [world] of block bytes each: what has come, by island and the rank there that it is from
type islandExchange struct {
	*maker
	islandPlace
	block  int64
	packed int // the most blocks that any rank puts together
}

// newIslandExchange says how it is cut.
func newIslandExchange(m *maker, rank int, islands [][]int, block int64) *islandExchange {
	return &islandExchange{maker: m, islandPlace: newIslandPlace(rank, islands, false), block: block, packed: packedBlocks(islands)}
}

// packedBlocks is the most blocks that any rank puts together.
func packedBlocks(islands [][]int) (most int) {
	for _, ranks := range islands {
		for _, r := range ranks {
			most = max(most, len(ranks)*len(newIslandPlace(r, islands, false).carriesFor()))
		}
	}
	return most
}

// packs reports whether blocks between islands are put together.
func (a *allToAll) packs() bool { return a.blockBytes() <= hierarchicalPackBytes }

// byIslands makes the spec that of the form Hierarchical.
func (a *allToAll) byIslands(s *collective.Spec) {
	islands := islandRanks(a.in.Memory().Islands())
	if !a.packs() || !severalIslands(islands) {
		a.movement().byTransfers(s)
		return
	}
	f := newIslandExchange(a.maker, a.in.Rank(), islands, a.blockBytes())
	s.Parameters += fmt.Sprintf(", islands %v", f.islands)
	s.Workspace = f.workspaceBytes()
	s.Program = &collective.Program{
		Signals: exchangeSignals, Granted: 1, // there is room for the first packs
		Build: func(_ context.Context, b *collective.Builder) error { f.build(islandExchanger{f, b}); return nil },
	}
	links := f.links()
	s.Program.Peers = [][]int{f.near(), append(f.near(), links...), links}
}

func (f *islandExchange) workspaceBytes() int64 {
	size := 0
	for _, ranks := range f.islands {
		size += len(ranks)
	}
	return int64(f.packed+size) * f.block
}

// packAt is where in the workspace what goes to the index-th of the ranks is that this one carries for, and slotAt where in that of any rank comes what is from an island.
func (f *islandExchange) packAt(index int) int64 {
	return int64(index*len(f.islands[f.island])) * f.block
}

func (f *islandExchange) slotAt(island int) int64 {
	at := f.packed
	for _, ranks := range f.islands[:island] {
		at += len(ranks)
	}
	return int64(at) * f.block
}

// exchangeSteps takes the steps of a run.
type exchangeSteps interface {
	pack()             // the plan's stream puts together what this rank carries, and stores its own block to its output
	send()             // it puts packs to those that they are for, and blocks to the outputs of the island, with the signal behind each
	unpack()           // it stores what has come to its output
	signal(signal int) // it signals every peer of the signal
	wait(signal int)   // it waits for a signal of each of them
	finish(signal int) // so it does, and is told what has failed
}

// build adds the steps of one run. Each wait is for what the peers of the signal have sent in an earlier step, or run: so nobody waits in a circle. The ranks of an island tell each other twice that they have
// come: one that has given up waiting for another, and writes to its input again, says it once only, and its blocks do not go into packs then. Whom these are for need not wait for that rank.
func (f *islandExchange) build(s exchangeSteps) {
	for range 2 {
		s.signal(exchangeReady)
		s.wait(exchangeReady)
	}
	s.pack()
	s.wait(exchangeRoom)
	s.send()
	s.finish(exchangeData)
	s.unpack()
	s.signal(exchangeRoom)
}

// islandExchanger makes the steps those of a plan.
type islandExchanger struct {
	*islandExchange
	*collective.Builder
}

func (b islandExchanger) signal(signal int) { b.Signal(signal) }
func (b islandExchanger) wait(signal int)   { b.Wait(signal) }
func (b islandExchanger) finish(signal int) { b.Finish(signal) }

// copies adds a step that copies, all of it in order.
func (b islandExchanger) copies(all []copied) {
	b.Host(func() error {
		for _, c := range all {
			copy(c.dst, c.src)
		}
		return nil
	})
}

// input is the block that a rank of the island has for another rank.
func (b islandExchanger) input(from, to int) []byte {
	return b.Bytes(b.Tensor(specIn, from).Add(int64(to)*b.block), b.block)
}

// output is where this rank has the block that is from another one.
func (b islandExchanger) output(from int) []byte {
	return b.Bytes(b.out.Ptr().Add(int64(from)*b.block), b.block)
}

// own is the index-th block behind a place in this rank's workspace.
func (b islandExchanger) own(at int64, index int) []byte {
	return b.Bytes(b.Workspace(b.Rank()).Add(at+int64(index)*b.block), b.block)
}

func (b islandExchanger) pack() {
	var all []copied
	for k, t := range b.carriesFor() {
		for i, r := range b.islands[b.island] {
			all = append(all, copied{b.own(b.packAt(k), i), b.input(r, t.rank)})
		}
	}
	b.copies(append(all, copied{b.output(b.Rank()), b.input(b.Rank(), b.Rank())}))
}

func (b islandExchanger) send() {
	var puts []collective.Put
	for k, t := range b.carriesFor() {
		puts = append(puts, collective.Put{
			Peer: t.rank, Tensor: collective.ToWorkspace, Offset: b.slotAt(b.island),
			Local: b.Workspace(b.Rank()).Add(b.packAt(k)), Bytes: int64(len(b.islands[b.island])) * b.block,
		})
	}
	for _, r := range b.near() {
		puts = append(puts, collective.Put{Peer: r, Tensor: specOut, Offset: int64(b.Rank()) * b.block, Local: b.in.Ptr().Add(int64(r) * b.block), Bytes: b.block})
	}
	b.Send(exchangeData, puts...)
}

func (b islandExchanger) unpack() {
	var all []copied
	for _, island := range b.otherIslands() {
		for i, r := range b.islands[island] {
			all = append(all, copied{b.output(r), b.own(b.slotAt(island), i)})
		}
	}
	b.copies(all)
}
