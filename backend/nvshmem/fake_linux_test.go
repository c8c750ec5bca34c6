package nvshmem

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"time"
	"unsafe"

	"github.com/symmem/symmem/backend/backendtest/fakecuda"
	"github.com/symmem/symmem/device"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/nvshmem"
)

const (
	fakeHeap = 320 << 20 // of it, what a PE's heap can have
	granule  = 2 << 20
)

// machine is a host with some GPUs and an NVSHMEM for each, as far as this backend asks for them: memory, contexts, streams
// whose work runs at once, and a library whose PEs are all in this process. It notes what the real ones would not survive.
type machine struct {
	*fakecuda.GPUs
	pes int

	taken   []uint64 // bytes of a GPU that somebody else has
	next    uint64
	foreign map[device.Ptr]*foreignMem

	job   job
	libs  []*fakeLib
	homes []*home
}

// foreignMem is memory that is not of a heap.
type foreignMem struct {
	gpu    int
	mem    []byte
	vmm    bool
	prop   cu.MemAllocationProp
	access uint64
}

// job is what the PEs of one start share.
type job struct {
	cond     *sync.Cond
	round    int // of collective calls
	came     int
	what     string
	result   uint64
	absent   map[int]bool // PEs that hang instead of coming
	hung     int          // PEs that have come to where they hang
	dead     chan struct{}
	brk      uint64   // the end of what the heap has grown to
	ends     []uint64 // of its physical memory, piece by piece
	limit    uint64
	used     map[uint64]uint64 // bytes, by offset
	aliases  map[uint64]*[8]*foreignMem
	teams    int
	ready    map[nvshmem.Team]bool // a barrier was the team's last call
	calls    []string
	mem      [8][]byte
	starts   int
	failure  func(call string, pe int) bool // whether a call fails
	multi    bool                           // multicast addresses exist
	finalize int
	pending  map[cu.StreamHandle]bool // streams with a collective that not all PEs have come to
}

func newMachine(pes int) *machine {
	m := &machine{
		GPUs: fakecuda.New(pes), pes: pes, taken: make([]uint64, pes), next: 1 << 20, foreign: map[device.Ptr]*foreignMem{},
	}
	m.Find = func(p device.Ptr) (fakecuda.Memory, bool) {
		base, f := m.find(p)
		if f == nil {
			return fakecuda.Memory{}, false
		}
		return fakecuda.Memory{GPU: f.gpu, Base: base, Bytes: uint64(len(f.mem))}, true
	}
	m.job = job{cond: sync.NewCond(&m.Mu), absent: map[int]bool{}, dead: make(chan struct{}), limit: fakeHeap, ready: map[nvshmem.Team]bool{},
		pending: map[cu.StreamHandle]bool{}}
	for pe := range pes {
		m.libs = append(m.libs, &fakeLib{m: m, pe: pe})
		m.homes = append(m.homes, &home{})
	}
	return m
}

// options returns those of a rank.
func (m *machine) options(rank int) *Options {
	return &Options{LocalRank: rank, Driver: m.driver(), Multicast: "off", Chunk: 32 << 20, Arena: 16 << 20, home: m.homes[rank],
		load: func(o *nvshmem.Options) (library, error) { m.libs[rank].opts = *o; return m.libs[rank], nil }}
}

// left says what is not given back.
func (m *machine) left() string {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	left := m.GPUs.Left(map[string]int{"foreign": len(m.foreign)})
	for pe, l := range m.libs {
		if l.started {
			left = append(left, fmt.Sprintf("PE %d is started", pe))
		}
	}
	return strings.Join(left, ", ")
}

// fakeLib is the library as one PE has it.
type fakeLib struct {
	m       *machine
	pe      int
	opts    nvshmem.Options
	started bool
	patch   int32  // of its version, 0 is 5
	granule string // NVSHMEM_CUMEM_GRANULARITY, if it is set
	scratch string // NVSHMEM_REDUCE_SCRATCH_SIZE
}

var _ library = (*fakeLib)(nil)

func (l *fakeLib) Version() nvshmem.Version {
	return nvshmem.Version{Major: 3, Minor: 4, Patch: cmp.Or(l.patch, 5)}
}
func (l *fakeLib) Path() string      { return "fake" }
func (l *fakeLib) Bootstrap() string { return "fake plugin" }
func (l *fakeLib) Settings() []nvshmem.Setting {
	var all []nvshmem.Setting
	for name, value := range map[string]string{nvshmem.GranularityEnv: l.granule, reduceScratchEnv: l.scratch} {
		if value != "" {
			all = append(all, nvshmem.Setting{Name: name, Value: value})
		}
	}
	return all
}

func (l *fakeLib) NewUniqueID() (*nvshmem.UniqueID, error) {
	if f := l.m.job.failure; f != nil && f("id", l.pe) {
		return nil, fmt.Errorf("no socket interface: %w", errs.ErrUnavailable)
	}
	return &nvshmem.UniqueID{Version: 65664}, nil
}

// meet is a collective call: it returns what the last to come computes. The caller holds the lock.
func (l *fakeLib) meet(what string, last func() uint64) (uint64, bool) {
	return l.meetUntil(new(bool), what, last)
}

// streamPatience is how long a collective on a stream keeps its caller, which a real one does not, until the others have come: work of the simulated
// streams runs when it is enqueued. Of those that do not come, the stream waits.
const streamPatience = 2 * time.Second

// meetOn is meet on a stream.
func (l *fakeLib) meetOn(stream uintptr, what string, last func() uint64) {
	m, late := l.m, false
	defer time.AfterFunc(streamPatience, func() { m.Mu.Lock(); late = true; m.job.cond.Broadcast(); m.Mu.Unlock() }).Stop()
	if _, met := l.meetUntil(&late, what, last); !met && late {
		m.job.pending[cu.StreamHandle(stream)] = true
	}
}

// meetUntil is meet until late is set.
func (l *fakeLib) meetUntil(late *bool, what string, last func() uint64) (uint64, bool) {
	m, j := l.m, &l.m.job
	if m.Current() != l.pe {
		m.Violation("%s without the context of GPU %d", what, l.pe)
	}
	if j.absent[l.pe] {
		j.hung++
		m.Mu.Unlock()
		<-j.dead // like a PE that hangs in here
		m.Mu.Lock()
		return 0, false
	}
	if j.came == 0 {
		j.what = what
	} else if j.what != what {
		m.Violation("PE %d calls %s while another calls %s", l.pe, what, j.what)
	}
	j.came++
	round := j.round
	if j.came == m.pes {
		j.calls = append(j.calls, what)
		j.came, j.round, j.result = 0, j.round+1, last()
		j.cond.Broadcast()
		return j.result, true
	}
	for j.round == round {
		select {
		case <-j.dead:
			return 0, false
		default:
		}
		if *late {
			j.came--
			return 0, false
		}
		j.cond.Wait()
	}
	return j.result, true
}

// release lets all calls return that hang.
func (m *machine) release() {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	select {
	case <-m.job.dead:
	default:
		close(m.job.dead)
		m.job.cond.Broadcast()
	}
}

func (l *fakeLib) Start(pes, pe int, _ *nvshmem.UniqueID) error {
	l.m.Mu.Lock()
	defer l.m.Mu.Unlock()
	j := &l.m.job
	if l.started || pes != l.m.pes || pe != l.pe {
		l.m.Violation("start of PE %d of %d as PE %d", pe, pes, l.pe)
	}
	_, ok := l.meet("start", func() uint64 {
		j.brk, j.ends, j.used, j.aliases, j.starts, j.teams = 4<<20, []uint64{4 << 20}, map[uint64]uint64{0: 1 << 20}, map[uint64]*[8]*foreignMem{}, j.starts+1, 7
		return 0
	})
	if !ok {
		return errs.ErrClosed
	}
	if j.failure != nil && j.failure("start", pe) {
		return fmt.Errorf("bootstrapped only: %w", errs.ErrUnavailable)
	}
	l.started = true
	return nil
}

func (l *fakeLib) Finalize() error {
	l.m.Mu.Lock()
	defer l.m.Mu.Unlock()
	if _, ok := l.meet("finalize", func() uint64 { l.m.job.finalize++; return 0 }); ok {
		l.started = false
	}
	return nil
}

func (l *fakeLib) check(what string) {
	if !l.started {
		l.m.Violation("%s before start: the process would have ended", what)
	}
}

// base returns where PE v has the heap of PE pe.
func (m *machine) base(v, pe int) uint64 {
	return uint64(v+1)<<44 + uint64((pe-v+m.pes)%m.pes)<<36
}

func (l *fakeLib) Align(alignment, bytes int64) (uint64, error) {
	l.m.Mu.Lock()
	defer l.m.Mu.Unlock()
	l.check("align")
	j := &l.m.job
	off, ok := l.meet(fmt.Sprintf("align %d", bytes), func() uint64 {
		if j.failure != nil && j.failure("align", l.pe) {
			return 0
		}
		return j.allocate(uint64(bytes), uint64(alignment))
	})
	if !ok || off == 0 {
		return 0, nil
	}
	mem := l.m.heap(l.pe)
	for i := off; i < off+uint64(bytes); i += 509 { // new memory is not zero
		mem[i] = 0xa5
	}
	return l.m.base(l.pe, l.pe) + off, nil
}

// allocate returns the first place that is free, growing the heap if there is none; 0 if it cannot grow.
func (j *job) allocate(bytes, alignment uint64) uint64 {
	bytes += alignment
	at := uint64(0)
	for {
		end := j.brk
		for off := range j.used {
			if off >= at && off < end {
				end = off
			}
		}
		start := (at + alignment - 1) / alignment * alignment
		if start+bytes <= end {
			j.used[start] = bytes
			return start
		}
		if end == j.brk {
			break
		}
		at = end + j.used[end]
	}
	grow := (bytes + granule - 1) / granule * granule
	if j.brk+grow > j.limit {
		return 0
	}
	j.brk += grow
	j.ends = append(j.ends, j.brk)
	return j.allocate(bytes-alignment, alignment)
}

func (l *fakeLib) Ptr(p uint64, pe int) (uint64, error) {
	l.m.Mu.Lock()
	defer l.m.Mu.Unlock()
	l.check("ptr")
	if j := &l.m.job; j.failure != nil && j.failure("ptr", l.pe) {
		return 0, nil
	}
	own := l.m.base(l.pe, l.pe)
	if p < own || p >= own+1<<36 {
		return 0, nil // not of the heap
	}
	return p - own + l.m.base(l.pe, pe), nil
}

// aliasOffset is where registered memory is in the heap.
const aliasOffset = 1 << 34

func (l *fakeLib) Register(p uint64, bytes int64) (uint64, error) {
	l.m.Mu.Lock()
	defer l.m.Mu.Unlock()
	l.check("register")
	j := &l.m.job
	mem := l.m.foreign[device.Ptr(p)]
	if mem == nil || !mem.vmm || bytes%granule != 0 || bytes != int64(len(mem.mem)) || mem.prop.RequestedHandleTypes != cu.HandleFD {
		l.m.Violation("registering %d bytes at %#x: the heap would be gone", bytes, p)
		return 0, nil
	}
	for _, of := range j.aliases {
		if of[l.pe] == mem {
			l.m.Violation("registering %d bytes at %#x twice", bytes, p)
			return 0, nil
		}
	}
	off, ok := l.meet(fmt.Sprintf("register %d", bytes), func() uint64 {
		off := uint64(aliasOffset)
		for j.aliases[off] != nil {
			off += 1 << 30
		}
		j.aliases[off] = &[8]*foreignMem{}
		return off
	})
	if !ok {
		return 0, nil
	}
	j.aliases[off][l.pe] = mem
	l.meet("registered", func() uint64 { return 0 })
	return l.m.base(l.pe, l.pe) + off, nil
}

func (l *fakeLib) Unregister(alias uint64, bytes int64) error {
	l.m.Mu.Lock()
	defer l.m.Mu.Unlock()
	l.check("unregister")
	off := alias - l.m.base(l.pe, l.pe)
	l.meet(fmt.Sprintf("unregister %d %d", off, bytes), func() uint64 {
		if l.m.job.aliases[off] == nil {
			l.m.Violation("unregistering nothing")
		}
		delete(l.m.job.aliases, off)
		return 0
	})
	return nil
}

func (l *fakeLib) NewTeam() (nvshmem.Team, error) {
	l.m.Mu.Lock()
	defer l.m.Mu.Unlock()
	l.check("team")
	j := &l.m.job
	team, _ := l.meet("team", func() uint64 { j.teams++; return uint64(j.teams) })
	if team > 12 {
		return nvshmem.TeamInvalid, fmt.Errorf("no team is left: %w", errs.ErrUnsupported)
	}
	return nvshmem.Team(team), nil
}

func (l *fakeLib) Barrier(team nvshmem.Team, stream uintptr) error {
	l.m.Mu.Lock()
	defer l.m.Mu.Unlock()
	l.check("barrier")
	l.meetOn(stream, fmt.Sprintf("barrier of team %d", team), func() uint64 { l.m.job.ready[team] = true; return 0 })
	return nil
}

func (l *fakeLib) Collective(what, dtype, op string) (nvshmem.Collective, error) {
	combines := what == nvshmem.Reduce || what == nvshmem.ReduceScatter
	if !slices.Contains([]string{"f16", "bf16", "f32", "f64", "i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64"}, dtype) ||
		combines && !slices.Contains([]string{"sum", "prod", "min", "max"}, op) {
		return nil, errs.ErrUnsupported
	}
	name := dtype + " " + op
	if !combines {
		name = dtype
	}
	if what != nvshmem.Reduce {
		name = what + " " + name
	}
	return func(team nvshmem.Team, dst, src uint64, count int64, root int, stream uintptr) error {
		l.m.Mu.Lock()
		defer l.m.Mu.Unlock()
		l.check("collective")
		at := func(p uint64) uint64 { return p - l.m.base(l.pe, l.pe) }
		l.meetOn(stream, fmt.Sprintf("%s of %d by team %d from %d to %d of %d", name, count, team, at(src), at(dst), root), func() uint64 {
			if what != nvshmem.Reduce && !l.m.job.ready[team] {
				l.m.Violation("%s without a barrier in front, when a PE may still read its output", what)
			}
			l.m.job.ready[team] = false
			l.collect(what, name, at(dst), at(src), count*elementBytes(dtype), root)
			return 0
		})
		return nil
	}, nil
}

// collect does what a collective does to the memory of all PEs: bytes are those of the message, or of a block.
func (l *fakeLib) collect(what, name string, dst, src uint64, bytes int64, root int) {
	of := func(pe int, off uint64, n int64) []byte {
		return l.m.at(l.pe, device.Ptr(l.m.base(l.pe, pe)+off), uint64(n))
	}
	n := int64(l.m.pes)
	var all [][]byte // every PE's input, as it was
	for pe := range l.m.pes {
		size := bytes
		if what == nvshmem.ReduceScatter || what == nvshmem.AllToAll {
			size *= n
		}
		all = append(all, slices.Clone(of(pe, src, size)))
	}
	for pe := range l.m.pes {
		switch what {
		case nvshmem.Broadcast:
			copy(of(pe, dst, bytes), all[root])
		case nvshmem.Collect:
			copy(of(pe, dst, bytes*n), slices.Concat(all...))
		case nvshmem.AllToAll:
			for from, block := range all {
				copy(of(pe, dst+uint64(from)*uint64(bytes), bytes), block[int64(pe)*bytes:])
			}
		case nvshmem.ReduceScatter:
			if name == "reducescatter f32 sum" {
				copy(of(pe, dst, bytes), sumOf(all)[int64(pe)*bytes:])
			}
		case nvshmem.Reduce:
			if name == "f32 sum" {
				copy(of(pe, dst, bytes), sumOf(all))
			}
		}
	}
}

// sumOf adds f32.
func sumOf(all [][]byte) []byte {
	sums := make([]byte, len(all[0]))
	for i := 0; i < len(sums); i += 4 {
		var sum float32
		for _, one := range all {
			sum += math.Float32frombits(binary.LittleEndian.Uint32(one[i:]))
		}
		binary.LittleEndian.PutUint32(sums[i:], math.Float32bits(sum))
	}
	return sums
}

func (l *fakeLib) MulticastPtr(p uint64) (uint64, error) {
	if !l.opts.Multicast {
		l.m.Mu.Lock()
		defer l.m.Mu.Unlock()
		l.m.Violation("multicast was asked for")
		return 0, errs.ErrUnsupported
	}
	if !l.m.job.multi {
		return 0, nil
	}
	return p | 1<<60, nil
}

// heap returns the memory of a PE's heap.
func (m *machine) heap(pe int) []byte {
	if m.job.mem[pe] == nil {
		m.job.mem[pe] = make([]byte, m.job.limit)
	}
	return m.job.mem[pe]
}

// at returns n bytes of memory that the GPU can reach at p.
func (m *machine) at(gpu int, p device.Ptr, n uint64) []byte {
	for base, f := range m.foreign {
		if p >= base && p < base.Add(int64(len(f.mem))) && f.gpu == gpu {
			return f.mem[p-base:][:n]
		}
	}
	v := int(p>>44) - 1
	pe := (int(p>>36)&0xff + v) % m.pes
	off := uint64(p) & (1<<36 - 1)
	if v != gpu || off >= m.job.limit && m.job.aliases[off/(1<<30)*(1<<30)] == nil {
		m.Violation("GPU %d has no access to %d bytes at %s", gpu, n, p)
		return make([]byte, n)
	}
	if off >= aliasOffset {
		base := off / (1 << 30) * (1 << 30)
		return m.job.aliases[base][pe].mem[off-base:][:n]
	}
	return m.heap(pe)[off:][:n]
}

// heapRange returns the piece of physical memory of the heap that is mapped at p.
func (m *machine) heapRange(base *device.Ptr, bytes *uint64, p device.Ptr) cu.Result {
	off, begin := uint64(p)&(1<<36-1), uint64(0)
	for _, end := range m.job.ends {
		if off < end {
			*base, *bytes = p-device.Ptr(off-begin), end-begin
			return cu.Success
		}
		begin = end
	}
	return cu.NotFound
}

// driver returns a table for the machine. Functions that nothing here calls are not supported.
func (m *machine) driver() *cu.Driver {
	d := m.GPUs.Driver()
	m.basics(d)
	m.memory(d)
	m.work(d)
	idle := d.StreamQuery
	d.StreamQuery = func(s cu.StreamHandle) cu.Result {
		m.Mu.Lock()
		waits := m.job.pending[s]
		m.Mu.Unlock()
		if waits {
			return cu.NotReady
		}
		return idle(s)
	}
	return d
}

func (m *machine) basics(d *cu.Driver) {
	d.DeviceGetAttribute = func(v *int32, a cu.DeviceAttribute, _ cu.DeviceOrdinal) cu.Result {
		if *v = 1; a == cu.AttrComputeCapabilityMajor {
			*v = 9
		}
		return cu.Success
	}
	d.MemGetInfo = func(free, total *uint64) cu.Result {
		return m.Do("cuMemGetInfo", func(gpu int) cu.Result {
			*free, *total = fakecuda.TotalMemory-m.taken[max(gpu, 0)]-m.job.brk, fakecuda.TotalMemory
			return cu.Success
		})
	}
}

// find returns the memory that is not of a heap at p.
func (m *machine) find(p device.Ptr) (device.Ptr, *foreignMem) {
	for base, f := range m.foreign {
		if p >= base && p < base.Add(int64(len(f.mem))) {
			return base, f
		}
	}
	return 0, nil
}

func (m *machine) memory(d *cu.Driver) {
	d.MemAlloc = func(p *device.Ptr, bytes uint64) cu.Result {
		return m.Do("cuMemAlloc", func(gpu int) cu.Result {
			*p = m.newForeign(&foreignMem{gpu: gpu, mem: make([]byte, bytes)})
			return cu.Success
		})
	}
	d.MemFree = func(p device.Ptr) cu.Result {
		return m.Do("cuMemFree", func(int) cu.Result { delete(m.foreign, p); return cu.Success })
	}
	d.MemRelease = func(cu.MemHandle) cu.Result { return cu.Success }
	d.MemRetainAllocationHandle = func(h *cu.MemHandle, p device.Ptr) cu.Result {
		return m.Do("cuMemRetainAllocationHandle", func(int) cu.Result {
			if base, f := m.find(p); f != nil && f.vmm {
				*h = cu.MemHandle(base)
				return cu.Success
			}
			return cu.InvalidValue
		})
	}
	d.MemGetAllocationPropertiesFromHandle = func(prop *cu.MemAllocationProp, h cu.MemHandle) cu.Result {
		return m.Do("cuMemGetAllocationPropertiesFromHandle", func(int) cu.Result {
			*prop = m.foreign[device.Ptr(h)].prop
			return cu.Success
		})
	}
	d.MemGetAddressRange = func(base *device.Ptr, bytes *uint64, p device.Ptr) cu.Result {
		return m.Do("cuMemGetAddressRange", func(int) cu.Result {
			at, f := m.find(p)
			if f == nil {
				return m.heapRange(base, bytes, p)
			}
			*base, *bytes = at, uint64(len(f.mem))
			return cu.Success
		})
	}
	d.MemGetAccess = func(flags *uint64, _ *cu.MemLocation, p device.Ptr) cu.Result {
		return m.Do("cuMemGetAccess", func(int) cu.Result { _, f := m.find(p); *flags = f.access; return cu.Success })
	}
}

// allocate makes memory of a GPU that is not of a heap; f makes it what it is not otherwise.
func (m *machine) allocate(gpu int, bytes int64, f func(*foreignMem)) device.Ptr {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	x := &foreignMem{gpu: gpu, mem: make([]byte, bytes), vmm: true, access: uint64(cu.AccessReadWrite), prop: cu.MemAllocationProp{
		Type: cu.AllocationPinned, RequestedHandleTypes: cu.HandleFD, Location: cu.MemLocation{Type: cu.LocationDevice, ID: int32(gpu)}}}
	if f != nil {
		f(x)
	}
	return m.newForeign(x)
}

// newForeign gives memory its place.
func (m *machine) newForeign(x *foreignMem) device.Ptr {
	p := device.Ptr(m.next)
	m.next += uint64(roundUp(int64(len(x.mem)), granule)) + granule
	m.foreign[p] = x
	return p
}

func (m *machine) free(p device.Ptr) {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	delete(m.foreign, p)
}

func (m *machine) work(d *cu.Driver) {
	d.MemcpyHtoDAsync = func(dst device.Ptr, src unsafe.Pointer, n uint64, s cu.StreamHandle) cu.Result {
		return m.Do("cuMemcpyHtoDAsync", func(int) cu.Result {
			copy(m.at(m.Streams[s], dst, n), unsafe.Slice((*byte)(src), n))
			return cu.Success
		})
	}
	d.MemcpyDtoHAsync = func(dst unsafe.Pointer, src device.Ptr, n uint64, s cu.StreamHandle) cu.Result {
		return m.Do("cuMemcpyDtoHAsync", func(int) cu.Result {
			copy(unsafe.Slice((*byte)(dst), n), m.at(m.Streams[s], src, n))
			return cu.Success
		})
	}
	d.MemsetD8Async = func(p device.Ptr, value uint8, n uint64, s cu.StreamHandle) cu.Result {
		return m.Do("cuMemsetD8Async", func(int) cu.Result {
			if mem := m.at(m.Streams[s], p, n); value == 0 {
				clear(mem)
			}
			return cu.Success
		})
	}
}

// inCall counts the PEs that wait for others in a collective call, or hang there.
func (m *machine) inCall() int {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	return m.job.came + m.job.hung
}

// called counts the collective calls of the library whose names begin so.
func (m *machine) called(prefix string) int {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	n := 0
	for _, c := range m.job.calls {
		if strings.HasPrefix(c, prefix) {
			n++
		}
	}
	return n
}
