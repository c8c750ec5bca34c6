//go:build unix

package symmem_test

import (
	"os"

	"golang.org/x/sys/unix"
)

// dup returns a descriptor of the same file that nothing else owns.
func dup(f *os.File) (int, error) { return unix.Dup(int(f.Fd())) }

// alive reports whether a descriptor is that of an open file, and closes it.
func alive(fd int) bool { return unix.Close(fd) == nil }
