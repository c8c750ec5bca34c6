package nixl

import (
	"log/slog"
	"os"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	devhost "github.com/symmem/symmem/device/host"
)

// TestProbeAgain: a trial that fails for want of something that the process has again later is made again.
func TestProbeAgain(t *testing.T) {
	withoutUserNetwork(t)
	RequireLibrary(t)
	lib, err := load("", 0, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	d, err := devhost.New(nil)
	require.NoError(t, err)
	defer func() { assert.NoError(t, d.Close()) }()
	probes.Lock()
	probes.found = nil
	probes.Unlock()

	var limit unix.Rlimit
	require.NoError(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &limit))
	files, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	low := limit
	low.Cur = uint64(len(files) + 3) // an engine opens more
	require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &low))
	_, err = probe(t.Context(), lib, d)
	require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &limit))
	require.Error(t, err)

	alone, err := probe(t.Context(), lib, d)
	require.NoError(t, err)
	assert.True(t, alone, "it needs no network")
}
