package tensor

import (
	"math"
	"strconv"
)

// F16 is an IEEE 754 binary16 number, held as its bits.
type F16 uint16

// F16From rounds f to the nearest F16, ties to even. What is too large becomes an infinity; a NaN stays a NaN and is quiet.
func F16From(f float32) F16 {
	b := math.Float32bits(f)
	sign := uint16(b>>16) & 0x8000
	b &= 0x7fffffff
	switch {
	case b > 0x7f800000: // NaN: keep the upper payload bits and make it quiet
		return F16(sign | 0x7e00 | uint16(b>>13)&0x1ff)
	case b >= 0x477ff000: // 65520 and above round to infinity
		return F16(sign | 0x7c00)
	case b >= 0x38800000: // normal: 2^-14 and above. Rebias the exponent, then round away the lower 13 bits
		b -= 112 << 23
		return F16(sign | uint16((b+0xfff+b>>13&1)>>13))
	case b > 0x33000000: // subnormal: above 2^-25. Align with 2^-24 and round to even
		shift := 126 - b>>23
		m := b&0x7fffff | 0x800000
		half := uint32(1)<<(shift-1) - 1
		return F16(sign | uint16((m+half+m>>shift&1)>>shift))
	}
	return F16(sign)
}

// Float32 is the exact value as a float32.
func (h F16) Float32() float32 {
	sign := uint32(h&0x8000) << 16
	exp, frac := uint32(h>>10)&0x1f, uint32(h)&0x3ff
	switch {
	case exp == 0x1f:
		return math.Float32frombits(sign | 0x7f800000 | frac<<13)
	case exp != 0:
		return math.Float32frombits(sign | (exp+112)<<23 | frac<<13)
	}
	// Zero or subnormal: frac * 2^-24, exact in float32.
	f := float32(frac) * (1.0 / (1 << 24))
	return math.Float32frombits(sign | math.Float32bits(f))
}

// String gives the value in decimal.
func (h F16) String() string { return strconv.FormatFloat(float64(h.Float32()), 'g', -1, 32) }

// BF16 is a bfloat16 number, the upper half of a float32, held as its bits.
type BF16 uint16

// BF16From rounds f to the nearest BF16, ties to even. What is too large becomes an infinity; a NaN stays a NaN and is quiet.
func BF16From(f float32) BF16 {
	b := math.Float32bits(f)
	if b&0x7fffffff > 0x7f800000 {
		return BF16(b>>16 | 0x40)
	}
	return BF16((b + 0x7fff + b>>16&1) >> 16)
}

// Float32 is the exact value as a float32.
func (b BF16) Float32() float32 { return math.Float32frombits(uint32(b) << 16) }

// String gives the value in decimal.
func (b BF16) String() string { return strconv.FormatFloat(float64(b.Float32()), 'g', -1, 32) }
