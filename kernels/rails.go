package kernels

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"os"
	"slices"

	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/kernels/ptx"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// On GPUs, Hierarchical is kernels inside islands and NCCL's collectives, or puts (rails_puts.go), between them; of an all-to-all NCCL's sends and receives (rails_exchange.go). What an island brings or gets is cut into as many shards as the smallest
// island has ranks, and the n-th ranks of all islands are a rail, which has the n-th shards. A shard goes in laps, and a lap is four launches:
//
//	enter  each rank of a rail makes its part from what its island has: the combination of the island's inputs, or what it is to pass on
//	rail   NCCL carries the parts between the ranks of the rail, and with them the word that says whether one has given up
//	told   a plan gives up whose rail brings such a word, or was cut off: what it brings was never finished
//	leave  each rank loads what it is to have from the ranks of its island that have got it
//
// Ranks behind the last rail only have inputs and outputs. The kernels that enter and leave begin and end with a barrier of the island, so that nobody's input is
// written, and no output read, too early; also in place: of an input, each byte is loaded by one rank of the island, in the lap in which it is overwritten or before.
//
// Where there are several laps, rails run on a stream of the plan's own, beside the kernels: while a lap is on its way, the next one enters, and the one before
// leaves.
//
// The order is that of the sums: those of an island in the order of its ranks, rounded to the dtype, and then those of the islands. Of two islands any order
// gives the same bits, and NCCL may sum up. Of more it promises none, so that it only carries what kernels combine (rails_messages.go). An average is that of the islands' averages, each counted
// as often as its island has ranks.

// A lap is of railLapBytes of a shard at most, unless these were more than railMostLaps: each lap is some launches, and a call of NCCL's that is tried when the
// plan is made. Where each island brings or gets other bytes, as of an all-gather, two of them have so much. The first is a guess at what keeps a network busy for
// longer than the launches take; it was not measured over a network.
var railLapBytes = int64(8 << 20)

const railMostLaps = 32

// railSlots is how many laps have room of their own in the workspace, where those of one go over rails once.
const railSlots = 2

// stretch is a range of bytes of the message.
type stretch struct{ lo, hi int64 }

func (s stretch) bytes() int64 { return s.hi - s.lo }

// railForm is how a collective is cut, alike on every rank.
type railForm struct {
	islandPlace
	in, out   tensor.SymmetricTensor
	specOut   int // the number of out in the Spec
	op        Op  // 0 where nothing is combined
	maxBlocks int

	shards [][][]stretch // what goes over rails: one part of the message, or one for each island; of each its shards, by place; of each its ranges, in order
	lap    int64         // bytes of a lap of a shard
	laps   int           // of the longest
	most   int64         // bytes of the longest

	moved      int64 // bytes that a rank loads in a lap, or more
	own, rooms int   // how many rooms of a lap there are in the workspace for what is this rank's, and in all

	moves    railMoves
	puts     *railPuts     // what carries parts over rails in NCCL's place, or nil
	messages *railMessages // what NCCL carries for kernels to combine, or nil
	exchange *railExchange // how blocks are exchanged, of an all-to-all
}

// railMoves is what one collective does in a lap. Nil is nothing.
type railMoves struct {
	sums   func(lap int, own device.Ptr) []railSum             // what this rank combines of the island's inputs; own is its workspace
	loads  func(at *collective.Addresses, lap int) []ptx.Piece // in its place, what this rank copies; ranks are places on the island
	calls  func(lap int, own device.Ptr) []memory.LibraryCall  // what NCCL does between the ranks of the rail
	leaves func(at *collective.Addresses, lap int) []ptx.Piece // what this rank loads from its island
}

// railSum is a range of the inputs whose combination goes to memory of this rank.
type railSum struct {
	stretch
	to device.Ptr
}

// newRails cuts a message into shards that are the same part of it on every island, or, if parts is not nil, what parts says of each.
func newRails(in, out tensor.SymmetricTensor, specOut int, op Op, maxBlocks int, shares func(rank int) (lo, hi int64)) *railForm {
	f := &railForm{
		in: in, out: out, specOut: specOut, op: op, maxBlocks: maxBlocks,
		islandPlace: newIslandPlace(in.Rank(), islandRanks(in.Memory().Islands()), true),
	}
	if shares == nil {
		n := max(in.Bytes(), out.Bytes())
		f.shards = [][][]stretch{cutEvenly([]stretch{{0, n}}, f.rails)}
	} else {
		for _, ranks := range f.islands {
			var all []stretch
			for _, r := range ranks {
				lo, hi := shares(r)
				all = append(all, stretch{lo, hi})
			}
			f.shards = append(f.shards, cutShares(all, f.rails))
		}
	}
	f.cut()
	f.moved = min(f.lap*int64(f.rails*len(f.shards)), max(in.Bytes(), out.Bytes()))
	if f.crosses() && in.Memory().Backend().Name() != NCCL.Backend() {
		f.puts = &railPuts{}
	} else if f.crosses() && op != 0 && (len(f.islands) > 2 || op == Avg && !alikeIslands(f.islands)) {
		f.messages = &railMessages{}
	}
	return f
}

// cut decides how shards are cut into laps.
func (f *railForm) cut() {
	for _, part := range f.shards {
		for _, shard := range part {
			f.most = max(f.most, sizeOf(shard))
		}
	}
	lap := railLapBytes
	if parts := int64(len(f.shards)); parts > 2 {
		lap = max(lap*2/parts, 1)
	}
	f.lap, f.laps = evenLaps(f.most, max((f.most+railMostLaps-1)/railMostLaps, min(lap, f.most), 1))
}

// cutShares makes shards of the shares of an island's ranks. Where there are as many ranks as shards, each has its own.
func cutShares(shares []stretch, shards int) [][]stretch {
	if len(shares) > shards {
		return cutEvenly(shares, shards)
	}
	var all [][]stretch
	for _, s := range shares {
		all = append(all, between([]stretch{s}, 0, s.bytes()))
	}
	return all
}

// cutEvenly cuts ranges, one behind the other, into as many shards, at whole cache lines.
func cutEvenly(ranges []stretch, shards int) (all [][]stretch) {
	n := sizeOf(ranges)
	each := alignUp((n+int64(shards)-1)/int64(shards), shardAlign)
	for i := range int64(shards) {
		all = append(all, between(ranges, i*each, (i+1)*each))
	}
	return all
}

// without is what of the range is not in another.
func (s stretch) without(not stretch) (all []stretch) {
	for _, x := range []stretch{{s.lo, min(s.hi, not.lo)}, {max(s.lo, not.hi), s.hi}} {
		if x.bytes() > 0 {
			all = append(all, x)
		}
	}
	return all
}

// sizeOf is the size of ranges.
func sizeOf(ranges []stretch) (n int64) {
	for _, s := range ranges {
		n += s.bytes()
	}
	return n
}

// between is what is between two places in ranges that are one behind the other. What is together in the message is one range.
func between(ranges []stretch, lo, hi int64) (found []stretch) {
	at := int64(0)
	for _, s := range ranges {
		x := stretch{s.lo + min(max(lo-at, 0), s.bytes()), s.lo + min(max(hi-at, 0), s.bytes())}
		at += s.bytes()
		switch last := len(found) - 1; {
		case x.bytes() == 0:
		case last >= 0 && found[last].hi == x.lo:
			found[last].hi = x.hi
		default:
			found = append(found, x)
		}
	}
	return found
}

// lapOf is the ranges of a lap of the shard of a part that the ranks at a place have; none for one behind the last rail.
func (f *railForm) lapOf(part, place, lap int) []stretch {
	if place >= f.rails {
		return nil
	}
	return between(f.shards[part][place], int64(lap)*f.lap, int64(lap+1)*f.lap)
}

// workspace makes the workspace have rooms for laps, of a lap's bytes each: so many for what is this rank's, and behind these what holds the parts of the other islands: for puts a room each.
func (f *railForm) workspace(s *collective.Spec, own int) {
	f.own, f.rooms = own, own
	if f.puts != nil {
		f.rooms += len(f.islands) - 1
	} else if f.messages != nil {
		f.rooms += int((int64(len(f.islands)-1)*f.messages.most + f.lap - 1) / f.lap)
	}
	s.Workspace = int64(min(f.laps, f.slots())) * int64(f.rooms) * f.lap
}

// slots is how many laps have room of their own in the workspace.
func (f *railForm) slots() int {
	if f.twice() && f.messages.stays {
		return railSlots + 1
	}
	return railSlots
}

// roomAt is where in the workspace a room of a lap is.
func (f *railForm) roomAt(lap, room int) int64 {
	return (int64(lap%f.slots())*int64(f.rooms) + int64(room)) * f.lap
}

// each is the bytes of a lap that every rank of a rail brings, or gets, or more.
func (f *railForm) each(lap int) int64 {
	return min(f.lap, alignUp(f.most-int64(lap)*f.lap, shardAlign))
}

// number is which rank of the rail at a place the one on an island is: NCCL numbers them in the order of their ranks in the group.
func (f *railForm) number(place, island int) (n int) {
	for _, ranks := range f.islands {
		if ranks[place] < f.islands[island][place] {
			n++
		}
	}
	return n
}

// checkRails says why there can be no rails for elements of dtype that op combines; 0 is that nothing is combined.
func checkRails(m *memory.Memory, dtype tensor.DType, op Op) error {
	if have := m.Backend().Name(); have != NCCL.Backend() && !m.MovesBetweenIslands() {
		return fmt.Errorf("%s on GPUs goes between islands by NCCL, or by a backend's own puts, and this memory is of backend %s: %w", Hierarchical, have, errs.ErrUnsupported)
	}
	if op == 0 {
		return nil
	}
	if !Supported(device.CUDA, Hierarchical, dtype, op, m.Group().Size()) {
		return fmt.Errorf("%s on GPUs has no %s of %s: %w", Hierarchical, op, dtype, errs.ErrUnsupported)
	}
	return nil
}

// railsFromShard is the size of a rail's shard of an all-reduce from which on Auto takes rails in place of NCCL's own all-reduce of all ranks: two laps, so that what is on the network overlaps
// with what is inside the islands. Between two pretended hosts of two H200, over sockets of the loopback device, rails take 98 and 148 us for NCCL's 57 and 92 of 1 and 64 KiB, and 371, 855, 2870, 11115
// and 40684 for its 520, 1246, 4516, 23252 and 96543 of 1, 4, 16, 64 and 256 MiB, of which a shard is half: docs/hardware.md. No faster network was measured. There the launches of a lap, some 40 us,
// count for more: so it is not from where on rails were faster, but a size of which the network takes most of the time there too.
const railsFromShard = 16 << 20

// railsAreFaster reports whether Auto takes rails for an all-reduce that NCCL has too: for one that is large, where all islands have as many ranks, and more than one. Of tensors that had a rendezvous
// it is the same on every rank.
func railsAreFaster(in, out tensor.SymmetricTensor, op Op) bool {
	m := in.Memory()
	islands := islandRanks(m.Islands())
	return severalIslands(islands) && alikeIslands(islands) && in.Bytes() >= int64(len(islands[0]))*railsFromShard && checkRails(m, in.DType(), op) == nil &&
		reachesIsland(in, m) == nil && reachesIsland(out, m) == nil
}

// alikeIslands reports whether all have as many ranks.
func alikeIslands(islands [][]int) bool {
	return !slices.ContainsFunc(islands, func(ranks []int) bool { return len(ranks) != len(islands[0]) })
}

// byRails makes the spec that of kernels inside islands and of NCCL between them.
func (a *allReduce) byRails(s *collective.Spec) {
	f := newRails(a.in, a.out, specOut, a.op, a.maxBlocks, nil)
	width := a.in.DType().Bytes()
	f.moves = railMoves{
		sums: func(lap int, _ device.Ptr) (all []railSum) {
			for _, x := range f.lapOf(0, f.local, lap) {
				all = append(all, railSum{x, f.out.Ptr().Add(x.lo)})
			}
			return all
		},
		calls: func(lap int, _ device.Ptr) (all []memory.LibraryCall) {
			for _, x := range f.lapOf(0, f.local, lap) {
				at := f.out.Ptr().Add(x.lo)
				all = append(all, memory.LibraryCall{In: at, Out: at, Count: x.bytes() / width, DType: a.in.DType().String(), Op: a.op.String()})
			}
			return all
		},
		leaves: func(at *collective.Addresses, lap int) []ptx.Piece { return f.others(at, lap) },
	}
	switch {
	case f.puts != nil:
		f.allReducePuts(s)
	case f.messages != nil:
		f.cutForAll(func(lap int, _ device.Ptr) device.Ptr { return f.ownOut(lap) }, func(int) bool { return true }, false)
		f.workspace(s, 1)
		f.moves.sums = f.sumsAside
	}
	f.spec(s)
}

// allReducePuts is what an all-reduce over rails puts there: what its island has combined, to each of the others.
func (f *railForm) allReducePuts(s *collective.Spec) {
	f.workspace(s, 1)
	f.moves.sums = f.sumsAside
	f.puts.brings = func(lap, _ int) (room int, bytes int64) { return 0, sizeOf(f.lapOf(0, f.local, lap)) }
	f.puts.takes = func(lap int, _ device.Ptr) (dst device.Ptr, room int, bytes int64) {
		return f.ownOut(lap), 0, sizeOf(f.lapOf(0, f.local, lap))
	}
}

// ownOut is where in the output a lap of this rank's shard is, of a message that is one part; 0 if there is none.
func (f *railForm) ownOut(lap int) (at device.Ptr) {
	for _, x := range f.lapOf(0, f.local, lap) {
		at = f.out.Ptr().Add(x.lo)
	}
	return at
}

// sumsAside is what this rank combines of a lap of a message that is one part, to the first room.
func (f *railForm) sumsAside(lap int, own device.Ptr) (all []railSum) {
	for _, x := range f.lapOf(0, f.local, lap) {
		all = append(all, railSum{x, own.Add(f.roomAt(lap, 0))})
	}
	return all
}

// others is what other places of the island have of a lap in their outputs, which goes to the same place in this rank's.
func (f *railForm) others(at *collective.Addresses, lap int) (all []ptx.Piece) {
	for k := 1; k < at.WorldSize(); k++ {
		place := (at.Rank() + k) % at.WorldSize()
		for part := range f.shards {
			for _, x := range f.lapOf(part, place, lap) {
				all = append(all, x.piece(at.Tensor(f.specOut, place).Add(x.lo), f.out.Ptr().Add(x.lo)))
			}
		}
	}
	return all
}

// piece is the range of the message that the kernel loads.
func (x stretch) piece(from, to device.Ptr) ptx.Piece {
	return ptx.Piece{From: uint64(from), To: uint64(to), Bytes: uint64(x.bytes())}
}

// spec makes the spec that of the collective.
func (f *railForm) spec(s *collective.Spec) {
	kernel := ptx.Pull(false) // beside copies and NCCL's work nothing is gained by beginning early
	pull, err := ptx.Image(kernel.File)
	var sum *railKernel
	if err == nil && f.op != 0 {
		sum, err = f.newKernel()
	}
	if err != nil {
		s.Failure = err
		return
	}
	s.Parameters += fmt.Sprintf(", islands %v, laps of %d bytes of shards of %d", f.islands, f.lap, f.most)
	s.Program = &collective.Program{
		Among: f.islands[f.island],
		Lane:  f.lane(),
		Build: func(ctx context.Context, b *collective.Builder) error { return f.build(ctx, b, sum) },
	}
	if f.puts != nil {
		f.signals(s.Program)
	}
	pulls := func(pieces func(at *collective.Addresses) []ptx.Piece) *collective.Kernel {
		return &collective.Kernel{
			Image: pull, Function: kernel.Name, Overlap: kernel.Overlap,
			Fit: func(multiprocessors int) (blocks, threads int) {
				g := pullGeometry(f.moved, f.rails, multiprocessors).atMost(f.maxBlocks)
				return g.blocks, g.threads
			},
			Params: func(at *collective.Addresses) []any { return []any{at.Comm(), pulled(at, pieces(at))} },
		}
	}
	for lap := range f.laps {
		enter := pulls(func(at *collective.Addresses) []ptx.Piece { return f.moves.loads(at, lap) })
		if sum != nil {
			enter = sum.entering(lap)
		}
		s.Program.Kernels = append(s.Program.Kernels, enter, pulls(func(at *collective.Addresses) []ptx.Piece { return f.moves.leaves(at, lap) }))
	}
}

// The kernels of a lap, of those of a plan.
func entersLap(lap int) int { return 2 * lap }
func leavesLap(lap int) int { return 2*lap + 1 }

// lane reports whether rails go on a stream beside the kernels. NCCL's do, which nothing else bounds: all ranks of an island may wait for those of another one, and none of them for
// another in a kernel.
func (f *railForm) lane() bool {
	return f.crosses() && (f.laps > 1 || f.goesStraight() || f.puts == nil)
}

// parts says by rank which rail it is on, by the lowest rank there. Ranks behind the last rail are alone.
func (f *railForm) parts() []int {
	if f.exchange != nil {
		return f.exchangeParts()
	}
	parts := make([]int, len(slices.Concat(f.islands...)))
	for place := range f.rails {
		var rail []int
		for _, ranks := range f.islands {
			rail = append(rail, ranks[place])
		}
		for _, r := range rail {
			parts[r] = slices.Min(rail)
		}
	}
	for _, ranks := range f.islands {
		for _, r := range ranks[f.rails:] {
			parts[r] = r
		}
	}
	return parts
}

// build adds the steps of a run. A lap is on its rail while the next one enters and the one before leaves; what a lap has in the workspace is overwritten by
// that of two laps later, which enters when everybody on the island has left with it.
func (f *railForm) build(ctx context.Context, b *collective.Builder, sum *railKernel) error {
	enter := func(lap int) { f.entering(b, lap, sum) }
	if f.puts != nil {
		return f.addPuts(b, sum)
	}
	if !f.crosses() {
		for lap := range f.laps {
			enter(lap)
			b.Waiting(leavesLap(lap))
		}
		return nil
	}
	own := b.Workspace(b.Rank())
	calls, combine := f.moves.calls, func(int) {}
	if f.messages != nil {
		reduce, err := f.newReduce(b)
		if err != nil {
			return err
		}
		calls, combine = f.messaged, func(lap int) { f.combineParts(b, reduce, lap) }
	}
	behind := 0 // by so many launches a lap leaves later than its parts have come
	if f.twice() {
		behind = 1 // with what was combined of it
	}
	launches := f.laps + behind
	// A word for each launch: one may come while another is looked at. It is not 0 before its rail has brought it, so that of a rail which was cut off it never is.
	unheard := bytes.Repeat([]byte{1}, 4*launches)
	heard, again := b.Upload(unheard), b.Upload(unheard)
	rails := make([]libraryLaunch, launches)
	parts := f.parts()
	for lap := range rails {
		// A word goes with it: the largest of the rail's.
		calls := append(calls(lap, own), memory.LibraryCall{
			In: b.Dead(), Out: heard.Add(4 * int64(lap)), Count: 1, DType: tensor.Uint32.String(), Op: Max.String(),
		})
		rail, err := f.in.Memory().PrepareCollective(ctx, memory.Place{}, memory.Place{}, 0, 0, memory.LibraryCollective{Name: NCCL.String(), Parts: parts, Calls: calls, Beside: f.lane()})
		if err != nil {
			return err
		}
		rails[lap] = libraryLaunch{rail}
	}
	watch := func(lap int) {
		if f.lane() {
			b.Launch(watchLaunch{rails[lap]})
		}
	}
	send := func(lap int) {
		watch(lap)
		b.Fork()
		b.LaunchBeside(rails[lap])
	}
	if f.goesStraight() {
		send(0) // it takes nothing of what enters
		enter(0)
	} else {
		enter(0)
		send(0)
	}
	if f.laps > 1 {
		enter(1)
	}
	for lap := range launches {
		b.JoinInTime(f.late)
		watch(lap)
		if lap+1 < launches && !f.twice() {
			send(lap + 1)
		}
		words := []device.Ptr{heard.Add(4 * int64(lap))}
		if rail, ok := rails[lap].reduce.(interface{ Abandoned() device.Ptr }); ok {
			words = append(words, rail.Abandoned()) // what was cut off here must not be loaded by others, who may not know yet
		}
		for _, word := range words {
			b.StopIf(word, f.told)
		}
		combine(lap)
		if lap+1 < launches && f.twice() {
			send(lap + 1) // with what was combined of this one
		}
		if leaves := lap - behind; leaves >= 0 {
			b.Waiting(leavesLap(leaves))
		}
		if lap+2 < f.laps {
			enter(lap + 2)
		}
	}
	return byCopies(b, []stretched{{in: again, out: heard, bytes: int64(len(unheard))}}, tensor.Uint32, f.maxBlocks)
}

// entering adds what makes this rank's part of a lap.
func (f *railForm) entering(b *collective.Builder, lap int, sum *railKernel) {
	b.Waiting(entersLap(lap))
	if sum != nil {
		sum.rest(b, lap, b.Workspace(b.Rank()))
	}
}

// told is the error of a run that was given up because of what a rail brought.
func (f *railForm) told() error {
	if err := f.in.Memory().Group().Err(); err != nil {
		return err
	}
	return fmt.Errorf("%s of another island has given up, since a rank of that island did not come in %v, or NCCL was ended: %w", f.onRail(),
		f.in.Memory().KernelTimeout(), os.ErrDeadlineExceeded)
}

// late is the error of a run that was given up because nothing came of a rail.
func (f *railForm) late() error {
	if err := f.in.Memory().Group().Err(); err != nil {
		return err
	}
	return fmt.Errorf("%s of another island, to which NCCL takes this rank's part, did not come in %v: %w", f.onRail(), f.in.Memory().KernelTimeout(), os.ErrDeadlineExceeded)
}

// onRail names the ranks of other islands that are on the rail of this one.
func (f *railForm) onRail() string {
	var rail []int
	parts, rank := f.parts(), f.islands[f.island][f.local]
	for r, part := range parts {
		if part == parts[rank] && !slices.Contains(f.islands[f.island], r) {
			rail = append(rail, r)
		}
	}
	if len(rail) == 0 { // it is behind the last one
		return "a rank"
	}
	return "rank " + errs.FoldRanks(rail, " or ")
}

// railKernel is the kernel that combines inputs of an island.
type railKernel struct {
	*railForm
	ptx.Kernel
	image []byte
	size  int // of islands, or one for which the kernel is one for every number of ranks, since all ranks have the same
}

func (f *railForm) newKernel() (*railKernel, error) {
	k := &railKernel{railForm: f, size: len(f.islands[0])}
	if !alikeIslands(f.islands) {
		k.size = ptx.Inline + 1
	}
	var err error
	k.Kernel, k.image, err = findKernel(ptx.AllReduce, ptx.OneShotPull, f.in.Device(), hopper(f.in.Memory()), f.in.DType(), f.op, k.size)
	return k, err
}

// launch is the kernel for what params gives.
func (k *railKernel) launch(params func(at *collective.Addresses) []byte) *collective.Kernel {
	return &collective.Kernel{
		Image: k.image, Function: k.Name, Overlap: k.Overlap,
		Fit: func(multiprocessors int) (blocks, threads int) {
			g := geometry(OneShotPull, k.lap, 0, k.size, multiprocessors).atMost(k.maxBlocks)
			return g.blocks, g.threads
		},
		Params: func(at *collective.Addresses) []any { return []any{params(at)} },
	}
}

// entering is the kernel that waits for the island, and combines the first range of a lap, if there is one.
func (k *railKernel) entering(lap int) *collective.Kernel {
	return k.launch(func(at *collective.Addresses) []byte {
		c := at.Comm()
		p := ptx.Params{Workspace: c.Workspace, Fault: c.Fault, Dead: c.Dead, Stop: c.Stop, Timeout: c.Timeout, Op: uint32(k.op)}
		if at.WorldSize() == 1 {
			p.Flags = ptx.NoBarrier
		}
		var sum railSum
		if all := k.moves.sums(lap, at.Workspace(at.Rank())); len(all) > 0 {
			sum = all[0]
		}
		return k.params(at, p, sum, func(place int) uint64 { return uint64(at.Records(place)) })
	})
}

// rest adds the kernels that combine the other ranges of a lap. They wait for nobody: the inputs are there, and stay until everybody has left.
func (k *railKernel) rest(b *collective.Builder, lap int, own device.Ptr) {
	all := k.moves.sums(lap, own)
	for i := 1; i < len(all); i++ {
		b.Kernel(k.launch(func(at *collective.Addresses) []byte {
			return k.params(at, ptx.Params{Dead: uint64(at.Dead()), Op: uint32(k.op), Flags: ptx.NoBarrier}, all[i], func(int) uint64 { return 0 })
		}))
	}
}

// params fills in the ranks of the island and where their inputs are.
func (k *railKernel) params(at *collective.Addresses, p ptx.Params, sum railSum, records func(place int) uint64) []byte {
	ranks := k.islands[k.island]
	size := len(ranks)
	p.Rank, p.World, p.Count = uint32(k.local), uint32(size), uint64(sum.bytes()/k.in.DType().Bytes())
	in := func(place int) uint64 {
		t, err := k.in.Remote(ranks[place])
		if err != nil {
			return 0 // which the Spec's check has refused
		}
		return uint64(t.Ptr().Add(sum.lo))
	}
	if size <= ptx.Inline {
		for place := range size {
			p.In[place] = in(place)
		}
		p.Out[k.local] = uint64(sum.to)
		return p.Bytes()
	}
	// The rows of the table are inputs, outputs, of which this rank's counts, and workspaces.
	words := make([]byte, 3*size*8)
	for place := range size {
		binary.LittleEndian.PutUint64(words[8*place:], in(place))
		binary.LittleEndian.PutUint64(words[8*(2*size+place):], records(place))
	}
	binary.LittleEndian.PutUint64(words[8*(size+k.local):], uint64(sum.to))
	p.Table = uint64(at.Upload(words))
	return p.Bytes()
}
