package nccl

import (
	"fmt"
	"runtime"

	"github.com/symmem/symmem/internal/errs"
)

// AllReduceTold is AllReduce with a word beside it, one group of calls where the library has groups: what of told, a u32, is the largest on any rank comes to
// heard on each. Addresses are of the GPU's memory; told and heard are not in what is reduced. Of no elements only the word is.
func (c *Comm) AllReduceTold(stream uintptr, send, recv uint64, count int64, t DataType, op Op, told, heard uint64) error {
	if count < 0 {
		return errs.Invalid("AllReduceTold", "count", count, "0 and more")
	}
	f := &c.lib.call
	grouped := f.GroupStart != nil && f.GroupEnd != nil && count > 0
	c.mu.Lock()
	defer c.mu.Unlock()
	handle := c.Handle()
	if handle == 0 {
		return c.gone(AllReduce.String())
	}
	if grouped { // a group is the thread's
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		if r := f.GroupStart(); r != Success {
			return c.refused("beginning a group", AllReduce, r)
		}
	}
	r := Success
	if count > 0 {
		r = f.AllReduce(send, recv, uintptr(count), t, op, handle, stream)
		if !grouped {
			r = c.await(handle, r)
		}
	}
	if r == Success || r == InProgress {
		r = f.AllReduce(told, heard, 1, Uint32, Max, handle, stream)
	}
	if grouped {
		end := f.GroupEnd() // in any case: the thread would stay in the group
		if r == Success || r == InProgress {
			r = end
		}
	}
	if r = c.await(handle, r); r != Success {
		return c.refused(fmt.Sprintf("%s of %d %v, %v, with a word", AllReduce, count, t, op), AllReduce, r)
	}
	return nil
}
