package verify

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	_ "github.com/symmem/symmem/backend/all"
	"github.com/symmem/symmem/cmd/symmem/internal/exit"
	"github.com/symmem/symmem/internal/errs"
)

// some are simulated GPUs for two backends.
type some struct{}

func (some) Backends() []string { return []string{"native", "nccl"} }

func (some) Start(string, int, uint64, string, bool) (Simulation, error) { panic("not to be started") }

// TestSimulatedBackends: auto takes the first, all takes those that are simulated, and one that is not is refused with an error that says which are.
func TestSimulatedBackends(t *testing.T) {
	SetSimulator(some{})
	defer SetSimulator(nil)
	for text, want := range map[string][]string{"auto": {"native"}, "all": {"native", "nccl"}, "nccl": {"nccl"}, "nccl,native": {"nccl", "native"}} {
		got, err := simulated(true, text)
		require.NoError(t, err)
		assert.Equal(t, want, got, text)
	}
	got, err := simulated(false, "")
	require.NoError(t, err)
	assert.Equal(t, []string{"native"}, got)
	for text, says := range map[string]string{"nixl": "nixl is not simulated", "native,host": "host is not simulated", "native,auto": "auto is not simulated"} {
		_, err := simulated(true, text)
		require.ErrorIs(t, err, errs.ErrInvalid, text)
		assert.ErrorContains(t, err, says)
		assert.ErrorContains(t, err, "native, nccl, auto and all")
		var status *exit.Error
		require.ErrorAs(t, err, &status)
		assert.Equal(t, exit.Usage, status.Status)
	}
	require.NoError(t, weakOn([]string{"native"}))
	err = weakOn([]string{"native", "nccl"})
	require.ErrorIs(t, err, errs.ErrInvalid)
	assert.ErrorContains(t, err, "--backend is nccl; allowed: native")
	_, err = simulated(true, "nccl,nccl")
	assert.ErrorContains(t, err, "twice")
	_, err = simulated(true, "ncll")
	assert.ErrorContains(t, err, "allowed are")
}
