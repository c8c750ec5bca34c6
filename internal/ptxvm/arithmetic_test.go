package ptxvm

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/big"
	"math/bits"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// calculate runs instructions on a, b and c, and gives d. $d, $a, $b and $c are registers of the sizes of the operands; predicates are p.
func calculate(t *testing.T, body string, sizes [4]int, a, b, c uint64) uint64 {
	t.Helper()
	names := []string{"d", "a", "b", "c"}
	var text strings.Builder
	text.WriteString(header + ".visible .entry k(.param .u64 to, .param .u64 from) {\n.reg .b64 %rd<4>;\n.reg .pred p, q;\n.reg .b32 %r<4>;\n")
	for i, n := range names {
		fmt.Fprintf(&text, ".reg .b%d $%s;\n", 8*sizes[i], n)
	}
	text.WriteString("ld.param.u64 %rd0, [to];\nld.param.u64 %rd1, [from];\n")
	for i, n := range names[1:] {
		fmt.Fprintf(&text, "ld.global.b%d $%s, [%%rd1+%d];\n", 8*sizes[i+1], n, 8*i)
	}
	fmt.Fprintf(&text, "mov.b%d $d, 0;\n%s\nst.global.b%d [%%rd0], $d;\nret;\n}\n", 8*sizes[0], body, 8*sizes[0])
	m := parse(t, "k.ptx", text.String())
	memory := NewMemory()
	from, to := aligned(32), aligned(16)
	for i, v := range []uint64{a, b, c} {
		binary.LittleEndian.PutUint64(from[8*i:], v)
	}
	require.NoError(t, memory.Map(0x1000, from))
	require.NoError(t, memory.Map(0x2000, to))
	machine := New(memory, Config{})
	require.NoError(t, machine.NewStream(0).Launch(Launch{Function: m.Function("k"), Params: [][]byte{u64(0x2000), u64(0x1000)}}))
	require.NoError(t, machine.Run())
	return binary.LittleEndian.Uint64(to)
}

func bits32(x float64) uint64 { return uint64(math.Float32bits(float32(x))) }

var (
	inf, minusZero = math.Inf(1), math.Copysign(0, -1)
	nan            = math.NaN()
)

// TestInstructions holds instructions against what the PTX document says of them.
func TestInstructions(t *testing.T) {
	w16, w32, w64 := [4]int{2, 2, 2, 2}, [4]int{4, 4, 4, 4}, [4]int{8, 8, 8, 8}
	minus := func(x uint64, size int) uint64 { return -x & mask(size) }
	for _, c := range []struct {
		body    string
		sizes   [4]int
		a, b, c uint64
		want    uint64
	}{
		// Integers wrap around.
		{"add.s32 $d, $a, $b;", w32, 0xffffffff, 2, 0, 1},
		{"add.s16 $d, $a, $b;", w16, 0xffff, 2, 0, 1},
		{"sub.u64 $d, $a, $b;", w64, 1, 2, 0, math.MaxUint64},
		{"sub.s32 $d, $a, $b;", w32, 1, 2, 0, 0xffffffff},
		{"mul.lo.s32 $d, $a, $b;", w32, 0x10001, 0x10001, 0, 0x20001},
		{"mul.lo.u16 $d, $a, $b;", w16, 0x101, 0x101, 0, 0x201},
		{"mul.hi.u32 $d, $a, $b;", w32, 0xffffffff, 0xffffffff, 0, 0xfffffffe},
		{"mul.hi.s32 $d, $a, $b;", w32, 0xffffffff, 2, 0, 0xffffffff},
		{"mul.hi.u64 $d, $a, $b;", w64, math.MaxUint64, math.MaxUint64, 0, math.MaxUint64 - 1},
		{"mul.hi.s64 $d, $a, $b;", w64, math.MaxUint64, 2, 0, math.MaxUint64},
		{"mul.hi.s64 $d, $a, $b;", w64, 1 << 63, 1 << 63, 0, 1 << 62},
		{"mul.wide.u32 $d, $a, $b;", [4]int{8, 4, 4, 4}, 0xffffffff, 2, 0, 0x1fffffffe},
		{"mul.wide.s32 $d, $a, $b;", [4]int{8, 4, 4, 4}, 0xffffffff, 2, 0, minus(2, 8)},
		{"mul.wide.s16 $d, $a, $b;", [4]int{4, 2, 2, 2}, 0xffff, 2, 0, minus(2, 4)},
		{"mad.lo.s32 $d, $a, $b, $c;", w32, 0xffffffff, 3, 5, 2},
		{"mad.wide.s32 $d, $a, $b, $c;", [4]int{8, 4, 4, 8}, 0xffffffff, 3, 5, 2},
		{"mad.wide.u32 $d, $a, $b, $c;", [4]int{8, 4, 4, 8}, 0xffffffff, 2, 5, 0x200000003},
		{"div.s32 $d, $a, $b;", w32, minus(7, 4), 2, 0, minus(3, 4)},
		{"div.s32 $d, $a, $b;", w32, 1 << 31, 0xffffffff, 0, 1 << 31},
		{"div.u32 $d, $a, $b;", w32, minus(7, 4), 2, 0, minus(7, 4) / 2},
		{"div.s64 $d, $a, $b;", w64, 1 << 63, math.MaxUint64, 0, 1 << 63},
		{"rem.s32 $d, $a, $b;", w32, minus(7, 4), 2, 0, minus(1, 4)},
		{"rem.u64 $d, $a, $b;", w64, 7, 4, 0, 3},
		{"min.s32 $d, $a, $b;", w32, 0xffffffff, 1, 0, 0xffffffff},
		{"min.u32 $d, $a, $b;", w32, 0xffffffff, 1, 0, 1},
		{"max.s64 $d, $a, $b;", w64, 1 << 63, 1, 0, 1},
		{"max.u64 $d, $a, $b;", w64, 1 << 63, 1, 0, 1 << 63},
		{"max.s16 $d, $a, $b;", w16, 0x8000, 1, 0, 1},
		{"abs.s32 $d, $a;", w32, minus(5, 4), 0, 0, 5},
		{"neg.s16 $d, $a;", w16, 5, 0, 0, minus(5, 2)},
		{"not.b16 $d, $a;", w16, 0xff, 0, 0, 0xff00},
		{"and.b32 $d, $a, 12;", w32, 10, 0, 0, 8},
		{"xor.b64 $d, $a, -1;", w64, 10, 0, 0, ^uint64(10)},

		// Shifts by the width and more give 0, or the sign.
		{"shl.b32 $d, $a, $b;", w32, 1, 31, 0, 1 << 31},
		{"shl.b32 $d, $a, $b;", w32, 1, 32, 0, 0},
		{"shl.b32 $d, $a, $b;", w32, 1, 0xffffffff, 0, 0},
		{"shl.b64 $d, $a, $b;", [4]int{8, 8, 4, 4}, 1, 64, 0, 0},
		{"shl.b16 $d, $a, $b;", [4]int{2, 2, 4, 4}, 1, 16, 0, 0},
		{"shr.u32 $d, $a, $b;", w32, 1 << 31, 31, 0, 1},
		{"shr.u32 $d, $a, $b;", w32, 1 << 31, 32, 0, 0},
		{"shr.s32 $d, $a, $b;", w32, 1 << 31, 40, 0, 0xffffffff},
		{"shr.s64 $d, $a, $b;", [4]int{8, 8, 4, 4}, 1 << 63, 3, 0, 0xf000000000000000},
		{"shr.s16 $d, $a, $b;", [4]int{2, 2, 4, 4}, 0x8000, 3, 0, 0xf000},

		{"bfi.b32 $d, $a, $b, 8, 4;", w32, 0xff, 0, 0, 0xf00},
		{"bfi.b32 $d, $a, $b, 28, 8;", w32, 0xff, 0x1, 0, 0xf0000001},
		{"bfi.b32 $d, $a, $b, 32, 8;", w32, 0xff, 5, 0, 5},
		{"bfi.b64 $d, $a, $b, 32, 32;", w64, 7, 9, 0, 7<<32 | 9},
		{"bfe.u32 $d, $a, 4, 8;", w32, 0xabcd, 0, 0, 0xbc},
		{"bfe.s32 $d, $a, 4, 8;", w32, 0xabcd, 0, 0, 0xffffffbc},
		{"bfe.s32 $d, $a, 28, 8;", w32, 0x80000000, 0, 0, 0xfffffff8},
		{"bfe.u32 $d, $a, 4, 0;", w32, 0xabcd, 0, 0, 0},
		{"prmt.b32 $d, $a, $b, 4180;", w32, 0x33221100, 0x77665544, 0, prmt(0x33221100, 0x77665544, 4180)},
		{"prmt.b32 $d, $a, $b, $c;", w32, 0x80112233, 0, 0xb3b3, 0xff80ff80},
		{"popc.b64 $d, $a;", [4]int{4, 8, 8, 8}, math.MaxUint64, 0, 0, 64},
		{"clz.b32 $d, $a;", w32, 1, 0, 0, 31},
		{"clz.b64 $d, $a;", [4]int{4, 8, 8, 8}, 0, 0, 0, 64},
		{"brev.b32 $d, $a;", w32, 1, 0, 0, 1 << 31},

		// Predicates, selection, vectors.
		{"setp.lt.s32 p, $a, $b; selp.u32 $d, 1, 0, p;", w32, 0xffffffff, 0, 0, 1},
		{"setp.lt.u32 p, $a, $b; selp.u32 $d, 1, 0, p;", w32, 0xffffffff, 0, 0, 0},
		{"setp.ge.s64 p, $a, $b; selp.b64 $d, $a, $b, p;", w64, 1 << 63, 5, 0, 5},
		{"setp.hi.u32 p, $a, $b; selp.u32 $d, 1, 0, p;", w32, 2, 1, 0, 1},
		{"setp.le.s16 p, $a, $b; selp.u16 $d, 1, 0, p;", w16, 0x8000, 0, 0, 1},
		{"setp.eq.u32 q, $a, 1; setp.lt.and.u32 p, $a, $b, !q; selp.u32 $d, 1, 0, p;", w32, 1, 5, 0, 0},
		{"setp.eq.u32 p, $a, 1; setp.lt.or.u32 p, $b, $a, p; selp.u32 $d, 1, 0, p;", w32, 1, 5, 0, 1},
		{"setp.eq.u32 p, $a, 1; @p mov.u32 $d, 7; @!p mov.u32 $d, 8;", w32, 1, 0, 0, 7},
		{"setp.eq.u32 p, $a, 1; @p mov.u32 $d, 7; @!p mov.u32 $d, 8;", w32, 2, 0, 0, 8},
		{"mov.b64 {%r0, %r1}, $a; mov.b64 $d, {%r1, %r0};", w64, 1<<32 | 2, 0, 0, 2<<32 | 1},
		{"{ .reg .b16 %h<2>; mov.b32 {%h0, %h1}, $a; mov.b32 $d, {%h1, %h0}; }", w32, 1<<16 | 2, 0, 0, 2<<16 | 1},
		{"{ .reg .b16 %h<4>; mov.b64 {%h0, %h1, %h2, %h3}, $a; mov.b64 $d, {%h3, %h2, %h1, %h0}; }", w64, 1<<48 | 2<<32 | 3<<16 | 4, 0, 0, 4<<48 | 3<<32 | 2<<16 | 1},
		{"{ .reg .pred p; setp.eq.u32 p, 1, 1; } setp.eq.u32 p, 1, 2; { .reg .pred p; setp.eq.u32 p, 1, 1; } selp.u32 $d, 1, 0, p;", w32, 0, 0, 0, 0},

		// Conversions between integers cut off and extend.
		{"cvt.s32.s8 $d, $a;", w32, 0x180, 0, 0, 0xffffff80},
		{"cvt.u32.u8 $d, $a;", w32, 0x180, 0, 0, 0x80},
		{"cvt.u16.u32 $d, $a;", [4]int{2, 4, 4, 4}, 0x12345, 0, 0, 0x2345},
		{"cvt.s64.s32 $d, $a;", [4]int{8, 4, 4, 4}, 0x80000000, 0, 0, 0xffffffff80000000},
		{"cvt.u64.u32 $d, $a;", [4]int{8, 4, 4, 4}, 0x80000000, 0, 0, 0x80000000},
		{"cvt.u32.s16 $d, $a;", [4]int{4, 2, 2, 2}, 0x8000, 0, 0, 0xffff8000},
		{"cvt.s8.s32 $d, $a;", w32, 0x80, 0, 0, 0xffffff80},
		{"cvt.u8.u32 $d, $a;", w32, 0x180, 0, 0, 0x80},

		// Between integers and floats: rounded as it says, and cut off at the ends.
		{"cvt.rn.f32.u32 $d, $a;", w32, 0xffffffff, 0, 0, bits32(4294967296)},
		{"cvt.rz.f32.u32 $d, $a;", w32, 0xffffffff, 0, 0, 0x4f7fffff},
		{"cvt.rn.f32.s32 $d, $a;", w32, 0xffffffff, 0, 0, bits32(-1)},
		{"cvt.rm.f32.s64 $d, $a;", [4]int{4, 8, 8, 8}, minus(1<<24+1, 8), 0, 0, bits32(-(1<<24 + 2))},
		{"cvt.rp.f32.s64 $d, $a;", [4]int{4, 8, 8, 8}, minus(1<<24+1, 8), 0, 0, bits32(-(1 << 24))},
		{"cvt.rn.f64.u64 $d, $a;", w64, math.MaxUint64, 0, 0, math.Float64bits(1 << 64)},
		{"cvt.rn.f16.s32 $d, $a;", [4]int{2, 4, 4, 4}, 100000, 0, 0, 0x7c00},
		{"cvt.rzi.s32.f32 $d, $a;", w32, bits32(-2.7), 0, 0, minus(2, 4)},
		{"cvt.rni.s32.f32 $d, $a;", w32, bits32(2.5), 0, 0, 2},
		{"cvt.rmi.s32.f32 $d, $a;", w32, bits32(-2.1), 0, 0, minus(3, 4)},
		{"cvt.rpi.u32.f32 $d, $a;", w32, bits32(2.1), 0, 0, 3},
		{"cvt.rzi.s32.f32 $d, $a;", w32, bits32(3e9), 0, 0, 0x7fffffff},
		{"cvt.rzi.s32.f32 $d, $a;", w32, bits32(-3e9), 0, 0, 0x80000000},
		{"cvt.rzi.u32.f32 $d, $a;", w32, bits32(-3), 0, 0, 0},
		{"cvt.rzi.u64.f64 $d, $a;", w64, math.Float64bits(1e30), 0, 0, math.MaxUint64},
		{"cvt.rzi.s32.f32 $d, $a;", w32, bits32(nan), 0, 0, 0},
		{"cvt.rni.f32.f32 $d, $a;", w32, bits32(3.5), 0, 0, bits32(4)},
		{"cvt.rn.sat.f16.f32 $d, $a;", [4]int{2, 4, 4, 4}, bits32(7), 0, 0, 0x3c00},
		{"cvt.rn.f16x2.f32 $d, $a, $b;", w32, bits32(1), bits32(-2), 0, 0x3c00c000},
		{"cvt.rn.bf16x2.f32 $d, $a, $b;", w32, bits32(1.00390625), bits32(nan), 0, 0x3f807fff},
		{"cvt.sat.f32.f32 $d, $a;", w32, bits32(nan), 0, 0, 0},

		// Floats. A NaN of 32 bits is always the same.
		{"add.rn.f32 $d, $a, $b;", w32, bits32(1), bits32(0x1p-24), 0, bits32(1)},
		{"add.f32 $d, $a, $b;", w32, bits32(inf), bits32(-inf), 0, nan32},
		{"add.f32 $d, $a, $b;", w32, 0xffc12345, bits32(1), 0, nan32},
		{"mul.rn.f32 $d, $a, $b;", w32, bits32(0x1p-140), bits32(0x1p-9), 0, bits32(0x1p-149)},
		{"div.rn.f32 $d, $a, $b;", w32, bits32(1), bits32(minusZero), 0, bits32(-inf)},
		{"div.rn.f32 $d, $a, $b;", w32, bits32(1), bits32(3), 0, 0x3eaaaaab},
		{"fma.rn.f32 $d, $a, $b, $c;", w32, bits32(1 + 0x3p-23), bits32(1 + 0x3p-23), bits32(-1), 0x35400002},
		{"fma.rn.f64 $d, $a, $b, $c;", w64, math.Float64bits(1 + 0x1p-52), math.Float64bits(1 - 0x1p-52), math.Float64bits(-1), math.Float64bits(-0x1p-104)},
		{"sub.f64 $d, $a, $b;", w64, math.Float64bits(inf), math.Float64bits(inf), 0, nan64},
		{"add.f64 $d, $a, $b;", w64, math.Float64bits(1), 0x7ff0000000000123, 0, 0x7ff8000000000123},
		{"neg.f32 $d, $a;", w32, bits32(0), 0, 0, 0x80000000},
		{"abs.f64 $d, $a;", w64, math.Float64bits(-2), 0, 0, math.Float64bits(2)},
		{"sqrt.rn.f32 $d, $a;", w32, bits32(2), 0, 0, 0x3fb504f3},
		{"sqrt.rn.f32 $d, $a;", w32, bits32(-1), 0, 0, nan32},
		{"rsqrt.approx.f32 $d, $a;", w32, bits32(4), 0, 0, bits32(0.5)},
		{"ex2.approx.f32 $d, $a;", w32, bits32(3), 0, 0, bits32(8)},

		// Minimum and maximum: -0 is less than +0, and a NaN counts only with .NaN.
		{"min.f32 $d, $a, $b;", w32, bits32(0), bits32(minusZero), 0, bits32(minusZero)},
		{"min.f32 $d, $a, $b;", w32, bits32(minusZero), bits32(0), 0, bits32(minusZero)},
		{"max.f32 $d, $a, $b;", w32, bits32(minusZero), bits32(0), 0, 0},
		{"max.f32 $d, $a, $b;", w32, bits32(0), bits32(minusZero), 0, 0},
		{"min.f32 $d, $a, $b;", w32, bits32(nan), bits32(3), 0, bits32(3)},
		{"max.f32 $d, $a, $b;", w32, bits32(3), bits32(nan), 0, bits32(3)},
		{"max.f32 $d, $a, $b;", w32, bits32(nan), 0xffc00000, 0, nan32},
		{"min.NaN.f32 $d, $a, $b;", w32, bits32(nan), bits32(3), 0, nan32},
		{"max.NaN.f32 $d, $a, $b;", w32, bits32(3), 0xff800001, 0, nan32},
		{"min.NaN.f32 $d, $a, $b;", w32, bits32(-3), bits32(3), 0, bits32(-3)},
		{"min.f64 $d, $a, $b;", w64, math.Float64bits(0), math.Float64bits(minusZero), 0, math.Float64bits(minusZero)},
		{"max.f64 $d, $a, $b;", w64, math.Float64bits(nan), math.Float64bits(3), 0, math.Float64bits(3)},
	} {
		t.Run(fmt.Sprintf("%s %#x %#x %#x", c.body, c.a, c.b, c.c), func(t *testing.T) {
			require.Equal(t, fmt.Sprintf("%#x", c.want), fmt.Sprintf("%#x", calculate(t, c.body, c.sizes, c.a, c.b, c.c)))
		})
	}
}

// prmt is the instruction, byte by byte, for a selector without signs.
func prmt(a, b uint32, how uint32) (out uint64) {
	all := binary.LittleEndian.AppendUint32(binary.LittleEndian.AppendUint32(nil, a), b)
	for i := range 4 {
		out |= uint64(all[how>>(4*i)&7]) << (8 * i)
	}
	return out
}

// TestComparisons: every condition of setp for floats, with every pair of less, equal, greater and unordered.
func TestComparisons(t *testing.T) {
	pairs := []struct{ a, b float64 }{{1, 2}, {2, 2}, {minusZero, 0}, {3, 2}, {nan, 1}, {1, nan}, {nan, nan}, {inf, inf}, {-inf, inf}}
	for name := range conditions {
		for _, p := range pairs {
			unordered := p.a != p.a || p.b != p.b
			is := map[string]bool{"eq": p.a == p.b, "ne": p.a != p.b, "lt": p.a < p.b, "le": p.a <= p.b, "gt": p.a > p.b, "ge": p.a >= p.b}
			var want bool
			switch base := strings.TrimSuffix(name, "u"); {
			case name == "num":
				want = !unordered
			case name == "nan":
				want = unordered
			case base != name:
				want = unordered || is[base]
			default:
				want = !unordered && is[name]
			}
			got := calculate(t, fmt.Sprintf("setp.%s.f32 p, $a, $b; selp.u32 $d, 1, 0, p;", name), [4]int{4, 4, 4, 4}, bits32(p.a), bits32(p.b), 0)
			require.Equal(t, bit(want), got, "setp.%s.f32 %v, %v", name, p.a, p.b)
			got = calculate(t, fmt.Sprintf("setp.%s.f64 p, $a, $b; selp.u32 $d, 1, 0, p;", name), [4]int{4, 8, 8, 8}, math.Float64bits(p.a), math.Float64bits(p.b), 0)
			require.Equal(t, bit(want), got, "setp.%s.f64 %v, %v", name, p.a, p.b)
		}
	}
}

// formats are floats by the bits of their fraction, and the exponent of the smallest normal number.
var formats = []struct {
	name     string
	fraction int
	lowest   int
	most     float64
	nan      uint64
}{{"f16", 10, -14, 65504, nan16}, {"bf16", 7, -126, 0x1.fep127, nan16}, {"f32", 23, -126, math.MaxFloat32, nan32}}

// rounded is what a number is in a format, by arithmetic of arbitrary precision.
func rounded(x float64, fraction, lowest int, most float64, mode big.RoundingMode) float64 {
	if x == 0 || math.IsInf(x, 0) {
		return x
	}
	_, e := math.Frexp(x)
	unit := max(e-1, lowest) - fraction // of the last bit
	n, _ := new(big.Float).SetMode(mode).SetPrec(200).SetFloat64(x).SetMantExp(new(big.Float).SetFloat64(x), -unit).Float64()
	switch mode { // to a whole number of units
	case big.ToNearestEven:
		n = math.RoundToEven(n)
	case big.ToZero:
		n = math.Trunc(n)
	case big.ToNegativeInf:
		n = math.Floor(n)
	case big.ToPositiveInf:
		n = math.Ceil(n)
	}
	y := math.Ldexp(n, unit)
	if math.Abs(y) > most {
		switch {
		case mode == big.ToZero, mode == big.ToNegativeInf && y > 0, mode == big.ToPositiveInf && y < 0:
			return math.Copysign(most, y)
		}
		return math.Copysign(inf, y)
	}
	if y == 0 {
		return math.Copysign(0, x)
	}
	return y
}

// TestNarrow: conversions to narrower floats round as they say, subnormal and overflowing ones too.
func TestNarrow(t *testing.T) {
	modes := map[string]big.RoundingMode{"rn": big.ToNearestEven, "rz": big.ToZero, "rm": big.ToNegativeInf, "rp": big.ToPositiveInf}
	rnd := rand.New(rand.NewPCG(3, 4))
	value := func(k kind, v uint64) float64 {
		c := conversion{to: kind{float: true, bits: 64}, from: k}
		return f64(convert(c.encode(), v))
	}
	for _, f := range formats {
		for mode, how := range modes {
			narrow, ok := newConversion(f.name, "f64", mode, false)
			require.True(t, ok)
			require.Equal(t, f.nan, convert(narrow.encode(), math.Float64bits(nan)))
			for range 20_000 {
				x := math.Ldexp(rnd.Float64()+0.5, f.lowest-f.fraction-3+rnd.IntN(40))
				if rnd.IntN(3) == 0 { // near or at the middle between two
					x = math.Ldexp(float64(rnd.IntN(1<<(f.fraction+2))), f.lowest-f.fraction-1+rnd.IntN(5)) + float64(rnd.IntN(3)-1)*math.Ldexp(1, f.lowest-f.fraction-20)
				}
				if rnd.IntN(4) == 0 {
					x = f.most * (1 + (rnd.Float64()-0.5)*math.Ldexp(1, -f.fraction))
				}
				if rnd.IntN(2) == 0 {
					x = -x
				}
				got := value(narrow.to, convert(narrow.encode(), math.Float64bits(x)))
				want := rounded(x, f.fraction, f.lowest, f.most, how)
				if math.Abs(want) == inf && how == big.ToNearestEven && math.Abs(x) < f.most*(1+math.Ldexp(1, -f.fraction-2)) {
					want = math.Copysign(f.most, x)
				}
				require.Equal(t, math.Float64bits(want), math.Float64bits(got), "cvt.%s.%s.f64 of %g (%x) gives %g, not %g", mode, f.name, x, x, got, want)
			}
		}
	}
}

// TestHalves: the quick conversions of 16 bits are the slow ones.
func TestHalves(t *testing.T) {
	wide, _ := newConversion("f32", "f16", "", false)
	for h := range uint64(1 << 16) {
		require.Equal(t, convert(wide.encode(), h), f32of16(h), "%#x", h)
	}
	half, _ := newConversion("f16", "f32", "rn", false)
	brain, _ := newConversion("bf16", "f32", "rn", false)
	h, b := half.encode(), brain.encode()
	for i := uint64(0); i < 1<<32; i += 1021 {
		for _, v := range []uint64{i, i &^ 0xfff, i&^0x1fff | 0x1000, i&^0xffff | 0x8000} {
			if f16of32(v) != convert(h, v) || bf16of32(v) != convert(b, v) {
				t.Fatalf("%#x: %#x and %#x, not %#x and %#x", v, f16of32(v), bf16of32(v), convert(h, v), convert(b, v))
			}
		}
	}
}

// TestFMA: a fused multiply-add rounds once.
func TestFMA(t *testing.T) {
	rnd := rand.New(rand.NewPCG(5, 6))
	for range 200_000 {
		number := func() float32 { return math.Float32frombits(rnd.Uint32()&^0x7f800000 | uint32(100+rnd.IntN(50))<<23) }
		a, b, c := number(), number(), number()
		if rnd.IntN(2) == 0 { // nearly as large as the product, or nearly half of its last bit
			c = -a * b * float32(math.Ldexp(1, []int{0, -24, -25, 24}[rnd.IntN(4)]))
		}
		exact := new(big.Float).SetPrec(400).SetFloat64(float64(a))
		exact.Mul(exact, new(big.Float).SetFloat64(float64(b))).Add(exact, new(big.Float).SetFloat64(float64(c)))
		want, _ := exact.Float32()
		if got := fma32(a, b, c); got != want {
			t.Fatalf("%x * %x + %x = %x, not %x", a, b, c, got, want)
		}
	}
}

// TestInsert holds bfi and bfe against bits.
func TestInsert(t *testing.T) {
	rnd := rand.New(rand.NewPCG(7, 8))
	for range 20_000 {
		a, b, at, n := rnd.Uint64(), rnd.Uint64(), rnd.Uint64N(70), rnd.Uint64N(70)
		want := b
		for i := range n {
			if at+i < 64 {
				want = want&^(1<<(at+i)) | a>>i&1<<(at+i)
			}
		}
		require.Equal(t, want, insert(a, b, at, n, 64), "%#x %#x %d %d", a, b, at, n)
		plain := uint64(0)
		for i := range min(n, 64) {
			if at+i < 64 {
				plain |= a >> (at + i) & 1 << i
			}
		}
		require.Equal(t, plain, extract(2, a, at, n))
		if n > 0 && n < 64 && at+n <= 64 {
			require.Equal(t, uint64(int64(plain<<(64-n))>>(64-n)), extract(3, a, at, n))
		}
		require.LessOrEqual(t, bits.Len64(extract(0, a&0xffffffff, at, n)), 32)
	}
}
