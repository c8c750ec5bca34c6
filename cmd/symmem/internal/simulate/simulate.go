// Package simulate gives verify simulated GPUs. The command symmem imports it, and no other program has to carry them.
package simulate

import (
	"errors"
	"fmt"
	"strings"

	"github.com/symmem/symmem/backend/native"
	"github.com/symmem/symmem/backend/nccl"
	"github.com/symmem/symmem/backend/nvshmem"
	"github.com/symmem/symmem/cmd/symmem/internal/verify"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/simcuda"
	"github.com/symmem/symmem/internal/simlib"
)

func init() { verify.SetSimulator(simulator{}) }

type simulator struct{}

func (simulator) Backends() []string { return []string{native.Name, nccl.Name, nvshmem.Name} }

// chunk is what NVSHMEM's heap grows by, in bytes: simulated GPUs have little memory.
const chunk = 32 << 20

// Start makes as many GPUs as there are ranks, and the library of the backend.
func (s simulator) Start(backend string, ranks int, seed uint64, multicast string, weak bool) (verify.Simulation, error) {
	m, err := simcuda.New(simcuda.Config{GPUs: ranks, Seed: seed, Multicast: multicast != config.MulticastOff, Weak: weak})
	if err != nil {
		return verify.Simulation{}, err
	}
	switch backend {
	case native.Name:
		return verify.Simulation{Options: &native.Options{Driver: m.Driver(), Multicast: multicast}, Err: m.Err}, nil
	case nccl.Name:
		lib := simlib.NewNCCL(m)
		o := &nccl.Options{Driver: m.Driver(), Functions: lib.Functions(), Multicast: multicast}
		return verify.Simulation{Options: o, Err: both(m, "NCCL", lib.Left)}, nil
	case nvshmem.Name:
		lib := simlib.NewNVSHMEM(m)
		o := &nvshmem.Options{Driver: m.Driver(), Calls: lib.Load, Multicast: multicast, Chunk: chunk}
		return verify.Simulation{Options: o, Err: both(m, "NVSHMEM", lib.Left)}, nil
	}
	return verify.Simulation{}, errs.Invalid("verify", "backend to simulate", backend, strings.Join(s.Backends(), ", "))
}

// both says what was used wrongly, and what is left in the library and the driver.
func both(m *simcuda.Machine, library string, left func() []string) func() error {
	return func() error {
		err := m.Err()
		if rest := left(); len(rest) > 0 {
			err = errors.Join(err, fmt.Errorf("the simulated %s still has %s", library, strings.Join(rest, ", ")))
		}
		return err
	}
}
