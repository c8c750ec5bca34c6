package kernels

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync/atomic"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/kernels/ptx"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// cudaForm is an all-reduce on a CUDA device: which kernel, and how it is launched.
type cudaForm struct {
	plan      *Plan
	layout    ptx.Layout // without blocks and laps, which depend on what all ranks offer
	kernel    ptx.Kernel
	known     bool // there is such a kernel
	maxBlocks int
	flags     uint32

	threads int
	tenant  *tenant
}

func newCUDAForm(p *Plan, op Op, inPlace bool, maxBlocks int) cudaForm {
	size := p.in.WorldSize()
	f := cudaForm{
		plan: p, maxBlocks: maxBlocks,
		layout: ptx.Layout{Form: ptxForms[p.algorithm], World: size, Bytes: max(p.in.Bytes(), 1)},
	}
	switch f.layout.Form {
	case ptx.OneShotPull:
		switch {
		case size == 1:
			f.flags |= ptx.NoBarrier
		case inPlace:
			f.flags |= ptx.Staged
			f.layout.Staged = true
		}
	case ptx.OneShotMultimem:
		if inPlace {
			f.flags |= ptx.Staged
			f.layout.Staged = true
		}
	}
	capability := 0
	if c, ok := p.device.(gpu); ok {
		capability = c.ComputeCapability()
	}
	f.kernel, f.known = ptx.AllReduce(f.layout.Form, p.in.DType().String(), int(op), size, capability >= 90)
	return f
}

// cudaOffer is what a rank's device can do for a plan.
type cudaOffer struct {
	Processors int                  `json:"processors"` // multiprocessors
	Resident   [len(blockSizes)]int `json:"resident"`   // blocks of the kernel that the device runs at the same time, by their size
}

func (f cudaForm) offer() ([]byte, error) {
	if f.plan.in.Bytes() == 0 {
		return json.Marshal(cudaOffer{Processors: 1})
	}
	c, ok := f.plan.device.(gpu)
	if !ok || !f.known {
		return nil, fmt.Errorf("no kernels for %s: %w", f.plan.device.Name(), ErrUnsupported)
	}
	fn, err := f.plan.in.Memory().Kernel(f.kernel)
	if err != nil {
		return nil, err
	}
	o := cudaOffer{Processors: c.Multiprocessors()}
	for i, threads := range blockSizes {
		if o.Resident[i], err = fn.MaxBlocks(threads, 0); err != nil {
			return nil, err
		}
	}
	return json.Marshal(o)
}

// agree settles how the kernel is launched.
func (f cudaForm) agree(p *Plan, offers []memory.WorkspaceOffer) (form, error) {
	if f.layout.World == 1 || p.in.Bytes() == 0 { // it waits for nobody
		var own cudaOffer
		if err := json.Unmarshal(offers[0].Offer, &own); err != nil {
			return nil, err
		}
		f.setLaunch(geometry(p.algorithm, p.in.Bytes(), f.layout.World, own.Processors).atMost(f.maxBlocks))
		return f, nil
	}
	g, early, err := agreeLaunch(p.algorithm, p.in.Bytes(), f.maxBlocks, offers)
	if err != nil {
		return nil, err
	}
	f.setLaunch(g)
	if early {
		f.flags |= ptx.Early
	}
	f.tenant, err = f.newTenant(offers, early)
	return f, err
}

func (f *cudaForm) setLaunch(g launchGeometry) {
	f.threads, f.layout.LapBytes, f.layout.Blocks = g.threads, g.lapBytes, g.blocks
}

// agreeLaunch says how a kernel is launched: alike on all ranks, since the blocks of one wait for those of the others, and so that it
// leaves room on every device. early says that the launch after it may take its place before this one leaves; that is only
// where it costs no blocks.
func agreeLaunch(a Algorithm, bytes int64, maxBlocks int, offers []memory.WorkspaceOffer) (g launchGeometry, early bool, err error) {
	devices := make([]cudaOffer, len(offers))
	processors := math.MaxInt
	for r, o := range offers {
		if err := json.Unmarshal(o.Offer, &devices[r]); err != nil {
			return g, false, fmt.Errorf("reading what the device of rank %d can do: %w", r, err)
		}
		processors = min(processors, devices[r].Processors)
	}
	g = geometry(a, bytes, len(offers), processors).atMost(maxBlocks)
	size := slices.Index(blockSizes[:], g.threads)
	most := func(early bool) int {
		least := math.MaxInt
		for r, d := range devices {
			least = min(least, mostBlocks(d.Resident[size], d.Processors, sharing(offers, r), early))
		}
		return least
	}
	early = most(true) >= g.blocks
	g = g.atMost(most(early))
	for r, d := range devices {
		if n := sharing(offers, r); g.blocks*n > d.Resident[size] {
			// The blocks wait for those of other ranks: all must run at once.
			return g, false, errs.Invalid("NewAllReduce", "blocks", g.blocks*n,
				fmt.Sprintf("at most %d of %d threads on the device of rank %d, which %d ranks share", d.Resident[size], g.threads, r, n))
		}
	}
	return g, early, nil
}

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

// newTenant says what the plan takes of this rank's device. Ranks of other processes on it cannot be counted, and so are taken to
// do as those of this one.
func (f cudaForm) newTenant(offers []memory.WorkspaceOffer, early bool) (*tenant, error) {
	rank, members := f.plan.in.Rank(), f.plan.in.Memory().Group().Members()
	var own cudaOffer
	if err := json.Unmarshal(offers[rank].Offer, &own); err != nil {
		return nil, err
	}
	here := 0
	for r, o := range offers {
		if o.Device == offers[rank].Device && members[r].Process == members[rank].Process {
			here++
		}
	}
	resident := own.Resident[slices.Index(blockSizes[:], f.threads)]
	takes := float64(f.layout.Blocks) / float64(resident) * float64(sharing(offers, rank)) / float64(here)
	if early {
		takes *= 2
	}
	m := f.plan.in.Memory()
	over := func() bool { return errors.Is(m.Err(), ErrClosed) }
	return &tenant{device: offers[rank].Device, takes: takes, most: capacity(own.Processors), over: over}, nil
}

// gpu is what CUDA devices tell about themselves.
type gpu interface {
	ComputeCapability() int // ten times the major number plus the minor one
	Multiprocessors() int
}

func (f cudaForm) purpose() string { return ", kernel " + f.kernel.Name }

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
	p.tenant = f.tenant
	w.launch, err = fn.Prepare(device.Launch{
		Grid: [3]uint32{uint32(f.layout.Blocks)}, Block: [3]uint32{uint32(f.threads)}, Params: [][]byte{params.Bytes()}, Overlap: f.kernel.Overlap,
		Fault: w.fault,
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
	for kind, slot := range []*[ptx.Inline]uint64{&params.In, &params.Out, &params.Workspace} {
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
