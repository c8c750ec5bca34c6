package kernels

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/backend/host"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/tensor"
)

// brokenFar is a backend without peer pointers whose transfers fail from some time on.
type brokenFar struct {
	backend.Backend
	broken atomic.Bool
}

var errBroken = errors.New("the link is broken")

func (b *brokenFar) PrepareTransfer(op backend.TransferOp, peer int, blocks []backend.TransferBlock) (backend.PreparedTransfer, error) {
	t, err := b.Backend.(backend.Transferrer).PrepareTransfer(op, peer, blocks)
	return brokenTransfer{t, b}, err
}

func (b *brokenFar) NewFlags(ctx context.Context, n int) (backend.Flags, error) {
	return b.Backend.(backend.Flagger).NewFlags(ctx, n)
}

func (b *brokenFar) Quiesce(ctx context.Context) error {
	return b.Backend.(backend.Quiescer).Quiesce(ctx)
}

type brokenTransfer struct {
	backend.PreparedTransfer
	link *brokenFar
}

func (t brokenTransfer) Start() (device.HostProgress, error) {
	if t.link.broken.Load() {
		return nil, errBroken
	}
	return t.PreparedTransfer.Start()
}

// TestTransfersFail: whatever keeps a run from its end is an error of the stream that the plan was run on, whichever stream of the plan
// it happened on: a peer that does not come, one that is lost, a put that fails.
func TestTransfersFail(t *testing.T) {
	for _, c := range []struct {
		name string
		want error
		at0  bool // rank 0's link breaks; else rank 1 does what peer says
		peer func(g *group.Group)
	}{
		{"late", os.ErrDeadlineExceeded, false, func(*group.Group) {}},
		{"lost", backend.ErrPeerLost, false, func(g *group.Group) { g.Abort("test") }},
		{"broken", errBroken, true, nil},
	} {
		for _, elements := range []int64{1 << 10, 1 << 20} { // small, and in laps
			for _, graph := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s/%d/graph=%t", c.name, elements, graph), func(t *testing.T) {
					groups, err := group.Local(2, nil)
					require.NoError(t, err)
					var ranks errgroup.Group
					for _, g := range groups {
						ranks.Go(func() error {
							link, p, s, err := farPlan(g, elements)
							if err != nil {
								return err
							}
							ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
							defer cancel()
							if err := errors.Join(p.Run(s), s.Synchronize(ctx), g.Barrier(ctx, "one run")); err != nil {
								return err
							}
							if g.Rank() == 1 {
								if c.peer != nil {
									c.peer(g)
									return nil
								}
								return failingRun(ctx, p, s, graph, os.ErrDeadlineExceeded)
							}
							link.broken.Store(c.at0)
							return failingRun(ctx, p, s, graph, c.want)
						})
					}
					require.NoError(t, ranks.Wait())
				})
			}
		}
	}
}

// farPlan makes a plan by transfers between ranks that wait for 300 ms at the most.
func farPlan(g *group.Group, elements int64) (*brokenFar, *Plan, device.Stream, error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	near, err := host.New(g, nil)
	if err != nil {
		return nil, nil, nil, err
	}
	link := &brokenFar{Backend: backendtest.Far(near, g, nil)}
	m := backend.NewMemory(link, g, &backend.MemoryOptions{KernelTimeout: 300 * time.Millisecond})
	x, err := tensor.Empty(ctx, m, tensor.Float32, elements)
	if err != nil {
		return nil, nil, nil, err
	}
	if err := x.Rendezvous(ctx); err != nil {
		return nil, nil, nil, err
	}
	s, err := m.Device().NewStream()
	if err != nil {
		return nil, nil, nil, err
	}
	p, err := NewAllReduce(ctx, x, Sum, nil)
	return link, p, s, err
}

// failingRun runs a plan, which must fail so, be told once, and refuse to run again.
func failingRun(ctx context.Context, p *Plan, s device.Stream, graph bool, want error) error {
	run := func() error { return p.Run(s) }
	if graph {
		err := errors.Join(s.BeginCapture(), p.Run(s))
		g, ended := s.EndCapture()
		if err := errors.Join(err, ended); err != nil {
			return err
		}
		run = func() error { return g.Launch(s) }
	}
	if err := run(); err != nil {
		return err
	}
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
