package nixl

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// TestLookingForFilesTakesNone: whoever looks whether files are left for an agent leaves all of them to others of the process: another rank's agent, which is being made, would end the process for want of one.
func TestLookingForFilesTakesNone(t *testing.T) {
	var limit unix.Rlimit
	require.NoError(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &limit))
	low := limit
	low.Cur = limitThatLeaves(agentFiles)
	require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &low))
	defer func() { assert.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &limit)) }()
	looked := make(chan struct{})
	go func() {
		defer close(looked)
		for range 300 {
			_ = roomForFiles() // one of them may be open
		}
	}()
	var failed error
	for looking := true; looking && failed == nil; {
		var fd int
		if fd, failed = unix.Eventfd(0, unix.EFD_CLOEXEC); failed == nil {
			failed = unix.Close(fd)
		}
		select {
		case <-looked:
			looking = false
		default:
		}
	}
	<-looked
	require.NoError(t, failed)
	require.NoError(t, roomForFiles())
}
