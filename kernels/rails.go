package kernels

import (
	"context"
	"encoding/binary"
	"fmt"
	"os"
	"slices"

	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/kernels/ptx"
	"github.com/symmem/symmem/memory"
)

// On GPUs, Hierarchical is kernels inside islands and NCCL's all-reduce between them. The message is cut into as many shards as the smallest island has ranks,
// and the n-th ranks of all islands are a rail, which has the n-th shard. A run is four launches on the plan's stream:
//
//	reduce  each rank of a rail loads its shard of the inputs of its island, and stores their combination to its own output
//	rail    NCCL all-reduces the shard between the ranks of the rail, in place, and with it the word that says whether one has given up
//	told    a plan gives up whose rail brings such a word: what it brings with it was never finished
//	gather  each rank loads the other shards from the outputs of its island
//
// Ranks behind the last rail only have inputs and outputs. Both kernels begin and end with a barrier of the island, so that nobody's input is written, and no
// output read, too early; also in place: a shard is loaded by the rank alone that stores it.
//
// The order is that of the sums: those of an island in the order of its ranks, rounded to the dtype, and then those of the islands. Of two islands any order
// gives the same bits; of more it is NCCL's, which promises none, but all ranks of a rail get the same bits, and so have all ranks. An average is that
// of the islands' averages, which have to have as many ranks for it.

// The kernels of a plan of rails.
const (
	railReduce = iota
	railGather
)

// railForm is how the message is cut, alike on every rank.
type railForm struct {
	*allReduce
	islandPlace
	shard int64 // bytes; the last ones may be shorter, or empty
}

// checkRails says why there can be no rails.
func (a *allReduce) checkRails() error {
	if have := a.in.Memory().Backend().Name(); have != NCCL.Backend() {
		return fmt.Errorf("%s on GPUs goes between islands by NCCL, and this memory is of backend %s: %w", a.algorithm, have, errs.ErrUnsupported)
	}
	islands := islandRanks(a.in.Memory().Islands())
	if a.op == Avg && !alikeIslands(islands) {
		return fmt.Errorf("%s has averages of islands with as many ranks each only, and these are %v: take %s: %w", a.algorithm, islands, NCCL, errs.ErrUnsupported)
	}
	return nil
}

// alikeIslands reports whether all have as many ranks.
func alikeIslands(islands [][]int) bool {
	return !slices.ContainsFunc(islands, func(ranks []int) bool { return len(ranks) != len(islands[0]) })
}

// byRails makes the spec that of kernels inside islands and of NCCL between them.
func (a *allReduce) byRails(s *collective.Spec) {
	f := &railForm{allReduce: a, islandPlace: newIslandPlace(a.in.Rank(), islandRanks(a.in.Memory().Islands()), true)}
	f.shard = alignUp((a.in.Bytes()+int64(f.rails)-1)/int64(f.rails), shardAlign)
	size := len(f.islands[0])
	if !alikeIslands(f.islands) {
		size = ptx.Inline + 1 // for which the kernel is one for every number of ranks, since all ranks have the same
	}
	reduce, image, err := findKernel(ptx.AllReduce, ptx.OneShotPull, a.in.Device(), a.in.DType(), a.op, size)
	var pull, told []byte
	if err == nil {
		pull, err = ptx.Image(ptx.Pull.File)
	}
	if err == nil {
		told, err = ptx.Image(ptx.Told.File)
	}
	if err != nil {
		s.Failure = err
		return
	}
	s.Parameters += fmt.Sprintf(", islands %v, shards of %d bytes", f.islands, f.shard)
	s.Program = &collective.Program{
		Among: f.islands[f.island],
		Kernels: []*collective.Kernel{
			railReduce: {
				Image: image, Function: reduce.Name, Overlap: reduce.Overlap,
				Fit: func(multiprocessors int) (blocks, threads int) {
					g := geometry(OneShotPull, f.shard, 0, size, multiprocessors).atMost(a.maxBlocks)
					return g.blocks, g.threads
				},
				Params: func(at *collective.Addresses) []any { return []any{f.reduceParams(at)} },
			},
			railGather: {
				Image: pull, Function: ptx.Pull.Name, Overlap: ptx.Pull.Overlap,
				Fit: func(multiprocessors int) (blocks, threads int) {
					g := pullGeometry(a.in.Bytes(), f.rails, multiprocessors).atMost(a.maxBlocks)
					return g.blocks, g.threads
				},
				Params: func(at *collective.Addresses) []any { return []any{at.Comm(), f.pieces(at)} },
			},
		},
		Build: func(ctx context.Context, b *collective.Builder) error { return f.build(ctx, b, told) },
	}
}

// piece is the range of bytes of the shard that the rank at a place of its island has; nothing for one behind the last rail.
func (f *railForm) piece(place int) (lo, hi int64) {
	if place >= f.rails {
		return 0, 0
	}
	n := f.in.Bytes()
	lo = min(int64(place)*f.shard, n)
	return lo, min(lo+f.shard, n)
}

// parts says by rank which rail it is on, by the lowest rank there. Ranks behind the last rail are alone.
func (f *railForm) parts() []int {
	parts := make([]int, f.in.WorldSize())
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

// build adds the steps of a run.
func (f *railForm) build(ctx context.Context, b *collective.Builder, told []byte) error {
	if !f.crosses() {
		b.Waiting(railReduce)
		b.Waiting(railGather)
		return nil
	}
	var at memory.Place
	var err error
	if at.Window, at.Offset, err = f.out.Window(); err != nil {
		return err
	}
	lo, hi := f.piece(f.local)
	at.Offset += lo
	heard := b.Upload(make([]byte, 4))
	rail, err := f.in.Memory().PrepareCollective(ctx, at, at, hi-lo, hi-lo, memory.LibraryCollective{
		Name: NCCL.String(), Count: (hi - lo) / f.in.DType().Bytes(), DType: f.in.DType().String(), Op: f.op.String(), Parts: f.parts(), Told: b.Dead(), Heard: heard,
	})
	if err != nil {
		return err
	}
	b.Waiting(railReduce)
	b.Launch(libraryLaunch{rail})
	b.Kernel(&collective.Kernel{
		Image: told, Function: ptx.Told.Name, Blocks: 1, Threads: 32,
		Params: func(at *collective.Addresses) []any { return []any{at.Comm(), heard} },
		Fault:  f.told,
	})
	b.Waiting(railGather)
	return nil
}

// told is the error of a run that was given up because of what a rail brought.
func (f *railForm) told(fault ptx.Fault) error {
	if fault.Kernel != ptx.FaultTeller || fault.Why != ptx.FaultTold {
		return nil
	}
	if err := f.in.Memory().Group().Err(); err != nil {
		return err
	}
	var rail []int
	if f.owns() {
		for _, i := range f.otherIslands() {
			rail = append(rail, f.islands[i][f.local])
		}
	}
	return fmt.Errorf("rank %s of another island has given up, since a rank of that island did not come in %v: %w", errs.FoldRanks(rail, " or "),
		f.in.Memory().KernelTimeout(), os.ErrDeadlineExceeded)
}

// reduceParams is the parameter of the kernel that reduces this rank's shard of the inputs of the island.
func (f *railForm) reduceParams(at *collective.Addresses) []byte {
	c := at.Comm()
	rank, size := at.Rank(), at.WorldSize()
	lo, hi := f.piece(f.local)
	p := ptx.Params{
		Workspace: c.Workspace, Count: uint64((hi - lo) / f.in.DType().Bytes()), Fault: c.Fault, Dead: c.Dead, Stop: c.Stop, Timeout: c.Timeout,
		Rank: c.Rank, World: c.World, Op: uint32(f.op),
	}
	if size == 1 {
		p.Flags = ptx.NoBarrier
	}
	out := uint64(f.out.Ptr().Add(lo))
	if size <= ptx.Inline {
		for r := range size {
			p.In[r] = uint64(at.Tensor(specIn, r).Add(lo))
		}
		p.Out[rank] = out
		return p.Bytes()
	}
	// The rows of the table are inputs, outputs, of which this rank's counts, and workspaces.
	words := make([]byte, 3*size*8)
	for r := range size {
		binary.LittleEndian.PutUint64(words[8*r:], uint64(at.Tensor(specIn, r).Add(lo)))
		binary.LittleEndian.PutUint64(words[8*(2*size+r):], uint64(at.Records(r)))
	}
	binary.LittleEndian.PutUint64(words[8*(size+rank):], out)
	p.Table = uint64(at.Upload(words))
	return p.Bytes()
}

// pieces is what this rank loads of the others' shards.
func (f *railForm) pieces(at *collective.Addresses) ptx.Pieces {
	var all []ptx.Piece
	size := at.WorldSize()
	for k := 1; k < size; k++ {
		place := (at.Rank() + k) % size
		lo, hi := f.piece(place)
		if lo < hi {
			all = append(all, ptx.Piece{From: uint64(at.Tensor(specOut, place).Add(lo)), To: uint64(f.out.Ptr().Add(lo)), Bytes: uint64(hi - lo)})
		}
	}
	return pulled(at, all)
}
