package chart

import (
	"math"
	"slices"
)

// mostLabels is how many values have room beside each other on an axis of powers of two.
const mostLabels = 12

// scale maps values to places on a logarithmic axis from low to high, which are both marks.
type scale struct {
	low, high float64
	labels    []float64 // marks with their values
	minor     []float64 // and without
}

// newScale returns the shortest scale between two marks that has room for all values, which are above 0. Without values it goes from 1
// to the base.
func newScale(base int, values []float64) scale {
	if len(values) == 0 {
		values = []float64{1, float64(base)}
	}
	low, high := slices.Min(values), slices.Max(values)
	if base == 2 {
		step := 2.0
		for math.Log(high/low)/math.Log(step) > mostLabels-2 {
			step *= step
		}
		return between(low, high, func(i int) float64 { return math.Pow(step, float64(i)) })
	}
	tens := func(i int) float64 { return math.Pow(10, float64(i)) }
	steps := func(factors ...float64) func(i int) float64 {
		return func(i int) float64 {
			n := len(factors)
			whole := int(math.Floor(float64(i) / float64(n)))
			return factors[i-whole*n] * tens(whole)
		}
	}
	s := between(low, high, steps(1, 2, 5))
	if s.high/s.low < 1000 {
		return s
	}
	// Many powers of ten have no room for what is between them.
	all := between(s.low, s.high, steps(1, 2, 3, 4, 5, 6, 7, 8, 9))
	s.labels = nil
	for _, v := range all.labels {
		if math.Mod(math.Round(math.Log10(v)*1e9)/1e9, 1) == 0 {
			s.labels = append(s.labels, v)
		} else {
			s.minor = append(s.minor, v)
		}
	}
	return s
}

// between returns the scale from low to high with the marks of an ascending sequence: from the last one that is not above low to the
// first one that is not below high, and at least two.
func between(low, high float64, mark func(i int) float64) scale {
	const close = 1 + 1e-9 // powers are rounded
	first := 0
	for mark(first) > low*close {
		first--
	}
	for mark(first+1) <= low*close {
		first++
	}
	s := scale{low: mark(first)}
	for i := first; ; i++ {
		s.high = mark(i)
		s.labels = append(s.labels, s.high)
		if i > first && s.high*close >= high {
			return s
		}
	}
}

// at returns the place of a value, from 0 at low to 1 at high.
func (s scale) at(value float64) float64 { return math.Log(value/s.low) / math.Log(s.high/s.low) }
