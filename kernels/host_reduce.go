package kernels

import (
	"unsafe"

	"github.com/symmem/symmem/tensor"
)

// reducer combines the elements from lo to hi of all srcs, in their order, and writes them to dst at the same places. dst
// may be one of the srcs.
type reducer func(dst []byte, srcs [][]byte, lo, hi int64)

// chunk is how many elements are accumulated at a time: the accumulator stays in the first-level cache.
const chunk = 1024

type integer interface {
	int8 | int16 | int32 | int64 | uint8 | uint16 | uint32 | uint64
}

type number interface {
	integer | float32 | float64
}

// newReducer gives the reducer for elements of dtype, or nil for an unknown dtype. A reducer is used by one goroutine at a
// time: it has one accumulator.
func newReducer(dtype tensor.DType, op Op, size int) reducer {
	switch dtype {
	case tensor.Float16:
		return reduce16(op, size, f16To32, f16From32)
	case tensor.BFloat16:
		return reduce16(op, size, bf16To32, bf16From32)
	case tensor.Float32:
		return reduceNumbers[float32](op, size)
	case tensor.Float64:
		return reduceNumbers[float64](op, size)
	case tensor.Int8:
		return reduceNumbers[int8](op, size)
	case tensor.Int16:
		return reduceNumbers[int16](op, size)
	case tensor.Int32:
		return reduceNumbers[int32](op, size)
	case tensor.Int64:
		return reduceNumbers[int64](op, size)
	case tensor.Uint8:
		return reduceNumbers[uint8](op, size)
	case tensor.Uint16:
		return reduceNumbers[uint16](op, size)
	case tensor.Uint32:
		return reduceNumbers[uint32](op, size)
	case tensor.Uint64:
		return reduceNumbers[uint64](op, size)
	}
	return nil
}

// slice is the elements of b as T. Tensors are aligned to their elements.
func slice[T any](b []byte) []T {
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b))/unsafe.Sizeof(*new(T)))
}

// reduceNumbers reduces types that Go computes with. size is the number of ranks, for Avg.
func reduceNumbers[T number](op Op, size int) reducer {
	acc := make([]T, chunk)
	combine := newCombiner[T](op)
	return func(dst []byte, srcs [][]byte, lo, hi int64) {
		out, first := slice[T](dst), slice[T](srcs[0])
		if len(srcs) == 2 && op != Avg {
			// Element by element the result may go where one of the two came from.
			combine(out[lo:hi], first[lo:hi], slice[T](srcs[1])[lo:hi])
			return
		}
		for at := lo; at < hi; at += chunk {
			end := min(at+chunk, hi)
			a := acc[:end-at]
			if len(srcs) == 1 {
				copy(a, first[at:end])
			} else {
				combine(a, first[at:end], slice[T](srcs[1])[at:end])
				for _, src := range srcs[2:] {
					combine(a, a, slice[T](src)[at:end])
				}
			}
			if op == Avg {
				average(a, size)
			}
			copy(out[at:end], a)
		}
	}
}

// newCombiner gives the function that sets dst to x op y, element by element; all three are equally long, and dst may be x
// or y.
func newCombiner[T number](op Op) func(dst, x, y []T) {
	const block = 128
	wide := wideCombine[T](op)
	perBlock := block / int(unsafe.Sizeof(*new(T)))
	return func(dst, x, y []T) {
		if blocks := len(dst) / perBlock; wide != nil && blocks > 0 {
			wide(unsafe.Pointer(&dst[0]), unsafe.Pointer(&x[0]), unsafe.Pointer(&y[0]), blocks)
			dst, x, y = dst[blocks*perBlock:], x[blocks*perBlock:], y[blocks*perBlock:]
		}
		combine(op, dst, x, y)
	}
}

// combine is newCombiner's function in plain Go.
func combine[T number](op Op, dst, x, y []T) {
	if len(dst) == 0 {
		return
	}
	// The compiler then knows that all indices are in range.
	x, y = x[:len(dst)], y[:len(dst)]
	switch op {
	case Sum, Avg:
		for i := range dst {
			dst[i] = x[i] + y[i]
		}
	case Prod:
		for i := range dst {
			dst[i] = x[i] * y[i]
		}
	case Min:
		for i := range dst {
			dst[i] = min(x[i], y[i])
		}
	case Max:
		for i := range dst {
			dst[i] = max(x[i], y[i])
		}
	}
}

// average divides by the number of ranks.
func average[T number](a []T, size int) {
	ranks := T(size)
	if int(ranks) != size {
		// More ranks than an 8-bit integer counts; its values and their quotients are exact in float64.
		for i := range a {
			a[i] = T(float64(a[i]) / float64(size))
		}
		return
	}
	for i := range a {
		a[i] /= ranks
	}
}

// reduce16 reduces 16-bit floats: in float32, rounded once at the end.
func reduce16(op Op, size int, load func(dst []float32, src []uint16), store func(dst []uint16, src []float32)) reducer {
	acc, next := make([]float32, chunk), make([]float32, chunk)
	combine := newCombiner[float32](op)
	return func(dst []byte, srcs [][]byte, lo, hi int64) {
		out := slice[uint16](dst)
		for at := lo; at < hi; at += chunk {
			end := min(at+chunk, hi)
			a, n := acc[:end-at], next[:end-at]
			load(a, slice[uint16](srcs[0])[at:end])
			for _, src := range srcs[1:] {
				load(n, slice[uint16](src)[at:end])
				combine(a, a, n)
			}
			if op == Avg {
				average(a, size)
			}
			store(out[at:end], a)
		}
	}
}

// wideBlock is how many 16-bit floats the wide loops convert at a time.
const wideBlock = 32

// convert sets dst to the src converted one by one, and whole blocks of them by wide where the processor can.
func convert[D, S any](dst []D, src []S, wide func(dst *D, src *S, blocks int), one func(S) D) {
	src = src[:len(dst)]
	if blocks := len(dst) / wideBlock; hasSIMD && blocks > 0 {
		wide(&dst[0], &src[0], blocks)
		dst, src = dst[blocks*wideBlock:], src[blocks*wideBlock:]
	}
	for i := range dst {
		dst[i] = one(src[i])
	}
}

func bf16To32(dst []float32, src []uint16) {
	convert(dst, src, loadBF16, func(b uint16) float32 { return tensor.BF16(b).Float32() })
}

func bf16From32(dst []uint16, src []float32) {
	convert(dst, src, storeBF16, func(f float32) uint16 { return uint16(tensor.BF16From(f)) })
}

func f16To32(dst []float32, src []uint16) {
	convert(dst, src, loadF16, func(b uint16) float32 { return tensor.F16(b).Float32() })
}

func f16From32(dst []uint16, src []float32) {
	convert(dst, src, storeF16, func(f float32) uint16 { return uint16(tensor.F16From(f)) })
}
