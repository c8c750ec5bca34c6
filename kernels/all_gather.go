package kernels

import (
	"context"
	"fmt"

	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/kernels/ptx"
	"github.com/symmem/symmem/tensor"
)

// NewAllGather prepares an all-gather: after a run, every rank's out has the elements of all ranks' in, rank 0's first. Out has any number n
// of elements, of any shape and dtype, and in c = ceil(n / world size); rank r's share of out is elements r*c to min((r+1)*c, n), so that
// of the last ranks only the first elements of in may count, or none. In may also be just this rank's share of out, a Sub of it: in
// place, on all ranks. 0 elements is no work. Collective: all ranks come with the same tensors and options (ErrMismatch with everybody's
// value if not), and these must have had their rendezvous. It blocks until all ranks have come. Close the plan.
//
// Its errors are those of [collective.New], ErrInvalid for numbers of elements that do not fit, dtypes that differ, tensors that overlap in
// another way and options that do not exist, and ErrUnsupported for a form that an all-gather has not on the device.
func NewAllGather(ctx context.Context, in, out tensor.SymmetricTensor, opts *Options) (*Plan, error) {
	m := newMaker("NewAllGather", in, out, opts)
	return m.plan(ctx, &allGather{m})
}

type allGather struct{ *maker }

func (a *allGather) check() (whole tensor.SymmetricTensor, err error) {
	return a.checkShare(a.out, a.in, "in")
}

func (a *allGather) describe() string {
	return fmt.Sprintf("all-gather of %d %s", a.out.NumElements(), a.out.DType())
}

func (a *allGather) algorithms(kind device.Kind) []Algorithm {
	if kind != device.CUDA {
		return []Algorithm{OneShot, Hierarchical}
	}
	return []Algorithm{OneShotLL, OneShotPush, OneShotPull, OneShotMultimem}
}

func (a *allGather) spec(s *collective.Spec) {
	switch {
	case a.algorithm == Hierarchical && a.in.Device().Kind() == device.CUDA:
		a.byRails(s)
		return
	case a.algorithm == Hierarchical:
		a.byIslands(s)
		return
	}
	v := &movement{maker: a.maker, phases: []phase{a.share}, pattern: ptx.Gather, shares: a.out.NumElements()}
	v.spec(s)
}

// share is what every rank has from another, and, unless it is there already, from itself.
func (a *allGather) share(from, to int) piece {
	width := a.out.DType().Bytes()
	lo, hi := shareOf(a.out.NumElements(), a.out.WorldSize(), from)
	p := piece{dst: lo * width, bytes: (hi - lo) * width, turn: from}
	if a.inPlace() {
		p.src = p.dst // the one tensor is the whole
		if from == to {
			return piece{}
		}
	}
	return p
}
