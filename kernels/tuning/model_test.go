package tuning_test

import (
	"math"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/kernels/tuning"
)

// lastOf is the size up to which a form is taken for messages that are not whole vectors, 0 if it never is.
func lastOf(table *tuning.Table, collective string, ranks int, dtype, form string) int64 {
	last := int64(0)
	for _, s := range table.Find(collective, ranks, dtype, false).Steps {
		if s.Form == form && !s.WholeVectors {
			last = int64(s.UpTo)
			if s.UpTo == 0 {
				last = math.MaxInt64
			}
		}
	}
	return last
}

// TestModelOfH200: from what MeasureSpeed finds on H200, the model comes to the choices that were measured there, within three times the size: where two forms cross flat, what either
// takes differs by some per cent.
func TestModelOfH200(t *testing.T) {
	for ranks, hop := range map[int]float64{2: 1.8, 4: 2.05} {
		model := tuning.Model(tuning.LinkNVLink, ranks, tuning.Speed{Hop: hop, Bandwidth: 320}, false)
		shipped := tuning.Shipped("NVIDIA H200", tuning.LinkNVLink)
		for _, c := range []struct{ collective, dtype, form string }{
			{tuning.AllReduce, "bf16", "one_shot_push"}, {tuning.AllReduce, "i32", "one_shot_ll"},
			{tuning.AllGather, "u8", "one_shot_ll"}, {tuning.ReduceScatter, "f16", "one_shot_push"}, {tuning.Broadcast, "f32", "one_shot_ll"}, {tuning.Reduce, "i8", "one_shot_ll"},
		} {
			got, want := float64(lastOf(model, c.collective, ranks, c.dtype, c.form)), float64(lastOf(shipped, c.collective, ranks, c.dtype, c.form))
			assert.InDelta(t, 0, math.Log(got/want), math.Log(3.5), "%s of %s between %d ranks, %s: up to %s, and %s was measured", c.collective, c.dtype, ranks, c.form,
				tuning.Size(got), tuning.Size(want))
		}
	}
}

// TestModelIsSensible: on any machine a model has a form for every collective, world and size; small messages go in one step and large ones in two; and the more a hop takes, or the more the links carry,
// the longer one step stays the better.
func TestModelIsSensible(t *testing.T) {
	for _, link := range []string{tuning.LinkNVLink, tuning.LinkPCIe} {
		for _, ranks := range []int{2, 3, 4, 8, 16, 72, 500} {
			before := int64(0)
			for _, hop := range []float64{0.5, 2, 10, 50} {
				for _, bandwidth := range []float64{1, 20, 200, 900} {
					for _, multicast := range []bool{false, true} {
						model := tuning.Model(link, ranks, tuning.Speed{Hop: hop, Bandwidth: bandwidth}, multicast)
						require.True(t, model.Complete(ranks))
						text, err := model.Text()
						require.NoError(t, err)
						_, err = tuning.Parse("of the model", text)
						require.NoError(t, err, "a model is a table that can be read")
					}
				}
				model := tuning.Model(link, ranks, tuning.Speed{Hop: hop, Bandwidth: 100}, false)
				last := lastOf(model, tuning.AllGather, ranks, "f32", "one_shot_ll")
				assert.GreaterOrEqual(t, last, before, "hop %v", hop)
				assert.Positive(t, last)
				before = last
			}
		}
	}
	for _, speed := range []tuning.Speed{{}, {Hop: 1}, {Hop: math.NaN(), Bandwidth: 1}, {Hop: 1, Bandwidth: math.Inf(1)}, {Hop: -1, Bandwidth: 1}} {
		assert.False(t, speed.Known(), "%v", speed)
	}
}
