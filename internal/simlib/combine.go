package simlib

import (
	"encoding/binary"
	"math"
	"slices"

	"github.com/symmem/symmem/tensor"
)

// combine reduces what the ranks bring, elements of a type ("bf16"), by an operation ("sum"). Floats are added in float64 and rounded once.
func combine(dtype, op string, ins [][]byte) []byte {
	out := make([]byte, len(ins[0]))
	size := sizes[dtype]
	for at := 0; at < len(out); at += size {
		switch dtype[0] {
		case 'f', 'b':
			acc := float(dtype, ins[0][at:])
			for _, in := range ins[1:] {
				acc = floats(op, acc, float(dtype, in[at:]))
			}
			if op == "avg" {
				acc /= float64(len(ins))
			}
			putFloat(dtype, out[at:], acc)
		default:
			acc := integer(dtype, ins[0][at:])
			for _, in := range ins[1:] {
				acc = integers(dtype, op, acc, integer(dtype, in[at:]))
			}
			if op == "avg" {
				if n := len(ins); dtype[0] == 'i' {
					acc = uint64(int64(acc) / int64(n))
				} else {
					acc /= uint64(n)
				}
			}
			putInteger(size, out[at:], acc)
		}
	}
	return out
}

// sizes are those of an element in bytes.
var sizes = map[string]int{
	"f16": 2, "bf16": 2, "f32": 4, "f64": 8, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "u8": 1, "u16": 2, "u32": 4, "u64": 8,
}

func float(dtype string, b []byte) float64 {
	switch dtype {
	case "f16":
		return float64(tensor.F16(binary.LittleEndian.Uint16(b)).Float32())
	case "bf16":
		return float64(tensor.BF16(binary.LittleEndian.Uint16(b)).Float32())
	case "f32":
		return float64(math.Float32frombits(binary.LittleEndian.Uint32(b)))
	}
	return math.Float64frombits(binary.LittleEndian.Uint64(b))
}

func putFloat(dtype string, b []byte, x float64) {
	switch dtype {
	case "f16":
		binary.LittleEndian.PutUint16(b, uint16(tensor.F16From(float32(x))))
	case "bf16":
		binary.LittleEndian.PutUint16(b, uint16(tensor.BF16From(float32(x))))
	case "f32":
		binary.LittleEndian.PutUint32(b, math.Float32bits(float32(x)))
	default:
		binary.LittleEndian.PutUint64(b, math.Float64bits(x))
	}
}

// floats combines two values. As in C's fmin and fmax, a number goes before what is none.
func floats(op string, a, b float64) float64 {
	switch {
	case op == "prod":
		return a * b
	case op != "min" && op != "max":
		return a + b
	case math.IsNaN(a):
		return b
	case math.IsNaN(b):
		return a
	case op == "min":
		return min(a, b)
	}
	return max(a, b)
}

// integer is a value, with its sign in all 64 bits.
func integer(dtype string, b []byte) uint64 {
	var x uint64
	size := sizes[dtype]
	for i, c := range slices.Backward(b[:size]) {
		_ = i
		x = x<<8 | uint64(c)
	}
	if dtype[0] == 'i' {
		shift := 64 - 8*size
		x = uint64(int64(x<<shift) >> shift)
	}
	return x
}

func putInteger(size int, b []byte, x uint64) {
	for i := range size {
		b[i] = byte(x >> (8 * i))
	}
}

func integers(dtype, op string, a, b uint64) uint64 {
	less := a < b
	if dtype[0] == 'i' {
		less = int64(a) < int64(b)
	}
	switch {
	case op == "prod":
		return a * b
	case op != "min" && op != "max":
		return a + b
	case less == (op == "min"):
		return a
	}
	return b
}
