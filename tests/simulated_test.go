package tests

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/backend/native"
	"github.com/symmem/symmem/backend/nccl"
	"github.com/symmem/symmem/backend/nvshmem"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/simcuda"
	"github.com/symmem/symmem/internal/simlib"
	"github.com/symmem/symmem/tests/suite"
)

// simulatedName is what the matrix calls backend native on simulated GPUs, which have multicast. It is no backend that a program could choose. Backends
// over libraries, which are simulated too, have their own names behind it: "simulated_nccl".
const simulatedName = "simulated"

// simulatedLibraries are the backends that work on simulated GPUs with a simulated library, and the cases by world size: those that depend on where
// memory comes from, the library's own collectives, and of each kernel a few runs. The short matrix has those of the first map, the whole one all.
var (
	simulatedLibraries = map[string]map[int]string{
		nccl.Name: {
			2: libraryCases + `|^all_reduce/nccl[a-z_]*/(f32|bf16)/|^all_reduce/nccl[a-z_]*/odd_place|^(broadcast|reduce|reduce_scatter|all_gather|all_to_all)/nccl/.*(delayed|f32)`,
			3: `^memory/|^groups/(overlapping|errors)|^all_reduce/[a-z_]+_multimem/f32/.*1023|^all_reduce/nccl[a-z_]*/f32/.*2051`,
		},
		nvshmem.Name: {
			2: libraryCases + `|^all_reduce/nvshmem/(f32|bf16)/|^all_reduce/nvshmem/odd_place|^(broadcast|reduce_scatter|all_gather|all_to_all|barrier_plan)/nvshmem/`,
			3: `^memory/|^groups/(overlapping|errors)|^all_reduce/[a-z_]+_multimem/f32/.*1023|^all_reduce/nvshmem/f32/.*2051`,
		},
	}
	wholeLibraries = map[int]string{
		1: `^(memory|window|heap|bad_input)/`,
		2: `^(memory|window|slice|heap|agreement|groups|bad_input|signal|transfer|graph)/|^lifetime/(delayed|busy)|^all_reduce/(nccl|nvshmem)|` +
			`^(broadcast|reduce|reduce_scatter|all_gather|all_to_all)/(nccl|nvshmem)/|^all_reduce/[a-z_]+/(f32|bf16)/.*(1023|2051)`,
		4: `^(memory|signal)/|^groups/(overlapping|again)|^all_reduce/(nccl|nvshmem)[a-z_]*/(f32|u8)/|^all_reduce/[a-z_]+_multimem/f32/.*1023`,
	}
)

const libraryCases = `^(memory|window|slice|heap|agreement|groups|bad_input|signal)/|^transfer/(put|get)|^graph/|^all_reduce/[a-z_]+/f32/.*1023|^all_to_all_v/transfers/re`

// seedVariable is the seed of simulated GPUs: a number. Without it the short matrix takes 1, and the whole one several.
const seedVariable = "SYMMEM_TEST_SEED"

// The cases of the short matrix by world size, which take half a minute of one core together. The whole matrix runs all cases.
var shortSimulated = map[int]string{
	1: `^all_reduce/[a-z_]+/f32/|^memory/|^lifetime/`,
	2: `^(memory|window|slice|heap|agreement|groups|bad_input|signal|transfer|graph|lifetime)/|^all_reduce/errors|^plans/(room|max_blocks|exclusive|[a-z_]+/other_memory)$|` +
		`^plans/two_shot_(flow|multimem)/full_size|^all_reduce/[a-z_]+/(f32|bf16)/.*(15|1023|1009|2050|2051)|` +
		`^(broadcast|reduce|reduce_scatter|all_gather|all_to_all)/.*/(delayed|overtaken|epoch_wrap)$|^all_to_all_v/|` +
		`^(broadcast|reduce|reduce_scatter|all_gather)/one_shot_multimem/(every_count|lacking|two_plans)$|^all_reduce_many/one_shot_push/whole/(lists|delayed|two_plans|epoch_wrap)$|^same_bits/f32/sum$|` +
		`^(all_gather|reduce_scatter|broadcast)_many/one_shot_(ll|push|pull)/(delayed|overtaken|epoch_wrap)$|^all_gather_many/errors$`,
	3: `^all_reduce/[a-z_]+/(f16|u8|f64)/.*(17|2050)|^all_reduce/[a-z_]+/(rounding|special_values|epoch_wrap)$|^(all_gather|broadcast)_many/one_shot_ll/(lists|overtaken)$|^reduce_scatter_many/one_shot_push/overtaken$`,
	5: `^all_reduce/[a-z_]+/(f32|i16)/(out/)?(1|17|1023)/`,
	8: `^all_reduce/[a-z_]+/(f32|bf16)/.*(1023|2051)|^all_reduce/[a-z_]+_multimem/f16/|^memory/multicast|^signal/|^(reduce|all_to_all)/[a-z_]+/delayed$`,
}

// simulatedProcesses are the cases of the short matrix with ranks that are processes, each with a machine of its own, by world size. They pass each
// other memory and multicast objects as descriptors of files.
var simulatedProcesses = map[int]string{
	2: `^(memory|window|signal|transfer)/|^all_reduce/[a-z_]+/(f32|bf16)/.*(1023|2051)/`,
}

// simulatedWeak are the cases with weak memory, by world size, of the short matrix and of the whole one.
var (
	simulatedWeak = map[int]string{
		2: `^signal/|^graph/|^transfer/put|^all_reduce/[a-z_]+/f32/.*1023/|^all_to_all_v/transfers/re|^(reduce|all_gather)/.*/other_stream$`,
	}
	wholeWeak = map[int]string{
		2: `^(signal|graph|transfer|window)/|^all_reduce/[a-z_]+/(f32|bf16)/.*(15|1023)/|^(broadcast|reduce|reduce_scatter|all_gather|all_to_all)/.*/(delayed|other_stream)$|^all_to_all_v/|^plans/one_shot_pull/other_stream$`,
		3: `^signal/|^all_reduce/[a-z_]+/f32/.*1023/`,
	}
)

const weakSuffix = "+weak"

// teamsSuffix is for simulated NCCL whose windows have addresses among so many ranks only, as on several hosts: "nccl@2".
const teamsSuffix = "@"

// wholeSeeds are the seeds of the whole matrix, in which the world sizes of wholeSimulated run all cases, and the others those of the short one. Two
// processes run all cases, too.
var (
	wholeSimulated = map[int]bool{3: true}
	wholeSeeds     = []uint64{1, 2}
)

// onSimulated runs the suite on backend native and simulated GPUs, on goroutines of one process.
func onSimulated(t *testing.T) {
	if runtime.GOOS != "linux" {
		_, err := simcuda.New(simcuda.Config{})
		require.ErrorIs(t, err, symmem.ErrUnavailable)
		skipWithout(t, simulatedName, "GPUs are simulated on Linux")
	}
	whole := wholeMatrix(t)
	sizes, seeds := slices.Sorted(maps.Keys(shortSimulated)), wholeSeeds
	if !whole {
		seeds = []uint64{1}
	}
	if given := os.Getenv(seedVariable); given != "" {
		seed, err := strconv.ParseUint(given, 10, 64)
		require.NoErrorf(t, err, "%s is %q, and a number is allowed", seedVariable, given)
		seeds = []uint64{seed}
	}
	weak := simulatedWeak
	if whole {
		weak = wholeWeak
	}
	for _, size := range slices.Sorted(maps.Keys(weak)) {
		t.Run(fmt.Sprintf("world=%d/seed=%d/weak", size, seeds[0]), func(t *testing.T) {
			t.Parallel()
			opts := &suite.Options{Device: device.CUDA, Backend: native.Name, World: size, Short: true, Simulated: true, Filter: regexp.MustCompile(weak[size])}
			runCases(t, nil, simulatedName, opts, 1, fmt.Sprintf("simulated:%d,%d,%s%s", size, seeds[0], native.Name, weakSuffix))
		})
	}
	for _, size := range sizes {
		for _, seed := range seeds {
			t.Run(fmt.Sprintf("world=%d/seed=%d", size, seed), func(t *testing.T) {
				t.Parallel()
				opts := &suite.Options{Device: device.CUDA, Backend: native.Name, World: size, Short: true, Simulated: true}
				if !whole || !wholeSimulated[size] || seed != seeds[0] {
					opts.Filter = regexp.MustCompile(shortSimulated[size])
				}
				runCases(t, nil, simulatedName, opts, 1, fmt.Sprintf("simulated:%d,%d", size, seed))
			})
			filter := simulatedProcesses[size]
			if filter == "" || whole && seed != seeds[0] {
				continue
			}
			t.Run(fmt.Sprintf("world=%d/seed=%d/processes", size, seed), func(t *testing.T) {
				t.Parallel()
				opts := &suite.Options{Device: device.CUDA, Backend: native.Name, World: size, Short: true, Simulated: true}
				if !whole {
					opts.Filter = regexp.MustCompile(filter)
				}
				runCases(t, nil, simulatedName, opts, size, fmt.Sprintf("simulated_process:%d,%d", size, seed))
			})
		}
	}
}

// simulatedJob is all ranks of the suite on simulated GPUs; arg is their number and the seed, "3,1:short", and maybe the backend, "3,1,native+weak" with weak memory. Whatever is left in the GPUs' driver in the
// end, or was used wrongly, is an error.
func simulatedJob(ctx context.Context, own config.Config, arg string, say func(any)) error {
	arg, short, _ := strings.Cut(arg, ":")
	var size int
	var seed uint64
	if _, err := fmt.Sscanf(arg, "%d,%d", &size, &seed); err != nil {
		return err
	}
	name := native.Name
	if parts := strings.SplitN(arg, ",", 3); len(parts) == 3 {
		name = parts[2]
	}
	name, weak := strings.CutSuffix(name, weakSuffix)
	name, teams, spread := strings.Cut(name, teamsSuffix)
	m, err := simcuda.New(simcuda.Config{GPUs: size, Seed: seed, Multicast: true, Weak: weak})
	if err != nil {
		return err
	}
	cast := config.MulticastOn
	if size == 1 || spread {
		cast = config.MulticastOff
	}
	cfg := goroutinesConfig(name, own.KernelTimeout)
	var o any
	left := func() []string { return nil }
	switch name {
	case nccl.Name:
		lib := simlib.NewNCCL(m)
		if spread {
			perTeam, err := strconv.Atoi(teams)
			if err != nil {
				return err
			}
			lib.Spread(perTeam)
		}
		o, left = &nccl.Options{Driver: m.Driver(), Functions: lib.Functions(), Multicast: cast}, lib.Left
	case nvshmem.Name:
		lib := simlib.NewNVSHMEM(m)
		o, left = &nvshmem.Options{Driver: m.Driver(), Calls: lib.Load, Multicast: cast, Chunk: 32 << 20}, lib.Left
	default:
		o = &native.Options{Driver: m.Driver(), Multicast: cast}
	}
	ranks, err := symmem.OpenLocal(ctx, size, cfg, &symmem.Options{Backend: o})
	if err != nil {
		return err
	}
	err = together(ctx, ranks, &suite.Options{Device: device.CUDA, Backend: name, World: size, Short: short == "short", Simulated: true}, say)
	if rest := left(); len(rest) > 0 {
		err = errors.Join(err, fmt.Errorf("the simulated library still has %s", strings.Join(rest, ", ")))
	}
	return errors.Join(err, m.Err())
}

// onSimulatedLibrary runs the suite on a backend over a simulated library.
func onSimulatedLibrary(t *testing.T, name string) {
	if runtime.GOOS != "linux" {
		skipWithout(t, simulatedName, "GPUs are simulated on Linux")
	}
	chosen := simulatedLibraries[name]
	if wholeMatrix(t) {
		chosen = maps.Clone(chosen)
		maps.Copy(chosen, wholeLibraries)
	}
	for _, size := range slices.Sorted(maps.Keys(chosen)) {
		t.Run(fmt.Sprintf("world=%d/seed=1", size), func(t *testing.T) {
			t.Parallel()
			opts := &suite.Options{Device: device.CUDA, Backend: name, World: size, Short: true, Simulated: true, Filter: regexp.MustCompile(chosen[size])}
			runCases(t, nil, simulatedName+"_"+name, opts, 1, fmt.Sprintf("simulated:%d,1,%s", size, name))
		})
	}
	if name == nccl.Name {
		t.Run("world=4/teams=2", func(t *testing.T) {
			t.Parallel()
			opts := &suite.Options{Device: device.CUDA, Backend: name, World: 4, Short: true, Simulated: true}
			runCases(t, nil, simulatedName+"_"+name, opts, 1, fmt.Sprintf("simulated:4,1,%s%s2", name, teamsSuffix))
		})
	}
}

// simulatedProcessJob is one rank of the suite, with simulated GPUs of its own process.
func simulatedProcessJob(ctx context.Context, cfg config.Config, arg string, say func(any)) error {
	arg, short, _ := strings.Cut(arg, ":")
	var size int
	var seed uint64
	if _, err := fmt.Sscanf(arg, "%d,%d", &size, &seed); err != nil {
		return err
	}
	m, err := simcuda.New(simcuda.Config{GPUs: size, Seed: seed + uint64(cfg.Rank), Multicast: true})
	if err != nil {
		return err
	}
	r, err := symmem.Open(ctx, cfg, &symmem.Options{Backend: &native.Options{Driver: m.Driver(), Multicast: config.MulticastOn}})
	if err != nil {
		return err
	}
	opts := &suite.Options{Device: device.CUDA, Backend: native.Name, World: size, Short: short == "short", Simulated: true}
	var report func(suite.Result)
	if r.Rank() == 0 {
		report = func(res suite.Result) { say(res) }
	}
	chosen := chosenCases(opts)
	_, err = suite.Run(ctx, r, chosen.all(), opts, report)
	return errors.Join(err, chosen.err, r.Close(ctx), m.Err())
}

// backendOf is the backend that a name of the matrix stands for.
func backendOf(name string) string {
	if name == simulatedName {
		return native.Name
	}
	return strings.TrimPrefix(name, simulatedName+"_")
}
