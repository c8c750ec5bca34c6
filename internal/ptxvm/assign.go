package ptxvm

import (
	"fmt"
	"math/bits"
	"slices"
)

// assign gives each register a word of the frame. PTX has a register for nearly every value; those that never live at the same time share a
// word, so that the frame of a thread stays small: there are very many threads.
func (d *decoder) assign() {
	code, n := d.code, int(d.regs)
	leader := make([]bool, len(code)+1)
	leader[0] = true
	for i, p := range code {
		switch p.op {
		case opBra, opBraIf, opBraIfNot:
			leader[p.tgt], leader[i+1] = true, true
		case opRet, opExit, opTrap:
			leader[i+1] = true
		}
	}
	var starts []int
	blockOf := make([]int, len(code)+1)
	for i := range code {
		if leader[i] {
			starts = append(starts, i)
		}
		blockOf[i] = len(starts) - 1
	}
	words := (n + 63) / 64
	sets := make([]uint64, 3*words*len(starts))
	set := func(kind, b int) []uint64 { return sets[(kind*len(starts)+b)*words:][:words] }
	const uses, defs, in = 0, 1, 2
	end := func(b int) int {
		if b+1 < len(starts) {
			return starts[b+1]
		}
		return len(code)
	}
	each := func(p pre, what uint8, do func(r int32)) {
		for k := range p.x {
			if what>>k&1 != 0 && p.x[k] >= 0 {
				do(p.x[k])
			}
		}
	}
	for b := range starts {
		u, f := set(uses, b), set(defs, b)
		for _, p := range code[starts[b]:end(b)] {
			each(p, p.use, func(r int32) {
				if f[r/64]>>(r%64)&1 == 0 {
					u[r/64] |= 1 << (r % 64)
				}
			})
			each(p, p.def, func(r int32) { f[r/64] |= 1 << (r % 64) })
		}
		copy(set(in, b), u)
	}
	successors := func(b int) (s [2]int, n int) {
		last := code[end(b)-1]
		switch last.op {
		case opRet, opExit, opTrap:
			return s, 0
		case opBra:
			return [2]int{blockOf[last.tgt]}, 1
		case opBraIf, opBraIfNot:
			return [2]int{blockOf[last.tgt], b + 1}, 2
		}
		return [2]int{b + 1}, 1
	}
	out := make([]uint64, words)
	liveOut := func(b int) []uint64 {
		clear(out)
		s, n := successors(b)
		for _, t := range s[:n] {
			for w, x := range set(in, t) {
				out[w] |= x
			}
		}
		return out
	}
	for changed := true; changed; {
		changed = false
		for b := len(starts) - 1; b >= 0; b-- {
			i, f := set(in, b), set(defs, b)
			for w, x := range liveOut(b) {
				if x = i[w] | x&^f[w]; x != i[w] {
					i[w], changed = x, true
				}
			}
		}
	}
	// The time from the first to the last of a register; an instruction reads at twice its number and writes one later.
	type interval struct{ reg, from, to int }
	live := make([]interval, n)
	for r := range live {
		live[r] = interval{r, len(code) * 2, -1}
	}
	at := func(r, t int) {
		live[r].from, live[r].to = min(live[r].from, t), max(live[r].to, t)
	}
	every := func(s []uint64, t int) {
		for w, x := range s {
			for ; x != 0; x &= x - 1 {
				at(w*64+bits.TrailingZeros64(x), t)
			}
		}
	}
	for b := range starts {
		every(set(in, b), 2*starts[b])
		every(liveOut(b), 2*end(b)-1)
	}
	for i, p := range code {
		each(p, p.use, func(r int32) { at(int(r), 2*i) })
		each(p, p.def, func(r int32) { at(int(r), 2*i+1) })
	}
	live = slices.DeleteFunc(live, func(v interval) bool { return v.to < 0 })
	slices.SortFunc(live, func(a, b interval) int { return a.from - b.from })
	place := make([]int, n)
	base := len(d.values)
	next := base
	var free []int
	var active []interval
	for _, v := range live {
		keep := active[:0]
		for _, a := range active {
			if a.to < v.from {
				free = append(free, place[a.reg])
			} else {
				keep = append(keep, a)
			}
		}
		active = append(keep, v)
		if k := len(free); k > 0 {
			place[v.reg], free = free[k-1], free[:k-1]
		} else {
			place[v.reg] = next
			next++
		}
	}
	f := d.f
	f.words = next
	f.frame = max(next+d.words, 1)
	if f.frame > 1<<15 {
		panic(&Error{Place: f.module.place(code[0].line), Err: fmt.Errorf("%s with %d words of registers: %w", f.Name, f.frame, ErrUnsupported)})
	}
	f.consts = d.values
	where := func(x int32) uint16 {
		if x >= 0 {
			return uint16(place[x])
		}
		return uint16(-x - 1)
	}
	f.code, f.at = make([]instr, len(code)), make([]int32, len(code))
	for i, p := range code {
		in := instr{op: p.op, tgt: p.tgt, imm: p.imm}
		for k, to := range []*uint16{&in.d, &in.a, &in.b, &in.c, &in.e, &in.g} {
			if (p.def|p.use)>>k&1 != 0 {
				*to = where(p.x[k])
			}
		}
		if in.op == opLdFrame || in.op == opStFrame {
			in.imm += int64(f.words) * 8
		}
		f.code[i], f.at[i] = in, int32(p.line)
	}
}
