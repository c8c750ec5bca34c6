package ptxvm

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/kernels/ptx"
)

// BenchmarkAllReduce is an all-reduce of 1 MiB between 4 ranks. instr/s counts those of all threads.
func BenchmarkAllReduce(b *testing.B) {
	for _, c := range []struct {
		form  ptx.Form
		dtype string
	}{
		{ptx.OneShotLL, "f32"}, {ptx.OneShotPush, "f32"}, {ptx.OneShotPull, "f32"}, {ptx.TwoShotPush, "f32"}, {ptx.TwoShotPull, "f32"}, {ptx.TwoShotPull, "bf16"},
		{ptx.TwoShotFlow, "f32"}, {ptx.TwoShotMultimem, "f32"}, {ptx.OneShotLL, "i8"},
	} {
		b.Run(c.form.String()+"/"+c.dtype, func(b *testing.B) {
			j := job{form: c.form, dtype: c.dtype, op: ptx.Sum, ranks: 4, count: 1 << 20 / widths[c.dtype], blocks: 4, threads: 256, lap: 4096, exact: true, hopper: c.form >= ptx.OneShotMultimem}
			w := newWorld(b, j)
			m := New(w.memory, Config{Seed: 1})
			var streams []*Stream
			for r := range j.ranks {
				streams = append(streams, m.NewStream(r))
			}
			w.fill(0)
			for b.Loop() {
				w.launch(b, streams, 0)
				require.NoError(b, m.Run())
			}
			b.ReportMetric(float64(m.Steps())/b.Elapsed().Seconds(), "instr/s")
			b.ReportMetric(float64(m.Steps())/float64(b.N), "instr/op")
		})
	}
}

// BenchmarkWeak is one of 8 KiB with weak memory.
func BenchmarkWeak(b *testing.B) {
	for _, form := range []ptx.Form{ptx.OneShotPush, ptx.OneShotPull, ptx.TwoShotFlow} {
		b.Run(form.String(), func(b *testing.B) {
			j := job{form: form, dtype: "f32", op: ptx.Sum, ranks: 4, count: 2048, epochs: 1, blocks: 2, threads: 64, lap: 512}
			steps := uint64(0)
			for b.Loop() {
				n, err := j.run(b, Config{Seed: 1, Weak: true})
				require.NoError(b, err)
				steps += n
			}
			b.ReportMetric(float64(steps)/b.Elapsed().Seconds(), "instr/s")
		})
	}
}
