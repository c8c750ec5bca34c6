package kernels

import (
	"math"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/tensor"
)

// hostOneShotBytes is the size in bytes up to which one-shot is the faster form on the host device, by world size (the last
// entry serves all above). Found by `symmem bench --algorithm all`.
var hostOneShotBytes = [...]int64{2: 1 << 10, 3: 4 << 10, 4: 4 << 10}

// choose makes Auto, and on CUDA the families OneShot and TwoShot, into one form. Everything else stays as it was asked for. whole says that
// the message is whole vectors.
func choose(asked Algorithm, kind device.Kind, dtype tensor.DType, op Op, bytes int64, size int, whole bool) Algorithm {
	if kind == device.CUDA {
		return chooseCUDA(asked, dtype, op, bytes, size, whole)
	}
	if asked != Auto {
		return asked
	}
	if size < 2 || bytes <= hostOneShotBytes[min(size, len(hostOneShotBytes)-1)] {
		return OneShot
	}
	return TwoShot
}

// The sizes in bytes up to which each form is the fastest on CUDA devices, by world size (the last entry serves all above),
// measured on H200 with NVLink for 2 to 4 ranks and from a model of the bytes on the wire above. First for sums of f32, f16 and
// bf16, which have kernels that push whole lines; then for everything else.
var (
	oneShotPushBytes = [...]int64{2: 2 << 20, 3: 384 << 10, 4: 320 << 10, 5: 160 << 10, 6: 128 << 10, 7: 96 << 10, 8: 64 << 10}
	twoShotPushBytes = int64(12 << 20)
	// The same for messages of whole vectors.
	twoShotPushWholeBytes = [...]int64{2: 32 << 20, 3: 16 << 20, 4: 16 << 20, 5: 12 << 20}

	oneShotLLBytes   = [...]int64{2: 768 << 10, 3: 512 << 10, 4: 512 << 10, 5: 256 << 10, 6: 192 << 10, 7: 128 << 10, 8: 96 << 10}
	twoShotPullBytes = [...]int64{2: 8 << 20, 3: 4 << 20}
)

// copyEngineBytes is the size in bytes from which on Transfers is faster than every kernel on CUDA devices, by world size, measured as
// above; the last entry serves all above, for which it was not measured.
var copyEngineBytes = [...]int64{2: 1 << 30, 3: 1 << 30, 4: 1 << 30, 5: math.MaxInt64}

// copyEnginesWin reports whether Transfers is the fastest form where peers have pointers.
func copyEnginesWin(kind device.Kind, bytes int64, size int) bool {
	return kind == device.CUDA && size > 1 && bytes >= limit(copyEngineBytes[:], size)
}

// limit is the entry of a table for a world size of at least 2.
func limit(table []int64, size int) int64 { return table[min(size, len(table)-1)] }

// chooseCUDA picks the form by size and world size.
func chooseCUDA(asked Algorithm, dtype tensor.DType, op Op, bytes int64, size int, whole bool) Algorithm {
	if asked != Auto && asked != OneShot && asked != TwoShot {
		return asked
	}
	if size == 1 {
		return OneShotPull // a copy, or the rounding of an average
	}
	if Supported(device.CUDA, OneShotPush, dtype, op, size) {
		switch {
		case asked == OneShot, asked == Auto && bytes <= limit(oneShotPushBytes[:], size):
			return OneShotPush
		case bytes <= twoShotPushBytes, whole && bytes <= limit(twoShotPushWholeBytes[:], size):
			return TwoShotPush
		}
		return TwoShotFlow
	}
	switch {
	case asked == OneShot, asked == Auto && bytes <= limit(oneShotLLBytes[:], size):
		return OneShotLL
	case bytes <= limit(twoShotPullBytes[:], size):
		return TwoShotPull
	}
	return TwoShotFlow
}

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

// geometry gives the launch of a form for a message of bytes between size ranks, on devices with so many multiprocessors, as it is
// the fastest: at most two blocks of 256 threads for each multiprocessor. The plan takes fewer blocks where these would not leave
// room for others.
func geometry(a Algorithm, bytes int64, size, multiprocessors int) launchGeometry {
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
		// Laps of 32 KiB are the fastest from 64 MiB on; the workspace is world * blocks * 4 laps.
		g := launchGeometry{blocks: 2 * multiprocessors, threads: most, lapBytes: 16 << 10}
		if bytes >= 64<<20 {
			g.lapBytes = 32 << 10
		}
		// No more blocks than there are laps to do.
		laps := (shard*16 + g.lapBytes - 1) / g.lapBytes
		g.blocks = int(min(int64(g.blocks), max(laps, 1)))
		return g
	}
	return perBlock(vectors)
}

// pushGeometry is geometry for the kernels of OneShotPush and TwoShotPush that take whole vectors. At least 32 blocks are faster than
// fewer, however little there is to do.
func pushGeometry(a Algorithm, bytes int64, size, multiprocessors int) launchGeometry {
	units, all := bytes/16, int64(multiprocessors)
	if a == TwoShotPush { // a warp has one peer
		units = (units + int64(size) - 1) / int64(size) * int64(size-1)
	}
	blocks := func(threads int64) int64 { return (units + threads - 1) / threads }
	g := launchGeometry{threads: 128, blocks: int(min(max(blocks(64), 32), all))}
	if a == TwoShotPush && size > 5 {
		g.threads = 256 // a single block has a warp for every peer
	}
	switch {
	case units <= all*int64(g.threads):
	case units <= 2*all*256:
		g = launchGeometry{threads: 256, blocks: int(blocks(256))}
	case a == TwoShotPush && size <= 5: // so that the most threads fit into half of the device
		g = launchGeometry{threads: 128, blocks: int(min(blocks(128), 4*all))}
	case size == 2:
		g = launchGeometry{threads: 512, blocks: int(min(blocks(512), 2*all))}
	default:
		g = launchGeometry{threads: 256, blocks: int(2 * all)}
	}
	return g
}

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
