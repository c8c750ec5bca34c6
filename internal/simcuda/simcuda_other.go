//go:build !linux

package simcuda

import (
	"fmt"
	"runtime"

	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/errs"
)

// Machine is some simulated GPUs.
type Machine struct{}

// New returns ErrUnavailable: the memory of simulated GPUs is files that Linux has.
func New(Config) (*Machine, error) {
	return nil, fmt.Errorf("GPUs are simulated on Linux, not on %s: %w", runtime.GOOS, errs.ErrUnavailable)
}

// Driver returns nil.
func (*Machine) Driver() *cu.Driver { return nil }

// Violations returns nil.
func (*Machine) Violations() []string { return nil }

// Left returns nil.
func (*Machine) Left() []string { return nil }

// Err returns nil.
func (*Machine) Err() error { return nil }

// Stats returns nothing.
func (*Machine) Stats() Stats { return Stats{} }
