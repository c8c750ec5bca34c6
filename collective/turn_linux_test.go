package collective_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// aWhile is long enough for a call that has begun to come as far as it can.
const aWhile = 50 * time.Millisecond

// awaitCall waits until a collective call that another goroutine makes has the turn of the rank's memory.
func (r *rank) awaitCall(ctx context.Context) {
	for ctx.Err() == nil && !backendtest.InCall(r.m) {
		time.Sleep(100 * time.Microsecond)
	}
}

// TestMakingAPlanIsOneCall: a collective call that begins while a plan is made comes behind the plan on every rank, though it begins later on one than on another.
func TestMakingAPlanIsOneCall(t *testing.T) {
	onRanks(t, 2, patience, onHost, func(ctx context.Context, r *rank) error {
		y, err := tensor.Zeros(ctx, r.m, tensor.Float32, elements)
		if err != nil {
			return err
		}
		building, let := make(chan struct{}), make(chan struct{})
		made := make(chan error, 1)
		var p *collective.Plan
		go func() {
			var err error
			p, err = collective.New(ctx, r.m, collective.Spec{Name: "slow", Program: &collective.Program{Build: func(context.Context, *collective.Builder) error {
				close(building)
				<-let
				return nil
			}}})
			made <- err
		}()
		<-building
		if r.Rank() == 1 {
			close(let)
			if err := errors.Join(<-made, y.Rendezvous(ctx)); err != nil {
				return err
			}
			return errors.Join(p.Close(ctx), y.Close(ctx))
		}
		met := make(chan error, 1)
		go func() { met <- y.Rendezvous(ctx) }()
		time.Sleep(aWhile)
		close(let)
		if err := errors.Join(<-made, <-met); err != nil {
			return err
		}
		return errors.Join(p.Close(ctx), y.Close(ctx))
	})
}

// TestClosingAPlanIsOneCall: a collective call that begins while a plan is closed comes behind that on every rank, though one rank's device is at work for longer.
func TestClosingAPlanIsOneCall(t *testing.T) {
	onRanks(t, 2, patience, onHost, func(ctx context.Context, r *rank) error {
		y, err := tensor.Zeros(ctx, r.m, tensor.Float32, elements)
		if err != nil {
			return err
		}
		p, err := collective.New(ctx, r.m, collective.Spec{Name: "closed", Workspace: 257 << 20, Host: func(*collective.Addresses) (collective.HostKernel, error) {
			return func(*collective.HostRun) error { return nil }, nil
		}})
		if err != nil {
			return err
		}
		let, closed, met := make(chan struct{}), make(chan error, 1), make(chan error, 1)
		if r.Rank() == 0 {
			if err := r.s.HostFunc(func() { <-let }); err != nil {
				return err
			}
		}
		go func() { closed <- p.Close(ctx) }()
		for r.Rank() == 0 && !errors.Is(p.Run(r.s), errs.ErrClosed) {
			time.Sleep(time.Millisecond)
		}
		if r.Rank() == 0 {
			r.awaitCall(ctx)
		} else if err := <-closed; err != nil {
			return err
		}
		go func() { met <- y.Rendezvous(ctx) }()
		time.Sleep(aWhile)
		close(let)
		if r.Rank() == 0 {
			err = <-closed
		}
		return errors.Join(err, <-met, y.Close(ctx))
	})
}

// TestPlanGivesUpItsTurn: a plan that is not made, or not closed, before the context of the call ends, because an earlier call is under way, is refused with that reason; the other
// ranks are told, and all go on.
func TestPlanGivesUpItsTurn(t *testing.T) {
	onRanks(t, 2, patience, onHost, func(ctx context.Context, r *rank) error {
		spec := collective.Spec{Name: "late", Host: func(*collective.Addresses) (collective.HostKernel, error) {
			return func(run *collective.HostRun) error { return run.Barrier(0) }, nil
		}}
		old, err := collective.New(ctx, r.m, spec)
		if err != nil {
			return err
		}
		y, err := tensor.Zeros(ctx, r.m, tensor.Float32, elements)
		if err != nil {
			return err
		}
		store := r.Store()
		if r.Rank() == 1 {
			if _, err := store.Get(ctx, "rank 0 has given up"); err != nil {
				return err
			}
			err := y.Rendezvous(ctx)
			_, newErr := collective.New(ctx, r.m, spec)
			for _, told := range []error{newErr, old.Close(ctx)} {
				if vote, ok := errors.AsType[*group.VoteError](told); !ok || vote.Failures[0].Rank != 0 {
					err = errors.Join(err, fmt.Errorf("a call that rank 0 gave up: %w", told))
				}
			}
			return errors.Join(err, r.runs(ctx, spec), y.Close(ctx))
		}
		met := make(chan error, 1)
		go func() { met <- y.Rendezvous(ctx) }()
		r.awaitCall(ctx)
		soon, cancel := context.WithTimeout(ctx, aWhile)
		defer cancel()
		_, newErr := collective.New(soon, r.m, spec)
		for _, gaveUp := range []error{newErr, old.Close(soon)} {
			if turn, ok := errors.AsType[*memory.TurnError](gaveUp); !ok || !errors.Is(gaveUp, context.DeadlineExceeded) || turn.Behind != "rendezvous" {
				err = errors.Join(err, fmt.Errorf("behind a rendezvous: %w", gaveUp))
			}
		}
		return errors.Join(err, store.Set(ctx, "rank 0 has given up", nil), <-met, r.runs(ctx, spec), y.Close(ctx))
	})
}

// runs makes a plan, runs it and closes it.
func (r *rank) runs(ctx context.Context, spec collective.Spec) error {
	p, err := collective.New(ctx, r.m, spec)
	if err != nil {
		return err
	}
	return errors.Join(p.Run(r.s), r.s.Synchronize(ctx), p.Close(ctx))
}

// TestPlanGivenUpHalfWay: when the context of one rank ends while its plan is made, the workspace that was taken is there for others, on every rank.
func TestPlanGivenUpHalfWay(t *testing.T) {
	onRanks(t, 2, patience, onHost, func(ctx context.Context, r *rank) error {
		const large = 257 << 20
		had := r.backend.bytes.Load()
		soon, cancel := context.WithCancel(ctx)
		defer cancel()
		err := r.refused(soon, collective.Spec{Name: "given up", Workspace: large, Program: &collective.Program{Build: func(context.Context, *collective.Builder) error {
			if r.Rank() == 1 {
				cancel()
			} else {
				time.Sleep(10 * aWhile) // rank 1 has given up, and still listens for what this one says
			}
			return nil
		}}}, nil)
		if err != nil {
			return err
		}
		if held := r.backend.bytes.Load() - had; held >= large {
			return fmt.Errorf("%d bytes more are held", held)
		}
		return r.runs(ctx, collective.Spec{Name: "next", Host: func(*collective.Addresses) (collective.HostKernel, error) {
			return func(run *collective.HostRun) error { return run.Barrier(0) }, nil
		}})
	})
}

// TestRoomOfPlansThatWereClosedAtWork: a plan whose device was still at work when its Close ended has its room until the device is idle, and no longer.
func TestRoomOfPlansThatWereClosedAtWork(t *testing.T) {
	m := newMachine(2, map[string]fake{"still": still})
	onRanks(t, 2, patience, m.open, func(ctx context.Context, r *rank) error {
		busy := func(is bool) error {
			if r.Rank() == 0 {
				m.Mu.Lock()
				m.busy, m.late = is, is
				m.Mu.Unlock()
			}
			return r.Barrier(ctx, "busy")
		}
		plans, streams, err := r.large(ctx, collective.Spec{Name: "plan 0"}, collective.Spec{Name: "plan 1"}, collective.Spec{Name: "plan 2"})
		if err != nil {
			return err
		}
		if err := errors.Join(plans[0].Run(streams[0]), plans[1].Run(streams[1]), r.Barrier(ctx, "run"), busy(true)); err != nil {
			return err
		}
		soon, cancel := context.WithTimeout(ctx, aWhile)
		defer cancel()
		if err := plans[0].Close(soon); !errors.Is(err, context.DeadlineExceeded) {
			return fmt.Errorf("closing a plan at work: %w", err)
		}
		if err := plans[2].Run(streams[2]); !errors.Is(err, errs.ErrNoRoom) {
			return fmt.Errorf("beside a plan that is still at work: %w", err)
		}
		if err := errors.Join(r.Barrier(ctx, "refused"), busy(false)); err != nil {
			return err
		}
		if err := plans[2].Run(streams[2]); err != nil {
			return fmt.Errorf("when the plan has ended: %w", err)
		}
		return errors.Join(r.m.Device().Synchronize(ctx), plans[1].Close(ctx), plans[2].Close(ctx), streams[0].Close(), streams[1].Close(), streams[2].Close())
	})
}

// nearGPU is the host backend of a sub-group over its parent's GPU, which stays open.
type nearGPU struct {
	backend.Backend
	device device.Device
}

func (b nearGPU) Device() device.Device { return b.device }

// TestPlanClosedAtWorkEndsWithItsMemory: what a plan could not give back, because its device was at work or an earlier call under way, is given back when its memory closes, also where the device
// stays open for others.
func TestPlanClosedAtWorkEndsWithItsMemory(t *testing.T) {
	for _, behind := range []bool{false, true} {
		t.Run(fmt.Sprintf("behind a call=%t", behind), func(t *testing.T) {
			m := newMachine(2, map[string]fake{"still": still})
			var busy atomic.Bool // the GPU of rank 0
			m.Call = func(name string, gpu int) cu.Result {
				if gpu == 0 && busy.Load() && strings.HasSuffix(name, "Query") {
					return cu.NotReady
				}
				return cu.Success
			}
			onRanks(t, 2, patience, m.open, func(ctx context.Context, r *rank) error {
				had := held(r)
				for round := range 2 {
					if err := r.closeAtWork(ctx, &busy, behind); err != nil {
						return err
					}
					now := held(r)
					now.Modules = had.Modules // they stay with the device
					if now != had {
						return fmt.Errorf("round %d: the device holds %+v, and had %+v", round, now, had)
					}
				}
				return nil
			})
			assert.Empty(t, m.left())
		})
	}
}

// closeAtWork makes a plan on the memory of a sub-group, closes it in vain on rank 0, and closes the memory.
func (r *rank) closeAtWork(ctx context.Context, busy *atomic.Bool, behind bool) error {
	g, m, err := r.sub(ctx)
	if err != nil {
		return err
	}
	kernel := &collective.Kernel{Image: []byte(image), Function: "still", Blocks: 1, Threads: 32}
	p, err := collective.New(ctx, m, collective.Spec{Name: "at work", Program: &collective.Program{
		Signals: 1, Lane: true, Kernels: []*collective.Kernel{kernel},
		Build: func(_ context.Context, b *collective.Builder) error {
			b.Stage(100)
			b.Upload([]byte{1})
			b.Kernel(kernel)
			b.Waiting(0)
			return nil
		},
	}})
	if err != nil {
		return err
	}
	if r.Rank() == 0 {
		err = closeInVain(ctx, busy, m, p, behind)
	} else {
		if behind {
			_, err = g.Store().Get(ctx, "rank 0 has given up")
			err = errors.Join(err, m.MeetCapability(ctx))
		}
		if _, told := errors.AsType[*group.VoteError](p.Close(ctx)); !told {
			err = errors.Join(err, errors.New("rank 1 is not told that rank 0 keeps its plan"))
		}
	}
	return errors.Join(err, m.Close(ctx), g.Close(ctx))
}

// closeInVain closes a plan with a context that ends while the device is at work, or while another collective call is under way.
func closeInVain(ctx context.Context, busy *atomic.Bool, m *memory.Memory, p *collective.Plan, behind bool) error {
	soon, cancel := context.WithTimeout(ctx, aWhile)
	defer cancel()
	want := func(err error) error {
		if !errors.Is(err, context.DeadlineExceeded) {
			return fmt.Errorf("closing a plan at work: %w", err)
		}
		return nil
	}
	if !behind {
		busy.Store(true)
		defer busy.Store(false)
		return want(p.Close(soon))
	}
	met := make(chan error, 1)
	go func() { met <- m.MeetCapability(ctx) }()
	for ctx.Err() == nil && !backendtest.InCall(m) {
		time.Sleep(100 * time.Microsecond)
	}
	err := want(p.Close(soon))
	return errors.Join(err, m.Group().Store().Set(ctx, "rank 0 has given up", nil), <-met)
}

// TestClosedMemoryIsForgotten: plans that nobody has closed before their memory do not stay for as long as the process lives.
func TestClosedMemoryIsForgotten(t *testing.T) {
	m := newMachine(2, map[string]fake{"still": still})
	kernel := &collective.Kernel{Image: []byte(image), Function: "still", Blocks: 1, Threads: 32}
	for range 3 {
		onRanks(t, 2, patience, m.open, func(ctx context.Context, r *rank) error {
			p, err := collective.New(ctx, r.m, collective.Spec{Name: "left", CUDA: kernel})
			if err != nil {
				return err
			}
			return errors.Join(p.Run(r.s), r.s.Synchronize(ctx))
		})
	}
	onRanks(t, 2, patience, m.open, func(ctx context.Context, r *rank) error {
		p, err := collective.New(ctx, r.m, collective.Spec{Name: "closed", CUDA: kernel})
		if err != nil {
			return err
		}
		return errors.Join(p.Run(r.s), r.s.Synchronize(ctx), p.Close(ctx))
	})
	assert.Zero(t, collective.Tenants())
}

// TestTensorClosedBeforeItsPlansTurn: a tensor that one rank closes while its New waits behind an earlier call is ErrClosed on all ranks, and no difference between them.
func TestTensorClosedBeforeItsPlansTurn(t *testing.T) {
	onRanks(t, 2, patience, onHost, func(ctx context.Context, r *rank) error {
		part, err := r.x.Sub(10, 20)
		if err != nil {
			return err
		}
		spec := collective.Spec{Name: "late", Tensors: []tensor.SymmetricTensor{part}, Host: func(*collective.Addresses) (collective.HostKernel, error) {
			return func(*collective.HostRun) error { return nil }, nil
		}}
		if r.Rank() == 1 {
			return r.refused(ctx, spec, errs.ErrClosed)
		}
		in, let := make(chan struct{}), make(chan struct{})
		held := make(chan error, 1)
		go func() {
			held <- r.m.InTurn(ctx, "a test", func(context.Context, error) error { close(in); <-let; return nil })
		}()
		<-in
		refused := make(chan error, 1)
		go func() { refused <- r.refused(ctx, spec, errs.ErrClosed) }()
		time.Sleep(aWhile) // it waits for its turn
		err = part.Close(ctx)
		close(let)
		return errors.Join(err, <-held, <-refused)
	})
}
