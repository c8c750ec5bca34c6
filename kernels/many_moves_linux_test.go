package kernels

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/backend/host"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/kernels/ptx"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// The collectives of lists but the all-reduce.
const (
	gatherMany    = "all_gather"
	scatterMany   = "reduce_scatter"
	broadcastMany = "broadcast"
)

var movesMany = []string{gatherMany, scatterMany, broadcastMany}

// sharedTest is one list of tensors on one kind of memory, of a collective that has shares or a root.
type sharedTest struct {
	what      string
	algorithm Algorithm
	dtypes    []tensor.DType // of the tensors in turn
	op        Op
	root      int
	counts    []int64 // of the larger tensor of each pair
	maxBlocks int
	skew      int64 // elements between the tensors, 1 if it is 0
	kernel    string
}

func (c sharedTest) dtype(i int) tensor.DType { return c.dtypes[i%len(c.dtypes)] }
func (c sharedTest) inPlace(i int) bool       { return c.what == broadcastMany || i%2 == 0 }

// input is what a rank brings of a tensor: the whole of it, of which it uses a share of an all-gather.
func (c sharedTest) input(i, rank, run int) []byte {
	b := make([]byte, c.counts[i]*c.dtype(i).Bytes())
	for k := range b {
		b[k] = byte(k*31 + rank*17 + i*5 + run*3 + k/257)
		if c.what == scatterMany {
			b[k] &= 0x3f
		}
	}
	return b
}

func (c sharedTest) plan(ctx context.Context, pairs []Pair) (*Plan, error) {
	opts := &Options{Algorithm: c.algorithm, FirstEpoch: 1<<32 - 2, MaxBlocks: c.maxBlocks}
	return c.make(ctx, pairs, opts)
}

func (c sharedTest) make(ctx context.Context, pairs []Pair, opts *Options) (*Plan, error) {
	switch c.what {
	case gatherMany:
		return NewAllGatherMany(ctx, pairs, opts)
	case scatterMany:
		return NewReduceScatterMany(ctx, pairs, c.op, opts)
	}
	var ts []tensor.SymmetricTensor
	for _, p := range pairs {
		ts = append(ts, p.In)
	}
	return NewBroadcastMany(ctx, ts, c.root, opts)
}

// sharedPlace is where a tensor of a list is: in its dtype's allocations.
type sharedPlace struct {
	at, to int64 // in elements
}

// run is one rank of the test: three runs and 4 from a graph, with new input for each. The tensors lie next to each other in two allocations for each dtype, at odd
// places, and what is between them is not touched.
func (c sharedTest) run(ctx context.Context, m *memory.Memory) (err error) {
	rank, size, d := m.Group().Rank(), m.Group().Size(), m.Device()
	skew := max(c.skew, 1)
	ins, outs := map[tensor.DType]*tensor.Tensor{}, map[tensor.DType]*tensor.Tensor{}
	var bases []*tensor.Tensor
	for _, dtype := range slices.Compact(slices.Sorted(slices.Values(c.dtypes))) {
		total := 4 * skew
		for i, n := range c.counts {
			if c.dtype(i) == dtype {
				total += n + skew + int64(size)
			}
		}
		for _, to := range []map[tensor.DType]*tensor.Tensor{ins, outs} {
			if to[dtype], err = tensor.Zeros(ctx, m, dtype, total); err != nil {
				return err
			}
			if err := to[dtype].Rendezvous(ctx); err != nil {
				return err
			}
			bases = append(bases, to[dtype])
		}
	}
	var pairs []Pair
	var places []sharedPlace
	next := map[tensor.DType]int64{}
	for i, n := range c.counts {
		a, b := ins[c.dtype(i)], outs[c.dtype(i)]
		at := next[c.dtype(i)] + skew
		next[c.dtype(i)] = at + max(n, int64(size))
		lo, hi := shareOf(n, size, rank)
		share, to := shareElements(n, size), at+int64(i%3)*skew // some not aligned as the input is
		var p Pair
		var inErr, outErr error
		switch {
		case c.what == broadcastMany:
			p.In, inErr = a.Sub(at, n)
		case c.inPlace(i):
			p.In, inErr = a.Sub(at, n)
			p.Out, outErr = a.Sub(at+lo, hi-lo)
		case c.what == gatherMany:
			p.In, inErr = a.Sub(at, share)
			p.Out, outErr = b.Sub(to, n)
		default:
			p.In, inErr = a.Sub(at, n)
			p.Out, outErr = b.Sub(to, share)
		}
		if c.what == gatherMany && c.inPlace(i) {
			p.In, p.Out = p.Out, p.In
		}
		if err := errors.Join(inErr, outErr); err != nil {
			return err
		}
		pairs, places = append(pairs, p), append(places, sharedPlace{at, to})
	}
	p, err := c.plan(ctx, pairs)
	if err != nil {
		return err
	}
	s, err := d.NewStream()
	if err != nil {
		return err
	}
	launched := s
	if sim, ok := s.(*simStream); ok {
		launched = sim.Stream
	}
	// images gives what is in both allocations of a dtype before a run, or behind it.
	images := func(run int, after bool) map[*tensor.Tensor][]byte {
		all := map[*tensor.Tensor][]byte{}
		for _, t := range bases {
			all[t] = bytes.Repeat([]byte{0xab}, int(t.Bytes()))
		}
		for i, n := range c.counts {
			dtype := c.dtype(i)
			width := dtype.Bytes()
			a, b := all[ins[dtype]], all[outs[dtype]]
			at, to := places[i].at*width, places[i].to*width
			lo, hi := shareOf(n, size, rank)
			mine := c.input(i, rank, run)
			switch c.what {
			case broadcastMany:
				if after {
					mine = c.input(i, c.root, run)
				}
				copy(a[at:], mine)
			case gatherMany:
				own := mine[lo*width : hi*width]
				dst := b[to:]
				if c.inPlace(i) {
					dst = a[at:]
					copy(dst[lo*width:], own)
				} else {
					copy(a[at:], own)
				}
				if !after {
					continue
				}
				for r := range size {
					lo, hi := shareOf(n, size, r)
					copy(dst[lo*width:], c.input(i, r, run)[lo*width:hi*width])
				}
			default:
				copy(a[at:], mine)
				if !after || hi == lo {
					continue
				}
				var every [][]byte
				for r := range size {
					every = append(every, c.input(i, r, run))
				}
				sum := make([]byte, n*width)
				newReducer(dtype, c.op, size)(sum, every, 0, n)
				if c.inPlace(i) {
					copy(a[at+lo*width:], sum[lo*width:hi*width])
				} else {
					copy(b[to:], sum[lo*width:hi*width])
				}
			}
		}
		return all
	}
	fill := func(run int) error {
		err := m.Group().Barrier(ctx, "ended")
		for t, b := range images(run, false) {
			err = errors.Join(err, d.CopyFromHost(t.Ptr(), b))
		}
		return errors.Join(err, m.Group().Barrier(ctx, "filled"))
	}
	check := func(run int) error {
		for t, want := range images(run, true) {
			got := make([]byte, len(want))
			if err := d.CopyToHost(got, t.Ptr()); err != nil {
				return err
			}
			for i := range got {
				if got[i] != want[i] {
					return fmt.Errorf("run %d on rank %d: byte %d of %d of %s (inputs %t) is %x, not %x", run, rank, i, len(got), t.DType(), ins[t.DType()] == t, got[i], want[i])
				}
			}
		}
		return nil
	}
	for i := range 3 {
		if err := errors.Join(fill(i), p.Run(s), s.Synchronize(ctx), check(i)); err != nil {
			return err
		}
	}
	if err := errors.Join(s.BeginCapture(), p.Run(s)); err != nil {
		return err
	}
	graph, err := s.EndCapture()
	if err != nil {
		return err
	}
	for i := range 4 {
		if err := errors.Join(fill(i), graph.Launch(launched), s.Synchronize(ctx), check(i)); err != nil {
			return err
		}
	}
	err = errors.Join(graph.Close(), p.Close(ctx), s.Close())
	for _, t := range bases {
		err = errors.Join(err, t.Close(ctx))
	}
	return err
}

// everyShared calls f with lists of each collective: of one dtype and of several where elements only move, with shares that are empty on some ranks, and on all.
func everyShared(f func(name string, c sharedTest)) {
	i := 0
	for _, what := range movesMany {
		dtypes := [][]tensor.DType{{tensor.Float32, tensor.Uint8, tensor.Float16}, {tensor.Float64}, {tensor.Int8}}
		if what == scatterMany {
			dtypes = [][]tensor.DType{{tensor.Float32}, {tensor.BFloat16}, {tensor.Int8}, {tensor.Float64}}
		}
		for k, of := range dtypes {
			for l, counts := range [][]int64{{1}, {0, 0}, {3, 0, 17, 1, 64, 33, 7}, {256, 256, 256, 255, 257}, {5, 3_011, 2}} {
				i++
				f(fmt.Sprintf("%s/%d/%d", what, k, l), sharedTest{what: what, dtypes: of, op: Ops()[i%len(Ops())], counts: counts, root: i})
			}
		}
	}
}

// TestManySharedOnCPU runs lists on the host device, and without pointers to peers.
func TestManySharedOnCPU(t *testing.T) {
	smallLimits(t)
	for _, size := range []int{1, 2, 3, 4} {
		everyShared(func(name string, c sharedTest) {
			c.root %= size
			for _, far := range []bool{false, true} {
				for _, c.algorithm = range []Algorithm{Auto, OneShot, Transfers} {
					if far && c.algorithm != Auto {
						continue
					}
					c := c
					t.Run(fmt.Sprintf("size=%d/far=%t/%s/%s", size, far, name, c.algorithm), func(t *testing.T) {
						backendtest.RequireAll(t, backendtest.OnRanks(t, size, nil, func(ctx context.Context, g *group.Group) error {
							m, err := onHostMemory(g, far)
							if err != nil {
								return err
							}
							return errors.Join(c.run(ctx, m), m.Close(ctx))
						}))
					})
				}
			}
		})
	}
}

// TestManySharedOnCUDA runs lists on the simulated CUDA device, with the kernels as they were compiled: launches, streams, graphs; with the tables of large worlds too.
func TestManySharedOnCUDA(t *testing.T) {
	smallLimits(t)
	for _, size := range []int{1, 2, 3, 4, ptx.Inline + 1} {
		everyShared(func(name string, c sharedTest) {
			c.root %= size
			if size > ptx.Inline && !strings.HasSuffix(name, "/0/2") {
				return // enough with some
			}
			line := OneShotLL
			if c.what == scatterMany && ptx.ManyLine(c.dtypes[0].String()) == 16 {
				line = OneShotPush
			}
			for _, c.algorithm = range []Algorithm{line, OneShotPull, Transfers, Auto} {
				c := c
				t.Run(fmt.Sprintf("size=%d/%s/%s", size, name, c.algorithm), func(t *testing.T) {
					onSimulated(t, size, func(ctx context.Context, _ *simDevice, m *memory.Memory) error { return c.run(ctx, m) })
				})
			}
		})
	}
}

// TestManySharedIsOneLaunch: a run of a list is one launch of the kernel for the form, in no more blocks than it may have.
func TestManySharedIsOneLaunch(t *testing.T) {
	counts := slices.Repeat([]int64{512}, 20)
	for _, c := range []sharedTest{
		{what: gatherMany, algorithm: OneShotLL, dtypes: []tensor.DType{tensor.Float32}, kernel: "symmem_many_lines"},
		{what: gatherMany, algorithm: OneShotPull, dtypes: []tensor.DType{tensor.Float32}, kernel: "symmem_many_moves", maxBlocks: 3},
		{what: broadcastMany, algorithm: OneShot, dtypes: []tensor.DType{tensor.Float32}, kernel: "symmem_many_lines", maxBlocks: 1},
		{what: broadcastMany, algorithm: OneShotPull, dtypes: []tensor.DType{tensor.Float32}, kernel: "symmem_many_moves", maxBlocks: 1},
		{what: scatterMany, algorithm: OneShot, dtypes: []tensor.DType{tensor.Float32}, kernel: "symmem_many_scatter_f32", maxBlocks: 2},
		{what: scatterMany, algorithm: OneShotLL, dtypes: []tensor.DType{tensor.Int64}, kernel: "symmem_many_scatter_i64"},
		{what: scatterMany, algorithm: OneShotPull, dtypes: []tensor.DType{tensor.Float32}, kernel: "symmem_many_pull_f32"},
	} {
		c.counts, c.op = counts, Sum
		t.Run(fmt.Sprintf("%s/%s/%d", c.what, c.algorithm, c.maxBlocks), func(t *testing.T) {
			onSimulated(t, 2, func(ctx context.Context, dev *simDevice, m *memory.Memory) error {
				before := len(dev.launches)
				if err := c.run(ctx, m); err != nil {
					return err
				}
				made := dev.launches[before:]
				if len(made) == 0 {
					return errors.New("no launch")
				}
				for _, l := range made {
					if l.name != c.kernel || c.maxBlocks > 0 && int(l.grid) > c.maxBlocks {
						return fmt.Errorf("kernel %s in %d blocks", l.name, l.grid)
					}
				}
				return nil
			})
		})
	}
}

// TestManySharedRefused: what a list must not be is told with its place, on every rank alike, and nothing is left behind.
func TestManySharedRefused(t *testing.T) {
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		near, err := host.New(g, nil)
		if err != nil {
			return err
		}
		m := memory.New(near, g, nil)
		x, err := tensor.Zeros(ctx, m, tensor.Float32, 100)
		if err != nil {
			return err
		}
		ints, err := tensor.Zeros(ctx, m, tensor.Int32, 20)
		if err != nil {
			return err
		}
		if err := errors.Join(x.Rendezvous(ctx), ints.Rendezvous(ctx)); err != nil {
			return err
		}
		sub := func(at, n int64) tensor.SymmetricTensor {
			s, subErr := x.Sub(at, n)
			err = errors.Join(err, subErr)
			return s
		}
		rank := int64(g.Rank())
		half, whole, mine := sub(0, 5), sub(20, 10), sub(20+5*rank, 5)
		other, third, longer := sub(40, 5), sub(60, 10), sub(80, 11)
		overlapping, notMine := sub(22, 5), sub(20+5*(1-rank), 5)
		if err != nil {
			return err
		}
		var wrong error
		refused := func(what string, is error, text string, make func() (*Plan, error)) {
			p, err := make()
			if err == nil {
				err = errors.Join(errors.New("no error"), p.Close(ctx))
			}
			if !errors.Is(err, is) || !strings.Contains(err.Error(), text) {
				wrong = errors.Join(wrong, fmt.Errorf("%s: %w", what, err))
			}
		}
		gather := func(what string, is error, text string, pairs ...Pair) {
			refused("all-gather: "+what, is, text, func() (*Plan, error) { return NewAllGatherMany(ctx, pairs, nil) })
		}
		scatter := func(what string, is error, text string, pairs ...Pair) {
			refused("reduce-scatter: "+what, is, text, func() (*Plan, error) { return NewReduceScatterMany(ctx, pairs, Sum, nil) })
		}
		broadcast := func(what string, is error, text string, root int, ts ...tensor.SymmetricTensor) {
			refused("broadcast: "+what, is, text, func() (*Plan, error) { return NewBroadcastMany(ctx, ts, root, nil) })
		}
		good := Pair{In: half, Out: whole}
		gather("no output", errs.ErrInvalid, "pairs[0].Out", Pair{In: half})
		gather("an output of another size", errs.ErrInvalid, "6, the largest of 2 shares of 11 elements", Pair{In: half, Out: longer})
		gather("another rank's share", errs.ErrInvalid, "pairs[0].Out", Pair{In: notMine, Out: whole})
		gather("an input across shares", errs.ErrInvalid, "pairs[0].Out", Pair{In: overlapping, Out: whole})
		gather("one output twice", errs.ErrInvalid, "pairs[", good, Pair{In: other, Out: whole})
		gather("an output that is another's input", errs.ErrInvalid, "pairs[0].Out", good, Pair{In: overlapping, Out: third})
		gather("an output in place that is another's input", errs.ErrInvalid, "pairs[0].Out", Pair{In: mine, Out: whole}, Pair{In: overlapping, Out: third})
		gather("dtypes of a pair", errs.ErrInvalid, "i32", Pair{In: half, Out: ints})
		gather("other places", errs.ErrMismatch, "pairs[1]", good, []Pair{{In: half, Out: third}, {In: other, Out: third}}[rank])
		gather("in place on one rank", errs.ErrMismatch, "in place", []Pair{good, {In: mine, Out: whole}}[rank])
		gather("other lengths", errs.ErrMismatch, "2 tensors", []Pair{good, {In: half, Out: third}}[:1+rank]...)
		gather("one rank's nil", errs.ErrInvalid, "pairs[1].In", good, []Pair{{In: half, Out: third}, {}}[rank])
		scatter("no output", errs.ErrInvalid, "pairs[0].Out", Pair{In: whole})
		scatter("an output of another size", errs.ErrInvalid, "Out.NumElements", Pair{In: longer, Out: half})
		scatter("another rank's share", errs.ErrInvalid, "pairs[0].Out", Pair{In: whole, Out: notMine})
		scatter("one output twice", errs.ErrInvalid, "pairs[", Pair{In: whole, Out: half}, Pair{In: third, Out: half})
		scatter("an output in an input that has its own output", errs.ErrInvalid, "pairs[", Pair{In: whole, Out: mine}, Pair{In: third, Out: notMine})
		scatter("an output that is another's input", errs.ErrInvalid, "pairs[0].Out", Pair{In: third, Out: overlapping}, Pair{In: whole, Out: half})
		scatter("another dtype", errs.ErrInvalid, "i32", Pair{In: whole, Out: half}, Pair{In: ints, Out: ints})
		scatter("in place on one rank", errs.ErrMismatch, "in place", []Pair{{In: whole, Out: half}, {In: whole, Out: mine}}[rank])
		refused("an operation", errs.ErrInvalid, "Op(0)", func() (*Plan, error) { return NewReduceScatterMany(ctx, []Pair{{In: whole, Out: half}}, 0, nil) })
		refused("other operations", errs.ErrMismatch, "max", func() (*Plan, error) {
			return NewReduceScatterMany(ctx, []Pair{{In: whole, Out: half}}, []Op{Max, Min}[rank], nil)
		})
		broadcast("nothing", errs.ErrInvalid, "a list of 0", 0)
		broadcast("a nil", errs.ErrInvalid, "tensors[1]", 0, half, nil)
		broadcast("a root that is none", errs.ErrInvalid, "root", 2, half)
		broadcast("a negative root", errs.ErrInvalid, "root", -1, half)
		broadcast("other roots", errs.ErrMismatch, "from rank 1", int(rank), half)
		broadcast("one tensor twice", errs.ErrInvalid, "tensors[", 0, half, third, half)
		broadcast("other places", errs.ErrMismatch, "tensors[1]", 0, whole, []tensor.SymmetricTensor{half, other}[rank])
		broadcast("other dtypes", errs.ErrMismatch, "tensors[0]", 0, []tensor.SymmetricTensor{ints, x}[rank])
		broadcast("a list that is too long", errs.ErrInvalid, "a list of 4097", 0, slices.Repeat([]tensor.SymmetricTensor{half}, MaxPairs+1)...)
		for _, a := range []Algorithm{TwoShot, OneShotPush, Hierarchical} {
			refused("a form", errs.ErrUnsupported, "transfers", func() (*Plan, error) { return NewAllGatherMany(ctx, []Pair{good}, &Options{Algorithm: a}) })
		}
		refused("a form that is none", errs.ErrInvalid, "99", func() (*Plan, error) {
			return NewBroadcastMany(ctx, []tensor.SymmetricTensor{half}, 0, &Options{Algorithm: 99})
		})
		refused("blocks", errs.ErrInvalid, "MaxBlocks", func() (*Plan, error) { return NewAllGatherMany(ctx, []Pair{good}, &Options{MaxBlocks: -1}) })
		// Inputs may overlap.
		meets := sub(3, 5)
		p, err := NewAllGatherMany(ctx, []Pair{good, {In: meets, Out: third}}, nil)
		if err != nil {
			return errors.Join(wrong, err)
		}
		scattered, err := NewReduceScatterMany(ctx, []Pair{{In: sub(20, 10), Out: half}, {In: sub(22, 10), Out: other}}, Sum, nil)
		if err != nil {
			return errors.Join(wrong, err)
		}
		wrong = errors.Join(wrong, overlapped(ctx, m, x, p, scattered))
		q, err := NewBroadcastMany(ctx, []tensor.SymmetricTensor{ints, x}, 1, nil)
		if err != nil {
			return errors.Join(wrong, err)
		}
		return errors.Join(wrong, q.Close(ctx), scattered.Close(ctx), p.Close(ctx), ints.Close(ctx), x.Close(ctx), m.Close(ctx))
	}))
}

// overlapped runs an all-gather of elements 0 to 5 and 3 to 8 of x to 20 and to 60, and then a reduce-scatter of what is at 20 to 30 and at 22 to 32, to 0 and to 40.
func overlapped(ctx context.Context, m *memory.Memory, x *tensor.Tensor, gather, scatter *Plan) error {
	rank := m.Group().Rank()
	have := make([]float32, x.NumElements())
	for i := range have {
		have[i] = float32(100*rank + i)
	}
	s, err := m.Device().NewStream()
	if err != nil {
		return err
	}
	if err := errors.Join(tensor.Write(x.Local(), have, 0), m.Group().Barrier(ctx, "written"), gather.Run(s), scatter.Run(s), s.Synchronize(ctx),
		m.Group().Barrier(ctx, "run"), tensor.Read(x.Local(), have, 0), s.Close()); err != nil {
		return err
	}
	ends := []float32{30, 31} // behind what was gathered, alike but for the rank
	want := func(at int) (gathered [10]float32) {
		for i := range gathered {
			gathered[i] = float32(100*(i/5) + at + i%5)
		}
		return gathered
	}
	first, second := want(0), want(3)
	for what, c := range map[string]struct {
		got  []float32
		want []float32
	}{
		"gathered":       {have[20:30], first[:]},
		"gathered again": {have[60:70], second[:]},
	} {
		if !slices.Equal(c.got, c.want) {
			err = errors.Join(err, fmt.Errorf("%s: %v, not %v", what, c.got, c.want))
		}
	}
	for i := range 5 {
		at := 5*rank + i // of each rank's share
		one := 2 * first[at]
		var other float32
		if at+2 < len(first) {
			other = 2 * first[at+2]
		} else {
			other = 100 + 2*ends[at+2-len(first)]
		}
		if have[i] != one || have[40+i] != other {
			err = errors.Join(err, fmt.Errorf("scattered %v and %v at %d, not %v and %v", have[i], have[40+i], i, one, other))
		}
	}
	return err
}

// TestManyIsNotOverrun: a rank that gets nothing of others does not write over lines that they have not taken, however far it is ahead: root of a broadcast, and who has no share of a
// reduce-scatter.
func TestManyIsNotOverrun(t *testing.T) {
	const runs = 7
	for _, what := range []string{broadcastMany, scatterMany, gatherMany} {
		for _, form := range []Algorithm{OneShot, OneShotPull, Transfers} {
			t.Run(fmt.Sprintf("%s/%s", what, form), func(t *testing.T) {
				onSimulated(t, 2, func(ctx context.Context, _ *simDevice, m *memory.Memory) error {
					x, err := tensor.Zeros(ctx, m, tensor.Float32, 64)
					if err != nil {
						return err
					}
					if err := x.Rendezvous(ctx); err != nil {
						return err
					}
					// One element: the first rank has it, of what is shared out.
					one, oneErr := x.Sub(3, 1)
					other, otherErr := x.Sub(9, 1)
					if err := errors.Join(oneErr, otherErr); err != nil {
						return err
					}
					ahead := 0 // the rank that sends, and gets nothing
					pair, to := Pair{In: one}, one
					switch what {
					case scatterMany:
						ahead, pair.Out, to = 1, other, other
					case gatherMany:
						pair.Out, to = other, other
					}
					p, err := sharedTest{what: what, op: Sum, root: ahead}.make(ctx, []Pair{pair}, &Options{Algorithm: form})
					if err != nil {
						return err
					}
					s, err := m.Device().NewStream()
					if err != nil {
						return err
					}
					d, rank := m.Device(), m.Group().Rank()
					room, err := d.Alloc(8 * runs)
					if err != nil {
						return err
					}
					var values []float32
					for i := range runs {
						values = append(values, float32(100*i+7))
					}
					if rank != ahead {
						values = make([]float32, runs)
					}
					err = d.CopyFromHost(room, asBytes(values))
					for i := range int64(runs) {
						if rank != ahead {
							err = errors.Join(err, s.HostFunc(func() { time.Sleep(3 * time.Millisecond) }))
						}
						err = errors.Join(err, s.Copy(one.Ptr(), room.Add(4*i), 4), p.Run(s), s.Copy(room.Add(4*runs+4*i), to.Ptr(), 4))
					}
					if err := errors.Join(err, s.Synchronize(ctx)); err != nil {
						return err
					}
					got := make([]float32, runs)
					if err := d.CopyToHost(asBytes(got), room.Add(4*runs)); err != nil {
						return err
					}
					for i := range got {
						if want := float32(100*i + 7); rank != ahead && got[i] != want {
							err = errors.Join(err, fmt.Errorf("run %d has %v, not %v", i, got[i], want))
						}
					}
					return errors.Join(err, d.Free(room), s.Close(), p.Close(ctx), x.Close(ctx))
				})
			})
		}
	}
}

// TestCutAlike: the lists of all ranks have stretches of the same tensors and lines under the same numbers, whatever each has of them, and all lines of a rank once.
func TestCutAlike(t *testing.T) {
	lists := [][]stretched{
		{{in: 0x1000, bytes: 5000}, {in: 0x3003, bytes: 1}, {in: 0x4000, bytes: 0}},
		{{in: 0x1007, bytes: 4999}, {in: 0x3003, bytes: 0}, {in: 0x4001, bytes: 0}},
		{{in: 0x1001, bytes: 10}, {in: 0x300f, bytes: 9}, {in: 0x4002, bytes: 0}},
	}
	stretches, lines, longest := cutAlike(lists, 1, 8)
	require.EqualValues(t, 626+2, lines) // of the second rank's first tensor, and the third's second
	require.EqualValues(t, 256, longest)
	for r, list := range stretches {
		require.Len(t, list, len(stretches[0]))
		got := map[uint64]uint64{}
		for i, s := range list {
			require.Equal(t, stretches[0][i].Line, s.Line)
			if i+1 < len(list) {
				require.LessOrEqual(t, s.Line+s.Vectors, list[i+1].Line)
			}
			if s.Vectors > 0 {
				require.Equal(t, got[s.In], s.First)
			}
			got[s.In] += s.Vectors
		}
		for _, x := range lists[r] {
			want := uint64(0)
			if x.bytes > 0 {
				want = (uint64(x.in)%8 + uint64(x.bytes) + 7) / 8
			}
			require.Equal(t, want, got[uint64(x.in)])
		}
	}
}

// TestLoadedAtOnce: the list of a long list of tensors does not grow without end.
func TestLoadedAtOnce(t *testing.T) {
	for bytes, chunk := range map[int64]int64{0: 16 << 10, 256 << 20: 16 << 10, 256<<20 + 16<<10: 32 << 10, 80 << 30: 8 << 20} {
		require.Equal(t, chunk, loadedAtOnce(bytes), bytes)
	}
}

// TestManySharedChooses: a list takes the form of one tensor of its size, where it has that, and loads where it has not.
func TestManySharedChooses(t *testing.T) {
	onSimulated(t, 2, func(ctx context.Context, _ *simDevice, m *memory.Memory) error {
		x, err := tensor.Zeros(ctx, m, tensor.Float32, 2<<20)
		if err != nil {
			return err
		}
		if err := x.Rendezvous(ctx); err != nil {
			return err
		}
		for _, c := range []struct {
			what string
			n    int64
			form Algorithm
		}{
			{gatherMany, 1 << 10, OneShotLL}, {gatherMany, 1 << 20, OneShotPull}, {broadcastMany, 1 << 10, OneShotLL}, {broadcastMany, 1 << 20, OneShotPull},
			{scatterMany, 1 << 10, OneShotPush}, {scatterMany, 1 << 20, OneShotPull},
		} {
			whole, err := x.Sub(0, c.n)
			if err != nil {
				return err
			}
			part, err := x.Sub(1<<20, c.n/2)
			if err != nil {
				return err
			}
			pair := Pair{In: whole, Out: part}
			if c.what == gatherMany {
				pair = Pair{In: part, Out: whole}
			}
			p, err := sharedTest{what: c.what, op: Sum}.make(ctx, []Pair{pair}, nil)
			if err != nil {
				return err
			}
			if p.Algorithm() != c.form {
				err = fmt.Errorf("%s of %d elements by %s", c.what, c.n, p.Algorithm())
			}
			if p.Bytes() != pair.In.Bytes() {
				err = errors.Join(err, fmt.Errorf("%s of %d bytes, not %d", c.what, p.Bytes(), pair.In.Bytes()))
			}
			if err := errors.Join(err, p.Close(ctx)); err != nil {
				return err
			}
		}
		return x.Close(ctx)
	})
	require.Equal(t, []Algorithm{OneShotLL, OneShotPull, Transfers}, CollectiveAlgorithms("NewAllGatherMany", device.CUDA))
}

// TestManyLinesGeometry: whatever the number of ranks, blocks have a number of threads that there is, and a team of them for each peer while they last.
func TestManyLinesGeometry(t *testing.T) {
	for size := 1; size <= 72; size++ {
		for together := 32; together <= stretchVectors; together *= 2 {
			g := manyLinesGeometry(7, together, size, 132)
			at := fmt.Sprintf("%d ranks, %d threads together", size, together)
			assert.Contains(t, []int{32, 64, 128, 256, 512}, g.threads, at)
			assert.Equal(t, 7, g.blocks, at)
			teams := g.threads / together
			assert.True(t, teams == 1 || teams < size, at)
			assert.True(t, 2*teams >= size || 2*g.threads > ptx.MaxThreads, at)
		}
	}
}
