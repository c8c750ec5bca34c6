package tests

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/tests/suite"
)

// TestChosenCases chooses cases by -run and -skip: the ranks run those and no others, whether they are goroutines or processes.
func TestChosenCases(t *testing.T) {
	self, err := os.Executable()
	require.NoError(t, err)
	for _, ranks := range []string{"goroutines", "processes"} {
		c := exec.CommandContext(t.Context(), self, "-test.v", "-test.run", "^TestMatrix$/^backend=host$/^world=2$/^"+ranks+"$/^transfer$/^(ring_put|ring_get|put_get)$/^17$",
			"-test.skip", "/////^ring_get$")
		c.Env = append(os.Environ(), matrixVariable+"=full")
		out, err := c.CombinedOutput()
		require.NoError(t, err, string(out))
		var ran []string
		for line := range strings.Lines(string(out)) {
			if name, ok := strings.CutPrefix(strings.TrimSpace(line), "=== RUN   TestMatrix/backend=host/world=2/"+ranks+"/"); ok {
				ran = append(ran, name)
			}
		}
		assert.Equal(t, []string{"transfer/ring_put", "transfer/put_get/17"}, ran)
		assert.Contains(t, string(out), "2 passed, 0 failed, 0 skipped", "what the ranks have run")
	}
}

func init() { jobs["pretended"] = pretendedJob }

// pretendVariable makes TestResults run the suite of pretendedJob.
const pretendVariable = "SYMMEM_TEST_PRETEND"

// pretendedJob runs no case, and tells of each what its name says here.
func pretendedJob(_ context.Context, _ config.Config, _ string, say func(any)) error {
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		res := suite.Result{Case: lines.Text(), Status: suite.Passed}
		switch lines.Text() {
		case "transfer/ring_put":
			fmt.Fprintln(os.Stderr, "a word of the case that fails")
			res.Status, res.Reason = suite.Failed, "rank 1: it is broken"
		case "transfer/ring_get":
			res.Status, res.Missing, res.Reason = suite.Skipped, "graphs", "there are no graphs"
		case "transfer/all_to_all":
			res.Status, res.Missing, res.Reason = suite.Skipped, suite.MoreRanks, "needs 9 ranks"
		case "transfer/prepared_read":
			res.Case = "transfer/prepared_write"
		case "transfer/states":
			fmt.Fprintln(os.Stderr, "a last word")
			os.Exit(3)
		}
		say(res)
	}
	return lines.Err()
}

// TestResults: what the ranks say of a case is the result of its sub-test, with what they wrote meanwhile.
func TestResults(t *testing.T) {
	if os.Getenv(pretendVariable) != "" {
		runSuite(t, nil, "host", 2, 1, "pretended")
		return
	}
	self, err := os.Executable()
	require.NoError(t, err)
	for _, required := range []string{"", "host"} {
		c := exec.CommandContext(t.Context(), self, "-test.v", "-test.run", "^TestResults$/^transfer$")
		c.Env = append(os.Environ(), pretendVariable+"=1", "SYMMEM_TEST_REQUIRE="+required)
		text, err := c.CombinedOutput()
		require.Error(t, err, string(text))
		out := string(text)
		// Of a case: what is between its start and its end.
		of := func(name string) string {
			_, rest, found := strings.Cut(out, "=== RUN   TestResults/transfer/"+name+"\n")
			require.Truef(t, found, "%s is not in: %s", name, out)
			text, _, _ := strings.Cut(rest, "=== RUN")
			return text
		}
		skip := "--- SKIP: TestResults/transfer/ring_get"
		if required != "" {
			skip = "--- FAIL: TestResults/transfer/ring_get"
			assert.Contains(t, of("ring_get"), "has no graphs on this machine")
		}
		assert.Contains(t, out, skip)
		assert.Contains(t, of("ring_get"), "there are no graphs")
		assert.Contains(t, out, "--- FAIL: TestResults/transfer/ring_put")
		assert.Contains(t, of("ring_put"), "rank 1: it is broken")
		assert.Contains(t, of("ring_put"), "a word of the case that fails")
		assert.Contains(t, out, "--- SKIP: TestResults/transfer/all_to_all", "for want of ranks, which no machine has more of")
		assert.Contains(t, of("all_to_all"), "needs 9 ranks")
		assert.Contains(t, out, "--- PASS: TestResults/transfer/prepared_write")
		assert.Contains(t, out, "--- FAIL: TestResults/transfer/prepared_read", "another case was run")
		assert.Contains(t, out, "--- FAIL: TestResults/transfer/states")
		assert.Contains(t, of("states"), "a last word")
		assert.Contains(t, of("states"), "the ranks have ended without a result")
		assert.NotContains(t, out, "TestResults/transfer/errors", "nothing runs on ranks that have ended")
		assert.Contains(t, out, "exit status 3")
	}
}
