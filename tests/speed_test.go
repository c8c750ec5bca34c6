package tests

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// figure is one thing that was measured between two ranks.
type figure struct {
	What  string
	Value float64
	Unit  string
}

// TestTransferSpeed measures transfers of backend nixl between two processes, beside plain copies of the same two processes
// over a backend with peer pointers. With "speed" in SYMMEM_TEST_REQUIRE the figures must be what is promised.
func TestTransferSpeed(t *testing.T) {
	const name, size = "nixl", 2
	if testing.Short() {
		skipWithout(t, "speed", "it measures, which -short leaves out")
	}
	requireBackend(t, name)
	requireGPUs(t, name, size)
	plain := "host"
	if deviceKind(t, name) == device.CUDA {
		plain = "native"
	}
	world := runWorld(t, size, "speed:"+plain, "SYMMEM_BACKEND="+name, "SYMMEM_NIXL_ISLANDS=off")
	figures := map[string]float64{}
	for _, p := range world {
		require.NoErrorf(t, p.err, "rank %d", p.rank)
		require.Emptyf(t, p.end.Error, "rank %d", p.rank)
	}
	for _, line := range world[0].lines {
		var f figure
		require.NoError(t, json.Unmarshal(line, &f))
		figures[f.What] = f.Value
		t.Logf("%-40s %10.2f %s", f.What, f.Value, f.Unit)
	}
	if !slices.Contains(required(), "speed") {
		return
	}
	assert.LessOrEqual(t, figures["enqueue"], 20.0, "us to enqueue a transfer")
	if plain == "host" {
		// Both move memory of one process into memory of the other that they do not share.
		assert.Positive(t, figures["kernel copy 1 MiB"], "processes may not write to each other here")
		assert.GreaterOrEqual(t, figures["put 1 MiB"], 0.8*figures["kernel copy 1 MiB"])
		return
	}
	assert.GreaterOrEqual(t, figures["put 64 MiB"], 0.9*figures["plain 64 MiB"])
	assert.GreaterOrEqual(t, figures["put 1 GiB"], 0.95*figures["plain 1 GiB"])
	assert.LessOrEqual(t, figures["put 8 B"], 25.0, "us for a small put, one after the other")
}

// speedSizes are the sizes of what is moved, in bytes, with names.
func speedSizes(kind device.Kind) []int64 {
	if kind == device.CUDA {
		return []int64{1 << 20, 16 << 20, 64 << 20, 1 << 30}
	}
	return []int64{64 << 10, 1 << 20, 16 << 20}
}

// bytesText names a size.
func bytesText(n int64) string {
	switch {
	case n >= 1<<30:
		return fmt.Sprintf("%d GiB", n>>30)
	case n >= 1<<20:
		return fmt.Sprintf("%d MiB", n>>20)
	case n >= 1<<10:
		return fmt.Sprintf("%d KiB", n>>10)
	}
	return fmt.Sprintf("%d B", n)
}

// speedJob is one of two ranks: rank 0 puts into rank 1's memory and says how fast.
func speedJob(ctx context.Context, cfg config.Config, plain string, say func(any)) error {
	r, err := symmem.Open(ctx, cfg, nil)
	if err != nil {
		return err
	}
	g, err := r.Group().Sub(ctx, []int{0, 1})
	if err != nil {
		return err
	}
	near, err := memory.Open(ctx, plain, &backend.Env{
		Group: g, LocalRank: r.Rank(), Opened: r.Device(), Multicast: "off", KernelTimeout: cfg.KernelTimeout, Getenv: os.Getenv,
	}, nil)
	if err != nil {
		return err
	}
	if r.Rank() != 0 {
		say = func(any) {}
	}
	s, err := r.NewStream()
	if err != nil {
		return err
	}
	for _, n := range speedSizes(r.Device().Kind()) {
		if err := errors.Join(speedOf(ctx, r, r.Memory(), "put", n, s, say), speedOf(ctx, r, near, "plain", n, s, say)); err != nil {
			return err
		}
	}
	return errors.Join(latencies(ctx, r, s, say), s.Close(), near.Close(ctx), g.Close(ctx), r.Close(ctx))
}

// speedPieces is how many pieces are moved in turn, one behind the other on the stream: so many that on a CPU they come from
// memory and not from a cache.
func speedPieces(kind device.Kind, n int64) int64 {
	if kind == device.CUDA {
		return max(2, min(8, 512<<20/n))
	}
	return max(2, 128<<20/n)
}

// speedOf measures prepared writes of n bytes, in GB/s, the best of some.
func speedOf(ctx context.Context, r *symmem.Rank, m *memory.Memory, what string, n int64, s device.Stream,
	say func(any)) error {
	pieces := speedPieces(r.Device().Kind(), n)
	t, err := tensor.Zeros(ctx, m, tensor.Uint8, n*pieces)
	if err != nil {
		return err
	}
	if err := t.Rendezvous(ctx); err != nil {
		return err
	}
	if err := errors.Join(s.Fill(t.Ptr(), 1, t.Bytes()), s.Synchronize(ctx), r.Barrier(ctx)); err != nil {
		return err
	}
	var puts []*memory.Transfer
	for i := range pieces {
		piece, err := t.Slice(i*n, (i+1)*n)
		if err != nil {
			return err
		}
		x, err := tensor.PrepareTransfer(backend.Write, 1-r.Rank(), tensor.Pair{Local: piece, Remote: piece})
		if err != nil {
			return err
		}
		puts = append(puts, x)
	}
	if r.Rank() == 0 {
		err = measure(what+" "+bytesText(n), n, len(puts), say, func() error {
			for _, x := range puts {
				if err := x.Post(s); err != nil {
					return err
				}
			}
			return s.Synchronize(ctx)
		})
		if err != nil {
			return err
		}
	}
	if r.Device().Kind() == device.Host && what == "put" {
		if err := plainAcross(ctx, r, t, n, pieces, say); err != nil {
			return err
		}
	}
	for _, x := range puts {
		if err := x.Close(); err != nil {
			return err
		}
	}
	return t.Close(ctx)
}

// measure says how fast pieces of n bytes move, in GB/s, the best of some rounds after the first.
func measure(what string, n int64, pieces int, say func(any), move func() error) error {
	var best time.Duration
	for round := range 8 {
		began := time.Now()
		if err := move(); err != nil {
			return err
		}
		if took := time.Since(began) / time.Duration(pieces); round == 1 || round > 1 && took < best {
			best = took
		}
	}
	say(figure{What: what, Value: float64(n) / best.Seconds() / 1e9, Unit: "GB/s"})
	return nil
}

// latencies measures what small transfers take.
func latencies(ctx context.Context, r *symmem.Rank, s device.Stream, say func(any)) error {
	t, err := r.Zeros(ctx, tensor.Uint8, 4096)
	if err != nil {
		return err
	}
	if err := t.Rendezvous(ctx); err != nil {
		return err
	}
	small, err := t.Slice(0, 8)
	if err != nil {
		return err
	}
	const n = 300
	us := func(d time.Duration, n int) float64 { return float64(d.Nanoseconds()) / float64(n) / 1000 }
	if r.Rank() == 0 {
		var enqueue, whole time.Duration
		for range 5 {
			began := time.Now()
			for range n {
				if err := small.Put(s, 1, small); err != nil {
					return err
				}
			}
			enqueue = time.Since(began)
			if err := s.Synchronize(ctx); err != nil {
				return err
			}
			whole = time.Since(began)
		}
		say(figure{"put 8 B", us(whole, n), "us"})
		// What enqueueing takes while the stream is held up, so that nothing runs beside it.
		gate := make(chan struct{})
		if err := s.HostFunc(func() { <-gate }); err != nil {
			return err
		}
		began := time.Now()
		for range 100 {
			if err := small.Put(s, 1, small); err != nil {
				close(gate)
				return err
			}
		}
		held := time.Since(began)
		close(gate)
		if err := s.Synchronize(ctx); err != nil {
			return err
		}
		say(figure{"enqueue", us(held, 100), "us"})
		say(figure{"enqueue beside running transfers", us(enqueue, n), "us"})
	}
	if err := r.Barrier(ctx); err != nil {
		return err
	}
	other := 1 - r.Rank()
	var best time.Duration
	for round := range 5 {
		if err := errors.Join(t.Barrier(s, 0), s.Synchronize(ctx)); err != nil {
			return err
		}
		began := time.Now()
		for range n {
			var err error
			if r.Rank() == 0 {
				err = errors.Join(t.Signal(s, other, 1), t.Wait(s, other, 1))
			} else {
				err = errors.Join(t.Wait(s, other, 1), t.Signal(s, other, 1))
			}
			if err != nil {
				return err
			}
		}
		if err := s.Synchronize(ctx); err != nil {
			return err
		}
		if took := time.Since(began); round == 0 || took < best {
			best = took
		}
	}
	say(figure{"signal, one way", us(best, 2*n), "us"})
	return t.Close(ctx)
}
