package ptxvm

import (
	"math"
	"math/bits"
)

// The NaNs that the device makes.
const (
	nan32 = 0x7fffffff
	nan16 = 0x7fff // of f16 and of bf16
	nan64 = 0xfff8000000000000
)

func f32(bits uint64) float32 { return math.Float32frombits(uint32(bits)) }
func f64(bits uint64) float64 { return math.Float64frombits(bits) }

// of32 is the bits of a result: every NaN is the same.
func of32(x float32) uint64 {
	if x != x {
		return nan32
	}
	return uint64(math.Float32bits(x))
}

// of64 is the bits of a result of a and b: a NaN comes from the first operand that is one.
func of64(x float64, a, b uint64) uint64 {
	if x != x {
		switch {
		case f64(a) != f64(a):
			return a | 1<<51
		case f64(b) != f64(b):
			return b | 1<<51
		}
		return nan64
	}
	return math.Float64bits(x)
}

// fma32 rounds a*b+c once. In double the product is exact; the sum is rounded to odd, so that rounding it again to single is as if it was
// exact.
func fma32(a, b, c float32) float32 {
	p, z := float64(a)*float64(b), float64(c)
	s := p + z
	if math.IsInf(s, 0) || s != s {
		return float32(s)
	}
	v := s - p
	err := (p - (s - v)) + (z - v)
	if err != 0 && math.Float64bits(s)&1 == 0 {
		if (err > 0) == (s > 0) {
			s = math.Float64frombits(math.Float64bits(s) + 1)
		} else {
			s = math.Float64frombits(math.Float64bits(s) - 1)
		}
	}
	return float32(s)
}

// less32 orders numbers, -0 before +0.
func less32(a, b uint64) bool {
	x, y := f32(a), f32(b)
	return x < y || x == y && a>>31 > b>>31
}

func less64(a, b uint64) bool {
	x, y := f64(a), f64(b)
	return x < y || x == y && a>>63 > b>>63
}

// extreme32 is min, or max with high. A NaN counts only if both are, or with strict.
func extreme32(a, b uint64, high, strict bool) uint64 {
	an, bn := f32(a) != f32(a), f32(b) != f32(b)
	switch {
	case an && bn || strict && (an || bn):
		return nan32
	case an:
		return b
	case bn:
		return a
	case less32(a, b) != high:
		return a
	}
	return b
}

func extreme64(a, b uint64, high bool) uint64 {
	an, bn := f64(a) != f64(a), f64(b) != f64(b)
	switch {
	case an && bn:
		return a | 1<<51
	case an:
		return b
	case bn:
		return a
	case less64(a, b) != high:
		return a
	}
	return b
}

// compare says whether what mask names holds: less 1, equal 2, greater 4, unordered 8.
func compare(a, b float64, mask int64) uint64 {
	is := 3
	switch {
	case a < b:
		is = 0
	case a == b:
		is = 1
	case a > b:
		is = 2
	}
	return uint64(mask) >> is & 1
}

func f32of16(h uint64) uint64 {
	x := uint32(h&0x7fff) << 13
	sign := uint32(h&0x8000) << 16
	if x >= 0x7c00<<13 {
		if x > 0x7c00<<13 {
			return nan32
		}
		return uint64(sign | 0x7f800000)
	}
	// The exponent is biased by 15 in place of 127; the product is exact, for small numbers too.
	return uint64(math.Float32bits(math.Float32frombits(x)*0x1p112) | sign)
}

func f16of32(x uint64) uint64 {
	sign, m := x>>16&0x8000, uint32(x&0x7fffffff)
	switch {
	case m > 0x7f800000:
		return nan16
	case m >= 0x47800000: // 65536
		return sign | 0x7c00
	case m < 0x38800000: // 2^-14: as a sum, whose last bit is the last of the result
		return sign | uint64(math.Float32bits(math.Float32frombits(m)+0.5)-0x3f000000)
	}
	odd := m >> 13 & 1
	m += 0xc8000fff + odd // the exponent's bias, and half of the last bit but the smallest amount
	return sign | uint64(m>>13)
}

func bf16of32(x uint64) uint64 {
	if x&0x7fffffff > 0x7f800000 {
		return nan16
	}
	return (x + 0x7fff + x>>16&1) >> 16
}

// Rounding, as modifiers name it.
const (
	roundNone uint8 = iota
	roundNearest
	roundZero
	roundDown
	roundUp
)

// kind is a number's type.
type kind struct {
	float  bool
	signed bool
	bits   uint8
	brain  bool // bf16
}

func kindOf(typ string) kind {
	k := kind{float: float(typ), signed: typ[0] == 's', brain: typ == "bf16", bits: uint8(8 * sizes[typ])}
	return k
}

func (k kind) encode() int64 {
	n := int64(bits.TrailingZeros8(k.bits)) << 3
	for i, b := range []bool{k.float, k.signed, k.brain} {
		if b {
			n |= 1 << i
		}
	}
	return n
}

func decodeKind(n int64) kind {
	return kind{float: n&1 != 0, signed: n&2 != 0, brain: n&4 != 0, bits: 1 << (n >> 3 & 7)}
}

// conversion is a cvt that has a float at one side.
type conversion struct {
	to, from kind
	round    uint8
	integral bool // to a whole number
	sat      bool
}

func newConversion(to, from, round string, sat bool) (conversion, bool) {
	c := conversion{to: kindOf(to), from: kindOf(from), sat: sat}
	if len(round) == 3 {
		c.integral, round = true, round[:2]
	}
	c.round = map[string]uint8{"": roundNone, "rn": roundNearest, "rz": roundZero, "rm": roundDown, "rp": roundUp}[round]
	switch {
	case c.to.float && c.from.float:
		narrows := c.to.bits < c.from.bits || c.to.bits == c.from.bits && c.to.brain != c.from.brain
		if c.integral {
			return c, to == from
		}
		return c, narrows == (c.round != roundNone)
	case c.to.float:
		return c, c.round != roundNone && !c.integral && !sat
	}
	return c, c.integral
}

func (c conversion) encode() int64 {
	n := c.to.encode() | c.from.encode()<<8 | int64(c.round)<<16
	if c.integral {
		n |= 1 << 24
	}
	if c.sat {
		n |= 1 << 25
	}
	return n
}

func convert(code int64, v uint64) uint64 {
	c := conversion{to: decodeKind(code), from: decodeKind(code >> 8), round: uint8(code >> 16), integral: code>>24&1 != 0, sat: code>>25&1 != 0}
	if !c.from.float {
		v &= mask(int(c.from.bits) / 8)
		negative := false
		if c.from.signed {
			s := int64(v) << (64 - c.from.bits) >> (64 - c.from.bits)
			if negative = s < 0; negative {
				s = -s
			}
			v = uint64(s)
		}
		return pack(c.to, c.round, negative, v, 0)
	}
	var x float64 // exact
	switch {
	case c.from.brain:
		x = float64(f32(v << 16))
	case c.from.bits == 16:
		x = float64(f32(f32of16(v)))
	case c.from.bits == 32:
		x = float64(f32(v))
	default:
		x = f64(v)
	}
	if c.integral {
		switch c.round {
		case roundNearest:
			x = math.RoundToEven(x)
		case roundZero:
			x = math.Trunc(x)
		case roundDown:
			x = math.Floor(x)
		case roundUp:
			x = math.Ceil(x)
		}
	}
	if !c.to.float {
		return whole(c.to, x)
	}
	if c.sat {
		if !(x > 0) {
			x = 0
		}
		x = min(x, 1)
	}
	if x != x {
		switch c.to.bits {
		case 16:
			return nan16
		case 32:
			return nan32
		}
		return math.Float64bits(x)
	}
	b := math.Float64bits(x)
	if math.IsInf(x, 0) || c.to.bits == 64 {
		if c.to.bits == 64 {
			return b
		}
		return b>>63<<(c.to.bits-1) | c.to.infinity()
	}
	e, m := int(b>>52&0x7ff), b&(1<<52-1)
	if e == 0 {
		e = 1
	} else {
		m |= 1 << 52
	}
	return pack(c.to, c.round, b>>63 != 0, m, e-1075)
}

// whole is a float without a fraction as an integer: the nearest that there is, 0 for NaN.
func whole(to kind, x float64) uint64 {
	n := to.bits
	switch {
	case x != x:
		return 0
	case to.signed:
		low, high := -math.Ldexp(1, int(n)-1), math.Ldexp(1, int(n)-1)
		switch {
		case x < low:
			return 1 << (n - 1)
		case x >= high:
			return 1<<(n-1) - 1
		}
		return uint64(int64(x)) & mask(int(n)/8)
	case x < 0:
		return 0
	case x >= math.Ldexp(1, int(n)):
		return mask(int(n) / 8)
	}
	return uint64(x)
}

func (k kind) fraction() int {
	switch {
	case k.brain:
		return 7
	case k.bits == 16:
		return 10
	case k.bits == 32:
		return 23
	}
	return 52
}

func (k kind) infinity() uint64 {
	f := k.fraction()
	return (1<<(int(k.bits)-1-f) - 1) << f
}

// pack rounds m * 2^e to a float.
func pack(to kind, round uint8, negative bool, m uint64, e int) uint64 {
	sign := uint64(0)
	if negative {
		sign = 1 << (to.bits - 1)
	}
	if m == 0 {
		return sign
	}
	f := to.fraction()
	bias := 1<<(int(to.bits)-2-f) - 1
	top := e + bits.Len64(m) - 1 // exponent of the first bit
	last := max(top, 1-bias) - f // that of the last bit that is kept
	var q, rest, half uint64
	switch shift := last - e; {
	case shift <= 0:
		q = m << -shift
	case shift > 64:
		rest, half = 1, 2 // less than half
	case shift == 64:
		rest, half = m, 1<<63
	default:
		q, rest, half = m>>shift, m&(1<<shift-1), 1<<(shift-1)
	}
	up := false
	switch round {
	case roundNearest, roundNone:
		up = rest > half || rest == half && rest != 0 && q&1 == 1
	case roundDown:
		up = negative && rest != 0
	case roundUp:
		up = !negative && rest != 0
	}
	if up {
		q++
	}
	b := q
	if top >= 1-bias {
		b += uint64(top+bias-1) << f // the first bit of q counts one
	}
	if b >= to.infinity() {
		b = to.infinity()
		if round == roundZero || round == roundDown && !negative || round == roundUp && negative {
			b-- // the largest number
		}
	}
	return sign | b
}

// What opApprox does.
const (
	approxSqrt = iota
	approxRcp
	approxRsqrt
	approxEx2
	approxLg2
)

func approximate(what int64, v uint64) uint64 {
	x := float64(f32(v))
	switch what {
	case approxSqrt:
		x = math.Sqrt(x)
	case approxRcp:
		x = 1 / x
	case approxRsqrt:
		x = 1 / math.Sqrt(x)
	case approxEx2:
		x = math.Exp2(x)
	case approxLg2:
		x = math.Log2(x)
	}
	return of32(float32(x))
}

// permute is prmt.b32.
func permute(a, b, how uint64) uint64 {
	all, out := a&0xffffffff|b<<32, uint64(0)
	for i := range 4 {
		n := how >> (4 * i)
		x := all >> (8 * (n & 7)) & 0xff
		if n&8 != 0 {
			x = uint64(int64(int8(x))>>7) & 0xff
		}
		out |= x << (8 * i)
	}
	return out
}

// insert is bfi.
func insert(a, b, at, n uint64, width uint64) uint64 {
	at, n = at&0xff, n&0xff
	if at >= width {
		return b
	}
	n = min(n, width-at)
	m := uint64(math.MaxUint64)
	if n < 64 {
		m = 1<<n - 1
	}
	return b&^(m<<at) | a&m<<at
}

// extract is bfe.
func extract(kind int64, a, at, n uint64) uint64 {
	width := uint64(32)
	if kind >= 2 {
		width = 64
	}
	at, n = at&0xff, n&0xff
	var sign uint64
	if kind&1 != 0 && n != 0 {
		sign = a >> min(at+n-1, width-1) & 1
	}
	var out uint64
	for i := range min(n, width) {
		bit := sign
		if at+i < width {
			bit = a >> (at + i) & 1
		}
		out |= bit << i
	}
	if sign != 0 && n < width {
		out |= math.MaxUint64 << n
	}
	return out & mask(int(width)/8)
}
