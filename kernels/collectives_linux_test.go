package kernels

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/backend/host"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/kernels/ptx"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// collectiveTest is one collective on one kind of memory.
type collectiveTest struct {
	what      string
	algorithm Algorithm
	dtype     tensor.DType
	op        Op
	n, offset int64 // elements: of the larger tensor, and in front of both
	root      int
	inPlace   bool
	maxBlocks int
}

// elements is the size of input and output.
func (c collectiveTest) elements(size int) (in, out int64) {
	switch c.what {
	case "all-gather":
		return shareElements(c.n, size), c.n
	case "reduce-scatter":
		return c.n, shareElements(c.n, size)
	}
	return c.n, c.n
}

// input is small numbers in every dtype.
func (c collectiveTest) input(rank, size int) []byte {
	in, _ := c.elements(size)
	b := make([]byte, in*c.dtype.Bytes())
	for i := range b {
		b[i] = byte(i*31+rank*17+i/257) & 0x3f
	}
	if c.sums() { // exactly, in any order
		for i := range in {
			bits := math.Float32bits(float32((int(i)+rank*5)%11 - 5))
			for k := range c.dtype.Bytes() {
				b[i*c.dtype.Bytes()+k] = byte(bits >> (32 - 8*c.dtype.Bytes() + 8*k))
			}
		}
	}
	return b
}

// onMachine says whether its kernel is run as it was compiled.
func (c collectiveTest) onMachine() bool {
	return c.algorithm == OneShotLL || c.algorithm == OneShotPush && c.combines() || c.algorithm == OneShotMultimem
}

// sums says whether it is of a form that has sums of floats only.
func (c collectiveTest) sums() bool {
	return (c.algorithm == OneShotMultimem || c.algorithm == Hierarchical && c.dtype.IsFloat()) && c.combines()
}

// want is the output on a rank that had before in it.
func (c collectiveTest) want(rank, size int, before []byte) []byte {
	out, width := bytes.Clone(before), c.dtype.Bytes()
	var ins [][]byte
	for r := range size {
		ins = append(ins, c.input(r, size))
	}
	combined := make([]byte, c.n*width)
	if c.what == "reduce" || c.what == "reduce-scatter" {
		newReducer(c.dtype, c.op, size)(combined, ins, 0, c.n)
	}
	lo, hi := shareOf(c.n, size, rank)
	switch c.what {
	case "broadcast":
		return ins[c.root]
	case "reduce":
		if rank == c.root {
			return combined
		}
	case "reduce-scatter":
		copy(out, combined[lo*width:hi*width])
	case "all-gather":
		for r := range size {
			lo, hi := shareOf(c.n, size, r)
			copy(out[lo*width:hi*width], ins[r])
		}
	case "all-to-all":
		block := c.n / int64(size) * width
		for r := range size {
			copy(out[int64(r)*block:], ins[r][int64(rank)*block:int64(rank+1)*block])
		}
	}
	return out
}

// run is one rank of the test: the collective three times, then 10 times from a graph, with the input and the output written anew in between.
func (c collectiveTest) run(ctx context.Context, m *memory.Memory, poisoned byte) error {
	rank, size, d, width := m.Group().Rank(), m.Group().Size(), m.Device(), c.dtype.Bytes()
	inElements, outElements := c.elements(size)
	whole, err := tensor.Zeros(ctx, m, c.dtype, max(inElements, outElements)+c.offset+3)
	if err != nil {
		return err
	}
	wholeOut, err := tensor.Zeros(ctx, m, c.dtype, max(inElements, outElements)+c.offset+3)
	if err != nil {
		return err
	}
	if err := errors.Join(whole.Rendezvous(ctx), wholeOut.Rendezvous(ctx)); err != nil {
		return err
	}
	lo, hi := shareOf(c.n, size, rank)
	var in, out tensor.SymmetricTensor
	var inErr, outErr error
	in, inErr = whole.Sub(c.offset, inElements)
	out, outErr = wholeOut.Sub(max(c.offset-1, 0), outElements) // not aligned as the input is
	if c.inPlace {
		switch c.what {
		case "reduce":
			out = in
		case "reduce-scatter":
			out, outErr = in.Sub(lo, hi-lo)
		case "all-gather":
			in, inErr = out.Sub(lo, hi-lo)
		}
	}
	if err := errors.Join(inErr, outErr); err != nil {
		return err
	}
	opts := &Options{Algorithm: c.algorithm, FirstEpoch: 1<<32 - 2, MaxBlocks: c.maxBlocks}
	if c.onMachine() {
		opts.MaxBlocks = 2 // the machine that runs these kernels takes its time
	}
	var p *Plan
	switch c.what {
	case "broadcast":
		out = in
		p, err = NewBroadcast(ctx, in, c.root, opts)
	case "reduce":
		p, err = NewReduce(ctx, in, out, c.op, c.root, opts)
	case "reduce-scatter":
		p, err = NewReduceScatter(ctx, in, out, c.op, opts)
	case "all-gather":
		p, err = NewAllGather(ctx, in, out, opts)
	default:
		p, err = NewAllToAll(ctx, in, out, opts)
	}
	if err != nil {
		return err
	}
	if c.algorithm != Auto && p.Algorithm() != c.algorithm {
		return fmt.Errorf("%s came in place of %s", p.Algorithm(), c.algorithm)
	}
	before := bytes.Repeat([]byte{poisoned}, int(out.Bytes()))
	mine := c.input(rank, size)[:in.Bytes()]
	if c.inPlace && c.what == "reduce-scatter" {
		before = bytes.Clone(mine[lo*width : hi*width])
	} else if out == in {
		before = mine
	}
	want := c.want(rank, size, before)
	write := func(t tensor.SymmetricTensor, b []byte) error {
		if len(b) == 0 {
			return nil
		}
		return d.CopyFromHost(t.Ptr(), b)
	}
	fill := func() error {
		return errors.Join(m.Group().Barrier(ctx, "ended"), write(out, before), write(in, mine), m.Group().Barrier(ctx, "filled"))
	}
	check := func(what string) error {
		got := make([]byte, len(want))
		if len(got) == 0 {
			return nil
		}
		if err := d.CopyToHost(got, out.Ptr()); err != nil {
			return err
		}
		if !bytes.Equal(got, want) {
			return fmt.Errorf("%s: another result on rank %d: %x, not %x", what, rank, got[:min(len(got), 64)], want[:min(len(want), 64)])
		}
		return nil
	}
	s, err := d.NewStream()
	if err != nil {
		return err
	}
	for i := range 3 {
		if err := errors.Join(fill(), p.Run(s), s.Synchronize(ctx), check(fmt.Sprint("run ", i))); err != nil {
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
	launched := s
	if sim, ok := s.(*simStream); ok {
		launched = sim.Stream
	}
	times := 10
	if out == in && c.what == "reduce" {
		times = 1
	}
	if c.inPlace && c.what == "reduce-scatter" {
		times = 1 // sums of sums otherwise
	}
	if err := fill(); err != nil {
		return err
	}
	for range times {
		if err := graph.Launch(launched); err != nil {
			return err
		}
	}
	return errors.Join(s.Synchronize(ctx), check("graph"), graph.Close(), p.Close(ctx), s.Close(), wholeOut.Close(ctx), whole.Close(ctx))
}

// fullMatrix is for more, which takes longer.
var fullMatrix = os.Getenv("SYMMEM_TEST_MATRIX") == "full"

// constructors by what they make.
var constructors = map[string]string{
	"broadcast": "NewBroadcast", "reduce": "NewReduce", "reduce-scatter": "NewReduceScatter", "all-gather": "NewAllGather", "all-to-all": "NewAllToAll",
}

// onSimulated runs f on ranks over simulated CUDA devices.
func onSimulated(t *testing.T, size int, f func(ctx context.Context, dev *simDevice, m *memory.Memory) error) {
	t.Helper()
	groups, err := group.Local(size, nil)
	require.NoError(t, err)
	var g errgroup.Group
	for _, gr := range groups {
		g.Go(func() error {
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			near, err := host.New(gr, nil)
			if err != nil {
				return err
			}
			dev := &simDevice{Device: near.Device(), mem: near.Device().(device.HostMemory), atomics: true}
			b := &castBackend{ranks: size, simBackend: &simBackend{Backend: near, dev: dev}}
			b.left.Store(math.MaxInt64)
			m := memory.New(b, gr, nil)
			if err := f(ctx, dev, m); err != nil {
				gr.Abort("the test has failed")
				return err
			}
			return errors.Join(m.Close(ctx), gr.Close(ctx))
		})
	}
	require.NoError(t, g.Wait())
}

// everyCollective calls f with each collective: at an odd place, aligned, with a few elements and with many, in place and not.
func everyCollective(size int, algorithms func(what string) []Algorithm, f func(c collectiveTest)) {
	dtypes := []tensor.DType{tensor.Float32, tensor.BFloat16, tensor.Int8, tensor.Float64, tensor.Uint16}
	i := 0
	for _, what := range []string{"broadcast", "reduce", "reduce-scatter", "all-gather", "all-to-all"} {
		for _, algorithm := range algorithms(what) {
			for _, n := range []int64{0, 1, 67, 3000, 50021} {
				for _, inPlace := range []bool{false, true} {
					if inPlace && (what == "broadcast" || what == "all-to-all") {
						continue
					}
					if what == "all-to-all" {
						n -= n % int64(size)
					}
					i++
					f(collectiveTest{
						what: what, algorithm: algorithm, dtype: dtypes[i%len(dtypes)], op: Ops()[i/2%len(Ops())], n: n, offset: int64(i % 3 * 5), root: i % size, inPlace: inPlace,
					})
				}
			}
		}
	}
}

// smallLimits makes messages large that are small, for a test.
func smallLimits(t *testing.T) {
	small, lap, far, via, own := cudaTransferSmallBytes, cudaTransferLapBytes, hostTransferSmallBytes, viaAllBytes, ownBesideBytes
	two, most, least := nearTwoLapsBytes, apartMostBytes, apartLeastBytes
	t.Cleanup(func() {
		cudaTransferSmallBytes, cudaTransferLapBytes, hostTransferSmallBytes, viaAllBytes, ownBesideBytes = small, lap, far, via, own
		nearTwoLapsBytes, apartMostBytes, apartLeastBytes = two, most, least
	})
	nearTwoLapsBytes, apartMostBytes, apartLeastBytes = 1000, 40_000, 1000 // so that some have places apart, and some have not
	ownBesideBytes = 2000
	for i := range cudaTransferSmallBytes {
		cudaTransferSmallBytes[i] = 2000
	}
	cudaTransferLapBytes, hostTransferSmallBytes = 8<<10, 2000
	viaAllBytes = func(device.Kind, bool) int64 { return 20_000 }
}

// TestCollectivesOnCUDA runs every collective on the simulated CUDA device: parameters, launches, streams, graphs; inline and with the tables
// of large worlds.
func TestCollectivesOnCUDA(t *testing.T) {
	smallLimits(t)
	sizes := []int{1, 2, 5}
	if fullMatrix {
		sizes = []int{1, 2, 3, 5, ptx.Inline + 1}
	}
	for _, size := range sizes {
		everyCollective(size, func(what string) []Algorithm {
			return CollectiveAlgorithms(constructors[what], device.CUDA)
		}, func(c collectiveTest) {
			if _, ok := ptx.PushScatter(ptx.OneShotPush, c.dtype.String(), true); c.algorithm == OneShotPush && c.combines() && !ok {
				c.dtype = tensor.BFloat16
			}
			if c.sums() {
				if c.op = Sum; c.dtype != tensor.BFloat16 {
					c.dtype = tensor.Float32
				}
			}
			if c.n > 1000 && c.onMachine() {
				if c.n == 3000 && (!fullMatrix || size > 3) {
					return
				}
				c.n = 1200 - 1200%int64(size)
			}
			if size > ptx.Inline && c.onMachine() && (c.n < 2 || c.dtype.Bytes() > 4) {
				return
			}
			t.Run(fmt.Sprintf("size=%d/%s/%s/%s/%d/in_place=%t", size, c.what, c.algorithm, c.dtype, c.n, c.inPlace), func(t *testing.T) {
				onSimulated(t, size, func(ctx context.Context, _ *simDevice, m *memory.Memory) error { return c.run(ctx, m, 0xab) })
			})
		})
	}
}

// TestCollectivesFar runs every collective between peers without pointers, cut into many laps.
func TestCollectivesFar(t *testing.T) {
	smallLimits(t)
	for _, size := range []int{2, 4} {
		everyCollective(size, func(string) []Algorithm { return []Algorithm{Auto} }, func(c collectiveTest) {
			c.n *= 3
			t.Run(fmt.Sprintf("size=%d/%s/%s/%d/in_place=%t", size, c.what, c.dtype, c.n, c.inPlace), func(t *testing.T) {
				backendtest.RequireAll(t, backendtest.OnRanks(t, size, nil, func(ctx context.Context, g *group.Group) error {
					near, err := host.New(g, nil)
					if err != nil {
						return err
					}
					m := memory.New(backendtest.Far(near, g, nil), g, nil)
					return errors.Join(c.run(ctx, m, 0xab), m.Close(ctx))
				}))
			})
		})
	}
}

// TestShardsStayWithTheirBlocks: what a block copies of what a rank has got in the same launch, the block of the same number has
// stored: only with that has it met. In the form that loads, ranks store to their own memory; in the one that stores, to that of others.
func TestShardsStayWithTheirBlocks(t *testing.T) {
	for _, form := range []Algorithm{TwoShotPull, TwoShotPush} {
		for _, size := range []int{3, 4, ptx.Inline + 1} {
			const bytes = 1<<20 + 77
			var mu sync.Mutex
			blocks, copied := map[uint64]uint64{}, map[uint64]bool{} // by place in the tensor: of whoever stored it first; whether it was passed on
			var wrong []string
			onSimulated(t, size, func(ctx context.Context, dev *simDevice, m *memory.Memory) error {
				x, err := tensor.Zeros(ctx, m, tensor.Int8, bytes)
				if err != nil {
					return err
				}
				if err := x.Rendezvous(ctx); err != nil {
					return err
				}
				var ranks []uint64
				for r := range size {
					v, err := x.Remote(r)
					if err != nil {
						return err
					}
					ranks = append(ranks, uint64(v.Ptr()))
				}
				dev.moved = func(phase uint32, to, block uint64) {
					mu.Lock()
					defer mu.Unlock()
					owner := slices.IndexFunc(ranks, func(base uint64) bool { return base <= to && to < base+bytes })
					if own := owner == x.Rank(); own != (form == TwoShotPull) {
						wrong = append(wrong, fmt.Sprintf("rank %d stores to rank %d", x.Rank(), owner))
					}
					at := to - ranks[owner]
					if phase == 0 {
						blocks[at] = block
					} else if first, ok := blocks[at]; ok {
						if copied[at] = true; first != block {
							wrong = append(wrong, fmt.Sprintf("block %d copies what block %d has stored at %d", block, first, at))
						}
					}
				}
				p, err := NewBroadcast(ctx, x, 1, &Options{Algorithm: form})
				if err != nil {
					return err
				}
				s, err := dev.NewStream()
				if err != nil {
					return err
				}
				return errors.Join(p.Run(s), s.Synchronize(ctx), p.Close(ctx), s.Close(), x.Close(ctx))
			})
			require.Empty(t, wrong, "%s between %d ranks", form, size)
			require.NotEmpty(t, blocks)
			require.Len(t, copied, len(blocks))
		}
	}
}
