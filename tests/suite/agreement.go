package suite

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// agreementCases are about ranks that do not ask for the same thing: each is an error on every rank that names each rank's
// value, never a hang, and afterwards the group works.
func agreementCases() []Case {
	last := func(e *Env) bool { return e.R.Rank() == e.R.WorldSize()-1 }
	pick := func(e *Env, all, odd int64) int64 {
		if last(e) {
			return odd
		}
		return all
	}
	mk := func(name string, run func(ctx context.Context, e *Env) error) Case {
		return Case{Name: "agreement/" + name, MinWorld: 2, Run: func(ctx context.Context, e *Env) error {
			if err := run(ctx, e); err != nil {
				return err
			}
			return worksAfterwards(ctx, e)
		}}
	}
	return []Case{
		mk("size", func(ctx context.Context, e *Env) error {
			return mismatched(ctx, e, tensor.Float32, []int64{pick(e, 1000, 2000)}, "shape", "[1000]", "[2000]")
		}),
		mk("bytes", func(ctx context.Context, e *Env) error {
			a, err := e.R.Memory().Allocate(ctx, pick(e, 1000, 1001), "")
			if err != nil {
				return wantError("sizes that differ", err, errs.ErrMismatch, "1000", "1001")
			}
			_, err = e.R.Memory().Rendezvous(ctx, a, memory.Record{})
			if err := namesAll(e, err, "size in bytes", "1000", "1001"); err != nil {
				return err
			}
			return e.R.Memory().Free(ctx, a)
		}),
		mk("shape", func(ctx context.Context, e *Env) error {
			shape := []int64{6, 4}
			if last(e) {
				shape = []int64{4, 6}
			}
			return mismatched(ctx, e, tensor.Float32, shape, "shape", "[6 4]", "[4 6]")
		}),
		mk("dtype", func(ctx context.Context, e *Env) error {
			dtype := tensor.Float32
			if last(e) {
				dtype = tensor.Int32
			}
			return mismatched(ctx, e, dtype, []int64{100}, "dtype", "f32", "i32")
		}),
		mk("empty", func(ctx context.Context, e *Env) error {
			return mismatched(ctx, e, tensor.Float32, []int64{pick(e, 16, 0)}, "shape", "[16]", "[0]")
		}),
		mk("offset", func(ctx context.Context, e *Env) error {
			if e.R.Capabilities().CollectiveAllocate {
				return nil
			}
			t, err := e.R.Zeros(ctx, tensor.Int64, 100)
			if err != nil {
				return err
			}
			s, err := t.Sub(pick(e, 8, 16), 10)
			if err != nil {
				return err
			}
			if err := namesAll(e, s.Rendezvous(ctx), "offset", "64", "128"); err != nil {
				return err
			}
			return t.Close(ctx)
		}),
		mk("order", func(ctx context.Context, e *Env) error {
			a, err := tensor.ZerosNamed(ctx, e.R.Memory(), "weights", tensor.Float32, 64)
			if err != nil {
				return err
			}
			b, err := tensor.ZerosNamed(ctx, e.R.Memory(), "biases", tensor.Float32, 64)
			if err != nil {
				return err
			}
			first := a
			if last(e) {
				first = b
			}
			if err := namesAll(e, first.Rendezvous(ctx), "name", "weights", "biases"); err != nil {
				return err
			}
			return closeAll(ctx, a, b)
		}),
		mk("another_call", func(ctx context.Context, e *Env) error {
			t, err := e.R.Zeros(ctx, tensor.Float32, 64)
			if err != nil {
				return err
			}
			if last(e) {
				err = e.R.Barrier(ctx)
			} else {
				err = t.Rendezvous(ctx)
			}
			if err := namesAll(e, err, "rendezvous", "barrier"); err != nil {
				return err
			}
			return t.Close(ctx)
		}),
		mk("one_rank_fails", func(ctx context.Context, e *Env) error {
			t, err := e.R.Zeros(ctx, tensor.Float32, 64)
			if err != nil {
				return err
			}
			if last(e) {
				if err := t.Close(ctx); err != nil {
					return err
				}
			}
			err = t.Rendezvous(ctx)
			if last(e) {
				return wantError("rendezvous of a closed tensor", err, symmem.ErrClosed)
			}
			vote, ok := errors.AsType[*group.VoteError](err)
			if !ok || len(vote.Failures) != 1 || vote.Failures[0].Rank != e.R.WorldSize()-1 {
				return fmt.Errorf("rendezvous with a rank that fails: %w", err)
			}
			return t.Close(ctx)
		}),
		mk("op", func(ctx context.Context, e *Env) error {
			t, err := e.mapped(ctx, tensor.Float32, 64)
			if err != nil {
				return err
			}
			op := kernels.Sum
			if last(e) {
				op = kernels.Max
			}
			_, err = kernels.NewAllReduce(ctx, t, op, nil)
			if e.R.Capabilities().PeerPointers {
				if err := namesAll(e, err, "sum", "max"); err != nil {
					return err
				}
			}
			part, err := t.Sub(0, pick(e, 64, 63))
			if err != nil {
				return err
			}
			_, err = kernels.NewAllReduce(ctx, part, kernels.Sum, nil)
			if err := namesAll(e, err, " of 64 f32", " of 63 f32"); err != nil {
				return fmt.Errorf("numbers of elements: %w", err)
			}
			return t.Close(ctx)
		}),
		mk("plan_on_one_rank_fails", func(ctx context.Context, e *Env) error {
			t, err := e.mapped(ctx, tensor.Float32, 64)
			if err != nil {
				return err
			}
			op := kernels.Sum
			if last(e) {
				op = 99
			}
			_, err = kernels.NewAllReduce(ctx, t, op, nil)
			if last(e) {
				err = wantArgument("an unknown op", err, "99")
			} else if err == nil {
				err = errors.New("no error though the last rank's op is unknown")
			} else {
				err = nil
			}
			if err != nil {
				return err
			}
			return t.Close(ctx)
		}),
		mk("one_rank_gives_up", func(ctx context.Context, e *Env) error {
			t, err := e.R.Zeros(ctx, tensor.Float32, 64)
			if err != nil {
				return err
			}
			if last(e) {
				// Comes only when the others have given up.
				if _, err := e.R.Group().Store().Get(ctx, "gave up"); err != nil {
					return err
				}
				if err := t.Rendezvous(ctx); err == nil {
					return errors.New("a rendezvous that the others gave up has worked")
				}
				return t.Close(ctx)
			}
			short, cancel := context.WithTimeout(ctx, 50e6)
			defer cancel()
			err = t.Rendezvous(short)
			if missing, ok := errors.AsType[*group.MissingRanksError](err); ok {
				if len(missing.Missing) == 0 || missing.Missing[len(missing.Missing)-1] != e.R.WorldSize()-1 {
					return fmt.Errorf("the error does not name rank %d: %w", e.R.WorldSize()-1, err)
				}
			} else if err == nil {
				return errors.New("a rendezvous without the last rank has worked")
			}
			if err := e.R.Group().Store().Set(ctx, "gave up", []byte("yes")); err != nil {
				return err
			}
			return t.Close(ctx)
		}),
	}
}

// mismatched allocates a tensor whose shape or dtype is not the same on all ranks, and expects the error at the collective
// call that compares them.
func mismatched(ctx context.Context, e *Env, dtype tensor.DType, shape []int64, values ...string) error {
	t, err := e.R.Zeros(ctx, dtype, shape...)
	if err != nil {
		if e.R.Capabilities().CollectiveAllocate {
			return wantError("tensors that differ", err, errs.ErrMismatch)
		}
		return err
	}
	if err := namesAll(e, t.Rendezvous(ctx), values...); err != nil {
		return err
	}
	return t.Close(ctx)
}

// namesAll expects ErrMismatch with a value for each rank, among them the given ones.
func namesAll(e *Env, err error, values ...string) error {
	if err := wantError("ranks that differ", err, symmem.ErrMismatch, values...); err != nil {
		return err
	}
	m, ok := errors.AsType[*group.MismatchError](err)
	if !ok || len(m.Values) != e.R.WorldSize() {
		return fmt.Errorf("the error does not list every rank's value: %w", err)
	}
	return nil
}

// worksAfterwards is a rendezvous and an exchange of data, to show that the group still works.
func worksAfterwards(ctx context.Context, e *Env) error {
	t, err := e.R.Zeros(ctx, tensor.Int64, 8)
	if err != nil {
		return fmt.Errorf("afterwards: %w", err)
	}
	if err := t.Rendezvous(ctx); err != nil {
		return fmt.Errorf("afterwards: %w", err)
	}
	next := (e.R.Rank() + 1) % e.R.WorldSize()
	prev := (e.R.Rank() + e.R.WorldSize() - 1) % e.R.WorldSize()
	src, err := e.R.Zeros(ctx, tensor.Int64, 8)
	if err != nil {
		return fmt.Errorf("afterwards: %w", err)
	}
	if err := tensor.Write(src.Local(), []int64{int64(e.R.Rank())}, 0); err != nil {
		return err
	}
	if !e.R.Memory().CanSignal() {
		return errors.Join(sumsAfterwards(ctx, e, src), closeAll(ctx, src, t))
	}
	if err := errors.Join(t.PutSignal(e.S, next, src, 0), t.Wait(e.S, prev, 0), e.S.Synchronize(ctx)); err != nil {
		return fmt.Errorf("afterwards: %w", err)
	}
	var got [1]int64
	if err := tensor.Read(t.Local(), got[:], 0); err != nil {
		return err
	}
	if got[0] != int64(prev) {
		return fmt.Errorf("afterwards: %s came from rank %d", strconv.FormatInt(got[0], 10), prev)
	}
	return closeAll(ctx, src, t)
}

// sumsAfterwards adds up the ranks' numbers, for a group that only collectives reach all of.
func sumsAfterwards(ctx context.Context, e *Env, t *tensor.Tensor) error {
	if err := t.Rendezvous(ctx); err != nil {
		return fmt.Errorf("afterwards: %w", err)
	}
	plan, err := kernels.NewAllReduce(ctx, t, kernels.Sum, nil)
	if err != nil {
		return fmt.Errorf("afterwards: %w", err)
	}
	var got [1]int64
	if err := errors.Join(plan.Run(e.S), e.S.Synchronize(ctx), tensor.Read(t.Local(), got[:], 0), plan.Close(ctx)); err != nil {
		return fmt.Errorf("afterwards: %w", err)
	}
	if want := int64(e.R.WorldSize()*(e.R.WorldSize()-1)) / 2; got[0] != want {
		return fmt.Errorf("afterwards: the sum of all ranks is %d, not %d", got[0], want)
	}
	return nil
}
