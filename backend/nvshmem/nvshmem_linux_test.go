package nvshmem

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/backend/backendtest/fakecuda"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/cuda"
	"github.com/symmem/symmem/group"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/dl"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/nvshmem"
	"github.com/symmem/symmem/internal/testneed"
	"github.com/symmem/symmem/memory"
)

// withMemory opens the backend and a memory over it, and closes it after f.
func withMemory(ctx context.Context, g *group.Group, o *Options, f func(b *Backend, m *memory.Memory) error) error {
	b, err := New(ctx, g, o)
	if err != nil {
		return err
	}
	return backendtest.WithMemory(ctx, g, b, func(m *memory.Memory) error { return f(b, m) })
}

// sub makes a sub-group and a memory over it, and closes both after f.
func sub(ctx context.Context, b *Backend, ranks []int, o *Options, f func(b *Backend, m *memory.Memory) error) error {
	g, err := b.group.Sub(ctx, ranks)
	if err != nil {
		return err
	}
	own := *o
	own.Parent = b
	return errors.Join(withMemory(ctx, g, &own, f), g.Close(ctx))
}

func TestConformance(t *testing.T) {
	for _, size := range []int{1, 2, 3} {
		m := newMachine(size)
		backendtest.Run(t, backendtest.Harness{
			Open: func(ctx context.Context, g *group.Group) (backend.Backend, error) {
				return New(ctx, g, m.options(g.Rank()))
			},
			WorldSizes: []int{size},
			Adoptable: func(_ backend.Backend, rank int, bytes int64) (device.Ptr, func() error, error) {
				p := m.allocate(rank, bytes, nil)
				return p, func() error { m.free(p); return nil }, nil
			},
			AdoptAlign: adoptAlign, AllReduces: []string{Name},
		})
		assert.Empty(t, m.left(), "world of %d", size)
		assert.Equal(t, m.job.starts, m.job.finalize, "what was started was finalized")
	}
}

// TestMemory goes through package backend, as users do.
func TestMemory(t *testing.T) {
	m := newMachine(3)
	backendtest.RequireAll(t, backendtest.OnRanks(t, 3, nil, func(ctx context.Context, g *group.Group) error {
		return withMemory(ctx, g, m.options(g.Rank()), func(b *Backend, mem *memory.Memory) error {
			for _, n := range []int64{1, 4096, 5000, 1 << 20, 40 << 20} {
				if err := backendtest.TryWindow(ctx, mem, n); err != nil {
					return fmt.Errorf("%d bytes: %w", n, err)
				}
			}
			return nil
		})
	}))
	assert.Empty(t, m.left())
}

// TestHeapIsReused: what all ranks have freed goes back before the heap grows, and small allocations do not grow it one by one.
func TestHeapIsReused(t *testing.T) {
	m := newMachine(2)
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		return withMemory(ctx, g, m.options(g.Rank()), func(b *Backend, mem *memory.Memory) error {
			if err := backendtest.TryWindow(ctx, mem, 1000); err != nil {
				return err
			}
			before := m.brk()
			for i := range 50 {
				if err := backendtest.TryWindow(ctx, mem, int64(1+i)*100_000); err != nil {
					return err
				}
			}
			if now := m.brk(); now != before {
				return fmt.Errorf("the heap has grown from %d to %d bytes", before, now)
			}
			return nil
		})
	}))
	assert.Empty(t, m.left())
}

func (m *machine) brk() uint64 {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	return m.job.brk
}

// TestReleaseOnOneRankOnly: memory that only one rank has given back stays, and goes when the other has.
func TestReleaseOnOneRankOnly(t *testing.T) {
	m := newMachine(2)
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		return withMemory(ctx, g, m.options(g.Rank()), func(b *Backend, mem *memory.Memory) error {
			a, err := mem.Allocate(ctx, 4096, "")
			if err != nil {
				return err
			}
			if g.Rank() == 0 {
				err = mem.Free(ctx, a) // without a window this is local
			}
			if err := errors.Join(err, backendtest.TryWindow(ctx, mem, 100), g.Barrier(ctx, "1")); err != nil {
				return err
			}
			if n := len(b.world.held); n != 3 { // it, the workspace, and the one just freed
				return fmt.Errorf("%d pieces of the heap are held", n)
			}
			if g.Rank() == 1 {
				err = mem.Free(ctx, a)
			}
			return errors.Join(err, backendtest.TryWindow(ctx, mem, 100))
		})
	}))
	assert.Empty(t, m.left())
}

// TestSubGroups: groups of all PEs use the heap, others the arena, which goes on being reused.
func TestSubGroups(t *testing.T) {
	m := newMachine(3)
	backendtest.RequireAll(t, backendtest.OnRanks(t, 3, nil, func(ctx context.Context, g *group.Group) error {
		o := m.options(g.Rank())
		return withMemory(ctx, g, o, func(b *Backend, mem *memory.Memory) error {
			for _, ranks := range [][]int{{0, 1, 2}, {0, 2}, {1, 2}, {g.Rank()}} {
				if !contains(ranks, g.Rank()) {
					continue
				}
				for range 3 {
					err := sub(ctx, b, ranks, o, func(s *Backend, mem *memory.Memory) error {
						if s.all != (len(ranks) == 3) {
							return fmt.Errorf("the group of %v is of all PEs: %t", ranks, s.all)
						}
						for i := range 20 {
							if err := backendtest.TryWindow(ctx, mem, int64(1+i)*100_000); err != nil {
								return err
							}
						}
						return nil
					})
					if err != nil {
						return fmt.Errorf("group of %v: %w", ranks, err)
					}
				}
				if taken := b.world.arena.taken; taken != 0 {
					return fmt.Errorf("group of %v: %d bytes of the arena are taken still", ranks, taken)
				}
			}
			return nil
		})
	}))
	assert.Empty(t, m.left())
	assert.Equal(t, 1, m.job.starts)
}

func contains(ranks []int, r int) bool {
	for _, x := range ranks {
		if x == r {
			return true
		}
	}
	return false
}

func TestArenaIsExhausted(t *testing.T) {
	m := newMachine(2)
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		o := m.options(g.Rank())
		return withMemory(ctx, g, o, func(b *Backend, mem *memory.Memory) error {
			return sub(ctx, b, []int{g.Rank()}, o, func(_ *Backend, mem *memory.Memory) error {
				_, err := mem.Allocate(ctx, 17<<20, "")
				if !errors.Is(err, errs.ErrNoMemory) || !strings.Contains(err.Error(), arenaEnv) {
					return fmt.Errorf("more than the arena: %w", err)
				}
				return backendtest.TryWindow(ctx, mem, 1<<20)
			})
		})
	}))
	assert.Empty(t, m.left())
}

// TestTwoGroupsAtOnce: groups of all PEs allocate at the same time, in another order on each rank.
func TestTwoGroupsAtOnce(t *testing.T) {
	m := newMachine(3)
	backendtest.RequireAll(t, backendtest.OnRanks(t, 3, nil, func(ctx context.Context, g *group.Group) error {
		o := m.options(g.Rank())
		return withMemory(ctx, g, o, func(b *Backend, mem *memory.Memory) error {
			return sub(ctx, b, []int{0, 1, 2}, o, func(_ *Backend, other *memory.Memory) error {
				failed := make([]error, 2)
				var wg sync.WaitGroup
				for i, m := range []*memory.Memory{mem, other} {
					wg.Go(func() {
						for n := range 30 {
							if failed[i] == nil {
								failed[i] = backendtest.TryWindow(ctx, m, int64(1+(n*7+i*3)%11)*10_000)
							}
						}
					})
				}
				wg.Wait()
				return errors.Join(failed...)
			})
		})
	}))
	assert.Empty(t, m.left(), "every call was the same on all PEs")
}

// TestTwoGroupsInAnyOrder: rank 0 allocates with two groups of all PEs at the same time, and the other with one after the other: no group holds up another one
// before all of its ranks have come.
func TestTwoGroupsInAnyOrder(t *testing.T) {
	m := newMachine(2)
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, &group.LocalOptions{Timeout: 10 * time.Second}, func(ctx context.Context, g *group.Group) error {
		o := m.options(g.Rank())
		return withMemory(ctx, g, o, func(b *Backend, _ *memory.Memory) error {
			return sub(ctx, b, []int{0, 1}, o, func(s *Backend, _ *memory.Memory) error {
				allocate := func(b *Backend) error {
					a, err := b.Allocate(ctx, 4096)
					if err != nil {
						return err
					}
					return a.Release(ctx)
				}
				if g.Rank() == 1 {
					time.Sleep(20 * time.Millisecond) // rank 0 is in both by then
					return errors.Join(allocate(s), allocate(b))
				}
				first := make(chan error, 1)
				go func() { first <- allocate(b) }()
				time.Sleep(10 * time.Millisecond)
				return errors.Join(allocate(s), <-first)
			})
		})
	}))
	assert.Empty(t, m.left())
}

func TestSizesDiffer(t *testing.T) {
	m := newMachine(2)
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		return withMemory(ctx, g, m.options(g.Rank()), func(b *Backend, mem *memory.Memory) error {
			_, err := mem.Allocate(ctx, int64(4096*(1+g.Rank())), "")
			if !errors.Is(err, errs.ErrMismatch) || !strings.Contains(err.Error(), "8192") {
				return fmt.Errorf("other sizes: %w", err)
			}
			_, err = b.Allocate(ctx, int64(4096*(1+g.Rank())))
			if !errors.Is(err, errs.ErrMismatch) {
				return fmt.Errorf("other sizes, past Memory: %w", err)
			}
			return backendtest.TryWindow(ctx, mem, 100)
		})
	}))
	assert.Empty(t, m.left())
}

// TestHeapIsFull: NVSHMEM is not asked for what might not fit, on any rank, and smaller allocations work.
func TestHeapIsFull(t *testing.T) {
	m := newMachine(2)
	m.taken[1] = fakecuda.TotalMemory - 200<<20
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		return withMemory(ctx, g, m.options(g.Rank()), func(b *Backend, mem *memory.Memory) error {
			before := m.called("align")
			_, err := mem.Allocate(ctx, 150<<20, "")
			if !errors.Is(err, errs.ErrNoMemory) {
				return fmt.Errorf("more than the other GPU has: %w", err)
			}
			if err := g.Barrier(ctx, "asked"); err != nil {
				return err
			}
			if n := m.called("align"); n != before {
				return fmt.Errorf("NVSHMEM was asked %d times", n-before)
			}
			return backendtest.TryWindow(ctx, mem, 10<<20)
		})
	}))
	assert.Empty(t, m.left())
}

// TestHeapIsTornDown: NVSHMEM refuses all the same. Everything later is an error that says so, and nothing hangs.
func TestHeapIsTornDown(t *testing.T) {
	m := newMachine(2)
	var asked atomic.Bool
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		err := withMemory(ctx, g, m.options(g.Rank()), func(b *Backend, mem *memory.Memory) error {
			if err := errors.Join(backendtest.TryWindow(ctx, mem, 100), g.Barrier(ctx, "1")); err != nil {
				return err
			}
			if g.Rank() == 0 {
				m.Mu.Lock()
				m.job.failure = func(call string, _ int) bool { return call == "align" }
				m.Mu.Unlock()
			}
			a, err := mem.Allocate(ctx, 100, "")
			if err != nil {
				return err
			}
			w, err := mem.Rendezvous(ctx, a, memory.Record{})
			if err != nil {
				return err
			}
			if err := g.Barrier(ctx, "2"); err != nil {
				return err
			}
			_, err = mem.Allocate(ctx, 50<<20, "")
			if !errors.Is(err, errs.ErrNoMemory) || !strings.Contains(err.Error(), "torn the heap down") {
				return fmt.Errorf("the refused allocation: %w", err)
			}
			_, err = mem.Allocate(ctx, 100, "")
			if !errors.Is(err, errs.ErrNoMemory) || !strings.Contains(err.Error(), "given up") {
				return fmt.Errorf("a later one: %w", err)
			}
			if _, err := w.Peer(0, 0); !errors.Is(err, errs.ErrNoMemory) {
				return fmt.Errorf("an address in what is gone: %w", err)
			}
			m.Mu.Lock()
			m.job.failure = func(string, int) bool { asked.Store(true); return false }
			m.Mu.Unlock()
			if _, err := mem.Register(ctx, a.Ptr(), 64, ""); !errors.Is(err, errs.ErrNoMemory) || !strings.Contains(err.Error(), "given up") {
				return fmt.Errorf("adopting memory: %w", err)
			}
			return mem.Free(ctx, a)
		})
		if err != nil {
			return err
		}
		_, err = New(ctx, g, m.options(g.Rank()))
		if err == nil || !strings.Contains(err.Error(), "cannot be started again") {
			return fmt.Errorf("opening it again: %w", err)
		}
		return nil
	}))
	assert.Zero(t, m.job.finalize)
	assert.False(t, asked.Load(), "the library is asked when its heap is gone")
}

// TestOpenAgain: a library that was finalized can be started again, and a start that did not come to the library leaves
// nothing.
func TestOpenAgain(t *testing.T) {
	m := newMachine(2)
	for range 3 {
		backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
			return withMemory(ctx, g, m.options(g.Rank()), func(_ *Backend, mem *memory.Memory) error {
				return backendtest.TryWindow(ctx, mem, 100)
			})
		}))
		for r, err := range backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
			o := m.options(g.Rank())
			if g.Rank() == 1 {
				o.load = func(*nvshmem.Options) (library, error) {
					return nil, fmt.Errorf("not here: %w", errs.ErrUnavailable)
				}
			}
			_, err := New(ctx, g, o)
			return err
		}) {
			require.ErrorContains(t, err, "rank 1: not here", "rank %d", r)
		}
		m.job.failure = func(call string, _ int) bool { return call == "id" }
		for _, err := range backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
			_, err := New(ctx, g, m.options(g.Rank()))
			return err
		}) {
			require.ErrorContains(t, err, "no socket interface")
		}
		m.job.failure = nil
	}
	assert.Equal(t, 3, m.job.starts)
	assert.Equal(t, 3, m.job.finalize)
	assert.Empty(t, m.left())
}

// TestStartFails: after a start that failed half way the process is lost for NVSHMEM, and says so.
func TestStartFails(t *testing.T) {
	m := newMachine(2)
	m.job.failure = func(call string, pe int) bool { return call == "start" && pe == 1 }
	for r, err := range backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		_, err := New(ctx, g, m.options(g.Rank()))
		if err == nil {
			return nil
		}
		_, again := New(ctx, g, m.options(g.Rank()))
		if again == nil || !strings.Contains(again.Error(), "cannot be started again") {
			return fmt.Errorf("again: %w", again)
		}
		return err
	}) {
		require.ErrorContains(t, err, "rank 1: bootstrapped only", "rank %d", r)
	}
}

// TestSeveralHosts: ranks of two hosts are refused on each of them, with the reason that the capabilities give, before the library is touched.
func TestSeveralHosts(t *testing.T) {
	m := newMachine(3)
	for r, err := range backendtest.OnRanks(t, 3, &group.LocalOptions{BootIDs: []string{"a", "a", "b"}}, func(ctx context.Context, g *group.Group) error {
		o := m.options(g.Rank())
		o.Library = "named"
		b, err := New(ctx, g, o)
		if err == nil {
			err = b.Close(ctx)
		}
		return err
	}) {
		require.ErrorIs(t, err, errs.ErrUnsupported, "rank %d", r)
		require.ErrorContains(t, err, capabilities(false).Why["several_hosts"], "rank %d", r)
		require.ErrorContains(t, err, "rank 2 on ", "rank %d", r)
	}
	for r, lib := range m.libs {
		assert.Empty(t, lib.opts.Path, "rank %d: the library was loaded", r)
		assert.False(t, lib.started, "rank %d", r)
	}
	require.Empty(t, m.left())
}

// TestRankHangsInStart: the error comes in time and names the rank that did not come.
func TestRankHangsInStart(t *testing.T) {
	m := newMachine(3)
	m.job.absent[1] = true
	t.Cleanup(m.release)
	bounded := &group.LocalOptions{Timeout: 5 * time.Second}
	for r, err := range backendtest.OnRanks(t, 3, bounded, func(ctx context.Context, g *group.Group) error {
		o := m.options(g.Rank())
		if o.KernelTimeout = 300 * time.Millisecond; g.Rank() == 1 {
			o.KernelTimeout = 10 * time.Second // it does not even say that it hangs
		}
		began := time.Now()
		if g.Rank() == 1 {
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, 2*time.Second)
			defer cancel()
		}
		_, err := New(ctx, g, o)
		if took := time.Since(began); took > 8*time.Second {
			return fmt.Errorf("took %v: %w", took, err)
		}
		return err
	}) {
		var vote *group.VoteError
		require.ErrorAs(t, err, &vote, "rank %d", r)
		assert.Len(t, vote.Failures, 3)
		assert.ErrorContains(t, err, "ranks 0-2: starting NVSHMEM: NVSHMEM has not done it (")
	}
}

// TestRankDies: the survivors' calls end, Close returns, and they go on over the arena.
func TestRankDies(t *testing.T) {
	m := newMachine(3)
	died := make(chan struct{})
	bounded := &group.LocalOptions{Timeout: 10 * time.Second}
	backendtest.RequireAll(t, backendtest.OnRanks(t, 3, bounded, func(ctx context.Context, g *group.Group) error {
		o := m.options(g.Rank())
		b, err := New(ctx, g, o)
		if err != nil {
			return err
		}
		mem := memory.New(b, g, &memory.Options{Channels: 1})
		a, err := mem.Allocate(ctx, 1000, "")
		if err != nil {
			return err
		}
		if _, err := mem.Rendezvous(ctx, a, memory.Record{}); err != nil {
			return err
		}
		if g.Rank() == 1 {
			g.Abort("it dies")
			close(died)
			m.Mu.Lock()
			m.Contexts[1], m.libs[1].started = 0, false
			m.Mu.Unlock()
			return nil
		}
		<-died
		<-g.Lost()
		calls := m.called("")
		if _, err := mem.Allocate(ctx, 100, ""); !errors.Is(err, errs.ErrPeerLost) {
			return fmt.Errorf("allocating: %w", err)
		}
		err = sub(ctx, b, []int{0, 2}, o, func(_ *Backend, mem *memory.Memory) error {
			for range 5 {
				if err := backendtest.TryWindow(ctx, mem, 100_000); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			return fmt.Errorf("the survivors: %w", err)
		}
		if err := mem.Close(ctx); !errors.Is(err, errs.ErrPeerLost) {
			return fmt.Errorf("closing: %w", err)
		}
		if now := m.called(""); now != calls {
			return fmt.Errorf("%d collective calls were made without the rank", now-calls)
		}
		return nil
	}))
}

// TestRankDiesInACall: a call that never returns is given up soon after the loss.
func TestRankDiesInACall(t *testing.T) {
	m := newMachine(2)
	t.Cleanup(m.release)
	bounded := &group.LocalOptions{Timeout: 10 * time.Second}
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, bounded, func(ctx context.Context, g *group.Group) error {
		b, err := New(ctx, g, m.options(g.Rank()))
		if err != nil {
			return err
		}
		if g.Rank() == 1 {
			m.Mu.Lock()
			m.job.absent[1] = true
			m.Mu.Unlock()
		}
		if err := g.Barrier(ctx, "ready"); err != nil {
			return err
		}
		if g.Rank() == 1 {
			go func() {
				for m.inCall() < 2 && ctx.Err() == nil {
					time.Sleep(time.Millisecond)
				}
				g.Abort("it dies")
			}()
		}
		began := time.Now()
		_, err = b.Allocate(ctx, 50<<20)
		var stuck *nvshmem.StuckError
		if !errors.Is(err, errs.ErrPeerLost) || !errors.As(err, &stuck) {
			return fmt.Errorf("the call: %w", err)
		}
		if took := time.Since(began); took > 10*time.Second {
			return fmt.Errorf("it took %v", took)
		}
		return b.Close(ctx)
	}))
}

// TestRankDoesNotClose: the others' Close returns all the same, and the library is spent.
func TestRankDoesNotClose(t *testing.T) {
	m := newMachine(2)
	closed := make(chan struct{})
	bounded := &group.LocalOptions{Timeout: 2 * time.Second}
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, bounded, func(ctx context.Context, g *group.Group) error {
		b, err := New(ctx, g, m.options(g.Rank()))
		if err != nil {
			return err
		}
		if g.Rank() == 0 {
			defer close(closed)
		} else {
			<-closed
		}
		if err := b.Close(ctx); err != nil {
			return err
		}
		if err := m.homes[g.Rank()].usable(); err == nil {
			return errors.New("the library can be opened again")
		}
		return nil
	}))
	assert.Zero(t, m.job.finalize)
}

func TestRefusals(t *testing.T) {
	refused := func(size int, o func(m *machine, rank int) *Options) []error {
		m := newMachine(size)
		failed := backendtest.OnRanks(t, size, nil, func(ctx context.Context, g *group.Group) error {
			b, err := New(ctx, g, o(m, g.Rank()))
			if err == nil {
				return errors.Join(errors.New("no error"), b.Close(ctx))
			}
			return err
		})
		assert.Zero(t, m.job.starts, "the library was not started")
		assert.Empty(t, m.left())
		return failed
	}
	with := func(change func(o *Options, rank int)) func(m *machine, rank int) *Options {
		return func(m *machine, rank int) *Options {
			o := m.options(rank)
			change(o, rank)
			return o
		}
	}
	for _, tt := range []struct {
		name    string
		size    int
		is      error
		text    string
		options func(m *machine, rank int) *Options
	}{
		{"one process", 2, errs.ErrUnsupported, "one state for a process", with(func(o *Options, _ int) {
			o.home = nil
			o.load = func(*nvshmem.Options) (library, error) { panic("the library is touched") }
		})},
		{"one GPU", 2, errs.ErrInvalid, "on rank 0 and on rank 1", with(func(o *Options, _ int) { o.Device = "0" })},
		{"no such GPU", 2, nil, "rank 1", with(func(o *Options, rank int) { o.LocalRank = 7 * rank })},
		{"arenas differ", 2, errs.ErrMismatch, arenaEnv, with(func(o *Options, rank int) { o.Arena = int64(1+rank) << 20 })},
		{"a huge arena", 1, errs.ErrInvalid, "Arena", with(func(o *Options, _ int) { o.Arena = 1 << 50 })},
		{"chunk", 1, errs.ErrInvalid, "Chunk", with(func(o *Options, _ int) { o.Chunk = -1 })},
		{"multicast on", 2, errs.ErrUnsupported, "NVSHMEM_DISABLE_NVLS", with(func(o *Options, rank int) {
			if o.Multicast = "on"; rank == 1 {
				o.Multicast, o.Getenv = "auto", func(name string) string { return map[string]string{"NVSHMEM_DISABLE_NVLS": "1"}[name] }
			}
		})},
		{"multicast what", 1, errs.ErrInvalid, "maybe", with(func(o *Options, _ int) { o.Multicast = "maybe" })},
		{"preflight", 2, nil, "rank 1: the preflight of NVSHMEM failed: exit status 255", with(func(o *Options, rank int) {
			o.Preflight = func(context.Context) error {
				if rank == 1 {
					return errors.New("exit status 255")
				}
				return nil
			}
		})},
		{"versions differ", 3, errs.ErrMismatch, "version of NVSHMEM: ranks disagree:\n\tranks 0, 2: 3.4.5\n\trank 1: 3.4.7", func(m *machine, rank int) *Options {
			m.libs[rank].patch = []int32{0, 7, 0}[rank]
			return m.options(rank)
		}},
		{"granularity", 1, errs.ErrInvalid, nvshmem.GranularityEnv, func(m *machine, rank int) *Options {
			m.libs[rank].granule = "3M"
			return m.options(rank)
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for r, err := range refused(tt.size, tt.options) {
				require.ErrorContains(t, err, tt.text, "rank %d", r)
				if tt.is != nil && (r == tt.size-1 || tt.is != errs.ErrInvalid) {
					assert.ErrorIs(t, err, tt.is, "rank %d", r)
				}
			}
		})
	}
}

// TestSecondGroup: one library, one world.
func TestSecondGroup(t *testing.T) {
	m := newMachine(2)
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		return withMemory(ctx, g, m.options(g.Rank()), func(*Backend, *memory.Memory) error {
			other, err := g.Sub(ctx, []int{0, 1})
			if err != nil {
				return err
			}
			_, err = New(ctx, other, m.options(g.Rank()))
			if !errors.Is(err, errs.ErrUnsupported) || !strings.Contains(err.Error(), "group world has it open") {
				return fmt.Errorf("a second group: %w", err)
			}
			return other.Close(ctx)
		})
	}))
	assert.Empty(t, m.left())
}

func TestNoPeerAccess(t *testing.T) {
	m := newMachine(2)
	m.job.failure = func(call string, pe int) bool { return call == "ptr" && pe == 1 }
	for _, err := range backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		_, err := New(ctx, g, m.options(g.Rank()))
		return err
	}) {
		require.ErrorContains(t, err, "no pointers to the memory of ranks [0 1]")
	}
}

// TestRegister: memory of the caller's is at two places; peers see the one in the heap, the owner keeps its own.
func TestRegister(t *testing.T) {
	m := newMachine(2)
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		return withMemory(ctx, g, m.options(g.Rank()), func(b *Backend, mem *memory.Memory) error {
			base := m.allocate(g.Rank(), 4*granule, nil)
			p := base.Add(int64(1+g.Rank()) * 4096) // at another place on each rank
			for range 3 {
				a, err := mem.Register(ctx, p, 3*granule, "")
				if err != nil {
					return err
				}
				w, err := mem.Rendezvous(ctx, a, memory.Record{})
				if err != nil {
					return err
				}
				own, err := w.Peer(g.Rank(), 0)
				if err != nil || own != p {
					return fmt.Errorf("the own place is %s and not %s: %w", own, p, err)
				}
				if in := b.inHeap(p.Add(5)); in == p.Add(5) || b.world.at(g.Rank(), b.world.offset(in)) != in {
					return fmt.Errorf("the alias of %s is %s", p, in)
				}
				if err := errors.Join(backendtest.ExchangeBytes(ctx, mem, w), mem.Free(ctx, a)); err != nil {
					return err
				}
			}
			m.Mu.Lock()
			last := m.foreign[base].mem[int64(p-base)+3*granule-2:][:2]
			want := []byte{backendtest.Sent(0, g.Rank()), backendtest.Sent(1, g.Rank())}
			m.Mu.Unlock()
			if !bytes.Equal(last, want) {
				return fmt.Errorf("the memory ends in %v, and %v was written through peers", last, want)
			}
			if err := backendtest.TryWindow(ctx, mem, 100); err != nil { // flushes
				return err
			}
			if b.world.heap.registered != 0 {
				return fmt.Errorf("%d bytes are registered still", b.world.heap.registered)
			}
			m.free(base)
			return nil
		})
	}))
	assert.Empty(t, m.left())
	assert.Equal(t, 3, m.called("register "))
	assert.Equal(t, 3, m.called("unregister "))
}

func TestRegisterErrors(t *testing.T) {
	m := newMachine(1)
	backendtest.RequireAll(t, backendtest.OnRanks(t, 1, nil, func(ctx context.Context, g *group.Group) error {
		return withMemory(ctx, g, m.options(0), func(b *Backend, mem *memory.Memory) error {
			made := func(bytes int64, f func(*foreignMem)) device.Ptr { return m.allocate(0, bytes, f) }
			good := made(4*granule, nil)
			a, err := b.Allocate(ctx, granule)
			if err != nil {
				return err
			}
			for _, tt := range []struct {
				name  string
				p     device.Ptr
				bytes int64
				text  string
			}{
				{"odd", good + 8, 100, "not a multiple of 16"},
				{"of the heap", a.Ptr(), granule, "symmetric heap"},
				{"behind the end", good.Add(granule), 4 * granule, "behind the end"},
				{"nothing", 1 << 40, 64, "never allocated"},
				{"host", 4096, 64, "memory of the host"},
				{"plain", made(granule, func(f *foreignMem) { f.vmm = false }), 64, "cuMemCreate"},
				{"not a multiple", made(granule+4096, nil), granule + 64, "allocate 4194304"},
				{"other handles", made(granule, func(f *foreignMem) { f.prop.RequestedHandleTypes |= cu.HandleFabric }), 64, "POSIX_FILE_DESCRIPTOR"},
				{"not pinned", made(granule, func(f *foreignMem) { f.prop.Type = 2 }), 64, "not pinned"},
				{"on the host", made(granule, func(f *foreignMem) { f.prop.Location.Type = cu.LocationHost }), 64, "not created on a GPU"},
				{"read only", made(granule, func(f *foreignMem) { f.access = 1 }), 64, "cuMemSetAccess"},
				{"another GPU", made(granule, func(f *foreignMem) { f.gpu = 3 }), 64, "this rank's is"},
			} {
				_, err := mem.Register(ctx, tt.p, tt.bytes, "")
				var bad *cuda.MemoryError
				if !errors.As(err, &bad) || !errors.Is(err, errs.ErrInvalid) || !strings.Contains(err.Error(), tt.text) {
					return fmt.Errorf("%s: %w", tt.name, err)
				}
			}
			m.Mu.Lock()
			clear(m.foreign)
			m.Mu.Unlock()
			return a.Release(ctx)
		})
	}))
	assert.Empty(t, m.left())
	assert.Zero(t, m.called("register"), "the library was not asked")
}

// TestRegisterParts: tensors that lie in the middle of allocations, as caching allocators cut them, share one registration of the whole.
func TestRegisterParts(t *testing.T) {
	m := newMachine(2)
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		return withMemory(ctx, g, m.options(g.Rank()), func(b *Backend, mem *memory.Memory) error {
			base := m.allocate(g.Rank(), 10*granule, nil)
			other := m.allocate(g.Rank(), 10*granule, nil)
			part := func(p device.Ptr, bytes int64) (backend.Allocation, error) {
				a, err := mem.Register(ctx, p, bytes, "")
				if err != nil {
					return nil, err
				}
				w, err := mem.Rendezvous(ctx, a, memory.Record{})
				if err != nil {
					return nil, err
				}
				if in := b.inHeap(p.Add(bytes - 1)); in == p.Add(bytes-1) {
					return nil, fmt.Errorf("the last byte at %s has no alias", p)
				}
				return a, backendtest.ExchangeBytes(ctx, mem, w)
			}
			first, err := part(base.Add(granule/2), granule)
			if err != nil {
				return err
			}
			second, err := part(base.Add(granule/2+4*granule+int64(g.Rank())*4096), 3*granule+64)
			if err != nil {
				return err
			}
			// One rank brings another allocation than it brought with the first: there is nothing to share.
			if _, err := part([]device.Ptr{base, other}[g.Rank()].Add(8*granule), 100); err == nil {
				return errors.New("one rank shares a registration, and the other has none")
			}
			third, err := part(other.Add(8*granule), 100)
			if err != nil {
				return err
			}
			if want := int64(20 * granule); b.world.heap.registered != want {
				return fmt.Errorf("%d bytes are registered and not %d", b.world.heap.registered, want)
			}
			if err := mem.Free(ctx, first); err != nil {
				return err
			}
			if err := backendtest.TryWindow(ctx, mem, 100); err != nil { // flushes
				return err
			}
			if in := b.inHeap(base.Add(5 * granule)); in == base.Add(5*granule) {
				return errors.New("the registration went with the first of two tensors")
			}
			if err := errors.Join(mem.Free(ctx, second), mem.Free(ctx, third), backendtest.TryWindow(ctx, mem, 100)); err != nil {
				return err
			}
			if b.world.heap.registered != 0 {
				return fmt.Errorf("%d bytes are registered still", b.world.heap.registered)
			}
			m.free(base)
			m.free(other)
			return nil
		})
	}))
	assert.Empty(t, m.left())
	assert.Equal(t, 2, m.called("register "))
	assert.Equal(t, 2, m.called("unregister "))
}

// TestKindsDiffer: one rank registers, the other allocates.
func TestKindsDiffer(t *testing.T) {
	m := newMachine(2)
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		return withMemory(ctx, g, m.options(g.Rank()), func(b *Backend, mem *memory.Memory) error {
			a, err := b.Allocate(ctx, granule)
			if err != nil {
				return err
			}
			brought, base := a, device.Ptr(0)
			if g.Rank() == 1 {
				base = m.allocate(1, granule, nil)
				if brought, err = b.Register(ctx, base, granule); err != nil {
					return err
				}
			}
			if _, err := b.Rendezvous(ctx, brought); !errors.Is(err, errs.ErrMismatch) {
				return fmt.Errorf("different kinds: %w", err)
			}
			m.free(base)
			return errors.Join(a.Release(ctx), backendtest.TryWindow(ctx, mem, 100))
		})
	}))
	assert.Empty(t, m.left())
}

func TestReduce(t *testing.T) {
	m := newMachine(2)
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		o := m.options(g.Rank())
		return withMemory(ctx, g, o, func(b *Backend, mem *memory.Memory) error {
			a, err := mem.Allocate(ctx, 4096, "")
			if err != nil {
				return err
			}
			w, err := mem.Rendezvous(ctx, a, memory.Record{})
			if err != nil {
				return err
			}
			first, second := memory.Place{Window: w}, memory.Place{Window: w, Offset: 64}
			s, err := b.device.NewStream()
			if err != nil {
				return err
			}
			for range 8 { // more than there are teams
				one, err := mem.PrepareAllReduce(ctx, Name, first, second, 10, 20, "bf16", "sum")
				if err != nil {
					return err
				}
				two, err := mem.PrepareAllReduce(ctx, Name, first, first, 4, 16, "f32", "max")
				if err != nil {
					return err
				}
				if one.(*collective).team == two.(*collective).team {
					return errors.New("two reductions have one team")
				}
				if err := errors.Join(one.Enqueue(s), two.Enqueue(s), one.Close(), two.Close()); err != nil {
					return err
				}
			}
			_, err = mem.PrepareAllReduce(ctx, "nccl", first, first, 4, 16, "f32", "max")
			if !errors.Is(err, errs.ErrUnsupported) {
				return fmt.Errorf("another library's: %w", err)
			}
			_, err = mem.PrepareAllReduce(ctx, Name, first, first, 4, 16, "f32", "avg")
			if !errors.Is(err, errs.ErrUnsupported) {
				return fmt.Errorf("an average: %w", err)
			}
			err = sub(ctx, b, []int{g.Rank()}, o, func(s *Backend, _ *memory.Memory) error {
				_, err := s.PrepareAllReduce(ctx, &backend.AllReduce{Name: Name})
				if !errors.Is(err, errs.ErrUnsupported) || !strings.Contains(err.Error(), "team") {
					return fmt.Errorf("in a part: %w", err)
				}
				return nil
			})
			return errors.Join(err, s.Close(), mem.Free(ctx, a))
		})
	}))
	assert.Empty(t, m.left())
	assert.Equal(t, 2, m.called("team"), "teams are used again")
	assert.Equal(t, 9, m.called("bf16 sum"), "one to warm up")
}

// TestContextFailsInATurn: a rank whose context cannot be made current at any place of a turn that is voted on keeps in step with the others, and all
// have the error.
func TestContextFailsInATurn(t *testing.T) {
	var pushes atomic.Int32
	for nth := int32(1); pushes.Load() == nth-1; nth++ { // until there are no more places
		m := newMachine(2)
		t.Cleanup(m.release)
		var armed atomic.Bool
		pushes.Store(0)
		backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
			o := m.options(g.Rank())
			o.KernelTimeout = 10 * time.Second
			if push := o.Driver.CtxPushCurrent; g.Rank() == 1 {
				o.Driver.CtxPushCurrent = func(c cu.ContextHandle) cu.Result {
					if armed.Load() && pushes.Load() < nth && pushes.Add(1) == nth {
						return cu.OperatingSystem
					}
					return push(c)
				}
			}
			b, err := New(ctx, g, o)
			if err != nil {
				return err
			}
			mem := memory.New(b, g, nil)
			a, err := mem.Allocate(ctx, 4096, "")
			if err != nil {
				return err
			}
			w, err := mem.Rendezvous(ctx, a, memory.Record{})
			if err != nil {
				return err
			}
			if err := g.Barrier(ctx, "ready"); err != nil {
				return err
			}
			armed.Store(true)
			_, failed := mem.PrepareAllReduce(ctx, Name, memory.Place{Window: w}, memory.Place{Window: w}, 4, 16, "f32", "sum")
			all, err := g.AllGather(ctx, "how it went", fmt.Appendf(nil, "%t", failed == nil))
			if err != nil {
				return fmt.Errorf("push %d: out of step: %w", nth, err)
			}
			armed.Store(false)
			if string(all[0]) != string(all[1]) {
				return fmt.Errorf("push %d: whether it succeeded: %q; here: %w", nth, all, failed)
			}
			if closed := mem.Close(ctx); failed == nil { // a library that was given up is not finalized
				return closed
			}
			return nil
		}))
	}
	assert.GreaterOrEqual(t, pushes.Load(), int32(2), "places")
}

// TestContextFails: a rank whose context cannot be made current, wherever that is from opening to closing, has the error, and so have all ranks unless it
// is only giving back what is its own. Nobody waits for it in the library.
func TestContextFails(t *testing.T) {
	var pushes atomic.Int32
	for nth := int32(1); pushes.Load() == nth-1; nth++ { // until there are no more places
		m := newMachine(2)
		pushes.Store(0)
		failed := make([]error, 2)
		backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
			o := m.options(g.Rank())
			if push := o.Driver.CtxPushCurrent; g.Rank() == 1 {
				o.Driver.CtxPushCurrent = func(c cu.ContextHandle) cu.Result {
					if pushes.Load() < nth && pushes.Add(1) == nth {
						return cu.OperatingSystem
					}
					return push(c)
				}
			}
			failed[g.Rank()] = func() (err error) {
				b, err := New(ctx, g, o)
				if err != nil {
					return err
				}
				mem := memory.New(b, g, nil)
				defer func() {
					if err = errors.Join(err, mem.Close(ctx)); mem.Busy() {
						err = errors.Join(err, mem.Close(ctx))
					}
				}()
				a, err := mem.Allocate(ctx, 4096, "")
				if err != nil {
					return err
				}
				_, err = mem.Rendezvous(ctx, a, memory.Record{})
				return err
			}()
			return nil
		}))
		m.release()
		switch struck := pushes.Load() == nth; {
		case !struck:
			require.NoError(t, errors.Join(failed...))
			continue
		case failed[0] == nil:
			require.ErrorContains(t, failed[1], "closing symmetric memory (it was released)", "push %d", nth)
		default:
			require.ErrorContains(t, failed[0], "cuCtxPushCurrent", "push %d", nth)
			require.ErrorContains(t, failed[0], "rank 1", "push %d", nth)
			require.NotContains(t, failed[0].Error(), "deadline", "push %d", nth)
		}
		require.ErrorContains(t, failed[1], "cuCtxPushCurrent", "push %d", nth)
	}
	assert.GreaterOrEqual(t, pushes.Load(), int32(20), "places")
}

// TestEnqueueFails: where one rank cannot enqueue a reduction, which then never ends on the others, NVSHMEM is given up, and all ranks learn it.
func TestEnqueueFails(t *testing.T) {
	m := newMachine(2)
	t.Cleanup(m.release)
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		var fails atomic.Bool
		o := m.options(g.Rank())
		push := o.Driver.CtxPushCurrent
		o.Driver.CtxPushCurrent = func(c cu.ContextHandle) cu.Result {
			if fails.Swap(false) {
				return cu.OperatingSystem
			}
			return push(c)
		}
		b, err := New(ctx, g, o)
		if err != nil {
			return err
		}
		mem := memory.New(b, g, nil)
		a, err := mem.Allocate(ctx, 4096, "")
		if err != nil {
			return err
		}
		w, err := mem.Rendezvous(ctx, a, memory.Record{})
		if err != nil {
			return err
		}
		p, err := mem.PrepareAllReduce(ctx, Name, memory.Place{Window: w}, memory.Place{Window: w}, 4, 16, "f32", "sum")
		if err != nil {
			return err
		}
		if err := p.Enqueue(nil); !errors.Is(err, errs.ErrInvalid) || b.world.usable() != nil {
			return fmt.Errorf("no stream: %w; %w", err, b.world.usable())
		}
		if g.Rank() == 1 {
			s, err := b.device.NewStream()
			if err != nil {
				return err
			}
			fails.Store(true)
			if err := p.Enqueue(s); err == nil || !strings.Contains(err.Error(), "only some ranks") {
				return fmt.Errorf("enqueuing: %w", err)
			}
			if err := s.Close(); err != nil {
				return err
			}
		}
		if _, err := mem.Allocate(ctx, 20<<20, ""); err == nil || !strings.Contains(err.Error(), "given up") || !strings.Contains(err.Error(), "rank 1") {
			return fmt.Errorf("an allocation after it: %w", err)
		}
		_ = mem.Close(ctx) // a library that was given up is not finalized
		return nil
	}))
}

func TestMulticast(t *testing.T) {
	for _, exists := range []bool{true, false} {
		m := newMachine(2)
		m.job.multi = exists
		backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
			o := m.options(g.Rank())
			o.Multicast, o.Getenv = "auto", func(string) string { return "" }
			return withMemory(ctx, g, o, func(b *Backend, mem *memory.Memory) error {
				a, err := mem.Allocate(ctx, 4096, "")
				if err != nil {
					return err
				}
				w, err := mem.Rendezvous(ctx, a, memory.Record{})
				if err != nil {
					return err
				}
				if _, err := w.Multicast(16); !errors.Is(err, errs.ErrNoMulticast) {
					return fmt.Errorf("multicast before it was enabled: %w", err)
				}
				if err := mem.EnableMulticast(ctx, w, nil); exists != (err == nil) || !exists && !errors.Is(err, errs.ErrUnsupported) {
					return fmt.Errorf("enabling multicast: %w", err)
				}
				if c := b.Capabilities(); c.Multicast != exists {
					return fmt.Errorf("capabilities: %+v", c)
				}
				p, err := w.Multicast(16)
				if exists && (err != nil || p != a.Ptr().Add(16)|1<<60) || !exists && !errors.Is(err, errs.ErrUnsupported) {
					return fmt.Errorf("multicast at %s: %w", p, err)
				}
				return mem.Free(ctx, a)
			})
		}))
	}
	m := newMachine(2)
	for _, err := range backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		o := m.options(g.Rank())
		o.Multicast, o.Getenv = "on", func(string) string { return "" }
		return withMemory(ctx, g, o, func(b *Backend, mem *memory.Memory) error { return backendtest.TryWindow(ctx, mem, 4096) })
	}) {
		require.ErrorIs(t, err, errs.ErrUnsupported, "multicast is on, and there is none")
	}
}

func TestStaleSockets(t *testing.T) {
	old := socketFolder
	t.Cleanup(func() { socketFolder = old })
	socketFolder = t.TempDir()
	mine := filepath.Join(socketFolder, "nvshmem-socket-1-"+strconv.Itoa(os.Getpid()))
	l, err := net.ListenPacket("unixgram", mine)
	require.NoError(t, err)
	require.NoError(t, l.Close())
	other := filepath.Join(socketFolder, "nvshmem-socket-1-1")
	require.NoError(t, os.WriteFile(other, nil, 0o600))
	if _, err := os.Lstat(mine); err != nil { // Go removes it on close
		fd, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: mine, Net: "unixgram"})
		require.NoError(t, err)
		t.Cleanup(func() { _ = fd.Close() })
	}
	require.NoError(t, removeStale())
	assert.NoFileExists(t, mine)
	assert.FileExists(t, other, "another process's is left alone")

	require.NoError(t, os.WriteFile(mine, nil, 0o600))
	err = removeStale()
	require.ErrorIs(t, err, errs.ErrUnavailable)
	assert.ErrorContains(t, err, mine)
	require.NoError(t, os.Remove(mine))

	socketFolder = filepath.Join(socketFolder, "missing")
	require.ErrorIs(t, removeStale(), errs.ErrUnavailable)
}

func TestPreflightStartsAndEnds(t *testing.T) {
	m := newMachine(1)
	require.NoError(t, Preflight(t.Context(), m.options(0)))
	assert.Equal(t, 1, m.job.starts)
	assert.Equal(t, 1, m.job.finalize)
	assert.Empty(t, m.left())
	m.job.failure = func(call string, _ int) bool { return call == "start" }
	require.ErrorContains(t, Preflight(t.Context(), m.options(0)), "bootstrapped only")
}

func TestOptions(t *testing.T) {
	env := func(arena string) *backend.Env {
		return &backend.Env{Getenv: func(name string) string { return map[string]string{arenaEnv: arena}[name] }}
	}
	for text, want := range map[string]int64{"": defaultArena, "128M": 128 << 20, "0": -1, "4096": 4096} {
		o, err := options(env(text))
		require.NoError(t, err)
		assert.Equal(t, want, o.Arena, text)
	}
	for _, text := range []string{"much", "2T"} {
		_, err := options(env(text))
		require.ErrorIs(t, err, errs.ErrInvalid)
		assert.ErrorContains(t, err, arenaEnv)
	}
	given := env("128M")
	given.Given = &Options{Arena: 4096, Library: "/l"}
	o, err := options(given)
	require.NoError(t, err)
	assert.EqualValues(t, 4096, o.Arena, "what the program gives")
	assert.Equal(t, "/l", o.Library)
}

func TestSpans(t *testing.T) {
	var s spans
	s.give(span{100, 50})
	s.give(span{0, 50})
	assert.Equal(t, spans{{0, 50}, {100, 50}}, s)
	_, ok := s.take(51)
	assert.False(t, ok)
	s.give(span{50, 50})
	assert.Equal(t, spans{{0, 150}}, s)
	at, ok := s.take(30)
	assert.True(t, ok)
	assert.Zero(t, at)
	at, ok = s.take(120)
	assert.True(t, ok)
	assert.EqualValues(t, 30, at)
	assert.Empty(t, s)
}

// TestNothingLiesAcrossPieces: no memory lies across two pieces of physical memory, whatever NVSHMEM gives, because the
// driver copies nothing there.
func TestNothingLiesAcrossPieces(t *testing.T) {
	m := newMachine(1)
	backendtest.RequireAll(t, backendtest.OnRanks(t, 1, nil, func(ctx context.Context, g *group.Group) error {
		return withMemory(ctx, g, m.options(0), func(b *Backend, mem *memory.Memory) error {
			var all []backend.Allocation
			for _, n := range []int64{10 << 20, 30 << 20, 5000, 40 << 20, 31 << 20, 33 << 20, 9 << 20, 1} {
				a, err := mem.Allocate(ctx, n, "")
				if err != nil {
					return err
				}
				all = append(all, a)
				var first, last device.Ptr
				var size uint64
				err = b.device.WithContext(func() error {
					return errors.Join(b.drv.Check("range", b.drv.MemGetAddressRange(&first, &size, a.Ptr())),
						b.drv.Check("range", b.drv.MemGetAddressRange(&last, &size, a.Ptr().Add(n-1))))
				})
				if err != nil || first != last {
					return fmt.Errorf("%d bytes at %s begin in what is at %s and end in what is at %s: %w", n, a.Ptr(), first, last, err)
				}
			}
			for _, a := range all {
				if err := mem.Free(ctx, a); err != nil {
					return err
				}
			}
			return nil
		})
	}))
	assert.Empty(t, m.left())
	assert.Greater(t, len(m.job.ends), 3)
}

// TestLibraries: the three answers about the library, on any machine.
func TestLibraries(t *testing.T) {
	env := &backend.Env{Multicast: "off", Getenv: os.Getenv, Logger: slog.New(slog.DiscardHandler)}
	dir := t.TempDir()
	t.Setenv(nvshmem.LibraryEnv, dir)
	found := factory{}.Libraries(t.Context(), env)
	require.Len(t, found, 1)
	assert.Equal(t, "missing", found[0].State)
	assert.Contains(t, found[0].Tried[0], filepath.Join(dir, "libnvshmem_host.so.3"))
	assert.Contains(t, found[0].Fix, nvshmem.LibraryEnv)

	file := filepath.Join(dir, "libnvshmem_host.so.3")
	require.NoError(t, os.WriteFile(file, []byte("no library"), 0o600))
	found = factory{}.Libraries(t.Context(), env)
	require.Len(t, found, 1)
	assert.Contains(t, found[0].Tried[0], file)

	libc, err := dl.Open(dl.Search{Library: "C", Names: []string{"libc.so.6"}})
	require.NoError(t, err)
	path, err := libc.File("getpid")
	require.NoError(t, err)
	t.Setenv(nvshmem.LibraryEnv, path)
	found = factory{}.Libraries(t.Context(), env)
	require.Len(t, found, 1)
	assert.Equal(t, "unusable", found[0].State)
	assert.Contains(t, found[0].Reason, "nvshmemx_hostlib_init_attr")

	env.Getenv = func(string) string { return "much" }
	found = factory{}.Libraries(t.Context(), env)
	require.Len(t, found, 1)
	assert.Contains(t, found[0].Reason, arenaEnv)
}

// TestLibrariesThatAreThere runs where NVSHMEM is installed; it needs no GPU.
func TestLibrariesThatAreThere(t *testing.T) {
	env := &backend.Env{Multicast: "off", Getenv: os.Getenv, Logger: slog.New(slog.DiscardHandler)}
	found := factory{}.Libraries(t.Context(), env)
	if found[0].State == "missing" {
		testneed.Missing(t, Name, found[0].Reason)
	}
	require.Len(t, found, 2)
	assert.Equal(t, "usable", found[0].State, found[0].Reason)
	assert.Regexp(t, `^3\.\d+\.\d+$`, found[0].Version)
	assert.Equal(t, "usable", found[1].State, found[1].Reason)
	assert.FileExists(t, found[1].Path)
	var names []string
	for _, d := range found[0].Details {
		names = append(names, d.Name)
	}
	assert.Subset(t, names, []string{"NVSHMEM_DISABLE_NVLS", "NVSHMEM_REMOTE_TRANSPORT", "transports"})
}
