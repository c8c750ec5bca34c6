package measure

import (
	"context"
	"errors"

	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/tensor"
)

// manyPlan makes the tensors, each of at least bytes, and one plan that reduces all of them in place. closeAll closes what it made.
func (b *bencher) manyPlan(ctx context.Context, bytes int64) (p *kernels.Plan, whole int64, closeAll func(context.Context) error, err error) {
	dtype, err := tensor.ParseDType(b.spec.DType)
	if err != nil {
		return nil, 0, nil, err
	}
	op, err := kernels.ParseOp(b.spec.Op)
	if err != nil {
		return nil, 0, nil, err
	}
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
		t, err := b.tensorOf(ctx, dtype, bytes)
		if err != nil {
			return nil, 0, nil, errors.Join(err, closeAll(ctx))
		}
		tensors, pairs, whole = append(tensors, t), append(pairs, kernels.Pair{In: t}), whole+t.Bytes()
	}
	if p, err = kernels.NewAllReduceMany(ctx, pairs, op, nil); err != nil {
		return nil, 0, nil, errors.Join(err, closeAll(ctx))
	}
	return p, whole, closeAll, nil
}
