package kernels

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/backend/host"
	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/kernels/ptx"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// manyTest is one list of tensors on one kind of memory.
type manyTest struct {
	algorithm Algorithm
	dtype     tensor.DType
	op        Op
	counts    []int64
	whole     bool // tensors are whole vectors of 16 bytes: each count is filled up to such, and all lie at multiples of them
	odd       int  // with whole: the number from 1 on of one whose output is not at such a place, or 0
	short     int  // with whole: that of one that lacks an element, or 0
	maxBlocks int
}

// manyCounts are lists: one alone, nothing among others, sizes around vectors and lines, one that is much larger than the rest.
var manyCounts = [][]int64{{1}, {0, 0}, {3, 0, 17, 1, 64, 33}, {256, 256, 256, 255, 257}, {5, 6_011, 2}}

// value is small numbers in every dtype.
func (c manyTest) input(i, rank, run int) []byte {
	b := make([]byte, c.counts[i]*c.dtype.Bytes())
	for k := range b {
		b[k] = byte(k*31+rank*17+i*5+run*3+k/257) & 0x3f
	}
	return b
}

// run is one rank of the test: three runs and 4 from a graph, with new input for each. Every other tensor is in place; the tensors lie next to
// each other in two allocations, at odd places, and what is between them is not touched.
func (c manyTest) run(ctx context.Context, m *memory.Memory) error {
	rank, size, d := m.Group().Rank(), m.Group().Size(), m.Device()
	total, unit := int64(0), int64(1)
	if c.whole {
		unit = 16 / c.dtype.Bytes()
	}
	counts := make([]int64, len(c.counts))
	for i, n := range c.counts {
		counts[i] = (n + unit - 1) / unit * unit
		total += counts[i] + unit
		if i+1 == c.short {
			counts[i]--
		}
	}
	c.counts = counts
	ins, err := tensor.Zeros(ctx, m, c.dtype, total+3*unit)
	if err != nil {
		return err
	}
	outs, err := tensor.Zeros(ctx, m, c.dtype, total+3*unit)
	if err != nil {
		return err
	}
	if err := errors.Join(ins.Rendezvous(ctx), outs.Rendezvous(ctx)); err != nil {
		return err
	}
	var pairs []Pair
	at := unit
	for i, n := range c.counts {
		in, err := ins.Sub(at, n)
		if err != nil {
			return err
		}
		p := Pair{In: in}
		if i%2 == 1 {
			to := at + int64(i%3)*unit // some not aligned as the input is
			if i+1 == c.odd {
				to++
			}
			if p.Out, err = outs.Sub(to, n); err != nil {
				return err
			}
		}
		pairs = append(pairs, p)
		at += (n+unit-1)/unit*unit + unit
	}
	p, err := NewAllReduceMany(ctx, pairs, c.op, &Options{Algorithm: c.algorithm, FirstEpoch: 1<<32 - 2, MaxBlocks: c.maxBlocks})
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
	poison := bytes.Repeat([]byte{0xab}, int(ins.Bytes()))
	fill := func(run int) error {
		err := errors.Join(m.Group().Barrier(ctx, "ended"), d.CopyFromHost(ins.Ptr(), poison), d.CopyFromHost(outs.Ptr(), poison))
		for i, p := range pairs {
			if in := c.input(i, rank, run); len(in) > 0 {
				err = errors.Join(err, d.CopyFromHost(p.In.Ptr(), in))
			}
		}
		return errors.Join(err, m.Group().Barrier(ctx, "filled"))
	}
	check := func(run int) error {
		wants := map[*tensor.Tensor][]byte{ins: bytes.Clone(poison), outs: bytes.Clone(poison)}
		for i, p := range pairs {
			if c.counts[i] == 0 {
				continue
			}
			var all [][]byte
			for r := range size {
				all = append(all, c.input(i, r, run))
			}
			copy(wants[ins][p.In.Ptr()-ins.Ptr():], all[rank])
			sum := make([]byte, p.In.Bytes())
			newReducer(c.dtype, c.op, size)(sum, all, 0, c.counts[i])
			if p.Out == nil {
				copy(wants[ins][p.In.Ptr()-ins.Ptr():], sum)
			} else {
				copy(wants[outs][p.Out.Ptr()-outs.Ptr():], sum)
			}
		}
		for t, want := range wants {
			got := make([]byte, len(want))
			if err := d.CopyToHost(got, t.Ptr()); err != nil {
				return err
			}
			for i := range got {
				if got[i] != want[i] {
					return fmt.Errorf("run %d on rank %d: byte %d of %d of the inputs (%t) is %x, not %x", run, rank, i, len(got), t == ins, got[i], want[i])
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
	return errors.Join(graph.Close(), p.Close(ctx), s.Close(), outs.Close(ctx), ins.Close(ctx))
}

// everyMany calls f with each list, in each form.
func everyMany(algorithms func(dtype tensor.DType) []Algorithm, f func(name string, c manyTest)) {
	i := 0
	for _, dtype := range []tensor.DType{tensor.Float32, tensor.BFloat16, tensor.Int8, tensor.Float64, tensor.Uint16} {
		for _, a := range algorithms(dtype) {
			for k, counts := range manyCounts {
				i++
				c := manyTest{algorithm: a, dtype: dtype, op: Ops()[i%len(Ops())], counts: counts}
				f(fmt.Sprintf("%s/%s/%s/%d", a, dtype, c.op, k), c)
			}
		}
	}
}

// TestManyOnHost runs lists on the host device, and without pointers to peers; in the latter cut into laps too.
func TestManyOnHost(t *testing.T) {
	smallLimits(t)
	for _, size := range []int{1, 2, 3} {
		everyMany(func(tensor.DType) []Algorithm { return []Algorithm{Auto, OneShot, TwoShot, Transfers} }, func(name string, c manyTest) {
			for _, far := range []bool{false, true} {
				if far && c.algorithm != Auto {
					continue
				}
				t.Run(fmt.Sprintf("size=%d/far=%t/%s", size, far, name), func(t *testing.T) {
					backendtest.RequireAll(t, backendtest.OnRanks(t, size, nil, func(ctx context.Context, g *group.Group) error {
						m, err := onHostMemory(g, far)
						if err != nil {
							return err
						}
						return errors.Join(c.run(ctx, m), m.Close(ctx))
					}))
				})
			}
		})
	}
}

// onHostMemory is memory of the host device for a group, whose peers have no addresses if far.
func onHostMemory(g *group.Group, far bool) (*memory.Memory, error) {
	near, err := host.New(g, nil)
	if err != nil {
		return nil, err
	}
	if far {
		return memory.New(backendtest.Far(near, g, nil), g, nil), nil
	}
	return memory.New(near, g, nil), nil
}

// TestManyOnCUDA runs lists on the simulated CUDA device: what the kernels are told, launches, streams, graphs; with the tables of large worlds
// too, and with so many vectors that stretches are longer.
func TestManyOnCUDA(t *testing.T) {
	smallLimits(t)
	for _, size := range []int{1, 2, ptx.Inline + 1} {
		everyMany(func(dtype tensor.DType) []Algorithm { return append(manyAlgorithms(device.CUDA, dtype), Auto) }, func(name string, c manyTest) {
			if size > ptx.Inline && (c.op > Prod || c.dtype != tensor.Float32 && c.dtype != tensor.Int8) {
				return // enough with some
			}
			t.Run(fmt.Sprintf("size=%d/%s", size, name), func(t *testing.T) {
				onSimulated(t, size, func(ctx context.Context, _ *simDevice, m *memory.Memory) error { return c.run(ctx, m) })
			})
		})
	}
}

// TestManyWholeOnCUDA: a list of nothing but whole vectors takes the kernel for such, where there is one, and a list with one odd tensor the other;
// both as they were compiled, or as that is done here, with the right results, and in no more blocks than they may have.
func TestManyWholeOnCUDA(t *testing.T) {
	type test struct {
		manyTest
		size   int
		kernel string // how its name begins
	}
	const other = "symmem_many_oneshot_"
	counts := []int64{4, 0, 250, 1, 1030, 16}
	var tests []test
	for size := 2; size <= 8; size++ {
		dtype := []tensor.DType{tensor.Float32, tensor.Float16, tensor.BFloat16}[size%3]
		tests = append(tests, test{manyTest{dtype: dtype, op: []Op{Sum, Avg}[size%2], counts: counts, maxBlocks: size % 4}, size, wholeLists})
	}
	long := slices.Repeat([]int64{8, 32, 0, 16, 256}, 30) // more stretches than travel in the parameter
	for _, dtype := range []tensor.DType{tensor.Float32, tensor.Float16, tensor.BFloat16} {
		tests = append(tests,
			test{manyTest{dtype: dtype, op: Sum, counts: counts, maxBlocks: 1}, 2, wholeLists},
			test{manyTest{dtype: dtype, op: Avg, counts: long}, 2, wholeLists},
			test{manyTest{dtype: dtype, op: Avg, counts: counts}, 2, wholeLists},
			test{manyTest{dtype: dtype, op: Avg, counts: counts, odd: 4}, 2, other},
			test{manyTest{dtype: dtype, op: Sum, counts: counts, short: 5}, 2, other},
			test{manyTest{dtype: dtype, op: Max, counts: counts}, 2, other})
	}
	tests = append(tests,
		test{manyTest{dtype: tensor.Int32, op: Sum, counts: counts}, 2, other},
		test{manyTest{dtype: tensor.Float32, op: Sum, counts: counts}, 9, other})
	for _, c := range tests {
		c.whole, c.algorithm = true, OneShot
		t.Run(fmt.Sprintf("size=%d/%s/%s/odd=%d/short=%d/blocks=%d", c.size, c.dtype, c.op, c.odd, c.short, c.maxBlocks), func(t *testing.T) {
			onSimulated(t, c.size, func(ctx context.Context, dev *simDevice, m *memory.Memory) error {
				before := len(dev.launches)
				err := c.run(ctx, m)
				for _, l := range dev.launches[before:] {
					if !strings.HasPrefix(l.name, c.kernel) || c.maxBlocks > 0 && int(l.grid) > c.maxBlocks {
						err = errors.Join(err, fmt.Errorf("kernel %s in %d blocks", l.name, l.grid))
					}
				}
				if len(dev.launches) == before {
					err = errors.Join(err, errors.New("no kernel"))
				}
				return err
			})
		})
	}
}

// TestManyWholeTold: that a list is whole vectors is among what the ranks compare, since the kernels would wait for each other's lines in vain.
func TestManyWholeTold(t *testing.T) {
	onSimulated(t, 2, func(ctx context.Context, _ *simDevice, m *memory.Memory) error {
		x, err := tensor.Zeros(ctx, m, tensor.Float32, 64)
		if err != nil {
			return err
		}
		if err := x.Rendezvous(ctx); err != nil {
			return err
		}
		list := newAllReduceMany([]Pair{{In: x}}, Sum, &Options{Algorithm: OneShot})
		if err := errors.Join(list.check(), list.choose()); err != nil {
			return err
		}
		var s collective.Spec
		list.spec(&s)
		return errors.Join(wholeIsTold(ctx, m, s), x.Close(ctx))
	})
}

// TestWholeGeometry: so many threads as a stretch has vectors do it, whole warps and no more than a block, and blocks have several of them, as long as the
// bound of blocks allows.
func TestWholeGeometry(t *testing.T) {
	for longest, together := range map[uint64]int{0: 32, 1: 32, 32: 32, 33: 64, 64: 64, 100: 128, 129: 256, 256: 256, 4096: 256} {
		require.Equal(t, together, wholeTogether(longest), longest)
	}
	for _, c := range []struct{ stretches, together, blocks, threads int }{
		{0, 32, 1, 128}, {1, 32, 1, 128}, {5, 32, 2, 128}, {50, 32, 13, 128}, {64, 32, 16, 128}, {65, 32, 9, 256}, {50, 64, 13, 256},
		{3, 128, 3, 128}, {17, 128, 9, 256}, {50, 256, 50, 256}, {1000, 32, 125, 256}, {1 << 14, 32, 264, 256}, {1 << 14, 256, 264, 256},
	} {
		g := wholeGeometry(c.stretches, c.together, 132)
		require.Equal(t, launchGeometry{blocks: c.blocks, threads: c.threads}, g, c)
		require.Zero(t, g.threads%c.together)
	}
}

// TestCut: stretches are all vectors of all tensors, once, in the order of their lines, however many there are.
func TestCut(t *testing.T) {
	for _, tensors := range [][]stretched{
		{{in: 0x1000, bytes: 1}}, {{in: 0x100f, bytes: 2}}, {{in: 0x1003, bytes: 4096}, {in: 0x3000, bytes: 16}}, {{in: 0x1001, bytes: 1 << 30}, {in: 0x8000_0000, bytes: 77}},
	} {
		for _, vector := range []int64{8, 16} {
			stretches, lines, longest := cut(tensors, tensor.Int8, vector)
			require.Less(t, len(stretches), mostStretches+mostStretches/2)
			next, most := uint64(0), uint64(0)
			got := map[uint64]uint64{}
			for _, s := range stretches {
				require.Equal(t, next, s.Line)
				require.Equal(t, got[s.In], s.First)
				require.NotZero(t, s.Vectors)
				got[s.In] += s.Vectors
				next += s.Vectors
				most = max(most, s.Vectors)
			}
			require.Equal(t, lines, next)
			require.Equal(t, most, longest)
			for _, s := range tensors {
				first := uint64(s.in) / uint64(vector)
				require.Equal(t, (uint64(s.in)+uint64(s.bytes)-1)/uint64(vector)-first+1, got[uint64(s.in)])
			}
		}
	}
}

// many does what the kernels of lists do with the same parameters: each line in its place, and stretches alone.
func (l *simLaunch) many() error {
	bytes := func(p uint64, n uint64) []byte {
		if n == 0 {
			return nil
		}
		b, err := l.dev.mem.Bytes(device.Ptr(p), int64(n))
		if err != nil {
			panic(err)
		}
		return b
	}
	stretches := unsafe.Slice((*ptx.Stretch)(unsafe.Pointer(unsafe.SliceData(bytes(l.list.Stretches, uint64(l.list.Count)*64)))), l.list.Count)
	// of is the bytes of a stretch, from its first address on; vectors of so many bytes.
	of := func(s ptx.Stretch, width, vector uint64) (from, to uint64) {
		begin := s.In / vector * vector
		return max(begin+s.First*vector, s.In) - s.In, min(begin+(s.First+s.Vectors)*vector, s.In+s.Count*width) - s.In
	}
	form, name, _ := strings.Cut(strings.TrimPrefix(l.name, "symmem_many_"), "_")
	if form == "copy" {
		width := uint64(name[0] - '0')
		for _, s := range stretches {
			from, to := of(s, width, 16)
			copy(bytes(s.Out+from, to-from), bytes(s.In+from, to-from))
		}
		return nil
	}
	dtype, err := tensor.ParseDType(name)
	if err != nil {
		return err
	}
	world, rank, width := int(l.p.World), int(l.p.Rank), uint64(dtype.Bytes())
	run := simRun{dev: l.dev, world: world, rank: rank, workspace: func(r int) uint64 { return l.pointer(2, r) }}
	run.open()
	defer run.close()
	reduce := newReducer(dtype, Op(l.p.Op), world)
	if form == "pull" {
		if err := run.meet(0); err != nil {
			return err
		}
		row := func(row uint64, r int) uint64 {
			return *(*uint64)(unsafe.Pointer(unsafe.SliceData(bytes(l.list.Table+(row*uint64(world)+uint64(r))*8, 8))))
		}
		for _, s := range stretches {
			from, to := of(s, width, 16)
			var srcs [][]byte
			for r := range world {
				srcs = append(srcs, bytes(row(s.Row, r)+from, to-from))
			}
			sum := make([]byte, to-from)
			reduce(sum, srcs, 0, int64((to-from)/width))
			if s.OutRow == ptx.OwnOnly {
				copy(bytes(s.Out+from, to-from), sum)
				continue
			}
			for r := range world {
				copy(bytes(row(s.OutRow, r)+from, to-from), sum)
			}
		}
		return run.meet(1)
	}
	line := uint64(ptx.ManyLine(name))
	slot := func(owner, writer int, at uint64) uint64 {
		data := l.pointer(2, owner) + uint64(ptx.ControlBytes(int(l.grid), world))
		return data + (uint64(run.epoch&1)*uint64(world)+uint64(writer))*l.p.Span + at*16
	}
	// each gives the lines of a stretch: which bytes of the tensor each has, and where in it they begin.
	each := func(s ptx.Stretch, f func(at, n, line, within uint64)) {
		from, to := of(s, width, line)
		for at := from; at < to; {
			within := (s.In + at) % line
			n := min(line-within, to-at)
			f(at, n, s.Line+(s.In+at)/line-s.In/line-s.First, within)
			at += n
		}
	}
	for _, s := range stretches {
		each(s, func(at, n, k, within uint64) {
			for r := range world {
				copy(bytes(slot(r, rank, k)+within, n), bytes(s.In+at, n))
			}
		})
	}
	if err := run.meet(0); err != nil {
		return err
	}
	for _, s := range stretches {
		from, to := of(s, width, line)
		srcs := make([][]byte, world)
		for r := range world {
			each(s, func(_, n, k, within uint64) { srcs[r] = append(srcs[r], bytes(slot(rank, r, k)+within, n)...) })
		}
		reduce(bytes(s.Out+from, to-from), srcs, 0, int64((to-from)/width))
	}
	return nil
}

// TestManyRefused: what a list must not be is told with its place, on every rank alike, and nothing is left behind.
func TestManyRefused(t *testing.T) {
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
		if err := x.Rendezvous(ctx); err != nil {
			return err
		}
		a, aErr := x.Sub(0, 10)
		b, bErr := x.Sub(9, 10)
		c, cErr := x.Sub(40, 10)
		d, dErr := x.Sub(60, 10)
		behind, behindErr := x.Sub(49, 10)
		if err := errors.Join(aErr, bErr, cErr, dErr, behindErr); err != nil {
			return err
		}
		var wrong error
		refused := func(what string, is error, text string, pairs ...Pair) {
			p, err := NewAllReduceMany(ctx, pairs, Sum, nil)
			if err == nil {
				err = errors.Join(errors.New("no error"), p.Close(ctx))
			}
			if !errors.Is(err, is) || !strings.Contains(err.Error(), text) {
				wrong = errors.Join(wrong, fmt.Errorf("%s: %w", what, err))
			}
		}
		refused("an output that overlaps its input", errs.ErrInvalid, "pairs[0].Out", Pair{In: a, Out: b})
		refused("outputs that overlap", errs.ErrInvalid, "pairs[1].Out", Pair{In: a}, Pair{In: b})
		refused("one output twice", errs.ErrInvalid, "pairs[1]", Pair{In: a, Out: c}, Pair{In: b, Out: c})
		refused("an output that is another's input", errs.ErrInvalid, "pairs[1].Out", Pair{In: a, Out: c}, Pair{In: c, Out: a})
		refused("an output that overlaps another's input", errs.ErrInvalid, "pairs[0].Out", Pair{In: a, Out: c}, Pair{In: behind, Out: d})
		refused("other places", errs.ErrMismatch, "pairs[1]", Pair{In: c}, []Pair{{In: a}, {In: b}}[g.Rank()])
		refused("other lengths", errs.ErrMismatch, "2 tensors", []Pair{{In: c}, {In: a}}[:1+g.Rank()]...)
		refused("one rank's nil", errs.ErrInvalid, "pairs[1].In", Pair{In: c}, []Pair{{In: a}, {}}[g.Rank()])
		// A rank of another program says nothing of its list, or less than there is in it.
		for _, record := range []string{`{}`, `{"what":[]}`, `{"what":["sum of 2 tensors of f32"]}`} {
			if g.Rank() == 0 {
				refused(record, errs.ErrMismatch, "nothing", Pair{In: a}, Pair{In: c})
			} else if _, err := g.AllGather(ctx, "the tensors of all-reduce of many", []byte(record)); err != nil {
				return err
			}
		}
		// Inputs may overlap.
		p, err := NewAllReduceMany(ctx, []Pair{{In: a, Out: c}, {In: b, Out: d}}, Sum, nil)
		if err != nil {
			return errors.Join(wrong, err)
		}
		return errors.Join(wrong, p.Close(ctx), x.Close(ctx), m.Close(ctx))
	}))
}

// TestManyAdjoin: tensors that lie one behind the other, inputs and outputs, are as one on the host, whatever they are cut into, and only they: not over a gap, in
// another order, where only the inputs do, nor from one window to the next. The results are those of each by itself, and nothing between them is
// touched.
func TestManyAdjoin(t *testing.T) {
	type piece struct{ window, in, out, n int64 } // elements
	const inPlace = -1
	for name, c := range map[string]struct {
		pieces []piece
		runs   int
	}{
		"one behind the other":    {[]piece{{0, 0, inPlace, 5}, {0, 5, inPlace, 70}, {0, 75, inPlace, 1}, {0, 76, inPlace, 9000}}, 1},
		"and empty ones":          {[]piece{{0, 0, inPlace, 5}, {0, 90, inPlace, 0}, {0, 5, inPlace, 300}}, 1},
		"a gap":                   {[]piece{{0, 0, inPlace, 64}, {0, 65, inPlace, 64}, {0, 129, inPlace, 64}}, 2},
		"backwards":               {[]piece{{0, 64, inPlace, 64}, {0, 0, inPlace, 64}}, 2},
		"inputs and outputs":      {[]piece{{0, 0, 100, 33}, {0, 33, 133, 50}, {0, 83, 183, 17}}, 1},
		"inputs alone":            {[]piece{{0, 0, 100, 33}, {0, 33, 134, 50}}, 2},
		"outputs alone":           {[]piece{{0, 0, 100, 33}, {0, 34, 133, 50}}, 2},
		"then in place":           {[]piece{{0, 0, 100, 33}, {0, 33, inPlace, 50}}, 2},
		"at the next window":      {[]piece{{0, 0, inPlace, 10000}, {1, 10000, inPlace, 100}}, 2},
		"many, with a gap":        {append([]piece{{0, 1, inPlace, 2}}, slices.Repeat([]piece{{0, 4, inPlace, 0}}, 20)...), 1},
		"shares end in a tensor":  {[]piece{{0, 0, inPlace, 100}, {0, 100, inPlace, 1}, {0, 103, inPlace, 500}, {1, 3, inPlace, 64}, {1, 67, inPlace, 3}}, 3},
		"outputs before all else": {[]piece{{1, 700, 0, 40}, {1, 740, 40, 600}}, 1},
	} {
		for _, algorithm := range []Algorithm{Auto, OneShot, TwoShot, Transfers} {
			for _, size := range []int{1, 2, 3} {
				t.Run(fmt.Sprintf("%s/%s/size=%d", name, algorithm, size), func(t *testing.T) {
					backendtest.RequireAll(t, backendtest.OnRanks(t, size, nil, func(ctx context.Context, g *group.Group) error {
						near, err := host.New(g, nil)
						if err != nil {
							return err
						}
						m := memory.New(near, g, nil)
						var windows [2]*tensor.Tensor
						value := func(w, r int, i int64) float32 { return float32(i*3 + int64(r)*7 + int64(w)*11) }
						var want [2][]float32
						for w := range want {
							for i := range int64(20000) {
								want[w] = append(want[w], value(w, g.Rank(), i))
							}
						}
						for w := range windows {
							x, err := tensor.Zeros(ctx, m, tensor.Float32, 20000)
							if err == nil {
								err = errors.Join(x.Rendezvous(ctx), m.Device().CopyFromHost(x.Ptr(), asBytes(want[w])))
							}
							if err != nil {
								return err
							}
							windows[w] = x
						}
						var pairs []Pair
						for _, p := range c.pieces {
							in, err := windows[p.window].Sub(p.in, p.n)
							if err != nil {
								return err
							}
							pair, to := Pair{In: in}, p.in
							if p.out != inPlace {
								to = p.out
								if pair.Out, err = windows[p.window].Sub(p.out, p.n); err != nil {
									return err
								}
							}
							pairs = append(pairs, pair)
							for i := range p.n {
								var sum float32
								for r := range size {
									sum += value(int(p.window), r, p.in+i)
								}
								want[p.window][to+i] = sum
							}
						}
						listed := newAllReduceMany(pairs, Sum, nil)
						if err := listed.check(); err != nil || len(listed.runs) != c.runs {
							return fmt.Errorf("%d runs where %d are right: %w", len(listed.runs), c.runs, err)
						}
						p, err := NewAllReduceMany(ctx, pairs, Sum, &Options{Algorithm: algorithm})
						if err != nil {
							return err
						}
						s, err := m.Device().NewStream()
						if err != nil {
							return err
						}
						if err := errors.Join(p.Run(s), s.Synchronize(ctx), s.Close()); err != nil {
							return err
						}
						for w, x := range windows {
							got := make([]float32, 20000)
							if err := m.Device().CopyToHost(asBytes(got), x.Ptr()); err != nil {
								return err
							}
							for i := range got {
								if got[i] != want[w][i] {
									return fmt.Errorf("element %d of window %d is %v, and should be %v", i, w, got[i], want[w][i])
								}
							}
						}
						return errors.Join(p.Close(ctx), m.Close(ctx))
					}))
				})
			}
		}
	}
}

func asBytes(v []float32) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(v))), 4*len(v))
}

// TestManyHasFewStretches: where auto would take one-shot for a list's bytes it does so only if there are few stretches to copy.
func TestManyHasFewStretches(t *testing.T) {
	onHostRanks(t, 2, func(ctx context.Context, m *memory.Memory, x, _ *tensor.Tensor) error {
		for _, c := range []struct {
			apart int64
			count int
			form  Algorithm
		}{{2, manyOneShot, OneShot}, {2, manyOneShot + 1, TwoShot}, {1, 50, OneShot}} {
			var pairs []Pair
			for i := range c.count {
				in, err := x.Sub(int64(i)*c.apart, 1)
				if err != nil {
					return err
				}
				pairs = append(pairs, Pair{In: in})
			}
			p, err := NewAllReduceMany(ctx, pairs, Sum, nil)
			if err != nil {
				return err
			}
			if p.Algorithm() != c.form {
				return fmt.Errorf("%d tensors, %d apart, are reduced by %s", c.count, c.apart, p.Algorithm())
			}
			if err := p.Close(ctx); err != nil {
				return err
			}
		}
		return nil
	})
}
