package measure

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/cmd/symmem/internal/bytesize"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/tensor"
)

// busFactor is what each rank has to send at least, in messages, as nccl-tests has it; 0 for what is no collective.
func busFactor(kind string, ranks int) float64 {
	w := float64(ranks)
	switch kind {
	case AllReduce, AllReduceRMSNorm, AllReduceMany:
		return 2 * (w - 1) / w
	case AllGather, ReduceScatter, AllToAll, AllToAllV, AllGatherMany, ReduceScatterMany:
		return (w - 1) / w
	case Broadcast, Reduce, BroadcastMany:
		return min(w-1, 1)
	}
	return 0
}

// constructors of the collectives other than all-reduce, in package kernels.
var constructors = map[string]string{
	Broadcast: "NewBroadcast", Reduce: "NewReduce", AllGather: "NewAllGather", ReduceScatter: "NewReduceScatter", AllToAll: "NewAllToAll", AllToAllV: "NewAllToAllV", Barrier: "NewBarrier",
}

// collectiveForms returns the forms of a collective to measure: of those that were asked for, or of all, the ones that it has for the dtype here. If
// it has none of them, Auto.
func (b *bencher) collectiveForms(kind string) []kernels.Algorithm {
	if slices.Contains(Lists, kind) { // its plan chooses its form by the size of the list
		return []kernels.Algorithm{kernels.Auto}
	}
	float := b.dtype == tensor.Float32 || b.dtype == tensor.Float16 || b.dtype == tensor.BFloat16
	all := slices.DeleteFunc(kernels.Forms(constructors[kind], b.r.Device().Kind(), b.r.Backend()), func(a kernels.Algorithm) bool {
		combines := kind == Reduce || kind == ReduceScatter
		return a.NeedsPeerPointers() && !b.r.Capabilities().PeerPointers || a == kernels.OneShotPush && !float && combines ||
			(a.NeedsMulticast() || a == kernels.Hierarchical) && combines && !kernels.Supported(b.r.Device().Kind(), a, b.dtype, b.op, b.r.WorldSize()) ||
			a.NeedsMulticast() && !b.r.Capabilities().Multicast
	})
	if slices.Equal(b.spec.Algorithms, []string{AllAlgorithms}) {
		return slices.DeleteFunc(all, func(a kernels.Algorithm) bool {
			return overRails(b.r.Device().Kind(), a) && oneIsland(b.r.Memory().Islands())
		})
	}
	var asked []kernels.Algorithm
	for _, name := range b.spec.Algorithms {
		if a, err := kernels.ParseAlgorithm(name); err == nil && (a == kernels.Auto || slices.Contains(all, a)) {
			asked = append(asked, a)
		}
	}
	if len(asked) == 0 {
		return []kernels.Algorithm{kernels.Auto}
	}
	return asked
}

// overRails reports whether a form is the one for several islands of GPUs. It can be had on one, but there is nothing to measure.
func overRails(kind device.Kind, a kernels.Algorithm) bool {
	return a == kernels.Hierarchical && kind == device.CUDA
}

// oneIsland reports whether all ranks have addresses of each other's memory; islands is what Memory.Islands gives.
func oneIsland(islands []int) bool { return slices.Max(islands) == 0 }

// collectiveSizes returns the sizes to measure: a barrier has none.
func (b *bencher) collectiveSizes(kind string) []int64 {
	if kind == Barrier {
		return []int64{0}
	}
	return b.spec.Sizes
}

// collectivePlan makes the tensors and the plan of a collective other than all-reduce, of a message of at least bytes. closeAll closes what
// it made.
func (b *bencher) collectivePlan(ctx context.Context, kind string, algorithm kernels.Algorithm, bytes int64) (p *kernels.Plan, whole int64, closeAll func(context.Context) error, err error) {
	w := int64(b.r.WorldSize())
	share := shareOf(bytes, w, b.dtype.Bytes()) // elements
	var tensors []tensor.SymmetricTensor
	closeAll = func(ctx context.Context) error {
		var err error
		if p != nil {
			err = p.Close(ctx)
		}
		for _, t := range tensors {
			err = errors.Join(err, t.Close(ctx))
		}
		return err
	}
	opts := &kernels.Options{Algorithm: algorithm, Exclusive: b.spec.Exclusive}
	if kind == Barrier {
		p, err = kernels.NewBarrier(ctx, b.r.Memory(), opts)
		return p, 0, closeAll, err
	}
	ins, outs := share*w, share*w
	switch kind {
	case AllGather:
		ins = share
	case ReduceScatter:
		outs = share
	case Broadcast, Reduce: // which need not be shared out
		ins = (bytes + b.dtype.Bytes() - 1) / b.dtype.Bytes()
		outs = ins
	}
	for _, n := range []int64{ins, outs} {
		t, err := b.tensorOf(ctx, b.dtype, n*b.dtype.Bytes())
		if err != nil {
			return nil, 0, nil, errors.Join(err, closeAll(ctx))
		}
		tensors = append(tensors, t)
	}
	in, out := tensors[0], tensors[1]
	switch kind {
	case Broadcast:
		p, err = kernels.NewBroadcast(ctx, in, 0, opts)
	case Reduce:
		p, err = kernels.NewReduce(ctx, in, out, b.op, 0, opts)
	case AllGather:
		p, err = kernels.NewAllGather(ctx, in, out, opts)
	case ReduceScatter:
		p, err = kernels.NewReduceScatter(ctx, in, out, b.op, opts)
	case AllToAllV:
		p, err = b.dispatchPlan(ctx, in, out, &tensors, opts)
	default:
		p, err = kernels.NewAllToAll(ctx, in, out, opts)
	}
	if err == nil && !b.unchecked {
		check := reduction{kind: kind, name: p.String(), dtype: b.dtype, elements: max(ins, outs), op: b.op, in: in.Ptr(), out: out.Ptr(), enqueue: func() error { return p.Run(b.s) }}
		if kind == Broadcast { // in place
			check.out = check.in
		}
		err = b.checkResult(ctx, check)
	}
	if err != nil {
		return nil, 0, nil, errors.Join(err, closeAll(ctx))
	}
	return p, max(ins, outs) * b.dtype.Bytes(), closeAll, nil
}

// vectorBytes is what kernels load and store at a time.
const vectorBytes = 16

// shareOf is how many elements of width bytes each of w ranks has of a message of at least bytes. Shares of at least a vector of 16 bytes are whole vectors, as those of
// programs mostly are: other kernels are for those that are not.
func shareOf(bytes, w, width int64) int64 {
	share := (bytes + w*width - 1) / (w * width)
	if per := vectorBytes / width; share >= per {
		share = (share + per - 1) / per * per
	}
	return share
}

// dispatchPlan makes the plan of an all-to-all with counts on the device, which are equal. The tensors that it makes are added to tensors.
func (b *bencher) dispatchPlan(ctx context.Context, in, out tensor.SymmetricTensor, tensors *[]tensor.SymmetricTensor, opts *kernels.Options) (*kernels.Plan, error) {
	w := int64(b.r.WorldSize())
	var made [2]tensor.SymmetricTensor
	for i, n := range []int64{w, 2 * w} {
		t, err := b.tensorOf(ctx, tensor.Int64, 8*n)
		if err != nil {
			return nil, err
		}
		made[i], *tensors = t, append(*tensors, t)
	}
	received, err := made[1].Sub(0, 2, w)
	if err != nil {
		return nil, err
	}
	counts := make([]int64, w)
	for q := range counts {
		counts[q] = in.NumElements() / w
	}
	if err := b.r.Device().CopyFromHost(made[0].Ptr(), bytesOf(counts)); err != nil {
		return nil, err
	}
	return kernels.NewAllToAllV(ctx, in, out, made[0], received, opts)
}

// refused reports whether a form is there, but not for what is asked for, as all ranks know: NVSHMEM's reduce-scatter has room for so many bytes, and Hierarchical
// on GPUs has the dtypes and operations of NCCL.
func refused(a kernels.Algorithm, err error) bool {
	return (a.Backend() != "" || a == kernels.Hierarchical) && errors.Is(err, symmem.ErrUnsupported) && !errors.Is(err, symmem.ErrMismatch)
}

// collectives measures all forms of a collective of bytes other than all-reduce and, right after them, NCCL's.
func (b *bencher) collectives(ctx context.Context, kind string, bytes int64) error {
	var row *Row
	for _, alg := range b.collectiveForms(kind) {
		one, err := b.collective(ctx, kind, alg, bytes)
		if err != nil {
			return fmt.Errorf("measuring %s of %s, %s: %w", kind, bytesize.Text(bytes), alg, err)
		}
		if one != nil {
			row = one
		}
	}
	if b.peer == nil || row == nil {
		return nil
	}
	if slices.Contains(Lists, kind) {
		if err := b.peerMany(ctx, *row); err != nil {
			return fmt.Errorf("measuring NCCL's %s in a group: %w", kind, err)
		}
		return nil
	}
	return b.ncclCollective(ctx, *row)
}

// collective measures one, in one form, and returns its row without the times. One that is refused is reported as such, and has none.
func (b *bencher) collective(ctx context.Context, kind string, algorithm kernels.Algorithm, bytes int64) (_ *Row, err error) {
	newPlan := b.collectivePlan
	if slices.Contains(Lists, kind) {
		newPlan = func(ctx context.Context, kind string, _ kernels.Algorithm, bytes int64) (*kernels.Plan, int64, func(context.Context) error, error) {
			return b.manyPlan(ctx, kind, bytes)
		}
	}
	p, whole, closeAll, err := newPlan(ctx, kind, algorithm, bytes)
	if refused(algorithm, err) {
		if b.r.Rank() > 0 {
			return nil, nil
		}
		return nil, b.rep.Row(Row{Kind: kind, Backend: b.r.Backend(), Bytes: bytes, Algorithm: algorithm.String(),
			Note: fmt.Sprintf("%s of %s, %s: %v", kind, bytesize.Text(bytes), algorithm, err)})
	}
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, closeAll(ctx)) }()
	row := Row{Kind: kind, Bytes: whole, Place: "out of place", DType: b.spec.DType, Algorithm: algorithm.String(),
		Chosen: p.Algorithm().String()}
	switch kind {
	case Broadcast:
		row.Place = inPlace
	case Reduce, ReduceScatter:
		row.Op = b.spec.Op
	case Barrier:
		row.Place, row.DType = "", ""
	case AllReduceMany:
		row.Op, row.Place = b.spec.Op, inPlace
	case ReduceScatterMany:
		row.Op = b.spec.Op
	case BroadcastMany:
		row.Place = inPlace
	}
	if slices.Contains(Lists, kind) {
		row.Tensors = b.spec.Tensors
	}
	if err := b.timed(ctx, &row, func() error { return p.Run(b.s) }); err != nil {
		return nil, err
	}
	return &row, nil
}
