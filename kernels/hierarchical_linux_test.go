package kernels

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/backend/host"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// onIslands runs f on ranks of which those with the same number are on one island.
func onIslands(t *testing.T, islands []int, timeout time.Duration, broken *atomic.Bool, f func(ctx context.Context, m *memory.Memory, s device.Stream) error) {
	t.Helper()
	backendtest.RequireAll(t, backendtest.OnRanks(t, len(islands), nil, func(ctx context.Context, g *group.Group) error {
		near, err := host.New(g, nil)
		if err != nil {
			return err
		}
		o := backendtest.FarOptions{Islands: islands, Delay: 20 * time.Microsecond, Fail: func() error {
			if broken != nil && broken.Load() {
				return errBroken
			}
			return nil
		}}
		m := memory.New(backendtest.Far(near, g, &o), g, &memory.Options{KernelTimeout: timeout})
		s, err := m.Device().NewStream()
		if err != nil {
			return err
		}
		if err = f(ctx, m, s); err != nil {
			g.Abort("the test has failed") // the others may be waiting
		}
		closed := errors.Join(s.Close(), m.Close(ctx))
		if err == nil && !errors.Is(closed, errs.ErrPeerLost) {
			err = closed
		}
		return err
	}))
}

// islandOrder is what an all-reduce of f32, f16 or bf16 over islands gives, by the order that Hierarchical states.
func islandOrder(dtype tensor.DType, op Op, islands [][]int, value func(rank int) float32) float32 {
	round := func(x float32) float32 { return rounded(dtype, x) }
	step := func(x, y float32) float32 {
		if op == Prod {
			return x * y
		}
		return x + y
	}
	var all float32
	size := 0
	for i, ranks := range islands {
		sum := value(ranks[0])
		for _, r := range ranks[1:] {
			sum = step(sum, value(r))
		}
		if size += len(ranks); dtype != tensor.Float16 || op != Avg {
			sum = round(sum)
		}
		if i == 0 {
			all = sum
		} else {
			all = step(all, sum)
		}
	}
	if op == Avg {
		all /= float32(size)
	}
	return round(all)
}

// rounded is x as an element of f32, f16 or bf16.
func rounded(dtype tensor.DType, x float32) float32 {
	switch dtype {
	case tensor.Float16:
		return tensor.F16From(x).Float32()
	case tensor.BFloat16:
		return tensor.BF16From(x).Float32()
	}
	return x
}

// TestHierarchicalOrder: every rank gets the same bits, those of the order that is stated: sums inside islands first, in the order of their ranks, then
// these in the order of the islands; in place or not, of any number of elements at any place, several times, and from a graph.
func TestHierarchicalOrder(t *testing.T) {
	for _, places := range [][]int{{0, 0, 1, 1}, {0, 1, 1, 0, 0}, {0, 1, 1, 2, 2}} {
		if testing.Short() && len(places) < 5 { // the others have islands of these sizes too
			continue
		}
		t.Run(fmt.Sprint(places), func(t *testing.T) {
			onIslands(t, places, 10*time.Second, nil, func(ctx context.Context, m *memory.Memory, s device.Stream) error {
				islands := islandRanks(m.Islands())
				for i, n := range []int64{1, 77, 100_003, 700_001} {
					dtype := []tensor.DType{tensor.BFloat16, tensor.Float16, tensor.Float32, tensor.Float32}[i]
					op := []Op{Sum, Avg, Prod, Sum}[i]
					if err := orderOnIslands(ctx, m, s, islands, islandOrder, dtype, op, n, i%2 == 0); err != nil {
						return fmt.Errorf("%s of %d %s: %w", op, n, dtype, err)
					}
				}
				return nil
			})
		})
	}
}

// islandResult is what an all-reduce over islands gives of what each rank has.
type islandResult func(dtype tensor.DType, op Op, islands [][]int, value func(rank int) float32) float32

func orderOnIslands(ctx context.Context, m *memory.Memory, s device.Stream, islands [][]int, order islandResult, dtype tensor.DType, op Op, n int64, inPlace bool) error {
	const before, behind = 3, 5 // so that nothing is aligned
	var whole [2]*tensor.Tensor
	var parts [2]tensor.SymmetricTensor
	for i := range whole {
		var err error
		if whole[i], err = tensor.Zeros(ctx, m, dtype, before+n+behind); err != nil {
			return err
		}
		if err := whole[i].Rendezvous(ctx); err != nil {
			return err
		}
		if parts[i], err = whole[i].Sub(before, n); err != nil {
			return err
		}
	}
	in, out := parts[0], parts[1]
	if inPlace {
		out = in
	}
	value := func(rank int, i int64) float32 { // of sizes that are far apart: they lose digits, other ones in another order
		mix := uint64(i)*0x9e3779b97f4a7c15 + uint64(rank+1)*0xbf58476d1ce4e5b9
		mix ^= mix >> 31
		v := float32(int(mix%255)-127) / 64 * float32(int(1)<<(mix>>8%9))
		if op == Prod {
			v = 1 + float32(mix%127)/128
		}
		if dtype == tensor.Float32 {
			v *= 1 + float32(mix>>44)*0x1p-20
		}
		return v
	}
	write := func() error {
		var b []byte
		for i := range n {
			b = appendFloat32(b, dtype, value(m.Group().Rank(), i))
		}
		return m.Device().CopyFromHost(in.Ptr(), b)
	}
	p, err := NewAllReduce(ctx, in, op, &AllReduceOptions{Algorithm: Hierarchical, Out: out})
	if err != nil {
		return err
	}
	var want []byte
	for i := range n {
		want = appendFloat32(want, dtype, order(dtype, op, islands, func(rank int) float32 { return value(rank, i) }))
	}
	check := func(what string) error {
		got := make([]byte, len(want))
		if err := m.Device().CopyToHost(got, out.Ptr()); err != nil {
			return err
		}
		for i := range got {
			if got[i] != want[i] {
				return fmt.Errorf("%s: element %d differs", what, int64(i)/dtype.Bytes())
			}
		}
		// What lies beside it is as it was.
		edge := make([]byte, before*dtype.Bytes())
		if err := m.Device().CopyToHost(edge, out.Ptr().Add(-before*dtype.Bytes())); err != nil {
			return err
		}
		tail := make([]byte, behind*dtype.Bytes())
		if err := m.Device().CopyToHost(tail, out.Ptr().Add(n*dtype.Bytes())); err != nil {
			return err
		}
		if slices.ContainsFunc(append(edge, tail...), func(b byte) bool { return b != 0 }) {
			return fmt.Errorf("%s: written beside the output", what)
		}
		return nil
	}
	for run := range 2 {
		if err := errors.Join(write(), p.Run(s), s.Synchronize(ctx), check(fmt.Sprintf("run %d", run))); err != nil {
			return err
		}
	}
	if !inPlace { // runs that follow each other without the host
		if err := errors.Join(p.Run(s), p.Run(s), s.Synchronize(ctx), check("two runs")); err != nil {
			return err
		}
	}
	if err := errors.Join(s.BeginCapture(), p.Run(s)); err != nil {
		return err
	}
	g, err := s.EndCapture()
	if err != nil {
		return err
	}
	for range 2 {
		if err := errors.Join(write(), g.Launch(s), s.Synchronize(ctx), check("a graph")); err != nil {
			return err
		}
	}
	return errors.Join(g.Close(), p.Close(ctx), whole[0].Close(ctx), whole[1].Close(ctx))
}

func appendFloat32(b []byte, dtype tensor.DType, v float32) []byte {
	out := make([]byte, dtype.Bytes())
	switch dtype {
	case tensor.Float16:
		slice[uint16](out)[0] = uint16(tensor.F16From(v))
	case tensor.BFloat16:
		slice[uint16](out)[0] = uint16(tensor.BF16From(v))
	default:
		slice[float32](out)[0] = v
	}
	return append(b, out...)
}

// TestHierarchicalAverage: an average of f16 is right where the sum of an island is too large for f16, and where the values are the least there are.
func TestHierarchicalAverage(t *testing.T) {
	onIslands(t, []int{0, 0, 1, 1}, 10*time.Second, nil, func(ctx context.Context, m *memory.Memory, s device.Stream) error {
		x, err := tensor.Zeros(ctx, m, tensor.Float16, 2)
		if err != nil {
			return err
		}
		const largest, least = 65504, 0x1p-24
		var in []byte
		in = appendFloat32(appendFloat32(in, tensor.Float16, largest), tensor.Float16, least)
		if err := errors.Join(x.Rendezvous(ctx), m.Device().CopyFromHost(x.Ptr(), in)); err != nil {
			return err
		}
		p, err := NewAllReduce(ctx, x, Avg, &AllReduceOptions{Algorithm: Hierarchical})
		if err != nil {
			return err
		}
		got := make([]byte, len(in))
		if err := errors.Join(p.Run(s), s.Synchronize(ctx), m.Device().CopyToHost(got, x.Ptr())); err != nil {
			return err
		}
		if string(got) != string(in) {
			return fmt.Errorf("the averages are % x, and % x were expected", got, in)
		}
		return errors.Join(p.Close(ctx), x.Close(ctx))
	})
}

// TestHierarchicalChoice: auto takes the form from some size on where there are several islands and one of more than one rank, unless the order of the ranks is wanted
// or the memory has no addresses; and says why it cannot be had where that was asked for.
func TestHierarchicalChoice(t *testing.T) {
	taken := func(ctx context.Context, x tensor.SymmetricTensor, o AllReduceOptions) (Algorithm, error) {
		p, err := NewAllReduce(ctx, x, Sum, &o)
		if err != nil {
			return 0, err
		}
		return p.Algorithm(), p.Close(ctx)
	}
	for _, c := range []struct {
		islands []int
		want    Algorithm // of a large message
	}{{[]int{0, 0, 1}, Hierarchical}, {[]int{0, 1, 2}, Transfers}, {[]int{0, 0, 0}, TwoShot}} {
		onIslands(t, c.islands, 10*time.Second, nil, func(ctx context.Context, m *memory.Memory, _ device.Stream) error {
			x, err := tensor.Zeros(ctx, m, tensor.Float32, hierarchicalBytes/4)
			if err != nil {
				return err
			}
			if err := x.Rendezvous(ctx); err != nil {
				return err
			}
			small, err := x.Sub(0, hierarchicalBytes/4-1)
			if err != nil {
				return err
			}
			for _, one := range []struct {
				t    tensor.SymmetricTensor
				o    AllReduceOptions
				want Algorithm
			}{
				{x, AllReduceOptions{}, c.want},
				{x, AllReduceOptions{RankOrder: c.want == Hierarchical}, map[bool]Algorithm{true: Transfers, false: c.want}[c.want == Hierarchical]},
				{small, AllReduceOptions{RankOrder: c.want == TwoShot}, map[bool]Algorithm{true: TwoShot, false: Transfers}[c.want == TwoShot]},
				{small, AllReduceOptions{Algorithm: Hierarchical}, Hierarchical},
			} {
				got, err := taken(ctx, one.t, one.o)
				if err != nil {
					return err
				}
				if got != one.want {
					return fmt.Errorf("islands %v, %d bytes, %+v: %s was taken, and %s was expected", c.islands, one.t.Bytes(), one.o, got, one.want)
				}
			}
			if _, err := taken(ctx, x, AllReduceOptions{Algorithm: Hierarchical, RankOrder: true}); !errors.Is(err, errs.ErrUnsupported) {
				return fmt.Errorf("in the order of the ranks it gives %v", err)
			}
			return x.Close(ctx)
		})
	}
	// On GPUs it has what NCCL has, and no average of integers: that of averages is another number.
	require.True(t, Supported(device.CUDA, Hierarchical, tensor.Float32, Avg, 4))
	require.False(t, Supported(device.CUDA, Hierarchical, tensor.Int16, Sum, 4))
	require.False(t, Supported(device.CUDA, Hierarchical, tensor.Int32, Avg, 4))
	require.False(t, Hierarchical.RankOrder())
	require.False(t, Hierarchical.NeedsPeerPointers())
}

// TestHierarchicalFails: whatever keeps a run from its end is told to every rank that has run, whichever stream of the plan it happened on: a peer of the island or of
// the rail that does not come, one that is lost, a put that fails. A run that failed leaves nothing that the next one would take for its own: it is refused.
func TestHierarchicalFails(t *testing.T) {
	shortLaps(t)
	for _, c := range []struct {
		name string
		want error
		peer func(g *group.Group) // what the last rank does in place of the run; nil if it is the link that breaks
	}{
		{"late", os.ErrDeadlineExceeded, func(*group.Group) {}},
		{"lost", errs.ErrPeerLost, func(g *group.Group) { g.Abort("test") }},
		{"broken", errBroken, nil},
	} {
		for _, elements := range []int64{1 << 10, 64 << 10} { // one lap, and several
			t.Run(fmt.Sprintf("%s/%d", c.name, elements), func(t *testing.T) {
				t.Parallel() // they wait more than they work
				var broken atomic.Bool
				var begun atomic.Int32
				islands := []int{0, 0, 1, 1}
				onIslands(t, islands, time.Second, &broken, func(ctx context.Context, m *memory.Memory, s device.Stream) error {
					g := m.Group()
					x, err := tensor.Zeros(ctx, m, tensor.Float32, elements)
					if err != nil {
						return err
					}
					if err := x.Rendezvous(ctx); err != nil {
						return err
					}
					p, err := NewAllReduce(ctx, x, Sum, &AllReduceOptions{Algorithm: Hierarchical})
					if err != nil {
						return err
					}
					if err := errors.Join(p.Run(s), s.Synchronize(ctx), g.Barrier(ctx, "one run")); err != nil {
						return err
					}
					last := len(islands) - 1
					if g.Rank() == last && c.peer != nil {
						for int(begun.Load()) < last && ctx.Err() == nil {
							time.Sleep(time.Millisecond)
						}
						c.peer(g)
					} else {
						broken.Store(c.peer == nil)
						if err := p.Run(s); err != nil {
							return err
						}
						begun.Add(1)
						err := s.Synchronize(ctx)
						// A rank whose put failed knows why, and the others that nothing comes.
						if !errors.Is(err, c.want) && !(c.peer == nil && errors.Is(err, os.ErrDeadlineExceeded)) {
							return fmt.Errorf("Synchronize gave %v, and %w was expected", err, c.want)
						}
						if again := p.Run(s); again == nil {
							return errors.New("a plan that has failed runs again")
						}
					}
					// Nobody goes before all have told what they have to.
					if err := g.Barrier(ctx, "told"); err != nil && !errors.Is(err, errs.ErrPeerLost) {
						return err
					}
					err = errors.Join(p.Close(ctx), x.Close(ctx))
					if errors.Is(err, errs.ErrPeerLost) {
						err = nil
					}
					return err
				})
			})
		}
	}
}
