//go:build !linux

package nixl

import (
	"context"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/internal/errs"
)

func newSharedFlags(context.Context, *Backend, int) (backend.Flags, error) {
	return nil, errs.ErrUnsupported
}
