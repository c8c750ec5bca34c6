package main

// Weak memory of simulated GPUs.
var weakTests = []stage{{"internal/simcuda", "TestWeak", usual}}

func init() {
	mutants = append(mutants,
		mutant{file: "internal/simcuda/schedule_linux.go", why: "an event orders nothing", tests: weakTests,
			old: "\t\t\tw.order = m.join(w.order, o.stamp.order)\n", new: ""},
		mutant{file: "internal/simcuda/schedule_linux.go", why: "a launch is not behind what the host was behind", tests: weakTests,
			old: "\tnow.Behind = behind\n", new: ""},
		mutant{file: "internal/simcuda/schedule_linux.go", why: "what a stream has copied is not before what comes next", tests: weakTests,
			old: "\t\t\ts.lane.vm.Follow(w.order)\n", new: ""},
		mutant{file: "internal/simcuda/schedule_linux.go", why: "a node of a graph is not behind those that it depends on", tests: weakTests,
			old: "\t\tw.order = m.join(w.order, r.orders[r.exec.number[dep]])\n", new: "\t\t_ = dep\n"},
		mutant{file: "internal/simcuda/schedule_linux.go", why: "a graph orders nothing behind itself", tests: weakTests,
			old: "\t\t\t\tw.order = m.join(w.order, last)\n", new: "\t\t\t\t_ = last\n"},
		mutant{file: "internal/simcuda/streams_linux.go", why: "the host is behind nothing that it has waited for", tests: weakTests,
			old: "\t\t\t\tm.tell(s.lane.vm.Order())\n", new: ""},
		mutant{file: "internal/ptxvm/order.go", why: "a copy does not look at what kernels have stored", tests: weakTests,
			old: "\tif r.words != nil {\n\t\te.size = 8\n", new: "\tif r.words != nil && false {\n\t\te.size = 8\n"},
		mutant{file: "internal/ptxvm/order.go", why: "a kernel does not see what a copy has accessed", tests: weakTests,
			old: "\t\tcase off < x.low || off >= x.high:\n", new: "\t\tcase true:\n"},
		mutant{file: "internal/ptxvm/machine.go", why: "all is ordered when the GPUs are idle", tests: weakTests,
			old: "if idle && !m.config.Keep {", new: "if idle {"},
	)
}
