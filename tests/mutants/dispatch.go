package main

// All-to-all with counts by transfers, and what steps of the CPU copy and put that find out what in the run.
func init() {
	suites := []stage{{"backend/nixl", "SuiteOnGPUs/.*/3", usual}}
	counts := []stage{{"backend/nixl", "AllToAllV", usual}}
	copies := []stage{{"collective", "ComputedCopies", usual}}
	made := []stage{{"kernels", "RunsAllocateNothing", usual}}
	buffers := []stage{{"device/cuda", "HostBuffer|WorkStream", usual}}
	const file, steps = "kernels/all_to_all_v.go", "collective/copy_computed.go"
	mutants = append(mutants,
		mutant{file: file, why: "the counts of others are those of an earlier run", tests: suites,
			old: "return look, nil })", new: "return look[1:], nil })"},
		mutant{file: file, why: "this rank's own counts are those of an earlier run", tests: suites,
			old: "return look, nil })", new: "return look[:1], nil })"},
		mutant{file: file, why: "counts are looked at that have not come", tests: suites,
			old: "\t\t\tb.Send(signalCounts, puts...)\n\t\t\tb.Wait(signalCounts)\n\t\t}\n\t\tlook", new: "\t\t\tb.Send(signalCounts, puts...)\n\t\t\tdefer b.Wait(signalCounts)\n\t\t}\n\t\tlook"},
		mutant{file: file, why: "a run ends before its rows have come", tests: suites,
			old: "run.putRows)\n\t\t\tb.Finish(signalRows)", new: "run.putRows)\n\t\t\tb.Finish(signalCounts)"},
		mutant{file: file, why: "rows are put that do not fit", tests: suites,
			old: "\t\tif all > room {", new: "\t\tif all > room+1 {"},
		mutant{file: file, why: "a rank's own rows go to the beginning", tests: suites,
			old: "{Dst: x.out.Ptr().Add(x.behind[rank][rank] * width)", new: "{Dst: x.out.Ptr()"},
		mutant{file: file, why: "the whole input is put to everybody who gets something", tests: counts,
			old: "if n := x.rows[rank][q] * width; n > 0 {\n\t\t\tx.puts", new: "if n := x.rows[rank][q] * width; n > 0 {\n\t\t\tn = min(n*2, x.in.Bytes()-x.from[rank][q]*width)\n\t\t\tx.puts"},
		mutant{file: steps, why: "a graph of a closed plan finds out what to copy", tests: copies,
			old: "\tif err := p.released(); err != nil {\n\t\treturn nil, err\n\t}\n", new: ""},
		mutant{file: steps, why: "a step that has failed lets the peers go on", tests: copies,
			old: "\t\tf.run = c.work.signals.FailByWork(c.by, err)\n", new: ""},
		mutant{file: steps, why: "signals go on behind copies that are left out", tests: []stage{{"collective", "CopiesOfARunInPart", usual}},
			old: "return &copyFailed{run: c.work.signals.FailByWork(c.by, err)}, nil // told", new: "return &copyFailed{}, nil // told"},
		mutant{file: steps, why: "a panic of a step goes on to the stream alone", tests: copies,
			old: "if v := recover(); v != nil { // signals", new: "if v := error(nil); v != nil { // signals"},
		mutant{file: "memory/work_copies.go", why: "kernels signal behind work that has failed", tests: copies,
			old: "if !ok || by == nil ||", new: "if true || !ok || by == nil ||"},
		mutant{file: "memory/work_copies.go", why: "copies count as ended when they are enqueued", tests: with(copies, suites...),
			old: "\tended, err := c.ended.Query()\n", new: "\tended, err := true, error(nil)\n"},
		mutant{file: "memory/signal_device.go", why: "what has failed on the host is told as a wait in vain", tests: copies,
			old: "f.Why == 0 && why != nil", new: "f.Why == 0 && why == errs.ErrInvalid"},
		mutant{file: "memory/send_computed.go", why: "a send whose puts cannot be found out signals all the same", tests: copies,
			old: "\t\t\twork.kill = func() device.HostProgress { return p.killBy(by) }\n", new: "\t\t\twork.kill = func() device.HostProgress { return nothing{} }\n"},
		mutant{file: "memory/send_computed.go", why: "a panic of what computes puts is not waited for", tests: copies,
			old: "\tif w.kill != nil {\n\t\tdefer func", new: "\tif false {\n\t\tdefer func"},
		mutant{file: file, why: "what goes where is made anew in each run", tests: made,
			old: "\t\t\twrong := a.settle(p)\n", new: "\t\t\tp = newPlaces(size, a.counts.NumElements())\n\t\t\twrong := a.settle(p)\n"},
		mutant{file: "memory/signal_flags.go", why: "waits by flags that have ended are not used again", tests: made,
			old: "\t\tf.awaits.give(r)\n", new: ""},
		mutant{file: "device/cuda/hostwork.go", why: "the places of work that has ended are not used again", tests: made,
			old: "\t\tl.jobs, l.next = l.jobs[:0], 0\n", new: "\t\tl.jobs, l.next = nil, 0\n"},
		mutant{file: "memory/send_computed.go", why: "one peer gets two puts of a run", tests: []stage{{"collective", "ComputedSendFails", usual}},
			old: "\tif c.taken[put.Peer] {\n", new: "\tif false {\n"},
		mutant{file: "memory/send_computed.go", why: "what a run does not put again is put again", tests: suites,
			old: "\tclear(c.taken)\n", new: ""},
		mutant{file: "device/cuda/buffer.go", why: "a buffer is freed while streams may use it", tests: buffers,
			old: "\treturn b.destroy(d.retire)", new: "\treturn b.destroy(d.give)"},
		mutant{file: "device/cuda/stream.go", why: "what work of the CPU enqueues may wait in a queue behind what waits for the work", tests: buffers,
			old: "\tif urgent {\n", new: "\tif false && urgent {\n"},
	)
}
