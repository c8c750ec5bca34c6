package kernels

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/bits"

	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/kernels/ptx"
	"github.com/symmem/symmem/tensor"
)

// A stretch is at most so many vectors, a block's work of one round, unless there were too many of them then.
const (
	stretchVectors = 256
	mostStretches  = 1 << 14
)

// stretched is one tensor that is cut into stretches.
type stretched struct {
	in, out     device.Ptr
	bytes       int64
	row, outRow int
}

// cut cuts tensors of a dtype into stretches of vectors of so many bytes. It also gives how many vectors, and so lines, there are in all, and
// how many the longest stretch has. Addresses that are alike modulo 16 give the same.
func cut(tensors []stretched, dtype tensor.DType, vector int64) (stretches []ptx.Stretch, lines, longest uint64) {
	all, lines, longest := cutAlike([][]stretched{tensors}, dtype.Bytes(), vector)
	return all[0], lines, longest
}

// cutAlike is cut for a list of each rank, of the same tensors or shares of them, with elements of so many bytes. All have as many stretches, of which those of one number are of the same tensor,
// and their lines begin in the same place: where one rank's tensor has fewer vectors than another's, its last stretches are shorter, or empty.
func cutAlike(lists [][]stretched, width, vector int64) (stretches [][]ptx.Stretch, lines, longest uint64) {
	vectors := func(t stretched) uint64 {
		if t.bytes == 0 {
			return 0
		}
		return uint64((int64(t.in)%vector + t.bytes + vector - 1) / vector)
	}
	most := func(tensor int) (n uint64) {
		for _, list := range lists {
			n = max(n, vectors(list[tensor]))
		}
		return n
	}
	for i := range lists[0] {
		lines += most(i)
	}
	each := uint64(stretchVectors)
	for lines/each > mostStretches {
		each *= 2
	}
	stretches = make([][]ptx.Stretch, len(lists))
	line := uint64(0)
	for i := range lists[0] {
		all := most(i)
		for first := uint64(0); first < all; first += each {
			for r, list := range lists {
				t := list[i]
				s := ptx.Stretch{
					In: uint64(t.in), Out: uint64(t.out), Count: uint64(t.bytes / width), First: first, Line: line + first, Row: uint64(t.row), OutRow: uint64(t.outRow),
				}
				if n := vectors(t); n > first {
					s.Vectors = min(each, n-first)
				}
				stretches[r], longest = append(stretches[r], s), max(longest, s.Vectors)
			}
		}
		line += all
	}
	return stretches, lines, longest
}

// upload copies stretches to the plan's device, and gives the parameter.
func upload(at *collective.Addresses, stretches []ptx.Stretch) ptx.Many {
	if len(stretches) == 0 {
		return ptx.Many{}
	}
	var list bytes.Buffer
	_ = binary.Write(&list, binary.LittleEndian, stretches) // a Buffer takes everything
	return ptx.Many{Stretches: uint64(at.Upload(list.Bytes())), Count: uint32(len(stretches))}
}

// uploadWhole is upload for the kernel of whole vectors, of which so many threads do a stretch together.
func uploadWhole(at *collective.Addresses, stretches []ptx.Stretch, together int) ptx.WholeMany {
	whole := make([]ptx.WholeStretch, len(stretches))
	for i, s := range stretches {
		whole[i] = s.Whole()
	}
	var list bytes.Buffer
	_ = binary.Write(&list, binary.LittleEndian, whole)
	m := ptx.WholeMany{Stretches: uint64(at.Upload(list.Bytes())), Count: uint32(len(whole)), Shift: shiftOf(together)}
	copy(m.Inlined[:], whole)
	return m
}

// shiftOf is which power of two a number is.
func shiftOf(n int) uint32 { return uint32(bits.TrailingZeros(uint(n))) }

// wholeTogether is how many threads do a stretch together, of which the longest has so many vectors.
func wholeTogether(longest uint64) int {
	threads := 32
	for threads < stretchVectors && uint64(threads) < longest {
		threads *= 2
	}
	return threads
}

// wholeGeometry is manyGeometry for the kernel of whole vectors, of which so many threads do a stretch together. Few blocks with many stretches each are the fastest.
func wholeGeometry(stretches, together, multiprocessors int) launchGeometry {
	threads := together
	for threads < 128 || threads < 256 && stretches*together > 16*128 {
		threads *= 2
	}
	each := threads / together
	return launchGeometry{blocks: min(max((stretches+each-1)/each, 1), 2*multiprocessors), threads: threads}
}

// manyGeometry is the launch of a kernel for so many stretches: a block each.
func manyGeometry(stretches int, longest uint64, multiprocessors int) launchGeometry {
	threads := 64
	for threads < 256 && uint64(threads) < longest {
		threads *= 2
	}
	return launchGeometry{blocks: min(max(stretches, 1), 2*multiprocessors), threads: threads}
}

// manyLinesGeometry is manyGeometry for the kernel that pushes lines of what only moves: so many threads do a stretch of one peer together, and others beside them those of other peers.
func manyLinesGeometry(stretches, together, size, multiprocessors int) launchGeometry {
	teams := 1 // a power of two, as blocks have numbers of threads that are
	for 2*teams <= min(size-1, ptx.MaxThreads/together) {
		teams *= 2
	}
	return launchGeometry{blocks: min(max(stretches, 1), 2*multiprocessors), threads: teams * together}
}

// image is that of a kernel, if there is one: else that is the spec's failure.
func (m *many) image(s *collective.Spec, kernel ptx.Kernel, ok bool) (image []byte, there bool) {
	if !ok {
		s.Failure = fmt.Errorf("no kernels for many %s: %w", m.dtype, errs.ErrUnsupported)
		return nil, false
	}
	image, s.Failure = ptx.Image(kernel.File)
	return image, s.Failure == nil
}

// onCUDA makes the spec that of a kernel on a CUDA device.
func (m *many) onCUDA(s *collective.Spec) {
	s.Program = nil
	size := m.memory.Group().Size()
	oneShot := m.algorithm != TwoShotPull
	kernel, ok := ptx.ManyPull(m.dtype.String())
	vector := int64(16)
	whole := false // everything is whole vectors
	if oneShot {
		hopper := hopper(m.memory)
		if kernel, whole = ptx.ManyPushWhole(m.dtype.String(), int(m.op), size, hopper); whole {
			whole = m.wholeVectors()
		}
		ok = whole
		if !whole {
			kernel, ok = ptx.ManyOneShot(m.dtype.String(), hopper)
		}
		vector = ptx.ManyLine(m.dtype.String())
	}
	image, ok := m.image(s, kernel, ok)
	if !ok {
		return
	}
	var tensors []stretched
	for _, v := range m.parts {
		tensors = append(tensors, stretched{in: v.In.Ptr(), out: v.Out.Ptr(), bytes: v.In.Bytes(), row: v.in, outRow: v.out})
	}
	stretches, lines, longest := cut(tensors, m.dtype, vector)
	var span int64
	blocks := len(stretches)
	if oneShot {
		span = alignUp(int64(lines)*16, shardAlign)
		s.Workspace = 2 * int64(size) * span
	} else {
		blocks = (blocks + size - 1) / size
	}
	// Whose stretches were cut otherwise would wait for lines that do not come.
	s.Parameters += fmt.Sprintf(", %d stretches of %d lines", len(stretches), lines)
	if whole {
		s.Parameters += ", whole"
	}
	together := wholeTogether(longest)
	s.CUDA = &collective.Kernel{
		Image: image, Function: kernel.Name, Overlap: kernel.Overlap, EarlyEpoch: whole,
		Fit: func(multiprocessors int) (int, int) {
			g := manyGeometry(blocks, longest, multiprocessors)
			if whole {
				g = wholeGeometry(blocks, together, multiprocessors)
			}
			g = g.atMost(m.maxBlocks)
			return g.blocks, g.threads
		},
		Params: func(at *collective.Addresses) []any {
			p := m.params(at)
			p.Span = uint64(span)
			switch {
			case whole:
				push := newPushParams(at, span)
				push.Op = uint32(m.op)
				return []any{push.Bytes(), uploadWhole(at, stretches, together)}
			case oneShot:
				return []any{p.Bytes(), upload(at, stretches)}
			}
			var own []ptx.Stretch
			for i := at.Rank(); i < len(stretches); i += size {
				own = append(own, stretches[i])
			}
			list := upload(at, own)
			list.Table = uint64(at.Table())
			return []any{p.Bytes(), list}
		},
	}
}

// wholeVectors reports whether the tensors are vectors of 16 bytes and nothing else on this rank.
func (m *many) wholeVectors() bool {
	vectors := int64(0)
	for _, v := range m.parts {
		if !wholeVectors(v.In, v.Out) {
			return false
		}
		vectors += v.In.Bytes() / 16
	}
	return vectors < ptx.MaxPushVectors
}

// params is the kernel's first parameter, without inputs and outputs.
func (m *many) params(at *collective.Addresses) ptx.Params {
	c := at.Comm()
	p := ptx.Params{
		Workspace: c.Workspace, Fault: c.Fault, Dead: c.Dead, Stop: c.Stop, Timeout: c.Timeout, Rank: c.Rank, World: c.World, Op: uint32(m.op),
	}
	if size := at.WorldSize(); size > ptx.Inline {
		// The rows of the table are inputs and outputs, which are not used, and workspaces from their records on.
		p.Table = c.Table - uint64(2*8*size)
	}
	return p
}

// byCopies adds a launch that copies between memory of this rank's device.
func byCopies(b *collective.Builder, tensors []stretched, dtype tensor.DType, maxBlocks int) error {
	kernel := ptx.ManyCopy(dtype.Bytes())
	image, err := ptx.Image(kernel.File)
	if err != nil {
		return err
	}
	stretches, _, longest := cut(tensors, dtype, 16)
	b.Kernel(&collective.Kernel{
		Image: image, Function: kernel.Name, Overlap: kernel.Overlap,
		Fit: func(multiprocessors int) (int, int) {
			g := manyGeometry(len(stretches), longest, multiprocessors).atMost(maxBlocks)
			return g.blocks, g.threads
		},
		Params: func(at *collective.Addresses) []any { return []any{upload(at, stretches)} },
	})
	return nil
}

// pushed makes the spec that of a kernel that pushes lines of shares, of vectors of so many bytes, of every rank's list, with elements of so many bytes. roles says whether this rank awaits that another has
// taken what it was sent, and tells it. In teams so many threads as are of use do a stretch of one peer together.
func (m *many) pushed(s *collective.Spec, kernel ptx.Kernel, image []byte, lists [][]stretched, width, vector int64, roles func(rank int) (awaits, tells bool), teams bool) {
	size := len(lists)
	stretches, lines, longest := cutAlike(lists, width, vector)
	span := alignUp(int64(lines)*16, shardAlign)
	s.Workspace = 2 * int64(size) * span
	// Whose stretches were cut otherwise would wait for lines that do not come.
	s.Parameters += fmt.Sprintf(", %d stretches of %d lines", len(stretches[0]), lines)
	together := wholeTogether(longest)
	s.CUDA = &collective.Kernel{
		Image: image, Function: kernel.Name, Overlap: kernel.Overlap,
		Fit: func(multiprocessors int) (int, int) {
			g := manyGeometry(len(stretches[0]), longest, multiprocessors)
			if teams {
				g = manyLinesGeometry(len(stretches[0]), together, size, multiprocessors)
			}
			g = g.atMost(m.maxBlocks)
			return g.blocks, g.threads
		},
		Params: func(at *collective.Addresses) []any {
			p := m.params(at)
			p.Span = uint64(span)
			list := uploadAll(at, stretches)
			if teams {
				list.Shift = shiftOf(together)
			}
			list.Table = uploadRoles(at, roles)
			return []any{p.Bytes(), list}
		},
	}
}
