package main

// One rendezvous service for many jobs.
var jobTests = []stage{{"group", "TestServeJobs", long}}

func init() {
	mutants = append(mutants,
		mutant{file: "group/jobs.go", why: "ranks that are told of no service are let in", tests: jobTests, old: "case !h.GetServed():", new: "case false:"},
		mutant{file: "group/jobs.go", why: "an earlier attempt begins beside a later one", tests: jobTests, old: "other.restart > n.restart", new: "false"},
		mutant{file: "group/jobs.go", why: "there may be any number of jobs", tests: jobTests, old: "case len(j.there) >= j.options.bounds().jobs:", new: "case false:"},
		mutant{file: "group/jobs.go", why: "jobs may have any number of ranks", tests: jobTests, old: "ranks > most", new: "false"},
		mutant{file: "group/jobs.go", why: "a job that nobody was let into stays", tests: jobTests, old: "return one.streams > 0", new: "return true"},
		mutant{file: "group/jobs.go", why: "a service that was started again ends with the first job that is over", tests: jobTests, old: "!time.Now().Before(j.earliest)", new: "true"},
		mutant{file: "group/jobs.go", why: "a service ends though it is to stay", tests: jobTests, old: "ended = j.close(!o.Stay)", new: "ended = j.close(true)"},
		mutant{file: "group/jobs.go", why: "a service ends with the first job that is over", tests: jobTests, old: "j.begun && len(j.there) == 0 &&", new: "j.begun &&"},
		mutant{file: "group/jobs.go", why: "streams of ranks outlive their job", tests: jobTests, old: "		s.close(j.ctx)\n", new: "		s.end()\n"},
		mutant{file: "group/jobs.go", why: "nobody is missing in a job that is cut short", tests: jobTests, old: "if !came && j.ctx.Err() != nil {", new: "if j.ctx.Err() != nil {"},
		mutant{file: "group/jobs.go", why: "a store that is not there when the context ends is a failure", tests: jobTests, old: "if !came && j.ctx.Err() != nil {", new: "if false {"},
		mutant{file: "group/jobs.go", why: "each failure of a job counts", tests: jobTests, old: "case again || len(j.failed)", new: "case again && false || len(j.failed)"},
		mutant{file: "group/service.go", why: "a job that is over keeps its number of ranks for a moment", tests: jobTests,
			old: "s.many && (len(present)+len(absent) == 0 || len(absent) == o.WorldSize)", new: "s.many && len(present) < 0 && len(absent) < 0"},
		mutant{file: "group/service.go", why: "who comes to be told that he has left waits", tests: jobTests, old: "before == rankLeft && !h.GetAgain()", new: "before == rankLeft"},
	)
}
