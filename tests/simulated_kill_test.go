package tests

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/backend/native"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/internal/simcuda"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/tensor"
)

func init() { jobs["simulated_kill"] = simulatedKillJob }

// castKilled is what the rank that lives on says.
type castKilled struct {
	Launched string // the kernels that have run, by name
	Error    string
	Lost     bool
	Wrong    string // what was used wrongly of the simulated driver
}

// TestKillSimulatedMulticast: two processes, each with simulated GPUs of its own, reduce through a multicast object that they share. One is killed while
// the kernel of the other waits for it: the other gets an error that says so, and no wrong use of the driver.
func TestKillSimulatedMulticast(t *testing.T) {
	t.Parallel()
	if runtime.GOOS != "linux" {
		skipWithout(t, simulatedName, "GPUs are simulated on Linux")
	}
	for _, alg := range []kernels.Algorithm{kernels.OneShotMultimem, kernels.TwoShotMultimem} {
		t.Run(alg.String(), func(t *testing.T) {
			t.Parallel()
			world := runWorld(t, 2, "simulated_kill:"+alg.String(), "SYMMEM_BACKEND="+native.Name, "SYMMEM_TIMEOUT=20s", "SYMMEM_KERNEL_TIMEOUT=40s", "SYMMEM_LIVENESS_TIMEOUT=3s")
			require.False(t, world[1].end.Done, "the victim was killed")
			p := world[0]
			require.NoError(t, p.err)
			require.Empty(t, p.end.Error)
			require.Len(t, p.lines, 1)
			var s castKilled
			require.NoError(t, json.Unmarshal(p.lines[0], &s))
			assert.Contains(t, s.Launched, "multimem")
			assert.Truef(t, s.Lost, "%s", s.Error)
			assert.Empty(t, s.Wrong)
		})
	}
}

// simulatedKillJob is one rank of TestKillSimulatedMulticast.
func simulatedKillJob(ctx context.Context, cfg config.Config, arg string, say func(any)) error {
	m, err := simcuda.New(simcuda.Config{GPUs: 2, Seed: uint64(cfg.Rank + 1), Multicast: true})
	if err != nil {
		return err
	}
	r, err := symmem.Open(ctx, cfg, &symmem.Options{Backend: &native.Options{Driver: m.Driver(), Multicast: config.MulticastOn}})
	if err != nil {
		return err
	}
	const n = 5000
	x, err := r.Zeros(ctx, tensor.Float32, n)
	if err != nil {
		return err
	}
	if err := x.Rendezvous(ctx); err != nil {
		return err
	}
	alg, err := kernels.ParseAlgorithm(arg)
	if err != nil {
		return err
	}
	p, err := kernels.NewAllReduce(ctx, x, kernels.Sum, &kernels.AllReduceOptions{Algorithm: alg})
	if err != nil {
		return err
	}
	s, err := r.NewStream()
	if err != nil {
		return err
	}
	ones := make([]float32, n)
	for i := range ones {
		ones[i] = float32(r.Rank() + 1)
	}
	if err := errors.Join(tensor.Write(x.Local(), ones, 0), r.Barrier(ctx), p.Run(s), s.Synchronize(ctx)); err != nil {
		return err
	}
	sums, err := tensor.ReadAll[float32](x.Local())
	if err != nil {
		return err
	}
	for i, v := range sums {
		if v != 3 {
			return fmt.Errorf("element %d is %v, and 3 was to come", i, v)
		}
	}
	if err := r.Barrier(ctx); err != nil {
		return err
	}
	if r.Rank() == 1 {
		time.Sleep(50 * time.Millisecond) // the other's kernel waits by then, most often
		self, err := os.FindProcess(os.Getpid())
		if err == nil {
			err = self.Kill()
		}
		time.Sleep(time.Minute) // until it takes effect
		return fmt.Errorf("still alive: %w", err)
	}
	err = errors.Join(p.Run(s), s.Synchronize(ctx))
	var ran []string
	for name := range m.Stats().Launches {
		ran = append(ran, name)
	}
	say(castKilled{Launched: strings.Join(ran, " "), Error: fmt.Sprint(err), Lost: errors.Is(err, symmem.ErrPeerLost), Wrong: strings.Join(m.Violations(), "; ")})
	_ = r.Close(ctx) // nothing can be agreed with the other
	return nil
}
