package ptxvm

import (
	"fmt"
	"math"
	"math/rand/v2"
	"unsafe"
)

// Chooser decides what is not determined: which thread goes on, which message a load reads.
type Chooser interface {
	// Choose gives a number from 0 up to, and without, n, which is at least 1.
	Choose(n int) int
}

// Random chooses by chance, the same for the same seed.
func Random(seed uint64) Chooser { return &random{rand.NewPCG(seed, 0x5ee1)} }

type random struct{ source *rand.PCG }

func (r *random) Choose(n int) int {
	high, _ := mul64(r.source.Uint64(), uint64(n))
	return int(high)
}

// Config is how a machine runs. The zero value is the fast mode, with seed 0.
type Config struct {
	// Seed is that of Random, if Chooser is nil.
	Seed    uint64
	Chooser Chooser
	// Weak makes memory as weak as PTX's memory model has it.
	Weak bool
	// Turn is how long a thread goes on before the chooser picks another: with Weak in accesses and the like, else in instructions, and
	// then only to the next branch. 0 means 8 and 2000. With weak memory each turn's length is chosen, up to this.
	Turn int
	// MaxSteps ends a run with ErrSteps after so many instructions of all threads together; 0 means never.
	MaxSteps uint64
	// Clock gives %globaltimer, in nanoseconds. Nil means the machine's own time: StepTime for each instruction that it has executed, 0 meaning 1, and
	// what [Stream.Pause] has let pass.
	Clock    func() uint64
	StepTime uint64
	// Schedule decides which thread goes on; nil means chance.
	Schedule Schedule
	// Hangs makes it an error, a [Hang], if no thread goes on any more but by its own time-out. It supposes that nobody but the machine stores to
	// the memory. Patience is after how many polls, one as the other, a thread counts as waiting: more than any that a kernel makes before it
	// does something else. 0 means 8192, twice what this module's kernels poll before they have looked at everything.
	Hangs    bool
	Patience int
	// Name says what is at an address, for the text of a Hang; nil: nobody knows.
	Name func(address uint64) string
	// Coverage, if not nil, is told which instructions are executed.
	Coverage *Coverage
	// Trace, if not nil, is called before each instruction that others may see the effect of, or that may see theirs. It slows the machine down.
	Trace func(Thread, Place)
	// Keep keeps with weak memory what is ordered before what when all streams are idle: only what [Machine.Tell] or [Stream.Follow] says is behind that, until
	// [Machine.Settle] finds that the host is behind everything.
	Keep bool
}

// Launch is a grid of blocks that run a kernel.
type Launch struct {
	Function *Function
	Grid     [3]uint32 // blocks; 0 is 1
	Block    [3]uint32 // threads; 0 is 1
	Params   [][]byte  // one for each of Function.Params, of its size. They are copied
	Overlap  bool      // programmatic stream serialization: it may begin before the launch before it ends
	Behind   Order     // with weak memory: what it is behind besides the stream
}

// Machine runs launches on streams. It is not safe for concurrent use.
type Machine struct {
	memory *Memory
	config Config
	choose Chooser
	weak   bool
	turn   int

	streams []*Stream
	ready   []*thread // that can go on, the eager ones first
	eager   int       // of ready: those whose last turn was not in vain. All, unless that is known
	news    bool      // a load has seen something new in this turn
	before  uint64    // written, when this turn began
	active  int       // launches that have begun and not ended
	steps   uint64
	written uint64 // stores that were executed
	err     error
	cache   [16]cached
	cast    *region // the multicast address that was found last

	even     bool            // those that poll have as many turns as others
	sorts    bool            // the eager threads are known
	watch    bool            // what threads poll is known
	slow     bool            // not only the instructions themselves are executed
	patience int             // of Config
	stores   uint64          // while watch
	stored   map[uint64]site // while watch: who stored last, by address/8*8
	woken    bool            // for the schedule: a thread may go on that could not
	skipped  uint64          // time that has passed without instructions
	alarm    uint64          // when the first stream is past its pause; 0: none pauses
	floors   map[int]*floor  // of devices that have limits

	site   site     // of the access that is done
	hidden bool     // there is private memory
	slots  []uint32 // with weak memory: the clock of each slot when its last thread ended
	fence  fences
	age    uint64          // the time since order was last forgotten
	spaces map[int]*Memory // of devices, if they have their own
	host   Order
	floor  Order // of everything that has not begun
	agents []*Agent
	spare  []int // slots of agents that have ended

	wordsOf   slab[word]
	locations slab[location]
	messages  slab[message]
	reads     slab[read]
}

// cached is a region that was found for an address like this.
type cached struct {
	base, size uint64
	data       unsafe.Pointer
}

// New is a machine over an address space.
func New(memory *Memory, config Config) *Machine {
	m := &Machine{memory: memory, config: config, choose: config.Chooser, weak: config.Weak, turn: config.Turn, age: ages.Add(1)}
	if m.choose == nil {
		m.choose = Random(config.Seed)
	}
	if m.turn <= 0 {
		m.turn = 2000
		if m.weak {
			m.turn = 8
		}
	}
	if config.Schedule != nil && config.Schedule.exact() {
		m.turn, m.watch = 1, true
	}
	if m.patience = config.Patience; m.patience <= 0 {
		m.patience = defaultPatience
	}
	_, alike := config.Schedule.(even)
	m.sorts = m.weak && !alike && (config.Schedule == nil || !config.Schedule.exact())
	m.watch = m.watch || config.Hangs
	m.slow = m.weak || m.watch || config.Coverage != nil || config.Trace != nil
	return m
}

// Stream is work that a device does one after the other.
type Stream struct {
	machine  *Machine
	device   int
	number   int
	launches int
	items    int // that were ever enqueued
	queue    []item
	active   []*launch // that have begun and not ended, the oldest first
	settled  *vector   // what a launch that begins is behind
	ended    *vector   // of that, the stream's own launches
	banks    []bank
}

// item is a launch, or something to do between launches.
type item struct {
	number int // on its stream
	launch *launch
	do     func() bool
	wait   *Stream // until its items up to this number have ended
	until  int
	pause  uint64 // until this time; before it has begun, for so long
	begun  bool
}

type launch struct {
	stream  *Stream
	number  int
	item    int // on the stream
	f       *Function
	grid    [3]uint32
	dim     [3]uint32
	params  []byte
	overlap bool

	before    *launch  // the one before it, if that has not ended
	left      int      // blocks that have not ended
	outside   []*block // that have not begun, because there is no room; of a cluster the first
	triggered int      // blocks that let the launch after this one begin
	waiting   []*thread
	done      bool
	final     *vector // what its threads knew in the end
	own       *vector // with those before it: what they did
	base      *vector
	bank      *bank
	behind    Order
}

type block struct {
	launch    *launch
	index     [3]uint32
	threads   []thread
	live      int
	triggered bool
	on        int // processor, if the device has limits
	shared    *region
	began     bool // a thread has executed something
	rank      int  // in the cluster
	cluster   *cluster
	final     *vector // in a cluster, with weak memory: what its threads knew in the end
	barriers  [16]barrier
}

type barrier struct {
	count    int
	and      bool
	or       bool
	popc     uint64
	red      bool
	vectors  *vector // with weak memory: what all that came know
	waiting  []*thread
	lastSeen *vector
}

const (
	running uint8 = iota
	atBarrier
	atCluster
	atShuffle
	atGrid
	atRoom
	ended
)

type frame struct {
	f    *Function
	pc   int32
	base int32
	call int32
}

type thread struct {
	block  *block
	number int32
	status uint8
	f      *Function
	pc     int32
	base   int32
	words  []uint64
	frames []frame
	at     int32  // in ready
	came   uint32 // the phase of the cluster barrier that it has arrived at and not waited for, from 1 on; 0: none
	pace   int

	value uint64 // at a shuffle
	in    *instr // that it waits at
	vain  bool   // until it came there, its turn had brought nothing
	view
	watched

	priority uint64 // of a schedule
	slow     bool
}

// NewStream is a stream of a device. Devices matter to the scope .gpu alone.
func (m *Machine) NewStream(device int) *Stream {
	s := &Stream{machine: m, device: device, number: len(m.streams)}
	m.streams = append(m.streams, s)
	return s
}

// Launch puts a launch on the stream. It fails if the parameters are not the kernel's or the block is larger than the module allows.
func (s *Stream) Launch(l Launch) error {
	f := l.Function
	if f == nil || !f.Entry || !f.defined {
		return fmt.Errorf("launching no kernel: %w", ErrUnsupported)
	}
	n := &launch{stream: s, number: s.launches, f: f, overlap: l.Overlap, behind: l.Behind, grid: l.Grid, dim: l.Block, left: 1}
	for _, g := range []*[3]uint32{&n.grid, &n.dim} {
		for i := range g {
			g[i] = max(g[i], 1)
		}
	}
	threads := uint64(n.dim[0]) * uint64(n.dim[1]) * uint64(n.dim[2])
	blocks := uint64(n.grid[0]) * uint64(n.grid[1]) * uint64(n.grid[2])
	if most := uint64(f.MaxThreads); threads > 1024 || most != 0 && threads > most || blocks > 1<<20 {
		return fmt.Errorf("launching %s: %d blocks of %d threads, at most %d threads are allowed: %w", f.Name, blocks, threads, f.MaxThreads, ErrUnsupported)
	}
	n.left = int(blocks)
	switch {
	case n.grid[0]%uint32(f.Cluster) != 0:
		return fmt.Errorf("launching %s: %d blocks along x, which are no whole clusters of %d: %w", f.Name, n.grid[0], f.Cluster, ErrUnsupported)
	case f.Cluster > 1 && f.module.bytes > 1<<rankShift:
		return fmt.Errorf("launching %s in clusters: blocks with %d bytes of shared memory, of at most %d: %w", f.Name, f.module.bytes, 1<<rankShift, ErrUnsupported)
	}
	if len(l.Params) != len(f.Params) {
		return fmt.Errorf("launching %s: %d parameters, not %d: %w", f.Name, len(l.Params), len(f.Params), ErrUnsupported)
	}
	for i, p := range f.Params {
		if len(l.Params[i]) != p.Size {
			return fmt.Errorf("launching %s: parameter %d has %d bytes, not %d: %w", f.Name, i, len(l.Params[i]), p.Size, ErrUnsupported)
		}
		for len(n.params)%p.Align != 0 {
			n.params = append(n.params, 0)
		}
		n.params = append(n.params, l.Params[i]...)
	}
	if err := s.machine.fits(n); err != nil {
		return err
	}
	s.launches++
	n.item = s.items
	s.enqueue(item{launch: n})
	return nil
}

func (s *Stream) enqueue(i item) {
	i.number = s.items
	s.items++
	s.queue = append(s.queue, i)
}

// Wait makes what is put on the stream from now on wait for all that is on the other one now, as an event that is recorded there and waited for here:
// it is ordered behind it.
func (s *Stream) Wait(other *Stream) { s.enqueue(item{wait: other, until: other.items}) }

// past says whether the first items of the stream have ended.
func (s *Stream) past(until int) bool {
	if len(s.queue) > 0 && s.queue[0].number < until {
		return false
	}
	for _, l := range s.active {
		if l.item < until {
			return false
		}
	}
	return true
}

// Do puts a function on the stream, which is called when all before it has ended, and again, as the machine steps, until it says true. What is
// behind it waits. With weak memory the function is no event: what it does to the bytes of the memory must be ordered otherwise, or
// nobody else may look.
func (s *Stream) Do(do func() (done bool)) { s.enqueue(item{do: do}) }

// Pause makes what is put on the stream from now on wait for so many nanoseconds of the machine's time, from when all before it has ended. If no thread can go on
// meanwhile, the time passes at once. With Config.Clock it is that time, which passes by itself.
func (s *Stream) Pause(nanoseconds uint64) {
	if nanoseconds > 0 {
		s.enqueue(item{pause: nanoseconds})
	}
}

// Idle says whether everything on the stream has ended.
func (s *Stream) Idle() bool { return len(s.queue) == 0 && len(s.active) == 0 }

// Steps is how many instructions were executed, of all threads together.
func (m *Machine) Steps() uint64 { return m.steps }

// Run goes on until all streams are idle, or something fails: then with an [*Error], and the machine can do nothing more.
func (m *Machine) Run() error {
	for {
		idle, err := m.Step(1 << 20)
		if idle || err != nil {
			return err
		}
	}
}

// Step lets threads take up to so many turns, and says whether all streams are idle.
func (m *Machine) Step(turns int) (idle bool, err error) {
	if m.err != nil {
		return false, m.err
	}
	clear(m.cache[:]) // what is mapped may have changed
	m.cast = nil
	for n := 0; n < turns && m.err == nil; n++ {
		if n%256 == 0 {
			m.even = m.sorts && m.choose.Choose(4) == 0
		}
		if len(m.ready) == 0 || n%256 == 0 || m.alarm != 0 && m.now() >= m.alarm {
			moved := m.begin()
			if len(m.ready) == 0 {
				if moved || m.err != nil {
					continue
				}
				if m.pass() {
					continue
				}
				if m.stuck() {
					break
				}
				idle := m.idle()
				if idle && !m.config.Keep {
					m.settle()
				}
				return idle, nil
			}
		}
		if n%256 == 255 && m.config.Hangs && m.hanging() {
			m.deadlock()
			break
		}
		var t *thread
		if m.config.Schedule != nil {
			t = m.config.Schedule.pick(m)
		} else {
			t = m.chance()
		}
		m.news, m.before = false, m.written
		m.exec(t)
		if t.status == running && m.sorts {
			m.sort(t, m.fruitful())
		}
		if m.config.MaxSteps != 0 && m.steps > m.config.MaxSteps {
			m.fail(t, t.pc, fmt.Errorf("%d steps: %w", m.steps, ErrSteps))
		}
	}
	return false, m.err
}

func (m *Machine) idle() bool {
	for _, s := range m.streams {
		if !s.Idle() {
			return false
		}
	}
	return true
}

// wakeAt is when there is something to begin.
func (m *Machine) wakeAt(time uint64) {
	if m.alarm == 0 || time < m.alarm {
		m.alarm = time
	}
}

// pass lets the time pass that streams pause for, up to the first that ends, and says whether any did.
func (m *Machine) pass() bool {
	if m.config.Clock != nil || m.alarm <= m.now() {
		return false
	}
	m.skipped += m.alarm - m.now()
	return true
}

// stuck says whether only threads are left that wait for each other, which is an error.
func (m *Machine) stuck() bool {
	if m.active == 0 || m.outside() {
		return false
	}
	m.deadlock()
	return m.err != nil
}

// begin starts what can be started, and says whether anything was.
func (m *Machine) begin() (moved bool) {
	m.alarm = 0
	for _, s := range m.streams {
		for len(s.queue) > 0 {
			i := s.queue[0]
			if i.wait != nil {
				if len(s.active) > 0 || !i.wait.past(i.until) {
					break
				}
				if o := i.wait; m.weak {
					s.settled, s.ended = merge(s.settled, o.settled), merge(s.ended, o.ended)
				}
			} else if i.do != nil {
				if len(s.active) > 0 || !i.do() {
					break
				}
			} else if i.pause != 0 {
				if len(s.active) > 0 {
					break
				}
				if !i.begun {
					s.queue[0].begun, s.queue[0].pause = true, m.now()+i.pause
					m.wakeAt(m.now() + i.pause)
					break
				}
				if m.now() < i.pause {
					m.wakeAt(i.pause)
					break
				}
			} else {
				if n := len(s.active); n > 0 {
					last := s.active[n-1]
					if !i.launch.overlap || last.triggered < last.count() {
						break
					}
					i.launch.before = last
				}
				m.start(i.launch)
			}
			s.queue = s.queue[1:]
			moved = true
		}
	}
	return moved
}

func (l *launch) count() int { return int(l.grid[0]) * int(l.grid[1]) * int(l.grid[2]) }

func (l *launch) blocks() []*block { return l.bank.blocks }

// bank is the room of a launch: threads, their registers, and with weak memory their slots.
type bank struct {
	first   int // slot
	threads []thread
	words   []uint64
	blocks  []*block
	owner   *launch
}

func (m *Machine) start(l *launch) {
	s := l.stream
	s.active = append(s.active, l)
	m.active++
	per := int(l.dim[0] * l.dim[1] * l.dim[2])
	total := per * l.count()
	if m.weak {
		s.Follow(l.behind)
	}
	l.base = s.settled
	l.bank = m.room(s, total)
	b := l.bank
	b.owner = l
	stack := l.f.stack
	if len(b.words) < total*stack {
		b.words = make([]uint64, total*stack)
	}
	b.blocks = b.blocks[:0]
	blocks := make([]block, l.count())
	room := m.floors[s.device]
	var clusters []cluster
	each := l.f.Cluster // blocks of a cluster
	if each > 1 {
		clusters = make([]cluster, len(blocks)/each)
	}
	for i := range blocks {
		g := uint32(i)
		k := &blocks[i]
		*k = block{
			launch: l, index: [3]uint32{g % l.grid[0], g / l.grid[0] % l.grid[1], g / l.grid[0] / l.grid[1]}, live: per,
			threads: b.threads[i*per : (i+1)*per : (i+1)*per],
		}
		if n := l.f.module.bytes; n > 0 {
			data := make([]uint64, (n+15)/16*2)
			for w := range data {
				data[w] = math.MaxUint64 // what is there when a block begins is anything: NaN, of floats
			}
			k.shared = &region{size: uint64(n), data: unsafe.Pointer(&data[0]), block: k}
		}
		if each > 1 {
			k.rank, k.cluster = i%each, &clusters[i/each]
			k.cluster.blocks = append(k.cluster.blocks, k)
		}
		b.blocks = append(b.blocks, k)
		for j := range k.threads {
			t := &k.threads[j]
			n := i*per + j
			*t = thread{block: k, number: int32(j), f: l.f, words: b.words[n*stack : (n+1)*stack : (n+1)*stack], frames: t.frames[:0], watched: watched{polls: t.polls[:0]}}
			copy(t.words, l.f.consts)
			if m.weak {
				m.enter(t, b.first+n)
				if m.turn > 1 {
					t.pace = m.choose.Choose(1 << 20)
				}
			}
			if m.config.Schedule != nil {
				m.config.Schedule.begun(m, t)
			}
			if room != nil {
				t.status = atRoom
			} else {
				m.wake(t)
			}
		}
		if room != nil && k.rank == 0 {
			l.outside = append(l.outside, k)
		}
	}
	if room != nil {
		room.waiting = append(room.waiting, l)
		m.admit(room)
	}
}

// room finds threads for a launch that nobody uses any more and whose last events everybody on the stream is behind.
func (m *Machine) room(s *Stream, n int) *bank {
	for i := range s.banks {
		b := &s.banks[i]
		if len(b.threads) == n && (b.owner == nil || b.owner.done) {
			return b
		}
	}
	for i := range s.banks {
		if b := &s.banks[i]; !m.weak && (b.owner == nil || b.owner.done) {
			b.threads = make([]thread, n)
			return b
		}
	}
	if len(s.banks) == cap(s.banks) { // others point to them
		grown := make([]bank, len(s.banks), 2*len(s.banks)+4)
		copy(grown, s.banks)
		for i := range grown {
			if o := grown[i].owner; o != nil {
				o.bank = &grown[i]
			}
		}
		s.banks = grown
	}
	s.banks = append(s.banks, bank{first: len(m.slots), threads: make([]thread, n)})
	if m.weak {
		m.slots = append(m.slots, make([]uint32, n)...)
	}
	return &s.banks[len(s.banks)-1]
}

func (m *Machine) wake(t *thread) {
	t.status = running
	m.woken = true
	t.at = int32(len(m.ready))
	m.ready = append(m.ready, t)
	if !t.vain {
		m.swap(int(t.at), m.eager)
		m.eager++
	}
}

// fruitful says whether the turn has brought something: a thread has stored something, or seen what it had not.
func (m *Machine) fruitful() bool { return m.news || m.written != m.before }

func (m *Machine) swap(i, j int) {
	r := m.ready
	r[i], r[j] = r[j], r[i]
	r[i].at, r[j].at = int32(i), int32(j)
}

// sort puts a thread that can go on among the eager ones, or those that poll.
func (m *Machine) sort(t *thread, eager bool) {
	i := int(t.at)
	switch {
	case eager && i >= m.eager:
		m.swap(i, m.eager)
		m.eager++
	case !eager && i < m.eager:
		m.eager--
		m.swap(i, m.eager)
	}
}

// rest takes a thread out of those that can go on.
func (m *Machine) rest(t *thread, status uint8) {
	t.status = status
	t.vain = m.sorts && (status == atBarrier || status == atShuffle || status == atCluster) && !m.fruitful()
	last := len(m.ready) - 1
	if int(t.at) > last || m.ready[t.at] != t {
		return // it has never been among them since
	}
	m.sort(t, false)
	m.swap(int(t.at), last)
	m.ready[last] = nil
	m.ready = m.ready[:last]
}

// exit ends a thread.
func (m *Machine) exit(t *thread) {
	m.rest(t, ended)
	b := t.block
	b.live--
	if m.weak {
		m.leave(t)
	}
	for i := range b.barriers {
		if r := &b.barriers[i]; r.count > 0 && r.count == b.live {
			m.open(b, r)
		}
	}
	m.shuffled(b, t.number/32)
	if b.cluster != nil {
		m.leaveCluster(t)
	}
	if b.live > 0 {
		return
	}
	if m.weak && b.shares() {
		m.endsShared(t)
	}
	l := b.launch
	m.vacate(b)
	m.trigger(b)
	if l.left--; l.left > 0 {
		return
	}
	l.done = true
	s := l.stream
	m.active--
	for i, a := range s.active {
		if a == l {
			s.active = append(s.active[:i:i], s.active[i+1:]...)
			break
		}
	}
	if m.weak {
		s.settled, s.ended = merge(s.settled, l.final), merge(s.ended, l.own)
	}
	for _, a := range s.active {
		if a.before == l {
			a.before = nil
			for _, w := range a.waiting {
				if m.weak {
					m.passed(w)
				}
				m.wake(w)
			}
			a.waiting = nil
		}
	}
	m.begin()
}

// trigger is a block that lets the launch after its own begin.
func (m *Machine) trigger(b *block) {
	if b.triggered {
		return
	}
	b.triggered = true
	if l := b.launch; l.triggered+1 == l.count() {
		l.triggered++
		m.begin()
	} else {
		l.triggered++
	}
}

// arrive is a thread at a barrier. It says whether all have come, so that this one can go on.
func (m *Machine) arrive(t *thread, in *instr, value bool) bool {
	b := t.block
	r := &b.barriers[in.imm]
	red := in.op == opBarRed
	if r.count == 0 {
		*r = barrier{and: true, red: red, waiting: r.waiting[:0]}
	}
	r.count++
	r.and = r.and && value
	r.or = r.or || value
	if value {
		r.popc++
	}
	if m.weak {
		m.gather(t, r)
	}
	t.in = in
	m.rest(t, atBarrier)
	r.waiting = append(r.waiting, t)
	if r.count < b.live {
		return false
	}
	m.open(b, r)
	return true
}

func (m *Machine) open(b *block, r *barrier) {
	for _, t := range r.waiting {
		if t.in.op == opBarRed {
			t.words[int(t.base)+int(t.in.d)] = [3]uint64{bit(r.and), bit(r.or), r.popc}[t.in.tgt]
		}
		if m.weak {
			t.vector = r.vectors
			t.clock++
		}
		m.wake(t)
	}
	r.count = 0
	r.waiting = r.waiting[:0]
}

func bit(b bool) uint64 {
	if b {
		return 1
	}
	return 0
}

// shuffled lets the threads of a warp go on that are at a shuffle, if all are there that it names.
func (m *Machine) shuffled(b *block, warp int32) {
	first := int(warp) * 32
	lanes := b.threads[first:min(first+32, len(b.threads))]
	for i := range lanes {
		t := &lanes[i]
		if t.status != atShuffle {
			continue
		}
		members := t.words[int(t.base)+int(t.in.g)]
		whole := true
		for j := range lanes {
			o := &lanes[j]
			if members>>j&1 != 0 && o.status != ended && (o.status != atShuffle || o.words[int(o.base)+int(o.in.g)] != members) {
				whole = false
				break
			}
		}
		if !whole {
			continue
		}
		for j := range lanes {
			o := &lanes[j]
			if members>>j&1 == 0 || o.status != atShuffle {
				continue
			}
			r := o.words[o.base:]
			by, c := int(r[o.in.c]&31), int(r[o.in.e])
			segment := c >> 8 & 31
			low, high := j&segment, j&segment|c&31&^segment
			var from int
			var in bool
			switch o.in.imm {
			case 0:
				from = j - by
				in = from >= high
			case 1:
				from = j + by
				in = from <= high
			case 2:
				from = j ^ by
				in = from <= high
			default:
				from = low | by&^segment
				in = from <= high
			}
			if !in {
				from = j
			}
			v := o.value
			if from < len(lanes) && from >= 0 {
				v = lanes[from].value
			}
			r[o.in.d], r[o.in.b] = v, bit(in)
		}
		for j := range lanes {
			if o := &lanes[j]; members>>j&1 != 0 && o.status == atShuffle {
				m.wake(o)
			}
		}
	}
}

func (m *Machine) who(t *thread) Thread {
	l := t.block.launch
	return name(l, t.block.index, t.number)
}

func name(l *launch, block [3]uint32, number int32) Thread {
	n := uint32(number)
	return Thread{
		Device: l.stream.device, Stream: l.stream.number, Launch: l.number, Function: l.f.Name, Block: block,
		Thread: [3]uint32{n % l.dim[0], n / l.dim[0] % l.dim[1], n / l.dim[0] / l.dim[1]},
	}
}

// fail ends the machine with an error at an instruction.
func (m *Machine) fail(t *thread, pc int32, err error) {
	if m.err != nil {
		return
	}
	who := m.who(t)
	m.err = &Error{Place: t.f.place(pc), Thread: &who, Err: err}
}

func (f *Function) place(pc int32) Place {
	if f.module == nil { // an agent's
		return Place{File: f.Name}
	}
	pc = max(0, min(pc, int32(len(f.at)-1)))
	return f.module.place(int(f.at[pc]))
}

func (m *Machine) now() uint64 {
	if m.config.Clock != nil {
		return m.config.Clock()
	}
	return m.steps*max(m.config.StepTime, 1) + m.skipped
}
