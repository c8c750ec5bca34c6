//go:build amd64 || arm64

package cuda

import (
	"os"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestManyQueues: the library asks for as many queues as there can be, unless the user has asked for another number.
func TestManyQueues(t *testing.T) {
	t.Setenv(LibraryEnv, t.TempDir()) // where there is no driver
	t.Setenv(queuesEnv, "1")
	_, err := Load(nil)
	require.Error(t, err)
	assert.Equal(t, "1", os.Getenv(queuesEnv))
	require.NoError(t, os.Unsetenv(queuesEnv)) // t.Setenv puts it back in the end
	_, err = Load(nil)
	require.Error(t, err)
	assert.Equal(t, "32", os.Getenv(queuesEnv))
}
