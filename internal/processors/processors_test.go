package processors

import (
	"math/bits"
	"runtime"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// of returns the set of these processors.
func of(numbers ...int) Set {
	var words [Most / 64]uint64
	var b []byte
	for _, n := range numbers {
		words[n/64] |= 1 << (n % 64)
	}
	for _, w := range words {
		for i := range 8 {
			b = append(b, byte(w>>(8*i)))
		}
	}
	return Set(strings.TrimRight(string(b), "\x00"))
}

func TestSets(t *testing.T) {
	for _, numbers := range [][]int{nil, {0}, {7}, {8}, {0, 1, 63, 64, 65}, {Most - 1}} {
		var got []int
		for p := range of(numbers...).all {
			got = append(got, p)
		}
		require.Equal(t, numbers, got)
	}
	require.Equal(t, of(0, 1, 2), first(3))
	require.Equal(t, Set(""), first(0))
	require.Len(t, first(2*Most), Most/8)
	require.Equal(t, of(0, 9, bits.UintSize+1), setOf([]uintptr{1<<9 | 1, 2, 0, 0}))
}

func TestHere(t *testing.T) {
	s := Here()
	require.Equal(t, s, s.Checked(), "what a process says of itself is believed by others")
	require.Equal(t, runtime.GOMAXPROCS(0), s.AtOnce)
	n := 0
	for range s.Set.all {
		n++
	}
	require.Equal(t, runtime.NumCPU(), n)
}

// TestChecked: what no process can have is not known, and nobody waits for a processor that is not there.
func TestChecked(t *testing.T) {
	good := Share{Set: first(Most), AtOnce: 1, Quota: 1, QuotaOf: 5}
	require.Equal(t, good, good.Checked())
	for name, change := range map[string]func(s *Share){
		"no processor":           func(s *Share) { s.Set = "" },
		"more than there can be": func(s *Share) { s.Set += "\x01" },
		"empty bytes":            func(s *Share) { s.Set = "\x01\x00" },
		"none at once":           func(s *Share) { s.AtOnce = 0 },
		"negative":               func(s *Share) { s.AtOnce = -1 },
		"negative quota":         func(s *Share) { s.Quota = -1 },
	} {
		bad := good
		change(&bad)
		require.Equal(t, Share{}, bad.Checked(), name)
		require.False(t, Enough([]Rank{{Process: "a", Share: bad.Checked()}}), name)
	}
}

func TestEnough(t *testing.T) {
	on := func(process string, atOnce int, numbers ...int) Rank {
		return Rank{Process: process, Share: Share{Set: of(numbers...), AtOnce: atOnce}}
	}
	limited := func(r Rank, quota int64, of uint64) Rank {
		r.Quota, r.QuotaOf = quota, of
		return r
	}
	for _, tt := range []struct {
		name   string
		ranks  []Rank
		enough bool
	}{
		{"one", []Rank{on("a", 1, 0)}, true},
		{"a core each", []Rank{on("a", 1, 0), on("b", 1, 1)}, true},
		{"the same core", []Rank{on("a", 1, 1), on("b", 1, 1)}, false},
		{"two that may run on both", []Rank{on("a", 2, 0, 1), on("b", 2, 0, 1)}, true},
		{"three on two cores", []Rank{on("a", 2, 0, 1), on("b", 2, 0, 1), on("c", 2, 0, 1)}, false},
		{"three, each bound to one of two", []Rank{on("a", 1, 0), on("b", 1, 1), on("c", 1, 0)}, false},
		{"two on one core of many", []Rank{on("a", 1, 0), on("b", 1, 0), on("c", 4, 0, 1, 2, 3)}, false},
		{"who is free makes room", []Rank{on("a", 4, 0, 1, 2, 3), on("b", 1, 0), on("c", 1, 1)}, true},
		{"a chain makes room", []Rank{on("a", 2, 0, 1), on("b", 2, 1, 2), on("c", 2, 2, 3), on("d", 1, 0)}, true},
		{"a chain that ends nowhere", []Rank{on("a", 2, 0, 1), on("b", 2, 1, 2), on("c", 2, 0, 2), on("d", 1, 0)}, false},
		{"two of one process", []Rank{on("a", 2, 0, 1), on("a", 2, 0, 1)}, true},
		{"two of one process, which runs one at a time", []Rank{on("a", 1, 0, 1), on("a", 1, 0, 1)}, false},
		{"two that run one at a time each", []Rank{on("a", 1, 0, 1), on("b", 1, 0, 1)}, true},
		{"half a processor", []Rank{limited(on("a", 2, 0, 1), 500, 7)}, false},
		{"one and a half for one", []Rank{limited(on("a", 2, 0, 1), 1500, 7)}, true},
		{"one and a half for two", []Rank{limited(on("a", 2, 0, 1), 1500, 7), limited(on("b", 2, 0, 1), 1500, 7)}, false},
		{"one each", []Rank{limited(on("a", 2, 0, 1), 1000, 7), limited(on("b", 2, 0, 1), 1000, 8)}, true},
		{"two for two", []Rank{limited(on("a", 2, 0, 1), 2000, 7), limited(on("b", 2, 0, 1), 2000, 7)}, true},
		{"half for the other", []Rank{on("a", 2, 0, 1), limited(on("b", 2, 0, 1), 500, 7)}, false},
		{"one is not known", []Rank{on("a", 2, 0, 1), {Process: "b"}}, false},
	} {
		require.Equal(t, tt.enough, Enough(tt.ranks), tt.name)
	}
}

// TestEnoughIsRight: for a few ranks, all ways to seat them are tried, in any order.
func TestEnoughIsRight(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		sets := rapid.SliceOfN(rapid.SliceOfNDistinct(rapid.IntRange(0, 5), 1, 6, rapid.ID[int]), 1, 6).Draw(t, "sets")
		var seated func(i, taken int) bool
		seated = func(i, taken int) bool {
			if i == len(sets) {
				return true
			}
			for _, p := range sets[i] {
				if taken>>p&1 == 0 && seated(i+1, taken|1<<p) {
					return true
				}
			}
			return false
		}
		var ranks []Rank
		for i, set := range sets {
			ranks = append(ranks, Rank{Process: string(rune('a' + i)), Share: Share{Set: of(set...), AtOnce: 1}})
		}
		require.Equal(t, seated(0, 0), Enough(ranks))
		require.Equal(t, seated(0, 0), Enough(rapid.Permutation(ranks).Draw(t, "in another order")))
	})
}

// TestEnoughOfLargeMachines: machines as large as they can be take no time worth speaking of, whether there are enough or not.
func TestEnoughOfLargeMachines(t *testing.T) {
	const ranks = 1024
	var same, halves []Rank
	for i := range ranks {
		process := string(rune(0x4e00 + i))
		same = append(same, Rank{process, Share{Set: first(ranks), AtOnce: 1}})
		half := Rank{process, Share{Set: first(ranks / 2), AtOnce: 1}}
		if i < ranks/2 {
			half.Set = first(ranks) // they take the half of the others first
		}
		halves = append(halves, half)
	}
	require.True(t, Enough(same))
	require.True(t, Enough(halves))
	same = append(same, Rank{"one more", same[0].Share})
	require.False(t, Enough(same))
	halves[0].Set = first(ranks / 2)
	require.False(t, Enough(halves))
}
