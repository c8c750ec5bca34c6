package nixl

import (
	"errors"
	"log/slog"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/symmem/symmem/backend/backendtest"
	devhost "github.com/symmem/symmem/device/host"
	"github.com/symmem/symmem/group"
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
	limited := func(left int) (alone bool, files uint64, err error) {
		low := limit
		low.Cur = limitThatLeaves(left)
		require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &low))
		alone, err = probe(t.Context(), lib, d)
		require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &limit))
		return alone, low.Cur, err
	}
	open, err := backendtest.OpenFiles()
	require.NoError(t, err)
	for _, left := range []int{0, 1, 2, 3, 4, 7, agentFiles - 1} { // with fewer than three the library would end this process
		_, files, err := limited(left)
		full, ok := errors.AsType[*group.FileLimitError](err)
		require.True(t, ok, "%d files: %v", left, err)
		require.Equal(t, files, full.Limit)
		_, err = backendtest.FilesLeft(open)
		require.NoError(t, err)
	}

	alone, _, err := limited(agentFiles)
	require.NoError(t, err)
	assert.True(t, alone, "it needs no network")
}

// limitThatLeaves returns the limit of open files under which this process may open so many more.
func limitThatLeaves(files int) uint64 {
	for fd := uintptr(0); ; fd++ {
		if _, err := unix.FcntlInt(fd, unix.F_GETFD, 0); err == nil {
			continue // it is open
		}
		if files == 0 {
			return uint64(fd)
		}
		files--
	}
}
