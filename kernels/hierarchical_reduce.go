package kernels

import (
	"context"
	"fmt"
	"slices"

	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/tensor"
)

// A reduce-scatter, and a reduction to one rank, in the form Hierarchical. Each part of the result is one rank's: its share, or a shard, of which the ranks of root's island have one
// each. On every other island one rank sums it up from the inputs there, and puts the sum to that rank, who reduces what it has got together with the sum of its own island. The order is
// that of an all-reduce in this form, and so are the bits. Parts go in laps: while one is on the network, the next is summed up.

// islandReduction is how it is cut, alike on every rank. The signals are those of an all-reduce whose laps are exchanged whole. The workspace is
//
//	partials  [slots][targets+1] of span bytes each: what this rank's island has summed up of a lap of its own part, and of those of the ranks that it carries for
//	slots     [slots][islands-1] of span bytes each: what others have summed up of its own part. Of the islands, the next one comes first
type islandReduction struct {
	*reduction
	islandPlace
	part    func(rank int) (lo, hi int64) // what rank reduces, in bytes of the input
	lap     int64                         // bytes of a lap
	laps    int                           // of the longest part
	wide    int64                         // how many times as long partials are
	targets int                           // the most ranks that any rank carries for
}

// hierarchicalLeastLap is the least that laps are cut to where a rank carries for many others, in bytes.
const hierarchicalLeastLap = 128 << 10

// byIslands makes the spec that of the form Hierarchical.
func (r *reduction) byIslands(s *collective.Spec) {
	islands := islandRanks(r.in.Memory().Islands())
	f := &islandReduction{reduction: r, islandPlace: newIslandPlace(r.in.Rank(), islands, !r.scatter), wide: 1}
	if widens(r.in.DType(), r.op) {
		f.wide = 2
	}
	for _, ranks := range islands {
		for _, rank := range ranks {
			f.targets = max(f.targets, len(newIslandPlace(rank, islands, !r.scatter).carriesFor()))
		}
	}
	n, size, width := r.in.NumElements(), r.in.WorldSize(), r.in.DType().Bytes()
	longest := shareElements(n, size) * width
	f.part = func(rank int) (lo, hi int64) {
		lo, hi = shareOf(n, size, rank)
		return lo * width, hi * width
	}
	if !r.scatter {
		longest = alignUp(shareElements(n*width, f.rails), shardAlign)
		first := islands[newIslandPlace(r.root, islands, true).island]
		f.part = func(rank int) (lo, hi int64) {
			place := slices.Index(first, rank)
			if place < 0 || place >= f.rails {
				return 0, 0
			}
			lo = min(int64(place)*longest, n*width)
			return lo, min(lo+longest, n*width)
		}
	}
	f.cut(longest, longLap(longest, max(hierarchicalLapBytes/int64(max(f.targets, 1)), min(hierarchicalLeastLap, hierarchicalLapBytes))))
	f.spec(s)
}

// cut decides how parts of so many bytes at most are cut.
func (f *islandReduction) cut(longest, lap int64) { f.lap, f.laps = evenLaps(longest, lap) }

func (f *islandReduction) spec(s *collective.Spec) {
	s.Parameters += fmt.Sprintf(", islands %v, laps of %d bytes", f.islands, f.lap)
	s.Program = &collective.Program{
		Signals: hierarchicalResults + f.slots(), Granted: f.slots(), // there is room for the first laps
		Lane:  f.crosses() && f.laps > 1,
		Build: func(_ context.Context, b *collective.Builder) error { f.addTo(b); return nil },
	}
	if f.crosses() {
		s.Workspace = int64(f.slots()) * int64(f.targets+len(f.islands)) * f.span()
	}
	for signal := range s.Program.Signals {
		s.Program.Peers = append(s.Program.Peers, f.form().peersOf(signal))
	}
}

// form is that of an all-reduce whose laps are exchanged whole, with the same steps.
func (f *islandReduction) form() hierarchicalForm {
	return hierarchicalForm{islandPlace: f.islandPlace, laps: f.laps}
}

func (f *islandReduction) slots() int  { return min(f.laps, transferSlots) }
func (f *islandReduction) span() int64 { return f.lap * f.wide }

// partialAt is where in the workspace the sum of a lap is, of what this rank carries as the index-th, or of its own part, the 0th.
func (f *islandReduction) partialAt(index, lap int) int64 {
	return int64(lap%f.slots()*(f.targets+1)+index) * f.span()
}

// slot is where in the workspace of a rank on the island to a lap comes that the island from has summed up.
func (f *islandReduction) slot(to, from, lap int) int64 {
	islands := len(f.islands)
	index := f.slots()*(f.targets+1) + lap%f.slots()*(islands-1) + (from-to+islands)%islands - 1
	return int64(index) * f.span()
}

// piece is a lap of rank's part.
func (f *islandReduction) piece(rank, lap int) (lo, hi int64) {
	first, end := f.part(rank)
	lo = min(first+int64(lap)*f.lap, end)
	return lo, min(lo+f.lap, end)
}

// islandReducer makes the steps those of a plan.
type islandReducer struct {
	*islandReduction
	*collective.Builder
	inner, outer reducer // of an island's inputs, and of the islands' sums
}

func (b islandReducer) signal(signal int) { b.Signal(signal) }
func (b islandReducer) wait(signal int)   { b.Wait(signal) }
func (b islandReducer) fork()             { b.Fork() }
func (b islandReducer) join()             { b.Join() }

// addTo adds the steps of a run, which are those of an all-reduce whose laps are exchanged whole.
func (f *islandReduction) addTo(b *collective.Builder) {
	s := islandReducer{islandReduction: f, Builder: b}
	s.inner, s.outer = islandReducers(f.in.DType(), f.op, f.in.WorldSize(), f.crosses())
	s.fork()
	for range f.greetings() {
		s.signal(hierarchicalReady)
		s.wait(hierarchicalReady)
	}
	s.join()
	switch {
	case !f.crosses():
		for l := range f.laps {
			s.reduceAlone(l)
		}
	case f.owns():
		f.form().buildDirect(s)
	default:
		f.form().tellLaps(s)
	}
	f.form().awaitLaps(s)
	s.fork()
	s.signal(hierarchicalDone)
	s.join()
	s.Finish(hierarchicalDone)
}

// own is n bytes of this rank's workspace.
func (b islandReducer) own(at, n int64) []byte { return b.Bytes(b.Workspace(b.Rank()).Add(at), n) }

// inputs is every input of the island between two bytes, by rank.
func (b islandReducer) inputs(lo, hi int64) [][]byte {
	var ins [][]byte
	for _, r := range b.islands[b.island] {
		ins = append(ins, b.Bytes(b.Tensor(specIn, r).Add(lo), hi-lo))
	}
	return ins
}

// output is where the result between two bytes of this rank's part goes.
func (b islandReducer) output(lo, hi int64) []byte {
	var at device.Ptr
	if b.scatter {
		first, _ := b.part(b.Rank())
		at = b.out.Ptr().Add(lo - first)
	} else {
		at = b.Tensor(b.specOut(), b.root).Add(lo)
	}
	return b.Bytes(at, hi-lo)
}

// reduce adds a step that reduces n elements.
func (b islandReducer) reduce(by reducer, dst []byte, srcs [][]byte, n int64) {
	b.Host(func() error {
		by(dst, srcs, 0, n)
		return nil
	})
}

func (b islandReducer) reduceAlone(lap int) {
	if lo, hi := b.piece(b.Rank(), lap); lo < hi {
		b.reduce(b.inner, b.output(lo, hi), b.inputs(lo, hi), (hi-lo)/b.in.DType().Bytes())
	}
}

func (b islandReducer) sum(lap int) {
	for i, t := range append([]islandTarget{{b.Rank(), b.island}}, b.carriesFor()...) {
		if lo, hi := b.piece(t.rank, lap); lo < hi {
			b.reduce(b.inner, b.own(b.partialAt(i, lap), (hi-lo)*b.wide), b.inputs(lo, hi), (hi-lo)/b.in.DType().Bytes())
		}
	}
}

func (b islandReducer) send(lap int) {
	var puts []collective.Put
	for i, t := range b.carriesFor() {
		if lo, hi := b.piece(t.rank, lap); lo < hi {
			puts = append(puts, collective.Put{
				Peer: t.rank, Tensor: collective.ToWorkspace, Offset: b.slot(t.island, b.island, lap),
				Local: b.Workspace(b.Rank()).Add(b.partialAt(i+1, lap)), Bytes: (hi - lo) * b.wide,
			})
		}
	}
	b.Send(hierarchicalData, puts...)
}

func (b islandReducer) combine(lap int) {
	lo, hi := b.piece(b.Rank(), lap)
	if lo == hi {
		return
	}
	var srcs [][]byte // in the order of the islands
	for i := range b.islands {
		at := b.partialAt(0, lap)
		if i != b.island {
			at = b.slot(b.island, i, lap)
		}
		srcs = append(srcs, b.own(at, (hi-lo)*b.wide))
	}
	b.reduce(b.outer, b.output(lo, hi), srcs, (hi-lo)/b.in.DType().Bytes())
}

// widens reports whether what an island has summed up is kept in float32: the sum of values of f16 may be too large for f16 where their average is not.
func widens(dtype tensor.DType, op Op) bool { return dtype == tensor.Float16 && op == Avg }

// islandReducers makes the reducers of an island's inputs, and, where there are several islands, of their sums.
func islandReducers(dtype tensor.DType, op Op, size int, crosses bool) (inner, outer reducer) {
	switch {
	case !crosses:
		return newReducer(dtype, op, size), nil
	case widens(dtype, op):
		return sum16(f16To32), average16(size, f16From32)
	case op == Avg:
		return newReducer(dtype, Sum, size), newReducer(dtype, Avg, size)
	}
	return newReducer(dtype, op, size), newReducer(dtype, op, size)
}
