package main

import (
	"errors"
	"math"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/kernels"
)

func TestParseSizes(t *testing.T) {
	for text, want := range map[string][]int64{
		"1K":             {1 << 10},
		"1k,4,1K":        {4, 1 << 10},
		"1K:8K":          {1 << 10, 2 << 10, 4 << 10, 8 << 10},
		"3:20":           {3, 6, 12},
		"64MiB":          {64 << 20},
		"1G,1B":          {1, 1 << 30},
		" 7 , 5 ":        {5, 7},
		"1M:2M,16,1M:4M": {16, 1 << 20, 2 << 20, 4 << 20},
	} {
		got, err := parseSizes(text)
		require.NoError(t, err, text)
		assert.Equal(t, want, got, text)
	}
	for _, text := range []string{"", "0", "-1", "K", "1.5K", "1T", "2K:1K", ":", "1:", "1,,2", "9999999999G", "2000G", "0x10"} {
		_, err := parseSizes(text)
		assert.Error(t, err, text)
	}
}

func TestSizeText(t *testing.T) {
	for n, want := range map[int64]string{1: "1", 1023: "1023", 1 << 10: "1K", 1536: "1536", 3 << 20: "3M", 1 << 30: "1G"} {
		assert.Equal(t, want, sizeText(n))
		back, err := parseSize(want)
		require.NoError(t, err)
		assert.Equal(t, n, back)
	}
}

func TestByteText(t *testing.T) {
	for n, want := range map[int64]string{unlimited: "unlimited", 0: "0 B", 1023: "1023 B", 1 << 10: "1.0 KiB", 3 << 19: "1.5 MiB",
		math.MaxInt64: "8.0 EiB"} {
		assert.Equal(t, want, byteText(n))
	}
}

func TestMedian(t *testing.T) {
	assert.InDelta(t, 2, median([]float64{1, 2, 9}), 0)
	assert.InDelta(t, 2.5, median([]float64{1, 2, 3, 9}), 0)
	assert.True(t, math.IsNaN(median(nil)))
}

func TestIterationsAreBounded(t *testing.T) {
	assert.Equal(t, maxIterations, iterations(device.Host, true, 1))
	assert.Equal(t, 256, iterations(device.Host, true, 1<<20))
	assert.Equal(t, maxIterations/100, iterations(device.Host, false, 1))
	assert.Equal(t, minIterations, iterations(device.Host, true, 1<<40))
}

// failingWriter takes some writes and then none.
type failingWriter struct {
	left int
	b    strings.Builder
}

var errFull = errors.New("full")

func (w *failingWriter) Write(p []byte) (int, error) {
	if w.left--; w.left < 0 {
		return 0, errFull
	}
	return w.b.Write(p)
}

func TestLineWriter(t *testing.T) {
	var mu sync.Mutex
	out := &failingWriter{left: 100}
	w := &lineWriter{mu: &mu, to: out, prefix: "[7] "}
	for _, part := range []string{"a", "b\nc\n\nd", "", "e\r\n", "last"} {
		n, err := w.Write([]byte(part))
		require.NoError(t, err)
		assert.Equal(t, len(part), n)
	}
	w.flush()
	w.flush()
	assert.Equal(t, "[7] ab\n[7] c\n[7] \n[7] de\r\n[7] last\n", out.b.String())
	assert.NoError(t, w.err)
}

func TestLineWriterBreaksEndlessLines(t *testing.T) {
	var mu sync.Mutex
	out := &failingWriter{left: 100}
	w := &lineWriter{mu: &mu, to: out, prefix: "> "}
	text := strings.Repeat("x", maxLine*5/2)
	for at := 0; at < len(text); at += 300_000 {
		_, err := w.Write([]byte(text[at:min(at+300_000, len(text))]))
		require.NoError(t, err)
		assert.LessOrEqual(t, len(w.held), maxLine)
	}
	w.flush()
	lines := strings.Split(strings.TrimSuffix(out.b.String(), "\n"), "\n")
	require.Len(t, lines, 3)
	assert.Equal(t, text, strings.ReplaceAll(strings.Join(lines, ""), "> ", ""))
}

func TestLineWriterRemembersAFailure(t *testing.T) {
	var mu sync.Mutex
	w := &lineWriter{mu: &mu, to: &failingWriter{left: 1}, prefix: ""}
	n, err := w.Write([]byte("a\nb\nc\n"))
	require.NoError(t, err, "a rank is not stopped by a reader that is gone")
	assert.Equal(t, 6, n)
	assert.ErrorIs(t, w.err, errFull)
}

func TestRankEnviron(t *testing.T) {
	got := rankEnviron(
		[]string{"PATH=/bin", "SYMMEM_RANK=7", "SYMMEM_TOKEN=old", "MASTER_PORT=1", "TORCHELASTIC_RUN_ID=x", "SYMMEM_TIMEOUT=9s",
			"SYMMEM_BACKEND=a", "RANK=5", "GROUP_RANK=3", "OMPI_COMM_WORLD_RANK=2"},
		[]string{"SYMMEM_RANK=0", "SYMMEM_BACKEND=b"})
	assert.Equal(t, []string{"PATH=/bin", "SYMMEM_TIMEOUT=9s", "OMPI_COMM_WORLD_RANK=2", "SYMMEM_RANK=0", "SYMMEM_BACKEND=b"}, got)
}

// TestCheckValuesFit holds that what bench checks with is exact in the smallest dtypes at any number of ranks.
func TestCheckValuesFit(t *testing.T) {
	for _, op := range kernels.Ops() {
		for _, ranks := range []int{1, 2, 3, 7, 8, 12, 13, 60, 61, 127, 128, 500, maxRanks} {
			for i := range int64(2) {
				sum, product := float32(0), float32(1)
				for rank := range ranks {
					sum += checkValue(op, ranks, rank, i)
					product *= checkValue(op, ranks, rank, i)
				}
				want := checkWant(op, ranks, i)
				assert.LessOrEqual(t, want, float32(127), "%v of %d ranks", op, ranks)
				assert.Equal(t, float32(int(want)), want, "%v of %d ranks", op, ranks)
				switch op {
				case kernels.Sum:
					assert.Equal(t, sum, want)
				case kernels.Avg:
					assert.Equal(t, sum/float32(ranks), want)
				case kernels.Prod:
					assert.Equal(t, product, want)
				}
			}
		}
	}
}

func TestDescribe(t *testing.T) {
	end := func(rank, code int, asked bool) rankEnd {
		return rankEnd{rank: rank, pid: 100 + rank, code: code, asked: asked}
	}
	for name, tt := range map[string]struct {
		ranks   []rankEnd
		texts   []string
		done    []bool
		stalled bool
		want    []string
	}{
		"all well": {
			ranks: []rankEnd{end(0, 0, false), end(1, 0, false)}, texts: []string{"", ""}, done: []bool{true, true},
		},
		"one died": {
			ranks: []rankEnd{end(0, 1, true), end(1, 9, false)}, texts: []string{"rank 1 is lost", ""}, done: []bool{false, false},
			want: []string{"rank 1 (process 101) exited with status 9; rank 0: rank 1 is lost"},
		},
		"one died and was asked to end before that was known": {
			ranks: []rankEnd{end(0, 1, false), end(1, 9, true), end(2, 1, true)}, texts: []string{"rank 1 is lost", "", ""}, done: []bool{false, false, false},
			want: []string{"rank 1 (process 101) exited with status 9; rank 0: rank 1 is lost"},
		},
		"one left early": {
			ranks: []rankEnd{end(0, 0, false), end(1, 0, false)}, texts: []string{"", ""}, done: []bool{true, false},
			want: []string{"rank 1 ended without"},
		},
		"one hangs": {
			ranks: []rankEnd{end(0, 1, true), end(1, 1, true)}, texts: []string{"gave up", ""}, done: []bool{false, false}, stalled: true,
			want: []string{"ranks [1] hang", "rank 0: gave up"},
		},
		"ended from here": {
			ranks: []rankEnd{end(0, 1, true), end(1, 1, true)}, texts: []string{"", ""}, done: []bool{false, false},
			want: []string{"rank 0 (process 100)"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			got := describe(&outcome{ranks: tt.ranks}, tt.texts, tt.done, tt.stalled)
			if tt.want == nil {
				assert.Empty(t, got)
			}
			for _, part := range tt.want {
				assert.Contains(t, got, part)
			}
		})
	}
}
