//go:build !linux

package host

import (
	"context"
	"fmt"
	"runtime"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
)

func supported() error {
	return fmt.Errorf("the host backend shares memory by memfd, which %s does not have; run on Linux: %w", runtime.GOOS, errs.ErrUnsupported)
}

// Allocate returns ErrUnsupported on this system.
func (b *Backend) Allocate(context.Context, int64) (backend.Allocation, error) {
	return nil, supported()
}

// Register returns ErrUnsupported on this system.
func (b *Backend) Register(context.Context, device.Ptr, int64) (backend.Allocation, error) {
	return nil, supported()
}

// Rendezvous returns ErrUnsupported on this system.
func (b *Backend) Rendezvous(context.Context, backend.Allocation) (backend.Mapping, error) {
	return nil, supported()
}
