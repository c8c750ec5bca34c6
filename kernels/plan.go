package kernels

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// The errors of this package, for errors.Is.
var (
	ErrUnsupported  = errs.ErrUnsupported  // this device cannot do it
	ErrNotReachable = errs.ErrNotReachable // a peer's memory has no address in this process
	ErrMismatch     = errs.ErrMismatch     // the ranks did not ask for the same thing
	ErrPeerLost     = errs.ErrPeerLost     // another rank has died or left
	ErrClosed       = errs.ErrClosed       // the plan or its tensor was closed before
	ErrInvalid      = errs.ErrInvalid      // an argument outside of what is allowed
	ErrNoRendezvous = errs.ErrNoRendezvous // a tensor has had no rendezvous yet
	ErrTwoStreams   = errs.ErrTwoStreams   // a plan runs on one stream at a time
	ErrNoRoom       = errs.ErrNoRoom       // see RoomError
)

// Plan is a collective that was prepared once and can be run many times. One run follows the other: a plan may move to
// another stream only when its work on the last one has ended (ErrTwoStreams). Different plans do not disturb each other: the
// kernels of any two, on two streams and in whatever order, run at the same time and leave room for others; of more streams, see
// [RoomError].
type Plan struct {
	name      string
	algorithm Algorithm
	device    device.Device
	in, out   tensor.SymmetricTensor
	channel   *memory.Workspace
	work      work
	lives     []life // that a recorded run asks for when it runs

	tenant *tenant // what its kernels take of the device while they wait for peers
	closed atomic.Bool
	failed atomic.Pointer[error]
	stream atomic.Pointer[device.Stream] // of the last Run that was not recorded
}

// form is a plan before it has its channel.
type form interface {
	// purpose says what else, besides the plan's name and its memory, the ranks must agree on.
	purpose() string
	// channelBytes is the size of the channel.
	channelBytes() int64
	// prepare makes the plan's work once the channel is there. Every rank is in it at the same time.
	prepare(ctx context.Context, p *Plan, op Op, firstEpoch uint32) (work, error)
}

// reachable reports whether every peer's copy of the tensors has an address in this process, as far as it is known.
func reachable(ts ...tensor.SymmetricTensor) bool {
	for _, t := range ts {
		for r := range t.WorldSize() {
			if _, err := t.Remote(r); errors.Is(err, ErrNotReachable) {
				return false
			}
		}
	}
	return true
}

// negotiated is a form that depends on what all ranks can do.
type negotiated interface {
	form
	// offer says what this rank can do. It is local.
	offer() ([]byte, error)
	// agree gives the form for what all ranks offer, the same on every rank.
	agree(p *Plan, offers []memory.WorkspaceOffer) (form, error)
}

// newForm gives the form of a plan whose request was checked, or some form if it is wrong.
func newForm(p *Plan, op Op, inPlace bool, maxBlocks int) form {
	if p.algorithm.Backend() != "" {
		return libraryForm{}
	}
	if p.algorithm == Transfers {
		return newTransferForm(p)
	}
	if p.device.Kind() != device.CUDA {
		return hostLayout{size: p.in.WorldSize(), bytes: p.in.Bytes(), staged: p.algorithm == OneShot}
	}
	return newCUDAForm(p, op, inPlace, maxBlocks)
}

// work is what a plan enqueues, on one kind of device.
type work interface {
	// enqueue enqueues one run on s, or records it. It allocates nothing.
	enqueue(s device.Stream, recorded bool) error
	// settled reports whether all runs that were enqueued, those of graphs not counted, have ended.
	settled() (bool, error)
	// close gives back what the work holds besides the channel. The device has nothing left to do for it.
	close() error
}

// AllReduceOptions sets what NewAllReduce makes. Nil or zero values mean the defaults.
type AllReduceOptions struct {
	// Out takes the result, of the same dtype and number of elements as the input, with its rendezvous behind it; it must
	// not overlap the input in part. Nil: in place.
	Out tensor.SymmetricTensor
	// Algorithm is the form; Auto by default. Of messages of 1 GiB and more between 2 to 4 GPUs Auto takes Transfers, which copy engines
	// carry out faster than a kernel does, with up to 768 MiB of workspace on each rank for each plan that is open; where that cannot be
	// had, or with TwoShotFlow, a kernel does it with some 130 MiB, which the memory keeps for the next plans.
	Algorithm Algorithm
	// MaxBlocks is the most blocks that a kernel of the plan may take on a CUDA device, to leave more room for other work and
	// for plans on other streams; the same on every rank. 0, the default, is as many as are of use, but at most what leaves room
	// for a second plan like it. Ignored by forms that are no such kernel.
	MaxBlocks int
	// FirstEpoch is the count that runs begin at. It exists to test that counting wraps around; every rank gives the same.
	FirstEpoch uint32
}

// NewAllReduce prepares an all-reduce of t over its group: after a run, every element of the output is the combination by op
// of that element on all ranks. Every count of elements works; 0 elements is no work. Collective: all ranks come with the
// same dtype, number of elements, op and options (ErrMismatch with everybody's value if not), and t must have had its
// rendezvous. It blocks until all ranks have come. Close the plan.
func NewAllReduce(ctx context.Context, t tensor.SymmetricTensor, op Op, opts *AllReduceOptions) (*Plan, error) {
	if err := errors.Join(errs.Given("NewAllReduce", "ctx", ctx, "a context"), errs.Given("NewAllReduce", "t", t, "a tensor")); err != nil {
		return nil, err
	}
	if opts == nil {
		opts = &AllReduceOptions{}
	}
	out := t
	if !errs.IsNil(opts.Out) {
		out = opts.Out
	}
	asked := opts.Algorithm
	if asked == Auto && (t.Bytes() == 0 || !reachable(t, out)) {
		asked = Transfers // without elements there is no address to ask for, and nothing to reach
	}
	if asked == Auto && copyEnginesWin(t.Device().Kind(), t.Bytes(), t.WorldSize()) {
		p, err := newAllReduce(ctx, Transfers, t, out, op, opts)
		if _, large := errors.AsType[*memory.WorkspaceError](err); !large {
			return p, err
		}
		t.Memory().Logger().Info("an all-reduce by transfers needs more workspace than there is memory; a kernel does it", "bytes", t.Bytes(), "error", err)
	}
	chosen := choose(asked, t.Device().Kind(), t.DType(), op, t.Bytes(), t.WorldSize())
	return newAllReduce(ctx, chosen, t, out, op, opts)
}

// newAllReduce makes a plan with the form that was chosen.
func newAllReduce(ctx context.Context, chosen Algorithm, t, out tensor.SymmetricTensor, op Op, opts *AllReduceOptions) (*Plan, error) {
	p := &Plan{device: t.Device(), in: t, out: out, algorithm: chosen}
	inPlace := p.in.Local().Ptr() == p.out.Local().Ptr()
	p.name = fmt.Sprintf("all-reduce %s of %d %s, %s", op, t.NumElements(), t.DType(), p.algorithm)

	failure := checkAllReduce(p, op, inPlace, opts)
	form := newForm(p, op, inPlace, opts.MaxBlocks)
	request := memory.WorkspaceRequest{
		Purpose: fmt.Sprintf("%s, from %s to %s, at most %d blocks, first epoch %d%s", p.name, place(t), place(out), opts.MaxBlocks, opts.FirstEpoch, form.purpose()),
	}
	n, negotiate := form.(negotiated)
	if negotiate && failure == nil {
		request.Offer, failure = n.offer()
	}
	request.Failure = failure
	request.Size = func(offers []memory.WorkspaceOffer) (_ int64, err error) {
		if negotiate {
			if form, err = n.agree(p, offers); err != nil {
				return 0, err
			}
		}
		return form.channelBytes(), nil
	}
	ch, err := t.Memory().NewWorkspace(ctx, request)
	if err != nil {
		return nil, fmt.Errorf("preparing %s: %w", p.name, err)
	}
	p.channel = ch
	p.lives = p.livesOn()
	p.work, err = form.prepare(ctx, p, op, opts.FirstEpoch)
	// Nobody may run before every rank's flags are set.
	if err := t.Memory().Group().Vote(ctx, "plan", err); err != nil {
		if p.work != nil {
			err = errors.Join(err, p.work.close())
		}
		return nil, fmt.Errorf("preparing %s: %w", p.name, errors.Join(err, ch.Close(ctx)))
	}
	return p, nil
}

// place names the memory of a tensor in a way that is the same on every rank.
func place(t tensor.SymmetricTensor) string {
	if t.Bytes() == 0 {
		return "nothing"
	}
	w, offset, err := t.Window()
	if err != nil {
		return "memory without a window" // which is a failure of this rank's
	}
	return fmt.Sprintf("byte %d of window %d", offset, w.Number())
}

// checkAllReduce says what is wrong with this rank's request.
func checkAllReduce(p *Plan, op Op, inPlace bool, opts *AllReduceOptions) error {
	const name = "NewAllReduce"
	if !op.Valid() {
		return errs.Invalid(name, "op", op, fmt.Sprint(Ops()))
	}
	if p.algorithm < Auto || p.algorithm >= algorithms {
		return errs.Invalid(name, "Algorithm", p.algorithm, fmt.Sprint(append([]Algorithm{Auto}, Algorithms(p.device.Kind())...)))
	}
	if opts.MaxBlocks < 0 {
		return errs.Invalid(name, "MaxBlocks", opts.MaxBlocks, "0 for the default, or more")
	}
	have := p.in.Memory().Backend().Name()
	if b := p.algorithm.Backend(); b != "" && b != have {
		return fmt.Errorf("%s is the all-reduce of the library below backend %s, and this memory is of backend %s: %w", p.algorithm, b, have, ErrUnsupported)
	}
	if !Supported(p.device.Kind(), p.algorithm, p.in.DType(), op, p.in.WorldSize()) {
		return fmt.Errorf("there is no kernel for %s on a %s device: %w", p.name, p.device.Kind(), ErrUnsupported)
	}
	for _, t := range []tensor.SymmetricTensor{p.in, p.out} {
		if err := t.Err(); err != nil {
			return err
		}
		for r := range t.WorldSize() {
			if _, err := t.Remote(r); err != nil && (p.algorithm.NeedsPeerPointers() || r == t.Rank()) {
				return err
			}
		}
	}
	switch {
	case p.out.Memory() != p.in.Memory():
		return errs.Invalid(name, "Out", "a tensor of another group", "a tensor of the same memory as the input")
	case p.out.DType() != p.in.DType():
		return errs.Invalid(name, "Out.DType", p.out.DType(), p.in.DType().String()+", the input's")
	case p.out.NumElements() != p.in.NumElements():
		return errs.Invalid(name, "Out.NumElements", p.out.NumElements(), fmt.Sprintf("%d, the input's", p.in.NumElements()))
	}
	a, b, n := p.in.Local().Ptr(), p.out.Local().Ptr(), device.Ptr(p.in.Bytes())
	if !inPlace && a < b+n && b < a+n {
		return errs.Invalid(name, "Out", fmt.Sprintf("%d bytes at %s", n, b), fmt.Sprintf("memory apart from the input, %d bytes at %s, or just the input", n, a))
	}
	return nil
}

// Algorithm is the form that was chosen.
func (p *Plan) Algorithm() Algorithm { return p.algorithm }

// Bytes is the size of the message, one rank's input.
func (p *Plan) Bytes() int64 { return p.in.Bytes() }

// String describes the plan.
func (p *Plan) String() string { return p.name }

// Run enqueues one run on s, or records it if s is capturing, and returns at once. Every rank runs the plan equally often.
// It allocates nothing. After a run has failed (Err), ErrClosed, ErrPeerLost or that failure. ErrTwoStreams while the plan runs on
// another stream, and a [*RoomError] where it would not fit the device beside the plans on others.
func (p *Plan) Run(s device.Stream) error {
	if errs.IsNil(s) {
		return errs.Invalid("Run", "stream", nil, "a stream of the plan's device "+p.device.Name())
	}
	if err := p.usable(); err != nil {
		return fmt.Errorf("running %s: %w", p.name, err)
	}
	if s.Device() != p.device {
		return errs.Invalid("Run", "stream", fmt.Sprintf("a stream of %s", s.Device().Name()), "a stream of the plan's device "+p.device.Name())
	}
	recorded := s.Capturing()
	if !recorded {
		if last := p.stream.Load(); last == nil || *last != s {
			if err := p.move(s); err != nil {
				return fmt.Errorf("running %s: %w", p.name, err)
			}
		}
	}
	if err := p.tenant.move(s); err != nil {
		return fmt.Errorf("running %s: %w", p.name, err)
	}
	if err := p.work.enqueue(s, recorded); err != nil {
		return fmt.Errorf("running %s: %w", p.name, err)
	}
	return nil
}

// move makes s the stream that the plan runs on, if no run is under way on another.
func (p *Plan) move(s device.Stream) error {
	if p.stream.Load() != nil {
		settled, err := p.work.settled()
		if err != nil {
			return err
		}
		if !settled {
			return fmt.Errorf("synchronize the stream it runs on first: %w", ErrTwoStreams)
		}
	}
	p.stream.Store(&s)
	return nil
}

func (p *Plan) usable() error {
	if p.closed.Load() {
		return fmt.Errorf("plan: %w", ErrClosed)
	}
	if err := p.Err(); err != nil {
		return err
	}
	if err := p.in.Err(); err != nil || p.out == p.in {
		return err
	}
	return p.out.Err()
}

// Err is the error of the first run that failed, or nil. Such a plan cannot go on: the ranks no longer agree how often it
// has run.
func (p *Plan) Err() error {
	if err := p.failed.Load(); err != nil {
		return *err
	}
	return nil
}

// Close gives the plan back, and its workspace if that is large and no other plan has any of it. Collective: it waits for this rank's
// device and for all ranks. If ctx ends while the device still works, what the plan's kernels use stays until the rank closes. Close
// graphs that hold the plan first: where the CPU runs them, a launch afterwards is ErrClosed in its stream; a GPU writes into workspace that
// may be another plan's. Closing twice is ErrClosed.
func (p *Plan) Close(ctx context.Context) error {
	if err := errs.Given("Close", "ctx", ctx, "a context"); err != nil {
		return err
	}
	if p.closed.Swap(true) {
		return fmt.Errorf("closing %s: %w", p.name, ErrClosed)
	}
	busy := p.device.Synchronize(ctx)
	if busy == nil {
		p.tenant.leave()
	}
	err := p.channel.Close(ctx) // in any case: the other ranks are there, or will be
	if busy == nil {
		err = errors.Join(err, p.work.close())
	}
	err = errors.Join(err, p.in.Memory().TrimWorkspace(ctx))
	if err = errors.Join(busy, err); err != nil {
		return fmt.Errorf("closing %s: %w", p.name, err)
	}
	return nil
}

func (p *Plan) fail(err error) error {
	p.failed.CompareAndSwap(nil, &err)
	return err
}
