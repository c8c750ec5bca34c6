package ptxvm

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/kernels/ptx"
)

// jobs are all-reduces of every form, as the launch plans have them, on small grids.
func jobs(ranks int, dtypes, others []string) []job {
	var out []job
	for _, form := range ptx.Forms() {
		list := dtypes
		if form == ptx.OneShotLL || form == ptx.OneShotPull || form == ptx.TwoShotPull || form == ptx.TwoShotFlow {
			list = append(append([]string{}, dtypes...), others...)
		}
		for _, dtype := range list {
			for op := ptx.Sum; op <= ptx.Avg; op++ {
				if _, ok := ptx.AllReduce(form, dtype, op, ranks, true); !ok {
					continue
				}
				j := job{form: form, dtype: dtype, op: op, ranks: ranks, count: 237, epochs: 3, blocks: 2, threads: 32, lap: 256, hopper: op == ptx.Avg || form >= ptx.OneShotMultimem,
					exact: form >= ptx.OneShotMultimem, first: 1<<32 - 2}
				out = append(out, j)
				if form == ptx.OneShotPush || form == ptx.TwoShotPush { // whole vectors, for which they have a path of its own
					w := j
					w.count = 240
					for _, w.inPlace = range []bool{false, true} {
						out = append(out, w)
						w.user = true
						out = append(out, w)
						w.user, w.hopper = false, true
					}
					w.inPlace, w.missing = false, 1
					out = append(out, w)
					if _, ok := ptx.PushLong(form, dtype, op, ranks, true); ok { // a vector a thread, and several
						w.blocks = 1
						for i, vectors := range []int{w.threads - 2, 2*w.threads - 4} {
							w.count = vectors * 16 / widths[dtype]
							w.user, w.missing, w.long, w.longer = i == 0, 0, i == 0, i == 1
							for _, w.inPlace = range []bool{false, true} {
								w.hopper = w.inPlace == w.user
								out = append(out, w)
							}
							w.user, w.missing = false, 1
							out = append(out, w)
						}
					}
				}
				j.queued = true
				out = append(out, j)
				j.queued, j.user = false, true
				out = append(out, j)
				j.user, j.missing = false, 1
				out = append(out, j)
				j.missing, j.offset, j.inPlace, j.count = 0, 1, true, 61
				out = append(out, j)
				j.user = true
				out = append(out, j)
				j.user = false
				if form < ptx.OneShotMultimem && op == ptx.Sum {
					j.inPlace, j.shift, j.hopper = false, 1, true
					out = append(out, j)
				}
			}
		}
	}
	return out
}

// TestAllReduce: the kernels as they are give the exact results of every dtype, operation and form, between 2 and 4 ranks.
func TestAllReduce(t *testing.T) {
	for _, ranks := range []int{2, 4} {
		if ranks > 2 && os.Getenv("SYMMEM_TEST_MATRIX") != "full" {
			break
		}
		dtypes, others := []string{"f32", "f16", "bf16"}, []string{"f64", "i8", "u16", "i32", "u64"}
		if ranks > 2 && !full() {
			dtypes, others = []string{"bf16"}, []string{"i32"}
		}
		for _, j := range jobs(ranks, dtypes, others) {
			t.Run(j.String(), func(t *testing.T) {
				_, err := j.run(t, Config{Seed: 1, MaxSteps: 1 << 28})
				require.NoError(t, err)
			})
		}
	}
}

// TestAllReduceWorlds: world sizes besides 2 and 4: 1, those that have kernels of their own, and 9, whose addresses are in a table.
// SYMMEM_TEST_MATRIX=full runs them all.
func TestAllReduceWorlds(t *testing.T) {
	worlds := []int{1, 3, 9}
	if full() {
		worlds = []int{1, 3, 5, 6, 7, 8, 9}
	}
	for _, ranks := range worlds {
		for _, form := range ptx.Forms() {
			j := job{form: form, dtype: "bf16", op: ptx.Sum, ranks: ranks, count: 333, offset: 3, epochs: 3, user: true, blocks: 2, threads: 16, lap: 128, hopper: form >= ptx.OneShotMultimem,
				exact: form >= ptx.OneShotMultimem}
			if _, ok := ptx.AllReduce(form, j.dtype, j.op, ranks, j.hopper); !ok {
				j.dtype = "i8"
			}
			if _, ok := ptx.AllReduce(form, j.dtype, j.op, ranks, j.hopper); !ok {
				continue
			}
			whole := j
			whole.count, whole.offset, whole.threads = 336, 0, 32
			for _, j := range []job{j, whole} {
				t.Run(j.String(), func(t *testing.T) {
					for seed := range uint64(2) {
						_, err := j.run(t, Config{Seed: seed, Weak: seed > 0, MaxSteps: 1 << 28})
						require.NoError(t, err)
					}
				})
			}
		}
	}
}

// TestAllReduceWeak: so they do with memory as weak as it may be, and there is no race in them. SYMMEM_TEST_MATRIX=full tries more seeds.
func TestAllReduceWeak(t *testing.T) {
	seeds, worlds := uint64(1), []int{2}
	if full() {
		seeds, worlds = 6, []int{2, 4}
	}
	for _, ranks := range worlds {
		for _, j := range jobs(ranks, []string{"f32", "f16"}, []string{"f64", "u8"}) {
			if j.op != ptx.Sum && j.op != ptx.Avg {
				continue
			}
			if most := 150; j.count > most {
				if j.count%8 == 0 {
					most = 152 // whole vectors still
				}
				j.count = most
			}
			t.Run(j.String(), func(t *testing.T) {
				for seed := range seeds {
					_, err := j.run(t, Config{Seed: seed, Weak: true, MaxSteps: 1 << 28})
					require.NoError(t, err)
				}
			})
		}
	}
}
