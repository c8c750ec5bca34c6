package memory_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/backend/host"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/memory"
)

// behind makes a call on rank 0, with a context that ends soon, while an earlier collective call of that rank waits for the others. The call has to end with
// its context. Then the others come to the earlier call, and to this one, of which they have to be told.
func behind(ctx context.Context, m *memory.Memory, key string, call func(ctx context.Context) error) error {
	a, err := m.Allocate(ctx, 100, "")
	if err != nil {
		return err
	}
	let, end := underWay(ctx, m, key, meeting(ctx, m, a))
	if m.Group().Rank() != 0 {
		err := errors.Join(end(), call(ctx))
		vote, ok := errors.AsType[*group.VoteError](err)
		if !ok || len(vote.Failures) != 1 || vote.Failures[0].Rank != 0 || !strings.Contains(vote.Failures[0].Text, "gave up") {
			return fmt.Errorf("a call that rank 0 gave up: %w", err)
		}
		return nil
	}
	soon, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- call(soon) }()
	select {
	case err = <-ended:
	case <-time.After(10 * time.Second):
		err = errors.New("it outlives its deadline")
	}
	if turn, ok := errors.AsType[*memory.TurnError](err); !ok || !errors.Is(err, context.DeadlineExceeded) || turn.Behind == "" || turn.Op == "" {
		return errors.Join(fmt.Errorf("a call behind one that waits: %w", err), let(), end())
	}
	return errors.Join(let(), end())
}

// meeting is a rendezvous of a.
func meeting(ctx context.Context, m *memory.Memory, a backend.Allocation) func() error {
	return func() error {
		_, err := m.Rendezvous(ctx, a, memory.Record{})
		return err
	}
}

// TestCallsBehindOneThatWaits: a collective call that waits for its turn ends with its context. The other ranks are told, all ranks stay in step, and the call
// can be made again.
func TestCallsBehindOneThatWaits(t *testing.T) {
	defer memory.KeepWorkspace(0)()
	backendtest.RequireAll(t, backendtest.OnRanks(t, 3, nil, func(ctx context.Context, g *group.Group) error {
		near, err := host.New(g, nil)
		if err != nil {
			return err
		}
		b := &sharing{Backend: near}
		return backendtest.WithMemory(ctx, g, b, func(m *memory.Memory) error {
			if err := callsBehind(ctx, m, b); err != nil {
				g.Abort("the test has failed") // the others may be waiting
				return err
			}
			return nil
		})
	}))
}

// sharing is a backend that allocates collectively when it is told to.
type sharing struct {
	backend.Backend
	collective bool
}

func (b *sharing) Capabilities() backend.Capabilities {
	c := b.Backend.Capabilities()
	c.CollectiveAllocate, c.Multicast = b.collective, true
	return c
}

func callsBehind(ctx context.Context, m *memory.Memory, b *sharing) error {
	if err := backendtest.TryWindow(ctx, m, 100); err != nil {
		return err
	}
	var a, shared backend.Allocation
	var w *memory.Window
	var c *memory.Workspace
	var s *memory.Signals
	var h *memory.Heap
	var mu sync.Mutex // a call of which the deadline was not kept goes on
	keep := func(f func()) { mu.Lock(); defer mu.Unlock(); f() }
	a, err := m.Allocate(ctx, 100, "")
	if err != nil {
		return err
	}
	for _, x := range []struct {
		name string
		call func(ctx context.Context) error
		left bool // the other ranks have gone on, and need not come again
	}{
		{"Rendezvous", func(ctx context.Context) error {
			got, err := m.Rendezvous(ctx, a, memory.Record{})
			keep(func() { w = got })
			return err
		}, false},
		{"NewWorkspace", func(ctx context.Context) error {
			got, err := m.NewWorkspace(ctx, memory.WorkspaceRequest{Purpose: "test", Bytes: 16 << 20})
			keep(func() { c = got })
			return err
		}, false},
		{"Signals", func(ctx context.Context) error {
			got, err := c.Signals(ctx, 0, &memory.SignalsOptions{Channels: 1, Op: "test", Failed: func(err error) error { return err }})
			keep(func() { s = got })
			return err
		}, false},
		{"NewHeap", func(ctx context.Context) error {
			got, err := m.NewHeap(ctx, 4096)
			keep(func() { h = got })
			return err
		}, false},
		{"Check", func(ctx context.Context) error { return h.Check(ctx) }, false},
		{"Reclaim", func(ctx context.Context) error { return h.Reclaim(ctx) }, false},
		{"Close of a heap", func(ctx context.Context) error { return h.Close(ctx) }, true},
		{"Free", func(ctx context.Context) error { return m.Free(ctx, a) }, true},
	} {
		if err := behind(ctx, m, "turns: "+x.name, x.call); err != nil {
			return fmt.Errorf("%s: %w", x.name, err)
		}
		if x.left && m.Group().Rank() != 0 {
			continue
		}
		if err := x.call(ctx); err != nil {
			return fmt.Errorf("%s once more: %w", x.name, err)
		}
	}
	if !errors.Is(w.Err(), errs.ErrClosed) || m.Holds(a) {
		return errors.New("what was freed is still there")
	}
	if err := behind(ctx, m, "turns: collective Allocate", func(ctx context.Context) error {
		b.collective = true
		defer func() { b.collective = false }()
		got, err := m.Allocate(ctx, 100, "")
		keep(func() { shared = got })
		return err
	}); err != nil || shared != nil {
		return fmt.Errorf("collective Allocate: %v, %w", shared, err)
	}
	// What a workspace was is not handed out again while some rank has not said that nothing works on it.
	if err := behind(ctx, m, "turns: Close of a workspace", c.Close); err != nil {
		return fmt.Errorf("Close of a workspace: %w", err)
	}
	return errors.Join(s.Close(), backendtest.TryWindow(ctx, m, 100))
}

// TestMulticastBehindOneThatWaits is about windows, whose multicast is asked for.
func TestMulticastBehindOneThatWaits(t *testing.T) {
	onAiling(t, func(ctx context.Context, _ *ailing, m *memory.Memory, _ bool) error {
		return backendtest.WithWindow(ctx, m, 100, func(w *memory.Window) error {
			return behind(ctx, m, "turns: multicast", func(ctx context.Context) error { return m.EnableMulticast(ctx, w, nil) })
		})
	})
}

// TestCloseBehindOneThatWaits: a Close that waits for its turn ends with its context, and has kept everything on this rank. The others close, and so does
// this rank when it is called again.
func TestCloseBehindOneThatWaits(t *testing.T) {
	backendtest.RequireAll(t, backendtest.OnRanks(t, 3, nil, func(ctx context.Context, g *group.Group) error {
		b, err := newAiling(g)
		if err != nil {
			return err
		}
		m := memory.New(b, g, nil)
		if err := backendtest.TryWindow(ctx, m, 100); err != nil {
			return err
		}
		if err := behind(ctx, m, "turns: Close", m.Close); err != nil {
			g.Abort("the test has failed")
			return err
		}
		if busy := m.Busy(); busy != (g.Rank() == 0) {
			return fmt.Errorf("memory that was to be closed can be closed again: %t", busy)
		}
		if g.Rank() == 0 {
			err = m.Close(ctx)
		}
		if a := b.allocations.Load(); err != nil || a != 0 || b.closed.Load() != 1 || m.Busy() {
			return fmt.Errorf("after closing there are %d allocations, and the backend was closed %d times: %w", a, b.closed.Load(), err)
		}
		if err := m.Close(ctx); !errors.Is(err, errs.ErrClosed) || m.Busy() {
			return fmt.Errorf("closing once more: %w", err)
		}
		return nil
	}))
}

// TestHeapBehindOneThatWaits: an allocation that waits behind a Reclaim of the same heap ends with its context, has asked for nothing, and can be made again. A
// Check there tells the others.
func TestHeapBehindOneThatWaits(t *testing.T) {
	onAiling(t, func(ctx context.Context, _ *ailing, m *memory.Memory, _ bool) error {
		h, err := m.NewHeap(ctx, 4096)
		if err != nil {
			return err
		}
		let, end := underWay(ctx, m, "turns: heap", func() error { return h.Reclaim(ctx) })
		var turn *memory.TurnError
		if m.Group().Rank() == 0 {
			soon, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
			defer cancel()
			_, err := h.Allocate(soon, 256, "u8", []int64{256})
			checked := h.Check(soon)
			if !errors.As(err, &turn) || !errors.As(checked, &turn) || h.Usage().Used != 0 {
				return errors.Join(fmt.Errorf("an allocation, and then a Check, behind a Reclaim: %w, %w; %+v", err, checked, h.Usage()), let(), end())
			}
		}
		if err := errors.Join(let(), end()); err != nil {
			return err
		}
		if m.Group().Rank() != 0 {
			if err := h.Check(ctx); err == nil || !strings.Contains(err.Error(), "rank 0") || !strings.Contains(err.Error(), "gave up") {
				return fmt.Errorf("a Check that rank 0 gave up: %w", err)
			}
		}
		a, err := h.Allocate(ctx, 256, "u8", []int64{256})
		if err != nil {
			return err
		}
		return errors.Join(h.Check(ctx), a.Free(), h.Close(ctx))
	})
}

// TestHeapKeepsItsPlace: a Check that gives up behind a Reclaim comes before a rendezvous that is begun after it, as on ranks where it need not wait.
func TestHeapKeepsItsPlace(t *testing.T) {
	onAiling(t, func(ctx context.Context, _ *ailing, m *memory.Memory, _ bool) error {
		if err := backendtest.TryWindow(ctx, m, 100); err != nil {
			return err
		}
		h, err := m.NewHeap(ctx, 4096)
		if err != nil {
			return err
		}
		a, err := m.Allocate(ctx, 100, "")
		if err != nil {
			return err
		}
		let, end := underWay(ctx, m, "turns: place", func() error { return h.Reclaim(ctx) })
		if m.Group().Rank() != 0 {
			if err := end(); err != nil {
				return err
			}
			err := h.Check(ctx)
			if vote, ok := errors.AsType[*group.VoteError](err); !ok || len(vote.Failures) != 1 || vote.Failures[0].Rank != 0 {
				return fmt.Errorf("a Check that rank 0 gave up: %w", err)
			}
			return errors.Join(meeting(ctx, m, a)(), m.Free(ctx, a), h.Close(ctx))
		}
		soon, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
		defer cancel()
		if _, ok := errors.AsType[*memory.TurnError](h.Check(soon)); !ok {
			return errors.Join(errors.New("a Check did not give up behind a Reclaim"), let(), end())
		}
		met := make(chan error, 1)
		go func() { met <- meeting(ctx, m, a)() }()
		awaitPlaces(ctx, m, 3)
		return errors.Join(let(), end(), <-met, m.Free(ctx, a), h.Close(ctx))
	})
}

// TestFullHeapKeepsItsPlace: an allocation that has to reclaim does so where it was asked for, also when a call that came later has a place in the memory's turn.
func TestFullHeapKeepsItsPlace(t *testing.T) {
	onAiling(t, func(ctx context.Context, _ *ailing, m *memory.Memory, _ bool) error {
		if err := backendtest.TryWindow(ctx, m, 100); err != nil {
			return err
		}
		h, err := m.NewHeap(ctx, 4096)
		if err != nil {
			return err
		}
		full, err := h.Allocate(ctx, 4096, "u8", []int64{4096})
		if err != nil {
			return err
		}
		a, err := m.Allocate(ctx, 100, "")
		if err != nil {
			return err
		}
		if err := full.Free(); err != nil {
			return err
		}
		let, end := underWay(ctx, m, "turns: full", func() error { return h.Check(ctx) })
		asked, met := make(chan error, 1), make(chan error, 1)
		allocate := func() {
			_, err := h.Allocate(ctx, 256, "u8", []int64{256})
			asked <- err
		}
		meet := func() { met <- meeting(ctx, m, a)() }
		if m.Group().Rank() == 0 {
			go allocate()
			awaitPlaces(ctx, m, 2)
			go meet()
			awaitPlaces(ctx, m, 3)
			err = errors.Join(let(), end())
		} else if err = end(); err == nil {
			allocate()
			meet()
		}
		if err != nil {
			return err
		}
		return errors.Join(<-asked, <-met, m.Free(ctx, a), h.Close(ctx))
	})
}

// TestHeapInATurn: a heap is used in a turn of its memory while another goroutine's Reclaim waits behind that turn.
func TestHeapInATurn(t *testing.T) {
	onAiling(t, func(ctx context.Context, _ *ailing, m *memory.Memory, _ bool) error {
		if err := backendtest.TryWindow(ctx, m, 100); err != nil {
			return err
		}
		h, err := m.NewHeap(ctx, 4096)
		if err != nil {
			return err
		}
		reclaimed, outside := make(chan error, 1), ctx
		err = m.InTurn(ctx, "using a heap", func(ctx context.Context, gaveUp error) error {
			go func() { reclaimed <- h.Reclaim(outside) }()
			time.Sleep(20 * time.Millisecond) // it comes to where it waits
			soon, cancel := context.WithTimeout(ctx, 10*time.Second)
			defer cancel()
			for range 2 { // the second time there is no room before what was freed is reclaimed
				a, err := h.Allocate(soon, 4096, "u8", []int64{4096})
				if err != nil {
					return err
				}
				if err := errors.Join(h.Check(soon), a.Free()); err != nil {
					return err
				}
			}
			return h.Reclaim(soon)
		})
		return errors.Join(err, <-reclaimed, h.Check(ctx), h.Close(ctx))
	})
}

// TestPreparingBehindOneThatWaits: a call that nobody waits for any more is told to the others, and no rank's library is asked for it.
func TestPreparingBehindOneThatWaits(t *testing.T) {
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		near, err := host.New(g, nil)
		if err != nil {
			return err
		}
		b := &reducing{Backend: near}
		return backendtest.WithMemory(ctx, g, b, func(m *memory.Memory) error {
			if err := backendtest.TryWindow(ctx, m, 100); err != nil {
				return err
			}
			a, err := m.Allocate(ctx, 100, "")
			if err != nil {
				return err
			}
			let, end := underWay(ctx, m, "turns: preparing", meeting(ctx, m, a))
			barrier := memory.LibraryCollective{Name: "theirs", Collective: "barrier"}
			if g.Rank() != 0 {
				err := end()
				_, told := m.PrepareCollective(ctx, memory.Place{}, memory.Place{}, 0, 0, barrier)
				if vote, ok := errors.AsType[*group.VoteError](told); !ok || len(vote.Failures) != 1 || vote.Failures[0].Rank != 0 || len(b.asked) != 0 {
					err = errors.Join(err, fmt.Errorf("preparing with a rank that gave up, when the library was asked %d times: %w", len(b.asked), told))
				}
				return errors.Join(err, g.Barrier(ctx, "told"))
			}
			soon, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
			defer cancel()
			p, err := m.PrepareCollective(soon, memory.Place{}, memory.Place{}, 0, 0, barrier)
			if _, ok := errors.AsType[*memory.TurnError](err); !ok || p != nil {
				return errors.Join(fmt.Errorf("preparing behind a call that waits: %v, %w", p, err), let(), end())
			}
			err = errors.Join(let(), end())
			err = errors.Join(err, m.InTurn(ctx, "behind it", func(context.Context, error) error { return nil }), g.Barrier(ctx, "told"))
			if len(b.asked) != 0 {
				err = errors.Join(err, errors.New("the library was asked"))
			}
			return err
		})
	}))
}
