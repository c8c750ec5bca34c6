package simlib

import (
	"encoding/binary"
	"slices"

	"github.com/symmem/symmem/device"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/nccl"
	"github.com/symmem/symmem/internal/simcuda"
)

// GIN lets GPUs of several hosts send over the network of themselves: windows then have all ranks of several hosts, with addresses inside each, and there
// are puts between them. To be called before the functions are.
func (n *NCCL) GIN() { n.gin = true }

// rmaBytes is the size of ncclCommProperties_t since 2.29.7, and hostRma where it says whether there are puts.
const (
	rmaBytes = 56
	hostRma  = 44
)

// rmaProperties says whether there are puts.
func (n *NCCL) rmaProperties(c *comm, b []byte) nccl.Result {
	if binary.LittleEndian.Uint32(b[8:]) != 0xcafebeef || binary.LittleEndian.Uint32(b[12:]) != 22907 {
		return nccl.InvalidArgument
	}
	if b[hostRma] = 0; n.gin || !n.severalHosts(c.world) {
		b[hostRma] = 1
	}
	return nccl.Success
}

// putSignal puts the bytes on their way when the stream comes to them, and the stream goes on when they have arrived. What NCCL refuses it refuses, as its
// source does (rmaTaskAppend in enqueue.cc); what NCCL takes and then does wrong is a violation.
func (n *NCCL) putSignal(send uint64, count uintptr, t nccl.DataType, peer int32, to nccl.WindowHandle, offset uintptr, signal, context int32, flags uint32,
	h nccl.CommHandle, stream uintptr,
) nccl.Result {
	var c *comm
	var there device.Ptr
	bytes := uint64(int64(count) * t.Bytes())
	r := n.on(h, func(x *comm) nccl.Result {
		if c = x; x.busy() {
			n.machine.Violation("ncclPutSignal on rank %d, whose last call was not waited for", x.rank)
		}
		if x.flying.Load() > 0 && x.putting != stream {
			n.machine.Violation("the puts of rank %d are on two streams, and NCCL counts them in one order", x.rank)
		}
		x.putting = stream
		w := n.windows[to]
		mine := slices.ContainsFunc(x.windows, func(o *window) bool {
			at := uint64(o.base) + o.from
			return o.symmetric && send >= at && send+bytes <= at+o.size
		})
		switch {
		case n.severalHosts(x.world) && !n.gin, signal != 0, context != 0, flags != 0, peer < 0, int(peer) >= len(x.world.joined):
			return nccl.InvalidArgument
		case w == nil || w.comm != x || !w.symmetric || !mine || bytes == 0:
			return nccl.InvalidArgument
		case uint64(offset)+bytes > w.size:
			n.machine.Violation("ncclPutSignal of %d bytes at %d of a window of %d", bytes, offset, w.size)
			return nccl.InvalidArgument
		}
		there = w.copyOf(int(peer)).Add(int64(w.from) + int64(offset))
		return nccl.Success
	})
	if r != nccl.Success {
		return r
	}
	c.flying.Add(1)
	enqueued := n.machine.EnqueueLibrary(cu.StreamHandle(stream), func(recorded bool) func() simcuda.Step {
		if recorded {
			n.machine.Violation("ncclPutSignal of rank %d was recorded, and its signals are counted in another place", c.rank)
		}
		return func() simcuda.Step {
			flying := false
			return func(a *simcuda.Access) (done, moved bool, err error) {
				select {
				case <-c.aborted: // nothing moves any more
					return true, true, nil
				default:
				}
				if !flying { // other streams have a turn before it arrives
					flying = true
					return false, true, nil
				}
				from, err := a.Bytes(device.Ptr(send), int64(bytes))
				if err != nil {
					return true, true, err
				}
				into, err := a.Bytes(there, int64(bytes))
				if err != nil {
					return true, true, err
				}
				data := slices.Concat(from...)
				for _, b := range into {
					data = data[copy(b, data):]
				}
				c.flying.Add(-1)
				return true, true, nil
			}
		}
	})
	if enqueued != cu.Success {
		c.flying.Add(-1)
		return nccl.UnhandledCudaError
	}
	return nccl.Success
}
