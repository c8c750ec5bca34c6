//go:build amd64 || arm64

package dl_test

import (
	"os"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/internal/dl"
)

// TestCall calls functions with no argument, with a pointer, and with as many as there can be, and allocates nothing.
func TestCall(t *testing.T) {
	l := libc(t)
	symbol := func(name string) uintptr {
		p, err := l.Symbol(name)
		require.NoError(t, err)
		return p
	}
	pid := symbol("getpid")
	assert.EqualValues(t, os.Getpid(), int32(dl.Call(pid, 0, 0, 0, 0, 0, 0, 0, 0)))
	text := []byte("symmetric\x00")
	assert.EqualValues(t, 9, dl.Call(symbol("strlen"), 1, uintptr(unsafe.Pointer(&text[0])), 0, 0, 0, 0, 0, 0))
	out, format := make([]byte, 16), []byte("%d%d%d%d\x00")
	n := dl.Call(symbol("snprintf"), 7, uintptr(unsafe.Pointer(&out[0])), uintptr(len(out)), uintptr(unsafe.Pointer(&format[0])), 1, 2, 3, 4)
	assert.EqualValues(t, 4, int32(n))
	assert.Equal(t, "1234", string(out[:4]))
	assert.Zero(t, testing.AllocsPerRun(1000, func() { dl.Call(pid, 0, 0, 0, 0, 0, 0, 0, 0) }))
}
