package memory_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/memory"
)

// TestFreeWhileCopying: one goroutine copies and posts transfers again and again while another frees the local side. What was enqueued
// works on memory that is there, and what comes later is refused.
func TestFreeWhileCopying(t *testing.T) {
	nearAndFar(t, 2, func(ctx context.Context, g *group.Group, b backend.Backend) error {
		return backendtest.WithMemory(ctx, g, b, func(m *memory.Memory) error {
			return backendtest.WithWindow(ctx, m, 1<<16, func(w *memory.Window) error {
				s, err := m.Device().NewStream()
				if err != nil {
					return err
				}
				for range 15 {
					if err := freeWhileCopying(ctx, m, w, s); err != nil {
						return errors.Join(err, s.Close())
					}
				}
				return s.Close()
			})
		})
	})
}

func freeWhileCopying(ctx context.Context, m *memory.Memory, w *memory.Window, s device.Stream) error {
	peer := 1 - m.Group().Rank()
	src, err := m.Allocate(ctx, 4096, "")
	if err != nil {
		return err
	}
	x, err := m.PrepareTransfer(backend.Write, peer, []memory.TransferBlock{{Local: src.Ptr(), Window: w, Bytes: src.Bytes()}})
	if err != nil {
		return err
	}
	refused := make(chan error, 2)
	go func() {
		var err error
		for err == nil {
			err = m.Copy(s, backend.Write, peer, w, 0, src.Ptr(), src.Bytes())
		}
		refused <- err
	}()
	go func() {
		var err error
		for err == nil {
			if err = x.Post(s); err == nil {
				err = x.Wait(ctx)
			}
		}
		refused <- err
	}()
	time.Sleep(50 * time.Microsecond)
	if err := m.Free(ctx, src); err != nil {
		return err
	}
	for range 2 {
		if err := <-refused; !errors.Is(err, errs.ErrClosed) && !errors.Is(err, errs.ErrNotSymmetric) {
			return fmt.Errorf("memory that is freed is refused with %w", err)
		}
	}
	if err := s.Synchronize(ctx); err != nil {
		return fmt.Errorf("what was enqueued before: %w", err)
	}
	return x.Close()
}
