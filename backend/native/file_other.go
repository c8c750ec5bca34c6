//go:build !linux

package native

import (
	"fmt"
	"os"
	"runtime"

	"github.com/symmem/symmem/internal/errs"
)

// newFile returns ErrUnsupported on this system.
func newFile(int32, string) (*os.File, error) {
	return nil, fmt.Errorf("GPU memory is passed to other ranks as a file descriptor, which %s cannot; run on Linux: %w",
		runtime.GOOS, errs.ErrUnsupported)
}
