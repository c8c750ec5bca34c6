package main

// Which ranks have a processor each, and so look for their peers before they sleep.
func init() {
	const shares, quotas, members = "internal/processors/processors.go", "internal/processors/processors_linux.go", "group/frames.go"
	own := []stage{{"internal/processors", ".", usual}}
	ranks := []stage{{"group", "BoundRanks|Oversubscribed|MemberOnTheWire", usual}}
	looks := []stage{{"internal/futex", "Patience|Looks", usual}}
	patient := []stage{{"memory", "Patience", usual}, {"collective", "Patience", usual}}
	mutants = append(mutants,
		mutant{file: shares, why: "nobody makes room", tests: own,
			old: "\t\tif s.place(s.taken[p]-1, asked) {", new: "\t\tif false {"},
		mutant{file: shares, why: "two ranks have one processor", tests: own,
			old: "\t\tif s.taken[p] == 0 {", new: "\t\tif true {"},
		mutant{file: shares, why: "ranks of one process are not counted", tests: with(own, ranks...),
			old: "inProcess[r.Process] > r.AtOnce || ", new: ""},
		mutant{file: shares, why: "quotas are rounded up", tests: own,
			old: "1000*inGroup[r.QuotaOf] > r.Quota", new: "1000*inGroup[r.QuotaOf] > r.Quota+999"},
		mutant{file: shares, why: "each rank has the quota for itself", tests: own,
			old: "1000*inGroup[r.QuotaOf] > r.Quota", new: "1000 > r.Quota"},
		mutant{file: shares, why: "empty bytes in a set are believed", tests: own,
			old: " || s.Set[len(s.Set)-1] == 0", new: ""},
		mutant{file: quotas, why: "the quotas of outer groups are not looked at", tests: own,
			old: "; at = path.Dir(at) {", new: "; at = \"\" {"},
		mutant{file: quotas, why: "a group outside of the namespace is looked for above it", tests: own,
			old: "strings.HasPrefix(at+\"/\", top+\"/\")", new: "at != \".\""},
		mutant{file: members, why: "what cannot be true of a rank's processors is believed", tests: ranks,
			old: "\t\t}.Checked(),", new: "\t\t},"},
		mutant{file: members, why: "a rank does not say which processors it may run on", tests: ranks,
			old: "Processors: []byte(m.share.Set), ", new: ""},
		mutant{file: "group/member.go", why: "ranks of other machines take processors here", tests: ranks,
			old: "\t\tif m.sameMachine(g.members[g.rank]) {\n\t\t\tranks", new: "\t\tif true {\n\t\t\tranks"},
		mutant{file: "internal/futex/word.go", why: "a rank with one processor sleeps at once", tests: looks,
			old: "\tif p == nil && (runtime", new: "\tif (runtime"},
		mutant{file: "internal/futex/word.go", why: "goroutines have no turn while another looks", tests: looks,
			old: "\t\truntime.Gosched()\n", new: ""},
		mutant{file: "memory/signal_host.go", why: "waits of ranks without a processor each are patient", tests: patient[:1],
			old: "\tif !m.oversubscribed {", new: "\tif true {"},
		mutant{file: "collective/host.go", why: "plans of ranks without a processor each are patient", tests: patient[1:],
			old: "\tif !p.memory.Oversubscribed() {", new: "\tif true {"},
	)
}
