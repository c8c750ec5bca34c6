package nixl

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
)

// TestVersions: ranks whose libraries have several versions are told which rank has which; one that does not say goes with any.
func TestVersions(t *testing.T) {
	of := func(versions ...string) error {
		peers := make([]member, len(versions))
		for r, v := range versions {
			peers[r] = member{Kind: "host", Version: v}
		}
		return (&Backend{peers: peers}).agree()
	}
	require.NoError(t, of("1.5.1"))
	require.NoError(t, of("1.5.1", "1.5.1", "1.5.1"))
	require.NoError(t, of("", "1.5.1", "", "1.5.1"))
	require.NoError(t, of("", ""))
	err := of("1.5.1", "", "1.4.0")
	var mismatch *group.MismatchError
	require.ErrorAs(t, err, &mismatch)
	require.ErrorIs(t, err, group.ErrMismatch)
	require.Equal(t, []string{"1.5.1", "unknown", "1.4.0"}, mismatch.Values)
	require.ErrorContains(t, err, "install the same on every host")
	require.NotErrorIs(t, err, errs.ErrUnsupported)
}
