package kernels

import (
	"context"
	"encoding/binary"
	"fmt"

	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/kernels/ptx"
	"github.com/symmem/symmem/kernels/tuning"
	"github.com/symmem/symmem/tensor"
)

// NewAllGatherMany prepares all-gathers of many tensors at once: after a run, every rank's Out of each pair has the elements of all ranks' In, rank 0's first, as after a plan of [NewAllGather]
// of that pair. A run is one launch and one exchange: of many small tensors it takes little more than of one. The shards of a model's parameters are such a list.
//
// Of each pair Out has any number n of elements, of any shape, 0 too, and In c = ceil(n / world size) of the same dtype; rank r's share of Out is elements r*c to min((r+1)*c, n). In may also be just this
// rank's share of Out, a Sub of it: in place, on all ranks. Out is to be given. Elements are only moved: pairs may have different dtypes, any that there are, and lie at any place. Inputs may overlap each other. An
// output overlaps nothing else of the list, but may have its own input as this rank's share. There are 1 to [MaxPairs] pairs.
//
// The forms are, of [Options.Algorithm]: OneShot, which on CUDA is OneShotLL, lines that are pushed without a barrier, or OneShotPull, loads between two barriers; and Transfers, which gathers what a rank has
// in the workspace, sends that, and scatters what has come. Auto chooses by the size of all outputs together, as NewAllGather does for one of that size.
//
// Collective: all ranks come with the same list and options. Where lists differ every rank gets an ErrMismatch with the number of the first
// pair that does and everybody's value of it. The tensors must have had their rendezvous. It blocks until all ranks have come. Close the plan.
//
// Its errors are those of [collective.New], ErrInvalid for a list that is empty or too long, a nil tensor, numbers of elements that do not fit, dtypes of a pair that differ, tensors that overlap in
// another way and options that do not exist, and ErrUnsupported for a form that a list has not on the device. An empty list, or one without any
// tensor, is an error of this rank alone: it does not say with whom.
func NewAllGatherMany(ctx context.Context, pairs []Pair, opts *Options) (*Plan, error) {
	return newMany(&manyKind{call: "NewAllGatherMany", title: "all-gather", table: tuning.AllGather, list: "pairs", shares: true}, pairs, 0, 0, opts).make(ctx)
}

// NewBroadcastMany prepares broadcasts of many tensors at once: after a run, every rank's copy of each has the elements of root's, which is not touched. A run is one launch and one exchange: of many small tensors it takes
// little more than of one. The first weights of a model are such a list.
//
// The tensors may have different dtypes, any that there are, be of any shape, 0 elements too, and lie at any place, but none overlaps another. There are 1 to [MaxPairs] of them. The forms are those of [NewAllGatherMany], and
// Auto chooses by the size of all tensors together, as [NewBroadcast] does for one of that size.
//
// Collective: all ranks come with the same list, root and options. Where lists differ every rank gets an ErrMismatch with the number of the first
// tensor that does and everybody's value of it. The tensors must have had their rendezvous. It blocks until all ranks have come. Close the plan.
//
// Its errors are those of [collective.New], ErrInvalid for a list that is empty or too long, a nil tensor, tensors that overlap, a root that is no rank and options that do not exist, and
// ErrUnsupported for a form that a list has not on the device. An empty list, or one without any tensor, is an error of this rank alone: it does not say with whom.
func NewBroadcastMany(ctx context.Context, tensors []tensor.SymmetricTensor, root int, opts *Options) (*Plan, error) {
	pairs := make([]Pair, len(tensors))
	for i, t := range tensors {
		pairs[i].In = t
	}
	return newMany(&manyKind{call: "NewBroadcastMany", title: "broadcast", table: tuning.Broadcast, list: "tensors", rooted: true}, pairs, 0, root, opts).make(ctx)
}

// manyMoves is a list whose elements only move: what a rank has of a tensor all others get, in the same place.
type manyMoves struct{ *many }

// piece is what rank from has of a part for all others: where in its input, where in everybody's output, in bytes. In place both are in the one tensor.
func (m *manyMoves) piece(v part, from int) piece {
	width := v.Out.DType().Bytes()
	if m.rooted {
		if from != m.root {
			return piece{}
		}
		return piece{bytes: v.In.Bytes()}
	}
	lo, hi := shareOf(v.Out.NumElements(), m.memory.Group().Size(), from)
	p := piece{dst: lo * width, bytes: (hi - lo) * width}
	if v.inPlace {
		p.src = p.dst
	}
	return p
}

// from is where on this rank a part's pieces come from, but for their src. On the others it is alike modulo 16.
func (m *manyMoves) from(v part) device.Ptr {
	if v.inPlace {
		return m.whole(v.Pair).Ptr()
	}
	return v.In.Ptr()
}

// sends says of each rank whether it has anything for the others.
func (m *manyMoves) sends() []bool {
	has := make([]bool, m.memory.Group().Size())
	for r := range has {
		for _, v := range m.parts {
			has[r] = has[r] || m.piece(v, r).bytes > 0
		}
	}
	return has
}

func (m *manyMoves) spec(s *collective.Spec, kind device.Kind) {
	switch {
	case m.algorithm == Transfers:
		m.byTransfers(s)
	case m.algorithm == OneShotLL:
		m.byLines(s)
	case kind == device.CUDA:
		m.byLoads(s)
	default:
		m.onHost(s)
	}
}

// byLines makes the spec that of the kernel that pushes lines.
func (m *manyMoves) byLines(s *collective.Spec) {
	s.Program = nil
	size, rank := m.memory.Group().Size(), m.memory.Group().Rank()
	kernel := ptx.ManyLines(hopper(m.memory))
	image, ok := m.image(s, kernel, true)
	if !ok {
		return
	}
	lists := make([][]stretched, size)
	for _, v := range m.parts {
		for r := range lists {
			p := m.piece(v, r)
			lists[r] = append(lists[r], stretched{in: m.from(v).Add(p.src), out: v.Out.Ptr().Add(p.dst), bytes: p.bytes})
		}
	}
	sends := m.sends()
	m.pushed(s, kernel, image, lists, 1, ptx.LineBytes, func(r int) (awaits, tells bool) { return sends[rank] && !sends[r], sends[r] && !sends[rank] }, true)
}

// byLoads makes the spec that of the kernel that loads pieces between two barriers, what it has from one rank and from the next in turn.
func (m *manyMoves) byLoads(s *collective.Spec) {
	s.Program = nil
	kernel := ptx.ManyMoves
	image, ok := m.image(s, kernel, true)
	if !ok {
		return
	}
	size, chunk := m.memory.Group().Size(), loadedAtOnce(m.message)
	var blocks int64
	for to := range size {
		var n int64
		for _, v := range m.parts {
			for from := range size {
				if from != to || !v.inPlace {
					n += (m.piece(v, from).bytes + chunk - 1) / chunk
				}
			}
		}
		blocks = max(blocks, n)
	}
	s.CUDA = &collective.Kernel{
		Image: image, Function: kernel.Name, Overlap: kernel.Overlap,
		Fit: func(multiprocessors int) (int, int) {
			g := launchGeometry{blocks: int(min(max(blocks, 1), 2*int64(multiprocessors))), threads: pullThreads}.atMost(m.maxBlocks)
			return g.blocks, g.threads
		},
		Params: func(at *collective.Addresses) []any {
			p := m.params(at)
			return []any{p.Bytes(), upload(at, m.loads(at, chunk))}
		},
	}
}

// loadedAtOnce is how many bytes of a piece a block loads at a time, of a list of so many bytes: the chunk of other kernels, unless the list of chunks were too long then.
func loadedAtOnce(bytes int64) int64 {
	chunk := int64(ptx.ChunkBytes)
	for bytes/chunk > mostStretches {
		chunk *= 2
	}
	return chunk
}

// loads is the list of what this rank loads, in chunks of so many bytes.
func (m *manyMoves) loads(at *collective.Addresses, chunk int64) []ptx.Stretch {
	size := at.WorldSize()
	var from [][]ptx.Stretch // by rank, this one last
	for k := range size {
		r := (at.Rank() + 1 + k) % size
		var all []ptx.Stretch
		for _, v := range m.parts {
			p := m.piece(v, r)
			if p.bytes == 0 || r == at.Rank() && v.inPlace {
				continue
			}
			src, dst := at.Tensor(v.in, r).Add(p.src), v.Out.Ptr().Add(p.dst)
			for begin := int64(0); begin < p.bytes; begin += chunk {
				n := min(p.bytes-begin, chunk)
				all = append(all, ptx.Stretch{In: uint64(src.Add(begin)), Out: uint64(dst.Add(begin)), Count: uint64(n)})
			}
		}
		from = append(from, all)
	}
	var list []ptx.Stretch
	for i, more := 0, true; more; i++ {
		more = false
		for _, all := range from {
			if i < len(all) {
				list, more = append(list, all[i]), true
			}
		}
	}
	return list
}

// onHost makes the spec that of a kernel on the host device: each rank waits for those that it loads from to be ready, and for those that load from it to have done so. Where only one of two
// loads, both wait for each other all the same, before and after: or one that comes late would load from an input that the other has given up waiting with, and written to since.
func (m *manyMoves) onHost(s *collective.Spec) {
	s.Program = nil
	s.Host = func(at *collective.Addresses) (collective.HostKernel, error) {
		rank, size := at.Rank(), at.WorldSize()
		sends := m.sends()
		var own, copies []copied
		var peers []int // that this rank loads from, or that load from it
		for k := range size {
			r := (rank + k) % size
			if r != rank && (sends[r] || sends[rank]) {
				peers = append(peers, r)
			}
			for _, v := range m.parts {
				p := m.piece(v, r)
				if p.bytes == 0 || r == rank && v.inPlace {
					continue
				}
				c := copied{at.Bytes(v.Out.Ptr().Add(p.dst), p.bytes), at.Bytes(at.Tensor(v.in, r).Add(p.src), p.bytes)}
				if r == rank {
					own = append(own, c)
				} else {
					copies = append(copies, c)
				}
			}
		}
		return func(r *collective.HostRun) error {
			for _, peer := range peers {
				r.Signal(peer, flagStart, r.Epoch())
			}
			for _, c := range own {
				copy(c.dst, c.src)
			}
			if err := meet(r, flagStart, nil, peers); err != nil {
				return err
			}
			for _, c := range copies {
				copy(c.dst, c.src)
			}
			return meet(r, flagEnd, peers, peers)
		}, nil
	}
}

// packed is where in the workspace of every rank what one of them sends lies, in bytes: that of one rank behind that of the one before. On GPUs each piece is at a place that is alike to its own on
// its rank modulo 16, which the ranks have compared (placeOf).
func (m *manyMoves) packed() (begins []int64, places [][]int64) {
	size := m.memory.Group().Size()
	begins, places = make([]int64, size+1), make([][]int64, size)
	for r := range size {
		end := int64(0)
		for _, v := range m.parts {
			p := m.piece(v, r)
			at := alignUp(end, manyAlign)
			if m.memory.Device().Kind() == device.CUDA {
				at += int64(m.from(v).Add(p.src) % manyAlign)
			}
			if places[r] = append(places[r], at); p.bytes > 0 {
				end = at + p.bytes
			}
		}
		begins[r+1] = begins[r] + alignUp(end, shardAlign)
	}
	return begins, places
}

// byTransfers makes the spec that of a program: what this rank has for others is gathered in its workspace, put to the same place in theirs, and what has come is scattered to the outputs. A rank says that there is room
// when its stream has come to the run, behind the scattering of the one before.
func (m *manyMoves) byTransfers(s *collective.Spec) {
	rank, size := m.memory.Group().Rank(), m.memory.Group().Size()
	begins, places := m.packed()
	s.Workspace = begins[size]
	s.Parameters += fmt.Sprintf(", %d bytes in all", begins[size])
	s.Program = &collective.Program{Build: func(_ context.Context, b *collective.Builder) error {
		at := func(r, i int) device.Ptr { return b.Workspace(rank).Add(begins[r] + places[r][i]) }
		var gather, scatter []stretched
		for i, v := range m.parts {
			for r := range size {
				p := m.piece(v, r)
				out := v.Out.Ptr().Add(p.dst)
				switch {
				case p.bytes == 0:
				case r != rank:
					scatter = append(scatter, stretched{in: at(r, i), out: out, bytes: p.bytes})
				default:
					in := m.from(v).Add(p.src)
					if size > 1 {
						gather = append(gather, stretched{in: in, out: at(r, i), bytes: p.bytes})
					}
					if !v.inPlace {
						scatter = append(scatter, stretched{in: in, out: out, bytes: p.bytes})
					}
				}
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
			if n := begins[rank+1] - begins[rank]; n > 0 {
				for k := 1; k < size; k++ {
					puts = append(puts, collective.Put{Peer: (rank + k) % size, Tensor: collective.ToWorkspace, Offset: begins[rank], Local: b.Workspace(rank).Add(begins[rank]), Bytes: n})
				}
			}
			b.Wait(signalReady)
			b.Send(signalPieces, puts...)
			b.Finish(signalPieces)
		}
		return m.addCopies(b, scatter)
	}}
	if size > 1 {
		s.Program.Signals = signalPieces + 1
	}
}

// unit is the largest integer that the elements of all tensors are one or several of: what a copy takes at a time where vectors do not fit.
func (m *many) unit() tensor.DType {
	width := int64(8)
	for _, v := range m.parts {
		width = min(width, v.In.DType().Bytes())
	}
	return map[int64]tensor.DType{1: tensor.Uint8, 2: tensor.Uint16, 4: tensor.Uint32, 8: tensor.Uint64}[width]
}

// uploadAll copies the stretches of every rank's list to the plan's device, as many of each, and gives the parameter.
func uploadAll(at *collective.Addresses, stretches [][]ptx.Stretch) ptx.Many {
	var all []ptx.Stretch
	for _, list := range stretches {
		all = append(all, list...)
	}
	m := upload(at, all)
	m.Count = uint32(len(stretches[0]))
	return m
}

// uploadRoles copies what a rank awaits of others and tells them, of those that do not send to each other, to the plan's device, and gives the address, or 0 if there is nothing.
func uploadRoles(at *collective.Addresses, of func(rank int) (awaits, tells bool)) uint64 {
	words, some := make([]byte, 8*at.WorldSize()), false
	for r := range at.WorldSize() {
		awaits, tells := of(r)
		word := uint64(0)
		if awaits {
			word |= ptx.ManyAwaits
		}
		if tells {
			word |= ptx.ManyTells
		}
		binary.LittleEndian.PutUint64(words[8*r:], word)
		some = some || word != 0
	}
	if !some {
		return 0
	}
	return uint64(at.Upload(words))
}
