package main

// The mutants of all-reduces by rails, between GPUs of several hosts.
func init() {
	rails := []stage{{"backend/nccl", "TestRails", usual}}
	parts := []stage{{"backend/nccl", "TestParts", usual}}
	programs := []stage{{"collective", "TestWrongPrograms", usual}}
	const file = "kernels/rails.go"
	mutants = append(mutants,
		mutant{file: file, why: "what a rail brings that was never finished is a result", tests: rails,
			old: "Parts: f.parts(), Told: b.Dead(), Heard: heard,", new: "Parts: f.parts(), Told: b.Upload(make([]byte, 4)), Heard: heard,"},
		mutant{file: file, why: "shards are gathered before the rails have brought them", tests: rails,
			old: "\tb.Launch(libraryLaunch{rail})\n", new: ""},
		mutant{file: file, why: "all ranks are one rail", tests: rails,
			old: "parts[r] = slices.Min(rail)", new: "parts[r] = 0"},
		mutant{file: file, why: "each rank reduces the first shard", tests: rails,
			old: "lo, hi := f.piece(f.local)\n\tp := ptx.Params{", new: "lo, hi := f.piece(0)\n\tp := ptx.Params{"},
		mutant{file: "backend/nccl/parts.go", why: "the other ranks are not told of a plan that has failed", tests: rails,
			old: "b.runFailed(red, err); err != nil", new: "error(nil); err != nil"},
		mutant{file: "backend/nccl/parts.go", why: "parts are taken whose number is that of none of their ranks", tests: parts,
			old: " || r.Parts[first] != first", new: ""},
		mutant{file: "collective/waiting.go", why: "kernels wait for ranks that this one is not among", tests: programs,
			old: "r <= last || r >= size", new: "r >= size"},
		mutant{file: "internal/simlib/nccl_linux.go", why: "a split forgets the keys", tests: []stage{{"internal/simlib", "Split", usual}},
			old: "cmp.Compare(args[a].(splitting).key, args[b].(splitting).key)", new: "0"},
	)
}
