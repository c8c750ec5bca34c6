package kernels

import (
	"bytes"
	"encoding/binary"

	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/kernels/ptx"
)

// byLines makes the spec that of the kernel that pushes pieces in lines, in one phase. A broadcast that ranks pass on is whole vectors.
func (v *movement) byLines(s *collective.Spec) {
	s.Program = nil
	size, longest, hopper := v.in.WorldSize(), v.longest(), hopper(v.in.Memory())
	kernel, whole := ptx.LinesWhole(v.pattern, size, hopper)
	slot := ptx.LinesWholeSlotBytes(longest)
	slots, sent := 2*int64(size), longest
	switch whole = whole && v.wholePieces(); {
	case whole && v.passesOn:
		s.Parameters += ", passed on in lines"
		kernel, _ = ptx.LinesPass(size, hopper)
		slots, sent = 2, shareElements(longest/16, size-1)*16
	case whole:
		s.Parameters += ", whole"
	default:
		kernel, slot = ptx.PushLines(hopper), ptx.LinesSlotBytes(longest)
	}
	image, err := ptx.Image(kernel.File)
	if err != nil {
		s.Failure = err
		return
	}
	s.Workspace = slots * slot
	s.CUDA = &collective.Kernel{
		Image: image, Function: kernel.Name, Overlap: kernel.Overlap, EarlyEpoch: whole && v.pattern != ptx.Broadcast,
		Fit: func(multiprocessors int) (blocks, threads int) {
			g := geometry(OneShotLL, longest*int64(max(size-1, 1)), 0, size, multiprocessors)
			if whole {
				g = pushGeometry(OneShotPush, sent, size, multiprocessors)
				if v.passesOn {
					g = g.atMost(passBlocks(longest, size))
				}
			}
			g = g.atMost(v.maxBlocks)
			return g.blocks, g.threads
		},
		Params: func(at *collective.Addresses) []any {
			if whole {
				p := newPushParams(at, slot)
				p.In, p.Out, p.Vectors, p.Shard = v.wholeInput(at), uint64(at.Tensor(v.specOut(), at.Rank())), uint32(longest/16), uint32(v.root)
				return []any{p.Bytes()}
			}
			return []any{at.Comm(), v.lines(at)}
		},
	}
}

// wholeInput is the address of what this rank sends to all, or of its pieces for each.
func (v *movement) wholeInput(at *collective.Addresses) uint64 {
	in := at.Tensor(specIn, at.Rank())
	if v.pattern == ptx.Gather {
		in = in.Add(v.phases[0](at.Rank(), (at.Rank()+1)%at.WorldSize()).src)
	}
	return uint64(in)
}

// longest is the size of the longest piece that any rank sends to another.
func (v *movement) longest() int64 {
	n := int64(0)
	for from := range v.in.WorldSize() {
		for to := range v.in.WorldSize() {
			if from != to {
				n = max(n, v.phases[0](from, to).bytes)
			}
		}
	}
	return n
}

// lines is the kernel's list. Where in its buffer a rank has the lines of each writer is alike on all.
func (v *movement) lines(at *collective.Addresses) ptx.Lines {
	rank, size, phase := at.Rank(), at.WorldSize(), v.phases[0]
	longest := v.longest()
	slot := ptx.LinesSlotBytes(longest)
	l := ptx.Lines{Span: uint64(int64(size) * slot), Longest: uint64(ptx.LinesOf(longest, 7))}
	piece := func(from, to int) ptx.LinePiece {
		c := phase(from, to)
		src := at.Tensor(specIn, from).Add(c.src) // of a peer alike modulo 8 on it
		p := ptx.LinePiece{Bytes: uint64(c.bytes), Slot: uint64(int64(from) * slot), Lead: uint32(src % 8), Turn: uint32((to-from+size)%size - 1)}
		if phase(to, from).bytes == 0 {
			p.OneWay = 1
		}
		if p.At, p.Peer = uint64(src), uint32(to); to == rank {
			p.At, p.Peer = uint64(at.Tensor(v.specOut(), rank).Add(c.dst)), uint32(from)
		}
		return p
	}
	var all []ptx.LinePiece
	sources, readers := v.peers(phase)
	for _, to := range readers {
		all = append(all, piece(rank, to))
		l.Awaits |= all[len(all)-1].OneWay
	}
	for _, from := range sources {
		all = append(all, piece(from, rank))
		l.Tells |= all[len(all)-1].OneWay
	}
	l.Sends, l.Receives = uint32(len(readers)), uint32(len(sources))
	if c := phase(rank, rank); c.bytes > 0 {
		l.From, l.To, l.Bytes = uint64(at.Tensor(specIn, rank).Add(c.src)), uint64(at.Tensor(v.specOut(), rank).Add(c.dst)), uint64(c.bytes)
	}
	if len(all) <= ptx.InlineLines {
		copy(l.Inlined[:], all)
		return l
	}
	var table bytes.Buffer
	_ = binary.Write(&table, binary.LittleEndian, all) // a Buffer takes everything
	l.Table = uint64(at.Upload(table.Bytes()))
	return l
}
