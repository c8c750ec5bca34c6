package kernels

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/backend/host"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

var errBroken = errors.New("the link is broken")

// TestTransfersFail: whatever keeps a run from its end is an error of the stream that the plan was run on, whichever stream of the plan
// it happened on: a peer that does not come, one that is lost, a put that fails.
func TestTransfersFail(t *testing.T) {
	for _, c := range []struct {
		name string
		want error                // of rank 0's run
		peer func(g *group.Group) // what rank 1 does in place of it; nil if it is rank 0's link that breaks
	}{
		{"late", os.ErrDeadlineExceeded, func(*group.Group) {}},
		{"lost", errs.ErrPeerLost, func(g *group.Group) { g.Abort("test") }},
		{"broken", errBroken, nil},
	} {
		for _, elements := range []int64{1 << 10, 1 << 20} { // small, and in laps
			for _, graph := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s/%d/graph=%t", c.name, elements, graph), func(t *testing.T) {
					t.Parallel()                 // they wait more than they work
					begun := make(chan struct{}) // rank 0's run, so that it is not refused at once
					backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
						var broken atomic.Bool
						return onFarPlan(ctx, g, elements, &broken, func(p *Plan, _ *tensor.Tensor, s device.Stream) error {
							if err := errors.Join(p.Run(s), s.Synchronize(ctx), g.Barrier(ctx, "one run")); err != nil {
								return err
							}
							switch {
							case g.Rank() == 1 && c.peer != nil:
								select {
								case <-begun:
								case <-ctx.Done():
								}
								c.peer(g)
								return ctx.Err()
							case g.Rank() == 1:
								return failingRun(ctx, p, s, graph, os.ErrDeadlineExceeded, func() {})
							}
							broken.Store(c.peer == nil)
							return failingRun(ctx, p, s, graph, c.want, func() { close(begun) })
						})
					}))
				})
			}
		}
	}
}

// onFarPlan makes a plan by transfers, which fail when broken is set, between ranks that wait for a second at the most, and runs f on it.
func onFarPlan(ctx context.Context, g *group.Group, elements int64, broken *atomic.Bool, f func(p *Plan, x *tensor.Tensor, s device.Stream) error) (err error) {
	near, err := host.New(g, nil)
	if err != nil {
		return err
	}
	far := backendtest.Far(near, g, &backendtest.FarOptions{Fail: func() error {
		if broken.Load() {
			return errBroken
		}
		return nil
	}})
	m := memory.New(far, g, &memory.Options{KernelTimeout: time.Second})
	closing := func(close func() error) {
		if closed := close(); !errors.Is(closed, errs.ErrPeerLost) { // which is what closing tells then
			err = errors.Join(err, closed)
		}
	}
	defer closing(func() error { return m.Close(ctx) })
	x, err := tensor.Zeros(ctx, m, tensor.Float32, elements)
	if err != nil {
		return err
	}
	defer closing(func() error { return x.Close(ctx) })
	if err := x.Rendezvous(ctx); err != nil {
		return err
	}
	s, err := m.Device().NewStream()
	if err != nil {
		return err
	}
	defer closing(s.Close)
	p, err := NewAllReduce(ctx, x, Sum, nil)
	if err != nil {
		return err
	}
	defer closing(func() error { return p.Close(ctx) })
	return f(p, x, s)
}

// failingRun runs a plan, which must fail so, be told once, and refuse to run again. It calls begun when the run was enqueued.
func failingRun(ctx context.Context, p *Plan, s device.Stream, graph bool, want error, begun func()) (err error) {
	run := func() error { return p.Run(s) }
	if graph {
		err := errors.Join(s.BeginCapture(), p.Run(s))
		g, ended := s.EndCapture()
		if err := errors.Join(err, ended); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, g.Close()) }()
		run = func() error { return g.Launch(s) }
	}
	if err := run(); err != nil {
		return err
	}
	begun()
	if err := s.Synchronize(ctx); !errors.Is(err, want) {
		return fmt.Errorf("Synchronize gave %v, and %w was expected", err, want)
	}
	if err := s.Synchronize(ctx); err != nil {
		return fmt.Errorf("told twice: %w", err)
	}
	if err := p.Run(s); !errors.Is(err, want) {
		return fmt.Errorf("the next run gave %v, and %w was expected", err, want)
	}
	return nil
}

// TestFailedRunReducesNothing: a run that waits for its peer in vain leaves its output as it was, and so do those behind it: what would be
// reduced is not what the peer has sent.
func TestFailedRunReducesNothing(t *testing.T) {
	for _, elements := range []int64{1 << 10, 1 << 20} { // small, and in laps
		for _, graph := range []bool{false, true} {
			t.Run(fmt.Sprintf("%d/graph=%t", elements, graph), func(t *testing.T) {
				t.Parallel() // they wait more than they work
				backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
					var whole atomic.Bool
					return onFarPlan(ctx, g, elements, &whole, func(p *Plan, x *tensor.Tensor, s device.Stream) error {
						in := x.Local()
						want := make([]float32, elements)
						for i := range want {
							want[i] = float32(i%1000 + 1)
						}
						// What the first run sends is still in the workspace when the second one waits.
						if err := errors.Join(tensor.Write(in, want, 0), p.Run(s), s.Synchronize(ctx), g.Barrier(ctx, "one run")); err != nil {
							return err
						}
						if g.Rank() == 1 {
							return nil // it does not run again
						}
						if err := tensor.Write(in, want, 0); err != nil {
							return err
						}
						if err := failingRun(ctx, p, s, graph, os.ErrDeadlineExceeded, func() {}); err != nil {
							return err
						}
						got, err := tensor.ReadAll[float32](in)
						if err != nil {
							return err
						}
						for i, v := range got {
							if v != want[i] {
								return fmt.Errorf("element %d is %v after a run that failed, and was %v", i, v, want[i])
							}
						}
						return nil
					})
				}))
			})
		}
	}
}
