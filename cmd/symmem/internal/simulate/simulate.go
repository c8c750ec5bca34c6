// Package simulate gives verify simulated GPUs. The command symmem imports it, and no other program has to carry them.
package simulate

import (
	"github.com/symmem/symmem/backend/native"
	"github.com/symmem/symmem/cmd/symmem/internal/verify"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/internal/simcuda"
)

func init() { verify.SetSimulator(simulator{}) }

type simulator struct{}

func (simulator) Backend() string { return native.Name }

// Start makes as many GPUs as there are ranks.
func (simulator) Start(ranks int, seed uint64, multicast string) (verify.Simulation, error) {
	m, err := simcuda.New(simcuda.Config{GPUs: ranks, Seed: seed, Multicast: multicast != config.MulticastOff})
	if err != nil {
		return verify.Simulation{}, err
	}
	return verify.Simulation{Options: &native.Options{Driver: m.Driver(), Multicast: multicast}, Err: m.Err}, nil
}
