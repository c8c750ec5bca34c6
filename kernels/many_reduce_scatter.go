package kernels

import (
	"context"
	"encoding/binary"
	"fmt"

	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/kernels/ptx"
	"github.com/symmem/symmem/kernels/tuning"
)

// NewReduceScatterMany prepares reduce-scatters of many tensors at once: after a run, this rank's Out of each pair has its share of the combination by op of all ranks' In, in the order of the ranks: the bits are those
// that a plan of that pair alone gives in any form with [Algorithm.RankOrder]. A run is one launch and one exchange: of many small tensors it takes little more than of one. The gradients of a model whose
// parameters are in shards are such a list.
//
// Of each pair In has any number n of elements, 0 too, and Out c = ceil(n / world size); rank r's Out has elements r*c to min((r+1)*c, n) of the combination, and what the last ranks' has more is not touched. Out may also be just
// this rank's share of In, a Sub of it: in place, on all ranks, and the rest of In is not touched. Out is to be given. All tensors have one dtype, since one kernel combines them. They lie at any place. Inputs may
// overlap each other. An output overlaps nothing else of the list, but may be its own input's share; nothing overlaps an input that has its output in itself. There are 1 to [MaxPairs] pairs.
//
// The forms are, of [Options.Algorithm]: OneShot, which on CUDA is OneShotPush (OneShotLL for dtypes other than f32, f16 and bf16), lines that are pushed without a barrier, or OneShotPull, loads between two barriers; and Transfers, which gathers
// the list in the workspace, sends each rank its shares, and scatters what they make. Auto chooses by the size of all inputs together, as [NewReduceScatter] does for one of that size.
//
// Collective: all ranks come with the same list, op and options. Where lists differ every rank gets an ErrMismatch with the number of the first
// pair that does and everybody's value of it. The tensors must have had their rendezvous. It blocks until all ranks have come. Close the plan.
//
// Its errors are those of [collective.New], ErrInvalid for a list that is empty or too long, a nil tensor, numbers of elements that do not fit, dtypes that differ, tensors that overlap in another way, an
// operation or option that does not exist, and ErrUnsupported for a form that a list has not on the device. An empty list, or one without any
// tensor, is an error of this rank alone: it does not say with whom.
func NewReduceScatterMany(ctx context.Context, pairs []Pair, op Op, opts *Options) (*Plan, error) {
	return newMany(&manyKind{call: "NewReduceScatterMany", title: "reduce-scatter", table: tuning.ReduceScatter, list: "pairs", combines: true, sharesIn: true}, pairs, op, 0, opts).make(ctx)
}

// manyScatter is a reduce-scatter of a list.
type manyScatter struct{ *many }

// share is where in a part's input a rank's share is, in bytes.
func (m *manyScatter) share(v part, rank int) (at, bytes int64) {
	lo, hi := shareOf(v.In.NumElements(), m.memory.Group().Size(), rank)
	return lo * m.dtype.Bytes(), (hi - lo) * m.dtype.Bytes()
}

// gets says of each rank whether it has any share.
func (m *manyScatter) gets() []bool {
	has := make([]bool, m.memory.Group().Size())
	for r := range has {
		for _, v := range m.parts {
			_, n := m.share(v, r)
			has[r] = has[r] || n > 0
		}
	}
	return has
}

func (m *manyScatter) spec(s *collective.Spec, kind device.Kind) {
	switch {
	case m.algorithm == Transfers:
		m.byTransfers(s)
	case m.algorithm == OneShotLL, m.algorithm == OneShotPush:
		m.byLines(s)
	case kind == device.CUDA:
		m.byLoads(s)
	default:
		m.onHost(s)
	}
}

// byLines makes the spec that of the kernel that pushes shares in lines.
func (m *manyScatter) byLines(s *collective.Spec) {
	s.Program = nil
	size, rank := m.memory.Group().Size(), m.memory.Group().Rank()
	kernel, ok := ptx.ManyScatter(m.dtype.String(), hopper(m.memory))
	image, ok := m.image(s, kernel, ok)
	if !ok {
		return
	}
	lists := make([][]stretched, size)
	for _, v := range m.parts {
		for r := range lists {
			at, n := m.share(v, r)
			lists[r] = append(lists[r], stretched{in: v.In.Ptr().Add(at), out: v.Out.Ptr(), bytes: n})
		}
	}
	gets := m.gets()
	m.pushed(s, kernel, image, lists, m.dtype.Bytes(), ptx.ManyLine(m.dtype.String()), func(r int) (awaits, tells bool) { return gets[r] && !gets[rank], gets[rank] && !gets[r] }, false)
}

// byLoads makes the spec that of the kernel that loads this rank's shares of all inputs between two barriers. In place is safe: nobody else reads or writes the share of the input that this rank works on.
func (m *manyScatter) byLoads(s *collective.Spec) {
	s.Program = nil
	size := m.memory.Group().Size()
	kernel, ok := ptx.ManyPull(m.dtype.String())
	image, ok := m.image(s, kernel, ok)
	if !ok {
		return
	}
	// Grids are alike, and so as large as who has most needs: the first rank.
	shares := func(rank int) (all []stretched) {
		for row, v := range m.parts {
			if at, n := m.share(v, rank); n > 0 {
				all = append(all, stretched{in: v.In.Ptr().Add(at), out: v.Out.Ptr(), bytes: n, row: row})
			}
		}
		return all
	}
	most, _, longest := cut(shares(0), m.dtype, 16)
	s.CUDA = &collective.Kernel{
		Image: image, Function: kernel.Name, Overlap: kernel.Overlap,
		Fit: func(multiprocessors int) (int, int) {
			g := manyGeometry(len(most), longest, multiprocessors).atMost(m.maxBlocks)
			return g.blocks, g.threads
		},
		Params: func(at *collective.Addresses) []any {
			p := m.params(at)
			stretches, _, _ := cut(shares(at.Rank()), m.dtype, 16)
			for i := range stretches {
				stretches[i].OutRow = ptx.OwnOnly
			}
			rows := make([]byte, 0, 8*size*len(m.parts))
			for _, v := range m.parts {
				begin, _ := m.share(v, at.Rank())
				for r := range size {
					rows = binary.LittleEndian.AppendUint64(rows, uint64(at.Tensor(v.in, r).Add(begin)))
				}
			}
			list := upload(at, stretches)
			list.Table = uint64(at.Upload(rows))
			return []any{p.Bytes(), list}
		},
	}
}

// onHost makes the spec that of a kernel on the host device: between two meetings each rank combines its shares of all inputs.
func (m *manyScatter) onHost(s *collective.Spec) {
	s.Program = nil
	s.Host = func(at *collective.Addresses) (collective.HostKernel, error) {
		combine := newReducer(m.dtype, m.op, at.WorldSize())
		if combine == nil {
			return nil, errs.Invalid(m.call, "dtype", m.dtype, "a dtype that has kernels")
		}
		rank, size := at.Rank(), at.WorldSize()
		gets := m.gets()
		var peers []int // that this rank loads from, or that load from it: see manyMoves.onHost
		for k := 1; k < size; k++ {
			if r := (rank + k) % size; gets[rank] || gets[r] {
				peers = append(peers, r)
			}
		}
		type share struct {
			out      []byte
			ins      [][]byte
			elements int64
		}
		var shares []share
		for _, v := range m.parts {
			lo, n := m.share(v, rank)
			if n == 0 {
				continue
			}
			x := share{out: at.Bytes(v.Out.Ptr(), n), elements: n / m.dtype.Bytes()}
			for r := range size {
				x.ins = append(x.ins, at.Bytes(at.Tensor(v.in, r).Add(lo), n))
			}
			shares = append(shares, x)
		}
		return func(run *collective.HostRun) error {
			if err := meet(run, flagStart, peers, peers); err != nil {
				return err
			}
			for _, x := range shares {
				combine(x.out, x.ins, 0, x.elements)
			}
			return meet(run, flagEnd, peers, peers)
		}, nil
	}
}

// byTransfers makes the spec that of a program. The workspace is two rows of a block for each rank: what this rank has for each, its shares of all inputs one behind the other, and what the others have sent it, of which this rank's own is not
// used. Each block is put to the rank that is to have it, which combines what has come with its own block, in place, and scatters that to the outputs. In a block shares lie as their
// places in the input do modulo 16, on GPUs, which the ranks have compared (placeOf), and all of one tensor begin in the same 16 bytes; what is between them is combined too, and looked at by nobody.
func (m *manyScatter) byTransfers(s *collective.Spec) {
	rank, size := m.memory.Group().Rank(), m.memory.Group().Size()
	places := make([][]int64, size) // by rank and part
	var block int64
	for _, v := range m.parts {
		begin := alignUp(block, manyAlign)
		for r := range size {
			at, n := m.share(v, r)
			place := begin
			if m.memory.Device().Kind() == device.CUDA {
				place += int64(v.In.Ptr().Add(at) % manyAlign)
			}
			places[r] = append(places[r], place)
			block = max(block, place+n)
		}
	}
	block = alignUp(block, shardAlign)
	s.Workspace = 2 * int64(size) * block
	s.Parameters += fmt.Sprintf(", blocks of %d bytes", block)
	s.Program = &collective.Program{Build: func(_ context.Context, b *collective.Builder) error {
		mine := b.Workspace(rank)
		reduce, err := newLocalReduce(b, m.memory.Device(), m.dtype, m.op, size, m.maxBlocks)
		if err != nil {
			return err
		}
		var gather, scatter []stretched
		for i, v := range m.parts {
			for r := range size {
				if at, n := m.share(v, r); n > 0 {
					gather = append(gather, stretched{in: v.In.Ptr().Add(at), out: mine.Add(int64(r)*block + places[r][i]), bytes: n})
				}
			}
			if _, n := m.share(v, rank); n > 0 {
				scatter = append(scatter, stretched{in: mine.Add(int64(rank)*block + places[rank][i]), out: v.Out.Ptr(), bytes: n})
			}
		}
		if size > 1 {
			b.Signal(signalReady)
		}
		if err := m.addCopies(b, gather); err != nil {
			return err
		}
		if size > 1 {
			var puts []collective.Put
			for k := 1; k < size; k++ {
				to := (rank + k) % size
				puts = append(puts, collective.Put{Peer: to, Tensor: collective.ToWorkspace, Offset: int64(size+rank) * block, Local: mine.Add(int64(to) * block), Bytes: block})
			}
			b.Wait(signalReady)
			b.Send(signalPieces, puts...)
			b.Finish(signalPieces)
		}
		var srcs []device.Ptr
		for r := range size {
			src := mine.Add(int64(size+r) * block)
			if r == rank {
				src = mine.Add(int64(rank) * block)
			}
			srcs = append(srcs, src)
		}
		reduce(srcs, mine.Add(int64(rank)*block), block)
		return m.addCopies(b, scatter)
	}}
	if size > 1 {
		s.Program.Signals = signalPieces + 1
	}
}
