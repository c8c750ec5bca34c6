package kernels

import (
	"math"

	"github.com/symmem/symmem/kernels/ptx"
)

// What quantized.cu does with a block, with the same bits.
const (
	smallestScale = 0x1p-126
	quantizedNaN  = 0x7fffffff // the scale of a block that is no numbers
	quantizedZero = 128        // the byte that stands for 0
	// toInteger added to a number below 2^22 makes the last bit of the sum count 1, and its last byte 128 more than the number.
	toInteger = 3<<22 + quantizedZero
)

// quantizeBlock gives the bits of the scale.
func quantizeBlock(dst *[ptx.QuantizedBlock]byte, x *[ptx.QuantizedBlock]float32) (scale uint32) {
	most := uint32(0) // magnitudes are ordered as their bits are, and a NaN is above all
	for _, v := range x {
		most = max(most, math.Float32bits(v)&0x7fffffff)
	}
	if most >= 0x7f800000 {
		for i := range dst {
			dst[i] = quantizedZero
		}
		return quantizedNaN
	}
	s := max(math.Float32frombits(most)/127, smallestScale)
	inverse := 1 / s
	for i, v := range x {
		dst[i] = byte(math.Float32bits(float32(v*inverse) + toInteger))
	}
	return math.Float32bits(s)
}

func dequantizeBlock(x *[ptx.QuantizedBlock]float32, src *[ptx.QuantizedBlock]byte, scale uint32) {
	s := math.Float32frombits(scale)
	for i, b := range src {
		x[i] = float32(float32(int(b)-quantizedZero) * s)
	}
}
