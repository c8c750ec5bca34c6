package collective

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"unsafe"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/kernels/ptx"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// Addresses says where everything of a plan is, while it is prepared. It is for the functions of a [Spec], and must not be used after they
// have returned. A method that fails returns 0, and [New] returns its error.
type Addresses struct {
	plan    *Plan
	dataAt  int64 // of the Spec's workspace, in bytes from the beginning of the plan's
	blocks  int
	ranks   []int // nil, or those that there are, of the plan's
	records int64 // where in the plan's workspace a kernel's begin
	dead    device.Ptr
	table   device.Ptr
	err     error // the first
}

// fail keeps the first error.
func (a *Addresses) fail(err error) {
	if a.err == nil {
		a.err = err
	}
}

// Rank is this rank.
func (a *Addresses) Rank() int {
	if a.ranks != nil {
		return slices.Index(a.ranks, a.plan.rank)
	}
	return a.plan.rank
}

// WorldSize is the number of ranks.
func (a *Addresses) WorldSize() int {
	if a.ranks != nil {
		return len(a.ranks)
	}
	return a.plan.size
}

// planRank is the number of a rank in the plan; false if there is no such rank, which is kept as the error of a call.
func (a *Addresses) planRank(call string, rank int) (int, bool) {
	if n := a.WorldSize(); rank < 0 || rank >= n {
		a.fail(errs.Invalid(call, "rank", rank, fmt.Sprintf("0 to %d", n-1)))
		return 0, false
	}
	if a.ranks == nil {
		return rank, true
	}
	return a.ranks[rank], true
}

// Tensor is the address in this process of the first element of rank's copy of Spec.Tensors[i]; nil for an empty tensor. ErrInvalid for a
// tensor or rank that does not exist, ErrNotReachable for a peer that has no address here.
func (a *Addresses) Tensor(i, rank int) device.Ptr {
	ts := a.plan.spec.Tensors
	if i < 0 || i >= len(ts) {
		a.fail(errs.Invalid("Addresses.Tensor", "i", i, fmt.Sprintf("the number of one of %d tensors", len(ts))))
		return 0
	}
	of, ok := a.planRank("Addresses.Tensor", rank)
	if !ok || ts[i].Bytes() == 0 {
		return 0
	}
	v, err := ts[i].Remote(of)
	if err != nil {
		a.fail(err)
		return 0
	}
	return v.Ptr()
}

// Multicast is the address that reaches all ranks' copies of Spec.Tensors[i] at once. ErrNoMulticast unless Spec.Multicast asked for it.
func (a *Addresses) Multicast(i int) device.Ptr {
	ts := a.plan.spec.Tensors
	if i < 0 || i >= len(ts) {
		a.fail(errs.Invalid("Addresses.Multicast", "i", i, fmt.Sprintf("the number of one of %d tensors", len(ts))))
		return 0
	}
	at, err := ts[i].Multicast()
	if err != nil {
		a.fail(err)
	}
	return at
}

// Workspace is the address in this process of rank's Spec.Workspace bytes, aligned to 128 bytes.
func (a *Addresses) Workspace(rank int) device.Ptr {
	at := a.base(rank)
	if at.IsNil() {
		return 0
	}
	return at.Add(a.dataAt)
}

// base is where rank's part of the plan's workspace begins, with flags or pads.
func (a *Addresses) base(rank int) device.Ptr {
	of, ok := a.planRank("Addresses.Workspace", rank)
	if !ok {
		return 0
	}
	at, err := a.plan.workspace.Peer(of)
	if err != nil {
		a.fail(err)
		return 0
	}
	return at
}

// Bytes is memory of the host device as a slice: n bytes at p. ErrUnsupported on other devices. [Slice] is the same for other types.
func (a *Addresses) Bytes(p device.Ptr, n int64) []byte {
	hm, ok := a.plan.device.(device.HostMemory)
	if !ok {
		a.fail(fmt.Errorf("memory of %s as a slice: %w", a.plan.device.Name(), errs.ErrUnsupported))
		return nil
	}
	if n == 0 {
		return nil
	}
	b, err := hm.Bytes(p, n)
	if err != nil {
		a.fail(err)
	}
	return b
}

// Slice is memory of the host device as elements: n of them at p. Like a method of a, it returns nil where it fails: ErrUnsupported on other
// devices, ErrInvalid for an address that is not a multiple of an element's size, and for what is not memory of the device.
func Slice[T tensor.Element](a *Addresses, p device.Ptr, n int64) []T {
	size := tensor.DTypeOf[T]().Bytes()
	if n < 0 || n > math.MaxInt64/size || int64(p)%size != 0 {
		a.fail(errs.Invalid("Slice", "memory", fmt.Sprintf("%d elements at %s", n, p), fmt.Sprintf("0 or more, at a multiple of %d", size)))
		return nil
	}
	b := a.Bytes(p, n*size)
	if len(b) == 0 {
		return nil
	}
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(b))), n)
}

// Upload copies data to new memory of this rank's device, which lives as long as the plan, and returns its address, aligned to 256 bytes.
func (a *Addresses) Upload(data []byte) device.Ptr {
	at := a.alloc(int64(len(data)))
	if !at.IsNil() {
		if err := a.plan.device.CopyFromHost(at, data); err != nil {
			a.fail(err)
		}
	}
	return at
}

// alloc takes zeroed memory for the plan.
func (a *Addresses) alloc(bytes int64) device.Ptr {
	at, err := a.plan.device.Alloc(bytes)
	if err != nil {
		a.fail(err)
		return 0
	}
	a.plan.held.memory = append(a.plan.held.memory, at)
	return at
}

// Table is the address, in memory of this rank's device, of every rank's addresses: of Spec.Tensors[0] by rank, then of the next tensors, and
// last of the workspace as [Addresses.Comm] has it; each a 64-bit word.
func (a *Addresses) Table() device.Ptr {
	if !a.table.IsNil() {
		return a.table
	}
	var words []byte
	for i := range a.plan.spec.Tensors {
		for r := range a.WorldSize() {
			words = binary.LittleEndian.AppendUint64(words, uint64(a.Tensor(i, r)))
		}
	}
	for r := range a.WorldSize() {
		words = binary.LittleEndian.AppendUint64(words, uint64(a.Records(r)))
	}
	a.table = a.Upload(words)
	return a.table
}

// Blocks is the number of blocks that the kernel is launched with, the same on every rank. Only for CUDA kernels.
func (a *Addresses) Blocks() int { return a.blocks }

// Comm is the parameter symmem::Comm of a CUDA kernel that includes symmem.cuh: every rank's workspace, and what bounds its waits. Such a
// kernel keeps the records in front of the workspace as the header says, and finds the Spec's workspace behind them.
func (a *Addresses) Comm() ptx.Comm {
	p := a.plan
	if p.held.fault == nil {
		a.fail(fmt.Errorf("symmem::Comm, which only the plan's own CUDA kernels have: %w", errs.ErrUnsupported))
		return ptx.Comm{}
	}
	dead, size := a.Dead(), a.WorldSize()
	stop, err := p.memory.StopWord()
	if err != nil {
		a.fail(err)
	}
	c := ptx.Comm{
		Version: ptx.CommVersion, Rank: uint32(a.Rank()), World: uint32(size), Timeout: uint64(p.memory.KernelTimeout().Nanoseconds()),
		Stop: uint64(stop), Dead: uint64(dead), Fault: uint64(p.held.fault.Ptr()),
	}
	if size > 1 && len(p.spec.programKernels()) > 0 && a.blocks == 0 {
		return c // of a kernel that waits for nobody: not all ranks have addresses
	}
	for r := range min(size, ptx.Inline) {
		c.Workspace[r] = uint64(a.Records(r))
	}
	if size > ptx.Inline {
		c.Table = uint64(a.Table().Add(int64(8 * len(p.spec.Tensors) * size)))
	}
	return c
}

// Records is where rank's part of the workspace begins with the records of the kernel, as [Addresses.Comm] has it.
func (a *Addresses) Records(rank int) device.Ptr {
	at := a.base(rank)
	if at.IsNil() {
		return 0
	}
	return at.Add(a.records)
}

// Dead is the address of the word, of 32 bits in memory of this rank's device, that is not 0 when a kernel of the plan has given up here: that of
// [Addresses.Comm].
func (a *Addresses) Dead() device.Ptr {
	if a.dead.IsNil() {
		a.dead = a.alloc(4)
	}
	return a.dead
}

// enableMulticast gives the tensors multicast addresses, if the Spec wants them. It comes before anything that may fail on one rank alone,
// because the ranks do it together.
func (a *Addresses) enableMulticast(ctx context.Context) error {
	if !a.plan.spec.Multicast {
		return nil
	}
	for _, t := range a.plan.spec.Tensors {
		if err := t.EnableMulticast(ctx); err != nil { // a second time is nothing
			return err
		}
	}
	return nil
}

// put is a write to a peer's tensor or workspace as package memory has it.
func (a *Addresses) put(put Put) (memory.SendPut, error) {
	send := memory.SendPut{Peer: put.Peer, Local: put.Local, Bytes: put.Bytes}
	if p := a.plan; put.Peer < 0 || put.Peer >= p.size || put.Peer == p.rank {
		return send, errs.Invalid("Builder.Send", "Peer", put.Peer, fmt.Sprintf("another rank than this one, %d, of 0 to %d", p.rank, p.size-1))
	}
	if put.Tensor == ToWorkspace {
		if put.Offset < 0 || put.Bytes < 0 || put.Bytes > a.plan.spec.Workspace-put.Offset {
			return send, errs.Invalid("Builder.Send", "put", fmt.Sprintf("%d bytes at offset %d", put.Bytes, put.Offset),
				fmt.Sprintf("inside the workspace of %d bytes", a.plan.spec.Workspace))
		}
		send.Offset = a.dataAt + put.Offset
		return send, nil
	}
	ts := a.plan.spec.Tensors
	if put.Tensor < 0 || put.Tensor >= len(ts) {
		return send, errs.Invalid("Builder.Send", "Tensor", put.Tensor, fmt.Sprintf("the number of one of %d tensors, or ToWorkspace", len(ts)))
	}
	if n := ts[put.Tensor].Bytes(); put.Offset < 0 || put.Bytes < 0 || put.Bytes > n-put.Offset {
		return send, errs.Invalid("Builder.Send", "put", fmt.Sprintf("%d bytes at offset %d", put.Bytes, put.Offset), fmt.Sprintf("inside the tensor of %d bytes", n))
	}
	w, offset, err := ts[put.Tensor].Window()
	if err != nil {
		return send, err
	}
	send.Window, send.Offset = w, offset+put.Offset
	return send, nil
}
