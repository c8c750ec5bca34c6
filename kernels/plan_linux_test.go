package kernels

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/backend/host"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// onHostRanks runs f on ranks with two tensors of 100 f32 that have had their rendezvous, over host memory.
func onHostRanks(t *testing.T, size int, f func(ctx context.Context, b *holding, m *memory.Memory, x, y *tensor.Tensor) error) {
	t.Helper()
	backendtest.RequireAll(t, backendtest.OnRanks(t, size, nil, func(ctx context.Context, g *group.Group) error {
		b, m, err := newHolding(g)
		if err != nil {
			return err
		}
		x, err := tensor.Zeros(ctx, m, tensor.Float32, 100)
		if err != nil {
			return err
		}
		y, err := tensor.Zeros(ctx, m, tensor.Float32, 100)
		if err != nil {
			return err
		}
		if err = errors.Join(x.Rendezvous(ctx), y.Rendezvous(ctx)); err == nil {
			err = f(ctx, b, m, x, y)
		}
		if err != nil {
			g.Abort("the test has failed") // the other ranks may be waiting
		}
		return errors.Join(err, x.Close(ctx), y.Close(ctx), m.Close(ctx))
	}))
}

// holding is a backend over host memory that counts the bytes that it has given out.
type holding struct {
	backend.Backend
	bytes atomic.Int64
}

func newHolding(g *group.Group) (*holding, *memory.Memory, error) {
	near, err := host.New(g, nil)
	if err != nil {
		return nil, nil, err
	}
	b := &holding{Backend: near}
	return b, memory.New(b, g, &memory.Options{KernelTimeout: 5 * time.Second}), nil
}

func (b *holding) Allocate(ctx context.Context, bytes int64) (backend.Allocation, error) {
	a, err := b.Backend.Allocate(ctx, bytes)
	if err != nil {
		return nil, err
	}
	b.bytes.Add(bytes)
	return &heldAllocation{a, b}, nil
}

func (b *holding) Rendezvous(ctx context.Context, a backend.Allocation) (backend.Mapping, error) {
	return b.Backend.Rendezvous(ctx, a.(*heldAllocation).Allocation)
}

type heldAllocation struct {
	backend.Allocation
	backend *holding
}

func (a *heldAllocation) Release(ctx context.Context) error {
	a.backend.bytes.Add(-a.Bytes())
	return a.Allocation.Release(ctx)
}

// TestRanksMakeOnePlan: where ranks do not make the same plan, all of them are told.
func TestRanksMakeOnePlan(t *testing.T) {
	onHostRanks(t, 2, func(ctx context.Context, _ *holding, m *memory.Memory, x, y *tensor.Tensor) error {
		z, err := tensor.Zeros(ctx, m, tensor.Float32, 100)
		if err != nil {
			return err
		}
		if err := z.Rendezvous(ctx); err != nil {
			return err
		}
		type request struct {
			in *tensor.Tensor
			o  AllReduceOptions
		}
		for _, c := range []struct {
			what string
			of   [2]request
		}{
			{"inputs", [2]request{{x, AllReduceOptions{Out: z}}, {y, AllReduceOptions{Out: z}}}},
			{"outputs", [2]request{{x, AllReduceOptions{Out: y}}, {x, AllReduceOptions{Out: z}}}},
			{"most blocks", [2]request{{x, AllReduceOptions{MaxBlocks: 1}}, {x, AllReduceOptions{MaxBlocks: 2}}}},
			{"first epochs", [2]request{{x, AllReduceOptions{FirstEpoch: 1}}, {x, AllReduceOptions{FirstEpoch: 2}}}},
		} {
			mine := c.of[m.Group().Rank()]
			if _, err := NewAllReduce(ctx, mine.in, Sum, &mine.o); !errors.Is(err, ErrMismatch) {
				return fmt.Errorf("ranks with other %s: %w", c.what, err)
			}
		}
		return z.Close(ctx)
	})
}

// TestPlanIntoAnotherGroup: the result goes into memory of the group that the input is of.
func TestPlanIntoAnotherGroup(t *testing.T) {
	onHostRanks(t, 2, func(ctx context.Context, _ *holding, m *memory.Memory, x, _ *tensor.Tensor) error {
		_, other, err := newHolding(m.Group())
		if err != nil {
			return err
		}
		out, err := tensor.Zeros(ctx, other, tensor.Float32, 100)
		if err != nil {
			return err
		}
		if err := out.Rendezvous(ctx); err != nil {
			return err
		}
		if p, err := NewAllReduce(ctx, x, Sum, &AllReduceOptions{Out: out}); !errors.Is(err, ErrInvalid) {
			if err == nil {
				err = p.Close(ctx)
			}
			return fmt.Errorf("an output of another memory: %w", err)
		}
		return errors.Join(out.Close(ctx), other.Close(ctx))
	})
}

// workWatched is a plan's work that notes when it is given back.
type workWatched struct {
	work
	closed atomic.Bool
}

func (w *workWatched) close() error {
	w.closed.Store(true)
	return w.work.close()
}

// TestBusyPlanKeepsItsWork: what the kernels of a plan use is not given back while the device still works, although the context of Close has
// ended.
func TestBusyPlanKeepsItsWork(t *testing.T) {
	onHostRanks(t, 2, func(ctx context.Context, _ *holding, m *memory.Memory, x, _ *tensor.Tensor) error {
		p, err := NewAllReduce(ctx, x, Sum, nil)
		if err != nil {
			return err
		}
		w := &workWatched{work: p.work}
		p.work = w
		s, err := m.Device().NewStream()
		if err != nil {
			return err
		}
		hold := make(chan struct{})
		if err := errors.Join(s.HostFunc(func() { <-hold }), p.Run(s)); err != nil {
			return err
		}
		soon, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
		err = p.Close(soon)
		cancel()
		kept := !w.closed.Load()
		close(hold)
		if !errors.Is(err, context.DeadlineExceeded) || !kept {
			return fmt.Errorf("closing a plan whose device works on, kept %t: %w", kept, err)
		}
		return errors.Join(s.Synchronize(ctx), s.Close())
	})
}

// TestPlanGivesLargeWorkspaceBack: closing a plan gives back what large workspace nobody uses any more.
func TestPlanGivesLargeWorkspaceBack(t *testing.T) {
	onHostRanks(t, 1, func(ctx context.Context, b *holding, m *memory.Memory, x, _ *tensor.Tensor) error {
		const large = 257 << 20
		had := b.bytes.Load()
		p, err := NewAllReduce(ctx, x, Sum, nil)
		if err != nil {
			return err
		}
		c, err := m.NewWorkspace(ctx, memory.WorkspaceRequest{Purpose: "a large plan", Bytes: large})
		if err != nil {
			return err
		}
		if err := c.Close(ctx); err != nil {
			return err
		}
		if held := b.bytes.Load() - had; held < large {
			return fmt.Errorf("%d bytes more are held where a channel of %d was", held, int64(large))
		}
		if err := p.Close(ctx); err != nil {
			return err
		}
		if held := b.bytes.Load() - had; held >= large {
			return fmt.Errorf("%d bytes more are held after closing", held)
		}
		return nil
	})
}

// TestGraphsOnTwoStreams: a graph of a plan that is launched while another graph runs it on another stream is an error of its stream.
func TestGraphsOnTwoStreams(t *testing.T) {
	onHostRanks(t, 2, func(ctx context.Context, _ *holding, m *memory.Memory, x, _ *tensor.Tensor) error {
		p, err := NewAllReduce(ctx, x, Sum, &AllReduceOptions{Algorithm: OneShot})
		if err != nil {
			return err
		}
		a, err := m.Device().NewStream()
		if err != nil {
			return err
		}
		b, err := m.Device().NewStream()
		if err != nil {
			return err
		}
		if m.Group().Rank() == 1 {
			err := errors.Join(p.Run(a), a.Synchronize(ctx))
			return errors.Join(err, m.Group().Barrier(ctx, "run"), a.Close(), b.Close(), p.Close(ctx))
		}
		k := p.work.(*hostWork).allReduce
		reduce, began, hold := k.reduce, make(chan struct{}, 2), make(chan struct{})
		k.reduce = func(dst []byte, srcs [][]byte, lo, hi int64) {
			began <- struct{}{}
			<-hold
			reduce(dst, srcs, lo, hi)
		}
		var graphs [2]device.Graph // launches of one graph follow each other
		for i := range graphs {
			if err := errors.Join(a.BeginCapture(), p.Run(a)); err != nil {
				return err
			}
			if graphs[i], err = a.EndCapture(); err != nil {
				return err
			}
		}
		if err := graphs[0].Launch(a); err != nil {
			return err
		}
		select {
		case <-began:
		case <-ctx.Done():
			return ctx.Err()
		}
		err = errors.Join(graphs[1].Launch(b), b.Synchronize(ctx))
		close(hold)
		if !errors.Is(err, ErrTwoStreams) {
			return fmt.Errorf("a graph on a second stream: %w", err)
		}
		if err := a.Synchronize(ctx); err != nil {
			return fmt.Errorf("the run under way: %w", err)
		}
		return errors.Join(m.Group().Barrier(ctx, "run"), graphs[0].Close(), graphs[1].Close(), a.Close(), b.Close(), p.Close(ctx))
	})
}

// refusing is a reduction that cannot be enqueued.
type refusing struct{ transferReduce }

func (refusing) enqueue(device.Stream, int) error { return errBroken }

// TestRunInPart: a run of which only the beginning could be enqueued is the plan's last, since its peers do the whole run.
func TestRunInPart(t *testing.T) {
	onHostRanks(t, 2, func(ctx context.Context, _ *holding, m *memory.Memory, x, _ *tensor.Tensor) error {
		p, err := NewAllReduce(ctx, x, Sum, &AllReduceOptions{Algorithm: Transfers})
		if err != nil {
			return err
		}
		s, err := m.Device().NewStream()
		if err != nil {
			return err
		}
		w := p.work.(*transferWork)
		reduce := w.reduce
		w.reduce = refusing{reduce}
		err = p.Run(s)
		w.reduce = reduce
		if !errors.Is(err, errBroken) {
			return fmt.Errorf("a run whose reduction is refused: %w", err)
		}
		if err := p.Run(s); !errors.Is(err, errBroken) || !errors.Is(p.Err(), errBroken) {
			return fmt.Errorf("the run after one in part: %w", err)
		}
		return errors.Join(s.Synchronize(ctx), s.Close(), p.Close(ctx))
	})
}
