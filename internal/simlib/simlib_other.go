//go:build !linux

package simlib

import (
	"fmt"
	"runtime"

	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/nccl"
	"github.com/symmem/symmem/internal/nvshmem"
	"github.com/symmem/symmem/internal/simcuda"
)

// NCCL is the library of a process with all ranks.
type NCCL struct{}

// NewNCCL returns one that cannot be used: there are no simulated GPUs here.
func NewNCCL(*simcuda.Machine) *NCCL { return &NCCL{} }

// Functions returns a table without functions.
func (*NCCL) Functions() *nccl.Functions { return &nccl.Functions{} }

// Spread does nothing.
func (*NCCL) Spread(...int) {}

// GIN does nothing.
func (*NCCL) GIN() {}

// Left returns nil.
func (*NCCL) Left() []string { return nil }

// NVSHMEM is the library of each rank of a process.
type NVSHMEM struct{}

// NewNVSHMEM returns one that cannot be used: there are no simulated GPUs here.
func NewNVSHMEM(*simcuda.Machine) *NVSHMEM { return &NVSHMEM{} }

// Load returns ErrUnavailable.
func (*NVSHMEM) Load(*nvshmem.Options) (nvshmem.Calls, error) {
	return nil, fmt.Errorf("NVSHMEM is simulated on Linux, not on %s: %w", runtime.GOOS, errs.ErrUnavailable)
}

// Left returns nil.
func (*NVSHMEM) Left() []string { return nil }
