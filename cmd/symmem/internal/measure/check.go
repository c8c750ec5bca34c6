package measure

import (
	"bytes"
	"context"
	"fmt"
	"math"
	"unsafe"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/tensor"
)

// checkChunk is how many elements are written or read at a time.
const checkChunk = 1 << 20

// reduction is an all-reduce whose result can be checked. It reads the elements at in and writes the result to out, which may be the
// same.
type reduction struct {
	name     string // as errors call it
	dtype    tensor.DType
	elements int64
	op       kernels.Op
	in, out  device.Ptr
	enqueue  func() error // one run, on the stream of the bencher
	// tolerance is the relative error that a result may have: 0 unless it is known to be rounded.
	tolerance float64
	// ends checks only the first and the last chunk. The input is known to hold zeros elsewhere.
	ends bool
}

// starts returns where the chunks of n elements begin that are filled and compared.
func (r *reduction) starts(n int64) []int64 {
	if r.ends && r.elements > 2*n {
		return []int64{0, r.elements - n}
	}
	var all []int64
	for at := int64(0); at < r.elements; at += n {
		all = append(all, at)
	}
	return all
}

// checker is checkResult for the dtype of the reduction.
type checker func(ctx context.Context, r reduction) error

// checkResult runs the reduction once on small integers, which every dtype holds exactly, compares the result, and fills the input with zeros. An
// all-reduce with wrong results is not measured. Collective.
func (b *bencher) checkResult(ctx context.Context, r reduction) error {
	var check checker
	switch r.dtype {
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
		return fmt.Errorf("checking %s: there is no such dtype", r.dtype)
	}
	return check(ctx, r)
}

// number is an element type that Go has arithmetic for.
type number interface {
	float32 | float64 | int8 | int16 | int32 | int64 | uint8 | uint16 | uint32 | uint64
}

func checkNumber[T number](b *bencher) checker {
	return checkOf(b, func(x float32) T { return T(x) }, func(x T) float32 { return float32(x) })
}

// checkOf returns the check for elements that are converted from and to float32.
func checkOf[T tensor.Element](b *bencher, from func(float32) T, to func(T) float32) checker {
	return func(ctx context.Context, r reduction) error {
		n, w := r.elements, b.r.WorldSize()
		most := min(n, checkChunk)
		size := r.dtype.Bytes()
		starts := r.starts(most)
		// A value depends only on whether the index is odd, so one chunk does for all.
		chunkOf := func(value func(i int64) float32) func(at int64) []T {
			even, odd := from(value(0)), from(value(1))
			all := make([]T, most+1)
			for i := range all {
				if all[i] = even; i%2 == 1 {
					all[i] = odd
				}
			}
			return func(at int64) []T { return all[at%2:][:min(most, n-at)] }
		}
		fill := func(value func(i int64) float32) error {
			chunk := chunkOf(value)
			for _, at := range starts {
				if err := b.r.Device().CopyFromHost(r.in.Add(at*size), bytesOf(chunk(at))); err != nil {
					return err
				}
			}
			return nil
		}
		if err := fill(func(i int64) float32 { return checkValue(r.op, w, b.r.Rank(), i) }); err != nil {
			return err
		}
		if err := r.enqueue(); err != nil {
			return err
		}
		if err := b.s.Synchronize(ctx); err != nil {
			return err
		}
		want := chunkOf(func(i int64) float32 { return checkWant(r.op, w, i) })
		got := make([]T, most)
		for _, at := range starts {
			right := want(at)
			part := got[:len(right)]
			if err := b.r.Device().CopyToHost(bytesOf(part), r.out.Add(at*size)); err != nil {
				return err
			}
			if bytes.Equal(bytesOf(part), bytesOf(right)) {
				continue
			}
			for i, x := range part {
				have, should := to(x), to(right[i])
				if off := math.Abs(float64(have) - float64(should)); !(off <= r.tolerance*math.Abs(float64(should))) {
					return fmt.Errorf("%s gave %v at element %d, and %v is right", r.name, have, at+int64(i), should)
				}
			}
		}
		// No rank may begin the next run before all others have read this result.
		if err := fill(func(int64) float32 { return 0 }); err != nil {
			return err
		}
		return b.r.Barrier(ctx)
	}
}

// bytesOf returns the memory of the elements. Devices have the byte order of the machine.
func bytesOf[T tensor.Element](s []T) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(s))), uintptr(len(s))*unsafe.Sizeof(*new(T)))
}

// checkValue returns element i of the input of a rank: 1 or 2. It is the same everywhere for averages, which would be rounded, and
// where the sums or products of many ranks would leave the range of small integers.
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

// checkWant returns element i of the right result.
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
