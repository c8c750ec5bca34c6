package collective

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"sync/atomic"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/kernels/ptx"
	"github.com/symmem/symmem/memory"
)

// Kernel is a kernel for CUDA devices, and how it is launched. The grid and its blocks have one dimension.
//
// All blocks of the grid run at the same time, so that they may wait for the blocks of other ranks. Every rank launches equally many:
// as many as Blocks says, or fewer where these would not leave room on each rank's device for a second plan like it (unless Spec.Exclusive is set) and for other
// work, or are more than the setting max-blocks of a rank allows. So a kernel goes by its gridDim, as a loop over the grid does. A rank alone has nobody to wait for: it launches as many as Blocks
// says, and those that the device has no place for run when others have ended.
type Kernel struct {
	// Image is PTX, a cubin or a fat binary, the same on every rank. It is loaded once for a device, however many plans use it.
	Image []byte
	// Function is the kernel's name in the image, as the compiler made it: for C++, extern "C" keeps it readable.
	Function string
	// Blocks is how many blocks are of use, at least 1, and Threads how many threads each has.
	Blocks, Threads int
	// Fit, unless nil, returns Blocks and Threads for devices with so many multiprocessors, the fewest that any rank's has. Of threads it
	// takes 32, 64, 128, 256, 512 or 1024.
	Fit func(multiprocessors int) (blocks, threads int)
	// MinBlocks is how many blocks there must be at least; with fewer New fails, on every rank. 0 is 1. Blocks of a kernel that was compiled for clusters along x, as by __cluster_dims__, come in
	// whole clusters: there are fewer than Blocks rather than a part of one, and New fails where there is not one.
	MinBlocks int
	// SharedBytes is the dynamic shared memory of a block.
	SharedBytes int
	// BlockWorkspace is how many bytes of workspace each block has, behind Spec.Workspace.
	BlockWorkspace int64
	// Overlap lets the kernel begin while the work before it in the stream still ends, where the device can (programmatic dependent launch).
	// The kernel waits for that work by itself, as symmem::awaitPrevious does. It lets the launch after it begin (symmem::startNext) only
	// when it waits for nobody any more: what has begun takes room on the device.
	Overlap bool
	// EarlyEpoch says that a block keeps the epoch of a launch before it has ended, while it may still wait for peers. Then records do not tell that runs have
	// ended: the plan moves to another stream only when the last one is idle.
	EarlyEpoch bool
	// Fault, unless nil, makes an error of a fault word that the kernel has written for reasons of its own, which [ptx.Fault] has as Why; nil for
	// any other.
	Fault func(f ptx.Fault) error
	// Params returns the kernel's parameters in their order, when a plan is made: integers and floats of fixed size, a [device.Ptr] for a
	// pointer, an array of these or a struct whose padding is in fields called _, or the bytes of a parameter as they are. Nil for a kernel that has none.
	Params func(a *Addresses) []any
}

// threadSizes are the blocks that Fit may choose.
var threadSizes = []int{32, 64, 128, 256, 512, mostThreads}

// mostThreads is the most threads that a block has on any CUDA device.
const mostThreads = 1024

// badFit is the error of a Fit that gave what no launch can be.
func badFit(blocks, threads int) error {
	return errs.Invalid("New", "Fit", fmt.Sprintf("%d blocks of %d threads", blocks, threads),
		fmt.Sprintf("1 to %d blocks, of %v threads and no more than the kernel was compiled for", math.MaxInt32, threadSizes))
}

// kernelForm is a plan as a CUDA kernel.
type kernelForm struct {
	plan   *Plan
	kernel *Kernel
	name   string // of the kernel in the Spec, for errors

	function        device.Function
	blocks, threads int
	tenant          *tenant
}

// deviceOffer is what a rank's device can do for a plan.
type deviceOffer struct {
	Processors int         `json:"processors"` // multiprocessors
	Resident   map[int]int `json:"resident"`   // blocks of the kernel that the device runs at the same time, by their threads
	Limit      string      `json:"limit"`      // why there are none with more threads; "" if there are all
	Most       int         `json:"most"`       // blocks that the rank's settings allow; 0 is any number
}

// gpu is what CUDA devices tell about themselves.
type gpu interface{ Multiprocessors() int }

func (f *kernelForm) describe() string {
	k := f.kernel
	text := fmt.Sprintf("kernel %s of the image %x, ", k.Function, sha256.Sum256(k.Image))
	if k.Fit == nil {
		text += fmt.Sprintf("%d blocks of %d threads, ", k.Blocks, k.Threads)
	}
	return text + fmt.Sprintf("at least %d blocks, %d bytes of shared memory and %d of workspace a block, overlap %t", max(k.MinBlocks, 1), k.SharedBytes, k.BlockWorkspace, k.Overlap)
}

func (f *kernelForm) check(call string) error {
	switch k := f.kernel; {
	case len(k.Image) == 0:
		return errs.Invalid(call, f.name+".Image", "nothing", "PTX, a cubin or a fat binary")
	case k.Function == "":
		return errs.Invalid(call, f.name+".Function", `""`, "the name of a kernel in the image")
	case k.Fit == nil && (k.Blocks < 1 || k.Blocks > math.MaxInt32):
		return errs.Invalid(call, f.name+".Blocks", k.Blocks, fmt.Sprintf("1 to %d", math.MaxInt32))
	case k.Fit == nil && (k.Threads < 1 || k.Threads > mostThreads):
		return errs.Invalid(call, f.name+".Threads", k.Threads, fmt.Sprintf("1 to %d", mostThreads))
	case k.MinBlocks < 0:
		return errs.Invalid(call, f.name+".MinBlocks", k.MinBlocks, "0 or more")
	case k.SharedBytes < 0 || k.SharedBytes > math.MaxInt32:
		return errs.Invalid(call, f.name+".SharedBytes", k.SharedBytes, "0 or more bytes that a block can have")
	case k.BlockWorkspace < 0 || k.BlockWorkspace > maxWorkspaceBytes:
		return errs.Invalid(call, f.name+".BlockWorkspace", k.BlockWorkspace, fmt.Sprintf("0 to %d bytes", int64(maxWorkspaceBytes)))
	}
	return nil
}

func (f *kernelForm) offer() ([]byte, error) {
	if err := f.check("New"); err != nil {
		return nil, err
	}
	g, ok := f.plan.device.(gpu)
	if !ok {
		return nil, fmt.Errorf("kernels for %s: %w", f.plan.device.Name(), errs.ErrUnsupported)
	}
	var err error
	if f.function, err = f.plan.memory.Function(f.kernel.Image, f.kernel.Function); err != nil {
		return nil, err
	}
	o := deviceOffer{Processors: g.Multiprocessors(), Resident: map[int]int{}, Most: f.plan.memory.MaxBlocks()}
	if f.kernel.Fit == nil {
		if o.Resident[f.kernel.Threads], err = f.function.MaxBlocks(f.kernel.Threads, f.kernel.SharedBytes); err != nil {
			return nil, err
		}
		return json.Marshal(o)
	}
	for _, threads := range threadSizes {
		n, err := f.function.MaxBlocks(threads, f.kernel.SharedBytes)
		if _, large := errors.AsType[*errs.ArgumentError](err); large && threads > threadSizes[0] {
			o.Limit = err.Error() // the kernel was compiled for smaller blocks
			break
		}
		if err != nil {
			return nil, err
		}
		o.Resident[threads] = n
	}
	return json.Marshal(o)
}

// settle decides how the kernel is launched: alike on all ranks, since the blocks of one wait for those of the others, and so that it
// leaves room on every device.
func (f *kernelForm) settle(offers []memory.WorkspaceOffer) (int64, error) {
	const call = "New"
	devices := make([]deviceOffer, len(offers))
	processors := math.MaxInt
	for r, o := range offers {
		if err := json.Unmarshal(o.Offer, &devices[r]); err != nil {
			return 0, fmt.Errorf("reading what the device of rank %d can do: %w", r, err)
		}
		processors = min(processors, devices[r].Processors)
	}
	k := f.kernel
	f.blocks, f.threads = k.Blocks, k.Threads
	if k.Fit != nil {
		f.blocks, f.threads = k.Fit(processors)
	}
	for r, d := range devices {
		switch n, ok := d.Resident[f.threads]; {
		case f.blocks < 1 || f.blocks > math.MaxInt32 || !ok:
			err := badFit(f.blocks, f.threads)
			if d.Limit != "" {
				err = fmt.Errorf("%w; what the device of rank %d says of larger blocks: %s", err, r, d.Limit)
			}
			return 0, err
		case n < 1:
			return 0, errs.Invalid(call, f.name+".Threads", fmt.Sprintf("%d with %d bytes of shared memory", f.threads, k.SharedBytes), fmt.Sprintf("what fits the device of rank %d", r))
		}
	}
	for _, d := range devices {
		if d.Most > 0 {
			f.blocks = min(f.blocks, d.Most)
		}
	}
	f.wholeClusters()
	if len(offers) > 1 { // a rank alone waits for nobody
		if err := f.makeRoom(offers, devices); err != nil {
			return 0, err
		}
	}
	if least := max(k.MinBlocks, clusterBlocks(f.function)); f.blocks < least {
		return 0, errs.Invalid(call, f.name+".MinBlocks", least,
			fmt.Sprintf("at most %d of %d threads, which are of use, the setting max-blocks of every rank allows, and leave room for others on its device", f.blocks, f.threads))
	}
	if k.BlockWorkspace > maxWorkspaceBytes/int64(f.blocks) {
		return 0, errs.Invalid(call, f.name+".BlockWorkspace", k.BlockWorkspace,
			fmt.Sprintf("what makes no more than %d bytes of %d blocks", int64(maxWorkspaceBytes), f.blocks))
	}
	return max(f.dataAt()+f.plan.spec.Workspace+int64(f.blocks)*k.BlockWorkspace, 1), nil
}

// makeRoom takes away the blocks for which there is no room.
func (f *kernelForm) makeRoom(offers []memory.WorkspaceOffer, devices []deviceOffer) error {
	const call = "New"
	plans := plansAtOnce
	if f.plan.spec.Exclusive {
		plans = 1
	}
	for r, d := range devices {
		f.blocks = min(f.blocks, mostBlocks(d.Resident[f.threads], d.Processors, sharing(offers, r), plans))
	}
	f.wholeClusters()
	for r, d := range devices {
		if n := sharing(offers, r); f.blocks*n > d.Resident[f.threads] {
			// The blocks wait for those of other ranks: all must run at once.
			return errs.Invalid(call, f.name+".Blocks", f.blocks*n,
				fmt.Sprintf("at most %d of %d threads on the device of rank %d, which %d ranks share", d.Resident[f.threads], f.threads, r, n))
		}
	}
	f.tenant = f.newTenant(offers, devices)
	return nil
}

// clusterBlocks is how many blocks a cluster of a function has, which are alike on all ranks: they have the same image.
func clusterBlocks(f device.Function) int {
	if c, ok := f.(device.Clustered); ok {
		return max(c.ClusterBlocks(), 1)
	}
	return 1
}

// wholeClusters takes away the blocks that make no whole cluster.
func (f *kernelForm) wholeClusters() { f.blocks -= f.blocks % clusterBlocks(f.function) }

// sharing counts the ranks on the device of rank.
func sharing(offers []memory.WorkspaceOffer, rank int) int {
	n := 0
	for _, o := range offers {
		if o.Device == offers[rank].Device {
			n++
		}
	}
	return n
}

// newTenant says what the plan takes of this rank's device, with the same figures on every rank, those of the device that it takes most of: so ranks that run
// their plans alike run out of room alike. All ranks on a device are taken to do as this one does.
func (f *kernelForm) newTenant(offers []memory.WorkspaceOffer, devices []deviceOffer) *tenant {
	members, rank := f.plan.memory.Group().Members(), f.plan.rank
	t := &tenant{device: offers[rank].Device, rank: members[rank].WorldRank, most: 1, over: f.plan.over}
	for r, d := range devices {
		t.takes = max(t.takes, float64(f.blocks)/float64(d.Resident[f.threads])*float64(sharing(offers, r)))
		t.most = min(t.most, capacity(d.Processors))
	}
	for r, o := range offers {
		t.shared = t.shared || r != rank && o.Device == t.device && members[r].Process == members[rank].Process
	}
	return t
}

func (f *kernelForm) launch() string {
	return fmt.Sprintf(" of %d blocks of %d threads", f.blocks, f.threads)
}

func (f *kernelForm) dataAt() int64 { return ptx.ControlBytes(f.blocks, f.plan.size) }

// kernelWork is a plan's work on a CUDA device.
type kernelWork struct {
	plan   *Plan
	blocks int
	launch device.PreparedLaunch

	enqueued atomic.Uint32 // runs that were not recorded
	captured atomic.Bool   // a run was recorded, so that nobody knows how many there were
}

func (f *kernelForm) prepare(_ context.Context, a *Addresses) (work, error) {
	p := f.plan
	w := &kernelWork{plan: p, blocks: f.blocks}
	faults, ok := p.device.(device.FaultReporter)
	if !ok {
		return nil, fmt.Errorf("kernels for %s: %w", p.device.Name(), errs.ErrUnsupported)
	}
	var err error
	if p.held.fault, err = faults.NewFaultWord(w.decode); err != nil {
		return nil, err
	}
	a.blocks = f.blocks
	params, err := f.kernel.params(a)
	if err != nil {
		return nil, err
	}
	if err := p.beginRecords(0, f.blocks); err != nil {
		return nil, err
	}
	w.launch, err = f.function.Prepare(device.Launch{
		Grid: [3]uint32{uint32(f.blocks)}, Block: [3]uint32{uint32(f.threads)}, SharedBytes: uint32(f.kernel.SharedBytes), Params: params,
		Overlap: f.kernel.Overlap, Fault: p.held.fault,
	})
	if err != nil {
		return nil, err
	}
	p.tenant = f.tenant
	return w, nil
}

// control reads the records at the front of this rank's workspace.
func (w *kernelWork) control() ([]byte, error) {
	own, err := w.plan.workspace.Peer(w.plan.rank)
	if err != nil {
		return nil, err
	}
	control := make([]byte, ptx.ControlBytes(w.blocks, w.plan.size))
	return control, w.plan.device.CopyToHost(control, own)
}

// beginRecords makes every word of a kernel's records, which begin so far into this rank's workspace, the first epoch. They are 0 before.
func (p *Plan) beginRecords(at int64, blocks int) error {
	if p.spec.FirstEpoch == 0 {
		return nil
	}
	own, err := p.workspace.Peer(p.rank)
	if err != nil {
		return err
	}
	control := make([]byte, 0, ptx.ControlBytes(blocks, p.size))
	for len(control) < cap(control) {
		control = binary.LittleEndian.AppendUint32(control, p.spec.FirstEpoch)
	}
	return p.device.CopyFromHost(own.Add(at), control)
}

// decode makes an error of what a kernel wrote when it gave up.
func (w *kernelWork) decode(word uint64) error {
	f := ptx.DecodeFault(word)
	if own := w.plan.spec.CUDA.Fault; own != nil {
		if err := own(f); err != nil {
			return w.plan.fail(fmt.Errorf("running %s: %w", w.plan.name, err))
		}
	}
	return w.plan.fail(w.plan.memory.WaitFailed(w.plan.name, f))
}

func (w *kernelWork) enqueue(s device.Stream, recorded bool) error {
	if word := w.plan.held.fault.Load(); word != 0 {
		return w.decode(word)
	}
	if recorded {
		w.captured.Store(true)
		return w.launch.Launch(s)
	}
	w.enqueued.Add(1)
	err := w.launch.Launch(s)
	if err != nil {
		w.enqueued.Add(^uint32(0)) // it will not run
	}
	return err
}

// settled asks the stream first. If that has more to do it compares the count of runs that each block keeps in its record with how many were
// enqueued. Once runs were recorded nobody knows how many there were, a kernel that does not include symmem.cuh, or has no peers, counts nothing, and
// one with an EarlyEpoch counts runs that have begun: then the stream must be idle.
func (w *kernelWork) settled() (bool, error) {
	idle, err := w.plan.idle()
	if idle || w.captured.Load() || w.plan.spec.CUDA.EarlyEpoch {
		return idle, err
	}
	control, readErr := w.control() // though the stream cannot be asked, as when something is recorded on it
	if readErr != nil {
		return false, readErr
	}
	if w.counted(control) {
		return true, nil
	}
	return false, err
}

// counted reports whether every block has counted all runs.
func (w *kernelWork) counted(control []byte) bool {
	record := len(control) / w.blocks
	for b := range w.blocks {
		if binary.LittleEndian.Uint32(control[b*record:]) != w.plan.spec.FirstEpoch+w.enqueued.Load() {
			return false
		}
	}
	return true
}

func (w *kernelWork) close() error { return notClosed(w.launch.Close()) }
