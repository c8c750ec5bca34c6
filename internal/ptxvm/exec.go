package ptxvm

import (
	"fmt"
	"math"
	"math/bits"
	"sync/atomic"
	"unsafe"
)

func mul64(a, b uint64) (high, low uint64) { return bits.Mul64(a, b) }

// registers is the frame of a function that runs. It is no longer than the frame; decoding sees to it that no index is beyond.
type registers = *[1 << 16]uint64

// locate is where bytes are, or nil: n is 1, 2, 4, 8 or 16, and so aligned.
func (m *Machine) locate(address, n uint64) unsafe.Pointer {
	c := &m.cache[(address>>20)*0x9e3779b97f4a7c15>>60]
	if off := address - c.base; off < c.size && address&(n-1) == 0 && n <= c.size-off {
		return unsafe.Add(c.data, off)
	}
	return m.look(address, n)
}

//go:noinline
func (m *Machine) look(address, n uint64) unsafe.Pointer {
	r := m.memory.find(address)
	if r == nil || r.copies != nil || address&(n-1) != 0 || n > r.size-(address-r.base) {
		return nil
	}
	m.cache[(address>>20)*0x9e3779b97f4a7c15>>60] = cached{r.base, r.size, r.data}
	return unsafe.Add(r.data, address-r.base)
}

// bad ends the machine for an address that locate has not.
func (m *Machine) bad(t *thread, pc int32, steps, address, n uint64) {
	m.steps += steps
	m.fail(t, pc, m.wrong(address, n))
}

func (m *Machine) wrong(address, n uint64) error {
	if address&(n-1) != 0 {
		return fmt.Errorf("%d bytes at %#x: %w", n, address, ErrAlignment)
	}
	if r := m.memory.find(address); r != nil && r.copies != nil {
		return fmt.Errorf("%d bytes at %#x, a multicast address: %w", n, address, ErrAddress)
	}
	return fmt.Errorf("%d bytes at %#x: %w", n, address, ErrAddress)
}

func (t *thread) special(which int64) uint32 {
	l := t.block.launch
	n := uint32(t.number)
	switch which {
	case 0:
		return n % l.dim[0]
	case 1:
		return n / l.dim[0] % l.dim[1]
	case 2:
		return n / l.dim[0] / l.dim[1]
	case 3, 4, 5:
		return l.dim[which-3]
	case 6, 7, 8:
		return t.block.index[which-6]
	case 9, 10, 11:
		return l.grid[which-9]
	case 12:
		return n % 32
	case 13:
		return n / 32
	}
	return t.block.special(which)
}

// exec lets a thread go on for a turn.
//
//go:nocheckptr
func (m *Machine) exec(t *thread) {
	if m.spaces != nil {
		m.turnTo(t.block.launch.stream.device)
	}
	f, pc := t.f, t.pc
	t.block.began = true
	code := f.code
	r := registers(unsafe.Pointer(&t.words[t.base]))
	steps := uint64(0)
	limit, events := uint64(m.turn), 0
	weak := m.weak
	if weak {
		limit = 1 << 14 // for a loop that nothing comes out of
		events = m.turn
		if events > 1 {
			events = 1 + m.choose.Choose(events)
		}
	}
	slow := m.slow
	var ticks []bool // coverage, of the function covered
	var covered *Function
	for {
		in := &code[pc]
		pc++
		steps++
		if slow {
			if t.loaded != 0 {
				m.saw(t, f, r)
			}
			if in.op > opVisible {
				if weak && (!m.hidden || !m.private(r, in)) {
					if events == 0 {
						t.pc = pc - 1
						m.steps += steps - 1
						return
					}
					events--
				}
				if m.watch {
					m.note(t, f, pc-1, in, r)
				}
				if m.config.Trace != nil {
					m.config.Trace(m.who(t), f.place(pc-1))
				}
			}
			if c := m.config.Coverage; c != nil {
				if covered != f {
					ticks, covered = c.of(f), f
				}
				ticks[pc-1] = true
			}
			if weak && in.op > opVisible && in.op < opFence && m.hosted(f, in, r) {
				m.meetHost(t, &f.access[in.tgt], in.op)
			} else if weak && in.op > opVisible && in.op < opFence {
				m.site = site{t.block, t.number, pc - 1, f}
				if err := m.access(t, f, in, r); err != nil {
					m.steps += steps
					m.fail(t, pc-1, err)
					return
				}
				continue
			}
		}
		switch in.op {
		case opMov:
			r[in.d] = r[in.a]
		case opPack32:
			r[in.d] = r[in.a] | r[in.b]<<32
		case opPack16:
			r[in.d] = r[in.a] | r[in.b]<<16
		case opPack4:
			r[in.d] = r[in.a] | r[in.b]<<16 | r[in.c]<<32 | r[in.e]<<48
		case opUnpack32:
			x := r[in.a]
			r[in.d], r[in.b] = uint64(uint32(x)), x>>32
		case opUnpack16:
			x := r[in.a]
			r[in.d], r[in.b] = uint64(uint16(x)), x>>16
		case opUnpack4:
			x := r[in.a]
			r[in.d], r[in.b], r[in.c], r[in.e] = uint64(uint16(x)), uint64(uint16(x>>16)), uint64(uint16(x>>32)), x>>48
		case opSpecial:
			r[in.d] = uint64(t.special(in.imm))
		case opMapa:
			address, err := t.mapa(r[in.a], r[in.b])
			if err != nil {
				m.steps += steps
				m.fail(t, pc-1, err)
				return
			}
			r[in.d] = address
		case opTimer:
			m.steps, steps = m.steps+steps, 0
			r[in.d] = m.now()
		case opSelp:
			if r[in.c] != 0 {
				r[in.d] = r[in.a]
			} else {
				r[in.d] = r[in.b]
			}
		case opMask:
			r[in.d] = r[in.a] & uint64(in.imm)
		case opSext:
			r[in.d] = uint64(int64(r[in.a])<<(uint32(in.tgt)&63)>>(uint32(in.tgt)&63)) & uint64(in.imm)
		case opAnd:
			r[in.d] = r[in.a] & r[in.b]
		case opOr:
			r[in.d] = r[in.a] | r[in.b]
		case opXor:
			r[in.d] = r[in.a] ^ r[in.b]
		case opNot:
			r[in.d] = ^r[in.a] & uint64(in.imm)
		case opAdd16:
			r[in.d] = uint64(uint16(r[in.a] + r[in.b]))
		case opSub16:
			r[in.d] = uint64(uint16(r[in.a] - r[in.b]))
		case opMul16:
			r[in.d] = uint64(uint16(r[in.a] * r[in.b]))
		case opMad16:
			r[in.d] = uint64(uint16(r[in.a]*r[in.b] + r[in.c]))
		case opMinS16:
			r[in.d] = uint64(uint16(min(int16(r[in.a]), int16(r[in.b]))))
		case opMaxS16:
			r[in.d] = uint64(uint16(max(int16(r[in.a]), int16(r[in.b]))))
		case opAbs16:
			if r[in.a]>>15 != 0 {
				r[in.d] = uint64(uint16(-r[in.a]))
			} else {
				r[in.d] = r[in.a]
			}
		case opShl16:
			r[in.d] = uint64(uint16(r[in.a] << r[in.b]))
		case opShrS16:
			r[in.d] = uint64(uint16(int16(r[in.a]) >> r[in.b]))
		case opSetLtS16:
			r[in.d] = bit(int16(r[in.a]) < int16(r[in.b]))
		case opSetLeS16:
			r[in.d] = bit(int16(r[in.a]) <= int16(r[in.b]))
		case opAdd32:
			r[in.d] = uint64(uint32(r[in.a] + r[in.b]))
		case opSub32:
			r[in.d] = uint64(uint32(r[in.a] - r[in.b]))
		case opMul32:
			r[in.d] = uint64(uint32(r[in.a] * r[in.b]))
		case opMad32:
			r[in.d] = uint64(uint32(r[in.a]*r[in.b] + r[in.c]))
		case opMinS32:
			r[in.d] = uint64(uint32(min(int32(r[in.a]), int32(r[in.b]))))
		case opMaxS32:
			r[in.d] = uint64(uint32(max(int32(r[in.a]), int32(r[in.b]))))
		case opAbs32:
			if r[in.a]>>31 != 0 {
				r[in.d] = uint64(uint32(-r[in.a]))
			} else {
				r[in.d] = r[in.a]
			}
		case opShl32:
			r[in.d] = uint64(uint32(r[in.a] << r[in.b]))
		case opShrS32:
			r[in.d] = uint64(uint32(int32(r[in.a]) >> r[in.b]))
		case opSetLtS32:
			r[in.d] = bit(int32(r[in.a]) < int32(r[in.b]))
		case opSetLeS32:
			r[in.d] = bit(int32(r[in.a]) <= int32(r[in.b]))
		case opAdd64:
			r[in.d] = r[in.a] + r[in.b]
		case opSub64:
			r[in.d] = r[in.a] - r[in.b]
		case opMul64:
			r[in.d] = r[in.a] * r[in.b]
		case opMad64:
			r[in.d] = r[in.a]*r[in.b] + r[in.c]
		case opMinS64:
			r[in.d] = uint64(min(int64(r[in.a]), int64(r[in.b])))
		case opMaxS64:
			r[in.d] = uint64(max(int64(r[in.a]), int64(r[in.b])))
		case opAbs64:
			if r[in.a]>>63 != 0 {
				r[in.d] = -r[in.a]
			} else {
				r[in.d] = r[in.a]
			}
		case opShl64:
			r[in.d] = r[in.a] << r[in.b]
		case opShrS64:
			r[in.d] = uint64(int64(r[in.a]) >> r[in.b])
		case opSetLtS64:
			r[in.d] = bit(int64(r[in.a]) < int64(r[in.b]))
		case opSetLeS64:
			r[in.d] = bit(int64(r[in.a]) <= int64(r[in.b]))
		case opMulHiU32:
			r[in.d] = r[in.a] * r[in.b] >> 32
		case opMulHiS32:
			r[in.d] = uint64(uint32(int64(int32(r[in.a])) * int64(int32(r[in.b])) >> 32))
		case opMulHiU64:
			r[in.d], _ = mul64(r[in.a], r[in.b])
		case opMulHiS64:
			a, b := r[in.a], r[in.b]
			high, _ := mul64(a, b)
			r[in.d] = high - a*(b>>63) - b*(a>>63)
		case opMulWideU16:
			r[in.d] = r[in.a] * r[in.b]
		case opMulWideU32:
			r[in.d] = r[in.a] * r[in.b]
		case opMulWideS16:
			r[in.d] = uint64(uint32(int32(int16(r[in.a])) * int32(int16(r[in.b]))))
		case opMulWideS32:
			r[in.d] = uint64(int64(int32(r[in.a])) * int64(int32(r[in.b])))
		case opMadWideU16:
			r[in.d] = uint64(uint32(r[in.a]*r[in.b] + r[in.c]))
		case opMadWideU32:
			r[in.d] = r[in.a]*r[in.b] + r[in.c]
		case opMadWideS16:
			r[in.d] = uint64(uint32(int32(int16(r[in.a]))*int32(int16(r[in.b])) + int32(r[in.c])))
		case opMadWideS32:
			r[in.d] = uint64(int64(int32(r[in.a]))*int64(int32(r[in.b]))) + r[in.c]
		case opDivU:
			if b := r[in.b]; b == 0 {
				r[in.d] = uint64(in.imm)
			} else {
				r[in.d] = r[in.a] / b
			}
		case opRemU:
			if b := r[in.b]; b != 0 {
				r[in.d] = r[in.a] % b
			} else {
				r[in.d] = r[in.a]
			}
		case opMinU:
			r[in.d] = min(r[in.a], r[in.b])
		case opMaxU:
			r[in.d] = max(r[in.a], r[in.b])
		case opNeg:
			r[in.d] = -r[in.a] & uint64(in.imm)
		case opShrU:
			r[in.d] = r[in.a] >> r[in.b]
		case opBfi32:
			r[in.d] = insert(r[in.a], r[in.b], r[in.c], r[in.e], 32) & 0xffffffff
		case opBfi64:
			r[in.d] = insert(r[in.a], r[in.b], r[in.c], r[in.e], 64)
		case opBfe:
			r[in.d] = extract(in.imm, r[in.a], r[in.b], r[in.c])
		case opPrmt:
			r[in.d] = permute(r[in.a], r[in.b], r[in.c])
		case opPopc:
			r[in.d] = uint64(bits.OnesCount64(r[in.a]))
		case opClz32:
			r[in.d] = uint64(bits.LeadingZeros32(uint32(r[in.a])))
		case opClz64:
			r[in.d] = uint64(bits.LeadingZeros64(r[in.a]))
		case opBrev32:
			r[in.d] = uint64(bits.Reverse32(uint32(r[in.a])))
		case opBrev64:
			r[in.d] = bits.Reverse64(r[in.a])
		case opSetEq:
			r[in.d] = bit(r[in.a] == r[in.b])
		case opSetNe:
			r[in.d] = bit(r[in.a] != r[in.b])
		case opSetLtU:
			r[in.d] = bit(r[in.a] < r[in.b])
		case opSetLeU:
			r[in.d] = bit(r[in.a] <= r[in.b])
		case opSetF32:
			r[in.d] = compare(float64(f32(r[in.a])), float64(f32(r[in.b])), in.imm)
		case opSetF64:
			r[in.d] = compare(f64(r[in.a]), f64(r[in.b]), in.imm)
		case opFmaF32:
			r[in.d] = of32(fma32(f32(r[in.a]), f32(r[in.b]), f32(r[in.c])))
		case opFmaF64:
			a, b, c := r[in.a], r[in.b], r[in.c]
			if x := math.FMA(f64(a), f64(b), f64(c)); x == x || f64(c) == f64(c) {
				r[in.d] = of64(x, a, b)
			} else {
				r[in.d] = of64(x, c, c)
			}
		case opMinF32:
			r[in.d] = extreme32(r[in.a], r[in.b], false, false)
		case opMaxF32:
			r[in.d] = extreme32(r[in.a], r[in.b], true, false)
		case opMinNaNF32:
			r[in.d] = extreme32(r[in.a], r[in.b], false, true)
		case opMaxNaNF32:
			r[in.d] = extreme32(r[in.a], r[in.b], true, true)
		case opMinF64:
			r[in.d] = extreme64(r[in.a], r[in.b], false)
		case opMaxF64:
			r[in.d] = extreme64(r[in.a], r[in.b], true)
		case opNegF32:
			r[in.d] = r[in.a] ^ 1<<31
		case opAbsF32:
			r[in.d] = r[in.a] &^ (1 << 31)
		case opNegF64:
			r[in.d] = r[in.a] ^ 1<<63
		case opAbsF64:
			r[in.d] = r[in.a] &^ (1 << 63)
		case opSqrtF32:
			r[in.d] = of32(float32(math.Sqrt(float64(f32(r[in.a])))))
		case opSqrtF64:
			r[in.d] = of64(math.Sqrt(f64(r[in.a])), r[in.a], r[in.a])
		case opApprox:
			r[in.d] = approximate(in.imm, r[in.a])
		case opCvtF32F16:
			r[in.d] = f32of16(r[in.a])
		case opCvtF16F32:
			r[in.d] = f16of32(r[in.a])
		case opCvtBF16F32:
			r[in.d] = bf16of32(r[in.a])
		case opCvtF16x2F32:
			r[in.d] = f16of32(r[in.a])<<16 | f16of32(r[in.b])
		case opCvtBF16x2F32:
			r[in.d] = bf16of32(r[in.a])<<16 | bf16of32(r[in.b])
		case opCvtF32U32:
			r[in.d] = uint64(math.Float32bits(float32(uint32(r[in.a]))))
		case opCvt:
			r[in.d] = convert(in.imm, r[in.a])
		case opAddF32:
			r[in.d] = of32(f32(r[in.a]) + f32(r[in.b]))
		case opAddF64:
			a, b := r[in.a], r[in.b]
			r[in.d] = of64(f64(a)+f64(b), a, b)
		case opSubF32:
			r[in.d] = of32(f32(r[in.a]) - f32(r[in.b]))
		case opSubF64:
			a, b := r[in.a], r[in.b]
			r[in.d] = of64(f64(a)-f64(b), a, b)
		case opMulF32:
			r[in.d] = of32(f32(r[in.a]) * f32(r[in.b]))
		case opMulF64:
			a, b := r[in.a], r[in.b]
			r[in.d] = of64(f64(a)*f64(b), a, b)
		case opDivF32:
			r[in.d] = of32(f32(r[in.a]) / f32(r[in.b]))
		case opDivF64:
			a, b := r[in.a], r[in.b]
			r[in.d] = of64(f64(a)/f64(b), a, b)
		case opDivS32:
			switch a, b := int32(r[in.a]), int32(r[in.b]); b {
			case 0:
				r[in.d] = math.MaxUint32
			case -1:
				r[in.d] = uint64(uint32(-a))
			default:
				r[in.d] = uint64(uint32(a / b))
			}
		case opRemS32:
			switch a, b := int32(r[in.a]), int32(r[in.b]); b {
			case 0:
				r[in.d] = r[in.a]
			case -1:
				r[in.d] = 0
			default:
				r[in.d] = uint64(uint32(a % b))
			}
		case opDivS64:
			switch a, b := int64(r[in.a]), int64(r[in.b]); b {
			case 0:
				r[in.d] = math.MaxUint64
			case -1:
				r[in.d] = uint64(-a)
			default:
				r[in.d] = uint64(a / b)
			}
		case opRemS64:
			switch a, b := int64(r[in.a]), int64(r[in.b]); b {
			case 0:
				r[in.d] = r[in.a]
			case -1:
				r[in.d] = 0
			default:
				r[in.d] = uint64(a % b)
			}
		case opBra:
			pc = in.tgt
			if steps >= limit {
				t.pc = pc
				m.steps += steps
				return
			}
		case opBraIf:
			if r[in.a] != 0 {
				pc = in.tgt
				if steps >= limit {
					t.pc = pc
					m.steps += steps
					return
				}
			}
		case opBraIfNot:
			if r[in.a] == 0 {
				pc = in.tgt
				if steps >= limit {
					t.pc = pc
					m.steps += steps
					return
				}
			}
		case opCall:
			c := &f.calls[in.imm]
			g := c.to
			base := t.base + int32(f.frame)
			t.frames = append(t.frames, frame{f, pc, t.base, int32(in.imm)})
			next := t.words[base:]
			copy(next, g.consts)
			for _, v := range c.args {
				copy(next[g.words+v.there:g.words+v.there+v.words], t.words[int(t.base)+f.words+v.here:])
			}
			t.base, t.f, f, code, pc = base, g, g, g.code, 0
			r = registers(unsafe.Pointer(&t.words[base]))
		case opRet, opExit:
			n := len(t.frames)
			if n == 0 || in.op == opExit {
				t.pc = pc
				m.steps += steps
				m.exit(t)
				return
			}
			from := t.words[int(t.base)+f.words:]
			k := t.frames[n-1]
			t.frames = t.frames[:n-1]
			t.base, t.f, f, code, pc = k.base, k.f, k.f, k.f.code, k.pc
			for _, v := range f.calls[k.call].rets {
				copy(t.words[int(t.base)+f.words+v.here:][:v.words], from[v.there:])
			}
			r = registers(unsafe.Pointer(&t.words[t.base]))
		case opTrap:
			m.steps += steps
			m.fail(t, pc-1, ErrTrap)
			return
		case opLdParam:
			a := &f.access[in.tgt]
			at, params := r[in.a]+uint64(in.imm), t.block.launch.params
			n := uint64(a.size) * uint64(a.n)
			if at%n != 0 || at+n > uint64(len(params)) || at+n < n {
				m.steps += steps
				m.fail(t, pc-1, fmt.Errorf("%d bytes at %d of %d bytes of parameters: %w", n, at, len(params), ErrAddress))
				return
			}
			p := unsafe.Pointer(&params[at])
			for i := range int(a.n) {
				to := [4]uint16{in.d, in.b, in.c, in.e}[i]
				r[to] = load(unsafe.Add(p, i*int(a.size)), a.size)
			}
		case opLdFrame:
			a := &f.access[in.tgt]
			p := unsafe.Add(unsafe.Pointer(r), in.imm)
			for i := range int(a.n) {
				to := [4]uint16{in.d, in.b, in.c, in.e}[i]
				r[to] = load(unsafe.Add(p, i*int(a.size)), a.size)
			}
		case opStFrame:
			a := &f.access[in.tgt]
			p := unsafe.Add(unsafe.Pointer(r), in.imm)
			for i := range int(a.n) {
				from := [4]uint16{in.d, in.b, in.c, in.e}[i]
				store(unsafe.Add(p, i*int(a.size)), a.size, r[from])
			}
		case opLd8:
			address := r[in.a] + uint64(in.imm)
			p := m.locate(address, 1)
			if p == nil {
				m.bad(t, pc-1, steps, address, 1)
				return
			}
			x0 := *(*uint8)(p)
			r[in.d] = uint64(x0)
		case opLd16:
			address := r[in.a] + uint64(in.imm)
			p := m.locate(address, 2)
			if p == nil {
				m.bad(t, pc-1, steps, address, 2)
				return
			}
			x0 := *(*uint16)(p)
			r[in.d] = uint64(x0)
		case opLd32:
			address := r[in.a] + uint64(in.imm)
			p := m.locate(address, 4)
			if p == nil {
				m.bad(t, pc-1, steps, address, 4)
				return
			}
			x0 := *(*uint32)(p)
			r[in.d] = uint64(x0)
		case opLd64:
			address := r[in.a] + uint64(in.imm)
			p := m.locate(address, 8)
			if p == nil {
				m.bad(t, pc-1, steps, address, 8)
				return
			}
			x0 := *(*uint64)(p)
			r[in.d] = uint64(x0)
		case opLd2x32:
			address := r[in.a] + uint64(in.imm)
			p := m.locate(address, 8)
			if p == nil {
				m.bad(t, pc-1, steps, address, 8)
				return
			}
			x0 := *(*uint32)(p)
			x1 := *(*uint32)(unsafe.Add(p, 4))
			r[in.d], r[in.b] = uint64(x0), uint64(x1)
		case opLd2x64:
			address := r[in.a] + uint64(in.imm)
			p := m.locate(address, 16)
			if p == nil {
				m.bad(t, pc-1, steps, address, 16)
				return
			}
			x0 := *(*uint64)(p)
			x1 := *(*uint64)(unsafe.Add(p, 8))
			r[in.d], r[in.b] = uint64(x0), uint64(x1)
		case opLd4x32:
			address := r[in.a] + uint64(in.imm)
			p := m.locate(address, 16)
			if p == nil {
				m.bad(t, pc-1, steps, address, 16)
				return
			}
			x0 := *(*uint32)(p)
			x1 := *(*uint32)(unsafe.Add(p, 4))
			x2 := *(*uint32)(unsafe.Add(p, 8))
			x3 := *(*uint32)(unsafe.Add(p, 12))
			r[in.d], r[in.b], r[in.c], r[in.e] = uint64(x0), uint64(x1), uint64(x2), uint64(x3)
		case opLdStrong32:
			address := r[in.a] + uint64(in.imm)
			p := m.locate(address, 4)
			if p == nil {
				m.bad(t, pc-1, steps, address, 4)
				return
			}
			x0 := atomic.LoadUint32((*uint32)(p))
			r[in.d] = uint64(x0)
		case opLdStrong64:
			address := r[in.a] + uint64(in.imm)
			p := m.locate(address, 8)
			if p == nil {
				m.bad(t, pc-1, steps, address, 8)
				return
			}
			x0 := atomic.LoadUint64((*uint64)(p))
			r[in.d] = uint64(x0)
		case opLdStrong2x32:
			address := r[in.a] + uint64(in.imm)
			p := m.locate(address, 8)
			if p == nil {
				m.bad(t, pc-1, steps, address, 8)
				return
			}
			x0 := atomic.LoadUint32((*uint32)(p))
			x1 := atomic.LoadUint32((*uint32)(unsafe.Add(p, 4)))
			r[in.d], r[in.b] = uint64(x0), uint64(x1)
		case opLdStrong2x64:
			address := r[in.a] + uint64(in.imm)
			p := m.locate(address, 16)
			if p == nil {
				m.bad(t, pc-1, steps, address, 16)
				return
			}
			x0 := atomic.LoadUint64((*uint64)(p))
			x1 := atomic.LoadUint64((*uint64)(unsafe.Add(p, 8)))
			r[in.d], r[in.b] = uint64(x0), uint64(x1)
		case opLdStrong4x32:
			address := r[in.a] + uint64(in.imm)
			p := m.locate(address, 16)
			if p == nil {
				m.bad(t, pc-1, steps, address, 16)
				return
			}
			x0 := atomic.LoadUint32((*uint32)(p))
			x1 := atomic.LoadUint32((*uint32)(unsafe.Add(p, 4)))
			x2 := atomic.LoadUint32((*uint32)(unsafe.Add(p, 8)))
			x3 := atomic.LoadUint32((*uint32)(unsafe.Add(p, 12)))
			r[in.d], r[in.b], r[in.c], r[in.e] = uint64(x0), uint64(x1), uint64(x2), uint64(x3)
		case opSt8:
			m.written++
			address := r[in.a] + uint64(in.imm)
			p := m.locate(address, 1)
			if p == nil {
				m.bad(t, pc-1, steps, address, 1)
				return
			}
			*(*uint8)(p) = uint8(r[in.d])
		case opSt16:
			m.written++
			address := r[in.a] + uint64(in.imm)
			p := m.locate(address, 2)
			if p == nil {
				m.bad(t, pc-1, steps, address, 2)
				return
			}
			*(*uint16)(p) = uint16(r[in.d])
		case opSt32:
			m.written++
			address := r[in.a] + uint64(in.imm)
			p := m.locate(address, 4)
			if p == nil {
				m.bad(t, pc-1, steps, address, 4)
				return
			}
			*(*uint32)(p) = uint32(r[in.d])
		case opSt64:
			m.written++
			address := r[in.a] + uint64(in.imm)
			p := m.locate(address, 8)
			if p == nil {
				m.bad(t, pc-1, steps, address, 8)
				return
			}
			*(*uint64)(p) = uint64(r[in.d])
		case opSt2x32:
			m.written++
			address := r[in.a] + uint64(in.imm)
			p := m.locate(address, 8)
			if p == nil {
				m.bad(t, pc-1, steps, address, 8)
				return
			}
			*(*uint32)(p) = uint32(r[in.d])
			*(*uint32)(unsafe.Add(p, 4)) = uint32(r[in.b])
		case opSt2x64:
			m.written++
			address := r[in.a] + uint64(in.imm)
			p := m.locate(address, 16)
			if p == nil {
				m.bad(t, pc-1, steps, address, 16)
				return
			}
			*(*uint64)(p) = uint64(r[in.d])
			*(*uint64)(unsafe.Add(p, 8)) = uint64(r[in.b])
		case opSt4x32:
			m.written++
			address := r[in.a] + uint64(in.imm)
			p := m.locate(address, 16)
			if p == nil {
				m.bad(t, pc-1, steps, address, 16)
				return
			}
			*(*uint32)(p) = uint32(r[in.d])
			*(*uint32)(unsafe.Add(p, 4)) = uint32(r[in.b])
			*(*uint32)(unsafe.Add(p, 8)) = uint32(r[in.c])
			*(*uint32)(unsafe.Add(p, 12)) = uint32(r[in.e])
		case opStStrong32:
			m.written++
			address := r[in.a] + uint64(in.imm)
			p := m.locate(address, 4)
			if p == nil {
				m.bad(t, pc-1, steps, address, 4)
				return
			}
			atomic.StoreUint32((*uint32)(p), uint32(r[in.d]))
		case opStStrong64:
			m.written++
			address := r[in.a] + uint64(in.imm)
			p := m.locate(address, 8)
			if p == nil {
				m.bad(t, pc-1, steps, address, 8)
				return
			}
			atomic.StoreUint64((*uint64)(p), uint64(r[in.d]))
		case opStStrong4x32:
			m.written++
			address := r[in.a] + uint64(in.imm)
			p := m.locate(address, 16)
			if p == nil {
				m.bad(t, pc-1, steps, address, 16)
				return
			}
			atomic.StoreUint32((*uint32)(p), uint32(r[in.d]))
			atomic.StoreUint32((*uint32)(unsafe.Add(p, 4)), uint32(r[in.b]))
			atomic.StoreUint32((*uint32)(unsafe.Add(p, 8)), uint32(r[in.c]))
			atomic.StoreUint32((*uint32)(unsafe.Add(p, 12)), uint32(r[in.e]))
		case opLdAny, opStAny, opAtom, opLdReduce, opStMulticast, opRedMulticast:
			if err := m.other(t, f, in, r); err != nil {
				m.steps += steps
				m.fail(t, pc-1, err)
				return
			}
		case opFence:
			if weak {
				m.order(t, &f.access[in.tgt])
			}
		case opBar, opBarRed:
			t.pc = pc
			if !m.arrive(t, in, in.op == opBar || r[in.a] != 0) {
				m.steps += steps
				return
			}
		case opClusterArrive, opClusterWait:
			t.pc = pc
			var err error
			if in.op == opClusterArrive {
				err = m.arriveCluster(t, in.imm != 0)
			} else {
				err = m.waitCluster(t)
			}
			if err != nil {
				m.steps += steps
				m.fail(t, pc-1, err)
				return
			}
			if t.status != running {
				m.steps += steps
				return
			}
		case opShfl:
			t.pc, t.in, t.value = pc, in, r[in.a]
			if r[in.g]>>(t.number&31)&1 == 0 {
				m.steps += steps
				m.fail(t, pc-1, fmt.Errorf("a shuffle that does not name its own thread: %w", ErrTrap))
				return
			}
			m.rest(t, atShuffle)
			m.shuffled(t.block, t.number/32)
			if t.status != running {
				m.steps += steps
				return
			}
		case opGridWait:
			l := t.block.launch
			if l.before != nil {
				t.pc = pc
				m.rest(t, atGrid)
				l.waiting = append(l.waiting, t)
				m.steps += steps
				return
			}
			if weak {
				m.passed(t)
			}
		case opGridLaunch:
			m.trigger(t.block)
		case opSleep:
			if !weak {
				t.pc = pc
				m.steps += steps
				return
			}
		default:
			m.steps += steps
			m.fail(t, pc-1, ErrUnsupported)
			return
		}
	}
}

// span is where elements of an access are: of the shared memory of its block or one of its cluster, or global.
func (m *Machine) span(t *thread, a *access, address uint64) (unsafe.Pointer, error) {
	n := uint64(a.size) * uint64(a.n)
	if !a.shared {
		if p := m.locate(address, n); p != nil {
			return p, nil
		}
		return nil, m.wrong(address, n)
	}
	s, off := t.block.shared, address
	if address&(n-1) != 0 {
		return nil, fmt.Errorf("%d bytes at %#x of shared memory: %w", n, address, ErrAlignment)
	}
	if a.cluster {
		var err error
		if s, off, err = t.remote(address); err != nil {
			return nil, fmt.Errorf("%d bytes at %#x of shared memory: %w", n, address, err)
		}
	}
	if s == nil || off >= s.size || n > s.size-off {
		return nil, fmt.Errorf("%d bytes at %#x of shared memory: %w", n, address, ErrAddress)
	}
	return unsafe.Add(s.data, off), nil
}

// other is the accesses that are rare, one at a time.
func (m *Machine) other(t *thread, f *Function, in *instr, r registers) error {
	a := &f.access[in.tgt]
	address := r[in.a] + uint64(in.imm)
	regs := [4]uint16{in.d, in.b, in.c, in.e}
	switch in.op {
	case opLdReduce, opStMulticast, opRedMulticast:
		region, err := m.multicast(address, uint64(a.size)*uint64(a.n))
		if err != nil {
			return err
		}
		off := address - region.base
		var pointers [16]unsafe.Pointer
		where := pointers[:0]
		first := 0 // the order of a sum is the switch's business
		if in.op == opLdReduce {
			first = m.choose.Choose(len(region.copies))
		} else {
			m.written++
		}
		for k := range region.copies {
			p, err := m.span(t, a, region.copies[(first+k)%len(region.copies)]+off)
			if err != nil {
				return err
			}
			where = append(where, p)
		}
		var values [16]uint64
		for i := range int(a.n) {
			each := values[:0]
			for _, p := range where {
				p = unsafe.Add(p, i*int(a.size))
				switch {
				case in.op == opLdReduce && a.size == 4:
					each = append(each, uint64(*(*uint32)(p)))
				case in.op == opLdReduce:
					each = append(each, load(p, a.size))
				case in.op == opStMulticast && a.size == 4:
					atomic.StoreUint32((*uint32)(p), uint32(r[regs[i]]))
				case in.op == opStMulticast:
					store(p, a.size, r[regs[i]])
				default: // atomic as well for other processes, which have the memory too
					for !m.add(a, p, r[regs[i]]) {
					}
				}
			}
			if in.op == opLdReduce {
				r[regs[i]] = sum(a, each)
			}
		}
		return nil
	}
	p, err := m.span(t, a, address)
	if err != nil {
		return err
	}
	switch in.op {
	case opLdAny:
		var x [4]uint64
		for i := range int(a.n) {
			x[i] = load(unsafe.Add(p, i*int(a.size)), a.size)
		}
		for i := range int(a.n) {
			r[regs[i]] = x[i]
		}
	case opStAny:
		m.written++
		for i := range int(a.n) {
			store(unsafe.Add(p, i*int(a.size)), a.size, r[regs[i]])
		}
	case opAtom:
		for {
			var old uint64
			if a.size == 4 {
				old = uint64(atomic.LoadUint32((*uint32)(p)))
			} else {
				old = atomic.LoadUint64((*uint64)(p))
			}
			v := modify(a, old, r[in.b], r[in.c])
			if a.size == 4 && atomic.CompareAndSwapUint32((*uint32)(p), uint32(old), uint32(v)) ||
				a.size == 8 && atomic.CompareAndSwapUint64((*uint64)(p), old, v) {
				if r[in.d] = old; v != old {
					m.written++
				}
				return nil
			}
		}
	}
	return nil
}

// add adds to what is at p, unless it changes meanwhile.
func (m *Machine) add(a *access, p unsafe.Pointer, v uint64) bool {
	switch a.size {
	case 4:
		old := atomic.LoadUint32((*uint32)(p))
		return atomic.CompareAndSwapUint32((*uint32)(p), old, uint32(sum(a, []uint64{uint64(old), v})))
	case 8:
		old := atomic.LoadUint64((*uint64)(p))
		return atomic.CompareAndSwapUint64((*uint64)(p), old, sum(a, []uint64{old, v}))
	}
	store(p, a.size, sum(a, []uint64{load(p, a.size), v}))
	return true
}

func (m *Machine) multicast(address, n uint64) (*region, error) {
	r := m.cast
	if r == nil || address-r.base >= r.size {
		r = m.memory.find(address)
	}
	switch {
	case address&(n-1) != 0:
		return nil, fmt.Errorf("%d bytes at %#x: %w", n, address, ErrAlignment)
	case r == nil || n > r.size-(address-r.base):
		return nil, fmt.Errorf("%d bytes at %#x: %w", n, address, ErrAddress)
	case r.copies == nil:
		return nil, fmt.Errorf("%d bytes at %#x, which is no multicast address: %w", n, address, ErrAddress)
	}
	m.cast = r
	return r, nil
}

// modify is what an atomic makes of what was there.
func modify(a *access, old, b, c uint64) uint64 {
	n := int(a.size)
	less := old < b
	if signed(a.typ) {
		less = int64(old)<<(64-8*n) < int64(b)<<(64-8*n)
	}
	switch a.rmw {
	case rmwAdd:
		if float(a.typ) {
			return sum(a, []uint64{old, b})
		}
		return (old + b) & mask(n)
	case rmwCas:
		if old == b {
			return c
		}
		return old
	case rmwExch:
		return b
	case rmwMin:
		if less {
			return old
		}
		return b
	case rmwMax:
		if less {
			return b
		}
		return old
	case rmwAnd:
		return old & b
	case rmwOr:
		return old | b
	case rmwXor:
		return old ^ b
	case rmwInc:
		if old >= b {
			return 0
		}
		return old + 1
	case rmwDec:
		if old == 0 || old > b {
			return b
		}
		return old - 1
	}
	return old
}

// sum adds values of a type in the order in which they are.
func sum(a *access, values []uint64) uint64 {
	total := values[0]
	switch a.typ {
	case "f32":
		for _, v := range values[1:] {
			total = of32(f32(total) + f32(v))
		}
	case "f64":
		for _, v := range values[1:] {
			total = of64(f64(total)+f64(v), total, v)
		}
	case "f16x2", "bf16x2":
		narrow, widen := f16of32, f32of16
		if a.typ == "bf16x2" {
			narrow, widen = bf16of32, func(x uint64) uint64 { return x << 16 }
		}
		total = 0
		for half := 0; half < 32; half += 16 {
			x := widen(values[0] >> half & 0xffff)
			for _, v := range values[1:] {
				x = of32(f32(x) + f32(widen(v>>half&0xffff)))
				if !a.wide {
					x = widen(narrow(x))
				}
			}
			total |= narrow(x) << half
		}
	default:
		for _, v := range values[1:] {
			total += v
		}
		total &= mask(int(a.size))
	}
	return total
}
