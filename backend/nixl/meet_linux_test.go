package nixl

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend/backendtest"
	devhost "github.com/symmem/symmem/device/host"
	"github.com/symmem/symmem/group"
)

// TestVersionsOfRanks: a rank that comes with another version is refused on every rank, itself too, before anything is connected, and nothing is left.
func TestVersionsOfRanks(t *testing.T) {
	net := &network{}
	errs := backendtest.OnRanks(t, 3, nil, func(ctx context.Context, g *group.Group) error {
		d, err := devhost.New(nil)
		if err != nil {
			return err
		}
		o := Options{Opened: d, engine: net.engine, version: []string{"1.5.1", "1.5.1", "1.4.0"}[g.Rank()]}
		b, err := New(ctx, g, &o)
		if err == nil {
			err = b.Close(ctx)
		}
		return errors.Join(err, d.Close())
	})
	for rank, err := range errs {
		var mismatch *group.MismatchError
		require.ErrorAs(t, err, &mismatch, "rank %d", rank)
		require.Equal(t, []string{"1.5.1", "1.5.1", "1.4.0"}, mismatch.Values, "rank %d", rank)
	}
	require.Len(t, net.engines, 3)
	for name, e := range net.engines {
		require.True(t, e.closed, name)
	}
}
