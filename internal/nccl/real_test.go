package nccl

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/testneed"
)

// TestRealLibrary calls what needs no GPU, where the library is installed.
func TestRealLibrary(t *testing.T) {
	t.Setenv(multicastEnv, "0")
	l, err := Load(nil)
	if err != nil {
		require.ErrorIs(t, err, errs.ErrUnavailable)
		testneed.Missing(t, "nccl", err)
	}
	t.Logf("NCCL %s at %s", l.Version(), l.Path())
	assert.GreaterOrEqual(t, l.Version(), Version(22304))
	assert.Contains(t, l.Path(), "libnccl.so")
	t.Logf("it lacks %v", l.Missing())
	if l.Version() >= 22803 {
		require.NoError(t, l.Require("ncclCommSplit", "ncclMemAlloc", "ncclMemFree", "ncclCommWindowRegister",
			"ncclCommWindowDeregister",
			"ncclTeamLsa", "ncclDevCommCreate", "ncclDevCommDestroy"))
	}
	for r := Success; r <= InProgress; r++ {
		assert.NotEmpty(t, l.call.GetErrorString(r), r.String())
	}
	err = l.check("ncclAllReduce", InvalidArgument)
	require.ErrorContains(t, err, "invalid argument")

	// A communicator that does not exist is refused before a GPU is asked for.
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	_, err = Bound(ctx, "reducing", func() (struct{}, error) {
		r := l.call.AllReduce(0, 0, 1, Float32, Sum, 0, 0)
		return struct{}{}, l.check("ncclAllReduce", r)
	})
	require.ErrorContains(t, err, "ncclInvalidArgument")
}
