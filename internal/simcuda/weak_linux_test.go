package simcuda_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/simcuda"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/tensor"
)

// TestWeakAllReduce: with weak memory every form gives the sum, and nothing races.
func TestWeakAllReduce(t *testing.T) {
	_, ranks := open(t, 2, simcuda.Config{Seed: 1, Multicast: true, Weak: true})
	for _, alg := range kernels.Algorithms(device.CUDA) {
		t.Run(alg.String(), func(t *testing.T) {
			require.True(t, kernels.Supported(ranks[0].Device().Kind(), alg, tensor.Float32, kernels.Sum, 2))
			each(t, ranks, func(r *symmem.Rank) error { return sum(t, r, alg, 1000) })
		})
	}
}
