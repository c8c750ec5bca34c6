package chaos

import (
	"cmp"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/symmem/symmem/backend/backendtest"
)

// every returns all calls that can be trapped and may fail.
func every() []*call {
	var all []*call
	for _, list := range [][]call{calls, further} {
		for i := range list {
			all = append(all, &list[i])
		}
	}
	return all
}

// keeps are the calls that give something back: what they fail for stays.
var keeps = []string{"munmap", "close(memfd)", "close(socket)"}

// TestEverySystemCall lets each system call go wrong that a rank makes from joining to closing, one in each case: it fails, once or from then on,
// hangs until the others have given up, or is the last thing that its rank does. Then those that are left do the job once more.
//
// By default each sort of call fails once, and some hang or kill. With SYMMEM_TEST_FAULTS=full every call fails with one of its errors, in turn, once
// and from then on, hangs, and kills. Of the reads and writes of sockets, which are hundreds on one connection, how many depends on time: the first
// eight fail, those after each stage of the job, and one in 16, and one in 64 does the rest. With SYMMEM_TEST_FAULTS=all all of them do all, and all
// calls fail once with each error. The table is logged, and written to the file that SYMMEM_TEST_TABLE names, behind what that has.
func TestEverySystemCall(t *testing.T) {
	requireTraps(t)
	all := os.Getenv("SYMMEM_TEST_FAULTS") == "all"
	full := all || os.Getenv("SYMMEM_TEST_FAULTS") == "full"
	var cases []*fault
	for victim := range 2 { // the one that serves, and one that does not
		f := &fault{victim: victim, counted: map[string]int{}, again: true}
		world, err := runWorld(worldSize, f)
		require.NoError(t, err)
		for _, w := range world {
			require.NoError(t, w.watched)
			require.NotNil(t, w.last, "rank %d: %s", w.rank, w.noise.String())
			require.Empty(t, w.last.Error)
			require.NotNil(t, w.again)
			require.Empty(t, w.again.Error)
			require.Empty(t, w.left)
		}
		cases = append(cases, sweep(f.counted, victim, full, all)...)
		cases = append(cases, broken(victim, full)...)
	}
	require.NotEmpty(t, cases)
	var table backendtest.FaultTable
	t.Cleanup(func() { table.Print(t) })
	for _, f := range cases {
		t.Run(f.name(), func(t *testing.T) {
			t.Parallel() // most of a case is waiting
			world, err := runWorld(worldSize, f)
			require.NoError(t, err)
			wrong := f.judgeSweep(world)
			for _, w := range wrong {
				t.Error(w)
			}
			table.Add(f.call.name, f.what(), f.outcome(world, wrong))
			for _, w := range world {
				if w.last != nil && f.stage != "" {
					t.Logf("rank %d after %v, in %s: %s", w.rank, w.took.Round(time.Millisecond), w.last.In, cmp.Or(w.last.Error, "no error"))
				}
			}
		})
	}
}

// sweep makes the cases of the calls that a rank has made.
func sweep(counted map[string]int, victim int, full, all bool) []*fault {
	var cases []*fault
	for i, c := range every() {
		if len(c.errnos) == 0 {
			continue
		}
		for nth := 1; nth <= counted[c.name]; nth++ {
			if !full && (nth > 1 || i%2 != victim) {
				continue
			}
			one := func(f *fault) {
				f.victim, f.call, f.count, f.again = victim, c, nth, true
				cases = append(cases, f)
			}
			many := full && !all && (c.name == "read(socket)" || c.name == "write(socket)")
			if many && nth > 8 && nth%16 != 1 {
				continue
			}
			once := c.errnos[(nth-1+nth/16+victim)%len(c.errnos)]
			on := c.errnos[nth%len(c.errnos)]
			for _, errno := range c.errnos {
				if all || errno == once {
					one(&fault{errno: errno})
				}
			}
			if many && nth%64 != 1 {
				continue
			}
			// Package net asks again for as long as ECONNABORTED comes; and it does without some of what getsockname says.
			if (full || c.name == "getsockname") && on != unix.ECONNABORTED {
				one(&fault{errno: on, on: true})
			}
			if !full && i%12 > 1 {
				continue
			}
			one(&fault{kill: true})
			if !c.raw {
				one(&fault{hang: true})
			}
		}
	}
	return cases
}

// broken makes the cases of a connection that breaks between joining and closing: a write to one of the victim's sockets fails with EPIPE after it has
// come to a stage. Whatever it wrote, a rank is lost, and nobody may wait for it without a bound.
func broken(victim int, full bool) []*fault {
	var cases []*fault
	all := every()
	write := all[slices.IndexFunc(all, func(c *call) bool { return c.name == "write(socket)" })]
	for _, stage := range stages {
		for nth := 1; nth <= 3 && stage != "join"; nth++ { // those of joining are the first that sweep has
			if full || stage == "rendezvous" && nth == 1 {
				cases = append(cases, &fault{victim: victim, call: write, count: nth, stage: stage, errno: unix.EPIPE, again: true})
			}
		}
	}
	return cases
}

// what names the fault.
func (f *fault) what() string {
	switch {
	case f.kill:
		return "kills"
	case f.hang:
		return "hangs"
	case f.on:
		return unix.ErrnoName(f.errno) + " from then on"
	case f.stage != "":
		return unix.ErrnoName(f.errno) + " at " + f.stage
	}
	return unix.ErrnoName(f.errno)
}

// name is that of the case's test.
func (f *fault) name() string {
	return fmt.Sprintf("rank=%d/%s/%d/%s", f.victim, f.call.name, f.count, strings.ReplaceAll(f.what(), " ", "_"))
}

// judgeSweep says what is wrong with how a world has ended that was to do its job twice.
func (f *fault) judgeSweep(world []*worker) []string {
	if f.errno != 0 && slices.Contains(keeps, f.call.name) {
		for _, w := range world {
			w.left = "" // of what the call did not give back
		}
	}
	wrong := f.judge(world)
	for _, w := range world {
		switch {
		case w.rank == f.victim && f.kill:
		case w.again == nil:
			wrong = append(wrong, fmt.Sprintf("rank %d has not done the job again: %v; it wrote: %s", w.rank, w.err, w.noise.String()))
		case w.again.Error != "":
			wrong = append(wrong, fmt.Sprintf("rank %d, the second time, in %s: %s", w.rank, w.again.In, w.again.Error))
		case w.again.Goroutines > 0:
			wrong = append(wrong, fmt.Sprintf("rank %d has left %d goroutines behind the second time", w.rank, w.again.Goroutines))
		}
	}
	if len(wrong) > 0 {
		for _, w := range world {
			if w.last != nil {
				wrong = append(wrong, fmt.Sprintf("  rank %d had, in %s: %s", w.rank, w.last.In, cmp.Or(w.last.Error, "no error")))
			}
		}
	}
	return wrong
}

// judgeHang: whoever has given up says for whom it has waited.
func (f *fault) judgeHang(world []*worker, complain func(string, ...any)) {
	for _, w := range world {
		e := w.last
		if w.rank == f.victim || e.Error == "" {
			continue
		}
		// When one of rank 0's connections hangs, to another rank, it is that rank which does not come.
		serving := f.victim == 0 && f.connection() && len(e.Names) > 0
		if !serving && !slices.Contains(e.Names, f.victim) && !(f.victim == 0 && (e.Connect || strings.Contains(e.Error, "rendezvous service"))) &&
			!strings.Contains(e.Error, fmt.Sprintf("rank %d", f.victim)) {
			complain("rank %d does not name rank %d, in %s: %s", w.rank, f.victim, e.In, e.Error)
		}
		if !slices.Contains(e.Conditions, "gave up") && !slices.Contains(e.Conditions, "deadline") && !slices.Contains(e.Conditions, "peer lost") &&
			!strings.Contains(e.Error, "deadline passed") && !strings.Contains(e.Error, "deadline exceeded") {
			complain("rank %d: the error is not of the deadline, in %s: %s", w.rank, e.In, e.Error)
		}
	}
}

// outcome says how a world has ended, given what is wrong with it.
func (f *fault) outcome(world []*worker, wrong []string) string {
	failed := 0
	for _, w := range world {
		if w.last != nil && w.last.Error != "" && (w.rank != f.victim || !f.kill) {
			failed++
		}
	}
	switch {
	case len(wrong) > 0:
		return backendtest.FaultWrong
	case !f.struck:
		return "not reached"
	case f.kill && failed == 0:
		return "nobody needs the rank any more"
	case f.kill:
		return "lost, and the others go on"
	case f.hang && failed == 0:
		return "goes on late"
	case failed == 0:
		return "no error: it is done without, or again"
	case failed == len(world):
		return "error on all ranks"
	}
	return "error on some ranks: the others were done"
}
