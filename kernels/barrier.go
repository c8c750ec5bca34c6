package kernels

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/kernels/ptx"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// NewBarrier prepares a barrier of all ranks of m on their streams: what is behind a run of it on a stream begins when every rank's stream has come to
// its own, and sees all that was done to symmetric memory before. Of opts, Algorithm is Auto, OneShot (a kernel, where every peer's memory has
// an address in this process), Transfers (signals), or the library's own, of [LibraryCollectives]. Collective: all ranks come with the same options (ErrMismatch with everybody's value
// if not). It blocks until all ranks have come. Close the plan.
//
// Its errors are those of [collective.New], ErrInvalid for options that do not exist, and ErrUnsupported for a form that a barrier has not.
func NewBarrier(ctx context.Context, m *memory.Memory, opts *Options) (*Plan, error) {
	const call = "NewBarrier"
	if err := errs.Given(call, "m", m, "a memory"); err != nil {
		return nil, errors.Join(errs.Given(call, "ctx", ctx, "a context"), err)
	}
	var o Options
	if opts != nil {
		o = *opts
	}
	ctx, failure := errs.WithContext(call, ctx, nil)
	return inTurn(ctx, m, call, func(ctx context.Context, _ error) (*Plan, error) { return newBarrier(ctx, m, call, o, failure) })
}

// newBarrier makes the plan, unless this rank has failed.
func newBarrier(ctx context.Context, m *memory.Memory, call string, o Options, failure error) (*Plan, error) {
	library := LibraryCollectives(call, m.Backend().Name())
	forms := append(append([]Algorithm{Auto}, CollectiveAlgorithms(call, m.Device().Kind())...), library...)
	s := collective.Spec{FirstEpoch: o.FirstEpoch, Failure: failure, Exclusive: o.Exclusive}
	chosen := o.Algorithm
	near := m.Backend().Capabilities().PeerPointers || m.Group().Size() == 1
	switch {
	case failure != nil:
	case !chosen.known():
		s.Failure = errs.Invalid(call, "Algorithm", chosen, fmt.Sprint(forms))
	case !slices.Contains(forms, chosen):
		s.Failure = fmt.Errorf("there is no barrier in the form %s; there are %v: %w", chosen, forms, errs.ErrUnsupported)
	case o.MaxBlocks < 0:
		s.Failure = errs.Invalid(call, "MaxBlocks", o.MaxBlocks, "0 for the default, or more")
	case chosen == Auto && near:
		chosen = OneShot
	case chosen == Auto:
		chosen = farForm(m, func(Algorithm) bool { return true }, library...)
	}
	s.Name = fmt.Sprintf("barrier, %s", chosen)
	s.Parameters = fmt.Sprintf("at most %d blocks", o.MaxBlocks)
	if s.Failure == nil && m.Device().Kind() == device.CUDA {
		// There may have been no rendezvous. In whatever form: ranks that want others are told of these where the plan is made, and not that one of them has come to another call.
		if err := m.MeetCapability(ctx); err != nil {
			return nil, fmt.Errorf("preparing %s: %w", s.Name, err)
		}
	}
	switch {
	case s.Failure != nil:
	case chosen == NCCL: // which has no barrier
		s.Workspace = 1
		s.Program = &collective.Program{Build: func(ctx context.Context, b *collective.Builder) error { return byteBarrier(ctx, m, b) }}
	case slices.Contains(library, chosen):
		s.Program = libraryBarrier(m, chosen)
	case chosen == Transfers:
		s.Program = barrierProgram(m.Group().Size())
	case m.Device().Kind() == device.CUDA:
		k := ptx.Meet(hopper(m))
		image, err := ptx.Image(k.File)
		s.Failure = err
		s.CUDA = &collective.Kernel{
			Image: image, Function: k.Name, Overlap: k.Overlap, Blocks: 1, Threads: 32,
			Params: func(at *collective.Addresses) []any { return []any{at.Comm()} },
		}
	default:
		s.Host = func(*collective.Addresses) (collective.HostKernel, error) {
			return func(r *collective.HostRun) error { return r.Barrier(flagStart) }, nil
		}
	}
	p, err := collective.New(ctx, m, s)
	if err != nil {
		return nil, err
	}
	return &Plan{Plan: p, algorithm: chosen}, nil
}

// byteBarrier adds NCCL's all-reduce of one byte: no rank has the sum before all have come.
func byteBarrier(ctx context.Context, m *memory.Memory, b *collective.Builder) error {
	_, w, offset, err := m.Find(b.Workspace(m.Group().Rank()))
	at := memory.Place{Window: w, Offset: offset, Err: err}
	p, err := m.PrepareAllReduce(ctx, NCCL.String(), at, at, 1, 1, tensor.Uint8.String(), Sum.String())
	if err != nil {
		return err
	}
	b.Launch(libraryLaunch{p})
	return nil
}

// barrierProgram is a signal to everybody and one from everybody.
func barrierProgram(size int) *collective.Program {
	p := &collective.Program{Build: func(_ context.Context, b *collective.Builder) error {
		if size > 1 {
			b.Signal(signalReady)
			b.Finish(signalReady)
		}
		return nil
	}}
	if size > 1 {
		p.Signals = 1
	}
	return p
}
