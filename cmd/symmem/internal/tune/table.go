package tune

import (
	"cmp"
	"math"
	"slices"

	"github.com/symmem/symmem/cmd/symmem/internal/measure"
	"github.com/symmem/symmem/kernels/tuning"
)

// classes are the dtypes that go by what was measured with one of them: of one width, and with or without push forms whose lines are all data.
var classes = [][]string{{"f16", "bf16"}, {"f32"}, {"f64", "i64", "u64"}, {"i32", "u32"}, {"i16", "u16"}, {"i8", "u8"}}

// classOf is the class of a dtype.
func classOf(dtype string) []string {
	for _, c := range classes {
		if slices.Contains(c, dtype) {
			return c
		}
	}
	return []string{dtype}
}

// series is what was found of one collective, at ascending sizes.
type series struct {
	collective string
	dtypes     []string // nil for all
	multicast  bool
	points     []measure.Point
}

// seriesOf sorts points.
func seriesOf(points []measure.Point) []*series {
	var all []*series
	for _, p := range points {
		dtypes := classOf(p.DType)
		if p.Moves {
			dtypes = nil
		}
		i := slices.IndexFunc(all, func(s *series) bool {
			return s.collective == p.Collective && s.multicast == p.Multicast && slices.Equal(s.dtypes, dtypes)
		})
		if i < 0 {
			i = len(all)
			all = append(all, &series{collective: p.Collective, dtypes: dtypes, multicast: p.Multicast})
		}
		all[i].points = append(all[i].points, p)
	}
	for _, s := range all {
		slices.SortFunc(s.points, func(a, b measure.Point) int { return cmp.Compare(a.Bytes, b.Bytes) })
	}
	return all
}

// tableOf makes a table of what was found: where another form, number of blocks or lap was faster by more than noise, that, and all else as it was.
func tableOf(m *measure.TunedMachine, points []measure.Point) *tuning.Table {
	before := &tuning.Table{Version: tuning.Version, Devices: m.Devices, Link: m.Link, Rules: m.Rules}
	t := &tuning.Table{Version: tuning.Version, Devices: m.Devices, Link: m.Link, Driver: m.Driver}
	for _, s := range seriesOf(points) {
		t.Rules = append(t.Rules, s.rule(before, m.Ranks))
	}
	return before.Merge(t)
}

// rule makes a rule of a series. Between two sizes that were measured, the nearer one counts, and beyond the largest that one, as far as there was one form before.
func (s *series) rule(before *tuning.Table, ranks int) tuning.Rule {
	r := tuning.Rule{Collective: s.collective, Ranks: ranks, DTypes: s.dtypes, Multicast: s.multicast, Source: tuning.Measured}
	dtype := s.points[0].DType
	old := before.Find(s.collective, ranks, dtype, s.multicast)
	if old == nil {
		old = before.Find(s.collective, ranks, dtype, false)
	}
	var bounds []int64 // of the sizes between which nothing changes
	for i := range s.points {
		bounds = append(bounds, s.boundary(i))
	}
	if old != nil {
		for _, step := range old.Steps {
			if step.UpTo > 0 {
				bounds = append(bounds, int64(step.UpTo))
			}
		}
	}
	slices.Sort(bounds)
	bounds = append(slices.Compact(bounds), math.MaxInt64)
	for _, bound := range bounds {
		for _, whole := range []bool{true, false} {
			step := s.at(old, bound, whole)
			if step.WholeVectors = whole; bound < math.MaxInt64 {
				step.UpTo = tuning.Size(bound)
			} else {
				step.UpTo = 0
			}
			r.Steps = append(r.Steps, step)
		}
	}
	r.Steps = merged(r.Steps)
	return r
}

// boundary is the largest size that goes by point i: half way to the next one, in powers.
func (s *series) boundary(i int) int64 {
	if i+1 == len(s.points) {
		return s.points[i].Bytes
	}
	at := math.Sqrt(float64(s.points[i].Bytes) * float64(s.points[i+1].Bytes))
	// In quarters of a power of two, which people can read: 24 KiB is between 16 and 32 KiB.
	quarter := math.Exp2(math.Floor(math.Log2(at))) / 4
	return max(int64(math.Round(at/quarter)*quarter), s.points[i].Bytes)
}

// at is the step for a message of just so many bytes.
func (s *series) at(old *tuning.Rule, bytes int64, whole bool) tuning.Step {
	i := slices.IndexFunc(s.points, func(p measure.Point) bool { return true })
	for i < len(s.points) && bytes > s.boundary(i) {
		i++
	}
	before := func(whole bool) (step tuning.Step) {
		if old != nil {
			set := tuning.Set{Tables: []*tuning.Table{{Rules: []tuning.Rule{*old}}}, Multicast: true}
			step, _ = set.Choose(old.Collective, old.Ranks, s.points[0].DType, bytes, whole, func(*tuning.Step) bool { return true })
		}
		return step
	}
	was := before(whole)
	p := s.points[min(i, len(s.points)-1)]
	if i == len(s.points) && old != nil && candidateOf(was) != p.Default.Candidate {
		return was // it was not measured, and is not what was there for the largest size that was
	}
	if p.Best.Candidate == p.Default.Candidate && old != nil && !s.stale(i, bytes, was, candidateOf(before(true))) {
		return was
	}
	if !whole && old != nil && s.lines(p.Best.Form) {
		return was // its kernels for other messages are slower
	}
	return tuning.Step{Form: p.Best.Form, Blocks: p.Best.Blocks, LapBytes: tuning.Size(p.Best.Lap)}
}

// lines reports whether a form sends lines, by kernels of their own for messages that are whole vectors, as those are that were measured.
func (s *series) lines(form string) bool {
	switch s.collective {
	case tuning.Broadcast, tuning.AllGather, tuning.AllToAll:
		return form == "one_shot_ll"
	}
	return form == "one_shot_ll" || form == "one_shot_push" || form == "two_shot_push"
}

// candidateOf is what a step takes.
func candidateOf(s tuning.Step) measure.Candidate {
	return measure.Candidate{Form: s.Form, Blocks: s.Blocks, Lap: int64(s.LapBytes)}
}

// stale reports whether what was in use for a message near point i was so for the next point beyond it, too, and was beaten there: the size at which the old table
// changed is none at which the new one has to. What was measured is whole vectors; what the old table had for other messages alone is left.
func (s *series) stale(i int, bytes int64, was tuning.Step, wasWhole measure.Candidate) bool {
	if i == len(s.points) {
		return false
	}
	beyond := i + 1
	if bytes < s.points[i].Bytes {
		beyond = i - 1
	}
	if c := candidateOf(was); beyond < 0 || beyond >= len(s.points) || c == s.points[i].Default.Candidate || c != wasWhole || c != s.points[beyond].Default.Candidate {
		return false
	}
	return s.points[beyond].Best.Candidate != s.points[beyond].Default.Candidate
}

// merged leaves out steps that say no more than others. They come in pairs for one size: for whole vectors, and for all others.
func merged(steps []tuning.Step) []tuning.Step {
	same := func(a, b tuning.Step) bool {
		return a.Form == b.Form && a.Blocks == b.Blocks && a.LapBytes == b.LapBytes
	}
	var found []tuning.Step
	for i := 0; i < len(steps); i += 2 {
		whole, any := steps[i], steps[i+1]
		// A pair like the one before takes its place.
		if i > 0 && same(whole, steps[i-2]) && same(any, steps[i-1]) {
			for len(found) > 0 && found[len(found)-1].UpTo == steps[i-1].UpTo {
				found = found[:len(found)-1]
			}
		}
		if !same(whole, any) {
			found = append(found, whole)
		}
		found = append(found, any)
	}
	// What is for messages of any kind and as the next such step is said by that one, if what is between is for whole vectors and the same too.
	var least []tuning.Step
	for i, s := range found {
		if !s.WholeVectors && i+1 < len(found) && !found[i+1].WholeVectors && same(s, found[i+1]) {
			continue
		}
		least = append(least, s)
	}
	return least
}
