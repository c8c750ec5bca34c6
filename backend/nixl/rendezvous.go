package nixl

import (
	"context"
	"fmt"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/nixl"
)

// offer is what reaching one rank's memory takes.
type offer struct {
	Block    nixl.Block
	Metadata []byte
}

// mapping is what this rank knows of everybody's memory.
type mapping struct {
	own   device.Ptr
	rank  int
	peers []nixl.Block // by rank
}

// Rendezvous exchanges what reaching the memory takes.
func (b *Backend) Rendezvous(ctx context.Context, ba backend.Allocation, _ *backend.Agreement) (backend.Mapping, error) {
	var region nixl.Block
	var failure error
	a, ok := ba.(*allocation)
	if ok && a.backend == b {
		region = a.region
	} else {
		failure = fmt.Errorf("an allocation of another backend: %w", errs.ErrInvalid)
	}
	blocks, err := b.share(ctx, "memory", b.node.memory, region, failure)
	if err != nil {
		return nil, err
	}
	return &mapping{own: a.ptr, rank: b.group.Rank(), peers: blocks}, nil
}

// share gives the others what reaching a registered region takes, and takes theirs. Collective. The caller sees to a vote on what
// becomes of it; the failure of one rank before is an error on all.
func (b *Backend) share(ctx context.Context, what string, m nixl.Memory, region nixl.Block, failure error) ([]nixl.Block, error) {
	mine := offer{Block: region}
	if failure == nil {
		mine.Metadata, failure = b.node.engine.MetadataOf(m, region)
	}
	offers, err := tell(ctx, b.group, "sharing "+what, mine, failure)
	if err != nil {
		return nil, err
	}
	blocks := make([]nixl.Block, len(offers))
	for r, o := range offers {
		blocks[r] = o.Block
		if r == b.group.Rank() {
			continue
		}
		if _, err := b.node.learn(ctx, o.Metadata); err != nil {
			return nil, fmt.Errorf("memory of rank %d: %w", r, err)
		}
	}
	return blocks, nil
}

// Peer is the own address; the peers' memory has none.
func (m *mapping) Peer(rank int) (device.Ptr, error) {
	if rank != m.rank {
		return 0, fmt.Errorf("backend %s moves memory of rank %d and does not map it; use put, get and transfers: %w", Name, rank, errs.ErrNotReachable)
	}
	return m.own, nil
}

// Unmap has nothing to do: what the agent knows of the peers' memory is never found again.
func (m *mapping) Unmap(context.Context) error { return nil }
