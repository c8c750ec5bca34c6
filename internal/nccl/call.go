package nccl

import (
	"fmt"

	"github.com/symmem/symmem/internal/errs"
)

// Call is one of several collectives, or sides of messages, that are enqueued together.
type Call struct {
	What       Collective
	Send, Recv uint64 // addresses of the GPU's memory; a message has the one of its side
	Count      int64  // elements, at least 1
	Type       DataType
	Op         Op  // of those that combine
	Root       int // rank of the communicator, of those that have one; of a message the other rank
}

// String says what it is: "AllReduce of 4 float32, sum", "Send of 4 float32, rank 1".
func (c *Call) String() string {
	if c.What.IsMessage() {
		return fmt.Sprintf("%s of %d %v, rank %d", c.What, c.Count, c.Type, c.Root)
	}
	return fmt.Sprintf("%s of %d %v, %v", c.What, c.Count, c.Type, c.Op)
}

// enqueue calls the library's function, which is there.
func (l *Library) enqueue(handle CommHandle, stream uintptr, c *Call) (r Result) {
	n := uintptr(c.Count)
	switch f := &l.call; c.What {
	case AllReduce:
		r = f.AllReduce(c.Send, c.Recv, n, c.Type, c.Op, handle, stream)
	case Broadcast:
		r = f.Broadcast(c.Send, c.Recv, n, c.Type, int32(c.Root), handle, stream)
	case Reduce:
		r = f.Reduce(c.Send, c.Recv, n, c.Type, c.Op, int32(c.Root), handle, stream)
	case AllGather:
		r = f.AllGather(c.Send, c.Recv, n, c.Type, handle, stream)
	case ReduceScatter:
		r = f.ReduceScatter(c.Send, c.Recv, n, c.Type, c.Op, handle, stream)
	case AllToAll:
		r = f.AllToAll(c.Send, c.Recv, n, c.Type, handle, stream)
	case Send:
		r = f.Send(c.Send, n, c.Type, int32(c.Root), handle, stream)
	case Recv:
		r = f.Recv(c.Recv, n, c.Type, int32(c.Root), handle, stream)
	}
	return r
}

// EnqueueAll enqueues, or records, collectives in their order, the same on every rank but for the addresses, and the sides of messages that this rank has. Where the
// library has groups they are one, which NCCL carries out together. The caller keeps calls until it returns.
func (c *Comm) EnqueueAll(stream uintptr, calls []Call) error {
	for i := range calls {
		x := &calls[i]
		if x.Count < 1 || x.Root < 0 || x.Root >= c.ranks {
			return errs.Invalid("EnqueueAll", "call", x, fmt.Sprintf("1 element or more, and a root of 0 to %d", c.ranks-1))
		}
		if err := c.lib.Has(x.What); err != nil {
			return err
		}
	}
	f := &c.lib.call
	grouped := f.GroupStart != nil && f.GroupEnd != nil && len(calls) > 1
	c.mu.Lock()
	defer c.mu.Unlock()
	handle := c.Handle()
	if handle == 0 {
		return c.gone("EnqueueAll")
	}
	at := 0 // the call that failed, or the last one
	all := func() (r Result) {
		for i := range calls {
			at = i
			r = c.lib.enqueue(handle, stream, &calls[i])
			if !grouped {
				r = c.await(handle, r)
			}
			if r != Success && r != InProgress {
				break
			}
		}
		return r
	}
	var r Result
	if grouped {
		var of string
		if r, of = c.lib.inGroup(all); of == groupStart {
			return c.refused("beginning a group", calls[0].What, r)
		}
	} else {
		r = all()
	}
	if r = c.await(handle, r); r != Success {
		return c.refused(fmt.Sprintf("%v, call %d of %d", &calls[at], at+1, len(calls)), calls[at].What, r)
	}
	return nil
}
