package kernels

import (
	"context"
	"fmt"

	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/kernels/ptx"
	"github.com/symmem/symmem/tensor"
)

// NewBroadcast prepares a broadcast of t: after a run, every rank's copy of t has the elements of root's. Root's own copy is not touched, but
// for the form OneShotMultimem, which writes to it the bytes that it has. t may be of any shape and dtype, at any offset; 0 elements is no work. Collective: all ranks come with the same t, root and options
// (ErrMismatch with everybody's value if not), and t must have had its rendezvous. It blocks until all ranks have come. Close the plan.
//
// Its errors are those of [collective.New], ErrInvalid for a root that is no rank and for options that do not exist, and ErrUnsupported for a
// form that a broadcast has not on the device.
func NewBroadcast(ctx context.Context, t tensor.SymmetricTensor, root int, opts *Options) (*Plan, error) {
	m := newMaker("NewBroadcast", t, t, opts)
	return m.plan(ctx, &broadcast{m, root})
}

type broadcast struct {
	*maker
	root int
}

func (b *broadcast) check() (whole tensor.SymmetricTensor, err error) {
	return b.in, b.checkRoot(b.root)
}

func (b *broadcast) describe() string {
	return fmt.Sprintf("broadcast from rank %d of %d %s", b.root, b.in.NumElements(), b.in.DType())
}

func (b *broadcast) algorithms(kind device.Kind) []Algorithm {
	if kind != device.CUDA {
		return []Algorithm{OneShot, Hierarchical}
	}
	return []Algorithm{OneShotLL, OneShotPush, OneShotPull, TwoShotPush, TwoShotPull, OneShotMultimem}
}

// From so many ranks on, root gives each rank a shard by transfers, which all then have from there, if the message has viaAllBytes: what leaves root is the
// message once or twice, and not once for every other rank. It is the count of bytes on the wire; what another step costs was not measured.
const broadcastTwoPhaseRanks = 3

// viaAllBytes is the size of a message in bytes from which on transfers have each rank send a part of it to all, or combine a part, in place of
// the one rank that has it or is to get it: a step more, which takes longer between GPUs than what it saves of a smaller message. It was not
// measured.
var viaAllBytes = func(kind device.Kind, far bool) int64 {
	if kind == device.CUDA && !far {
		return 16 << 20
	}
	return 256 << 10
}

func (b *broadcast) spec(s *collective.Spec) {
	switch {
	case b.algorithm == Hierarchical && b.in.Device().Kind() == device.CUDA:
		b.byRails(s)
		return
	case b.algorithm == Hierarchical:
		b.byIslands(s)
		return
	}
	size, bytes := b.in.WorldSize(), b.in.Bytes()
	two := b.algorithm == TwoShotPull || b.algorithm == TwoShotPush || b.algorithm == Transfers && size >= broadcastTwoPhaseRanks && bytes >= viaAllBytes(b.in.Device().Kind(), b.far())
	v := &movement{maker: b.maker, pattern: ptx.Broadcast, root: b.root, passesOn: b.passesOn()}
	v.inLines = v.passesOn && bytes <= passLinesBytes(size) && b.wholePieces()
	if !two || v.inLines {
		v.phases = []phase{b.whole}
	} else {
		v.phases = []phase{b.scatter, b.gather}
	}
	v.spec(s)
}

// passLinesBytes is the longest message that so many ranks pass on in lines, which carry as many bytes of flags as of data, in place of chunks, which wait for fences (docs/hardware.md).
var passLinesBytes = func(size int) int64 {
	if size == 3 {
		return 5 << 19
	}
	return 3 << 20
}

// passBlocks is how many blocks pass on the lines of a message of bytes between so many ranks, where fewer than have something to do are faster; 0 is all (docs/hardware.md).
func passBlocks(bytes int64, size int) int {
	if size > 3 && bytes > 3<<19 {
		return 64
	}
	return 0
}

// whole is all of root's for every other rank.
func (b *broadcast) whole(from, to int) piece {
	if from != b.root || to == b.root {
		return piece{}
	}
	return piece{bytes: b.in.Bytes()}
}

// scatter is a shard for each other rank.
func (b *broadcast) scatter(from, to int) piece {
	if from != b.root || to == b.root {
		return piece{}
	}
	return b.shard(to)
}

// gather is every rank's shard for all that have not got it.
func (b *broadcast) gather(from, to int) piece {
	if to == b.root || from == to {
		return piece{}
	}
	return b.shard(from)
}

// passesOn reports whether ranks pass each chunk of a shard on as it comes. Between two there is nobody to pass it on to.
func (b *broadcast) passesOn() bool { return b.algorithm == TwoShotPush && b.in.WorldSize() > 2 }

// shard is one of equal shards, cut at whole cache lines. Where one phase is over before the next, root has one too. Where chunks are passed on as they come, it has none, so
// that the message leaves it once.
func (b *broadcast) shard(rank int) piece {
	n, shards, i := b.in.Bytes(), b.in.WorldSize(), rank
	if b.passesOn() {
		if rank == b.root {
			return piece{}
		}
		i = (rank - b.root - 1 + shards) % shards
		shards--
	}
	each := alignUp(shareElements(n, shards), shardAlign)
	lo := min(int64(i)*each, n)
	return piece{src: lo, dst: lo, bytes: min(lo+each, n) - lo, turn: rank}
}
