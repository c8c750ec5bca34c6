package futex_test

import (
	"fmt"
	"os"
	"testing"

	"go.uber.org/goleak"
)

// childRole names the variable that makes this binary play one side of a test across processes instead of running tests.
const childRole = "SYMMEM_FUTEX_TEST_CHILD"

func TestMain(m *testing.M) {
	if role := os.Getenv(childRole); role != "" {
		if err := runChild(role); err != nil {
			fmt.Fprintln(os.Stderr, "child:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}
