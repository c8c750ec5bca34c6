package kernels

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// Plan is a collective of this package that was prepared once and can be run many times: see [collective.Plan], whose methods it has. Plans that NCCL carries out are run in the same order
// on every rank: see Forms in the comment of this package.
type Plan struct {
	*collective.Plan
	algorithm Algorithm
	bytes     int64
}

// orZero is the plan, or the zero Plan for nil. A constructor that fails gives nil, and whoever closes that all the same gets an error: methods that were only embedded would panic.
func (p *Plan) orZero() *Plan {
	if p == nil {
		return new(Plan)
	}
	return p
}

// Run is [collective.Plan.Run].
func (p *Plan) Run(s device.Stream) error { return p.orZero().Plan.Run(s) }

// Close is [collective.Plan.Close].
func (p *Plan) Close(ctx context.Context) error { return p.orZero().Plan.Close(ctx) }

// Err is [collective.Plan.Err].
func (p *Plan) Err() error { return p.orZero().Plan.Err() }

// String returns the collective's name.
func (p *Plan) String() string { return p.orZero().Plan.String() }

// Algorithm is the form that was chosen.
func (p *Plan) Algorithm() Algorithm { return p.orZero().algorithm }

// Bytes is the size of the message, one rank's input.
func (p *Plan) Bytes() int64 { return p.orZero().bytes }

// AllReduceOptions sets what NewAllReduce makes. Nil or zero values mean the defaults.
type AllReduceOptions struct {
	// Out takes the result, of the same dtype and number of elements as the input, with its rendezvous behind it; it must
	// not overlap the input in part. Nil: in place.
	Out tensor.SymmetricTensor
	// Algorithm is the form; Auto by default, which takes what tables say is the fastest ([github.com/symmem/symmem/memory.Memory.Tuning]). Of messages of more than 384 MiB between 2 H200, and of 1 GiB and more
	// between 3 and 4, that is Transfers, which copy engines carry out faster than a kernel does, with up to 768 MiB of workspace on each rank for each plan that is open; where that cannot be
	// had, or with TwoShotFlow, a kernel does it with some 130 MiB, which the memory keeps for the next plans. Where the memory has multicast addresses it
	// may be a form that does not combine in the order of the ranks: see RankOrder. So it is over several islands, as hosts with several ranks each are: from 64 KiB on it is Hierarchical.
	// Between GPUs on memory of backend nccl it is NCCL, and Hierarchical of 16 MiB and more for each rank of an island, where all islands have as many. What NCCL does not have, as 16-bit integers and the
	// order of the ranks, is Transfers, where NCCL has puts.
	//
	// Auto never takes QuantizedInt8, which is lossy; see there what that means: [QuantizedBytes].
	Algorithm Algorithm
	// MaxBlocks is the most blocks that a kernel of the plan may take on a CUDA device, to leave more room for other work and
	// for plans on other streams; the same on every rank. 0, the default, is as many as are of use, but at most what leaves room
	// for a second plan like it. The setting max-blocks bounds all plans. Ignored by forms that launch no kernel of this module.
	MaxBlocks int
	// Exclusive lets the plan's kernels take all of a CUDA device but a small part, as [Options] says; the same on every rank.
	Exclusive bool
	// RankOrder keeps the plan to forms that promise the bits of the order of the ranks ([Algorithm.RankOrder]), so that a result does not depend
	// on the size of the message, on how it was split, or on what else was sent with it. Auto takes none but those then, whatever tables and
	// registered forms there are, and an Algorithm without the promise is ErrUnsupported. The setting rank-order does so for all that Auto takes. Every rank gives the same.
	RankOrder bool
	// FirstEpoch is the count that runs begin at. It exists to test that counting wraps around; every rank gives the same.
	FirstEpoch uint32
}

// NewAllReduce prepares an all-reduce of t over its group: after a run, every element of the output is the combination by op
// of that element on all ranks. Every count of elements works; 0 elements is no work. Collective: all ranks come with the
// same dtype, number of elements, op and options (ErrMismatch with everybody's value if not), and t must have had its
// rendezvous. It blocks until all ranks have come. Close the plan.
//
// Its errors are those of [collective.New], ErrInvalid for an operation or option that does not exist and an output that does not
// fit the input, and ErrUnsupported where there is no kernel of the form for the dtype and operation.
func NewAllReduce(ctx context.Context, t tensor.SymmetricTensor, op Op, opts *AllReduceOptions) (*Plan, error) {
	const call = "NewAllReduce"
	own := AllReduceOptions{}
	if opts != nil {
		own = *opts // a call that has given up its turn looks at them later
	}
	opts = &own
	out, failure := t, usable(call, "t", t)
	if !errs.IsNil(opts.Out) {
		out = opts.Out
		failure = errors.Join(failure, usable(call, "Out", out))
	}
	if failure = errors.Join(errs.Given(call, "ctx", ctx, "a context"), failure); failure != nil {
		return nil, refuse(ctx, call, failure, t, out)
	}
	if opts.Algorithm == Auto && t.Memory().RankOrder() {
		opts.RankOrder = true
	}
	return inTurn(ctx, t.Memory(), call, func(ctx context.Context, _ error) (*Plan, error) { return firstAllReduce(ctx, t, out, op, opts) })
}

// inTurn makes what a constructor does one collective call, whatever forms it tries. One that gave up comes to the first step.
func inTurn(ctx context.Context, m *memory.Memory, call string, prepare func(ctx context.Context, gaveUp error) (*Plan, error)) (*Plan, error) {
	var made *Plan
	err := m.InTurn(ctx, call, func(ctx context.Context, gaveUp error) error {
		p, err := prepare(ctx, gaveUp)
		if gaveUp == nil { // else who called has gone
			made = p
		}
		return err
	})
	return made, err
}

// firstAllReduce prepares an all-reduce in the form that was asked for, or the first that can be had.
func firstAllReduce(ctx context.Context, t, out tensor.SymmetricTensor, op Op, opts *AllReduceOptions) (*Plan, error) {
	far := opts.Algorithm == Auto && t.Bytes() > 0 && !reachable(t, out)
	whole := wholeVectors(t, out)
	var avoided []Algorithm
	return untilHad(t.Memory(), opts.Algorithm, &avoided, func() (*Plan, Algorithm, error) {
		asked := opts.Algorithm
		switch {
		case far:
			asked = farAllReduce(t, out, op, opts, avoided)
		case asked == Auto && t.Bytes() == 0:
			asked = Transfers // without elements there is no address to ask for, and nothing to reach
		}
		c := chooseAllReduce(t.Memory(), t.Memory().Tuning(), asked, t.Device().Kind(), t.DType(), op, t.Bytes(), t.WorldSize(), whole, func(a Algorithm) bool {
			return opts.RankOrder && !a.RankOrder() || slices.Contains(avoided, a)
		})
		p, err := newAllReduce(ctx, c, t, out, op, opts)
		return p, c.algorithm, err
	})
}

// farAllReduce is the form that Auto takes where a peer's copy of the tensors has no address in this process.
func farAllReduce(t, out tensor.SymmetricTensor, op Op, opts *AllReduceOptions, avoided []Algorithm) Algorithm {
	does := func(a Algorithm) bool {
		return Supported(t.Device().Kind(), a, t.DType(), op, t.WorldSize()) && (!opts.RankOrder || a.RankOrder())
	}
	form := farForm(t.Memory(), does, libraryAllReduces(t.Memory().Backend().Name())...)
	if !opts.RankOrder && !slices.Contains(avoided, Hierarchical) && (takesIslands(t.Memory(), t.Bytes(), t, out) || form == NCCL && railsAreFaster(t, out, op)) {
		return Hierarchical
	}
	return form
}

// reachable reports whether every peer's copy of the tensors has an address in this process, as far as it is known.
func reachable(ts ...tensor.SymmetricTensor) bool {
	for _, t := range ts {
		for r := range t.WorldSize() {
			if _, err := t.Remote(r); errors.Is(err, errs.ErrNotReachable) {
				return false
			}
		}
	}
	return true
}

// allReduce is one that is being prepared, in the form that was chosen.
type allReduce struct {
	in, out   tensor.SymmetricTensor
	op        Op
	algorithm Algorithm
	opts      *AllReduceOptions
	maxBlocks int
	lap       int64 // of TwoShotFlow
	inPlace   bool
	rankOrder bool
}

// The numbers of the tensors in the Spec.
const (
	specIn = iota
	specOut
)

func newAllReduce(ctx context.Context, c choice, in, out tensor.SymmetricTensor, op Op, opts *AllReduceOptions) (*Plan, error) {
	a := allReduce{in: in, out: out, op: op, algorithm: c.algorithm, opts: opts, maxBlocks: opts.MaxBlocks, lap: c.lap, rankOrder: opts.RankOrder, inPlace: in.Ptr() == out.Ptr()}
	if opts.MaxBlocks >= 0 { // which check refuses otherwise
		a.maxBlocks = atMostBlocks(opts.MaxBlocks, c.blocks)
	}
	spec := a.spec()
	spec.FirstEpoch = opts.FirstEpoch
	p, err := collective.New(ctx, in.Memory(), spec)
	if err != nil {
		return nil, err
	}
	return &Plan{Plan: p, algorithm: c.algorithm, bytes: in.Bytes()}, nil
}

// spec describes the all-reduce.
func (a *allReduce) spec() collective.Spec {
	s := collective.Spec{
		Name:       fmt.Sprintf("all-reduce %s of %d %s, %s", a.op, a.in.NumElements(), a.in.DType(), a.algorithm),
		Tensors:    []tensor.SymmetricTensor{a.in, a.out},
		Parameters: fmt.Sprintf("at most %d blocks, in rank order %t", a.maxBlocks, a.rankOrder),
		Exclusive:  a.opts != nil && a.opts.Exclusive,
		Program:    &collective.Program{Build: func(context.Context, *collective.Builder) error { return nil }},
	}
	if a.opts != nil && a.opts.Algorithm == Auto {
		s.Parameters += ", chosen by auto" // who asks for the form does not go on with another one
	}
	if s.Failure = a.check(s.Name); s.Failure != nil || a.in.Bytes() == 0 {
		return s
	}
	switch {
	case a.algorithm.form() != nil:
		a.byForm(&s)
	case a.algorithm.Backend() != "":
		a.byLibrary(&s)
	case a.algorithm == QuantizedInt8:
		a.quantized(&s)
	case a.algorithm == Hierarchical && a.in.Device().Kind() == device.CUDA:
		a.byRails(&s)
	case a.algorithm == Hierarchical:
		a.byHierarchy(&s)
	case a.algorithm == Transfers:
		a.byTransfers(&s)
	case a.in.Device().Kind() == device.CUDA:
		a.onCUDA(&s)
	default:
		a.onHost(&s)
	}
	return s
}

// check says what is wrong with this rank's request.
func (a *allReduce) check(plan string) error {
	const name = "NewAllReduce"
	kind := a.in.Device().Kind()
	if !a.op.Valid() {
		return errs.Invalid(name, "op", a.op, fmt.Sprint(Ops()))
	}
	if !a.algorithm.known() {
		return errs.Invalid(name, "Algorithm", a.algorithm, fmt.Sprint(append([]Algorithm{Auto}, Algorithms(kind)...)))
	}
	if a.maxBlocks < 0 {
		return errs.Invalid(name, "MaxBlocks", a.maxBlocks, "0 for the default, or more")
	}
	if a.rankOrder && !a.algorithm.RankOrder() {
		return notInRankOrder(a.opts.Algorithm, a.algorithm)
	}
	have := a.in.Memory().Backend().Name()
	if b := a.algorithm.Backend(); b != "" && b != have {
		return fmt.Errorf("%s is the all-reduce of the library below backend %s, and this memory is of backend %s: %w", a.algorithm, b, have, errs.ErrUnsupported)
	}
	if !Supported(kind, a.algorithm, a.in.DType(), a.op, a.in.WorldSize()) {
		return fmt.Errorf("there is no kernel for %s on a %s device: %w", plan, kind, errs.ErrUnsupported)
	}
	if a.algorithm == Hierarchical && kind == device.CUDA {
		if err := checkRails(a.in.Memory(), a.in.DType(), a.op); err != nil {
			return err
		}
	}
	for _, t := range []tensor.SymmetricTensor{a.in, a.out} {
		if err := t.Err(); err != nil {
			return err
		}
		for r := range t.WorldSize() {
			if _, err := t.Remote(r); err != nil && (a.algorithm.NeedsPeerPointers() || r == t.Rank()) {
				return err
			}
		}
		if a.algorithm == Hierarchical {
			if err := reachesIsland(t, a.in.Memory()); err != nil {
				return err
			}
		}
	}
	switch {
	case a.out.Memory() != a.in.Memory():
		return errs.Foreign(name, "Out", "a tensor of another group", "a tensor of the same memory as the input")
	case a.out.DType() != a.in.DType():
		return errs.Invalid(name, "Out.DType", a.out.DType(), a.in.DType().String()+", the input's")
	case a.out.NumElements() != a.in.NumElements():
		return errs.Invalid(name, "Out.NumElements", a.out.NumElements(), fmt.Sprintf("%d, the input's", a.in.NumElements()))
	}
	in, out, n := a.in.Ptr(), a.out.Ptr(), device.Ptr(a.in.Bytes())
	if !a.inPlace && in < out+n && out < in+n {
		return errs.Invalid(name, "Out", fmt.Sprintf("%d bytes at %s", n, out), fmt.Sprintf("memory apart from the input, %d bytes at %s, or just the input", n, in))
	}
	return nil
}
