package tensor_test

import (
	"math"
	"math/big"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/tensor"
)

// format is a binary floating-point format, for a reference that shares nothing with the code under test.
type format struct {
	exponentBits, fractionBits uint
}

// exact gives the value of the bits as a big number; ok is false for infinities and NaN.
func (f format) exact(bits uint16) (v *big.Float, ok bool) {
	exp := int(bits>>f.fractionBits) & (1<<f.exponentBits - 1)
	frac := int64(bits) & (1<<f.fractionBits - 1)
	bias := 1<<(f.exponentBits-1) - 1
	if exp == 1<<f.exponentBits-1 {
		return nil, false
	}
	if exp == 0 {
		exp = 1
	} else {
		frac |= 1 << f.fractionBits
	}
	v = new(big.Float).SetMantExp(new(big.Float).SetInt64(frac), exp-bias-int(f.fractionBits))
	if bits&0x8000 != 0 {
		v.Neg(v)
	}
	return v, true
}

var (
	binary16 = format{5, 10}
	bfloat16 = format{8, 7}
)

func TestFloat16AllValues(t *testing.T) { allValues(t, binary16, tensor.F16.Float32, tensor.F16From) }

func TestBFloat16AllValues(t *testing.T) {
	allValues(t, bfloat16, tensor.BF16.Float32, tensor.BF16From)
}

// allValues checks that all 65 536 values convert exactly to float32 and back, and that the points half way between
// neighbours, and just beside them, round to the nearest, ties to even.
func allValues[T ~uint16](t *testing.T, f format, widen func(T) float32, narrow func(float32) T) {
	for i := range 1 << 16 {
		h := T(i)
		wide := widen(h)
		exact, finite := f.exact(uint16(i))
		if !finite {
			if frac := i & (1<<f.fractionBits - 1); frac != 0 {
				require.Truef(t, math.IsNaN(float64(wide)), "%#04x is NaN, and widens to %v", i, wide)
				back := narrow(wide)
				require.Truef(t, math.IsNaN(float64(widen(back))), "NaN %#04x comes back as %#04x", i, back)
				require.Equalf(t, i&0x8000, int(back)&0x8000, "the sign of NaN %#04x", i)
				continue
			}
			require.Truef(t, math.IsInf(float64(wide), 0), "%#04x is an infinity, and widens to %v", i, wide)
			require.Equal(t, h, narrow(wide))
			continue
		}
		got := new(big.Float).SetFloat64(float64(wide))
		require.Zerof(t, exact.Cmp(got), "%#04x widens to %v, and is %v", i, wide, exact)
		require.Equalf(t, i&0x8000 != 0, math.Signbit(float64(wide)), "the sign of %#04x", i)
		require.Equalf(t, h, narrow(wide), "%#04x goes to %v and comes back otherwise", i, wide)

		// The next value away from zero, if it is finite.
		if _, finite := f.exact(uint16(i) + 1); !finite || uint16(i)+1 == 0x8000 || uint16(i) == 0xffff {
			continue
		}
		next := widen(h + 1)
		half := float32((float64(wide) + float64(next)) / 2) // exact: one more bit than the format has
		even := h
		if i&1 == 1 {
			even = h + 1
		}
		require.Equalf(t, even, narrow(half), "half way between %#04x and the next", i)
		require.Equalf(t, h, narrow(math.Nextafter32(half, wide)), "just below half way after %#04x", i)
		require.Equalf(t, h+1, narrow(math.Nextafter32(half, next)), "just above half way after %#04x", i)
	}
}

func TestFloat16Limits(t *testing.T) {
	require.Equal(t, tensor.F16(0x7bff), tensor.F16From(65519.996), "just below half way to infinity")
	require.Equal(t, tensor.F16(0x7c00), tensor.F16From(65520), "half way rounds to infinity, which is even")
	require.Equal(t, tensor.F16(0x7c00), tensor.F16From(math.MaxFloat32))
	require.Equal(t, tensor.F16(0xfc00), tensor.F16From(-math.MaxFloat32))
	require.Equal(t, tensor.F16(0x0000), tensor.F16From(float32(math.Ldexp(1, -25))), "half of the smallest rounds to zero, which is even")
	require.Equal(t, tensor.F16(0x0001), tensor.F16From(math.Nextafter32(float32(math.Ldexp(1, -25)), 1)))
	require.Equal(t, tensor.F16(0x8000), tensor.F16From(float32(math.Copysign(math.SmallestNonzeroFloat32, -1))))
	require.Equal(t, tensor.BF16(0x7f80), tensor.BF16From(math.MaxFloat32))
	require.Equal(t, tensor.BF16(0x8000), tensor.BF16From(float32(math.Copysign(0, -1))))
	require.Equal(t, "1.5", tensor.F16From(1.5).String())
	require.Equal(t, "-2.5", tensor.BF16From(-2.5).String())
}

func FuzzFloat16(f *testing.F) {
	f.Add(uint32(0))
	f.Add(math.Float32bits(65520))
	f.Fuzz(func(t *testing.T, bits uint32) {
		v := math.Float32frombits(bits)
		near := func(widened float32, ulp float64) bool {
			return math.Abs(float64(widened)-float64(v)) <= ulp/2
		}
		switch {
		case math.IsNaN(float64(v)):
			require.True(t, math.IsNaN(float64(tensor.F16From(v).Float32())))
			require.True(t, math.IsNaN(float64(tensor.BF16From(v).Float32())))
		case math.Abs(float64(v)) < 65520:
			_, e := math.Frexp(float64(v))
			require.True(t, near(tensor.F16From(v).Float32(), math.Ldexp(1, max(e-11, -24))), "%v", v)
		}
	})
}
