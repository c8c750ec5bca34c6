package memory_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/backend/host"
	devhost "github.com/symmem/symmem/device/host"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/memory"
)

// scarce is a backend that has memory for so many allocations more.
type scarce struct {
	backend.Backend
	left int
}

func (b *scarce) Allocate(ctx context.Context, bytes int64) (backend.Allocation, error) {
	if b.left--; b.left < 0 {
		return nil, fmt.Errorf("a test: %w", errs.ErrNoMemory)
	}
	return b.Backend.Allocate(ctx, bytes)
}

// TestHeapHalfMade: a heap for which one rank lacks the memory is no rank's, whose error is the same, and nothing of it is left.
func TestHeapHalfMade(t *testing.T) {
	backendtest.RequireAll(t, backendtest.OnRanks(t, 3, nil, func(ctx context.Context, g *group.Group) error {
		near, err := host.New(g, nil)
		if err != nil {
			return err
		}
		b := &scarce{Backend: near, left: 100}
		m := memory.New(b, g, nil)
		h, err := m.NewHeap(ctx, 4096) // which makes the signals too
		if err != nil {
			return err
		}
		had := m.Entries()
		if g.Rank() == 1 {
			b.left = 0
		}
		_, err = m.NewHeap(ctx, 4096)
		if !errors.Is(err, errs.ErrNoMemory) || !strings.Contains(err.Error(), "rank 1") {
			return fmt.Errorf("a heap for which rank 1 has no memory: %w", err)
		}
		if m.Entries() != had {
			return fmt.Errorf("%d allocations are left, and there were %d", m.Entries(), had)
		}
		b.left = 100
		other, err := m.NewHeap(ctx, 4096)
		if err != nil {
			return fmt.Errorf("afterwards: %w", err)
		}
		return errors.Join(other.Close(ctx), h.Close(ctx), m.Close(ctx))
	}))
}

// TestHeapOfMoreThanThereIs: no heap is so large that it is another condition than ErrNoMemory, on any rank, up to what sizes may be.
func TestHeapOfMoreThanThereIs(t *testing.T) {
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		b, err := host.New(g, nil)
		if err != nil {
			return err
		}
		return backendtest.WithMemory(ctx, g, b, func(m *memory.Memory) error {
			const most = math.MaxInt64 - memory.HeapAlign
			for _, bytes := range []int64{1 << 62, most - 4096, most} {
				if _, err := m.NewHeap(ctx, bytes); !errors.Is(err, errs.ErrNoMemory) || errors.Is(err, errs.ErrInvalid) {
					return fmt.Errorf("a heap of %d bytes: %w", bytes, err)
				}
			}
			if _, err := m.NewHeap(ctx, most+1); !errors.Is(err, errs.ErrInvalid) {
				return fmt.Errorf("a heap of a size that may not be: %w", err)
			}
			if _, err := m.Allocate(ctx, math.MaxInt64, ""); !errors.Is(err, errs.ErrNoMemory) {
				return fmt.Errorf("as much as a number may say: %w", err)
			}
			return nil
		})
	}))
}

// TestNoHeap: what NewHeap has not made is refused.
func TestNoHeap(t *testing.T) {
	for name, h := range map[string]*memory.Heap{"nil": nil, "zero": {}} {
		t.Run(name, func(t *testing.T) {
			_, allocErr := h.Allocate(t.Context(), 1, "u8", nil)
			for what, err := range map[string]error{"Allocate": allocErr, "Err": h.Err(), "Check": h.Check(t.Context()), "Reclaim": h.Reclaim(t.Context()), "Close": h.Close(t.Context())} {
				require.ErrorIs(t, err, errs.ErrInvalid, what)
			}
		})
	}
	var a memory.HeapAllocation
	require.ErrorIs(t, a.Free(), errs.ErrInvalid)
	require.ErrorIs(t, a.Err(), errs.ErrInvalid)
}

// TestHeapKeepsNothingForWhatIsGone: a table that is made while its tensor is closed and reclaimed does not stay until the device closes.
func TestHeapKeepsNothingForWhatIsGone(t *testing.T) {
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		b, err := host.New(g, nil)
		if err != nil {
			return err
		}
		m := memory.New(b, g, nil)
		d := m.Device().(*devhost.Device)
		h, err := m.NewHeap(ctx, 4096)
		if err != nil {
			return err
		}
		a, err := h.Allocate(ctx, 512, "u8", nil)
		if err != nil {
			return err
		}
		had := d.Stats().Allocations
		keep := func() error {
			p, err := d.Alloc(64)
			if err == nil {
				a.Keep(p)
			}
			return err
		}
		if err := errors.Join(keep(), a.Free(), keep()); err != nil {
			return err
		}
		if n := d.Stats().Allocations; n != had+2 {
			return fmt.Errorf("%d allocations before the reclaim, want %d: work may use them", n, had+2)
		}
		if err := errors.Join(h.Reclaim(ctx), keep()); err != nil {
			return err
		}
		if n := d.Stats().Allocations; n != had {
			return fmt.Errorf("%d allocations after it, want %d", n, had)
		}
		return errors.Join(h.Close(ctx), m.Close(ctx))
	}))
}

// TestHeapInWhichRanksDiffer: the ranks are told once, where they meet, and by the heap from then on. Nothing else of the memory's ends with it.
func TestHeapInWhichRanksDiffer(t *testing.T) {
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		b, err := host.New(g, nil)
		if err != nil {
			return err
		}
		m := memory.New(b, g, nil)
		h, err1 := m.NewHeap(ctx, 4096)
		other, err2 := m.NewHeap(ctx, 4096)
		if err := errors.Join(err1, err2); err != nil {
			return err
		}
		if _, err := h.Allocate(ctx, 256<<g.Rank(), "u8", nil); err != nil {
			return err
		}
		for what, err := range map[string]error{"meeting": backendtest.WithWindow(ctx, m, 4096, nil), "the heap": h.Err()} {
			if _, ok := errors.AsType[*group.MismatchError](err); !ok {
				return fmt.Errorf("%s, where the ranks differ: %w", what, err)
			}
		}
		a, err := other.Allocate(ctx, 256, "u8", nil)
		if err != nil {
			return fmt.Errorf("the other heap: %w", err)
		}
		if err := errors.Join(backendtest.WithWindow(ctx, m, 4096, nil), other.Check(ctx)); err != nil {
			return fmt.Errorf("meeting again: %w", err)
		}
		return errors.Join(a.Free(), other.Close(ctx), h.Close(ctx), m.Close(ctx))
	}))
}

// TestHeapLosesPeer: what waits for a lost rank ends with ErrPeerLost, and the heap's memory is given back all the same.
func TestHeapLosesPeer(t *testing.T) {
	backendtest.RequireAll(t, backendtest.OnRanks(t, 3, nil, func(ctx context.Context, g *group.Group) error {
		b, err := host.New(g, nil)
		if err != nil {
			return err
		}
		m := memory.New(b, g, nil)
		h, err := m.NewHeap(ctx, 4096)
		if err != nil {
			return err
		}
		a, err := h.Allocate(ctx, 4096, "u8", nil)
		if err != nil {
			return err
		}
		if err := a.Free(); err != nil {
			return err
		}
		if g.Rank() == 2 {
			for rank := range 2 {
				if _, err := g.Store().Get(ctx, fmt.Sprint("allocated on ", rank)); err != nil {
					return err
				}
			}
			g.Abort("a test")
			_ = m.Close(ctx)
			return nil
		}
		if err := g.Store().Set(ctx, fmt.Sprint("allocated on ", g.Rank()), nil); err != nil {
			return err
		}
		_, full := h.Allocate(ctx, 256, "u8", nil) // reclaims
		for what, err := range map[string]error{"Allocate": full, "Reclaim": h.Reclaim(ctx), "Check": h.Check(ctx), "Close": h.Close(ctx)} {
			if !errors.Is(err, errs.ErrPeerLost) {
				return fmt.Errorf("%s after rank 2 was lost: %w", what, err)
			}
		}
		if n := m.Allocations(); n != 0 {
			return fmt.Errorf("%d allocations are left", n)
		}
		if err := m.Close(ctx); !errors.Is(err, errs.ErrPeerLost) {
			return fmt.Errorf("closing the memory: %w", err)
		}
		return nil
	}))
}

// TestHeapLeaks: what a program did not free is logged with its place, when its heap is closed or the memory is, and has ended.
func TestHeapLeaks(t *testing.T) {
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		b, err := host.New(g, nil)
		if err != nil {
			return err
		}
		var log bytes.Buffer
		m := memory.New(b, g, &memory.Options{Logger: slog.New(slog.NewTextHandler(&log, nil))})
		for _, how := range []string{"heap", "memory"} {
			h, err := m.NewHeap(ctx, 4096)
			if err != nil {
				return err
			}
			var a *memory.HeapAllocation
			var err1 error
			for range 3 { // of one place
				var err error
				a, err = h.Allocate(ctx, 100, "u8", nil)
				err1 = errors.Join(err1, err)
			}
			gone, err2 := h.Allocate(ctx, 101, "u8", nil)
			none, err3 := h.Allocate(ctx, 0, "u8", nil)
			if err := errors.Join(err1, err2, err3, gone.Free()); err != nil {
				return err
			}
			log.Reset()
			if how == "heap" {
				err = h.Close(ctx)
			} else {
				err = m.Close(ctx)
			}
			if err != nil {
				return err
			}
			text := log.String()
			if n := strings.Count(text, "was not freed before its heap was closed"); n != 2 || strings.Contains(text, "bytes=101") || !strings.Contains(text, "allocations=3 bytes=300") {
				return fmt.Errorf("%d places of 2 are logged: %s", n, text)
			}
			if how == "memory" && strings.Count(text, "heap_linux_test.go") != 3 || how == "heap" && strings.Count(text, "heap_linux_test.go") != 2 {
				return fmt.Errorf("the log does not say where: %s", text)
			}
			for _, a := range []*memory.HeapAllocation{a, gone, none} {
				if err := a.Window().Err(); !errors.Is(err, errs.ErrClosed) {
					return fmt.Errorf("a window of what was closed: %w", err)
				}
				if err := a.Free(); !errors.Is(err, errs.ErrClosed) {
					return fmt.Errorf("freeing what was closed: %w", err)
				}
			}
		}
		return nil
	}))
}
