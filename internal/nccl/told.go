package nccl

import (
	"fmt"

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
	calls := func() Result {
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
		return r
	}
	var r Result
	if grouped {
		var of string
		if r, of = c.lib.inGroup(calls); of == groupStart {
			return c.refused("beginning a group", AllReduce, r)
		}
	} else {
		r = calls()
	}
	if r = c.await(handle, r); r != Success {
		return c.refused(fmt.Sprintf("%s of %d %v, %v, with a word", AllReduce, count, t, op), AllReduce, r)
	}
	return nil
}
