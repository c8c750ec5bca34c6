package command

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/cmd/symmem/internal/bench"
	"github.com/symmem/symmem/cmd/symmem/internal/exit"
	"github.com/symmem/symmem/kernels/tuning"
)

// tuned calls tune on the host with little to measure.
func tuned(t *testing.T, env []string, args ...string) result {
	t.Helper()
	return call(t, "", env, append([]string{"tune", "--backend", "host", "--sizes", "1K,64K", "--dtype", "f32", "--reps", "3"}, args...)...)
}

// TestTune: tune prints what it found beside what is in use, and writes a table that is read again, with where it comes from; tables of several numbers of ranks share a file; and a program
// goes by the file.
func TestTune(t *testing.T) {
	file := filepath.Join(t.TempDir(), "tuning.json")
	today := func() string { return time.Now().UTC().Format(time.DateOnly) }
	before := today()
	// What is measured is compared with what there is without a file: one that is broken is in nobody's way.
	r := tuned(t, environ("SYMMEM_TUNING=/no/such.json"), "-n", "2", "--kind", "all_reduce,all_gather", "--token", "hunter2", "--output", file)
	require.Equal(t, exit.OK, r.status, r.err)
	for _, part := range []string{"2 ranks of", "in use is the shipped table for links of kind host", "all_reduce of f32", "all_gather", "  64K ", "two_shot", "one_shot", "transfers", "of 4 sizes"} {
		assert.Contains(t, r.out, part)
	}
	assert.Contains(t, r.err, "SYMMEM_TUNING="+file)
	table, text, err := tuning.Read(file)
	require.NoError(t, err)
	assert.NotContains(t, string(text), "hunter2")
	assert.Contains(t, []string{before, today()}, table.Date)
	assert.Contains(t, table.Machine, "2 ranks of")
	assert.Contains(t, table.Command, "symmem tune --backend=host")
	assert.Equal(t, tuning.LinkHost, table.Link)
	assert.True(t, table.Complete(2))
	assert.False(t, table.Covers(3))
	measured := func(table *tuning.Table) (all []string) {
		for _, r := range table.Rules {
			if r.Source == tuning.Measured && slices.Contains(r.DTypes, "f32") {
				all = append(all, r.Collective)
			}
		}
		return all
	}
	assert.Equal(t, []string{tuning.AllReduce}, measured(table))

	r = tuned(t, environ(), "-n", "3", "--kind", "all_reduce", "--output", file, "--json")
	require.Equal(t, exit.OK, r.status, r.err)
	table, text, err = tuning.Read(file)
	require.NoError(t, err)
	assert.Equal(t, string(text), r.out, "--json prints what the file gets")
	assert.True(t, table.Complete(2))
	assert.True(t, table.Complete(3))
	assert.Len(t, measured(table), 2)

	// Somebody knows better.
	for i := range table.Rules {
		if table.Rules[i].Collective == tuning.AllReduce {
			table.Rules[i].Steps = []tuning.Step{{UpTo: 32 << 10, Form: "two_shot"}, {Form: "transfers"}}
		}
	}
	text, err = table.Text()
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(file, text, 0o600))
	for _, ranks := range []string{"2", "3"} {
		r = call(t, "", environ("SYMMEM_TUNING="+file), "bench", "--backend", "host", "-n", ranks, "--kind", "all_reduce", "--sizes", "1K,64K", "--reps", "1", "--json")
		require.Equal(t, exit.OK, r.status, r.err)
		var report bench.Report
		require.NoError(t, json.Unmarshal([]byte(r.out), &report))
		require.Len(t, report.Rows, 2)
		assert.Equal(t, "two_shot", report.Rows[0].Chosen)
		assert.Equal(t, "transfers", report.Rows[1].Chosen)
	}
	r = call(t, "", environ(), "bench", "--backend", "host", "-n", "4", "--kind", "all_reduce", "--sizes", "1K", "--reps", "1", "--tuning", file)
	assert.Equal(t, exit.Failure, r.status)
	assert.Contains(t, r.err, "rules for 4 ranks, which this group has")

	r = call(t, "", environ(), "doctor", "--backend", "host", "--tuning", file)
	assert.Contains(t, r.out, "auto chooses forms by the file "+file)
	require.NoError(t, os.WriteFile(file, []byte("{}"), 0o600))
	r = call(t, "", environ(), "doctor", "--backend", "host", "--tuning", file)
	assert.Equal(t, exit.Failure, r.status)
	assert.Contains(t, r.out, "no program starts")
}

// TestTuneAtOnce: of two that measure at the same time and have one file none loses the rules of the other.
func TestTuneAtOnce(t *testing.T) {
	file := filepath.Join(t.TempDir(), "tuning.json")
	ends := make(chan result, 2)
	for _, ranks := range []string{"2", "3"} {
		go func() {
			var out, errOut syncBuffer
			status := run(t.Context(), []string{"tune", "--backend", "host", "--sizes", "1K", "--kind", "broadcast", "--reps", "3", "-n", ranks, "--output", file},
				strings.NewReader(""), &out, &errOut, environ())
			ends <- result{status: status, out: out.String(), err: errOut.String()}
		}()
	}
	for range 2 {
		r := <-ends
		require.Equal(t, exit.OK, r.status, r.err)
	}
	table, _, err := tuning.Read(file)
	require.NoError(t, err)
	assert.True(t, table.Covers(2))
	assert.True(t, table.Covers(3))
}

// TestTuneKeepsFiles: where nothing is measured, or it is of something else, the file stays as it was.
func TestTuneKeepsFiles(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "tuning.json")
	untouched := func(text string, run func() result, status int, says string) {
		t.Helper()
		require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
		r := run()
		assert.Equal(t, status, r.status, r.err)
		assert.Contains(t, r.err, says)
		left, err := os.ReadFile(file)
		require.NoError(t, err)
		assert.Equal(t, text, string(left))
		files, err := os.ReadDir(dir)
		require.NoError(t, err)
		assert.Len(t, files, 1, "nothing else is left behind")
	}
	gpu := tuning.Model(tuning.LinkPCIe, 2, tuning.Speed{Hop: 9, Bandwidth: 20}, false)
	gpu.Devices = []string{"NVIDIA A100-PCIE-40GB"}
	text, err := gpu.Text()
	require.NoError(t, err)
	untouched(string(text), func() result {
		r := tuned(t, environ(), "-n", "2", "--kind", "all_gather", "--output", file)
		assert.Empty(t, r.out, "nothing was measured before the file was refused")
		return r
	}, exit.Failure, "name another file")
	untouched("not a table", func() result { return tuned(t, environ(), "-n", "2", "--output", file) }, exit.Usage, "JSON")
	here := filepath.Join(t.TempDir(), "here.json")
	r := tuned(t, environ(), "-n", "2", "--kind", "broadcast", "--output", here)
	require.Equal(t, exit.OK, r.status, r.err)
	text, err = os.ReadFile(here)
	require.NoError(t, err)
	untouched(string(text), func() result { return tuned(t, environ(), "-n", "2", "--time", "1ns", "--output", file) }, exit.Failure, "measured nothing")
	untouched(string(text), func() result {
		return tuned(t, environ(brokenVar+"=1"), "-n", "2", "--backend", "hangs", "--timeout", "2s", "--output", file)
	}, exit.Failure, "")
}

// TestTuneWithoutTheFileInUse: what is compared with is what there is without a file, whoever names one, also the configuration file.
func TestTuneWithoutTheFileInUse(t *testing.T) {
	settings := filepath.Join(t.TempDir(), "settings.yaml")
	require.NoError(t, os.WriteFile(settings, []byte("tuning: /no/such.json\n"), 0o600))
	r := tuned(t, environ("SYMMEM_CONFIG="+settings), "-n", "2", "--kind", "broadcast")
	require.Equal(t, exit.OK, r.status, r.err)
	assert.Contains(t, r.out, "in use is the shipped table for links of kind host")
}

// TestTuneInAJob: each rank of a launcher's job would start ranks of its own, and they would measure each other. One process a host is none too many.
func TestTuneInAJob(t *testing.T) {
	for name, vars := range jobs {
		if name == "explicit+kubernetes" { // whose pods have one process each
			continue
		}
		r := tuned(t, environ(vars(1, 2, "79", 29500)...), "-n", "2", "--kind", "broadcast")
		assert.Equal(t, exit.Usage, r.status, name)
		assert.Empty(t, r.out, name)
		assert.Contains(t, r.err, "rank 1 ("+name+")")
	}
	for name, vars := range map[string][]string{
		"a pod":          jobs["explicit+kubernetes"](1, 2, "79", 29500),
		"a batch script": {"SLURM_JOB_ID=7", "SLURM_NTASKS=8", "SLURM_PROCID=0"},
	} {
		r := tuned(t, environ(vars...), "-n", "2", "--kind", "broadcast")
		assert.Equal(t, exit.OK, r.status, "%s: %s", name, r.err)
	}
}

// TestTuneToAPipe: a file that is none is written to, and not read.
func TestTuneToAPipe(t *testing.T) {
	pipe := filepath.Join(t.TempDir(), "pipe")
	require.NoError(t, syscall.Mkfifo(pipe, 0o600))
	read := make(chan []byte, 1)
	go func() {
		text, _ := os.ReadFile(pipe)
		read <- text
	}()
	r := tuned(t, environ(), "-n", "2", "--kind", "broadcast", "--json", "--output", pipe)
	require.Equal(t, exit.OK, r.status, r.err)
	select {
	case text := <-read:
		assert.Equal(t, r.out, string(text))
	case <-time.After(patience):
		t.Fatal("nothing came through the pipe")
	}
	// As a table it is refused at once, where it might never begin.
	r = call(t, "", environ(), "doctor", "--backend", "host", "--tuning", pipe)
	assert.Equal(t, exit.Failure, r.status)
	assert.Contains(t, r.out, "a regular file")
}

// TestTuneSaysThatTimeIsOver: whoever only reads what is printed learns that sizes are missing.
func TestTuneSaysThatTimeIsOver(t *testing.T) {
	r := tuned(t, environ(), "-n", "2", "--kind", "all_reduce,broadcast,all_gather,reduce", "--sizes", "1K:4M", "--time", "500ms")
	require.Equal(t, exit.OK, r.status, r.err)
	assert.Contains(t, r.err, "the time of 500ms was over: ")
}

// TestTuneInterrupted: nothing outlives an interrupt, and nothing is written.
func TestTuneInterrupted(t *testing.T) {
	dir := t.TempDir()
	c := interrupted(t, "tune", "--ranks", "2", "--backend", "host", "--output", filepath.Join(dir, "tuning.json"))
	assert.Contains(t, c.err.String(), "interrupted; no table was written")
	files, err := os.ReadDir(dir)
	require.NoError(t, err)
	assert.Empty(t, files)
}
