package simlib

import (
	"fmt"
	"slices"

	"github.com/symmem/symmem/device"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/nvshmem"
	"github.com/symmem/symmem/internal/simcuda"
)

const (
	// heapRoom is the room for a PE's heap, NVSHMEM's own default: below aliases what it has allocated, and from there on what was registered.
	heapRoom = 256 << 30
	aliases  = heapRoom / 2
	// ownUse is what NVSHMEM itself takes of the heap when it is started.
	ownUse = 1 << 20
	// The teams: those that always are, and NVSHMEM_MAX_TEAMS.
	firstTeam, lastTeam = 8, 31
)

// NVSHMEM is the library of each rank of a process, which it has once for each.
type NVSHMEM struct {
	host
	jobs map[nvshmem.UniqueID]*job
	open int // PEs that are started
}

// NewNVSHMEM makes an NVSHMEM for the GPUs of a machine.
func NewNVSHMEM(m *simcuda.Machine) *NVSHMEM {
	return &NVSHMEM{host: newHost(m), jobs: map[nvshmem.UniqueID]*job{}}
}

// Left lists what was made and not given back.
func (n *NVSHMEM) Left() (left []string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.open > 0 {
		left = append(left, fmt.Sprintf("%d PEs that are started", n.open))
	}
	return left
}

// Load gives a rank its library.
func (n *NVSHMEM) Load(o *nvshmem.Options) (nvshmem.Calls, error) {
	return &pe{lib: n, multicast: o.Multicast}, nil
}

// job is what the PEs of one start share.
type job struct {
	pes    []*pe
	calls  *rounds
	cast   bool
	end    uint64 // of what the heaps have grown to
	used   []room // of the heaps, ascending
	pieces []*piece
	teams  int
	work   map[nvshmem.Team]*work
	torn   bool
}

type room struct{ at, bytes uint64 }

// piece is one piece of physical memory of each heap.
type piece struct {
	room
	cast *cast
}

// pe is the library as one PE has it.
type pe struct {
	lib       *NVSHMEM
	multicast bool
	job       *job // nil unless it is started
	number    int
	gpu       int
	base      device.Ptr // of all PEs' heaps, its own first
}

var _ nvshmem.Calls = (*pe)(nil)

// Version is the oldest version that the module works with.
func (*pe) Version() nvshmem.Version { return nvshmem.Version{Major: 3, Minor: 4, Patch: 5} }

// Path says that there is no file.
func (*pe) Path() string { return "simulated" }

// Bootstrap says that there is no plugin.
func (*pe) Bootstrap() string { return "simulated" }

// Settings is empty.
func (*pe) Settings() []nvshmem.Setting { return nil }

// NewUniqueID makes the id of a start.
func (p *pe) NewUniqueID() (*nvshmem.UniqueID, error) {
	id := &nvshmem.UniqueID{Version: 1<<16 + nvshmem.UniqueIDBytes}
	p.lib.id(id.Internal[:])
	return id, nil
}

// heap is where a PE has the heap of another: its own first, and the others behind it, so that no two have the same order.
func (p *pe) heap(other int) device.Ptr {
	n := len(p.job.pes)
	return p.base.Add(int64((other-p.number+n)%n) * heapRoom)
}

// together is a call that takes all PEs, made with mu held; it gives mu up.
func (p *pe) together(call string, arg any, finish func(args []any)) error {
	n, j := p.lib, p.job
	if now := n.machine.Current(); now != p.gpu {
		n.machine.Violation("%s by the PE of GPU %d with the context of GPU %d", call, p.gpu, now)
	}
	r := n.come(j.calls, p.number, call, arg, func(args []any) {
		if err := try(func() { finish(args) }); err != nil {
			n.machine.Violation("%s: %v: NVSHMEM has torn its heap down", call, err)
			j.torn = true
		}
	})
	n.mu.Unlock()
	switch {
	case !n.await(r, nil):
		return fmt.Errorf("%s: other PEs have not come: %w", call, errs.ErrPeerLost)
	case r.torn:
		return fmt.Errorf("%s: other PEs call %s: %w", call, r.call, errs.ErrMismatch)
	}
	return nil
}

// started returns the job, with mu held, or notes that the process would have ended.
func (p *pe) started(call string) (*job, error) {
	p.lib.mu.Lock()
	if p.job == nil {
		p.lib.mu.Unlock()
		p.lib.machine.Violation("%s before the start: NVSHMEM would end the process", call)
		return nil, fmt.Errorf("%s: NVSHMEM is not started, or finalized: %w", call, errs.ErrClosed)
	}
	return p.job, nil
}

// Start makes this rank a PE.
func (p *pe) Start(pes, number int, id *nvshmem.UniqueID) error {
	n := p.lib
	n.mu.Lock()
	gpu := n.machine.Current()
	j := n.jobs[*id]
	if j == nil {
		j = &job{pes: make([]*pe, pes), calls: newRounds(pes), teams: firstTeam, work: map[nvshmem.Team]*work{}}
		n.jobs[*id] = j
	}
	if p.job != nil || gpu < 0 || len(j.pes) != pes || number < 0 || number >= pes || j.pes[number] != nil ||
		slices.ContainsFunc(j.pes, func(o *pe) bool { return o != nil && o.gpu == gpu }) {
		n.mu.Unlock()
		n.machine.Violation("NVSHMEM starts as PE %d of %d on GPU %d", number, pes, gpu)
		return fmt.Errorf("starting NVSHMEM as PE %d of %d on GPU %d: %w", number, pes, gpu, errs.ErrInvalid)
	}
	p.job, p.number, p.gpu = j, number, gpu
	j.pes[number] = p
	err := p.together("start", nil, func([]any) {
		delete(n.jobs, *id)
		j.cast = pes > 1 && !slices.ContainsFunc(j.pes, func(o *pe) bool { return !o.multicast || !n.machine.Multicast(o.gpu) })
		for _, o := range j.pes {
			o.base = n.reserve(uint64(pes) * heapRoom)
			n.open++
		}
		n.grow(j, granule)
		j.used = append(j.used, room{0, ownUse})
	})
	if err == nil && j.torn {
		err = fmt.Errorf("starting NVSHMEM: its GPU half failed: %w", errs.ErrUnavailable)
	}
	return err
}

// Finalize ends what Start began.
func (p *pe) Finalize() error {
	j, err := p.started("finalize")
	if err != nil {
		return err
	}
	n := p.lib
	return p.together("finalize", nil, func([]any) {
		for _, x := range slices.Clone(j.pieces) {
			n.remove(j, x)
		}
		for _, o := range j.pes {
			o.job = nil
			n.open--
			must("cuMemAddressFree", n.drv.MemAddressFree(o.base, uint64(len(j.pes))*heapRoom))
		}
	})
}

// grow adds memory to the end of all heaps.
func (n *NVSHMEM) grow(j *job, bytes uint64) {
	var memory []cu.MemHandle
	defer func() {
		for _, m := range memory {
			must("cuMemRelease", n.drv.MemRelease(m))
		}
	}()
	for _, o := range j.pes {
		memory = append(memory, n.create(o.gpu, bytes))
	}
	n.add(j, room{j.end, bytes}, memory)
	j.end += bytes
}

// add maps memory of each PE to a place of its heap, for all PEs.
func (n *NVSHMEM) add(j *job, at room, memory []cu.MemHandle) {
	for _, o := range j.pes {
		for other, m := range memory {
			n.show(o.heap(other).Add(int64(at.at)), at.bytes, m, o.gpu)
		}
	}
	x := &piece{room: at}
	j.pieces = append(j.pieces, x)
	if !j.cast {
		return
	}
	var gpus []int
	var own []device.Ptr
	for _, o := range j.pes {
		gpus, own = append(gpus, o.gpu), append(own, o.heap(o.number).Add(int64(at.at)))
	}
	x.cast = n.bind(gpus, own, at.bytes)
}

// remove takes a piece from all heaps.
func (n *NVSHMEM) remove(j *job, x *piece) {
	j.pieces = slices.DeleteFunc(j.pieces, func(o *piece) bool { return o == x })
	for _, o := range j.pes {
		if x.cast != nil {
			x.cast.leave(o.number)
		}
		for other := range j.pes {
			must("cuMemUnmap", n.drv.MemUnmap(o.heap(other).Add(int64(x.at)), x.bytes))
		}
	}
}

// Align allocates memory of the heap, which grows if it must.
func (p *pe) Align(alignment, bytes int64) (uint64, error) {
	j, err := p.started("nvshmem_align")
	if err != nil {
		return 0, err
	}
	at := new(uint64)
	err = p.together(fmt.Sprintf("nvshmem_align of %d at %d", bytes, alignment), at, func(args []any) {
		place := p.lib.allocate(j, uint64(bytes), uint64(alignment))
		for _, a := range args {
			*a.(*uint64) = place
		}
	})
	if err != nil || j.torn {
		return 0, err
	}
	return uint64(p.heap(p.number)) + *at, nil
}

// allocate finds the first place that is free, as far as the heap can grow. NVSHMEM takes the alignment besides.
func (n *NVSHMEM) allocate(j *job, bytes, alignment uint64) uint64 {
	bytes += alignment
	at, i := uint64(0), 0
	for ; i < len(j.used); i++ {
		if at = roundUp(at, alignment); at+bytes <= j.used[i].at {
			break
		}
		at = j.used[i].at + j.used[i].bytes
	}
	at = roundUp(at, alignment)
	if at+bytes > aliases {
		panic(failed{"room in the heap", cu.OutOfMemory})
	}
	if at+bytes > j.end {
		n.grow(j, roundUp(at+bytes-j.end, granule))
	}
	j.used = slices.Insert(j.used, i, room{at, bytes})
	return at
}

// Ptr is nvshmem_ptr.
func (p *pe) Ptr(at uint64, other int) (uint64, error) {
	j, err := p.started("nvshmem_ptr")
	if err != nil {
		return 0, err
	}
	defer p.lib.mu.Unlock()
	own := uint64(p.heap(p.number))
	if at < own || at-own >= heapRoom || other < 0 || other >= len(j.pes) {
		return 0, nil
	}
	return at - own + uint64(p.heap(other)), nil
}

// Register maps memory of cuMemCreate into the heap besides.
func (p *pe) Register(at uint64, bytes int64) (uint64, error) {
	j, err := p.started("nvshmemx_buffer_register_symmetric")
	if err != nil {
		return 0, err
	}
	n := p.lib
	type memory struct {
		m  cu.MemHandle
		at *uint64
	}
	mine := memory{at: new(uint64)}
	bad := try(func() {
		m, base, size := n.retain(device.Ptr(at))
		mine.m = m
		if uint64(base) != at || size != uint64(bytes) {
			panic(failed{fmt.Sprintf("%d bytes at %#x, of %d at %s", bytes, at, size, base), cu.InvalidValue})
		}
	})
	if bad != nil {
		n.machine.Violation("nvshmemx_buffer_register_symmetric: %v: the heap would be gone", bad)
	}
	err = p.together(fmt.Sprintf("nvshmemx_buffer_register_symmetric of %d", bytes), mine, func(args []any) {
		where := room{aliases, uint64(bytes)}
		for again := true; again; {
			again = false
			for _, x := range j.pieces {
				if x.at < where.at+where.bytes && where.at < x.at+x.bytes {
					where.at, again = x.at+x.bytes, true
				}
			}
		}
		if where.at+where.bytes > heapRoom {
			panic(failed{"room in the heap", cu.OutOfMemory})
		}
		var all []cu.MemHandle
		for _, a := range args {
			all = append(all, a.(memory).m)
		}
		n.add(j, where, all)
		for _, a := range args {
			*a.(memory).at = where.at
		}
	})
	if mine.m != 0 {
		n.drv.MemRelease(mine.m)
	}
	if err != nil || j.torn {
		return 0, err
	}
	return uint64(p.heap(p.number)) + *mine.at, nil
}

// Unregister takes away what Register has mapped.
func (p *pe) Unregister(alias uint64, bytes int64) error {
	j, err := p.started("nvshmemx_buffer_unregister_symmetric")
	if err != nil {
		return err
	}
	at := alias - uint64(p.heap(p.number))
	return p.together(fmt.Sprintf("nvshmemx_buffer_unregister_symmetric of %d at %d", bytes, at), nil, func([]any) {
		i := slices.IndexFunc(j.pieces, func(x *piece) bool { return x.at == at && x.at >= aliases && x.bytes == uint64(bytes) })
		if i < 0 {
			panic(failed{fmt.Sprintf("%d bytes at %d, which are not registered", bytes, at), cu.InvalidValue})
		}
		p.lib.remove(j, j.pieces[i])
	})
}

// NewTeam makes another team of all PEs.
func (p *pe) NewTeam() (nvshmem.Team, error) {
	j, err := p.started("nvshmem_team_split_strided")
	if err != nil {
		return nvshmem.TeamInvalid, err
	}
	team := new(nvshmem.Team)
	err = p.together("nvshmem_team_split_strided", team, func(args []any) {
		made := nvshmem.TeamInvalid
		if j.teams <= lastTeam {
			made = nvshmem.Team(j.teams)
			j.work[made] = newWork(p.lib.machine, len(j.pes))
			j.teams++
		}
		for _, a := range args {
			*a.(*nvshmem.Team) = made
		}
	})
	if err == nil && *team == nvshmem.TeamInvalid {
		err = fmt.Errorf("NVSHMEM has %d teams and no more: %w", lastTeam+1, errs.ErrUnsupported)
	}
	return *team, err
}

// team gives the collectives of a team, or notes that there is none.
func (p *pe) team(what string, team nvshmem.Team) (*work, uint64, error) {
	j, err := p.started(what)
	if err != nil {
		return nil, 0, err
	}
	defer p.lib.mu.Unlock()
	w := j.work[team]
	if w == nil {
		p.lib.machine.Violation("%s by team %d, which is none", what, team)
		return nil, 0, fmt.Errorf("%s by team %d: %w", what, team, errs.ErrInvalid)
	}
	return w, uint64(p.heap(p.number)), nil
}

// Barrier enqueues a barrier of a team.
func (p *pe) Barrier(team nvshmem.Team, stream uintptr) error {
	w, _, err := p.team("nvshmemx_barrier_on_stream", team)
	if err != nil {
		return err
	}
	w.free(p.number, true)
	return p.lib.drv.Check("enqueueing a barrier", w.enqueue(stream, call{
		what: fmt.Sprintf("nvshmemx_barrier_on_stream of team %d", team), rank: p.number,
		result: func([][]byte, []byte) []byte { return nil },
	}))
}

// reduceRoom is how many bytes of input a reduce-scatter takes: half of NVSHMEM_REDUCE_SCRATCH_SIZE.
const reduceRoom = 1 << 18

// Collective gives one of NVSHMEM's collectives. Of those other than the all-reduce NVSHMEM may write a PE's output before its stream has come to the call, so
// that one without a barrier in front is noted.
func (p *pe) Collective(what, dtype, op string) (nvshmem.Collective, error) {
	combines := what == nvshmem.Reduce || what == nvshmem.ReduceScatter
	moves := slices.Contains([]string{nvshmem.Broadcast, nvshmem.Collect, nvshmem.AllToAll}, what)
	if sizes[dtype] == 0 || !combines && !moves || combines && !slices.Contains([]string{"sum", "prod", "min", "max"}, op) {
		return nil, fmt.Errorf("NVSHMEM has no %s of %s by %q: %w", what, dtype, op, errs.ErrUnsupported)
	}
	return func(team nvshmem.Team, dst, src uint64, count int64, root int, stream uintptr) error {
		name := fmt.Sprintf("nvshmemx_%s_on_stream of %d %s %s by team %d", what, count, dtype, op, team)
		w, own, err := p.team(name, team)
		if err != nil {
			return err
		}
		pes := int64(len(w.made))
		if count < 1 || dst < own || dst-own >= heapRoom || src < own || src-own >= heapRoom || root < 0 || int64(root) >= pes {
			p.lib.machine.Violation("%s from %#x to %#x, root %d", name, src, dst, root)
			return fmt.Errorf("%s from %#x to %#x, root %d: %w", name, src, dst, root, errs.ErrInvalid)
		}
		block := count * int64(sizes[dtype])
		if was := w.free(p.number, false); !was && what != nvshmem.Reduce {
			p.lib.machine.Violation("%s without a barrier in front", name)
		}
		// The memory is at the same place of every heap.
		c := call{what: name + fmt.Sprintf(", from %d to %d, root %d", src-own, dst-own, root), rank: p.number, send: device.Ptr(src), bytes: block, recv: device.Ptr(dst)}
		if combines {
			c.joint = func(ins [][]byte) []byte { return combine(dtype, op, ins) }
		}
		mine := int64(p.number) * block
		switch what {
		case nvshmem.Reduce:
			c.result = func(_ [][]byte, all []byte) []byte { return all }
		case nvshmem.Broadcast:
			c.result = func(ins [][]byte, _ []byte) []byte { return ins[root] }
		case nvshmem.Collect:
			c.result = func(ins [][]byte, _ []byte) []byte { return slices.Concat(ins...) }
		case nvshmem.ReduceScatter:
			c.bytes *= pes
			c.result = func(_ [][]byte, all []byte) []byte { return all[mine:][:block] }
			if pes > 1 && c.bytes > reduceRoom {
				p.lib.machine.Violation("%s: there is no room for %d bytes, and the kernel would end the context", name, c.bytes)
			}
		default:
			c.bytes *= pes
			c.result = func(ins [][]byte, _ []byte) (out []byte) {
				for _, in := range ins {
					out = append(out, in[mine:][:block]...)
				}
				return out
			}
		}
		return p.lib.drv.Check("enqueueing "+name, w.enqueue(stream, c))
	}, nil
}

// MulticastPtr is nvshmemx_mc_ptr of all PEs.
func (p *pe) MulticastPtr(at uint64) (uint64, error) {
	if !p.multicast {
		p.lib.machine.Violation("nvshmemx_mc_ptr where multicast is off")
		return 0, fmt.Errorf("multicast is switched off: %w", errs.ErrUnsupported)
	}
	j, err := p.started("nvshmemx_mc_ptr")
	if err != nil {
		return 0, err
	}
	defer p.lib.mu.Unlock()
	off := at - uint64(p.heap(p.number))
	for _, x := range j.pieces {
		if x.cast != nil && off >= x.at && off-x.at < x.bytes {
			return uint64(x.cast.at[p.number]) + off - x.at, nil
		}
	}
	return 0, nil
}
