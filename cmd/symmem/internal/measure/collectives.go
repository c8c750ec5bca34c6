package measure

import (
	"context"
	"errors"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/tensor"
)

// busFactor is what each rank has to send at least, in messages, as nccl-tests has it; 0 for what is no collective.
func busFactor(kind string, ranks int) float64 {
	w := float64(ranks)
	switch kind {
	case AllReduce, AllReduceMany:
		return 2 * (w - 1) / w
	case AllGather, ReduceScatter, AllToAll:
		return (w - 1) / w
	case Broadcast, Reduce:
		return min(w-1, 1)
	}
	return 0
}

// collectivePlan makes the tensors and the plan of a collective other than all-reduce, of a message of at least bytes. closeAll closes what
// it made.
func (b *bencher) collectivePlan(ctx context.Context, kind string, bytes int64) (p *kernels.Plan, whole int64, closeAll func(context.Context) error, err error) {
	dtype, err := tensor.ParseDType(b.spec.DType)
	if err != nil {
		return nil, 0, nil, err
	}
	op, err := kernels.ParseOp(b.spec.Op)
	if err != nil {
		return nil, 0, nil, err
	}
	w := int64(b.r.WorldSize())
	share := (bytes + w*dtype.Bytes() - 1) / (w * dtype.Bytes()) // elements
	var tensors []*tensor.Tensor
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
	ins, outs := share*w, share*w
	switch kind {
	case AllGather:
		ins = share
	case ReduceScatter:
		outs = share
	}
	for _, n := range []int64{ins, outs} {
		t, err := b.tensorOf(ctx, dtype, n*dtype.Bytes())
		if err != nil {
			return nil, 0, nil, errors.Join(err, closeAll(ctx))
		}
		tensors = append(tensors, t)
	}
	in, out := tensors[0], tensors[1]
	switch kind {
	case Broadcast:
		p, err = kernels.NewBroadcast(ctx, in, 0, nil)
	case Reduce:
		p, err = kernels.NewReduce(ctx, in, out, op, 0, nil)
	case AllGather:
		p, err = kernels.NewAllGather(ctx, in, out, nil)
	case ReduceScatter:
		p, err = kernels.NewReduceScatter(ctx, in, out, op, nil)
	default:
		p, err = kernels.NewAllToAll(ctx, in, out, nil)
	}
	if err != nil {
		return nil, 0, nil, errors.Join(err, closeAll(ctx))
	}
	return p, share * w * dtype.Bytes(), closeAll, nil
}

// collective measures one, in the form that it takes by itself.
func (b *bencher) collective(ctx context.Context, kind string, bytes int64) (err error) {
	newPlan := b.collectivePlan
	if kind == AllReduceMany {
		newPlan = func(ctx context.Context, _ string, bytes int64) (*kernels.Plan, int64, func(context.Context) error, error) {
			return b.manyPlan(ctx, bytes)
		}
	}
	p, whole, closeAll, err := newPlan(ctx, kind, bytes)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, closeAll(ctx)) }()
	n, each := b.iterations(whole), 1
	row := Row{Kind: kind, Bytes: whole, Place: "out of place", DType: b.spec.DType, Algorithm: kernels.Auto.String(),
		Chosen: p.Algorithm().String(), Mode: "eager"}
	switch kind {
	case Broadcast:
		row.Place = "in place"
	case Reduce, ReduceScatter:
		row.Op = b.spec.Op
	case AllReduceMany:
		row.Op, row.Place, row.Tensors = b.spec.Op, "in place", b.spec.Tensors
	}
	enqueue := func() error { return p.Run(b.s) }
	var graph device.Graph
	if b.spec.Graph {
		row.Mode, each = "graph", min(graphRuns, n)
		n -= n % each
		if graph, err = b.capture(repeated(each, enqueue)); err != nil {
			return err
		}
		defer func() { err = errors.Join(graph.Close(), err) }()
		enqueue = func() error { return graph.Launch(b.s) }
	}
	row.Iterations = n
	times, err := b.measure(ctx, n, each, enqueue)
	if err != nil {
		return err
	}
	return b.report(ctx, row, times.total)
}
