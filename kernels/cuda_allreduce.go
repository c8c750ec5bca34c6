package kernels

import (
	"fmt"

	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/kernels/ptx"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// finder is ptx.AllReduce, or ptx.PushWhole.
type finder func(form ptx.Form, dtype string, op, world int, hopper bool) (ptx.Kernel, bool)

// hopper reports whether the GPUs of all ranks have compute capability 9.0 or later. The ranks of a plan have one kernel, so where their GPUs are not alike it is that of the oldest.
func hopper(m *memory.Memory) bool { return m.LeastCapability() >= 90 }

// findKernel finds the kernel of a form for a device; hopper is as ptx.AllReduce has it, and may be false for the sake of another rank's GPU.
func findKernel(find finder, form ptx.Form, d device.Device, hopper bool, dtype tensor.DType, op Op, size int) (ptx.Kernel, []byte, error) {
	k, ok := find(form, dtype.String(), int(op), size, hopper)
	switch {
	case !ok && !hopper && ptx.Hopper(d):
		return k, nil, fmt.Errorf("no kernels for compute capabilities below 9.0, of which a rank's GPU is: %w", errs.ErrUnsupported)
	case !ok:
		return k, nil, fmt.Errorf("no kernels for %s: %w", d.Name(), errs.ErrUnsupported)
	}
	image, err := ptx.Image(k.File)
	return k, image, err
}

// onCUDA makes the spec that of a kernel on a CUDA device.
func (a *allReduce) onCUDA(s *collective.Spec) {
	s.Program = nil
	size, bytes := a.in.WorldSize(), a.in.Bytes()
	layout := ptx.Layout{Form: ptxForms[a.algorithm], World: size, Bytes: bytes, Whole: wholeVectors(a.in, a.out)}
	layout.LapBytes = geometry(a.algorithm, bytes, a.lap, size, 1).lapBytes
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
	find, whole := finder(ptx.AllReduce), a.whole(layout.Form)
	if whole {
		find = ptx.PushWhole
		if _, ok := ptx.PushLong(layout.Form, a.in.DType().String(), int(a.op), size, false); ok {
			switch {
			case bytes > oneShotLongBytes:
				find = ptx.PushLonger
			case bytes > oneShotWholeBytes:
				find = ptx.PushLong
			}
		}
	}
	kernel, image, err := findKernel(find, layout.Form, a.in.Device(), hopper(a.in.Memory()), a.in.DType(), a.op, size)
	if err != nil {
		s.Failure = err
		return
	}
	s.Multicast = a.algorithm.NeedsMulticast()
	s.Workspace = layout.DataBytes()
	s.CUDA = &collective.Kernel{
		Image: image, Function: kernel.Name, Overlap: kernel.Overlap, EarlyEpoch: whole, BlockWorkspace: layout.BlockBytes(),
		Fit: func(multiprocessors int) (blocks, threads int) {
			g := geometry(a.algorithm, bytes, a.lap, size, multiprocessors)
			if whole {
				g = allReducePushGeometry(a.algorithm, bytes, size, multiprocessors)
			}
			g = g.atMost(a.maxBlocks)
			return g.blocks, g.threads
		},
		Params: func(at *collective.Addresses) []any {
			if whole {
				return []any{a.pushParams(at, layout)}
			}
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

// wholeVectors reports whether a message is vectors of 16 bytes and nothing else on this rank, and so on every rank, since tensors lie alike on
// them modulo 16.
func wholeVectors(in, out tensor.SymmetricTensor) bool {
	n := in.Bytes()
	return (uint64(in.Ptr())|uint64(out.Ptr())|uint64(n))%16 == 0 && n/16 < ptx.MaxPushVectors
}

// whole reports whether the message is whole vectors, and the form has a kernel for such.
func (a *allReduce) whole(form ptx.Form) bool {
	_, ok := ptx.PushWhole(form, a.in.DType().String(), int(a.op), a.in.WorldSize(), false)
	return ok && wholeVectors(a.in, a.out)
}

// newPushParams is the parameter of a kernel for whole vectors, without the message: with slots of so many bytes.
func newPushParams(at *collective.Addresses, slot int64) ptx.PushParams {
	c := at.Comm()
	p := ptx.PushParams{Records: c.Workspace[at.Rank()], Dead: c.Dead, Slot: uint32(slot / 16), Rank: c.Rank, Fault: c.Fault, Stop: c.Stop, Timeout: c.Timeout}
	for k := range at.WorldSize() {
		p.Data = append(p.Data, uint64(at.Workspace((at.Rank()+k)%at.WorldSize())))
	}
	return p
}

// pushParams is the parameter of a kernel for whole vectors.
func (a *allReduce) pushParams(at *collective.Addresses, layout ptx.Layout) []byte {
	p := newPushParams(at, layout.Span())
	p.In, p.Out, p.Op = uint64(at.Tensor(specIn, at.Rank())), uint64(at.Tensor(specOut, at.Rank())), uint32(a.op)
	p.Vectors, p.Shard = uint32(a.in.Bytes()/16), uint32(layout.Shard())
	return p.Bytes()
}
