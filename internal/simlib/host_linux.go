package simlib

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/symmem/symmem/device"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/simcuda"
)

const (
	granule = 2 << 20
	// endless is how long a call waits for the other ranks: a real library's would wait for ever.
	endless = 2 * time.Minute
)

// host is what both libraries are made on. mu is held while calls of the driver are made, and never in a step of a stream's work.
type host struct {
	machine *simcuda.Machine
	drv     *cu.Driver

	mu   sync.Mutex
	next uint64 // number of an id
}

func newHost(m *simcuda.Machine) host { return host{machine: m, drv: m.Driver()} }

// id gives bytes that no other id has.
func (h *host) id(b []byte) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.next++
	binary.LittleEndian.PutUint64(b, h.next)
}

func roundUp(n, unit uint64) uint64 { return (n + unit - 1) / unit * unit }

// failed is a call of the driver that did not succeed. It is thrown and caught within this package.
type failed struct {
	call string
	r    cu.Result
}

func (f failed) String() string { return fmt.Sprintf("%s: result %d", f.call, f.r) }

func must(call string, r cu.Result) {
	if r != cu.Success {
		panic(failed{call, r})
	}
}

// try calls f, and returns the call of the driver that failed in it.
func try(f func()) (err error) {
	defer func() {
		if x := recover(); x != nil {
			e, ok := x.(failed)
			if !ok {
				panic(x)
			}
			err = errors.New(e.String())
		}
	}()
	f()
	return nil
}

// create makes memory of a GPU, as both libraries do: it can be passed on as a descriptor.
func (h *host) create(gpu int, bytes uint64) (m cu.MemHandle) {
	must("cuMemCreate", h.drv.MemCreate(&m, bytes, &cu.MemAllocationProp{
		Type: cu.AllocationPinned, RequestedHandleTypes: cu.HandleFD, Location: cu.MemLocation{Type: cu.LocationDevice, ID: int32(gpu)},
	}, 0))
	return m
}

func (h *host) reserve(bytes uint64) (p device.Ptr) {
	must("cuMemAddressReserve", h.drv.MemAddressReserve(&p, bytes, granule, 0, 0))
	return p
}

// show maps memory, for the kernels of some GPUs.
func (h *host) show(p device.Ptr, bytes uint64, m cu.MemHandle, gpus ...int) {
	must("cuMemMap", h.drv.MemMap(p, bytes, 0, m, 0))
	var all []cu.MemAccessDesc
	for _, g := range gpus {
		all = append(all, cu.MemAccessDesc{Location: cu.MemLocation{Type: cu.LocationDevice, ID: int32(g)}, Flags: cu.AccessReadWrite})
	}
	if r := h.drv.MemSetAccess(p, bytes, &all[0], uint64(len(all))); r != cu.Success {
		h.drv.MemUnmap(p, bytes)
		panic(failed{"cuMemSetAccess", r})
	}
}

// retain gives a handle of the memory at an address, what is at its beginning, and its size.
func (h *host) retain(p device.Ptr) (m cu.MemHandle, base device.Ptr, bytes uint64) {
	must("cuMemGetAddressRange", h.drv.MemGetAddressRange(&base, &bytes, p))
	must("cuMemRetainAllocationHandle", h.drv.MemRetainAllocationHandle(&m, p))
	return m, base, bytes
}

// reachers are the GPUs that reach the memory of one, itself among them.
func (h *host) reachers(gpu int) (all []int) {
	for g := range h.machine.GPUs() {
		var can int32
		must("cuDeviceCanAccessPeer", h.drv.DeviceCanAccessPeer(&can, cu.DeviceOrdinal(g), cu.DeviceOrdinal(gpu)))
		if can != 0 || g == gpu {
			all = append(all, g)
		}
	}
	return all
}

// cast is a multicast object with memory of each rank, mapped for each at an address of its own.
type cast struct {
	host   *host
	object cu.MemHandle
	bytes  uint64
	at     []device.Ptr // by rank; 0 where the rank has left
	gpus   []int
}

// bind makes a multicast object of the memory at an address of each rank. The memory is whole allocations of the same size.
func (h *host) bind(gpus []int, memory []device.Ptr, bytes uint64) *cast {
	mc, err := h.drv.MulticastSource()
	if err != nil {
		panic(failed{"dlsym of cuMulticastCreate", cu.NotSupported})
	}
	c := &cast{host: h, bytes: bytes, gpus: gpus}
	must("cuMulticastCreate", mc.Create(&c.object, &cu.MulticastObjectProp{NumDevices: uint32(len(gpus)), Size: bytes, HandleTypes: uint64(cu.HandleFD)}))
	for _, g := range gpus {
		must("cuMulticastAddDevice", mc.AddDevice(c.object, cu.DeviceOrdinal(g)))
	}
	for r := range gpus {
		m, _, _ := h.retain(memory[r])
		must("cuMulticastBindMem", mc.BindMem(c.object, 0, m, 0, bytes, 0))
		must("cuMemRelease", h.drv.MemRelease(m))
	}
	for _, g := range gpus {
		p := h.reserve(bytes)
		h.show(p, bytes, c.object, g)
		c.at = append(c.at, p)
	}
	return c
}

// leave takes a rank's part away, and the object with the last of them.
func (c *cast) leave(rank int) {
	if c.at[rank] == 0 {
		return
	}
	h := c.host
	must("cuMemUnmap", h.drv.MemUnmap(c.at[rank], c.bytes))
	must("cuMemAddressFree", h.drv.MemAddressFree(c.at[rank], c.bytes))
	c.at[rank] = 0
	mc, err := h.drv.MulticastSource()
	if err != nil {
		panic(failed{"dlsym of cuMulticastUnbind", cu.NotSupported})
	}
	must("cuMulticastUnbind", mc.Unbind(c.object, cu.DeviceOrdinal(c.gpus[rank]), 0, c.bytes))
	if !slices.ContainsFunc(c.at, func(p device.Ptr) bool { return p != 0 }) {
		must("cuMemRelease", h.drv.MemRelease(c.object))
	}
}

// round is a call that takes all ranks.
type round struct {
	call string
	args []any
	came int
	torn bool          // the ranks make different calls, of which nothing comes
	done chan struct{} // closed when the last has come, and has done what the call does for all
}

// rounds are the calls of some ranks, each of which makes them in the same order.
type rounds struct {
	size   int
	made   []int // by rank
	rounds map[int]*round
}

func newRounds(size int) *rounds {
	return &rounds{size: size, made: make([]int, size), rounds: map[int]*round{}}
}

// come is a rank's call. The last to come calls finish with what the ranks bring. The host's mu is held.
func (h *host) come(w *rounds, rank int, call string, arg any, finish func(args []any)) *round {
	n := w.made[rank]
	w.made[rank]++
	r := w.rounds[n]
	if r == nil {
		r = &round{call: call, args: make([]any, w.size), done: make(chan struct{})}
		w.rounds[n] = r
	}
	if r.call != call {
		r.torn = true
		h.machine.Violation("rank %d of %d calls %s, and others %s", rank, w.size, call, r.call)
	}
	r.args[rank] = arg
	if r.came++; r.came == w.size {
		delete(w.rounds, n)
		if !r.torn {
			finish(r.args)
		}
		close(r.done)
	}
	return r
}

// await waits for a round, until the communicator is aborted, and says whether the round came to its end.
func (h *host) await(r *round, aborted <-chan struct{}) bool {
	late := time.NewTimer(endless)
	defer late.Stop()
	select {
	case <-r.done:
		return true
	case <-aborted:
	case <-late.C:
		h.machine.Violation("%s waits in vain for ranks that do not come", r.call)
	}
	return false
}
