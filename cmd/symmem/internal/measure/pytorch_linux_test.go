package measure

import (
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/internal/testneed"
)

// besidePyTorch measures all-reduces of two sizes on simulated GPUs beside what interpreter is, and returns what rank 0 reports, why nothing is measured, and the ranks' errors.
func besidePyTorch(t *testing.T, ranks []*symmem.Rank, interpreter string, graph, required bool) (*refusals, []error) {
	t.Helper()
	var rep refusals
	errs := backendtest.OnAll(ranks, func(r *symmem.Rank) error {
		spec := Spec{Kinds: []string{AllReduce}, Sizes: []int64{256, 1024}, DType: "bf16", Op: "sum", Algorithms: []string{"auto"}, Repetitions: 3, Graph: graph,
			Peer: &PeerSpec{PyTorch: true, Required: required, Library: interpreter, Timeout: 30 * time.Second}}
		b, err := newBencher(r, spec, &rep)
		if err != nil {
			return err
		}
		b.most = 4
		return b.run(t.Context())
	})
	return &rep, errs
}

// refusals collects rows and the reasons why nothing is measured.
type refusals struct {
	rowsOf
	reasons []string
}

func (r *refusals) Refuse(reason string) error { r.reasons = append(r.reasons, reason); return nil }

// fakePython is an interpreter that answers each request by a line of its own.
func fakePython(t *testing.T, answers ...string) string {
	t.Helper()
	script := "#!/bin/sh\n"
	for _, a := range answers {
		script += "read request\ncat <<'END'\n" + a + "\nEND\n"
	}
	file := filepath.Join(t.TempDir(), "python")
	require.NoError(t, os.WriteFile(file, []byte(script), 0o755))
	return file
}

// peersOf returns the rows of the peer.
func peersOf(rows []Row) (peers []Row) {
	for _, row := range rows {
		if row.Beside != "" {
			peers = append(peers, row)
		}
	}
	return peers
}

const (
	pythonHello = `{"version":"2.9","port":4711}`
	pythonReady = `{}`
)

// TestPyTorchBesideOurs: of what the processes answer the form is told that is faster on the slowest rank.
func TestPyTorchBesideOurs(t *testing.T) {
	ranks := simulated(t, 2, "Somebody's GPU")
	python := fakePython(t, pythonHello, pythonReady,
		`{"times":{"one_shot_all_reduce":[4,2,3],"two_shot_all_reduce_":[6,5,7]}}`, `{"times":{"two_shot_all_reduce_":[9,8,7]}}`)
	rep, errs := besidePyTorch(t, ranks, python, true, true)
	backendtest.RequireAll(t, errs)
	require.Len(t, rep.rows, 4)
	for i, want := range []struct {
		form     string
		med, min float64
	}{{"one_shot_all_reduce", 3, 2}, {"two_shot_all_reduce_", 8, 7}} {
		ours, row := rep.rows[2*i], rep.rows[2*i+1]
		assert.Equal(t, PyTorch, row.Backend)
		assert.Equal(t, ours.Backend, row.Beside)
		assert.Equal(t, []any{ours.Kind, ours.Bytes, ours.DType, ours.Op, ours.Mode, ours.Place, ours.Iterations}, []any{row.Kind, row.Bytes, row.DType, row.Op, row.Mode, row.Place, row.Iterations})
		assert.Equal(t, want.form, row.Chosen)
		assert.Equal(t, []float64{want.med, want.min}, []float64{row.Median, row.Min})
		assert.Contains(t, row.Note, "PyTorch 2.9")
	}
}

// TestPyTorchThatIsNotThere: what is missing ends the bench before anything is measured if it has to be there, and is said otherwise.
func TestPyTorchThatIsNotThere(t *testing.T) {
	ranks := simulated(t, 2, "Somebody's GPU")
	for says, python := range map[string]string{
		"starting Python": filepath.Join(t.TempDir(), "none"),
		"No module named": fakePython(t, `{"error":"ModuleNotFoundError: No module named 'torch'"}`),
		"no peer access":  fakePython(t, pythonHello, `{"error":"RuntimeError: no peer access"}`),
		"the Python process has ended: exit status 3: it is broken": func() string {
			file := filepath.Join(t.TempDir(), "python")
			require.NoError(t, os.WriteFile(file, []byte("#!/bin/sh\necho 'it is broken' >&2\nexit 3\n"), 0o755))
			return file
		}(),
		"which is no answer": fakePython(t, "hello"),
	} {
		rep, errs := besidePyTorch(t, ranks, python, false, true)
		backendtest.RequireAll(t, errs)
		assert.Empty(t, rep.rows, says)
		require.Len(t, rep.reasons, 1, says)
		assert.Contains(t, rep.reasons[0], says)
		assert.Contains(t, rep.reasons[0], "the peer pytorch cannot be measured beside backend native")
	}
	rep, errs := besidePyTorch(t, ranks, filepath.Join(t.TempDir(), "none"), false, false)
	backendtest.RequireAll(t, errs)
	require.Len(t, peersOf(rep.rows), 1)
	assert.Contains(t, rep.rows[0].Note, "starting Python")
	assert.Len(t, rep.rows, 3, "ours is measured")
}

// TestPyTorchThatRefuses: a size that it has not is said, and the next is measured; where its process has ended or says what makes no sense nothing more is.
func TestPyTorchThatRefuses(t *testing.T) {
	ranks := simulated(t, 2, "Somebody's GPU")
	times := `{"times":{"one_shot_all_reduce":[4,2,3]}}`
	rep, errs := besidePyTorch(t, ranks, fakePython(t, pythonHello, pythonReady, `{"error":"RuntimeError: not for this size"}`, times), false, true)
	backendtest.RequireAll(t, errs)
	peers := peersOf(rep.rows)
	require.Len(t, peers, 2)
	assert.Contains(t, peers[0].Note, "256 bytes are not measured: RuntimeError: not for this size")
	assert.Zero(t, peers[0].Iterations)
	assert.InDelta(t, 3, peers[1].Median, 0)

	for says, answers := range map[string][]string{
		"256 bytes and more are not measured: the Python process has ended":       {},
		"256 bytes and more are not measured: PyTorch answers [1] for the times":  {`{"times":{"one_shot_all_reduce":[1]}}`, times},
		"256 bytes and more are not measured: PyTorch answers without times":      {`{}`, times},
		"256 bytes and more are not measured: PyTorch answers [1 2 0] for the ti": {`{"times":{"one_shot_all_reduce":[1,2,0]}}`, times},
	} {
		rep, errs := besidePyTorch(t, ranks, fakePython(t, append([]string{pythonHello, pythonReady}, answers...)...), false, true)
		backendtest.RequireAll(t, errs)
		peers := peersOf(rep.rows)
		require.Len(t, peers, 1, says)
		assert.Contains(t, peers[0].Note, says)
		assert.Len(t, rep.rows, 3, "ours is measured at both sizes")
	}
}

// TestPyTorchThatIsWrong: wrong results are an error on every rank.
func TestPyTorchThatIsWrong(t *testing.T) {
	ranks := simulated(t, 2, "Somebody's GPU")
	_, errs := besidePyTorch(t, ranks, fakePython(t, pythonHello, pythonReady, `{"wrong":"rank 1: one_shot_all_reduce gave another sum"}`), false, true)
	for _, err := range errs {
		require.ErrorContains(t, err, "measuring PyTorch's all-reduce of 256: rank 1: one_shot_all_reduce gave another sum")
	}
}

// TestPyTorchThatHangs: no wait is without end, also where the process has left others behind that have its output.
func TestPyTorchThatHangs(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "python")
	require.NoError(t, os.WriteFile(file, []byte("#!/bin/sh\nsleep 60\n"), 0o755))
	p, err := startPyTorch(t.Context(), &PeerSpec{Library: file})
	require.NoError(t, err)
	p.within = 10 * time.Millisecond
	_, err = p.ask(t.Context(), pytorchJob{})
	require.ErrorContains(t, err, "PyTorch has not answered within 10ms")
	p.close()
	require.ErrorContains(t, p.ended, "killed")
}

// TestPyTorchScript: the script itself, with something that pretends to be PyTorch and has no GPU.
func TestPyTorchScript(t *testing.T) {
	python, err := exec.LookPath("python3")
	if err != nil {
		testneed.Missing(t, "python3", err)
	}
	torch, err := filepath.Abs("testdata/torch")
	require.NoError(t, err)
	t.Setenv("PYTHONPATH", torch)
	t.Setenv("PYTHONDONTWRITEBYTECODE", "1")
	t.Setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
	ranks := simulated(t, 2, "Somebody's GPU")
	measured := func(graph bool) ([]Row, []error) {
		t.Setenv("PRETENDED_TORCH", t.TempDir())
		rep, errs := besidePyTorch(t, ranks, python, graph, true)
		assert.Empty(t, rep.reasons)
		return peersOf(rep.rows), errs
	}
	for _, given := range []string{"", "7"} {
		t.Setenv("PRETENDED_NVLS", "0")
		if given != "" {
			t.Setenv("NCCL_NVLS_ENABLE", given)
			t.Setenv("PRETENDED_NVLS", given)
		} else {
			t.Setenv("NCCL_NVLS_ENABLE", "") // so that it comes back
			require.NoError(t, os.Unsetenv("NCCL_NVLS_ENABLE"))
		}
		rows, errs := measured(given == "")
		backendtest.RequireAll(t, errs)
		require.Len(t, rows, 2)
		for _, row := range rows {
			assert.Positive(t, row.Median, row.Note)
			assert.Contains(t, row.Note, "PyTorch 0.0+pretended")
			assert.Equal(t, 3, row.Repetitions)
		}
	}
	t.Setenv("PRETENDED_TORCH_SPOILS", "one")
	rows, errs := measured(false)
	backendtest.RequireAll(t, errs)
	require.Len(t, rows, 2)
	assert.Contains(t, rows[0].Note, "one_shot_all_reduce: rank 0: RuntimeError: one_shot is not for this; two_shot_all_reduce_: rank 0: ")
	t.Setenv("PRETENDED_TORCH_SPOILS", "wrong")
	_, errs = measured(false)
	for _, err := range errs {
		require.ErrorContains(t, err, "rank 0: two_shot_all_reduce_ gave another sum of 128 elements")
	}
}

// TestPyTorchIsWaitedFor: no timeout is so long that the process is not waited for at all.
func TestPyTorchIsWaitedFor(t *testing.T) {
	for timeout, within := range map[time.Duration]time.Duration{time.Minute: 45 * time.Second, 1000000 * time.Hour: pytorchTime, math.MaxInt64: pytorchTime} {
		p, err := startPyTorch(t.Context(), &PeerSpec{PyTorch: true, Library: fakePython(t, `{"version": "1"}`), Timeout: timeout})
		require.NoError(t, err)
		assert.Equal(t, within, p.within)
		a, err := p.ask(t.Context(), pytorchJob{})
		assert.NoError(t, err, timeout)
		assert.Equal(t, "1", a.Version)
		p.close()
	}
}
