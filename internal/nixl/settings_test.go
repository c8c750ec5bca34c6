package nixl

import (
	"os"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestSettings: an agent's settings reach the engine as one text, lists by the environment and only while the engine is made, and never
// over what the user has set.
func TestSettings(t *testing.T) {
	l, _, _ := table()
	var config, during string
	var chosen bool
	l.call.addParam = func(_ handle, key, value string) Status {
		assert.Equal(t, "engine_config", key)
		config = value
		return Success
	}
	make := l.call.createBackend
	l.call.createBackend = func(agent handle, plugin string, params handle, b *handle) Status {
		during = os.Getenv("UCX_NET_DEVICES")
		_, chosen = UserVariable("UCX_NET_DEVICES")
		return make(agent, plugin, params, b)
	}
	agent := func(settings map[string]string) {
		t.Helper()
		a, err := l.NewAgent("a", &AgentOptions{Settings: settings})
		require.NoError(t, err)
		require.NoError(t, a.Close())
	}
	_, had := os.LookupEnv("UCX_NET_DEVICES")
	require.False(t, had, "this test needs it unset")

	agent(map[string]string{"POSIX_ERROR_HANDLING": "y", "NET_DEVICES": ""})
	assert.Equal(t, "NET_DEVICES=,POSIX_ERROR_HANDLING=y", config)
	assert.Empty(t, during)

	agent(map[string]string{"NET_DEVICES": "eth0,mlx5_0:1", "TLS": "tcp"})
	assert.Equal(t, "TLS=tcp", config, "the engine cannot take a list")
	assert.Equal(t, "eth0,mlx5_0:1", during)
	assert.False(t, chosen, "the user has not set it")
	_, left := os.LookupEnv("UCX_NET_DEVICES")
	assert.False(t, left, "no other agent and no child of this process gets it")

	t.Setenv("UCX_NET_DEVICES", "ib0")
	agent(map[string]string{"NET_DEVICES": "eth0,mlx5_0:1"})
	assert.Equal(t, "ib0", during)
	assert.True(t, chosen)
	assert.Equal(t, "ib0", os.Getenv("UCX_NET_DEVICES"), "the user's own")
}
