package bytesize

import (
	"math"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
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
		got, err := ParseList(text)
		require.NoError(t, err, text)
		assert.Equal(t, want, got, text)
	}
	for _, text := range []string{"", "0", "-1", "K", "1.5K", "1T", "2K:1K", ":", "1:", "1,,2", "9999999999G", "2000G", "0x10"} {
		_, err := ParseList(text)
		assert.Error(t, err, text)
	}
}

func TestSizeText(t *testing.T) {
	for n, want := range map[int64]string{1: "1", 1023: "1023", 1 << 10: "1K", 1536: "1536", 3 << 20: "3M", 1 << 30: "1G"} {
		assert.Equal(t, want, Text(n))
		back, err := parse(want)
		require.NoError(t, err)
		assert.Equal(t, n, back)
	}
}

func TestByteText(t *testing.T) {
	for n, want := range map[int64]string{0: "0 B", 1023: "1023 B", 1 << 10: "1.0 KiB", 3 << 19: "1.5 MiB",
		math.MaxInt64: "8.0 EiB"} {
		assert.Equal(t, want, Human(n))
	}
}
