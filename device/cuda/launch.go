package cuda

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"sync"
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
	maxThreads int // a block
	shared     int // static shared memory, bytes a block
	params     int // bytes of its parameter; -1 if the driver does not tell
}

// askParams asks how large the kernel's parameter is, and refuses kernels with several.
func (f *Function) askParams() error {
	drv := f.module.dev.drv
	f.params = -1
	if drv.FuncGetParamInfo == nil {
		return nil
	}
	var sizes [2]uint64
	for i := range sizes {
		var offset uint64
		switch r := drv.FuncGetParamInfo(f.handle, uint64(i), &offset, &sizes[i]); r {
		case cu.Success:
		case cu.InvalidValue: // there are no more
			sizes[i] = 0
		default:
			return drv.Check("cuFuncGetParamInfo", r)
		}
	}
	if sizes[1] != 0 {
		return errs.Invalid("Function", "name", fmt.Sprintf("%q", f.name),
			"a kernel with one parameter, a struct by value; this one has more")
	}
	f.params = int(sizes[0])
	return nil
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
// same time, if nothing else runs on it.
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
	if r != cu.Success {
		return 0, f.module.dev.check(call, "cuOccupancyMaxActiveBlocksPerMultiprocessor", r)
	}
	return int(blocks) * f.module.dev.limits.processors, nil
}

// Prepare fixes everything about a launch.
func (f *Function) Prepare(l device.Launch) (device.PreparedLaunch, error) {
	const call = "Prepare"
	d := f.module.dev
	threads := 1
	for i := range l.Grid {
		l.Grid[i], l.Block[i] = max(l.Grid[i], 1), max(l.Block[i], 1)
		if most := d.limits.maxGrid[i]; int64(l.Grid[i]) > int64(most) {
			return nil, errs.Invalid(call, fmt.Sprintf("Grid[%d]", i), l.Grid[i], fmt.Sprintf("0 to %d", most))
		}
		if most := d.limits.maxBlock[i]; int64(l.Block[i]) > int64(most) {
			return nil, errs.Invalid(call, fmt.Sprintf("Block[%d]", i), l.Block[i], fmt.Sprintf("0 to %d", most))
		}
		threads *= int(l.Block[i]) // at most 1024*1024*64
	}
	if err := f.checkBlock(call, threads, int(l.SharedBytes)); err != nil {
		return nil, err
	}
	if f.params >= 0 && len(l.Params) != f.params {
		return nil, errs.Invalid(call, "len(Params)", len(l.Params),
			fmt.Sprintf("%d, the size of the parameter of the kernel %s", f.params, f.name))
	}
	fault, err := d.faultWord(call, "Fault", l.Fault)
	if err != nil {
		return nil, err
	}
	var cellOf *FaultWord
	cellAt := 0
	if c := l.FaultCell; c != nil {
		if cellOf, err = d.faultWord(call, "FaultCell.Word", c.Word); err != nil {
			return nil, err
		}
		if cellAt = c.Offset; cellOf == nil || cellAt < 0 || cellAt%8 != 0 || cellAt > len(l.Params)-8 {
			return nil, errs.Invalid(call, "FaultCell", fmt.Sprintf("%+v", *c),
				fmt.Sprintf("a word, and a multiple of 8 with 8 bytes behind it in the %d of the parameter", len(l.Params)))
		}
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
		block:    bytes.Clone(l.Params),
		config:   cu.LaunchConfig{Grid: l.Grid, Block: l.Block, SharedBytes: l.SharedBytes},
		fault:    fault,
		cellOf:   cellOf,
		cellAt:   cellAt,
	}
	for _, w := range []*FaultWord{fault, cellOf} {
		if w != nil {
			w.named.Store(true)
		}
	}
	if len(p.block) > 0 {
		p.params[0] = unsafe.Pointer(&p.block[0])
	}
	if l.Overlap && d.limits.capability >= 90 {
		p.attr = cu.LaunchAttribute{ID: cu.LaunchProgrammaticStreamSerialization}
		p.attr.Value[0] = 1
		p.config.Attrs, p.config.NumAttrs = &p.attr, 1
	}
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
//
// What the driver reads (the configuration, the array of parameters and the parameter) is part of this object or held by it,
// in memory that does not move: the collector leaves heap objects where they are, and the call keeps this one alive.
type PreparedLaunch struct {
	function *Function
	call     string     // what errors call it: "Launch of" and the kernel
	fault    *FaultWord // that the kernel writes, or nil
	cellOf   *FaultWord // of the cells that it writes, or nil
	cellAt   int        // where in the block a cell's address goes

	mu     sync.Mutex // taken before that of a stream
	closed bool
	block  []byte
	config cu.LaunchConfig
	attr   cu.LaunchAttribute
	params [1]unsafe.Pointer
}

// Launch enqueues the kernel on s, or records it, and returns at once; when the driver's queue is full, it waits for room. It
// allocates nothing.
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
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return closed(call, "launch")
	}
	if p.function.module.closed.Load() {
		return closed(call, "module")
	}
	noted := false
	var refused error
	err := st.enqueue(call, "cuLaunchKernelEx", func() cu.Result {
		if !noted { // this may be called twice
			if refused = p.note(st); refused != nil {
				return cu.Success
			}
			noted = true
		}
		p.config.Stream = st.handle
		return d.drv.LaunchKernelEx(&p.config, p.function.handle, &p.params[0], nil)
	})
	if refused != nil {
		return fmt.Errorf("%s: %w", call, refused)
	}
	return err
}

// note sees to it that a failure of the launch that is to follow is told by the streams that it concerns. Both are locked.
func (p *PreparedLaunch) note(s *Stream) error {
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
	binary.NativeEndian.PutUint64(p.block[p.cellAt:], uint64(cell.at))
	return nil
}

// Close releases the launch. Launches already enqueued still run. Twice is ErrClosed.
func (p *PreparedLaunch) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return closed("Close", "launch")
	}
	p.closed = true
	p.block, p.params[0] = nil, nil
	return nil
}
