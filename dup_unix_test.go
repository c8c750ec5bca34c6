//go:build unix

package symmem_test

import (
	"os"

	"golang.org/x/sys/unix"
)

// dup returns a descriptor of the same file that nothing else owns.
func dup(f *os.File) (int, error) { return unix.Dup(int(f.Fd())) }
