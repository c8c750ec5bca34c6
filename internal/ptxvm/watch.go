package ptxvm

import (
	"fmt"
	"slices"
	"strings"
	"unsafe"
)

// A hang is a state in which nobody goes on any more. Kernels wait in loops, which nothing ends but the clock, so this is what counts as waiting: a thread polls
// if it has stored nothing, and each load has given it what the same instruction gave it when it was last executed, from the same address. An atomic that leaves
// what is there as it was is a load. Whatever else it has done is arithmetic on what it has already seen and on the clock, fences, and barriers of its block.
// Nobody goes on if each thread that could has polled so often that all paths of its loop have been taken (Config.Patience), if what it polls is still
// what it saw, so that it would see nothing else, and if the others wait for these: at barriers, for room, or for the launch before.
// A time-out of the kernel's own would end such a loop, but nothing else would.

// poll is an instruction that a thread has loaded with, and what it got.
type poll struct {
	f       *Function
	pc      int32
	address uint64
	shared  bool
	value   [4]uint64
	n       uint32 // times, one after the other
}

// watched is what is known of a thread's polling.
type watched struct {
	polls  []poll
	next   int    // where in polls the next load is expected
	still  uint64 // loads that were nothing new, one after the other
	loaded int32  // 1 more than the load whose value is not looked at yet
	loadAt uint64
	stores uint64 // of the machine, when the thread last polled
}

// mostPolls is how many loads a loop may have to be found as one.
const mostPolls = 96

const defaultPatience = 1 << 13

// note looks at an instruction that is about to be executed. One that others may see.
func (m *Machine) note(t *thread, f *Function, pc int32, in *instr, r registers) {
	switch {
	case in.op < opSt8 || in.op == opLdReduce:
		t.loaded, t.loadAt = pc+1, r[in.a]+uint64(in.imm)
		return
	case in.op == opAtom:
		t.loaded, t.loadAt = pc+1, r[in.a]+uint64(in.imm)
		if !m.changes(t, &f.access[in.tgt], in, r) {
			return // a load
		}
	case in.op > opRedMulticast && in.op != opGridLaunch:
		return
	}
	t.loaded = 0
	t.polls, t.next, t.still = t.polls[:0], 0, 0
	if in.op == opGridLaunch {
		return
	}
	m.stores++
	a := &f.access[in.tgt]
	if a.shared {
		return
	}
	address, n := r[in.a]+uint64(in.imm), uint64(a.size)*uint64(a.n)
	who := site{t.block, t.number, pc, f}
	if in.op == opStMulticast || in.op == opRedMulticast {
		if region := m.memory.find(address); region != nil {
			for _, c := range region.copies {
				m.remember(c+address-region.base, n, who)
			}
		}
		return
	}
	m.remember(address, n, who)
}

func (m *Machine) remember(address, n uint64, who site) {
	if m.stored == nil {
		m.stored = map[uint64]site{}
	}
	for a := address &^ 7; a < address+n; a += 8 {
		m.stored[a] = who
	}
}

// changes says whether an atomic makes something else of what is there.
func (m *Machine) changes(t *thread, a *access, in *instr, r registers) bool {
	p, err := m.span(t, a, r[in.a]+uint64(in.imm))
	if err != nil {
		return true
	}
	old := load(p, a.size)
	return modify(a, old, r[in.b], r[in.c]) != old
}

// saw looks at what the last load has given.
func (m *Machine) saw(t *thread, f *Function, r registers) {
	pc := t.loaded - 1
	t.loaded = 0
	in := &f.code[pc]
	a := f.access[in.tgt]
	x := poll{f: f, pc: pc, address: t.loadAt, shared: a.shared, n: 1}
	for i, d := range [4]uint16{in.d, in.b, in.c, in.e} {
		if i < int(max(a.n, 1)) {
			x.value[i] = r[d]
		}
	}
	t.stores = m.stores
	n := len(t.polls)
	for k := range n {
		i := (t.next + k) % n
		if o := &t.polls[i]; o.pc == pc && o.f == f {
			t.next = i + 1
			if o.address == x.address && o.value == x.value {
				o.n++
				t.still++
				return
			}
			*o = x
			t.still = 0
			return
		}
	}
	if n == mostPolls {
		t.polls = t.polls[:0]
	}
	t.polls = append(t.polls, x)
	t.next, t.still = len(t.polls), 0
}

// spinning says whether a thread only polls, and nobody has stored anything since.
func (m *Machine) spinning(t *thread) bool {
	return t.still > 2*uint64(len(t.polls)) && t.stores == m.stores
}

// polled says whether a thread would see nothing else, however long it polled.
func (m *Machine) polled(t *thread) bool {
	if t.still < uint64(m.patience)*uint64(max(len(t.polls), 1)) {
		return false
	}
	for i := range t.polls {
		x := &t.polls[i]
		in := &x.f.code[x.pc]
		a := &x.f.access[in.tgt]
		if in.op == opLdReduce || x.n < 2 { // not of the loop
			continue
		}
		p, err := m.span(t, a, x.address)
		if err != nil {
			continue
		}
		for k := range int(a.n) {
			if load(unsafe.Add(p, k*int(a.size)), a.size) != x.value[k]&mask(int(a.size)) {
				t.still = 0 // it has not seen it yet
				return false
			}
		}
	}
	return true
}

// hanging looks whether nobody goes on.
func (m *Machine) hanging() bool {
	if m.outside() {
		return false
	}
	for _, t := range m.ready {
		if !m.polled(t) {
			return false
		}
	}
	return true
}

// outside says whether something on a stream that is no thread may still go on.
func (m *Machine) outside() bool {
	for _, s := range m.streams {
		if len(s.queue) > 0 && len(s.active) == 0 && (s.queue[0].do != nil || s.queue[0].pause != 0) {
			return true
		}
	}
	return false
}

// Hang is who waits for what, where nobody goes on. It is an ErrDeadlock.
type Hang struct{ Waits []Wait }

// Wait is threads of a block that wait for the same, or blocks, or a launch.
type Wait struct {
	Thread  Thread // one of them
	Threads int    // of its block that wait so. 0: the block has not begun, or the launch
	Blocks  int    // that have not begun
	What    string // "polls", "waits at the barrier" and so on
	Place   Place  // where; none if it has not begun

	// Of a thread that polls.
	Address uint64
	Shared  bool     // the address is of shared memory
	Name    string   // of the address, as Config.Name has it
	Value   []uint64 // what it saw, element by element
	Stored  *Access  // who stored there last, nil if nobody has since the machine was made
}

// Unwrap gives ErrDeadlock.
func (h *Hang) Unwrap() error { return ErrDeadlock }

// Error has a line for each who waits.
func (h *Hang) Error() string {
	var b strings.Builder
	b.WriteString("no thread can go on:")
	for i, w := range h.Waits {
		if i == 40 {
			fmt.Fprintf(&b, "\n  and %d more", len(h.Waits)-i)
			break
		}
		b.WriteString("\n  " + w.String())
	}
	return b.String()
}

// String gives "device 1, stream 1, launch 0 of symmem_wait, block 0, thread 0 polls 0x2300000080 (0x0) at signals.ptx:65: ld.acquire.sys.global.u32 %r25, [%rd3];".
func (w Wait) String() string {
	t := w.Thread
	launch := fmt.Sprintf("device %d, stream %d, launch %d of %s", t.Device, t.Stream, t.Launch, t.Function)
	switch {
	case w.Threads == 0 && w.Blocks > 0:
		return fmt.Sprintf("%s, %d blocks from %s on: %s", launch, w.Blocks, index(t.Block), w.What)
	case w.Threads == 0:
		return fmt.Sprintf("%s: %s", launch, w.What)
	}
	s := t.String()
	if w.Threads > 1 {
		s += fmt.Sprintf(" and %d more", w.Threads-1)
	}
	s += ": " + w.What
	if w.Value != nil {
		space := ""
		if w.Shared {
			space = "shared "
		}
		s += fmt.Sprintf(" %s%#x", space, w.Address)
		if w.Name != "" {
			s += " (" + w.Name + ")"
		}
		s += fmt.Sprintf(", which is %#x", w.Value)
	}
	s += fmt.Sprintf(", at %s", w.Place)
	if w.Stored != nil {
		s += fmt.Sprintf("; last stored to at %s (%s)", w.Stored.Place, w.Stored.Thread)
	} else if w.Value != nil && !w.Shared {
		s += "; nobody has stored there"
	}
	return s
}

// hang is what there is to say of a state in which nobody goes on.
func (m *Machine) hang() *Hang {
	h := &Hang{}
	for _, s := range m.streams {
		for _, l := range s.active {
			missing := Wait{What: "wait for room on the device, which blocks that wait themselves have taken"}
			for _, b := range l.blocks() {
				if b.waits() {
					if missing.Blocks == 0 {
						missing.Thread = name(l, b.index, 0)
					}
					missing.Blocks++
					continue
				}
				first := len(h.Waits)
				for i := range b.threads {
					t := &b.threads[i]
					for _, w := range m.wait(t) {
						same := slices.IndexFunc(h.Waits[first:], func(o Wait) bool {
							return o.What == w.What && o.Place == w.Place && o.Address == w.Address && slices.Equal(o.Value, w.Value)
						})
						if same >= 0 {
							h.Waits[first+same].Threads++
						} else {
							h.Waits = append(h.Waits, w)
						}
					}
				}
			}
			if missing.Blocks > 0 {
				h.Waits = append(h.Waits, missing)
			}
		}
		if len(s.queue) > 0 {
			if l := s.queue[0].launch; l != nil {
				h.Waits = append(h.Waits, Wait{Thread: name(l, [3]uint32{}, 0), What: "waits for the launch before it on its stream"})
			}
		}
	}
	return h
}

// wait is what a thread waits for, in one place or, polling, several.
func (m *Machine) wait(t *thread) []Wait {
	w := Wait{Thread: m.who(t), Threads: 1, Place: t.f.place(t.pc - 1)}
	switch t.status {
	case ended:
		return nil
	case atBarrier:
		w.What = "waits at the barrier for the other threads of its block"
	case atCluster:
		w.What = "waits at the cluster barrier for the other threads of its cluster"
	case atShuffle:
		w.What = "waits for the other threads of its warp"
	case atGrid:
		w.What = "waits for the launch before it on its stream"
	default:
		var all []Wait
		var most uint32
		for i := range t.polls {
			most = max(most, t.polls[i].n)
		}
		for i := range t.polls {
			x := &t.polls[i]
			if x.n < most/16 { // what it looks at now and then, as the word that ends it all
				continue
			}
			p := w
			p.What, p.Place, p.Address, p.Shared = "polls", x.f.place(x.pc), x.address, x.shared
			p.Value = slices.Clone(x.value[:max(x.f.access[x.f.code[x.pc].tgt].n, 1)])
			if !x.shared {
				if m.config.Name != nil {
					p.Name = m.config.Name(x.address)
				}
				if s, ok := m.stored[x.address&^7]; ok {
					a := s.access()
					p.Stored = &a
				}
			}
			all = append(all, p)
		}
		if all != nil {
			return all
		}
		w.What = "goes on"
	}
	return []Wait{w}
}

// deadlock ends the machine with a Hang, at the place of the first who waits.
func (m *Machine) deadlock() {
	h := m.hang()
	for _, w := range h.Waits {
		if w.Place.File != "" {
			m.err = &Error{Place: w.Place, Thread: &w.Thread, Err: h}
			return
		}
	}
}
