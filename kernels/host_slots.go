package kernels

import (
	"math/bits"

	"github.com/symmem/symmem/collective"
)

// Ranks on the host device that load from each other's tensors meet twice in a run: before they load, and after, since whatever is behind
// the run may write to the input. For a small message that costs more than the message. So a rank copies what others are to load into a
// slot of its workspace, and goes on as soon as it has what it wants itself: a slot is written again only some runs later, when its
// readers have long been there.
const (
	hostSlotBytes = 8 << 10  // the most that a slot has: above, the copy costs more than a meeting
	hostSlotsRoom = 32 << 10 // what the slots of a rank may take together, so that they stay in the first-level cache
	hostSlotsMost = 32       // how many there are of short messages
)

// hostSlotsOf gives the kernel slots for the first so many bytes of every rank's input, which is the same on all ranks, or nil if that is
// too much for them.
func hostSlotsOf(s *collective.Spec, bytes int64) *slots {
	if bytes > hostSlotBytes {
		return nil
	}
	x := &slots{bytes: bytes, stride: max(alignUp(bytes, cacheLine), cacheLine)}
	x.count = uint32(1) << (bits.Len64(uint64(min(hostSlotsRoom/x.stride, hostSlotsMost))) - 1)
	s.Workspace = int64(x.count) * x.stride
	return x
}

// slots are the places for small messages on the host device.
type slots struct {
	bytes, stride int64
	count         uint32     // how many runs a rank may be ahead of its readers; a power of two, so that the epoch may wrap, and 4 or more
	in            []byte     // what readers are to have of this rank
	ranks         [][][]byte // every rank's slots
	// The ranks that this one has messages from, and those that have messages of it.
	sources, readers []int
}

// prepare finds the addresses. Others load the first so many bytes of this rank's input.
func (x *slots) prepare(at *collective.Addresses, mine int64, sources, readers []int) {
	x.sources, x.readers = sources, readers
	if len(readers) > 0 {
		x.in = at.Bytes(at.Tensor(specIn, at.Rank()), mine)
	}
	x.ranks = make([][][]byte, at.WorldSize())
	for _, r := range append([]int{at.Rank()}, sources...) {
		for i := range int64(x.count) {
			x.ranks[r] = append(x.ranks[r], at.Bytes(at.Workspace(r).Add(i*x.stride), x.bytes))
		}
	}
}

// exchange gives this rank's message to its readers, waits for those of its sources, and returns which slot of theirs they are in. They are
// there until release.
func (x *slots) exchange(r *collective.HostRun) (slot uint32, err error) {
	slot = r.Epoch() & (x.count - 1)
	if len(x.readers) > 0 {
		// Readers tell at every so many-th run, so what they have told by the time that they have read the slot is that run or the next such one.
		half := x.count / 2
		read := (r.Epoch() - x.count + half - 1) &^ (half - 1)
		for _, reader := range x.readers {
			if err := r.Wait(reader, flagEnd, read); err != nil {
				return 0, err
			}
		}
		copy(x.ranks[r.Rank()][slot], x.in)
	}
	return slot, meet(r, flagStart, x.readers, x.sources)
}

// release lets the sources write their slots again. They are told of half of the slots at a time, as a flag costs more than a short message.
func (x *slots) release(r *collective.HostRun) {
	if r.Epoch()&(x.count/2-1) != 0 {
		return
	}
	for _, source := range x.sources {
		r.Signal(source, flagEnd, r.Epoch())
	}
}
