package nccl

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/nccl"
	"github.com/symmem/symmem/memory"
)

// child returns the options of a sub-group of the parent's.
func (m *machine) child(parent *Backend) *Options {
	o := m.plain(0)
	o.Opened, o.Parent = parent.device, parent
	return o
}

// inSub runs f in a sub-group of g's ranks over the parent's backend, and closes it.
func inSub(ctx context.Context, g *group.Group, ranks []int, o *Options, f func(b *Backend, mem *memory.Memory) error) error {
	s, err := g.Sub(ctx, ranks)
	if err != nil {
		return err
	}
	return errors.Join(withMemory(ctx, s, o, f), s.Close(ctx))
}

// onParents runs f on each of size ranks, with the group, its backend, and its memory.
func onParents(t *testing.T, m *machine, size int, f func(ctx context.Context, g *group.Group, parent *Backend) error) {
	t.Helper()
	backendtest.RequireAll(t, backendtest.OnRanks(t, size, nil, func(ctx context.Context, g *group.Group) error {
		return withMemory(ctx, g, m.plain(g.Rank()), func(parent *Backend, _ *memory.Memory) error { return f(ctx, g, parent) })
	}))
	m.requireClean(t)
}

// tryAll uses the group's communicators: that of the windows, and those of both forms of all-reduce.
func tryAll(ctx context.Context, mem *memory.Memory, g *group.Group) error {
	err := backendtest.TryWindow(ctx, mem, 4096)
	for _, form := range []string{plainForm, symmetricForm} {
		if err == nil {
			err = reduceBy(ctx, g, mem, form, 10, func(p backend.PreparedAllReduce, s device.Stream) error {
				return errors.Join(p.Enqueue(s), s.Synchronize(ctx))
			})
		}
	}
	return err
}

// made agrees on how many communicators there were, at a moment at which no rank makes any.
func made(ctx context.Context, m *machine, g *group.Group) (int, error) {
	err := g.Barrier(ctx, "counting")
	n := m.made()
	return n, errors.Join(err, g.Barrier(ctx, "counted"))
}

// TestSubGroupsUseCommunicatorsAgain: however often a sub-group of the same ranks is made, of which ranks, its communicators are made
// once.
func TestSubGroupsUseCommunicatorsAgain(t *testing.T) {
	for _, joint := range []bool{false, true} {
		t.Run(fmt.Sprintf("joint=%t", joint), func(t *testing.T) {
			m := newMachine(3)
			m.joint = joint
			onParents(t, m, 3, func(ctx context.Context, g *group.Group, parent *Backend) error {
				for i := range 3 {
					for _, ranks := range [][]int{{0, 1, 2}, {0, 2}, {0, 1}, {g.Rank()}} {
						if !slices.Contains(ranks, g.Rank()) {
							continue
						}
						if err := inSub(ctx, g, ranks, m.child(parent), func(b *Backend, mem *memory.Memory) error {
							if split := len(ranks) == 3; b.split != split || b.reused != (i > 0) {
								return fmt.Errorf("ranks %v, round %d: split is %t, kept %t", ranks, i, b.split, b.reused)
							}
							return tryAll(ctx, mem, b.group)
						}); err != nil {
							return err
						}
					}
					// The parent's, and three for each rank of the sub-groups.
					if n, err := made(ctx, m, g); err != nil || n != 3+3*(3+2+2+3) {
						return fmt.Errorf("after round %d there were %d communicators: %w", i, n, err)
					}
				}
				return nil
			})
		})
	}
}

// TestSubGroupsOfSubGroups: communicators of their ranks are kept beyond the group that they were made in.
func TestSubGroupsOfSubGroups(t *testing.T) {
	m := newMachine(3)
	m.joint = true
	onParents(t, m, 3, func(ctx context.Context, g *group.Group, parent *Backend) error {
		for range 4 {
			if err := inSub(ctx, g, []int{0, 1, 2}, m.child(parent), func(b *Backend, mem *memory.Memory) error {
				if g.Rank() == 0 {
					return nil
				}
				return inSub(ctx, b.group, []int{1, 2}, m.child(b), func(_ *Backend, mem *memory.Memory) error {
					return backendtest.TryWindow(ctx, mem, 4096)
				})
			}); err != nil {
				return err
			}
		}
		if n, err := made(ctx, m, g); err != nil || n != 3+3+2 {
			return fmt.Errorf("%d communicators: %w", n, err)
		}
		return nil
	})
}

// TestSideBySide: two sub-groups of the same ranks that are open at the same time have a communicator each, and so have the next two.
func TestSideBySide(t *testing.T) {
	m := newMachine(2)
	m.joint = true
	onParents(t, m, 2, func(ctx context.Context, g *group.Group, parent *Backend) error {
		for range 4 {
			if err := inSub(ctx, g, []int{0, 1}, m.child(parent), func(one *Backend, mem *memory.Memory) error {
				return inSub(ctx, g, []int{0, 1}, m.child(parent), func(two *Backend, other *memory.Memory) error {
					if one.comm.Handle() == two.comm.Handle() {
						return errors.New("both have one communicator")
					}
					return errors.Join(backendtest.TryWindow(ctx, mem, 4096), backendtest.TryWindow(ctx, other, 4096))
				})
			}); err != nil {
				return err
			}
		}
		if n, err := made(ctx, m, g); err != nil || n != 2+2*2 {
			return fmt.Errorf("%d communicators: %w", n, err)
		}
		return nil
	})
}

// TestSideBySideInAnyOrder: groups of the same ranks that are opened and closed at the same time, in whatever order on each rank.
func TestSideBySideInAnyOrder(t *testing.T) {
	m := newMachine(3)
	onParents(t, m, 3, func(ctx context.Context, g *group.Group, parent *Backend) error {
		if g.Rank() == 2 { // so that the others' communicator is no split of the parent's, which must come in one order
			return g.Barrier(ctx, "all closed")
		}
		for range 5 {
			const groups = 6
			var subs [groups]*group.Group
			for i := range subs {
				var err error
				if subs[i], err = g.Sub(ctx, []int{0, 1}); err != nil {
					return err
				}
			}
			failed := make(chan error, groups)
			for _, s := range subs {
				go func() {
					failed <- errors.Join(withMemory(ctx, s, m.child(parent), func(_ *Backend, mem *memory.Memory) error {
						return backendtest.TryWindow(ctx, mem, 4096)
					}), s.Close(ctx))
				}()
			}
			var err error
			for range subs {
				err = errors.Join(err, <-failed)
			}
			if err != nil {
				return err
			}
		}
		if err := g.Barrier(ctx, "all closed"); err != nil {
			return err
		}
		parent.shelf.mu.Lock()
		defer parent.shelf.mu.Unlock()
		for _, l := range parent.shelf.links {
			if l.state != free {
				return fmt.Errorf("a communicator was left in state %d", l.state)
			}
		}
		if n := len(parent.shelf.links); n == 0 || n > mostKept || parent.shelf.claimed != 0 {
			return fmt.Errorf("%d are kept, %d claimed", n, parent.shelf.claimed)
		}
		return nil
	})
}

// TestKeptAreBounded: a rank keeps no more than some, whatever groups there are; what can be ended for a new one is the oldest.
func TestKeptAreBounded(t *testing.T) {
	const size = 5
	m := newMachine(size)
	m.joint = true
	onParents(t, m, size, func(ctx context.Context, g *group.Group, parent *Backend) error {
		for set := 1; set < 1<<size; set++ {
			var ranks []int
			for r := range size {
				if set&(1<<r) != 0 {
					ranks = append(ranks, r)
				}
			}
			if slices.Contains(ranks, g.Rank()) {
				if err := inSub(ctx, g, ranks, m.child(parent), func(_ *Backend, mem *memory.Memory) error {
					return backendtest.TryWindow(ctx, mem, 64)
				}); err != nil {
					return err
				}
			}
			if n := len(parent.shelf.links); n > mostKept {
				return fmt.Errorf("%d communicators are kept after %v", n, ranks)
			}
		}
		links := parent.shelf.links
		if len(links) == 0 || !slices.Equal(links[len(links)-1].ranks, []int{0, 1, 2, 3, 4}) {
			return fmt.Errorf("%d are kept", len(links))
		}
		if g.Rank() == 0 && slices.ContainsFunc(links, func(l *link) bool { return slices.Equal(l.ranks, []int{0}) }) {
			return errors.New("the oldest is there still")
		}
		return g.Barrier(ctx, "looked")
	})
}

// TestKeptEndInOneOrder: ranks that kept their communicators in another order end them in one, and so do not wait for each other in a
// circle.
func TestKeptEndInOneOrder(t *testing.T) {
	m := newMachine(3)
	m.joint = true
	onParents(t, m, 3, func(ctx context.Context, g *group.Group, parent *Backend) error {
		for _, ranks := range [][]int{{0, 1}, {0, 2}, {1, 2}} {
			if slices.Contains(ranks, g.Rank()) {
				if err := inSub(ctx, g, ranks, m.child(parent), func(*Backend, *memory.Memory) error { return nil }); err != nil {
					return err
				}
			}
		}
		if links := parent.shelf.links; g.Rank() == 1 {
			slices.Reverse(links) // 0: 01, 02; 1: 12, 01; 2: 02, 12
		}
		return g.Barrier(ctx, "in another order")
	})
}

// TestKeptFormFailsOnOneRank: a rank that cannot use the communicator of a form that was kept tells the others, and all can try again.
func TestKeptFormFailsOnOneRank(t *testing.T) {
	m := newMachine(2)
	var failing atomic.Bool
	m.Call = func(name string, gpu int) cu.Result {
		if name == "cuMemHostAlloc" && gpu == 1 && failing.CompareAndSwap(true, false) {
			return cu.OutOfMemory
		}
		return cu.Success
	}
	onParents(t, m, 2, func(ctx context.Context, g *group.Group, parent *Backend) error {
		for i := range 2 {
			if err := inSub(ctx, g, []int{0, 1}, m.child(parent), func(b *Backend, mem *memory.Memory) error {
				return backendtest.WithWindow(ctx, mem, 64, func(w *memory.Window) error {
					in := memory.Place{Window: w}
					prepare := func() error {
						_, err := mem.PrepareAllReduce(ctx, plainForm, in, in, 10, 40, "f32", "sum")
						return err
					}
					if i == 1 {
						if g.Rank() == 1 {
							failing.Store(true)
						}
						if err := g.Barrier(ctx, "failing"); err != nil {
							return err
						}
						if err := prepare(); err == nil {
							return errors.New("no error")
						}
					}
					return prepare()
				})
			}); err != nil {
				return err
			}
		}
		if n, err := made(ctx, m, g); err != nil || n != 2+2*2 {
			return fmt.Errorf("%d communicators: %w", n, err)
		}
		return nil
	})
}

// TestOneCallAtATime: what one call decides about, no other does, until it is given back.
func TestOneCallAtATime(t *testing.T) {
	var s shelf
	l, all := &link{ranks: []int{1}}, func(*link) bool { return true }
	require.True(t, s.keep(l))
	require.Equal(t, []*link{l}, s.pend(all))
	require.Empty(t, s.pend(all))
	require.Len(t, s.busy([]int{1}, nil), 1)
	require.True(t, s.give(l))
	require.Len(t, s.pend(all), 1)
}

func TestDecide(t *testing.T) {
	notes := func(lists ...[]int) (all []note) {
		for _, ranks := range lists {
			all = append(all, note{fmt.Sprint(ranks), ranks})
		}
		return all
	}
	for name, tt := range map[string]struct {
		all   []leaving
		keep  bool
		ended []string
	}{
		"all can":           {[]leaving{{Sound: true}, {Sound: true}}, true, nil},
		"one cannot":        {[]leaving{{Sound: true}, {}}, false, nil},
		"one cannot though": {[]leaving{{Sound: true, Full: true, Kept: notes([]int{5})}, {}}, false, nil},
		"no place":          {[]leaving{{Sound: true}, {Sound: true, Full: true}}, false, nil},
		"the oldest": {[]leaving{{Sound: true, Full: true, Kept: notes([]int{5}, []int{5, 7})}, {Sound: true, Kept: notes([]int{5, 7})}},
			true, []string{"[5]"}},
		"not all have it": {[]leaving{{Sound: true, Full: true, Kept: notes([]int{5, 7}, []int{5})}, {Sound: true}}, true, []string{"[5]"}},
		"one for both": {[]leaving{{Sound: true, Full: true, Kept: notes([]int{5, 7}, []int{5})},
			{Sound: true, Full: true, Kept: notes([]int{7}, []int{5, 7})}}, true, []string{"[5 7]"}},
		"one each": {[]leaving{{Sound: true, Full: true, Kept: notes([]int{5})}, {Sound: true, Full: true, Kept: notes([]int{7})}}, true,
			[]string{"[5]", "[7]"}},
		"a place on one only": {[]leaving{{Sound: true, Full: true, Kept: notes([]int{5})}, {Sound: true, Full: true}}, false, nil},
		"of another rank":     {[]leaving{{Sound: true, Full: true, Kept: notes([]int{5, 6})}, {Sound: true}}, false, nil},
	} {
		keep, ended := decide([]int{5, 7}, tt.all)
		assert.Equal(t, tt.keep, keep, name)
		assert.Equal(t, tt.ended, ended, name)
	}
}

func TestChoose(t *testing.T) {
	offers := []keptOffer{
		{Have: []string{"a", "b", "c", "d"}},
		{Have: []string{"d", "b"}, Busy: []string{"c"}},
		{Have: []string{"b", "d"}},
	}
	assert.Equal(t, []string{"b", "d"}, choose(offers))
	assert.True(t, gone(offers, "a"), "two ranks have it no more")
	assert.True(t, gone(offers, "e"), "this rank has found it to be bad, and nobody else has it")
	assert.False(t, gone(offers, "b"))
	assert.False(t, gone(offers, "c"), "the third has it no more, but the second cannot end it now")
}

// goesBad opens a sub-group, lets bad spoil it, closes it, and wants the next one to have communicators of its own, and the one after that
// to have the same.
func goesBad(t *testing.T, m *machine, timeout time.Duration, bad func(ctx context.Context, b *Backend, mem *memory.Memory) error) {
	t.Helper()
	onParents(t, m, 2, func(ctx context.Context, g *group.Group, parent *Backend) error {
		for i, do := range []func(ctx context.Context, b *Backend, mem *memory.Memory) error{nil, bad, nil, nil} {
			o := m.child(parent)
			o.KernelTimeout = timeout
			if err := inSub(ctx, g, []int{0, 1}, o, func(b *Backend, mem *memory.Memory) error {
				if reused := i == 1 || i == 3; b.reused != reused {
					return fmt.Errorf("group %d: kept is %t", i, b.reused)
				}
				if do == nil {
					return backendtest.TryWindow(ctx, mem, 64)
				}
				return do(ctx, b, mem)
			}); err != nil && (i != 1 || errors.Is(err, group.ErrPeerLost)) {
				return fmt.Errorf("group %d: %w", i, err)
			}
			if n := len(parent.shelf.links); (n == 0) != (i == 1) {
				return fmt.Errorf("group %d: %d are kept", i, n)
			}
		}
		return nil
	})
}

// TestBadCommunicatorsAreNotKept on any rank, when one rank has found them to be bad.
func TestBadCommunicatorsAreNotKept(t *testing.T) {
	t.Run("asynchronous error", func(t *testing.T) {
		m := newMachine(2)
		goesBad(t, m, 5*time.Second, func(_ context.Context, b *Backend, _ *memory.Memory) error {
			if b.group.Rank() == 1 {
				m.set(func() { m.comms[b.comm.Handle()].result = nccl.SystemError })
			}
			return nil
		})
	})
	t.Run("failed call", func(t *testing.T) {
		m := newMachine(2)
		var failing atomic.Bool
		m.fail = func(call string, rank, _ int) nccl.Result {
			if call == "ncclCommSplit" && rank == 1 && failing.CompareAndSwap(true, false) {
				return nccl.InternalError
			}
			return nccl.Success
		}
		goesBad(t, m, 2*time.Second, func(ctx context.Context, b *Backend, mem *memory.Memory) error {
			failing.Store(true)
			if err := tryAll(ctx, mem, b.group); err == nil {
				return errors.New("no error")
			}
			return nil
		})
	})
	t.Run("communicator of a form given up", func(t *testing.T) {
		m := newMachine(2)
		goesBad(t, m, 5*time.Second, func(ctx context.Context, b *Backend, mem *memory.Memory) error {
			err := tryAll(ctx, mem, b.group)
			if b.group.Rank() == 1 {
				err = errors.Join(err, b.giveUp(ctx, b.reducers[plainForm], errors.New("a fault")))
			}
			return err
		})
	})
	t.Run("aborted", func(t *testing.T) {
		m := newMachine(2)
		goesBad(t, m, 5*time.Second, func(ctx context.Context, b *Backend, _ *memory.Memory) error {
			if b.group.Rank() == 0 {
				return b.comm.Abort(ctx, errors.New("a fault"))
			}
			return nil
		})
	})
	t.Run("used by the caller", func(t *testing.T) {
		m := newMachine(2)
		goesBad(t, m, 5*time.Second, func(_ context.Context, b *Backend, _ *memory.Memory) error {
			if b.group.Rank() == 1 && b.Comm() == 0 {
				return errors.New("no handle")
			}
			return nil
		})
	})
	t.Run("window that cannot be deregistered", func(t *testing.T) {
		m := newMachine(2)
		var failing atomic.Bool
		m.fail = func(call string, rank, _ int) nccl.Result {
			if call == "ncclCommWindowDeregister" && rank == 1 && failing.CompareAndSwap(true, false) {
				return nccl.SystemError
			}
			return nccl.Success
		}
		var second atomic.Int64
		failed := backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
			return withMemory(ctx, g, m.plain(g.Rank()), func(parent *Backend, _ *memory.Memory) error {
				first := inSub(ctx, g, []int{0, 1}, m.child(parent), func(b *Backend, mem *memory.Memory) error {
					err := backendtest.TryWindow(ctx, mem, 64)
					failing.Store(true)
					return err
				})
				if g.Rank() == 1 && first == nil {
					return errors.New("no error")
				}
				return inSub(ctx, g, []int{0, 1}, m.child(parent), func(b *Backend, mem *memory.Memory) error {
					if !b.reused {
						second.Add(1)
					}
					return backendtest.TryWindow(ctx, mem, 64)
				})
			})
		})
		backendtest.RequireAll(t, failed)
		assert.EqualValues(t, 2, second.Load())
	})
}

// TestWindowsLeftAtClose: what is still registered when a group is closed is not when its communicator is used again.
func TestWindowsLeftAtClose(t *testing.T) {
	m := newMachine(2)
	onParents(t, m, 2, func(ctx context.Context, g *group.Group, parent *Backend) error {
		for i := range 3 {
			s, err := g.Sub(ctx, []int{0, 1})
			if err != nil {
				return err
			}
			b, err := New(ctx, s, m.child(parent))
			if err != nil {
				return err
			}
			if b.reused != (i > 0) {
				return fmt.Errorf("round %d: kept is %t", i, b.reused)
			}
			m.Mu.Lock()
			left := len(m.comms[b.comm.Handle()].windows)
			m.Mu.Unlock()
			a, err := b.Allocate(ctx, 64)
			if err != nil || left != 0 {
				return fmt.Errorf("round %d: %d windows from before: %w", i, left, err)
			}
			if _, err := b.Rendezvous(ctx, a); err != nil {
				return err
			}
			if err := errors.Join(b.Close(ctx), a.Release(ctx), s.Close(ctx)); err != nil {
				return err
			}
		}
		return nil
	})
}

// TestBadWhileKept: a communicator that NCCL reports an error of while nobody uses it is ended on all ranks by the next group, on whichever
// rank that was.
func TestBadWhileKept(t *testing.T) {
	for _, victim := range []int{0, 1} {
		m := newMachine(2)
		m.joint = true
		onParents(t, m, 2, func(ctx context.Context, g *group.Group, parent *Backend) error {
			for i := range 4 {
				if err := inSub(ctx, g, []int{0, 1}, m.child(parent), func(b *Backend, mem *memory.Memory) error {
					if reused := i == 1 || i == 3; b.reused != reused {
						return fmt.Errorf("group %d: kept is %t", i, b.reused)
					}
					return backendtest.TryWindow(ctx, mem, 64)
				}); err != nil {
					return err
				}
				if i == 1 && g.Rank() == victim {
					m.set(func() { m.comms[parent.shelf.links[0].comm.Handle()].result = nccl.RemoteError })
				}
			}
			if n := len(parent.shelf.links); n != 1 {
				return fmt.Errorf("%d are kept", n)
			}
			if n, err := made(ctx, m, g); err != nil || n != 2+2+2 {
				return fmt.Errorf("%d communicators: %w", n, err)
			}
			return nil
		})
	}
}

// TestOneRankHasItNoMore: where one rank has lost what it had kept, the others end theirs, which lets that rank's end, and all have a new
// one.
func TestOneRankHasItNoMore(t *testing.T) {
	for _, victim := range []int{0, 1, 2} {
		m := newMachine(3)
		m.joint = true
		onParents(t, m, 3, func(ctx context.Context, g *group.Group, parent *Backend) error {
			use := func(reused bool) error {
				return inSub(ctx, g, []int{0, 1, 2}, m.child(parent), func(b *Backend, mem *memory.Memory) error {
					if b.reused != reused {
						return fmt.Errorf("kept is %t", b.reused)
					}
					return backendtest.TryWindow(ctx, mem, 64)
				})
			}
			if err := use(false); err != nil {
				return err
			}
			ended := make(chan struct{})
			close(ended)
			if g.Rank() == victim {
				l := parent.shelf.pend(func(*link) bool { return true })
				ended = make(chan struct{})
				go func() {
					defer close(ended)
					parent.endLinks(ctx, l) // which waits for the others
				}()
				for len(parent.shelf.busy(l[0].ranks, nil)) > 0 {
					time.Sleep(time.Millisecond)
				}
			}
			if err := errors.Join(use(false), use(true)); err != nil {
				return err
			}
			select {
			case <-ended:
				return nil
			case <-ctx.Done():
				return errors.New("the others did not end theirs")
			}
		})
		assert.Equal(t, 3+3+3, m.made())
	}
}

// TestKeptDoesNotWork: where the trial of a communicator that was kept fails, on one rank, all make a new one, and the opening succeeds.
func TestKeptDoesNotWork(t *testing.T) {
	m := newMachine(2)
	m.joint = true
	var failing atomic.Bool
	m.fail = func(call string, rank, _ int) nccl.Result {
		if call == "ncclCommWindowRegister" && rank == 1 && failing.CompareAndSwap(true, false) {
			return nccl.SystemError
		}
		return nccl.Success
	}
	onParents(t, m, 2, func(ctx context.Context, g *group.Group, parent *Backend) error {
		for i := range 4 {
			o := m.child(parent)
			o.KernelTimeout = time.Second
			failing.Store(i == 2)
			if err := g.Barrier(ctx, "set"); err != nil {
				return err
			}
			if err := inSub(ctx, g, []int{0, 1}, o, func(b *Backend, mem *memory.Memory) error {
				if reused := i == 1 || i == 3; b.reused != reused {
					return fmt.Errorf("group %d: kept is %t", i, b.reused)
				}
				return tryAll(ctx, mem, b.group)
			}); err != nil {
				return err
			}
		}
		return nil
	})
}

// TestCloseThatTimedOut: what one rank did not keep, because another came too late, no rank has any more.
func TestCloseThatTimedOut(t *testing.T) {
	m := newMachine(2)
	onParents(t, m, 2, func(ctx context.Context, g *group.Group, parent *Backend) error {
		s, err := g.Sub(ctx, []int{0, 1})
		if err != nil {
			return err
		}
		o := m.child(parent)
		o.KernelTimeout = 600 * time.Millisecond
		b, err := New(ctx, s, o)
		if err != nil {
			return err
		}
		if g.Rank() == 0 {
			err = b.Close(ctx)
		}
		if e := g.Barrier(ctx, "rank 0 is done"); e != nil {
			return e
		}
		if g.Rank() == 1 {
			err = b.Close(ctx)
		}
		if n := len(parent.shelf.links); n != 0 {
			return fmt.Errorf("%d communicators on rank %d", n, g.Rank())
		}
		_ = err // of one rank of this process that waits for the other, or not
		_ = s.Close(ctx)
		if e := g.Barrier(ctx, "closed"); e != nil {
			return e
		}
		return inSub(ctx, g, []int{0, 1}, m.child(parent), func(b *Backend, mem *memory.Memory) error {
			if b.reused {
				return errors.New("it was kept")
			}
			return backendtest.TryWindow(ctx, mem, 64)
		})
	})
}

// TestKeptAfterALoss: what the survivors of a lost rank had among themselves serves them still, and what they had with it does not.
func TestKeptAfterALoss(t *testing.T) {
	m := newMachine(3)
	failed := backendtest.OnRanks(t, 3, nil, func(ctx context.Context, g *group.Group) error {
		parent, err := New(ctx, g, m.plain(g.Rank()))
		if err != nil {
			return err
		}
		try := func(ranks []int, reused bool) error {
			if !slices.Contains(ranks, g.Rank()) {
				return nil
			}
			return inSub(ctx, g, ranks, m.child(parent), func(b *Backend, mem *memory.Memory) error {
				if b.reused != reused {
					return fmt.Errorf("ranks %v: kept is %t", ranks, b.reused)
				}
				return backendtest.TryWindow(ctx, mem, 64)
			})
		}
		if err := errors.Join(try([]int{0, 1, 2}, false), try([]int{0, 1}, false), g.Barrier(ctx, "made")); err != nil {
			return err
		}
		if g.Rank() == 2 {
			g.Abort("it had enough")
		} else {
			<-g.Lost()
			err = try([]int{0, 1}, true)
		}
		return errors.Join(err, parent.Close(ctx))
	})
	backendtest.RequireAll(t, failed)
	m.requireClean(t)
}

// TestKeptByMulticast: a communicator that was made without multicast is none for a group that may use it, and the other way round.
func TestKeptByMulticast(t *testing.T) {
	m := newMachine(2)
	m.version, m.nvls = 22907, true
	onParents(t, m, 2, func(ctx context.Context, g *group.Group, parent *Backend) error {
		for i := range 6 {
			o := m.child(parent)
			o.Multicast = []string{"off", "auto"}[i%2]
			if err := inSub(ctx, g, []int{0, 1}, o, func(b *Backend, mem *memory.Memory) error {
				if b.reused != (i > 1) || b.Capabilities().Multicast != (i%2 == 1) {
					return fmt.Errorf("group %d: kept is %t, capabilities %+v", i, b.reused, b.Capabilities())
				}
				return backendtest.TryWindow(ctx, mem, 64)
			}); err != nil {
				return err
			}
		}
		return nil
	})
}

// TestParentClosedFirst: a sub-group that is closed behind the group that it comes from keeps nothing.
func TestParentClosedFirst(t *testing.T) {
	m := newMachine(2)
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		parent, err := New(ctx, g, m.plain(g.Rank()))
		if err != nil {
			return err
		}
		s, err := g.Sub(ctx, []int{0, 1})
		if err != nil {
			return err
		}
		o := m.plain(g.Rank()) // with the same GPU opened again, or it would be closed with the parent
		o.Parent = parent
		b, err := New(ctx, s, o)
		if err != nil {
			return err
		}
		if b.keeps {
			return errors.New("it would be kept though it is of another device's")
		}
		return errors.Join(parent.Close(ctx), b.Close(ctx), s.Close(ctx))
	}))
	m.requireClean(t)

	var s shelf
	require.NoError(t, s.open())
	require.Empty(t, s.close())
	require.Error(t, s.open())
	l := &link{}
	s.add(l)
	assert.False(t, s.keep(l))
	assert.Empty(t, s.links)
	l.state = pended
	assert.False(t, s.give(l))
}
