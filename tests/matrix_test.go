// Package tests runs the correctness suite over every backend, world size and way to start ranks, and kills ranks.
package tests

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/backend"
	_ "github.com/symmem/symmem/backend/all"
	"github.com/symmem/symmem/backend/host"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/tests/suite"
)

// worlds are the world sizes of the whole matrix, in which nearly all run with goroutines and with processes. fullWorld is the one at which the large cases run too: over
// memory that ranks share with processes, and over other memory with goroutines. The
// short matrix starts goroutines at the sizes of shortGoroutines, or of shortFar where there are no peer pointers, and processes at those of shortProcesses.
var (
	worlds          = []int{1, 2, 3, 4, 5, 6, 7, 8}
	shortGoroutines = []int{1, 2, 5}
	shortFar        = []int{3}
	shortProcesses  = []int{2, fullWorld}
	// Of isles, which differs from far in plans only, the whole matrix has these.
	islesGoroutines = []int{3, 5, 8}
	islesProcesses  = []int{5}
	// What processes add to goroutines they add at every size alike: of odd sizes, the whole matrix has processes of host at three, and of isles, which is far with islands, at five.
	hostProcesses = []int{1, 2, 3, fullWorld, 8}
	farProcesses  = []int{1, 2, fullWorld, 8}
)

const fullWorld = 4

// matrixVariable is "full" for the whole matrix; otherwise it is the short one, in which most world sizes are run once.
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
	return &suite.Options{Device: deviceKind(t, name), Backend: name, World: size, Short: size != fullWorld || !wholeMatrix(t) || testing.Short()}
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
	cfg.Backend, cfg.Multicast = []string{name}, multicastSetting()
	ranks, err := symmem.OpenLocal(t.Context(), 1, cfg, nil)
	require.NoError(t, err)
	kinds[name] = ranks[0].Device().Kind()
	require.NoError(t, ranks[0].Close(t.Context()))
	return kinds[name]
}

// TestMatrix runs the suite on every backend at every world size, with goroutines and with processes. Each case is a sub-test, which
// -run and -skip can choose: a world runs those of its cases that are chosen, one after the other.
func TestMatrix(t *testing.T) {
	t.Parallel()
	for _, name := range backend.Names() {
		t.Run("backend="+name, func(t *testing.T) {
			requireBackend(t, name)
			whole := wholeMatrix(t)
			// Worlds of a CPU run side by side: their ranks wait more than they work. A GPU is one world's alone.
			aside := func(*testing.T) {}
			if deviceKind(t, name) == device.Host {
				aside = (*testing.T).Parallel
			}
			goroutines, processes := worlds, worlds
			switch {
			case whole && name == islesName:
				goroutines, processes = islesGoroutines, islesProcesses
			case whole && name == farName:
				processes = farProcesses
			case whole && name == host.Name:
				processes = hostProcesses
			case !whole:
				goroutines, processes = shortGoroutines, shortProcesses
				if !capabilities(t, name).PeerPointers {
					goroutines = shortFar
				}
			}
			for _, size := range worlds {
				if !slices.Contains(goroutines, size) && !slices.Contains(processes, size) {
					continue
				}
				t.Run(fmt.Sprintf("world=%d", size), func(t *testing.T) {
					requireGPUs(t, name, size)
					aside(t)
					if slices.Contains(goroutines, size) {
						t.Run("goroutines", func(t *testing.T) {
							aside(t)
							onGoroutines(t, name, size)
						})
					}
					if slices.Contains(processes, size) {
						t.Run("processes", func(t *testing.T) {
							aside(t)
							onProcesses(t, name, size)
						})
					}
				})
			}
		})
	}
	t.Run("backend="+simulatedName, onSimulated)
	for _, name := range slices.Sorted(maps.Keys(simulatedLibraries)) {
		t.Run("backend="+simulatedName+"_"+name, func(t *testing.T) { onSimulatedLibrary(t, name) })
	}
}

// onGoroutines runs the suite on ranks that share a process. It is not this one: cases look at what their process holds.
func onGoroutines(t *testing.T, name string, size int) {
	if c := capabilities(t, name); size > 1 && !c.RanksInOneProcess {
		_, err := symmem.OpenLocal(t.Context(), size, goroutinesConfig(name, kernelTimeout), nil)
		require.ErrorIs(t, err, symmem.ErrUnavailable, "a backend that has one rank in a process refuses more")
		require.ErrorContains(t, err, c.Why["ranks_in_one_process"])
		requireCapability(t, name, size, "ranks_in_one_process")
		return
	}
	runSuite(t, nil, name, size, 1, fmt.Sprintf("goroutines:%d", size))
}

// onProcesses runs the suite on ranks that are processes.
func onProcesses(t *testing.T, name string, size int) { onProcessesAt(t, nil, name, size) }

// onProcessesAt runs the suite on processes at other places; nil is here.
func onProcessesAt(t *testing.T, on *hosts, name string, size int) {
	runSuite(t, on, name, size, size, "suite")
}

// runSuite runs the job of a world of some ranks on some processes, and each case, if it is chosen, as a sub-test. The processes are told
// the name of a case when its turn comes.
func runSuite(t *testing.T, on *hosts, name string, size, processes int, job string) {
	opts := options(t, name, size)
	if deviceKind(t, name) == device.Host && (processes == 1) == capabilities(t, name).PeerPointers {
		opts.Short = true // see fullWorld
	}
	runCases(t, on, name, opts, processes, job)
}

// runCases is runSuite with the cases that the options choose.
func runCases(t *testing.T, on *hosts, name string, opts *suite.Options, processes int, job string) {
	size := opts.World
	if opts.Short {
		job += ":short"
	}
	results := make(chan suite.Result, 1)
	w := startWorld(t, on, processes, job, func(rank int, line json.RawMessage) {
		var res suite.Result
		if err := json.Unmarshal(line, &res); err != nil {
			res = suite.Result{Status: suite.Failed, Reason: fmt.Sprintf("rank %d said %q: %v", rank, line, err)}
		}
		select {
		case results <- res:
		default:
			t.Errorf("rank %d said more than the result of a case: %s", rank, line)
		}
	}, "SYMMEM_BACKEND="+backendOf(name), "SYMMEM_KERNEL_TIMEOUT="+kernelTimeout.String())
	var sum suite.Summary
	for _, c := range suite.Cases(opts) {
		alive := true
		t.Run(c.Name, func(t *testing.T) {
			require.Truef(t, strings.HasSuffix(t.Name(), "/"+c.Name), "case %q cannot be chosen by its name", c.Name)
			for _, p := range w.processes {
				_, _ = fmt.Fprintln(p.stdin, c.Name) // one that has ended is seen below
			}
			var res suite.Result
			select {
			case res = <-results:
			case <-w.ended:
				select {
				case res = <-results: // its last
				default:
					alive = false
					w.showNews(t)
					t.Fatal("the ranks have ended without a result")
				}
			}
			w.showNews(t)
			sum.Add(res)
			check(t, name, size, c.Name, res)
		})
		if !alive {
			break
		}
	}
	w.wait(t)
	for _, p := range w.processes {
		assert.NoErrorf(t, p.err, "rank %d", p.rank)
		assert.Truef(t, p.end.Done, "rank %d did not come to its end", p.rank)
		assert.Emptyf(t, p.end.Error, "rank %d", p.rank)
	}
	t.Log(sum)
}

// bootVariable pretends that a worker is on another machine: its value is that machine's boot id.
const bootVariable = "SYMMEM_TEST_BOOT_ID"

// suiteJob is one rank of the suite, which runs the cases whose names it reads.
func suiteJob(ctx context.Context, cfg config.Config, arg string, say func(any)) error {
	r, err := symmem.Open(ctx, cfg, &symmem.Options{BootID: os.Getenv(bootVariable)})
	if err != nil {
		return err
	}
	opts := &suite.Options{Device: r.Device().Kind(), Backend: r.Backend(), World: r.WorldSize(), Short: arg == "short"}
	var report func(suite.Result)
	if r.Rank() == 0 {
		report = func(res suite.Result) { say(res) }
	}
	chosen := chosenCases(opts)
	_, err = suite.Run(ctx, r, chosen.all(), opts, report)
	return errors.Join(err, chosen.err, r.Close(ctx))
}

// goroutinesConfig is the configuration of ranks that share a process.
func goroutinesConfig(backend string, kernelTimeout time.Duration) config.Config {
	cfg := config.Default()
	cfg.Backend = []string{backend}
	cfg.KernelTimeout = kernelTimeout
	cfg.Multicast = multicastSetting()
	return cfg
}

// goroutinesJob is all ranks of the suite, as many as arg says: "3" or "3:short".
func goroutinesJob(ctx context.Context, own config.Config, arg string, say func(any)) error {
	count, short, _ := strings.Cut(arg, ":")
	size, err := strconv.Atoi(count)
	if err != nil {
		return err
	}
	cfg := goroutinesConfig(own.Backend[0], own.KernelTimeout)
	cfg.Multicast = own.Multicast
	ranks, err := symmem.OpenLocal(ctx, size, cfg, nil)
	if err != nil {
		return err
	}
	return together(ctx, ranks, &suite.Options{Device: ranks[0].Device().Kind(), Backend: ranks[0].Backend(), World: size, Short: short == "short"}, say)
}

// together runs the cases whose names this process reads on ranks that share it, and closes them.
func together(ctx context.Context, ranks []*symmem.Rank, opts *suite.Options, say func(any)) (err error) {
	size := len(ranks)
	// One goroutine reads, and each rank gets the cases from it.
	each := make([]chan suite.Case, size)
	for i := range each {
		each[i] = make(chan suite.Case, 1)
	}
	sums, failed := make([]suite.Summary, size), make([]error, size)
	ended, stop := context.WithCancel(ctx)
	defer stop()
	var wg sync.WaitGroup
	for _, r := range ranks {
		wg.Go(func() {
			defer stop() // a rank that cannot go on must not leave the reader waiting
			var report func(suite.Result)
			if r.Rank() == 0 {
				report = func(res suite.Result) { say(res) }
			}
			i := r.Rank()
			sums[i], failed[i] = suite.Run(ctx, r, received(each[i]), opts, report)
			failed[i] = errors.Join(failed[i], r.Close(ctx))
		})
	}
	read := make(chan error, 1)
	go func() {
		chosen := chosenCases(opts)
		for c := range chosen.all() {
			for _, to := range each {
				select {
				case to <- c:
				case <-ended.Done():
				}
			}
		}
		read <- chosen.err
		for _, to := range each {
			close(to)
		}
	}()
	wg.Wait()
	for rank, err := range failed {
		if err != nil {
			failed[rank] = fmt.Errorf("rank %d: %w", rank, err)
		} else if sums[rank] != sums[0] {
			failed[rank] = fmt.Errorf("rank %d counts %v, and rank 0 %v", rank, sums[rank], sums[0])
		}
	}
	select {
	case err = <-read:
	default: // it still waits for a line, and the ranks have failed
	}
	return errors.Join(append(failed, err)...)
}
