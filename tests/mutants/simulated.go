package main

// Simulated libraries and multicast between simulated processes, and backends on them.
var (
	sharedCasts    = []stage{{"internal/simcuda", "Another|GivenUp|Slots|NotBound", usual}}
	libraryTests   = []stage{{"internal/simlib", ".", usual}}
	simulatedNCCL  = []stage{{"tests", "TestMatrix/backend=simulated_nccl/world=[23]", long}}
	simulatedHeaps = []stage{{"tests", "TestMatrix/backend=simulated_nvshmem/world=[23]", long}}
)

func init() {
	mutants = append(mutants,
		mutant{file: "internal/simcuda/schedule_linux.go", why: "kernels do not find what other processes bind", tests: sharedCasts,
			old: "\tfor _, c := range m.shared {\n\t\tc.look()\n\t}\n", new: ""},
		mutant{file: "internal/simcuda/multicast_linux.go", why: "binding does not wait for the GPUs of others", tests: sharedCasts,
			old: "int(c.head.added.Load()) < c.devices; pause", new: "int(c.head.added.Load()) < 1; pause"},
		mutant{file: "internal/simcuda/multicast_linux.go", why: "an object comes back from a descriptor that nobody holds", tests: sharedCasts,
			old: "if c.head.holders.Add(1) == 1 {", new: "if c.head.holders.Add(1) == 0 {"},
		mutant{file: "internal/simcuda/multicast_linux.go", why: "a GPU binds twice", tests: sharedCasts,
			old: "if state%slotNext != slotFree || !s.state", new: "if !s.state"},
		mutant{file: "internal/simlib/nccl_linux.go", why: "memory is freed that is a window", tests: libraryTests,
			old: "\t\tif w.base == at {", new: "\t\tif w.base == 0 {"},
		mutant{file: "internal/simlib/stream_linux.go", why: "an aborted collective waits", tests: libraryTests,
			old: "\tif w.aborted[c.rank] {\n\t\treturn true, nil\n\t}\n", new: ""},
		mutant{file: "device/cuda/device.go", why: "memory is freed under a copy whose call has failed",
			tests: []stage{{"device/cuda", "FailedCopies", usual}},
			old:   "d.lane.drain(ctx)", new: "error(nil)"},
		mutant{file: "device/cuda/lane.go", why: "a lane whose stream cannot be asked counts as idle",
			tests: []stage{{"device/cuda", "FailedCopies", usual}},
			old:   "\t\t\tif err != nil {\n\t\t\t\treturn err\n\t\t\t}\n\t\t}\n\t\tif err := ctx.Err()", new: "\t\t\tif err != nil {\n\t\t\t\treturn nil\n\t\t\t}\n\t\t}\n\t\tif err := ctx.Err()"},
		mutant{file: "group/sockets_linux.go", why: "silent connections are not ended", tests: []stage{{"group", "SilentConnections", usual}},
			old: "			c.endSilent()\n", new: ""},
		mutant{file: "group/sockets_linux.go", why: "what a connection has brought is lost when it is ended", tests: []stage{{"group", "EndedAfterTheMessage", usual}},
			old: "if err := conn.CloseRead(); err", new: "if err := conn.Close(); err"},
		mutant{file: "group/sockets_linux.go", why: "a file whose connection was ended is not sent again", tests: []stage{{"group", "SilentConnections", usual}},
			old: "case try == fileTries:", new: "case try > 0 || try == fileTries:"},
		mutant{file: "group/islands.go", why: "a rank that has not heard which islands there are looks again alone", tests: []stage{{"group", "IslandsHeardBySome", usual}},
			old: "asked := g.asked.Load(); asked != 0 {", new: "asked := g.asked.Load(); asked != 0 && false {"},
		mutant{file: "internal/nccl/comm.go", why: "a communicator counts as ended where NCCL was not called", tests: []stage{{"internal/nccl", "CannotBeEnded", usual}},
			old: "			if called {\n", new: "			if called || !called {\n"},
		mutant{file: "group/sockets_linux.go", why: "an exchange does not hear that its file is lost", tests: []stage{{"group", "ConnectionIsLost", usual}},
			old: "if !stillQueued(err) {", new: "if false {"},
		mutant{file: "group/listener.go", why: "a service does not note why it takes no connection", tests: []stage{{"group", "ConnectionsThatAreLost", usual}},
			old: "\t\tl.noteFailure(err)\n", new: ""},
		mutant{file: "backend/nccl/rendezvous.go", why: "a window goes before it is used", tests: simulatedNCCL,
			old: "return wholeMapping{m}, nil", new: "return wholeMapping{m}, b.deregister(ctx, w)"},
		mutant{file: "backend/nccl/rendezvous.go", why: "windows stay registered", tests: simulatedNCCL,
			old: "errors.Join(b.forget(ctx, base), b.deregister(ctx, w, base))", new: "b.forget(ctx, base)"},
		mutant{file: "backend/nvshmem/rendezvous.go", why: "a rank of a sub-group is taken for the PE of its number", tests: simulatedHeaps,
			old: "b.world.at(b.pes[r], base+all[r].Offset)", new: "b.world.at(r, base+all[r].Offset)"},
	)
}
