package native

import (
	"os"

	"golang.org/x/sys/unix"
)

// newFile makes a file of a descriptor that the driver has returned. The file owns the descriptor.
func newFile(fd int32, name string) (*os.File, error) {
	unix.CloseOnExec(int(fd))
	return os.NewFile(uintptr(fd), name), nil
}
