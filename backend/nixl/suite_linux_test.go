package nixl

import (
	"context"
	"errors"
	"os"
	"regexp"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/cuda"
	"github.com/symmem/symmem/internal/simcuda"
	"github.com/symmem/symmem/tests/suite"
)

// simulated is the backend over simulated GPUs and fake engines, by the name that it is registered under: with islands, and without.
type simulated struct {
	factory
	islands string
	mu      sync.Mutex
	machine *simcuda.Machine
	net     *network
}

var simulations = map[string]*simulated{
	"nixl-simulated": {islands: islandsAuto}, "nixl-simulated-apart": {islands: islandsOff},
}

func init() {
	for name, s := range simulations {
		backend.Register(name, s)
	}
}

func (s *simulated) Probe(context.Context, *backend.Env) (backend.Capabilities, error) {
	c := capabilities(device.CUDA)
	c.RanksInOneProcess = true
	return c, nil
}

// Takes is nothing, and Preference the last: no other test is to find it.
func (s *simulated) Takes(any) bool            { return false }
func (s *simulated) Preference(bool) int       { return -1000 }
func (s *simulated) Options() []backend.Option { return nil }

func (s *simulated) Open(ctx context.Context, env *backend.Env) (backend.Backend, error) {
	s.mu.Lock()
	machine, net := s.machine, s.net
	s.mu.Unlock()
	o := &Options{Islands: s.islands, engine: net.engine, pads: true, KernelTimeout: env.KernelTimeout}
	if env.Parent != nil {
		o.Parent = env.Parent.(*Backend)
		return New(ctx, env.Group, o)
	}
	d, err := cuda.Open(&cuda.Options{Driver: machine.Driver(), LocalRank: env.LocalRank, Err: env.Group.Err, WaitTimeout: env.KernelTimeout})
	if err != nil {
		return nil, err
	}
	o.Opened = d
	b, err := New(ctx, env.Group, o)
	if err != nil {
		return nil, errors.Join(err, d.Close())
	}
	b.owned = true
	return b, nil
}

// shortSuite are the cases without SYMMEM_TEST_MATRIX=full, which take some seconds of one core.
const shortSuite = `^(memory|window|groups|signal|transfer|lifetime)/|^all_reduce/[a-z_]+/f32/1023/|^(broadcast|reduce|all_gather)/.*/delayed$`

// fullSuite are those with it: all but the dtypes, which make no difference to memory.
const fullSuite = `^([b-z]|all_(gather|to_all))|^all_reduce/(errors|[a-z_]+/(f32|bf16)/)`

// TestSuiteOnGPUs: the suite over simulated GPUs, with everything by address, and with everything by the library.
func TestSuiteOnGPUs(t *testing.T) {
	for name, s := range simulations {
		t.Run(name, func(t *testing.T) {
			const size = 2
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
			defer cancel()
			var err error
			s.net = &network{}
			s.machine, err = simcuda.New(simcuda.Config{GPUs: size, Seed: 1})
			require.NoError(t, err)
			for i := range size {
				d, err := cuda.Open(&cuda.Options{Driver: s.machine.Driver(), LocalRank: i})
				require.NoError(t, err)
				s.net.gpus = append(s.net.gpus, d)
			}
			cfg := config.Default()
			cfg.Backend, cfg.Multicast, cfg.KernelTimeout = []string{name}, config.MulticastOff, 45*time.Second
			ranks, err := symmem.OpenLocal(ctx, size, cfg, nil)
			require.NoError(t, err)
			o := &suite.Options{Device: device.CUDA, Backend: Name, World: size, Short: true, Simulated: true}
			switch {
			case testing.Short():
				o.Filter = regexp.MustCompile(`^(memory|window|signal)/`)
			case os.Getenv("SYMMEM_TEST_MATRIX") == "full":
				o.Filter = regexp.MustCompile(fullSuite)
			default:
				o.Filter = regexp.MustCompile(shortSuite)
			}
			var wg sync.WaitGroup
			passed, skipped := 0, map[string]int{}
			for _, r := range ranks {
				assert.Equal(t, s.islands == islandsAuto, r.Capabilities().PeerPointers)
				wg.Go(func() {
					_, err := suite.Run(ctx, r, slices.Values(suite.Cases(o)), o, func(res suite.Result) {
						if r.Rank() != 0 {
							return
						}
						switch res.Status {
						case suite.Passed:
							passed++
						case suite.Skipped:
							skipped[res.Missing]++
						default:
							t.Errorf("%s: %s", res.Case, res.Reason)
						}
					})
					assert.NoError(t, errors.Join(err, r.Close(ctx)))
				})
			}
			wg.Wait()
			t.Logf("%d passed, skipped: %v", passed, skipped)
			assert.Greater(t, passed, 20)
			for _, d := range s.net.gpus {
				assert.NoError(t, d.Close())
			}
			assert.NoError(t, s.machine.Err())
			assert.Empty(t, s.machine.Left())
		})
	}
}
