//go:build linux || darwin || dragonfly || freebsd || netbsd || openbsd

package outfile

import (
	"errors"
	"os"
	"syscall"
	"time"
)

// lock locks a file against others that lock it, until it is closed or this process ends. It is errLocked if another has it until the deadline.
func lock(f *os.File, deadline time.Time) error {
	for pause := time.Millisecond; ; pause = min(2*pause, 100*time.Millisecond) {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		switch {
		case err == nil:
			return nil
		case errors.Is(err, syscall.EINTR):
		case errors.Is(err, syscall.ENOLCK), errors.Is(err, syscall.ENOSYS), errors.Is(err, syscall.ENOTSUP), errors.Is(err, syscall.EOPNOTSUPP):
			return nil // a file system without locks
		case !errors.Is(err, syscall.EWOULDBLOCK):
			return &os.PathError{Op: "lock", Path: f.Name(), Err: err}
		case time.Now().After(deadline):
			return errLocked
		}
		time.Sleep(pause)
	}
}
