package collective_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/group"
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
