package command

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/cmd/symmem/internal/exit"
	"github.com/symmem/symmem/cmd/symmem/internal/measure"
)

// TestFlagsOfOtherKinds: a flag that nothing of what is measured has is refused, and not ignored, even where it says what is the default.
func TestFlagsOfOtherKinds(t *testing.T) {
	for says, args := range map[string][]string{
		"--tensors was given, and --kind is \"all_reduce,put\"; only all_reduce_many has it":                                                                   {"--tensors", "50", "--kind", "all_reduce,put"},
		"--place was given, and --kind is \"reduce\"; only all_reduce, all_reduce_matmul, plan_run have it":                                                    {"--place", "out", "--kind", "reduce"},
		"--op was given, and --kind is \"put,barrier\"; only all_reduce, reduce, reduce_scatter, all_reduce_many, all_reduce_matmul, plan_run have it":         {"--op", "sum", "--kind", "put,barrier"},
		"--op was given, and --kind is \"all_reduce_rms_norm\"; only all_reduce, reduce, reduce_scatter, all_reduce_many, all_reduce_matmul, plan_run have it": {"--op", "max", "--kind", "all_reduce_rms_norm"},
		"--exclusive was given, and --kind is \"put,rendezvous\"; only all_reduce, broadcast, reduce, ":                                                        {"--exclusive", "--kind", "put,rendezvous"},
	} {
		r := call(t, "", environ(), append([]string{"bench", "--ranks", "0"}, args...)...) // 0 is refused too, so that nothing is ever measured
		assert.Equal(t, exit.Usage, r.status, says)
		assert.Contains(t, r.err, says)
	}
	for _, args := range [][]string{
		{"--tensors", "2", "--kind", "put,all_reduce_many"}, {"--place", "out"}, {"--op", "max", "--kind", "plan_run"}, {"--op", "max", "--kind", "put,reduce"}, {"--kind", "put"}, {"--exclusive"}, {"--exclusive", "--kind", "put,barrier"},
		{"--op", "max", "--place", "out", "--tensors", "2", "--kind", "put,reduse"}, // what is wrong with the list of kinds is enough
	} {
		r := call(t, "", environ(), append([]string{"bench", "--ranks", "0"}, args...)...)
		assert.NotContains(t, r.err, "was given")
	}
}

// TestOneFileForTwo: the picture would take the place of the results.
func TestOneFileForTwo(t *testing.T) {
	dir := t.TempDir()
	picture, link := filepath.Join(dir, "b.svg"), filepath.Join(dir, "link")
	require.NoError(t, os.Symlink("b.svg", link))
	for _, output := range []string{picture, link, dir + "/./b.svg"} {
		r := call(t, "", environ(), "bench", "--ranks", "1", "--kind", measure.AllReduce, "--sizes", "64", "--reps", "1", "--plot", picture, "--output", output)
		assert.Equal(t, exit.Usage, r.status, output)
		assert.Contains(t, r.err, "which are one file")
		assert.NoFileExists(t, picture)
	}
}

func TestPeerUsage(t *testing.T) {
	for says, args := range map[string][]string{
		"auto, nccl, nvshmem, sglang, pytorch, none": {"--peer", "mpi"},
		"has no u16":         {"--peer", "nccl", "--dtype", "u16"},
		"no --peer-library":  {"--peer", "sglang", "--dtype", "bf16"},
		"add that to --kind": {"--peer", "nccl", "--kind", measure.Put},
	} {
		r := call(t, "", environ(), append([]string{"bench"}, args...)...)
		assert.Equal(t, exit.Usage, r.status, says)
		assert.Contains(t, r.err, says)
	}
}
