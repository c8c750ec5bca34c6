package ptxvm

import (
	"slices"
	"sync/atomic"
	"unsafe"
)

// What a driver above a machine with weak memory needs: devices with address spaces of their own over the same memory, the order that its calls make, and
// accesses that no kernel does.

// ages number the times at which machines have forgotten all order, so that what was noted before is known as old.
var ages atomic.Uint64

// Allocation is bytes that several addresses map, of one device or of several. With weak memory all of these are one and the same location: the machine does
// not ask for fence.proxy.alias between them, only between them and multicast addresses.
type Allocation struct{ region region }

// NewAllocation is for bytes at a multiple of 16.
func NewAllocation(b []byte) *Allocation {
	return &Allocation{region{size: uint64(len(b)), data: unsafe.Pointer(&b[0]), keep: b}}
}

// MapAllocation is Map for n bytes of an allocation, from offset, a multiple of 16.
func (m *Memory) MapAllocation(address uint64, a *Allocation, offset, n uint64) error {
	if err := m.Map(address, a.region.keep[offset:offset+n]); err != nil {
		return err
	}
	r := m.find(address)
	r.of, r.shift = &a.region, offset
	return nil
}

// MapHost is Map for memory that a host uses too. An access there takes place when its instruction is executed, and races are not found. A store tells the host what it would
// tell who loads it, and a load learns what the host knows: see [Machine.Host].
func (m *Memory) MapHost(address uint64, b []byte) error {
	if err := m.Map(address, b); err != nil {
		return err
	}
	m.find(address).host = true
	return nil
}

// span is consecutive words of an allocation that were accessed together, and not since then by threads.
type span struct {
	low, high uint64
	write     bool
	looked    bool // strong loads of 4 bytes
	slot      int32
	clock     uint32
	site      site
}

// origin is where an address of a region really is.
func (m *Machine) origin(r *region, off uint64) (*region, uint64) {
	if r.of == nil {
		return r, off
	}
	o := r.of
	if o.age != m.age {
		o.words, o.spans, o.age = nil, nil, m.age
	}
	return o, off + r.shift
}

// Space gives a device an address space of its own, instead of the machine's; nil takes it away. All of a machine's devices have one, or none.
func (m *Machine) Space(device int, memory *Memory) {
	if m.spaces == nil {
		m.spaces = map[int]*Memory{}
	}
	delete(m.spaces, device)
	if memory != nil {
		m.spaces[device] = memory
	}
}

// turnTo makes the address space of a device the one that addresses are of.
func (m *Machine) turnTo(device int) {
	if s := m.spaces[device]; s != nil && s != m.memory {
		m.memory, m.cast = s, nil
		clear(m.cache[:])
	}
}

// hosted says whether an instruction accesses memory of the host.
func (m *Machine) hosted(f *Function, in *instr, r registers) bool {
	if m.spaces == nil || f.access[in.tgt].shared {
		return false
	}
	region := m.memory.find(r[in.a] + uint64(in.imm))
	return region != nil && region.host
}

// meetHost is what an access to memory of the host orders.
func (m *Machine) meetHost(t *thread, a *access, op uint16) {
	if op >= opSt8 && op <= opAtom {
		v := t.rel[scopeSystem]
		if a.sem&release != 0 {
			v = merge(v, t.snapshot())
		}
		m.host.seen = merge(m.host.seen, v)
	}
	if op < opSt8 || op == opAtom {
		t.pend[scopeSystem] = merge(t.pend[scopeSystem], m.host.seen)
		if a.sem&acquire != 0 {
			t.vector = merge(t.vector, m.host.seen)
		}
	}
}

// Order is accesses that something is behind. The zero value is none. It is of one machine.
type Order struct {
	age   uint64
	seen  *vector
	ended *vector // those by which all aliases of the memory are the same again
}

// Join is what is behind both.
func (m *Machine) Join(a, b Order) Order {
	a, b = m.current(a), m.current(b)
	return Order{m.age, merge(a.seen, b.seen), merge(a.ended, b.ended)}
}

// current forgets what all are behind.
func (m *Machine) current(o Order) Order {
	if o.age != m.age {
		return Order{age: m.age}
	}
	return o
}

func (o Order) covers(seen, ended *vector) bool {
	within := func(a, b *vector) bool {
		switch {
		case b == nil:
			return true
		case a == nil:
			return len(b.events) == 0
		}
		return a == b || covers(a.events, b.events)
	}
	return within(o.seen, seen) && within(o.ended, ended)
}

// Order is what comes next on the stream is behind, when it is idle.
func (s *Stream) Order() Order { return Order{s.machine.age, s.settled, s.ended} }

// Follow makes what comes next on the stream be behind something else too.
func (s *Stream) Follow(o Order) {
	o = s.machine.current(o)
	s.settled, s.ended = merge(s.settled, o.seen), merge(s.ended, o.ended)
}

// Fits says whether the stream can be used for what is behind o, and is then behind nothing else.
func (s *Stream) Fits(o Order) bool { return s.machine.current(o).covers(s.settled, s.ended) }

// Host is what the host is behind: what it was told by [Machine.Tell], and by stores to its memory.
func (m *Machine) Host() Order { return m.current(m.host) }

// Tell makes the host be behind something.
func (m *Machine) Tell(o Order) { m.host = m.Join(m.host, o) }

// TellAll makes the host be behind all that has ended on the streams of a device.
func (m *Machine) TellAll(device int) {
	for _, s := range m.streams {
		if s.device == device {
			m.Tell(s.Order())
		}
	}
}

// Floor says what everything that has not begun yet is behind, at least: so much the machine can forget.
func (m *Machine) Floor(o Order) { m.floor = m.current(o) }

// Settle forgets all order, if nothing is under way and the host is behind everything.
func (m *Machine) Settle() {
	if len(m.agents) > 0 || !m.idle() {
		return
	}
	h := m.Host()
	for _, s := range m.streams {
		if !h.covers(s.settled, s.ended) {
			return
		}
	}
	m.settle()
	for _, s := range m.streams {
		s.banks = nil
	}
	m.slots, m.spare = nil, nil
}

// Agent is who accesses memory without being a thread of a kernel: a copy, say. Its accesses are behind what the agent is, and in the order in which they are done.
type Agent struct {
	m *Machine
	t *thread
}

// Agent begins an agent of a device. what is its name, as it stands in a [Race].
func (m *Machine) Agent(device int, what string, behind Order) *Agent {
	behind = m.current(behind)
	s := &Stream{machine: m, device: device, number: -1, settled: behind.seen, ended: behind.ended}
	l := &launch{stream: s, f: &Function{Name: what}, grid: [3]uint32{1, 1, 1}, dim: [3]uint32{1, 1, 1}, base: behind.seen}
	b := &block{launch: l, threads: make([]thread, 1)}
	slot := -1
	for i, k := range m.spare { // a place whose last one this one is behind
		if behind.seen != nil && at(behind.seen.events, int32(k)) >= m.slots[k] && behind.ended != nil && at(behind.ended.events, int32(k)) >= m.slots[k] {
			slot = k
			m.spare = slices.Delete(m.spare, i, i+1)
			break
		}
	}
	if slot < 0 {
		slot = len(m.slots)
		m.slots = append(m.slots, 0)
	}
	a := &Agent{m, &b.threads[0]}
	a.t.block, a.t.f = b, l.f
	m.enter(a.t, slot)
	m.agents = append(m.agents, a)
	return a
}

// End ends the agent, and says what is behind it.
func (a *Agent) End() Order {
	m := a.m
	m.leave(a.t)
	l := a.t.block.launch
	m.agents = slices.DeleteFunc(m.agents, func(o *Agent) bool { return o == a })
	m.spare = append(m.spare, int(a.t.slot))
	return Order{m.age, merge(l.stream.settled, l.final), merge(l.stream.ended, l.own)}
}

// Name changes what the agent is called, for what it does next.
func (a *Agent) Name(what string) { a.t.f = &Function{Name: what} }

func (a *Agent) event(of *Allocation, offset, address uint64) *event {
	a.m.site = site{a.t.block, 0, 0, a.t.f}
	r, off := a.m.origin(&region{of: &of.region}, offset)
	return &event{t: a.t, region: r, off: off, base: address - off}
}

func (a *Agent) wrong(err error) error {
	if err == nil {
		return nil
	}
	who := a.m.who(a.t)
	return &Error{Place: a.t.f.place(0), Thread: &who, Err: err}
}

// Load is ld.acquire.sys of a word of an allocation.
func (a *Agent) Load(of *Allocation, offset, address uint64) (uint32, error) {
	e := a.event(of, offset, address)
	e.size, e.sem, e.scope = 4, strong|acquire, scopeSystem
	v, err := a.m.loadElement(e)
	return uint32(v), a.wrong(err)
}

// Store is st.release.sys.
func (a *Agent) Store(of *Allocation, offset, address uint64, v uint32) error {
	e := a.event(of, offset, address)
	e.size, e.sem, e.scope = 4, strong|release, scopeSystem
	return a.wrong(a.m.storeElement(e, uint64(v)))
}

// Read says that n bytes are read by weak loads; the caller reads them. A [Race] is an error.
func (a *Agent) Read(of *Allocation, offset, address, n uint64) error {
	return a.load(of, offset, address, n, reads)
}

// Look says that n bytes are read by a copy for the host, which may look at words that others store to meanwhile: every aligned 4 bytes are read as by
// ld.relaxed.sys, if they were not accessed in other sizes. So it races only with stores that are not strong, or of other sizes.
func (a *Agent) Look(of *Allocation, offset, address, n uint64) error {
	return a.load(of, offset, address, n, looks)
}

func (a *Agent) load(of *Allocation, offset, address, n uint64, does int) error {
	return a.wrong(a.edges(of, offset, address, n, func(e *event, _ uint64) error {
		_, err := a.m.loadElement(e)
		return err
	}, does))
}

// Write says that n bytes are written by weak stores: the byte at i becomes value(i). The caller writes them. A [Race] is an error.
func (a *Agent) Write(of *Allocation, offset, address, n uint64, value func(i uint64) byte) error {
	return a.wrong(a.edges(of, offset, address, n, func(e *event, i uint64) error { return a.m.storeElement(e, uint64(value(i))) }, writes))
}

// What an agent does to a span.
const (
	reads = iota
	looks
	writes
)

// edges calls f for the bytes at both ends that are less than a word, and for four where they are looked at, and takes what is between as a span.
func (a *Agent) edges(of *Allocation, offset, address, n uint64, f func(e *event, i uint64) error, does int) error {
	for i := uint64(0); i < n; {
		e := a.event(of, offset+i, address+i)
		if k := (n - i) &^ 7; e.off%8 == 0 && k > 0 {
			if err := a.m.span8(e, k, does); err != nil {
				return err
			}
			i += k
			continue
		}
		e.size = 1
		if does == looks && e.off%4 == 0 && n-i >= 4 {
			e.size, e.sem, e.scope = 4, strong, scopeSystem
		}
		if err := f(e, i); err != nil {
			return err
		}
		i += uint64(e.size)
	}
	return nil
}

// span8 accesses n bytes, whole words, weakly or as Look says.
func (m *Machine) span8(e *event, n uint64, does int) error {
	r, low, high := e.region, e.off, e.off+n
	t := e.t
	write := does == writes
	for i := range r.spans {
		x := &r.spans[i]
		if x.low < high && low < x.high && (write || x.write) && !t.known(x.slot, x.clock, false) {
			e.off = max(x.low, low)
			return m.race(e, &x.site)
		}
	}
	if r.words != nil {
		e.size = 8
		for i := low / 8; i < high/8; i++ {
			w := r.words[i]
			if w == nil {
				continue
			}
			e.off = i * 8
			if does == looks && w.size == 4 {
				if err := m.look32(e, w); err != nil {
					return err
				}
				continue
			}
			if err := m.ordered(e, w.locs, write); err != nil {
				return err
			}
			if write {
				r.words[i] = nil // what comes behind this is behind all that was there
				continue
			}
			for k := range w.locs {
				l := &w.locs[k]
				m.record(e, l, &l.messages[len(l.messages)-1], 0, nil)
			}
		}
	}
	var kept []span
	for _, x := range r.spans {
		// Who looks does not stand for who has read weakly.
		if x.high <= low || high <= x.low || !write && (x.write || does == looks && !x.looked || !t.known(x.slot, x.clock, false)) {
			kept = append(kept, x)
			continue
		}
		for _, part := range [2][2]uint64{{x.low, low}, {high, x.high}} {
			if part[0] < part[1] {
				y := x
				y.low, y.high = part[0], part[1]
				kept = append(kept, y)
			}
		}
	}
	r.spans = append(kept, span{low, high, write, does == looks, t.slot, t.clock, m.site})
	if write {
		m.written++
	}
	return nil
}

// look32 is ld.relaxed.sys of both halves of a word. The last message stands for the one that is read.
func (m *Machine) look32(e *event, w *word) error {
	x := *e
	x.size, x.sem, x.scope = 4, strong, scopeSystem
	for i := range w.locs {
		l := &w.locs[i]
		x.off = e.off + 4*uint64(i)
		if err := m.conflicts(&x, l, false); err != nil {
			return err
		}
		m.record(&x, l, &l.messages[len(l.messages)-1], 0, nil)
	}
	return nil
}

// spread is what a new location has of the spans that it is in.
func (l *location) spread(r *region, off uint64, size uint8) {
	for i := range r.spans {
		x := &r.spans[i]
		switch {
		case off < x.low || off >= x.high:
		case x.write:
			y := &l.messages[0]
			y.slot, y.clock, y.site = x.slot, x.clock, x.site
			l.weakStores = true
		default:
			y := read{slot: x.slot, first: x.clock, last: x.clock, time: between, site: x.site}
			if x.looked && size == 4 {
				y.sem, y.scope = strong, scopeSystem
			}
			l.weakLoads = l.weakLoads || !forAll(y.sem, y.scope)
			l.reads = append(l.reads, y)
		}
	}
}

// After says whether everything that p is behind is something that o is behind, too.
func (o Order) After(p Order) bool { return o.age != p.age || o.covers(p.seen, p.ended) }
