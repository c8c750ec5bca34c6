package nvshmem

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/cuda"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/nvshmem"
)

// collective is one of NVSHMEM's collectives, prepared. Each has a team of its own, because two collectives of one team on two
// streams would disturb each other.
type collective struct {
	backend  *Backend
	call     nvshmem.Collective // nil for a barrier
	what     string             // "" for an all-reduce, and otherwise as backend.AllReduce calls it
	turn     uint64
	team     nvshmem.Team
	in, out  device.Ptr
	count    int64
	root     int // a PE
	released bool
}

const barrier = "barrier"

// collectives are NVSHMEM's names, by those of this module. It has no reduction to one PE.
var collectives = map[string]string{
	"": nvshmem.Reduce, "broadcast": nvshmem.Broadcast, "all_gather": nvshmem.Collect, "reduce_scatter": nvshmem.ReduceScatter, "all_to_all": nvshmem.AllToAll,
}

const (
	// wide is how many bytes addresses and blocks are a multiple of where what is only moved goes as integers of 32 bits: for them NVSHMEM has
	// faster ways than for bytes.
	wide = 16
	// reduceScratch is the default of reduceScratchEnv.
	reduceScratch    = 1 << 19
	reduceScratchEnv = "NVSHMEM_REDUCE_SCRATCH_SIZE"
)

// PrepareAllReduce takes a team for the collective, and makes one if none is left of earlier ones. Collective. ErrUnsupported for a collective, a dtype
// or an operation that NVSHMEM does not have, for output that overlaps the input where NVSHMEM wants them apart, for a reduce-scatter that is larger than
// NVSHMEM's room for it, and in a group of only some PEs: NVSHMEM makes teams with all PEs, and the others do not come.
func (b *Backend) PrepareAllReduce(ctx context.Context, r *backend.AllReduce) (backend.PreparedAllReduce, error) {
	if _, known := collectives[r.Collective]; !known && r.Collective != barrier {
		return nil, fmt.Errorf("backend %s has no %s of the library's own: %w", Name, r.Collective, errs.ErrUnsupported)
	}
	if r.Parts != nil {
		return nil, fmt.Errorf("backend %s has no collectives among parts of a group: %w", Name, errs.ErrUnsupported)
	}
	if r.Name != Name {
		return nil, fmt.Errorf("backend %s has no collective called %s: %w", Name, r.Name, errs.ErrUnsupported)
	}
	if !b.all || !slices.IsSorted(b.pes) {
		return nil, fmt.Errorf("NVSHMEM's collectives need a team, which all its %d PEs make together, and this group has %d of them: %w",
			b.world.pes, b.group.Size(), errs.ErrUnsupported)
	}
	w := b.world
	p := &collective{backend: b, what: r.Collective, count: r.Count}
	name, failure := p.prepare(r)
	mine := ask{Op: "a team for NVSHMEM's " + name}
	stream := b.stream // a call that is given up may end after Close
	var warming atomic.Bool
	taken := make(chan uint64, 1) // the turn, when a team was taken in it
	take := func(turn uint64, _ []ask) error {
		team, err := w.takeTeam()
		if err != nil {
			return err
		}
		p.team, p.turn = team, turn
		w.hold(turn, &resource{team: team})
		taken <- turn
		return nil
	}
	// NVSHMEM bounds nothing, so no rank enqueues a collective before all have a team.
	warm := func(uint64, []ask) error {
		if w.warm[name] {
			return nil
		}
		warming.Store(true)
		err := p.warmUp(ctx, stream)
		w.warm[name] = err == nil
		return err
	}
	err := w.collectively(ctx, b.group, mine, failure, take, warm)
	if err != nil && warming.Load() {
		err = w.breakUp(onlySome(err))
	}
	if err != nil {
		select {
		case turn := <-taken: // all PEs give it back together, so that the book stays the same; if one has none, it is lost
			w.release(turn)
		default:
		}
		return nil, err
	}
	return p, nil
}

// prepare finds out what is called with what, and gives it a name, which is the same on all ranks where the call is.
func (p *collective) prepare(r *backend.AllReduce) (name string, err error) {
	const op = "PrepareAllReduce"
	if p.what == barrier {
		return barrier, nil
	}
	b := p.backend
	dtype, size := r.DType, int64(b.group.Size())
	for _, place := range []struct {
		alloc  backend.Allocation
		offset int64
		ptr    *device.Ptr
	}{{r.In, r.InOffset, &p.in}, {r.Out, r.OutOffset, &p.out}} {
		*place.ptr = b.inHeap(place.alloc.Ptr().Add(place.offset))
	}
	bytes := r.Count * elementBytes(dtype) // of the message, or of a block
	ins, outs := bytes, bytes
	switch p.what {
	case "all_gather":
		outs *= size
	case "reduce_scatter":
		ins *= size
	case "all_to_all":
		ins, outs = ins*size, outs*size
	}
	moves := p.what == "broadcast" || p.what == "all_gather" || p.what == "all_to_all"
	name = strings.TrimSpace(collectives[p.what] + " " + dtype)
	switch {
	case r.Count < 1:
		return name, errs.Invalid(op, "count", r.Count, "1 and more")
	case r.Root < 0 || int64(r.Root) >= size:
		return name, errs.Invalid(op, "root", r.Root, fmt.Sprintf("0 to %d", size-1))
	case p.what != "" && p.what != "broadcast" && p.in < p.out.Add(outs) && p.out < p.in.Add(ins):
		return name, fmt.Errorf("NVSHMEM's %s wants input and output that do not overlap, and these are %d bytes at %s and %d at %s: %w",
			collectives[p.what], ins, p.in, outs, p.out, errs.ErrUnsupported)
	case p.what == "reduce_scatter" && size > 1 && ins > b.world.reduceRoom():
		// NVSHMEM looks at it in the kernel, and ends the context there.
		return name, fmt.Errorf("NVSHMEM's reduce-scatter has room for %d bytes of input, and these are %d; make %s, in the environment before NVSHMEM starts, twice as large as the input: %w",
			b.world.reduceRoom(), ins, reduceScratchEnv, errs.ErrUnsupported)
	case moves && dtype == "u8" && bytes%wide == 0 && p.in%wide == 0 && p.out%wide == 0:
		dtype, p.count = "u32", r.Count/4
		name = collectives[p.what] + " u32"
	case !moves:
		name += " " + r.Op
	}
	p.root = b.pes[r.Root]
	p.call, err = b.world.lib.Collective(collectives[p.what], dtype, r.Op)
	return name, err
}

// elementBytes is the size of an element of a type, of which the name ends in its bits.
func elementBytes(dtype string) int64 {
	bits, err := strconv.Atoi(strings.TrimLeft(dtype, "abcdefghijklmnopqrstuvwxyz"))
	if err != nil {
		return 1 // the library has no such type, and says so
	}
	return int64(bits) / 8
}

// reduceRoom is how many bytes NVSHMEM's reduce-scatter can take in: half of its scratch memory, as one run may still be read when the next begins.
func (w *world) reduceRoom() int64 {
	room := int64(reduceScratch)
	for _, s := range w.lib.Settings() {
		if n, ok := nvshmem.ParseSize(s.Value); s.Name == reduceScratchEnv && ok {
			room = n
		}
	}
	return room / 2
}

// takeTeam takes a team for a collective. It is part of a turn.
func (w *world) takeTeam() (nvshmem.Team, error) {
	h := &w.heap
	if len(h.teams) > 0 {
		team := h.teams[0]
		h.teams = slices.Delete(h.teams, 0, 1)
		return team, nil
	}
	team, err := w.lib.NewTeam()
	if err != nil {
		return team, fmt.Errorf("after %d teams: %w", h.made, err)
	}
	h.made++
	return team, nil
}

// warmUp runs the first collective of a name, on scratch memory, so that the GPU loads its kernel: that must not happen while a stream is
// recorded. It is part of a turn.
func (p *collective) warmUp(ctx context.Context, stream device.Stream) error {
	b, w := p.backend, p.backend.world
	in := w.ref.Add(w.scratch)
	out := in
	if p.what != "" && p.what != "broadcast" {
		out = in.Add(alignment / 2) // a block of one element for each PE is not so large
	}
	if err := p.enqueue(stream, in, out, 1); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), b.timeout)
	defer cancel()
	return stream.Synchronize(ctx)
}

// Enqueue enqueues one run. NVSHMEM does not bound waits on the GPU: if a peer is lost, or cannot enqueue it, the work on the streams of the others
// never ends. So NVSHMEM is given up where that happens.
func (p *collective) Enqueue(s device.Stream) error {
	if err := p.backend.world.usable(); err != nil {
		return err
	}
	err := p.enqueue(s, p.in, p.out, p.count)
	if err != nil && !errors.Is(err, errs.ErrInvalid) {
		err = p.backend.world.breakUp(onlySome(err))
	}
	return err
}

// onlySome says why NVSHMEM is of no use after an error of one rank.
func onlySome(err error) error {
	return fmt.Errorf("a collective that only some ranks run never ends on them: %w", err)
}

func (p *collective) enqueue(s device.Stream, in, out device.Ptr, count int64) error {
	stream, ok := s.(*cuda.Stream)
	if !ok {
		return errs.Invalid("AllReduce", "stream", fmt.Sprintf("a %T", s), "a stream of a CUDA device")
	}
	return p.backend.device.WithContext(func() error {
		if p.what != "" {
			// What NVSHMEM puts may come before a peer's stream has done with its output: it asks callers for a barrier.
			if err := p.backend.world.lib.Barrier(p.team, uintptr(stream.Handle())); err != nil || p.call == nil {
				return err
			}
		}
		return p.call(p.team, uint64(out), uint64(in), count, p.root, uintptr(stream.Handle()))
	})
}

// Close releases the team, for another collective.
func (p *collective) Close() error {
	if !p.released {
		p.released = true
		p.backend.world.release(p.turn)
	}
	return nil
}
