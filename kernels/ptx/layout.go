package ptx

import (
	"encoding/binary"
	"structs"
	"unsafe"
)

// Inline is how many ranks' pointers travel in Params and Comm; with more, they are in a table in device memory.
const Inline = 8

// CommVersion is Comm.Version: of the layout of Comm and of workspaces, which kernels/cuda/symmem.cuh says.
const CommVersion = 1

// Comm is symmem::Comm of kernels/cuda/symmem.cuh, which kernels take that are not this module's. Addresses are of the device.
type Comm struct {
	_ structs.HostLayout

	Version   uint32 // CommVersion
	Index     uint32 // its low 16 bits are Fault.Index
	Rank      uint32
	World     uint32
	Timeout   uint64 // ns that a thread may wait
	Stop      uint64 // 32-bit word that ends all waiting when it is not 0; or 0 for none
	Dead      uint64 // 32-bit word in this device's memory, 0 as long as all is well
	Fault     uint64 // 64-bit fault word, for one dead word
	Table     uint64 // World > Inline: [World]uint64 in this device's memory, in place of Workspace
	_         uint64
	Workspace [Inline]uint64 // every rank's workspace, by rank; 128-byte aligned
}

// Bytes is a copy of c as a kernel takes it.
func (c *Comm) Bytes() []byte {
	return append([]byte(nil), unsafe.Slice((*byte)(unsafe.Pointer(c)), unsafe.Sizeof(*c))...)
}

// ControlBytes is the size of the records at the front of a workspace, for a grid of so many blocks: every 32-bit word of them begins
// with the first epoch. The kernel's own data begins behind them, with zeros.
func ControlBytes(blocks, world int) int64 {
	writers := roundUp(int64(world), 8)
	return int64(blocks) * roundUp(stateBytes+flagKinds*writers*4, 128)
}

// The flags of Params.
const (
	Staged    = 1 << iota // OneShotPull: the peers read a copy in the workspace; OneShotMultimem: the result waits there; needed in place
	NoBarrier             // OneShotPull: wait for nobody and use no workspace
	Atomics               // signals: the links to all peers have atomics
)

// Params is the parameter of every kernel, by value. Addresses are of the device.
type Params struct {
	_ structs.HostLayout

	In           [Inline]uint64 // every rank's input, by rank; aligned to its elements and alike on all ranks modulo 16
	Out          [Inline]uint64 // every rank's output, by rank; likewise. May equal In
	Workspace    [Inline]uint64 // every rank's workspace or signal pad, by rank; 128-byte aligned
	Table        uint64         // World > Inline: [3][World]uint64, in place of In, Out and Workspace
	Count        uint64         // elements; PutSignal and PutSignalWait: bytes
	Fault        uint64         // 64-bit fault word, for one dead word; signals: a fault cell, of 16 bytes
	Dead         uint64         // 32-bit word in this device's memory, 0 as long as all is well; signals: or 0
	Stop         uint64         // 32-bit word that ends all waiting when it is not 0; or 0 for none
	Timeout      uint64         // ns that a launch may wait
	Shard        uint64         // Layout.Shard; PutSignalWait: the rank to wait for
	Span         uint64         // Layout.Span
	MulticastIn  uint64         // multicast address of the input
	MulticastOut uint64         // multicast address of the output
	Rank         uint32
	World        uint32
	Op           uint32
	Flags        uint32
	Index        uint32 // for the fault word; signals: the channel
	Peer         uint32 // signals: the other rank
	Channels     uint32 // signals: how many channels the pad has
	_            uint32
}

// FaultOffset is where in Bytes Params.Fault is.
const FaultOffset = int(unsafe.Offsetof(Params{}.Fault))

// Bytes is a copy of p as a kernel takes it.
func (p *Params) Bytes() []byte {
	return append([]byte(nil), unsafe.Slice((*byte)(unsafe.Pointer(p)), unsafe.Sizeof(*p))...)
}

// PushParams is the parameter of the kernels that PushWhole, ManyPushWhole, LinesWhole, ScatterWhole and ScatterFlow find, by value. ManyPushWhole's does not use In,
// Out, Vectors and Shard. Addresses are of the device.
type PushParams struct {
	In, Out  uint64   // this rank's; multiples of 16
	Data     []uint64 // every rank's workspace behind the records: this rank's, and then those of the ranks behind it
	Records  uint64   // this rank's workspace
	Dead     uint64   // as in Params
	Vectors  uint32   // of 16 bytes, less than MaxPushVectors: of the message, or of a piece or share
	Shard    uint32   // Layout.Shard; of a broadcast or reduce, the root
	Slot     uint32   // Layout.Span, or LinesWholeSlotBytes or ScatterSpan, in vectors
	Rank, Op uint32
	Index    uint32 // for the fault word
	Fault    uint64 // as in Params, and what follows
	Stop     uint64
	Timeout  uint64
}

// MaxPushVectors is more vectors of 16 bytes than a message of PushParams has.
const MaxPushVectors = 1 << 30

// Bytes is p as a kernel takes it.
func (p *PushParams) Bytes() []byte {
	le := binary.LittleEndian
	b := le.AppendUint64(le.AppendUint64(nil, p.In), p.Out)
	for _, x := range p.Data {
		b = le.AppendUint64(b, x)
	}
	b = le.AppendUint64(le.AppendUint64(b, p.Records), p.Dead)
	for _, x := range []uint32{p.Vectors, p.Shard, p.Slot, p.Rank, p.Op, p.Index} {
		b = le.AppendUint32(b, x)
	}
	for _, x := range []uint64{p.Fault, p.Stop, p.Timeout} {
		b = le.AppendUint64(b, x)
	}
	return b
}

// InlinePieces is how many pieces travel in Pieces, and ChunkBytes what a block moves of one at a time.
const (
	InlinePieces = 8
	ChunkBytes   = 16 << 10
)

// Piece is bytes that Pull loads on any rank and stores on this one, or loads on this one and stores on any. Addresses are of the device.
type Piece struct {
	From, To, Bytes uint64
	// Turn is the block that takes the first chunk, modulo the grid: the same for whoever copies the same bytes that a rank has stored
	// in the launch. It does not count with Pieces.Chunks, nor for pieces that are stored together.
	Turn uint32
	// Peer is of use with Pieces.Chunks: of the first pieces the rank that gets the piece, of the second the one that it has come from.
	Peer uint32
}

// What Pieces.Flags says of pieces.
const (
	StoredTogether = 1 // they are inlined, and fewer than 2^31 whole vectors each on both sides, which this rank stores: a thread stores some of each at a time
	AlikePieces    = 4 // and they are the same bytes
)

// TogetherPieces is how many pieces that are stored together are stored at a time.
const TogetherPieces = 4

// TogetherFlags is what Pieces.Flags says of inlined pieces that this rank stores: whether they are whole vectors, and no more than an index of 32 bits has room for, and whether they are the same bytes.
func TogetherFlags(pieces []Piece) uint32 {
	flags := uint32(StoredTogether | AlikePieces)
	for _, c := range pieces {
		if (c.From|c.To|c.Bytes)%16 != 0 || c.Bytes/16 >= 1<<31 {
			return 0
		}
		if c.From != pieces[0].From || c.Bytes != pieces[0].Bytes {
			flags = StoredTogether
		}
	}
	return flags
}

// Pieces is the parameter of Pull beside Comm, by value.
type Pieces struct {
	_ structs.HostLayout

	Table   uint64    // more than InlinePieces: address of all pieces in this device's memory, in place of Inlined
	Counts  [2]uint32 // of those that are there at first, and of those that a peer has loaded in the launch; the second are behind the first
	Phases  uint32    // 1, or 2 if any rank has some of the second
	Chunks  uint32    // not 0: the second go chunk by chunk as the first come, all by stores, and so many chunks has the longest of the first on any rank
	Chunk   uint32    // and so many bytes has a chunk, alike on all ranks: a multiple of 16
	Flags   uint32    // StoredTogether and AlikePieces, of the second shifted by 1
	Inlined [InlinePieces]Piece
}

// Stretch is some vectors of one tensor of a list, which a block of the kernels ManyOneShot, ManyScatter, ManyPull, ManyCopy and ManyLines does at a time. Of ManyMoves it
// is Count bytes that go from In, on any rank, to Out, and the rest is not used. Addresses are of the device.
type Stretch struct {
	In, Out     uint64 // this rank's, of the first element of the tensor, or of the share; alike on all ranks modulo 16. ManyLines: of what others send, In is alike to the sender's modulo 8
	Count       uint64 // elements of the tensor, or of the share; ManyLines: bytes
	First       uint64 // the stretch's first vector, counted from the last multiple of a vector at or before In
	Vectors     uint64 // of the stretch
	Line        uint64 // ManyOneShot, ManyScatter and ManyLines: where its first line is in a slot, in lines
	Row, OutRow uint64 // ManyPull: the rows of the tensor's inputs and outputs in Many.Table. OutRow may be OwnOnly
}

// OwnOnly in place of Stretch.OutRow says that ManyPull stores to this rank's output only, as a reduce-scatter does.
const OwnOnly = 1<<64 - 1

// What Many.Table of ManyScatter and ManyLines says of a rank, where two ranks do not send each other something in every launch.
const (
	ManyAwaits = 1 // this rank sends it lines and gets none from it, and so waits until what it sent two launches before was taken
	ManyTells  = 2 // this rank gets lines from it and sends it none, and so tells it that it has taken them
)

// Many is the parameter of these kernels, by value: beside Params, and of ManyCopy alone.
type Many struct {
	_ structs.HostLayout

	// Stretches is the address of all stretches in this device's memory. ManyOneShot: the same on every rank. ManyPull: what this rank reduces. ManyMoves: what it loads. ManyScatter and
	// ManyLines: [World][Count]Stretch, of ManyScatter the share that a rank is to have, with this rank's input, and of ManyLines what comes from a rank.
	Stretches uint64
	Table     uint64 // ManyPull: [rows][World]uint64 of addresses, in this device's memory. ManyScatter and ManyLines: [World]uint64 of ManyAwaits and ManyTells, or 0 if all are 0
	Count     uint32 // of stretches
	Shift     uint32 // ManyLines: 1 << Shift threads, whole warps, do a stretch of one peer together
}

// WholeStretch is some vectors of 16 bytes of one tensor of a list, which some warps of a block of ManyPushWhole do at a time. Addresses are of the device.
type WholeStretch struct {
	In, Out uint64 // this rank's, of the first vector
	Vectors uint32
	Line    uint32 // where its first line is in a slot, in lines
}

// Whole is the stretch as ManyPushWhole takes it: of a tensor that is whole vectors, which begins at a multiple of 16.
func (s Stretch) Whole() WholeStretch {
	return WholeStretch{In: s.In + s.First*16, Out: s.Out + s.First*16, Vectors: uint32(s.Vectors), Line: uint32(s.Line)}
}

// InlineStretches is how many stretches travel in WholeMany, so that a launch need not load its first ones from memory.
const InlineStretches = 64

// WholeMany is the parameter of ManyPushWhole beside PushParams, by value.
type WholeMany struct {
	_ structs.HostLayout

	Stretches uint64                        // address of all stretches in this device's memory, the same on every rank but for In and Out
	Count     uint32                        // of stretches
	Shift     uint32                        // 1 << Shift threads, whole warps, do a stretch together
	Inlined   [InlineStretches]WholeStretch // the first ones
}

// Why a kernel gave up.
const (
	FaultTimeout = 1 // a peer did not come in time
	FaultStopped = 2 // the stop word was set
	FaultVersion = 3 // Comm.Version is not the one that the kernel was compiled for
)

// Fault is what a fault word says.
type Fault struct {
	Why    uint8  // FaultTimeout, FaultStopped or FaultVersion
	Kernel uint8  // kKind… of params.cuh; for an all-reduce, its Form; from FaultUser on, a kernel that is not this module's
	Peer   uint16 // the rank that was waited for: if another one is lost, maybe one that itself waits for that one
	Index  uint16 // Params.Index
	Block  uint16
}

// DecodeFault splits a fault word, which is not 0.
func DecodeFault(word uint64) Fault {
	return Fault{
		Why: uint8(word >> 56), Kernel: uint8(word >> 48), Peer: uint16(word >> 32), Index: uint16(word >> 16), Block: uint16(word),
	}
}

// FaultBarrier, FaultWait, FaultSignal, FaultPull, FaultMany and FaultCast are the kernels of a Fault that are no all-reduce; FaultUser is the first that is not this module's.
const (
	FaultBarrier = 16
	FaultWait    = 17
	FaultSignal  = 18
	FaultPull    = 19
	FaultMany    = 28
	FaultCast    = 29
	FaultUser    = 64
)

const (
	stateBytes = 32
	flagKinds  = 3
	flowSlots  = 4
	vector     = 16
)

func roundUp(n, to int64) int64 { return (n + to - 1) / to * to }

// Layout is how an all-reduce uses its workspace, alike on every rank. A workspace begins with ControlBytes in which every 32-bit
// word is the first epoch; all after it is 0. Launches of one plan all have the same Layout.
type Layout struct {
	Form     Form
	World    int   // ranks, at least 1
	Bytes    int64 // of the message, at least 1
	Blocks   int   // of the launch, all resident at the same time
	LapBytes int64 // TwoShotFlow: a multiple of 128
	Staged   bool  // OneShotPull and OneShotMultimem, with the flag of that name
	Whole    bool  // the message begins at a multiple of 16 on every rank, and is vectors of 16 bytes and nothing else
}

// Shard is Params.Shard: how many vectors of 16 bytes one rank reduces in the two-shot forms.
func (l Layout) Shard() int64 {
	return roundUp((l.vectors()+int64(l.World)-1)/int64(l.World), 8)
}

// vectors covers the message: wherever it begins, unless it is whole. One vector more than there are would make the first shards longer than the last by a few, for
// which blocks that divide them evenly would go round once more.
func (l Layout) vectors() int64 {
	if l.Whole {
		return l.Bytes / vector
	}
	return (l.Bytes + vector - 1 + vector - 1) / vector
}

// Span is Params.Span: bytes of one rank's slot in a message buffer.
func (l Layout) Span() int64 {
	switch l.Form {
	case OneShotLL:
		return roundUp((l.Bytes+7+7)/8*vector, 128)
	case OneShotPush, OneShotPull, OneShotMultimem:
		return roundUp(l.vectors()*vector, 128)
	case TwoShotPush:
		return l.Shard() * vector
	case TwoShotFlow:
		return l.LapBytes
	}
	return 0
}

// ControlBytes is the size of the part of the workspace that holds flags and counters.
func (l Layout) ControlBytes() int64 { return ControlBytes(l.Blocks, l.World) }

// DataBytes is the size of the part behind it, and BlockBytes what the launch's blocks have behind that, each.
func (l Layout) DataBytes() int64 {
	world := int64(l.World)
	var slots int64
	switch l.Form {
	case OneShotLL, OneShotPush:
		slots = 2 * world
	case OneShotPull:
		if l.Staged {
			slots = 2
		}
	case OneShotMultimem:
		if l.Staged {
			slots = 1
		}
	case TwoShotPush:
		slots = 2 * 2 * world
	}
	return slots * l.Span()
}

// BlockBytes is how many bytes of workspace each block has.
func (l Layout) BlockBytes() int64 {
	if l.Form != TwoShotFlow {
		return 0
	}
	return int64(l.World) * flowSlots * l.Span()
}

// WorkspaceBytes is the size of all of it: the control part, data, and what the blocks have.
func (l Layout) WorkspaceBytes() int64 {
	return l.ControlBytes() + l.DataBytes() + int64(l.Blocks)*l.BlockBytes()
}

const (
	padStride = 128
	padKinds  = 2
)

// PadBytes is the size of a signal pad for Barrier, Signal, Wait and WaitAll. It begins as zeros, or as PadImage.
func PadBytes(world, channels int) int64 {
	return int64(channels) * (padKinds*int64(world)*padStride + padStateBytes(world))
}

func padStateBytes(world int) int64 { return roundUp(32+12*int64(world), 128) }

// PadImage is a signal pad on which first signals were sent and consumed, on every channel and between all ranks, and on
// whose channels, besides, begin(channel)-first signals of every rank have come that were not consumed.
func PadImage(world, channels int, first uint32, begin func(channel int) uint32) []byte {
	pad := make([]byte, PadBytes(world, channels))
	states := pad[channels*padKinds*world*padStride:]
	for c := range channels {
		state := states[int64(c)*padStateBytes(world):]
		binary.LittleEndian.PutUint32(state, first)
		for r := range world {
			counters := pad[c*padKinds*world*padStride:]
			binary.LittleEndian.PutUint32(counters[r*padStride:], begin(c))
			binary.LittleEndian.PutUint32(counters[(world+r)*padStride:], first)
			binary.LittleEndian.PutUint32(state[32+4*r:], begin(c))
			binary.LittleEndian.PutUint32(state[32+4*(world+r):], first)
			binary.LittleEndian.PutUint32(state[32+4*(2*world+r):], begin(c))
		}
	}
	return pad
}
