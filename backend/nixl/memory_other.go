//go:build !linux

package nixl

import (
	"fmt"

	"github.com/symmem/symmem/internal/errs"
)

func obtain(int) ([]byte, error) {
	return nil, fmt.Errorf("NIXL is there for Linux only: %w", errs.ErrUnsupported)
}

func giveBack([]byte) error { return nil }

func preferHugePages([]byte) {}
