//go:build amd64 || arm64

package dl

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func TestSignalHandlers(t *testing.T) {
	now := signalHandlers()
	require.Len(t, now, signals+1)
	fault := now[unix.SIGSEGV] // the Go runtime's own
	assert.Greater(t, fault.address, uintptr(1))
	assert.NotZero(t, fault.flags&saOnStack)
	assert.Empty(t, changedHandlers(now, signalHandlers()))

	then := append([]handler(nil), now...)
	then[unix.SIGSEGV] = handler{address: 0x1234}
	then[unix.SIGUSR1] = handler{address: 0x1234, flags: saOnStack}
	then[unix.SIGUSR2] = handler{address: 1} // ignoring it runs nothing
	assert.Equal(t, []change{{signal: int(unix.SIGUSR1), onAltStack: true}, {signal: int(unix.SIGSEGV)}}, changedHandlers(now, then))
}
