package memory_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/backend/host"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/memory"
)

// TestErrorOfTransfer: a transfer that failed says why to whoever waits for it or asks, and so does its stream; the next post begins anew.
func TestErrorOfTransfer(t *testing.T) {
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		near, err := host.New(g, nil)
		if err != nil {
			return err
		}
		var broken atomic.Bool
		b := backendtest.Far(near, g, &backendtest.FarOptions{Fail: func() error {
			if broken.Load() {
				return errBroken
			}
			return nil
		}})
		return backendtest.WithMemory(ctx, g, b, func(m *memory.Memory) error {
			return backendtest.WithWindow(ctx, m, 4096, func(w *memory.Window) error { return failingTransfer(ctx, m, w, &broken) })
		})
	}))
}

func failingTransfer(ctx context.Context, m *memory.Memory, w *memory.Window, broken *atomic.Bool) (err error) {
	s, err := m.Device().NewStream()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	peer := 1 - m.Group().Rank()
	x, err := m.PrepareTransfer(backend.Write, peer, []memory.TransferBlock{{Local: w.Allocation().Ptr(), Window: w, Offset: 2048, Bytes: 64}})
	if err != nil {
		return err
	}
	if err := errors.Join(x.Post(s), x.Wait(ctx), s.Synchronize(ctx)); err != nil {
		return fmt.Errorf("before anything is broken: %w", err)
	}
	broken.Store(true)
	if err := x.Post(s); err != nil {
		return err
	}
	if err := x.Wait(ctx); !errors.Is(err, errBroken) {
		return fmt.Errorf("waiting for a transfer that fails: %w", err)
	}
	if state, err := x.Status(); state != memory.TransferDone || !errors.Is(err, errBroken) {
		return fmt.Errorf("a transfer that failed is %v: %w", state, err)
	}
	if err := s.Synchronize(ctx); !errors.Is(err, errBroken) {
		return fmt.Errorf("its stream says %w", err)
	}
	broken.Store(false)
	if err := errors.Join(x.Post(s), x.Wait(ctx), s.Synchronize(ctx)); err != nil {
		return fmt.Errorf("posted again: %w", err)
	}
	if state, err := x.Status(); state != memory.TransferDone || err != nil {
		return fmt.Errorf("a transfer that ended well after one that failed is %v: %w", state, err)
	}
	return x.Close()
}
