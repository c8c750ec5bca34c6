package collective_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/tensor"
)

// TestGraphLaunchedWhileClosing: a graph of a plan that is launched while this rank waits for the others to close the plan, a tensor of it or the memory is ErrClosed, and runs nothing of the plan.
func TestGraphLaunchedWhileClosing(t *testing.T) {
	for _, what := range []string{"plan", "tensor", "memory"} {
		for form := range 3 {
			t.Run(fmt.Sprintf("%s/form=%d", what, form), func(t *testing.T) {
				onRanks(t, 2, time.Second, onHost, func(ctx context.Context, r *rank) error {
					return r.launchWhileClosing(ctx, what, form)
				})
			})
		}
	}
}

func (r *rank) launchWhileClosing(ctx context.Context, what string, form int) error {
	x, err := r.tensor(ctx, elements)
	if err != nil {
		return err
	}
	var runs atomic.Int32
	spec := r.forms(func() error { runs.Add(1); return nil })[form].spec
	spec.Tensors = []tensor.SymmetricTensor{x}
	p, err := collective.New(ctx, r.m, spec)
	if err != nil {
		return err
	}
	g, err := r.graph(p)
	if err != nil {
		return err
	}
	if err := errors.Join(g.Launch(r.s), r.s.Synchronize(ctx)); err != nil {
		return err
	}
	end := map[string]func(context.Context) error{"plan": p.Close, "tensor": x.Close, "memory": r.m.Close}[what]
	r.over = what == "memory"
	if r.Rank() == 0 {
		ended := make(chan error, 1)
		go func() { ended <- end(ctx) }()
		var told error
		for begin := time.Now(); !errors.Is(told, errs.ErrClosed) && time.Since(begin) < patience; time.Sleep(time.Millisecond) { // soon, without the other rank
			told = errors.Join(g.Launch(r.s), r.s.Synchronize(ctx))
		}
		had := runs.Load()
		if told = errors.Join(g.Launch(r.s), r.s.Synchronize(ctx)); !errors.Is(told, errs.ErrClosed) || runs.Load() != had {
			err = fmt.Errorf("a graph while rank 1 has not come: %d runs more; %w", runs.Load()-had, told)
		}
		err = errors.Join(err, r.Store().Set(ctx, "launched", nil), <-ended)
	} else {
		_, err = r.Store().Get(ctx, "launched")
		err = errors.Join(err, end(ctx))
	}
	switch what {
	case "plan":
		err = errors.Join(err, g.Close(), x.Close(ctx))
	case "tensor":
		err = errors.Join(err, g.Close(), p.Close(ctx))
	}
	return err
}
