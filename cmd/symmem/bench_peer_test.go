package main

import (
	"bytes"
	"encoding/json"
	"image/png"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/tensor"
)

func TestPeerFlags(t *testing.T) {
	all := []string{kindAllReduce, kindPut}
	for name, tt := range map[string]struct {
		o     benchOptions
		kinds []string
		want  *peerSpec
		says  string // of the error
	}{
		"auto":             {benchOptions{peer: peerAuto, dtype: "f32"}, all, &peerSpec{}, ""},
		"nccl":             {benchOptions{peer: peerNCCL, dtype: "bf16", peerLibrary: "/l"}, all, &peerSpec{Required: true, Library: "/l"}, ""},
		"none":             {benchOptions{peer: peerNone, dtype: "f32"}, all, nil, ""},
		"auto, put only":   {benchOptions{peer: peerAuto, dtype: "f32"}, all[1:], nil, ""},
		"auto, i16":        {benchOptions{peer: peerAuto, dtype: "i16"}, all, &peerSpec{}, ""}, // the ranks tell
		"nccl, put only":   {benchOptions{peer: peerNCCL, dtype: "f32"}, all[1:], nil, "all_reduce"},
		"nccl, i16":        {benchOptions{peer: peerNCCL, dtype: "i16"}, all, nil, "has no i16"},
		"another":          {benchOptions{peer: "mpi", dtype: "f32"}, all, nil, "auto, nccl, nvshmem, none"},
		"nvshmem":          {benchOptions{peer: peerNVSHMEM, dtype: "i16", op: "max"}, all, &peerSpec{Required: true, NVSHMEM: true}, ""},
		"nvshmem, avg":     {benchOptions{peer: peerNVSHMEM, dtype: "f32", op: "avg"}, all, nil, "no avg of f32"},
		"nvshmem, library": {benchOptions{peer: peerNVSHMEM, dtype: "f32", op: "sum", peerLibrary: "/l"}, all, nil, "SYMMEM_NVSHMEM_LIBRARY"},
		"nvshmem, put":     {benchOptions{peer: peerNVSHMEM, dtype: "i16", op: "sum"}, all[1:], nil, "all_reduce"},
		"none, bad dtype":  {benchOptions{peer: peerNone, dtype: "f8"}, all, nil, ""},
		"nccl, no kind ok": {benchOptions{peer: peerNCCL, dtype: "f32"}, nil, nil, ""}, // that is an error of its own
	} {
		got, err := tt.o.peerSpec(tt.kinds)
		if tt.says != "" {
			require.ErrorContains(t, err, tt.says, name)
			continue
		}
		require.NoError(t, err, name)
		assert.Equal(t, tt.want, got, name)
	}
}

func TestPeerHasTheSameTypesAndOperations(t *testing.T) {
	for _, op := range kernels.Ops() {
		assert.Equal(t, "nccl"+op.String(), strings.ToLower(ncclOps[op].String()))
	}
	short := strings.NewReplacer("ncclInt", "i", "ncclUint", "u", "ncclFloat", "f", "ncclBfloat", "bf")
	for dtype, theirs := range ncclTypes {
		assert.Equal(t, dtype.String(), short.Replace(theirs.String()))
	}
	assert.NotContains(t, ncclTypes, tensor.Int16)
	assert.NotContains(t, ncclTypes, tensor.Uint16)
}

func TestWhyNoPeer(t *testing.T) {
	for name, tt := range map[string]struct {
		all   []peerFailure
		want  string
		stuck bool
	}{
		"all have it":      {all: []peerFailure{{}, {}}},
		"alike":            {all: []peerFailure{{Text: "gone"}, {Text: "gone"}}, want: "gone"},
		"one":              {all: []peerFailure{{}, {Text: "gone"}}, want: "rank 1: gone"},
		"different":        {all: []peerFailure{{Text: "old"}, {Text: "gone"}}, want: "rank 0: old"},
		"one of them hung": {all: []peerFailure{{Text: "bad"}, {Text: "late", Stuck: true}}, want: "rank 0: bad", stuck: true},
	} {
		reason, stuck := whyNoPeer(tt.all)
		assert.Equal(t, tt.want, reason, name)
		assert.Equal(t, tt.stuck, stuck, name)
	}
}

// comparison is a report of two forms at two sizes with the peer beside them, and what must not be mistaken for that.
func comparison() *benchReport {
	row := func(backend, beside, algorithm string, bytes int64, median float64) benchRow {
		r := benchRow{Kind: kindAllReduce, Backend: backend, Beside: beside, Ranks: 4, Bytes: bytes, DType: "bf16", Op: "sum",
			Algorithm: algorithm, Chosen: algorithm, Mode: "graph", Place: "in place", Iterations: 20, Repetitions: 3, Median: median,
			Min: median / 2, Max: median * 2, Bandwidth: float64(bytes) / median / 1e3}
		r.Bus = r.Bandwidth * 1.5
		if beside != "" {
			r.Note = "NCCL 2.28.9 (/lib/libnccl.so.2), plain device memory"
		}
		return r
	}
	return &benchReport{Rows: []benchRow{
		{Kind: kindRendezvous, Backend: "native", Ranks: 4, Bytes: 64 << 20, Note: "first", Iterations: 1, Median: 900},
		row("native", "", "one_shot", 1024, 4),
		row("native", "", "two_shot", 1024, 6),
		row(peerNCCL, "native", "", 1024, 12),
		row("native", "", "one_shot", 1<<20, 40),
		row("native", "", "two_shot", 1<<20, 16),
		row(peerNCCL, "native", "", 1<<20, 20),
		{Kind: kindPut, Backend: "native", Ranks: 4, Bytes: 1024, Iterations: 9, Median: 3, Bandwidth: 1},
		row("other", "", "one_shot", 1024, 8), // which had no peer
	}, Skipped: []skippedRuns{{Backend: "nccl beside other", Reason: "it is old"}}}
}

func TestPeerIsCompared(t *testing.T) {
	report := comparison()
	report.compare()
	var ratios []float64
	for _, row := range report.Rows {
		ratios = append(ratios, row.PeerRatio)
	}
	assert.Equal(t, []float64{0, 3, 2, 0, 0.5, 1.25, 0, 0, 0}, ratios)
	assert.InDelta(t, 12, report.Rows[1].PeerMedian, 0)
	assert.InDelta(t, report.Rows[3].Bus, report.Rows[1].PeerBus, 0)

	// Another mode is another measurement.
	report = comparison()
	report.Rows[3].Mode = "eager"
	report.compare()
	assert.Zero(t, report.Rows[1].PeerRatio)
	assert.InDelta(t, 0.5, report.Rows[4].PeerRatio, 0)
}

func TestPeerInTheTable(t *testing.T) {
	report := comparison()
	report.compare()
	var out strings.Builder
	require.NoError(t, report.writeTable(&out))
	var lines []string
	for line := range strings.Lines(out.String()) {
		lines = append(lines, strings.Join(strings.Fields(line), " "))
	}
	assert.Contains(t, lines, "bytes median us min us max us GB/s bus GB/s nccl us nccl bus ratio")
	assert.Contains(t, lines, "1K one_shot 4.00 2.00 8.00 0.26 0.38 12.0 0.13 3.00")
	assert.Contains(t, lines, "1M two_shot 16.0 8.00 32.0 65.5 98.3 20.0 78.6 1.25")
	assert.Contains(t, lines, "nccl: NCCL 2.28.9 (/lib/libnccl.so.2), plain device memory; ratio: the fastest peer's time divided by ours")
	assert.Contains(t, lines, "skipped: nccl beside other: it is old")
	assert.NotContains(t, out.String(), "all_reduce on nccl")
	assert.Equal(t, 1, strings.Count(out.String(), "ratio\n"), "tables without a peer have no columns for it:\n%s", out.String())
	assert.Equal(t, 1, strings.Count(out.String(), "all_reduce on native"), "one table, though the peer's rows lie between")
}

// TestTwoPeers: both are shown, and the faster one is what ours is compared with.
func TestTwoPeers(t *testing.T) {
	report := comparison()
	second := report.Rows[3]
	second.Backend, second.Chosen, second.Median, second.Bus = peerSymmetric, "16 blocks", 8, 7.7
	second.Note += ", symmetric windows"
	report.Rows = append(report.Rows, second, benchRow{Kind: kindAllReduce, Backend: peerSymmetric, Beside: "other", Note: "none here"})
	report.compare()
	assert.InDelta(t, 2, report.Rows[1].PeerRatio, 0)
	assert.InDelta(t, 1.25, report.Rows[5].PeerRatio, 0, "at that size there is only one")
	var out strings.Builder
	require.NoError(t, report.writeTable(&out))
	text := strings.Join(strings.Fields(out.String()), " ")
	assert.Contains(t, text, "nccl us nccl bus nccl_symmetric us nccl_symmetric bus ratio")
	assert.Contains(t, text, "1K one_shot 4.00 2.00 8.00 0.26 0.38 12.0 0.13 8.00 7.70 2.00")
	assert.Contains(t, text, "1M two_shot 16.0 8.00 32.0 65.5 98.3 20.0 78.6 1.25", "the second has no figures there")
	assert.Contains(t, text, "nccl_symmetric: NCCL 2.28.9 (/lib/libnccl.so.2), plain device memory, symmetric windows; ratio")
	assert.Contains(t, text, "nccl_symmetric: none here; ratio")
}

func TestPeerInTheDocument(t *testing.T) {
	report := comparison()
	report.compare()
	var out bytes.Buffer
	require.NoError(t, report.writeJSON(&out))
	var back benchReport
	d := json.NewDecoder(&out)
	d.DisallowUnknownFields()
	require.NoError(t, d.Decode(&back))
	assert.Equal(t, report.Rows, back.Rows)
	assert.Equal(t, peerNCCL, back.Rows[3].Backend)
	assert.Equal(t, "native", back.Rows[3].Beside)
}

func TestPeerInThePicture(t *testing.T) {
	report := comparison()
	assert.Equal(t, []string{"native all_reduce one_shot, 4 ranks, graph", "native all_reduce two_shot, 4 ranks, graph",
		"peer nccl all_reduce beside native, 4 ranks, graph", "native put, 4 ranks", "other all_reduce one_shot, 4 ranks, graph"},
		report.lines())
	var out bytes.Buffer
	require.NoError(t, report.writePlot(&out))
	picture, err := png.Decode(&out)
	require.NoError(t, err)
	assert.Positive(t, picture.Bounds().Dx())
}

func TestChecksOfTheEnds(t *testing.T) {
	r := reduction{elements: 25}
	assert.Equal(t, []int64{0, 10, 20}, r.starts(10))
	r.ends = true
	assert.Equal(t, []int64{0, 15}, r.starts(10))
	r.elements = 20
	assert.Equal(t, []int64{0, 10}, r.starts(10))
}

func TestPeerUsage(t *testing.T) {
	for says, args := range map[string][]string{
		"auto, nccl, nvshmem, none": {"--peer", "mpi"},
		"has no u16":                {"--peer", "nccl", "--dtype", "u16"},
		"add that to --kind":        {"--peer", "nccl", "--kind", kindPut},
	} {
		r := call(t, "", environ(), append([]string{"bench"}, args...)...)
		assert.Equal(t, exitUsage, r.status, says)
		assert.Contains(t, r.err, says)
	}
}
