package nvshmem

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
)

// mapping is an allocation as one rank sees it after rendezvous.
type mapping struct {
	backend     *Backend
	peers       []device.Ptr // by rank
	multicast   device.Ptr   // 0 if there is no multicast address
	noMulticast string       // why there is none; "" if there is
	alias       *alias       // of registered memory; else nil
}

var _ backend.Multicaster = (*mapping)(nil)

// Rendezvous tells the ranks where in the heap each has its memory; memory of the caller's is registered with NVSHMEM first.
func (b *Backend) Rendezvous(ctx context.Context, ba backend.Allocation) (backend.Mapping, error) {
	m := &mapping{backend: b, noMulticast: b.whyNoMulticast()}
	a, ok := ba.(*allocation)
	var failure error
	mine := ask{Op: "rendezvous"}
	switch {
	case !ok || a.backend != b:
		failure = fmt.Errorf("an allocation of another backend: %w", errs.ErrInvalid)
	case a.kind == registered:
		mine.Kind, mine.Bytes, mine.Offset = a.kind, a.span, a.offset
		if x := b.aliasOf(a); x != nil {
			mine.Shares = x.turn + 1
		}
	default:
		mine.Kind, mine.Bytes, mine.Offset = a.kind, a.bytes, a.offset
	}
	if b.all {
		err := b.world.collectively(ctx, b.group, mine, failure, func(turn uint64, all []ask) error { return m.meet(turn, a, all) })
		if err != nil {
			return nil, errors.Join(err, m.Unmap(ctx))
		}
		return m, nil
	}
	name, all, err := b.among(ctx, mine, failure)
	if err != nil {
		return nil, err
	}
	a.part = name
	m.locate(a, all, 0)
	return m, nil
}

// meet does the part of a rendezvous that needs a turn of all PEs.
func (m *mapping) meet(turn uint64, a *allocation, all []ask) error {
	w := m.backend.world
	if err := sameKind(all); err != nil {
		return err
	}
	var base int64
	if a.kind == registered {
		if err := m.register(turn, a); err != nil {
			return err
		}
		base = w.offset(m.alias.at)
	}
	m.locate(a, all, base)
	if m.noMulticast == "" {
		return m.findMulticast(base+a.offset, all)
	}
	return nil
}

// sameKind returns an error if the ranks bring memory of different kinds.
func sameKind(all []ask) error {
	if err := backend.Alike("kind of memory (bring the same on all ranks)", all, func(a *ask) string { return string(a.Kind) }); err != nil {
		return err
	}
	if all[0].Kind == registered {
		if err := backend.Alike("bytes of the allocation to register", all, func(a *ask) int64 { return a.Bytes }); err != nil {
			return err
		}
		return backend.Alike("registration that is there already, 0 for none (bring memory of corresponding allocations)", all, func(a *ask) uint64 { return a.Shares })
	}
	return nil
}

// locate finds the addresses of all ranks' memory, whose offsets count from base.
func (m *mapping) locate(a *allocation, all []ask, base int64) {
	b := m.backend
	m.peers = make([]device.Ptr, len(all))
	for r := range all {
		m.peers[r] = b.world.at(b.pes[r], base+all[r].Offset)
	}
	m.peers[b.group.Rank()] = a.ptr
}

// noneThere is why NVSHMEM has no multicast address for memory of the heap.
const noneThere = "NVSHMEM has no multicast address for it (nvshmemx_mc_ptr): the GPUs have no NVLink multicast, or it could not be set up"

// findMulticast finds the address that reaches all ranks' memory, if it is at the same place of every heap. NVSHMEM has made its multicast objects
// with the heap, so this makes none.
func (m *mapping) findMulticast(offset int64, all []ask) error {
	if err := backend.Alike("place in the heap", all, func(a *ask) int64 { return a.Offset }); err != nil {
		m.noMulticast = err.Error()
		return nil
	}
	b := m.backend
	p, err := b.world.lib.MulticastPtr(uint64(b.world.ref.Add(offset)))
	if err != nil {
		return err
	}
	if m.multicast = device.Ptr(p); p != 0 {
		return nil
	}
	if m.noMulticast = noneThere; b.mustCast {
		return fmt.Errorf("multicast is on, but %s; set it to auto or off: %w", noneThere, errs.ErrUnsupported)
	}
	return nil
}

// EnableMulticast returns the address that NVSHMEM has for the memory, if all ranks have one.
func (m *mapping) EnableMulticast(ctx context.Context) (device.Ptr, error) {
	var failure error
	if m.multicast.IsNil() {
		failure = fmt.Errorf("%s: %w", m.noMulticast, errs.ErrUnsupported)
	}
	if err := m.backend.group.Vote(ctx, "multicast address", failure); err != nil {
		return 0, m.refuseMulticast(err)
	}
	return m.multicast, nil
}

// refuseMulticast turns the error of the ranks' vote into ErrUnsupported. If NVSHMEM has no address on a rank, the other windows have none either.
func (m *mapping) refuseMulticast(err error) error {
	vote, agreed := errors.AsType[*group.VoteError](err)
	if !agreed {
		return err
	}
	if slices.ContainsFunc(vote.Failures, func(f group.RankFailure) bool { return strings.Contains(f.Text, noneThere) }) {
		b := m.backend
		b.mu.Lock()
		b.noMulticast = "it was tried and failed: " + vote.Error()
		b.mu.Unlock()
	}
	return fmt.Errorf("%w: %w", errs.ErrUnsupported, err)
}

// Peer returns the place of rank's memory in its heap, and for this rank the allocation itself. The error says that NVSHMEM has torn its heap down.
func (m *mapping) Peer(rank int) (device.Ptr, error) {
	if err := m.backend.world.gone(); err != nil {
		return 0, err
	}
	return m.peers[rank], nil
}

// Unmap forgets the addresses; the heap stays mapped. Registered memory leaves the heap when all ranks have unmapped it, with their next agreement.
func (m *mapping) Unmap(context.Context) error {
	if m.alias != nil {
		m.backend.forget(m.alias)
		m.alias = nil
	}
	return nil
}
