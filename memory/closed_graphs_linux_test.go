package memory_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/backend/host"
	"github.com/symmem/symmem/device"
	devhost "github.com/symmem/symmem/device/host"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/memory"
)

// TestGraphsOfClosedMemory: signals, waits and barriers that a graph has kept until their memory was closed are ErrClosed in the graph's
// stream, though the group lives on; so are those of a plan, before it is closed and after.
func TestGraphsOfClosedMemory(t *testing.T) { keptByGraphs(t, time.Minute, graphsOfClosedMemory) }

// keptByGraphs runs a test of what graphs have kept on two ranks, near and far. It closes the memory; the device lives on until its end.
func keptByGraphs(t *testing.T, timeout time.Duration, run func(ctx context.Context, m *memory.Memory, d device.Device) error) {
	for _, far := range []bool{false, true} {
		t.Run(fmt.Sprintf("far=%t", far), func(t *testing.T) {
			backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
				d, err := devhost.New(&devhost.Options{Err: g.Err})
				if err != nil {
					return err
				}
				near, err := host.New(g, &host.Options{Device: d})
				if err != nil {
					return err
				}
				var b backend.Backend = near
				if far {
					b = backendtest.Far(near, g, nil)
				}
				if err = run(ctx, memory.New(b, g, &memory.Options{Channels: 1, KernelTimeout: timeout}), d); err != nil {
					g.Abort("the test has failed") // the other rank may be waiting
				}
				return errors.Join(err, d.Close())
			}))
		})
	}
}

// keptGraph is a graph of one thing that is enqueued.
type keptGraph struct {
	what    string
	enqueue func() error
	graph   device.Graph
}

// keep records the graphs, and launches each once.
func keep(ctx context.Context, s device.Stream, kept []keptGraph) error {
	for i := range kept {
		k := &kept[i]
		err := errors.Join(s.BeginCapture(), k.enqueue())
		if err != nil {
			return err
		}
		if k.graph, err = s.EndCapture(); err != nil {
			return err
		}
		if err := errors.Join(k.graph.Launch(s), s.Synchronize(ctx)); err != nil {
			return fmt.Errorf("a graph with a %s: %w", k.what, err)
		}
	}
	return nil
}

func graphsOfClosedMemory(ctx context.Context, m *memory.Memory, d device.Device) error {
	if err := backendtest.WithWindow(ctx, m, 100, nil); err != nil { // the first makes the signal pads
		return err
	}
	c, err := m.NewWorkspace(ctx, memory.WorkspaceRequest{Purpose: "test", Bytes: 4096})
	if err != nil {
		return err
	}
	signals, err := c.Signals(ctx, 0, &memory.SignalsOptions{Channels: 1, Op: "the plan", Failed: func(err error) error { return err }})
	if err != nil {
		return err
	}
	s, err := d.NewStream()
	if err != nil {
		return err
	}
	peer := 1 - m.Group().Rank()
	kept := []keptGraph{
		{what: "signal", enqueue: func() error { return m.Signal(s, peer, 0) }},
		{what: "wait", enqueue: func() error { return m.Wait(s, peer, 0) }},
		{what: "barrier", enqueue: func() error { return m.Barrier(s, 0) }},
		{what: "plan's signal", enqueue: func() error { return signals.SignalAll(s, 0) }},
		{what: "plan's wait", enqueue: func() error { return signals.WaitAll(s, 0) }},
	}
	if err := keep(ctx, s, kept); err != nil {
		return err
	}
	if err := m.Close(ctx); err != nil {
		return err
	}
	for _, closed := range []bool{false, true} {
		if closed {
			if err := signals.Close(); err != nil {
				return err
			}
		}
		for _, k := range kept {
			if err := errors.Join(k.graph.Launch(s), s.Synchronize(ctx)); !errors.Is(err, errs.ErrClosed) {
				return fmt.Errorf("a graph with a %s after the memory was closed, and the plan %t: %w", k.what, closed, err)
			}
		}
	}
	for _, k := range kept {
		if err := k.graph.Close(); err != nil {
			return err
		}
	}
	return s.Close()
}
