package nixl

import (
	"context"
	"fmt"
	"slices"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/nixl"
)

// offer is what other ranks need to reach one rank's memory.
type offer struct {
	Block    nixl.Block
	Pad      int64  // where the pad begins; 0 if there is none
	Shares   string `json:",omitempty"` // how it is shared on an island; "" if only the library reaches it
	Metadata []byte
}

// mapping is what this rank knows about the memory of all ranks.
type mapping struct {
	own   device.Ptr
	rank  int
	peers []nixl.Block // by rank
	isle  *isle
	near  backend.Mapping // of the island; nil where no memory has addresses
}

// Rendezvous exchanges what the ranks need to reach each other's memory.
func (b *Backend) Rendezvous(ctx context.Context, ba backend.Allocation) (backend.Mapping, error) {
	var mine offer
	var failure error
	a, ok := ba.(*allocation)
	if ok && a.backend == b {
		mine = offer{Block: a.region, Pad: a.pad, Shares: a.shares}
	} else {
		failure = fmt.Errorf("an allocation of another backend: %w", errs.ErrInvalid)
	}
	offers, err := b.share(ctx, "memory", b.node.memory, mine, failure)
	if offers == nil {
		return nil, err
	}
	// From here on a failure is this rank's alone, and the others of its island are told. Memory that the ranks share in different ways, or some not at
	// all, has addresses nowhere: all ranks of the group do the same with it.
	mapped := b.isle != nil && !slices.ContainsFunc(offers, func(o offer) bool { return o.Shares == "" || o.Shares != offers[0].Shares })
	if !mapped {
		b.node.driver.rouse() // what comes to this memory comes through the library
	}
	if err == nil {
		err = b.warm(ctx, offers, mapped)
	}
	m := &mapping{rank: b.group.Rank(), peers: blocksOf(offers), isle: b.isle}
	if ok {
		m.own = a.ptr
	}
	if !mapped {
		if err != nil {
			return nil, err
		}
		return m, nil
	}
	if m.near, err = b.isle.meet(ctx, a.near, err); err != nil {
		return nil, err
	}
	if b.whole() {
		return wholeMapping{m}, nil
	}
	return m, nil
}

// share exchanges what the ranks need to reach each other's registered regions. Collective. A failure of one rank beforehand is an error on all, which
// get no offers. With offers, an error is this rank's alone, for the caller to vote on.
func (b *Backend) share(ctx context.Context, what string, m nixl.Memory, mine offer, failure error) ([]offer, error) {
	if failure == nil {
		mine.Metadata, failure = b.node.engine.MetadataOf(m, mine.Block)
	}
	offers, err := backend.Tell(ctx, b.group, "sharing "+what, mine, failure)
	if err != nil {
		return nil, err
	}
	for r, o := range offers {
		if r == b.group.Rank() {
			continue
		}
		if _, err := b.node.learn(ctx, o.Metadata); err != nil {
			return offers, fmt.Errorf("memory of rank %d: %w", r, err)
		}
	}
	return offers, nil
}

// blocksOf returns the memory of each rank.
func blocksOf(offers []offer) []nixl.Block {
	blocks := make([]nixl.Block, len(offers))
	for r, o := range offers {
		blocks[r] = o.Block
	}
	return blocks
}

// Peer returns this rank's own address, and that of a peer of the island; other memory has none.
func (m *mapping) Peer(rank int) (device.Ptr, error) {
	if rank == m.rank {
		return m.own, nil
	}
	if at := m.isle.number(rank); at >= 0 && m.near != nil {
		return m.near.Peer(at)
	}
	return 0, fmt.Errorf("backend %s moves memory of rank %d and does not map it; use put, get and transfers: %w", Name, rank, errs.ErrNotReachable)
}

// Unmap unmaps what the island shares. What the agent knows about the peers' memory is never found again.
func (m *mapping) Unmap(ctx context.Context) error {
	if m.near == nil {
		return nil
	}
	return between(m.isle.near.Device(), func() error { return m.near.Unmap(ctx) })
}
