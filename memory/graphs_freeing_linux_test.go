package memory_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/memory"
)

// launchedWhileGoing is graphs of things of memory that go on rank 0 by end, while that waits for the other rank.
type launchedWhileGoing struct {
	kept []keptGraph
	s    device.Stream
	end  func() error
	rest func() error // what is closed behind that
}

// TestGraphsLaunchedWhileFreeing: a graph that is launched when a rank has found its device idle, and waits for the others to free memory, or to close a heap, a workspace or the memory, is ErrClosed, and
// touches nothing: the others take what it writes to for free when they come.
func TestGraphsLaunchedWhileFreeing(t *testing.T) {
	for name, of := range map[string]func(ctx context.Context, m *memory.Memory) (*launchedWhileGoing, error){
		"allocation": goingWindow, "heap": goingHeap, "workspace": goingWorkspace, "memory": goingMemory,
	} {
		t.Run(name, func(t *testing.T) {
			onSlow(t, func(ctx context.Context, b *slow, m *memory.Memory) error {
				x, err := of(ctx, m)
				if err != nil {
					return err
				}
				if err := keep(ctx, own(x.s), x.kept); err != nil {
					return err
				}
				store := m.Group().Store()
				var once sync.Once
				if m.Group().Rank() != 0 {
					b.device.idle = func() { once.Do(func() { _, err = store.Get(ctx, "launched") }) }
					ended := x.end()
					b.device.idle = nil
					return errors.Join(err, ended, x.rest())
				}
				looked := make(chan struct{})
				b.device.idle = func() { once.Do(func() { close(looked) }) }
				ended := make(chan error, 1)
				go func() { ended <- x.end() }()
				select {
				case <-looked:
				case err := <-ended:
					return fmt.Errorf("it has not waited for the device: %w", err)
				}
				time.Sleep(soon) // else a wait of a plan may be in vain before, which that tells from then on
				for _, k := range x.kept {
					err = errors.Join(err, k.closed(ctx, own(x.s)))
				}
				err = errors.Join(err, store.Set(ctx, "launched", nil), <-ended)
				b.device.idle = nil
				return errors.Join(err, x.rest())
			})
		})
	}
}

// own is a stream as its device has made it, which is where graphs can be launched.
func own(s device.Stream) device.Stream {
	if x, ok := s.(*slowStream); ok {
		return x.Stream
	}
	return s
}

// closed launches the graph until it is told that what it has kept is going, which soon is so.
func (k *keptGraph) closed(ctx context.Context, s device.Stream) error {
	for begin := time.Now(); ; time.Sleep(time.Millisecond) {
		told := errors.Join(k.graph.Launch(s), s.Synchronize(ctx))
		if errors.Is(told, errs.ErrClosed) {
			return nil
		}
		if time.Since(begin) > patience {
			return fmt.Errorf("a graph with a %s: %w", k.what, told)
		}
	}
}

// goingWindow is memory with a window that is freed.
func goingWindow(ctx context.Context, m *memory.Memory) (*launchedWhileGoing, error) {
	a, err := m.Allocate(ctx, 128, "")
	if err != nil {
		return nil, err
	}
	w, err := m.Rendezvous(ctx, a, memory.Record{})
	if err != nil {
		return nil, err
	}
	x, err := puts(m, w, 0, a.Ptr())
	if err == nil {
		x.end = func() error { return m.Free(ctx, a) }
		x.rest = func() error { return errors.Join(x.s.Close(), m.Close(ctx)) }
	}
	return x, err
}

// goingHeap is a piece of a heap that is closed.
func goingHeap(ctx context.Context, m *memory.Memory) (*launchedWhileGoing, error) {
	h, err := m.NewHeap(ctx, 4096)
	if err != nil {
		return nil, err
	}
	a, err := h.Allocate(ctx, 128, "u8", nil)
	if err != nil {
		return nil, err
	}
	x, err := puts(m, a.Window(), a.Offset(), a.Allocation().Ptr().Add(a.Offset()))
	if err == nil {
		x.end = func() error { return h.Close(ctx) }
		x.rest = func() error { return errors.Join(x.s.Close(), m.Close(ctx)) }
	}
	return x, err
}

// goingWorkspace is the signals of a plan whose workspace is closed.
func goingWorkspace(ctx context.Context, m *memory.Memory) (*launchedWhileGoing, error) {
	c, signals, err := planned(ctx, m)
	if err != nil {
		return nil, err
	}
	s, err := m.Device().NewStream()
	if err != nil {
		return nil, err
	}
	own, err := c.Peer(m.Group().Rank())
	if err != nil {
		return nil, err
	}
	send, err := signals.PrepareSend(0, memory.SendPut{Peer: 1 - m.Group().Rank(), Offset: 2048, Local: own.Add(3072), Bytes: 8})
	if err != nil {
		return nil, err
	}
	both := func() error { return errors.Join(send.Enqueue(s), signals.WaitAll(s, 0)) }
	return &launchedWhileGoing{
		kept: []keptGraph{{what: "send and wait", enqueue: both}},
		s:    s,
		end:  func() error { return c.Close(ctx) },
		rest: func() error {
			if err := errors.Join(send.Close(), signals.Close()); err != nil {
				return err
			}
			next, err := m.NewWorkspace(ctx, memory.WorkspaceRequest{Purpose: "next", Bytes: 4096})
			if err != nil {
				return err
			}
			at, err := next.Peer(m.Group().Rank())
			if err != nil {
				return err
			}
			found := make([]byte, 4096)
			if err := m.Device().CopyToHost(found, at); err != nil {
				return err
			}
			for i, b := range found {
				if b != 0 {
					return fmt.Errorf("byte %d of the next workspace is %d", i, b)
				}
			}
			return errors.Join(next.Close(ctx), s.Close(), m.Close(ctx))
		},
	}, nil
}

// goingMemory is signals, and a put, of memory that is closed.
func goingMemory(ctx context.Context, m *memory.Memory) (*launchedWhileGoing, error) {
	x, err := goingWindow(ctx, m)
	if err != nil {
		return nil, err
	}
	peer := 1 - m.Group().Rank()
	x.kept = append(x.kept,
		keptGraph{what: "signal", enqueue: func() error { return m.Signal(x.s, peer, 0) }},
		keptGraph{what: "wait", enqueue: func() error { return m.Wait(x.s, peer, 0) }},
		keptGraph{what: "barrier", enqueue: func() error { return m.Barrier(x.s, 0) }},
	)
	x.end = func() error { return m.Close(ctx) }
	x.rest = func() error { return nil }
	return x, nil
}

// puts is a put and a get between places of a window and memory of this rank.
func puts(m *memory.Memory, w *memory.Window, offset int64, local device.Ptr) (*launchedWhileGoing, error) {
	s, err := m.Device().NewStream()
	if err != nil {
		return nil, err
	}
	peer := 1 - m.Group().Rank()
	return &launchedWhileGoing{s: s, kept: []keptGraph{
		{what: "put", enqueue: func() error { return m.Copy(s, backend.Write, peer, w, offset+64, local, 64) }},
		{what: "get", enqueue: func() error { return m.Copy(s, backend.Read, peer, w, offset, local.Add(64), 64) }},
	}}, nil
}

// TestFreeWaitsForGraphsLaunchedMeanwhile: what a graph has begun just before a rank tells the others that its device is idle has ended when the memory is given back, and what of it comes later touches
// that no more.
func TestFreeWaitsForGraphsLaunchedMeanwhile(t *testing.T) {
	onSlow(t, func(ctx context.Context, b *slow, m *memory.Memory) error {
		x, err := goingWindow(ctx, m)
		if err != nil {
			return err
		}
		let := make(chan struct{})
		if err := x.s.BeginCapture(); err != nil {
			return err
		}
		err = errors.Join(x.s.HostFunc(func() { <-let }), x.kept[0].enqueue())
		g, ended := x.s.EndCapture()
		if err := errors.Join(err, ended, m.Group().Barrier(ctx, "recorded")); err != nil {
			return err
		}
		var once sync.Once
		var launched error
		b.device.idle = func() {
			once.Do(func() {
				launched = g.Launch(own(x.s))
				go func() { time.Sleep(soon); close(let) }()
			})
		}
		freed := x.end()
		over, asked := x.s.Query()
		b.device.idle = nil
		if err := errors.Join(launched, freed, asked); err != nil || !over {
			return fmt.Errorf("freed while the graph was at work: %t; %w", !over, err)
		}
		if told := x.s.Synchronize(ctx); !errors.Is(told, errs.ErrClosed) {
			return fmt.Errorf("the put of the graph: %w", told)
		}
		return errors.Join(g.Close(), x.rest())
	})
}

// TestGraphsOfMemoryThatWasKept: graphs of memory that all ranks keep, because the library of one of them still works on it, go on.
func TestGraphsOfMemoryThatWasKept(t *testing.T) {
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		b, err := newSickly(g)
		if err != nil {
			return err
		}
		x, err := goingWindow(ctx, memory.New(b, g, nil))
		if err != nil {
			return err
		}
		if err := keep(ctx, x.s, x.kept); err != nil {
			return err
		}
		b.moving.Store(g.Rank() == 1)
		if err := x.end(); err == nil {
			return errors.New("memory that the library works on was freed")
		}
		b.moving.Store(false)
		for _, k := range x.kept {
			if err := errors.Join(k.graph.Launch(x.s), x.s.Synchronize(ctx)); err != nil {
				return fmt.Errorf("a graph with a %s of memory that was kept: %w", k.what, err)
			}
		}
		return errors.Join(g.Barrier(ctx, "launched"), x.end(), x.rest())
	}))
}
