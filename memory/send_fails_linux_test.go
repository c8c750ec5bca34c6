package memory_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/memory"
)

// TestSendsFail: a run of a send that a stream lost, or that began before the last had ended, is told by the plan's next wait, and the peer gets
// no signal. What was prepared for a send goes with it, and with one that is refused.
func TestSendsFail(t *testing.T) {
	for name, misuse := range map[string]func(context.Context, *sickly, *memory.PreparedSend, device.Stream, device.Stream) error{
		"panic":   panicInSend,
		"overlap": overlapSends,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel() // they wait more than they work
			backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
				b, err := newSickly(g)
				if err != nil {
					return err
				}
				m := memory.New(b, g, &memory.Options{Channels: 1, KernelTimeout: time.Second})
				if err = failingSend(ctx, m, b, misuse); err != nil {
					g.Abort("the test has failed") // the other rank may be waiting
				}
				return errors.Join(err, m.Close(ctx))
			}))
		})
	}
}

func panicInSend(ctx context.Context, b *sickly, send *memory.PreparedSend, lane, _ device.Stream) error {
	b.panics.Store(true)
	err := errors.Join(send.Enqueue(lane), lane.Synchronize(ctx))
	b.panics.Store(false)
	if err == nil {
		return errors.New("a send that panicked is no error")
	}
	return nil
}

func overlapSends(ctx context.Context, b *sickly, send *memory.PreparedSend, lane, other device.Stream) error {
	b.held.Store(true)
	defer b.held.Store(false)
	err := send.Enqueue(lane)
	for err == nil && b.started.Load() == 0 {
		time.Sleep(time.Millisecond)
		err = ctx.Err()
	}
	return errors.Join(err, send.Enqueue(other), other.Synchronize(ctx))
}

// planned makes the workspace and the signals of a plan.
func planned(ctx context.Context, m *memory.Memory) (*memory.Workspace, *memory.Signals, error) {
	c, err := m.NewWorkspace(ctx, memory.WorkspaceRequest{Purpose: "test", Bytes: 4096})
	if err != nil {
		return nil, nil, err
	}
	signals, err := c.Signals(ctx, 0, &memory.SignalsOptions{Channels: 1, Op: "the plan", Failed: func(err error) error { return err }})
	return c, signals, err
}

func failingSend(
	ctx context.Context, m *memory.Memory, b *sickly, misuse func(context.Context, *sickly, *memory.PreparedSend, device.Stream, device.Stream) error,
) error {
	g := m.Group()
	c, signals, err := planned(ctx, m)
	if err != nil {
		return err
	}
	own, err := c.Peer(g.Rank())
	if err != nil {
		return err
	}
	put := memory.SendPut{Peer: 1 - g.Rank(), Offset: 64, Local: own, Bytes: 8}
	if _, err := signals.PrepareSend(0, put, put); !errors.Is(err, errs.ErrInvalid) {
		return fmt.Errorf("two puts to a peer: %w", err)
	}
	if n := b.live.Load(); n != 0 {
		return fmt.Errorf("%d transfers of a send that was refused", n)
	}
	send, err := signals.PrepareSend(0, put)
	if err != nil {
		return err
	}
	var streams [3]device.Stream
	for i := range streams {
		if streams[i], err = m.Device().NewStream(); err != nil {
			return err
		}
	}
	s := streams[0]
	if g.Rank() == 0 {
		if err := misuse(ctx, b, send, streams[1], streams[2]); err != nil {
			return err
		}
	}
	if err := errors.Join(signals.WaitAll(s, 0), s.Synchronize(ctx)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) == (g.Rank() == 0) {
		return fmt.Errorf("the plan's wait: %w", err)
	}
	for _, s := range streams {
		_ = s.Synchronize(ctx) // what is told there was told before
		if err := s.Close(); err != nil {
			return err
		}
	}
	if err := send.Close(); err != nil {
		return err
	}
	if n := b.live.Load(); n != 0 {
		return fmt.Errorf("%d transfers of a send that was closed", n)
	}
	return errors.Join(c.Close(ctx), signals.Close())
}

// TestFailedSendTellsNobody: of a send whose put to one peer fails, the others' puts run to their end, and they get no signal.
func TestFailedSendTellsNobody(t *testing.T) {
	backendtest.RequireAll(t, backendtest.OnRanks(t, 3, nil, func(ctx context.Context, g *group.Group) error {
		b, err := newSickly(g)
		if err != nil {
			return err
		}
		m := memory.New(b, g, &memory.Options{Channels: 1, KernelTimeout: 300 * time.Millisecond})
		c, signals, err := planned(ctx, m)
		if err != nil {
			return err
		}
		s, err := m.Device().NewStream()
		if err != nil {
			return err
		}
		own, err := c.Peer(g.Rank())
		if err != nil {
			return err
		}
		var puts []memory.SendPut
		for peer := range g.Size() {
			if peer != g.Rank() {
				puts = append(puts, memory.SendPut{Peer: peer, Offset: int64(64 * (1 + g.Rank())), Local: own, Bytes: 8})
			}
		}
		send, err := signals.PrepareSend(0, puts...)
		if err != nil {
			return err
		}
		if g.Rank() == 0 {
			b.unreachable.Store(1)
		}
		if err := errors.Join(send.Enqueue(s), s.Synchronize(ctx), g.Barrier(ctx, "sent")); err != nil {
			return err
		}
		want := os.ErrDeadlineExceeded
		if g.Rank() == 0 {
			want = errBroken
		}
		if err := errors.Join(signals.WaitAll(s, 0), s.Synchronize(ctx)); !errors.Is(err, want) {
			return fmt.Errorf("the plan's wait: %w, expected %w", err, want)
		}
		return errors.Join(s.Close(), send.Close(), c.Close(ctx), signals.Close(), m.Close(ctx))
	}))
}

// TestWaitBesidePanics: a wait on a stream beside the user's that panics is told by the plan's next wait.
func TestWaitBesidePanics(t *testing.T) {
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		b, err := newUnplugged(g)
		if err != nil {
			return err
		}
		m := memory.New(b, g, &memory.Options{Channels: 1, KernelTimeout: 300 * time.Millisecond})
		c, signals, err := planned(ctx, m)
		if err != nil {
			return err
		}
		s, err := m.Device().NewStream()
		if err != nil {
			return err
		}
		b.noProgress.Store(true)
		err = errors.Join(signals.WaitAllBeside(s, 0), s.Synchronize(ctx))
		b.noProgress.Store(false)
		if err == nil {
			return errors.New("a wait that panicked is no error")
		}
		if err := errors.Join(signals.WaitAll(s, 0), s.Synchronize(ctx)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			return fmt.Errorf("the plan's wait: %w", err)
		}
		return errors.Join(s.Close(), c.Close(ctx), signals.Close(), m.Close(ctx))
	}))
}

// eventless is a device that has no events where it is told so.
type eventless struct {
	device.Device
	none atomic.Bool
}

func (d *eventless) NewEvent() (device.Event, error) {
	if d.none.Load() {
		return nil, errBroken
	}
	return d.Device.NewEvent()
}

// onEventless is a sickly backend of an eventless device.
type onEventless struct {
	*sickly
	device *eventless
}

func (b onEventless) Device() device.Device { return b.device }

// TestTransfersAreGivenBack: what a library has prepared for a transfer goes with it, also where the device has nothing to tell its end by.
func TestTransfersAreGivenBack(t *testing.T) {
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		near, err := newSickly(g)
		if err != nil {
			return err
		}
		b := onEventless{near, &eventless{Device: near.Device()}}
		return backendtest.WithMemory(ctx, g, b, func(m *memory.Memory) error {
			a, err := m.Allocate(ctx, 100, "")
			if err != nil {
				return err
			}
			w, err := m.Rendezvous(ctx, a, memory.Record{})
			if err != nil {
				return err
			}
			prepare := func() (*memory.Transfer, error) {
				return m.PrepareTransfer(backend.Write, 1-g.Rank(), []memory.TransferBlock{{Local: a.Ptr(), Window: w, Offset: 64, Bytes: 8}})
			}
			b.device.none.Store(true)
			_, err = prepare()
			b.device.none.Store(false)
			if n := near.live.Load(); !errors.Is(err, errBroken) || n != 0 {
				return fmt.Errorf("without an event %d transfers are left: %w", n, err)
			}
			x, err := prepare()
			if err != nil {
				return err
			}
			if err := x.Close(); err != nil {
				return err
			}
			if n := near.live.Load(); n != 0 {
				return fmt.Errorf("%d transfers were not closed", n)
			}
			return m.Free(ctx, a)
		})
	}))
}
