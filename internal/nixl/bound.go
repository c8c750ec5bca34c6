package nixl

import (
	"context"

	"github.com/symmem/symmem/internal/dl"
)

// StuckError is something that the library had not done when the caller could wait no longer.
type StuckError = dl.StuckError

// Bound is [dl.Bound] for calls of this library.
func Bound[T any](ctx context.Context, what string, call func() (T, error)) (T, error) {
	return dl.Bound(ctx, libraryName, what, call)
}
