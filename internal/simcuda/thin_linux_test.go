package simcuda_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/backend/native"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/simcuda"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/tensor"
)

// open gives ranks with a simulated GPU each, which the end of the test closes; then nothing may be left, and nothing have been used wrongly.
func open(t *testing.T, ranks int, c simcuda.Config) (*simcuda.Machine, []*symmem.Rank) {
	t.Helper()
	c.GPUs = ranks
	m, err := simcuda.New(c)
	require.NoError(t, err)
	cfg := config.Default()
	cfg.Backend = []string{native.Name}
	cfg.KernelTimeout = 30 * time.Second
	cfg.Multicast = config.MulticastOff
	if c.Multicast && ranks > 1 {
		cfg.Multicast = config.MulticastOn
	}
	all, err := symmem.OpenLocal(t.Context(), ranks, cfg, &symmem.Options{Backend: &native.Options{Driver: m.Driver()}})
	require.NoError(t, err)
	t.Cleanup(func() {
		each(t, all, func(r *symmem.Rank) error { return r.Close(context.WithoutCancel(t.Context())) })
		require.Empty(t, m.Left())
		require.Empty(t, m.Violations())
	})
	return m, all
}

// each runs f on every rank at the same time.
func each(t *testing.T, all []*symmem.Rank, f func(r *symmem.Rank) error) {
	t.Helper()
	backendtest.RequireAll(t, backendtest.OnAll(all, f))
}

// TestAllReduce: every form gives the sum, and its kernel has run.
func TestAllReduce(t *testing.T) {
	m, ranks := open(t, 4, simcuda.Config{Seed: 1, Multicast: true})
	for _, alg := range kernels.Algorithms(device.CUDA) {
		t.Run(alg.String(), func(t *testing.T) {
			require.True(t, kernels.Supported(ranks[0].Device().Kind(), alg, tensor.Float32, kernels.Sum, 4))
			before := m.Stats()
			each(t, ranks, func(r *symmem.Rank) error { return sum(t, r, alg, 1000) })
			var ran []string
			for name, n := range m.Stats().Launches {
				if n > before.Launches[name] {
					ran = append(ran, name)
				}
			}
			form := strings.NewReplacer("one_shot", "oneshot", "two_shot", "twoshot", "transfers", "oneshot_pull").Replace(alg.String())
			require.Contains(t, strings.Join(ran, " "), "symmem_allreduce_"+form+"_")
		})
	}
}

func sum(t *testing.T, r *symmem.Rank, alg kernels.Algorithm, count int) error {
	ctx := t.Context()
	x, err := r.Zeros(ctx, tensor.Float32, int64(count))
	if err != nil {
		return err
	}
	if err := x.Rendezvous(ctx); err != nil {
		return err
	}
	in := make([]float32, count)
	for i := range in {
		in[i] = float32(i + r.Rank())
	}
	if err := tensor.Write(x.Local(), in, 0); err != nil {
		return err
	}
	p, err := kernels.NewAllReduce(ctx, x, kernels.Sum, &kernels.AllReduceOptions{Algorithm: alg})
	if err != nil {
		return err
	}
	s, err := r.NewStream()
	if err != nil {
		return err
	}
	if err := p.Run(s); err != nil {
		return err
	}
	if err := s.Synchronize(ctx); err != nil {
		return err
	}
	out, err := tensor.ReadAll[float32](x.Local())
	if err != nil {
		return err
	}
	for i, got := range out {
		if want := float32(r.WorldSize()*i + r.WorldSize()*(r.WorldSize()-1)/2); got != want {
			t.Errorf("rank %d, element %d: %v, not %v", r.Rank(), i, got, want)
			break
		}
	}
	for _, f := range []func() error{s.Close, func() error { return p.Close(ctx) }, func() error { return x.Close(ctx) }} {
		if err := f(); err != nil {
			return err
		}
	}
	return nil
}
