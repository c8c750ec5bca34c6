package measure

import (
	"context"
	"errors"
	"fmt"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/cuda"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/tensor"
)

// manyPlan makes the tensors, each of at least bytes, and one plan that reduces all of them in place. closeAll closes what it made.
func (b *bencher) manyPlan(ctx context.Context, bytes int64) (p *kernels.Plan, whole int64, closeAll func(context.Context) error, err error) {
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
	var pairs []kernels.Pair
	for range b.spec.Tensors {
		t, err := b.tensorOf(ctx, b.dtype, bytes)
		if err != nil {
			return nil, 0, nil, errors.Join(err, closeAll(ctx))
		}
		tensors, pairs, whole = append(tensors, t), append(pairs, kernels.Pair{In: t}), whole+t.Bytes()
	}
	if p, err = kernels.NewAllReduceMany(ctx, pairs, b.op, &kernels.Options{Exclusive: b.spec.Exclusive}); err != nil {
		return nil, 0, nil, errors.Join(err, closeAll(ctx))
	}
	for _, t := range []tensor.SymmetricTensor{tensors[0], tensors[len(tensors)-1]} {
		err := b.checkResult(ctx, reduction{name: p.String(), dtype: b.dtype, elements: t.NumElements(), op: b.op, in: t.Ptr(), out: t.Ptr(), enqueue: func() error { return p.Run(b.s) }})
		if err != nil {
			return nil, 0, nil, errors.Join(err, closeAll(ctx))
		}
	}
	return p, whole, closeAll, nil
}

// peerMany measures NCCL's all-reduces, in one group of calls, of as many buffers of plain device memory as the row like has tensors, with its bytes,
// dtype, operation, mode and iterations, in place and on the same stream. Collective.
func (b *bencher) peerMany(ctx context.Context, like Row) error {
	stream, ok := b.s.(*cuda.Stream)
	if !ok {
		return fmt.Errorf("the stream is a %T, which NCCL cannot work on", b.s)
	}
	d := b.peer.device
	each := like.Bytes / int64(like.Tensors)
	count, handle := each/b.dtype.Bytes(), uintptr(stream.Handle())
	var buffers []uint64
	var failure error
	for range like.Tensors {
		p, err := d.Alloc(each)
		if err != nil {
			failure = err
			break
		}
		buffers = append(buffers, uint64(p))
	}
	if err := b.r.Group().Vote(ctx, "memory for the peer", failure); err != nil {
		return err
	}
	group := func() error {
		return d.WithContext(func() error {
			return b.peer.comm.AllReduceGroup(handle, buffers, count, ncclTypes[b.dtype], ncclOps[b.op])
		})
	}
	for _, p := range []uint64{buffers[0], buffers[len(buffers)-1]} { // the first also makes the connections that NCCL makes on first use
		check := reduction{name: "a group of ncclAllReduce", dtype: b.dtype, elements: count, op: b.op, in: device.Ptr(p), out: device.Ptr(p), enqueue: group, ends: true}
		if b.op == kernels.Avg {
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
	for _, p := range buffers {
		failure = errors.Join(failure, d.Free(device.Ptr(p)))
	}
	return failure
}
