package memory_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/backend/host"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/memory"
)

// onIslands runs f on three ranks, of which the first two are on one island.
func onIslands(t *testing.T, f func(ctx context.Context, m *memory.Memory, s device.Stream) error) {
	t.Helper()
	backendtest.RequireAll(t, backendtest.OnRanks(t, 3, nil, func(ctx context.Context, g *group.Group) error {
		near, err := host.New(g, nil)
		if err != nil {
			return err
		}
		b := backendtest.Far(near, g, &backendtest.FarOptions{Islands: []int{0, 0, 1}, Delay: time.Millisecond})
		m := memory.New(b, g, &memory.Options{Channels: 1, KernelTimeout: 5 * time.Second})
		s, err := m.Device().NewStream()
		if err != nil {
			return err
		}
		if err = f(ctx, m, s); err != nil {
			g.Abort("the test has failed") // the others may be waiting
		}
		closed := errors.Join(s.Close(), m.Close(ctx))
		if err != nil {
			return err
		}
		return closed
	}))
}

// TestSendOnIslands: a send whose puts go by address to some peers and by the backend to others brings each its data with its signal; so does one whose
// puts are known only when it runs.
func TestSendOnIslands(t *testing.T) {
	onIslands(t, func(ctx context.Context, m *memory.Memory, s device.Stream) error {
		me := m.Group().Rank()
		assert.Equal(t, []int{1, 1, 0}[me], m.Capabilities().PointerPeers)
		a, w, err := onWindow(ctx, m)
		if err != nil {
			return err
		}
		c, signals, err := planned(ctx, m)
		if err != nil {
			return err
		}
		var puts []memory.SendPut
		for peer := range 3 {
			if peer != me {
				puts = append(puts, memory.SendPut{Peer: peer, Window: w, Offset: int64(1 + me), Local: a.Ptr(), Bytes: 1})
			}
		}
		send, err := signals.PrepareSend(0, puts...)
		if err != nil {
			return err
		}
		computed, err := signals.PrepareComputedSend(0, nil, func() ([]memory.SendPut, error) { return puts, nil })
		if err != nil {
			return err
		}
		for round, send := range []*memory.PreparedSend{send, computed, send} {
			if err := m.Device().CopyFromHost(a.Ptr(), []byte{byte(10*round + me + 1)}); err != nil {
				return err
			}
			if err := errors.Join(send.Enqueue(s), signals.WaitAll(s, 0), s.Synchronize(ctx)); err != nil {
				return fmt.Errorf("round %d: %w", round, err)
			}
			var got [4]byte
			if err := m.Device().CopyToHost(got[:], a.Ptr()); err != nil {
				return err
			}
			for peer := range 3 {
				if peer != me {
					assert.EqualValues(t, 10*round+peer+1, got[1+peer], "rank %d, round %d", me, round)
				}
			}
			if err := m.Group().Barrier(ctx, "looked"); err != nil {
				return err
			}
		}
		return errors.Join(send.Close(), computed.Close(), c.Close(ctx), signals.Close(), m.Free(ctx, a))
	})
}

// TestKeptSendOnIslands: a graph that puts to memory of its island that was freed makes the plan fail, and touches nothing.
func TestKeptSendOnIslands(t *testing.T) {
	onIslands(t, func(ctx context.Context, m *memory.Memory, s device.Stream) error {
		me := m.Group().Rank()
		a, w, err := onWindow(ctx, m)
		if err != nil {
			return err
		}
		c, signals, err := planned(ctx, m)
		if err != nil {
			return err
		}
		var puts []memory.SendPut
		if me < 2 {
			puts = append(puts, memory.SendPut{Peer: 1 - me, Window: w, Offset: 8, Local: a.Ptr(), Bytes: 8})
		}
		send, err := signals.PrepareSend(0, puts...)
		if err != nil {
			return err
		}
		if err := errors.Join(s.BeginCapture(), send.Enqueue(s)); err != nil {
			return err
		}
		graph, err := s.EndCapture()
		if err != nil {
			return err
		}
		if err := errors.Join(graph.Launch(s), signals.WaitAll(s, 0), s.Synchronize(ctx), m.Free(ctx, a)); err != nil {
			return err
		}
		err = errors.Join(graph.Launch(s), s.Synchronize(ctx))
		if me < 2 {
			err = errors.Join(err, signals.WaitAll(s, 0), s.Synchronize(ctx))
			if !errors.Is(err, errs.ErrClosed) {
				return fmt.Errorf("a put to memory that was freed: %w", err)
			}
			err = nil
		}
		return errors.Join(err, m.Group().Barrier(ctx, "failed"), graph.Close(), send.Close(), c.Close(ctx), signals.Close())
	})
}

// onWindow allocates 64 bytes on every rank, and maps them.
func onWindow(ctx context.Context, m *memory.Memory) (backend.Allocation, *memory.Window, error) {
	a, err := m.Allocate(ctx, 64, "")
	if err != nil {
		return nil, nil, err
	}
	w, err := m.Rendezvous(ctx, a, memory.Record{})
	return a, w, err
}
