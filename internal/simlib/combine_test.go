package simlib

import (
	"encoding/binary"
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/tensor"
)

// TestCombine: each type wraps around or rounds as it does, with its sign, and a number goes before what is none.
func TestCombine(t *testing.T) {
	u8 := func(x ...byte) []byte { return x }
	u16 := func(x uint16) []byte { return binary.LittleEndian.AppendUint16(nil, x) }
	f32 := func(x float32) []byte { return binary.LittleEndian.AppendUint32(nil, math.Float32bits(x)) }
	f64 := func(x float64) []byte { return binary.LittleEndian.AppendUint64(nil, math.Float64bits(x)) }
	u64 := func(x uint64) []byte { return binary.LittleEndian.AppendUint64(nil, x) }
	nan := float32(math.NaN())
	for _, tt := range []struct {
		dtype, op string
		ins       [][]byte
		want      []byte
	}{
		{"u8", "sum", [][]byte{u8(200, 1), u8(100, 2)}, u8(44, 3)},
		{"u8", "max", [][]byte{u8(200), u8(100)}, u8(200)},
		{"i8", "max", [][]byte{u8(200), u8(100)}, u8(100)},
		{"i8", "min", [][]byte{u8(200), u8(100)}, u8(200)},
		{"i8", "avg", [][]byte{u8(250), u8(251)}, u8(251)}, // -6 and -5: -5.5, to 0
		{"u8", "avg", [][]byte{u8(100), u8(101)}, u8(100)},
		{"i16", "prod", [][]byte{u16(0xffff), u16(7)}, u16(0xfff9)},
		{"u64", "max", [][]byte{u64(1 << 63), u64(1)}, u64(1 << 63)},
		{"i64", "max", [][]byte{u64(1 << 63), u64(1)}, u64(1)},
		{"f32", "sum", [][]byte{f32(1e8), f32(1), f32(-1e8)}, f32(1)}, // rounded once
		{"f32", "avg", [][]byte{f32(1), f32(2)}, f32(1.5)},
		{"f32", "min", [][]byte{f32(nan), f32(2)}, f32(2)},
		{"f32", "max", [][]byte{f32(3), f32(nan)}, f32(3)},
		{"f64", "prod", [][]byte{f64(3), f64(0.5)}, f64(1.5)},
		{"f16", "sum", [][]byte{u16(uint16(tensor.F16From(2048))), u16(uint16(tensor.F16From(3)))}, u16(uint16(tensor.F16From(2052)))},
		{"bf16", "sum", [][]byte{u16(uint16(tensor.BF16From(256))), u16(uint16(tensor.BF16From(2)))}, u16(uint16(tensor.BF16From(258)))},
	} {
		require.Equal(t, tt.want, combine(tt.dtype, tt.op, tt.ins), "%s of %s %v", tt.op, tt.dtype, tt.ins)
	}
}
