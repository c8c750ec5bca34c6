package kernels

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/kernels/ptx"
	"github.com/symmem/symmem/tensor"
)

// TestE4M3 compares every bf16, and numbers next to where rounding changes, with the nearest 8-bit float.
func TestE4M3(t *testing.T) {
	nearest := func(x float32) byte {
		if x != x {
			return 0x7f
		}
		best, off := byte(0), math.Inf(1)
		for b := range byte(0x7f) {
			v := math.Ldexp(float64(8+b%8), int(b>>3)-10)
			if b < 8 {
				v = math.Ldexp(float64(b), -9)
			}
			if d := math.Abs(min(math.Abs(float64(x)), 448) - v); d < off || d == off && b%2 == 0 {
				best, off = b, d
			}
		}
		return best | byte(math.Float32bits(x)>>24&0x80)
	}
	for i := range 1 << 16 {
		x := tensor.BF16(i).Float32()
		for _, v := range []float32{x, math.Float32frombits(math.Float32bits(x) + 1), math.Float32frombits(math.Float32bits(x) - 1)} {
			if want, got := nearest(v), e4m3(v); want != got {
				t.Fatalf("%v is %#x, not %#x", v, got, want)
			}
		}
	}
	assert.Equal(t, byte(0x7e), e4m3(float32(math.Inf(1))))
	assert.Equal(t, byte(0xfe), e4m3(float32(math.Inf(-1))))
}

// block makes a block of f.
func block(f func(i int) float32) (x [ptx.QuantizedBlock]float32) {
	for i := range x {
		x[i] = f(i)
	}
	return x
}

// TestQuantizeBlock: what a block loses is no more than half of its scale, which is no more than a 127th of its largest magnitude, and nothing
// that is sent is 0, so that it can be waited for.
func TestQuantizeBlock(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	blocks := [][ptx.QuantizedBlock]float32{
		block(func(int) float32 { return 0 }),
		block(func(int) float32 { return float32(math.Copysign(0, -1)) }),
		block(func(int) float32 { return math.SmallestNonzeroFloat32 }),
		block(func(i int) float32 { return math.Float32frombits(uint32(i) * 0x1ffff) }), // subnormal
		block(func(i int) float32 { return float32(i-32) * 0x1p-126 }),
		block(func(i int) float32 { return float32(i-32) / 32 * 0x1p127 }), // as much as is promised
		block(func(i int) float32 { return float32(i%2*2-1) * 1e30 }),
		block(func(i int) float32 { return float32(i) + 0.5 }),
		block(func(i int) float32 { // one among small ones
			if i == 7 {
				return -1e20
			}
			return 1e-20
		}),
	}
	for range 3000 {
		size := r.IntN(250) - 140
		blocks = append(blocks, block(func(int) float32 { return float32(math.Ldexp(r.Float64()*2-1, size+r.IntN(8))) }))
	}
	for _, x := range blocks {
		var sent [ptx.QuantizedBlock]byte
		scale := quantizeBlock(&sent, &x)
		require.NotZero(t, scale)
		require.NotContains(t, sent[:], byte(0))
		var back [ptx.QuantizedBlock]float32
		dequantizeBlock(&back, &sent, scale)
		most := 0.0
		for _, v := range x {
			most = max(most, math.Abs(float64(v)))
		}
		s := float64(math.Float32frombits(scale))
		require.LessOrEqual(t, s, max(most/127*(1+0x1p-23), 0x1p-126))
		for i, v := range x {
			if off := math.Abs(float64(back[i]) - float64(v)); !(off <= s*(0.5+0x1p-15)) {
				t.Fatalf("%v of %v came back as %v: %v away, scale %v", v, x, back[i], off, s)
			}
		}
	}
	for _, bad := range []float32{float32(math.NaN()), float32(math.Inf(1)), float32(math.Inf(-1))} {
		x := block(func(i int) float32 { return float32(i) })
		x[9] = bad
		var sent [ptx.QuantizedBlock]byte
		scale := quantizeBlock(&sent, &x)
		require.NotContains(t, sent[:], byte(0))
		dequantizeBlock(&x, &sent, scale)
		for _, v := range x {
			require.True(t, v != v)
		}
	}
	assert.Equal(t, int64(68), QuantizedBytes(1))
	assert.Equal(t, int64(17*64), QuantizedBytes(1024))
	assert.Equal(t, int64(0), QuantizedBytes(0))
}
