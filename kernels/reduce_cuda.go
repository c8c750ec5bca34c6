package kernels

import (
	"encoding/binary"

	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/kernels/ptx"
)

// onCUDA makes the spec that of the all-reduce's kernel that loads every input, or their sums by the multicast address, on this rank's share of
// them. In place the first needs no copies aside: nobody else loads the share of the input that this rank stores to. The second has its results
// in the workspace first, since it loads by another address than it stores to.
func (r *reduction) onCUDA(s *collective.Spec) {
	s.Program = nil
	size := r.in.WorldSize()
	form := ptx.OneShotPull
	if r.algorithm == OneShotMultimem {
		form = ptx.OneShotMultimem
	}
	kernel, image, err := findKernel(ptx.AllReduce, form, r.in.Device(), hopper(r.in.Memory()), r.in.DType(), r.op, size)
	if err != nil {
		s.Failure = err
		return
	}
	bytes := r.shareBytes()
	if form == ptx.OneShotMultimem {
		s.Multicast = true
		s.Workspace = ptx.Layout{Form: form, World: size, Bytes: bytes, Staged: r.inPlace()}.DataBytes()
	}
	s.CUDA = &collective.Kernel{
		Image: image, Function: kernel.Name, Overlap: kernel.Overlap,
		Fit: func(multiprocessors int) (blocks, threads int) {
			g := geometry(OneShotPull, bytes, 0, size, multiprocessors).atMost(r.maxBlocks)
			return g.blocks, g.threads
		},
		Params: func(at *collective.Addresses) []any {
			p := r.params(at)
			return []any{p.Bytes()}
		},
	}
}

// params is the kernel's parameter.
func (r *reduction) params(at *collective.Addresses) ptx.Params {
	c := at.Comm()
	rank, size := at.Rank(), at.WorldSize()
	lo, hi := r.share(rank)
	p := ptx.Params{
		Workspace: c.Workspace, Count: uint64(hi - lo), Fault: c.Fault, Dead: c.Dead, Stop: c.Stop, Timeout: c.Timeout, Rank: c.Rank, World: c.World, Op: uint32(r.op),
	}
	switch {
	case r.algorithm == OneShotMultimem:
		p.MulticastIn = uint64(at.Multicast(specIn).Add(lo * r.in.DType().Bytes()))
		if r.inPlace() {
			p.Flags = ptx.Staged
		}
	case size == 1:
		p.Flags = ptx.NoBarrier
	}
	in := func(peer int) uint64 { return uint64(at.Tensor(specIn, peer).Add(lo * r.in.DType().Bytes())) }
	if size <= ptx.Inline {
		for peer := range size {
			p.In[peer] = in(peer)
		}
		p.Out[rank] = uint64(r.out.Ptr())
		return p
	}
	// The rows of the table are inputs, outputs, of which this rank's counts, and workspaces from their records on.
	words := make([]byte, 3*size*8)
	for peer := range size {
		binary.LittleEndian.PutUint64(words[8*peer:], in(peer))
		workspace := at.Workspace(peer).Add(-ptx.ControlBytes(at.Blocks(), size))
		binary.LittleEndian.PutUint64(words[8*(2*size+peer):], uint64(workspace))
	}
	binary.LittleEndian.PutUint64(words[8*(size+rank):], uint64(r.out.Ptr()))
	p.Table = uint64(at.Upload(words))
	return p
}
