package kernels

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/tensor"
)

// TestReducerInPlace: the output may be any of the inputs, and only the asked range is written.
func TestReducerInPlace(t *testing.T) {
	const n = 3000
	for _, size := range []int{1, 2, 3, 5} {
		for me := range size {
			srcs := make([][]byte, size)
			for r := range srcs {
				s := make([]int32, n)
				for i := range s {
					s[i] = int32(i*10 + r)
				}
				srcs[r] = bytesOf(s)
			}
			newReducer(tensor.Int32, Sum, size)(srcs[me], srcs, 100, 2900)
			for i, got := range slice[int32](srcs[me]) {
				want := int32(i*10 + me)
				if i >= 100 && i < 2900 {
					want = int32(i*10*size + size*(size-1)/2)
				}
				require.Equalf(t, want, got, "size %d, output is input %d, element %d", size, me, i)
			}
		}
	}
}

// bytesOf is the memory of s.
func bytesOf[T any](s []T) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(s))), uintptr(len(s))*unsafe.Sizeof(s[0]))
}

// TestWideLoops compares the wide loops with plain Go: all 65 536 values of the 16-bit floats, all values between them that
// round, and each operation at sizes around a block.
func TestWideLoops(t *testing.T) {
	const n = 1 << 16
	bits, wide := make([]uint16, n), make([]float32, n)
	for i := range bits {
		bits[i] = uint16(i)
	}
	narrow := make([]uint16, n)
	f16To32(wide, bits)
	for i, v := range wide {
		want := tensor.F16(bits[i]).Float32()
		require.True(t, v == want && math.Signbit(float64(v)) == math.Signbit(float64(want)) || v != v && want != want, "f16 %#04x widens to %v, expected %v", i, v, want)
	}
	bf16To32(wide, bits)
	for i, v := range wide {
		require.Equal(t, math.Float32bits(tensor.BF16(bits[i]).Float32()), math.Float32bits(v), "bf16 %#04x", i)
	}
	rnd := rand.New(rand.NewPCG(1, 2))
	for round := range 64 {
		for i := range wide {
			wide[i] = math.Float32frombits(rnd.Uint32())
			if round%2 == 0 { // around what an f16 can hold
				wide[i] = math.Float32frombits(rnd.Uint32()&0x87ffffff + 0x30000000)
			}
			if round == 2 { // exactly half way, and beside it
				wide[i] = math.Float32frombits(math.Float32bits(tensor.F16(i).Float32()) | 0x1000 + uint32(i)%3 - 1)
			}
		}
		f16From32(narrow, wide)
		for i, v := range wide {
			require.Equal(t, uint16(tensor.F16From(v)), narrow[i], "f16 of %v, %#08x", v, math.Float32bits(v))
		}
		bf16From32(narrow, wide)
		for i, v := range wide {
			require.Equal(t, uint16(tensor.BF16From(v)), narrow[i], "bf16 of %v, %#08x", v, math.Float32bits(v))
		}
	}
	wideAndPlain[float32](t, rnd)
	wideAndPlain[float64](t, rnd)
	nansAlike(t, rnd, math.Float32frombits, math.Float32bits, 0x7f800000)
	nansAlike(t, rnd, math.Float64frombits, math.Float64bits, 0x7ff0000000000000)
	wideAndPlain[int8](t, rnd)
	wideAndPlain[int16](t, rnd)
	wideAndPlain[int32](t, rnd)
	wideAndPlain[int64](t, rnd)
	wideAndPlain[uint8](t, rnd)
	wideAndPlain[uint64](t, rnd)
}

func wideAndPlain[T number](t *testing.T, rnd *rand.Rand) {
	for _, op := range Ops() {
		combiner := newCombiner[T](op)
		for n := range 300 {
			x, y := make([]T, n+1), make([]T, n+1)
			for i := range x {
				x[i], y[i] = T(rnd.IntN(200)-100), T(rnd.IntN(200)-100)
			}
			want, got := make([]T, n+2), make([]T, n+2)
			combine(op, want[1:n+1], x[1:], y[1:])
			combiner(got[1:n+1], x[1:], y[1:])
			require.Equalf(t, want, got, "%s of %d elements of %T", op, n, x[0])
			combiner(x[1:], x[1:], y[1:])
			require.Equalf(t, want[1:n+1], x[1:], "%s of %d elements of %T, in place", op, n, x[0])
		}
	}
}

// nansAlike: of two that are no numbers, or one and a number, the wide loops give the bits that plain Go does. It must not show where in a tensor an element is.
func nansAlike[T float32 | float64, B uint32 | uint64](t *testing.T, rnd *rand.Rand, from func(B) T, to func(T) B, exponent B) {
	const n = 512
	x, y, wide, plain := make([]T, n), make([]T, n), make([]T, n), make([]T, n)
	for i := range x {
		x[i], y[i] = from(exponent|B(rnd.Uint64())), from(exponent|B(rnd.Uint64()))
		switch i % 4 {
		case 0:
			x[i] = 1
		case 1:
			y[i] = -1
		}
	}
	for _, op := range []Op{Sum, Prod} {
		newCombiner[T](op)(wide, x, y)
		combine(op, plain, x, y)
		for i := range x {
			require.Equalf(t, to(plain[i]), to(wide[i]), "%s of %#x and %#x", op, to(x[i]), to(y[i]))
		}
	}
}

// TestAverageOfManyRanks: more ranks than an 8-bit integer counts.
func TestAverageOfManyRanks(t *testing.T) {
	for _, size := range []int{127, 128, 200, 300} {
		a := []int8{127, -128, 100, -1, 0}
		average(a, size)
		for i, v := range []int{127, -128, 100, -1, 0} {
			require.Equal(t, int8(v/size), a[i], "%d / %d", v, size)
		}
	}
}

func TestParts(t *testing.T) {
	for _, width := range []int64{1, 2, 4, 8} {
		for size := 1; size <= 9; size++ {
			for _, n := range []int64{0, 1, 15, 16, 17, 127, 128, 129, 1000, 65537} {
				at := int64(0)
				for r := range size {
					lo, hi := partOf(n, width, size, r)
					require.Equal(t, at, lo)
					require.LessOrEqual(t, lo, hi)
					at = hi
				}
				require.Equal(t, n, at, "%d elements of %d bytes, %d ranks", n, width, size)
			}
		}
	}
}

func TestNames(t *testing.T) {
	for _, op := range Ops() {
		back, err := ParseOp(op.String())
		require.NoError(t, err)
		require.Equal(t, op, back)
	}
	for a := Auto; a < algorithms; a++ {
		back, err := ParseAlgorithm(a.String())
		require.NoError(t, err)
		require.Equal(t, a, back)
	}
	_, err := ParseOp("xor")
	require.ErrorIs(t, err, errs.ErrInvalid)
	_, err = ParseAlgorithm("ring")
	require.ErrorIs(t, err, errs.ErrInvalid)
}

func BenchmarkReduce(b *testing.B) {
	const bytes = 1 << 16
	for _, dtype := range tensor.DTypes() {
		b.Run(fmt.Sprint(dtype), func(b *testing.B) {
			x, y, z := make([]byte, bytes), make([]byte, bytes), make([]byte, bytes)
			r := newReducer(dtype, Sum, 2)
			b.SetBytes(bytes)
			for b.Loop() {
				r(z, [][]byte{x, y}, 0, bytes/dtype.Bytes())
			}
		})
	}
}
