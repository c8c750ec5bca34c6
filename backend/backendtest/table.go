package backendtest

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"text/tabwriter"

	"github.com/stretchr/testify/require"
)

// FaultWrong is the outcome of a case that did not end as it should have.
const FaultWrong = "WRONG"

// FaultTable counts how cases in which a call goes wrong have ended, by call and fault. It is safe for use by several goroutines.
type FaultTable struct {
	mu       sync.Mutex
	outcomes map[string]int
	excused  map[string]int
}

// Add counts a case. What was not as it should be, and is so for a reason that somebody has given, is in excused, as "what: why"; such a case counts
// as one that is as it should be, and the table has the reasons.
func (t *FaultTable) Add(call, fault, outcome string, excused ...string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.outcomes == nil {
		t.outcomes, t.excused = map[string]int{}, map[string]int{}
	}
	t.outcomes[strings.Join([]string{call, fault, outcome}, "\t")]++
	for _, why := range excused {
		t.excused[call+"\t"+why]++
	}
}

// Print logs the table, with how many of the cases are as they should be, and writes it to the file that SYMMEM_TEST_TABLE names, behind what that has.
func (t *FaultTable) Print(tb testing.TB) {
	tb.Helper()
	text := t.text(tb.Name())
	tb.Logf("\n%s", text)
	path := os.Getenv("SYMMEM_TEST_TABLE")
	if path == "" {
		return
	}
	file, err := os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	require.NoError(tb, err)
	_, err = file.WriteString(text + "\n")
	require.NoError(tb, errors.Join(err, file.Close()))
}

func (t *FaultTable) text(name string) string {
	t.mu.Lock()
	defer t.mu.Unlock()
	var text strings.Builder
	w := tabwriter.NewWriter(&text, 0, 0, 2, ' ', 0)
	total, wrong, excused := 0, 0, 0
	fmt.Fprintf(w, "call\tfault\toutcome\tcases\n")
	for _, key := range slices.Sorted(maps.Keys(t.outcomes)) {
		n := t.outcomes[key]
		fmt.Fprintf(w, "%s\t%d\n", key, n)
		if total += n; strings.HasSuffix(key, "\t"+FaultWrong) {
			wrong += n
		}
	}
	_ = w.Flush()
	if len(t.excused) > 0 {
		fmt.Fprintf(w, "\ncall\texception\tcases\n")
	}
	for _, key := range slices.Sorted(maps.Keys(t.excused)) {
		n := t.excused[key]
		fmt.Fprintf(w, "%s\t%d\n", key, n)
		excused += n
	}
	_ = w.Flush()
	fmt.Fprintf(&text, "%s: %d of %d cases are as they should be", name, total-wrong, total)
	if excused > 0 {
		fmt.Fprintf(&text, ", %d times by an exception", excused)
	}
	return text.String() + "\n"
}
