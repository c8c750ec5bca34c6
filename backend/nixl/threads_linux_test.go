package nixl

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest"
	devhost "github.com/symmem/symmem/device/host"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/testneed"
)

// RequireLibrary skips the test if the library is not there, which under SYMMEM_TEST_REQUIRE=nixl is a failure.
func RequireLibrary(t *testing.T) {
	t.Helper()
	_, err := factory{}.Probe(t.Context(), &backend.Env{Device: hostDevice, Getenv: os.Getenv})
	if err == nil {
		return
	}
	require.ErrorIs(t, err, errs.ErrUnavailable)
	testneed.Missing(t, Name, err)
}

// TestConformanceWithoutThreads: the real library, with memory of the CPU and agents that only those who wait and the driver drive on,
// as on GPUs.
func TestConformanceWithoutThreads(t *testing.T) {
	RequireLibrary(t)
	lib, err := load("", 0, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	backendtest.Run(t, backendtest.Harness{
		Open: func(ctx context.Context, g *group.Group) (backend.Backend, error) {
			d, err := devhost.New(&devhost.Options{Err: g.Err})
			if err != nil {
				return nil, err
			}
			b, err := New(ctx, g, &Options{Opened: d, pads: true, drive: true, engine: func(name string) (engine, error) {
				a, err := makeAgent(ctx, lib, d, name, route{}, false)
				if err != nil {
					return nil, err
				}
				return agent{a}, nil
			}})
			if err != nil {
				return nil, errors.Join(err, d.Close())
			}
			b.owned = true
			return b, nil
		},
		WorldSizes: []int{1, 3}, Unreachable: true, Adoptable: OnDevice,
	})
}
