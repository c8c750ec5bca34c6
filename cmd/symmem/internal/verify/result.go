package verify

import (
	"bytes"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/symmem/symmem/cmd/symmem/internal/terminal"
	"github.com/symmem/symmem/tests/suite"
)

// fail records that the run itself failed, as one more failed case.
func (b *BackendResult) fail(reason string) {
	b.Status, b.Reason = suite.Failed, reason
	b.Results = append(b.Results, suite.Result{Case: runFailure, Status: suite.Failed, Reason: reason})
}

// broken reports whether the run itself failed.
func (b *BackendResult) broken() bool {
	n := len(b.Results)
	return n > 0 && b.Results[n-1].Case == runFailure
}

// count sums up. A backend that cannot be used is one skipped case.
func (v *Verification) count() {
	var sum suite.Summary
	for _, b := range v.Backends {
		if b.Status == suite.Skipped {
			sum.Skipped++
		}
		for _, r := range b.Results {
			sum.Add(r)
		}
	}
	v.Summary = Summary{Passed: sum.Passed, Failed: sum.Failed, Skipped: sum.Skipped}
}

// write prints a row for each backend and group of cases, with why some were skipped, then what failed, then the line with the sums.
func (v *Verification) write(w io.Writer, paint terminal.Painter) error {
	var table bytes.Buffer
	t := tabwriter.NewWriter(&table, 0, 0, 2, ' ', 0)
	also := "" // so that nobody takes what was simulated for what a GPU did
	if v.Simulated {
		also = ", simulated"
	}
	fmt.Fprintln(t, "backend"+also+"\tcases\tpassed\tfailed\tskipped\ttime\twhy skipped")
	failed := []bool{false} // by line
	row := func(bad bool, format string, args ...any) {
		fmt.Fprintf(t, format+"\n", args...)
		failed = append(failed, bad)
	}
	for _, b := range v.Backends {
		if b.Status == suite.Skipped {
			row(false, "%s\tnone\t0\t0\t1\t\t%s", b.Name+also, terminal.OneLine(b.Reason))
			continue
		}
		for _, g := range b.groups() {
			why := append(g.reasons(), "")
			row(g.sum.Failed > 0, "%s\t%s\t%d\t%d\t%d\t%.1fs\t%s", b.Name+also, g.name, g.sum.Passed, g.sum.Failed, g.sum.Skipped, g.took.Seconds(), why[0])
			for _, more := range why[1:max(len(why)-1, 1)] {
				row(false, "%s\t\t\t\t\t\t%s", strings.TrimPrefix(also, ", "), more)
			}
		}
	}
	if err := t.Flush(); err != nil {
		return err
	}
	var out bytes.Buffer
	line := 0
	for text := range strings.Lines(table.String()) {
		text = strings.TrimRight(text, " \n")
		if failed[line] {
			text = paint.Bad(text)
		}
		fmt.Fprintln(&out, text)
		line++
	}
	for _, b := range v.Backends {
		for _, r := range b.Results {
			if r.Status == suite.Failed {
				fmt.Fprintf(&out, "\n%s %s: %s: %s\n", paint.Bad("failed:"), b.Name+also, r.Case, r.Reason)
			}
		}
	}
	sums := suite.Summary(v.Summary).String()
	if v.Simulated {
		sums += fmt.Sprintf(", simulated with seed %d", v.Seed)
		if v.Weak {
			sums += " and weak memory"
		}
	}
	if v.Summary.Failed > 0 {
		sums = paint.Bad(sums)
	} else {
		sums = paint.Good(sums)
	}
	fmt.Fprintf(&out, "\n%s\n", sums)
	_, err := out.WriteTo(w)
	return err
}

// groupResult sums up the cases of one group.
type groupResult struct {
	name    string
	sum     suite.Summary
	took    time.Duration
	skipped map[string]int // by reason
}

// groups returns the groups in the order in which they were run.
func (b *BackendResult) groups() []*groupResult {
	var all []*groupResult
	for _, r := range b.Results {
		name := suite.Case{Name: r.Case}.Group()
		i := slices.IndexFunc(all, func(g *groupResult) bool { return g.name == name })
		if i < 0 {
			i, all = len(all), append(all, &groupResult{name: name, skipped: map[string]int{}})
		}
		all[i].sum.Add(r)
		all[i].took += r.Took
		if r.Status == suite.Skipped {
			all[i].skipped[r.Reason]++
		}
	}
	return all
}

// reasons returns why cases were skipped, the most frequent reason first. If there are several, each has its number of cases.
func (g *groupResult) reasons() []string {
	reasons := slices.Sorted(maps.Keys(g.skipped))
	slices.SortStableFunc(reasons, func(a, b string) int { return g.skipped[b] - g.skipped[a] })
	for i, why := range reasons {
		reasons[i] = terminal.OneLine(why)
		if len(reasons) > 1 {
			reasons[i] = fmt.Sprintf("%d: %s", g.skipped[why], terminal.OneLine(why))
		}
	}
	return reasons
}
