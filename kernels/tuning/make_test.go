package tuning_test

import (
	"os"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/kernels/tuning"
)

// TestMakeTables writes the shipped tables, once.
func TestMakeTables(t *testing.T) {
	h200 := tuning.Speed{Hop: 2, Bandwidth: 320}
	gpu := func() (rules []tuning.Rule) {
		for size := 2; size <= 8; size++ {
			source := func(measured ...int) string {
				if slices.Contains(measured, size) {
					return tuning.Measured
				}
				return tuning.Estimated
			}
			add := func(collective string, dtypes []string, source string, steps ...tuning.Step) {
				rules = append(rules, tuning.Rule{Collective: collective, Ranks: size, AndMore: size == 8, DTypes: dtypes, Source: source, Steps: steps})
			}
			upTo := func(form string, table []int64) tuning.Step {
				return tuning.Step{UpTo: tuning.Size(at(table, size)), Form: form}
			}
			flow := []tuning.Step{{UpTo: tuning.Size(oldLongLapsFrom - 1), Form: tuning.Flow, LapBytes: 16 << 10}}
			if size <= 4 {
				flow = append(flow, tuning.Step{UpTo: 1<<30 - 1, Form: tuning.Flow, LapBytes: 32 << 10}, tuning.Step{Form: "transfers"})
			} else {
				flow = append(flow, tuning.Step{Form: tuning.Flow, LapBytes: 32 << 10})
			}
			steps := []tuning.Step{upTo("one_shot_push", oldOneShotPush[:]), {UpTo: tuning.Size(oldTwoShotPush), Form: "two_shot_push"}}
			if w := at(oldTwoShotWhole[:], size); w > oldTwoShotPush {
				steps = append(steps, tuning.Step{UpTo: tuning.Size(w), WholeVectors: true, Form: "two_shot_push"})
			}
			add(tuning.AllReduce, tuning.Floats, source(2, 3, 4), append(steps, flow...)...)
			add(tuning.AllReduce, nil, source(2, 3, 4), append([]tuning.Step{upTo("one_shot_ll", oldOneShotLL[:]), upTo("two_shot_pull", oldTwoShotPull[:])}, flow...)...)
			add(tuning.AllReduceMany, tuning.Floats, tuning.Estimated, upTo("one_shot_push", oldOneShotPush[:]), tuning.Step{Form: "two_shot_pull"})
			add(tuning.AllReduceMany, nil, tuning.Estimated, upTo("one_shot_ll", oldOneShotLL[:]), tuning.Step{Form: "two_shot_pull"})
			add(tuning.AllReduceRMSNorm, nil, tuning.Estimated, upTo("one_shot_push", oldOneShotPush[:]), tuning.Step{UpTo: tuning.Size(oldTwoShotPush), Form: "two_shot_push"}, tuning.Step{Form: "two_shot_pull"})
			if size >= oldBroadcastTwo {
				add(tuning.Broadcast, nil, tuning.Estimated, upTo("one_shot_ll", oldBroadcastLL[:]), tuning.Step{UpTo: tuning.Size(oldBroadcastSize - 1), Form: "one_shot_pull"}, tuning.Step{Form: "two_shot_pull"})
			} else {
				add(tuning.Broadcast, nil, tuning.Estimated, upTo("one_shot_ll", oldBroadcastLL[:]), tuning.Step{Form: "one_shot_pull"})
			}
			add(tuning.Reduce, tuning.Floats, tuning.Estimated, upTo("one_shot_push", oldReducePush[:]), tuning.Step{Form: "one_shot_pull"})
			add(tuning.Reduce, nil, tuning.Estimated, upTo("one_shot_ll", oldReduceLL[:]), tuning.Step{Form: "one_shot_pull"})
			add(tuning.AllGather, nil, source(2), upTo("one_shot_ll", oldGatherLL[:]), tuning.Step{Form: "one_shot_pull"})
			add(tuning.ReduceScatter, tuning.Floats, source(2), upTo("one_shot_push", oldScatterPush[:]), tuning.Step{Form: "one_shot_pull"})
			add(tuning.ReduceScatter, nil, source(2), upTo("one_shot_ll", oldScatterLL[:]), tuning.Step{Form: "one_shot_pull"})
			for _, r := range tuning.Model(tuning.LinkNVLink, size, h200, true).Rules {
				if !r.Multicast {
					continue
				}
				// Up to where the switch wins, what wins without it.
				from := r.Steps[len(r.Steps)-2].UpTo
				last := r.Steps[len(r.Steps)-1]
				i := slices.IndexFunc(rules, func(o tuning.Rule) bool {
					return o.Collective == r.Collective && o.Ranks == size && !o.Multicast && slices.Equal(o.DTypes, r.DTypes)
				})
				r.Steps = nil
				for _, s := range rules[i].Steps {
					if s.UpTo == 0 || s.UpTo >= from {
						s.UpTo, s.WholeVectors = from, false
						r.Steps = append(r.Steps, s)
						break
					}
					r.Steps = append(r.Steps, s)
				}
				r.Steps = append(r.Steps, last)
				r.AndMore = size == 8
				rules = append(rules, r)
			}
			add(tuning.AllToAll, nil, tuning.Estimated, upTo("one_shot_ll", oldAllToAllLL[:]), tuning.Step{Form: "one_shot_pull"})
		}
		return rules
	}
	const command = "symmem bench --backend native --ranks N --kind K --algorithm all --mode graph --peer none"
	write := func(name string, table tuning.Table) {
		table.Version = tuning.Version
		text, err := table.Text()
		require.NoError(t, err)
		require.NoError(t, os.WriteFile("tables/"+name, text, 0o644))
	}
	write("h200.json", tuning.Table{
		Devices: []string{"NVIDIA H200", "Simulated GPU"}, Link: tuning.LinkNVLink,
		Machine: "2 and 4 NVIDIA H200, NV18 between every pair, Intel Xeon, Linux 6.18", Date: "2026-11-22", Driver: "580.159.04", Command: command,
		Notes: []string{
			"Measured are all-reduce between 2 to 4 ranks, bf16 and i32 sums, and all-gather and reduce-scatter between 2; docs/hardware.md has the figures.",
			"Estimated is everything else, from these figures and the bytes on the wire. Multicast was never on where this was measured.",
			"Simulated GPUs have no speed; they go by these choices so that all of them are tested.",
		},
		Rules: gpu(),
	})
	estimated := gpu()
	for i := range estimated {
		estimated[i].Source = tuning.Estimated
	}
	write("h100.json", tuning.Table{
		Devices: []string{"NVIDIA H100 80GB HBM3"}, Link: tuning.LinkNVLink,
		Machine: "2 NVIDIA H100 80GB HBM3", Date: "2026-11-22", Driver: "580.159.04", Command: command,
		Notes: []string{
			"These are the choices of the H200, whose links, multiprocessors and clocks this GPU has. Two of them ran all-reduce with these choices, each size within 6 % of two H200.",
			"No other form was measured on them, so everything is estimated. Multicast was never on.",
		},
		Rules: estimated,
	})
	var host []tuning.Rule
	for _, collective := range tuning.Collectives() {
		for size := 2; size <= 4; size++ {
			r := tuning.Rule{Collective: collective, Ranks: size, AndMore: size == 4, Source: tuning.Estimated, Steps: []tuning.Step{{Form: "one_shot"}}}
			switch collective {
			case tuning.AllReduce, tuning.AllReduceMany, tuning.AllReduceRMSNorm:
				r.Steps = []tuning.Step{{UpTo: tuning.Size(at(oldHostOneShot[:], size)), Form: "one_shot"}, {Form: "two_shot"}}
			}
			if collective == tuning.AllReduce {
				r.Source = tuning.Measured
			}
			if len(r.Steps) > 1 {
				host = append(host, r)
			} else if size == 2 {
				r.AndMore = true
				host = append(host, r)
			}
		}
	}
	write("host.json", tuning.Table{
		Devices: []string{tuning.AnyDevice}, Link: tuning.LinkHost,
		Machine: "2 cores of an AMD EPYC, Linux 6.18", Date: "2026-11-20", Command: "symmem bench --backend host --kind all_reduce --algorithm all",
		Notes: []string{"More than 2 ranks shared the 2 cores."},
		Rules: host,
	})
}
