package main

// Collectives over islands.
func init() {
	program := []stage{{"kernels", "TestHierarchicalProgram", usual}}
	order := []stage{{"kernels", "TestHierarchical", usual}}
	others := []stage{{"kernels", "TestIsland", usual}}
	const file, moves = "kernels/hierarchical.go", "kernels/hierarchical_moves.go"
	mutants = append(mutants,
		mutant{file: file, why: "laps are sent to slots that are not free", tests: program,
			old: "\t\ts.wait(hierarchicalResults + lap%f.slots())\n\t\ts.send(lap)", new: "\t\ts.send(lap)"},
		mutant{file: file, why: "laps are reduced that have not come", tests: program,
			old: "\t\ts.wait(hierarchicalData)\n\t\ts.join()\n\t\tif l+1 < f.laps {\n\t\t\ts.fork()\n\t\t\tsend", new: "\t\ts.join()\n\t\tif l+1 < f.laps {\n\t\t\ts.fork()\n\t\t\tsend"},
		mutant{file: file, why: "an owner does not wait between laps", tests: program,
			old: "\t\t\ts.wait(hierarchicalData)\n\t\t\ts.join() //", new: "\t\t\ts.join() //"},
		mutant{file: file, why: "sums are sent before they are made", tests: program,
			old: "\t\t\ts.fork()\n\t\t\tsend(l + 1)", new: "\t\t\tsend(l + 1)"},
		mutant{file: file, why: "inputs of the island are read before they are ready", tests: program,
			old: "\ts.wait(hierarchicalReady)\n", new: ""},
		mutant{file: file, why: "outputs are read before the island has written them", tests: program,
			old: "\ts.finish(hierarchicalDone)\n", new: ""},
		mutant{file: file, why: "a run ends before results have come", tests: program,
			old: "\t\ts.results(l)\n\t\ts.wait(hierarchicalResults)\n", new: "\t\ts.results(l)\n"},
		mutant{file: file, why: "both sums of an island are in one place", tests: program,
			old: "int64(lap%f.slots()) * f.span()", new: "int64(0)"},
		mutant{file: file, why: "islands are combined from the own one on", tests: order,
			old: "\tfor i := range b.islands {\n\t\tat :=", new: "\tfor k := range b.islands {\n\t\ti := (b.island + k) % len(b.islands)\n\t\tat :=",
		},
		mutant{file: file, why: "ranks of an island are summed up from the own one on", tests: order,
			old: "\tfor _, r := range b.islands[b.island] {\n\t\tins", new: "\tfor _, r := range append([]int{b.Rank()}, b.near()...) {\n\t\tins",
		},
		mutant{file: file, why: "f16 averages overflow", tests: order,
			old: "return a.in.DType() == tensor.Float16 && a.op == Avg", new: "return false"},
		mutant{file: file, why: "auto takes it where the order of the ranks is wanted", tests: order,
			old: "if rankOrder || ", new: "if "},
		mutant{file: moves, why: "shares are put before anybody's output may be written", tests: others,
			old: "\ts.wait(islandReady)\n", new: ""},
		mutant{file: moves, why: "shares are stored to the outputs of the island before they have come", tests: others,
			old: "\t\ts.wait(islandData)\n", new: ""},
		mutant{file: moves, why: "a run ends before the island has written its outputs", tests: others,
			old: "\ts.finish(islandDone)\n", new: ""},
		mutant{file: moves, why: "parts of a broadcast are stored before the others' have come", tests: others,
			old: "\t\t\ts.wait(islandRelayed)\n", new: ""},
		mutant{file: "kernels/islands.go", why: "a rank carries for one of another island only", tests: others,
			old: "place%len(p.islands[p.island]) == p.local", new: "place == p.local"},
		mutant{file: "kernels/islands.go", why: "auto takes it where every rank is alone", tests: others,
			old: "return len(ranks) > 1 })", new: "return len(ranks) > 0 })"},
		mutant{file: "kernels/islands.go", why: "auto takes it for small messages", tests: others,
			old: "if bytes < hierarchicalBytes || ", new: "if "},
		mutant{file: "memory/signal_flags.go", why: "a plan that has failed is not told where nobody is waited for", tests: []stage{{"memory", "SignalsForSome", usual}},
			old: "\tif w.signals.user.failedBefore() { // also", new: "\tif false { // also"},
	)
}
