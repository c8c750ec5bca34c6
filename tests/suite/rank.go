package suite

import (
	"context"
	"errors"
	"fmt"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/tensor"
)

// rankCases: the collectives that are methods of a rank, and keep their plans.
func rankCases() []Case {
	return []Case{
		{Name: "rank/collectives", Needs: needsOf(kernels.Auto), Run: rankCollectivesCase},
		{Name: "rank/replay", Needs: append(needsOf(kernels.Auto), "graphs"), Run: rankReplayCase},
		{Name: "rank/plans_go", Needs: needsOf(kernels.Auto), Run: rankPlansCase},
	}
}

// rankCollectivesCase calls each of them three times with other values: the first makes the plan, the others find it.
func rankCollectivesCase(ctx context.Context, e *Env) error {
	r := e.R
	for _, what := range []string{broadcast, reduce, allGather, reduceScatter, allToAll} {
		c := collect{what: what, dtype: tensor.Float32, op: kernels.Max, n: 1003, root: r.WorldSize() - 1}
		o, err := newCollected(ctx, e, c)
		if err != nil {
			return err
		}
		for o.set = range 3 {
			in, out := o.parts[0], o.out()
			err := errors.Join(o.fill(), r.Barrier(ctx))
			switch what {
			case broadcast:
				err = errors.Join(err, r.Broadcast(ctx, in, c.root))
			case reduce:
				err = errors.Join(err, r.Reduce(ctx, in, out, c.op, c.root))
			case allGather:
				err = errors.Join(err, r.AllGather(ctx, in, out))
			case reduceScatter:
				err = errors.Join(err, r.ReduceScatter(ctx, in, out, c.op))
			case allToAll:
				err = errors.Join(err, r.AllToAll(ctx, in, out))
			}
			if err := errors.Join(err, r.Synchronize(ctx), o.check(), r.Barrier(ctx)); err != nil {
				return fmt.Errorf("%s, call %d: %w", what, o.set, err)
			}
		}
		if err := o.Close(ctx); err != nil {
			return err
		}
	}
	l, err := newListed(ctx, e, list{dtype: tensor.Float32, op: kernels.Sum, counts: []int64{5, 0, 300}})
	if err != nil {
		return err
	}
	var ts []tensor.SymmetricTensor
	for i := range l.pairs { // all in place
		l.pairs[i].Out = nil
		ts = append(ts, l.pairs[i].In)
	}
	for l.set = range 3 {
		if err := errors.Join(l.fill(ctx), r.AllReduceMany(ctx, ts, l.op), r.Synchronize(ctx), l.check()); err != nil {
			return fmt.Errorf("all_reduce_many, call %d: %w", l.set, err)
		}
	}
	for l.set = range 3 {
		err := l.fill(ctx)
		for _, t := range ts {
			err = errors.Join(err, r.AllReduce(ctx, t, l.op))
		}
		if err := errors.Join(err, r.Synchronize(ctx), l.check()); err != nil {
			return fmt.Errorf("all_reduce, call %d: %w", l.set, err)
		}
	}
	return l.Close(ctx)
}

// rankReplayCase records calls that have their plan, and replays them.
func rankReplayCase(ctx context.Context, e *Env) error {
	r := e.R
	l, err := newListed(ctx, e, list{dtype: tensor.Int32, op: kernels.Max, counts: []int64{700}})
	if err != nil {
		return err
	}
	t := l.pairs[0].In
	s, err := r.Stream()
	if err != nil {
		return err
	}
	if err := errors.Join(r.AllReduce(ctx, t, l.op), s.BeginCapture(), r.AllReduce(ctx, t, l.op)); err != nil {
		return err
	}
	g, err := s.EndCapture()
	if err != nil {
		return err
	}
	if err := r.Synchronize(ctx); err != nil {
		return err
	}
	for l.set = range 5 {
		if err := errors.Join(l.fill(ctx), g.Launch(s), r.Synchronize(ctx), l.check()); err != nil {
			return fmt.Errorf("replay %d: %w", l.set, err)
		}
	}
	return errors.Join(g.Close(), l.Close(ctx))
}

// rankPlansCase: plans of closed tensors, and those that were not used for longest, make place for others while runs are under way.
func rankPlansCase(ctx context.Context, e *Env) error {
	r := e.R
	rounds := 3
	if !e.Short {
		rounds = symmem.MaxPlans + 10
	}
	t, err := e.mapped(ctx, tensor.Int32, int64(rounds)+8)
	if err != nil {
		return err
	}
	if err := errors.Join(tensor.Write(t.Local(), make([]int32, t.NumElements()), 0), r.Barrier(ctx)); err != nil {
		return err
	}
	for i := range rounds {
		part, err := t.Sub(int64(i), 8)
		if err != nil {
			return err
		}
		gone, err := e.mapped(ctx, tensor.Int32, 4)
		if err != nil {
			return err
		}
		if err := errors.Join(r.AllReduce(ctx, part, kernels.Max), r.AllReduce(ctx, gone, kernels.Sum), gone.Close(ctx)); err != nil {
			return fmt.Errorf("round %d: %w", i, err)
		}
	}
	return errors.Join(r.Synchronize(ctx), t.Close(ctx))
}
