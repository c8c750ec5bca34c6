package simlib

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"maps"
	"slices"
	"sync/atomic"
	"unsafe"

	"github.com/symmem/symmem/device"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/nccl"
	"github.com/symmem/symmem/internal/simcuda"
)

const (
	ncclVersion nccl.Version = 23007
	// stride is how far the ranks' copies of a window are apart. NCCL takes the memory of the largest GPU, in whole 4 GiB.
	stride = 16 << 30
	// structure is the room for what a window's handle points to, of which the first 32 bytes are as in NCCL 2.28 to 2.30.
	structure = 128
)

// NCCL is the library of a process with all ranks. Its functions may be called from several goroutines at once.
type NCCL struct {
	host
	worlds  map[nccl.UniqueID]*world
	comms   map[nccl.CommHandle]*comm
	windows map[nccl.WindowHandle]*window
	last    nccl.CommHandle
	groups  map[int]*group        // by thread: that is open
	owned   map[device.Ptr]uint64 // memory of ncclMemAlloc
	hosts   []int                 // GPUs of each host, and last of all others; nil: there is one host
	gin     bool                  // they send over the network of themselves
}

// world is what the communicators of some ranks share.
type world struct {
	calls  *rounds
	work   *work
	spans  []*span // where windows are, ascending
	joined []*comm // by rank
}

// span is a window's place, the same for all ranks: so far from where a rank's copies begin.
type span struct {
	at, bytes uint64
	users     int
	cast      *cast
}

// comm is a rank's communicator.
type comm struct {
	world    *world
	rank     int
	gpu      int
	blocking bool
	putting  uintptr      // the stream that its puts are on
	flying   atomic.Int64 // how many of them have not arrived
	pending  *round
	aborted  chan struct{}
	base     device.Ptr // of the copies of all ranks
	shelf    device.Ptr // structures of windows
	slots    []bool     // of the shelf, that are taken
	windows  []*window
	failed   nccl.Result
}

// window is a rank's side of one.
type window struct {
	comm *comm
	span *span
	base device.Ptr // the allocation
	slot int
	from uint64 // where in the allocation it begins
	size uint64 // bytes
	all  []device.Ptr

	symmetric bool // NCCL_WIN_COLL_SYMMETRIC
}

// NewNCCL makes an NCCL for the GPUs of a machine.
func NewNCCL(m *simcuda.Machine) *NCCL {
	return &NCCL{
		host: newHost(m), worlds: map[nccl.UniqueID]*world{}, comms: map[nccl.CommHandle]*comm{}, windows: map[nccl.WindowHandle]*window{},
		owned: map[device.Ptr]uint64{}, groups: map[int]*group{},
	}
}

// Spread makes the GPUs those of several hosts, in their order: windows end there. Each host has as many as gpus says, and those after the last of them as many as
// that. Backends have to be told by NCCL_HOSTID, with another value for each host, as NCCL itself would be. To be called before the functions are.
func (n *NCCL) Spread(gpus ...int) { n.hosts = gpus }

// Left lists what was made and not given back.
func (n *NCCL) Left() (left []string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for what, k := range map[string]int{"communicators": len(n.comms), "windows": len(n.windows), "allocations of ncclMemAlloc": len(n.owned)} {
		if k > 0 {
			left = append(left, fmt.Sprintf("%d %s", k, what))
		}
	}
	slices.Sort(left)
	return left
}

// Functions is NCCL's table.
func (n *NCCL) Functions() *nccl.Functions {
	f := &nccl.Functions{
		GetVersion:     func(v *int32) nccl.Result { *v = int32(ncclVersion); return nccl.Success },
		GetErrorString: func(r nccl.Result) string { return "by the simulated NCCL: " + r.String() },
		GetLastError:   func(nccl.CommHandle) string { return "" },
		GetUniqueID:    func(id *nccl.UniqueID) nccl.Result { n.id(id[:]); return nccl.Success },

		// Collectives in a group are put on the streams when they are called, in the order in which the group's end would, and messages at its end.
		GroupStart: n.groupStart, GroupEnd: n.groupEnd, Send: n.message(true), Recv: n.message(false),

		CommInitRankScalable: n.initRank, CommSplit: n.split, CommAsyncError: n.asyncError,
		CommFinalize: func(h nccl.CommHandle) nccl.Result {
			return n.on(h, func(c *comm) nccl.Result {
				if c.busy() {
					return nccl.InvalidArgument
				}
				return nccl.Success
			})
		},
		CommDestroy:  func(h nccl.CommHandle) nccl.Result { return n.end(h, false) },
		CommAbort:    func(h nccl.CommHandle) nccl.Result { return n.end(h, true) },
		CommCount:    n.number(func(c *comm) int { return c.world.calls.size }),
		CommUserRank: n.number(func(c *comm) int { return c.rank }),
		CommCuDevice: n.number(func(c *comm) int { return c.gpu }),
		TeamLsa: func(h nccl.CommHandle) (t nccl.Team) {
			n.on(h, func(c *comm) nccl.Result {
				ranks := n.team(c.world)
				t = nccl.Team{Ranks: int32(ranks), Rank: int32(c.rank % ranks), Stride: 1}
				return nccl.Success
			})
			return t
		},
		MemAlloc: n.memAlloc, MemFree: n.memFree,
		CommWindowRegister: n.register, CommWindowDeregister: n.deregister,
		GetPeerDevicePointer: func(h nccl.WindowHandle, offset uintptr, rank int32, p *uint64) nccl.Result {
			return n.window(h, func(w *window) nccl.Result {
				if rank < 0 || int(rank) >= w.comm.world.calls.size {
					return nccl.InvalidArgument
				}
				if team := n.team(w.comm.world); int(rank)/team != w.comm.rank/team {
					*p = 0
					return nccl.Success
				}
				*p = uint64(w.copyOf(int(rank))) + w.from + uint64(offset)
				return nccl.Success
			})
		},
		CommQueryProperties: func(h nccl.CommHandle, props *byte) nccl.Result {
			return n.on(h, func(c *comm) nccl.Result {
				const multimem, bytes, magic = 33, 40, 0xcafebeef
				b := unsafe.Slice(props, bytes)
				if binary.LittleEndian.Uint64(b) == rmaBytes {
					return n.rmaProperties(c, unsafe.Slice(props, rmaBytes))
				}
				if binary.LittleEndian.Uint64(b) != bytes || binary.LittleEndian.Uint32(b[8:]) != magic {
					return nccl.InvalidArgument
				}
				b[multimem] = 0
				if c.casts(n.machine) && !n.severalHosts(c.world) {
					b[multimem] = 1
				}
				return nccl.Success
			})
		},
	}
	f.MulticastSource = func() (*nccl.Multicast, error) {
		return &nccl.Multicast{GetLsaMultimemDevicePointer: n.multimem}, nil
	}
	n.collectives(f)
	f.PutSignal = n.putSignal
	return f
}

// on calls f with a communicator, on a thread with its GPU's context.
func (n *NCCL) on(h nccl.CommHandle, f func(c *comm) nccl.Result) nccl.Result {
	n.mu.Lock()
	defer n.mu.Unlock()
	c := n.comms[h]
	if c == nil {
		n.machine.Violation("NCCL's communicator %#x is none", h)
		return nccl.InvalidArgument
	}
	if now := n.machine.Current(); now != c.gpu {
		n.machine.Violation("a communicator of GPU %d was used with the context of GPU %d", c.gpu, now)
	}
	return f(c)
}

func (n *NCCL) number(of func(c *comm) int) func(nccl.CommHandle, *int32) nccl.Result {
	return func(h nccl.CommHandle, v *int32) nccl.Result {
		return n.on(h, func(c *comm) nccl.Result { *v = int32(of(c)); return nccl.Success })
	}
}

func (n *NCCL) window(h nccl.WindowHandle, f func(w *window) nccl.Result) nccl.Result {
	n.mu.Lock()
	defer n.mu.Unlock()
	w := n.windows[h]
	if w == nil {
		n.machine.Violation("NCCL's window %#x is none", h)
		return nccl.InvalidArgument
	}
	return f(w)
}

// copyOf is where this rank has the allocation of another.
func (w *window) copyOf(rank int) device.Ptr {
	return w.comm.base.Add(int64(rank)*stride + int64(w.span.at))
}

// casts says whether there is multicast for all ranks.
func (c *comm) casts(m *simcuda.Machine) bool {
	return len(c.world.joined) > 1 && !slices.ContainsFunc(c.world.joined, func(o *comm) bool { return !m.Multicast(o.gpu) })
}

// together is a call that takes all ranks, made with mu held; it gives mu up. finish makes what the call makes, for all ranks.
func (n *NCCL) together(c *comm, call string, arg any, finish func(args []any)) nccl.Result {
	if c.busy() {
		n.machine.Violation("%s on rank %d, whose last call was not waited for", call, c.rank)
	}
	r := n.come(c.world.calls, c.rank, call, arg, func(args []any) {
		if err := try(func() { finish(args) }); err != nil {
			for _, o := range c.world.joined {
				if o != nil {
					o.failed = nccl.UnhandledCudaError
				}
			}
			c.failed = nccl.UnhandledCudaError
		}
	})
	c.pending = r
	blocking := c.blocking
	n.mu.Unlock()
	switch {
	case !blocking && (call == "ncclCommWindowRegister" || call == "ncclCommSplit"):
		return nccl.Success // although it may go on
	case !blocking:
		return nccl.InProgress
	case !n.await(r, c.aborted):
		return nccl.InternalError
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	c.busy()
	return c.failed
}

// busy says that the last call has not come to its end.
func (c *comm) busy() bool {
	if c.pending != nil {
		select {
		case <-c.pending.done:
			if c.pending.torn {
				c.failed = nccl.InternalError
			}
			c.pending = nil
		default:
		}
	}
	return c.pending != nil
}

// asyncError needs no context.
func (n *NCCL) asyncError(h nccl.CommHandle, r *nccl.Result) nccl.Result {
	n.mu.Lock()
	defer n.mu.Unlock()
	c := n.comms[h]
	if c == nil {
		n.machine.Violation("NCCL's communicator %#x is none", h)
		return nccl.InvalidArgument
	}
	if *r = nccl.InProgress; !c.busy() {
		*r = c.failed
	}
	return nccl.Success
}

// join makes a rank's communicator, which is not ready yet.
func (n *NCCL) join(w *world, rank, gpu int, config *nccl.ConfigLayout) (nccl.CommHandle, *comm) {
	n.last += 0x100
	c := &comm{world: w, rank: rank, gpu: gpu, blocking: config.Blocking != 0, aborted: make(chan struct{})}
	n.comms[n.last] = c
	for _, o := range w.joined {
		if o != nil && o.gpu == gpu {
			n.machine.Violation("two ranks of a communicator on GPU %d", gpu)
		}
	}
	w.joined[rank] = c
	return n.last, c
}

func (n *NCCL) newWorld(ranks int) *world {
	return &world{calls: newRounds(ranks), work: newWork(n.machine, ranks), joined: make([]*comm, ranks)}
}

// furnish gives the communicator its addresses.
func (n *NCCL) furnish(c *comm) {
	c.base = n.reserve(uint64(c.world.calls.size) * stride)
	m := n.create(c.gpu, granule)
	c.shelf = n.reserve(granule)
	n.show(c.shelf, granule, m, c.gpu)
	must("cuMemRelease", n.drv.MemRelease(m))
	c.slots = make([]bool, granule/structure)
}

func (n *NCCL) initRank(h *nccl.CommHandle, ranks, rank, ids int32, id *nccl.UniqueID, config *nccl.ConfigLayout) nccl.Result {
	n.mu.Lock()
	gpu := n.machine.Current()
	if gpu < 0 || ids != 1 || rank < 0 || rank >= ranks {
		n.mu.Unlock()
		n.machine.Violation("ncclCommInitRankScalable of rank %d of %d with %d ids on GPU %d", rank, ranks, ids, gpu)
		return nccl.InvalidArgument
	}
	w := n.worlds[*id]
	if w == nil {
		w = n.newWorld(int(ranks))
		n.worlds[*id] = w
	}
	if len(w.joined) != int(ranks) || w.joined[rank] != nil {
		n.mu.Unlock()
		n.machine.Violation("rank %d of %d comes to a communicator of %d, or comes twice", rank, ranks, len(w.joined))
		return nccl.InvalidArgument
	}
	handle, c := n.join(w, int(rank), gpu, config)
	*h = handle
	return n.together(c, "ncclCommInitRankScalable", nil, func([]any) {
		delete(n.worlds, *id)
		for _, o := range w.joined {
			n.furnish(o)
		}
	})
}

// splitting is what a rank brings to ncclCommSplit.
type splitting struct {
	color, key int32
	h          *nccl.CommHandle
	config     *nccl.ConfigLayout
}

// split makes communicators of the ranks: "Ranks with the same color will end up in the same communicator. Within the new communicator, key will be used to
// order ranks. NCCL_SPLIT_NOCOLOR as color will indicate the rank will not be part of any group and will therefore return a NULL communicator"
// (nccl.h, ncclCommSplit). Ranks with the same key keep their order.
func (n *NCCL) split(parent nccl.CommHandle, color, key int32, h *nccl.CommHandle, config *nccl.ConfigLayout) nccl.Result {
	n.mu.Lock()
	c := n.comms[parent]
	if c == nil || color < noColor {
		n.mu.Unlock()
		n.machine.Violation("ncclCommSplit of communicator %#x with color %d and key %d", parent, color, key)
		return nccl.InvalidArgument
	}
	return n.together(c, "ncclCommSplit", splitting{color, key, h, config}, func(args []any) {
		parts := map[int32][]int{}
		for rank, arg := range args {
			s := arg.(splitting)
			*s.h = 0
			if s.color != noColor {
				parts[s.color] = append(parts[s.color], rank)
			}
		}
		for _, color := range slices.Sorted(maps.Keys(parts)) {
			ranks := parts[color]
			slices.SortStableFunc(ranks, func(a, b int) int { return cmp.Compare(args[a].(splitting).key, args[b].(splitting).key) })
			w := n.newWorld(len(ranks))
			for rank, old := range ranks {
				s := args[old].(splitting)
				handle, o := n.join(w, rank, c.world.joined[old].gpu, s.config)
				n.furnish(o)
				*s.h = handle
			}
		}
	})
}

// noColor is NCCL_SPLIT_NOCOLOR.
const noColor = -1

// severalHosts reports whether the ranks are on several hosts.
func (n *NCCL) severalHosts(w *world) bool {
	return slices.ContainsFunc(w.joined, func(c *comm) bool { return n.hostOf(c.gpu) != n.hostOf(w.joined[0].gpu) })
}

// hostOf is the host of a GPU.
func (n *NCCL) hostOf(gpu int) int {
	host := 0
	for i, gpus := range n.hosts {
		if i == len(n.hosts)-1 {
			return host + gpu/gpus
		}
		if gpu < gpus {
			return host
		}
		gpu -= gpus
		host++
	}
	return 0
}

// team is how many ranks each LSA team has: the greatest number by which all runs of ranks of one host can be divided, as NCCL counts since 2.28.7
// (dev_runtime.cc).
func (n *NCCL) team(w *world) int {
	size, run := 0, 0
	for r := range w.joined {
		if run++; r+1 == len(w.joined) || n.hostOf(w.joined[r+1].gpu) != n.hostOf(w.joined[r].gpu) {
			for a, b := size, run; ; a, b = b, a%b {
				if size = a; b == 0 {
					break
				}
			}
			run = 0
		}
	}
	return size
}

// end destroys or aborts a communicator.
func (n *NCCL) end(h nccl.CommHandle, abort bool) nccl.Result {
	return n.on(h, func(c *comm) nccl.Result {
		if abort {
			close(c.aborted)
			c.world.work.abort(c.rank)
		} else if len(c.windows) > 0 {
			n.machine.Violation("ncclCommDestroy of a communicator with %d windows", len(c.windows))
		}
		delete(n.comms, h)
		err := try(func() {
			for _, w := range slices.Clone(c.windows) {
				n.remove(w)
			}
			if c.base == 0 {
				return // it was never ready
			}
			must("cuMemUnmap", n.drv.MemUnmap(c.shelf, granule))
			must("cuMemAddressFree", n.drv.MemAddressFree(c.shelf, granule))
			must("cuMemAddressFree", n.drv.MemAddressFree(c.base, uint64(c.world.calls.size)*stride))
		})
		if err != nil {
			return nccl.UnhandledCudaError
		}
		return nccl.Success
	})
}

func (n *NCCL) memAlloc(p *uint64, bytes uintptr) nccl.Result {
	n.mu.Lock()
	defer n.mu.Unlock()
	gpu := n.machine.Current()
	if gpu < 0 || bytes == 0 || bytes > 1<<40 {
		return nccl.InvalidArgument
	}
	size := roundUp(uint64(bytes), granule)
	err := try(func() {
		m := n.create(gpu, size)
		defer n.drv.MemRelease(m)
		at := n.reserve(size)
		n.show(at, size, m, n.reachers(gpu)...)
		n.owned[at] = size
		*p = uint64(at)
	})
	if err != nil {
		return nccl.UnhandledCudaError
	}
	return nccl.Success
}

func (n *NCCL) memFree(p uint64) nccl.Result {
	n.mu.Lock()
	defer n.mu.Unlock()
	at := device.Ptr(p)
	size, ok := n.owned[at]
	if !ok {
		n.machine.Violation("ncclMemFree of %s, which ncclMemAlloc has not given", at)
		return nccl.InvalidArgument
	}
	for _, w := range n.windows {
		if w.base == at {
			n.machine.Violation("ncclMemFree of memory that is a window of rank %d", w.comm.rank)
		}
	}
	delete(n.owned, at)
	err := try(func() {
		must("cuMemUnmap", n.drv.MemUnmap(at, size))
		must("cuMemAddressFree", n.drv.MemAddressFree(at, size))
	})
	if err != nil {
		return nccl.UnhandledCudaError
	}
	return nccl.Success
}

// registration is what a rank brings to a window.
type registration struct {
	base        device.Ptr
	span        uint64 // of the allocation
	from, bytes uint64 // of it
	handle      *nccl.WindowHandle
	flags       nccl.WindowFlags
}

func (n *NCCL) register(h nccl.CommHandle, p uint64, bytes uintptr, handle *nccl.WindowHandle, flags nccl.WindowFlags) nccl.Result {
	n.mu.Lock()
	c := n.comms[h]
	mine := registration{bytes: uint64(bytes), handle: handle, flags: flags}
	err := try(func() {
		m, base, span := n.retain(device.Ptr(p))
		mine.base, mine.span, mine.from = base, span, p-uint64(base)
		must("cuMemRelease", n.drv.MemRelease(m))
	})
	// ncclCommWindowRegister: "must be aligned to NCCL_WIN_REQUIRED_ALIGNMENT". What is no memory of cuMemCreate NCCL does not survive, or accepts in silence.
	if c == nil || err != nil || bytes == 0 || mine.from%nccl.WindowAlignment != 0 || mine.from+mine.bytes > mine.span {
		n.mu.Unlock()
		n.machine.Violation("ncclCommWindowRegister of %d bytes at %#x: %v", bytes, p, err)
		return nccl.InvalidArgument
	}
	return n.together(c, "ncclCommWindowRegister", mine, func(args []any) { n.make(c.world, args) })
}

// make makes a window of each rank. Where a rank does not reach another's memory, there is none, and no error.
func (n *NCCL) make(w *world, args []any) {
	first := args[0].(registration)
	for rank, arg := range args {
		if r := arg.(registration); r.bytes != first.bytes || r.span != first.span || r.from != first.from {
			n.machine.Violation("a window of %d bytes at %d in %d on rank 0, and of %d at %d in %d on rank %d",
				first.bytes, first.from, first.span, r.bytes, r.from, r.span, rank)
			panic(failed{"ncclCommWindowRegister", cu.InvalidValue})
		}
	}
	if n.severalHosts(w) && !n.gin {
		return // success, and no handle: 2.29 and later make windows of several hosts only where GPUs send over the network of themselves
	}
	s := w.place(first.span)
	var all []*window
	err := try(func() {
		for rank, arg := range args {
			r := arg.(registration)
			x := &window{comm: w.joined[rank], span: s, base: r.base, from: r.from, size: r.bytes, slot: -1, symmetric: r.flags&nccl.WindowSymmetric != 0}
			all = append(all, x)
			for other, o := range args {
				m, _, _ := n.retain(o.(registration).base)
				p := x.copyOf(other)
				err := try(func() { n.show(p, s.bytes, m, x.comm.gpu) })
				must("cuMemRelease", n.drv.MemRelease(m))
				if err != nil {
					panic(err)
				}
				x.all = append(x.all, p)
			}
		}
	})
	if err != nil {
		for _, x := range all {
			for _, p := range x.all {
				n.drv.MemUnmap(p, s.bytes)
			}
		}
		w.spans = slices.DeleteFunc(w.spans, func(o *span) bool { return o == s })
		return // success, and no handle: ncclCommWindowRegister in dev_runtime.cc
	}
	for rank, x := range all {
		c := x.comm
		x.slot = slices.Index(c.slots, false)
		c.slots[x.slot] = true
		b := make([]byte, structure)
		binary.LittleEndian.PutUint64(b[8:], uint64(x.copyOf(0))+x.from)
		binary.LittleEndian.PutUint32(b[16:], uint32(rank))
		binary.LittleEndian.PutUint32(b[20:], uint32(rank))
		binary.LittleEndian.PutUint32(b[24:], stride>>32)
		h := nccl.WindowHandle(c.shelf) + nccl.WindowHandle(x.slot)*structure
		must("writing the window's structure", n.machine.Write(c.gpu, device.Ptr(h), b))
		s.users++
		c.windows = append(c.windows, x)
		n.windows[h] = x
		*args[rank].(registration).handle = h
	}
}

// place finds room for a window.
func (w *world) place(bytes uint64) *span {
	s := &span{bytes: bytes}
	i := 0
	for ; i < len(w.spans) && w.spans[i].at-s.at < bytes; i++ {
		s.at = w.spans[i].at + w.spans[i].bytes
	}
	if s.at+bytes > stride {
		panic(failed{"room for a window", cu.OutOfMemory})
	}
	w.spans = slices.Insert(w.spans, i, s)
	return s
}

func (n *NCCL) deregister(h nccl.CommHandle, handle nccl.WindowHandle) nccl.Result {
	return n.on(h, func(c *comm) nccl.Result {
		w := n.windows[handle]
		if w == nil || w.comm != c {
			n.machine.Violation("ncclCommWindowDeregister of no window of the communicator")
			return nccl.InvalidArgument
		}
		if err := try(func() { n.remove(w) }); err != nil {
			return nccl.UnhandledCudaError
		}
		return nccl.Success
	})
}

// remove takes a rank's side of a window away. Local: the others have theirs, and with it this rank's memory.
func (n *NCCL) remove(w *window) {
	c, s := w.comm, w.span
	delete(n.windows, nccl.WindowHandle(c.shelf)+nccl.WindowHandle(w.slot)*structure)
	c.windows = slices.DeleteFunc(c.windows, func(o *window) bool { return o == w })
	c.slots[w.slot] = false
	if s.cast != nil {
		s.cast.leave(c.rank)
	}
	for _, p := range w.all {
		must("cuMemUnmap", n.drv.MemUnmap(p, s.bytes))
	}
	if s.users--; s.users == 0 {
		c.world.spans = slices.DeleteFunc(c.world.spans, func(o *span) bool { return o == s })
	}
}

// multimem is ncclGetLsaMultimemDevicePointer. It waits for the other ranks when a window's object is to be made.
func (n *NCCL) multimem(h nccl.WindowHandle, offset uintptr, p *uint64) nccl.Result {
	n.mu.Lock()
	w := n.windows[h]
	if w == nil || !w.comm.casts(n.machine) {
		n.mu.Unlock()
		if w == nil {
			n.machine.Violation("the multicast address of NCCL's window %#x, which is none", h)
			return nccl.InvalidArgument
		}
		*p = 0
		return nccl.Success
	}
	c, s := w.comm, w.span
	if s.cast == nil {
		r := n.come(c.world.calls, c.rank, "ncclGetLsaMultimemDevicePointer", w.base, func(args []any) {
			err := try(func() {
				var gpus []int
				var memory []device.Ptr
				for rank, arg := range args {
					gpus, memory = append(gpus, c.world.joined[rank].gpu), append(memory, arg.(device.Ptr))
				}
				s.cast = n.bind(gpus, memory, s.bytes)
			})
			if err != nil {
				n.machine.Violation("a multicast object: %v", err)
			}
		})
		n.mu.Unlock()
		if !n.await(r, c.aborted) {
			return nccl.InternalError
		}
		n.mu.Lock()
	}
	defer n.mu.Unlock()
	if s.cast == nil {
		return nccl.UnhandledCudaError
	}
	*p = uint64(s.cast.at[c.rank]) + w.from + uint64(offset)
	return nccl.Success
}

// dtypes and operations are the names of NCCL's numbers.
var (
	dtypes = map[nccl.DataType]string{
		nccl.Int8: "i8", nccl.Uint8: "u8", nccl.Int32: "i32", nccl.Uint32: "u32", nccl.Int64: "i64", nccl.Uint64: "u64",
		nccl.Float16: "f16", nccl.Float32: "f32", nccl.Float64: "f64", nccl.BFloat16: "bf16",
	}
	operations = map[nccl.Op]string{nccl.Sum: "sum", nccl.Prod: "prod", nccl.Max: "max", nccl.Min: "min", nccl.Avg: "avg"}
)

// collectives fills the table with those that run on streams.
func (n *NCCL) collectives(f *nccl.Functions) {
	reduce := func(t nccl.DataType, op nccl.Op) func([][]byte) []byte {
		return func(ins [][]byte) []byte { return combine(dtypes[t], operations[op], ins) }
	}
	f.AllReduce = func(send, recv uint64, count uintptr, t nccl.DataType, op nccl.Op, h nccl.CommHandle, stream uintptr) nccl.Result {
		return n.collective(h, stream, fmt.Sprintf("ncclAllReduce of %d %v, %v", count, t, op), send, recv, int64(count)*t.Bytes(), reduce(t, op),
			func(_ int, _ [][]byte, all []byte) []byte { return all })
	}
	f.Reduce = func(send, recv uint64, count uintptr, t nccl.DataType, op nccl.Op, root int32, h nccl.CommHandle, stream uintptr) nccl.Result {
		return n.collective(h, stream, fmt.Sprintf("ncclReduce of %d %v, %v, to %d", count, t, op, root), send, recv, int64(count)*t.Bytes(), reduce(t, op),
			func(rank int, _ [][]byte, all []byte) []byte {
				if rank != int(root) {
					return nil
				}
				return all
			})
	}
	f.Broadcast = func(send, recv uint64, count uintptr, t nccl.DataType, root int32, h nccl.CommHandle, stream uintptr) nccl.Result {
		return n.collective(h, stream, fmt.Sprintf("ncclBroadcast of %d %v from %d", count, t, root), send, recv, int64(count)*t.Bytes(), nil,
			func(_ int, ins [][]byte, _ []byte) []byte { return ins[root] })
	}
	f.AllGather = func(send, recv uint64, count uintptr, t nccl.DataType, h nccl.CommHandle, stream uintptr) nccl.Result {
		return n.collective(h, stream, fmt.Sprintf("ncclAllGather of %d %v", count, t), send, recv, int64(count)*t.Bytes(),
			func(ins [][]byte) []byte { return slices.Concat(ins...) }, func(_ int, _ [][]byte, all []byte) []byte { return all })
	}
	f.ReduceScatter = func(send, recv uint64, count uintptr, t nccl.DataType, op nccl.Op, h nccl.CommHandle, stream uintptr) nccl.Result {
		share := int64(count) * t.Bytes()
		return n.collective(h, stream, fmt.Sprintf("ncclReduceScatter of %d %v, %v", count, t, op), send, recv, -share, reduce(t, op),
			func(rank int, _ [][]byte, all []byte) []byte { return all[int64(rank)*share:][:share] })
	}
	f.AllToAll = func(send, recv uint64, count uintptr, t nccl.DataType, h nccl.CommHandle, stream uintptr) nccl.Result {
		share := int64(count) * t.Bytes()
		return n.collective(h, stream, fmt.Sprintf("ncclAlltoAll of %d %v", count, t), send, recv, -share, nil,
			func(rank int, ins [][]byte, _ []byte) (out []byte) {
				for _, in := range ins {
					out = append(out, in[int64(rank)*share:][:share]...)
				}
				return out
			})
	}
}

// collective puts one on a stream. Of fewer than 0 bytes each rank sends so many to every rank.
func (n *NCCL) collective(h nccl.CommHandle, stream uintptr, what string, send, recv uint64, bytes int64, joint func([][]byte) []byte,
	result func(rank int, ins [][]byte, all []byte) []byte,
) nccl.Result {
	var c *comm
	r := n.on(h, func(x *comm) nccl.Result {
		if c = x; x.busy() {
			n.machine.Violation("%s on rank %d, whose last call was not waited for", what, x.rank)
		}
		return nccl.Success
	})
	if r != nccl.Success || bytes == 0 {
		return r
	}
	if bytes < 0 {
		bytes *= -int64(c.world.calls.size)
	}
	if c.world.work.enqueue(stream, call{
		what: what, rank: c.rank, send: device.Ptr(send), bytes: bytes, recv: device.Ptr(recv), joint: joint,
		result: func(ins [][]byte, all []byte) []byte { return result(c.rank, ins, all) },
	}) != cu.Success {
		return nccl.UnhandledCudaError
	}
	return nccl.Success
}
