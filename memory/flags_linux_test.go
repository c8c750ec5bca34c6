package memory_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/backend/host"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/memory"
)

// unplugged is a backend without peer pointers, whose writes of flags fail where it is told to.
type unplugged struct {
	backend.Backend
	backend.Transferrer
	backend.Flagger
	backend.Quiescer
	noPost, noPoll atomic.Bool
	noProgress     atomic.Bool // it panics
	noFlags        atomic.Bool
	flags, stores  atomic.Int32 // that were not closed
}

func newUnplugged(g *group.Group) (*unplugged, error) {
	near, err := host.New(g, nil)
	if err != nil {
		return nil, err
	}
	far := backendtest.Far(near, g, nil)
	return &unplugged{Backend: far, Transferrer: far.(backend.Transferrer), Flagger: far.(backend.Flagger), Quiescer: far.(backend.Quiescer)}, nil
}

func (b *unplugged) NewFlags(ctx context.Context, count int) (backend.Flags, error) {
	f, err := b.Flagger.NewFlags(ctx, count)
	if err != nil {
		return nil, err
	}
	if b.noFlags.Load() {
		return nil, errors.Join(errBroken, f.Close())
	}
	b.flags.Add(1)
	return unpluggedFlags{f, b}, nil
}

type unpluggedFlags struct {
	backend.Flags
	backend *unplugged
}

func (f unpluggedFlags) PrepareStore(peer, index int) (backend.FlagStore, error) {
	s, err := f.Flags.PrepareStore(peer, index)
	if err == nil {
		f.backend.stores.Add(1)
	}
	return unpluggedStore{s, f.backend}, err
}

func (f unpluggedFlags) Close() error {
	f.backend.flags.Add(-1)
	return f.Flags.Close()
}

func (f unpluggedFlags) Progress() {
	if f.backend.noProgress.Load() {
		panic(errBroken)
	}
	f.Flags.Progress()
}

type unpluggedStore struct {
	backend.FlagStore
	backend *unplugged
}

func (s unpluggedStore) Post(value uint64) error {
	if s.backend.noPost.Load() {
		return errBroken
	}
	return s.FlagStore.Post(value)
}

func (s unpluggedStore) Close() error {
	s.backend.stores.Add(-1)
	return s.FlagStore.Close()
}

func (s unpluggedStore) Poll() (bool, error) {
	if s.backend.noPoll.Load() {
		return false, errBroken
	}
	return s.FlagStore.Poll()
}

// onUnplugged runs f on two ranks for each way in which rank 0's writes of flags can fail, which they do while broken is set.
func onUnplugged(t *testing.T, f func(ctx context.Context, m *memory.Memory, s device.Stream, broken *atomic.Bool) error) {
	for _, way := range []string{"Post", "Poll"} {
		t.Run(way, func(t *testing.T) {
			backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
				b, err := newUnplugged(g)
				if err != nil {
					return err
				}
				broken := &b.noPost
				if way == "Poll" {
					broken = &b.noPoll
				}
				m := memory.New(b, g, &memory.Options{Channels: 2, KernelTimeout: 300 * time.Millisecond})
				s, err := m.Device().NewStream()
				if err != nil {
					return err
				}
				err = f(ctx, m, s, broken)
				if err != nil {
					g.Abort("the test has failed") // the other rank may be waiting
				}
				return errors.Join(err, g.Barrier(ctx, "end"), s.Close(), m.Close(ctx), b.left())
			}))
		})
	}
}

// TestBrokenSignals: a signal that cannot be written is an error of its stream, which says whose it was, and so is a barrier; the next
// signal brings the count of both.
func TestBrokenSignals(t *testing.T) {
	onUnplugged(t, func(ctx context.Context, m *memory.Memory, s device.Stream, broken *atomic.Bool) error {
		if err := backendtest.WithWindow(ctx, m, 100, nil); err != nil { // the first makes the signal pads
			return err
		}
		g := m.Group()
		if g.Rank() == 0 {
			broken.Store(true)
			if err := toldOf(ctx, s, "signal", m.Signal(s, 1, 1)); err != nil {
				return err
			}
			if err := toldOf(ctx, s, "barrier", m.Barrier(s, 1)); err != nil {
				return err
			}
			broken.Store(false)
			if err := errors.Join(m.Signal(s, 1, 1), s.Synchronize(ctx)); err != nil {
				return fmt.Errorf("a signal over a link that was mended: %w", err)
			}
		}
		if err := g.Barrier(ctx, "signalled"); err != nil {
			return err
		}
		if g.Rank() == 1 {
			if err := errors.Join(m.Wait(s, 0, 1), m.Wait(s, 0, 1), s.Synchronize(ctx)); err != nil {
				return fmt.Errorf("waiting for both signals: %w", err)
			}
			if err := errors.Join(m.Wait(s, 0, 1), s.Synchronize(ctx)); !errors.Is(err, os.ErrDeadlineExceeded) {
				return fmt.Errorf("waiting for a third signal: %w", err)
			}
		}
		return nil
	})
}

// toldOf fails unless the stream tells of a broken link to rank 1 on channel 1, in work called op that was enqueued with that error.
func toldOf(ctx context.Context, s device.Stream, op string, enqueued error) error {
	if enqueued != nil {
		return enqueued
	}
	err := s.Synchronize(ctx)
	wait, ok := errors.AsType[*device.WaitError](err)
	if !ok || !errors.Is(err, errBroken) || wait.Op != op || wait.Peer != 1 || wait.Channel != 1 {
		return fmt.Errorf("a %s over a broken link: %w", op, err)
	}
	return nil
}

// TestBrokenSignalsOfPlans: a plan's signal that cannot be written is told by its next wait, although what that waits for has come, and no
// signal follows it.
func TestBrokenSignalsOfPlans(t *testing.T) {
	onUnplugged(t, func(ctx context.Context, m *memory.Memory, s device.Stream, broken *atomic.Bool) error {
		g := m.Group()
		c, err := m.NewWorkspace(ctx, memory.WorkspaceRequest{Purpose: "test", Bytes: 4096})
		if err != nil {
			return err
		}
		var failed atomic.Int32
		signals, err := c.Signals(ctx, 0, &memory.SignalsOptions{Channels: 1, Op: "the plan", Failed: func(err error) error {
			failed.Add(1)
			return err
		}})
		if err != nil {
			return err
		}
		broken.Store(g.Rank() == 0)
		if err := errors.Join(signals.SignalAll(s, 0), s.Synchronize(ctx)); err != nil {
			return fmt.Errorf("the stream of a plan's signal, which may not be its user's, was told: %w", err)
		}
		broken.Store(false)
		if err := g.Barrier(ctx, "signalled"); err != nil {
			return err
		}
		if g.Rank() == 0 {
			if err := errors.Join(signals.SignalAll(s, 0), s.Synchronize(ctx)); err != nil {
				return err
			}
		}
		want := os.ErrDeadlineExceeded // rank 1's, which gets no signal
		if g.Rank() == 0 {
			want = errBroken
		}
		for range 2 {
			if err := errors.Join(signals.WaitAll(s, 0), s.Synchronize(ctx)); !errors.Is(err, want) {
				return fmt.Errorf("the plan's wait: %w, expected %w", err, want)
			}
		}
		if n := failed.Load(); n != 1 {
			return fmt.Errorf("%d failures", n)
		}
		return errors.Join(c.Close(ctx), signals.Close())
	})
}

// left is an error if flags, or writes of some, were not closed.
func (b *unplugged) left() error {
	if f, s := b.flags.Load(), b.stores.Load(); f != 0 || s != 0 {
		return fmt.Errorf("%d sets of flags and %d writes of flags are left", f, s)
	}
	return nil
}

// TestOneRankHasNoFlags: where one rank can have no flags no rank keeps any, and they can be asked for again; they go with the memory, and
// those of a plan with the plan. A plan that one rank does not want is made on none.
func TestOneRankHasNoFlags(t *testing.T) {
	backendtest.RequireAll(t, backendtest.OnRanks(t, 3, nil, func(ctx context.Context, g *group.Group) error {
		b, err := newUnplugged(g)
		if err != nil {
			return err
		}
		m := memory.New(b, g, &memory.Options{Channels: 1})
		fails := g.Rank() == 2
		a, err := m.Allocate(ctx, 100, "")
		if err != nil {
			return err
		}
		b.noFlags.Store(fails)
		_, err = m.Rendezvous(ctx, a, memory.Record{})
		b.noFlags.Store(false)
		if err := errors.Join(wantVote(err, fails), b.left()); err != nil {
			return fmt.Errorf("the memory's flags: %w", err)
		}
		if _, err := m.Rendezvous(ctx, a, memory.Record{}); err != nil {
			return fmt.Errorf("the second time: %w", err)
		}
		c, err := m.NewWorkspace(ctx, memory.WorkspaceRequest{Purpose: "test", Bytes: 4096})
		if err != nil {
			return err
		}
		o := memory.SignalsOptions{Channels: 1, Op: "the plan", Failed: func(err error) error { return err }}
		b.noFlags.Store(fails)
		_, err = c.Signals(ctx, 0, &o)
		b.noFlags.Store(false)
		if err := wantVote(err, fails); err != nil {
			return fmt.Errorf("a plan's flags: %w", err)
		}
		for _, channels := range []int{0, 1025, 1 << 56} {
			wrong := o
			if fails {
				wrong.Channels = channels
			}
			if _, err := c.Signals(ctx, 0, &wrong); !errors.Is(err, errs.ErrInvalid) {
				return fmt.Errorf("a plan with %d channels on rank 2: %w", channels, err)
			}
		}
		if n := b.flags.Load(); n != 1 {
			return fmt.Errorf("%d sets of flags beside those of the memory", n-1)
		}
		signals, err := c.Signals(ctx, 0, &o)
		if err != nil {
			return fmt.Errorf("the second time: %w", err)
		}
		s, err := m.Device().NewStream()
		if err != nil {
			return err
		}
		if err := errors.Join(signals.SignalAll(s, 0), signals.WaitAll(s, 0), m.Barrier(s, 0), s.Synchronize(ctx)); err != nil {
			return err
		}
		if err := c.Close(ctx); err != nil {
			return err
		}
		if _, err := c.Signals(ctx, 0, &o); !errors.Is(err, errs.ErrClosed) {
			return fmt.Errorf("a plan in a closed workspace: %w", err)
		}
		return errors.Join(s.Close(), signals.Close(), m.Free(ctx, a), m.Close(ctx), b.left())
	}))
}

// TestFlagsAreAlike: ranks that want words for signals of other numbers of channels all hear of it, before any has made some: a rank would write
// where another's words end.
func TestFlagsAreAlike(t *testing.T) {
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		differ := func(err error, values ...string) error {
			mismatch, ok := errors.AsType[*group.MismatchError](err)
			if !ok || !slices.Equal(mismatch.Values, values) {
				return fmt.Errorf("expected %q: %w", values, err)
			}
			return nil
		}
		open := func(channels int) (*memory.Memory, error) {
			b, err := newUnplugged(g)
			if err != nil {
				return nil, err
			}
			return memory.New(b, g, &memory.Options{Channels: channels}), nil
		}
		m, err := open(2 + g.Rank())
		if err != nil {
			return err
		}
		_, err = m.Rendezvous(ctx, nil, memory.Record{})
		if err := errors.Join(differ(err, "2", "3"), m.Close(ctx)); err != nil {
			return err
		}
		if m, err = open(2); err != nil {
			return err
		}
		c, err := m.NewWorkspace(ctx, memory.WorkspaceRequest{Purpose: "test", Bytes: 4096})
		if err != nil {
			return err
		}
		o := &memory.SignalsOptions{Channels: 4 - g.Rank(), Op: "the plan", Failed: func(err error) error { return err }}
		_, err = c.Signals(ctx, 0, o)
		return errors.Join(differ(err, "4", "3"), c.Close(ctx), m.Close(ctx))
	}))
}
