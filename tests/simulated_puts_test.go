package tests

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"runtime"
	"strings"
	"testing"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/backend/nccl"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/simcuda"
	"github.com/symmem/symmem/internal/simlib"
	"github.com/symmem/symmem/tests/suite"
)

func init() { jobs["simulated_puts"] = simulatedPutsJob }

// simulatedPuts are the cases of ranks in two teams, between which NCCL puts.
const simulatedPuts = `^(memory|window|signal|all_to_all_v)/|^transfer/|^graph/`

// TestSimulatedPuts: over NCCL that puts between ranks without addresses, what is made of puts and signals works as between those that have them,
// all-to-all with counts among it.
func TestSimulatedPuts(t *testing.T) {
	if runtime.GOOS != "linux" {
		skipWithout(t, simulatedName, "GPUs are simulated on Linux")
	}
	opts := &suite.Options{Device: device.CUDA, Backend: nccl.Name, World: 3, Short: true, Simulated: true, Filter: regexp.MustCompile(simulatedPuts)}
	runCases(t, nil, simulatedName+"_"+nccl.Name, opts, 1, "simulated_puts:3")
}

// simulatedPutsJob is all ranks of the suite; arg is their number. Two are in a team.
func simulatedPutsJob(ctx context.Context, own config.Config, arg string, say func(any)) error {
	arg, short, _ := strings.Cut(arg, ":")
	var size int
	if _, err := fmt.Sscanf(arg, "%d", &size); err != nil {
		return err
	}
	m, err := simcuda.New(simcuda.Config{GPUs: size, Seed: 1})
	if err != nil {
		return err
	}
	lib := simlib.NewNCCL(m)
	lib.Spread(2)
	lib.GIN()
	o := &nccl.Options{Driver: m.Driver(), Functions: lib.Functions(), Multicast: config.MulticastOff}
	ranks, err := symmem.OpenLocal(ctx, size, goroutinesConfig(nccl.Name, own.KernelTimeout), &symmem.Options{Backend: o})
	if err != nil {
		return err
	}
	err = together(ctx, ranks, &suite.Options{Device: device.CUDA, Backend: nccl.Name, World: size, Short: short == "short", Simulated: true}, say)
	if rest := lib.Left(); len(rest) > 0 {
		err = errors.Join(err, fmt.Errorf("the simulated library still has %s", strings.Join(rest, ", ")))
	}
	return errors.Join(err, m.Err())
}
