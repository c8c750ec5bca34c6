//go:build unix

package group

import (
	"errors"

	"golang.org/x/sys/unix"
)

// openFileLimit returns how many files this process may have open, or 0 if that is not known.
func openFileLimit() uint64 {
	var r unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &r) != nil {
		return 0
	}
	return uint64(r.Cur) //nolint:unconvert // it is signed on some systems
}

// fileLimit makes the error of too many open files one that says what to do.
func fileLimit(err error) error {
	if !errors.Is(err, unix.EMFILE) && !errors.Is(err, unix.ENFILE) {
		return err
	}
	return &FileLimitError{Limit: openFileLimit(), Err: err}
}
