package native

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/symmem/symmem/backend"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/errs"
)

// member is what a rank tells the others about itself when the backend is opened.
type member struct {
	UUID        string // of its device
	Share       bool   // whether it would share its device
	Granularity int64  // bytes that its memory is a multiple of
	Fabric      bool   // whether its memory can be passed between hosts
	NoMulticast string // why it cannot take part in multicast; "" if it can
	MustCast    bool   // whether it wants multicast or an error
}

// meet tells the others what this rank found out, or why it cannot take part, and agrees with them on what the backend can do.
func (b *Backend) meet(ctx context.Context, o *Options, failure error) error {
	var mine member
	if failure == nil {
		mine = member{
			UUID: b.device.UUID(), Share: o.ShareDevice, Granularity: b.found.granularity, Fabric: b.found.noFabric == "",
			NoMulticast: b.found.noMulticast, MustCast: o.Multicast == "on",
		}
	}
	peers, err := backend.Tell(ctx, b.group, "opening backend native", mine, failure)
	if err != nil {
		return err
	}
	b.peers = peers
	if b.islands, err = b.group.Islands(ctx); err != nil {
		return err
	}
	for _, p := range peers {
		b.granularity = max(b.granularity, p.Granularity)
		b.mustCast = b.mustCast || p.MustCast && len(peers) > 1
	}
	// From here on every rank decides alike, since all know the same.
	shared, err := sharing(peers)
	if err != nil {
		return err
	}
	b.noMulticast = b.agreeMulticast(shared)
	if b.noMulticast != "" {
		if b.mustCast {
			return fmt.Errorf("multicast is on, but %s; set it to auto or off: %w", b.noMulticast, errs.ErrUnsupported)
		}
	} else {
		b.multicast = b.found.multicast
	}
	pairs, err := b.unreachablePairs()
	all, err := backend.Tell(ctx, b.group, "opening backend native: reaching each other", pairs, err)
	if err != nil {
		return err
	}
	b.unreachable = some(slices.Concat(all...))
	if b.unreachable != "" {
		b.log.Warn("not all ranks can reach each other's memory", "pairs", b.unreachable)
	}
	return nil
}

// sharing reports whether ranks share a device, which is an error unless all of those ranks allow it.
func sharing(peers []member) (shared bool, err error) {
	for i, p := range peers {
		j := slices.IndexFunc(peers[:i], func(q member) bool { return q.UUID == p.UUID })
		if j < 0 {
			continue
		}
		if shared = true; !p.Share || !peers[j].Share {
			return true, errs.Invalid("opening backend native", "device", fmt.Sprintf("%s on rank %d and on rank %d", p.UUID, j, i),
				"a device for each rank: set device or local-rank, or allow the sharing with share-device (SYMMEM_SHARE_DEVICE=true)")
		}
	}
	return shared, nil
}

// agreeMulticast says why the ranks cannot have multicast; "" if they can.
func (b *Backend) agreeMulticast(shared bool) string {
	var whys []string
	for r, p := range b.peers {
		switch {
		case p.NoMulticast == "":
		case p.NoMulticast == b.peers[0].NoMulticast:
			if r == 0 {
				whys = append(whys, p.NoMulticast)
			}
		default:
			whys = append(whys, fmt.Sprintf("rank %d: %s", r, p.NoMulticast))
		}
	}
	switch {
	case len(whys) > 0:
		return some(whys)
	case shared:
		return "several ranks share a device, and a device can take part in multicast once"
	case b.islands.Count() > 1:
		return "the ranks are on several hosts, or in containers that cannot pass memory to each other"
	}
	return ""
}

// unreachablePairs lists the ranks whose memory this rank's device cannot reach, as far as that can be known before it is mapped: the driver says
// nothing about devices that this process does not see.
func (b *Backend) unreachablePairs() ([]string, error) {
	var pairs []string
	me := b.group.Rank()
	members := b.group.Members()
	for r, p := range b.peers {
		if !b.islands.Same(me, r) {
			if !b.peers[me].Fabric || !p.Fabric {
				apart := cmp.Or(b.islands.Why(), fmt.Sprintf("rank %d is on %s and rank %d on %s", me, members[me].Host, r, members[r].Host))
				pairs = append(pairs, apart+", and memory can be passed there only by fabric handles, which do not work (use backend nixl)")
			}
			continue
		}
		ordinal, seen := b.cudaDevices[p.UUID]
		if p.UUID == b.device.UUID() || !seen {
			continue
		}
		var can int32
		call := b.drv.DeviceCanAccessPeer(&can, b.device.Ordinal(), cu.DeviceOrdinal(ordinal))
		if err := b.drv.Check("cuDeviceCanAccessPeer", call); err != nil {
			return nil, err
		}
		if can == 0 {
			pairs = append(pairs, fmt.Sprintf("%s (rank %d) has no peer access to %s (rank %d); use backend nccl or host",
				b.device.UUID(), me, p.UUID, r))
		}
	}
	return pairs, nil
}

// some joins texts. If there are many, the last are only counted.
func some(texts []string) string {
	const most = 4
	if len(texts) > most {
		texts = append(slices.Clone(texts[:most]), fmt.Sprintf("and %d more", len(texts)-most))
	}
	return strings.Join(texts, "; ")
}
