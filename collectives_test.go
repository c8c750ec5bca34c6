package symmem_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/device"
	devhost "github.com/symmem/symmem/device/host"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// onRanks runs f on each of n ranks, with timeouts that end what hangs before the test does, and closes the ranks.
func onRanks(t *testing.T, n int, f func(ctx context.Context, r *symmem.Rank) error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	cfg := config.Default()
	cfg.Timeout, cfg.KernelTimeout = 20*time.Second, 5*time.Second
	ranks, err := symmem.OpenLocal(ctx, n, cfg, nobody)
	require.NoError(t, err)
	var g errgroup.Group
	for _, r := range ranks {
		g.Go(func() error { return errors.Join(f(ctx, r), r.Close(ctx)) })
	}
	require.NoError(t, g.Wait())
}

// awaitCall waits until a collective call of the rank that another goroutine makes has the turn of the rank's memory, or has ended.
func awaitCall(ctx context.Context, r *symmem.Rank, call <-chan error) {
	for ctx.Err() == nil && len(call) == 0 && !backendtest.InCall(r.Memory()) {
		time.Sleep(10 * time.Microsecond)
	}
}

// onTwoLate runs f on two ranks with these timeouts, and a tensor of ones for each of tensors. f closes its rank, which may tell what has failed.
func onTwoLate(t *testing.T, timeout, kernelTimeout time.Duration, tensors int, f func(ctx context.Context, r *symmem.Rank, all []*tensor.Tensor) error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	cfg := config.Default()
	cfg.Timeout, cfg.KernelTimeout = timeout, kernelTimeout
	ranks, err := symmem.OpenLocal(ctx, 2, cfg, nobody)
	require.NoError(t, err)
	var g errgroup.Group
	for _, r := range ranks {
		g.Go(func() error {
			var all []*tensor.Tensor
			for range tensors {
				x, err := ones(ctx, r, 6)
				if err != nil {
					return err
				}
				all = append(all, x)
			}
			return f(ctx, r, all)
		})
	}
	require.NoError(t, g.Wait())
}

// ones is a tensor of n elements that are all 1.
func ones(ctx context.Context, r *symmem.Rank, n int64) (*tensor.Tensor, error) {
	t, err := r.Zeros(ctx, tensor.Float32, n)
	if err != nil {
		return nil, err
	}
	one := make([]float32, n)
	for i := range one {
		one[i] = 1
	}
	if len(one) > 0 {
		err = tensor.Write(t.Local(), one, 0)
	}
	return t, errors.Join(err, t.Rendezvous(ctx))
}

// kept says whether the rank keeps and has made so many plans.
func kept(r *symmem.Rank, what string, kept, made int) error {
	if k, m := r.KeptPlans(); k != kept || m != made {
		return fmt.Errorf("%s: %d plans are kept and %d were made, not %d and %d", what, k, m, kept, made)
	}
	return nil
}

// first is the first element when all work has ended.
func first(ctx context.Context, r *symmem.Rank, t tensor.SymmetricTensor, want float32) error {
	got := make([]float32, 1)
	if err := errors.Join(r.Synchronize(ctx), tensor.Read(t.Local(), got, 0)); err != nil {
		return err
	}
	if got[0] != want {
		return fmt.Errorf("%v, not %v", got[0], want)
	}
	return nil
}

// TestPlansAreKept: a plan is made once for what is called on which memory, through whichever tensor, and goes when others were used later, or
// when its tensor is closed; all on every rank alike.
func TestPlansAreKept(t *testing.T) {
	onRanks(t, 3, func(ctx context.Context, r *symmem.Rank) error {
		r.KeepPlans(3)
		x, err := ones(ctx, r, 12)
		if err != nil {
			return err
		}
		sum := func(t tensor.SymmetricTensor) error { return r.AllReduce(ctx, t, kernels.Sum) }
		err = errors.Join(sum(x), kept(r, "first", 1, 1), sum(x), kept(r, "second", 1, 1), first(ctx, r, x, 9))
		for range 3 { // slices of the same memory are the same
			part, subErr := x.Sub(4, 4)
			err = errors.Join(err, subErr, sum(part))
		}
		err = errors.Join(err, kept(r, "slices", 2, 2))
		part, subErr := x.Sub(4, 5)
		err = errors.Join(err, subErr, sum(part), kept(r, "another size", 3, 3))
		// x was used before the slices: it goes.
		err = errors.Join(err, r.AllReduce(ctx, x, kernels.Max), kept(r, "another operation", 3, 4), sum(x), kept(r, "one that had gone", 3, 5), sum(part), kept(r, "one that had not", 3, 5))
		y, yErr := ones(ctx, r, 5)
		err = errors.Join(err, yErr, sum(y), kept(r, "a fourth", 3, 6), y.Close(ctx), kept(r, "after its tensor", 3, 6), r.Broadcast(ctx, x, 2), kept(r, "one closed, one new", 3, 7))
		if err != nil {
			return err
		}
		// A plan that was made through a slice, and one of slices of that slice, outlive it.
		part, subErr = x.Sub(8, 4)
		if err := errors.Join(subErr, sum(part), kept(r, "a slice", 3, 8)); err != nil {
			return err
		}
		left, leftErr := part.Sub(0, 2)
		right, rightErr := part.Sub(2, 2)
		many := []tensor.SymmetricTensor{left, right}
		err = errors.Join(leftErr, rightErr, r.AllReduceMany(ctx, many, kernels.Sum), kept(r, "a list", 3, 9), part.Close(ctx))
		again, subErr := x.Sub(8, 4)
		left, leftErr = x.Sub(8, 2)
		right, rightErr = x.Sub(10, 2)
		err = errors.Join(err, subErr, leftErr, rightErr, sum(again), r.AllReduceMany(ctx, []tensor.SymmetricTensor{left, right}, kernels.Sum),
			kept(r, "in place of slices that were closed", 3, 9))
		// Through the closed ones nothing runs, nor waits for the others.
		err = errors.Join(err, wantIs(sum(part), symmem.ErrClosed), wantIs(r.AllReduceMany(ctx, many, kernels.Sum), symmem.ErrClosed),
			wantIs(r.Reduce(ctx, part, again, kernels.Sum, 0), symmem.ErrClosed), kept(r, "closed", 3, 9))
		return errors.Join(err, r.Synchronize(ctx), x.Close(ctx))
	})
}

// TestCollectiveOfNothing: tensors without elements are tensors.
func TestCollectiveOfNothing(t *testing.T) {
	onRanks(t, 2, func(ctx context.Context, r *symmem.Rank) error {
		x, err := ones(ctx, r, 0)
		if err != nil {
			return err
		}
		all := []tensor.SymmetricTensor{x, x}
		return errors.Join(r.AllReduce(ctx, x, kernels.Sum), r.AllReduce(ctx, x, kernels.Sum), r.AllReduceMany(ctx, all, kernels.Sum), r.AllReduceMany(ctx, all, kernels.Sum),
			r.BroadcastMany(ctx, all, 1), r.AllGatherMany(ctx, []kernels.Pair{{In: x, Out: x}}), r.ReduceScatterMany(ctx, []kernels.Pair{{In: x, Out: x}}, kernels.Sum),
			kept(r, "nothing", 5, 5), r.Synchronize(ctx), x.Close(ctx))
	})
}

// TestPlansOutliveEmptyTensors: tensors without elements are all at the same place, so a plan that was made with one runs for another, on ranks that have closed the first and on those that
// have not. One that is closed is refused as any other is.
func TestPlansOutliveEmptyTensors(t *testing.T) {
	onRanks(t, 2, func(ctx context.Context, r *symmem.Rank) error {
		h, err := r.NewHeap(ctx, 4096)
		if err != nil {
			return err
		}
		full, err := h.Zeros(ctx, tensor.Float32, 16)
		closed, closedErr := h.Zeros(ctx, tensor.Float32, 0)
		open, openErr := h.Zeros(ctx, tensor.Float32, 0)
		if err := errors.Join(err, closedErr, openErr); err != nil {
			return err
		}
		slice, err := full.Sub(3, 0)
		list := func(empty tensor.SymmetricTensor) error {
			return r.AllReduceMany(ctx, []tensor.SymmetricTensor{full, empty}, kernels.Sum)
		}
		err = errors.Join(err, list(closed), r.AllReduce(ctx, closed, kernels.Sum), r.Synchronize(ctx))
		if r.Rank() == 0 { // a heap's tensor is closed by each rank when it likes
			err = errors.Join(err, closed.Close(ctx))
		}
		err = errors.Join(err, list(open), list(slice), r.AllReduce(ctx, open, kernels.Sum), r.Synchronize(ctx), kept(r, "another empty one", 2, 2),
			wantIs(r.AllReduce(ctx, closed, kernels.Max), symmem.ErrClosed)) // which rank 1 is told, as there is no plan
		if r.Rank() == 1 {
			err = errors.Join(err, closed.Close(ctx))
		}
		return errors.Join(err, wantIs(list(closed), symmem.ErrClosed), wantIs(r.AllReduce(ctx, closed, kernels.Sum), symmem.ErrClosed), kept(r, "closed", 2, 2),
			slice.Close(ctx), list(open), r.Synchronize(ctx), kept(r, "without the slice", 2, 2), h.Close(ctx))
	})
}

// TestListsAsCalls: lists that are gathered, scattered and broadcast are found again, through other slices of the same memory too, and the errors name which tensor of which pair it is.
func TestListsAsCalls(t *testing.T) {
	onRanks(t, 2, func(ctx context.Context, r *symmem.Rank) error {
		x, err := ones(ctx, r, 12)
		if err != nil {
			return err
		}
		y, err := ones(ctx, r, 6)
		if err != nil {
			return err
		}
		fill := func(t *tensor.Tensor, value float32) error {
			all := make([]float32, t.NumElements())
			for i := range all {
				all[i] = value
			}
			return errors.Join(tensor.Write(t.Local(), all, 0), r.Barrier(ctx))
		}
		for call := range 2 {
			whole, wholeErr := x.Sub(0, 8)
			part, partErr := y.Sub(0, 4)
			mine := float32(r.Rank() + 1)
			err := errors.Join(wholeErr, partErr, fill(y, mine), fill(x, 0), r.AllGatherMany(ctx, []kernels.Pair{{In: part, Out: whole}}), r.Synchronize(ctx))
			got := make([]float32, 12)
			if err := errors.Join(err, tensor.Read(x.Local(), got, 0)); err != nil {
				return err
			}
			if fmt.Sprint(got) != "[1 1 1 1 2 2 2 2 0 0 0 0]" {
				return fmt.Errorf("gathered %v", got)
			}
			err = errors.Join(fill(x, mine), r.ReduceScatterMany(ctx, []kernels.Pair{{In: whole, Out: part}}, kernels.Sum), r.Synchronize(ctx))
			if err := errors.Join(err, tensor.Read(y.Local(), got[:6], 0)); err != nil {
				return err
			}
			if want := fmt.Sprintf("[3 3 3 3 %v %v]", mine, mine); fmt.Sprint(got[:6]) != want {
				return fmt.Errorf("scattered %v, not %s", got[:6], want)
			}
			err = errors.Join(r.Barrier(ctx), fill(y, mine), r.BroadcastMany(ctx, []tensor.SymmetricTensor{x, y}, 1), first(ctx, r, x, 2), first(ctx, r, y, 2), kept(r, "lists", 3, 3), part.Close(ctx), whole.Close(ctx))
			if err != nil {
				return fmt.Errorf("call %d: %w", call, err)
			}
		}
		// Memory that was freed, and memory that took its place: the list is another, and the plan of the first has gone.
		for call := range 2 {
			z, err := ones(ctx, r, 6)
			if err != nil {
				return err
			}
			err = errors.Join(fill(z, float32(r.Rank()+1)), r.AllGatherMany(ctx, []kernels.Pair{{In: z, Out: x}}), r.Synchronize(ctx))
			got := make([]float32, 12)
			if err := errors.Join(err, tensor.Read(x.Local(), got, 0), r.Barrier(ctx)); err != nil {
				return err
			}
			if fmt.Sprint(got) != "[1 1 1 1 1 1 2 2 2 2 2 2]" {
				return fmt.Errorf("gathered %v from memory made anew, call %d", got, call)
			}
			if err := errors.Join(z.Close(ctx), wantIs(r.AllGatherMany(ctx, []kernels.Pair{{In: z, Out: x}}), symmem.ErrClosed)); err != nil {
				return err
			}
		}
		// Recorded in a graph.
		s, err := r.Stream()
		if err != nil {
			return err
		}
		list := []kernels.Pair{{In: y, Out: x}}
		if err := errors.Join(r.AllGatherMany(ctx, list), s.BeginCapture(), r.AllGatherMany(ctx, list)); err != nil {
			return err
		}
		g, err := s.EndCapture()
		if err != nil {
			return err
		}
		for replay := range 2 {
			err := errors.Join(r.Synchronize(ctx), r.Barrier(ctx), fill(y, float32(5+replay+r.Rank())), g.Launch(s), r.Synchronize(ctx))
			got := make([]float32, 12)
			if err := errors.Join(err, tensor.Read(x.Local(), got, 0), r.Barrier(ctx)); err != nil {
				return err
			}
			if one := 5 + replay; got[0] != float32(one) || got[11] != float32(one+1) {
				return fmt.Errorf("gathered %v in replay %d", got, replay)
			}
		}
		if err := g.Close(); err != nil {
			return err
		}
		err = r.AllGatherMany(ctx, []kernels.Pair{{In: y, Out: x}, {In: x}})
		if err := wantIs(err, symmem.ErrInvalid); err != nil {
			return err
		}
		if !strings.Contains(err.Error(), "pairs[1].Out") {
			return fmt.Errorf("%w does not name the tensor", err)
		}
		return errors.Join(x.Close(ctx), y.Close(ctx))
	})
}

// TestCallsThatDiffer: ranks whose calls differ are told, by what the call is or by what has been called before, and by timeouts where one rank finds
// its plan; nobody hangs, and the ranks can be closed.
func TestCallsThatDiffer(t *testing.T) {
	for name, c := range map[string]func(ctx context.Context, r *symmem.Rank, x, y *tensor.Tensor) error{
		"another call": func(ctx context.Context, r *symmem.Rank, x, y *tensor.Tensor) error {
			var err error
			if r.Rank() == 0 {
				err = r.AllReduce(ctx, x, kernels.Max)
			} else {
				err = r.Broadcast(ctx, x, 0)
			}
			// Nothing has run: the same call works.
			return errors.Join(differs(err, "collective call"), r.AllReduce(ctx, y, kernels.Max))
		},
		"another tensor": func(ctx context.Context, r *symmem.Rank, x, y *tensor.Tensor) error {
			part, err := []*tensor.Tensor{x, y}[r.Rank()].Sub(0, 3)
			return errors.Join(err, wantIs(r.AllReduce(ctx, part, kernels.Sum), symmem.ErrMismatch))
		},
		"another order before": func(ctx context.Context, r *symmem.Rank, x, y *tensor.Tensor) error {
			if err := errors.Join(r.AllReduce(ctx, x, kernels.Sum), r.AllReduce(ctx, y, kernels.Sum), r.Synchronize(ctx)); err != nil {
				return err
			}
			first, second := x, y
			if r.Rank() == 0 {
				first, second = y, x
			}
			err := errors.Join(r.AllReduce(ctx, first, kernels.Sum), r.AllReduce(ctx, second, kernels.Sum))
			_ = r.Synchronize(ctx) // in vain: each rank waits for the other one's second
			return errors.Join(err, differs(r.AllReduce(ctx, x, kernels.Min), "order of the collective calls"))
		},
		"one rank records what the other runs": func(ctx context.Context, r *symmem.Rank, x, y *tensor.Tensor) error {
			if err := errors.Join(r.AllReduce(ctx, x, kernels.Sum), r.Synchronize(ctx)); err != nil {
				return err
			}
			twice := func() error { return errors.Join(r.AllReduce(ctx, x, kernels.Sum), r.AllReduce(ctx, x, kernels.Sum)) }
			if r.Rank() == 0 {
				s, err := r.Stream()
				if err != nil {
					return err
				}
				if err := errors.Join(s.BeginCapture(), twice()); err != nil {
					return err
				}
				g, err := s.EndCapture()
				if err != nil {
					return err
				}
				twice = func() error { return errors.Join(g.Launch(s), g.Close()) }
			}
			// It works, but the ranks would not drop the same plans.
			return errors.Join(twice(), first(ctx, r, x, 8), differs(r.AllReduce(ctx, y, kernels.Sum), "order of the collective calls"))
		},
		"one finds its plan": func(ctx context.Context, r *symmem.Rank, x, y *tensor.Tensor) error {
			if err := errors.Join(r.AllReduce(ctx, x, kernels.Sum), r.Synchronize(ctx)); err != nil {
				return err
			}
			if r.Rank() == 0 {
				return errors.Join(r.AllReduce(ctx, x, kernels.Sum), wantIs(r.Synchronize(ctx), os.ErrDeadlineExceeded))
			}
			if err := r.AllReduce(ctx, y, kernels.Sum); err == nil {
				return errors.New("a plan was made by one rank alone")
			}
			return nil
		},
		"one rank's nil": func(ctx context.Context, r *symmem.Rank, x, y *tensor.Tensor) error {
			return wantIs(r.AllReduce(ctx, []tensor.SymmetricTensor{x, nil}[r.Rank()], kernels.Sum), symmem.ErrInvalid)
		},
		"a slice that one rank has closed": func(ctx context.Context, r *symmem.Rank, x, y *tensor.Tensor) error {
			part, err := x.Sub(0, 3)
			err = errors.Join(err, r.AllReduce(ctx, part, kernels.Sum))
			if r.Rank() == 1 {
				err = errors.Join(err, part.Close(ctx))
				part, _ = x.Sub(0, 3)
			}
			// No rank makes a plan, and the next one is made by all.
			return errors.Join(err, r.AllReduce(ctx, part, kernels.Sum), kept(r, "through another slice", 1, 1), first(ctx, r, x, 4), r.AllReduce(ctx, y, kernels.Sum), first(ctx, r, y, 2))
		},
		"one rank calls through a closed slice": func(ctx context.Context, r *symmem.Rank, x, y *tensor.Tensor) error {
			part, err := x.Sub(0, 3)
			if err := errors.Join(err, r.AllReduce(ctx, part, kernels.Sum), r.Synchronize(ctx)); err != nil {
				return err
			}
			if r.Rank() == 0 {
				return errors.Join(r.AllReduce(ctx, part, kernels.Sum), wantIs(r.Synchronize(ctx), os.ErrDeadlineExceeded))
			}
			late, cancel := context.WithCancel(ctx)
			cancel() // so whatever waits for the other rank says so
			return errors.Join(part.Close(ctx), wantIs(r.AllReduce(late, part, kernels.Sum), symmem.ErrClosed))
		},
		"one rank's first call is through a closed slice": func(ctx context.Context, r *symmem.Rank, x, y *tensor.Tensor) error {
			part, err := x.Sub(0, 3)
			if r.Rank() == 1 {
				err = errors.Join(err, part.Close(ctx))
			}
			// All are told, and what is the same works.
			return errors.Join(err, wantIs(r.AllReduce(ctx, part, kernels.Sum), symmem.ErrClosed), kept(r, "refused", 0, 0), r.AllReduce(ctx, y, kernels.Sum), first(ctx, r, y, 2))
		},
		"a plan that ends on one rank": func(ctx context.Context, r *symmem.Rank, x, y *tensor.Tensor) error {
			if err := errors.Join(r.AllReduce(ctx, x, kernels.Sum), r.Synchronize(ctx)); err != nil {
				return err
			}
			if r.Rank() == 1 { // its tensor was closed there alone, and what lies there now has the same number
				symmem.EndPlans(r)
				y = x
			}
			err := differs(r.AllReduce(ctx, y, kernels.Sum), "earlier plan")
			// Nothing has gone.
			return errors.Join(err, kept(r, "refused", 1, 1), r.AllReduce(ctx, x, kernels.Max))
		},
		"nothing that one rank has closed": func(ctx context.Context, r *symmem.Rank, x, y *tensor.Tensor) error {
			nothing, err := ones(ctx, r, 0)
			again, againErr := ones(ctx, r, 0) // tensors without elements are all at the same place
			if err := errors.Join(err, againErr, r.AllReduce(ctx, nothing, kernels.Sum), r.Synchronize(ctx)); err != nil {
				return err
			}
			if r.Rank() == 1 { // with another collective of rank 0's, so that both fail
				err = wantIs(nothing.Close(ctx), symmem.ErrMismatch)
			} else {
				err = wantIs(r.Barrier(ctx), symmem.ErrMismatch)
			}
			// The plan is there for both, and what is the same works.
			return errors.Join(err, r.AllReduce(ctx, again, kernels.Sum), kept(r, "another one of nothing", 1, 1), r.AllReduce(ctx, y, kernels.Sum), first(ctx, r, y, 2))
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel() // they wait more than they work
			began := time.Now()
			onTwoLate(t, 2*time.Second, time.Second, 2, func(ctx context.Context, r *symmem.Rank, all []*tensor.Tensor) error {
				err := c(ctx, r, all[0], all[1])
				_ = r.Close(ctx) // which may tell what has failed
				return err
			})
			require.Less(t, time.Since(began), 50*time.Second, "only the test's own end has ended it")
		})
	}
}

// differs says whether err is that the ranks differ in what begins with that.
func differs(err error, what string) error {
	if m, ok := errors.AsType[*group.MismatchError](err); !ok || !strings.Contains(m.What, what) {
		return fmt.Errorf("%w is not that ranks differ in the %s", err, what)
	}
	return nil
}

func wantIs(err, is error) error {
	if !errors.Is(err, is) {
		return fmt.Errorf("%v is not %v: %w", err, is, errors.Join(err, errors.New("another error")))
	}
	return nil
}

// wantArgument fails unless err refuses that argument of a call.
func wantArgument(err error, call, arg string) error {
	var refused *symmem.ArgumentError
	if !errors.As(err, &refused) || refused.Op != call || refused.Arg != arg {
		return fmt.Errorf("%w; expected an error about %s of %s", err, arg, call)
	}
	return nil
}

// TestCollectivesRefuse: what is wrong is refused on every rank, the next call works, and nothing works after Close.
func TestCollectivesRefuse(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	onRanks(t, 2, func(_ context.Context, r *symmem.Rank) error {
		x, err := ones(ctx, r, 6)
		if err != nil {
			return err
		}
		y, err := ones(ctx, r, 6)
		if err != nil {
			return err
		}
		fresh, err := r.Zeros(ctx, tensor.Float32, 3)
		if err != nil {
			return err
		}
		sub, err := r.Sub(ctx, []int{0, 1})
		if err != nil {
			return err
		}
		var none context.Context
		err = errors.Join(
			wantIs(r.AllReduce(none, x, kernels.Sum), symmem.ErrInvalid),
			wantIs(r.AllReduceMany(none, []tensor.SymmetricTensor{x}, kernels.Sum), symmem.ErrInvalid),
			wantIs(r.Synchronize(none), symmem.ErrInvalid),
			wantArgument(r.AllReduce(ctx, nil, kernels.Sum), "AllReduce", "t"),
			wantArgument(r.Broadcast(ctx, nil, 0), "Broadcast", "t"),
			wantArgument(r.Reduce(ctx, nil, x, kernels.Sum, 0), "Reduce", "in"),
			wantArgument(r.AllToAll(ctx, x, nil), "AllToAll", "out"),
			wantIs(r.AllReduce(ctx, (*tensor.Tensor)(nil), kernels.Sum), symmem.ErrInvalid),
			wantIs(r.AllReduce(ctx, &tensor.Tensor{}, kernels.Sum), symmem.ErrInvalid),
			wantIs(r.AllReduce(ctx, x, 0), symmem.ErrInvalid),
			wantIs(r.AllReduce(ctx, fresh, kernels.Sum), symmem.ErrNoRendezvous),
			wantIs(sub.AllReduce(ctx, x, kernels.Sum), symmem.ErrInvalid),
			wantIs(r.Broadcast(ctx, x, 2), symmem.ErrInvalid),
			wantIs(r.AllGather(ctx, x, nil), symmem.ErrInvalid),
			wantIs(r.AllToAll(ctx, x, x), symmem.ErrInvalid),
			wantIs(r.AllReduceMany(ctx, nil, kernels.Sum), symmem.ErrInvalid),
			wantIs(r.AllReduceMany(ctx, []tensor.SymmetricTensor{x, nil}, kernels.Sum), symmem.ErrInvalid),
			wantIs(r.AllReduceMany(ctx, []tensor.SymmetricTensor{x, x}, kernels.Sum), symmem.ErrInvalid),
			wantIs(r.BroadcastMany(ctx, nil, 0), symmem.ErrInvalid),
			wantIs(r.BroadcastMany(ctx, []tensor.SymmetricTensor{x}, 2), symmem.ErrInvalid),
			wantIs(r.AllGatherMany(ctx, nil), symmem.ErrInvalid),
			wantIs(r.AllGatherMany(ctx, []kernels.Pair{{In: x}}), symmem.ErrInvalid),
			wantIs(r.AllGatherMany(none, []kernels.Pair{{In: x, Out: x}}), symmem.ErrInvalid),
			wantIs(r.ReduceScatterMany(ctx, []kernels.Pair{{Out: x}}, kernels.Sum), symmem.ErrInvalid),
			wantIs(r.ReduceScatterMany(ctx, []kernels.Pair{{In: x, Out: x}}, kernels.Sum), symmem.ErrInvalid),
			kept(r, "refused", 0, 0),
			r.AllReduce(ctx, x, kernels.Sum), first(ctx, r, x, 2),
		)
		if err != nil {
			return err
		}
		s, err := r.Stream()
		if err != nil {
			return err
		}
		if err := errors.Join(s.BeginCapture(), r.AllReduce(ctx, x, kernels.Sum), wantIs(r.AllReduce(ctx, y, kernels.Sum), symmem.ErrInvalid)); err != nil {
			return err
		}
		g, err := s.EndCapture()
		if err != nil {
			return err
		}
		err = errors.Join(first(ctx, r, x, 2), g.Launch(s), first(ctx, r, x, 4), g.Close(), sub.Close(ctx), fresh.Close(ctx), y.Close(ctx), x.Close(ctx))
		err = errors.Join(err, wantIs(r.AllReduce(ctx, x, kernels.Sum), symmem.ErrClosed))
		if err != nil {
			return err
		}
		// A rank that is closed, with plans.
		z, err := ones(ctx, r, 6)
		if err != nil {
			return err
		}
		again, err := r.Sub(ctx, []int{0, 1})
		if err != nil {
			return err
		}
		zz, err := ones(ctx, again, 3)
		if err != nil {
			return err
		}
		return errors.Join(r.AllReduce(ctx, z, kernels.Sum), r.AllReduce(ctx, z, kernels.Min), again.AllReduce(ctx, zz, kernels.Sum), again.Close(ctx),
			wantIs(again.AllReduce(ctx, zz, kernels.Sum), symmem.ErrClosed), wantIs(again.Synchronize(ctx), symmem.ErrClosed))
	})
}

// TestTensorOfAnotherGroup: a tensor of another group's memory is what package collective says that it is, ErrNotSymmetric, in every constructor and
// method, and a refused argument.
func TestTensorOfAnotherGroup(t *testing.T) {
	onRanks(t, 2, func(ctx context.Context, r *symmem.Rank) error {
		mine, err := ones(ctx, r, 4)
		if err != nil {
			return err
		}
		sub, err := r.Sub(ctx, []int{0, 1})
		if err != nil {
			return err
		}
		theirs, err := ones(ctx, sub, 4)
		if err != nil {
			return err
		}
		_, allReduce := kernels.NewAllReduce(ctx, mine, kernels.Sum, &kernels.AllReduceOptions{Out: theirs})
		_, many := kernels.NewAllReduceMany(ctx, []kernels.Pair{{In: mine}, {In: theirs}}, kernels.Sum, nil)
		_, allGather := kernels.NewAllGather(ctx, mine, theirs, nil)
		_, gatherMany := kernels.NewAllGatherMany(ctx, []kernels.Pair{{In: mine, Out: theirs}}, nil)
		_, scatterMany := kernels.NewReduceScatterMany(ctx, []kernels.Pair{{In: mine, Out: theirs}}, kernels.Sum, nil)
		_, broadcastMany := kernels.NewBroadcastMany(ctx, []tensor.SymmetricTensor{mine, theirs}, 0, nil)
		_, allToAllV := kernels.NewAllToAllV(ctx, mine, mine, theirs, theirs, nil)
		for what, err := range map[string]error{
			"NewAllReduce": allReduce, "NewAllReduceMany": many, "NewAllGather": allGather, "NewAllGatherMany": gatherMany, "NewReduceScatterMany": scatterMany, "NewBroadcastMany": broadcastMany, "NewAllToAllV": allToAllV,
			"AllReduce": r.AllReduce(ctx, theirs, kernels.Sum),
		} {
			var argument *symmem.ArgumentError
			if !errors.As(err, &argument) || !errors.Is(err, symmem.ErrInvalid) || !errors.Is(err, symmem.ErrNotSymmetric) {
				return fmt.Errorf("%s: %w", what, err)
			}
		}
		return errors.Join(theirs.Close(ctx), sub.Close(ctx), mine.Close(ctx))
	})
}

// TestCallsAllocateNothing: a call that finds its plan allocates nothing.
func TestCallsAllocateNothing(t *testing.T) {
	onRanks(t, 1, func(ctx context.Context, r *symmem.Rank) error {
		x, err := ones(ctx, r, 6)
		if err != nil {
			return err
		}
		if err := r.AllReduce(ctx, x, kernels.Sum); err != nil {
			return err
		}
		var s device.Stream
		if s, err = r.Stream(); err != nil {
			return err
		}
		var failed error
		plan, err := kernels.NewAllReduce(ctx, x, kernels.Sum, nil)
		if err != nil {
			return err
		}
		each := func(f func() error) float64 {
			return testing.AllocsPerRun(200, func() { failed = errors.Join(failed, f(), s.Synchronize(ctx)) })
		}
		run := each(func() error { return plan.Run(s) })
		call := each(func() error { return r.AllReduce(ctx, x, kernels.Sum) })
		if call > run {
			failed = errors.Join(failed, fmt.Errorf("%v allocations a call, and %v a run", call, run))
		}
		return errors.Join(failed, plan.Close(ctx), x.Close(ctx))
	})
}

// TestRecordedPlansStay: a plan that a graph may have stays, however many others are made, and takes no place of theirs.
func TestRecordedPlansStay(t *testing.T) {
	onRanks(t, 2, func(ctx context.Context, r *symmem.Rank) error {
		r.KeepPlans(2)
		x, err := ones(ctx, r, 12)
		if err != nil {
			return err
		}
		y, err := ones(ctx, r, 4)
		if err != nil {
			return err
		}
		s, err := r.Stream()
		if err != nil {
			return err
		}
		if err := errors.Join(r.AllReduce(ctx, y, kernels.Sum), s.BeginCapture(), r.AllReduce(ctx, y, kernels.Sum)); err != nil {
			return err
		}
		g, err := s.EndCapture()
		if err != nil {
			return err
		}
		for n := int64(1); n <= 5; n++ { // more than are kept
			part, subErr := x.Sub(n, 4)
			err = errors.Join(err, subErr, r.AllReduce(ctx, part, kernels.Max))
		}
		err = errors.Join(err, first(ctx, r, y, 2), g.Launch(s), first(ctx, r, y, 4), g.Close(), r.AllReduce(ctx, y, kernels.Sum), first(ctx, r, y, 8),
			kept(r, "a recorded one and two others", 3, 6))
		// When it goes with its memory, it makes no room either.
		return errors.Join(err, y.Close(ctx), r.AllReduce(ctx, x, kernels.Max), kept(r, "two others", 2, 7), x.Close(ctx))
	})
}

// TestRecordedPlanOutlivesItsSlice: a graph has the call of a slice that was closed since, and the plan stays while its memory does.
func TestRecordedPlanOutlivesItsSlice(t *testing.T) {
	onRanks(t, 2, func(ctx context.Context, r *symmem.Rank) error {
		x, err := ones(ctx, r, 12)
		if err != nil {
			return err
		}
		s, err := r.Stream()
		if err != nil {
			return err
		}
		part, err := x.Sub(0, 4)
		if err := errors.Join(err, r.AllReduce(ctx, part, kernels.Sum), s.BeginCapture(), r.AllReduce(ctx, part, kernels.Sum)); err != nil {
			return err
		}
		g, err := s.EndCapture()
		if err != nil {
			return err
		}
		return errors.Join(part.Close(ctx), r.AllReduce(ctx, x, kernels.Max), g.Launch(s), first(ctx, r, x, 4), kept(r, "after its slice", 2, 2), g.Close(),
			x.Close(ctx), r.Synchronize(ctx))
	})
}

// TestTwoGoroutinesCallAlike: two goroutines of each rank make the same call for the first time; the one that comes second finds the plan.
func TestTwoGoroutinesCallAlike(t *testing.T) {
	onRanks(t, 2, func(ctx context.Context, r *symmem.Rank) error {
		for n := int64(1); n <= 40; n++ {
			x, err := ones(ctx, r, n)
			if err != nil {
				return err
			}
			done := make(chan error, 1)
			go func() { done <- r.AllReduce(ctx, x, kernels.Sum) }()
			err = errors.Join(r.AllReduce(ctx, x, kernels.Sum), <-done, first(ctx, r, x, 4), x.Close(ctx))
			if err != nil {
				return fmt.Errorf("round %d: %w", n, err)
			}
		}
		return nil
	})
}

// TestCloseWhilePlansAreMade: a Close that comes while another goroutine waits for the other ranks, to make a plan, ends with its context, and so does Synchronize, which
// has nothing to wait for. Nothing was closed: the plan is made when the others come, and runs, and the rank is closed by another Close.
func TestCloseWhilePlansAreMade(t *testing.T) {
	for _, sub := range []bool{false, true} {
		t.Run(fmt.Sprintf("sub-group=%t", sub), func(t *testing.T) {
			onRanks(t, 2, func(ctx context.Context, parent *symmem.Rank) error {
				r := parent
				if sub {
					var err error
					if r, err = parent.Sub(ctx, []int{0, 1}); err != nil {
						return err
					}
				}
				x, err := ones(ctx, r, 12)
				if err != nil {
					return err
				}
				store := r.Group().Store()
				if r.Rank() == 1 {
					if _, err := store.Get(ctx, "rank 0 has given up"); err != nil {
						return err
					}
					return errors.Join(r.AllReduce(ctx, x, kernels.Sum), first(ctx, r, x, 2))
				}
				ran := make(chan error, 1)
				go func() { ran <- r.AllReduce(ctx, x, kernels.Sum) }()
				awaitCall(ctx, r, ran)
				synchronized := r.Synchronize(ctx)
				soon, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
				defer cancel()
				closed := parent.Close(soon)
				_, gaveUp := errors.AsType[*memory.TurnError](closed)
				err = store.Set(ctx, "rank 0 has given up", nil)
				if synchronized != nil || !gaveUp || !errors.Is(closed, context.DeadlineExceeded) {
					return fmt.Errorf("while a plan is made, Synchronize gives %v, and Close %w", synchronized, closed)
				}
				return errors.Join(err, <-ran, first(ctx, r, x, 2))
			})
		})
	}
}

// TestCloseBehindTheDevice: a program that closes the device of its rank, which is not its own, can close the rank all the same, and holds up nobody.
func TestCloseBehindTheDevice(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	cfg := config.Default()
	cfg.Timeout = 2 * time.Second
	ranks, err := symmem.OpenLocal(ctx, 2, cfg, nobody)
	require.NoError(t, err)
	var g errgroup.Group
	for _, r := range ranks {
		g.Go(func() error {
			freed, err := ones(ctx, r, 4)
			if err != nil {
				return err
			}
			left, err := ones(ctx, r, 4)
			if err != nil {
				return err
			}
			if r.Rank() != 0 {
				return errors.Join(freed.Close(ctx), r.Close(ctx))
			}
			err = errors.Join(r.Device().Close(), wantIs(freed.Close(ctx), symmem.ErrClosed), wantIs(r.Close(ctx), symmem.ErrClosed))
			if r.Open() || left.Err() == nil {
				err = errors.Join(err, errors.New("the rank is still open"))
			}
			return err
		})
	}
	require.NoError(t, g.Wait())
}

// TestCloseIsOneCall: a collective call of another goroutine that waits behind a Close comes when everything is closed, and not between the plans and the memory, where the
// other ranks have none.
func TestCloseIsOneCall(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	ranks, err := symmem.OpenLocal(ctx, 1, config.Default(), nobody)
	require.NoError(t, err)
	r := ranks[0]
	x, err := ones(ctx, r, 12)
	require.NoError(t, err)
	require.NoError(t, r.AllReduce(ctx, x, kernels.Sum))
	m := x.Memory()
	var others errgroup.Group
	held, release := make(chan struct{}), make(chan struct{})
	others.Go(func() error {
		return m.InTurn(ctx, "what is under way", func(context.Context, error) error {
			close(held)
			<-release
			return nil
		})
	})
	<-held
	closed := make(chan error, 1)
	go func() { closed <- r.Close(ctx) }()
	for r.Open() && ctx.Err() == nil {
		time.Sleep(100 * time.Microsecond)
	}
	time.Sleep(20 * time.Millisecond) // until Close waits for its turn: else what follows comes before it, which is no failure either
	for range 4 {
		others.Go(func() error {
			return m.InTurn(ctx, "what is behind", func(context.Context, error) error {
				if _, err := r.Stream(); errors.Is(err, symmem.ErrClosed) && m.Closed() == nil {
					return errors.New("the plans are closed, and the memory is not")
				}
				return nil
			})
		})
	}
	time.Sleep(20 * time.Millisecond)
	close(release)
	require.NoError(t, <-closed)
	require.NoError(t, others.Wait())
}

// TestCallsGiveUpTheirTurn: a call that comes while another goroutine waits for the other ranks, to make a plan, ends with its context, whether it has a plan or not. The other ranks are told
// of what had none, and have to be followed in what had one: the ranks are in step then.
func TestCallsGiveUpTheirTurn(t *testing.T) {
	onRanks(t, 2, func(ctx context.Context, r *symmem.Rank) error {
		x, err := ones(ctx, r, 12)
		if err != nil {
			return err
		}
		y, err := ones(ctx, r, 12)
		if err != nil {
			return err
		}
		sum := func(ctx context.Context, t tensor.SymmetricTensor) error { return r.AllReduce(ctx, t, kernels.Sum) }
		if err := errors.Join(sum(ctx, x), first(ctx, r, x, 2)); err != nil {
			return err
		}
		store := r.Group().Store()
		if r.Rank() == 1 {
			if _, err := store.Get(ctx, "rank 0 has given up"); err != nil {
				return err
			}
			err := r.AllReduce(ctx, x, kernels.Max)
			if vote, ok := errors.AsType[*group.VoteError](sum(ctx, y)); !ok || vote.Failures[0].Rank != 0 {
				err = errors.Join(err, errors.New("nobody has told that rank 0 gave up"))
			}
			return errors.Join(err, sum(ctx, x), sum(ctx, y), first(ctx, r, y, 2), first(ctx, r, x, 4))
		}
		ran := make(chan error, 1)
		go func() { ran <- r.AllReduce(ctx, x, kernels.Max) }()
		awaitCall(ctx, r, ran)
		soon, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
		defer cancel()
		for _, call := range []error{sum(soon, x), sum(soon, y)} {
			if _, gaveUp := errors.AsType[*memory.TurnError](call); !gaveUp || !errors.Is(call, context.DeadlineExceeded) {
				err = errors.Join(err, fmt.Errorf("while a plan is made: %w", call))
			}
		}
		return errors.Join(err, store.Set(ctx, "rank 0 has given up", nil), <-ran, sum(ctx, x), sum(ctx, y), first(ctx, r, y, 2), first(ctx, r, x, 4))
	})
}

// TestOptionsAfterGivingUp: options belong to the caller again when a constructor has given up its turn, though the rank tells the others later. (The race detector looks.)
func TestOptionsAfterGivingUp(t *testing.T) {
	onRanks(t, 2, func(ctx context.Context, r *symmem.Rank) error {
		x, err := ones(ctx, r, 12)
		if err != nil {
			return err
		}
		store := r.Group().Store()
		opts := &kernels.AllReduceOptions{MaxBlocks: 3}
		if r.Rank() == 1 {
			if _, err := store.Get(ctx, "rank 0 has given up"); err != nil {
				return err
			}
			err := r.Barrier(ctx)
			_, told := kernels.NewAllReduce(ctx, x, kernels.Sum, opts)
			if vote, ok := errors.AsType[*group.VoteError](told); !ok || vote.Failures[0].Rank != 0 {
				err = errors.Join(err, fmt.Errorf("nobody has told that rank 0 gave up: %w", told))
			}
			return err
		}
		barrier := make(chan error, 1)
		go func() { barrier <- r.Barrier(ctx) }()
		awaitCall(ctx, r, barrier)
		soon, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
		defer cancel()
		_, err = kernels.NewAllReduce(soon, x, kernels.Sum, opts)
		if _, gaveUp := errors.AsType[*memory.TurnError](err); !gaveUp {
			return fmt.Errorf("behind a barrier: %w", err)
		}
		err = errors.Join(store.Set(ctx, "rank 0 has given up", nil), <-barrier)
		for range 100 {
			*opts = kernels.AllReduceOptions{}
			time.Sleep(10 * time.Microsecond)
		}
		return err
	})
}

// TestNilContextIsTold: a rank that comes to a collective call without a context tells the others, whether the call has its plan already or not, and the next
// call is in step.
func TestNilContextIsTold(t *testing.T) {
	bounded, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	onRanks(t, 2, func(_ context.Context, r *symmem.Rank) error {
		x, err := ones(bounded, r, 6)
		if err != nil {
			return err
		}
		y, err := ones(bounded, r, 12)
		if err != nil {
			return err
		}
		made := func(p interface{ Close(context.Context) error }, err error) error {
			if err != nil {
				return err
			}
			return p.Close(bounded)
		}
		for _, c := range []struct {
			name string
			call func(ctx context.Context) error
		}{
			{"Barrier", r.Barrier},
			{"AllReduce", func(ctx context.Context) error { return r.AllReduce(ctx, x, kernels.Sum) }},
			{"AllReduceMany", func(ctx context.Context) error {
				return r.AllReduceMany(ctx, []tensor.SymmetricTensor{x, y}, kernels.Sum)
			}},
			{"AllGather", func(ctx context.Context) error { return r.AllGather(ctx, x, y) }},
			{"AllGatherMany", func(ctx context.Context) error { return r.AllGatherMany(ctx, []kernels.Pair{{In: x, Out: y}}) }},
			{"ReduceScatterMany", func(ctx context.Context) error {
				return r.ReduceScatterMany(ctx, []kernels.Pair{{In: y, Out: x}}, kernels.Sum)
			}},
			{"BroadcastMany", func(ctx context.Context) error { return r.BroadcastMany(ctx, []tensor.SymmetricTensor{x, y}, 1) }},
			{"NewAllReduce", func(ctx context.Context) error { return made(kernels.NewAllReduce(ctx, x, kernels.Sum, nil)) }},
			{"NewAllReduceMany", func(ctx context.Context) error {
				return made(kernels.NewAllReduceMany(ctx, []kernels.Pair{{In: x}}, kernels.Sum, nil))
			}},
			{"NewAllGather", func(ctx context.Context) error { return made(kernels.NewAllGather(ctx, x, y, nil)) }},
			{"NewAllGatherMany", func(ctx context.Context) error {
				return made(kernels.NewAllGatherMany(ctx, []kernels.Pair{{In: x, Out: y}}, nil))
			}},
			{"NewBroadcastMany", func(ctx context.Context) error {
				return made(kernels.NewBroadcastMany(ctx, []tensor.SymmetricTensor{x}, 0, nil))
			}},
			{"NewBarrier", func(ctx context.Context) error { return made(kernels.NewBarrier(ctx, r.Memory(), nil)) }},
			{"NewRMSNorm", func(ctx context.Context) error {
				return made(kernels.NewAllReduceRMSNorm(ctx, x, kernels.RMSNorm{}, nil))
			}},
		} {
			ctx := bounded
			if r.Rank() == 1 {
				ctx = nil
			}
			began := time.Now()
			if err := wantIs(c.call(ctx), symmem.ErrInvalid); err != nil {
				return fmt.Errorf("%s: %w", c.name, err)
			}
			if took := time.Since(began); took > 20*time.Second {
				return fmt.Errorf("%s: told after %v", c.name, took)
			}
			if c.name == "NewRMSNorm" {
				continue // it has no weight
			}
			if err := c.call(bounded); err != nil {
				return fmt.Errorf("%s behind it: %w", c.name, err)
			}
		}
		// With a plan that is kept there is nothing to wait for.
		var none context.Context
		return errors.Join(r.AllReduce(none, x, kernels.Sum), r.Synchronize(bounded), x.Close(bounded), y.Close(bounded))
	})
}

// TestCallsAfterALateRank: a rank that was late once has ended the plan that ran then, and no other: the ranks have made the same calls all the same.
func TestCallsAfterALateRank(t *testing.T) {
	onTwoLate(t, 20*time.Second, time.Second, 2, func(ctx context.Context, r *symmem.Rank, all []*tensor.Tensor) error {
		x, y := all[0], all[1]
		if err := errors.Join(r.AllReduce(ctx, x, kernels.Sum), first(ctx, r, x, 2), r.Barrier(ctx)); err != nil {
			return err
		}
		store := r.Group().Store()
		if r.Rank() == 1 {
			if _, err := store.Get(ctx, "rank 0 has given up"); err != nil {
				return err
			}
		}
		var late error
		for range 2 { // on one rank the second is refused, and on the other one it waits in vain
			late = errors.Join(late, r.AllReduce(ctx, x, kernels.Sum), r.Synchronize(ctx))
		}
		if late == nil {
			return errors.New("a rank that is late was waited for")
		}
		if r.Rank() == 0 {
			if err := store.Set(ctx, "rank 0 has given up", nil); err != nil {
				return err
			}
		}
		if err := r.Barrier(ctx); err != nil {
			return err
		}
		for i := range 3 {
			if err := errors.Join(r.AllReduce(ctx, y, kernels.Sum), first(ctx, r, y, float32(int(2)<<i))); err != nil {
				return fmt.Errorf("call %d after that: %w", i, err)
			}
		}
		_ = r.Close(ctx) // which tells of x's plan
		return nil
	})
}

// TestCloseWhileRecording: a rank that is closed while its own stream is recorded leaves nothing behind on a device that outlives it, and the recording has ended.
func TestCloseWhileRecording(t *testing.T) {
	onRanks(t, 2, func(ctx context.Context, r *symmem.Rank) error {
		if _, err := r.Stream(); err != nil {
			return err
		}
		counted := r.Device().(interface{ Stats() devhost.Stats })
		had := counted.Stats().Streams
		sub, err := r.Sub(ctx, []int{0, 1})
		if err != nil {
			return err
		}
		x, err := sub.Zeros(ctx, tensor.Float32, 100)
		if err != nil {
			return err
		}
		if err := errors.Join(x.Rendezvous(ctx), sub.AllReduce(ctx, x, kernels.Sum), sub.Synchronize(ctx)); err != nil {
			return err
		}
		s, err := sub.Stream()
		if err != nil {
			return err
		}
		if err := errors.Join(s.BeginCapture(), sub.AllReduce(ctx, x, kernels.Sum), sub.Close(ctx)); err != nil {
			return err
		}
		if _, err := s.EndCapture(); !errors.Is(err, symmem.ErrClosed) {
			return fmt.Errorf("the recording: %w", err)
		}
		if n := counted.Stats().Streams; n != had {
			return fmt.Errorf("the device has %d streams, and had %d", n, had)
		}
		return nil
	})
}

// TestCloseEndsWithItsContext: Close with work that waits for a rank that has not come ends soon after its context, whether that was cancelled or had a deadline, and has kept what the work is on; who
// calls a collective meanwhile is not held up. Once the work has ended a second Close ends it.
func TestCloseEndsWithItsContext(t *testing.T) {
	for _, want := range []error{context.DeadlineExceeded, context.Canceled} {
		t.Run(want.Error(), func(t *testing.T) { closeEndsWithItsContext(t, want) })
	}
}

func closeEndsWithItsContext(t *testing.T, want error) {
	tried := make(chan struct{})
	onTwoLate(t, 40*time.Second, 7*time.Second, 2, func(ctx context.Context, r *symmem.Rank, all []*tensor.Tensor) error {
		for _, x := range all {
			if err := errors.Join(r.AllReduce(ctx, x, kernels.Sum), first(ctx, r, x, 2)); err != nil {
				return err
			}
		}
		if err := r.Barrier(ctx); err != nil {
			return err
		}
		if r.Rank() == 1 {
			<-tried
			_ = r.Close(ctx) // which tells that rank 0 has given up
			return nil
		}
		defer close(tried)
		for _, x := range all {
			if err := r.AllReduce(ctx, x, kernels.Sum); err != nil {
				return err
			}
		}
		const while = 300 * time.Millisecond
		soon, cancel := context.WithTimeout(ctx, while)
		if errors.Is(want, context.Canceled) {
			cancel()
			soon, cancel = context.WithCancel(ctx)
			time.AfterFunc(while, cancel)
		}
		defer cancel()
		beside := make(chan error, 1)
		go func() {
			for r.Open() && ctx.Err() == nil {
				time.Sleep(100 * time.Microsecond)
			}
			began := time.Now()
			err := wantIs(r.AllReduce(soon, all[0], kernels.Sum), symmem.ErrClosed)
			if took := time.Since(began); took > 5*time.Second {
				err = errors.Join(err, fmt.Errorf("a call beside Close took %v", took))
			}
			beside <- err
		}()
		began := time.Now()
		kept := r.Close(soon)
		if took := time.Since(began); took > 10*time.Second || !errors.Is(kept, want) {
			return fmt.Errorf("Close took %v: %w", took, kept)
		}
		if err := <-beside; err != nil {
			return err
		}
		if err := r.Close(ctx); errors.Is(err, symmem.ErrClosed) {
			return fmt.Errorf("the first Close has kept nothing: %w", err)
		}
		return wantIs(r.Close(ctx), symmem.ErrClosed)
	})
}

// TestCloseBesideARun: a Close that comes while another goroutine enqueues a collective on a stream that is full waits no longer than its context lasts, and the rank can be closed again.
func TestCloseBesideARun(t *testing.T) {
	onRanks(t, 2, func(ctx context.Context, r *symmem.Rank) error {
		x, err := ones(ctx, r, 12)
		if err := errors.Join(err, r.AllReduce(ctx, x, kernels.Sum)); err != nil || r.Rank() == 1 {
			return err
		}
		release := symmem.HoldCalls(r)
		soon, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
		defer cancel()
		closed := make(chan error, 1)
		go func() { closed <- r.Close(soon) }()
		select {
		case err = <-closed:
			err = wantIs(err, context.DeadlineExceeded)
			release()
		case <-time.After(10 * time.Second):
			release()
			err = fmt.Errorf("it outlives its context: %w", <-closed)
		}
		return err
	})
}

// TestBarrierBesideACall: a Barrier of one goroutine and a call of another that makes its plan come one after the other, in the order in which they began, though the group has one
// order of exchanges for both.
func TestBarrierBesideACall(t *testing.T) {
	onRanks(t, 2, func(ctx context.Context, r *symmem.Rank) error {
		for n := int64(1); n <= 40; n++ {
			x, err := ones(ctx, r, n)
			if err != nil {
				return err
			}
			done := make(chan error, 1)
			go func() { done <- r.AllReduce(ctx, x, kernels.Sum) }()
			awaitCall(ctx, r, done)
			if err := errors.Join(r.Barrier(ctx), <-done, first(ctx, r, x, 2), x.Close(ctx)); err != nil {
				return fmt.Errorf("round %d: %w", n, err)
			}
		}
		return nil
	})
}

// TestBarrierGivesUpItsTurn: a Barrier that comes while another goroutine waits for the other ranks ends with its context, and the others are told when the turn comes. Then the
// ranks are in step.
func TestBarrierGivesUpItsTurn(t *testing.T) {
	onRanks(t, 2, func(ctx context.Context, r *symmem.Rank) error {
		x, err := ones(ctx, r, 12)
		if err != nil {
			return err
		}
		sub := func(ctx context.Context) error {
			s, err := r.Sub(ctx, []int{0, 1})
			if err != nil {
				return err
			}
			return errors.Join(s.Barrier(ctx), s.Close(ctx))
		}
		after := func() error { return errors.Join(r.Barrier(ctx), sub(ctx), first(ctx, r, x, 2)) }
		store := r.Group().Store()
		if r.Rank() == 1 {
			if _, err := store.Get(ctx, "rank 0 has given up"); err != nil {
				return err
			}
			err := r.AllReduce(ctx, x, kernels.Sum)
			for _, call := range []error{r.Barrier(ctx)} {
				if vote, ok := errors.AsType[*group.VoteError](call); !ok || vote.Failures[0].Rank != 0 {
					err = errors.Join(err, fmt.Errorf("nobody has told that rank 0 gave up: %w", call))
				}
			}
			return errors.Join(err, after())
		}
		ran := make(chan error, 1)
		go func() { ran <- r.AllReduce(ctx, x, kernels.Sum) }()
		awaitCall(ctx, r, ran)
		soon, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
		defer cancel()
		for _, call := range []error{r.Barrier(soon)} {
			if _, gaveUp := errors.AsType[*memory.TurnError](call); !gaveUp || !errors.Is(call, context.DeadlineExceeded) {
				err = errors.Join(err, fmt.Errorf("while a plan is made: %w", call))
			}
		}
		return errors.Join(err, store.Set(ctx, "rank 0 has given up", nil), <-ran, after())
	})
}

// TestSubWithoutContext: a rank that has no context for a sub-group tells the others at once, and the next one is in step.
func TestSubWithoutContext(t *testing.T) {
	onRanks(t, 2, func(ctx context.Context, r *symmem.Rank) error {
		asked := ctx
		if r.Rank() == 1 {
			var none context.Context
			asked = none
		}
		_, err := r.Sub(asked, []int{0, 1})
		if err := wantIs(err, symmem.ErrInvalid); err != nil {
			return err
		}
		s, err := r.Sub(ctx, []int{0, 1})
		if err != nil {
			return err
		}
		return s.Close(ctx)
	})
}

// TestCloseBehindASub: a Close that comes while another goroutine makes a sub-group closes that, too; a Sub behind it is refused.
func TestCloseBehindASub(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	ranks, err := symmem.OpenLocal(ctx, 2, config.Default(), nobody)
	require.NoError(t, err)
	closing := make(chan struct{})
	var g errgroup.Group
	for _, r := range ranks {
		g.Go(func() error {
			if r.Rank() == 1 {
				<-closing
			}
			made := make(chan *symmem.Rank, 1)
			var sub errgroup.Group
			sub.Go(func() error {
				s, err := r.Sub(ctx, []int{0, 1})
				made <- s
				return err
			})
			if r.Rank() == 0 {
				time.AfterFunc(100*time.Millisecond, func() { close(closing) })
			}
			for !r.MakesSub() && len(made) == 0 && ctx.Err() == nil {
				time.Sleep(100 * time.Microsecond)
			}
			closed := r.Close(ctx)
			if err := errors.Join(sub.Wait(), closed); err != nil {
				return fmt.Errorf("rank %d: %w", r.Rank(), err)
			}
			_, behind := r.Sub(ctx, []int{0, 1})
			return errors.Join(wantIs((<-made).Close(ctx), symmem.ErrClosed), wantIs(behind, symmem.ErrClosed))
		})
	}
	require.NoError(t, g.Wait())
}

// TestCloseBesideASubsClose: a Close that comes while another goroutine closes a sub-group waits for that, whose memory is on the device that it closes.
func TestCloseBesideASubsClose(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	ranks, err := symmem.OpenLocal(ctx, 2, config.Default(), nobody)
	require.NoError(t, err)
	alone := make(chan struct{})
	var g errgroup.Group
	for _, r := range ranks {
		g.Go(func() error {
			s, err := r.Sub(ctx, []int{0, 1})
			if err != nil {
				return err
			}
			x, err := s.Zeros(ctx, tensor.Float32, 16)
			if err != nil {
				return err
			}
			if err := x.Rendezvous(ctx); err != nil {
				return err
			}
			if r.Rank() == 1 {
				<-alone
				return errors.Join(s.Close(ctx), r.Close(ctx))
			}
			var sub errgroup.Group
			sub.Go(func() error { return s.Close(ctx) })
			for s.Open() {
				time.Sleep(time.Millisecond)
			}
			// The other rank does not come yet: who waits only for a time gives up, and may close again.
			brief, end := context.WithTimeout(ctx, 20*time.Millisecond)
			defer end()
			early := r.Close(brief)
			time.AfterFunc(20*time.Millisecond, func() { close(alone) })
			closed := r.Close(ctx)
			if s.Group().Err() == nil {
				closed = errors.Join(closed, errors.New("the rank was closed before its sub-group"))
			}
			return errors.Join(wantIs(early, context.DeadlineExceeded), closed, sub.Wait())
		})
	}
	require.NoError(t, g.Wait())
}
