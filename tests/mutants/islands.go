package main

// Which ranks share memory, and what follows from it.
var (
	islandTests = []stage{{"group", "Island", usual}}
	islandPlans = []stage{{"memory", "OnIslands", usual}, {"backend/nixl", "Island", usual}}
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
		mutant{file: "backend/nixl/rendezvous.go", why: "adopted memory has addresses on an island", tests: islandPlans,
			old: "func(o offer) bool { return o.Adopted })", new: "func(o offer) bool { return false })"},
		mutant{file: "backend/nixl/isle.go", why: "a rank alone rounds memory in its own way", tests: islandPlans,
			old: "max(b.granularity, l.Page)", new: "max(1, l.Page-l.Page)"},
		mutant{file: "backend/nixl/isle.go", why: "each rank decides for itself whether to share memory", tests: islandPlans,
			old: "if slices.ContainsFunc(where, func(l location) bool { return !l.Maps }) {", new: "if !where[b.group.Rank()].Maps {"},
		mutant{file: "backend/nixl/flags_isle.go", why: "signals on an island go through the library", tests: islandPlans,
			old: "\tif !near {\n", new: "\tif !near || words != nil {\n"},
		mutant{file: "memory/signal.go", why: "signals do without symmetric memory where all ranks share it", tests: islandPlans,
			old: "return f, ok && !m.backend.Capabilities().PeerPointers", new: "return f, ok"},
		mutant{file: "memory/transfer.go", why: "transfers on an island go through the library", tests: islandPlans,
			old: "near = near && b.Window.near[peer]", new: "near = peer == m.group.Rank()"},
		mutant{file: "memory/send.go", why: "graphs put to freed memory of an island", tests: islandPlans,
			old: "\tif err := n.transfer.freed(); err != nil {\n\t\treturn nil, err\n\t}\n", new: ""},
	)
}
