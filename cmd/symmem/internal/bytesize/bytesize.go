// Package bytesize reads and writes numbers of bytes, in powers of 1024.
package bytesize

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
)

// maxSize is the largest size that is accepted, in bytes.
const maxSize = 1 << 40

// parse reads a number of bytes with an optional K, M or G (powers of 1024): "64K".
func parse(text string) (int64, error) {
	digits, unit := strings.TrimSpace(text), int64(1)
	upper := strings.TrimSuffix(strings.TrimSuffix(strings.ToUpper(digits), "B"), "I")
	for shift, letter := range "KMG" {
		if rest, ok := strings.CutSuffix(upper, string(letter)); ok {
			upper, unit = rest, 1<<(10*(shift+1))
			break
		}
	}
	n, err := strconv.ParseInt(upper, 10, 64)
	if err != nil || n < 1 || n > math.MaxInt64/unit || n*unit > maxSize {
		return 0, fmt.Errorf("%q is no size; allowed are 1 to %d bytes, written like 4096, 64K or 1M", text, int64(maxSize))
	}
	return n * unit, nil
}

// ParseList reads sizes with commas between them, or a range LOW:HIGH that doubles from LOW on, up to HIGH. They come out in
// ascending order, each once.
func ParseList(text string) ([]int64, error) {
	var sizes []int64
	for part := range strings.SplitSeq(text, ",") {
		low, high, isRange := strings.Cut(part, ":")
		from, err := parse(low)
		if err != nil {
			return nil, err
		}
		to := from
		if isRange {
			if to, err = parse(high); err != nil {
				return nil, err
			}
			if to < from {
				return nil, fmt.Errorf("%q is no range: it begins above its end", part)
			}
		}
		for n := from; n <= to; n *= 2 {
			sizes = append(sizes, n)
		}
	}
	slices.Sort(sizes)
	return slices.Compact(sizes), nil
}

// Text formats a size exactly, as ParseList reads it: "64K".
func Text(n int64) string {
	for i, letter := range []string{"G", "M", "K"} {
		if unit := int64(1) << (10 * (3 - i)); n >= unit && n%unit == 0 {
			return strconv.FormatInt(n/unit, 10) + letter
		}
	}
	return strconv.FormatInt(n, 10)
}

// Human formats a number of bytes for people, rounded: "1.5 MiB".
func Human(n int64) string {
	const units = "KMGTPE"
	if n < 1<<10 {
		return fmt.Sprintf("%d B", n)
	}
	value, unit := float64(n)/(1<<10), 0
	for value >= 1<<10 && unit < len(units)-1 {
		value /= 1 << 10
		unit++
	}
	return fmt.Sprintf("%.1f %ciB", value, units[unit])
}
