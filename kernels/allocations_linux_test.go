package kernels

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/backend/host"
	"github.com/symmem/symmem/backend/native"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/simcuda"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// planKind is a constructor of plans, on tensors of n elements or so.
type planKind struct {
	name  string
	forms func(kind device.Kind) []Algorithm
	make  func(ctx context.Context, x *planTensors, n int64, a Algorithm) (*Plan, error)
}

// planTensors makes tensors that have had their rendezvous, and closes them.
type planTensors struct {
	m    *memory.Memory
	all  []*tensor.Tensor
	errs []error
}

func (x *planTensors) of(ctx context.Context, dtype tensor.DType, shape ...int64) *tensor.Tensor {
	t, err := tensor.Zeros(ctx, x.m, dtype, shape...)
	if err == nil {
		err = t.Rendezvous(ctx)
	}
	x.all, x.errs = append(x.all, t), append(x.errs, err)
	return t
}

func (x *planTensors) close(ctx context.Context) (err error) {
	for _, t := range slices.Backward(x.all) {
		err = errors.Join(err, t.Close(ctx))
	}
	return err
}

// planKinds are all kinds of plans, each in all forms that this package has.
var planKinds = []planKind{
	{"NewAllReduce", ownAlgorithms, allReduceOf},
	{"NewAllReduce, quantized", func(device.Kind) []Algorithm { return []Algorithm{QuantizedInt8} }, allReduceOf},
	{"NewAllReduceMany", func(device.Kind) []Algorithm { return []Algorithm{OneShot, TwoShot, Transfers} }, func(ctx context.Context, x *planTensors, n int64, a Algorithm) (*Plan, error) {
		one, other := x.of(ctx, tensor.Float32, n), x.of(ctx, tensor.Float32, n/2)
		return NewAllReduceMany(ctx, []Pair{{In: one}, {In: other}}, Sum, &Options{Algorithm: a})
	}},
	{"NewAllGatherMany", formsOf("NewAllGatherMany"), func(ctx context.Context, x *planTensors, n int64, a Algorithm) (*Plan, error) {
		size := int64(x.m.Group().Size())
		return NewAllGatherMany(ctx, []Pair{{In: x.of(ctx, tensor.Float32, n), Out: x.of(ctx, tensor.Float32, size*n)}, {In: x.of(ctx, tensor.Int8, n), Out: x.of(ctx, tensor.Int8, size*n)}}, &Options{Algorithm: a})
	}},
	{"NewReduceScatterMany", func(kind device.Kind) []Algorithm { // sums of f32 are pushed as vectors
		return slices.DeleteFunc(CollectiveAlgorithms("NewReduceScatterMany", kind), func(a Algorithm) bool { return a == OneShotLL })
	}, func(ctx context.Context, x *planTensors, n int64, a Algorithm) (*Plan, error) {
		size := int64(x.m.Group().Size())
		return NewReduceScatterMany(ctx, []Pair{{In: x.of(ctx, tensor.Float32, size*n), Out: x.of(ctx, tensor.Float32, n)}}, Sum, &Options{Algorithm: a})
	}},
	{"NewBroadcastMany", formsOf("NewBroadcastMany"), func(ctx context.Context, x *planTensors, n int64, a Algorithm) (*Plan, error) {
		return NewBroadcastMany(ctx, []tensor.SymmetricTensor{x.of(ctx, tensor.Float32, n), x.of(ctx, tensor.Int8, n)}, 0, &Options{Algorithm: a})
	}},
	{"NewAllReduceRMSNorm", func(device.Kind) []Algorithm { return []Algorithm{OneShot, TwoShot, Transfers} }, func(ctx context.Context, x *planTensors, n int64, a Algorithm) (*Plan, error) {
		return NewAllReduceRMSNorm(ctx, x.of(ctx, tensor.Float32, n/64+1, 64), normed(ctx, x, n), &Options{Algorithm: a})
	}},
	{"NewRMSNorm", func(device.Kind) []Algorithm { return []Algorithm{Auto} }, func(ctx context.Context, x *planTensors, n int64, a Algorithm) (*Plan, error) {
		return NewRMSNorm(ctx, x.of(ctx, tensor.Float32, n/64+1, 64), normed(ctx, x, n), &Options{Algorithm: a})
	}},
	{"NewBroadcast", formsOf("NewBroadcast"), func(ctx context.Context, x *planTensors, n int64, a Algorithm) (*Plan, error) {
		return NewBroadcast(ctx, x.of(ctx, tensor.Float32, n), 0, &Options{Algorithm: a})
	}},
	{"NewReduce", formsOf("NewReduce"), func(ctx context.Context, x *planTensors, n int64, a Algorithm) (*Plan, error) {
		return NewReduce(ctx, x.of(ctx, tensor.Float32, n), x.of(ctx, tensor.Float32, n), Sum, 0, &Options{Algorithm: a})
	}},
	{"NewAllGather", formsOf("NewAllGather"), func(ctx context.Context, x *planTensors, n int64, a Algorithm) (*Plan, error) {
		return NewAllGather(ctx, x.of(ctx, tensor.Float32, n), x.of(ctx, tensor.Float32, int64(x.m.Group().Size())*n), &Options{Algorithm: a})
	}},
	{"NewReduceScatter", formsOf("NewReduceScatter"), func(ctx context.Context, x *planTensors, n int64, a Algorithm) (*Plan, error) {
		return NewReduceScatter(ctx, x.of(ctx, tensor.Float32, int64(x.m.Group().Size())*n), x.of(ctx, tensor.Float32, n), Sum, &Options{Algorithm: a})
	}},
	{"NewAllToAll", formsOf("NewAllToAll"), func(ctx context.Context, x *planTensors, n int64, a Algorithm) (*Plan, error) {
		size := int64(x.m.Group().Size())
		return NewAllToAll(ctx, x.of(ctx, tensor.Float32, size*n), x.of(ctx, tensor.Float32, size*n), &Options{Algorithm: a})
	}},
	{"NewAllToAllV", formsOf("NewAllToAllV"), func(ctx context.Context, x *planTensors, n int64, a Algorithm) (*Plan, error) {
		size := int64(x.m.Group().Size())
		counts := x.of(ctx, tensor.Int64, size)
		rows := make([]int64, size)
		for q := range rows {
			rows[q] = n / size / int64(q+1)
		}
		if err := x.m.Device().CopyFromHost(counts.Ptr(), bytesOfInts(rows)); err != nil {
			return nil, err
		}
		return NewAllToAllV(ctx, x.of(ctx, tensor.Float32, n, 1), x.of(ctx, tensor.Float32, size*n, 1), counts, x.of(ctx, tensor.Int64, 2, size), &Options{Algorithm: a})
	}},
	{"NewBarrier", formsOf("NewBarrier"), func(ctx context.Context, x *planTensors, _ int64, a Algorithm) (*Plan, error) {
		return NewBarrier(ctx, x.m, &Options{Algorithm: a})
	}},
}

// ownAlgorithms are the forms of all-reduce that this package has.
func ownAlgorithms(kind device.Kind) []Algorithm {
	return slices.DeleteFunc(Algorithms(kind), func(a Algorithm) bool { return a >= algorithms })
}

func formsOf(constructor string) func(device.Kind) []Algorithm {
	return func(kind device.Kind) []Algorithm { return CollectiveAlgorithms(constructor, kind) }
}

func allReduceOf(ctx context.Context, x *planTensors, n int64, a Algorithm) (*Plan, error) {
	return NewAllReduce(ctx, x.of(ctx, tensor.Float32, n), Sum, &AllReduceOptions{Algorithm: a})
}

// normed is a norm of what an all-reduce of n elements or so gives.
func normed(ctx context.Context, x *planTensors, n int64) RMSNorm {
	return RMSNorm{
		Residual: LocalOf(x.of(ctx, tensor.Float32, n/64+1, 64).Local()), Weight: LocalOf(x.of(ctx, tensor.Float32, 64).Local()),
		Out: LocalOf(x.of(ctx, tensor.Float32, n/64+1, 64).Local()), Epsilon: 1e-5,
	}
}

// allocationRuns is how many runs of a plan are looked at.
const allocationRuns = 20

// counted counts what a number of runs allocate, by stack, leaving out the stacks that name something in beneath.
func counted(run func(), beneath ...string) map[string]int64 {
	rate := runtime.MemProfileRate
	defer func() { runtime.MemProfileRate = rate }()
	runtime.MemProfileRate = 1
	snapshot := func() map[[32]uintptr]int64 {
		for range 3 {
			runtime.GC() // the profile is that of a cycle before
		}
		n, _ := runtime.MemProfile(nil, true)
		records := make([]runtime.MemProfileRecord, n+1000)
		n, _ = runtime.MemProfile(records, true)
		all := map[[32]uintptr]int64{}
		for _, r := range records[:n] {
			all[r.Stack0] += r.AllocObjects
		}
		return all
	}
	before := snapshot()
	done := make(chan struct{})
	go func() { // whose stacks begin here
		defer close(done)
		for range allocationRuns {
			run()
		}
	}()
	<-done
	after := snapshot()
	found := map[string]int64{}
	for stack, n := range after {
		if n -= before[stack]; n == 0 {
			continue
		}
		var names []string
		frames := runtime.CallersFrames(stack[:slices.Index(append(stack[:], 0), 0)])
		for more := true; more; {
			var f runtime.Frame
			f, more = frames.Next()
			names = append(names, fmt.Sprintf("%s:%d", f.Function, f.Line))
		}
		text := strings.Join(names, "\n\t")
		if !slices.ContainsFunc(beneath, func(part string) bool { return strings.Contains(text, part) }) {
			found[text] += n
		}
	}
	return found
}

// running is a plan that each rank has made, in the same place.
type running struct {
	plans   []*Plan
	streams []device.Stream
	graphs  []device.Graph
}

// once runs every rank's plan once, or its graph, and waits.
func (x *running) once(ctx context.Context, graph bool) error {
	var err error
	for r, s := range x.streams {
		if graph {
			err = errors.Join(err, x.graphs[r].Launch(s))
		} else {
			err = errors.Join(err, x.plans[r].Run(s))
		}
	}
	for _, s := range x.streams {
		err = errors.Join(err, s.Synchronize(ctx))
	}
	return err
}

// allocates makes a plan of a kind on every rank, and has the first one look at what runs of it allocate. Collective.
func (x *running) allocates(ctx context.Context, m *memory.Memory, k planKind, a Algorithm, n int64) error {
	tensors := &planTensors{m: m}
	p, err := k.make(ctx, tensors, n, a)
	if err := errors.Join(append(tensors.errs, err)...); err != nil {
		return err
	}
	s, err := m.Device().NewStream()
	if err := errors.Join(err, s.BeginCapture(), p.Run(s)); err != nil {
		return err
	}
	g, err := s.EndCapture()
	if err != nil {
		return err
	}
	r := m.Group().Rank()
	x.plans[r], x.streams[r], x.graphs[r] = p, s, g
	if err := m.Group().Barrier(ctx, "made"); err != nil {
		return err
	}
	var found error
	for _, graph := range []bool{false, true} {
		if r > 0 {
			break
		}
		var failed error
		run := func() { failed = errors.Join(failed, x.once(ctx, graph)) }
		for range 5 {
			run() // as much is under way together as ever will be
		}
		for stack, n := range counted(run, beneathRuns...) {
			if n >= allocationRuns/2 { // what has to grow grows once
				found = errors.Join(found, fmt.Errorf("graph %t: %d in %d runs, of\n\t%s", graph, n, allocationRuns, stack))
			}
		}
		found = errors.Join(found, failed)
	}
	return errors.Join(found, m.Group().Barrier(ctx, "looked"), g.Close(), p.Close(ctx), s.Close(), tensors.close(ctx))
}

// beneathRuns is what may allocate in a run: the simulated driver, the backend that pretends to have no addresses, what the device looks at by the clock, and
// the runtime where goroutines wait for each other and types are asked for.
var beneathRuns = []string{
	"internal/simcuda.", "internal/ptxvm.", "backend/backendtest.", "device/cuda.(*watcher).", "runtime.acquireSudog", "runtime.buildTypeAssertCache", "runtime.newproc",
}

// TestRunsAllocateNothing: neither enqueueing a plan of any kind, in any form, nor running it allocates, eager and from a graph: on the host device, where
// peers have addresses and where not, and on GPUs.
func TestRunsAllocateNothing(t *testing.T) {
	const size = 2
	for _, where := range []string{"host", "far", "gpu"} {
		t.Run(where, func(t *testing.T) {
			elements := []int64{100, 300_000}
			open := func(g *group.Group) (backend.Backend, error) {
				b, err := host.New(g, nil)
				if err == nil && where == "far" {
					return backendtest.Far(b, g, nil), nil
				}
				return b, err
			}
			if where == "gpu" {
				elements = elements[:1]
				machine, err := simcuda.New(simcuda.Config{GPUs: size, Seed: 1})
				require.NoError(t, err)
				defer func() { assert.NoError(t, machine.Err()) }()
				open = func(g *group.Group) (backend.Backend, error) {
					return native.New(t.Context(), g, &native.Options{Driver: machine.Driver(), LocalRank: g.Rank(), Multicast: config.MulticastOff, KernelTimeout: time.Minute})
				}
			}
			x := &running{plans: make([]*Plan, size), streams: make([]device.Stream, size), graphs: make([]device.Graph, size)}
			backendtest.RequireAll(t, backendtest.OnRanks(t, size, nil, func(ctx context.Context, g *group.Group) error {
				b, err := open(g)
				if err != nil {
					return err
				}
				m := memory.New(b, g, &memory.Options{KernelTimeout: time.Minute})
				var failed error
				for _, k := range planKinds {
					for _, a := range k.forms(m.Device().Kind()) {
						if a.NeedsMulticast() || a.NeedsPeerPointers() && where == "far" {
							continue
						}
						for _, n := range elements {
							if err := x.allocates(ctx, m, k, a, n); err != nil {
								failed = errors.Join(failed, fmt.Errorf("%s, %s, %d elements: %w", k.name, a, n, err))
							}
						}
					}
				}
				return errors.Join(failed, m.Close(ctx))
			}))
		})
	}
}
