package main

import (
	"context"
	"fmt"

	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/tensor"
)

// checkChunk is how many elements are written or read at a time.
const checkChunk = 1 << 20

// checker is checkResult for the dtype of the tensor.
type checker func(ctx context.Context, t, out *tensor.Tensor, p *kernels.Plan, op kernels.Op) error

// checkResult runs the plan once on small whole numbers, which every dtype holds exactly, compares all of the result and fills
// the tensor with zeros. A wrong result is not measured.
func (b *bencher) checkResult(ctx context.Context, t, out *tensor.Tensor, p *kernels.Plan, op kernels.Op) error {
	var check checker
	switch t.DType() {
	case tensor.Float16:
		check = checkOf(b, tensor.F16From, tensor.F16.Float32)
	case tensor.BFloat16:
		check = checkOf(b, tensor.BF16From, tensor.BF16.Float32)
	case tensor.Float32:
		check = checkNumber[float32](b)
	case tensor.Float64:
		check = checkNumber[float64](b)
	case tensor.Int8:
		check = checkNumber[int8](b)
	case tensor.Int16:
		check = checkNumber[int16](b)
	case tensor.Int32:
		check = checkNumber[int32](b)
	case tensor.Int64:
		check = checkNumber[int64](b)
	case tensor.Uint8:
		check = checkNumber[uint8](b)
	case tensor.Uint16:
		check = checkNumber[uint16](b)
	case tensor.Uint32:
		check = checkNumber[uint32](b)
	case tensor.Uint64:
		check = checkNumber[uint64](b)
	default:
		return fmt.Errorf("checking %s: there is no such dtype", t.DType())
	}
	return check(ctx, t, out, p, op)
}

// number is an element that Go computes with.
type number interface {
	float32 | float64 | int8 | int16 | int32 | int64 | uint8 | uint16 | uint32 | uint64
}

func checkNumber[T number](b *bencher) checker {
	return checkOf(b, func(x float32) T { return T(x) }, func(x T) float32 { return float32(x) })
}

// checkOf gives the check for elements that are made from and turned into float32.
func checkOf[T tensor.Element](b *bencher, from func(float32) T, to func(T) float32) checker {
	return func(ctx context.Context, t, out *tensor.Tensor, p *kernels.Plan, op kernels.Op) error {
		n, w := t.NumElements(), t.WorldSize()
		chunk := make([]T, min(n, checkChunk))
		fill := func(value func(i int64) float32) error {
			for at := int64(0); at < n; at += int64(len(chunk)) {
				part := chunk[:min(int64(len(chunk)), n-at)]
				for i := range part {
					part[i] = from(value(at + int64(i)))
				}
				if err := tensor.Write(t.Local(), part, at); err != nil {
					return err
				}
			}
			return nil
		}
		if err := fill(func(i int64) float32 { return checkValue(op, w, t.Rank(), i) }); err != nil {
			return err
		}
		if err := p.Run(b.s); err != nil {
			return err
		}
		if err := b.s.Synchronize(ctx); err != nil {
			return err
		}
		// The expected values repeat with the input's.
		var want [2]float32
		for i := range want {
			want[i] = checkWant(op, w, int64(i))
		}
		for at := int64(0); at < n; at += int64(len(chunk)) {
			part := chunk[:min(int64(len(chunk)), n-at)]
			if err := tensor.Read(out.Local(), part, at); err != nil {
				return err
			}
			for i, x := range part {
				if to(x) != to(from(want[(at+int64(i))%2])) {
					return fmt.Errorf("%s gave %v at element %d, and %v is right", p, to(x), at+int64(i), want[(at+int64(i))%2])
				}
			}
		}
		// Nobody may begin the next run on what another has not read yet.
		if err := fill(func(int64) float32 { return 0 }); err != nil {
			return err
		}
		return b.r.Barrier(ctx)
	}
}

// checkValue is element i of rank's input: 1 or 2, or the same everywhere where sums or products of many ranks would leave the
// range of small integers, and for averages, which would be rounded.
func checkValue(op kernels.Op, ranks, rank int, i int64) float32 {
	const manyFactors, manyTerms = 12, 60
	switch {
	case (op == kernels.Sum || op == kernels.Avg) && ranks > manyTerms:
		return 0
	case op == kernels.Avg, op == kernels.Prod && ranks > manyFactors:
		return 1
	}
	return float32(1 + (i+int64(rank))%2)
}

// checkWant is element i of the result.
func checkWant(op kernels.Op, ranks int, i int64) float32 {
	result := checkValue(op, ranks, 0, i)
	for rank := 1; rank < ranks; rank++ {
		x := checkValue(op, ranks, rank, i)
		switch op {
		case kernels.Sum, kernels.Avg:
			result += x
		case kernels.Prod:
			result *= x
		case kernels.Min:
			result = min(result, x)
		case kernels.Max:
			result = max(result, x)
		}
	}
	if op == kernels.Avg {
		result /= float32(ranks)
	}
	return result
}
