package kernels

import (
	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/internal/errs"
)

// hostMany is the kernel of one plan of many tensors on the host device.
type hostMany struct {
	rank, size int
	width      int64 // bytes of an element
	bytes      int64 // of all tensors
	reduce     reducer
	parts      []hostPart
}

// hostPart is one tensor of the list.
type hostPart struct {
	at      int64       // of the list's bytes
	bytes   int64       // of the tensor
	ins     [][]byte    // every rank's input, by rank
	outs    [][]byte    // every rank's output, by rank
	buffers [2][][]byte // one-shot: every rank's copy of the input, by parity of the epoch and rank
}

// manyAlign is what tensors are aligned to in a copy of the list, in bytes: whole vectors.
const manyAlign = 16

// onHost makes the spec that of a kernel on the host device. The workspace of one-shot is two copies of the list.
func (m *many) onHost(s *collective.Spec) {
	s.Program = nil
	var buffer int64
	for _, v := range m.parts {
		buffer += alignUp(v.In.Bytes(), manyAlign)
	}
	buffer = alignUp(buffer, cacheLine)
	if m.algorithm == OneShot {
		s.Workspace = 2 * buffer
	}
	s.Host = func(at *collective.Addresses) (collective.HostKernel, error) {
		k := &hostMany{rank: at.Rank(), size: at.WorldSize(), width: m.dtype.Bytes(), bytes: m.bytes, reduce: newReducer(m.dtype, m.op, at.WorldSize())}
		if k.reduce == nil {
			return nil, errs.Invalid(manyCall, "dtype", m.dtype, "a dtype that has kernels")
		}
		var listed, copied int64
		for _, v := range m.parts {
			p := hostPart{at: listed, bytes: v.In.Bytes()}
			for r := range k.size {
				p.ins = append(p.ins, at.Bytes(at.Tensor(v.in, r), p.bytes))
				p.outs = append(p.outs, at.Bytes(at.Tensor(v.out, r), p.bytes))
				if m.algorithm != OneShot {
					continue
				}
				for parity := range p.buffers {
					p.buffers[parity] = append(p.buffers[parity], at.Bytes(at.Workspace(r).Add(int64(parity)*buffer+copied), p.bytes))
				}
			}
			k.parts = append(k.parts, p)
			listed += p.bytes
			copied += alignUp(p.bytes, manyAlign)
		}
		if m.algorithm == OneShot {
			return k.oneShot, nil
		}
		return k.twoShot, nil
	}
}

// oneShot is hostAllReduce's, over the list.
func (k *hostMany) oneShot(r *collective.HostRun) error {
	parity := r.Epoch() & 1
	for i := range k.parts {
		p := &k.parts[i]
		copy(p.buffers[parity][k.rank], p.ins[k.rank])
	}
	if err := r.Barrier(flagStart); err != nil {
		return err
	}
	for i := range k.parts {
		p := &k.parts[i]
		k.reduce(p.outs[k.rank], p.buffers[parity], 0, p.bytes/k.width)
	}
	return nil
}

// twoShot is hostAllReduce's, over the list: each rank has as many bytes of it, whatever tensors they are in.
func (k *hostMany) twoShot(r *collective.HostRun) error {
	if err := r.Barrier(flagStart); err != nil {
		return err
	}
	each := alignUp((k.bytes+int64(k.size)-1)/int64(k.size), cacheLine)
	lo, hi := int64(k.rank)*each, int64(k.rank+1)*each
	for i := range k.parts {
		p := &k.parts[i]
		k.part(p, max(lo-p.at, 0), min(hi-p.at, p.bytes))
	}
	return r.Barrier(flagEnd)
}

// part reduces bytes lo to hi of a tensor and writes them to every output, in pieces that stay in the cache.
func (k *hostMany) part(p *hostPart, lo, hi int64) {
	const piece = 32 << 10
	own := p.outs[k.rank]
	for at := lo; at < hi; at += piece {
		end := min(at+piece, hi)
		k.reduce(own, p.ins, at/k.width, end/k.width)
		for i := 1; i < k.size; i++ {
			copy(p.outs[(k.rank+i)%k.size][at:end], own[at:end])
		}
	}
}
