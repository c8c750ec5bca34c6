package kernels

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/backend/host"
	"github.com/symmem/symmem/backend/native"
	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/simcuda"
	"github.com/symmem/symmem/kernels/ptx"
	"github.com/symmem/symmem/kernels/tuning"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// wholeTest is a collective, and how the name of the kernel begins that it takes.
type wholeTest struct {
	collectiveTest
	size   int
	kernel string
}

func wholeTests() (all []wholeTest) {
	patterns := map[string]string{"all-gather": "gather", "all-to-all": "exchange", "broadcast": "broadcast"}
	i := 0
	add := func(c collectiveTest, size int, kernel string) { all = append(all, wholeTest{c, size, kernel}) }
	for _, what := range []string{"all-gather", "all-to-all", "broadcast", "reduce-scatter", "reduce"} {
		for size := 2; size <= 9; size++ {
			for _, inPlace := range []bool{false, true} {
				if inPlace && (what == "broadcast" || what == "all-to-all") || inPlace && size%3 != 0 {
					continue
				}
				i++
				dtype := []tensor.DType{tensor.BFloat16, tensor.Float32, tensor.Float16}[i%3]
				vectors := int64([]int{1, 37, 150}[i/2%3])
				if size > 4 {
					vectors %= 100 // the machine that runs the kernels takes its time
				}
				n := int64(size) * vectors * 16 / dtype.Bytes()
				c := collectiveTest{what: what, algorithm: OneShotLL, dtype: dtype, op: []Op{Sum, Avg}[i%2], n: n, root: i % size, inPlace: inPlace}
				kernel, other := fmt.Sprintf("symmem_lines_%s_w%d", patterns[what], size), "symmem_lines"
				if c.combines() {
					c.algorithm = OneShotPush
					form := map[string]string{"reduce-scatter": "whole", "reduce": "root"}[what]
					kernel, other = fmt.Sprintf("symmem_scatter_%s_%s_sum_w%d", form, dtype, size), "symmem_scatter_push_"+dtype.String()
				} else if size%2 == 0 {
					c.dtype, c.n = tensor.Int8, n*dtype.Bytes() // moves take any dtype
				}
				if size > 8 {
					kernel = other
				}
				add(c, size, kernel)
				if size != 2 && size != 3 || inPlace {
					continue
				}
				odd := c
				odd.offset = 1 // element
				add(odd, size, other)
				odd = c
				odd.n -= int64(size) // shares, or blocks, of one element less
				add(odd, size, other)
				if c.combines() {
					odd = c
					odd.op = Max
					add(odd, size, other)
					odd = c
					odd.algorithm = OneShotLL
					add(odd, size, "symmem_scatter_ll_"+dtype.String())
				}
				if what == "all-gather" || what == "reduce-scatter" {
					odd = c
					odd.n-- // the last share is an element shorter than the others, which are whole vectors
					add(odd, size, other)
				}
			}
		}
	}
	return all
}

// TestWholeOnCUDA: collectives whose pieces are whole vectors of one length take the kernels for such, all others the general ones; as they were compiled,
// with the right results, eager and from a graph.
func TestWholeOnCUDA(t *testing.T) {
	for _, c := range wholeTests() {
		t.Run(fmt.Sprintf("size=%d/%s/%s/%s/%s/%d+%d/in_place=%t", c.size, c.what, c.algorithm, c.dtype, c.op, c.n, c.offset, c.inPlace), c.onCUDA)
	}
}

// onCUDA runs the collective, and fails unless it takes the kernel.
func (c wholeTest) onCUDA(t *testing.T) {
	onSimulated(t, c.size, func(ctx context.Context, dev *simDevice, m *memory.Memory) error {
		err := c.run(ctx, m, 0xab)
		for _, l := range dev.launches {
			if l.name != c.kernel {
				err = errors.Join(err, fmt.Errorf("kernel %s, not %s", l.name, c.kernel))
			}
		}
		if len(dev.launches) == 0 {
			err = errors.Join(err, errors.New("no kernel"))
		}
		return err
	})
}

// inChunksFrom makes shares of a reduce-scatter, and reduces between more than two ranks, go in chunks from so many bytes on.
func inChunksFrom(t *testing.T, bytes int64) {
	t.Helper()
	scatter, root := flowLeastBytes, rootFlowLeastBytes
	t.Cleanup(func() { flowLeastBytes, rootFlowLeastBytes = scatter, root })
	flowLeastBytes, rootFlowLeastBytes = bytes, func(int) int64 { return bytes }
}

// TestScatterInChunksOnCUDA: long shares that are whole vectors go by the kernel for such, with a bound of one block too, and short ones, or others, do not; so do reduces, whose
// last share is shorter.
func TestScatterInChunksOnCUDA(t *testing.T) {
	const least = 600
	inChunksFrom(t, least)
	for _, c := range wholeTests() {
		if !c.combines() || c.size > 4 && c.size != 8 {
			continue
		}
		switch bytes := c.n * c.dtype.Bytes(); {
		case c.what == "reduce-scatter" && bytes/int64(c.size) >= least:
			c.kernel = strings.Replace(c.kernel, "symmem_scatter_whole_", "symmem_scatter_flow_", 1)
		case c.what == "reduce" && c.size > 2 && bytes >= least:
			c.kernel = strings.Replace(c.kernel, "symmem_scatter_root_", "symmem_scatter_flow_", 1)
		}
		for _, blocks := range []int{0, 1, 3} {
			c.maxBlocks = blocks
			t.Run(fmt.Sprintf("size=%d/%s/%s/%s/%s/%d+%d/in_place=%t/blocks=%d", c.size, c.what, c.algorithm, c.dtype, c.op, c.n, c.offset, c.inPlace, blocks), c.onCUDA)
		}
	}
}

// wholeIsTold fails unless it is among what ranks compare of a plan that its tensors are whole vectors: rank 1 says that they are not. Collective.
func wholeIsTold(ctx context.Context, m *memory.Memory, s collective.Spec) error {
	same, ok := strings.CutSuffix(s.Parameters, ", whole")
	if !ok {
		return fmt.Errorf("parameters %q", s.Parameters)
	}
	if m.Group().Rank() == 1 {
		s.Parameters = same
	}
	p, err := collective.New(ctx, m, s)
	if err == nil {
		return errors.Join(errors.New("no error"), p.Close(ctx))
	}
	if !errors.Is(err, errs.ErrMismatch) || !strings.Contains(err.Error(), "whole") {
		return err
	}
	return nil
}

// TestWholeMovesTold: that pieces are whole vectors is among what the ranks compare, since the kernels would wait for each other's lines in vain.
func TestWholeMovesTold(t *testing.T) {
	for what, f := range map[string]func(m *maker) collectiveForm{
		"NewAllGather":     func(m *maker) collectiveForm { return &allGather{m} },
		"NewAllToAll":      func(m *maker) collectiveForm { return &allToAll{m} },
		"NewBroadcast":     func(m *maker) collectiveForm { return &broadcast{m, 0} },
		"NewReduceScatter": func(m *maker) collectiveForm { m.op = Sum; return &reduction{maker: m, scatter: true} },
		"NewReduce":        func(m *maker) collectiveForm { m.op = Sum; return &reduction{maker: m} },
	} {
		t.Run(what, func(t *testing.T) {
			onSimulated(t, 2, func(ctx context.Context, _ *simDevice, m *memory.Memory) error {
				x, err := tensor.Zeros(ctx, m, tensor.Float32, 192)
				if err != nil {
					return err
				}
				if err := x.Rendezvous(ctx); err != nil {
					return err
				}
				inElements, outElements := int64(64), int64(64)
				if what == "NewAllGather" {
					inElements = 32
				} else if what == "NewReduceScatter" {
					outElements = 32
				}
				in, inErr := x.Sub(0, inElements)
				out, outErr := x.Sub(64, outElements)
				s := collective.Spec{Name: what, Tensors: []tensor.SymmetricTensor{in, out}}
				if what == "NewBroadcast" {
					out, s.Tensors = in, s.Tensors[:1]
				}
				maker := newMaker(what, in, out, nil)
				if maker.algorithm = OneShotLL; what == "NewBroadcast" {
					maker.whole = in
				}
				if strings.HasPrefix(what, "NewReduce") {
					maker.algorithm = OneShotPush
				}
				f(maker).spec(&s)
				if err := errors.Join(inErr, outErr, s.Failure); err != nil {
					return err
				}
				return errors.Join(wholeIsTold(ctx, m, s), x.Close(ctx))
			})
		})
	}
}

// TestRoomInChunks: a reduce-scatter in chunks has a workspace with one place for each share of the others, and the ranks compare that it goes in chunks.
func TestRoomInChunks(t *testing.T) {
	inChunksFrom(t, 16)
	const share = 3<<13 + 16 // bytes: four chunks of blocks of 128 threads, the last of one vector
	onSimulated(t, 3, func(ctx context.Context, _ *simDevice, m *memory.Memory) error {
		x, err := mapped(ctx, m, 4*share/4)
		if err != nil {
			return err
		}
		in, inErr := x.Sub(0, 3*share/4)
		out, outErr := x.Sub(3*share/4, share/4)
		s := collective.Spec{Name: "NewReduceScatter", Tensors: []tensor.SymmetricTensor{in, out}}
		maker := newMaker("NewReduceScatter", in, out, nil)
		maker.algorithm, maker.op = OneShotPush, Sum
		(&reduction{maker: maker, scatter: true}).spec(&s)
		if want := 2 * ptx.ScatterSpan(ptx.OneShotPush, share); s.Workspace != want {
			err = fmt.Errorf("a workspace of %d bytes, and %d were expected", s.Workspace, want)
		}
		if !strings.HasSuffix(s.Parameters, ", whole in chunks") {
			err = errors.Join(err, fmt.Errorf("parameters %q", s.Parameters))
		}
		// A reduce to rank 1 of two shares less a vector, so that the first has four chunks too.
		in, inErr2 := x.Sub(0, (2*share-16)/4)
		reduce := collective.Spec{Name: "NewReduce", Tensors: []tensor.SymmetricTensor{in}}
		maker = newMaker("NewReduce", in, in, nil)
		maker.algorithm, maker.op, maker.whole = OneShotPush, Sum, in
		(&reduction{maker: maker, root: 1}).spec(&reduce)
		if reduce.Workspace != s.Workspace || !strings.HasSuffix(reduce.Parameters, ", whole in chunks") {
			err = errors.Join(err, fmt.Errorf("a workspace of %d bytes, and %d were expected; parameters %q", reduce.Workspace, s.Workspace, reduce.Parameters))
		}
		if !s.CUDA.EarlyEpoch || !reduce.CUDA.EarlyEpoch {
			err = errors.Join(err, errors.New("records say that a run has ended, and they do not say that its lines are empty"))
		}
		err = errors.Join(err, inErr2, reduce.Failure)
		return errors.Join(inErr, outErr, err, s.Failure, x.Close(ctx))
	})
}

// onGPUs runs f on ranks with a simulated GPU each, whose kernels wait so long for each other, under the driver of a simulated machine.
func onGPUs(t *testing.T, size int, patience time.Duration, f func(ctx context.Context, m *memory.Memory) error) {
	t.Helper()
	machine, err := simcuda.New(simcuda.Config{GPUs: size, Seed: 1})
	require.NoError(t, err)
	backendtest.RequireAll(t, backendtest.OnRanks(t, size, nil, func(ctx context.Context, g *group.Group) error {
		b, err := native.New(ctx, g, &native.Options{Driver: machine.Driver(), LocalRank: g.Rank(), Multicast: config.MulticastOff, KernelTimeout: patience})
		if err != nil {
			return err
		}
		m := memory.New(b, g, &memory.Options{KernelTimeout: patience})
		if err := f(ctx, m); err != nil {
			g.Abort("the test has failed")
			return err
		}
		return m.Close(ctx)
	}))
	assert.NoError(t, machine.Err())
}

// wholePlan is a plan that takes a kernel for whole vectors, with a tensor of its own.
type wholePlan struct {
	*Plan
	t   *tensor.Tensor
	out tensor.SymmetricTensor
}

var wholeKinds = []string{"all-gather", "all-to-all", "broadcast", "reduce-scatter", "reduce"}

// newWholePlan makes a plan of pieces of 64 float32 or so, of which rank 1 is root. Its input is all the rank's number plus 1.
func newWholePlan(ctx context.Context, m *memory.Memory, what string) (*wholePlan, error) {
	const piece = 64
	size := int64(m.Group().Size())
	t, err := tensor.Zeros(ctx, m, tensor.Float32, 2*size*piece)
	if err != nil {
		return nil, err
	}
	if err := t.Rendezvous(ctx); err != nil {
		return nil, err
	}
	lengths := map[string][2]int64{"all-gather": {piece, size * piece}, "all-to-all": {size * piece, size * piece}, "reduce-scatter": {size * piece, piece}, "reduce": {piece, piece}, "broadcast": {piece, piece}}[what]
	in, inErr := t.Sub(0, lengths[0])
	out, outErr := t.Sub(size*piece, lengths[1])
	if err := errors.Join(inErr, outErr); err != nil {
		return nil, err
	}
	w := &wholePlan{t: t, out: out}
	opts := &Options{Algorithm: OneShotLL, MaxBlocks: 2, FirstEpoch: 1<<32 - 2}
	switch what {
	case "all-gather":
		w.Plan, err = NewAllGather(ctx, in, out, opts)
	case "all-to-all":
		w.Plan, err = NewAllToAll(ctx, in, out, opts)
	case "broadcast":
		w.out = in
		w.Plan, err = NewBroadcast(ctx, in, 1, opts)
	case "reduce-scatter":
		opts.Algorithm = OneShotPush
		w.Plan, err = NewReduceScatter(ctx, in, out, Sum, opts)
	default:
		opts.Algorithm = OneShotPush
		w.Plan, err = NewReduce(ctx, in, out, Sum, 1, opts)
	}
	if err != nil {
		return nil, err
	}
	return w, w.fill(1)
}

// fill writes the rank's number plus first to all of the input.
func (w *wholePlan) fill(first int) error {
	rank, n := w.t.Rank(), w.t.NumElements()/2
	return tensor.Write(w.t.Local(), slices.Repeat([]float32{float32(rank + first)}, int(n)), 0)
}

// check says what of the output is not as fill(first) makes it.
func (w *wholePlan) check(what string, first int) error {
	rank, size := w.t.Rank(), w.t.WorldSize()
	got, err := tensor.ReadAll[float32](w.t.Local())
	if err != nil {
		return err
	}
	at := int64(w.out.Ptr()-w.t.Ptr()) / 4
	sum := float32(0)
	for r := range size {
		sum += float32(r + first)
	}
	for i := range w.out.NumElements() {
		want := sum
		switch what {
		case "all-gather", "all-to-all":
			want = float32(int(i)/64 + first)
		case "broadcast":
			want = float32(1 + first)
		case "reduce":
			if rank != 1 {
				want = 0
			}
		}
		if got[at+i] != want {
			return fmt.Errorf("%s on rank %d: element %d is %v, not %v", what, rank, i, got[at+i], want)
		}
	}
	return nil
}

func (w *wholePlan) close(ctx context.Context) error {
	return errors.Join(w.Plan.Close(ctx), w.t.Close(ctx))
}

// TestWholeOnGPUs: under the simulated driver, two plans of each collective on two streams, which the ranks enqueue in opposite order, give the right results in
// hundreds of runs, of which one rank enqueues some late.
func TestWholeOnGPUs(t *testing.T) {
	const size = 3
	for _, what := range wholeKinds {
		t.Run(what, func(t *testing.T) {
			onGPUs(t, size, time.Minute, func(ctx context.Context, m *memory.Memory) error {
				rank := m.Group().Rank()
				var plans [2]*wholePlan
				var streams [2]device.Stream
				for i := range plans {
					var err error
					if plans[i], err = newWholePlan(ctx, m, what); err != nil {
						return err
					}
					if streams[i], err = m.Device().NewStream(); err != nil {
						return err
					}
				}
				for round := range 20 {
					for i := range plans {
						if err := plans[i].fill(round + i); err != nil {
							return err
						}
					}
					if err := m.Group().Barrier(ctx, fmt.Sprint("filled ", round)); err != nil {
						return err
					}
					for run := range 15 {
						if rank == round%size && run%5 == 0 {
							time.Sleep(2 * time.Millisecond)
						}
						for k := range plans {
							i := (k + rank) % 2
							if err := plans[i].Run(streams[i]); err != nil {
								return err
							}
						}
					}
					for i := range plans {
						if err := errors.Join(streams[i].Synchronize(ctx), plans[i].check(what, round+i)); err != nil {
							return fmt.Errorf("round %d, plan %d: %w", round, i, err)
						}
					}
					if err := m.Group().Barrier(ctx, fmt.Sprint("checked ", round)); err != nil {
						return err
					}
				}
				var err error
				for i := range plans {
					err = errors.Join(err, plans[i].close(ctx), streams[i].Close())
				}
				return err
			})
		})
	}
}

// TestWholeLost: where a rank does not run the plan, all others are told which they have waited for.
func TestWholeLost(t *testing.T) {
	const size, lost = 3, 2
	for _, what := range wholeKinds {
		t.Run(what, func(t *testing.T) {
			t.Parallel() // they wait more than they work
			onGPUs(t, size, time.Second, func(ctx context.Context, m *memory.Memory) error {
				p, err := newWholePlan(ctx, m, what)
				if err != nil {
					return err
				}
				s, err := m.Device().NewStream()
				if err != nil {
					return err
				}
				rank := m.Group().Rank()
				if rank != lost {
					for range 3 {
						err = errors.Join(err, p.Run(s))
					}
					told := errors.Join(err, s.Synchronize(ctx))
					want := lost
					if (what == "broadcast" || what == "reduce") && rank != 1 {
						want = 1 // root, which has given up
					}
					wait, ok := errors.AsType[*device.WaitError](told)
					if err = nil; !ok || wait.Peer != want || !errors.Is(told, os.ErrDeadlineExceeded) || p.Err() == nil {
						err = fmt.Errorf("rank %d was told %w, and the plan's error is %v", rank, told, p.Err())
					}
				}
				return errors.Join(err, m.Group().Barrier(ctx, "told"), p.close(ctx), s.Close())
			})
		})
	}
}

// TestWholeKeepsBits: what moves may be any bits: words of ones and of zeros, signaling NaNs.
func TestWholeKeepsBits(t *testing.T) {
	onGPUs(t, 2, time.Minute, func(ctx context.Context, m *memory.Memory) error {
		p, err := newWholePlan(ctx, m, "all-gather")
		if err != nil {
			return err
		}
		s, err := m.Device().NewStream()
		if err != nil {
			return err
		}
		words := []uint32{1<<32 - 1, 0, 0x7fffffff, 0x7f800001, 0x80000000, 1, 0xff800001, 0x7fffffff}
		var mine []byte
		for i := range 64 {
			w := words[i%len(words)]
			mine = append(mine, byte(w), byte(w>>8), byte(w>>16), byte(w>>24))
		}
		d := m.Device()
		got := make([]byte, 2*len(mine))
		if err := errors.Join(d.CopyFromHost(p.t.Ptr(), mine), m.Group().Barrier(ctx, "filled"), p.Run(s), p.Run(s), s.Synchronize(ctx), d.CopyToHost(got, p.out.Ptr())); err != nil {
			return err
		}
		if !bytes.Equal(got, append(bytes.Clone(mine), mine...)) {
			err = fmt.Errorf("%x", got)
		}
		return errors.Join(err, p.close(ctx), s.Close())
	})
}

// TestOwnPartBesideCopies: where copy engines bring much to the others, a kernel copies what a rank has itself, if both sides are vectors: anything else a copy engine does.
func TestOwnPartBesideCopies(t *testing.T) {
	smallLimits(t)
	for _, c := range []struct {
		elements, in, out int64 // of a share, and where in their tensors
		want              bool
	}{{1024, 0, 0, true}, {1028, 4, 8, true}, {1024, 0, 2, false}, {1025, 0, 0, false}, {256, 0, 0, false}} {
		t.Run(fmt.Sprintf("%+v", c), func(t *testing.T) {
			onSimulated(t, 2, func(ctx context.Context, dev *simDevice, m *memory.Memory) error {
				in, err := mapped(ctx, m, 2048)
				if err != nil {
					return err
				}
				out, err := mapped(ctx, m, 4096)
				if err != nil {
					return err
				}
				x, err := in.Sub(c.in, c.elements)
				if err != nil {
					return err
				}
				y, err := out.Sub(c.out, 2*c.elements)
				if err != nil {
					return err
				}
				before := len(dev.launches)
				p, err := NewAllGather(ctx, x, y, &Options{Algorithm: Transfers})
				if err != nil {
					return err
				}
				copies := 0
				for _, l := range dev.launches[before:] {
					if strings.HasPrefix(l.name, "symmem_allreduce_oneshot_pull_u64_") {
						copies++
					}
				}
				if (copies == 1) != c.want || copies > 1 {
					err = fmt.Errorf("%d kernels copy the own part", copies)
				}
				return errors.Join(err, p.Close(ctx), in.Close(ctx), out.Close(ctx))
			})
		})
	}
}

// mapped is a tensor of so many float32 after its rendezvous.
func mapped(ctx context.Context, m *memory.Memory, n int64) (tensor.SymmetricTensor, error) {
	x, err := tensor.Zeros(ctx, m, tensor.Float32, n)
	if err != nil {
		return nil, err
	}
	return x, x.Rendezvous(ctx)
}

// TestWholePieces: tables are asked for whole vectors where the kernels for such would be taken, and nowhere else: the choice would be one that the kernel for any message has to carry out.
func TestWholePieces(t *testing.T) {
	for _, size := range []int{2, ptx.Inline, ptx.Inline + 1} {
		onSimulated(t, size, func(ctx context.Context, _ *simDevice, m *memory.Memory) error {
			const most = wholeMostBytes / 4
			large, err := mapped(ctx, m, 2*most+8)
			if err != nil {
				return err
			}
			world := int64(size)
			for _, c := range []struct {
				call        string
				in, out, at int64 // elements, and where both begin
				op          Op
				want        bool
			}{
				{"NewBroadcast", 64, 64, 0, 0, true}, {"NewBroadcast", 64, 64, 1, 0, false}, {"NewBroadcast", 65, 65, 0, 0, false}, {"NewBroadcast", 0, 0, 0, 0, false},
				{"NewBroadcast", most, most, 0, 0, true}, {"NewBroadcast", most + 4, most + 4, 0, 0, false},
				{"NewAllGather", 64, 64 * world, 4, 0, true}, {"NewAllGather", 64, 64*world - 4, 0, 0, false},
				{"NewAllToAll", 4 * world, 4 * world, 0, 0, true}, {"NewAllToAll", 2 * world, 2 * world, 0, 0, false},
				{"NewReduce", 64, 64, 0, Sum, true}, {"NewReduce", 64, 64, 0, Avg, true}, {"NewReduce", 64, 64, 0, Max, false},
				{"NewReduceScatter", (most + 4) * min(world, 2), most + 4, 0, Sum, world == 2}, {"NewReduceScatter", 64 * world, 64, 0, Sum, true}, {"NewReduceScatter", 64 * world, 64, 0, Prod, false}, {"NewReduceScatter", 64*world - 1, 64, 0, Sum, false},
			} {
				in, err := large.Sub(c.at, c.in)
				if err != nil {
					return err
				}
				out, err := large.Sub(c.at, c.out)
				if err != nil {
					return err
				}
				mk := newMaker(c.call, in, out, nil)
				mk.combines, mk.op = c.op != 0, c.op
				if got := mk.wholePieces(); got != (c.want && size <= ptx.Inline) {
					return fmt.Errorf("%+v between %d ranks: %t", c, size, got)
				}
			}
			return large.Close(ctx)
		})
	}
}

// TestLoadsWhereStoresHaveNoRoom: Auto stores the shares of a reduce-scatter where its table says so, and loads them on every rank where one rank has no memory for the workspace of that.
func TestLoadsWhereStoresHaveNoRoom(t *testing.T) {
	const share = 16 << 20
	for _, c := range []struct {
		left int64 // of rank 1's memory, behind the tensors
		want Algorithm
	}{{64 << 20, OneShotPush}, {10 << 20, OneShotPull}} {
		t.Run(fmt.Sprintf("%d left", c.left), func(t *testing.T) {
			groups, err := group.Local(2, nil)
			require.NoError(t, err)
			var g errgroup.Group
			for _, gr := range groups {
				g.Go(func() error {
					ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
					defer cancel()
					near, err := host.New(gr, nil)
					if err != nil {
						return err
					}
					b := &simBackend{Backend: near, dev: &simDevice{Device: near.Device(), mem: near.Device().(device.HostMemory)}}
					b.left.Store(math.MaxInt64)
					if gr.Rank() == 1 {
						b.left.Store(3*share + c.left)
					}
					m := memory.New(b, gr, nil)
					m.SetTuning(&tuning.Set{Tables: []*tuning.Table{{Rules: []tuning.Rule{{
						Collective: tuning.ReduceScatter, Ranks: 2, Steps: []tuning.Step{{UpTo: 1 << 30, WholeVectors: true, Form: "one_shot_push"}, {Form: "one_shot_pull"}},
					}}}}})
					in, inErr := mapped(ctx, m, 2*share/4)
					out, outErr := mapped(ctx, m, share/4)
					if err := errors.Join(inErr, outErr); err != nil {
						return err
					}
					p, err := NewReduceScatter(ctx, in, out, Sum, nil)
					if err != nil {
						return err
					}
					if p.Algorithm() != c.want {
						err = fmt.Errorf("%s was chosen in place of %s", p.Algorithm(), c.want)
					}
					return errors.Join(err, p.Close(ctx), in.Close(ctx), out.Close(ctx), m.Close(ctx), gr.Close(ctx))
				})
			}
			require.NoError(t, g.Wait())
		})
	}
}

// TestListsOfWholeVectors: of lists, the rules for whole vectors are only for what has a kernel for them.
func TestListsOfWholeVectors(t *testing.T) {
	for _, c := range []struct {
		op    Op
		dtype tensor.DType
		n     int64
		want  Algorithm
	}{
		{Sum, tensor.Float32, 1024, OneShotPush},
		{Avg, tensor.BFloat16, 1024, OneShotPush},
		{Max, tensor.Float32, 1024, TwoShotPull},
		{Sum, tensor.Int32, 1024, TwoShotPull},
		{Sum, tensor.Float32, 1023, TwoShotPull},
	} {
		t.Run(fmt.Sprintf("%s/%s/%d", c.op, c.dtype, c.n), func(t *testing.T) {
			onSimulated(t, 2, func(ctx context.Context, _ *simDevice, m *memory.Memory) error {
				m.SetTuning(&tuning.Set{Tables: []*tuning.Table{{Rules: []tuning.Rule{{
					Collective: tuning.AllReduceMany, Ranks: 2, Steps: []tuning.Step{{UpTo: 1 << 20, WholeVectors: true, Form: "one_shot_push"}, {Form: "two_shot_pull"}},
				}}}}})
				in, err := tensor.Zeros(ctx, m, c.dtype, c.n)
				if err != nil {
					return err
				}
				if err := in.Rendezvous(ctx); err != nil {
					return err
				}
				p, err := NewAllReduceMany(ctx, []Pair{{In: in}}, c.op, nil)
				if err != nil {
					return err
				}
				if p.Algorithm() != c.want {
					err = fmt.Errorf("%s was chosen in place of %s", p.Algorithm(), c.want)
				}
				return errors.Join(err, p.Close(ctx), in.Close(ctx))
			})
		})
	}
}

// TestPushedWhereThereIsRoom: Auto takes the next form of its table where one rank has no memory for the workspace of the first, whatever the collective.
func TestPushedWhereThereIsRoom(t *testing.T) {
	const bytes = 8 << 20
	for _, c := range []struct {
		collective string
		first      Algorithm
		left       int64 // of rank 1's memory, behind the tensors
		want       Algorithm
		lap        tuning.Size
	}{
		{tuning.AllReduceMany, OneShotPush, 64 << 20, OneShotPush, 0},
		{tuning.AllReduceMany, OneShotPush, 20 << 20, TwoShotPull, 0},
		{tuning.AllReduceMany, Transfers, 64 << 20, Transfers, 0},
		{tuning.AllReduceMany, Transfers, 20 << 20, TwoShotPull, 0},
		{tuning.AllReduceRMSNorm, OneShotPush, 64 << 20, OneShotPush, 0},
		{tuning.AllReduceRMSNorm, OneShotPush, 28 << 20, TwoShotPull, 0},
		{tuning.AllReduceRMSNorm, TwoShotPush, 64 << 20, TwoShotPush, 0},
		{tuning.AllReduceRMSNorm, TwoShotPush, 28 << 20, TwoShotPull, 0},
		{tuning.AllReduce, TwoShotPush, 64 << 20, TwoShotPush, 0},
		{tuning.AllReduce, TwoShotPush, 20 << 20, TwoShotPull, 0},
		{tuning.AllReduce, TwoShotFlow, 64 << 20, TwoShotFlow, 1 << 20},
		{tuning.AllReduce, TwoShotFlow, 20 << 20, TwoShotPull, 1 << 20},
		{tuning.AllGather, OneShotLL, 64 << 20, OneShotLL, 0},
		{tuning.AllGather, OneShotLL, 20 << 20, OneShotPull, 0},
	} {
		t.Run(fmt.Sprintf("%s/%s/%d left", c.collective, c.first, c.left), func(t *testing.T) {
			groups, err := group.Local(2, nil)
			require.NoError(t, err)
			var g errgroup.Group
			for _, gr := range groups {
				g.Go(func() error {
					ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
					defer cancel()
					near, err := host.New(gr, nil)
					if err != nil {
						return err
					}
					b := &simBackend{Backend: near, dev: &simDevice{Device: near.Device(), mem: near.Device().(device.HostMemory)}}
					b.left.Store(math.MaxInt64)
					if gr.Rank() == 1 {
						b.left.Store(2*bytes + c.left)
					}
					m := memory.New(b, gr, nil)
					steps := []tuning.Step{{UpTo: 1 << 30, Form: c.first.String(), LapBytes: c.lap}, {Form: c.want.String()}}
					if c.first == TwoShotFlow {
						steps = steps[:1] // what there is without a table
					}
					m.SetTuning(&tuning.Set{Tables: []*tuning.Table{{Rules: []tuning.Rule{{Collective: c.collective, Ranks: 2, Steps: steps}}}}})
					in, err := tensor.Zeros(ctx, m, tensor.Float32, bytes/4/1024, 1024)
					if err != nil {
						return err
					}
					residual, residualErr := mapped(ctx, m, bytes/4)
					weight, weightErr := mapped(ctx, m, 1024)
					if err := errors.Join(in.Rendezvous(ctx), residualErr, weightErr); err != nil {
						return err
					}
					var p *Plan
					switch c.collective {
					case tuning.AllReduceMany:
						p, err = NewAllReduceMany(ctx, []Pair{{In: in}}, Sum, nil)
					case tuning.AllReduceRMSNorm:
						p, err = NewAllReduceRMSNorm(ctx, in, RMSNorm{Residual: LocalOf(residual.Local()), Weight: LocalOf(weight.Local())}, nil)
					case tuning.AllReduce:
						p, err = NewAllReduce(ctx, in, Sum, nil)
					default:
						half, subErr := residual.Sub(0, bytes/8)
						if subErr != nil {
							return subErr
						}
						p, err = NewAllGather(ctx, half, in, nil)
						err = errors.Join(err, half.Close(ctx))
					}
					if err != nil {
						return err
					}
					if p.Algorithm() != c.want {
						err = fmt.Errorf("%s was chosen in place of %s", p.Algorithm(), c.want)
					}
					return errors.Join(err, p.Close(ctx), in.Close(ctx), residual.Close(ctx), weight.Close(ctx), m.Close(ctx), gr.Close(ctx))
				})
			}
			require.NoError(t, g.Wait())
		})
	}
}

// TestBroadcastPassesOn: a broadcast by stores goes through the ranks that are not root chunk by chunk, or line by line where it is whole vectors and not long, whoever is root or late, several
// chunks to a block, run after run, and its counts may wrap around.
func TestBroadcastPassesOn(t *testing.T) {
	most := passLinesBytes
	t.Cleanup(func() { passLinesBytes = most })
	assert.Equal(t, []int64{5 << 19, 3 << 20, 3 << 20}, []int64{most(3), most(4), most(8)})
	assert.Equal(t, []int{0, 0, 64}, []int{passBlocks(3<<20, 3), passBlocks(3<<19, 4), passBlocks(3<<19+16, 4)})
	passLinesBytes = func(int) int64 { return 9*ptx.ChunkBytes - 16 }
	for _, size := range []int{2, 3, 5} {
		for i, bytes := range []int64{9*ptx.ChunkBytes + 77, 9 * ptx.ChunkBytes, 9*ptx.ChunkBytes - 16, 999*16 + 8, 16} {
			blocks, inLines := 1+i%2, size > 2 && (i == 2 || i == 4)
			t.Run(fmt.Sprintf("size=%d/blocks=%d/bytes=%d", size, blocks, bytes), func(t *testing.T) {
				onGPUs(t, size, 20*time.Second, func(ctx context.Context, m *memory.Memory) error {
					x, err := tensor.Zeros(ctx, m, tensor.Int8, bytes)
					if err != nil {
						return err
					}
					if err := x.Rendezvous(ctx); err != nil {
						return err
					}
					root := size - 1
					b := &broadcast{newMaker("NewBroadcast", x, x, nil), root}
					b.algorithm = TwoShotPush
					var spec collective.Spec
					kernel, workspace := ptx.Pull(true), int64(0)
					if inLines {
						kernel, _ = ptx.LinesPass(size, true)
						workspace = 2 * ptx.LinesWholeSlotBytes(bytes)
					}
					if b.spec(&spec); spec.Failure != nil || spec.CUDA.Function != kernel.Name || spec.Workspace != workspace {
						return fmt.Errorf("by %s with %d bytes of workspace: %w", spec.CUDA.Function, spec.Workspace, spec.Failure)
					}
					p, err := NewBroadcast(ctx, x, root, &Options{Algorithm: TwoShotPush, MaxBlocks: blocks, FirstEpoch: 1<<32 - 2})
					if err != nil {
						return err
					}
					s, err := m.Device().NewStream()
					if err != nil {
						return err
					}
					for run := range 4 {
						want := func(i int) int8 { return int8(i*7 + i>>9 + run) }
						values := make([]int8, bytes)
						for i := range values {
							if values[i] = -1; x.Rank() == root {
								values[i] = want(i)
							}
						}
						if err := tensor.Write(x.Local(), values, 0); err != nil {
							return err
						}
						if run == x.Rank() {
							time.Sleep(50 * time.Millisecond)
						}
						if err := errors.Join(p.Run(s), s.Synchronize(ctx)); err != nil {
							return err
						}
						got, err := tensor.ReadAll[int8](x.Local())
						if err != nil {
							return err
						}
						for i := range got {
							if got[i] != want(i) {
								return fmt.Errorf("run %d: byte %d is %d and not %d", run, i, got[i], want(i))
							}
						}
						if err := m.Group().Barrier(ctx, "checked"); err != nil {
							return err
						}
					}
					return errors.Join(s.Close(), p.Close(ctx), x.Close(ctx))
				})
			})
		}
	}
}

// workBackend is a simBackend whose device has streams and memory for work of the CPU.
type workBackend struct{ *simBackend }

func (b *workBackend) Device() device.Device { return workDevice{b.dev} }

type workDevice struct{ *simDevice }

func (d workDevice) NewWorkStream() (device.Stream, error) { return d.NewStream() }

func (d workDevice) NewHostBuffer(bytes int64) (device.HostBuffer, error) {
	p, err := d.Alloc(bytes)
	return workBuffer{d, p, bytes}, err
}

type workBuffer struct {
	device workDevice
	p      device.Ptr
	bytes  int64
}

func (b workBuffer) Ptr() device.Ptr { return b.p }
func (b workBuffer) Close() error    { return b.device.Free(b.p) }

func (b workBuffer) Bytes() []byte {
	all, _ := b.device.mem.Bytes(b.p, b.bytes) // it was allocated so
	return all
}

// TestTransfersWhereBlocksHaveNoRoom: for an all-to-all with counts there is no table, and Auto takes transfers where there is no memory for what each block of the kernel has.
func TestTransfersWhereBlocksHaveNoRoom(t *testing.T) {
	const size, page = 16, 4096
	for _, c := range []struct {
		pages int64 // of the workspace that are left
		want  Algorithm
	}{{20, OneShotPush}, {4, Transfers}} {
		t.Run(fmt.Sprintf("%d pages left", c.pages), func(t *testing.T) {
			groups, err := group.Local(size, nil)
			require.NoError(t, err)
			var g errgroup.Group
			for _, gr := range groups {
				g.Go(func() error {
					ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
					defer cancel()
					near, err := host.New(gr, nil)
					if err != nil {
						return err
					}
					b := &simBackend{Backend: near, dev: &simDevice{Device: near.Device(), mem: near.Device().(device.HostMemory), uuid: fmt.Sprint(gr.Rank())}}
					b.left.Store(math.MaxInt64)
					m := memory.New(&workBackend{b}, gr, nil)
					var tensors []tensor.SymmetricTensor
					for _, shape := range [][]int64{{1 << 10, 64}, {1 << 10, 64}, {size}, {2, size}} {
						x, err := tensor.Zeros(ctx, m, tensor.Int64, shape...)
						if err == nil {
							err = x.Rendezvous(ctx)
						}
						if err != nil {
							return err
						}
						tensors = append(tensors, x)
					}
					b.left.Store(0)
					room, err := m.NewWorkspace(ctx, memory.WorkspaceRequest{Purpose: "what will be left", Bytes: c.pages * page})
					if err != nil {
						return err
					}
					var taken []*memory.Workspace
					for bytes := int64(4 << 20); bytes >= page; {
						w, err := m.NewWorkspace(ctx, memory.WorkspaceRequest{Purpose: "what others have", Bytes: bytes})
						switch _, full := errors.AsType[*memory.WorkspaceError](err); {
						case full:
							bytes /= 2
						case err != nil:
							return err
						default:
							taken = append(taken, w)
						}
					}
					if err := room.Close(ctx); err != nil {
						return err
					}
					p, err := NewAllToAllV(ctx, tensors[0], tensors[1], tensors[2], tensors[3], nil)
					if err != nil {
						return err
					}
					if p.Algorithm() != c.want {
						err = fmt.Errorf("%s was chosen in place of %s", p.Algorithm(), c.want)
					}
					err = errors.Join(err, p.Close(ctx))
					for _, w := range taken {
						err = errors.Join(err, w.Close(ctx))
					}
					for _, x := range tensors {
						err = errors.Join(err, x.Close(ctx))
					}
					return errors.Join(err, m.Close(ctx), gr.Close(ctx))
				})
			}
			require.NoError(t, g.Wait())
		})
	}
}
