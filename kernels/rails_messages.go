package kernels

import (
	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// Where it matters in which order islands are combined, NCCL only sends and receives on rails, and kernels combine. What an island has combined of a lap is cut into a part for each island, and
// each rank of a rail sends the others theirs, and combines its own with what comes of them, in the order of the islands. Where all are to have the whole lap, as of an all-reduce, it then sends them
// its result: in the same group of messages as the parts of the next lap, so that a lap costs one launch of NCCL, and there is one more behind the last. A rail carries as much so as in NCCL's own
// collectives.
//
//	rail k    the parts of lap k, and the results of lap k - 1
//	combine   lap k
//	leave     lap k, or, where results go over the rail too, lap k - 1
//
// Where results are in the workspace until they leave, three laps have room there: one whose results are on their way, one whose parts are, and one that enters.

// railMessages is what NCCL sends on a rail for kernels to combine.
type railMessages struct {
	// part is what of this rank's workspace is for the rank of the rail on an island: where it is, and how many bytes. All ranks of a rail have as many for an island.
	part func(lap, island int) (offset, bytes int64)
	most int64 // bytes of a part, or more
	// result is where this rank has what an island has combined of its part; that of its own goes there.
	result func(lap, island int, own device.Ptr) device.Ptr
	// gets reports whether an island is to have the results of the others. It is nil if none is.
	gets  func(island int) bool
	stays bool // results are in the workspace until they leave
}

// twice reports whether a lap goes over rails twice: in parts, and when these are combined.
func (f *railForm) twice() bool { return f.messages != nil && f.messages.gets != nil }

// cutForAll cuts what an island has combined of a lap of a message that is one part, in the first room, so that each island combines a piece of it. The pieces belong together at
// whole, which may be the same place, where they stay until they leave.
func (f *railForm) cutForAll(whole func(lap int, own device.Ptr) device.Ptr, gets func(island int) bool, stays bool) {
	count := int64(len(f.islands))
	piece := alignUp((f.lap+count-1)/count, shardAlign)
	m := f.messages
	m.most, m.gets, m.stays = piece, gets, stays
	m.part = func(lap, island int) (offset, bytes int64) {
		n := sizeOf(f.lapOf(0, f.local, lap))
		lo, hi := min(int64(island)*piece, n), min(int64(island+1)*piece, n)
		return f.roomAt(lap, 0) + lo, hi - lo
	}
	m.result = func(lap, island int, own device.Ptr) device.Ptr {
		return whole(lap, own).Add(int64(island) * piece)
	}
}

// partFrom is where in the workspace the part comes that is from another island.
func (f *railForm) partFrom(lap, island int) int64 {
	n := len(f.islands)
	return f.roomAt(lap, f.own) + int64((island-f.island+n)%n-1)*f.messages.most
}

// sendCall is NCCL's sending of bytes to a rank.
func sendCall(peer int, from device.Ptr, bytes int64) memory.LibraryCall {
	return memory.LibraryCall{Collective: "send", Root: peer, In: from, Count: bytes, DType: tensor.Uint8.String(), Op: Sum.String()}
}

// receiveCall is what takes them.
func receiveCall(peer int, to device.Ptr, bytes int64) memory.LibraryCall {
	return memory.LibraryCall{Collective: "receive", Root: peer, Out: to, Count: bytes, DType: tensor.Uint8.String(), Op: Sum.String()}
}

// messaged is what NCCL carries in a launch: the parts of a lap, and the results of the one before.
func (f *railForm) messaged(lap int, own device.Ptr) (all []memory.LibraryCall) {
	m := f.messages
	// Of what is empty no message goes: each of the two ranks knows.
	send := func(island int, from device.Ptr, bytes int64) {
		if bytes > 0 {
			all = append(all, sendCall(f.carrier(island), from, bytes))
		}
	}
	receive := func(island int, to device.Ptr, bytes int64) {
		if bytes > 0 {
			all = append(all, receiveCall(f.carrier(island), to, bytes))
		}
	}
	for _, island := range f.otherIslands() {
		if lap < f.laps {
			at, theirs := m.part(lap, island)
			_, mine := m.part(lap, f.island)
			send(island, own.Add(at), theirs)
			receive(island, own.Add(f.partFrom(lap, island)), mine)
		}
		if !f.twice() || lap == 0 {
			continue
		}
		_, mine := m.part(lap-1, f.island)
		_, theirs := m.part(lap-1, island)
		if m.gets(island) {
			send(island, m.result(lap-1, f.island, own), mine)
		}
		if m.gets(f.island) {
			receive(island, m.result(lap-1, island, own), theirs)
		}
	}
	return all
}

// combineParts adds the kernel that combines this rank's parts of a lap. Behind the last one there are only results.
func (f *railForm) combineParts(b *collective.Builder, reduce localReduce, lap int) {
	if lap == f.laps {
		return
	}
	own := b.Workspace(b.Rank())
	offset, bytes := f.messages.part(lap, f.island)
	reduce(f.sources(func(island int) device.Ptr {
		if island == f.island {
			return own.Add(offset)
		}
		return own.Add(f.partFrom(lap, island))
	}), f.messages.result(lap, f.island, own), bytes)
}
