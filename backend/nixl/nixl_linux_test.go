package nixl_test

import (
	"context"
	"errors"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/backend/nixl"
	"github.com/symmem/symmem/group"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// require skips the test if the library is not there, which under SYMMEM_TEST_REQUIRE=nixl is a failure.
func requireLibrary(t *testing.T) {
	t.Helper()
	f, err := backend.Lookup(nixl.Name)
	require.NoError(t, err)
	_, err = f.Probe(t.Context(), &backend.Env{Device: nixl.HostDevice, Getenv: os.Getenv})
	if err == nil {
		return
	}
	if !errors.Is(err, backend.ErrUnavailable) || slices.Contains(strings.Split(os.Getenv("SYMMEM_TEST_REQUIRE"), ","), "nixl") {
		require.NoError(t, err)
	}
	t.Skip(err)
}

func TestConformance(t *testing.T) {
	requireLibrary(t)
	backendtest.Run(t, backendtest.Harness{
		Open: func(ctx context.Context, g *group.Group) (backend.Backend, error) {
			return nixl.New(ctx, g, &nixl.Options{Device: nixl.HostDevice})
		},
		WorldSizes: []int{1, 2, 3}, Unreachable: true,
	})
}
