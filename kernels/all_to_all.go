package kernels

import (
	"context"
	"fmt"

	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/kernels/ptx"
	"github.com/symmem/symmem/tensor"
)

// NewAllToAll prepares an all-to-all: in and out are as many equal blocks as there are ranks, and after a run block r of rank j's out is block
// j of rank r's in. Both have the same number of elements, a multiple of the world size, of any shape and dtype; they must not overlap. 0
// elements is no work. Collective: all ranks come with the same tensors and options (ErrMismatch with everybody's value if not), and
// these must have had their rendezvous. It blocks until all ranks have come. Close the plan.
//
// Its errors are those of [collective.New], ErrInvalid for numbers of elements that do not fit, dtypes that differ, tensors that overlap and
// options that do not exist, and ErrUnsupported for a form that an all-to-all has not on the device.
func NewAllToAll(ctx context.Context, in, out tensor.SymmetricTensor, opts *Options) (*Plan, error) {
	m := newMaker("NewAllToAll", in, out, opts)
	return m.plan(ctx, &allToAll{m})
}

type allToAll struct{ *maker }

func (a *allToAll) check() (whole tensor.SymmetricTensor, err error) {
	n, size := a.in.NumElements(), int64(a.in.WorldSize())
	switch {
	case n%size != 0:
		return nil, errs.Invalid(a.call, "in.NumElements", n, fmt.Sprintf("a multiple of %d, the number of ranks", size))
	case a.out.NumElements() != n:
		return nil, errs.Invalid(a.call, "out.NumElements", a.out.NumElements(), fmt.Sprintf("%d, those of in", n))
	}
	return nil, a.checkApart("")
}

func (a *allToAll) describe() string {
	return fmt.Sprintf("all-to-all of %d %s", a.in.NumElements(), a.in.DType())
}

func (a *allToAll) algorithms(kind device.Kind) []Algorithm {
	if kind != device.CUDA {
		return []Algorithm{OneShot, Hierarchical}
	}
	return []Algorithm{OneShotLL, OneShotPush, OneShotPull}
}

func (a *allToAll) spec(s *collective.Spec) {
	switch {
	case a.algorithm == Hierarchical && a.in.Device().Kind() == device.CUDA:
		a.byRails(s)
	case a.algorithm == Hierarchical:
		a.byIslands(s)
	default:
		a.movement().spec(s)
	}
}

func (a *allToAll) movement() *movement {
	return &movement{maker: a.maker, phases: []phase{a.block}, pattern: ptx.Exchange, shares: a.in.NumElements()}
}

// blockBytes is the size of what a rank has for another.
func (a *allToAll) blockBytes() int64 { return a.in.Bytes() / int64(a.in.WorldSize()) }

func (a *allToAll) block(from, to int) piece {
	bytes := a.blockBytes()
	return piece{src: int64(to) * bytes, dst: int64(from) * bytes, bytes: bytes, turn: from}
}
