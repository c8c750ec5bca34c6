package properties

import (
	"fmt"
	"slices"
	"strings"

	"pgregory.net/rapid"

	"github.com/symmem/symmem/tensor"
)

// A program is a sequence of steps, each of all ranks of a group. Every rank runs the steps of its groups in the program's order, without waiting for
// others where the step does not, so ranks run apart from each other as far as the library lets them. Steps that touch memory end with a fence of
// their group. The steps are those of one program whatever a rank finds, so it is legal by construction.
type program struct {
	world int
	seed  uint64 // of the delays
	steps []step
}

// step is what ranks do together.
type step struct {
	text  string
	group int
	// run is done by each rank of the group.
	run func(r *rank, g *member) error
}

func (p *program) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "world(%d) // delays %d; g0 is the world\n", p.world, p.seed)
	for _, s := range p.steps {
		fmt.Fprintf(&b, "g%d: %s\n", s.group, s.text)
	}
	return b.String()
}

// modelGroup is what the model knows of a group.
type modelGroup struct {
	ranks  []int // of the world
	closed bool
	inside int // the group that it is a part of, or -1
}

// modelTensor is what the model knows of a tensor.
type modelTensor struct {
	group  int
	dtype  tensor.DType
	data   [][]int64 // by rank of the group
	closed bool
}

// draft is a program that is being drawn, with the state of the model behind its last step.
type draft struct {
	*rapid.T
	program
	groups  []modelGroup
	tensors []modelTensor
}

// span is a part of a tensor.
type span struct{ t, from, to int }

func (s span) len() int { return s.to - s.from }

func (s span) String() string { return fmt.Sprintf("t%d[%d:%d]", s.t, s.from, s.to) }

// draw draws a program.
func draw(t *rapid.T, most int) *program {
	d := &draft{T: t, program: program{world: rapid.IntRange(1, 4).Draw(t, "world"), seed: rapid.Uint64Range(0, 99).Draw(t, "delays")}}
	all := make([]int, d.world)
	for i := range all {
		all[i] = i
	}
	d.groups = []modelGroup{{ranks: all, inside: -1}}
	d.zeros(0)
	kinds := []func(g int){d.zeros, d.fill, d.puts, d.puts, d.gets, d.putSignal, d.putSignal, d.putSignal, d.allReduce, d.allReduce, d.collective, d.collective, d.shared, d.shared, d.dispatch, d.subGroup, d.closeTensor, d.closeGroup,
		d.check, d.illegal}
	for range rapid.IntRange(1, most).Draw(t, "steps") {
		rapid.SampledFrom(kinds).Draw(t, "kind")(d.openGroup())
	}
	for g := range d.groups {
		if !d.groups[g].closed {
			d.check(g)
		}
	}
	return &d.program
}

func (d *draft) add(group int, run func(r *rank, g *member) error, format string, args ...any) {
	d.steps = append(d.steps, step{fmt.Sprintf(format, args...), group, run})
}

func (d *draft) openGroup() int {
	var open []int
	for i, g := range d.groups {
		if !g.closed {
			open = append(open, i)
		}
	}
	return rapid.SampledFrom(open).Draw(d.T, "group")
}

// open gives the group's tensors of at least so many elements.
func (d *draft) open(group, elements int) []int {
	var open []int
	for i, t := range d.tensors {
		if t.group == group && !t.closed && len(t.data[0]) >= elements {
			open = append(open, i)
		}
	}
	return open
}

// part draws a part of a tensor of the group, with len elements, or any number if that is -1; false if there is none.
func (d *draft) part(group, length int, dtype tensor.DType) (span, bool) {
	open := slices.DeleteFunc(d.open(group, max(length, 0)), func(t int) bool { return dtype != 0 && d.tensors[t].dtype != dtype })
	if len(open) == 0 {
		return span{}, false
	}
	t := rapid.SampledFrom(open).Draw(d.T, "tensor")
	n := len(d.tensors[t].data[0])
	if length < 0 {
		length = rapid.IntRange(0, n).Draw(d.T, "len")
	}
	from := rapid.IntRange(0, n-length).Draw(d.T, "from")
	return span{t, from, from + length}, true
}

func (d *draft) overlap(a, b span) bool {
	return a.t == b.t && a.from < b.to && b.from < a.to
}

// rankOf draws a rank of a group.
func (d *draft) rankOf(group int) int {
	return rapid.IntRange(0, len(d.groups[group].ranks)-1).Draw(d.T, "rank")
}

// fence is how a step that touches memory ends.
func (d *draft) fence() fence { return fence(rapid.IntRange(0, int(fences)-1).Draw(d.T, "fence")) }

func (d *draft) zeros(group int) {
	n := rapid.OneOf(rapid.IntRange(0, 9), rapid.IntRange(10, 300), rapid.Just(5000)).Draw(d.T, "elements")
	dtype := rapid.SampledFrom([]tensor.DType{tensor.Int32, tensor.Uint8}).Draw(d.T, "dtype")
	t := len(d.tensors)
	made := modelTensor{group: group, dtype: dtype}
	for range d.groups[group].ranks {
		made.data = append(made.data, make([]int64, n))
	}
	d.tensors = append(d.tensors, made)
	d.add(group, func(r *rank, g *member) error { return r.zeros(g, t, dtype, n) }, "t%d = Zeros(%s, %d).Rendezvous()", t, dtype, n)
	if n > 0 && rapid.IntRange(0, 9).Draw(d.T, "zeros") > 0 {
		d.write(group, span{t, 0, n}) // among zeros nothing is missed
	}
}

func (d *draft) fill(group int) {
	if s, ok := d.part(group, -1, 0); ok {
		d.write(group, s)
	}
}

func (d *draft) write(group int, s span) {
	seed, f := rapid.Int64Range(1, 99).Draw(d.T, "seed"), d.fence()
	for me, data := range d.tensors[s.t].data {
		copy(data[s.from:s.to], filling(d.tensors[s.t].dtype, seed, me, s.len()))
	}
	d.add(group, func(r *rank, g *member) error {
		return r.fenced(g, s.t, f, r.write(g, s, filling(g.tensors[s.t].DType(), seed, g.rank(), s.len())))
	}, "Write(%v, seed %d) on each rank; %v", s, seed, f)
}

// filling are the elements that a rank writes.
func filling(dtype tensor.DType, seed int64, rank, n int) []int64 {
	v := make([]int64, n)
	for i := range v {
		v[i] = wrap(dtype, seed*1_000_003+int64(rank)*7919+int64(i)*31)
	}
	return v
}

// wrap makes a value one of the dtype.
func wrap(dtype tensor.DType, v int64) int64 {
	if dtype == tensor.Uint8 {
		return int64(uint8(v))
	}
	return int64(int32(v))
}

// move is a copy from one rank's memory to another's.
type move struct {
	by, peer int // ranks of the group
	src, dst span
}

// moves draws copies that may run at the same time: no part that is written is read or written by another.
func (d *draft) moves(group int, put bool) []move {
	var all []move
	for range rapid.IntRange(1, 4).Draw(d.T, "moves") {
		src, ok := d.part(group, -1, 0)
		if !ok {
			break
		}
		dst, ok := d.part(group, src.len(), d.tensors[src.t].dtype)
		if !ok {
			continue
		}
		m := move{d.rankOf(group), d.rankOf(group), src, dst}
		if !slices.ContainsFunc(append(all, m), func(o move) bool {
			in, out := m.owners(put)
			otherIn, otherOut := o.owners(put)
			return out == otherIn && d.overlap(m.dst, o.src) || otherOut == in && d.overlap(o.dst, m.src) || o != m && out == otherOut && d.overlap(m.dst, o.dst)
		}) {
			all = append(all, m)
		}
	}
	return all
}

// owners are the ranks whose memory is read and written.
func (m move) owners(put bool) (in, out int) {
	if put {
		return m.by, m.peer
	}
	return m.peer, m.by
}

func (d *draft) apply(moves []move, put bool) {
	for _, m := range moves {
		in, out := m.owners(put)
		copy(d.tensors[m.dst.t].data[out][m.dst.from:m.dst.to], d.tensors[m.src.t].data[in][m.src.from:m.src.to])
	}
}

func (d *draft) puts(group int) { d.copies(group, true) }
func (d *draft) gets(group int) { d.copies(group, false) }

func (d *draft) copies(group int, put bool) {
	moves := d.moves(group, put)
	if len(moves) == 0 {
		return
	}
	f := d.fence()
	d.apply(moves, put)
	var texts []string
	for _, m := range moves {
		if put {
			texts = append(texts, fmt.Sprintf("%d puts %v to %v of %d", m.by, m.src, m.dst, m.peer))
		} else {
			texts = append(texts, fmt.Sprintf("%d gets %v of %d to %v", m.by, m.src, m.peer, m.dst))
		}
	}
	d.add(group, func(r *rank, g *member) error { return r.fenced(g, moves[0].dst.t, f, r.copies(g, moves, put)) }, "%s; %v", strings.Join(texts, ", "), f)
}

// putSignal: a rank puts with a signal, and its peer, behind a wait and nothing else, copies what has come to another place.
func (d *draft) putSignal(group int) {
	src, ok := d.part(group, -1, 0)
	if !ok {
		return
	}
	dst, ok := d.part(group, src.len(), d.tensors[src.t].dtype)
	if !ok {
		return
	}
	again, ok := d.part(group, src.len(), d.tensors[src.t].dtype)
	if !ok || d.overlap(src, dst) || d.overlap(dst, again) || d.overlap(src, again) {
		return
	}
	by, peer, channel, f := d.rankOf(group), d.rankOf(group), rapid.IntRange(0, 3).Draw(d.T, "channel"), d.fence()
	bare := rapid.Bool().Draw(d.T, "bare signal")
	m := []move{{by, peer, src, dst}}
	d.apply(m, true)
	d.apply([]move{{peer, peer, dst, again}}, true)
	d.add(group, func(r *rank, g *member) error {
		return r.fenced(g, dst.t, f, r.putSignal(g, m[0], again, channel, bare))
	}, "%d puts %v to %v of %d with a signal on channel %d (Put and Signal: %t), which waits and copies it to %v; %v", by, src, dst, peer, channel, bare, again, f)
}

func (d *draft) subGroup(group int) {
	if len(d.groups) > 4 {
		return
	}
	var ranks, members []int
	for i, w := range d.groups[group].ranks {
		if rapid.Bool().Draw(d.T, "member") {
			ranks, members = append(ranks, i), append(members, w)
		}
	}
	if len(ranks) == 0 {
		return
	}
	sub := len(d.groups)
	d.groups = append(d.groups, modelGroup{ranks: members, inside: group})
	d.add(group, func(r *rank, g *member) error { return r.subGroup(g, sub, ranks) }, "g%d = Sub(%v)", sub, ranks)
	d.zeros(sub)
}

func (d *draft) closeTensor(group int) {
	open := d.open(group, 0)
	if len(open) == 0 {
		return
	}
	t := rapid.SampledFrom(open).Draw(d.T, "tensor")
	d.tensors[t].closed = true
	d.add(group, func(r *rank, g *member) error { return g.tensors[t].Close(r.ctx) }, "t%d.Close()", t)
}

func (d *draft) closeGroup(group int) {
	if group == 0 || slices.ContainsFunc(d.groups, func(g modelGroup) bool { return g.inside == group && !g.closed }) {
		return
	}
	for _, t := range d.open(group, 0) {
		d.tensors[t].closed = true
		d.add(group, func(r *rank, g *member) error { return g.tensors[t].Close(r.ctx) }, "t%d.Close()", t)
	}
	d.groups[group].closed = true
	d.add(group, func(r *rank, g *member) error { return r.closeGroup(g) }, "Close()")
}

// check compares the group's memory with the model's.
func (d *draft) check(group int) {
	want := map[int][][]int64{}
	open := d.open(group, 0)
	if len(open) == 0 {
		return
	}
	f := d.fence()
	for _, t := range open {
		for _, data := range d.tensors[t].data {
			want[t] = append(want[t], slices.Clone(data))
		}
	}
	d.add(group, func(r *rank, g *member) error { return r.fenced(g, open[0], f, r.check(g, want)) }, "check; %v", f)
}
