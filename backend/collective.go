package backend

import (
	"context"

	"github.com/symmem/symmem/device"
)

// AllReducer is a Backend whose library has all-reduces of its own, which work on this backend's memory.
type AllReducer interface {
	// PrepareAllReduce prepares running the library's all-reduce. Collective; a rank that fails returns at once, and the caller tells the others. The
	// caller has checked that both tensors are inside windows of this backend.
	PrepareAllReduce(ctx context.Context, r *AllReduce) (PreparedAllReduce, error)
}

// AllReduce describes an all-reduce of a library and its operands.
type AllReduce struct {
	// Name is the library's form: "nccl", "nccl_symmetric", "nvshmem".
	Name string
	// In and Out are the allocations of the input and of the output, which may be one. Both have had their rendezvous.
	In, Out Allocation
	// InOffset and OutOffset are the offsets of the first elements in the allocations, in bytes.
	InOffset, OutOffset int64
	// Count is the number of elements, at least 1.
	Count int64
	// Collective is what it is in place of an all-reduce, "" for that: "broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all" or "barrier". Of
	// all_gather to all_to_all Count is that of what one rank sends to each, or gets from each. What combines nothing has the operation "sum". A barrier has
	// no operands, and nothing below but the name.
	Collective string
	// Root is the rank of a broadcast or reduce.
	Root int
	// Parts, unless nil, says by rank which part of the group it is in, by the lowest rank there, the same on every rank. A run is then Calls, among the ranks of
	// each part, and only Name is given besides.
	Parts []int
	// Calls is what a run does in parts, at least one, all at once: the same collectives on every rank of a part but for the addresses, and maybe others in other
	// parts, and of messages between two ranks of a part its side on each.
	Calls []Call
	// Beside says that runs are enqueued on a stream that nobody asks for failures: those that Watch names tell. Only with Parts.
	Beside bool
	// DType and Op are the names of the elements' type, "bf16", and of the operation, "sum".
	DType, Op string
}

// Call is a collective of a library among the ranks of one part of a group, or one side of a message between two of them.
type Call struct {
	// Collective is what AllReduce.Collective is, but no barrier; or "send" or "receive". The n-th message that a rank sends to another is the n-th that this one receives from it. No message waits for
	// another of the same Calls.
	Collective string
	// In and Out are addresses in memory of the device, which stays until the prepared collective is closed. They may be one where the library allows that. A send has In, and what
	// is received goes to Out.
	In, Out device.Ptr
	// Count is the number of elements, at least 1, counted as AllReduce.Count is.
	Count int64
	// Root is the rank of a broadcast or reduce, or the other rank of a message, by its number in the group. It is in the part.
	Root int
	// DType and Op are as in AllReduce.
	DType, Op string
}

// Failer is a PreparedAllReduce that can be told that this rank does not go on with the collective that it is a part of. Then the runs of the other ranks that
// wait for this one end, and fail with an error of the same conditions.
type Failer interface {
	// Fail does not wait, and calls nothing of the device.
	Fail(err error)
}

// PreparedAllReduce is a library's all-reduce that can be run many times.
type PreparedAllReduce interface {
	// Enqueue enqueues one run on s, or records it if s is capturing, and returns at once.
	Enqueue(s device.Stream) error
	// Close releases what it holds. No run is under way.
	Close() error
}

// Watcher is a PreparedAllReduce with AllReduce.Beside.
type Watcher interface {
	// Watch makes s, which waits for a run on another stream, tell of its failure. Where s is capturing, the streams on which the graph is launched do.
	Watch(s device.Stream) error
}

// Asker is a PreparedAllReduce whose runs wait for other ranks for as long as nobody ends them: while they wait, the stream that they are on tells its user nothing.
type Asker interface {
	// Ask makes the backend call gaveUp now and then, until the prepared collective is closed: it returns an error when this rank has given up the collective that this one is a part of, and has
	// called Failer.Fail then. It does not wait, and calls nothing of the device.
	Ask(gaveUp func() error)
}

// Abandoner is a PreparedAllReduce whose runs may be cut off, with results that are wrong.
type Abandoner interface {
	// Abandoned is the address, for the device, of a u32 that is 0 until runs are cut off, and is written before what they have enqueued ends.
	Abandoned() device.Ptr
}
