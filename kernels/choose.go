package kernels

import (
	"math"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/kernels/ptx"
	"github.com/symmem/symmem/kernels/tuning"
)

// limit is the entry of a table for a world size of at least 2.
func limit(table []int64, size int) int64 { return table[min(size, len(table)-1)] }

// launchGeometry is how many blocks of how many threads a form is launched with, and the bytes of a lap of TwoShotFlow.
type launchGeometry struct {
	blocks, threads int
	lapBytes        int64
}

// atMost is the launch with no more than so many blocks, if that is not 0.
func (g launchGeometry) atMost(blocks int) launchGeometry {
	if blocks > 0 {
		g.blocks = min(g.blocks, blocks)
	}
	return g
}

// geometry gives the launch of a form for a message of bytes between size ranks, with laps of so many bytes if it is TwoShotFlow, on devices with so many multiprocessors, as it is
// the fastest: at most two blocks of 256 threads for each multiprocessor. The plan takes fewer blocks where these would not leave
// room for others.
func geometry(a Algorithm, bytes, lap int64, size, multiprocessors int) launchGeometry {
	const most = 256
	perBlock := func(units int64) launchGeometry {
		threads := most
		switch {
		case a == OneShotPush && units <= int64(multiprocessors)*64:
			threads = 64 // spread over more multiprocessors
		case units <= int64(multiprocessors)*128:
			threads = 128
		}
		blocks := (units + int64(threads) - 1) / int64(threads)
		return launchGeometry{blocks: int(min(max(blocks, 1), 2*int64(multiprocessors))), threads: threads}
	}
	vectors := (bytes + 15) / 16
	shard := (vectors + int64(size) - 1) / int64(size)
	switch a {
	case OneShotLL:
		return perBlock((bytes + 7) / 8)
	case TwoShotPush:
		return perBlock(shard)
	case TwoShotPull, TwoShotMultimem:
		return launchGeometry{blocks: int(min(max((shard+most-1)/most, 1), 2*int64(multiprocessors))), threads: most}
	case TwoShotFlow:
		// The workspace is world * blocks * 4 laps.
		g := launchGeometry{blocks: 2 * multiprocessors, threads: most, lapBytes: lap}
		// No more blocks than there are laps to do.
		laps := (shard*16 + g.lapBytes - 1) / g.lapBytes
		g.blocks = int(min(int64(g.blocks), max(laps, 1)))
		return g
	}
	return perBlock(vectors)
}

// localGeometry is the launch of OneShotPull for n bytes of arrays that are all in the memory of the device: it waits for nobody, and so need not leave room, and
// more threads get more out of that memory than out of links.
func localGeometry(n int64, multiprocessors int) launchGeometry {
	g := geometry(OneShotPull, n, 0, 2, multiprocessors)
	g.blocks = int(min(max((n/16+int64(g.threads)-1)/int64(g.threads), 1), 4*int64(multiprocessors)))
	return g
}

// allReducePushGeometry is pushGeometry for an all-reduce. In one shot 32 blocks are faster than fewer only for the least between two ranks: else it has as many as have work, or 4.
func allReducePushGeometry(a Algorithm, bytes int64, size, multiprocessors int) launchGeometry {
	g := pushGeometry(a, bytes, size, multiprocessors)
	if a == OneShotPush && (size > 2 || bytes >= 4<<10) {
		g.blocks = int(min(max((bytes/16+int64(g.threads)-1)/int64(g.threads), 4), int64(g.blocks)))
	}
	return g
}

// pushGeometry is geometry for the kernels of OneShotPush and TwoShotPush that take whole vectors. At least 32 blocks are faster than
// fewer, however little there is to do, but for all-reduces in one shot.
func pushGeometry(a Algorithm, bytes int64, size, multiprocessors int) launchGeometry {
	units, all := bytes/16, int64(multiprocessors)
	if a == TwoShotPush { // a warp has one peer
		units = (units + int64(size) - 1) / int64(size) * int64(size-1)
	}
	least := int64(64)
	if a == TwoShotPush && size > 5 {
		least = 256 // a single block has a warp for every peer
	} else if a == TwoShotPush && size > 3 {
		least = 128
	}
	var g launchGeometry
	for g.threads = 64; g.threads < 256 && units > all*int64(g.threads); g.threads *= 2 {
	}
	if units > 2*all*256 && least <= 128 {
		g.threads = 128 // so that the most threads fit into half of the device
	}
	g.threads = max(g.threads, int(least))
	g.blocks = int(min(max((units+int64(g.threads)-1)/int64(g.threads), 32), 8*all))
	return g
}

// oneShotWholeBytes is the longest message of an all-reduce in one shot between two ranks for which the kernel with more registers is the faster one: of longer ones
// half of a device has less than a thread for each vector with it (docs/hardware.md).
var oneShotWholeBytes = int64(3 << 19)

// oneShotLongBytes is the longest such message for which half of a device has a thread for each vector, with as few registers as the kernels for long messages take (docs/hardware.md).
var oneShotLongBytes = int64(2 << 20)

// flowThreads is how many threads a block of a reduce-scatter, or reduce, in chunks has, for shares of bytes: half as many where a block has few chunks, since
// the first and the last of them cross the links alone.
func flowThreads(bytes int64, size int) int {
	if size > 2 && ptx.ScatterFlowChunks(bytes, size, 256) < 640 {
		return 128
	}
	return 256
}

// flowGeometry is the launch of a reduce-scatter, or reduce, in chunks, for shares of bytes: a block a multiprocessor, of which half store and half combine, but no more
// than have a chunk. Twice as many are no faster. The plan has as many where two blocks of the kernel fit a multiprocessor, for which it is compiled.
func flowGeometry(bytes int64, size, multiprocessors int) launchGeometry {
	threads := flowThreads(bytes, size)
	pairs := min(max(ptx.ScatterFlowChunks(bytes, size, threads), 1), int64(max(multiprocessors/2, 1)))
	return launchGeometry{blocks: 2 * int(pairs), threads: threads}
}

// wholeMostBytes is the longest piece that the kernels for pieces of whole vectors take: as far as they were measured, and faster than those for any
// piece (docs/hardware.md).
const wholeMostBytes = 16 << 20

// flowLeastBytes is the shortest share of a reduce-scatter that is sent and combined in chunks, which is faster from there on, and flowMostBytes the
// most of a workspace with the shares of all others, or of a reduce with the message (docs/hardware.md).
var flowLeastBytes = int64(tuning.ChunksOver + 16)

const flowMostBytes = 256 << 20

// rootFlowLeastBytes is the shortest message of a reduce between so many ranks, more than two, that the others combine for root, in chunks.
var rootFlowLeastBytes = func(size int) int64 { return tuning.RootChunksOver(size) + 16 }

// The most bytes of a message that is small for the form Transfers, by world size (the last entry serves all above). On CUDA devices
// measured on H200 for 2 ranks, and by what more is on the wire for others: a small message is sent whole to every peer, at some
// 30 us less than what a large one takes however short it is.
var (
	hostTransferSmallBytes = int64(16 << 10)
	cudaTransferSmallBytes = [...]int64{2: 32 << 20, 3: 16 << 20, 4: 6 << 20, 5: 4 << 20, 6: 3 << 20, 7: 5 << 19, 8: 2 << 20}
)

// cudaTransferLapBytes is the most that a rank puts to all its peers together in one lap, on CUDA devices.
var cudaTransferLapBytes = int64(384 << 20)

// cudaFarTwoLapsBytes is the size of a message from which on two laps are faster than one, far between CUDA devices.
const cudaFarTwoLapsBytes = 256 << 20

// transferGeometry says whether a message of bytes between size ranks is small for the form Transfers, and else how long its laps
// are, in bytes. far says that peers have no pointers: then a put and a signal are calls of a library, and take longer.
func transferGeometry(kind device.Kind, far bool, bytes int64, size int) (small bool, lap int64) {
	if size == 1 {
		return true, bytes
	}
	// Each lap makes the ranks wait for each other twice, for some 50 us on GPUs, and two are enough for all but the last reduction to go
	// on beside transfers; but the workspace is transferSlots laps of every peer.
	most, longest, laps := hostTransferSmallBytes, int64(128<<10), int64(32)
	if far {
		most, longest, laps = 256<<10, 512<<10, 8
	}
	if kind == device.CUDA {
		most, longest, laps = limit(cudaTransferSmallBytes[:], size), cudaTransferLapBytes/int64(size-1), math.MaxInt64
		if far {
			most *= 2
		}
	}
	if bytes <= most {
		return true, bytes
	}
	shard := (bytes + int64(size) - 1) / int64(size)
	n := min((shard+longest-1)/longest, laps)
	if far && kind == device.CUDA && bytes >= cudaFarTwoLapsBytes {
		n = max(n, 2)
	}
	return false, alignUp((shard+n-1)/n, shardAlign)
}
