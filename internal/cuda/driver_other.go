//go:build !linux || !(amd64 || arm64)

package cuda

import (
	"fmt"
	"runtime"

	"github.com/symmem/symmem/internal/errs"
)

// Load returns ErrUnavailable on this system.
func Load(*LoadOptions) (*Driver, error) {
	return nil, fmt.Errorf("loading the %s: CUDA devices are supported on linux/amd64 and linux/arm64, this is %s/%s: %w",
		libraryName, runtime.GOOS, runtime.GOARCH, errs.ErrUnavailable)
}
