package memory

import (
	"fmt"
	"sync/atomic"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
)

// Window is an allocation after rendezvous: mapped, and addressable on every peer that can be reached. All methods are local
// and safe for concurrent use; after the allocation was freed they return ErrClosed.
type Window struct {
	memory  *Memory
	alloc   backend.Allocation
	entry   *entry          // of the allocation
	mapping backend.Mapping // nil for an empty allocation
	number  uint64          // of its rendezvous, the same on every rank
	whole   *Window         // of the heap, for the window of one of its allocations; else nil
	near    []bool          // by rank: its copy has an address here
	adopted bool            // some rank has adopted its copy

	multicast   atomic.Uint64         // the multicast address, 0 before EnableMulticast
	noMulticast atomic.Pointer[error] // why the last EnableMulticast failed
}

// Number is the number of the rendezvous that made the window, from 1, and of an allocation of a [Heap] one from 2^63. It is the same on every rank, and no
// other window of the memory has it, except that those of a heap come again after 2^32 requests to it. Two allocations that have one number at the
// same time begin at different places of the heap. Ranks tell each other by the number and the place which memory they mean.
func (w *Window) Number() uint64 { return w.orZero().number }

// made refuses a window that no rendezvous has made.
func (w *Window) made(call string) error {
	if w == nil || w.memory == nil {
		return errs.Invalid(call, "window", "the zero Window", "one that Rendezvous gave")
	}
	return nil
}

// orZero is the window, or a zero one for nil.
func (w *Window) orZero() *Window {
	if w == nil {
		return new(Window)
	}
	return w
}

// base is the window of the heap, for that of one of its allocations; else the window itself.
func (w *Window) base() *Window {
	if w.whole != nil {
		return w.whole
	}
	return w
}

// reach finds out which copies have an address in this process.
func (w *Window) reach() {
	w.near = make([]bool, w.memory.group.Size())
	for r := range w.near {
		_, err := w.mapping.Peer(r)
		w.near[r] = err == nil
	}
}

// Bytes is the size that was asked for at allocation; for an allocation of a heap, the size of the heap.
func (w *Window) Bytes() int64 {
	if w.made("Bytes") != nil {
		return 0
	}
	return w.alloc.Bytes()
}

// Adopted reports whether the copy of any rank is memory that it has adopted ([Memory.Register]). Ranks of one island may have no addresses of such copies ([Memory.Islands]), which
// a rank that is alone on its island cannot tell from its own. All ranks get the same.
func (w *Window) Adopted() bool { return w.orZero().base().adopted }

// Err is ErrClosed once the allocation was freed, or is being freed and this rank's device has come to its end: what begins then must not touch it. Should it be kept after all, Err is nil again.
func (w *Window) Err() error {
	if err := w.made("using a window"); err != nil {
		return err
	}
	if w.entry.released() {
		return fmt.Errorf("window: %w", errs.ErrClosed)
	}
	return nil
}

// Usable is Err, and ErrClosed too as soon as somebody has begun to free the allocation, or the heap that it is in. Within a [Memory.Hold] the memory is there until its End if
// Usable is nil. Should the device be found busy, so that nothing is freed, it is nil again.
func (w *Window) Usable() error {
	if err := w.Err(); err != nil {
		return err
	}
	for e := w.entry; e != nil; e = e.whole {
		if e.closing.Load() {
			return fmt.Errorf("window: it is being freed: %w", errs.ErrClosed)
		}
	}
	return nil
}

// Mapping is the backend's view of the window, for the backend itself; nil for an empty window.
func (w *Window) Mapping() backend.Mapping { return w.orZero().mapping }

// Peer is the address, in this process, of the byte at offset in rank's copy; for the own rank, in this rank's. The address
// of an empty window is nil. ErrNotReachable where the peer's memory has no address here; ErrInvalid for a rank or an offset
// that does not exist.
func (w *Window) Peer(rank int, offset int64) (device.Ptr, error) {
	if err := w.check("Peer", offset); err != nil {
		return 0, err
	}
	if err := w.memory.checkRank("Peer", rank); err != nil {
		return 0, err
	}
	if w.mapping == nil {
		return 0, nil
	}
	p, err := w.mapping.Peer(rank)
	if err != nil {
		return 0, fmt.Errorf("peer pointer to rank %d: %w", rank, err)
	}
	return p.Add(offset), nil
}

// Contiguous is the address of the byte at offset in rank 0's copy, and the distance in bytes from each rank's copy to the
// next one's, where the backend lays them side by side; ErrUnsupported with the reason where it does not. For an empty
// window both are 0.
func (w *Window) Contiguous(offset int64) (device.Ptr, int64, error) {
	if err := w.check("Contiguous", offset); err != nil {
		return 0, 0, err
	}
	if w.mapping == nil {
		return 0, 0, nil
	}
	view, ok := w.mapping.(backend.ContiguousViewer)
	if !ok {
		return 0, 0, w.memory.backend.Capabilities().Missing(w.memory.backend.Name(), "contiguous")
	}
	base, stride, err := view.Contiguous()
	if err != nil {
		return 0, 0, fmt.Errorf("contiguous view: %w", err)
	}
	return base.Add(offset), stride, nil
}

// Allocation is the memory that the window was made of, for backends.
func (w *Window) Allocation() backend.Allocation { return w.orZero().alloc }

// Handle is the name that the library below the backend has for the window, as a kernel argument for its device interface
// (ncclWindow_t), and where in it the byte at offset is, in bytes; ErrUnsupported where there is no such name. For an empty
// window both are 0.
func (w *Window) Handle(offset int64) (handle uint64, at int64, err error) {
	if err := w.check("Handle", offset); err != nil {
		return 0, 0, err
	}
	if w.mapping == nil {
		return 0, 0, nil
	}
	h, ok := w.mapping.(backend.WindowHandler)
	if !ok {
		return 0, 0, fmt.Errorf("backend %s has no window handles: %w", w.memory.backend.Name(), errs.ErrUnsupported)
	}
	if handle, at, err = h.WindowHandle(); err != nil {
		return 0, 0, err
	}
	return handle, at + offset, nil
}

func (w *Window) check(op string, offset int64) error {
	if err := w.Err(); err != nil {
		return err
	}
	if offset < 0 || offset > w.Bytes() {
		return errs.Invalid(op, "offset", offset, fmt.Sprintf("0 to %d", w.Bytes()))
	}
	return nil
}

func (m *Memory) checkRank(op string, rank int) error { return m.checkRankOf(op, "rank", rank) }

// checkRankOf is checkRank for an argument of another name.
func (m *Memory) checkRankOf(op, arg string, rank int) error {
	if rank < 0 || rank >= m.group.Size() {
		return errs.Invalid(op, arg, rank, fmt.Sprintf("0 to %d, the ranks of the group", m.group.Size()-1))
	}
	return nil
}
