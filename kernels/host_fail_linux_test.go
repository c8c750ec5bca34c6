package kernels

import (
	"context"
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/backend/host"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// TestFailedRunIsTheLast: of the runs that are queued behind one that failed none begins, so that a peer that comes late does not take
// what it finds for their result.
func TestFailedRunIsTheLast(t *testing.T) {
	for _, graph := range []bool{false, true} {
		t.Run(fmt.Sprintf("graph=%t", graph), func(t *testing.T) {
			backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
				b, err := host.New(g, nil)
				if err != nil {
					return err
				}
				m := memory.New(b, g, &memory.Options{KernelTimeout: 100 * time.Millisecond})
				return errors.Join(failingFirst(ctx, m, graph), g.Barrier(ctx, "end"), m.Close(ctx))
			}))
		})
	}
}

func failingFirst(ctx context.Context, m *memory.Memory, graph bool) error {
	t, err := tensor.Zeros(ctx, m, tensor.Float32, 100)
	if err != nil {
		return err
	}
	if err := t.Rendezvous(ctx); err != nil {
		return err
	}
	p, err := NewAllReduce(ctx, t, Sum, &AllReduceOptions{Algorithm: OneShot})
	if err != nil {
		return err
	}
	s, err := m.Device().NewStream()
	if err != nil {
		return err
	}
	run := func() error { return p.Run(s) }
	var recorded device.Graph
	if graph {
		if err := errors.Join(s.BeginCapture(), p.Run(s)); err != nil {
			return err
		}
		if recorded, err = s.EndCapture(); err != nil {
			return err
		}
		run = func() error { return recorded.Launch(s) }
	}
	runs := func() error { return errors.Join(run(), run(), s.Synchronize(ctx)) }
	if m.Group().Rank() == 0 { // waits for nobody, in vain
		if err := runs(); !errors.Is(err, os.ErrDeadlineExceeded) {
			return fmt.Errorf("runs without the peer: %w", err)
		}
		if err := s.Synchronize(ctx); err != nil {
			return fmt.Errorf("told twice: %w", err)
		}
	}
	if err := m.Group().Barrier(ctx, "failed"); err != nil {
		return err
	}
	if m.Group().Rank() == 1 {
		if err := runs(); !errors.Is(err, os.ErrDeadlineExceeded) {
			return fmt.Errorf("two runs with a peer that began one: %w", err)
		}
	}
	if err := p.Run(s); !errors.Is(err, os.ErrDeadlineExceeded) {
		return fmt.Errorf("a plan that has failed: %w", err)
	}
	if graph {
		err = recorded.Close()
	}
	return errors.Join(err, s.Close(), p.Close(ctx), t.Close(ctx))
}

// TestOneShotIsNotOverrun: a rank that has ended a run and begins the next does not overwrite what a slower one still reduces.
func TestOneShotIsNotOverrun(t *testing.T) {
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		b, err := host.New(g, nil)
		if err != nil {
			return err
		}
		m := memory.New(b, g, nil)
		return errors.Join(slowReduction(ctx, m), g.Barrier(ctx, "end"), m.Close(ctx))
	}))
}

func slowReduction(ctx context.Context, m *memory.Memory) error {
	const n, runs = 100, 4
	t, err := tensor.Zeros(ctx, m, tensor.Float32, n)
	if err != nil {
		return err
	}
	if err := t.Rendezvous(ctx); err != nil {
		return err
	}
	p, err := NewAllReduce(ctx, t, Sum, &AllReduceOptions{Algorithm: OneShot})
	if err != nil {
		return err
	}
	if m.Group().Rank() == 1 {
		k := p.work.(*hostWork).allReduce
		reduce := k.reduce
		k.reduce = func(dst []byte, srcs [][]byte, lo, hi int64) {
			time.Sleep(10 * time.Millisecond)
			reduce(dst, srcs, lo, hi)
		}
	}
	// What goes in and what came out, run by run.
	in, err := tensor.Zeros(ctx, m, tensor.Float32, runs, n)
	if err != nil {
		return err
	}
	out, err := tensor.Zeros(ctx, m, tensor.Float32, runs, n)
	if err != nil {
		return err
	}
	s, err := m.Device().NewStream()
	if err != nil {
		return err
	}
	for i := range int64(runs) {
		for j := range int64(n) {
			if err := tensor.Write(in.Local(), []float32{float32(1000*i + j)}, i*n+j); err != nil {
				return err
			}
		}
		at := i * t.Bytes()
		if err := errors.Join(s.Copy(t.Ptr(), in.Ptr().Add(at), t.Bytes()), p.Run(s), s.Copy(out.Ptr().Add(at), t.Ptr(), t.Bytes())); err != nil {
			return err
		}
	}
	if err := s.Synchronize(ctx); err != nil {
		return err
	}
	got, err := tensor.ReadAll[float32](out.Local())
	if err != nil {
		return err
	}
	for i, v := range got {
		if want := float32(2 * (1000*(i/n) + i%n)); v != want {
			return fmt.Errorf("run %d: element %d is %v, not %v", i/n, i%n, v, want)
		}
	}
	return errors.Join(s.Close(), p.Close(ctx), out.Close(ctx), in.Close(ctx), t.Close(ctx))
}
