//go:build !linux

package nixl

import (
	"context"
	"fmt"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
)

// noWords stands for words that ranks with GPUs share, which they do on Linux only.
type noWords struct{}

func newFileWords(*group.Group) wordMemory { return noWords{} }

func (noWords) make(context.Context, int64) (device.Ptr, error) {
	return 0, fmt.Errorf("flags that ranks with GPUs share: %w", errs.ErrUnsupported)
}

func (noWords) meet(_ context.Context, failure error) ([]device.Ptr, error) { return nil, failure }
func (noWords) close(context.Context) error                                 { return nil }
