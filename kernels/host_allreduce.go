package kernels

import (
	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/internal/errs"
)

// cacheLine is what shares are cut at on the host, in bytes: two cache lines, as processors fetch lines in pairs.
const cacheLine = 128

// The flags of a run.
const (
	flagStart = iota // inputs are ready
	flagEnd          // outputs are complete
)

// hostAllReduce is the kernel of one plan on the host device, with all addresses resolved, so that a run only computes.
type hostAllReduce struct {
	rank     int
	size     int
	elements int64
	width    int64 // bytes of an element
	reduce   reducer

	in, out []byte
	ins     [][]byte    // every rank's input, by rank
	outs    [][]byte    // every rank's output, by rank
	buffers [2][][]byte // one-shot: every rank's message buffer, by parity of the epoch and rank
}

// onHost makes the spec that of a kernel on the host device. The workspace of one-shot is two message buffers.
func (a *allReduce) onHost(s *collective.Spec) {
	s.Program = nil
	if a.algorithm == OneShot {
		s.Workspace = 2 * a.hostBuffer()
	}
	s.Host = func(at *collective.Addresses) (collective.HostKernel, error) {
		k, err := a.hostKernel(at)
		if err != nil {
			return nil, err
		}
		if a.algorithm == OneShot {
			return k.oneShot, nil
		}
		return k.twoShot, nil
	}
}

// hostBuffer is the size of a message buffer, in bytes.
func (a *allReduce) hostBuffer() int64 { return alignUp(a.in.Bytes(), cacheLine) }

func (a *allReduce) hostKernel(at *collective.Addresses) (*hostAllReduce, error) {
	n := a.in.Bytes()
	k := &hostAllReduce{
		rank: at.Rank(), size: at.WorldSize(), elements: a.in.NumElements(), width: a.in.DType().Bytes(),
		reduce: newReducer(a.in.DType(), a.op, at.WorldSize()),
	}
	if k.reduce == nil {
		return nil, errs.Invalid("NewAllReduce", "dtype", a.in.DType(), "a dtype that has kernels")
	}
	for r := range k.size {
		k.ins, k.outs = append(k.ins, at.Bytes(at.Tensor(specIn, r), n)), append(k.outs, at.Bytes(at.Tensor(specOut, r), n))
		if a.algorithm == OneShot {
			for parity := range k.buffers {
				k.buffers[parity] = append(k.buffers[parity], at.Bytes(at.Workspace(r).Add(int64(parity)*a.hostBuffer()), n))
			}
		}
	}
	k.in, k.out = k.ins[k.rank], k.outs[k.rank]
	return k, nil
}

// oneShot: copy the input where the peers may read it, tell them, wait until all have, and reduce all buffers.
//
// Two buffers are enough without a second exchange. A buffer is written again two runs later, and between the two lies a run
// that this rank could end only because every peer had begun it, and so had read all it wanted of the run before.
func (k *hostAllReduce) oneShot(r *collective.HostRun) error {
	buffers := k.buffers[r.Epoch()&1]
	copy(buffers[k.rank], k.in)
	if err := r.Barrier(flagStart); err != nil {
		return err
	}
	k.reduce(k.out, buffers, 0, k.elements)
	return nil
}

// twoShot: wait until all inputs are ready, reduce one part of all of them, write it to every output, and wait until all
// parts are there. In place is safe: nobody else reads or writes the inputs' part that this rank works on.
func (k *hostAllReduce) twoShot(r *collective.HostRun) error {
	if err := r.Barrier(flagStart); err != nil {
		return err
	}
	lo, hi := partOf(k.elements, k.width, k.size, k.rank)
	// In pieces, so that what was reduced is still in the cache when it is copied to the peers.
	const piece = 32 << 10
	step := piece / k.width
	for at := lo; at < hi; at += step {
		end := min(at+step, hi)
		k.reduce(k.out, k.ins, at, end)
		done := k.out[at*k.width : end*k.width]
		for i := 1; i < k.size; i++ {
			copy(k.outs[(k.rank+i)%k.size][at*k.width:end*k.width], done)
		}
	}
	return r.Barrier(flagEnd)
}

// partOf is the range of elements, of so many bytes each, that one of size ranks reduces: equal parts cut at cache lines, counted from the
// first element.
func partOf(elements, width int64, size, rank int) (lo, hi int64) {
	line := max(cacheLine/width, 1)
	each := (elements + int64(size) - 1) / int64(size)
	each = (each + line - 1) / line * line
	return min(int64(rank)*each, elements), min(int64(rank+1)*each, elements)
}
