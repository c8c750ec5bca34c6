package kernels

import (
	"bytes"
	"encoding/binary"
	"slices"

	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/kernels/ptx"
)

// onCUDA makes the spec that of the kernel that copies pieces between barriers, loading them from the ranks that have them or storing them to those
// that are to have them: the same kernel, with another list. Stores use the links better, so that is for large messages. Where ranks pass on what they
// get, they do it chunk by chunk.
func (v *movement) onCUDA(s *collective.Spec) {
	s.Program = nil
	kernel := ptx.Pull(hopper(v.in.Memory()))
	image, err := ptx.Image(kernel.File)
	if err != nil {
		s.Failure = err
		return
	}
	message := max(v.in.Bytes(), v.out.Bytes())
	s.CUDA = &collective.Kernel{
		Image: image, Function: kernel.Name, Overlap: kernel.Overlap,
		Fit: func(multiprocessors int) (blocks, threads int) {
			g := pullGeometry(message, v.in.WorldSize(), multiprocessors)
			if v.passesOn {
				g.blocks = max(g.blocks, passingBlocks(v.longest(), v.in.WorldSize(), multiprocessors))
			}
			g = g.atMost(v.maxBlocks)
			return g.blocks, g.threads
		},
		Params: func(at *collective.Addresses) []any { return []any{at.Comm(), v.pieces(at)} },
	}
}

// pullThreads is how many threads a block has that copies pieces.
const pullThreads = 256

// pullGeometry is the launch of the kernel that copies pieces, for a message of bytes in all: a block for each chunk, up to one a multiprocessor, which was
// the fastest of those that were tried (docs/hardware.md).
func pullGeometry(bytes int64, size, multiprocessors int) launchGeometry {
	return chunkGeometry(bytes, size, multiprocessors)
}

// chunkGeometry is a block for each chunk of a message, up to so many.
func chunkGeometry(bytes int64, size, most int) launchGeometry {
	chunks := chunksOf(bytes) + int64(size) // of each piece, the last one may be short
	return launchGeometry{blocks: int(min(chunks, int64(most))), threads: pullThreads}
}

// pieces is the kernel's list.
func (v *movement) pieces(at *collective.Addresses) ptx.Pieces {
	var phases [2][]ptx.Piece
	for i, phase := range v.phases {
		for _, m := range v.copies(at, phase) {
			c := ptx.Piece{
				From: uint64(m.from), To: uint64(m.to), Bytes: uint64(m.bytes),
				Turn: uint32(int64(m.turn) * chunksOf(m.bytes) % int64(at.Blocks())), Peer: uint32(m.peer),
			}
			if i > 0 && v.passesOn {
				c.Peer = uint32(v.root)
			}
			phases[i] = append(phases[i], c)
		}
	}
	p := pulled(at, phases[:len(v.phases)]...)
	if v.passesOn {
		chunk := passedChunk(v.longest(), at.Blocks(), v.in.WorldSize())
		p.Chunk, p.Chunks = uint32(chunk), uint32((v.longest()+chunk-1)/chunk)
	}
	for i, pieces := range phases {
		// More of them, in one phase, would go one four after the other, and not as links are busy: they go a chunk of each in turn.
		if v.stores() && p.Table == 0 && (v.passesOn || len(v.phases) == 1 && len(pieces) <= ptx.TogetherPieces) {
			p.Flags |= ptx.TogetherFlags(pieces) << i
		}
	}
	return p
}

// passedRow is the bytes of a vector for each thread.
const passedRow = 16 * pullThreads

// passingBlocks is how many blocks pass pieces of so many bytes at most on in one round, up to one a multiprocessor, between more than three ranks, whose chunks are short then: a second round
// would wait for what the first one has stored (docs/hardware.md).
func passingBlocks(longest int64, size, multiprocessors int) int {
	if size <= 3 {
		return 0
	}
	return int(min((longest+passedRow-1)/passedRow, int64(multiprocessors)))
}

// passedChunk is how much of each piece of so many bytes at most a block passes on at a time, as it was the fastest (docs/hardware.md): little enough for the first and the last to take little of the
// whole, and not too little for what a flag costs. Between more than four ranks it is as between four.
func passedChunk(longest int64, blocks, size int) int64 {
	switch each := longest / int64(blocks); {
	case size <= 3 && each < 12<<10:
		return 4 * passedRow // in one round
	case size > 3 && each < 32<<10:
		return passedRow
	case each < 200<<10:
		return 2 * passedRow
	}
	return 4 * passedRow
}

// chunksOf is how many chunks a piece of bytes has.
func chunksOf(bytes int64) int64 { return (bytes + ptx.ChunkBytes - 1) / ptx.ChunkBytes }

// pulled is the parameter of the kernel that copies pieces, in one phase or two.
func pulled(at *collective.Addresses, phases ...[]ptx.Piece) ptx.Pieces {
	p := ptx.Pieces{Phases: uint32(len(phases))}
	for i, pieces := range phases {
		p.Counts[i] = uint32(len(pieces))
	}
	all := slices.Concat(phases...)
	if len(all) <= ptx.InlinePieces {
		copy(p.Inlined[:], all)
		return p
	}
	var table bytes.Buffer
	for _, c := range all {
		_ = binary.Write(&table, binary.LittleEndian, c) // a Buffer takes everything
	}
	p.Table = uint64(at.Upload(table.Bytes()))
	return p
}
