package tuning_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/kernels/tuning"
)

// good is a file that is read.
const good = `{
  "version": 1, "devices": ["NVIDIA B200"], "link": "nvlink", "date": "2026-11-23",
  "rules": [
    {"collective": "all_reduce", "ranks": 2, "dtypes": ["bf16"], "source": "measured", "steps": [
      {"up_to": "384 KiB", "form": "one_shot_push", "blocks": 64},
      {"up_to": "1 MiB", "whole_vectors": true, "form": "two_shot_push"},
      {"up_to": "1 MiB", "form": "two_shot_pull"},
      {"form": "two_shot_flow", "lap_bytes": "32 KiB"}
    ]}
  ]
}`

// TestReadIsStrict: whatever is wrong with a file is told with the file, the field, its value, what is allowed and what to do; nothing is passed over.
func TestReadIsStrict(t *testing.T) {
	table, err := tuning.Parse("good.json", []byte(good))
	require.NoError(t, err)
	assert.Equal(t, tuning.Step{UpTo: 384 << 10, Form: "one_shot_push", Blocks: 64}, table.Rules[0].Steps[0])
	assert.EqualValues(t, 32<<10, table.Rules[0].Steps[3].LapBytes)
	for name, tt := range map[string]struct {
		old, new string
		parts    []string
	}{
		"no JSON":                   {`"rules": [`, `"rules": `, []string{"line 10", "JSON"}},
		"half of it":                {good[300:], ``, []string{"JSON"}},
		"nothing":                   {good, ``, []string{"EOF", "a whole table"}},
		"more behind":               {good, good + `{}`, []string{"more behind the table"}},
		"an unknown field":          {`"link"`, `"lanes": 18, "link"`, []string{`"lanes"`, "devices, link"}},
		"an unknown field of steps": {`"blocks"`, `"threads"`, []string{`"threads"`, "whole_vectors, form"}},
		"another version":           {`"version": 1`, `"version": 2`, []string{"version is 2", "1, the only one"}},
		"no version":                {`"version": 1, `, ``, []string{"version is 0"}},
		"no devices":                {`["NVIDIA B200"]`, `[]`, []string{"devices", "the names of devices"}},
		"an empty device":           {`["NVIDIA B200"]`, `[""]`, []string{"devices"}},
		"an unknown link":           {`"nvlink"`, `"nvlnk"`, []string{"link", `"nvlnk"`, "nvlink, pcie, host"}},
		"no day":                    {`2026-11-23`, `yesterday`, []string{"date", "yesterday"}},
		"an unknown collective":     {`"all_reduce"`, `"all_redcue"`, []string{"rules[0].collective", "all_redcue", "reduce_scatter"}},
		"one rank":                  {`"ranks": 2`, `"ranks": 1`, []string{"rules[0].ranks is 1", "2 to 65536"}},
		"a number as a text":        {`"ranks": 2`, `"ranks": "2"`, []string{"ranks", "line 4", "a JSON string", "int"}},
		"an unknown dtype":          {`["bf16"]`, `["bf16", "f8"]`, []string{"rules[0].dtypes", "f8", "i64"}},
		"a dtype twice":             {`["bf16"]`, `["bf16", "bf16"]`, []string{"rules[0].dtypes", "each once"}},
		"no source":                 {`"source": "measured", `, ``, []string{"rules[0].source", "measured or estimated"}},
		"the same rule twice": {`"rules": [`, `"rules": [{"collective": "all_reduce", "ranks": 2, "dtypes": ["f32", "bf16"], "source": "measured", "steps": [{"form": "two_shot_push"}]},`,
			[]string{"rules[1]", "rules[0] is not for already"}},
		"no rules":                 {good[strings.Index(good, `{"collective`):strings.Index(good, "\n  ]\n}")], ``, []string{"rules is none"}},
		"no steps":                 {good[strings.Index(good, `{"up_to`):strings.Index(good, "\n    ]}")], ``, []string{"rules[0].steps", "at least one"}},
		"sizes that overlap":       {`"up_to": "1 MiB", "form"`, `"up_to": "512 KiB", "form"`, []string{"rules[0].steps[2].up_to", "512 KiB", "more than 1 MiB"}},
		"a size twice":             {`"up_to": "384 KiB"`, `"up_to": "1 MiB"`, []string{"rules[0].steps[1].up_to", "more than 1 MiB"}},
		"a bound at the end":       {`"lap_bytes": "32 KiB"`, `"up_to": "1 GiB"`, []string{"rules[0].steps[3].up_to", "nothing for the last step"}},
		"a hole at the end":        {`"form": "two_shot_flow"`, `"whole_vectors": true, "form": "two_shot_flow"`, []string{"rules[0].steps[3].up_to", "serves every message"}},
		"no bound before the end":  {`"up_to": "384 KiB", `, ``, []string{"rules[0].steps[0].up_to"}},
		"a form that there is not": {`"two_shot_pull"`, `"three_shot"`, []string{"rules[0].steps[2].form", "three_shot", "two_shot_flow"}},
		"a family":                 {`"two_shot_pull"`, `"two_shot"`, []string{"rules[0].steps[2].form"}},
		"a lossy form":             {`"two_shot_pull"`, `"quantized_int8"`, []string{"rules[0].steps[2].form"}},
		"a form of a library":      {`"two_shot_pull"`, `"nccl"`, []string{"rules[0].steps[2].form"}},
		"multicast without it":     {`"two_shot_pull"`, `"two_shot_multimem"`, []string{"rules[0].steps[2].form", "only in a rule with multicast"}},
		"ranks that may differ":    {`"steps": [`, `"multicast": true, "steps": [{"up_to": "1 KiB", "form": "one_shot_multimem"}, `, []string{"rules[0].steps[0].form", "one_shot_multimem"}},
		"negative blocks":          {`"blocks": 64`, `"blocks": -1`, []string{"rules[0].steps[0].blocks is -1"}},
		"a lap of another form":    {`"blocks": 64`, `"lap_bytes": "16 KiB"`, []string{"rules[0].steps[0].lap_bytes", "two_shot_flow"}},
		"an odd lap":               {`"32 KiB"`, `"100 B"`, []string{"lap_bytes", "a multiple of 128"}},
		"a size without unit":      {`"384 KiB"`, `"384"`, []string{`"384"`, "384 KiB"}},
		"a size that is a number":  {`"384 KiB"`, `393216`, []string{"number"}},
		"a size with a fraction":   {`"384 KiB"`, `"1.5 MiB"`, []string{"1.5 MiB", "a whole number"}},
		"a size beyond all":        {`"384 KiB"`, `"99999999999 GiB"`, []string{"99999999999 GiB"}},
		"nothing as a size":        {`"384 KiB"`, `"0 B"`, []string{"0 B"}},
	} {
		t.Run(name, func(t *testing.T) {
			require.Contains(t, good, tt.old)
			_, err := tuning.Parse("bad.json", []byte(strings.Replace(good, tt.old, tt.new, 1)))
			require.ErrorIs(t, err, errs.ErrInvalid)
			wrong, ok := errors.AsType[*errs.ArgumentError](err)
			require.True(t, ok)
			assert.Contains(t, wrong.Op, "bad.json")
			assert.Contains(t, wrong.Advice, "symmem tune")
			for _, part := range tt.parts {
				assert.ErrorContains(t, err, part)
			}
		})
	}
	_, err = tuning.Parse("large.json", make([]byte, 17<<20))
	require.ErrorIs(t, err, errs.ErrInvalid)
	_, err = tuning.Parse("worst.json", []byte(`{"version": 1, "devices": ["x"], "link": "pcie", "rules": [`+strings.Repeat(`{"collective": "none"},`, 5000)+`{}]}`))
	require.ErrorIs(t, err, errs.ErrInvalid)
	assert.Less(t, len(err.Error()), 5000, "a file of which everything is wrong is told in few words")

	_, _, err = tuning.Read(filepath.Join(t.TempDir(), "none.json"))
	require.ErrorIs(t, err, fs.ErrNotExist)
	_, _, err = tuning.Read(t.TempDir())
	require.Error(t, err)
	path := filepath.Join(t.TempDir(), "good.json")
	require.NoError(t, os.WriteFile(path, []byte(good), 0o600))
	table, text, err := tuning.Read(path)
	require.NoError(t, err)
	assert.Equal(t, path, table.Name)
	assert.Equal(t, good, string(text))
}

// FuzzParse: whatever a file holds is a table that says something about every message, or an error.
func FuzzParse(f *testing.F) {
	f.Add([]byte(good))
	f.Add([]byte(`{"version":1,"devices":["any"],"link":"host","rules":[{}]}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		table, err := tuning.Parse("fuzz.json", text)
		if err != nil {
			require.ErrorIs(t, err, errs.ErrInvalid)
			return
		}
		for _, r := range table.Rules {
			set := &tuning.Set{Tables: []*tuning.Table{{Rules: []tuning.Rule{r}}}, Multicast: r.Multicast}
			dtype := "u8"
			if len(r.DTypes) > 0 {
				dtype = r.DTypes[0]
			}
			for _, bytes := range []int64{0, 1, 1 << 20, 1 << 50} {
				_, ok := set.Choose(r.Collective, r.Ranks, dtype, bytes, false, every)
				require.True(t, ok)
			}
		}
		again, err := table.Text()
		require.NoError(t, err)
		_, err = tuning.Parse("again.json", again)
		require.NoError(t, err)
	})
}

// TestFind: the rule for most ranks that serve counts, and of these the one that names the dtype.
func TestFind(t *testing.T) {
	rule := func(ranks int, more bool, form string, dtypes ...string) tuning.Rule {
		return tuning.Rule{Collective: tuning.AllReduce, Ranks: ranks, AndMore: more, DTypes: dtypes, Steps: []tuning.Step{{Form: form}}}
	}
	table := &tuning.Table{Rules: []tuning.Rule{rule(2, false, "a"), rule(4, true, "b"), rule(4, true, "c", "bf16"), rule(8, true, "d"), rule(6, false, "e", "f32")}}
	for _, tt := range []struct {
		ranks int
		dtype string
		want  string
	}{{2, "bf16", "a"}, {3, "bf16", ""}, {4, "f32", "b"}, {4, "bf16", "c"}, {5, "bf16", "c"}, {6, "f32", "e"}, {6, "bf16", "c"}, {6, "i8", "b"}, {8, "bf16", "d"}, {99, "f32", "d"}, {1, "f32", ""}} {
		got := ""
		if r := table.Find(tuning.AllReduce, tt.ranks, tt.dtype, false); r != nil {
			got = r.Steps[0].Form
		}
		assert.Equal(t, tt.want, got, "%+v", tt)
	}
	assert.Nil(t, table.Find(tuning.Reduce, 2, "f32", false))
	assert.Nil(t, table.Find(tuning.AllReduce, 2, "f32", true))
	assert.True(t, table.Covers(2))
	assert.True(t, table.Covers(77))
	assert.False(t, table.Covers(3))
	assert.False(t, table.Complete(4))
}

// TestMerge: of two tables the newer one's rules count, dtype by dtype, and what it has none for stays.
func TestMerge(t *testing.T) {
	rule := func(ranks int, form string, dtypes ...string) tuning.Rule {
		return tuning.Rule{Collective: tuning.AllReduce, Ranks: ranks, DTypes: dtypes, Source: tuning.Measured, Steps: []tuning.Step{{Form: form}}}
	}
	old := &tuning.Table{Date: "2026-01-01", Rules: []tuning.Rule{rule(2, "two_shot_push", "bf16", "f16", "f32"), rule(2, "two_shot_pull"), rule(4, "one_shot_ll")}}
	merged := old.Merge(&tuning.Table{Date: "2026-02-02", Rules: []tuning.Rule{rule(2, "two_shot_flow", "bf16", "f16")}})
	assert.Equal(t, "2026-02-02", merged.Date)
	for dtype, want := range map[string]string{"bf16": "two_shot_flow", "f16": "two_shot_flow", "f32": "two_shot_push", "i8": "two_shot_pull"} {
		assert.Equal(t, want, merged.Find(tuning.AllReduce, 2, dtype, false).Steps[0].Form, dtype)
	}
	assert.Equal(t, "one_shot_ll", merged.Find(tuning.AllReduce, 4, "bf16", false).Steps[0].Form)
	assert.Len(t, old.Rules[0].DTypes, 3, "the old table is as it was")
}

// TestForIsTheSet: the rules of a set as one table answer as the set does, whichever of its tables has rules for what: where one comes first, what the next has for a dtype by its name, or for memory with
// multicast addresses, does not count.
func TestForIsTheSet(t *testing.T) {
	rule := func(ranks int, multicast bool, form string, dtypes ...string) tuning.Rule {
		return tuning.Rule{Collective: tuning.AllReduce, Ranks: ranks, DTypes: dtypes, Multicast: multicast, Source: tuning.Measured, Steps: []tuning.Step{{Form: form}}}
	}
	shipped := &tuning.Table{Rules: []tuning.Rule{
		rule(2, false, "a", "f16", "f32"), rule(2, false, "b", "i32", "u32"), rule(2, false, "c"), rule(2, true, "d", "f32", "bf16"), rule(2, true, "e"),
	}}
	for i, file := range []*tuning.Table{
		{},
		{Rules: []tuning.Rule{rule(2, false, "x")}},
		{Rules: []tuning.Rule{rule(2, false, "x", "f32")}},
		{Rules: []tuning.Rule{rule(2, false, "x", "i32"), rule(2, true, "y")}},
		{Rules: []tuning.Rule{rule(2, true, "y", "f32", "i8"), rule(2, false, "x", "f16")}},
		{Rules: []tuning.Rule{rule(2, true, "y")}},
		{Rules: []tuning.Rule{rule(3, false, "x")}},
	} {
		for _, multicast := range []bool{false, true} {
			set := &tuning.Set{Tables: []*tuning.Table{file, shipped}, Multicast: multicast}
			one := set.For(2)
			for _, dtype := range tuning.DTypes() {
				form := func(s *tuning.Set) string {
					step, _ := s.Choose(tuning.AllReduce, 2, dtype, 1<<20, true, func(*tuning.Step) bool { return true })
					return step.Form
				}
				assert.Equal(t, form(set), form(&tuning.Set{Tables: []*tuning.Table{one}, Multicast: multicast}), "file %d, multicast %t, %s", i, multicast, dtype)
				for _, cast := range []bool{false, true} {
					named := 0
					for _, r := range one.Rules {
						if r.Multicast == cast && slices.Contains(r.DTypes, dtype) {
							named++
						}
					}
					assert.LessOrEqual(t, named, 1, "file %d has several rules for %s", i, dtype)
				}
			}
		}
	}
	assert.Len(t, shipped.Rules[0].DTypes, 2, "the shipped table is as it was")
}
