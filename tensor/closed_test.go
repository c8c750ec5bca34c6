package tensor_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// onRanks runs f on n ranks of this process.
func onRanks(t *testing.T, n int, f func(ctx context.Context, r *symmem.Rank) error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	ranks, err := symmem.OpenLocal(ctx, n, config.Default(), &symmem.Options{Environ: func() []string { return nil }})
	require.NoError(t, err)
	failures := make([]error, n)
	var wg sync.WaitGroup
	for i, r := range ranks {
		wg.Go(func() { failures[i] = errors.Join(f(ctx, r), r.Close(ctx)) })
	}
	wg.Wait()
	require.NoError(t, errors.Join(failures...))
}

// TestRemoteNamesItself: the error of a rank that there is not is that of the call that was made, and not of one below it.
func TestRemoteNamesItself(t *testing.T) {
	onRanks(t, 2, func(ctx context.Context, r *symmem.Rank) error {
		x, err := r.Zeros(ctx, tensor.Float32, 8)
		if err != nil {
			return err
		}
		if err := x.Rendezvous(ctx); err != nil {
			return err
		}
		if _, err := x.Remote(2); err == nil || err.Error() != "Remote: rank is 2; allowed: 0 to 1, the ranks of the group" {
			return fmt.Errorf("Remote of a rank that there is not: %w", err)
		}
		return x.Close(ctx)
	})
}

// TestRendezvousOfAClosedSlice: where the ranks have had a rendezvous none comes to another. So a rank that has closed its slice is told at once, as no rank would
// come, and the ranks are in step.
func TestRendezvousOfAClosedSlice(t *testing.T) {
	for _, whole := range []bool{true, false} {
		t.Run(fmt.Sprintf("whole=%t", whole), func(t *testing.T) {
			onRanks(t, 2, func(ctx context.Context, r *symmem.Rank) error {
				x, err := r.Zeros(ctx, tensor.Float32, 8)
				if err != nil {
					return err
				}
				part, err := x.Slice(2, 6)
				if err != nil {
					return err
				}
				met := part
				if whole {
					met = x
				}
				if err := met.Rendezvous(ctx); err != nil {
					return err
				}
				if r.Rank() == 0 {
					if err := part.Close(ctx); err != nil {
						return err
					}
				}
				soon, cancel := context.WithTimeout(ctx, 10*time.Second)
				defer cancel()
				err = part.Rendezvous(soon)
				if want := r.Rank() == 0; errors.Is(err, symmem.ErrClosed) != want || !want && err != nil || soon.Err() != nil {
					return fmt.Errorf("rank %d has %v, and its context %v", r.Rank(), err, soon.Err())
				}
				return errors.Join(r.Barrier(ctx), x.Close(ctx))
			})
		})
	}
}

// TestRendezvousOfAClosedTensor: the ranks that wait for one that has closed its tensor have the same condition as that, and what it is.
func TestRendezvousOfAClosedTensor(t *testing.T) {
	for _, slice := range []bool{false, true} {
		t.Run(fmt.Sprintf("slice=%t", slice), func(t *testing.T) {
			onRanks(t, 2, func(ctx context.Context, r *symmem.Rank) error {
				x, err := r.Zeros(ctx, tensor.Float32, 8)
				if err != nil {
					return err
				}
				var closed tensor.SymmetricTensor = x
				if slice {
					if closed, err = x.Slice(2, 6); err != nil {
						return err
					}
				}
				if r.Rank() == 0 {
					if err := closed.Close(ctx); err != nil {
						return err
					}
				}
				err = closed.Rendezvous(ctx)
				if !errors.Is(err, symmem.ErrClosed) || errors.Is(err, symmem.ErrNotSymmetric) {
					return fmt.Errorf("not that a tensor was closed: %w", err)
				}
				if vote, ok := errors.AsType[*group.VoteError](err); ok != (r.Rank() == 1) || ok && vote.Failures[0].Rank != 0 {
					return fmt.Errorf("not that rank 0 has closed it: %w", err)
				}
				if x.Err() != nil {
					return nil
				}
				return x.Close(ctx)
			})
		})
	}
}

// TestSliceClosesOnce: of several goroutines that close one slice, one does.
func TestSliceClosesOnce(t *testing.T) {
	onRanks(t, 1, func(ctx context.Context, r *symmem.Rank) error {
		x, err := r.Zeros(ctx, tensor.Float32, 8)
		if err != nil {
			return err
		}
		for range 2000 {
			part, err := x.Slice(2, 6)
			if err != nil {
				return err
			}
			var closed atomic.Int32
			var wg sync.WaitGroup
			begin := make(chan struct{})
			for range 4 {
				wg.Go(func() {
					<-begin
					switch err := part.Close(ctx); {
					case err == nil:
						closed.Add(1)
					case !errors.Is(err, symmem.ErrClosed):
						closed.Add(100)
					}
				})
			}
			close(begin)
			wg.Wait()
			if n := closed.Load(); n != 1 {
				return fmt.Errorf("%d closed it", n)
			}
		}
		return x.Close(ctx)
	})
}

// TestRendezvousEndsWithItsContext: a Rendezvous beside one of another goroutine, of the same tensor, waits no longer than its own context lasts. When the first has been the
// tensor's rendezvous the ranks are in step.
func TestRendezvousEndsWithItsContext(t *testing.T) {
	onRanks(t, 2, func(ctx context.Context, r *symmem.Rank) error {
		x, err := r.Zeros(ctx, tensor.Float32, 8)
		if err != nil {
			return err
		}
		store := r.Group().Store()
		if r.Rank() == 1 {
			if _, err := store.Get(ctx, "rank 0 has given up"); err != nil {
				return err
			}
			return errors.Join(x.Rendezvous(ctx), x.Rendezvous(ctx), r.Barrier(ctx), x.Close(ctx))
		}
		met := make(chan error, 1)
		go func() { met <- x.Rendezvous(ctx) }()
		for !backendtest.InCall(r.Memory()) && ctx.Err() == nil { // in which it waits for rank 1
			time.Sleep(100 * time.Microsecond)
		}
		soon, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
		defer cancel()
		beside := make(chan error, 1)
		go func() { beside <- x.Rendezvous(soon) }()
		select {
		case gaveUp := <-beside:
			if _, ok := errors.AsType[*memory.TurnError](gaveUp); !ok || !errors.Is(gaveUp, context.DeadlineExceeded) {
				err = fmt.Errorf("the second gives %w", gaveUp)
			}
		case <-time.After(20 * time.Second):
			err = errors.New("the second waits longer than its context")
		}
		return errors.Join(err, store.Set(ctx, "rank 0 has given up", nil), <-met, r.Barrier(ctx), x.Close(ctx))
	})
}
