package nccl

import (
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/symmem/symmem/internal/errs"
)

// commHandle is an ncclComm_t.
type commHandle uintptr

// Comm is a communicator: this rank's place among those that came together with one unique id. NCCL does one call of a
// communicator at a time, and so do the methods; only Abort does not wait for the others.
type Comm struct {
	lib    *Library
	ranks  int
	rank   int
	mu     sync.Mutex    // held during NCCL's calls
	handle atomic.Uint64 // the commHandle; 0 when destroyed or aborted
}

// NewUniqueID makes the id of one new communicator and opens the socket at which its ranks will meet. One rank calls it.
func (l *Library) NewUniqueID() (UniqueID, error) {
	id := new(UniqueID)
	if err := l.check("ncclGetUniqueId", l.call.getUniqueID(id)); err != nil {
		return UniqueID{}, fmt.Errorf("making a unique id: %w", err)
	}
	return *id, nil
}

// NewComm makes a communicator of the ranks that bring id, each with another number and another GPU. It is collective and
// blocks until all have come, for ever if one does not: see [Bound]. Destroy or abort the communicator.
func (l *Library) NewComm(ranks, rank int, id UniqueID) (*Comm, error) {
	const op = "NewComm"
	if ranks < 1 {
		return nil, errs.Invalid(op, "ranks", ranks, "1 and more")
	}
	if rank < 0 || rank >= ranks {
		return nil, errs.Invalid(op, "rank", rank, fmt.Sprintf("0 to %d", ranks-1))
	}
	handle := new(commHandle)
	r := l.call.commInitRankScalable(handle, int32(ranks), int32(rank), 1, &id, 0)
	if r == InProgress {
		// A thread of NCCL's will still write the handle, and nobody waits for it: its place must never become another's.
		abandoned.Store(handle, struct{}{})
	}
	if err := l.check("ncclCommInitRankScalable", r); err != nil {
		return nil, fmt.Errorf("making a communicator of %d ranks: %w", ranks, err)
	}
	c := &Comm{lib: l, ranks: ranks, rank: rank}
	c.handle.Store(uint64(*handle))
	return c, nil
}

// abandoned holds the places of handles that NCCL may write at any time.
var abandoned sync.Map

// Ranks is the number of ranks.
func (c *Comm) Ranks() int { return c.ranks }

// Rank is this rank's number, from 0.
func (c *Comm) Rank() int { return c.rank }

// AllReduce enqueues on stream, a CUstream, the combination by op of count elements at send on all ranks, with the result at
// recv on each; or it records it, if the stream is capturing. send and recv are addresses of the GPU's memory, the same or not
// overlapping. Collective: every rank enqueues it alike. It returns before the work has run; when the driver's queue is full it
// waits for room.
func (c *Comm) AllReduce(stream uintptr, send, recv uint64, count int64, t DataType, op Op) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	handle := commHandle(c.handle.Load())
	if handle == 0 {
		return closed("AllReduce")
	}
	if count < 0 {
		return errs.Invalid("AllReduce", "count", count, "0 and more")
	}
	if r := c.lib.call.allReduce(send, recv, uintptr(count), t, op, handle, stream); r != Success {
		return fmt.Errorf("AllReduce of %d %v, %v: %w", count, t, op, c.lib.check("ncclAllReduce", r))
	}
	return nil
}

// Destroy gives the communicator back. All ranks should call it, with no work left on their streams and all graphs closed that
// have recorded its work, for which NCCL waits: see [Bound]. Destroying or aborting twice is ErrClosed.
func (c *Comm) Destroy() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	handle := commHandle(c.handle.Swap(0))
	if handle == 0 {
		return closed("Destroy")
	}
	if err := c.lib.check("ncclCommDestroy", c.lib.call.commDestroy(handle)); err != nil {
		return fmt.Errorf("destroying the communicator: %w", err)
	}
	return nil
}

// Abort gives the communicator back without the other ranks and ends its work, done or not. It is for a rank whose peers have
// failed, and may be called while another goroutine is in AllReduce.
func (c *Comm) Abort() error {
	handle := commHandle(c.handle.Swap(0))
	if handle == 0 {
		return closed("Abort")
	}
	if err := c.lib.check("ncclCommAbort", c.lib.call.commAbort(handle)); err != nil {
		return fmt.Errorf("aborting the communicator: %w", err)
	}
	return nil
}

// closed is the error of using a communicator that was destroyed or aborted.
func closed(op string) error { return fmt.Errorf("%s: the communicator is %w", op, errs.ErrClosed) }
