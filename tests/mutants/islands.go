package main

// Which ranks share memory, and what follows from it.
var (
	islandTests = []stage{{"group", "Island", usual}}
	islandPlans = []stage{{"memory", "OnIslands", usual}, {"backend/nixl", "Island", usual}}
	islandGPUs  = []stage{{"backend/nixl", "IslandOfGPUs|IslandsOfGPUs|GPUsApart|InTheTrial", usual}}
)

func init() {
	mutants = append(mutants,
		mutant{file: "group/islands.go", why: "one direction is enough", tests: islandTests,
			old: "slices.Contains(words[a].Ranks, b) && slices.Contains(words[b].Ranks, a)", new: "slices.Contains(words[a].Ranks, b)"},
		mutant{file: "group/islands.go", why: "the first rank of an island speaks for all", tests: islandTests,
			old: "(found.of[apart] != first || shares(apart, r))", new: "(apart != first || shares(apart, r))"},
		mutant{file: "group/islands.go", why: "another version is as good", tests: islandTests,
			old: "err != nil || words[r].Version != islandsVersion {", new: "err != nil {"},
		mutant{file: "group/islands_linux.go", why: "what was written is not looked at", tests: islandTests,
			old: "if words[r].Load() != answer(secret, r) {", new: "if secret == 0 {"},
		mutant{file: "group/islands_linux.go", why: "files that were tried are left open", tests: islandTests,
			old: "\treturn errors.Join(err, f.Close())\n}\n\n// read", new: "\treturn err\n}\n\n// read"},
		mutant{file: "backend/choose.go", why: "backends are chosen that need memory which ranks do not share", tests: []stage{{"backend", "Choose", usual}},
			old: "if err := apart(islands); err != nil {", new: "if err := apart(islands); false {"},
		mutant{file: "backend/nixl/meet.go", why: "memory that the library does not take is shared", tests: []stage{{"backend/nixl", "TestGPUsApart", usual}},
			old: "failure = b.tryLibrary(ctx, failure)", new: ""},
		mutant{file: "backend/nixl/rendezvous.go", why: "adopted memory has addresses on an island", tests: islandPlans,
			old: "return o.Shares == \"\" || o.Shares != offers[0].Shares })", new: "return false })"},
		mutant{file: "backend/nixl/rendezvous.go", why: "memory of an island stays mapped", tests: islandGPUs,
			old: "return between(m.isle.near.Device(), func() error { return m.near.Unmap(ctx) })", new: "return nil"},
		mutant{file: "backend/nixl/warm.go", why: "the library moves memory that is mapped", tests: islandGPUs,
			old: " || mapped && b.isle.number(peer) >= 0 {", new: " {"},
		mutant{file: "backend/nixl/isle.go", why: "what is read of GPUs is not looked at", tests: islandGPUs,
			old: "if !slices.Equal(got, want) {", new: "if len(got) != len(want) {"},
		mutant{file: "backend/nixl/isle.go", why: "one rank alone knows that it cannot map memory of GPUs", tests: islandGPUs,
			old: "err = i.group.Vote(ctx, \"reading each other's memory\", err)", new: "_ = i.group.Vote(ctx, \"reading each other's memory\", err)"},
		mutant{file: "backend/nixl/isle.go", why: "what an island holds is kept until the device is closed", tests: islandGPUs,
			old: "err = i.near.Close(ctx)", new: "err = nil"},
		mutant{file: "backend/nixl/allocation.go", why: "adopted memory of GPUs is never shared", tests: islandGPUs,
			old: "a.shares = k.Kind()", new: "_ = k"},
		mutant{file: "backend/nixl/flags_files_linux.go", why: "words that ranks share stay mapped or open", tests: islandGPUs,
			old: "err = errors.Join(err, failed, file.Close())", new: "err = errors.Join(err, failed)"},
		mutant{file: "backend/nixl/isle.go", why: "a rank alone rounds memory in its own way", tests: islandPlans,
			old: "max(b.granularity, l.Page)", new: "max(1, l.Page-l.Page)"},
		mutant{file: "backend/nixl/isle.go", why: "each rank decides for itself whether to share memory", tests: islandPlans,
			old: "func(l location) bool { return !l.Maps }); r >= 0 {", new: "func(l location) bool { return !l.Maps }); r == b.group.Rank() {"},
		mutant{file: "backend/nixl/flags_isle.go", why: "signals on an island go through the library", tests: islandPlans,
			old: "\tif !near {\n", new: "\tif !near || words != nil {\n"},
		mutant{file: "memory/signal.go", why: "signals do without symmetric memory where all ranks share it", tests: islandPlans,
			old: "return f, ok && !m.backend.Capabilities().PeerPointers", new: "return f, ok"},
		mutant{file: "memory/transfer.go", why: "transfers on an island go through the library", tests: islandPlans,
			old: "near = near && b.Window.near[peer]", new: "near = peer == m.group.Rank()"},
		mutant{file: "memory/send.go", why: "graphs put to freed memory of an island", tests: islandPlans,
			old: "\tif err := freedSides(n.sides); err != nil {\n\t\treturn nil, err\n\t}\n", new: ""},
	)
}
