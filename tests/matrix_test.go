// Package tests runs the correctness suite over every backend, world size and way to start ranks, and kills ranks.
package tests

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
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
	_ "github.com/symmem/symmem/backend/all"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/tests/suite"
)

// worlds are the world sizes of the matrix. fullWorld is the one at which the large cases run too, where the whole matrix is run, and
// shortProcesses are those at which the short matrix starts processes; goroutines it starts at all but fullWorld.
var (
	worlds         = []int{1, 2, 3, 4, 5, 8}
	shortProcesses = []int{2, fullWorld}
)

const fullWorld = 4

// matrixVariable is "full" for the whole matrix; otherwise it is the short one, in which each world size is run once, and one twice.
const matrixVariable = "SYMMEM_TEST_MATRIX"

func wholeMatrix(t *testing.T) bool {
	switch v := os.Getenv(matrixVariable); v {
	case "full":
		return true
	case "", "short":
		return false
	default:
		t.Fatalf("%s is %q; allowed are short and full", matrixVariable, v)
		return false
	}
}

// kernelTimeout bounds device waits in tests: long enough for a busy machine, short enough to see a hang.
const kernelTimeout = 45 * time.Second

// requireBackend skips the test if the backend is not on this machine, and says what is missing; under
// SYMMEM_TEST_REQUIRE, a comma list of names, that is a failure.
func requireBackend(t *testing.T, name string) {
	t.Helper()
	f, err := backend.Lookup(name)
	require.NoError(t, err)
	if _, err = f.Probe(t.Context(), &backend.Env{Getenv: os.Getenv, Logger: slog.New(slog.DiscardHandler)}); err == nil {
		return
	}
	if !errors.Is(err, errs.ErrUnavailable) && !errors.Is(err, errs.ErrUnsupported) {
		require.NoError(t, err)
	}
	if slices.Contains(required(), name) {
		require.NoErrorf(t, err, "SYMMEM_TEST_REQUIRE names backend %s", name)
	}
	t.Skipf("backend %s: %v", name, err)
}

// capabilities are what the backend says of itself on this machine.
func capabilities(t *testing.T, name string) backend.Capabilities {
	t.Helper()
	f, err := backend.Lookup(name)
	require.NoError(t, err)
	c, err := f.Probe(t.Context(), &backend.Env{Getenv: os.Getenv, Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	return c
}

// options are the suite's for a backend and world size.
func options(t *testing.T, name string, size int) *suite.Options {
	return &suite.Options{Device: deviceKind(t, name), Backend: name, World: size, Short: size != fullWorld || !wholeMatrix(t) || testing.Short(), Filter: filter()}
}

// kinds remembers what deviceKind has found out, by backend.
var kinds = map[string]device.Kind{}

// deviceKind opens the backend, which is there, for one rank and asks what kind of device it works on.
func deviceKind(t *testing.T, name string) device.Kind {
	t.Helper()
	if kind, known := kinds[name]; known {
		return kind
	}
	cfg := config.Default()
	cfg.Backend = []string{name}
	ranks, err := symmem.OpenLocal(t.Context(), 1, cfg, nil)
	require.NoError(t, err)
	kinds[name] = ranks[0].Device().Kind()
	require.NoError(t, ranks[0].Close(t.Context()))
	return kinds[name]
}

// filter keeps the cases that SYMMEM_TEST_FILTER, a regular expression, matches: nil, all of them, if it is not set.
func filter() *regexp.Regexp {
	if f := os.Getenv("SYMMEM_TEST_FILTER"); f != "" {
		return regexp.MustCompile(f)
	}
	return nil
}

// TestMatrix runs the suite on every backend at every world size, with goroutines and with processes.
func TestMatrix(t *testing.T) {
	for _, name := range backend.Names() {
		t.Run("backend="+name, func(t *testing.T) {
			requireBackend(t, name)
			for _, size := range worlds {
				t.Run(fmt.Sprintf("world=%d", size), func(t *testing.T) {
					requireGPUs(t, name, size)
					whole := wholeMatrix(t)
					if whole || size != fullWorld {
						t.Run("goroutines", func(t *testing.T) { onGoroutines(t, name, size) })
					}
					if whole || slices.Contains(shortProcesses, size) {
						t.Run("processes", func(t *testing.T) { onProcesses(t, name, size) })
					}
				})
			}
		})
	}
}

func onGoroutines(t *testing.T, name string, size int) {
	ctx, cancel := context.WithTimeout(t.Context(), worldTimeout)
	defer cancel()
	cfg := config.Default()
	cfg.Backend = []string{name}
	cfg.KernelTimeout = kernelTimeout
	cfg.Multicast = multicastSetting()
	ranks, err := symmem.OpenLocal(ctx, size, cfg, nil)
	if c := capabilities(t, name); size > 1 && !c.RanksInOneProcess {
		require.ErrorIs(t, err, symmem.ErrUnavailable, "a backend that has one rank in a process refuses more")
		require.ErrorContains(t, err, c.Why["ranks_in_one_process"])
		requireCapability(t, name, size, "ranks_in_one_process")
		return
	}
	require.NoError(t, err)
	opts := options(t, name, size)
	cases := suite.Cases(opts)
	seen := checker{t: t, backend: name, world: size}
	var sums = make([]suite.Summary, size)
	var wg sync.WaitGroup
	for _, r := range ranks {
		wg.Go(func() {
			var report func(suite.Result)
			if r.Rank() == 0 {
				report = seen.check
			}
			var err error
			sums[r.Rank()], err = suite.Run(ctx, r, cases, opts, report)
			if err := errors.Join(err, r.Close(ctx)); err != nil {
				t.Errorf("rank %d: %v", r.Rank(), err)
			}
		})
	}
	wg.Wait()
	for _, sum := range sums {
		assert.Equal(t, sums[0], sum, "ranks count alike")
	}
	seen.log(sums[0])
}

func onProcesses(t *testing.T, name string, size int) { onProcessesAt(t, nil, name, size) }

// onProcessesAt runs the suite on processes at other places; nil is here.
func onProcessesAt(t *testing.T, on *hosts, name string, size int) {
	job := "suite"
	opts := options(t, name, size)
	if opts.Short {
		job = "suite:short"
	}
	world := runWorldOn(t, on, size, job, "SYMMEM_BACKEND="+name, "SYMMEM_KERNEL_TIMEOUT="+kernelTimeout.String())
	var sum suite.Summary
	seen := checker{t: t, backend: name, world: size}
	for _, line := range world[0].lines {
		var res suite.Result
		require.NoError(t, json.Unmarshal(line, &res))
		sum.Add(res)
		seen.check(res)
	}
	for _, p := range world {
		assert.NoErrorf(t, p.err, "rank %d", p.rank)
		assert.Truef(t, p.end.Done, "rank %d did not come to its end", p.rank)
		assert.Emptyf(t, p.end.Error, "rank %d", p.rank)
	}
	assert.Equal(t, len(suite.Cases(opts)), sum.Passed+sum.Failed+sum.Skipped)
	seen.log(sum)
}

// bootVariable pretends that a worker is on another machine: its value is that machine's boot id.
const bootVariable = "SYMMEM_TEST_BOOT_ID"

// suiteJob is one rank of the suite.
func suiteJob(ctx context.Context, cfg config.Config, arg string, say func(any)) error {
	r, err := symmem.Open(ctx, cfg, &symmem.Options{BootID: os.Getenv(bootVariable)})
	if err != nil {
		return err
	}
	opts := &suite.Options{Device: r.Device().Kind(), Backend: r.Backend(), World: r.WorldSize(), Short: arg == "short", Filter: filter()}
	var report func(suite.Result)
	if r.Rank() == 0 {
		report = func(res suite.Result) { say(res) }
	}
	_, err = suite.Run(ctx, r, suite.Cases(opts), opts, report)
	return errors.Join(err, r.Close(ctx))
}
