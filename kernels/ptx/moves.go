package ptx

import (
	"fmt"
	"slices"
	"structs"
)

// InlineLines is how many pieces travel in Lines.
const InlineLines = 14

// LinePiece is bytes that one rank pushes to another in lines of 8. Addresses are of the device.
type LinePiece struct {
	At     uint64 // of the first byte, on this rank: where it is sent from, or where it goes
	Bytes  uint64 // more than 0
	Slot   uint64 // where in the receiver's buffer the lines are, in bytes
	Peer   uint32 // the rank that it goes to, or comes from
	Lead   uint32 // the sender's address modulo 8
	Turn   uint32 // of the blocks, alike for both
	OneWay uint32 // 1: nothing goes the other way
}

// LinesOf is how many lines a piece is cut into.
func LinesOf(bytes int64, lead uint32) int64 { return (bytes + int64(lead) + 7) / 8 }

// LinesSlotBytes is the size of the slot of a piece that may begin anywhere.
func LinesSlotBytes(bytes int64) int64 { return roundUp(LinesOf(bytes, 7)*16, 128) }

// Lines is the parameter of PushLines beside Comm, by value. Its workspace has two buffers of Span bytes, of the slots.
type Lines struct {
	_ structs.HostLayout

	Table           uint64 // more than InlineLines: address of all pieces in this device's memory, in place of Inlined
	Span            uint64
	Longest         uint64 // lines of the longest piece of any rank
	From, To, Bytes uint64 // what this rank copies from its input to its output
	Sends, Receives uint32 // pieces; those that are received are behind those that are sent
	Awaits, Tells   uint32 // 1 if some that is sent, or received, is one way
	Inlined         [InlineLines]LinePiece
}

// AllToAllV is the parameter of PushAllToAllV beside Comm, by value. Addresses are of the device.
type AllToAllV struct {
	_ structs.HostLayout

	In, Counts, Received uint64 // on this rank
	Outputs              uint64 // World > Inline: address of [World]uint64, every rank's output, in place of Out
	Rows, Room           uint64 // of input and output, below 2^31
	RowBytes             uint64
	Lines                uint64 // where in the kernel's data the blocks have BlockBytes each
	BlockBytes           uint64 // AllToAllVBlockBytes
	Displaced            uint32 // 1: there are displacements behind the counts
	_                    uint32
	Out                  [Inline]uint64
}

// AllToAllVBlockBytes is the workspace of a block of an all-to-all with counts on the device.
func AllToAllVBlockBytes(world int) int64 {
	w := int64(world)
	return roundUp((w*w+w)*16, 128)
}

// Why PushAllToAllV gave up, as Fault.Why. The low half of the fault word is then a number: see [Fault.Number].
const (
	FaultCount = 16 // the peer's count is none; the number is whom it is for, and above that CountNegative or CountBeyond
	FaultRoom  = 17 // the peer's output is too short; the number is how many rows it is to get, or 2^32-1 for more
)

// Why a count is none.
const (
	CountNegative = 1 // it, or its displacement, is below 0
	CountBeyond   = 2 // it reaches beyond the input
)

// Number is the low half of the fault word.
func (f Fault) Number() uint32 { return uint32(f.Index)<<16 | uint32(f.Block) }

// The kernels of a Fault that push.
const (
	FaultLines     = 24
	FaultMeet      = 25
	FaultScatter   = 26
	FaultAllToAllV = 27
)

// PushAllToAllV takes Comm and AllToAllV.
var PushAllToAllV = Kernel{File: "alltoallv.ptx", Name: "symmem_all_to_all_v"}

// Meet is the kernel that is a barrier of all ranks on their streams. It takes Comm, and is one block. hopper is as for AllReduce.
func Meet(hopper bool) Kernel {
	k := PushLines(hopper)
	k.Name = "symmem_meet"
	return k
}

// PushLines is the kernel that pushes pieces in lines. It takes Comm and Lines. hopper is as for AllReduce.
func PushLines(hopper bool) Kernel {
	if hopper {
		return Kernel{File: "lines_sm90.ptx", Name: "symmem_lines", Overlap: true}
	}
	return Kernel{File: "lines.ptx", Name: "symmem_lines"}
}

// Pattern is who sends what to whom in a collective whose pieces are of one length.
type Pattern uint8

// The patterns.
const (
	Gather    Pattern = iota + 1 // every rank sends one piece to all others
	Exchange                     // every rank sends each other one a piece
	Broadcast                    // one rank sends a piece to all others
)

var patternNames = [...]string{Gather: "gather", Exchange: "exchange", Broadcast: "broadcast"}

// LinesWhole finds the kernel that takes the place of PushLines's where all pieces are whole vectors of 16 bytes, of one length, and begin at multiples
// of 16 on every rank, and whether there is one. It takes PushParams, and has blocks of whole warps and at most 256 threads. Its workspace has 2 slots
// of LinesWholeSlotBytes for each rank. hopper is as for AllReduce.
func LinesWhole(pattern Pattern, world int, hopper bool) (Kernel, bool) {
	if pattern == 0 || int(pattern) >= len(patternNames) || world < 2 || world > Inline {
		return Kernel{}, false
	}
	k := Kernel{File: fmt.Sprintf("lines_w%d.ptx", world), Name: fmt.Sprintf("symmem_lines_%s_w%d", patternNames[pattern], world)}
	if hopper {
		k.File, k.Overlap = fmt.Sprintf("lines_w%d_sm90.ptx", world), true
	}
	return k, true
}

// LinesPass finds the kernel that takes the place of LinesWhole's for a longer broadcast between more than two ranks, and whether there is one: ranks pass lines on to each other, so that the message
// leaves root once. It takes PushParams, whose Vectors are the message's, and has blocks as LinesWhole's. Its workspace has 2 slots of LinesWholeSlotBytes of the message in all. hopper is as for AllReduce.
func LinesPass(world int, hopper bool) (Kernel, bool) {
	k, ok := LinesWhole(Broadcast, world, hopper)
	k.Name = fmt.Sprintf("symmem_lines_pass_w%d", world)
	return k, ok && world > 2
}

// LinesWholeSlotBytes is the size of the slot of a piece of whole vectors: two lines each.
func LinesWholeSlotBytes(bytes int64) int64 { return roundUp(2*bytes, 256) }

// ScatterWhole finds the kernel that takes the place of PushScatter's for OneShotPush where the ranks' inputs and outputs begin at multiples of 16 and all
// shares are whole vectors of 16 bytes, of one length, and whether there is one: as PushWhole has. toRoot is a reduce, of which one rank has the one
// share. It takes PushParams, has blocks of whole warps and at most 256 threads, and the same workspace.
func ScatterWhole(dtype string, op, world int, toRoot, hopper bool) (Kernel, bool) {
	if toRoot {
		return scatterOfVectors("root", dtype, op, world, hopper)
	}
	return scatterOfVectors("whole", dtype, op, world, hopper)
}

// ScatterFlow finds the kernel that takes the place of ScatterWhole's for a reduce-scatter of long shares, or a long reduce, and whether there is one: wherever that has one. It takes
// PushParams, of which Slot is ScatterSpan of OneShotPush for a share and Shard the root, or the number of ranks of a reduce-scatter. Out is root's on every rank then, and Vectors the message's. It has blocks of whole warps and at most 256 threads, at least two of them, and a workspace of
// ScatterFlowBytes.
func ScatterFlow(dtype string, op, world int) (Kernel, bool) {
	return scatterOfVectors("flow", dtype, op, world, false) // with the overlap of newer devices it is slower
}

// ScatterFlowBytes is the size of the workspace of ScatterFlow's kernel between so many ranks, for shares of bytes: a slot of each of the others.
func ScatterFlowBytes(bytes int64, world int) int64 {
	return int64(world-1) * ScatterSpan(OneShotPush, bytes)
}

// ScatterFlowChunks is how many chunks a share of bytes has, of which each two blocks of so many threads do every so many-th.
func ScatterFlowChunks(bytes int64, world, threads int) int64 {
	chunk := int64(16 * flowVectors(world) * threads)
	return (bytes + chunk - 1) / chunk
}

// flowVectors is as in whole.cuh.
func flowVectors(world int) int {
	switch {
	case world == 2:
		return 8
	case world <= 4:
		return 4
	}
	return 2
}

func scatterOfVectors(form, dtype string, op, world int, hopper bool) (Kernel, bool) {
	if _, ok := PushWhole(OneShotPush, dtype, op, world, hopper); !ok {
		return Kernel{}, false
	}
	k := Kernel{File: fmt.Sprintf("scatter_%s_w%d.ptx", dtype, world), Name: fmt.Sprintf("symmem_scatter_%s_%s_sum_w%d", form, dtype, world)}
	if hopper {
		k.File, k.Overlap = fmt.Sprintf("scatter_%s_w%d_sm90.ptx", dtype, world), true
	}
	return k, true
}

// ToRoot is a flag of Params, of PushScatter: the rank Peer has the one share.
const ToRoot = 1024

// PushScatter finds the kernel that pushes shares to their owners and reduces them there, for a dtype by its short name. form is OneShotLL, or
// OneShotPush for f32, f16 and bf16. The kernel takes Params: In[0] and Out[0] are this rank's own input and output, and Shard the elements of
// a share; the rows of the table other than workspaces are not used.
func PushScatter(form Form, dtype string, hopper bool) (Kernel, bool) {
	float := slices.Contains(pushable, dtype)
	if !slices.Contains(dtypes, dtype) || form != OneShotLL && (form != OneShotPush || !float) {
		return Kernel{}, false
	}
	k := Kernel{File: "scatter_" + dtype + ".ptx", Name: "symmem_scatter_ll_" + dtype}
	if form == OneShotPush {
		k.Name = "symmem_scatter_push_" + dtype
	}
	if hopper && float {
		k.File, k.Overlap = "scatter_"+dtype+"_sm90.ptx", true
	}
	return k, true
}

// ScatterSpan is Params.Span of PushScatter, for shares of so many bytes: of one rank's slot. There are 2 for each rank.
func ScatterSpan(form Form, share int64) int64 {
	if form == OneShotPush {
		return roundUp((share+vector-1+vector-1)/vector*vector, 128)
	}
	return roundUp((share+7+7)/8*vector, 128)
}
