package verify

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/cmd/symmem/internal/terminal"
	"github.com/symmem/symmem/tests/suite"
)

// TestTable: every skip has its reason, that of most cases first, and every failure its text.
func TestTable(t *testing.T) {
	skipped := func(name, why string) suite.Result {
		return suite.Result{Case: name, Status: suite.Skipped, Reason: why}
	}
	v := Verification{Ranks: 2, Backends: []BackendResult{
		{Name: "gone", Status: suite.Skipped, Reason: "it is not here;\n  install it"},
		{Name: "host", Status: suite.Failed, Results: []suite.Result{
			{Case: "adopt/one", Status: suite.Passed, Took: 250 * time.Millisecond},
			skipped("adopt/two", "no adoption"), skipped("adopt/three", "no adoption"),
			{Case: "reduce/one", Status: suite.Failed, Reason: "2 is not 3"},
			skipped("reduce/two", "rare"), skipped("reduce/three", "often"), skipped("reduce/four", "often"),
			{Case: "put/one", Status: suite.Passed},
		}},
	}}
	v.count()
	assert.Equal(t, Summary{Passed: 2, Failed: 1, Skipped: 6}, v.Summary)
	var out strings.Builder
	require.NoError(t, v.write(&out, terminal.Painter{}))
	var lines []string
	for line := range strings.Lines(out.String()) {
		lines = append(lines, terminal.OneLine(line))
	}
	assert.Equal(t, []string{
		"backend cases passed failed skipped time why skipped",
		"gone none 0 0 1 it is not here; install it",
		"host adopt 1 0 2 0.2s no adoption",
		"host reduce 0 1 3 0.0s 2: often",
		"1: rare",
		"host put 1 0 0 0.0s",
		"",
		"failed: host: reduce/one: 2 is not 3",
		"",
		"2 passed, 1 failed, 6 skipped",
	}, lines)
	assert.NotContains(t, out.String(), "\x1b")
}
