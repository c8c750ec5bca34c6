package memfd

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/symmem/symmem/internal/errs"
)

// sealed are the seals of every file (linux/fcntl.h): nobody can shrink it, which would turn the peers' loads into SIGBUS, nor grow it, nor remove
// the seals.
const sealed = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL

// NoMemory turns the system's errors for no memory and no addresses left into ErrNoMemory, and returns other errors, nil included, as they are.
func NoMemory(err error) error {
	if errors.Is(err, unix.ENOMEM) || errors.Is(err, unix.ENOSPC) {
		return fmt.Errorf("%w: %w; free some, or raise the limits of the process (ulimit -v) or of its container", errs.ErrNoMemory, err)
	}
	return err
}

// New makes a sealed file of bytes zeros; bytes is a multiple of the page size. The error is ErrUnavailable if the system has no such files, or forbids them, and
// ErrNoMemory if it refuses the size.
func New(bytes int64) (*os.File, error) {
	// A process that makes a file larger than this is killed by SIGXFSZ.
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_FSIZE, &limit); err == nil && uint64(bytes) > limit.Cur {
		return nil, fmt.Errorf("shared memory of %d bytes is asked for, and the limit of the size of files (ulimit -f) is %d: %w", bytes, limit.Cur,
			errs.ErrNoMemory)
	}
	fd, err := unix.MemfdCreate("symmem", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	switch {
	case errors.Is(err, unix.ENOSYS):
		return nil, fmt.Errorf("memfd_create needs Linux 3.17 or newer: %w", errors.Join(errs.ErrUnavailable, err))
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES):
		return nil, fmt.Errorf("memfd_create is forbidden to this process; allow it in its seccomp profile (SystemCallFilter of systemd, --security-opt seccomp of docker) or "+
			"security policy: %w", errors.Join(errs.ErrUnavailable, err))
	case errors.Is(err, unix.EMFILE), errors.Is(err, unix.ENFILE):
		return nil, fmt.Errorf("memfd_create: no file descriptor is left; raise the limit (ulimit -n) or free tensors: %w", err)
	case err != nil:
		return nil, fmt.Errorf("memfd_create: %w", NoMemory(err))
	}
	f := os.NewFile(uintptr(fd), "memfd:symmem")
	if err := unix.Ftruncate(fd, bytes); err != nil {
		return nil, errors.Join(fmt.Errorf("sizing shared memory of %d bytes: %w", bytes, NoMemory(err)), f.Close())
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, sealed); err != nil {
		return nil, errors.Join(fmt.Errorf("sealing shared memory: %w", err), f.Close())
	}
	return f, nil
}

// Check returns ErrMismatch for a file of another process that does not have that many bytes, or that could be made smaller.
func Check(f *os.File, bytes int64) error {
	info, err := f.Stat()
	if err != nil {
		return err
	}
	seals, err := unix.FcntlInt(f.Fd(), unix.F_GET_SEALS, 0)
	if err != nil {
		return fmt.Errorf("reading seals: %w", err)
	}
	if info.Size() != bytes || seals&unix.F_SEAL_SHRINK == 0 {
		return fmt.Errorf("a sealed memfd of %d bytes was expected, and one of %d bytes with seals %#x came: %w", bytes, info.Size(), seals, errs.ErrMismatch)
	}
	return nil
}

// Map maps all bytes of a file for loads and stores. The file may be closed afterwards; unix.Munmap unmaps the memory.
func Map(f *os.File, bytes int64) ([]byte, error) {
	mem, err := unix.Mmap(int(f.Fd()), 0, int(bytes), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("mapping %d bytes of shared memory: %w", bytes, NoMemory(err))
	}
	return mem, nil
}
