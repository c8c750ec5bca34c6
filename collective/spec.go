package collective

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// Spec describes a collective. Every rank gives the same; functions are not compared, and have to do the same.
//
// Of CUDA, Host and Program at least one is given. [New] takes the first that the memory can have: CUDA on a CUDA device and Host on the
// host device, where this process has addresses of all peers' memory, and else Program.
type Spec struct {
	// Name is what errors call the collective; not empty.
	Name string
	// Tensors are the symmetric tensors that the collective works on: of the memory that the plan is made on, and with their rendezvous
	// behind them. Ranks can reach each other's; a run after one was closed is ErrClosed. One may be in the list several times. Where in the
	// memory each lies, its dtype and its shape are the same on every rank.
	Tensors []tensor.SymmetricTensor
	// Parameters is whatever else has to be the same on every rank, as text that can be read in an error: "root 3, tiles of 64".
	Parameters string
	// Workspace is the size in bytes of the symmetric memory that the plan has for itself. It begins as zeros.
	Workspace int64
	// Multicast says that the plan needs multicast addresses of the tensors. It is ErrUnsupported, with the reason, where there are none.
	Multicast bool
	// Exclusive says that kernels of the plan that wait for peers may take all of a CUDA device but its reserve, where without it they take at most half of
	// that, and so leave room for a second plan. Run is a [*RoomError] while a plan on another stream takes more than half of the reserve, as it then is for that
	// plan. It changes nothing where no kernel waits for peers.
	Exclusive bool

	// CUDA is the collective as a kernel for GPUs.
	CUDA *Kernel
	// Host returns the collective as a kernel for the CPU, when a plan is made. It makes no collective call of the memory. Its error is every rank's.
	Host func(a *Addresses) (HostKernel, error)
	// Program is the collective as steps.
	Program *Program

	// Failure is why this rank already knows that it cannot take part, such as an argument that it must refuse. Every rank gets an error
	// that names this rank, and nothing was made.
	Failure error
	// FirstEpoch is the count of runs that the plan begins at. It exists to test that counting wraps around.
	FirstEpoch uint32
}

// programKernels is the kernels of the Program, if there is one.
func (s *Spec) programKernels() []*Kernel {
	if s.Program == nil {
		return nil
	}
	return s.Program.Kernels
}

// form is a Spec as one kind of device carries it out, before there is workspace.
type form interface {
	// describe says what else the ranks agree on.
	describe() string
	// offer says what this rank can do. Local.
	offer() ([]byte, error)
	// settle decides from what all ranks offer, and so alike on each, how the plan runs, and returns the size of the workspace in bytes.
	settle(offers []memory.WorkspaceOffer) (bytes int64, err error)
	// launch says how the plan was settled to run, the same on every rank.
	launch() string
	// dataAt is where in the workspace the Spec's begins, once it is settled.
	dataAt() int64
	// prepare makes the plan's work. Every rank is in it at the same time. With an error it gives what there is of the work, if anything has to be closed behind the workspace.
	prepare(ctx context.Context, a *Addresses) (work, error)
}

// New prepares a collective on memory m. Collective: all ranks come with the same Spec (ErrMismatch with everybody's value if not). It blocks
// until all ranks have come. Close the plan.
//
// The first plan with an image loads it, which waits for what the GPU has under way. So where runs of other plans are enqueued that wait for
// peers, all ranks have to have enqueued them: make plans before, or at the same place between them on every rank.
//
// ErrInvalid for what the Spec must not have, an image without the function, and parameters that the kernel does not take; ErrNoRendezvous
// for a tensor that had none; ErrNotSymmetric for a tensor of another memory; ErrNotReachable where the peers' memory has no address in this
// process and there is no Program; ErrUnsupported where there is no form for the kind of device, or an image is not for this device; ErrClosed
// for a tensor or memory that was closed. A rank's failure is every rank's error, which names the rank. Where the memory has not enough
// workspace and cannot get more, every rank gets a [*memory.WorkspaceError]. If ctx ends while an earlier collective call of the memory is under way, a
// [*memory.TurnError]; if it ends half way, New gives back what it has taken, for which it waits up to 5 seconds for the others, unless
// all ranks have made the plan by then: so all have it, or none has.
func New(ctx context.Context, m *memory.Memory, spec Spec) (*Plan, error) {
	const call = "New"
	err := errs.Given(call, "m", m, "a memory")
	if err == nil && m.Group() == nil {
		err = errs.Invalid(call, "m", "the zero Memory", "one that New of package memory gave")
	}
	if err != nil {
		return nil, errors.Join(errs.Given(call, "ctx", ctx, "a context"), err)
	}
	ctx, spec.Failure = errs.WithContext(call, ctx, spec.Failure)
	spec.Tensors = slices.Clone(spec.Tensors)
	p := &Plan{name: spec.Name, memory: m, device: m.Device(), rank: m.Group().Rank(), size: m.Group().Size(), spec: spec}
	failure := spec.Failure
	if failure == nil {
		failure = p.check()
	}
	var form form
	if failure == nil {
		if form = p.form(); form == nil {
			failure = p.noForm()
		}
	}
	err = m.InTurn(ctx, "preparing "+p.name, func(ctx context.Context, gaveUp error) error {
		return p.prepare(ctx, form, cmp.Or(gaveUp, failure))
	})
	if err != nil {
		return nil, fmt.Errorf("preparing %s: %w", p.name, err)
	}
	return p, nil
}

// prepare makes the plan in its form. Collective, as one call of the memory: what another did between its steps on one rank, it might do before or behind them on another.
func (p *Plan) prepare(ctx context.Context, form form, failure error) error {
	m := p.memory
	if failure == nil {
		failure = p.check() // an earlier call, which this one has waited for, may have closed the memory, or somebody a tensor
	}
	request := memory.WorkspaceRequest{Failure: failure, Purpose: p.purpose(form, failure)}
	if failure == nil {
		request.Offer, request.Failure = form.offer()
	}
	request.Size = func(offers []memory.WorkspaceOffer) (int64, error) { return form.settle(offers) }
	workspace, err := m.NewWorkspace(ctx, request)
	if err != nil {
		return err
	}
	p.workspace = workspace
	p.liveOn()
	a := &Addresses{plan: p, dataAt: form.dataAt()}
	err = a.enableMulticast(ctx)
	if err == nil {
		p.work, err = form.prepare(ctx, a)
	}
	if a.err != nil && !errors.Is(err, a.err) {
		err = errors.Join(err, a.err)
	}
	// Nobody may run before every rank's flags are set, nor where Fit was not the same function on every rank.
	if err = m.Group().Vote(ctx, "plan"+form.launch(), err); err == nil {
		return nil
	}
	ctx, cancel := toGiveBack(ctx)
	defer cancel()
	// The workspace first: others may have been told that all have the plan, and signal here. Where that is so, it stays, and so do the signals on it.
	err = errors.Join(&agreedError{err}, workspace.Close(ctx))
	if p.work != nil {
		err = errors.Join(err, p.work.close())
	}
	return errors.Join(err, p.held.close(p.device), m.TrimWorkspace(ctx))
}

// agreedError is the failure of a plan that all ranks had come to with the same Spec: no rank had failed before. It says only what it wraps.
type agreedError struct{ error }

// Agreed says so. Package kernels asks for it: where ranks have come with the same, all of them may try something else.
func (e *agreedError) Agreed() {}

// Unwrap returns the failure.
func (e *agreedError) Unwrap() error { return e.error }

// giveBack is how long a rank whose context has ended waits for the others with what has to be given back together.
const giveBack = 5 * time.Second

// toGiveBack is ctx or, if that has ended, one that lasts for as long as it takes to give back what was taken: a rank that does not come to that would keep it on all.
func toGiveBack(ctx context.Context) (context.Context, context.CancelFunc) {
	if ctx.Err() == nil {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(context.WithoutCancel(ctx), giveBack)
}

// maxWorkspaceBytes is as much workspace as a memory gives, far above what any plan needs.
const maxWorkspaceBytes = 1 << 40

// check says what is wrong with this rank's Spec.
func (p *Plan) check() error {
	const call = "New"
	s := &p.spec
	switch {
	case s.Name == "":
		return errs.Invalid(call, "Name", `""`, "a name for errors")
	case s.Workspace < 0 || s.Workspace > maxWorkspaceBytes:
		return errs.Invalid(call, "Workspace", s.Workspace, fmt.Sprintf("0 to %d bytes", int64(maxWorkspaceBytes)))
	case s.CUDA == nil && s.Host == nil && s.Program == nil:
		return errs.Invalid(call, "Spec", "none of CUDA, Host and Program", "at least one")
	}
	for i, t := range s.Tensors {
		if errs.IsNil(t) {
			return errs.Invalid(call, fmt.Sprintf("Tensors[%d]", i), nil, "a tensor")
		}
		if err := t.Err(); err != nil {
			return err
		}
		if t.Memory() != p.memory {
			return fmt.Errorf("%s is of another memory than the plan's: %w", t, errs.ErrNotSymmetric)
		}
		if t.Bytes() == 0 {
			continue
		}
		if _, _, err := t.Window(); err != nil {
			return err
		}
	}
	return nil
}

// form chooses how the plan runs; nil if there is no way, or the Spec is wrong.
func (p *Plan) form() form {
	s := &p.spec
	reached := p.unreachable() == nil
	switch {
	case reached && s.CUDA != nil && p.device.Kind() == device.CUDA:
		return &kernelForm{plan: p, kernel: s.CUDA, name: "CUDA"}
	case reached && s.Host != nil && p.device.Kind() == device.Host:
		return hostForm{plan: p}
	case s.Program != nil:
		if s.Program.Workspace != 0 {
			s.Workspace = s.Program.Workspace
		}
		return &programForm{plan: p}
	}
	return nil
}

// noForm says why there is none.
func (p *Plan) noForm() error {
	s := &p.spec
	if err := p.unreachable(); err != nil {
		return fmt.Errorf("%s has no Program, which does without addresses of peers: %w", p.name, err)
	}
	var has []string
	if s.CUDA != nil {
		has = append(has, device.CUDA.String())
	}
	if s.Host != nil {
		has = append(has, device.Host.String())
	}
	return fmt.Errorf("%s has a kernel for %s devices only, and %s is a %s device: %w", p.name, strings.Join(has, " and "), p.device.Name(), p.device.Kind(), errs.ErrUnsupported)
}

// unreachable is why this process has no addresses of its peers' memory, or nil.
func (p *Plan) unreachable() error {
	for _, t := range p.spec.Tensors {
		if errs.IsNil(t) {
			continue
		}
		for r := range t.WorldSize() {
			if _, err := t.Remote(r); errors.Is(err, errs.ErrNotReachable) {
				return err
			}
		}
	}
	if c := p.memory.Backend().Capabilities(); p.size > 1 && !c.PeerPointers {
		return fmt.Errorf("backend %s has no addresses of peers' memory: %w", p.memory.Backend().Name(), errs.ErrNotReachable)
	}
	return nil
}

// purpose is all that the ranks have to agree on.
func (p *Plan) purpose(f form, failure error) string {
	if failure != nil {
		return p.name
	}
	s := &p.spec
	text := []string{p.name}
	for _, t := range s.Tensors[:min(len(s.Tensors), mostTold)] {
		text = append(text, place(t))
	}
	if len(s.Tensors) > mostTold {
		text = append(text, others(s.Tensors[mostTold:]))
	}
	if s.Parameters != "" {
		text = append(text, s.Parameters)
	}
	if s.Multicast {
		text = append(text, "with multicast")
	}
	if s.Exclusive {
		text = append(text, "exclusive")
	}
	return strings.Join(append(text, fmt.Sprintf("workspace of %d bytes", s.Workspace), f.describe(), fmt.Sprintf("first epoch %d", s.FirstEpoch)), ", ")
}

// mostTold is how many tensors errors tell the places of. A plan may have thousands, and an error has what every rank asked for.
const mostTold = 32

// others stands for the places of more tensors: alike on ranks where these are.
func others(tensors []tensor.SymmetricTensor) string {
	sum := sha256.New()
	for _, t := range tensors {
		_, _ = fmt.Fprintln(sum, place(t)) // a hash never fails
	}
	return fmt.Sprintf("%d more tensors (%x)", len(tensors), sum.Sum(nil)[:8])
}

// place says where the memory of a tensor is in a way that is the same on every rank.
func place(t tensor.SymmetricTensor) string {
	what := fmt.Sprintf("%s%v", t.DType(), t.Shape())
	if t.Bytes() == 0 {
		return what + " of nothing"
	}
	w, offset, err := t.Window()
	if err != nil {
		return what + " without a window" // which is a failure of this rank's
	}
	return fmt.Sprintf("%s at byte %d of window %d", what, offset, w.Number())
}
