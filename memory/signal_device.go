package memory

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/kernels/ptx"
)

// deviceSignals is signal, wait and barrier for devices that run compiled kernels. The pad is laid out as kernels/ptx says;
// what has been sent and consumed is in device memory, and advanced by the kernels.
type deviceSignals struct {
	memory   *Memory
	user     *signalUser // of a plan; nil for the memory's own
	channels int
	params   ptx.Params // what all launches have alike
	fault    device.FaultWord
	dead     device.Ptr // of a plan: its dead word, and a fault cell that nobody looks at
	table    device.Ptr
	kernels  [launchKinds]device.Function // loaded beforehand: loading waits for what the device has under way
	overlap  bool                         // they may overlap with the work before them
	far      []error                      // by rank: why its pad has no address here; nil if all have

	// One prepared launch for each kind, channel and peer, made when it is first needed.
	mu       sync.Mutex
	launches []atomic.Pointer[device.PreparedLaunch]

	puts putLaunches
}

// The kinds of launch.
const (
	launchSignal = iota
	launchWait
	launchBarrier
	launchSignalAll
	launchWaitAll
	launchWaitBeside // launchWaitAll whose failure the plan's next wait tells
	launchKinds
)

// A plan's dead word, and where behind it the cell is for launches on streams whose errors nobody looks for.
const (
	deadBytes  = 32
	unseenCell = 16
)

var signalKernels = [launchKinds]ptx.Kernel{
	launchSignal: ptx.Signal, launchWait: ptx.Wait, launchBarrier: ptx.Barrier, launchSignalAll: ptx.SignalAll, launchWaitAll: ptx.WaitAll,
	launchWaitBeside: ptx.WaitAll,
}

// newDeviceSignals makes signals on the pad at offset of a workspace. Local.
func newDeviceSignals(m *Memory, pad *Workspace, offset int64, channels int, user *signalUser) (_ *deviceSignals, err error) {
	faults, ok := m.device.(device.FaultReporter)
	if !ok {
		return nil, fmt.Errorf("compiled kernels on %s: %w", m.device.Name(), errs.ErrUnsupported)
	}
	size := m.group.Size()
	d := &deviceSignals{
		memory: m, user: user, channels: channels,
		launches: make([]atomic.Pointer[device.PreparedLaunch], launchKinds*channels*size),
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, d.close())
		}
	}()
	hopper := ptx.Hopper(m.device)
	for kind, k := range signalKernels {
		if d.kernels[kind], err = m.kernel(ptx.SignalOn(k, hopper)); err != nil {
			return d, err
		}
	}
	d.overlap = ptx.SignalOn(ptx.Signal, hopper).Overlap
	if user == nil {
		if d.puts.kernel, err = m.kernel(ptx.SignalOn(ptx.PutSignal, hopper)); err != nil {
			return d, err
		}
		if d.puts.waiting, err = m.kernel(ptx.SignalOn(ptx.PutSignalWait, hopper)); err != nil {
			return d, err
		}
	}
	if d.fault, err = faults.NewFaultWord(d.decode); err != nil {
		return d, err
	}
	if user != nil {
		if d.dead, err = m.device.Alloc(deadBytes); err != nil {
			return d, err
		}
	}
	stop, err := m.StopWord()
	if err != nil {
		return d, err
	}
	d.params = ptx.Params{
		Dead: uint64(d.dead), Stop: uint64(stop), Timeout: uint64(m.opts.KernelTimeout.Nanoseconds()),
		Rank: uint32(m.group.Rank()), World: uint32(size), Channels: uint32(channels),
	}
	if peerAtomics(m.device, m.devices) {
		d.params.Flags |= ptx.Atomics
	}
	// The table of a large world has inputs and outputs in front, which signals do not use.
	table := make([]byte, 16*size)
	for r := range size {
		p, err := pad.Peer(r)
		switch {
		case err == nil:
			p = p.Add(offset)
		case user == nil && errors.Is(err, errs.ErrNotReachable): // the memory's own signals work between those that reach each other
			if d.far == nil {
				d.far = make([]error, size)
			}
			d.far[r] = fmt.Errorf("signals to and from rank %d: %w", r, err)
			err = nil
		default:
			return d, err
		}
		if r < ptx.Inline {
			d.params.Workspace[r] = uint64(p)
		}
		table = binary.LittleEndian.AppendUint64(table, uint64(p))
	}
	if size > ptx.Inline {
		if d.table, err = m.device.Alloc(int64(len(table))); err != nil {
			return d, err
		}
		d.params.Table = uint64(d.table)
		if err = m.device.CopyFromHost(d.table, table); err != nil {
			return d, err
		}
	}
	if user != nil {
		return d, d.begin(pad, offset)
	}
	return d, nil
}

// peerAtomics reports whether kernels of d can do atomic operations on the memory of every device, as far as d can tell. Where they
// cannot, or nobody knows, signals are counts that are stored.
func peerAtomics(d device.Device, uuids []string) bool {
	links, ok := d.(device.PeerAtomics)
	return ok && len(uuids) > 0 && !slices.ContainsFunc(uuids, func(uuid string) bool { return !links.PeerAtomics(uuid) })
}

// begin makes the own part of a plan's pad what its user begins with.
func (d *deviceSignals) begin(pad *Workspace, offset int64) error {
	own, err := pad.Peer(d.memory.group.Rank())
	if err != nil {
		return err
	}
	image := ptx.PadImage(d.memory.group.Size(), d.channels, d.user.First, d.user.begin)
	return d.memory.device.CopyFromHost(own.Add(offset), image)
}

// launch enqueues a kernel, prepared at its first use. It may wait for room in the driver's queue, and so for peers, and holds no lock then.
func (d *deviceSignals) launch(s device.Stream, kind, peer, channel int) error {
	size := d.memory.group.Size()
	slot := &d.launches[(kind*d.channels+channel)*size+peer]
	prepared := slot.Load()
	if prepared == nil {
		var err error
		if prepared, err = d.prepare(slot, kind, peer, channel); err != nil {
			return err
		}
	}
	return (*prepared).Launch(s)
}

// prepare prepares a launch, and keeps it in its slot.
func (d *deviceSignals) prepare(slot *atomic.Pointer[device.PreparedLaunch], kind, peer, channel int) (*device.PreparedLaunch, error) {
	size := d.memory.group.Size()
	d.mu.Lock()
	defer d.mu.Unlock()
	if prepared := slot.Load(); prepared != nil {
		return prepared, nil
	}
	params := d.params
	params.Index, params.Peer = uint32(channel), uint32(peer)
	threads := uint32(32)
	if kind >= launchBarrier { // a thread for each rank
		threads = uint32(min(max(size, 32), ptx.MaxThreads)+31) / 32 * 32
	}
	l := device.Launch{Grid: [3]uint32{1}, Block: [3]uint32{threads}, Overlap: d.overlap}
	if d.user != nil && (kind == launchSignal || kind == launchSignalAll || kind == launchWaitBeside) {
		// The plan may do this on streams of its own. Its next wait finds the dead word, and tells what that says.
		params.Fault = uint64(d.dead.Add(unseenCell))
	} else {
		l.FaultCell = &device.FaultCellParam{Word: d.fault, Offset: ptx.FaultOffset}
	}
	l.Params = [][]byte{params.Bytes()}
	prepared, err := d.kernels[kind].Prepare(l)
	if err != nil {
		return nil, err
	}
	slot.Store(&prepared)
	return &prepared, nil
}

// reaches returns an error if a pad has no address here: that of peer, or any at all if peer is -1.
func (d *deviceSignals) reaches(peer int) error {
	if d.far == nil {
		return nil
	}
	if peer >= 0 {
		return d.far[peer]
	}
	return cmp.Or(d.far...)
}

func (d *deviceSignals) signal(s device.Stream, peer, channel int) error {
	if err := d.reaches(peer); err != nil {
		return err
	}
	return d.launch(s, launchSignal, peer, channel)
}

func (d *deviceSignals) wait(s device.Stream, peer, channel int) error {
	if err := d.reaches(peer); err != nil {
		return err
	}
	return d.launch(s, launchWait, peer, channel)
}

func (d *deviceSignals) barrier(s device.Stream, channel int) error {
	if err := d.reaches(-1); err != nil {
		return err
	}
	return d.launch(s, launchBarrier, d.memory.group.Rank(), channel)
}

func (d *deviceSignals) signalAll(s device.Stream, channel int) error {
	return d.launch(s, launchSignalAll, d.memory.group.Rank(), channel)
}

func (d *deviceSignals) waitAll(s device.Stream, channel int, beside bool) error {
	if beside {
		return d.launch(s, launchWaitBeside, d.memory.group.Rank(), channel)
	}
	return d.launch(s, launchWaitAll, d.memory.group.Rank(), channel)
}

// decode makes an error of what a kernel wrote when it gave up.
func (d *deviceSignals) decode(word uint64) error {
	f := ptx.DecodeFault(word)
	if why := d.user.toldWhy(); f.Why == 0 && why != nil {
		return why
	}
	op := "wait"
	switch f.Kernel {
	case ptx.FaultBarrier:
		op = "barrier"
	case ptx.FaultSignal:
		op = "signal"
	}
	return d.user.failure(&device.WaitError{Op: op, Channel: int(f.Index), Peer: int(f.Peer), Err: d.memory.waitReason(f)})
}

// waitReason says why a kernel waited in vain. A kernel cannot tell a rank that is lost from one that waits for that one, and names the first that its
// time was up for: so the error does not say more of that rank than that, and says who is lost if the group has learned of it.
func (m *Memory) waitReason(f ptx.Fault) error {
	lost := m.group.Err()
	switch {
	case f.Why == ptx.FaultStopped && lost != nil:
		return lost
	case f.Why == ptx.FaultStopped:
		return errs.ErrClosed
	}
	late := fmt.Errorf("it did not come in %v of waiting (kernel-timeout), and may itself wait for another rank: %w", m.opts.KernelTimeout, os.ErrDeadlineExceeded)
	if errors.Is(lost, errs.ErrPeerLost) {
		return fmt.Errorf("%w; by now %w", late, lost)
	}
	return late
}

// WaitFailed is the error of a compiled kernel of the plan named op that gave up: a [*device.WaitError], or ErrUnsupported for a kernel that
// was compiled with a symmem.cuh of another version.
func (m *Memory) WaitFailed(op string, f ptx.Fault) error {
	if err := m.made("WaitFailed"); err != nil {
		return err
	}
	if f.Why == ptx.FaultVersion {
		return fmt.Errorf("%s: its kernel was compiled with a symmem.cuh of another version than %d, which this module has; compile it again: %w",
			op, ptx.CommVersion, errs.ErrUnsupported)
	}
	return &device.WaitError{Op: op, Channel: -1, Peer: int(f.Peer), Err: m.waitReason(f)}
}

func (d *deviceSignals) close() error {
	err := d.puts.close()
	for i := range d.launches {
		if prepared := d.launches[i].Swap(nil); prepared != nil {
			err = errors.Join(err, (*prepared).Close())
		}
	}
	if d.fault != nil {
		err = errors.Join(err, d.fault.Close())
		d.fault = nil
	}
	for _, p := range []*device.Ptr{&d.dead, &d.table} {
		if !p.IsNil() {
			err = errors.Join(err, d.memory.device.Free(*p))
			*p = 0
		}
	}
	return err
}
