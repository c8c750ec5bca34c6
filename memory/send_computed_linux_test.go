package memory_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/memory"
)

// TestComputedSendKeepsTheLatest: what a run puts again is not prepared again, what it does not is given back, and all with the send.
func TestComputedSendKeepsTheLatest(t *testing.T) {
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		b, err := newSickly(g)
		if err != nil {
			return err
		}
		m := memory.New(b, g, &memory.Options{Channels: 1})
		c, signals, err := planned(ctx, m)
		if err != nil {
			return err
		}
		own, err := c.Peer(g.Rank())
		if err != nil {
			return err
		}
		put := func(offset, bytes int64) memory.SendPut {
			return memory.SendPut{Peer: 1 - g.Rank(), Offset: offset, Local: own.Add(2048), Bytes: bytes}
		}
		runs := [][]memory.SendPut{{put(1024, 8)}, {put(1024, 8)}, {put(1032, 8)}, nil, {put(1024, 0)}, {put(1024, 16)}}
		live := []int32{1, 1, 1, 0, 0, 1}
		n := 0
		send, err := signals.PrepareComputedSend(0, nil, func() ([]memory.SendPut, error) { return runs[n], nil })
		if err != nil {
			return err
		}
		s, err := m.Device().NewStream()
		if err != nil {
			return err
		}
		var last int32
		for n = range runs {
			if err := errors.Join(send.Enqueue(s), signals.WaitAll(s, 0), s.Synchronize(ctx)); err != nil {
				return err
			}
			if last = b.live.Load(); last != live[n] {
				return fmt.Errorf("run %d: %d transfers are prepared, and %d were expected", n, last, live[n])
			}
		}
		if err := send.Close(); err != nil || b.live.Load() != 0 {
			return fmt.Errorf("closing: %w, with %d transfers left", err, b.live.Load())
		}
		return errors.Join(s.Close(), c.Close(ctx), signals.Close(), m.Close(ctx))
	}))
}

// TestComputedSendKnowsNewMemory: memory that lies where some lay that was freed is other memory, for which a put is prepared again.
func TestComputedSendKnowsNewMemory(t *testing.T) {
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		b, err := newSickly(g)
		if err != nil {
			return err
		}
		m := memory.New(b, g, &memory.Options{Channels: 1})
		h, err := m.NewHeap(ctx, memory.HeapAlign)
		if err != nil {
			return err
		}
		c, signals, err := planned(ctx, m)
		if err != nil {
			return err
		}
		put := memory.SendPut{Peer: 1 - g.Rank(), Offset: 1024, Bytes: 8}
		send, err := signals.PrepareComputedSend(0, nil, func() ([]memory.SendPut, error) { return []memory.SendPut{put}, nil })
		if err != nil {
			return err
		}
		s, err := m.Device().NewStream()
		if err != nil {
			return err
		}
		for i := range 2 {
			a, err := h.Allocate(ctx, memory.HeapAlign, "u8", []int64{memory.HeapAlign})
			if err != nil {
				return err
			}
			at, err := a.Window().Peer(g.Rank(), 0)
			if err != nil {
				return err
			}
			if i > 0 && at != put.Local {
				return fmt.Errorf("the heap's only piece was at %s, and is at %s", put.Local, at)
			}
			put.Local = at
			if err := errors.Join(send.Enqueue(s), signals.WaitAll(s, 0), s.Synchronize(ctx)); err != nil {
				return fmt.Errorf("allocation %d: %w", i, err)
			}
			if n := b.live.Load(); n != 1 {
				return fmt.Errorf("allocation %d: %d transfers are prepared", i, n)
			}
			if err := errors.Join(a.Free(), h.Reclaim(ctx)); err != nil {
				return err
			}
		}
		return errors.Join(send.Close(), s.Close(), c.Close(ctx), signals.Close(), h.Close(ctx), m.Close(ctx))
	}))
}

// TestComputedSendIsRefused: a channel that there is not, and no function.
func TestComputedSendIsRefused(t *testing.T) {
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		near, err := newSickly(g)
		if err != nil {
			return err
		}
		none := func() ([]memory.SendPut, error) { return nil, nil }
		m := memory.New(near, g, &memory.Options{Channels: 1})
		c, signals, err := planned(ctx, m)
		if err != nil {
			return err
		}
		for _, channel := range []int{-1, 1} {
			if _, err := signals.PrepareComputedSend(channel, nil, none); !errors.Is(err, errs.ErrInvalid) {
				return fmt.Errorf("channel %d: %w", channel, err)
			}
		}
		if _, err := signals.PrepareComputedSend(0, nil, nil); !errors.Is(err, errs.ErrInvalid) {
			return fmt.Errorf("no function: %w", err)
		}
		return errors.Join(c.Close(ctx), signals.Close(), m.Close(ctx))
	}))
}
