package collective_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
)

// TestFlagsStayWhileAPeerIsAtWork: where signals are words that the backend writes in the peers' memory, a rank that closes a plan keeps its words as long as a peer may still write them: one that is
// at work when it closes the plan, or that closes another one. They go with the memory, and else with the plan.
func TestFlagsStayWhileAPeerIsAtWork(t *testing.T) {
	cases := map[string]struct {
		plans int // that are made
		end   func(ctx context.Context, r *rank, plans []*collective.Plan) error
		kept  int // the words of so many stay
	}{
		"idle": {plans: 1, end: func(ctx context.Context, _ *rank, plans []*collective.Plan) error { return plans[0].Close(ctx) }},
		"at work": {plans: 1, kept: 1, end: func(ctx context.Context, r *rank, plans []*collective.Plan) error {
			p := plans[0]
			if r.Rank() == 0 {
				if err := p.Close(ctx); !is[*group.VoteError](err) {
					return fmt.Errorf("rank 0 is not told that rank 1 is at work: %w", err)
				}
				return nil
			}
			hold := make(chan struct{})
			soon, cancel := context.WithTimeout(ctx, aWhile)
			defer cancel()
			err := errors.Join(r.s.HostFunc(func() { <-hold }), p.Run(r.s))
			if err == nil {
				err = wants(p.Close(soon), context.DeadlineExceeded)
			}
			close(hold)
			return errors.Join(err, wants(r.s.Synchronize(ctx), nil))
		}},
		"others": {plans: 2, kept: 2, end: func(ctx context.Context, r *rank, plans []*collective.Plan) error {
			for k := range plans {
				if err := wants(plans[(k+r.Rank())%2].Close(ctx), errs.ErrMismatch); err != nil {
					return err
				}
			}
			return nil
		}},
		"not made": {end: func(ctx context.Context, r *rank, _ []*collective.Plan) error {
			spec := r.program(false, func(b *collective.Builder) { b.Signal(0) })
			build := spec.Program.Build
			spec.Program.Build = func(ctx context.Context, b *collective.Builder) error {
				if r.Rank() == 1 {
					return errOwn
				}
				return build(ctx, b)
			}
			return r.refused(ctx, spec, nil, errOwn.Error())
		}},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			onRanks(t, 2, time.Second, onFar, func(ctx context.Context, r *rank) error {
				spec := r.program(false, func(b *collective.Builder) { b.Signal(0) })
				first, err := collective.New(ctx, r.m, spec) // which makes the memory's workspace
				if err != nil {
					return err
				}
				words := r.backend.bytes.Load()
				if err := first.Close(ctx); err != nil {
					return err
				}
				had := r.backend.bytes.Load()
				if words -= had; words == 0 {
					return errors.New("plans have no words of the backend's")
				}
				var plans []*collective.Plan
				for range c.plans {
					p, err := collective.New(ctx, r.m, spec)
					if err != nil {
						return err
					}
					plans = append(plans, p)
				}
				if err := c.end(ctx, r, plans); err != nil {
					return err
				}
				if held, want := r.backend.bytes.Load()-had, int64(c.kept)*words; held != want {
					return fmt.Errorf("%d bytes of words are held after closing, and not %d", held, want)
				}
				r.over = true
				if err := r.m.Close(ctx); err != nil {
					return err
				}
				if held := r.backend.bytes.Load(); held != 0 {
					return fmt.Errorf("%d bytes are held when the memory is closed", held)
				}
				return nil
			})
		})
	}
}

// is reports whether an error is of a type.
func is[E error](err error) bool {
	_, is := errors.AsType[E](err)
	return is
}

// wants makes sure of a condition.
func wants(err, want error) error {
	if !errors.Is(err, want) {
		return fmt.Errorf("%v is wanted: %w", want, err)
	}
	return nil
}
