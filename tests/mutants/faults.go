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
		mutant{file: "backend/native/multicast.go", why: "the creator's handle of a multicast object is tried to be released once", tests: []stage{{"backend/native", "TestContextFailsWhereMulticastIsMade", usual}},
			old: "\t\tc.undo.add(c.creation.run)", new: "\t\t_ = c.undo"},
		mutant{file: "backend/native/find.go", why: "a device that cannot be asked has no multicast", tests: []stage{{"backend/native", "TestContextFailsWhereMulticastIsMade", usual}},
			old: "\tif err := f.findMulticast(d, p, size); err != nil {\n\t\treturn nil, err\n\t}", new: "\tif err := f.findMulticast(d, p, size); err != nil {\n\t\tf.noMulticast = err.Error()\n\t}"},
		mutant{file: "backend/native/allocation.go", why: "memory is given back under a GPU that cannot be asked", tests: []stage{{"backend/native", "TestUnknownGPU", usual}},
			old: "!idle && !errors.Is(unknown, cuda.ErrContextLost)", new: "!idle && (unknown == nil || errors.Is(unknown, cuda.ErrContextLost))"},
		mutant{file: "backend/nvshmem/nvshmem.go", why: "a library that one rank could not finalize is no error", tests: []stage{{"backend/nvshmem", "TestContextFails", usual}},
			old: "\tif known || didNotCome(err) {\n", new: "\tif known || !didNotCome(err) {\n"},
		mutant{file: "collective/kernel.go", why: "a device that cannot be asked has room for small blocks only", tests: []stage{{"collective", "TestLimitFails", usual}},
			old: "if _, large := errors.AsType[*errs.ArgumentError](err); large && threads", new: "if errors.Is(err, errs.ErrInvalid) && threads"},
		mutant{file: "device/cuda/memory.go", why: "memory that could not be filled is lost", tests: []stage{{"device/cuda", "TestAllocFails", usual}},
			old: "\t\t\td.keep(retired{ptr: p})", new: "\t\t\t_ = p"},
		mutant{file: "memory/signal.go", why: "signal pads that were not made keep their workspace", tests: []stage{{"memory", "TestOneRankHasNoSignals", usual}},
			old: "\t\t\tpad.block.give(pad.span)", new: "\t\t\t_ = pad"},
	)
}
