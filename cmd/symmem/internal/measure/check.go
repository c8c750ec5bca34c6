package measure

import (
	"bytes"
	"context"
	"fmt"
	"math"
	"slices"
	"unsafe"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/tensor"
)

// checkChunk is how many elements are written or read at a time.
const checkChunk = 1 << 20

// reduction is a collective whose result can be checked: an all-reduce, or another that kind names. It reads what begins at in and writes what it makes to out, which may
// be the same.
type reduction struct {
	kind     string // "" is AllReduce
	name     string // as errors call it
	dtype    tensor.DType
	elements int64 // of the whole: of a collective with shares, those of all ranks
	op       kernels.Op
	in, out  device.Ptr
	enqueue  func() error // one run, on the stream of the bencher
	// tolerance is the relative error that a result may have: 0 unless it is known to be rounded.
	tolerance float64
	// ends checks only the first and the last chunk, of each share where there are shares.
	ends bool
}

// part is elements that follow each other in memory. Each is a function of its index, which repeats after checkPeriod.
type part struct {
	at, elements int64
	value        func(i int64) float32
}

// shares are parts of the elements of each rank.
func shares(elements int64, ranks int, value func(rank int, i int64) float32) (all []part) {
	share := elements / int64(ranks)
	for rank := range ranks {
		all = append(all, part{int64(rank) * share, share, func(i int64) float32 { return value(rank, i) }})
	}
	return all
}

// parts returns what a rank puts in, and what comes out there: nothing that anybody reads on ranks that are not the root of Reduce.
func (r *reduction) parts(rank, ranks int) (in, out []part) {
	share := r.elements / int64(ranks)
	one := func(n int64, value func(i int64) float32) []part { return []part{{0, n, value}} }
	mine := func(i int64) float32 { return checkValue(r.op, ranks, rank, i) }
	switch r.kind {
	case Broadcast:
		in = one(r.elements, zero)
		if rank == 0 {
			in = one(r.elements, func(i int64) float32 { return distinct(0, i) })
		}
		return in, one(r.elements, func(i int64) float32 { return distinct(0, i) })
	case AllGather:
		return one(share, func(i int64) float32 { return distinct(rank, i) }), shares(r.elements, ranks, distinct)
	case AllToAll, AllToAllV:
		// The share for each rank differs from those for others, too.
		return shares(r.elements, ranks, func(to int, i int64) float32 { return distinct(rank, i+5*int64(to)) }),
			shares(r.elements, ranks, func(from int, i int64) float32 { return distinct(from, i+5*int64(rank)) })
	case ReduceScatter:
		return shares(r.elements, ranks, func(to int, i int64) float32 { return mine(i + 5*int64(to)) }),
			one(share, func(i int64) float32 { return checkWant(r.op, ranks, i+5*int64(rank)) })
	}
	out = one(r.elements, func(i int64) float32 { return checkWant(r.op, ranks, i) })
	if r.kind == Reduce && rank > 0 {
		out = nil
	}
	return one(r.elements, mine), out
}

// starts returns where the chunks of n elements of a part begin that are filled and compared.
func (r *reduction) starts(p part, n int64) []int64 {
	if r.ends && p.elements > 2*n {
		return []int64{0, p.elements - n}
	}
	var all []int64
	for at := int64(0); at < p.elements; at += n {
		all = append(all, at)
	}
	return all
}

// checker is checkResult for the dtype of the reduction.
type checker func(ctx context.Context, r reduction) error

// checkResult runs the collective once on small integers, which every dtype holds exactly, compares the result, and fills the input with zeros. What gives
// wrong results is not measured. Collective.
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
		size := r.dtype.Bytes()
		in, out := r.parts(b.r.Rank(), b.r.WorldSize())
		// each calls do with the chunks of some parts: where each begins in memory, and what is there.
		each := func(all []part, do func(at int64, chunk []T) error) error {
			for _, p := range all {
				most := min(p.elements, checkChunk)
				// Values repeat, so that one piece of memory has any chunk in it.
				repeated := make([]T, most+checkPeriod)
				for i := range repeated {
					if repeated[i] = repeated[i%checkPeriod]; i < checkPeriod {
						repeated[i] = from(p.value(int64(i)))
					}
				}
				for _, at := range r.starts(p, most) {
					if err := do(p.at+at, repeated[at%checkPeriod:][:min(most, p.elements-at)]); err != nil {
						return err
					}
				}
			}
			return nil
		}
		fill := func(to device.Ptr, all []part) error {
			return each(all, func(at int64, chunk []T) error { return b.r.Device().CopyFromHost(to.Add(at*size), bytesOf(chunk)) })
		}
		if r.out != r.in { // what an earlier run has left there must not be taken for this one's
			if err := fill(r.out, zeros(out)); err != nil {
				return err
			}
		}
		if err := fill(r.in, in); err != nil {
			return err
		}
		if err := r.enqueue(); err != nil {
			return err
		}
		if err := b.s.Synchronize(ctx); err != nil {
			return err
		}
		got := make([]T, min(r.elements, checkChunk))
		err := each(out, func(at int64, right []T) error {
			part := got[:len(right)]
			if err := b.r.Device().CopyToHost(bytesOf(part), r.out.Add(at*size)); err != nil {
				return err
			}
			if bytes.Equal(bytesOf(part), bytesOf(right)) {
				return nil
			}
			for i, x := range part {
				have, should := to(x), to(right[i])
				if off := math.Abs(float64(have) - float64(should)); !(off <= r.tolerance*math.Abs(float64(should))) {
					return fmt.Errorf("%s gave %v at element %d, and %v is right", r.name, have, at+int64(i), should)
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
		// Zeros can be reduced again and again. No rank may begin the next run before all others have read this result.
		if err := fill(r.in, zeros(in)); err != nil {
			return err
		}
		return b.r.Barrier(ctx)
	}
}

func zero(int64) float32 { return 0 }

// zeros are the same parts without values.
func zeros(all []part) []part {
	all = slices.Clone(all)
	for i := range all {
		all[i].value = zero
	}
	return all
}

// bytesOf returns the memory of the elements. Devices have the byte order of the machine.
func bytesOf[T tensor.Element](s []T) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(s))), uintptr(len(s))*unsafe.Sizeof(*new(T)))
}

// checkPeriod is after how many elements values repeat: a prime, so that no length of a share hides what is in the wrong place, and small enough for every dtype.
const checkPeriod = 61

// distinct returns element i of what a rank has: 1 to 61, and another number than other ranks have there, up to so many of them.
func distinct(rank int, i int64) float32 { return float32(1 + (i+7*int64(rank))%checkPeriod) }

// checkValue returns element i of the input of a rank: 1 or 2, of rank 0 without any order, so that results differ from place to place. Where the sums or products of all
// ranks would leave the range of small integers, some ranks after each other have that, other ones in each place, and the rest what changes nothing. Averages, which would be
// rounded, are of what is the same on all ranks.
func checkValue(op kernels.Op, ranks, rank int, i int64) float32 {
	const manyFactors, manyTerms = 10, 60
	i %= checkPeriod
	// few reports whether a rank is among those of a place.
	few := func(most int) bool {
		step := (int64(ranks) + checkPeriod - 1) / checkPeriod
		return ranks <= most || (int64(rank)+i*step)%int64(ranks) < int64(most)
	}
	switch {
	case op == kernels.Avg && ranks > manyTerms:
		return 0
	case op == kernels.Avg, op == kernels.Prod && !few(manyFactors):
		return 1
	case op == kernels.Sum && !few(manyTerms):
		return 0
	}
	if rank == 0 {
		return float32(1 + i*i%checkPeriod%2)
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
