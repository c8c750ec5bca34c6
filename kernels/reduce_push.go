package kernels

import (
	"encoding/binary"
	"fmt"

	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/kernels/ptx"
)

// byPush makes the spec that of the kernel that pushes every owner's share to it in lines, or in chunks where it is long. In place it needs no copies aside: what it stores
// to is the share that only this rank reads, vector by vector. A reduce in chunks is combined by all ranks but root, a share each, which store what they have to root's output.
func (r *reduction) byPush(s *collective.Spec) {
	s.Program = nil
	form, size := ptxForms[r.algorithm], r.in.WorldSize()
	hopper := hopper(r.in.Memory())
	kernel, ok := ptx.PushScatter(form, r.in.DType().String(), hopper)
	wholeKernel, whole := ptx.ScatterWhole(r.in.DType().String(), int(r.op), size, !r.scatter, hopper)
	if whole = whole && form == ptx.OneShotPush && r.wholePieces(); whole {
		kernel = wholeKernel
		s.Parameters += ", whole"
	}
	share := r.shareBytes()
	flowKernel, flow := ptx.ScatterFlow(r.in.DType().String(), int(r.op), size)
	if flow = flow && whole && r.inChunks(); flow {
		kernel = flowKernel
		s.Parameters += " in chunks"
	}
	if !ok {
		s.Failure = fmt.Errorf("there is no %s in the form %s: %w", r.describe(), r.algorithm, errs.ErrUnsupported)
		return
	}
	image, err := ptx.Image(kernel.File)
	if err != nil {
		s.Failure = err
		return
	}
	vectors, root := share/16, r.root
	switch {
	case flow && r.scatter:
		root = size // none
	case flow: // what the others combine for root
		share = shareElements(vectors, size-1) * 16
	}
	span := ptx.ScatterSpan(form, share)
	s.Workspace = 2 * int64(size) * span
	if flow {
		s.Workspace = ptx.ScatterFlowBytes(share, size)
	}
	s.CUDA = &collective.Kernel{
		Image: image, Function: kernel.Name, Overlap: kernel.Overlap, EarlyEpoch: whole,
		Fit: func(multiprocessors int) (blocks, threads int) {
			g := geometry(r.algorithm, share, 0, size, multiprocessors)
			switch {
			case flow:
				g = flowGeometry(share, size, multiprocessors)
			case whole:
				g = pushGeometry(r.algorithm, share, size, multiprocessors)
			}
			g = g.atMost(r.maxBlocks)
			return g.blocks, g.threads
		},
		Params: func(at *collective.Addresses) []any {
			if whole {
				p := newPushParams(at, span)
				p.In, p.Out, p.Vectors, p.Shard, p.Op = uint64(r.in.Ptr()), uint64(r.out.Ptr()), uint32(vectors), uint32(root), uint32(r.op)
				if flow && !r.scatter {
					p.Out = uint64(at.Tensor(r.specOut(), root))
				}
				return []any{p.Bytes()}
			}
			p := r.pushParams(at, uint64(span))
			return []any{p.Bytes()}
		},
	}
}

// inChunks reports whether whole vectors go to the ranks that combine them in chunks, which they combine as they come, and not all before any is combined.
func (r *reduction) inChunks() bool {
	if r.scatter {
		return r.shareBytes() >= flowLeastBytes
	}
	size := r.in.WorldSize()
	return size > 2 && r.in.Bytes() >= rootFlowLeastBytes(size)
}

// shareBytes is the size of the largest share.
func (r *reduction) shareBytes() int64 {
	if !r.scatter {
		return r.in.Bytes()
	}
	return shareElements(r.in.NumElements(), r.in.WorldSize()) * r.in.DType().Bytes()
}

// pushParams is the kernel's parameter.
func (r *reduction) pushParams(at *collective.Addresses, span uint64) ptx.Params {
	c := at.Comm()
	size := at.WorldSize()
	p := ptx.Params{
		Workspace: c.Workspace, Count: uint64(r.in.NumElements()), Shard: uint64(r.shareBytes() / r.in.DType().Bytes()), Span: span,
		Fault: c.Fault, Dead: c.Dead, Stop: c.Stop, Timeout: c.Timeout, Rank: c.Rank, World: c.World, Op: uint32(r.op),
	}
	if !r.scatter {
		p.Flags, p.Peer = ptx.ToRoot, uint32(r.root)
	}
	p.In[0], p.Out[0] = uint64(r.in.Ptr()), uint64(r.out.Ptr())
	if size > ptx.Inline {
		words := make([]byte, 3*size*8) // of which the last row, the workspaces, counts
		for peer := range size {
			workspace := at.Workspace(peer).Add(-ptx.ControlBytes(at.Blocks(), size))
			binary.LittleEndian.PutUint64(words[8*(2*size+peer):], uint64(workspace))
		}
		p.Table = uint64(at.Upload(words))
	}
	return p
}
