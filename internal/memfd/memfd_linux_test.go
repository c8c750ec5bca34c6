package memfd

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/symmem/symmem/internal/errs"
)

// TestShared: what one mapping of a file stores, another one loads, and nobody can make the file smaller under them.
func TestShared(t *testing.T) {
	bytes := int64(os.Getpagesize())
	f, err := New(bytes)
	require.NoError(t, err)
	defer func() { require.NoError(t, f.Close()) }()
	require.NoError(t, Check(f, bytes))
	one, err := Map(f, bytes)
	require.NoError(t, err)
	two, err := Map(f, bytes)
	require.NoError(t, err)
	one[7] = 42
	assert.EqualValues(t, 42, two[7])
	assert.Error(t, f.Truncate(0))
	require.NoError(t, unix.Munmap(one))
	require.NoError(t, unix.Munmap(two))
}

// TestCheck: files that could become smaller, or are, are refused.
func TestCheck(t *testing.T) {
	bytes := int64(os.Getpagesize())
	f, err := New(bytes)
	require.NoError(t, err)
	assert.ErrorIs(t, Check(f, 2*bytes), errs.ErrMismatch)
	require.NoError(t, f.Close())
	assert.Error(t, Check(f, bytes), "closed")
	fd, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	require.NoError(t, err)
	loose := os.NewFile(uintptr(fd), "loose")
	require.NoError(t, loose.Truncate(bytes))
	assert.ErrorIs(t, Check(loose, bytes), errs.ErrMismatch)
	require.NoError(t, loose.Close())
	plain, err := os.Create(filepath.Join(t.TempDir(), "plain"))
	require.NoError(t, err)
	require.NoError(t, plain.Truncate(bytes))
	assert.Error(t, Check(plain, bytes))
	require.NoError(t, plain.Close())
}
