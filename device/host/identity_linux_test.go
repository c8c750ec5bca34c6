package host

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestBootIDThatCannotBeRead: where the system hides it, as some sandboxes do, a device is one of this process only.
func TestBootIDThatCannotBeRead(t *testing.T) {
	identity := func() string {
		d, err := New(nil)
		require.NoError(t, err)
		defer func() { require.NoError(t, d.Close()) }()
		return d.UUID()
	}
	known := identity()
	defer func(file string) { bootIDFile = file }(bootIDFile)
	empty := filepath.Join(t.TempDir(), "empty")
	require.NoError(t, os.WriteFile(empty, []byte("\n"), 0o666))
	for _, file := range []string{filepath.Join(t.TempDir(), "hidden"), empty} {
		bootIDFile = file
		require.NotEqual(t, known, identity())
		require.Greater(t, len(identity()), len("host-")+16)
		require.Equal(t, identity(), identity(), "all devices of a process are of one host")
	}
}
