package tuning

import (
	"fmt"
	"math"
	"slices"
)

// Speed is what a model of a group's links goes by, measured between its devices.
type Speed struct {
	// Hop is what the smallest all-reduce takes, by the form in which every rank pushes all it has to all others, in microseconds.
	Hop float64 `json:"hop_us"`
	// Bandwidth is what a rank sends, and at the same time receives, while kernels of all ranks load from their peers, in 1e9 bytes a second.
	Bandwidth float64 `json:"gb_per_s"`
}

// Known reports whether both are numbers that a model can go by.
func (s Speed) Known() bool {
	return s.Hop > 0 && s.Bandwidth > 0 && !math.IsInf(s.Hop, 0) && !math.IsInf(s.Bandwidth, 0)
}

// cost is how long a form takes, in a model: some hops, and then as long as some bytes are on the wire for each byte of the message.
type cost struct {
	form  string
	hops  float64 // of what is waited for one after the other, in times of Speed.Hop
	wire  float64 // what the rank that sends or receives most has to, in messages
	speed float64 // of the bytes, in times of Speed.Bandwidth
	over  int64   // bytes of a message that is too short for it
}

// ChunksOver is the longest share of a reduce-scatter that goes in lines in the form one_shot_push; longer ones of whole vectors go in chunks.
const ChunksOver = 8 << 20

// RootChunksOver is the longest message of a reduce between so many ranks that goes to root in lines in the form one_shot_push. The others combine longer ones of whole vectors
// for root, in chunks: in lines each byte comes to root from all of them. Between four ranks it was measured (docs/hardware.md).
func RootChunksOver(ranks int) int64 {
	if ranks <= 3 {
		return 16<<20 - 16
	}
	return 4<<20 - 16
}

// BarrierHops is how many times Speed.Hop the barriers before and behind a form take that loads from its peers.
const BarrierHops = 3.0

// The hops of forms, and how well forms use the links, are those of 2 and 4 H200, and of 2 H100 for the collectives other than all-reduce (docs/hardware.md): they belong to the kernels more than to the machine.
const (
	hopsPush2   = 1.3 // the second exchange is under way before the first is over
	hopsBarrier = BarrierHops
	hopsFlow    = 3.3
	hopsPhases  = 4.5 // three barriers
	hopsRoot    = 6.0 // the last chunks are combined when all have come

	speedLL    = 0.85 // flags are counted as bytes on the wire
	speedPush  = 0.9
	speedPush2 = 1.05
	speedFlow  = 1.08
	speedShare = 0.6  // one vector of each share at a time
	speedWhole = 0.85 // whole vectors
	speedStore = 1.08 // by stores to peers in place of loads from them
	speedRoot  = 0.85
	speedCast  = 0.9
)

// wholeRanks is between how many ranks there are kernels for whole vectors.
const wholeRanks = 8

// Floats are the dtypes whose push forms carry lines that are all data, and whose sums switches can add.
var Floats = []string{"f16", "bf16", "f32"}

// costs lists the forms of a collective between w ranks that a model knows, for messages that are whole vectors of 16 bytes or for others.
func costs(collective string, w float64, floats, multicast, whole bool) []cost {
	all, share, both := w-1, (w-1)/w, 2*(w-1)/w
	ll := func(wire float64) cost { return cost{"one_shot_ll", 1, 2 * wire, speedLL, 0} }
	pull := func(wire float64) cost { return cost{"one_shot_pull", hopsBarrier, wire, 1, 0} }
	shares := speedShare
	if whole && w <= wholeRanks {
		shares = speedWhole
	}
	store := func(wire float64) cost { return cost{"one_shot_push", hopsBarrier, wire, speedStore, 0} }
	push, pull2 := cost{"one_shot_push", 1, all, speedPush, 0}, cost{"two_shot_pull", hopsBarrier, both, 1, 0}
	push2 := cost{"two_shot_push", hopsPush2, both, speedPush2, 0}
	var found []cost
	switch collective {
	case AllReduce:
		found = []cost{ll(all), pull2, {Flow, hopsFlow, both, speedFlow, 0}}
		if floats {
			found = []cost{push, push2, {Flow, hopsFlow, both, speedFlow, 0}}
		}
		if floats && multicast {
			// A rank sends what the switch adds, all but its own part, and the sum of its part; that comes back to it too.
			found = append(found, cost{"two_shot_multimem", hopsBarrier, 1 + 1/w, speedCast, 0})
		}
	case AllReduceMany:
		if found = []cost{ll(all), pull2}; floats {
			found[0] = push
		}
	case AllReduceRMSNorm:
		found = []cost{push, push2, pull2}
	case Broadcast:
		found = []cost{ll(all), pull(all), store(all)}
		if w > 2 {
			found = append(found, cost{"two_shot_pull", hopsPhases, 1 + share, 1, 0}, cost{"two_shot_push", hopsPhases, 1, speedStore, 0})
		}
		if multicast {
			found = append(found, cost{"one_shot_multimem", hopsBarrier, 1, speedCast, 0})
		}
	case Reduce:
		if found = []cost{ll(all), pull(all)}; floats {
			found = append(found, cost{"one_shot_push", 1, all, shares, 0})
			if whole && w > 2 && w <= wholeRanks {
				found = append(found, cost{"one_shot_push", hopsRoot, 1, speedRoot, RootChunksOver(int(w))})
			}
		}
	case ReduceScatter:
		if found = []cost{ll(share), pull(share)}; floats {
			found = append(found, cost{"one_shot_push", 1, share, shares, 0})
			if whole && w <= wholeRanks { // long shares go in chunks
				found = append(found, cost{"one_shot_push", hopsFlow, share, speedStore, int64(w) * ChunksOver})
			}
		}
	case AllGather, AllToAll:
		found = []cost{ll(share), pull(share), store(share)}
	}
	return found
}

// The sizes at which a model compares forms: every power of two, and one between.
const (
	leastModelled = 1 << 10
	mostModelled  = 16 << 30
)

// Model estimates a table for GPUs between so many ranks.
func Model(link string, ranks int, speed Speed, multicast bool) *Table {
	t := &Table{
		Version: Version, Devices: []string{AnyDevice}, Link: link,
		Name: fmt.Sprintf("a model of the links between %d ranks (one exchange takes %.1f us, %.0f GB/s)", ranks, speed.Hop, speed.Bandwidth),
	}
	add := func(collective string, dtypes []string, floats, cast bool) {
		if r := modelled(collective, ranks, speed, floats, cast); !cast || slices.ContainsFunc(r.Steps, func(s Step) bool { return NeedsMulticast(s.Form) }) {
			r.DTypes, r.Multicast = slices.Clone(dtypes), cast
			t.Rules = append(t.Rules, r)
		}
	}
	for _, collective := range Collectives() {
		switch collective {
		case AllReduce, AllReduceMany, Reduce, ReduceScatter:
			add(collective, Floats, true, false)
			if multicast && collective == AllReduce {
				add(collective, Floats, true, true)
			}
			add(collective, nil, false, false)
		default:
			add(collective, nil, true, false)
			if multicast && collective == Broadcast {
				add(collective, nil, true, true)
			}
		}
	}
	return t
}

// modelled is one rule.
func modelled(collective string, ranks int, speed Speed, floats, cast bool) Rule {
	r := Rule{Collective: collective, Ranks: ranks, Source: Estimated}
	forms, wholes := costs(collective, float64(ranks), floats, cast, false), costs(collective, float64(ranks), floats, cast, true)
	before := int64(0)
	var last [2]string // form of the step before, for whole vectors and for others
	for bytes := int64(leastModelled); bytes <= mostModelled; {
		now := [2]string{fastest(wholes, bytes, speed), fastest(forms, bytes, speed)}
		if now != last {
			if r.bound(Size(before)); len(r.Steps) > 0 && now[1] == last[1] {
				r.Steps = r.Steps[:len(r.Steps)-1] // which the new one says too
			}
			if now[0] != now[1] {
				r.Steps = append(r.Steps, Step{WholeVectors: true, Form: now[0]})
			}
			r.Steps = append(r.Steps, Step{Form: now[1]})
			last = now
		}
		if before = bytes; bytes&(bytes-1) == 0 {
			bytes += bytes / 2
		} else {
			bytes += bytes / 3
		}
	}
	if n := len(r.Steps); n > 1 && r.Steps[n-2].UpTo == 0 { // the last one for whole vectors
		r.Steps[n-2].UpTo = mostModelled
	}
	return r
}

// bound ends the last steps.
func (r *Rule) bound(size Size) {
	for i := len(r.Steps) - 1; i >= 0 && r.Steps[i].UpTo == 0; i-- {
		r.Steps[i].UpTo = size
	}
}

// fastest is the form that takes the least for a message.
func fastest(forms []cost, bytes int64, speed Speed) string {
	best, least := "", math.Inf(1)
	for _, c := range forms {
		if c.over > 0 && bytes <= c.over {
			continue
		}
		if took := c.hops*speed.Hop + c.wire*float64(bytes)/(c.speed*speed.Bandwidth*1e3); took < least {
			best, least = c.form, took
		}
	}
	return best
}
