package ptxvm

import (
	"fmt"
	"math"
	"slices"
	"strings"
)

// pre is an instruction before registers have got their places.
type pre struct {
	op       uint16
	x        [6]int32 // d, a, b, c, e, g: a register from 0 on, or a constant below
	def, use uint8    // which of x
	tgt      int32
	imm      int64
	line     int
}

const (
	xd = 1 << iota
	xa
	xb
	xc
	xe
	xg
)

type register struct {
	id   int32
	size int
}

type scope struct {
	regs   map[string]register
	ranges []regRange
	params map[string]variable
	words  int // of parameters so far
}

type regRange struct {
	prefix string
	n      int
	first  int32
	size   int
}

type decoder struct {
	f      *Function
	s      *statement
	scopes []scope
	regs   int32
	consts map[uint64]int32
	values []uint64
	code   []pre
	labels map[string]int32
	jumps  []jump
	words  int // of parameters at most
	mods   []string
	used   int // of mods
}

type jump struct {
	at    int
	label string
	line  int
}

func (d *decoder) fail(condition error, format string, a ...any) {
	line := d.s.line
	panic(&Error{Place: d.f.module.place(line), Err: fmt.Errorf("%s: %w", fmt.Sprintf(format, a...), condition)})
}

func decode(f *Function) {
	d := &decoder{f: f, consts: map[uint64]int32{}, labels: map[string]int32{}}
	d.open()
	if !f.Entry {
		d.scopes[0].words = (f.paramB + 7) / 8
		d.words = d.scopes[0].words
	}
	for i := range f.body {
		d.s = &f.body[i]
		switch s := d.s; s.kind {
		case '{':
			d.open()
		case '}':
			d.scopes = d.scopes[:len(d.scopes)-1]
		case 'r':
			d.declare(s)
		case 'p':
			sc := &d.scopes[len(d.scopes)-1]
			sc.params[s.name] = variable{sc.words * 8, s.count}
			sc.words += (s.count + 7) / 8
			d.words = max(d.words, sc.words)
		case ':':
			if _, ok := d.labels[s.name]; ok {
				d.fail(ErrSyntax, "label %s for the second time", s.name)
			}
			d.labels[s.name] = int32(len(d.code))
		default:
			d.statement()
		}
	}
	d.emit(pre{op: opRet})
	for _, j := range d.jumps {
		to, ok := d.labels[j.label]
		if !ok {
			panic(&Error{Place: f.module.place(j.line), Err: fmt.Errorf("no label %s: %w", j.label, ErrSyntax)})
		}
		d.code[j.at].tgt = to
	}
	f.body = nil
	d.assign()
}

func (d *decoder) open() {
	sc := scope{regs: map[string]register{}, params: map[string]variable{}}
	if n := len(d.scopes); n > 0 {
		sc.words = d.scopes[n-1].words
	}
	d.scopes = append(d.scopes, sc)
}

func (d *decoder) declare(s *statement) {
	sc := &d.scopes[len(d.scopes)-1]
	size := sizes[s.typ]
	if s.typ == "pred" {
		size = 0
	}
	if s.count < 0 {
		sc.regs[s.name] = register{d.regs, size}
		d.regs++
		return
	}
	sc.ranges = append(sc.ranges, regRange{s.name, s.count, d.regs, size})
	d.regs += int32(s.count)
}

func (d *decoder) find(name string) (register, bool) {
	stem, n := name, 0
	if end := strings.TrimRight(name, "0123456789"); end != name && len(name)-len(end) < 8 {
		stem = end
		for _, c := range name[len(end):] {
			n = n*10 + int(c-'0')
		}
		if len(name)-len(end) > 1 && name[len(end)] == '0' {
			stem = name
		}
	}
	for i := len(d.scopes) - 1; i >= 0; i-- {
		sc := &d.scopes[i]
		if r, ok := sc.regs[name]; ok {
			return r, true
		}
		if stem == name {
			continue
		}
		for _, r := range sc.ranges {
			if r.prefix == stem && n < r.n {
				return register{r.first + int32(n), r.size}, true
			}
		}
	}
	return register{}, false
}

func (d *decoder) constant(v uint64) int32 {
	id, ok := d.consts[v]
	if !ok {
		id = -1 - int32(len(d.values))
		d.consts[v] = id
		d.values = append(d.values, v)
	}
	return id
}

func (d *decoder) emit(p pre) {
	if d.s != nil {
		p.line = d.s.line
	}
	d.code = append(d.code, p)
}

// mod takes the next modifier if it is one of these.
func (d *decoder) mod(names ...string) string {
	if d.used < len(d.mods) && slices.Contains(names, d.mods[d.used]) {
		d.used++
		return d.mods[d.used-1]
	}
	return ""
}

// typ takes the next modifier, a type.
func (d *decoder) typ() string {
	if d.used < len(d.mods) {
		t := d.mods[d.used]
		if sizes[t] != 0 {
			d.used++
			return t
		}
	}
	d.unknown()
	return ""
}

func (d *decoder) unknown() { d.fail(ErrUnsupported, "%s", d.s.name) }

// end says that all modifiers are understood and that there are n operands.
func (d *decoder) end(n int) {
	if d.used != len(d.mods) {
		d.unknown()
	}
	if len(d.s.ops) != n {
		d.fail(ErrSyntax, "%s with %d operands, not %d", d.s.name, len(d.s.ops), n)
	}
}

// size of a type in a register; of predicates 0.
func size(typ string) int {
	if typ == "pred" {
		return 0
	}
	return sizes[typ]
}

// reg is a register of this size, or of at least it.
func (d *decoder) reg(o operand, size int, wider bool) int32 {
	if o.kind != 'w' {
		d.fail(ErrSyntax, "an operand that is no register")
	}
	r, ok := d.find(o.word)
	if !ok {
		d.fail(ErrSyntax, "no register %s", o.word)
	}
	if r.size != size && !(wider && size > 0 && r.size > size) {
		d.fail(ErrSyntax, "register %s of %d bits where %d are expected", o.word, r.size*8, size*8)
	}
	return r.id
}

// src is a register or a number of this type.
func (d *decoder) src(o operand, typ string) int32 { return d.source(o, typ, false) }

func (d *decoder) source(o operand, typ string, wider bool) int32 {
	if o.kind != 'n' {
		return d.reg(o, size(typ), wider)
	}
	switch {
	case typ == "f32" && o.flt == 'd':
		return d.constant(uint64(math.Float32bits(float32(math.Float64frombits(o.num)))))
	case typ == "f64" && o.flt == 'f':
		return d.constant(math.Float64bits(float64(math.Float32frombits(uint32(o.num)))))
	case (typ == "f32" || typ == "f64") && o.flt == 0:
		d.fail(ErrSyntax, "an integer where a float is expected")
	case o.flt == 'd' && size(typ) < 8 || o.flt == 'f' && size(typ) < 4:
		d.fail(ErrSyntax, "a float where an integer is expected")
	}
	return d.constant(o.num & mask(size(typ)))
}

func mask(size int) uint64 {
	switch size {
	case 0:
		return 1
	case 8:
		return math.MaxUint64
	}
	return 1<<(8*size) - 1
}

func signed(typ string) bool { return typ[0] == 's' }
func float(typ string) bool  { return typ[0] == 'f' || typ[0] == 'b' && typ[1] == 'f' }
func integer(typ string) bool {
	return !float(typ) && typ != "pred"
}

// of picks what a width has: of 16, 32 or 64 bits; 0 is none.
func of(typ string, op16, op32, op64 uint16) uint16 {
	return [9]uint16{2: op16, 4: op32, 8: op64}[size(typ)]
}

// three emits d = a op b.
func (d *decoder) three(op uint16, typ string) {
	d.end(3)
	if op == 0 {
		d.unknown()
	}
	o := d.s.ops
	d.emit(pre{op: op, x: [6]int32{d.reg(o[0], size(typ), false), d.src(o[1], typ), d.src(o[2], typ)}, def: xd, use: xa | xb})
}

func (d *decoder) two(op uint16, typ string, imm int64) {
	d.end(2)
	if op == 0 {
		d.unknown()
	}
	o := d.s.ops
	d.emit(pre{op: op, x: [6]int32{d.reg(o[0], size(typ), false), d.src(o[1], typ)}, def: xd, use: xa, imm: imm})
}

// wide is for three sources, the destination and the third of twice the width for mad.wide.
func double(typ string) string { return typ[:1] + map[string]string{"16": "32", "32": "64"}[typ[1:]] }

func (d *decoder) statement() {
	s := d.s
	parts := strings.Split(s.name, ".")
	d.mods, d.used = parts[1:], 0
	if s.guard == "" {
		d.instruction(parts[0])
		return
	}
	guard := d.reg(operand{kind: 'w', word: s.guard}, 0, false)
	op := opBraIf
	if s.not {
		op = opBraIfNot
	}
	if parts[0] == "bra" {
		d.branch(op, guard)
		return
	}
	// A jump over the instruction takes the place of the guard.
	skip := len(d.code)
	d.emit(pre{op: opBraIf + opBraIfNot - op, x: [6]int32{1: guard}, use: xa})
	d.instruction(parts[0])
	d.code[skip].tgt = int32(len(d.code))
}

func (d *decoder) branch(op uint16, guard int32) {
	d.mod("uni")
	d.end(1)
	if d.s.ops[0].kind != 'w' {
		d.fail(ErrSyntax, "a branch to no label")
	}
	p := pre{op: op}
	if op != opBra {
		p.x[1], p.use = guard, xa
	}
	d.jumps = append(d.jumps, jump{len(d.code), d.s.ops[0].word, d.s.line})
	d.emit(p)
}

var specials = map[string]int64{
	"%tid.x": 0, "%tid.y": 1, "%tid.z": 2, "%ntid.x": 3, "%ntid.y": 4, "%ntid.z": 5, "%ctaid.x": 6, "%ctaid.y": 7, "%ctaid.z": 8,
	"%nctaid.x": 9, "%nctaid.y": 10, "%nctaid.z": 11, "%laneid": 12, "%warpid": 13,
	"%cluster_ctarank": 14, "%cluster_nctarank": 15, "%cluster_ctaid.x": 16, "%cluster_ctaid.y": 17, "%cluster_ctaid.z": 18,
	"%cluster_nctaid.x": 19, "%cluster_nctaid.y": 20, "%cluster_nctaid.z": 21, "%clusterid.x": 22, "%clusterid.y": 23, "%clusterid.z": 24,
	"%nclusterid.x": 25, "%nclusterid.y": 26, "%nclusterid.z": 27, "%is_explicit_cluster": 28,
}

func (d *decoder) instruction(name string) {
	o := d.s.ops
	switch name {
	case "mov":
		d.move()
	case "add", "sub":
		if r := d.mod("rn"); true {
			t := d.typ()
			if float(t) {
				d.three(pick(name == "add", of(t, 0, opAddF32, opAddF64), of(t, 0, opSubF32, opSubF64)), t)
				return
			}
			if r != "" || t[0] == 'b' || t == "pred" {
				d.unknown()
			}
			d.three(pick(name == "add", of(t, opAdd16, opAdd32, opAdd64), of(t, opSub16, opSub32, opSub64)), t)
		}
	case "mul":
		switch d.mod("lo", "hi", "wide", "rn") {
		case "lo":
			t := d.integer()
			d.three(of(t, opMul16, opMul32, opMul64), t)
		case "hi":
			t := d.integer()
			d.three(pick(signed(t), of(t, 0, opMulHiS32, opMulHiS64), of(t, 0, opMulHiU32, opMulHiU64)), t)
		case "wide":
			t := d.integer()
			op := pick(signed(t), of(t, opMulWideS16, opMulWideS32, 0), of(t, opMulWideU16, opMulWideU32, 0))
			if op == 0 {
				d.unknown()
			}
			d.end(3)
			d.emit(pre{op: op, x: [6]int32{d.reg(o[0], 2*size(t), false), d.src(o[1], t), d.src(o[2], t)}, def: xd, use: xa | xb})
		default:
			t := d.typ()
			if !float(t) {
				d.unknown()
			}
			d.three(of(t, 0, opMulF32, opMulF64), t)
		}
	case "mad":
		how := d.mod("lo", "wide")
		t := d.integer()
		op, w := of(t, opMad16, opMad32, opMad64), t
		switch how {
		case "wide":
			op, w = pick(signed(t), of(t, opMadWideS16, opMadWideS32, 0), of(t, opMadWideU16, opMadWideU32, 0)), double(t)
		case "":
			d.unknown()
		}
		if op == 0 {
			d.unknown()
		}
		d.end(4)
		d.emit(pre{op: op, x: [6]int32{d.reg(o[0], size(w), false), d.src(o[1], t), d.src(o[2], t), d.src(o[3], w)}, def: xd, use: xa | xb | xc})
	case "fma":
		d.need("rn")
		t := d.typ()
		op := of(t, 0, opFmaF32, opFmaF64)
		if !float(t) || op == 0 {
			d.unknown()
		}
		d.end(4)
		d.emit(pre{op: op, x: [6]int32{d.reg(o[0], size(t), false), d.src(o[1], t), d.src(o[2], t), d.src(o[3], t)}, def: xd, use: xa | xb | xc})
	case "div", "rem":
		rn := d.mod("rn")
		t := d.typ()
		switch {
		case float(t) && name == "div" && rn != "":
			d.three(of(t, 0, opDivF32, opDivF64), t)
		case !integer(t) || t[0] == 'b' || rn != "":
			d.unknown()
		case signed(t):
			d.three(pick(name == "div", of(t, 0, opDivS32, opDivS64), of(t, 0, opRemS32, opRemS64)), t)
		default:
			d.three(pick(name == "div", of(t, opDivU, opDivU, opDivU), of(t, opRemU, opRemU, opRemU)), t)
			d.code[len(d.code)-1].imm = int64(mask(size(t)))
		}
	case "min", "max":
		nan := d.mod("NaN")
		t := d.typ()
		low := name == "min"
		switch {
		case t == "f32" && nan != "":
			d.three(pick(low, opMinNaNF32, opMaxNaNF32), t)
		case nan != "" || t == "pred" || t[0] == 'b':
			d.unknown()
		case float(t):
			d.three(pick(low, of(t, 0, opMinF32, opMinF64), of(t, 0, opMaxF32, opMaxF64)), t)
		case signed(t):
			d.three(pick(low, of(t, opMinS16, opMinS32, opMinS64), of(t, opMaxS16, opMaxS32, opMaxS64)), t)
		default:
			d.three(pick(low, opMinU, opMaxU), t)
		}
	case "and", "or", "xor":
		t := d.typ()
		if t[0] != 'b' && t != "pred" || t == "b8" || float(t) {
			d.unknown()
		}
		d.three(map[string]uint16{"and": opAnd, "or": opOr, "xor": opXor}[name], t)
	case "not":
		t := d.typ()
		if t[0] != 'b' && t != "pred" || t == "b8" || float(t) {
			d.unknown()
		}
		d.two(opNot, t, int64(mask(size(t))))
	case "neg", "abs":
		t := d.typ()
		switch {
		case float(t):
			d.two(pick(name == "neg", of(t, 0, opNegF32, opNegF64), of(t, 0, opAbsF32, opAbsF64)), t, 0)
		case !signed(t):
			d.unknown()
		case name == "neg":
			d.two(opNeg, t, int64(mask(size(t))))
		default:
			d.two(of(t, opAbs16, opAbs32, opAbs64), t, 0)
		}
	case "shl", "shr":
		t := d.typ()
		op := of(t, opShl16, opShl32, opShl64)
		if name == "shr" {
			op = pick(signed(t), of(t, opShrS16, opShrS32, opShrS64), of(t, opShrU, opShrU, opShrU))
		}
		if float(t) || op == 0 || name == "shl" && t[0] != 'b' {
			d.unknown()
		}
		d.end(3)
		d.emit(pre{op: op, x: [6]int32{d.reg(o[0], size(t), false), d.src(o[1], t), d.src(o[2], "u32")}, def: xd, use: xa | xb})
	case "bfi":
		t := d.typ()
		op := of(t, 0, opBfi32, opBfi64)
		if t[0] != 'b' || op == 0 {
			d.unknown()
		}
		d.end(5)
		d.emit(pre{op: op, x: [6]int32{d.reg(o[0], size(t), false), d.src(o[1], t), d.src(o[2], t), d.src(o[3], "u32"), d.src(o[4], "u32")},
			def: xd, use: xa | xb | xc | xe})
	case "bfe":
		t := d.integer()
		imm, ok := map[string]int64{"u32": 0, "s32": 1, "u64": 2, "s64": 3}[t]
		if !ok {
			d.unknown()
		}
		d.end(4)
		d.emit(pre{op: opBfe, x: [6]int32{d.reg(o[0], size(t), false), d.src(o[1], t), d.src(o[2], "u32"), d.src(o[3], "u32")}, def: xd, use: xa | xb | xc, imm: imm})
	case "prmt":
		d.need("b32")
		d.end(4)
		d.emit(pre{op: opPrmt, x: [6]int32{d.reg(o[0], 4, false), d.src(o[1], "b32"), d.src(o[2], "b32"), d.src(o[3], "b32")}, def: xd, use: xa | xb | xc})
	case "popc", "clz":
		t := d.typ()
		op := pick(name == "clz", of(t, 0, opClz32, opClz64), of(t, 0, opPopc, opPopc))
		if t[0] != 'b' || op == 0 {
			d.unknown()
		}
		d.end(2)
		d.emit(pre{op: op, x: [6]int32{d.reg(o[0], 4, false), d.src(o[1], t)}, def: xd, use: xa})
	case "brev":
		t := d.typ()
		d.two(of(t, 0, opBrev32, opBrev64), t, 0)
	case "selp":
		t := d.typ()
		if t == "pred" || size(t) == 1 {
			d.unknown()
		}
		d.end(4)
		d.emit(pre{op: opSelp, x: [6]int32{d.reg(o[0], size(t), false), d.src(o[1], t), d.src(o[2], t), d.reg(o[3], 0, false)}, def: xd, use: xa | xb | xc})
	case "setp":
		d.setp()
	case "cvt":
		d.convert()
	case "cvta":
		d.mod("to")
		d.need("global")
		t := d.typ()
		if t != "u64" {
			d.unknown()
		}
		d.two(opMov, t, 0)
	case "sqrt", "rcp", "rsqrt", "ex2", "lg2":
		how := d.mod("rn", "approx")
		t := d.typ()
		switch {
		case name == "sqrt" && how == "rn" && float(t):
			d.two(of(t, 0, opSqrtF32, opSqrtF64), t, 0)
		case name == "rcp" && how == "rn" && t == "f32":
			d.two(opApprox, t, approxRcp) // exact in double and rounded once more, which for a reciprocal is exact too
		case how == "approx" && t == "f32":
			d.two(opApprox, t, map[string]int64{"sqrt": approxSqrt, "rcp": approxRcp, "rsqrt": approxRsqrt, "ex2": approxEx2, "lg2": approxLg2}[name])
		default:
			d.unknown()
		}
	case "bra":
		d.branch(opBra, 0)
	case "call":
		d.call()
	case "ret", "exit", "trap":
		d.mod("uni")
		d.end(0)
		d.emit(pre{op: map[string]uint16{"ret": opRet, "exit": opExit, "trap": opTrap}[name]})
	case "ld", "ldu", "st":
		d.memory(name)
	case "atom", "red":
		d.atomic(name)
	case "multimem":
		d.multimem()
	case "fence", "membar":
		d.fence(name)
	case "bar", "barrier":
		if name == "barrier" && d.mod("cluster") != "" {
			d.clusterBarrier()
			return
		}
		d.barrier()
	case "shfl":
		d.shuffle()
	case "mapa":
		d.mapa()
	case "griddepcontrol":
		op := map[string]uint16{"wait": opGridWait, "launch_dependents": opGridLaunch}[d.mod("wait", "launch_dependents")]
		if op == 0 {
			d.unknown()
		}
		d.end(0)
		d.emit(pre{op: op})
	case "nanosleep":
		d.need("u32")
		d.end(1)
		d.emit(pre{op: opSleep, x: [6]int32{1: d.src(o[0], "u32")}, use: xa})
	default:
		d.unknown()
	}
}

func pick(first bool, a, b uint16) uint16 {
	if first {
		return a
	}
	return b
}

func (d *decoder) need(name string) {
	if d.mod(name) == "" {
		d.unknown()
	}
}

func (d *decoder) integer() string {
	t := d.typ()
	if t[0] != 'u' && t[0] != 's' {
		d.unknown()
	}
	return t
}

func (d *decoder) move() {
	t := d.typ()
	d.end(2)
	to, from := d.s.ops[0], d.s.ops[1]
	switch {
	case to.kind == '{' || from.kind == '{':
		list, op := to.list, [2][5]uint16{{2: opUnpack16}, {2: opUnpack32, 4: opUnpack4}}
		one := from
		if from.kind == '{' {
			list, op, one = from.list, [2][5]uint16{{2: opPack16}, {2: opPack32, 4: opPack4}}, to
		}
		if (t != "b32" && t != "b64") || len(list) > 4 || op[size(t)/4-1][len(list)] == 0 || one.kind == '{' {
			d.unknown()
		}
		p := pre{op: op[size(t)/4-1][len(list)]}
		element := size(t) / len(list)
		parts := [4]int{0, 2, 3, 4} // of x
		p.def, p.use = xd|xb, xa
		if from.kind == '{' {
			parts = [4]int{1, 2, 3, 4}
			p.def, p.use = xd, xa|xb
		}
		if len(list) == 4 {
			p.use |= pickBits(from.kind == '{', xc|xe)
			p.def |= pickBits(from.kind != '{', xc|xe)
		}
		for i, o := range list {
			p.x[parts[i]] = d.reg(o, element, false)
		}
		if from.kind == '{' {
			p.x[0] = d.reg(to, size(t), false)
		} else {
			p.x[1] = d.reg(from, size(t), false)
		}
		d.emit(p)
	case from.kind == 'w' && from.word[0] == '%':
		if which, ok := specials[from.word]; ok {
			n := 4
			if from.word == "%is_explicit_cluster" {
				n = 0
			}
			if size(t) != n {
				d.unknown()
			}
			d.emit(pre{op: opSpecial, x: [6]int32{d.reg(to, n, false)}, def: xd, imm: which})
			return
		}
		if from.word == "%globaltimer" {
			d.emit(pre{op: opTimer, x: [6]int32{d.reg(to, 8, false)}, def: xd})
			return
		}
		if _, ok := d.find(from.word); !ok {
			d.fail(ErrUnsupported, "%s", from.word)
		}
		d.emit(pre{op: opMov, x: [6]int32{d.reg(to, size(t), false), d.reg(from, size(t), false)}, def: xd, use: xa})
	case from.kind == 'w':
		if _, ok := d.find(from.word); ok {
			d.emit(pre{op: opMov, x: [6]int32{d.reg(to, size(t), false), d.reg(from, size(t), false)}, def: xd, use: xa})
			return
		}
		at, ok := d.address(from.word)
		if !ok || size(t) != 8 && size(t) != 4 {
			d.fail(ErrUnsupported, "the address of %s", from.word)
		}
		d.emit(pre{op: opMov, x: [6]int32{d.reg(to, size(t), false), d.constant(uint64(at))}, def: xd, use: xa})
	default:
		d.emit(pre{op: opMov, x: [6]int32{d.reg(to, size(t), false), d.src(from, t)}, def: xd, use: xa})
	}
}

func pickBits(yes bool, bits uint8) uint8 {
	if yes {
		return bits
	}
	return 0
}

// address is where a kernel's parameter or a variable in shared memory is in its state space.
func (d *decoder) address(name string) (int, bool) {
	if v, ok := d.f.params[name]; ok && d.f.Entry {
		return v.offset, true
	}
	v, ok := d.f.module.shared[name]
	return v.offset, ok
}

// The conditions of setp for floats: what of less 1, equal 2, greater 4, unordered 8.
var conditions = map[string]int64{
	"eq": 2, "ne": 5, "lt": 1, "le": 3, "gt": 4, "ge": 6, "equ": 10, "neu": 13, "ltu": 9, "leu": 11, "gtu": 12, "geu": 14, "num": 7, "nan": 8,
}

func (d *decoder) setp() {
	if d.used >= len(d.mods) {
		d.unknown()
	}
	c := d.mods[d.used]
	d.used++
	combine := map[string]uint16{"and": opAnd, "or": opOr, "xor": opXor}[d.mod("and", "or", "xor")]
	t := d.typ()
	o := d.s.ops
	if combine == 0 {
		d.end(3)
	} else {
		d.end(4)
	}
	p := pre{x: [6]int32{0, d.src(o[1], t), d.src(o[2], t)}, def: xd, use: xa | xb}
	if o[0].kind == '|' {
		d.fail(ErrUnsupported, "%s with two destinations", d.s.name)
	}
	p.x[0] = d.reg(o[0], 0, false)
	var ok bool
	switch {
	case t == "f32" || t == "f64":
		p.op = pick(t == "f32", opSetF32, opSetF64)
		p.imm, ok = conditions[c]
	case t == "pred" || size(t) == 1 || float(t):
	default:
		lt, le := opSetLtU, opSetLeU
		if signed(t) {
			lt, le = of(t, opSetLtS16, opSetLtS32, opSetLtS64), of(t, opSetLeS16, opSetLeS32, opSetLeS64)
		}
		p.op, ok = map[string]uint16{
			"eq": opSetEq, "ne": opSetNe, "lt": lt, "le": le, "gt": lt, "ge": le, "lo": lt, "ls": le, "hi": lt, "hs": le,
		}[c]
		unsigned := c == "lo" || c == "ls" || c == "hi" || c == "hs"
		if t[0] == 'b' && c != "eq" && c != "ne" || unsigned && t[0] != 'u' {
			ok = false
		}
		if c == "gt" || c == "ge" || c == "hi" || c == "hs" {
			p.x[1], p.x[2] = p.x[2], p.x[1]
		}
	}
	if !ok {
		d.unknown()
	}
	if combine == 0 {
		d.emit(p)
		return
	}
	with := o[3]
	not := with.kind == '!'
	with.kind = 'w'
	w := d.reg(with, 0, false)
	// The other predicate may be the destination: compare into one of its own.
	own := d.regs
	d.regs++
	dest := p.x[0]
	p.x[0] = own
	d.emit(p)
	if not {
		inverse := d.regs
		d.regs++
		d.emit(pre{op: opNot, x: [6]int32{inverse, w}, def: xd, use: xa, imm: 1})
		w = inverse
	}
	d.emit(pre{op: combine, x: [6]int32{dest, own, w}, def: xd, use: xa | xb})
}

func (d *decoder) convert() {
	round := d.mod("rn", "rz", "rm", "rp", "rni", "rzi", "rmi", "rpi")
	sat := d.mod("sat")
	to, from := d.typ(), d.typ()
	o := d.s.ops
	if pack := map[string]uint16{"cvt.rn.f16x2.f32": opCvtF16x2F32, "cvt.rn.bf16x2.f32": opCvtBF16x2F32}[d.s.name]; pack != 0 {
		d.end(3)
		d.emit(pre{op: pack, x: [6]int32{d.reg(o[0], 4, true), d.source(o[1], from, true), d.source(o[2], from, true)}, def: xd, use: xa | xb})
		return
	}
	d.end(2)
	if to == "pred" || from == "pred" || size(to) == 1 && to[0] == 'b' || strings.HasSuffix(to, "x2") || strings.HasSuffix(from, "x2") ||
		to[0] == 'b' && !float(to) || from[0] == 'b' && !float(from) {
		d.unknown()
	}
	p := pre{x: [6]int32{d.reg(o[0], size(to), true), d.source(o[1], from, true)}, def: xd, use: xa}
	if integer(to) && integer(from) {
		if round != "" || sat != "" {
			d.unknown()
		}
		// Into a wider register it is extended, as the destination's type says.
		n := min(size(to), size(from))
		by := from
		if size(to) <= size(from) {
			by = to
		}
		r, _ := d.find(o[0].word)
		if signed(by) {
			p.op, p.tgt = opSext, int32(64-8*n)
			p.imm = int64(mask(r.size))
			if r.size > size(to) && !signed(to) {
				p.imm = int64(mask(size(to)))
			}
		} else {
			p.op, p.imm = opMask, int64(mask(n))
		}
		d.emit(p)
		return
	}
	c, ok := newConversion(to, from, round, sat != "")
	if !ok {
		d.unknown()
	}
	switch d.s.name {
	case "cvt.f32.f16":
		p.op = opCvtF32F16
	case "cvt.rn.f16.f32":
		p.op = opCvtF16F32
	case "cvt.rn.bf16.f32":
		p.op = opCvtBF16F32
	case "cvt.rn.f32.u32":
		p.op = opCvtF32U32
	default:
		p.op, p.imm = opCvt, c.encode()
	}
	d.emit(p)
}

// frame is where a parameter of the frame is.
func (d *decoder) frame(name string) (variable, bool) {
	for i := len(d.scopes) - 1; i >= 0; i-- {
		if v, ok := d.scopes[i].params[name]; ok {
			return v, true
		}
	}
	if v, ok := d.f.params[name]; ok && !d.f.Entry {
		return v, true
	}
	return variable{}, false
}

func (d *decoder) call() {
	d.mod("uni")
	o := d.s.ops
	if d.used != len(d.mods) || len(o) == 0 {
		d.unknown()
	}
	var rets, args []operand
	if o[0].kind == '(' {
		rets, o = o[0].list, o[1:]
	}
	if len(o) == 2 && o[1].kind == '(' {
		args, o = o[1].list, o[:1]
	}
	if len(o) != 1 || o[0].kind != 'w' {
		d.unknown()
	}
	g := d.f.module.byName[o[0].word]
	if g == nil || g.Entry || !g.defined {
		d.fail(ErrUnsupported, "call of %s, which the file has not", o[0].word)
	}
	if len(args) != len(g.formals) || len(rets) != len(g.returns) {
		d.fail(ErrSyntax, "%s takes %d parameters and returns %d, not %d and %d", g.Name, len(g.formals), len(g.returns), len(args), len(rets))
	}
	c := call{to: g}
	moves := func(here []operand, there []variable) (out []move) {
		for i, h := range here {
			v, ok := d.frame(h.word)
			if !ok {
				d.fail(ErrUnsupported, "parameter %s is not declared with .param here", h.word)
			}
			if v.size != there[i].size {
				d.fail(ErrSyntax, "parameter %s has %d bytes, not %d", h.word, v.size, there[i].size)
			}
			out = append(out, move{v.offset / 8, there[i].offset / 8, (v.size + 7) / 8})
		}
		return out
	}
	c.args, c.rets = moves(args, g.formals), moves(rets, g.returns)
	d.f.calls = append(d.f.calls, c)
	d.emit(pre{op: opCall, imm: int64(len(d.f.calls) - 1)})
}

// semantics takes the modifiers of order and scope.
func (d *decoder) semantics(a *access) {
	switch d.mod("weak", "relaxed", "acquire", "release", "acq_rel", "volatile") {
	case "":
		return
	case "weak":
		return
	case "volatile":
		a.sem, a.scope = strong, scopeSystem
		return
	case "relaxed":
		a.sem = strong
	case "acquire":
		a.sem = strong | acquire
	case "release":
		a.sem = strong | release
	case "acq_rel":
		a.sem = strong | acquire | release
	}
	d.scope(a)
}

func (d *decoder) scope(a *access) {
	switch d.mod("cta", "cluster", "gpu", "sys") {
	case "cta":
		a.scope = scopeCTA
	case "cluster":
		a.scope = scopeCluster
	case "gpu":
		a.scope = scopeGPU
	case "sys":
		a.scope = scopeSystem
	default:
		d.unknown()
	}
}

// at fills in the address of an operand: register or nothing, and offset.
func (d *decoder) at(p *pre, o operand, shared bool) {
	if o.kind != '[' {
		d.fail(ErrSyntax, "%s without an address", d.s.name)
	}
	p.imm = o.off
	base := o.list[0]
	p.x[1] = d.constant(0)
	p.use |= xa
	switch {
	case base.kind == 'n':
		p.imm += int64(base.num)
	case base.kind != 'w':
		d.fail(ErrSyntax, "%s without an address", d.s.name)
	default:
		if r, ok := d.find(base.word); ok {
			if r.size != 8 && !(shared && r.size == 4) {
				d.fail(ErrSyntax, "register %s of %d bits as an address", base.word, r.size*8)
			}
			p.x[1] = r.id
			return
		}
		v, ok := d.f.module.shared[base.word]
		if !ok || !shared {
			d.fail(ErrUnsupported, "variable %s", base.word)
		}
		p.imm += int64(v.offset)
	}
}

// elements fills in the registers of a vector.
func (d *decoder) elements(p *pre, o operand, n int, typ string, def bool) {
	list := []operand{o}
	if o.kind == '{' {
		list = o.list
	}
	if len(list) != n {
		d.fail(ErrSyntax, "%s with %d registers", d.s.name, len(list))
	}
	for i, e := range list {
		at := [4]int{0, 2, 3, 4}[i]
		if def {
			p.x[at] = d.reg(e, size(typ), true)
			p.def |= 1 << at
		} else {
			p.x[at] = d.source(e, typ, true)
			p.use |= 1 << at
		}
	}
}

func (d *decoder) vector() int {
	switch d.mod("v2", "v4") {
	case "v2":
		return 2
	case "v4":
		return 4
	}
	return 1
}

func (d *decoder) memory(name string) {
	load := name != "st"
	o := d.s.ops
	var a access
	d.semantics(&a)
	space := d.mod("global", "shared", "shared::cta", "shared::cluster", "param", "const", "local")
	a.inShared(space)
	if load {
		d.mod("nc")
	}
	d.mod("ca", "cg", "cs", "lu", "cv", "wb", "wt")
	n := d.vector()
	t := d.typ()
	d.end(2)
	if t == "pred" || n*size(t) > 16 || a.sem&acquire != 0 && !load || a.sem&release != 0 && load || space == "const" || space == "local" {
		d.unknown()
	}
	address, data := o[0], o[1]
	if load {
		address, data = o[1], o[0]
	}
	a.size, a.n = uint8(size(t)), uint8(n)
	p := pre{}
	d.elements(&p, data, n, t, load)
	if space == "param" {
		if a.sem != 0 {
			d.unknown()
		}
		d.param(p, a, address, load)
	} else {
		d.at(&p, address, a.shared)
		p.op = memoryOp(load, a)
		p.tgt = d.access(a)
		d.emit(p)
	}
	if load && signed(t) {
		for i, e := range dataOf(data) {
			r, _ := d.find(e.word)
			if r.size > size(t) {
				x := p.x[[4]int{0, 2, 3, 4}[i]]
				d.emit(pre{op: opSext, x: [6]int32{x, x}, def: xd, use: xa, tgt: int32(64 - 8*size(t)), imm: int64(mask(r.size))})
			}
		}
	}
}

// inShared says whether an access is of shared memory, and of whose.
func (a *access) inShared(space string) {
	a.shared = strings.HasPrefix(space, "shared")
	a.cluster = space == "shared::cluster"
}

func dataOf(o operand) []operand {
	if o.kind == '{' {
		return o.list
	}
	return []operand{o}
}

func (d *decoder) access(a access) int32 {
	for i, b := range d.f.access {
		if a == b {
			return int32(i)
		}
	}
	d.f.access = append(d.f.access, a)
	return int32(len(d.f.access) - 1)
}

func memoryOp(load bool, a access) uint16 {
	type shape struct {
		load, strong bool
		size, n      uint8
	}
	op := map[shape]uint16{
		{true, false, 1, 1}: opLd8, {true, false, 2, 1}: opLd16, {true, false, 4, 1}: opLd32, {true, false, 8, 1}: opLd64,
		{true, false, 4, 2}: opLd2x32, {true, false, 8, 2}: opLd2x64, {true, false, 4, 4}: opLd4x32,
		{true, true, 1, 1}: opLd8, {true, true, 2, 1}: opLd16,
		{true, true, 4, 1}: opLdStrong32, {true, true, 8, 1}: opLdStrong64, {true, true, 4, 2}: opLdStrong2x32, {true, true, 8, 2}: opLdStrong2x64,
		{true, true, 4, 4}:   opLdStrong4x32,
		{false, false, 1, 1}: opSt8, {false, false, 2, 1}: opSt16, {false, false, 4, 1}: opSt32, {false, false, 8, 1}: opSt64,
		{false, false, 4, 2}: opSt2x32, {false, false, 8, 2}: opSt2x64, {false, false, 4, 4}: opSt4x32,
		{false, true, 4, 1}: opStStrong32, {false, true, 8, 1}: opStStrong64, {false, true, 4, 4}: opStStrong4x32,
	}[shape{load, a.sem != 0, a.size, a.n}]
	if op != 0 && !a.shared {
		return op
	}
	return pick(load, opLdAny, opStAny)
}

// param is an access to parameters: a kernel's own, in the launch, or those of the frame.
func (d *decoder) param(p pre, a access, address operand, load bool) {
	if address.kind != '[' || address.list[0].kind != 'w' {
		d.fail(ErrSyntax, "%s without a parameter", d.s.name)
	}
	name, end := address.list[0].word, int(address.off)+int(a.size)*int(a.n)
	p.imm, p.tgt = address.off, d.access(a)
	inside := func(v variable) {
		if address.off < 0 || end > v.size || address.off%int64(a.size) != 0 {
			d.fail(ErrSyntax, "%s at %d of %d bytes", d.s.name, address.off, v.size)
		}
		p.imm += int64(v.offset)
	}
	if v, ok := d.frame(name); ok {
		inside(v)
		p.op = pick(load, opLdFrame, opStFrame)
		d.emit(p)
		return
	}
	if !d.f.Entry || !load {
		d.fail(ErrUnsupported, "parameter %s", name)
	}
	p.op = opLdParam
	p.x[1] = d.constant(0)
	p.use |= xa
	if v, ok := d.f.params[name]; ok {
		inside(v)
	} else {
		p.x[1] = d.reg(address.list[0], 8, false)
	}
	d.emit(p)
}

func (d *decoder) atomic(name string) {
	a := access{sem: strong, scope: scopeGPU, n: 1}
	before := d.used
	if d.semantics(&a); d.used == before {
		if d.used < len(d.mods) && slices.Contains([]string{"cta", "cluster", "gpu", "sys"}, d.mods[d.used]) {
			d.scope(&a)
		}
	}
	a.inShared(d.mod("global", "shared", "shared::cta", "shared::cluster"))
	op, ok := map[string]uint8{"add": rmwAdd, "cas": rmwCas, "exch": rmwExch, "min": rmwMin, "max": rmwMax, "and": rmwAnd, "or": rmwOr, "xor": rmwXor, "inc": rmwInc, "dec": rmwDec}[d.mod(
		"add", "cas", "exch", "min", "max", "and", "or", "xor", "inc", "dec")]
	if !ok || a.sem == 0 {
		d.unknown()
	}
	a.rmw = op
	a.typ = d.typ()
	a.size = uint8(size(a.typ))
	okType := a.size == 4 || a.size == 8
	switch op {
	case rmwCas, rmwExch, rmwAnd, rmwOr, rmwXor:
		okType = okType && a.typ[0] == 'b' && !float(a.typ)
	case rmwAdd:
		okType = okType && a.typ[0] != 'b'
	case rmwInc, rmwDec:
		okType = a.typ == "u32"
	default:
		okType = okType && a.typ[0] != 'b' && !float(a.typ)
	}
	if !okType || strings.HasSuffix(a.typ, "x2") {
		d.unknown()
	}
	p := pre{op: opAtom, tgt: d.access(a)}
	o := d.s.ops
	n := 1
	if op == rmwCas {
		n = 2
	}
	if name == "atom" {
		d.end(2 + n)
		p.x[0] = d.reg(o[0], int(a.size), false)
		o = o[1:]
	} else {
		if op == rmwCas || op == rmwExch {
			d.unknown()
		}
		d.end(1 + n)
		p.x[0] = d.regs // a result that nobody wants
		d.regs++
	}
	p.def = xd
	d.at(&p, o[0], a.shared)
	p.x[2] = d.src(o[1], a.typ)
	p.use |= xb
	if n == 2 {
		p.x[3] = d.src(o[2], a.typ)
		p.use |= xc
	}
	d.emit(p)
}

func (d *decoder) multimem() {
	what := d.mod("ld_reduce", "st", "red")
	a := access{}
	d.semantics(&a)
	d.mod("global")
	if what != "st" {
		d.need("add")
		a.wide = d.mod("acc::f32") != ""
	}
	a.n = uint8(d.vector())
	a.typ = d.typ()
	a.size = uint8(size(a.typ))
	switch a.typ {
	case "f32", "f16x2", "bf16x2", "u32", "s32", "u64", "f64", "f16", "bf16":
	default:
		if what != "st" || a.size < 4 {
			d.unknown()
		}
	}
	if a.size*a.n > 16 || a.sem&strong == 0 && what != "st" || a.size < 4 {
		d.unknown()
	}
	d.end(2)
	o := d.s.ops
	p := pre{}
	switch what {
	case "ld_reduce":
		p.op = opLdReduce
		d.elements(&p, o[0], int(a.n), a.typ, true)
		d.at(&p, o[1], false)
	case "st", "red":
		p.op = pick(what == "st", opStMulticast, opRedMulticast)
		d.elements(&p, o[1], int(a.n), a.typ, false)
		d.at(&p, o[0], false)
	default:
		d.unknown()
	}
	p.tgt = d.access(a)
	d.emit(p)
}

func (d *decoder) fence(name string) {
	a := access{sem: strong | acquire | release}
	if name == "membar" {
		level, ok := map[string]uint8{"cta": scopeCTA, "gl": scopeGPU, "sys": scopeSystem}[d.mod("cta", "gl", "sys")]
		if !ok {
			d.unknown()
		}
		a.scope = level
		a.sem |= sequential
	} else if d.mod("proxy") != "" {
		d.need("alias")
		a.sem = alias
	} else {
		switch d.mod("sc", "acq_rel", "acquire", "release") {
		case "sc":
			a.sem |= sequential
		case "acquire":
			a.sem = strong | acquire
		case "release":
			a.sem = strong | release
		}
		d.scope(&a)
	}
	d.end(0)
	d.emit(pre{op: opFence, tgt: d.access(a)})
}

func (d *decoder) barrier() {
	d.mod("cta")
	what := d.mod("sync", "red")
	if what == "" {
		d.unknown()
	}
	d.mod("aligned")
	o := d.s.ops
	if what == "sync" {
		d.end(1)
		d.emit(pre{op: opBar, imm: d.barrierNumber(o[0])})
		return
	}
	kind := d.mod("and", "or", "popc")
	d.mod("aligned")
	width := 0
	if kind == "popc" {
		d.need("u32")
		width = 4
	} else {
		d.need("pred")
	}
	d.end(3)
	p := pre{op: opBarRed, def: xd, use: xa, imm: d.barrierNumber(o[1]), tgt: map[string]int32{"and": 0, "or": 1, "popc": 2}[kind]}
	p.x[0] = d.reg(o[0], width, false)
	with := o[2]
	if with.kind == '!' {
		with.kind = 'w'
		inverse := d.regs
		d.regs++
		d.emit(pre{op: opNot, x: [6]int32{inverse, d.reg(with, 0, false)}, def: xd, use: xa, imm: 1})
		p.x[1] = inverse
	} else {
		p.x[1] = d.reg(with, 0, false)
	}
	d.emit(p)
}

func (d *decoder) clusterBarrier() {
	p := pre{op: opClusterArrive}
	switch d.mod("arrive", "wait") {
	case "arrive":
		if d.mod("release", "relaxed") != "relaxed" {
			p.imm = 1
		}
	case "wait":
		p.op = opClusterWait
		d.mod("acquire")
	default:
		d.unknown()
	}
	d.mod("aligned")
	d.end(0)
	d.emit(p)
}

// mapa is for addresses that are known to be of shared memory: generic ones are global here.
func (d *decoder) mapa() {
	d.need("shared::cluster")
	t := d.typ()
	if t != "u32" && t != "u64" {
		d.unknown()
	}
	d.end(3)
	o := d.s.ops
	p := pre{op: opMapa, x: [6]int32{d.reg(o[0], size(t), false), 0, d.src(o[2], "u32")}, def: xd, use: xa | xb}
	from := o[1]
	if from.kind == 'w' {
		if v, ok := d.f.module.shared[from.word]; ok {
			from = operand{kind: 'n', num: uint64(v.offset)}
		}
	}
	p.x[1] = d.src(from, t)
	d.emit(p)
}

func (d *decoder) barrierNumber(o operand) int64 {
	if o.kind != 'n' || o.num >= 16 {
		d.fail(ErrUnsupported, "%s with a barrier that is no number below 16", d.s.name)
	}
	return int64(o.num)
}

func (d *decoder) shuffle() {
	d.need("sync")
	mode, ok := map[string]int64{"up": 0, "down": 1, "bfly": 2, "idx": 3}[d.mod("up", "down", "bfly", "idx")]
	if !ok {
		d.unknown()
	}
	d.need("b32")
	d.end(5)
	o := d.s.ops
	to := o[0]
	p := pre{op: opShfl, imm: mode, def: xd | xb, use: xa | xc | xe | xg}
	if to.kind == '|' {
		p.x[2] = d.reg(to.list[1], 0, false)
		to = to.list[0]
	} else {
		p.x[2] = d.regs
		d.regs++
	}
	p.x[0] = d.reg(to, 4, false)
	p.x[1], p.x[3], p.x[4], p.x[5] = d.src(o[1], "b32"), d.src(o[2], "b32"), d.src(o[3], "b32"), d.src(o[4], "b32")
	d.emit(p)
}
