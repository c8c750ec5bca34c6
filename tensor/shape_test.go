package tensor

import (
	"math"
	"math/big"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/symmem/symmem/internal/errs"
)

// TestCheckShape compares sizes with those of unlimited integers.
func TestCheckShape(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		dtype := rapid.SampledFrom(DTypes()).Draw(t, "dtype")
		dim := rapid.OneOf(rapid.Int64Range(-2, 10), rapid.Int64Range(1<<20, 1<<40), rapid.Just(int64(math.MaxInt64)))
		shape := Shape(rapid.SliceOfN(dim, 0, 5).Draw(t, "shape"))
		want := big.NewInt(dtype.Bytes())
		negative := false
		for _, d := range shape {
			negative = negative || d < 0
			want.Mul(want, big.NewInt(d))
		}
		bytes, err := checkShape("Zeros", dtype, shape)
		if negative || !want.IsInt64() {
			require.ErrorIs(t, err, errs.ErrInvalid)
			return
		}
		require.NoError(t, err)
		require.Equal(t, want.Int64(), bytes)
		require.Equal(t, bytes, shape.NumElements()*dtype.Bytes())
	})
}

func TestDTypes(t *testing.T) {
	for _, d := range DTypes() {
		back, err := ParseDType(d.String())
		require.NoError(t, err)
		require.Equal(t, d, back)
		require.Positive(t, d.Bytes())
	}
	_, err := ParseDType("f8")
	require.ErrorIs(t, err, errs.ErrInvalid)
	require.ErrorContains(t, err, "bf16")
	require.Equal(t, "DType(77)", DType(77).String())
	require.Zero(t, DType(77).Bytes())
	require.Equal(t, Float16, DTypeOf[F16]())
	require.Equal(t, BFloat16, DTypeOf[BF16]())
	require.Equal(t, Float32, DTypeOf[float32]())
	require.Equal(t, Float64, DTypeOf[float64]())
	require.Equal(t, Int8, DTypeOf[int8]())
	require.Equal(t, Int16, DTypeOf[int16]())
	require.Equal(t, Int32, DTypeOf[int32]())
	require.Equal(t, Int64, DTypeOf[int64]())
	require.Equal(t, Uint8, DTypeOf[uint8]())
	require.Equal(t, Uint16, DTypeOf[uint16]())
	require.Equal(t, Uint32, DTypeOf[uint32]())
	require.Equal(t, Uint64, DTypeOf[uint64]())
}
