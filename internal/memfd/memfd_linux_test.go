package memfd

import (
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"unsafe"

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

// TestForbidden: where a seccomp filter forbids the call, as that of a service of systemd may, shared memory is not available, and the error says what to do.
func TestForbidden(t *testing.T) {
	for _, errno := range []unix.Errno{unix.EPERM, unix.EACCES, unix.ENOSYS} {
		made := make(chan error, 1)
		go func() {
			runtime.LockOSThread() // for good: the thread ends with the goroutine, and its filter with it
			if err := forbid(unix.SYS_MEMFD_CREATE, errno); err != nil {
				made <- err
				return
			}
			f, err := New(int64(os.Getpagesize()))
			if err == nil {
				_ = f.Close()
			}
			made <- err
		}()
		err := <-made
		require.ErrorIs(t, err, errno)
		assert.ErrorIs(t, err, errs.ErrUnavailable)
		if errno != unix.ENOSYS {
			assert.ErrorContains(t, err, "seccomp")
		}
	}
}

// forbid makes a system call of this thread fail.
func forbid(call uint32, errno unix.Errno) error {
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return err
	}
	program := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS}, // the number of the call, the first word of struct seccomp_data
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: call, Jf: 1},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ERRNO | uint32(errno)},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW},
	}
	p := unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]}
	_, _, failed := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, 0, uintptr(unsafe.Pointer(&p)))
	runtime.KeepAlive(program)
	if failed != 0 {
		return failed
	}
	return nil
}
