package collective

import (
	"cmp"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"sync/atomic"
	"unsafe"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/kernels/ptx"
	"github.com/symmem/symmem/memory"
)

// waiting is one of a program's kernels that wait for peers.
type waiting struct {
	kernelForm
	launched bool  // a run has it
	records  int64 // where in the plan's workspace its records begin, once it is settled
}

// checkKernels says what is wrong with the kernels of a program that wait for peers.
func (f *programForm) checkKernels() error {
	const call = "New"
	g, rank, size := f.plan.spec.Program, f.plan.rank, f.plan.size
	if g.Among != nil && !rising(g.Among, rank, size) {
		return errs.Invalid(call, "Program.Among", g.Among, fmt.Sprintf("ranks of 0 to %d, this one, %d, among them, each once and in order", size-1, rank))
	}
	for i, k := range g.Kernels {
		name := fmt.Sprintf("Program.Kernels[%d]", i)
		if k == nil {
			return errs.Invalid(call, name, nil, "a kernel")
		}
		if k.BlockWorkspace != 0 {
			return errs.Invalid(call, name+".BlockWorkspace", k.BlockWorkspace, "0: a program has the Spec's workspace only")
		}
		f.waits = append(f.waits, &waiting{kernelForm: kernelForm{plan: f.plan, kernel: k, name: name}})
	}
	return nil
}

// rising reports whether a list is of ranks, each once and in order, with this one among them.
func rising(list []int, rank, size int) bool {
	last, mine := -1, false
	for _, r := range list {
		if r <= last || r >= size {
			return false
		}
		last, mine = r, mine || r == rank
	}
	return mine
}

// programOffer is what a rank says of a program's kernels.
type programOffer struct {
	Most  int               `json:"most"`  // blocks of a kernel that the rank's settings allow; 0 is any number
	Waits []json.RawMessage `json:"waits"` // what its device can do for each of those that wait for peers
}

// offerKernels is what this rank's device can do for its kernels.
func (f *programForm) offerKernels() ([]byte, error) {
	o := programOffer{Most: f.plan.memory.MaxBlocks()}
	for _, w := range f.waits {
		own, err := w.offer()
		if err != nil {
			return nil, err
		}
		o.Waits = append(o.Waits, own)
	}
	return json.Marshal(o)
}

// settleKernels decides how they are launched. Their records stand one behind the other, after so many bytes, as long on every rank as for all ranks, of
// which each may have another number to wait for.
func (f *programForm) settleKernels(offers []memory.WorkspaceOffer, at int64) (int64, error) {
	all := make([]programOffer, len(offers))
	for r, o := range offers {
		if err := json.Unmarshal(o.Offer, &all[r]); err != nil || len(all[r].Waits) != len(f.waits) {
			return 0, fmt.Errorf("reading what the device of rank %d can do for %d kernels: %w", r, len(f.waits), cmp.Or(err, error(errs.ErrMismatch)))
		}
		if most := all[r].Most; most > 0 && (f.most == 0 || most < f.most) {
			f.most = most
		}
	}
	for i, w := range f.waits {
		own := slices.Clone(offers)
		for r := range own {
			own[r].Offer = all[r].Waits[i]
		}
		if _, err := w.settle(own); err != nil {
			return 0, err
		}
		w.records = at
		at += ptx.ControlBytes(w.blocks, f.plan.size)
	}
	return at, nil
}

// prepareKernels makes what they need: a fault word, records at the first epoch, and room on the device. They run one after the other, so that the largest
// is what the plan takes.
func (w *programWork) prepareKernels(f *programForm) error {
	p := w.plan
	w.waits = f.waits
	if len(w.waits) == 0 {
		return nil
	}
	faults, ok := p.device.(device.FaultReporter)
	if !ok {
		return fmt.Errorf("kernels for %s: %w", p.device.Name(), errs.ErrUnsupported)
	}
	var err error
	if p.held.fault, err = faults.NewFaultWord(w.decode); err != nil {
		return err
	}
	for _, k := range w.waits {
		if k.tenant != nil && (p.tenant == nil || k.tenant.takes > p.tenant.takes) {
			p.tenant = k.tenant
		}
		if err := p.beginRecords(k.records, k.blocks); err != nil {
			return err
		}
	}
	return nil
}

// Waiting adds the i-th of Program.Kernels on the plan's stream. A run has it once at most.
func (b *Builder) Waiting(i int) {
	const call = "Builder.Waiting"
	if b.err != nil {
		return
	}
	if n := len(b.work.waits); i < 0 || i >= n {
		b.fail(errs.Invalid(call, "i", i, fmt.Sprintf("the number of one of %d kernels", n)))
		return
	}
	k := b.work.waits[i]
	if k.launched {
		b.fail(errs.Invalid(call, "i", i, "a kernel that the run does not have yet: its records count its launches"))
		return
	}
	k.launched = true
	params, err := b.seenBy(k, func() ([][]byte, error) { return k.kernel.params(b.Addresses) })
	if err != nil {
		b.fail(err)
		return
	}
	l, err := k.function.Prepare(device.Launch{
		Grid: [3]uint32{uint32(k.blocks)}, Block: [3]uint32{uint32(k.threads)}, SharedBytes: uint32(k.kernel.SharedBytes), Params: params,
		Overlap: k.kernel.Overlap, Fault: b.plan.held.fault,
	})
	if err != nil {
		b.fail(err)
		return
	}
	b.explains(k.kernel)
	b.add(step{kind: stepLaunch, launch: l})
}

// seenBy calls f while the addresses are those of a kernel: of the ranks that it waits for alone, by their places among these, with its records.
func (a *Addresses) seenBy(k *waiting, f func() ([][]byte, error)) ([][]byte, error) {
	a.ranks, a.records, a.blocks, a.table = a.plan.spec.Program.Among, k.records, k.blocks, 0
	defer func() { a.ranks, a.records, a.blocks, a.table = nil, 0, 0, 0 }()
	return f()
}

// explains notes who makes an error of what a kernel wrote for reasons of its own.
func (b *Builder) explains(k *Kernel) {
	if k.Fault != nil {
		b.work.faults = append(b.work.faults, k.Fault)
	}
}

// failer is a launch that goes on elsewhere when a plan fails here.
type failer interface{ Fail(err error) }

// decode makes an error of what a kernel of the program wrote when it gave up, and tells the launches that have peers of their own, which would wait for this
// rank's next run.
func (w *programWork) decode(word uint64) error {
	err := w.plan.fail(w.failure(word))
	w.failLaunches(err)
	return err
}

// failLaunches tells the launches that go on elsewhere that the plan has failed here.
func (w *programWork) failLaunches(err error) {
	for _, s := range w.steps {
		if f, ok := s.launch.(failer); ok {
			f.Fail(err)
		}
	}
}

func (w *programWork) failure(word uint64) error {
	p, f := w.plan, ptx.DecodeFault(word)
	for _, own := range w.faults {
		if err := own(f); err != nil {
			return fmt.Errorf("running %s: %w", p.name, err)
		}
	}
	if among := p.spec.Program.Among; int(f.Peer) < len(among) && among[f.Peer] <= math.MaxUint16 {
		f.Peer = uint16(among[f.Peer])
	}
	return p.memory.WaitFailed(p.name, f)
}

// StopIf adds a kernel on the plan's stream that makes the kernels behind it give up if the 32-bit word at an address of this rank is not 0 when the run comes there; why is the error of the
// plan then. In a program that has Kernels.
func (b *Builder) StopIf(word device.Ptr, why func() error) { b.stopIf("Builder.StopIf", word, why) }

func (b *Builder) stopIf(call string, word device.Ptr, why func() error) {
	switch {
	case b.err != nil:
		return
	case why == nil: // which would be called only once the plan fails
		b.fail(errs.Invalid(call, "why", nil, "a function"))
		return
	case word.IsNil() || word%stopWordBytes != 0: // at which every run would end the context of the device
		b.fail(errs.Invalid(call, "word", word, fmt.Sprintf("the address of a 32-bit word, a multiple of %d", stopWordBytes)))
		return
	case len(b.work.waits) == 0:
		b.fail(errs.Invalid(call, "Kernels", "none", "some that wait for peers"))
		return
	}
	image, err := ptx.Image(ptx.Told.File)
	if err != nil {
		b.fail(err)
		return
	}
	// Its rank, which it tells of in the fault word and has no other use for, is which of the steps it is.
	number := b.work.stops
	b.work.stops++
	b.Kernel(&Kernel{
		Image: image, Function: ptx.Told.Name, Blocks: 1, Threads: 32,
		Params: func(at *Addresses) []any {
			c := at.Comm()
			c.Rank = number
			return []any{c, word}
		},
		Fault: func(f ptx.Fault) error {
			if f.Kernel != ptx.FaultTeller || f.Why != ptx.FaultTold || f.Peer != uint16(number) {
				return nil
			}
			return why()
		},
	})
}

// StopIfFailed is StopIf for whether a put, a signal or a wait of the program has failed here before: the kernels behind it would tell peers that wait for them that all is there.
func (b *Builder) StopIfFailed() {
	if b.err == nil && b.stop.IsNil() {
		var words []byte
		if words, b.stop = b.Stage(stopBytes); b.err != nil {
			return
		}
		b.work.failed = (*uint32)(unsafe.Pointer(unsafe.SliceData(words)))
	}
	b.stopIf("Builder.StopIfFailed", b.stop, b.work.plan.Err)
}

// JoinInTime is Join for a lane that waits for other ranks without a bound, as a library's launches do: where it has not come to here when the plan's stream has waited for as long as kernels
// wait for peers, the plan gives up as where one of its kernels has; why is its error then. Launches of the program that have a method Ask(func() error), as those of libraries, are told
// of that whatever the streams are at, and end what they wait for. In a program that has Kernels; without a lane it is nothing.
//
// What a library has to do first counts too: runs of other plans that it does in their order, on whatever streams they are. So the timeout has to be longer than what may be ahead of
// them there. Where kernels of several streams do not run at the same time, as under some debuggers and with CUDA_LAUNCH_BLOCKING=1, the lane does not come in time.
func (b *Builder) JoinInTime(why func() error) {
	const call = "Builder.JoinInTime"
	switch {
	case b.err != nil:
		return
	case why == nil:
		b.fail(errs.Invalid(call, "why", nil, "a function"))
		return
	case len(b.work.waits) == 0:
		b.fail(errs.Invalid(call, "Kernels", "none", "some that wait for peers"))
		return
	case b.work.lane == nil:
		return
	}
	// The two streams are the ranks of a barrier, in memory of this rank alone. The plan's is enqueued first: where the streams share a queue, it may not come behind one that the
	// lane holds up.
	const plan, lane, streams = 0, 1, 2
	meet := ptx.Meet(false)
	image, err := ptx.Image(meet.File)
	if err != nil {
		b.fail(err)
		return
	}
	var records [streams]uint64
	for i := range records {
		records[i] = uint64(b.Upload(make([]byte, ptx.ControlBytes(1, streams))))
	}
	number := b.work.joins // which of the steps it is, for the fault word
	b.work.joins++
	for rank, kind := range []stepKind{plan: stepLaunch, lane: stepBeside} {
		k := &Kernel{
			Image: image, Function: meet.Name, Overlap: meet.Overlap, Blocks: 1, Threads: 32,
			Params: func(at *Addresses) []any {
				c := at.Comm()
				c.Index, c.Rank, c.World, c.Table, c.Workspace = number, uint32(rank), streams, 0, [ptx.Inline]uint64{plan: records[plan], lane: records[lane]}
				if rank == lane {
					c.Timeout = min(c.Timeout, math.MaxInt64/laneTimeouts) * laneTimeouts // the plan's stream comes, or gives up, before that
				}
				return []any{c}
			},
			Fault: func(f ptx.Fault) error {
				if f.Kernel != ptx.FaultMeet || f.Index != uint16(number) {
					return nil
				}
				return why() // whatever it was: the peers of this barrier are streams, and no ranks
			},
		}
		fault := b.plan.held.fault
		if rank == lane {
			fault = nil // nobody asks the lane
		}
		l, err := b.prepareKernel(k, fault)
		if err != nil {
			b.fail(err)
			return
		}
		b.explains(k)
		b.add(step{kind: kind, launch: l})
	}
	b.work.asks = true
	b.Join()
}

// laneTimeouts is for how many timeouts of kernels a lane waits for the plan's stream, in front of which there may be some kernels that wait as long.
const laneTimeouts = 8

// asker is a launch that asks, as long as it is not closed, whether a kernel of the plan has given up.
type asker interface{ Ask(gaveUp func() error) }

// askers makes launches ask, where the lane has to come in time.
func (w *programWork) askers() {
	if !w.asks {
		return
	}
	// Who asks may do so while the plan is closed, and looks at a word that can be looked at then too.
	fault := w.plan.held.fault
	gaveUp := func() error { return w.gaveUpBy(fault) }
	for _, s := range w.steps {
		if a, ok := s.launch.(asker); ok {
			a.Ask(gaveUp)
		}
	}
}

// stopBytes is the size of what StopIfFailed looks at, and stopWordBytes that of the word of StopIf.
const (
	stopBytes     = 8
	stopWordBytes = 4
)

// fail makes the plan fail, and kernels behind the next StopIfFailed give up.
func (w *programWork) fail(err error) error {
	err = w.plan.fail(err)
	w.failing.Lock()
	defer w.failing.Unlock()
	if w.failed != nil {
		atomic.StoreUint32(w.failed, 1)
	}
	return err
}

// gaveUp is the error of a kernel that has given up; nil if none has.
func (w *programWork) gaveUp() error {
	if len(w.waits) == 0 {
		return nil
	}
	return w.gaveUpBy(w.plan.held.fault)
}

// gaveUpBy is the error that a fault word tells of.
func (w *programWork) gaveUpBy(fault device.FaultWord) error {
	if word := fault.Load(); word != 0 {
		return w.decode(word)
	}
	return nil
}
