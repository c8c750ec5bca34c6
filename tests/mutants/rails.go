package main

// The mutants of collectives by rails, between GPUs of several hosts.
func init() {
	late := []stage{{"backend/nccl", "TestRails", usual}, {"kernels", "TestRailsLateRank", usual}}
	right := []stage{{"backend/nccl", "TestRails$", usual}, {"kernels", "TestRailCollectives", usual}}
	parts := []stage{{"backend/nccl", "TestParts", usual}}
	programs := []stage{{"collective", "TestWrongPrograms", usual}}
	const file, others = "kernels/rails.go", "kernels/rails_collectives.go"
	mutants = append(mutants,
		mutant{file: file, why: "what a rail brings that was never finished is a result", tests: late,
			old: "In: b.Dead(), Out: heard", new: "In: b.Upload(make([]byte, 4)), Out: heard"},
		mutant{file: file, why: "what was cut off on a rank is loaded by others", tests: []stage{{"kernels", "TestRailsFailedCall", usual}},
			old: "words = append(words, rail.Abandoned())", new: "_ = rail.Abandoned()"},
		mutant{file: file, why: "laps leave before the rails have brought them", tests: right,
			old: "\t\tb.LaunchBeside(rails[lap])\n", new: ""},
		mutant{file: file, why: "a lap leaves while its rail is under way", tests: right,
			old: "\t\tb.Join()\n\t\twatch(lap)\n", new: "\t\twatch(lap)\n"},
		mutant{file: file, why: "a rail begins before its lap has entered", tests: right,
			old: "\t\twatch(lap)\n\t\tb.Fork()\n", new: "\t\twatch(lap)\n"},
		mutant{file: file, why: "all laps share one place in the workspace", tests: right,
			old: "int64(lap%railSlots) * int64(rooms)", new: "0 * int64(rooms)"},
		mutant{file: file, why: "all ranks are one rail", tests: right,
			old: "parts[r] = slices.Min(rail)", new: "parts[r] = 0"},
		mutant{file: file, why: "each rank reduces the first shard", tests: right,
			old: "\t\t\tfor _, x := range f.lapOf(0, f.local, lap) {\n\t\t\t\tall = append(all, railSum{x, f.out", new: "\t\t\tfor _, x := range f.lapOf(0, 0, lap) {\n\t\t\t\tall = append(all, railSum{x, f.out"},
		mutant{file: file, why: "of several ranges only the first is combined", tests: right,
			old: "for i := 1; i < len(all); i++ {\n\t\tb.Kernel", new: "for i := len(all); i < len(all); i++ {\n\t\tb.Kernel"},
		mutant{file: others, why: "what islands get is in their own order, where NCCL has another", tests: right,
			old: "int64(f.number(f.local, i)) * f.each(lap)", new: "int64(i) * f.each(lap)"},
		mutant{file: others, why: "what islands bring is in their own order, where NCCL has another", tests: right,
			old: "return f.slot(lap, rooms) + int64(f.number(place, island))", new: "return f.slot(lap, rooms) + int64(island)"},
		mutant{file: others, why: "Auto takes NCCL's collective for shares that it does not have", tests: []stage{{"kernels", "TestRailsByAuto", usual}},
			old: "return shared%int64(m.in.WorldSize()) != 0", new: "return false"},
		mutant{file: "collective/program.go", why: "launches are not told of a run that was enqueued in part", tests: []stage{{"collective", "TestRunInPart", usual}},
			old: "\t\t\t\tw.failLaunches(err)\n", new: ""},
		mutant{file: "backend/nccl/parts.go", why: "the other ranks are not told of a plan that has failed", tests: late,
			old: "b.runFailed(red, err); err != nil", new: "error(nil); err != nil"},
		mutant{file: "backend/nccl/parts.go", why: "parts are taken whose number is that of none of their ranks", tests: parts,
			old: " || r.Parts[first] != first", new: ""},
		mutant{file: "backend/nccl/parts.go", why: "the root of a part is its number in the group", tests: right,
			old: "slices.Index(part.ranks, c.Root)", new: "c.Root"},
		mutant{file: "collective/waiting.go", why: "kernels wait for ranks that this one is not among", tests: programs,
			old: "r <= last || r >= size", new: "r >= size"},
		mutant{file: "internal/simlib/nccl_linux.go", why: "a split forgets the keys", tests: []stage{{"internal/simlib", "Split", usual}},
			old: "cmp.Compare(args[a].(splitting).key, args[b].(splitting).key)", new: "0"},
	)
}
