package memory_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/backend/host"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// TestNumbersOfHeaps: what a heap's requests make has a number that no rendezvous has, nor another heap, also around request 2^32. What has the number of an
// earlier one is at another place.
func TestNumbersOfHeaps(t *testing.T) {
	backendtest.RequireAll(t, backendtest.OnRanks(t, 1, nil, func(ctx context.Context, g *group.Group) error {
		b, err := host.New(g, nil)
		if err != nil {
			return err
		}
		m := memory.New(b, g, nil)
		seen := map[uint64]string{}
		note := func(what string, n uint64) error {
			if other, ok := seen[n]; ok {
				return fmt.Errorf("%s and %s are both number %d", other, what, n)
			}
			seen[n] = what
			return nil
		}
		var heaps []*memory.Heap
		for i := range 3 {
			h, err := m.NewHeap(ctx, 1<<16)
			if err != nil {
				return err
			}
			heaps = append(heaps, h)
			if err := note(fmt.Sprintf("heap %d", i), h.Window().Number()); err != nil {
				return err
			}
			first, err := h.Allocate(ctx, 256, "u8", nil)
			if err != nil {
				return err
			}
			if err := note(fmt.Sprintf("the first of heap %d", i), first.Window().Number()); err != nil {
				return err
			}
			h.SkipRequests(1<<32 - 3)
			for n := range 3 {
				a, err := h.Allocate(ctx, 256, "u8", nil)
				if err != nil {
					return err
				}
				if n == 2 { // 2^32 requests after the first
					if a.Window().Number() != first.Window().Number() || a.Offset() == first.Offset() {
						return fmt.Errorf("number %d at %d, and %d at %d", first.Window().Number(), first.Offset(), a.Window().Number(), a.Offset())
					}
				} else if err := note(fmt.Sprintf("%d of heap %d", n, i), a.Window().Number()); err != nil {
					return err
				}
			}
		}
		if n := m.Heaps(); n != 3 {
			return fmt.Errorf("%d heaps", n)
		}
		// One whose memory is freed is compared no more.
		if err := errors.Join(m.Free(ctx, heaps[0].Window().Allocation()), heaps[1].Close(ctx)); err != nil {
			return err
		}
		if n := m.Heaps(); n != 1 {
			return fmt.Errorf("%d heaps after two were freed", n)
		}
		return m.Close(ctx)
	}))
}

// TestNumberOfWhatWasFreed: a plan that is kept for memory that was freed is not run for what has its number and its place 2^32 requests later.
func TestNumberOfWhatWasFreed(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	ranks, err := symmem.OpenLocal(ctx, 2, config.Default(), &symmem.Options{Environ: func() []string { return nil }})
	require.NoError(t, err)
	backendtest.RequireAll(t, backendtest.OnAll(ranks, func(r *symmem.Rank) error {
		err := reduceWhatComesAgain(ctx, r)
		if err != nil {
			r.Group().Abort("the test has failed")
		}
		return errors.Join(err, r.Close(ctx))
	}))
}

func reduceWhatComesAgain(ctx context.Context, r *symmem.Rank) error {
	h, err := tensor.NewHeap(ctx, r.Memory(), 1<<16)
	if err != nil {
		return err
	}
	const n = 8
	var number uint64
	var at int64
	for round := range 3 {
		a, err := h.Zeros(ctx, tensor.Float32, n)
		if err != nil {
			return err
		}
		w, offset, err := a.Window()
		if err != nil {
			return err
		}
		if round == 0 {
			number, at = w.Number(), offset
		}
		if w.Number() != number || offset != at {
			return fmt.Errorf("number %d at %d, and once more %d at %d", number, at, w.Number(), offset)
		}
		for range 2 { // with a new plan, and with one that is kept
			in := make([]float32, n)
			for i := range in {
				in[i] = float32(round + r.Rank())
			}
			if err := tensor.Write(a.Local(), in, 0); err != nil {
				return err
			}
			if err := r.Group().Barrier(ctx, "copied"); err != nil {
				return err
			}
			ts := []tensor.SymmetricTensor{a}
			if err := errors.Join(r.AllReduceMany(ctx, ts, kernels.Sum), r.Synchronize(ctx)); err != nil {
				return fmt.Errorf("round %d: %w", round, err)
			}
			out, err := tensor.ReadAll[float32](a.Local())
			if err != nil {
				return err
			}
			if want := float32(2*round + 1); out[0] != want || out[n-1] != want {
				return fmt.Errorf("round %d: %v, expected %v", round, out, want)
			}
		}
		if err := errors.Join(a.Close(ctx), h.Reclaim(ctx)); err != nil {
			return err
		}
		h.SkipRequests(1<<32 - 3) // Zeros, Close and Reclaim are three
	}
	return h.Close(ctx)
}
