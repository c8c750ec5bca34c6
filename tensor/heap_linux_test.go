package tensor_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/tensor"
)

// BenchmarkHeapZeros takes a tensor and closes it, among a thousand others. What was closed is reclaimed from time to time, which is not measured.
func BenchmarkHeapZeros(b *testing.B) {
	ctx := b.Context()
	r, err := symmem.Open(ctx, config.Default(), nil)
	require.NoError(b, err)
	h, err := r.NewHeap(ctx, 64<<20)
	require.NoError(b, err)
	kept := make([]*tensor.Tensor, 2000)
	for i := range kept { // with holes between those that stay
		kept[i], err = h.Zeros(ctx, tensor.Float32, int64(64+i%200))
		require.NoError(b, err)
	}
	for i := 0; i < len(kept); i += 2 {
		require.NoError(b, kept[i].Close(ctx))
	}
	require.NoError(b, h.Reclaim(ctx))
	b.ReportAllocs()
	b.ResetTimer()
	for i := range b.N {
		t, err := h.Zeros(ctx, tensor.Float32, 16, 16)
		if err == nil {
			err = t.Close(ctx)
		}
		if err != nil {
			b.Fatal(err)
		}
		if i%10_000 == 9999 {
			b.StopTimer()
			require.NoError(b, h.Reclaim(ctx))
			b.StartTimer()
		}
	}
	b.StopTimer()
	require.NoError(b, h.Close(ctx))
	require.NoError(b, r.Close(ctx))
}
