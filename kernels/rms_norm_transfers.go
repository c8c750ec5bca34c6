package kernels

import (
	"context"
	"fmt"

	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/device"
)

// normTransfers is how an all-reduce with a norm goes by transfers. A small message is put whole to every peer, and each rank sums everything;
// of a larger one each rank sums a shard, and puts that to everybody. Then each does the norm. The workspace is
//
//	sums   the whole message
//	slots  [world-1] of span bytes each, of the peers' shards. The next rank's comes first
type normTransfers struct {
	*norm
	small bool
	shard int64 // bytes; the last ones may be shorter, or empty
}

// The signals of a plan. The last one begins granted.
const (
	signalShard = iota
	signalSum
	signalNormRoom // the peer is done with its slots, and with its sums
	normSignals
)

func (n *norm) newTransfers() normTransfers {
	f := normTransfers{norm: n, shard: n.in.Bytes()}
	if f.small, _ = transferGeometry(n.in.Device().Kind(), n.far(), n.in.Bytes(), n.in.WorldSize()); !f.small {
		size := int64(n.in.WorldSize())
		f.shard = alignUp((n.in.Bytes()+size-1)/size, shardAlign)
	}
	return f
}

// piece is the range of bytes that owner sums.
func (f normTransfers) piece(owner int) (lo, hi int64) {
	if f.small {
		return 0, f.in.Bytes()
	}
	return min(int64(owner)*f.shard, f.in.Bytes()), min(int64(owner+1)*f.shard, f.in.Bytes())
}

// slot is where in owner's workspace writer's part goes.
func (f normTransfers) slot(owner, writer int) int64 {
	size := f.in.WorldSize()
	return alignUp(f.in.Bytes(), shardAlign) + int64((writer-owner+size)%size-1)*alignUp(f.shard, shardAlign)
}

func (n *norm) byTransfers(s *collective.Spec) {
	f := n.newTransfers()
	rank, size := n.in.Rank(), n.in.WorldSize()
	s.Parameters += fmt.Sprintf(", small %t, shards of %d bytes", f.small, f.shard)
	s.Workspace = f.slot(0, size-1) + alignUp(f.shard, shardAlign)
	s.Program = &collective.Program{Signals: normSignals, Granted: 1, Build: func(_ context.Context, b *collective.Builder) error {
		reduce, err := newLocalReduce(b, n.in.Device(), n.in.DType(), Sum, size, n.maxBlocks)
		if err != nil {
			return err
		}
		sums := b.Workspace(rank)
		lo, hi := f.piece(rank)
		srcs := make([]device.Ptr, size)
		var shards, results []collective.Put
		for k := range size {
			peer := (rank + k) % size
			if k == 0 {
				srcs[rank] = n.in.Ptr().Add(lo)
				continue
			}
			srcs[peer] = sums.Add(f.slot(rank, peer))
			from, to := f.piece(peer)
			shards = append(shards, collective.Put{Peer: peer, Tensor: collective.ToWorkspace, Offset: f.slot(peer, rank), Local: n.in.Ptr().Add(from), Bytes: to - from})
			results = append(results, collective.Put{Peer: peer, Tensor: collective.ToWorkspace, Offset: lo, Local: sums.Add(lo), Bytes: hi - lo})
		}
		b.Wait(signalNormRoom)
		b.Send(signalShard, shards...)
		if f.small {
			b.Finish(signalShard)
			reduce(srcs, sums.Add(lo), hi-lo)
		} else {
			b.Wait(signalShard)
			reduce(srcs, sums.Add(lo), hi-lo)
			b.Send(signalSum, results...)
			b.Finish(signalSum)
		}
		if err := n.step(b, sums); err != nil {
			return err
		}
		b.Signal(signalNormRoom)
		return nil
	}}
}
