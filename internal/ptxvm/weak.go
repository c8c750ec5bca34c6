package ptxvm

import (
	"fmt"
	"slices"
	"unsafe"
)

// vector says what is ordered before something: of each slot, a place for one thread after the other, the events up to a clock.
// A vector that others have does not change.
type vector struct {
	events []uint32
	alias  []uint32 // those with a fence.proxy.alias behind them
}

func at(v []uint32, slot int32) uint32 {
	if int(slot) < len(v) {
		return v[slot]
	}
	return 0
}

func covers(a, b []uint32) bool {
	if len(b) > len(a) {
		return false
	}
	for i, x := range b {
		if x > a[i] {
			return false
		}
	}
	return true
}

func raise(a *[]uint32, b []uint32) {
	if n := len(b) - len(*a); n > 0 {
		*a = append(*a, make([]uint32, n)...)
	}
	for i, x := range b {
		if x > (*a)[i] {
			(*a)[i] = x
		}
	}
}

func set(a *[]uint32, slot int32, clock uint32) {
	if n := int(slot) + 1 - len(*a); n > 0 {
		*a = append(*a, make([]uint32, n)...)
	}
	(*a)[slot] = max((*a)[slot], clock)
}

func (v *vector) clone() *vector {
	if v == nil {
		return &vector{}
	}
	return &vector{slices.Clone(v.events), slices.Clone(v.alias)}
}

// merge is both, one of them if it covers the other.
func merge(a, b *vector) *vector {
	switch {
	case b == nil || a == b:
		return a
	case a == nil || covers(b.events, a.events) && covers(b.alias, a.alias):
		return b
	case covers(a.events, b.events) && covers(a.alias, b.alias):
		return a
	}
	n := a.clone()
	n.add(b)
	return n
}

func (v *vector) add(b *vector) {
	if b != nil {
		raise(&v.events, b.events)
		raise(&v.alias, b.alias)
	}
}

// view is what a thread knows.
type view struct {
	vector *vector
	clock  uint32 // of its own events; it goes up when others may learn of them
	slot   int32
	began  *vector         // the launches of its stream that had ended when its own began: whatever alias they went by
	rel    [scopes]*vector // what its strong stores pass on, since a fence of at least that scope
	pend   [scopes]*vector // what its loads have seen of threads so near, for a fence to acquire
	passes *passes         // what its last strong store has passed on
}

// snapshot is what a thread knows and has done, for others; what it does next is not in it.
func (t *thread) snapshot() *vector {
	v := t.vector.clone()
	set(&v.events, t.slot, t.clock)
	t.clock++
	return v
}

// known says whether an event is ordered before what the thread does now. other: it went by another alias of the memory.
func (t *thread) known(slot int32, clock uint32, other bool) bool {
	switch {
	case slot < 0:
		return true
	case !other:
		return slot == t.slot || t.vector != nil && at(t.vector.events, slot) >= clock
	}
	return t.began != nil && at(t.began.events, slot) >= clock || t.vector != nil && at(t.vector.alias, slot) >= clock
}

// enter begins a thread.
func (m *Machine) enter(t *thread, slot int) {
	base := t.block.launch.base
	t.view = view{vector: base, clock: m.slots[slot] + 1, slot: int32(slot), began: t.block.launch.stream.ended, rel: [scopes]*vector{base, base, base, base}}
}

// leave ends a thread, as if with a fence for everybody.
func (m *Machine) leave(t *thread) {
	l := t.block.launch
	if l.final == nil {
		l.final = l.base.clone()
	}
	for _, v := range append([]*vector{t.vector}, t.pend[:]...) {
		if v != l.base {
			l.final.add(v)
		}
	}
	set(&l.final.events, t.slot, t.clock)
	m.slots[t.slot] = t.clock
	if b := t.block; b.shares() {
		for _, v := range append([]*vector{t.vector}, t.pend[:]...) {
			b.final = merge(b.final, v)
		}
	}
	if l.own == nil {
		l.own = l.stream.ended.clone()
	}
	set(&l.own.events, t.slot, t.clock)
}

// passed is what griddepcontrol.wait gives: the launches before this one have ended.
func (m *Machine) passed(t *thread) {
	s := t.block.launch.stream
	t.vector, t.began = merge(t.vector, s.settled), s.ended
	for i := range t.rel {
		t.rel[i] = merge(t.rel[i], s.settled)
	}
}

// gather is what a thread brings to a barrier.
func (m *Machine) gather(t *thread, r *barrier) {
	if r.vectors == nil {
		r.vectors = t.vector.clone()
		r.lastSeen = t.vector
	} else if t.vector != r.lastSeen {
		r.vectors.add(t.vector)
		r.lastSeen = t.vector
	}
	set(&r.vectors.events, t.slot, t.clock)
}

// fences is what fence.sc has put in order so far, by scope and, within it, by device, cluster or block.
type fences struct {
	system *vector
	gpu    map[int]*vector
	near   map[*cluster]*vector
	cta    map[*block]*vector
}

// order is a fence.
func (m *Machine) order(t *thread, a *access) {
	if a.sem&alias != 0 {
		v := t.vector.clone()
		raise(&v.alias, v.events)
		set(&v.alias, t.slot, t.clock)
		t.clock++
		t.vector = v
		return
	}
	if a.sem&acquire != 0 {
		for l := range a.scope + 1 {
			t.vector = merge(t.vector, t.pend[l])
			t.pend[l] = nil
		}
	}
	if a.sem&sequential != 0 {
		f := &m.fence
		if f.gpu == nil {
			f.gpu, f.near, f.cta = map[int]*vector{}, map[*cluster]*vector{}, map[*block]*vector{}
		}
		device := t.block.launch.stream.device
		c := t.block.cluster // nil: the block is all of it, and nothing is noted here
		near := [scopes]*vector{f.cta[t.block], f.near[c], f.gpu[device], f.system}
		for _, v := range near[:a.scope+1] {
			t.vector = merge(t.vector, v)
		}
		v := t.snapshot()
		f.cta[t.block] = merge(f.cta[t.block], v)
		if a.scope >= scopeCluster && c != nil {
			f.near[c] = merge(f.near[c], v)
		}
		if a.scope >= scopeGPU {
			f.gpu[device] = merge(f.gpu[device], v)
		}
		if a.scope >= scopeSystem {
			f.system = merge(f.system, v)
		}
	}
	if a.sem&release != 0 {
		v := t.snapshot()
		for l := range a.scope + 1 {
			t.rel[l] = merge(t.rel[l], v)
		}
	}
}

// site is who does an access, and where.
type site struct {
	block  *block
	thread int32
	pc     int32
	f      *Function
}

func (s *site) access() Access {
	return Access{Place: s.f.place(s.pc), Thread: name(s.block.launch, s.block.index, s.thread)}
}

// word is what is known of 8 bytes: locations of one size.
type word struct {
	size uint8
	locs []location
}

// location is bytes that are accessed together.
type location struct {
	messages []message // in coherence order
	reads    []read
	limit    int32 // of messages, before it is worth looking which nobody can read any more
	// Whether a message, and a load, is there that is not strong for all: else none is in a race with an access that is.
	weakStores, weakLoads bool
}

// forAll says whether accesses like this are strong between all threads.
func forAll(sem, scope uint8) bool { return sem&strong != 0 && scope == scopeSystem }

// message is a store.
type message struct {
	value   uint64
	time    uint64 // in coherence order
	slot    int32  // -1: known to all
	clock   uint32
	sem     uint8
	scope   uint8
	alias   bool // by a multicast address
	claimed bool // the next one is an atomic that has read this one: nothing comes between
	site    site
	passes  *passes // nil if it is not strong
}

// passes is what a message tells who reads it. Messages share it, so it does not change.
type passes struct {
	own [scopes]*vector // what this thread's releases at this location pass on
	rel [scopes]*vector // what it passes on to threads so near
}

// read is a thread's loads of one message.
type read struct {
	slot        int32
	first, last uint32 // clocks
	time        uint64 // of the message
	sem, scope  uint8  // the weakest
	alias       bool
	near        uint8 // to the thread of the message
	pended      bool  // what was passed is there for the thread's fences
	known       bool  // it is in what the thread knows
	passed      *vector
	site        site
}

const between = 1 << 32 // times of messages that follow each other

func level(a, b *block) uint8 {
	switch {
	case a == b:
		return scopeCTA
	case a.cluster != nil && a.cluster == b.cluster:
		return scopeCluster
	case a.launch.stream.device == b.launch.stream.device:
		return scopeGPU
	}
	return scopeSystem
}

// both says whether two accesses of the same bytes are morally strong.
func both(sem, scope uint8, a *block, sem2, scope2 uint8, b *block) bool {
	return sem&sem2&strong != 0 && level(a, b) <= min(scope, scope2)
}

// event is an access that a thread does now.
type event struct {
	t      *thread
	region *region
	off    uint64
	base   uint64 // what to add to off for the address that was accessed
	size   uint8
	sem    uint8
	scope  uint8
	alias  bool
}

func (m *Machine) race(e *event, s *site) error {
	r := &Race{Address: e.base + e.off, First: s.access(), Second: m.site.access()}
	if b := e.region.block; b != nil {
		r.Address, r.Shared, r.Block = e.off, true, b.index
	}
	return r
}

// slab gives pieces of large allocations.
type slab[T any] struct{ rest []T }

func (s *slab[T]) take(n int) []T {
	if len(s.rest) < n {
		s.rest = make([]T, max(n, 512))
	}
	p := s.rest[:n:n]
	s.rest = s.rest[n:]
	return p
}

// insert is slices.Insert, with room from the slab.
func (s *slab[T]) insert(v []T, i int, x T) []T {
	if n := len(v); n == cap(v) {
		v = append(s.take(2 * n)[:0], v...)
	}
	v = append(v, x)
	if i < len(v)-1 {
		copy(v[i+1:], v[i:])
		v[i] = x
	}
	return v
}

func (m *Machine) newWord(r *region, index uint64, size uint8) *word {
	w := &m.wordsOf.take(1)[0]
	*w = word{size: size, locs: m.locations.take(int(8 / size))}
	for i := range w.locs {
		w.locs[i] = m.settled(r, index*8+uint64(i)*uint64(size), size)
		w.locs[i].spread(r, index*8, size)
	}
	return w
}

// settled is a location whose value all know.
func (m *Machine) settled(r *region, off uint64, size uint8) location {
	var v uint64
	if off+uint64(size) <= r.size {
		v = load(unsafe.Add(r.data, off), size)
	}
	l := location{messages: m.messages.take(2)[:1]}
	l.messages[0] = message{value: v, time: between, slot: -1}
	return l
}

func (w *word) fresh() bool {
	for i := range w.locs {
		if l := &w.locs[i]; len(l.messages) > 1 || len(l.reads) > 0 || l.messages[0].slot >= 0 {
			return false
		}
	}
	return true
}

// word finds the 8 bytes of an event.
func (m *Machine) word(e *event) *word {
	r := e.region
	if r.words == nil {
		r.words = make([]*word, (r.size+7)/8)
	}
	i := e.off / 8
	w := r.words[i]
	if w == nil || w.size != e.size && w.fresh() {
		w = m.newWord(r, i, e.size)
		r.words[i] = w
	}
	return w
}

// parts are the locations that an event of another size overlaps.
func (w *word) parts(e *event) []location {
	low := e.off % 8 / uint64(w.size)
	high := (e.off%8 + uint64(e.size) - 1) / uint64(w.size)
	return w.locs[low : high+1]
}

// ordered fails if an event is not behind all stores, and, with reads, all loads.
func (m *Machine) ordered(e *event, locs []location, reads bool) error {
	for i := range locs {
		l := &locs[i]
		for j := range l.messages {
			if x := &l.messages[j]; !e.t.known(x.slot, x.clock, x.alias != e.alias) && !l.observed(e, x.time) {
				return m.race(e, &x.site)
			}
		}
		for j := range l.reads {
			if x := &l.reads[j]; reads && !e.t.known(x.slot, x.last, x.alias != e.alias) {
				return m.race(e, &x.site)
			}
		}
	}
	return nil
}

// observed says whether a load that is ordered before the event has read the message of this time.
func (l *location) observed(e *event, time uint64) bool {
	for i := range l.reads {
		if x := &l.reads[i]; x.time == time && e.t.known(x.slot, x.first, x.alias != e.alias) {
			return true
		}
	}
	return false
}

// floor is the first message that an event may read, and behind which it may write.
func (l *location) floor(e *event) int {
	i := len(l.messages) - 1
	for ; i > 0; i-- {
		if x := &l.messages[i]; e.t.known(x.slot, x.clock, x.alias != e.alias) {
			break
		}
	}
	if i == len(l.messages)-1 {
		return i // loads have read no later one
	}
	for k := range l.reads {
		if x := &l.reads[k]; x.time > l.messages[i].time && e.t.known(x.slot, x.first, x.alias != e.alias) {
			for i+1 < len(l.messages) && l.messages[i+1].time <= x.time {
				i++
			}
		}
	}
	return i
}

// conflicts fails if the event races with a store, or, being one, with a load.
func (m *Machine) conflicts(e *event, l *location, store bool) error {
	all := forAll(e.sem, e.scope)
	stores := l.messages
	if all && !l.weakStores {
		stores = nil
	}
	for i := range stores {
		x := &stores[i]
		if e.t.known(x.slot, x.clock, x.alias != e.alias) || both(x.sem, x.scope, x.site.block, e.sem, e.scope, e.t.block) || l.observed(e, x.time) {
			continue
		}
		return m.race(e, &x.site)
	}
	if !store || all && !l.weakLoads {
		return nil
	}
	for i := range l.reads {
		x := &l.reads[i]
		if e.t.known(x.slot, x.last, x.alias != e.alias) || both(x.sem, x.scope, x.site.block, e.sem, e.scope, e.t.block) {
			continue
		}
		return m.race(e, &x.site)
	}
	return nil
}

// record keeps that the event has read a message, and gives what is kept.
func (m *Machine) record(e *event, l *location, x *message, near uint8, passed *vector) *read {
	t := e.t
	l.weakLoads = l.weakLoads || !forAll(e.sem, e.scope)
	for i := range l.reads {
		if r := &l.reads[i]; r.slot == t.slot && r.time == x.time && r.alias == e.alias {
			r.last, r.sem, r.scope, r.site = t.clock, r.sem&e.sem, min(r.scope, e.scope), m.site
			return r
		}
	}
	m.news = true
	r := read{
		slot: t.slot, first: t.clock, last: t.clock, time: x.time, sem: e.sem, scope: e.scope, alias: e.alias, near: near, passed: passed, site: m.site,
	}
	if l.reads == nil {
		l.reads = m.reads.take(2)[:0]
	}
	l.reads = m.reads.insert(l.reads, len(l.reads), r)
	return &l.reads[len(l.reads)-1]
}

// see is what follows from reading a message.
func (m *Machine) see(e *event, l *location, x *message) {
	t := e.t
	var near uint8
	var passed *vector
	if x.slot >= 0 && both(x.sem, x.scope, x.site.block, e.sem, e.scope, t.block) {
		near = level(x.site.block, t.block)
		passed = x.passes.rel[near]
	}
	if r := m.record(e, l, x, near, passed); passed != nil && !(r.pended && r.passed == passed) {
		t.pend[near] = merge(t.pend[near], passed)
		r.pended = r.passed == passed
	}
	if e.sem&acquire == 0 {
		return
	}
	for i := range l.reads { // this one, and those of the location before
		if r := &l.reads[i]; r.slot == t.slot && r.passed != nil && !r.known && e.scope >= r.near {
			t.vector = merge(t.vector, r.passed)
			r.known = true
		}
	}
}

func (m *Machine) loadElement(e *event) (uint64, error) {
	w := m.word(e)
	if w.size != e.size {
		parts := w.parts(e)
		if err := m.ordered(e, parts, false); err != nil {
			return 0, err
		}
		partial := *e
		partial.sem = 0
		for i := range parts {
			l := &parts[i]
			m.record(&partial, l, &l.messages[len(l.messages)-1], 0, nil)
		}
		return load(unsafe.Add(e.region.data, e.off), e.size), nil
	}
	l := &w.locs[e.off%8/uint64(e.size)]
	if err := m.conflicts(e, l, false); err != nil {
		return 0, err
	}
	i := l.floor(e)
	if n := len(l.messages) - i; n > 1 {
		i += m.choose.Choose(n)
	}
	x := &l.messages[i]
	v := x.value
	m.see(e, l, x)
	return v, nil
}

// place is the location that a store goes to; nil if it must go there in parts, smaller than it.
func (m *Machine) place(e *event) (*location, error) {
	w := m.word(e)
	if w.size == e.size {
		return &w.locs[e.off%8/uint64(e.size)], nil
	}
	if err := m.ordered(e, w.parts(e), true); err != nil {
		return nil, err
	}
	n := &word{size: e.size, locs: make([]location, 8/e.size)}
	if e.size < w.size {
		for i := range n.locs {
			old := &w.locs[i*int(e.size)/int(w.size)]
			shift := i * int(e.size) % int(w.size) * 8
			l := location{messages: slices.Clone(old.messages), reads: slices.Clone(old.reads), weakStores: true, weakLoads: true}
			for j := range l.messages {
				x := &l.messages[j]
				x.value = x.value >> shift & mask(int(e.size))
				x.sem, x.claimed = 0, false // it was of other bytes
			}
			for j := range l.reads {
				l.reads[j].sem = 0
			}
			n.locs[i] = l
		}
	} else {
		whole := *e
		whole.off, whole.size = e.off/8*8, 8
		if m.ordered(&whole, w.locs, true) != nil {
			return nil, nil
		}
		low := int(e.off % 8 / uint64(w.size))
		per := int(e.size / w.size)
		for i := range w.locs { // what is beside it stays as narrow as it is while somebody may be in a race there
			if (i < low || i >= low+per) && !m.overWith(&w.locs[i]) {
				return nil, nil
			}
		}
		for i := range n.locs {
			n.locs[i] = m.settled(e.region, e.off/8*8+uint64(i)*uint64(e.size), e.size)
		}
		for i := range per {
			m.inherit(&n.locs[low/per], &w.locs[low+i])
		}
	}
	e.region.words[e.off/8] = n
	return &n.locs[e.off%8/uint64(e.size)], nil
}

// overWith says whether everybody is behind all that was done at a location.
func (m *Machine) overWith(l *location) bool {
	for i := range l.messages {
		if x := &l.messages[i]; !m.everyone(x.slot, x.clock, x.alias) {
			return false
		}
	}
	for i := range l.reads {
		if r := &l.reads[i]; !m.everyone(r.slot, r.last, r.alias) {
			return false
		}
	}
	return true
}

// inherit adds to a location what is known of a part of it: all that was stored there is in its value, and races as before with those who are not behind it.
func (m *Machine) inherit(l, part *location) {
	first := l.messages[0]
	for i := range part.messages {
		x := part.messages[i]
		if x.slot < 0 {
			continue
		}
		x.value, x.time = first.value, l.messages[len(l.messages)-1].time+between
		x.sem, x.claimed, x.passes = 0, false, nil
		l.messages = m.messages.insert(l.messages, len(l.messages), x)
		l.weakStores = true
	}
	for i := range part.reads {
		r := part.reads[i]
		r.time, r.sem, r.passed = first.time, 0, nil
		l.reads = append(l.reads, r)
		l.weakLoads = true
	}
}

func (m *Machine) storeElement(e *event, v uint64) error {
	l, err := m.place(e)
	if err != nil {
		return err
	}
	if l == nil {
		half := *e
		half.size /= 2
		if err := m.storeElement(&half, v&mask(int(half.size))); err != nil {
			return err
		}
		half.off += uint64(half.size)
		return m.storeElement(&half, v>>(8*half.size))
	}
	if err := m.conflicts(e, l, true); err != nil {
		return err
	}
	i := l.floor(e)
	n := 0 // places that it may take
	for p := i + 1; p <= len(l.messages); p++ {
		if l.room(p) {
			n++
		}
	}
	k := 0
	if n > 1 {
		k = m.choose.Choose(n)
	}
	for p := len(l.messages); ; p-- { // the last first
		if !l.room(p) {
			continue
		}
		if k == 0 {
			m.write(e, l, p, v, nil)
			return nil
		}
		k--
	}
}

// room says whether a message may come before the one at p.
func (l *location) room(p int) bool {
	return p == len(l.messages) || !l.messages[p-1].claimed && l.messages[p].time-l.messages[p-1].time > 1
}

// write puts a message at p. from is the one that an atomic has read.
func (m *Machine) write(e *event, l *location, p int, v uint64, from *message) {
	m.written++
	t := e.t
	x := message{value: v, slot: t.slot, clock: t.clock, sem: e.sem, scope: e.scope, alias: e.alias, site: m.site}
	if e.sem&strong != 0 {
		var tells passes
		for i := p - 1; i >= 0; i-- {
			if y := &l.messages[i]; y.slot == t.slot {
				if y.passes != nil {
					tells.own = y.passes.own
				}
				break
			}
		}
		if e.sem&release != 0 {
			s := t.snapshot()
			for k := range e.scope + 1 {
				tells.own[k] = merge(tells.own[k], s)
			}
		}
		for k := range tells.rel {
			tells.rel[k] = merge(t.rel[k], tells.own[k])
			if from != nil && from.passes != nil {
				tells.rel[k] = merge(tells.rel[k], from.passes.rel[max(uint8(k), level(from.site.block, t.block))])
			}
		}
		if t.passes == nil || *t.passes != tells {
			t.passes = new(tells)
		}
		x.passes = t.passes
	}
	l.weakStores = l.weakStores || !forAll(e.sem, e.scope)
	if p == len(l.messages) {
		x.time = l.messages[p-1].time + between
		store(unsafe.Add(e.region.data, e.off), e.size, v)
	} else {
		x.time = l.messages[p-1].time + (l.messages[p].time-l.messages[p-1].time)/2
	}
	l.messages = m.messages.insert(l.messages, p, x)
	if len(l.messages) > max(int(l.limit), 12) {
		m.prune(l)
		l.limit = int32(2 * len(l.messages))
	}
}

// everyone says whether an event is ordered before all that is to come.
func (m *Machine) everyone(slot int32, clock uint32, alias bool) bool {
	if slot < 0 {
		return true
	}
	if m.config.Keep {
		f := m.floor
		if f.age != m.age || f.seen == nil || f.ended == nil || at(f.seen.events, slot) < clock || at(f.ended.events, slot) < clock {
			return false
		}
		for _, a := range m.agents {
			if t := a.t; !t.known(slot, clock, false) || !t.known(slot, clock, true) {
				return false
			}
		}
	}
	for _, s := range m.streams {
		if !m.config.Keep && len(s.active) == 0 && (s.settled == nil || at(s.settled.events, slot) < clock) {
			return false
		}
		for _, a := range s.active {
			for _, b := range a.blocks() {
				for i := range b.threads {
					if t := &b.threads[i]; t.status != ended && !(t.known(slot, clock, false) && t.known(slot, clock, true)) {
						return false
					}
				}
			}
		}
	}
	return true
}

// prune drops messages that nobody can read, and loads of them that everybody is behind.
func (m *Machine) prune(l *location) {
	i := len(l.messages) - 1
	for ; i > 0; i-- {
		if x := &l.messages[i]; m.everyone(x.slot, x.clock, x.alias) {
			break
		}
	}
	for k := range i { // what is dropped must not be in a race with what is to come
		if x := &l.messages[k]; !m.everyone(x.slot, x.clock, x.alias) {
			return
		}
	}
	l.messages = slices.Delete(l.messages, 0, i)
	first := l.messages[0].time
	l.reads = slices.DeleteFunc(l.reads, func(r read) bool { return r.time < first && m.everyone(r.slot, r.last, r.alias) })
	l.weakStores = slices.ContainsFunc(l.messages, func(x message) bool { return x.slot >= 0 && !forAll(x.sem, x.scope) })
	l.weakLoads = slices.ContainsFunc(l.reads, func(r read) bool { return !forAll(r.sem, r.scope) })
}

func (m *Machine) modifyElement(e *event, a *access, b, c uint64) (uint64, error) {
	l, err := m.place(e)
	if err == nil && l == nil {
		err = fmt.Errorf("an atomic on bytes that were accessed in parts: %w", ErrUnsupported)
	}
	if err == nil {
		err = m.conflicts(e, l, true)
	}
	if err != nil {
		return 0, err
	}
	low, n := l.floor(e), 0
	for i := low; i < len(l.messages); i++ {
		if l.room(i + 1) {
			n++
		}
	}
	k := 0
	if n > 1 {
		k = m.choose.Choose(n)
	}
	for i := len(l.messages) - 1; ; i-- {
		if !l.room(i + 1) {
			continue
		}
		if k > 0 {
			k--
			continue
		}
		from := l.messages[i]
		m.see(e, l, &from)
		v := modify(a, from.value, b, c)
		if a.rmw == rmwCas && from.value != b {
			return from.value, nil // a load
		}
		l.messages[i].claimed = true
		m.write(e, l, i+1, v, &from)
		return from.value, nil
	}
}

// access is a memory instruction with weak memory.
func (m *Machine) access(t *thread, f *Function, in *instr, r registers) error {
	a := &f.access[in.tgt]
	address := r[in.a] + uint64(in.imm)
	n := uint64(a.size) * uint64(a.n)
	regs := [4]uint16{in.d, in.b, in.c, in.e}
	if in.op == opLdReduce || in.op == opStMulticast || in.op == opRedMulticast {
		return m.accessCopies(t, a, in, r, address, n)
	}
	if _, err := m.span(t, a, address); err != nil {
		return err
	}
	region, off := t.block.shared, address
	if !a.shared {
		region = m.memory.find(address)
		region, off = m.origin(region, off-region.base)
	} else if a.cluster {
		region, off, _ = t.remote(address)
	}
	e := event{t: t, region: region, off: off, base: address - off, size: a.size, sem: a.sem, scope: a.scope}
	switch {
	case region.private:
		old, p := [4]uint64{}, unsafe.Add(region.data, off)
		for i := range int(a.n) {
			switch in.op {
			case opAtom:
				old[i] = load(p, a.size)
				store(p, a.size, modify(a, old[i], r[in.b], r[in.c]))
				r[in.d] = old[i]
			case opStAny, opSt8, opSt16, opSt32, opSt64, opSt2x32, opSt2x64, opSt4x32, opStStrong32, opStStrong64, opStStrong4x32:
				store(unsafe.Add(p, i*int(a.size)), a.size, r[regs[i]])
			default:
				r[regs[i]] = load(unsafe.Add(p, i*int(a.size)), a.size)
			}
		}
	case in.op == opAtom:
		v, err := m.modifyElement(&e, a, r[in.b], r[in.c])
		if err != nil {
			return err
		}
		r[in.d] = v
	case in.op >= opSt8 && in.op <= opStAny:
		for i := range int(a.n) {
			if err := m.storeElement(&e, r[regs[i]]&mask(int(a.size))); err != nil {
				return err
			}
			e.off += uint64(a.size)
		}
	default:
		var x [4]uint64
		for i := range int(a.n) {
			var err error
			if x[i], err = m.loadElement(&e); err != nil {
				return err
			}
			e.off += uint64(a.size)
		}
		for i := range int(a.n) {
			r[regs[i]] = x[i]
		}
	}
	return nil
}

// accessCopies is access for a multicast address. The order in which copies are added is nobody's business but the switch's.
func (m *Machine) accessCopies(t *thread, a *access, in *instr, r registers, address, n uint64) error {
	multicast, err := m.multicast(address, n)
	if err != nil {
		return err
	}
	regs := [4]uint16{in.d, in.b, in.c, in.e}
	e := event{t: t, size: a.size, sem: a.sem, scope: a.scope, alias: true}
	first := m.choose.Choose(len(multicast.copies))
	for i := range int(a.n) {
		var values []uint64
		for k := range multicast.copies {
			c := multicast.copies[(first+k)%len(multicast.copies)] + address - multicast.base
			e.region = m.memory.find(c)
			if e.region == nil {
				return m.wrong(c, n)
			}
			e.region, e.off = m.origin(e.region, c-e.region.base+uint64(i)*uint64(a.size))
			e.base = address + uint64(i)*uint64(a.size) - e.off
			var v uint64
			switch in.op {
			case opLdReduce:
				v, err = m.loadElement(&e)
				values = append(values, v)
			case opStMulticast:
				err = m.storeElement(&e, r[regs[i]]&mask(int(a.size)))
			default:
				add := *a
				add.rmw = rmwAdd
				_, err = m.modifyElement(&e, &add, r[regs[i]], 0)
			}
			if err != nil {
				return err
			}
		}
		if in.op == opLdReduce {
			r[regs[i]] = sum(a, values)
		}
	}
	return nil
}

// private says whether an access is of memory that nobody else looks at.
func (m *Machine) private(r registers, in *instr) bool {
	if !m.hidden || in.op >= opFence {
		return false
	}
	region := m.memory.find(r[in.a] + uint64(in.imm))
	return region != nil && region.private
}

// settle forgets all order: everything has ended, and what comes is behind it.
func (m *Machine) settle() {
	if !m.weak {
		return
	}
	for _, r := range m.memory.regions {
		r.words = nil
	}
	for _, s := range m.streams {
		s.settled, s.ended = nil, nil
	}
	m.fence = fences{}
	m.age = ages.Add(1)
	m.host, m.floor = Order{}, Order{}
}
