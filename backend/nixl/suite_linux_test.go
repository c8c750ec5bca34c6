package nixl

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

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
	d, err := cuda.Open(&cuda.Options{Driver: machine.Driver(), LocalRank: env.Group.Rank(), Err: env.Group.Err, WaitTimeout: env.KernelTimeout})
	if err != nil {
		return nil, err
	}
	o.Opened, o.NetDevices = d, []string{"lo"}
	b, err := New(ctx, env.Group, o)
	if err != nil {
		return nil, errors.Join(err, d.Close())
	}
	b.owned = true
	return b, nil
}

// shortSuite are the cases without SYMMEM_TEST_MATRIX=full, which take some seconds of one core.
const shortSuite = `^(memory|window|groups|signal|transfer|lifetime|all_to_all_v)/|^all_reduce/[a-z_]+/f32/1023/|^(broadcast|reduce|all_gather)/.*/delayed$`

// fullSuite are those with it where the library moves everything: all but the dtypes, which make no difference to memory. By address all is as it is over native.
const fullSuite = `^([b-z]|all_(gather|to_all))|^all_reduce/(errors|[a-z_]+/(f32|bf16)/)`

// TestSuiteOnGPUs: the suite over simulated GPUs, with everything by address, with everything by the library, and with some of each.
func TestSuiteOnGPUs(t *testing.T) {
	full := os.Getenv("SYMMEM_TEST_MATRIX") == "full"
	near := shortSuite
	if testing.Short() {
		near = `^(memory|window|signal)/`
	}
	apart := near
	if full {
		apart = fullSuite
	}
	const byCounts = `^all_to_all_v/` // which moves what is near and what is far in one step
	const someNear = `^(groups|transfer)/|^memory/adopt`
	// Over several islands: everything by rails, what auto takes there, and what a rank does with some peers by address and with others not.
	rails := `^(broadcast|reduce|reduce_scatter|all_gather|all_to_all)/hierarchical/(large|delayed|overtaken|epoch_wrap|lacking)$|^all_reduce/hierarchical/(rounding$|f32/(1023|205[01])/|bf16/1009/)|` +
		`^(graph|heap)/all_reduce/hierarchical$|^lifetime/delayed/hierarchical$|^rank/collectives$|^[a-z_]+/errors$|` + someNear
	most := rails
	if full { // every form, between two pairs
		most = `/hierarchical|^rank/|^all_reduce/auto/|^[a-z_]+/errors$|` + someNear
	}
	for _, w := range []struct {
		backend  string
		hosts    []string // by rank
		cases    string
		least    int // cases that are run
		pointers bool
		always   bool
	}{
		{"nixl-simulated", hostsOf(2), near, 20, true, true},
		{"nixl-simulated-apart", hostsOf(2), apart, 20, false, true},
		{"nixl-simulated", []string{"a", "b", "a"}, byCounts, 5, false, true},
		{"nixl-simulated", []string{"a", "a", "b", "b"}, most, 20, false, true},
		{"nixl-simulated", []string{"a", "b", "a"}, rails, 20, false, false},
		{"nixl-simulated", []string{"a", "b", "c", "c"}, rails, 20, false, false},
		{"nixl-simulated-apart", hostsOf(1), byCounts, 5, false, false},
		{"nixl-simulated-apart", hostsOf(4), byCounts, 5, false, false},
		{"nixl-simulated", []string{"a", "a", "b", "c", "b", "a", "c", "c"}, byCounts, 5, false, false},
	} {
		if !w.always && !full {
			continue
		}
		t.Run(fmt.Sprintf("%s/%d%s", w.backend, len(w.hosts), strings.Join(w.hosts, "")), func(t *testing.T) {
			s, size := simulations[w.backend], len(w.hosts)
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
			defer cancel()
			var err error
			s.net = &network{}
			if w.cases == byCounts {
				s.net.delay = 50 * time.Microsecond
			}
			s.machine, err = simcuda.New(simcuda.Config{GPUs: size, Seed: 1})
			require.NoError(t, err)
			for i := range size {
				d, err := cuda.Open(&cuda.Options{Driver: s.machine.Driver(), LocalRank: i})
				require.NoError(t, err)
				s.net.gpus = append(s.net.gpus, d)
			}
			ranks := openOn(ctx, t, w.backend, w.hosts)
			o := &suite.Options{Device: device.CUDA, Backend: Name, World: size, Short: true, Simulated: true, Filter: regexp.MustCompile(w.cases)}
			var wg sync.WaitGroup
			passed, skipped := 0, map[string]int{}
			for _, r := range ranks {
				assert.Equal(t, w.pointers, r.Capabilities().PeerPointers)
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
			assert.GreaterOrEqual(t, passed, w.least)
			alone := w.pointers && !testing.Short() // all ranks are one island, and cases for several are among those of lifetime
			assert.Equal(t, alone, skipped[suite.SeveralIslands] > 0, "cases for several islands")
			for _, d := range s.net.gpus {
				assert.NoError(t, d.Close())
			}
			assert.NoError(t, s.machine.Err())
			assert.Empty(t, s.machine.Left())
		})
	}
}

// openOn opens ranks of this process that appear to be on those hosts.
func openOn(ctx context.Context, t *testing.T, name string, hosts []string) []*symmem.Rank {
	cfg := config.Default()
	cfg.Backend, cfg.Multicast, cfg.KernelTimeout = []string{name}, config.MulticastOff, 45*time.Second
	if !slices.ContainsFunc(hosts, func(h string) bool { return h != "" }) {
		ranks, err := symmem.OpenLocal(ctx, len(hosts), cfg, nil)
		require.NoError(t, err)
		return ranks
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	socket, err := l.(*net.TCPListener).File()
	require.NoError(t, err)
	cfg.RendezvousAddr, cfg.WorldSize = l.Addr().String(), len(hosts)
	cfg.RendezvousFD, err = unix.Dup(int(socket.Fd())) // which is rank 0's
	require.NoError(t, errors.Join(err, l.Close(), socket.Close()))
	ranks := make([]*symmem.Rank, len(hosts))
	var wg sync.WaitGroup
	for rank, host := range hosts {
		wg.Go(func() {
			cfg := cfg
			cfg.Rank, cfg.LocalRank = rank, len(slices.DeleteFunc(slices.Clone(hosts[:rank]), func(h string) bool { return h != host }))
			var err error
			ranks[rank], err = symmem.Open(ctx, cfg, &symmem.Options{Environ: func() []string { return nil }, BootID: host})
			assert.NoError(t, err)
		})
	}
	wg.Wait()
	require.False(t, t.Failed())
	return ranks
}
