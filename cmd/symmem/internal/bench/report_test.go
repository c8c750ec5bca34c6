package bench

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/cmd/symmem/internal/chart"
	"github.com/symmem/symmem/cmd/symmem/internal/measure"
)

// comparison returns a report of two forms at two sizes with the peer beside them, and what must not be mistaken for that.
func comparison() *Report {
	row := func(backend, beside, algorithm string, bytes int64, median float64) measure.Row {
		r := measure.Row{Kind: measure.AllReduce, Backend: backend, Beside: beside, Ranks: 4, Bytes: bytes, DType: "bf16", Op: "sum",
			Algorithm: algorithm, Chosen: algorithm, Mode: "graph", Place: "in place", Iterations: 20, Repetitions: 3, Median: median,
			Min: median / 2, Max: median * 2, Bandwidth: float64(bytes) / median / 1e3}
		r.Bus = r.Bandwidth * 1.5
		if beside != "" {
			r.Note = "NCCL 2.28.9 (/lib/libnccl.so.2), plain device memory"
		}
		return r
	}
	return &Report{Rows: []measure.Row{
		{Kind: measure.Rendezvous, Backend: "native", Ranks: 4, Bytes: 64 << 20, Note: "first", Iterations: 1, Median: 900},
		row("native", "", "one_shot", 1024, 4),
		row("native", "", "two_shot", 1024, 6),
		row(measure.NCCL, "native", "", 1024, 12),
		row("native", "", "one_shot", 1<<20, 40),
		row("native", "", "two_shot", 1<<20, 16),
		row(measure.NCCL, "native", "", 1<<20, 20),
		{Kind: measure.Put, Backend: "native", Ranks: 4, Bytes: 1024, Iterations: 9, Median: 3, Bandwidth: 1},
		row("other", "", "one_shot", 1024, 8), // which had no peer
	}, Skipped: []Skipped{{Backend: "nccl beside other", Reason: "it is old"}}}
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

	// So are lists of tensors, of as many.
	report = comparison()
	for i := range report.Rows {
		if report.Rows[i].Kind == measure.AllReduce {
			report.Rows[i].Kind, report.Rows[i].Tensors = measure.AllReduceMany, 8
		}
	}
	report.Rows[6].Tensors = 4
	report.compare()
	assert.InDelta(t, 3, report.Rows[1].PeerRatio, 0)
	assert.Zero(t, report.Rows[4].PeerRatio)

	// So are other collectives, which have lines of their own in the picture.
	report = comparison()
	for i := range report.Rows {
		if report.Rows[i].Kind == measure.AllReduce {
			report.Rows[i].Kind, report.Rows[i].Place = measure.AllGather, "out of place"
		}
	}
	report.compare()
	assert.InDelta(t, 3, report.Rows[1].PeerRatio, 0)
	assert.InDelta(t, 1.25, report.Rows[5].PeerRatio, 0)
	assert.Contains(t, report.lines(), "peer nccl all_gather beside native, 4 ranks, graph")
	assert.Contains(t, report.lines(), "native all_gather one_shot, 4 ranks, graph")
	var table strings.Builder
	require.NoError(t, report.writeTable(&table))
	assert.Contains(t, table.String(), "nccl us")

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
	second.Backend, second.Chosen, second.Median, second.Bus = measure.NCCLSymmetric, "16 blocks", 8, 7.7
	second.Note += ", symmetric windows"
	report.Rows = append(report.Rows, second, measure.Row{Kind: measure.AllReduce, Backend: measure.NCCLSymmetric, Beside: "other", Note: "none here"})
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

// TestMatMulInTheTable: together and alone, of ours and of the peer, and what multiplies.
func TestMatMulInTheTable(t *testing.T) {
	ours := measure.Row{Kind: measure.AllReduceMatMul, Backend: "native", Ranks: 2, Bytes: 1 << 20, DType: "bf16", Op: "sum", Algorithm: "auto", Chosen: "two_shot",
		Mode: "eager", Place: "in place", Note: "cuBLAS 13", Iterations: 5, Repetitions: 3, Median: 12, Min: 11, Max: 13, Alone: 6, MatMul: 7}
	peer := ours
	peer.Backend, peer.Beside, peer.Algorithm, peer.Chosen, peer.Note, peer.Median, peer.Alone = measure.NCCL, "native", "", "", "NCCL 2.32", 18, 9
	report := Report{Rows: []measure.Row{ours, peer}}
	report.compare()
	assert.InDelta(t, 1.5, report.Rows[0].PeerRatio, 0)
	var out strings.Builder
	require.NoError(t, report.writeTable(&out))
	text := strings.Join(strings.Fields(out.String()), " ")
	assert.Equal(t, 1, strings.Count(text, "all_reduce_matmul on native, 2 ranks"))
	assert.Contains(t, text, "1M auto: two_shot, alone 6.00, products alone 7.00 12.0 11.0 13.0")
	assert.Contains(t, text, "1M nccl, alone 9.00, products alone 7.00 18.0 11.0 13.0")
	assert.Contains(t, text, "products: cuBLAS 13; times are those of one all-reduce")
}

func TestPeerInTheDocument(t *testing.T) {
	report := comparison()
	report.compare()
	var out bytes.Buffer
	require.NoError(t, report.writeJSON(&out))
	var back Report
	d := json.NewDecoder(&out)
	d.DisallowUnknownFields()
	require.NoError(t, d.Decode(&back))
	assert.Equal(t, report.Rows, back.Rows)
	assert.Equal(t, measure.NCCL, back.Rows[3].Backend)
	assert.Equal(t, "native", back.Rows[3].Beside)
}

func TestPeerInThePicture(t *testing.T) {
	report := comparison()
	assert.Equal(t, []string{"native all_reduce one_shot, 4 ranks, graph", "native all_reduce two_shot, 4 ranks, graph",
		"peer nccl all_reduce beside native, 4 ranks, graph", "native put, 4 ranks", "other all_reduce one_shot, 4 ranks, graph"},
		report.lines())
}

// TestPicture: both charts have their units, sizes as people write them, and the points of every line.
func TestPicture(t *testing.T) {
	report := comparison()
	report.Machine.CPU, report.Machine.Cores = "Abacus 9000", 12
	page := report.page()
	assert.Contains(t, page.Title, "Abacus 9000, 12 cores")
	require.Len(t, page.Charts, 2)
	times, rates := page.Charts[0], page.Charts[1]
	assert.Contains(t, times.Y.Label, "µs")
	assert.Contains(t, rates.Y.Label, "GB/s")
	for bytes, want := range map[float64]string{1: "1 B", 1 << 10: "1 KiB", 1 << 19: "512 KiB", 4 << 20: "4 MiB", 1 << 30: "1 GiB"} {
		assert.Equal(t, want, times.X.Format(bytes))
	}
	for value, want := range map[float64]string{0.1: "0.1", 20: "20", 10000: "10000"} {
		assert.Equal(t, want, times.Y.Format(value))
	}
	require.Len(t, times.Lines, 5)
	assert.Equal(t, []chart.Point{{X: 1024, Y: 4}, {X: 1 << 20, Y: 40}}, times.Lines[0].Points)
	assert.Equal(t, report.Rows[1].Bus, rates.Lines[0].Points[0].Y, "of all_reduce the bus bandwidth")
	assert.Equal(t, report.Rows[3].Bus, rates.Lines[2].Points[0].Y, "of its peer too")
	assert.InDelta(t, 1, rates.Lines[3].Points[0].Y, 0, "of put the bandwidth")

	for name, begin := range map[string]string{"x.png": "\x89PNG", "X.PNG": "\x89PNG", "x.svg": "<svg"} {
		assert.True(t, drawable(name))
		var out bytes.Buffer
		require.NoError(t, report.writePlot(&out, name))
		assert.True(t, strings.HasPrefix(out.String(), begin), name)
	}
	assert.False(t, drawable("x.pdf"))
	report.Rows = report.Rows[:1] // rendezvous, which has one size
	assert.ErrorContains(t, report.writePlot(&bytes.Buffer{}, "x.png"), "nothing with sizes")
}
