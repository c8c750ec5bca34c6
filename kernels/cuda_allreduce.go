package kernels

import (
	"fmt"

	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/kernels/ptx"
	"github.com/symmem/symmem/tensor"
)

// gpu is what CUDA devices tell about themselves.
type gpu interface{ ComputeCapability() int } // ten times the major number plus the minor one

// findKernel finds the kernel of a form for a device.
func findKernel(form ptx.Form, d device.Device, dtype tensor.DType, op Op, size int) (ptx.Kernel, []byte, error) {
	capability := 0
	if g, ok := d.(gpu); ok {
		capability = g.ComputeCapability()
	}
	k, ok := ptx.AllReduce(form, dtype.String(), int(op), size, capability >= 90)
	if !ok {
		return k, nil, fmt.Errorf("no kernels for %s: %w", d.Name(), errs.ErrUnsupported)
	}
	image, err := ptx.Image(k.File)
	return k, image, err
}

// onCUDA makes the spec that of a kernel on a CUDA device.
func (a *allReduce) onCUDA(s *collective.Spec) {
	s.Program = nil
	size, bytes := a.in.WorldSize(), a.in.Bytes()
	layout := ptx.Layout{Form: ptxForms[a.algorithm], World: size, Bytes: bytes}
	layout.LapBytes = geometry(a.algorithm, bytes, size, 1).lapBytes
	var flags uint32
	switch layout.Form {
	case ptx.OneShotPull:
		switch {
		case size == 1:
			flags |= ptx.NoBarrier
		case a.inPlace:
			flags |= ptx.Staged
			layout.Staged = true
		}
	case ptx.OneShotMultimem:
		if a.inPlace {
			flags |= ptx.Staged
			layout.Staged = true
		}
	}
	kernel, image, err := findKernel(layout.Form, a.in.Device(), a.in.DType(), a.op, size)
	if err != nil {
		s.Failure = err
		return
	}
	s.Multicast = a.algorithm.NeedsMulticast()
	s.Workspace = layout.DataBytes()
	s.CUDA = &collective.Kernel{
		Image: image, Function: kernel.Name, Overlap: kernel.Overlap, BlockWorkspace: layout.BlockBytes(),
		Fit: func(multiprocessors int) (blocks, threads int) {
			g := geometry(a.algorithm, bytes, size, multiprocessors).atMost(a.maxBlocks)
			return g.blocks, g.threads
		},
		Params: func(at *collective.Addresses) []any {
			p := a.params(at, layout, flags)
			return []any{p.Bytes()}
		},
	}
}

// params is the kernel's parameter.
func (a *allReduce) params(at *collective.Addresses, layout ptx.Layout, flags uint32) ptx.Params {
	c := at.Comm()
	p := ptx.Params{
		Workspace: c.Workspace, Count: uint64(a.in.NumElements()), Fault: c.Fault, Dead: c.Dead, Stop: c.Stop, Timeout: c.Timeout,
		Shard: uint64(layout.Shard()), Span: uint64(layout.Span()), Rank: c.Rank, World: c.World, Op: uint32(a.op), Flags: flags,
	}
	if n := a.in.Bytes(); (uint64(a.in.Ptr())|uint64(a.out.Ptr())|uint64(n))%16 == 0 && n/16 < 1<<31 {
		p.Flags |= ptx.Whole
	}
	for r := range min(at.WorldSize(), ptx.Inline) {
		p.In[r], p.Out[r] = uint64(at.Tensor(specIn, r)), uint64(at.Tensor(specOut, r))
	}
	if at.WorldSize() > ptx.Inline {
		p.Table = uint64(at.Table())
	}
	if a.algorithm.NeedsMulticast() {
		p.MulticastIn, p.MulticastOut = uint64(at.Multicast(specIn)), uint64(at.Multicast(specOut))
	}
	return p
}
