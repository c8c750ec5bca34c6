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

// NewReduce prepares a reduction to one rank: after a run, every element of root's out is the combination by op of that element of all ranks'
// in, with the bits that an all-reduce gives, unless the form is one that does not combine in the order of the ranks ([Algorithm.RankOrder]), as Hierarchical, which Auto takes over several islands: Options.RankOrder keeps to those that do.
// Other ranks' out is not written. In and out have the same number of elements, any, of
// one dtype; out may be in itself, in place. 0 elements is no work. Collective: all ranks come with the same tensors, op, root and options
// (ErrMismatch with everybody's value if not), and the tensors must have had their rendezvous. It blocks until all ranks have come. Close
// the plan.
//
// Its errors are those of [collective.New], ErrInvalid for an operation or option that does not exist, a root that is no rank, and an output
// that does not fit the input or overlaps it in part, and ErrUnsupported for a form that a reduction has not on the device.
func NewReduce(ctx context.Context, in, out tensor.SymmetricTensor, op Op, root int, opts *Options) (*Plan, error) {
	m := newMaker("NewReduce", in, out, opts)
	m.combines, m.op = true, op
	return m.plan(ctx, &reduction{maker: m, root: root})
}

// NewReduceScatter prepares a reduction whose result is shared out: in has any number n of elements, out c = ceil(n / world size) of the same
// dtype, and after a run rank r's out has elements r*c to min((r+1)*c, n) of the combination by op of all ranks' in, with the bits that an
// all-reduce gives, unless the form is one that does not combine in the order of the ranks ([Algorithm.RankOrder]), as Hierarchical, which Auto takes over several islands: Options.RankOrder keeps to those that do. What the last ranks' out has more is not touched. Out may also be just this rank's share of in, a Sub of it: in place,
// on all ranks, and the rest of in is not touched. 0 elements is no work. Collective: all ranks come with the same tensors, op and
// options (ErrMismatch with everybody's value if not), and the tensors must have had their rendezvous. It blocks until all ranks have
// come. Close the plan.
//
// Its errors are those of [collective.New], ErrInvalid for an operation or option that does not exist, numbers of elements that do not fit,
// dtypes that differ and tensors that overlap in another way, and ErrUnsupported for a form that a reduce-scatter has not on the device.
func NewReduceScatter(ctx context.Context, in, out tensor.SymmetricTensor, op Op, opts *Options) (*Plan, error) {
	m := newMaker("NewReduceScatter", in, out, opts)
	m.combines, m.op = true, op
	return m.plan(ctx, &reduction{maker: m, scatter: true})
}

// reduction is a reduce, or a reduce-scatter.
type reduction struct {
	*maker
	root    int
	scatter bool // every rank gets a share, and there is no root
}

func (r *reduction) check() (whole tensor.SymmetricTensor, err error) {
	if err := r.checkOp(r.op); err != nil {
		return nil, err
	}
	if r.scatter {
		return r.checkShare(r.in, r.out, "out")
	}
	if err := r.checkRoot(r.root); err != nil {
		return nil, err
	}
	if r.out.NumElements() != r.in.NumElements() {
		return nil, errs.Invalid(r.call, "out.NumElements", r.out.NumElements(), fmt.Sprintf("%d, those of in", r.in.NumElements()))
	}
	if r.in.Ptr() == r.out.Ptr() {
		return r.in, nil
	}
	return nil, r.checkApart(", or just in")
}

func (r *reduction) describe() string {
	if r.scatter {
		return fmt.Sprintf("reduce-scatter %s of %d %s", r.op, r.in.NumElements(), r.in.DType())
	}
	return fmt.Sprintf("reduce %s to rank %d of %d %s", r.op, r.root, r.in.NumElements(), r.in.DType())
}

func (r *reduction) algorithms(kind device.Kind) []Algorithm {
	if kind != device.CUDA {
		return []Algorithm{OneShot, Hierarchical}
	}
	forms := []Algorithm{OneShotLL, OneShotPull}
	if _, float := ptx.PushScatter(ptx.OneShotPush, r.in.DType().String(), false); float {
		forms = append(forms, OneShotPush)
	}
	if Supported(kind, OneShotMultimem, r.in.DType(), r.op, r.in.WorldSize()) {
		forms = append(forms, OneShotMultimem)
	}
	return forms
}

// share is the range of elements of the input whose combination rank has in its output.
func (r *reduction) share(rank int) (lo, hi int64) {
	n := r.in.NumElements()
	switch {
	case r.scatter:
		return shareOf(n, r.in.WorldSize(), rank)
	case rank == r.root:
		return 0, n
	}
	return 0, 0
}

func (r *reduction) spec(s *collective.Spec) {
	switch {
	case r.algorithm == Transfers:
		r.byTransfers(s)
	case r.algorithm == Hierarchical && r.in.Device().Kind() == device.CUDA:
		r.byRails(s)
	case r.algorithm == Hierarchical:
		r.byIslands(s)
	case r.algorithm == OneShotLL, r.algorithm == OneShotPush:
		r.byPush(s)
	case r.algorithm.Backend() != "":
		count := r.in.NumElements()
		if r.scatter {
			count = r.evenly(s, count)
		}
		if s.Failure == nil {
			r.byLibrary(s, count, r.in.DType(), r.op, r.root)
		}
	case r.in.Device().Kind() == device.CUDA:
		r.onCUDA(s) // OneShotMultimem too
	default:
		r.onHost(s)
	}
}
