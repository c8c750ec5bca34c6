package nixl_test

import (
	"context"
	"errors"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/backend/nixl"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/testneed"
	"github.com/symmem/symmem/memory"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestConformance(t *testing.T) {
	nixl.RequireLibrary(t)
	for islands, unreachable := range map[string]bool{"auto": false, "off": true} {
		t.Run("islands="+islands, func(t *testing.T) {
			backendtest.Run(t, backendtest.Harness{
				Open: func(ctx context.Context, g *group.Group) (backend.Backend, error) {
					return nixl.New(ctx, g, &nixl.Options{Device: "host", Islands: islands})
				},
				WorldSizes: []int{1, 2, 3}, Unreachable: unreachable,
				Adoptable: nixl.OnDevice,
			})
		})
	}
}

// TestLibraries: the answers of doctor, with and without the library.
func TestLibraries(t *testing.T) {
	f, err := backend.Lookup(nixl.Name)
	require.NoError(t, err)
	answers := f.(backend.Libraries).Libraries(t.Context(), &backend.Env{Device: "host", Getenv: os.Getenv})
	require.Len(t, answers, 1)
	a := answers[0]
	require.Equal(t, "NIXL", a.Name)
	if a.State != "usable" {
		require.NotEmpty(t, a.Tried)
		require.Contains(t, a.Fix, "pip install")
		nixl.RequireLibrary(t)
	}
	require.FileExists(t, a.Path)
	details := map[string]string{}
	for _, d := range a.Details {
		details[d.Name] = d.Value
		t.Logf("%s: %s", d.Name, d.Value)
	}
	require.Contains(t, details["plugins"], "UCX")
	require.NotEmpty(t, details["UCX"])
	require.Contains(t, details["memory of the GPU"], "not tried")
}

// TestGPU opens and closes the backend some times on a GPU, if there is one, and moves memory of this rank by a transfer.
func TestGPU(t *testing.T) {
	f, err := backend.Lookup(nixl.Name)
	require.NoError(t, err)
	began := time.Now()
	if _, err := f.Probe(t.Context(), &backend.Env{Device: "0", Getenv: os.Getenv}); err != nil {
		if !errors.Is(err, errs.ErrUnavailable) && !errors.Is(err, errs.ErrUnsupported) {
			require.NoError(t, err)
		}
		testneed.Missing(t, "cuda", err)
	}
	t.Logf("probed after %v", time.Since(began))
	for round := range 3 {
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		groups, err := group.Local(1, nil)
		require.NoError(t, err)
		b, err := nixl.New(ctx, groups[0], &nixl.Options{Device: "0"})
		require.NoError(t, err)
		t.Logf("round %d: opened after %v", round, time.Since(began))
		m := memory.New(b, groups[0], &memory.Options{Channels: 1})
		a, err := m.Allocate(ctx, 1<<20, "")
		require.NoError(t, err)
		w, err := m.Rendezvous(ctx, a, memory.Record{})
		require.NoError(t, err)
		s, err := m.Device().NewStream()
		require.NoError(t, err)
		require.NoError(t, m.Signal(s, 0, 0))
		require.NoError(t, m.Wait(s, 0, 0))
		require.NoError(t, m.Barrier(s, 0))
		require.NoError(t, s.Synchronize(ctx))
		_, err = w.Peer(0, 0)
		require.NoError(t, err)
		t.Logf("round %d: closing after %v", round, time.Since(began))
		require.NoError(t, s.Close())
		require.NoError(t, m.Free(ctx, a))
		require.NoError(t, m.Close(ctx))
		require.NoError(t, groups[0].Close(ctx))
		t.Logf("round %d: closed after %v", round, time.Since(began))
	}
}
