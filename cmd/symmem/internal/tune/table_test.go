package tune

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/cmd/symmem/internal/measure"
	"github.com/symmem/symmem/kernels/tuning"
)

// chosen is the form that a table has for an all-reduce of bf16 between 2 ranks.
func chosen(t *testing.T, table *tuning.Table, dtype string, bytes int64, whole bool) tuning.Step {
	t.Helper()
	set := &tuning.Set{Tables: []*tuning.Table{table}}
	step, ok := set.Choose(tuning.AllReduce, 2, dtype, bytes, whole, func(*tuning.Step) bool { return true })
	require.True(t, ok)
	return step
}

// h200 is where points were found, with the rules of the H200 between 2 ranks.
func h200() *measure.TunedMachine {
	set := tuning.Set{Tables: []*tuning.Table{tuning.Shipped("NVIDIA H200", "")}, Multicast: true}
	return &measure.TunedMachine{Backend: "native", Devices: []string{"NVIDIA H200"}, Link: tuning.LinkNVLink, Ranks: 2, Rules: set.For(2).Rules}
}

// point is one size at which a form is faster than the one in use, or as fast.
func point(bytes int64, inUse, best measure.Candidate) measure.Point {
	return measure.Point{
		Collective: tuning.AllReduce, DType: "bf16", Bytes: bytes, Default: measure.Timed{Candidate: inUse, Median: 9}, Best: measure.Timed{Candidate: best, Median: 8},
	}
}

// TestTableKeepsWhatIsNotBeaten: where nothing was faster than what is in use, the table says what it said, to the byte, for whole vectors and for others, measured or not.
func TestTableKeepsWhatIsNotBeaten(t *testing.T) {
	m := h200()
	before := &tuning.Table{Rules: m.Rules}
	push, flow := measure.Candidate{Form: "one_shot_push"}, measure.Candidate{Form: tuning.Flow}
	table := tableOf(m, []measure.Point{point(1<<10, push, push), point(1<<20, push, push), point(64<<20, flow, flow)})
	for bytes := int64(16); bytes <= 4<<30; bytes *= 2 {
		for _, b := range []int64{bytes - 1, bytes, bytes + 1, bytes / 4 * 3, bytes/4*3 + 1} {
			for _, whole := range []bool{false, true} {
				for _, dtype := range []string{"bf16", "f16", "f32", "i32"} {
					want, got := chosen(t, before, dtype, b, whole), chosen(t, table, dtype, b, whole)
					assert.Equal(t, want.Form, got.Form, "%d bytes of %s, whole vectors %t", b, dtype, whole)
					assert.Equal(t, want.LapBytes, got.LapBytes, "%d bytes", b)
				}
			}
		}
	}
	rule := table.Find(tuning.AllReduce, 2, "bf16", false)
	assert.Equal(t, tuning.Measured, rule.Source)
	assert.Equal(t, []string{"f16", "bf16"}, rule.DTypes)
	assert.Equal(t, before.Find(tuning.AllReduce, 2, "bf16", false).Steps, rule.Steps, "and in as many steps")
	assert.True(t, table.Complete(2))
}

// TestTableTakesWhatIsFaster: what was faster is taken for the sizes that are nearer to its size than to another, for dtypes of that width, and no others.
func TestTableTakesWhatIsFaster(t *testing.T) {
	m := h200()
	push := measure.Candidate{Form: "one_shot_push"}
	few, long := measure.Candidate{Form: "two_shot_pull", Blocks: 32}, measure.Candidate{Form: tuning.Flow, Lap: 64 << 10}
	table := tableOf(m, []measure.Point{point(1<<20, push, few), point(256<<10, push, push), point(64<<20, measure.Candidate{Form: tuning.Flow, Lap: 32 << 10}, long)})
	text, err := table.Text()
	require.NoError(t, err)
	_, err = tuning.Parse("made.json", text)
	require.NoError(t, err, "%s", text)
	for _, whole := range []bool{false, true} {
		assert.Equal(t, "one_shot_push", chosen(t, table, "bf16", 512<<10, whole).Form)
		step := chosen(t, table, "f16", 512<<10+1, whole)
		assert.Equal(t, "two_shot_pull", step.Form)
		assert.Equal(t, 32, step.Blocks)
		assert.Equal(t, "two_shot_pull", chosen(t, table, "bf16", 8<<20, whole).Form)
		step = chosen(t, table, "bf16", 64<<20, whole)
		assert.EqualValues(t, 64<<10, step.LapBytes)
		assert.EqualValues(t, 64<<10, chosen(t, table, "bf16", 256<<20, whole).LapBytes, "beyond what was measured, as far as one form was the best")
		assert.Equal(t, "transfers", chosen(t, table, "bf16", 1<<30, whole).Form, "and no further")
		assert.Equal(t, "one_shot_push", chosen(t, table, "f32", 1<<20, whole).Form)
	}
}

// TestTableLeavesNoGap: where the old table changes between two sizes, from what stays the best at the one to what is beaten at the other, nothing between them keeps what was
// beaten, on either side; what the old table has for messages that are not whole vectors alone stays.
func TestTableLeavesNoGap(t *testing.T) {
	lines, push, pull := measure.Candidate{Form: "one_shot_ll"}, measure.Candidate{Form: "one_shot_push"}, measure.Candidate{Form: "two_shot_pull"}
	m := h200()
	m.Rules = []tuning.Rule{{Collective: tuning.AllReduce, Ranks: 2, Source: tuning.Estimated, Steps: []tuning.Step{
		{UpTo: 1 << 20, Form: lines.Form}, {UpTo: 24 << 20, Form: pull.Form}, {UpTo: 48 << 20, WholeVectors: true, Form: pull.Form}, {Form: push.Form},
	}}}
	table := tableOf(m, []measure.Point{point(1<<20, lines, lines), point(2<<20, pull, lines), point(16<<20, pull, push), point(32<<20, pull, pull), point(64<<20, push, push)})
	form := func(bytes int64) string { return chosen(t, table, "bf16", bytes, true).Form }
	for _, bytes := range []int64{1 << 10, 1 << 20, 1<<20 + 1, 3 << 19, 3 << 20} {
		assert.Equal(t, lines.Form, form(bytes), "%d bytes", bytes)
	}
	assert.Equal(t, push.Form, form(16<<20))
	assert.Equal(t, push.Form, form(1<<30))
	assert.Equal(t, pull.Form, chosen(t, table, "bf16", 32<<20, true).Form)
	assert.Equal(t, push.Form, chosen(t, table, "bf16", 32<<20, false).Form)

	// And the other way around: the smaller size is the one where it is beaten.
	m.Rules[0].Steps = []tuning.Step{{UpTo: 3 << 19, Form: pull.Form}, {Form: push.Form}}
	table = tableOf(m, []measure.Point{point(1<<20, pull, push), point(2<<20, push, push)})
	for bytes := int64(512 << 10); bytes <= 4<<20; bytes += 128 << 10 {
		assert.Equal(t, push.Form, chosen(t, table, "bf16", bytes, true).Form, "%d bytes", bytes)
	}
}

// TestTableLeavesOtherMessages: what was measured is whole vectors, for which forms that send lines have kernels of their own: messages that are none keep what they had. What
// has one kernel for all is taken for all.
func TestTableLeavesOtherMessages(t *testing.T) {
	m := h200()
	for _, c := range []struct {
		collective, dtype, form string
		all                     bool
	}{
		{tuning.AllReduce, "bf16", "one_shot_push", false}, {tuning.AllReduce, "bf16", "two_shot_push", false}, {tuning.AllReduce, "i32", "one_shot_ll", false}, {tuning.AllReduce, "bf16", "two_shot_pull", true},
		{tuning.ReduceScatter, "bf16", "one_shot_push", false}, {tuning.Reduce, "bf16", "one_shot_pull", true}, {tuning.AllGather, "", "one_shot_ll", false}, {tuning.AllGather, "", "one_shot_push", true},
		{tuning.Broadcast, "", "one_shot_push", true}, {tuning.AllToAll, "", "transfers", true},
	} {
		m.Rules = []tuning.Rule{{Collective: c.collective, Ranks: 2, Source: tuning.Estimated, Steps: []tuning.Step{{UpTo: 1 << 20, Form: "two_shot_pull"}, {Form: "one_shot_pull"}}}}
		p := point(8<<20, measure.Candidate{Form: "one_shot_pull"}, measure.Candidate{Form: c.form, Blocks: 64})
		p.Collective, p.DType, p.Moves = c.collective, c.dtype, c.dtype == ""
		table := tableOf(m, []measure.Point{p})
		set := &tuning.Set{Tables: []*tuning.Table{table}}
		for _, whole := range []bool{false, true} {
			dtype := c.dtype
			if dtype == "" {
				dtype = "u8"
			}
			step, ok := set.Choose(c.collective, 2, dtype, 8<<20, whole, func(*tuning.Step) bool { return true })
			require.True(t, ok)
			want := c.form
			if !whole && !c.all {
				want = "one_shot_pull"
			}
			assert.Equal(t, want, step.Form, "%+v, whole vectors %t", c, whole)
		}
	}
}

// TestTableOfMulticast: what was found for memory with multicast is a rule of its own, and begins from what is in use without where there was none.
func TestTableOfMulticast(t *testing.T) {
	m := h200()
	p := point(1<<20, measure.Candidate{Form: "one_shot_push"}, measure.Candidate{Form: "two_shot_multimem"})
	p.Multicast = true
	table := tableOf(m, []measure.Point{p})
	assert.Equal(t, "one_shot_push", chosen(t, table, "bf16", 1<<20, true).Form)
	set := &tuning.Set{Tables: []*tuning.Table{table}, Multicast: true}
	step, ok := set.Choose(tuning.AllReduce, 2, "bf16", 1<<20, true, func(*tuning.Step) bool { return true })
	require.True(t, ok)
	assert.Equal(t, "two_shot_multimem", step.Form)
	text, err := table.Text()
	require.NoError(t, err)
	_, err = tuning.Parse("made.json", text)
	require.NoError(t, err, "%s", text)
}
