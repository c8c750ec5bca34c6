package measure

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/tensor"
)

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

// TestCheckValuesFit holds that what bench checks with is exact in the smallest dtypes at any number of ranks.
func TestCheckValuesFit(t *testing.T) {
	for _, op := range kernels.Ops() {
		for _, ranks := range []int{1, 2, 3, 7, 8, 12, 13, 60, 61, 127, 128, 500, 1024} {
			for i := range int64(2 * checkPeriod) {
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

// TestChecksSeeWhatIsMissing holds that sums and products of any number of ranks are other than what is there before, on every rank and where nothing is written, and that sums have
// something of each rank.
func TestChecksSeeWhatIsMissing(t *testing.T) {
	for _, op := range []kernels.Op{kernels.Sum, kernels.Prod} {
		for _, ranks := range []int{2, 11, 12, 60, 61, 128, 1024} {
			for rank := range ranks {
				untouched, cleared, has := true, true, false
				for i := range int64(checkPeriod) {
					value, want := checkValue(op, ranks, rank, i), checkWant(op, ranks, i)
					untouched, cleared, has = untouched && value == want, cleared && want == 0, has || value != 0
				}
				assert.False(t, untouched, "%v of %d ranks: what rank %d puts in is right", op, ranks, rank)
				assert.False(t, cleared, "%v of %d ranks: zeros are right", op, ranks)
				assert.True(t, has, "%v of %d ranks: rank %d may be left out", op, ranks, rank)
			}
		}
	}
}

func TestChecksOfTheEnds(t *testing.T) {
	var r reduction
	assert.Equal(t, []int64{0, 10, 20}, r.starts(part{elements: 25}, 10))
	r.ends = true
	assert.Equal(t, []int64{0, 15}, r.starts(part{elements: 25}, 10))
	assert.Equal(t, []int64{0, 10}, r.starts(part{elements: 20}, 10))
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

// TestIslandsOfRanks: one island is that of rank 0.
func TestIslandsOfRanks(t *testing.T) {
	for _, c := range []struct {
		islands []int
		one     bool
	}{{[]int{0}, true}, {[]int{0, 0, 0}, true}, {[]int{0, 0, 2, 2}, false}, {[]int{0, 1, 0}, false}} {
		assert.Equal(t, c.one, oneIsland(c.islands), c.islands)
	}
}

// TestLibraryMayRefuse: only a library's form, or one that is for some islands, and only where it has not what is asked for, is left out of a measurement.
func TestLibraryMayRefuse(t *testing.T) {
	tooLarge := fmt.Errorf("too large: %w", symmem.ErrUnsupported)
	assert.True(t, refused(kernels.NVSHMEM, tooLarge))
	assert.True(t, refused(kernels.Hierarchical, tooLarge))
	assert.False(t, refused(kernels.OneShot, tooLarge))
	assert.False(t, refused(kernels.NVSHMEM, nil))
	assert.False(t, refused(kernels.NVSHMEM, symmem.ErrNoMemory))
	assert.False(t, refused(kernels.NVSHMEM, errors.Join(tooLarge, symmem.ErrMismatch)), "the ranks differ")
}

// TestPartsAreWhatCollectivesMake: what comes out is what the collective makes of what goes in, in each place, and it shows when shares are in each other's place.
func TestPartsAreWhatCollectivesMake(t *testing.T) {
	flat := func(parts []part) (all []float32) {
		for _, p := range parts {
			assert.Equal(t, int64(len(all)), p.at)
			for i := range p.elements {
				all = append(all, p.value(i))
			}
		}
		return all
	}
	for _, ranks := range []int{1, 2, 3, 8} {
		for _, share := range []int{1, 4, 61, 64, 130} {
			whole := ranks * share
			for _, kind := range []string{AllReduce, Broadcast, Reduce, AllGather, ReduceScatter, AllToAll, AllToAllV} {
				r := reduction{kind: kind, elements: int64(whole), op: kernels.Sum}
				var ins, outs [][]float32
				for rank := range ranks {
					in, out := r.parts(rank, ranks)
					ins, outs = append(ins, flat(in)), append(outs, flat(out))
				}
				sum := func(i int) (total float32) {
					for _, in := range ins {
						total += in[i]
					}
					return total
				}
				for rank, out := range outs {
					if kind == Reduce && rank > 0 {
						assert.Empty(t, out)
						continue
					}
					for i, x := range out {
						var want float32
						switch kind {
						case AllReduce, Reduce:
							want = sum(i)
						case Broadcast:
							want = ins[0][i]
						case AllGather:
							want = ins[i/share][i%share]
						case ReduceScatter:
							want = sum(rank*share + i)
						default:
							want = ins[i/share][rank*share+i%share]
						}
						if x != want {
							t.Fatalf("%s between %d with shares of %d: element %d of rank %d is %v, and the collective makes %v", kind, ranks, share, i, rank, x, want)
						}
					}
					if kind == ReduceScatter && rank > 0 && share > 4 {
						assert.NotEqual(t, outs[0], out)
					}
				}
			}
		}
	}
}
