package kernels

import (
	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/tensor"
)

// hostMany is the kernel of one plan of many tensors on the host device, with all addresses resolved, so that a run only computes.
type hostMany struct {
	rank, size int
	width      int64 // bytes of an element
	reduce     reducer
	stretches  [2][]hostStretch // of one-shot by parity of the epoch, of two-shot the first
}

// hostStretch is elements of the list that this rank reduces at once: they lie one behind the other on every rank, be they of one tensor or of several.
type hostStretch struct {
	elements int64
	// Of two-shot every rank's input, by rank, this rank's output, and the others' outputs, the next rank's first. Of one-shot every rank's copy of
	// the input, by rank, this rank's output and its input.
	at [][]byte
}

// manyAlign is what stretches are aligned to in a copy of the list, in bytes: whole vectors.
const manyAlign = 16

// manyOneShot is how many stretches a list of one-shot may have, unless it is asked for. Each costs every rank some ten nanoseconds when it is copied, and again
// when it is reduced; of two-shot a rank has its share of them.
const manyOneShot = 8

// manyPiece is how much of an output is written before it is copied to the peers, in bytes: it is in the cache still.
const manyPiece = 32 << 10

// manyRun is tensors of a list that lie one behind the other, inputs and outputs: as one.
type manyRun struct {
	in, out int   // the numbers in the Spec of the first one's tensors
	at      int64 // of the list's bytes
	bytes   int64
}

// findRuns finds the tensors of the list, in its order, those that adjoin on this rank together: then they do on every rank, since all have the same places.
func (m *many) findRuns() ([]manyRun, error) {
	var runs []manyRun
	type end struct{ window, offset int64 } // of a tensor
	place := func(t tensor.SymmetricTensor) (begin, behind end, err error) {
		w, offset, err := t.Window()
		if err != nil {
			return end{}, end{}, err
		}
		return end{int64(w.Number()), offset}, end{int64(w.Number()), offset + t.Bytes()}, nil
	}
	var listed int64
	var in, out end // of the last
	for _, v := range m.parts {
		inAt, inEnd, err := place(v.In)
		if err != nil {
			return nil, err
		}
		outAt, outEnd, err := place(v.Out)
		if err != nil {
			return nil, err
		}
		if n := len(runs); n > 0 && in == inAt && out == outAt {
			runs[n-1].bytes += v.In.Bytes()
		} else {
			runs = append(runs, manyRun{in: v.in, out: v.out, at: listed, bytes: v.In.Bytes()})
		}
		in, out = inEnd, outEnd
		listed += v.In.Bytes()
	}
	return runs, nil
}

// onHost makes the spec that of a kernel on the host device. The workspace of one-shot is two copies of the list.
func (m *many) onHost(s *collective.Spec) {
	s.Program = nil
	if m.algorithm == OneShot {
		var buffer int64
		for _, v := range m.runs {
			buffer += alignUp(v.bytes, manyAlign)
		}
		buffer = alignUp(buffer, cacheLine)
		s.Workspace = 2 * buffer
		s.Host = func(at *collective.Addresses) (collective.HostKernel, error) {
			k, err := m.hostKernel(at)
			if err != nil {
				return nil, err
			}
			for parity := range k.stretches {
				var copied int64
				for _, v := range m.runs {
					var all [][]byte
					for r := range at.WorldSize() {
						all = append(all, at.Bytes(at.Workspace(r).Add(int64(parity)*buffer+copied), v.bytes))
					}
					k.add(parity, append(all, at.Bytes(at.Tensor(v.out, k.rank), v.bytes), at.Bytes(at.Tensor(v.in, k.rank), v.bytes)))
					copied += alignUp(v.bytes, manyAlign)
				}
			}
			return k.oneShot, nil
		}
		return
	}
	s.Host = func(at *collective.Addresses) (collective.HostKernel, error) {
		k, err := m.hostKernel(at)
		if err != nil {
			return nil, err
		}
		// Each rank has as many bytes of the list, whatever tensors they are in.
		size := at.WorldSize()
		each := alignUp((m.bytes+int64(size)-1)/int64(size), cacheLine)
		for _, v := range m.runs {
			lo, hi := max(int64(k.rank)*each-v.at, 0), min(int64(k.rank+1)*each-v.at, v.bytes)
			for ; lo < hi; lo += manyPiece {
				n := min(hi-lo, manyPiece)
				var all [][]byte
				for r := range size {
					all = append(all, at.Bytes(at.Tensor(v.in, r).Add(lo), n))
				}
				for r := range size {
					all = append(all, at.Bytes(at.Tensor(v.out, (k.rank+r)%size).Add(lo), n))
				}
				k.add(0, all)
			}
		}
		return k.twoShot, nil
	}
}

// hostKernel is a kernel without stretches.
func (m *many) hostKernel(at *collective.Addresses) (*hostMany, error) {
	k := &hostMany{rank: at.Rank(), size: at.WorldSize(), width: m.dtype.Bytes(), reduce: newReducer(m.dtype, m.op, at.WorldSize())}
	if k.reduce == nil {
		return nil, errs.Invalid(m.call, "dtype", m.dtype, "a dtype that has kernels")
	}
	return k, nil
}

// add adds a stretch.
func (k *hostMany) add(parity int, at [][]byte) {
	k.stretches[parity] = append(k.stretches[parity], hostStretch{int64(len(at[0])) / k.width, at})
}

// oneShot is hostAllReduce's, over the list.
func (k *hostMany) oneShot(r *collective.HostRun) error {
	stretches := k.stretches[r.Epoch()&1]
	for i := range stretches {
		h := &stretches[i]
		copy(h.at[k.rank], h.at[k.size+1])
	}
	if err := r.Barrier(flagStart); err != nil {
		return err
	}
	for i := range stretches {
		h := &stretches[i]
		k.reduce(h.at[k.size], h.at[:k.size], 0, h.elements)
	}
	return nil
}

// twoShot is hostAllReduce's, over the list.
func (k *hostMany) twoShot(r *collective.HostRun) error {
	if err := r.Barrier(flagStart); err != nil {
		return err
	}
	stretches := k.stretches[0]
	for i := range stretches {
		h := &stretches[i]
		own := h.at[k.size]
		k.reduce(own, h.at[:k.size], 0, h.elements)
		for _, out := range h.at[k.size+1:] {
			copy(out, own)
		}
	}
	return r.Barrier(flagEnd)
}
