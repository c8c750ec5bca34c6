package nvshmem

import (
	"context"

	"github.com/symmem/symmem/internal/dl"
)

// StuckError is something that the library had not done when the caller could wait no longer.
type StuckError = dl.StuckError

// Bound is [dl.Bound] for calls of this library.
func Bound(ctx context.Context, what string, call func() error) error {
	_, err := dl.Bound(ctx, libraryName, what, func() (struct{}, error) { return struct{}{}, call() })
	return err
}
