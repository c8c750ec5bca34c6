package nccl

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/cuda"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/nccl"
)

// The library's forms of all-reduce, as package kernels calls them.
const (
	plainForm     = "nccl"
	symmetricForm = "nccl_symmetric"
)

// dataTypes and operations are NCCL's numbers for the dtypes and operations that it has.
var (
	dataTypes = map[string]nccl.DataType{
		"f16": nccl.Float16, "bf16": nccl.BFloat16, "f32": nccl.Float32, "f64": nccl.Float64, "i8": nccl.Int8,
		"i32": nccl.Int32, "i64": nccl.Int64,
		"u8": nccl.Uint8, "u32": nccl.Uint32, "u64": nccl.Uint64,
	}
	operations = map[string]nccl.Op{"sum": nccl.Sum, "prod": nccl.Prod, "min": nccl.Min, "max": nccl.Max, "avg": nccl.Avg}
)

// collectives are NCCL's by their names.
var collectives = map[string]nccl.Collective{
	"": nccl.AllReduce, "broadcast": nccl.Broadcast, "reduce": nccl.Reduce, "all_gather": nccl.AllGather, "reduce_scatter": nccl.ReduceScatter, "all_to_all": nccl.AllToAll,
	"send": nccl.Send, "receive": nccl.Recv, // in parts only
}

// evenElements is the first version whose symmetric kernels take elements of 2 bytes at any address.
const evenElements nccl.Version = 23003

// endableKernels is the first version whose symmetric kernels look at the communicator's abort flag while they wait (dev_runtime.cc,
// lsa_barrier__funcs.h and ll_a2a__funcs.h).
const endableKernels nccl.Version = 22907

// reducer is a communicator for the library's all-reduces of one form.
type reducer struct {
	form    string
	comm    *nccl.Comm
	windows map[device.Ptr]*nccl.Window // symmetric windows by the base of their allocation; none for the plain form

	// NCCL's kernels report nothing when they are ended, and leave results that are wrong. So every stream with a run watches a word, which is
	// written when the communicator is given up.
	fault *cuda.FaultWord
	used  atomic.Bool           // some stream watches it
	cause atomic.Pointer[error] // why it was given up; nil while it was not

	key string // under which a rank tells that a run has failed there; "" in a group of one rank

	failing atomic.Bool // this rank is giving it up, because a plan has failed here
}

// newReducer returns a reducer for this rank's device. key is where a rank tells of runs that have failed.
func (b *Backend) newReducer(form, key string, comm *nccl.Comm) (*reducer, error) {
	red := &reducer{form: form, comm: comm, key: key, windows: map[device.Ptr]*nccl.Window{}}
	fault, err := b.device.NewFaultWord(func(uint64) error {
		return fmt.Errorf("NCCL's all-reduce was ended: %w", *red.cause.Load())
	})
	if err != nil {
		return nil, err
	}
	red.fault = fault.(*cuda.FaultWord)
	b.mu.Lock()
	b.words = append(b.words, red.fault)
	b.mu.Unlock()
	return red, nil
}

// given returns an error if the communicator was given up.
func (red *reducer) given() error {
	if cause := red.cause.Load(); cause != nil {
		return fmt.Errorf("the communicator of %s was given up, so that it is %w: %w", red.form, errs.ErrClosed, *cause)
	}
	return nil
}

// tell makes every stream report that the communicator was given up, if it has a run on it after which it was not synchronized. It reports whether
// this is the first to say so, who then ends the communicator.
func (red *reducer) tell(cause error) bool {
	if !red.cause.CompareAndSwap(nil, &cause) {
		return false
	}
	// A word that nobody watches would be reported by streams that have nothing to do with it.
	if red.used.Load() {
		red.fault.Store(1)
	}
	return true
}

// reduction is an all-reduce, or other collectives, that was prepared.
type reduction struct {
	backend *Backend
	of      *reducer
	calls   []nccl.Call // of a run: one, unless the ranks are in parts

	form   string    // whose communicator it runs on
	part   nccl.Part // of the communicator; whole unless the ranks are in parts
	beside bool      // its streams tell of nothing

	runs sync.Pool // of *run
}

// run is one call with its arguments, to be made with the context current. It is kept, so that running allocates nothing.
type run struct {
	of     *reduction
	stream uintptr
	call   func() error
}

// place is what a rank tells the others about the memory that it reduces, and about the communicator.
type place struct {
	In, Out int64 // offsets in the windows
	Live    bool  // the form's communicator is there and was not given up
}

// PrepareAllReduce makes the communicator of the form if there is none yet, registers what the symmetric form needs, and runs the plain form once on
// memory of its own. NCCL makes its connections when they are first needed, so later runs do not wait for other ranks.
func (b *Backend) PrepareAllReduce(ctx context.Context, r *backend.AllReduce) (backend.PreparedAllReduce, error) {
	p, in, out, failure := b.reduction(r)
	var mine place
	if failure == nil {
		mine.Live = b.live(p.form)
		if r.Parts == nil {
			mine.In, mine.Out = in.offset+r.InOffset, out.offset+r.OutOffset
		}
	}
	step := "preparing " + formOf(r)
	places, err := backend.Tell(ctx, b.group, step, mine, failure)
	if err != nil {
		return nil, err
	}
	if r.Name == symmetricForm {
		if err := alike(places); err != nil {
			return nil, err
		}
	}
	red, err := b.reducer(ctx, p.form, p.part, !slices.ContainsFunc(places, func(p place) bool { return !p.Live }))
	if err != nil {
		return nil, err
	}
	p.of = red
	if r.Name == symmetricForm {
		if err := b.registerSymmetric(ctx, red, in); err != nil {
			return nil, err
		}
		if err := b.registerSymmetric(ctx, red, out); err != nil {
			return nil, err
		}
		return p, nil
	}
	return p, b.warmUp(ctx, p)
}

// reduction checks what is asked for, and finds the allocations, which there are none of in parts.
func (b *Backend) reduction(r *backend.AllReduce) (p *reduction, in, out *allocation, err error) {
	if r.Name != plainForm && r.Name != symmetricForm {
		return nil, nil, nil, fmt.Errorf("backend %s has no all-reduce called %q (it has %s and %s): %w", Name, r.Name, plainForm,
			symmetricForm, errs.ErrUnsupported)
	}
	if r.Name == symmetricForm && b.isle != nil && !b.isle.whole() {
		return nil, nil, nil, fmt.Errorf("NCCL's symmetric kernels end at the host, and the ranks are on several (%s); use %s: %w", b.isle, plainForm, errs.ErrUnsupported)
	}
	p = &reduction{backend: b, form: formOf(r), beside: r.Beside}
	p.runs.New = func() any {
		x := &run{of: p}
		x.call = x.make
		return x
	}
	if r.Parts != nil {
		return p, nil, nil, b.inParts(p, r)
	}
	whole := backend.Call{Collective: r.Collective, Count: r.Count, Root: r.Root, DType: r.DType, Op: r.Op}
	p.part = nccl.Part{Ranks: b.group.Size(), Rank: b.group.Rank()}
	call, err := b.callOf(r.Name, &whole)
	if err != nil {
		return nil, nil, nil, err
	}
	if call.What.IsMessage() {
		return nil, nil, nil, fmt.Errorf("backend %s has no %s called %q but among other calls, in parts: %w", Name, r.Collective, r.Name, errs.ErrUnsupported)
	}
	if r.Name == symmetricForm && (r.Op != "sum" || call.Type != nccl.Float32 && call.Type != nccl.Float16 && call.Type != nccl.BFloat16) {
		return nil, nil, nil, fmt.Errorf("NCCL's symmetric kernels add f32, f16 and bf16, and not %s of %s; use %s: %w", r.Op,
			r.DType, plainForm, errs.ErrUnsupported)
	}
	if err := b.ready(); err != nil {
		return nil, nil, nil, err
	}
	if err := b.lib.Has(call.What); err != nil {
		return nil, nil, nil, err
	}
	for _, x := range []struct {
		from   backend.Allocation
		offset int64
		p      *uint64
		alloc  **allocation
	}{{r.In, r.InOffset, &call.Send, &in}, {r.Out, r.OutOffset, &call.Recv, &out}} {
		at := x.from.Ptr().Add(x.offset)
		*x.p = uint64(at)
		a, ok := x.from.(*allocation)
		if !ok || a.backend != b {
			return nil, nil, nil, fmt.Errorf("memory at %s is of another backend: %w", at, errs.ErrInvalid)
		}
		*x.alloc = a
	}
	if r.Name == symmetricForm && b.lib.Version() < evenElements && call.Type.Bytes() == 2 && call.Send%4 != 0 {
		return nil, nil, nil, fmt.Errorf("NCCL %s gives wrong results for %s at %s, which is not a multiple of 4 (loadPack in op128.h, right since %s); "+
			"begin the tensor at an even element, or use %s: %w", b.lib.Version(), r.DType, device.Ptr(call.Send), evenElements, plainForm, errs.ErrUnsupported)
	}
	p.calls = []nccl.Call{call}
	return p, in, out, nil
}

// callOf checks one collective of a form, and makes it NCCL's. Its addresses are left out, and its root is a rank of the group.
func (b *Backend) callOf(form string, c *backend.Call) (nccl.Call, error) {
	const op = "PrepareAllReduce"
	dtype, known := dataTypes[c.DType]
	if !known {
		return nccl.Call{}, fmt.Errorf("NCCL has no %s (it has %s): %w", c.DType,
			strings.Join(slices.Sorted(maps.Keys(dataTypes)), ", "), errs.ErrUnsupported)
	}
	operation, known := operations[c.Op]
	if !known {
		return nccl.Call{}, fmt.Errorf("NCCL has no operation %s (it has %s): %w", c.Op,
			strings.Join(slices.Sorted(maps.Keys(operations)), ", "), errs.ErrUnsupported)
	}
	if c.Count < 1 {
		return nccl.Call{}, errs.Invalid(op, "count", c.Count, "1 and more")
	}
	what, known := collectives[c.Collective]
	if !known || what != nccl.AllReduce && form != plainForm {
		return nccl.Call{}, fmt.Errorf("backend %s has no %s called %q: %w", Name, c.Collective, form, errs.ErrUnsupported)
	}
	if size := b.group.Size(); c.Root < 0 || c.Root >= size {
		return nccl.Call{}, errs.Invalid(op, "root", c.Root, fmt.Sprintf("0 to %d", size-1))
	}
	return nccl.Call{What: what, Count: c.Count, Type: dtype, Op: operation, Root: c.Root}, nil
}

// alike returns an error if the memory is not at the same offset of the window on all ranks, which NCCL's symmetric kernels assume.
func alike(places []place) error {
	return backend.Alike("offset in the window in bytes (use algorithm "+plainForm+")", places,
		func(p *place) string { return fmt.Sprintf("input %d, output %d", p.In, p.Out) })
}

// live reports whether this rank has a communicator of the form that was not given up.
func (b *Backend) live(form string) bool {
	b.mu.Lock()
	red, spare := b.reducers[form], b.spare[form]
	b.mu.Unlock()
	if red != nil {
		return red.comm.Handle() != 0 && red.given() == nil
	}
	return spare != nil && spare.Sound() == nil
}

// reducer returns the communicator of a form: the one that all ranks have, or a new one, instead of any that some rank has given up.
// Collective.
func (b *Backend) reducer(ctx context.Context, form string, part nccl.Part, live bool) (*reducer, error) {
	b.mu.Lock()
	red, comm := b.reducers[form], b.spare[form]
	if !live {
		delete(b.reducers, form)
		delete(b.spare, form)
	}
	b.mu.Unlock()
	if live && red != nil {
		return red, nil
	}
	if !live {
		b.giveUpOld(ctx, red, comm)
		comm = nil
	}
	began := time.Now()
	defer b.lib.Log()
	key := b.key("runs of " + form) // all ranks come here, whatever fails below
	kept := comm != nil             // from a group before, on all ranks
	var err error
	if !kept {
		within, end := b.together(ctx, "splitting the communicator")
		comm, err = b.comm.SplitBy(within, part, &nccl.Config{NoMulticast: b.whyNoMulticast() != ""})
		err = end(err)
	}
	if err == nil {
		red, err = b.newReducer(form, key, comm)
	}
	if err := b.group.Vote(ctx, "the communicator of "+form, b.named(err)); err != nil {
		if comm != nil && !kept {
			err = errors.Join(err, comm.Abort(context.WithoutCancel(ctx), err))
		}
		return nil, err
	}
	b.mu.Lock()
	delete(b.spare, form)
	b.reducers[form] = red
	b.mu.Unlock()
	b.watch()
	b.hear(red)
	b.log.Info("NCCL communicator ready", "for", form, "communicator", fmt.Sprintf("%#x", uintptr(comm.Handle())), "split", true,
		"kept", kept, "took", time.Since(began))
	return red, nil
}

// giveUpOld gives up this rank's reducer, or kept communicator, of a form that some rank has given up. There may be neither.
func (b *Backend) giveUpOld(ctx context.Context, red *reducer, kept *nccl.Comm) {
	within, cancel := b.bounded(context.WithoutCancel(ctx))
	defer cancel()
	cause := errors.New("another rank has given it up")
	var err error
	switch {
	case red != nil:
		red.tell(cause)
		if red.comm.Handle() != 0 {
			err = red.comm.Abort(within, cause)
		}
	case kept != nil && kept.Handle() != 0:
		err = kept.Abort(within, cause)
	}
	if err != nil && !errors.Is(err, errs.ErrClosed) {
		b.log.Warn("aborting an NCCL communicator failed", "error", err)
	}
}

// registerSymmetric makes the allocation a symmetric window of the reducer's communicator, unless it is one. Collective.
func (b *Backend) registerSymmetric(ctx context.Context, red *reducer, a *allocation) error {
	b.mu.Lock()
	have := red.windows[a.base] != nil
	b.mu.Unlock()
	if have {
		return nil
	}
	began := time.Now()
	defer b.lib.Log()
	within, end := b.together(ctx, "registering a symmetric window")
	w, err := red.comm.Register(within, uint64(a.base), a.span, nccl.WindowSymmetric)
	if late := b.givenUp(err, a.base); late != nil {
		// Nothing else can be done with the communicator, and the memory may be wanted back.
		err = errors.Join(err, b.giveUp(context.WithoutCancel(ctx), red, err), b.freeLate())
	}
	if err = end(err); err == nil && b.group.Size() > 1 {
		err = b.device.WithContext(func() error { return b.guard(w) })
	}
	if err := b.group.Vote(ctx, "a symmetric window for "+red.form, err); err != nil {
		if w != nil {
			err = errors.Join(err, b.remove(context.WithoutCancel(ctx), red.comm, w, a.base))
		}
		return err
	}
	b.mu.Lock()
	red.windows[a.base] = w
	b.mu.Unlock()
	b.log.Info("window registered", "communicator", fmt.Sprintf("%#x", uintptr(red.comm.Handle())), "address", a.base,
		"bytes", a.span,
		"window", fmt.Sprintf("%#x", w.Handle()), "symmetric", true, "milliseconds", float64(time.Since(began).Microseconds())/1e3)
	return nil
}

// forget deregisters the symmetric window of an allocation that is about to be freed.
func (b *Backend) forget(ctx context.Context, base device.Ptr) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), b.timeout)
	defer cancel()
	var err error
	for _, red := range b.allReducers() {
		b.mu.Lock()
		w := red.windows[base]
		delete(red.windows, base)
		b.mu.Unlock()
		if w != nil {
			err = errors.Join(err, b.remove(ctx, red.comm, w, base))
		}
	}
	return err
}

// warmUp runs the all-reduce once on memory of its own, of the same size, and waits for it. Collective.
func (b *Backend) warmUp(ctx context.Context, p *reduction) error {
	within, cancel := b.bounded(ctx)
	defer cancel()
	// It is the kind of memory that tensors have: freeing it does not wait for other work of the device, as cuMemFree does.
	var scratch uint64
	err := b.device.WithContext(func() (err error) {
		scratch, err = b.takeMemory(p.scratch())
		return err
	})
	free := func() error { return b.freeMemory(scratch) }
	if voted := b.group.Vote(ctx, "memory to try "+plainForm, err); voted != nil {
		if err == nil {
			voted = errors.Join(voted, free())
		}
		return fmt.Errorf("trying the all-reduce takes as much memory as it reduces: %w", voted)
	}
	stream := b.stream.(*cuda.Stream)
	first, end := b.together(ctx, "trying the all-reduce")
	_, err = nccl.Bound(first, "trying the all-reduce", func() (struct{}, error) {
		return struct{}{}, b.device.WithContext(func() error {
			return p.enqueue(uintptr(stream.Handle()), p.tried(scratch))
		})
	})
	late := b.givenUp(err, 0)
	err = end(err)
	if err = b.group.Vote(ctx, "trying "+plainForm, err); err == nil {
		if err = stream.Synchronize(within); err != nil {
			err = b.runFailed(p.of, err) // the others may wait for this rank's part
		}
		err = b.group.Vote(ctx, "having tried "+plainForm, err)
	}
	if err != nil {
		// The kernels of some ranks wait for those of others, so they are ended. If that fails, the memory is freed with the device.
		err = errors.Join(b.named(err), b.giveUp(context.WithoutCancel(ctx), p.of, err))
		if !b.idle() {
			return err
		}
		if late != nil && !late.over() {
			b.keepFor(late, p.scratch(), free)
			return err
		}
	}
	return errors.Join(err, free())
}

// room is how much memory of its own a call can be tried on: the message, and the output behind it, if that has to be apart; and where the output is.
func (p *reduction) room(c *nccl.Call) (bytes, out int64) {
	const align = 256
	n := c.Count * c.Type.Bytes()
	if c.What == nccl.AllReduce || c.What.IsMessage() {
		return (n + align - 1) / align * align, 0
	}
	if c.What == nccl.AllGather || c.What == nccl.ReduceScatter || c.What == nccl.AllToAll {
		n *= int64(p.part.Ranks)
	}
	out = (n + align - 1) / align * align
	return 2 * out, out
}

// scratch is the size of memory of its own that it can be tried on.
func (p *reduction) scratch() (bytes int64) {
	for i := range p.calls {
		n, _ := p.room(&p.calls[i])
		bytes += n
	}
	return bytes
}

// tried is the calls on that memory.
func (p *reduction) tried(scratch uint64) []nccl.Call {
	calls := slices.Clone(p.calls)
	for i := range calls {
		n, out := p.room(&calls[i])
		calls[i].Send, calls[i].Recv = scratch, scratch+uint64(out)
		scratch += uint64(n)
	}
	return calls
}

// Enqueue enqueues one run on s, or records it.
func (p *reduction) Enqueue(s device.Stream) error {
	stream, err := p.streamOf("Enqueue", s)
	if err != nil {
		return err
	}
	handle := stream.Handle()
	if handle == 0 {
		return fmt.Errorf("Enqueue: the stream is %w", errs.ErrClosed)
	}
	if err := p.of.given(); err != nil {
		return fmt.Errorf("Enqueue: %w", err)
	}
	// The stream is noted before the run, so that it watches when the run may be given up, and again after it, because a Synchronize in between may
	// have found the stream idle with nothing to report.
	p.watch(stream)
	p.of.used.Store(true)
	if err := p.of.given(); err != nil { // else whoever gives it up now finds that it is used
		return fmt.Errorf("Enqueue: %w", err)
	}
	x := p.runs.Get().(*run)
	x.stream = uintptr(handle)
	err = p.backend.device.WithContext(x.call)
	p.watch(stream)
	p.runs.Put(x)
	if err != nil {
		return p.backend.runFailed(p.of, err)
	}
	return nil
}

// streamOf is a stream of this backend's device.
func (p *reduction) streamOf(call string, s device.Stream) (*cuda.Stream, error) {
	stream, ok := s.(*cuda.Stream)
	if !ok || stream.Device() != device.Device(p.backend.device) {
		return nil, errs.Invalid(call, "stream", fmt.Sprintf("%T of %s", s, s.Device().Name()), "a stream of "+p.backend.device.Name())
	}
	return stream, nil
}

// watch makes the stream of a run tell that it was given up, unless others do.
func (p *reduction) watch(s *cuda.Stream) {
	if !p.beside {
		p.of.fault.Watch(s)
	}
}

// Watch makes a stream tell of a run that was given up on another one.
func (p *reduction) Watch(s device.Stream) error {
	stream, err := p.streamOf("Watch", s)
	if err == nil {
		err = p.of.given()
	}
	if err == nil {
		p.of.fault.Watch(stream)
	}
	return err
}

// runFailed gives the communicator up after a run that this rank could not enqueue: the kernels of the other ranks wait for it, and nothing of NCCL's
// tells them. So they are told, and give it up too.
func (b *Backend) runFailed(red *reducer, failure error) error {
	if errors.Is(failure, errs.ErrClosed) { // of the device, or the communicator was given up already
		return failure
	}
	failure = b.explain(context.Background(), failure)
	return errors.Join(failure, b.giveUpTogether(red, failure))
}

// giveUpTogether gives the communicator up, and tells the other ranks, which wait for this one's part in a run and then give it up too.
func (b *Backend) giveUpTogether(red *reducer, failure error) error {
	if red.key != "" && b.group.Err() == nil {
		b.spread(context.Background(), red.key, failure)
	}
	return b.giveUp(context.Background(), red, failure)
}

func (x *run) make() error { return x.of.enqueue(x.stream, x.of.calls) }

// enqueue enqueues one run, with the device's context current.
func (p *reduction) enqueue(stream uintptr, calls []nccl.Call) error {
	if len(calls) == 1 {
		c := &calls[0]
		return p.of.comm.Enqueue(c.What, stream, c.Send, c.Recv, c.Count, c.Type, c.Op, c.Root)
	}
	return p.of.comm.EnqueueAll(stream, calls)
}

// Close releases nothing of NCCL: the communicator and the windows stay for the next plan.
func (p *reduction) Close() error {
	p.backend.mu.Lock()
	defer p.backend.mu.Unlock()
	delete(p.backend.asked, p)
	return nil
}

func (b *Backend) allReducers() []*reducer {
	b.mu.Lock()
	defer b.mu.Unlock()
	var all []*reducer
	for _, form := range slices.Sorted(maps.Keys(b.reducers)) {
		all = append(all, b.reducers[form])
	}
	return all
}

// closeReducers ends the communicators of all forms that were not kept; nothing is a window of theirs any more.
func (b *Backend) closeReducers(ctx context.Context) error {
	var err error
	forms := b.takeForms()
	for _, form := range slices.Sorted(maps.Keys(forms)) {
		err = errors.Join(err, b.endComm(ctx, forms[form]))
	}
	b.mu.Lock()
	words := b.words
	b.words = nil
	b.mu.Unlock()
	for _, word := range words {
		err = errors.Join(err, word.Close())
	}
	return err
}

// giveUpAll gives up the communicators of all forms, at once: NCCL's abort waits for all work of the GPU, also for kernels of another communicator that wait for a rank
// that is lost, and those end when theirs is aborted.
func (b *Backend) giveUpAll(ctx context.Context, cause error) error {
	all := b.allReducers()
	failed := make([]error, len(all))
	var ended sync.WaitGroup
	for i, red := range all {
		ended.Go(func() { failed[i] = b.giveUp(ctx, red, cause) })
	}
	ended.Wait()
	return errors.Join(failed...)
}

// giveUp ends a communicator and the kernels that run on it. Every stream with a run after which it was not synchronized reports it, and no other run
// is accepted.
func (b *Backend) giveUp(ctx context.Context, red *reducer, cause error) error {
	// The word is written before any kernel can end, so that a stream that finds its work ended also finds the word.
	if !red.tell(cause) {
		return nil
	}
	return b.endRuns(ctx, red, cause)
}

// giveUpBeside is giveUpTogether for who must not block, as work of the CPU: nothing is enqueued on the communicator from now on, and a goroutine of the
// backend tells the other ranks and aborts. Both may take long: the goroutine that does all work of the CPU for this device would be gone meanwhile, and
// NCCL's abort may even wait for streams that wait for such work.
func (b *Backend) giveUpBeside(red *reducer, failure error) {
	if errors.Is(failure, errs.ErrClosed) || !red.tell(failure) {
		return
	}
	end := func() {
		if red.key != "" && b.group.Err() == nil {
			b.spread(context.Background(), red.key, failure)
		}
		if err := b.endRuns(context.Background(), red, failure); err != nil {
			b.log.Warn("aborting an NCCL communicator failed", "form", red.form, "error", err)
		}
	}
	b.mu.Lock()
	watched := b.watched != nil
	if watched {
		b.watching.Go(end)
	}
	b.mu.Unlock()
	if !watched { // the backend is being closed, and waits for nothing of its own any more
		end()
	}
}

// endRuns aborts a communicator that is given up, with the kernels that run on it.
func (b *Backend) endRuns(ctx context.Context, red *reducer, cause error) error {
	if red.form == symmetricForm && b.lib.Version() < endableKernels && !b.idle() {
		b.log.Warn("a kernel of NCCL's may wait for a rank that is lost, and asks nobody: end the process, and use NCCL 2.29.7 or newer", "form", red.form)
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, b.timeout)
	defer cancel()
	if err := red.comm.Abort(ctx, cause); err != nil && !errors.Is(err, errs.ErrClosed) {
		return err
	}
	return nil
}

// idle reports whether the device ends its work within a short time.
func (b *Backend) idle() bool {
	ctx, cancel := context.WithTimeout(context.Background(), 500*time.Millisecond)
	defer cancel()
	return b.device.Synchronize(ctx) == nil
}

// checkEvery is how often NCCL is asked for asynchronous errors.
const checkEvery = 250 * time.Millisecond

// hear begins to wait for word that a run of the reducer has failed on another rank, and gives it up then. It ends with the watching.
func (b *Backend) hear(red *reducer) {
	b.mu.Lock()
	defer b.mu.Unlock()
	ctx := b.watched
	if ctx == nil || red.key == "" {
		return
	}
	b.watching.Go(func() {
		word, ok := b.listen(ctx, red.key)
		if !ok || word.Rank == b.group.Rank() {
			return
		}
		if err := b.giveUp(context.Background(), red, word.failure("running "+red.form)); err != nil {
			b.log.Warn("aborting an NCCL communicator failed", "form", red.form, "error", err)
		}
	})
}

// watch begins to watch the communicators of the library's own all-reduces. When a member of the group is lost, or NCCL reports an error, they are
// aborted, so that no kernel waits for ever; an error of NCCL's may be known to one rank alone, which tells the others.
func (b *Backend) watch() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.watched != nil {
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	b.watched, b.unwatch = ctx, cancel
	b.watching.Go(func() {
		tick := time.NewTicker(checkEvery)
		defer tick.Stop()
		gone := map[*reducer]time.Time{} // since when NCCL has said that some rank is
		for {
			select {
			case <-ctx.Done():
				return
			case <-b.group.Lost():
				if err := b.giveUpAll(context.Background(), b.group.Err()); err != nil {
					b.log.Warn("aborting NCCL's communicators failed", "error", err)
				}
				return
			case <-tick.C:
				b.askAll()
				for _, red := range b.allReducers() {
					if red.given() != nil {
						continue
					}
					if err := red.comm.Err(); err != nil && !errors.Is(err, errs.ErrClosed) {
						if b.unnamed(err) && b.lossTime() >= checkEvery { // the loss of a member ends all of them, and says of whom
							if gone[red].IsZero() {
								gone[red] = time.Now()
							}
							if time.Since(gone[red]) < b.lossTime() {
								continue
							}
						}
						b.log.Warn("NCCL reports an error and its communicator is aborted on all ranks", "form", red.form, "error", err)
						b.giveUpBeside(red, b.named(err)) // NCCL's abort may wait for kernels of another communicator, which is looked at meanwhile
					}
				}
			}
		}
	})
}

// stopWatching ends the watching.
func (b *Backend) stopWatching() {
	b.mu.Lock()
	end := b.unwatch
	b.watched, b.unwatch = nil, nil
	b.mu.Unlock()
	if end != nil {
		end()
		b.watching.Wait()
	}
}
