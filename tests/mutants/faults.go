package main

// The mutants of what the sweeps of faults have found.
func init() {
	mutants = append(mutants,
		mutant{file: "backend/nccl/allreduce.go", why: "an error that NCCL reports on one rank is not told to the others", tests: []stage{{"backend/nccl", "TestAsyncErrorOfOneRank", usual}},
			old: "b.giveUpTogether(red, b.explain(err))", new: "b.giveUp(context.Background(), red, err)"},
		mutant{file: "group/listener.go", why: "the peer does not learn that a write has failed", tests: []stage{{"group", "TestFailedWrite", usual}},
			old: "_ = half.CloseWrite()", new: "_ = half"},
		mutant{file: "backend/native/multicast.go", why: "a rank that is late binds memory to an object without devices", tests: []stage{{"backend/native", "TestMulticastImportedLate", usual}},
			old: "\"adding devices to the multicast object\", err); err != nil {", new: "\"adding devices to the multicast object\", err); err != nil && h == 0 {"},
	)
}
