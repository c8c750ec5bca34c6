package nvshmem

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/cuda"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/nvshmem"
)

// reduce is one of NVSHMEM's reductions, prepared. Each has a team of its own, because two reductions of one team on two
// streams would disturb each other.
type reduce struct {
	backend  *Backend
	call     nvshmem.Reduction
	turn     uint64
	team     nvshmem.Team
	in, out  device.Ptr
	count    int64
	released bool
}

// PrepareAllReduce takes a team for the reduction, and makes one if none is left of earlier ones. Collective. ErrUnsupported for a dtype
// or an operation that NVSHMEM does not have, and in a group of only some PEs: NVSHMEM makes teams with all PEs, and the others do
// not come.
func (b *Backend) PrepareAllReduce(ctx context.Context, r *backend.AllReduce) (backend.PreparedAllReduce, error) {
	if r.Collective != "" {
		return nil, fmt.Errorf("backend %s has no %s of the library's own: %w", Name, r.Collective, errs.ErrUnsupported)
	}
	if r.Name != Name {
		return nil, fmt.Errorf("backend %s has no all-reduce called %s: %w", Name, r.Name, errs.ErrUnsupported)
	}
	if !b.all {
		return nil, fmt.Errorf("NVSHMEM's reductions need a team, which all its %d PEs make together, and this group has %d of them: %w",
			b.world.pes, b.group.Size(), errs.ErrUnsupported)
	}
	w := b.world
	p := &reduce{backend: b, count: r.Count}
	call, failure := w.lib.Reduction(r.DType, r.Op)
	p.call = call
	for _, place := range []struct {
		alloc  backend.Allocation
		offset int64
		ptr    *device.Ptr
	}{{r.In, r.InOffset, &p.in}, {r.Out, r.OutOffset, &p.out}} {
		*place.ptr = b.inHeap(place.alloc.Ptr().Add(place.offset))
	}
	mine := ask{Op: "a team to reduce " + r.DType + " by " + r.Op}
	stream := b.stream // a call that is given up may end after Close
	name := r.DType + " " + r.Op
	var warming atomic.Bool
	take := func(turn uint64, _ []ask) error {
		team, err := w.takeTeam()
		p.team, p.turn = team, turn
		return err
	}
	// NVSHMEM bounds nothing, so no rank enqueues a reduction before all have a team.
	warm := func(turn uint64, _ []ask) error {
		w.hold(turn, &resource{team: p.team})
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
		return nil, err
	}
	return p, nil
}

// takeTeam takes a team for a reduction. It is part of a turn.
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

// warmUp runs the first reduction of a type and operation on scratch memory, so that the GPU loads its kernel: that must not happen while a stream is
// recorded. It is part of a turn.
func (p *reduce) warmUp(ctx context.Context, stream device.Stream) error {
	b, w := p.backend, p.backend.world
	at := w.ref.Add(w.scratch)
	if err := p.enqueue(stream, at, at, 1); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), b.timeout)
	defer cancel()
	return stream.Synchronize(ctx)
}

// Enqueue enqueues one run. NVSHMEM does not bound waits on the GPU: if a peer is lost, or cannot enqueue it, the work on the streams of the others
// never ends. So NVSHMEM is given up where that happens.
func (p *reduce) Enqueue(s device.Stream) error {
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
	return fmt.Errorf("a reduction that only some ranks run never ends on them: %w", err)
}

func (p *reduce) enqueue(s device.Stream, in, out device.Ptr, count int64) error {
	stream, ok := s.(*cuda.Stream)
	if !ok {
		return errs.Invalid("AllReduce", "stream", fmt.Sprintf("a %T", s), "a stream of a CUDA device")
	}
	return p.backend.device.WithContext(func() error {
		return p.call(p.team, uint64(out), uint64(in), count, uintptr(stream.Handle()))
	})
}

// Close releases the team, for another reduction.
func (p *reduce) Close() error {
	if !p.released {
		p.released = true
		p.backend.world.release(p.turn)
	}
	return nil
}
