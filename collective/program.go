package collective

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/kernels/ptx"
	"github.com/symmem/symmem/memory"
)

// Program is a collective as steps: puts with signals behind them, waits for signals, and launches. It needs no addresses of peers' memory.
//
// A run has the plan's stream and, if Lane is set, a stream of its own beside it for what waits for peers. The steps of each are in order;
// [Builder.Fork] and [Builder.Join] order the two; no run begins on the one before it begins on the other, nor ends. A wait is bounded as every wait of device work is. What fails makes the plan fail.
type Program struct {
	// Signals is how many signals each rank counts from each other; numbered from 0. There are 1024 at most.
	Signals int
	// Granted is how many of them, the last ones, begin with one of every peer that was not waited for: room that the peers have.
	Granted int
	// Peers are, by signal, the ranks that this rank exchanges it with: sends and signals go to them, and waits are for theirs. Nil, or nil for
	// a signal, is every peer, and an empty list nobody. Where one rank has another, the other has it: the ranks do not compare that. ErrUnsupported where
	// kernels signal ([memory.Memory.SignalsSome]).
	Peers [][]int
	// Workspace, unless 0, is the size in bytes of the workspace that the program has in place of Spec.Workspace.
	Workspace int64
	// Kernels are CUDA kernels that wait for peers, which [Builder.Waiting] adds to a run. Each is settled as Spec.CUDA would be, as wide as leaves room on
	// every rank's device, and has records of its own. Of them BlockWorkspace is 0, and Comm's data is not theirs to use. On a CUDA device.
	Kernels []*Kernel
	// Among, unless nil, is the ranks that the kernels wait for, in order, this one among them: those whose memory has addresses here. All of them
	// give the same list. For Params they are numbered by their places in it, and are all ranks that there are.
	Among []int
	// Lane says that sends, waits, signals and what LaunchBeside adds go on a stream beside the plan's.
	Lane bool
	// Build adds the steps of a run to b, when a plan is made, on every rank at the same time: the ranks may come together in it, as the
	// libraries below backends have to. Collective calls of the memory take ctx there: with another they would wait for the plan. Its error is every rank's.
	Build func(ctx context.Context, b *Builder) error
}

// ToWorkspace is Put.Tensor for a put to the peer's workspace.
const ToWorkspace = -1

// Put is a write to another rank.
type Put struct {
	Peer   int
	Tensor int   // the number in Spec.Tensors of the one that is written, or ToWorkspace
	Offset int64 // in bytes from its first, on the peer
	Local  device.Ptr
	Bytes  int64 // 0 writes nothing
}

// Builder takes the steps of a [Program]. It has the plan's addresses; of its own rank's memory only, where peers have no addresses here. The
// first step that is wrong is the error of New, and the steps behind it are not looked at.
type Builder struct {
	*Addresses
	work *programWork
	stop device.Ptr // what StopIfFailed looks at, if there is a step
}

// programForm is a plan as a program. Its workspace begins with the pads of the signals, and the records of kernels.
type programForm struct {
	plan  *Plan
	waits []*waiting
	data  int64 // where the Spec's workspace begins, once it is settled
	most  int   // blocks that the settings of every rank allow a kernel, once it is settled; 0 is any number
}

// maxSignals is the most signals of a program, as many as a memory has channels.
const maxSignals = 1024

// padAlign is what the Spec's workspace is aligned to.
const padAlign = 128

func (f *programForm) describe() string {
	g := f.plan.spec.Program
	text := fmt.Sprintf("a program of %d signals, %d of them granted, with a lane %t", g.Signals, g.Granted, g.Lane)
	for _, k := range g.Kernels {
		if k != nil { // which offer refuses
			text += ", " + (&kernelForm{plan: f.plan, kernel: k}).describe()
		}
	}
	return text
}

func (f *programForm) offer() ([]byte, error) {
	const call = "New"
	switch g := f.plan.spec.Program; {
	case g.Build == nil:
		return nil, errs.Invalid(call, "Program.Build", nil, "a function")
	case g.Signals < 0 || g.Signals > maxSignals:
		return nil, errs.Invalid(call, "Program.Signals", g.Signals, fmt.Sprintf("0 to %d", maxSignals))
	case g.Workspace < 0 || g.Workspace > maxWorkspaceBytes:
		return nil, errs.Invalid(call, "Program.Workspace", g.Workspace, fmt.Sprintf("0 to %d bytes", int64(maxWorkspaceBytes)))
	case len(g.Peers) > g.Signals:
		return nil, errs.Invalid(call, "Program.Peers", fmt.Sprintf("of %d signals", len(g.Peers)), fmt.Sprintf("of %d at most, the number of signals", g.Signals))
	case g.Granted < 0 || g.Granted > g.Signals:
		return nil, errs.Invalid(call, "Program.Granted", g.Granted, fmt.Sprintf("0 to %d, the number of signals", g.Signals))
	}
	if err := f.checkKernels(); err != nil {
		return nil, err
	}
	return f.offerKernels()
}

func (f *programForm) settle(offers []memory.WorkspaceOffer) (int64, error) {
	var err error
	if f.data, err = f.settleKernels(offers, f.padBytes()); err != nil {
		return 0, err
	}
	return f.data + max(f.plan.spec.Workspace, 1), nil
}

func (f *programForm) launch() (text string) {
	for _, w := range f.waits {
		text += w.launch()
	}
	return text
}

func (f *programForm) dataAt() int64 { return f.data }

// padBytes is the size of the signals' pads.
func (f *programForm) padBytes() int64 {
	n := f.plan.spec.Program.Signals
	if n == 0 {
		return 0
	}
	return (f.plan.memory.SignalsBytes(n) + padAlign - 1) / padAlign * padAlign
}

// programWork is a plan's work as a program.
type programWork struct {
	plan    *Plan
	signals *memory.Signals // nil if there are none
	steps   []step
	waits   []*waiting                // the kernels that wait for peers
	faults  []func(f ptx.Fault) error // what makes errors of what kernels write for reasons of their own
	most    int                       // blocks that the settings of every rank allow a kernel; 0 is any number

	// The stream that sends and waits beside the plan's, or nil.
	lane   device.Stream
	forked device.Event // the plan's stream has come so far
	joined device.Event // the lane has

	ended   device.Event // the last run that was not recorded; nil without steps
	running atomic.Bool  // a host function of it is at work

	stops, joins uint32 // the steps of StopIf and of JoinInTime that there are

	asks   bool               // launches ask whether a kernel has given up
	copies *memory.WorkCopies // nil if no step needs them

	failing sync.Mutex // guards failed
	failed  *uint32    // in memory that kernels read: not 0 once the plan has failed where the CPU sends and waits; nil if no step looks at it, and when that memory is given back
}

// step is one call of a run.
type step struct {
	kind   stepKind
	signal int
	send   *memory.PreparedSend
	launch device.PreparedLaunch
}

// stepKind tells steps apart.
type stepKind uint8

const (
	stepSend     stepKind = iota + 1 // the lane puts to peers, with a signal behind it unless it is Put's
	stepWait                         // the lane waits for a signal of every peer
	stepFinish                       // the plan's stream does, and is told what has failed
	stepSignal                       // the lane signals every peer
	stepAnnounce                     // the plan's stream does
	stepLaunch                       // the plan's stream launches
	stepBeside                       // the lane launches
	stepFork                         // the lane goes on only when the plan's stream has come here
	stepJoin                         // the plan's stream goes on only when the lane has come here
)

func (f *programForm) prepare(ctx context.Context, a *Addresses) (work, error) {
	w := &programWork{plan: f.plan, most: f.most}
	return w, w.make(ctx, f, a)
}

// make makes the work. What there is of it after an error is closed as the whole is.
func (w *programWork) make(ctx context.Context, f *programForm, a *Addresses) (err error) {
	p, g := f.plan, f.plan.spec.Program
	if g.Signals > 0 {
		o := memory.SignalsOptions{Channels: g.Signals, Granted: g.Granted, First: p.spec.FirstEpoch, Op: p.name, Failed: w.fail, GaveUp: w.gaveUp, Peers: g.Peers}
		if w.signals, err = p.workspace.Signals(ctx, 0, &o); err != nil {
			return err
		}
	}
	if w.ended, err = p.device.NewEvent(); err == nil {
		err = w.makeLane(g)
	}
	if err == nil {
		err = w.prepareKernels(f)
	}
	// Build may be collective: a rank that does not come to it takes the others with it.
	if err = p.memory.Group().Vote(ctx, "beginning a program", err); err != nil {
		return err
	}
	if err = g.Build(ctx, &Builder{Addresses: a, work: w}); err == nil {
		err = a.err
	}
	if err != nil {
		return err
	}
	w.guard()
	w.enclose()
	w.askers()
	return nil
}

// guard makes a run look first whether the plan, a tensor of it or its group was closed, where ranks take different steps: a graph has kept the run. Then no
// rank signals or waits any more, and it is ErrClosed on all, also on those that have nothing else to do.
func (w *programWork) guard() {
	if p := w.plan; p.device.Kind() == device.Host && w.signals != nil && len(p.spec.Program.Peers) > 0 {
		w.steps = slices.Insert(w.steps, 0, step{kind: stepLaunch, launch: &lookStep{work: w}})
	}
}

// lookStep looks whether the plan can still run.
type lookStep struct{ work *programWork }

// Launch enqueues the look, or records it.
func (l *lookStep) Launch(s device.Stream) error { return launchOnHost(s, l) }

// Close does nothing.
func (l *lookStep) Close() error { return nil }

// RunKernel looks.
func (l *lookStep) RunKernel() error {
	err := l.work.plan.released()
	if err != nil {
		l.work.signals.Fail(err)
	}
	return err
}

// enclose makes what the lane does part of the run, where the program does not: a fork comes before it, and a join behind. Else a capture
// would not have it, and who has waited for the plan's stream would not have waited for it.
func (w *programWork) enclose() {
	if w.lane == nil {
		return
	}
	var first stepKind // of those that concern the lane
	open := false      // the lane has more to do than was joined
	for _, s := range w.steps {
		if s.kind == stepLaunch || s.kind == stepFinish || s.kind == stepAnnounce {
			continue
		}
		if first == 0 {
			first = s.kind
		}
		open = s.kind != stepJoin
	}
	if first != 0 && first != stepFork {
		w.steps = slices.Insert(w.steps, 0, step{kind: stepFork})
	}
	if open {
		w.steps = append(w.steps, step{kind: stepJoin})
	}
}

// makeLane makes the stream beside the plan's.
func (w *programWork) makeLane(g *Program) (err error) {
	if !g.Lane {
		return nil
	}
	d := w.plan.device
	if w.lane, err = d.NewStream(); err != nil {
		return err
	}
	if w.forked, err = d.NewEvent(); err != nil {
		return err
	}
	w.joined, err = d.NewEvent()
	return err
}

// add adds a step, unless one before it was wrong.
func (b *Builder) add(s step) {
	if b.err == nil {
		b.work.steps = append(b.work.steps, s)
	}
}

// known reports whether there is such a signal.
func (b *Builder) known(call string, signal int) bool {
	if n := b.plan.spec.Program.Signals; signal < 0 || signal >= n {
		b.fail(errs.Invalid(call, "signal", signal, fmt.Sprintf("the number of one of %d signals", n)))
		return false
	}
	return true
}

// Send adds puts to peers of the signal, one to each at most, and then a signal to every one of these, also to those without a put. A peer that has waited for
// the signal has the bytes that were put there. Lane.
func (b *Builder) Send(signal int, puts ...Put) { b.send("Builder.Send", signal, true, puts) }

// Put is Send without the signals, which Announce gives: so that the next put need not wait until they are given. ErrUnsupported where the memory of a peer
// has no address here. Lane.
func (b *Builder) Put(signal int, puts ...Put) { b.send("Builder.Put", signal, false, puts) }

func (b *Builder) send(call string, signal int, signals bool, puts []Put) {
	if b.err != nil || !b.known(call, signal) {
		return
	}
	sends := make([]memory.SendPut, 0, len(puts))
	for _, put := range puts {
		send, err := b.put(put)
		if err != nil {
			b.fail(err)
			return
		}
		if put.Bytes > 0 {
			sends = append(sends, send)
		}
	}
	prepare := b.work.signals.PrepareSend
	if !signals {
		prepare = b.work.signals.PreparePuts
	}
	send, err := prepare(signal, sends...)
	if err != nil {
		b.fail(err)
		return
	}
	b.add(step{kind: stepSend, signal: signal, send: send})
}

// SendComputed is Send for puts that are known only when a run comes to it, as the counts of an all-to-all are: puts gives them at each run,
// also at each replay of a graph. All earlier steps of the lane have ended then. It is called by one goroutine at a time, must be quick and must
// not block. What it returns may be the same memory each time. Its error, and puts that Send would refuse, make the plan fail as a put that fails does: peers get no signal, and the next wait
// of the run returns the error. ErrUnsupported on a device whose work of the CPU cannot copy. Lane.
func (b *Builder) SendComputed(signal int, puts func() ([]Put, error)) {
	const call = "Builder.SendComputed"
	if b.err != nil || !b.known(call, signal) {
		return
	}
	if puts == nil {
		b.fail(errs.Invalid(call, "puts", nil, "a function"))
		return
	}
	by, err := b.work.copiesByWork()
	if err != nil {
		b.fail(err)
		return
	}
	var sends []memory.SendPut // of the latest run
	send, err := b.work.signals.PrepareComputedSend(signal, by, func() ([]memory.SendPut, error) {
		if err := errors.Join(b.plan.released(), b.plan.Err()); err != nil {
			return nil, err // the step that finds out what to put was left out
		}
		found, err := puts()
		if err != nil {
			return nil, err
		}
		sends = sends[:0]
		for _, put := range found {
			send, err := b.put(put)
			if err != nil {
				return nil, err
			}
			sends = append(sends, send)
		}
		return sends, nil
	})
	if err != nil {
		b.fail(err)
		return
	}
	b.add(step{kind: stepSend, signal: signal, send: send})
}

// Signal adds a signal to every peer of it. Lane.
func (b *Builder) Signal(signal int) {
	if b.known("Builder.Signal", signal) {
		b.add(step{kind: stepSignal, signal: signal})
	}
}

// Announce is Signal on the plan's stream: behind a Join that comes after the puts, it says that these have come.
func (b *Builder) Announce(signal int) {
	if b.known("Builder.Announce", signal) {
		b.add(step{kind: stepAnnounce, signal: signal})
	}
}

// Wait adds waiting for one signal of every peer of it that was not waited for before. What fails is told by the next Finish. Lane.
func (b *Builder) Wait(signal int) {
	if b.known("Builder.Wait", signal) {
		b.add(step{kind: stepWait, signal: signal})
	}
}

// Finish adds waiting on the plan's stream, whose user looks for errors: like Wait, and what has failed before is an error of that stream.
// It is the last wait of every program that waits. Join the lane before: what fails there later is an error of the next Run only.
func (b *Builder) Finish(signal int) {
	if b.known("Builder.Finish", signal) {
		b.add(step{kind: stepFinish, signal: signal})
	}
}

// Launch adds work of the plan's stream, which the plan closes. It must not wait for peers, unless that is bounded. If it has a method Fail(error), that is
// called when a kernel of the program has given up here, or a run could not be enqueued to its end, with the plan's error: peers that wait for this rank in it have to be told. It must not block, nor
// call anything of the device.
func (b *Builder) Launch(l device.PreparedLaunch) { b.launch("Builder.Launch", stepLaunch, l) }

// LaunchBeside is Launch for work of the lane. Without a lane it is Launch.
func (b *Builder) LaunchBeside(l device.PreparedLaunch) {
	b.launch("Builder.LaunchBeside", stepBeside, l)
}

func (b *Builder) launch(call string, kind stepKind, l device.PreparedLaunch) {
	if errs.IsNil(l) {
		b.fail(errs.Invalid(call, "l", nil, "a prepared launch"))
		return
	}
	if b.err != nil {
		b.fail(l.Close())
		return
	}
	b.add(step{kind: kind, launch: l})
}

// Kernel adds a CUDA kernel on the plan's stream, which must not wait for peers. It has fewer blocks only where the setting max-blocks of a rank allows no more. Of k, BlockWorkspace is
// not used, and Fault counts where the program has Kernels, as [Addresses.Comm] does; Fit is asked for this rank's device.
func (b *Builder) Kernel(k *Kernel) {
	if b.err != nil {
		return
	}
	l, err := b.prepareKernel(k, b.plan.held.fault)
	if err != nil {
		b.fail(err)
		return
	}
	b.explains(k)
	b.add(step{kind: stepLaunch, launch: l})
}

// prepareKernel prepares a kernel whose stream tells of what it writes to the fault word, if that is not nil.
func (b *Builder) prepareKernel(k *Kernel, fault device.FaultWord) (device.PreparedLaunch, error) {
	const call = "Builder.Kernel"
	if k == nil {
		return nil, errs.Invalid(call, "k", nil, "a kernel")
	}
	p := b.plan
	if err := (&kernelForm{plan: p, kernel: k, name: "k"}).check(call); err != nil {
		return nil, err
	}
	g, ok := p.device.(gpu)
	if !ok {
		return nil, fmt.Errorf("kernels for %s: %w", p.device.Name(), errs.ErrUnsupported)
	}
	fn, err := p.memory.Function(k.Image, k.Function)
	if err != nil {
		return nil, err
	}
	blocks, threads := k.Blocks, k.Threads
	if k.Fit != nil {
		if blocks, threads = k.Fit(g.Multiprocessors()); blocks < 1 || blocks > math.MaxInt32 || !slices.Contains(threadSizes, threads) {
			return nil, badFit(blocks, threads)
		}
	}
	if most := b.work.most; most > 0 && blocks > most {
		blocks = most
	}
	cluster := clusterBlocks(fn)
	blocks -= blocks % cluster
	if least := max(k.MinBlocks, cluster); blocks < least {
		return nil, errs.Invalid(call, "k.MinBlocks", least, fmt.Sprintf("at most %d, which are of use, and the setting max-blocks of every rank allows", blocks))
	}
	params, err := k.params(b.Addresses)
	if err != nil {
		return nil, err
	}
	return fn.Prepare(device.Launch{
		Grid: [3]uint32{uint32(blocks)}, Block: [3]uint32{uint32(threads)}, SharedBytes: uint32(k.SharedBytes), Params: params, Overlap: k.Overlap,
		Fault: fault,
	})
}

// Host adds a function that runs on a goroutine of the plan's stream, on the host device; ErrUnsupported elsewhere. Its error makes the plan
// fail, and peers get no signals from this rank any more.
func (b *Builder) Host(f func() error) {
	if d := b.plan.device; d.Kind() != device.Host {
		b.fail(fmt.Errorf("a step of the host on %s: %w", d.Name(), errs.ErrUnsupported))
		return
	}
	if f == nil {
		b.fail(errs.Invalid("Builder.Host", "f", nil, "a function"))
		return
	}
	b.add(step{kind: stepLaunch, launch: &hostStep{work: b.work, run: f}})
}

// Fork makes the lane go on only when the plan's stream has come to here. Without a lane it is nothing.
func (b *Builder) Fork() { b.add(step{kind: stepFork}) }

// Join makes the plan's stream go on only when the lane has come to here. Without a lane it is nothing.
func (b *Builder) Join() { b.add(step{kind: stepJoin}) }

// hostStep is a function as a launch.
type hostStep struct {
	work *programWork
	run  func() error
}

// Launch enqueues the function, or records it.
func (h *hostStep) Launch(s device.Stream) error { return launchOnHost(s, h) }

// launchOnHost enqueues a kernel of the host, or records it.
func launchOnHost(s device.Stream, k device.HostKernel) error {
	l, ok := s.(device.HostLauncher)
	if !ok {
		return fmt.Errorf("a stream of %s cannot run kernels of the host: %w", s.Device().Name(), errs.ErrUnsupported)
	}
	return l.Launch(k)
}

// Close does nothing.
func (h *hostStep) Close() error { return nil }

// RunKernel runs the function, unless the plan has failed.
func (h *hostStep) RunKernel() (err error) {
	p := h.work.plan
	if err := p.released(); err != nil {
		return err
	}
	if err := p.Err(); err != nil {
		if h.work.signals != nil {
			return nil // told by a wait
		}
		return err
	}
	// A graph may be launched on a stream that no Run was told of.
	if h.work.running.Swap(true) {
		return h.work.failSilently(fmt.Errorf("running %s: %w", p.name, errs.ErrTwoStreams))
	}
	defer h.work.running.Store(false)
	ended := false
	defer func() {
		if !ended {
			err = h.work.failSilently(brokenOff("step", p.name, recover()))
		}
	}()
	err = h.run()
	ended = true
	if err != nil {
		return h.work.failSilently(err)
	}
	return nil
}

// String describes the plan in errors of the stream.
func (h *hostStep) String() string { return h.work.plan.name }

func (w *programWork) enqueue(s device.Stream, recorded bool) error {
	if len(w.steps) == 0 {
		return nil
	}
	if !recorded && w.lane != nil && w.lane.Capturing() {
		return fmt.Errorf("another stream records it; end that capture first: %w", errs.ErrTwoStreams)
	}
	if err := w.gaveUp(); err != nil {
		return err
	}
	for i := range w.steps {
		if err := w.step(s, &w.steps[i]); err != nil {
			if i > 0 && !recorded { // the others do all of the run
				err = w.failSilently(err)
				w.failLaunches(err)
			}
			return err
		}
	}
	if recorded {
		return nil
	}
	if err := s.Record(w.ended); err != nil {
		return w.failSilently(err) // nobody knows when the run ends
	}
	return nil
}

// failSilently makes the plan fail. Steps that come to it from then on are left out, and so none may tell peers any more that it is done: from before then.
func (w *programWork) failSilently(err error) error {
	if w.signals != nil {
		w.signals.Fail(err)
	}
	return w.fail(err)
}

// step enqueues one step of a run on s, or on the lane if it is the lane's.
func (w *programWork) step(s device.Stream, t *step) error {
	lane := w.lane
	if lane == nil {
		lane = s
	}
	switch t.kind {
	case stepSend:
		return t.send.Enqueue(lane)
	case stepWait:
		if w.lane != nil {
			return w.signals.WaitAllBeside(lane, t.signal)
		}
		return w.signals.WaitAll(s, t.signal)
	case stepFinish:
		return w.signals.WaitAll(s, t.signal)
	case stepSignal:
		return w.signals.SignalAll(lane, t.signal)
	case stepAnnounce:
		return w.signals.SignalAll(s, t.signal)
	case stepLaunch:
		return t.launch.Launch(s)
	case stepBeside:
		return t.launch.Launch(lane)
	}
	switch {
	case w.lane == nil:
		return nil
	case t.kind == stepFork:
		return follow(lane, s, w.forked)
	}
	return follow(s, lane, w.joined)
}

// follow lets a stream go on when another has come to where it is now.
func follow(s, other device.Stream, e device.Event) error {
	if err := other.Record(e); err != nil {
		return err
	}
	return s.WaitEvent(e)
}

func (w *programWork) settled() (bool, error) {
	if len(w.steps) == 0 {
		return true, nil
	}
	return w.ended.Query()
}

func (w *programWork) close() error {
	var err error
	if w.lane != nil {
		err = w.lane.Close()
		if _, recorded := errors.AsType[*device.CaptureError](err); recorded { // in a capture that has not ended
			err = w.plan.memory.AtRelease(w.lane.Close)
		}
	}
	for _, e := range []device.Event{w.forked, w.joined, w.ended} {
		if e != nil {
			err = errors.Join(err, e.Close())
		}
	}
	for _, step := range w.steps {
		if step.send != nil {
			err = errors.Join(err, step.send.Close())
		}
		if step.launch != nil {
			err = errors.Join(err, step.launch.Close())
		}
	}
	if w.copies != nil {
		err = errors.Join(err, w.copies.Close())
	}
	if w.signals != nil {
		err = errors.Join(err, w.signals.Close())
	}
	w.failing.Lock()
	w.failed = nil // runs that their streams have cut off are polled to their end, and may fail then
	w.failing.Unlock()
	return notClosed(err)
}
