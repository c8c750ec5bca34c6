package settings

import (
	"testing"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestCommandLine: what a report says of the command gives the same settings again.
func TestCommandLine(t *testing.T) {
	given := func(args ...string) *pflag.FlagSet {
		flags := pflag.NewFlagSet("bench", pflag.ContinueOnError)
		AddForRanks(flags)
		require.NoError(t, flags.Parse(args))
		return flags
	}
	line := CommandLine("symmem bench", given("--net-devices", "eth0,mlx5_0:1", "--token", "a secret", "--timeout", "90s", "--share-device"))
	assert.Equal(t, []string{"symmem", "bench", "--net-devices=eth0,mlx5_0:1", "--share-device=true", "--timeout=1m30s"}, line)
	cfg, err := Load(given(line[2:]...), nil)
	require.NoError(t, err)
	assert.Equal(t, []string{"eth0", "mlx5_0:1"}, cfg.NetDevices)
}
