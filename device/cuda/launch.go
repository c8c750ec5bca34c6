package cuda

import (
	"encoding/binary"
	"fmt"
	"math"
	"runtime"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/symmem/symmem/device"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/errs"
)

// Function is one kernel of a module. It implements [device.Function].
type Function struct {
	module     *Module
	name       string
	handle     cu.FunctionHandle
	maxThreads int       // a block
	shared     int       // static shared memory, bytes a block
	params     []int     // bytes of each parameter; nil if the driver does not tell
	cluster    [3]uint32 // blocks of a cluster, at least 1 in each direction
}

// mostParamBytes is how many bytes the parameters of a kernel have together at most, since CUDA 12.1 and on GPUs of compute capability 7.0
// and up; before, it was 4 KiB. A parameter has at least one, so it bounds their number, too.
const mostParamBytes = 32764

// askParams asks how many parameters the kernel has, and how large each is. The driver tells since CUDA 12.4.
func (f *Function) askParams() error {
	drv := f.module.dev.drv
	if drv.FuncGetParamInfo == nil {
		return nil
	}
	f.params = []int{}
	for total := uint64(0); ; {
		var offset, size uint64
		switch r := drv.FuncGetParamInfo(f.handle, uint64(len(f.params)), &offset, &size); r {
		case cu.Success:
		case cu.InvalidValue: // there are no more
			return nil
		default:
			return drv.Check("cuFuncGetParamInfo", r)
		}
		if size == 0 || size > mostParamBytes-total {
			return fmt.Errorf("%w: the driver says that parameter %d has %d bytes, behind %d; a kernel's have 1 or more, and %d together",
				device.ErrUnsupported, len(f.params), size, total, mostParamBytes)
		}
		total += size
		f.params = append(f.params, int(size))
	}
}

// checkParams refuses parameters that the kernel does not have. What the driver does not tell, it cannot check.
func (f *Function) checkParams(call string, params [][]byte) error {
	if f.params != nil && len(params) != len(f.params) {
		return errs.Invalid(call, "len(Params)", len(params),
			fmt.Sprintf("%d, as many as the kernel %s has parameters; their sizes in bytes are %v", len(f.params), f.name, f.params))
	}
	total := 0
	for i, p := range params {
		if f.params != nil && len(p) != f.params[i] {
			return errs.Invalid(call, fmt.Sprintf("len(Params[%d])", i), len(p),
				fmt.Sprintf("%d, the size of parameter %d of the kernel %s in bytes", f.params[i], i, f.name))
		}
		if most := mostParamBytes - total; len(p) == 0 || len(p) > most {
			return errs.Invalid(call, fmt.Sprintf("len(Params[%d])", i), len(p),
				fmt.Sprintf("1 or more, and %d for all parameters together", mostParamBytes))
		}
		total += len(p)
	}
	return nil
}

// paramAlign is what the copy of a parameter is aligned to, in bytes: as much as the type of any parameter needs.
const paramAlign = 16

// layOut copies the parameters into one block, each at a multiple of paramAlign, and gives where in it each is.
func layOut(params [][]byte) (block []byte, at []int) {
	total := 0
	for _, p := range params {
		at = append(at, total)
		total += (len(p) + paramAlign - 1) / paramAlign * paramAlign
	}
	block = newBlock(total)
	for i, p := range params {
		copy(block[at[i]:], p)
	}
	return block, at
}

// newBlock makes memory for parameters.
func newBlock(bytes int) []byte {
	if bytes == 0 {
		return nil
	}
	block := make([]byte, bytes+paramAlign-1)
	return block[-uintptr(unsafe.Pointer(&block[0]))%paramAlign:][:bytes]
}

// checkBlock refuses blocks that the kernel cannot have.
func (f *Function) checkBlock(call string, threads, sharedBytes int) error {
	if threads < 1 || threads > f.maxThreads {
		return errs.Invalid(call, "threads", threads, fmt.Sprintf("1 to %d for the kernel %s", f.maxThreads, f.name))
	}
	if most := f.module.dev.limits.maxShared - f.shared; sharedBytes < 0 || sharedBytes > most {
		return errs.Invalid(call, "sharedBytes", sharedBytes, fmt.Sprintf("0 to %d for the kernel %s", most, f.name))
	}
	return nil
}

// allowShared asks for as much dynamic shared memory as more than a block has without asking needs. The context is current.
func (f *Function) allowShared(sharedBytes int) error {
	drv := f.module.dev.drv
	if sharedBytes+f.shared <= f.module.dev.limits.plainShared {
		return nil
	}
	// All that there is, so that launches with different needs do not take it from each other.
	most := int32(f.module.dev.limits.maxShared - f.shared)
	return drv.Check("cuFuncSetAttribute", drv.FuncSetAttribute(f.handle, cu.FuncMaxDynamicSharedBytes, most))
}

// ShareMultiprocessors makes the kernel prefer the most shared memory on each multiprocessor, and the least cache. It is for kernels that run
// long and wait. A multiprocessor divides its memory anew only when nothing runs on it. Without this, a kernel that needs shared memory
// could not start on a multiprocessor before the waiting one has ended there.
func (f *Function) ShareMultiprocessors() error {
	if err := f.module.begin("ShareMultiprocessors"); err != nil {
		return err
	}
	defer f.module.end()
	drv := f.module.dev.drv
	return drv.Check("cuFuncSetAttribute", drv.FuncSetAttribute(f.handle, cu.FuncSharedCarveout, 100))
}

// MaxBlocks is how many blocks of that many threads, each with sharedBytes of dynamic shared memory, the whole GPU runs at the
// same time, if nothing else runs on it. Blocks that do not fit are ErrInvalid, an
// *ArgumentError of package symmem; no other failure is one.
func (f *Function) MaxBlocks(threads, sharedBytes int) (int, error) {
	const call = "MaxBlocks"
	if err := f.checkBlock(call, threads, sharedBytes); err != nil {
		return 0, err
	}
	if err := f.module.begin(call); err != nil {
		return 0, err
	}
	defer f.module.end()
	if err := f.allowShared(sharedBytes); err != nil {
		return 0, fmt.Errorf("%s: %w", call, err)
	}
	var blocks int32
	r := f.module.dev.drv.OccupancyMaxActiveBlocks(&blocks, f.handle, int32(threads), uint64(sharedBytes))
	if err := f.module.dev.drv.Check("cuOccupancyMaxActiveBlocksPerMultiprocessor", r); r == cu.InvalidValue {
		return 0, fmt.Errorf("%w: %w", errs.Invalid(call, "threads", threads, fmt.Sprintf("what fits the GPU with %d bytes of shared memory", sharedBytes)), err)
	} else if err != nil {
		return 0, fmt.Errorf("%s: %w", call, err)
	}
	all := int(blocks) * f.module.dev.limits.processors
	if f.ClusterBlocks() == 1 || all == 0 {
		return all, nil
	}
	n, err := f.maxClusters(threads, sharedBytes)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", call, err)
	}
	return min(all/f.ClusterBlocks(), n) * f.ClusterBlocks(), nil
}

// ClusterBlocks is how many blocks a cluster has, for which the kernel was compiled; 1 if it was for none.
func (f *Function) ClusterBlocks() int {
	return int(f.cluster[0]) * int(f.cluster[1]) * int(f.cluster[2])
}

// maxClusters is how many clusters the whole GPU runs at the same time: fewer than the multiprocessors have room for, since the blocks of one must be near each other. The context is current.
func (f *Function) maxClusters(threads, sharedBytes int) (int, error) {
	drv := f.module.dev.drv
	if drv.OccupancyMaxActiveClusters == nil {
		return math.MaxInt32, nil
	}
	attr := cu.LaunchAttribute{ID: cu.LaunchClusterDimension}
	copy(attr.Value[:], f.cluster[:])
	config := cu.LaunchConfig{Grid: f.cluster, Block: [3]uint32{uint32(threads), 1, 1}, SharedBytes: uint32(sharedBytes), Attrs: &attr, NumAttrs: 1}
	var n int32
	r := drv.OccupancyMaxActiveClusters(&n, f.handle, &config)
	runtime.KeepAlive(&attr)
	if r == cu.InvalidClusterSize { // none fits
		return 0, nil
	}
	return int(n), drv.Check("cuOccupancyMaxActiveClusters", r)
}

// Prepare fixes everything about a launch. Drivers before CUDA 12.4 do not tell which parameters the kernel has: with those, Params that are
// not the kernel's are not found, and the launch is undefined.
func (f *Function) Prepare(l device.Launch) (device.PreparedLaunch, error) {
	const call = "Prepare"
	d := f.module.dev
	threads := 1
	for i := range l.Grid {
		l.Grid[i], l.Block[i] = max(l.Grid[i], 1), max(l.Block[i], 1)
		if most := d.limits.maxGrid[i]; int64(l.Grid[i]) > int64(most) {
			return nil, errs.Invalid(call, fmt.Sprintf("Grid[%d]", i), l.Grid[i], fmt.Sprintf("0 to %d", most))
		}
		if n := f.cluster[i]; l.Grid[i]%n != 0 {
			return nil, errs.Invalid(call, fmt.Sprintf("Grid[%d]", i), l.Grid[i], fmt.Sprintf("multiples of %d, which is a cluster of the kernel %s", n, f.name))
		}
		if most := d.limits.maxBlock[i]; int64(l.Block[i]) > int64(most) {
			return nil, errs.Invalid(call, fmt.Sprintf("Block[%d]", i), l.Block[i], fmt.Sprintf("0 to %d", most))
		}
		threads *= int(l.Block[i]) // at most 1024*1024*64
	}
	if err := f.checkBlock(call, threads, int(l.SharedBytes)); err != nil {
		return nil, err
	}
	if err := f.checkParams(call, l.Params); err != nil {
		return nil, err
	}
	fault, err := d.faultWord(call, "Fault", l.Fault)
	if err != nil {
		return nil, err
	}
	block, at := layOut(l.Params)
	var cellOf *FaultWord
	cellAt := 0
	if c := l.FaultCell; c != nil {
		if cellOf, err = d.faultWord(call, "FaultCell.Word", c.Word); err != nil {
			return nil, err
		}
		if cellOf == nil {
			return nil, errs.Invalid(call, "FaultCell.Word", nil, "a fault word of the device")
		}
		if c.Param < 0 || c.Param >= len(l.Params) {
			return nil, errs.Invalid(call, "FaultCell.Param", c.Param, fmt.Sprintf("that of one of the %d parameters, from 0", len(l.Params)))
		}
		if n := len(l.Params[c.Param]); c.Offset < 0 || c.Offset%8 != 0 || c.Offset > n-8 {
			return nil, errs.Invalid(call, "FaultCell.Offset", c.Offset,
				fmt.Sprintf("a multiple of 8 with 8 bytes from there on in the %d of parameter %d", n, c.Param))
		}
		cellAt = at[c.Param] + c.Offset
	}
	if err := f.module.begin(call); err != nil {
		return nil, err
	}
	defer f.module.end()
	if err := f.allowShared(int(l.SharedBytes)); err != nil {
		return nil, fmt.Errorf("%s: %w", call, err)
	}
	p := &PreparedLaunch{
		function: f,
		call:     "Launch of " + f.name,
		block:    block,
		at:       at,
		config:   cu.LaunchConfig{Grid: l.Grid, Block: l.Block, SharedBytes: l.SharedBytes},
		overlap:  l.Overlap && d.limits.capability >= 90,
		fault:    fault,
		cellOf:   cellOf,
		cellAt:   cellAt,
	}
	for _, w := range []*FaultWord{fault, cellOf} {
		if w != nil {
			w.named.Store(true)
		}
	}
	p.free = append(p.free, p.newArguments())
	return p, nil
}

// faultWord gives w as a fault word of this device; nil is none.
func (d *Device) faultWord(call, arg string, w device.FaultWord) (*FaultWord, error) {
	if w == nil {
		return nil, nil
	}
	f, ok := w.(*FaultWord)
	if !ok || f == nil || f.dev != d {
		return nil, errs.Invalid(call, arg, fmt.Sprintf("%T", w), "a fault word of the device that the kernel was loaded on")
	}
	return f, nil
}

// PreparedLaunch is a launch that can be enqueued many times. It implements [device.PreparedLaunch].
type PreparedLaunch struct {
	function *Function
	call     string     // what errors call it: "Launch of" and the kernel
	fault    *FaultWord // that the kernel writes, or nil
	cellOf   *FaultWord // of the cells that it writes, or nil
	cellAt   int        // where in the block a cell's address goes
	block    []byte     // the parameters, as layOut has them
	at       []int      // where in the block each of them is
	config   cu.LaunchConfig
	overlap  bool

	closed atomic.Bool
	life   sync.RWMutex // held for reading while it is launched, which Close waits for; taken before the lock of a stream

	mu   sync.Mutex // never held while the driver is called, which may wait for room in a stream's queue
	free []*arguments
}

// arguments are what the driver reads of one launch: the configuration, the array of pointers to the parameters, and the block that they are in. They are in memory
// that does not move: the collector leaves heap objects where they are, and the call keeps these alive. The driver has copied the parameters when its call returns, so
// that the next launch may have them. There are as many as launches were made at the same time.
type arguments struct {
	block  []byte
	params []unsafe.Pointer // to each parameter, in block
	config cu.LaunchConfig
	attr   cu.LaunchAttribute
}

func (p *PreparedLaunch) newArguments() *arguments {
	a := &arguments{block: newBlock(len(p.block)), config: p.config}
	copy(a.block, p.block)
	for _, at := range p.at {
		a.params = append(a.params, unsafe.Pointer(&a.block[at]))
	}
	if p.overlap {
		a.attr = cu.LaunchAttribute{ID: cu.LaunchProgrammaticStreamSerialization}
		a.attr.Value[0] = 1
		a.config.Attrs, a.config.NumAttrs = &a.attr, 1
	}
	return a
}

// take takes arguments that no launch has, and give gives them back.
func (p *PreparedLaunch) take() *arguments {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := len(p.free)
	if n == 0 {
		return p.newArguments()
	}
	a := p.free[n-1]
	p.free = p.free[:n-1]
	return a
}

func (p *PreparedLaunch) give(a *arguments) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.free = append(p.free, a)
}

// Launch enqueues the kernel on s, or records it, and returns at once; when the driver's queue of s is full, it waits for room, which holds up none on
// other streams. It allocates nothing, unless another launch of it is being made at the same time.
func (p *PreparedLaunch) Launch(s device.Stream) error {
	call := p.call
	st, ok := s.(*Stream)
	d := p.function.module.dev
	if !ok || st == nil {
		return errs.Invalid(call, "s", fmt.Sprintf("%T", s), "a stream of a CUDA device")
	}
	if st.dev != d {
		return errs.Invalid(call, "s", st.dev.uuid, "a stream of the device that the kernel was loaded on")
	}
	if p.closed.Load() { // one that waits in Close must not keep this waiting
		return closed(call, "launch")
	}
	p.life.RLock()
	defer p.life.RUnlock()
	if p.closed.Load() {
		return closed(call, "launch")
	}
	m := p.function.module
	if err := m.hold(call); err != nil {
		return err
	}
	defer m.mu.RUnlock()
	a := p.take()
	defer p.give(a)
	noted := false
	var refused error
	err := st.enqueue(call, "cuLaunchKernelEx", func() cu.Result {
		if !noted { // this may be called twice
			if refused = p.note(st, a); refused != nil {
				return cu.Success
			}
			noted = true
		}
		a.config.Stream = st.handle
		return d.drv.LaunchKernelEx(&a.config, p.function.handle, unsafe.SliceData(a.params), nil)
	})
	if refused != nil {
		return fmt.Errorf("%s: %w", call, refused)
	}
	return err
}

// note sees to it that a failure of the launch that is to follow is told by the streams that it concerns. The stream is locked.
func (p *PreparedLaunch) note(s *Stream, a *arguments) error {
	c := s.recording()
	switch {
	case p.fault == nil:
	case c != nil:
		c.addWord(p.fault)
	default:
		s.oweWord(p.fault)
	}
	if p.cellOf == nil {
		return nil
	}
	var cell *faultCell
	var err error
	if c == nil {
		cell, err = s.cell(p.cellOf)
	} else if cell, err = s.dev.takeCell(p.cellOf); err == nil {
		c.addCell(cell)
	}
	if err != nil {
		return err
	}
	binary.NativeEndian.PutUint64(a.block[p.cellAt:], uint64(cell.at))
	return nil
}

// Close releases the launch. Launches already enqueued still run. Twice is ErrClosed.
func (p *PreparedLaunch) Close() error {
	if p.closed.Swap(true) {
		return closed("Close", "launch")
	}
	p.life.Lock()
	defer p.life.Unlock()
	p.block, p.free = nil, nil
	return nil
}
