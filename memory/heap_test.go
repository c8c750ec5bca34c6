package memory

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestSpansAgainstModel: random calls give what a map of units says: the smallest free piece that is large enough, and of those the first; never
// what is taken; and what is given back is whole again.
func TestSpansAgainstModel(t *testing.T) {
	const units = 200
	for seed := range uint64(200) {
		r := rand.New(rand.NewPCG(seed, 1))
		var f spans
		f.give(span{0, units})
		taken := make([]bool, units)
		var live []span
		free := func() (all []span) {
			for i := 0; i < units; i++ {
				switch {
				case taken[i]:
				case i > 0 && !taken[i-1]:
					all[len(all)-1].bytes++
				default:
					all = append(all, span{int64(i), 1})
				}
			}
			return all
		}
		for step := range 300 {
			if r.IntN(2) == 0 && len(live) > 0 {
				i := r.IntN(len(live))
				s := live[i]
				live = slices.Delete(live, i, i+1)
				for u := s.start; u < s.start+s.bytes; u++ {
					taken[u] = false
				}
				f.give(s)
			} else {
				n := int64(r.IntN(1 + r.IntN(60)))
				fits := slices.DeleteFunc(free(), func(s span) bool { return s.bytes < n })
				got, ok := f.take(n)
				if n == 0 {
					require.True(t, ok)
					require.Zero(t, got)
					continue
				}
				require.Equal(t, len(fits) > 0, ok, "seed %d, step %d: %d units", seed, step, n)
				if !ok {
					continue
				}
				best := slices.MinFunc(fits, compareSize)
				require.Equal(t, span{best.start, n}, got, "seed %d, step %d", seed, step)
				for u := got.start; u < got.start+n; u++ {
					taken[u] = true
				}
				live = append(live, got)
			}
			want := free()
			require.Equal(t, len(want), len(f.byStart))
			sum, largest := int64(0), int64(0)
			for i, s := range want {
				require.Equal(t, s, f.byStart[i], "seed %d, step %d", seed, step)
				sum += s.bytes
				largest = max(largest, s.bytes)
			}
			require.Equal(t, sum, f.free)
			require.Equal(t, largest, f.largest())
			require.ElementsMatch(t, want, f.bySize)
			require.True(t, slices.IsSortedFunc(f.bySize, compareSize))
		}
		for _, s := range live {
			f.give(s)
		}
		require.Equal(t, []span{{0, units}}, f.byStart)
		require.Equal(t, []span{{0, units}}, f.bySize)
	}
}

// stateOf is what a rank tells that has made the requests.
func stateOf(exact bool, requests ...heapRequest) *HeapState {
	h := &Heap{number: 5}
	for _, r := range requests {
		h.log.add(r)
	}
	s := h.state()
	s.Exact = exact
	return &s
}

// TestCompareStates: the first request in which ranks differ is named with what each asked for; a rank that is only ahead does not differ, unless
// the step is one in which all must be at the same place.
func TestCompareStates(t *testing.T) {
	a := heapRequest{kind: heapAllocate, bytes: 1024, dtype: "f32", shape: []int64{256}}
	b := heapRequest{kind: heapAllocate, bytes: 2048, dtype: "f32", shape: []int64{512}}
	require.Nil(t, compareStates([]*HeapState{stateOf(true), stateOf(true)}))
	require.Nil(t, compareStates([]*HeapState{stateOf(true, a, b), stateOf(true, a, b)}))
	require.Nil(t, compareStates([]*HeapState{stateOf(false, a, b, a), stateOf(false, a, b)}))
	require.Nil(t, compareStates([]*HeapState{stateOf(false, a, b, a), stateOf(true, a, b)}))

	err := compareStates([]*HeapState{stateOf(false, a, a), stateOf(false, a, b), stateOf(false, a, a, a)})
	require.NotNil(t, err)
	assert.Equal(t, "request 2 of heap 5", err.What)
	assert.Equal(t, []string{"allocate 1024 bytes for f32[256]", "allocate 2048 bytes for f32[512]", "allocate 1024 bytes for f32[256]"}, err.Values)

	err = compareStates([]*HeapState{stateOf(true, a), stateOf(true, a, heapRequest{kind: heapFree, of: 1, bytes: 1024})})
	require.NotNil(t, err)
	assert.Equal(t, "request 2 of heap 5", err.What)
	assert.Equal(t, []string{"no such request after 1", "free the 1024 bytes of request 1"}, err.Values)

	// Each of what a request says is compared.
	for _, other := range []heapRequest{
		{kind: heapFree, bytes: 1024, dtype: "f32", shape: []int64{256}},
		{kind: heapAllocate, bytes: 1025, dtype: "f32", shape: []int64{256}},
		{kind: heapAllocate, bytes: 1024, dtype: "i32", shape: []int64{256}},
		{kind: heapAllocate, bytes: 1024, dtype: "f32", shape: []int64{256, 1}},
		{kind: heapAllocate, bytes: 1024, dtype: "f32", shape: []int64{16, 16}},
		{kind: heapAllocate, of: 1, bytes: 1024, dtype: "f32", shape: []int64{256}},
	} {
		require.NotNil(t, compareStates([]*HeapState{stateOf(true, a), stateOf(true, other)}), "%v", other)
	}

	// A difference is seen long after, and then the request is not known any more.
	many := slices.Repeat([]heapRequest{a}, 40)
	err = compareStates([]*HeapState{stateOf(false, append([]heapRequest{a}, many...)...), stateOf(false, append([]heapRequest{b}, many...)...)})
	require.NotNil(t, err)
	assert.Equal(t, "request 26 of heap 5, or one before it", err.What)

	// So far ahead that nothing is remembered in common: there is nothing to compare yet; where all must be at the same place it is an error.
	require.Nil(t, compareStates([]*HeapState{stateOf(false, many...), stateOf(false, a)}))
	err = compareStates([]*HeapState{stateOf(true, many...), stateOf(true, a)})
	require.NotNil(t, err)
	assert.Equal(t, []string{"40 requests", "no such request after 1"}, err.Values)
}
