package ptxvm

import (
	"errors"
	"os"
	"slices"
	"strings"
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
					j.inPlace, j.shift, j.hopper, j.early = false, 1, true, true
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
		if ranks > 2 && testing.Short() {
			break
		}
		for _, j := range jobs(ranks, []string{"f32", "f16", "bf16"}, []string{"f64", "i8", "u16", "i32", "u64"}) {
			t.Run(j.String(), func(t *testing.T) {
				_, err := j.run(t, Config{Seed: 1, MaxSteps: 1 << 28})
				require.NoError(t, err)
			})
		}
	}
}

// TestAllReduceWorlds: the world sizes besides 2 and 4 that have kernels of their own, 1, and 9, whose addresses are in a table.
func TestAllReduceWorlds(t *testing.T) {
	for _, ranks := range []int{1, 3, 5, 6, 7, 8, 9} {
		for _, form := range ptx.Forms() {
			j := job{form: form, dtype: "bf16", op: ptx.Sum, ranks: ranks, count: 333, offset: 3, epochs: 3, user: true, blocks: 2, threads: 16, lap: 128, hopper: form >= ptx.OneShotMultimem,
				exact: form >= ptx.OneShotMultimem}
			if _, ok := ptx.AllReduce(form, j.dtype, j.op, ranks, j.hopper); !ok {
				j.dtype = "i8"
			}
			if _, ok := ptx.AllReduce(form, j.dtype, j.op, ranks, j.hopper); !ok {
				continue
			}
			t.Run(j.String(), func(t *testing.T) {
				for seed := range uint64(2) {
					j.replace = func(m *Module) *Module { return withFence(t, m) }
					_, err := j.run(t, Config{Seed: seed, Weak: seed > 0, MaxSteps: 1 << 28})
					require.NoError(t, err)
				}
			})
		}
	}
}

// TestAllReduceWeak: so they do with memory as weak as it may be, and there is no race in them. SYMMEM_TEST_MATRIX=full tries more seeds.
func TestAllReduceWeak(t *testing.T) {
	seeds := uint64(1)
	if os.Getenv("SYMMEM_TEST_MATRIX") == "full" {
		seeds = 10
	}
	for _, ranks := range []int{2, 4} {
		for _, j := range jobs(ranks, []string{"f32", "f16"}, []string{"f64", "u8"}) {
			if j.op != ptx.Sum && j.op != ptx.Avg {
				continue
			}
			j.count = min(j.count, 150)
			t.Run(j.String(), func(t *testing.T) {
				for seed := range seeds {
					weakly(t, j, Config{Seed: seed, Weak: true, MaxSteps: 1 << 28})
				}
			})
		}
	}
}

func weakly(t *testing.T, j job, c Config) {
	_, err := j.run(t, c)
	if j.form == ptx.OneShotMultimem && (j.inPlace || j.user) {
		// Formally it is one: inputs are loaded by the multicast address, and then, behind a barrier, stored to by their own, without
		// a fence.proxy.alias between. On a device the loads have returned by then.
		race, ok := errors.AsType[*Race](err)
		require.True(t, ok, "%v", err)
		require.Contains(t, race.First.Instruction, "multimem.ld_reduce")
		require.Contains(t, race.Second.Instruction, "st.global")
		j.replace = func(m *Module) *Module { return withFence(t, m) }
		_, err = j.run(t, c)
	}
	require.NoError(t, err)
}

// withFence is multimem.ptx with the fence that oneshot_multimem has not: before each barrier of the block that is no reduction.
func withFence(tb testing.TB, m *Module) *Module {
	if m.file != "multimem.ptx" {
		return m
	}
	if old, ok := modules.Load("mended"); ok {
		return old.(*Module)
	}
	lines := slices.Clone(m.lines)
	for i, l := range lines {
		if strings.HasPrefix(l, "bar.sync") && !strings.HasPrefix(lines[i-1], "fence") {
			lines[i-1] += " fence.proxy.alias;"
		}
	}
	n := parse(tb, m.file, strings.Join(lines, "\n"))
	modules.Store("mended", n)
	return n
}
