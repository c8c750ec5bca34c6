// Package chaos attacks one rank of a running job, in real processes: its system calls fail, it may have no more files, it is killed or
// stopped, at any place from joining to closing. Every rank must end soon, with an error that names what failed and whose it was, the
// same for all that were told of it, and hold nothing any more; or it succeeds.
//
// What befalls whom comes from a seed, which is printed. -chaos.seed gives another one, -chaos.time how long to go on, and -chaos.only the
// number of the one thing to do again.
package chaos

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"
	"text/tabwriter"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/symmem/symmem/internal/testneed"
)

var (
	seed   = flag.Uint64("chaos.seed", 1, "what befalls whom")
	budget = flag.Duration("chaos.time", 4*time.Second, "how long all tests of this package go on, about")
	only   = flag.Int("chaos.only", 0, "do only the attack of this number")
)

func TestMain(m *testing.M) {
	if os.Getenv(workerVariable) != "" {
		os.Exit(work())
	}
	flag.Parse()
	goleak.VerifyTestMain(m)

}

// The kinds of attacks, which the random numbers depend on.
const (
	failures uint64 = 1 + iota
	limits
	kills
	pauses
)

// worldSize is the number of ranks: some that were attacked, some that look on.
const worldSize = 3

// requireTraps skips the test where system calls cannot be trapped; with chaos in SYMMEM_TEST_REQUIRE that is a failure.
func requireTraps(t *testing.T) {
	t.Helper()
	if err := trappable(); err != nil {
		testneed.Missing(t, "chaos", fmt.Sprintf("system calls cannot be trapped here: %v", err))
	}
}

// TestSystemCalls lets system calls fail.
func TestSystemCalls(t *testing.T) {
	requireTraps(t)
	attack(t, failures, failingCall)
}

// TestFewFiles limits the open files to 8 to 200.
func TestFewFiles(t *testing.T) { attack(t, limits, fewFiles) }

// TestKills kills a rank.
func TestKills(t *testing.T) {
	requireTraps(t)
	attack(t, kills, killed)
}

// TestPauses stops a rank for 0.5 to 4 s, after which all goes on.
func TestPauses(t *testing.T) {
	requireTraps(t)
	attack(t, pauses, stopped)
}

// attack makes faults and lets them happen, until the test's share of the time is over, at least one.
func attack(t *testing.T, kind uint64, make func(r *rand.Rand, size int) *fault) {
	t.Logf("-chaos.seed=%d", *seed)
	var text strings.Builder
	table := tabwriter.NewWriter(&text, 0, 0, 2, ' ', 0)
	began := time.Now()
	for i := 1; time.Since(began) < *budget/time.Duration(pauses) || i == 1 || i <= *only; i++ {
		f := make(attackRand(*seed, kind, i), worldSize)
		if *only > 0 && i != *only {
			continue
		}
		started := time.Now()
		world, err := runWorld(worldSize, f)
		require.NoError(t, err)
		wrong := f.judge(world)
		fmt.Fprintf(table, "%d\t%v\t%s\t%v\n", i, f, outcome(world, wrong), time.Since(started).Round(10*time.Millisecond))
		for _, w := range wrong {
			t.Errorf("attack %d, %v: %s", i, f, w)
		}
		if *only > 0 {
			break
		}
	}
	require.NoError(t, table.Flush())
	t.Logf("seed %d:\n%s", *seed, text.String())
}

// outcome sums up how a world has ended.
func outcome(world []*worker, wrong []string) string {
	if len(wrong) > 0 {
		return "WRONG"
	}
	var ends []string
	for _, w := range world {
		end := "-"
		switch {
		case w.last == nil:
		case w.last.Error == "":
			end = "ok"
		default:
			end = w.last.In
			if len(w.last.Conditions) > 0 {
				end += " (" + strings.Join(w.last.Conditions, ", ") + ")"
			}
		}
		ends = append(ends, end)
	}
	if slices.Equal(ends, slices.Repeat([]string{ends[0]}, len(ends))) {
		return "all: " + ends[0]
	}
	return strings.Join(ends, " | ")
}
