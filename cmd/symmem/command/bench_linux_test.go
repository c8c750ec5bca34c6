package command

import (
	"bytes"
	"encoding/json"
	"fmt"
	"image/png"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/cmd/symmem/internal/bench"
	"github.com/symmem/symmem/cmd/symmem/internal/exit"
	"github.com/symmem/symmem/cmd/symmem/internal/measure"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/kernels/tuning"
)

func TestBench(t *testing.T) {
	dir := t.TempDir()
	jsonFile, plotFile := filepath.Join(dir, "b.json"), filepath.Join(dir, "b.png")
	r := call(t, "", environ(), "bench", "--ranks", "2", "--sizes", "1M,1000004", "--algorithm", "all", "--reps", "3",
		"--token", "hunter2", "--output", jsonFile, "--plot", plotFile)
	require.Equal(t, exit.OK, r.status, r.err)
	for _, part := range []string{"all_reduce on host, 2 ranks, sum of f32, eager", "put on host", "get on host", "put_signal on host",
		"rendezvous on host", "plan_run on host", "median us", "1000004"} {
		assert.Contains(t, r.out, part)
	}

	text, err := os.ReadFile(jsonFile)
	require.NoError(t, err)
	assert.NotContains(t, string(text), "hunter2")
	var report bench.Report
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	require.NoError(t, d.Decode(&report))
	assert.Equal(t, runtime.NumCPU(), report.Machine.Cores)
	assert.False(t, report.Date.IsZero())
	count := map[string]int{}
	for _, row := range report.Rows {
		count[row.Kind]++
		assert.Equal(t, "host", row.Backend)
		assert.Equal(t, 2, row.Ranks)
		assert.Positive(t, row.Iterations)
		assert.LessOrEqual(t, row.Min, row.Median)
		assert.LessOrEqual(t, row.Median, row.Max)
		if row.Kind == measure.AllReduce {
			assert.Equal(t, row.Algorithm, row.Chosen)
			assert.InDelta(t, float64(row.Bytes)/row.Median/1e3, row.Bandwidth, 1e-9)
			assert.InDelta(t, row.Bandwidth, row.Bus, 1e-9, "2(W-1)/W of two ranks is 1")
		}
		// Tools that know only lines read it too.
		line, err := json.Marshal(row)
		require.NoError(t, err)
		assert.Contains(t, string(text), "\n    "+string(line))
	}
	assert.Equal(t, map[string]int{measure.Rendezvous: 2, measure.AllReduce: 2 * len(kernels.Algorithms(device.Host)), measure.Put: 2, measure.Get: 2,
		measure.PutSignal: 2, measure.PlanRun: 1}, count)

	f, err := os.Open(plotFile)
	require.NoError(t, err)
	picture, err := png.Decode(f)
	require.NoError(t, err)
	require.NoError(t, f.Close())
	assert.Positive(t, picture.Bounds().Dx())
}

// TestBenchCollectives: the collectives besides all-reduce are measured when they are asked for, those that are shared out in shares of whole vectors.
func TestBenchCollectives(t *testing.T) {
	kinds := []string{measure.Broadcast, measure.Reduce, measure.AllGather, measure.ReduceScatter, measure.AllToAll}
	for _, mode := range []string{"eager", "graph"} {
		r := call(t, "", environ(), "bench", "--backend", "host", "--ranks", "3", "--sizes", "1000000,1048577", "--kind", strings.Join(kinds, ","), "--mode", mode,
			"--dtype", "f16", "--op", "max", "--reps", "2", "--json")
		require.Equal(t, exit.OK, r.status, r.err)
		var report bench.Report
		require.NoError(t, json.Unmarshal([]byte(r.out), &report))
		require.Len(t, report.Rows, 2*len(kinds))
		for i, row := range report.Rows {
			assert.Equal(t, kinds[i/2], row.Kind)
			want := []int64{1000032, 1048608}[i%2]
			if row.Kind == measure.Broadcast || row.Kind == measure.Reduce { // which are not shared out
				want = []int64{1000000, 1048578}[i%2]
			}
			assert.Equal(t, want, row.Bytes)
			assert.Equal(t, mode, row.Mode)
			assert.Equal(t, "one_shot", row.Chosen)
			reduces := row.Kind == measure.Reduce || row.Kind == measure.ReduceScatter
			assert.Equal(t, reduces, row.Op == "max")
			factor := 2. / 3
			if row.Kind == measure.Broadcast || row.Kind == measure.Reduce {
				factor = 1
			}
			assert.InDelta(t, row.Bandwidth*factor, row.Bus, 1e-9)
		}
	}
}

// TestBenchBarrier: a barrier is measured by itself, where nothing else has made memory before.
func TestBenchBarrier(t *testing.T) {
	r := call(t, "", environ(), "bench", "--backend", "host", "--ranks", "2", "--kind", measure.Barrier, "--reps", "1", "--json")
	require.Equal(t, exit.OK, r.status, r.err)
	var report bench.Report
	require.NoError(t, json.Unmarshal([]byte(r.out), &report))
	require.Len(t, report.Rows, 1)
	assert.Equal(t, measure.Barrier, report.Rows[0].Kind)
	assert.Zero(t, report.Rows[0].Bytes)
	assert.Positive(t, report.Rows[0].Median)
}

// TestBenchOfParts: signals without data, heaps, and what enqueuing costs, each in rows of its own; of one rank what is between ranks says so.
func TestBenchOfParts(t *testing.T) {
	args := []string{"bench", "--backend", "host", "--kind", strings.Join([]string{measure.SignalWait, measure.HeapAlloc, measure.Enqueue}, ","), "--sizes", "1000,1M", "--reps", "2", "--json"}
	r := call(t, "", environ(), append(args, "--ranks", "2", "--mode", "graph")...)
	require.Equal(t, exit.OK, r.status, r.err)
	var report bench.Report
	require.NoError(t, json.Unmarshal([]byte(r.out), &report))
	var rows []string
	for _, row := range report.Rows {
		rows = append(rows, strings.TrimSpace(fmt.Sprintf("%s %d %s%s", row.Kind, row.Bytes, row.Mode, row.Note)))
		assert.Positive(t, row.Median)
		assert.Positive(t, row.Iterations)
		assert.Equal(t, 2, row.Repetitions)
		assert.Zero(t, row.Bandwidth)
	}
	assert.Equal(t, []string{"signal_wait 0 graph", "heap_alloc 1000", "heap_alloc 1048576", "enqueue 1000 put", "enqueue 0 signal", "enqueue 0 wait", "enqueue 0 barrier", "enqueue 1000 AllReduce"}, rows)

	r = call(t, "", environ(), append(args, "--ranks", "1")...)
	require.Equal(t, exit.OK, r.status, r.err)
	report = bench.Report{}
	require.NoError(t, json.Unmarshal([]byte(r.out), &report))
	assert.Len(t, report.Rows, 2)
	require.Len(t, report.Skipped, 2)
	assert.Contains(t, report.Skipped[0].Reason, "signal_wait is between ranks")
	assert.Contains(t, report.Skipped[1].Reason, "enqueue is between ranks")
}

// TestBenchRMSNorm: an all-reduce with RMSNorm is measured, and the two apart beside it.
func TestBenchRMSNorm(t *testing.T) {
	r := call(t, "", environ(), "bench", "--backend", "host", "--ranks", "2", "--sizes", "1000000", "--kind", measure.AllReduceRMSNorm, "--mode", "graph",
		"--dtype", "bf16", "--reps", "1", "--json")
	require.Equal(t, exit.OK, r.status, r.err)
	var report bench.Report
	require.NoError(t, json.Unmarshal([]byte(r.out), &report))
	require.Len(t, report.Rows, 2)
	for i, row := range report.Rows {
		assert.Equal(t, measure.AllReduceRMSNorm, row.Kind)
		assert.Equal(t, int64(61*8192*2), row.Bytes, "whole rows")
		assert.Equal(t, "two_shot", row.Chosen)
		assert.Equal(t, "graph", row.Mode)
		assert.Equal(t, []string{"host", measure.Unfused}[i], row.Backend)
		assert.Equal(t, []string{"", "host"}[i], row.Beside)
	}
	row := report.Rows[0]
	assert.InDelta(t, report.Rows[1].Median, row.PeerMedian, 0)
	assert.Positive(t, row.PeerRatio)
	assert.InDelta(t, row.Bandwidth, row.Bus, 1e-9)
	r = call(t, "", environ(), "bench", "--backend", "host", "--ranks", "2", "--sizes", "1M", "--kind", measure.AllReduceRMSNorm, "--dtype", "i8", "--reps", "1")
	assert.NotEqual(t, exit.OK, r.status)
	assert.Contains(t, r.err, "there is no RMSNorm of i8")
}

// TestBenchQuantized: what a lossy all-reduce sends is said.
func TestBenchQuantized(t *testing.T) {
	file := filepath.Join(t.TempDir(), "b.json")
	r := call(t, "", environ(), "bench", "--backend", "host", "--ranks", "3", "--sizes", "1M", "--kind", measure.AllReduce, "--dtype", "f32", "--algorithm", "quantized_int8",
		"--reps", "1", "--output", file)
	require.Equal(t, exit.OK, r.status, r.err)
	assert.Contains(t, r.out, "quantized_int8, 371370 bytes sent")
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	var report bench.Report
	require.NoError(t, json.Unmarshal(text, &report))
	require.Len(t, report.Rows, 1)
	assert.Equal(t, 4*kernels.QuantizedBytes(256<<10)/3, report.Rows[0].Wire)
}

// TestBenchModes has each dtype with one operation, and with all of them where the whole matrix is run.
func TestBenchModes(t *testing.T) {
	for i, dtype := range []string{"f16", "bf16", "f64", "i8", "u64"} {
		for j, op := range []string{"prod", "avg", "max"} {
			if i%3 != j && os.Getenv("SYMMEM_TEST_MATRIX") != "full" {
				continue
			}
			r := call(t, "", environ(), "bench", "--ranks", "3", "--sizes", "4M", "--dtype", dtype, "--op", op, "--mode", "graph",
				"--kind", measure.AllReduce, "--reps", "1", "--json")
			require.Equal(t, exit.OK, r.status, r.err)
			var report bench.Report
			require.NoError(t, json.Unmarshal([]byte(r.out), &report), "only the document is printed")
			require.Len(t, report.Rows, 1)
			row := report.Rows[0]
			assert.Equal(t, "graph", row.Mode)
			assert.Equal(t, dtype, row.DType)
			assert.Equal(t, op, row.Op)
			assert.Zero(t, row.Iterations%20, "in whole graphs")
			assert.InDelta(t, row.Bandwidth*4/3, row.Bus, 1e-9)
		}
	}
}

func TestBenchOfOneRank(t *testing.T) {
	plotFile := filepath.Join(t.TempDir(), "one.svg")
	r := call(t, "", environ(), "bench", "-n", "1", "--sizes", "64", "--reps", "1", "--plot", plotFile)
	require.Equal(t, exit.OK, r.status, r.err)
	assert.Contains(t, r.out, "all_reduce on host, 1 ranks")
	assert.NotContains(t, r.out, "put on host")
	picture, err := os.ReadFile(plotFile)
	require.NoError(t, err)
	assert.Contains(t, string(picture), "</svg>")
}

// TestBenchPictureOfNothing: a picture that would have nothing on it is refused before anything is measured.
func TestBenchPictureOfNothing(t *testing.T) {
	plotFile := filepath.Join(t.TempDir(), "x.png")
	r := call(t, "", environ(), "bench", "--ranks", "1", "--kind", measure.Rendezvous+","+measure.Barrier, "--reps", "1", "--plot", plotFile)
	assert.Equal(t, exit.Usage, r.status)
	assert.Contains(t, r.err, "nothing with sizes")
	assert.Empty(t, r.out)

	// What is between ranks has none of one rank, which is known only where the ranks are.
	r = call(t, "", environ(), "bench", "--ranks", "1", "--kind", measure.Put+","+measure.PutSignal, "--reps", "1", "--plot", plotFile)
	assert.Equal(t, exit.Failure, r.status)
	assert.Contains(t, r.err, "nothing with sizes")
	assert.Contains(t, r.out, "skipped: host: put is between ranks")
	assert.Contains(t, r.out, "skipped: host: put_signal is between ranks")
	assert.NoFileExists(t, plotFile)
}

// TestBenchKeepsFiles: a file that was there stays as it was unless something was measured.
func TestBenchKeepsFiles(t *testing.T) {
	dir := t.TempDir()
	jsonFile, plotFile := filepath.Join(dir, "b.json"), filepath.Join(dir, "b.svg")
	for _, path := range []string{jsonFile, plotFile} {
		require.NoError(t, os.WriteFile(path, []byte("earlier"), 0o600))
	}
	small := []string{"bench", "--ranks", "2", "--sizes", "64", "--kind", measure.Put, "--reps", "1", "--output", jsonFile, "--plot", plotFile}
	r := call(t, "", environ(), append(small, "--backend", "absent")...)
	assert.Equal(t, exit.Failure, r.status)
	for _, path := range []string{jsonFile, plotFile} {
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		assert.Equal(t, "earlier", string(text))
	}
	r = call(t, "", environ(), append(small, "--backend", "host")...)
	require.Equal(t, exit.OK, r.status, r.err)
	text, err := os.ReadFile(jsonFile)
	require.NoError(t, err)
	assert.True(t, json.Valid(text))
	text, err = os.ReadFile(plotFile)
	require.NoError(t, err)
	assert.Contains(t, string(text), "</svg>")
	files, err := os.ReadDir(dir)
	require.NoError(t, err)
	assert.Len(t, files, 2, "nothing else is left behind")
}

// TestBenchMany: a list of tensors is measured whatever forms are asked for.
func TestBenchMany(t *testing.T) {
	for _, form := range []string{"auto", "all", "one_shot"} {
		r := call(t, "", environ(), "bench", "--backend", "host", "--ranks", "2", "--sizes", "4K", "--kind", measure.AllReduceMany, "--tensors", "3", "--reps", "1",
			"--algorithm", form, "--json")
		require.Equal(t, exit.OK, r.status, r.err)
		var report bench.Report
		require.NoError(t, json.Unmarshal([]byte(r.out), &report))
		require.Len(t, report.Rows, 1, form)
		assert.Equal(t, int64(3*4096), report.Rows[0].Bytes)
		assert.Equal(t, 3, report.Rows[0].Tensors)
	}
	r := call(t, "", environ(), "bench", "--backend", "host", "--ranks", "2", "--sizes", "4K", "--kind", strings.Join(measure.Lists, ","), "--tensors", "3", "--reps", "1", "--json")
	require.Equal(t, exit.OK, r.status, r.err)
	var report bench.Report
	require.NoError(t, json.Unmarshal([]byte(r.out), &report))
	require.Len(t, report.Rows, len(measure.Lists))
	for i, row := range report.Rows {
		assert.Equal(t, measure.Lists[i], row.Kind)
		assert.Equal(t, int64(3*4096), row.Bytes)
		assert.Equal(t, 3, row.Tensors)
		assert.Equal(t, row.Kind == measure.AllReduceMany || row.Kind == measure.ReduceScatterMany, row.Op != "")
	}
}

// TestBenchExclusive: what was measured with exclusive plans says so, and what has no plan does not.
func TestBenchExclusive(t *testing.T) {
	args := []string{"bench", "--backend", "host", "--ranks", "2", "--sizes", "4K", "--kind", "all_reduce,broadcast,barrier,put,plan_run", "--reps", "1", "--exclusive"}
	r := call(t, "", environ(), append(args, "--json")...)
	require.Equal(t, exit.OK, r.status, r.err)
	var report bench.Report
	require.NoError(t, json.Unmarshal([]byte(r.out), &report))
	require.Len(t, report.Rows, 5)
	for _, row := range report.Rows {
		assert.Equal(t, row.Kind != measure.Put, row.Exclusive, row.Kind)
	}
	r = call(t, "", environ(), args...)
	require.Equal(t, exit.OK, r.status, r.err)
	assert.Contains(t, r.out, "sum of f32, eager, in place, exclusive")
}

func TestBenchBackends(t *testing.T) {
	small := []string{"bench", "--ranks", "2", "--sizes", "64", "--kind", measure.Put, "--reps", "1"}
	r := call(t, "", environ(), append(small, "--backend", "all")...)
	require.Equal(t, exit.OK, r.status, r.err)
	assert.Contains(t, r.out, "skipped: absent: ")
	assert.Contains(t, r.out, "put on host")

	r = call(t, "", environ(), append(small, "--backend", "absent")...)
	assert.Equal(t, exit.Failure, r.status)
	assert.Contains(t, r.err, "libabsent.so")

	r = call(t, "", environ(brokenVar+"=1"), append(small, "--backend", "dies")...)
	assert.Equal(t, exit.Failure, r.status)
	assert.Contains(t, r.err, "rank 1 (process")
	assert.Equal(t, 1, strings.Count(r.err, "symmem: "), r.err)

	// One that a variable names is called by its name, too.
	r = call(t, "", environ(brokenVar+"=1", "SYMMEM_BACKEND=dies"), small...)
	assert.Equal(t, exit.Failure, r.status)
	assert.Contains(t, r.err, "measuring backend dies: ")
}

// TestBenchTellsWhatItHas: what was measured is reported though a later backend fails.
func TestBenchTellsWhatItHas(t *testing.T) {
	jsonFile := filepath.Join(t.TempDir(), "b.json")
	r := call(t, "", environ(brokenVar+"=1"), "bench", "--ranks", "2", "--sizes", "64", "--kind", measure.Put, "--reps", "1", "--backend",
		"host,dies", "--output", jsonFile)
	assert.Equal(t, exit.Failure, r.status)
	assert.Contains(t, r.err, "rank 1 (process")
	assert.Contains(t, r.out, "put on host")
	assert.Contains(t, r.out, "incomplete: measuring backend dies: ")
	text, err := os.ReadFile(jsonFile)
	require.NoError(t, err)
	var report bench.Report
	require.NoError(t, json.Unmarshal(text, &report))
	assert.Len(t, report.Rows, 1)
	assert.Contains(t, report.Incomplete, "rank 1 (process")
}

// TestBenchPeerThatCannotBe asks for NCCL beside a backend that does not work on GPUs.
func TestBenchPeerThatCannotBe(t *testing.T) {
	small := []string{"bench", "--ranks", "2", "--sizes", "64", "--kind", measure.AllReduce + "," + measure.Rendezvous, "--reps", "1"}
	r := call(t, "", environ(), append(small, "--backend", "host", "--peer", "nccl")...)
	assert.Equal(t, exit.Failure, r.status)
	assert.Contains(t, r.err, "the peer nccl cannot be measured beside backend host: NCCL works on CUDA devices")
	assert.Contains(t, r.err, "--peer=none")
	assert.Equal(t, 1, strings.Count(r.err, "symmem: "), r.err)
	assert.NotContains(t, r.err, "rank", "one reason, not one for each rank")
	assert.Empty(t, r.out, "nothing was measured")

	r = call(t, "", environ(), append(small, "--backend", "host", "--peer", "nvshmem")...)
	assert.Equal(t, exit.Failure, r.status)
	assert.Contains(t, r.err, "the peer nvshmem cannot be measured beside backend host: NVSHMEM works on CUDA devices")
	assert.Empty(t, r.out, "nothing was measured")

	r = call(t, "", environ(), append(small, "--backend", "host", "--peer", "pytorch")...)
	assert.Equal(t, exit.Failure, r.status)
	assert.Contains(t, r.err, "the peer pytorch cannot be measured beside backend host: PyTorch's symmetric memory is on CUDA devices")
	assert.Empty(t, r.out, "nothing was measured")

	r = call(t, "", environ(), append(small, "--backend", "all", "--peer", "nccl")...)
	require.Equal(t, exit.OK, r.status, r.err)
	assert.Contains(t, r.out, "skipped: host: the peer nccl")

	r = call(t, "", environ(), append(small, "--backend", "host")...)
	require.Equal(t, exit.OK, r.status, r.err)
	assert.NotContains(t, r.out, "nccl", "nobody expects it there")
}

// TestFilesOfWhoeverIsNotRead: where nobody reads the standard output any more, which ends the process, the file that was asked for is there all the same.
func TestFilesOfWhoeverIsNotRead(t *testing.T) {
	self, err := os.Executable()
	require.NoError(t, err)
	for _, args := range [][]string{
		{"bench", "--kind", "put", "--sizes", "64", "--reps", "1"},
		{"tune", "--kind", "broadcast", "--sizes", "1K", "--dtype", "f32", "--reps", "3"},
	} {
		t.Run(args[0], func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "found.json")
			reader, writer, err := os.Pipe()
			require.NoError(t, err)
			require.NoError(t, reader.Close())
			var said syncBuffer
			cmd := exec.CommandContext(t.Context(), self, append(args, "--ranks", "2", "--backend", "host", "--output", file)...)
			cmd.Env, cmd.Stdout, cmd.Stderr = environ(), writer, &said
			require.Error(t, cmd.Run(), "%s", &said)
			require.NoError(t, writer.Close())
			if args[0] == "tune" {
				_, _, err := tuning.Read(file)
				require.NoError(t, err)
				return
			}
			text, err := os.ReadFile(file)
			require.NoError(t, err)
			var report bench.Report
			require.NoError(t, json.Unmarshal(text, &report))
			assert.Len(t, report.Rows, 1)
		})
	}
}
