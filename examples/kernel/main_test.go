package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/config"
)

// onRanks runs f on n ranks of a backend, each a goroutine. It skips where the backend is not on this machine, unless SYMMEM_TEST_REQUIRE names
// it.
func onRanks(t *testing.T, backend string, n int, f func(ctx context.Context, r *symmem.Rank) error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	cfg, err := config.Load(nil)
	require.NoError(t, err)
	cfg.Backend, cfg.KernelTimeout = []string{backend}, 3*time.Second
	ranks, err := symmem.OpenLocal(ctx, n, cfg, nil)
	if errors.Is(err, symmem.ErrUnavailable) && !required(backend) {
		t.Skipf("%s is missing: %v", backend, err)
	}
	require.NoError(t, err)
	var all sync.WaitGroup
	for _, r := range ranks {
		all.Go(func() {
			assert.NoError(t, f(ctx, r), "rank %d", r.Rank())
			assert.NoError(t, r.Close(ctx), "rank %d", r.Rank())
		})
	}
	all.Wait()
}

// required reports whether SYMMEM_TEST_REQUIRE forbids to skip a test for what name stands for.
func required(name string) bool {
	return slices.Contains(strings.Split(os.Getenv("SYMMEM_TEST_REQUIRE"), ","), name)
}

// TestRun: every rank compares each run, on the CPU and on GPUs. A difference ends the test binary.
func TestRun(t *testing.T) {
	all := func(ctx context.Context, r *symmem.Rank) error {
		run(ctx, r)
		return nil
	}
	for world := 1; world <= 4; world++ {
		t.Run(fmt.Sprintf("host/world=%d", world), func(t *testing.T) { onRanks(t, "host", world, all) })
	}
	t.Run("native/world=2", func(t *testing.T) { onRanks(t, "native", 2, all) })
}

// TestRefused: what a rank must refuse is every rank's error, and so are arguments that differ.
func TestRefused(t *testing.T) {
	for _, c := range []struct {
		columns int64
		epsilon func(rank int) float32
		rows    func(rank int) int64
		want    string
	}{
		{6, func(int) float32 { return epsilon }, func(int) int64 { return 2 }, "f32[6], and columns in multiples of 4"},
		{8, func(int) float32 { return epsilon }, func(rank int) int64 { return 1 + int64(rank)%2 }, "allowed: f32[2 8]"},
		{8, func(rank int) float32 { return float32(rank) }, func(int) int64 { return 2 }, "epsilon 1"},
	} {
		onRanks(t, "host", 3, func(ctx context.Context, r *symmem.Rank) error {
			x, y, weight := zeros(ctx, r, 2, c.columns), zeros(ctx, r, 2, c.columns), zeros(ctx, r, c.columns)
			hidden, err := zeros(ctx, r, 2, c.columns).Slice(0, c.rows(r.Rank()))
			if err != nil {
				return err
			}
			if _, err := newNorm(ctx, x, hidden, y, weight, c.epsilon(r.Rank())); err == nil || !strings.Contains(err.Error(), c.want) {
				return fmt.Errorf("want %q: %v", c.want, err)
			}
			return nil
		})
	}
}

// TestNoMatrix: a tensor of one dimension, on one rank or on all, is every rank's error too.
func TestNoMatrix(t *testing.T) {
	for _, all := range []bool{false, true} {
		onRanks(t, "host", 2, func(ctx context.Context, r *symmem.Rank) error {
			x, hidden, y, weight := zeros(ctx, r, 2, 8), zeros(ctx, r, 2, 8), zeros(ctx, r, 2, 8), zeros(ctx, r, 8)
			if all || r.Rank() == 1 {
				x = weight
			}
			if _, err := newNorm(ctx, x, hidden, y, weight, epsilon); err == nil || !strings.Contains(err.Error(), "allowed: f32[rows columns]") {
				return fmt.Errorf("a tensor of one dimension: %v", err)
			}
			return nil
		})
	}
}

// TestLate: a rank that does not come ends the others' runs in bounded time, on the CPU and on GPUs.
func TestLate(t *testing.T) {
	for backend, world := range map[string]int{"host": 3, "native": 2} {
		t.Run(backend, func(t *testing.T) { onRanks(t, backend, world, lateRun) })
	}
}

func lateRun(ctx context.Context, r *symmem.Rank) error {
	plan, err := newNorm(ctx, zeros(ctx, r, 2, 8), zeros(ctx, r, 2, 8), zeros(ctx, r, 2, 8), zeros(ctx, r, 8), epsilon)
	if err != nil {
		return err
	}
	s, err := r.NewStream()
	if err != nil {
		return err
	}
	if r.Rank() > 0 {
		if err := errors.Join(plan.Run(s), s.Synchronize(ctx)); !errors.Is(err, os.ErrDeadlineExceeded) {
			return fmt.Errorf("a run without rank 0: %v", err)
		}
		if err := plan.Run(s); !errors.Is(err, os.ErrDeadlineExceeded) {
			return fmt.Errorf("the next run: %v", err)
		}
	}
	return errors.Join(r.Barrier(ctx), plan.Close(ctx), s.Close())
}
