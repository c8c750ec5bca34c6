package nvshmem

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/cuda"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/multicast"
	"github.com/symmem/symmem/internal/nvshmem"
)

// member is what a rank tells the others of itself before the library is started.
type member struct {
	UUID        string // of its device
	Version     string // of the library
	Granularity int64  // that its heap grows by
	MaxHeap     int64
	Arena       int64
	Chunk       int64
	Total       int64  // memory of its GPU, in bytes
	NoMulticast string // why it may not take part in multicast; "" if it may
	MustCast    bool   // whether it wants multicast or an error
}

// start starts the library with the ranks of the group as its PEs. Collective.
func (b *Backend) start(ctx context.Context, o *Options, failure error) error {
	if err := b.refuseShared(o); err != nil {
		return err // on every rank alike
	}
	w := &world{
		log: b.log, lost: b.group.Lost(), lostErr: b.group.Err, timeout: o.KernelTimeout, pe: b.group.Rank(), pes: b.group.Size(),
		peOf: map[int]int{}, turned: make(chan struct{}), held: map[uint64]*resource{}, warm: map[string]bool{},
	}
	for r, m := range b.group.Members() {
		b.pes, w.peOf[m.WorldRank] = append(b.pes, r), r
	}
	b.all = true
	entered := false
	var mine member
	if failure == nil {
		failure = b.home.enter(b.group.Name())
		entered = failure == nil
	}
	if failure == nil {
		mine, failure = b.prepare(w, o)
	}
	err := b.agree(ctx, w, mine, failure)
	began := false
	if err == nil {
		began, err = b.begin(ctx, w, mine, o)
	}
	if err == nil {
		err = b.furnish(ctx, w, o)
	}
	switch {
	case err == nil:
		b.world, b.first = w, true
	case began:
		// Only all ranks together could finalize a library that has started on some of them.
		spent := fmt.Errorf("starting it failed half way: %w", err)
		_ = w.breakUp(spent)
		b.world = w
		b.home.leave(spent)
	case entered:
		b.home.leave(nil)
	}
	return err
}

// refuseShared refuses groups that the library cannot serve, before it is touched.
func (b *Backend) refuseShared(o *Options) error {
	members := b.group.Members()
	for r, m := range members {
		for q := range r {
			if members[q].Process == m.Process && o.home == &process {
				return fmt.Errorf("ranks %d and %d are in one process, and NVSHMEM has one state for a process: start a process for each rank "+
					"(symmem run, torchrun, mpirun), or use native or host: %w", q, r, errs.ErrUnsupported)
			}
		}
		if m.BootID != members[0].BootID {
			return fmt.Errorf("rank 0 is on %s and rank %d on %s: %s: %w", members[0].Host, r, m.Host, capabilities(false).Why["several_hosts"],
				errs.ErrUnsupported)
		}
	}
	return nil
}

// prepare opens the device and loads the library. What it opened is closed by giveUp, also after an error.
func (b *Backend) prepare(w *world, o *Options) (member, error) {
	policy, err := multicast.NewPolicy("nvshmem.New", o.Multicast, o.Getenv)
	if err != nil {
		return member{}, err
	}
	if b.device = o.Opened; b.device == nil {
		if b.device, err = openDevice(o, b.group.Err); err != nil {
			return member{}, err
		}
		b.owned = true
	}
	b.drv = b.device.Driver()
	if w.device = b.device; b.device.ComputeCapability() < 70 {
		return member{}, fmt.Errorf("%s (%s) is too old for NVSHMEM, which needs compute capability 7.0: %w", b.device.Name(), b.device.UUID(),
			errs.ErrUnsupported)
	}
	if err := b.drv.Require("cuMemGetInfo_v2", "cuMemGetAddressRange_v2"); err != nil {
		return member{}, err
	}
	b.noRegister = whyNoRegister(b.drv)
	if b.stream, err = b.device.NewStream(); err != nil {
		return member{}, err
	}
	if w.lib, err = o.load(&nvshmem.Options{Path: o.Library, Multicast: policy.Forbidden == "", Logger: o.Logger}); err != nil {
		return member{}, err
	}
	_, total, err := b.device.MemInfo()
	if err != nil {
		return member{}, err
	}
	m := member{
		UUID: b.device.UUID(), Version: w.lib.Version().String(), Granularity: nvshmem.DefaultGranularity, MaxHeap: defaultMaxHeap, Arena: o.Arena,
		Chunk: o.Chunk, Total: total, NoMulticast: policy.Forbidden, MustCast: policy.Must,
	}
	for _, s := range w.lib.Settings() {
		size, ok := nvshmem.ParseSize(s.Value)
		switch s.Name {
		case nvshmem.GranularityEnv:
			if !ok || size < 1 || size&(size-1) != 0 {
				return m, errs.Invalid("nvshmem.New", "environment variable "+s.Name, s.Value, "a power of two, in bytes; unset it")
			}
			m.Granularity = max(size, nvshmem.DefaultGranularity)
		case nvshmem.MaxHeapEnv:
			if !ok || size < 1 {
				return m, errs.Invalid("nvshmem.New", "environment variable "+s.Name, s.Value, "a number of bytes; unset it")
			}
			m.MaxHeap = size
		}
	}
	return m, removeStale()
}

// openDevice opens the GPU that the options name.
func openDevice(o *Options, lost func() error) (*cuda.Device, error) {
	c := cuda.Options{
		Driver: o.Driver, Device: o.Device, LocalRank: o.LocalRank, Logger: o.Logger, WaitTimeout: o.KernelTimeout, Err: lost,
	}
	if c.Driver == nil {
		var err error
		if c.Driver, err = cu.Load(&cu.LoadOptions{Logger: o.Logger}); err != nil {
			return nil, fmt.Errorf("opening the CUDA device: %w", err)
		}
	}
	return cuda.Open(&c)
}

// socketFolder is where NVSHMEM's processes pass memory to each other, through sockets called
// nvshmem-socket-<sender>-<receiver> by their process ids (sockets.cpp of NVSHMEM 3.4.5).
var socketFolder = "/tmp"

// removeStale removes sockets that an earlier process with this one's id has left behind, over which NVSHMEM would fail, and checks that new ones can
// be made.
func removeStale() error {
	left, err := filepath.Glob(filepath.Join(socketFolder, "nvshmem-socket-*-"+strconv.Itoa(os.Getpid())))
	if err != nil {
		return err
	}
	for _, path := range left {
		if info, err := os.Lstat(path); err != nil || info.Mode().Type() != os.ModeSocket {
			return fmt.Errorf("%s is in the way of NVSHMEM's sockets and is none itself; remove it: %w", path, errs.ErrUnavailable)
		}
		if err := os.Remove(path); err != nil {
			return fmt.Errorf("removing the socket %s that another process has left, in the way of NVSHMEM's (%w): %w", path, err, errs.ErrUnavailable)
		}
	}
	f, err := os.CreateTemp(socketFolder, "symmem-nvshmem-*")
	if err != nil {
		return fmt.Errorf("NVSHMEM passes memory through sockets in %s, which cannot be written (%w): %w", socketFolder, err, errs.ErrUnavailable)
	}
	return cmp.Or(f.Close(), os.Remove(f.Name()))
}

// agree makes sure that the ranks are about to start the same.
func (b *Backend) agree(ctx context.Context, w *world, mine member, failure error) error {
	all, err := backend.Tell(ctx, b.group, "opening backend nvshmem", mine, failure)
	if err != nil {
		return err
	}
	// From here on every rank decides alike, since all know the same.
	for _, err := range []error{
		backend.Alike("version of NVSHMEM", all, func(m *member) string { return m.Version }),
		backend.Alike("granularity of NVSHMEM's heap in bytes ("+nvshmem.GranularityEnv+")", all, func(m *member) int64 { return m.Granularity }),
		backend.Alike("largest size of NVSHMEM's heap in bytes ("+nvshmem.MaxHeapEnv+")", all, func(m *member) int64 { return m.MaxHeap }),
		backend.Alike("size of the arena in bytes ("+arenaEnv+")", all, func(m *member) int64 { return m.Arena }),
		backend.Alike("size of the heap's chunks in bytes", all, func(m *member) int64 { return m.Chunk }),
	} {
		if err != nil {
			return err
		}
	}
	for i, m := range all {
		if j := slices.IndexFunc(all[:i], func(q member) bool { return q.UUID == m.UUID }); j >= 0 {
			return errs.Invalid("opening backend nvshmem", "device", fmt.Sprintf("%s on rank %d and on rank %d", m.UUID, j, i),
				"a device for each rank (set device or local-rank): NVSHMEM hardly works for ranks that share one; use native")
		}
		if m.NoMulticast != "" && b.noMulticast == "" {
			b.noMulticast = m.NoMulticast
			if i > 0 {
				b.noMulticast = fmt.Sprintf("rank %d: %s", i, m.NoMulticast)
			}
		}
		b.mustCast = b.mustCast || m.MustCast && len(all) > 1
	}
	if len(all) == 1 && b.noMulticast == "" {
		b.noMulticast = "the group has only one rank"
	}
	if b.mustCast && b.noMulticast != "" {
		return fmt.Errorf("multicast is on, but %s; set it to auto or off: %w", b.noMulticast, errs.ErrUnsupported)
	}
	smallest := slices.MinFunc(all, func(a, b member) int { return cmp.Compare(a.Total, b.Total) })
	w.heap = heap{granularity: mine.Granularity, chunk: roundUp(mine.Chunk, chunkAlign), limit: mine.MaxHeap, total: smallest.Total}
	return nil
}

// begin starts the library. It reports whether that has begun: from there on a failure cannot be undone.
func (b *Backend) begin(ctx context.Context, w *world, mine member, o *Options) (began bool, err error) {
	t, id, err := b.lastSteps(ctx, w, mine, o)
	if t != nil {
		defer t.Close()
	}
	if err != nil {
		return false, err
	}
	err = t.call(ctx, "starting NVSHMEM", func() error { return w.lib.Start(w.pes, w.pe, id) })
	// Ranks whose start has not returned do not come, or say so: the error names them.
	return true, b.group.Vote(context.WithoutCancel(ctx), "NVSHMEM has started", err)
}

// lastSteps takes the last steps before the library starts, which reads its environment at its first start and never again. It returns the thread for
// the start, also after an error unless there is none, and the id by which the PEs meet.
func (b *Backend) lastSteps(ctx context.Context, w *world, mine member, o *Options) (*thread, *nvshmem.UniqueID, error) {
	now := reading{multicast: b.noMulticast == "", granularity: mine.Granularity}
	err := b.home.compare(now)
	if err == nil && !now.multicast {
		err = nvshmem.ForbidMulticast()
	}
	if err == nil && o.Preflight != nil {
		if err = o.Preflight(ctx); err != nil {
			err = fmt.Errorf("the preflight of NVSHMEM failed: %w", err)
		}
	}
	var t *thread
	if err == nil {
		t, err = w.thread()
	}
	if err := b.group.Vote(ctx, "preparing NVSHMEM", err); err != nil {
		return t, nil, err
	}
	b.home.read(now)
	var blob []byte
	if w.pe == 0 {
		err = t.call(ctx, "making NVSHMEM's unique id", func() error {
			id, err := w.lib.NewUniqueID()
			if err == nil {
				blob = id.Bytes()
			}
			return err
		})
	}
	ids, err := backend.Tell(ctx, b.group, "NVSHMEM's unique id", blob, err)
	if err != nil {
		return t, nil, err
	}
	id, err := nvshmem.ParseUniqueID(ids[0])
	// A rank that has died before this point is known to be lost, so only one that dies during what follows leaves the others waiting there.
	return t, id, b.group.Vote(ctx, "starting NVSHMEM", err)
}

// furnish allocates the arena and finds the addresses of the PEs' heaps.
func (b *Backend) furnish(ctx context.Context, w *world, o *Options) error {
	w.scratch = roundUp(o.Arena, alignment)
	bytes := w.scratch + alignment
	free, _, err := b.device.MemInfo()
	mine := ask{Op: "the arena", Bytes: bytes, Free: free, need: bytes}
	return b.group.Vote(context.WithoutCancel(ctx), "opening NVSHMEM's heap", w.collectively(ctx, b.group, mine, err,
		func(uint64, []ask) error {
			p, err := w.allocate(bytes)
			if err != nil {
				return err
			}
			w.ref = p
			w.arena.bytes = o.Arena
			if o.Arena > 0 {
				w.arena.free = spans{{0, roundUp(o.Arena, alignment)}}
			}
			w.peers = make([]device.Ptr, w.pes)
			var unreachable []string
			for pe := range w.pes {
				at, err := w.lib.Ptr(uint64(p), pe)
				if err != nil {
					return err
				}
				if w.peers[pe] = device.Ptr(at); at == 0 {
					unreachable = append(unreachable, strconv.Itoa(pe))
				}
			}
			if len(unreachable) > 0 {
				return fmt.Errorf("nvshmem_ptr gives rank %d no pointers to the memory of ranks %v, whose GPUs have no peer access to its own (%s); use nccl or host: %w",
					w.pe, unreachable, b.device.UUID(), errs.ErrNotReachable)
			}
			return nil
		}))
}

// least returns the least memory that a GPU has left.
func least(all []ask) int64 {
	return slices.MinFunc(all, func(a, b ask) int { return cmp.Compare(a.Free, b.Free) }).Free
}
