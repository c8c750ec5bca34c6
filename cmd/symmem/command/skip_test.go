package command

import (
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// skipWithout skips the test and says what is missing; under SYMMEM_TEST_REQUIRE with name among its names that is a failure.
func skipWithout(t *testing.T, name, missing string) {
	t.Helper()
	require.NotContains(t, strings.Split(os.Getenv("SYMMEM_TEST_REQUIRE"), ","), name, missing)
	t.Skip(missing)
}
