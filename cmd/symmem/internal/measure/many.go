package measure

import (
	"context"
	"errors"
	"fmt"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/cuda"
	"github.com/symmem/symmem/internal/nccl"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/tensor"
)

// oneOfList is what each tensor of a list goes through; an all-reduce of many is an all-reduce.
var oneOfList = map[string]string{AllGatherMany: AllGather, ReduceScatterMany: ReduceScatter, BroadcastMany: Broadcast}

// manyPlan makes the tensors, of which each whole is at least bytes, and one plan of a kind for all of them: an all-reduce and a broadcast in place, the others out of place. closeAll closes what it made.
func (b *bencher) manyPlan(ctx context.Context, kind string, bytes int64) (p *kernels.Plan, whole int64, closeAll func(context.Context) error, err error) {
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
	w, width := int64(b.r.WorldSize()), b.dtype.Bytes()
	sizes := []int64{bytes} // of what one pair has
	if kind == AllGatherMany || kind == ReduceScatterMany {
		share := shareOf(bytes, w, width) * width
		sizes = []int64{share * w, share}
	}
	var pairs []kernels.Pair
	for range b.spec.Tensors {
		var made []tensor.SymmetricTensor
		for _, n := range sizes {
			t, err := b.tensorOf(ctx, b.dtype, n)
			if err != nil {
				return nil, 0, nil, errors.Join(err, closeAll(ctx))
			}
			tensors, made = append(tensors, t), append(made, t)
		}
		whole += made[0].Bytes()
		switch kind {
		case AllGatherMany:
			pairs = append(pairs, kernels.Pair{In: made[1], Out: made[0]})
		case ReduceScatterMany:
			pairs = append(pairs, kernels.Pair{In: made[0], Out: made[1]})
		default:
			pairs = append(pairs, kernels.Pair{In: made[0]})
		}
	}
	opts := &kernels.Options{Exclusive: b.spec.Exclusive}
	switch kind {
	case AllGatherMany:
		p, err = kernels.NewAllGatherMany(ctx, pairs, opts)
	case ReduceScatterMany:
		p, err = kernels.NewReduceScatterMany(ctx, pairs, b.op, opts)
	case BroadcastMany:
		p, err = kernels.NewBroadcastMany(ctx, tensors, 0, opts)
	default:
		p, err = kernels.NewAllReduceMany(ctx, pairs, b.op, opts)
	}
	if err != nil {
		return nil, 0, nil, errors.Join(err, closeAll(ctx))
	}
	for _, pair := range []kernels.Pair{pairs[0], pairs[len(pairs)-1]} {
		check := reduction{kind: oneOfList[kind], name: p.String(), dtype: b.dtype, op: b.op, in: pair.In.Ptr(), out: pair.In.Ptr(), enqueue: func() error { return p.Run(b.s) }}
		check.elements = pair.In.NumElements()
		if pair.Out != nil {
			check.out, check.elements = pair.Out.Ptr(), max(check.elements, pair.Out.NumElements())
		}
		if err := b.checkResult(ctx, check); err != nil {
			return nil, 0, nil, errors.Join(err, closeAll(ctx))
		}
	}
	return p, whole, closeAll, nil
}

// peerMany measures NCCL's collectives, in one group of calls, on as many messages of plain device memory as the row like has tensors, with its kind, bytes, dtype, operation, mode, place and
// iterations, on the same stream. Collective.
func (b *bencher) peerMany(ctx context.Context, like Row) error {
	stream, ok := b.s.(*cuda.Stream)
	if !ok {
		return fmt.Errorf("the stream is a %T, which NCCL cannot work on", b.s)
	}
	one := like
	one.Bytes /= int64(like.Tensors)
	if one.Kind = AllReduce; oneOfList[like.Kind] != "" {
		one.Kind = oneOfList[like.Kind]
	}
	what := ncclCollectives[one.Kind]
	count := one.Bytes / b.dtype.Bytes()
	elements := count
	if what == nccl.AllGather || what == nccl.ReduceScatter {
		count /= int64(b.r.WorldSize())
	}
	var calls []nccl.Call
	var frees []func() error
	var failure error
	for range like.Tensors {
		in, out, free, err := b.peerBuffers(one)
		if err != nil {
			failure = err
			break
		}
		frees = append(frees, free)
		calls = append(calls, nccl.Call{What: what, Send: uint64(in), Recv: uint64(out), Count: count, Type: ncclTypes[b.dtype], Op: ncclOps[b.op]})
	}
	if err := b.r.Group().Vote(ctx, "memory for the peer", failure); err != nil {
		return err
	}
	group := func() error {
		return b.peer.device.WithContext(func() error { return b.peer.comm.EnqueueAll(uintptr(stream.Handle()), calls) })
	}
	for _, c := range []nccl.Call{calls[0], calls[len(calls)-1]} { // the first also makes the connections that NCCL makes on first use
		check := reduction{kind: oneOfList[like.Kind], name: "a group of NCCL's " + what.String(), dtype: b.dtype, elements: elements, op: b.op, in: device.Ptr(c.Send), out: device.Ptr(c.Recv), enqueue: group, ends: true}
		if b.op == kernels.Avg && like.Op != "" {
			check.tolerance = averageTolerance
		}
		if err := b.checkResult(ctx, check); err != nil {
			return err
		}
	}
	row := like
	row.Backend, row.Beside, row.Algorithm, row.Chosen = NCCL, b.r.Backend(), "", ""
	row.Note = b.peer.about + ", one group of calls"
	if err := b.timed(ctx, &row, group); err != nil {
		return err
	}
	for _, free := range frees {
		failure = errors.Join(failure, free())
	}
	return failure
}
