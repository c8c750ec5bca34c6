package kernels

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/kernels/ptx"
	"github.com/symmem/symmem/tensor"
)

// cudaForm is an all-reduce on a CUDA device: which kernel, and how it is launched.
type cudaForm struct {
	layout  ptx.Layout
	kernel  ptx.Kernel
	known   bool // there is such a kernel
	threads int
	flags   uint32
}

func newCUDAForm(p *Plan, op Op, inPlace bool) cudaForm {
	size := p.in.WorldSize()
	processors, capability := 1, 0
	if c, ok := p.device.(gpu); ok {
		processors, capability = c.Multiprocessors(), c.ComputeCapability()
	}
	g := geometry(p.algorithm, p.in.Bytes(), size, processors)
	f := cudaForm{
		layout:  ptx.Layout{Form: ptxForms[p.algorithm], World: size, Bytes: max(p.in.Bytes(), 1), Blocks: g.blocks, LapBytes: g.lapBytes},
		threads: g.threads,
	}
	if f.layout.Form == ptx.OneShotPull {
		switch {
		case size == 1:
			f.flags |= ptx.NoBarrier
		case inPlace:
			f.flags |= ptx.Staged
			f.layout.Staged = true
		}
	}
	f.kernel, f.known = ptx.AllReduce(f.layout.Form, p.in.DType().String(), int(op), size, capability >= 90)
	return f
}

// gpu is what CUDA devices tell about themselves.
type gpu interface {
	ComputeCapability() int // ten times the major number plus the minor one
	Multiprocessors() int
}

func (f cudaForm) purpose() string {
	return fmt.Sprintf(", kernel %s, %d blocks of %d threads, laps of %d", f.kernel.Name, f.layout.Blocks, f.threads, f.layout.LapBytes)
}

func (f cudaForm) channelBytes() int64 { return f.layout.ChannelBytes() }

// cudaWork is a plan's work on a CUDA device.
type cudaWork struct {
	plan   *Plan
	layout ptx.Layout
	first  uint32                // the first epoch
	launch device.PreparedLaunch // nil for an empty tensor
	fault  device.FaultWord
	dead   device.Ptr
	table  device.Ptr

	enqueued atomic.Uint32 // runs that were not recorded
	captured atomic.Bool   // a run was recorded, so that nobody knows how many there were
}

func (f cudaForm) prepare(ctx context.Context, p *Plan, op Op, firstEpoch uint32) (_ work, err error) {
	w := &cudaWork{plan: p, layout: f.layout, first: firstEpoch}
	defer func() {
		if err != nil {
			err = errors.Join(err, w.close())
		}
	}()
	if p.in.Bytes() == 0 {
		return w, nil
	}
	if p.algorithm.NeedsMulticast() {
		// Before anything that may fail on one rank alone, because the ranks do it together. In place, the second is nothing.
		for _, t := range []tensor.SymmetricTensor{p.in, p.out} {
			if err := t.EnableMulticast(ctx); err != nil {
				return nil, err
			}
		}
	}
	d, m := p.device, p.in.Memory()
	faults, ok := d.(device.FaultReporter)
	if !ok || !f.known {
		return nil, fmt.Errorf("no kernels for %s: %w", d.Name(), ErrUnsupported)
	}
	fn, err := m.Kernel(f.kernel)
	if err != nil {
		return nil, err
	}
	resident, err := fn.MaxBlocks(f.threads, 0)
	if err != nil {
		return nil, err
	}
	if resident < f.layout.Blocks {
		// The blocks wait for those of other ranks: all must run at once.
		return nil, errs.Invalid("NewAllReduce", "blocks", f.layout.Blocks, fmt.Sprintf("at most %d of %d threads on %s", resident, f.threads, d.Name()))
	}
	if w.dead, err = d.Alloc(4); err != nil {
		return nil, err
	}
	if w.fault, err = faults.NewFaultWord(w.decode); err != nil {
		return nil, err
	}
	stop, err := m.StopWord()
	if err != nil {
		return nil, err
	}
	params := ptx.Params{
		Count: uint64(p.in.NumElements()), Fault: uint64(w.fault.Ptr()), Dead: uint64(w.dead), Stop: uint64(stop),
		Timeout: uint64(m.KernelTimeout().Nanoseconds()), Shard: uint64(f.layout.Shard()), Span: uint64(f.layout.Span()),
		Rank: uint32(p.in.Rank()), World: uint32(p.in.WorldSize()), Op: uint32(op), Flags: f.flags,
	}
	if p.algorithm.NeedsMulticast() {
		in, err := p.in.Multicast()
		if err != nil {
			return nil, err
		}
		out, err := p.out.Multicast()
		if err != nil {
			return nil, err
		}
		params.MulticastIn, params.MulticastOut = uint64(in), uint64(out)
	}
	if err := w.address(&params); err != nil {
		return nil, err
	}
	if firstEpoch != 0 {
		if err := w.fill(firstEpoch); err != nil {
			return nil, err
		}
	}
	w.launch, err = fn.Prepare(device.Launch{
		Grid: [3]uint32{uint32(f.layout.Blocks)}, Block: [3]uint32{uint32(f.threads)}, Params: params.Bytes(), Overlap: f.kernel.Overlap,
	})
	if err != nil {
		return nil, err
	}
	return w, nil
}

// address fills in every rank's input, output and channel.
func (w *cudaWork) address(params *ptx.Params) error {
	p := w.plan
	var words []byte
	for kind, slot := range []*[ptx.Inline]uint64{&params.In, &params.Out, &params.Channel} {
		for r := range p.in.WorldSize() {
			var at device.Ptr
			var err error
			switch kind {
			case 0:
				at, err = remotePtr(p.in, r)
			case 1:
				at, err = remotePtr(p.out, r)
			default:
				at, err = p.channel.Peer(r)
			}
			if err != nil {
				return err
			}
			if r < len(slot) {
				slot[r] = uint64(at)
			}
			words = binary.LittleEndian.AppendUint64(words, uint64(at))
		}
	}
	if p.in.WorldSize() <= ptx.Inline {
		return nil
	}
	var err error
	if w.table, err = p.device.Alloc(int64(len(words))); err != nil {
		return err
	}
	params.Table = uint64(w.table)
	return p.device.CopyFromHost(w.table, words)
}

func remotePtr(t tensor.SymmetricTensor, rank int) (device.Ptr, error) {
	v, err := t.Remote(rank)
	if err != nil {
		return 0, err
	}
	return v.Ptr(), nil
}

// fill makes every word of the channel's control part the first epoch.
func (w *cudaWork) fill(epoch uint32) error {
	own, err := w.plan.channel.Peer(w.plan.in.Rank())
	if err != nil {
		return err
	}
	control := make([]byte, 0, w.layout.ControlBytes())
	for len(control) < cap(control) {
		control = binary.LittleEndian.AppendUint32(control, epoch)
	}
	return w.plan.device.CopyFromHost(own, control)
}

// decode makes an error of what a kernel wrote when it gave up.
func (w *cudaWork) decode(word uint64) error {
	return w.plan.fail(w.plan.in.Memory().WaitFailed(w.plan.name, ptx.DecodeFault(word)))
}

func (w *cudaWork) enqueue(s device.Stream, recorded bool) error {
	if w.launch == nil {
		return nil
	}
	if word := w.fault.Load(); word != 0 {
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

// settled compares the count of runs that each block keeps in the channel with how many were enqueued. Once runs were recorded
// nobody knows how many there were, and the stream must be idle.
func (w *cudaWork) settled() (bool, error) {
	if w.launch == nil {
		return true, nil
	}
	if w.captured.Load() || w.layout.World == 1 { // one rank alone counts nothing
		s := w.plan.stream.Load()
		if s == nil {
			return true, nil
		}
		done, err := (*s).Query()
		if errors.Is(err, ErrClosed) {
			return true, nil
		}
		return done, err
	}
	own, err := w.plan.channel.Peer(w.plan.in.Rank())
	if err != nil {
		return false, err
	}
	control := make([]byte, w.layout.ControlBytes())
	if err := w.plan.device.CopyToHost(control, own); err != nil {
		return false, err
	}
	record := len(control) / w.layout.Blocks
	for b := range w.layout.Blocks {
		if binary.LittleEndian.Uint32(control[b*record:]) != w.first+w.enqueued.Load() {
			return false, nil
		}
	}
	return true, nil
}

func (w *cudaWork) close() error {
	var err error
	if w.launch != nil {
		err = w.launch.Close()
	}
	if w.fault != nil {
		err = errors.Join(err, w.fault.Close())
	}
	for _, p := range []device.Ptr{w.dead, w.table} {
		if !p.IsNil() {
			err = errors.Join(err, w.plan.device.Free(p))
		}
	}
	if errors.Is(err, ErrClosed) {
		return nil // the device has gone, and all of this with it
	}
	return err
}
