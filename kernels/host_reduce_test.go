package kernels

import (
	"fmt"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

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
				k := hostAllReduce{size: size, elements: n, width: width}
				at := int64(0)
				for r := range size {
					lo, hi := k.part(r)
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
	for _, a := range append(Algorithms(), Auto) {
		back, err := ParseAlgorithm(a.String())
		require.NoError(t, err)
		require.Equal(t, a, back)
	}
	_, err := ParseOp("xor")
	require.ErrorIs(t, err, ErrInvalid)
	_, err = ParseAlgorithm("ring")
	require.ErrorIs(t, err, ErrInvalid)
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
