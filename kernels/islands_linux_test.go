package kernels

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/backend/host"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// shortLaps makes messages have several laps that are small, and few blocks short, for a test.
func shortLaps(t *testing.T) {
	lap, direct, pack, few := hierarchicalLapBytes, hierarchicalDirectBytes, hierarchicalPackBytes, hierarchicalFewLaps
	t.Cleanup(func() {
		hierarchicalLapBytes, hierarchicalDirectBytes, hierarchicalPackBytes, hierarchicalFewLaps = lap, direct, pack, few
	})
	hierarchicalLapBytes, hierarchicalDirectBytes, hierarchicalPackBytes, hierarchicalFewLaps = 16<<10, 4<<10, 6<<10, 1<<20 // many laps
}

// TestIslandCollectives: in the form Hierarchical, every collective that has it gives what it states: from and to every rank, with uneven and empty shares, at odd places, in place, several
// times and from a graph; over islands that are alike and not, in one piece and not, and one alone.
func TestIslandCollectives(t *testing.T) {
	shortLaps(t)
	for _, places := range [][]int{{0, 0}, {0, 1}, {0, 0, 1, 1}, {0, 1, 1, 0, 0}, {0, 1, 1, 2, 2}, {0, 0, 0, 1, 2}} {
		t.Run(fmt.Sprint(places), func(t *testing.T) {
			onIslands(t, places, 10*time.Second, nil, func(ctx context.Context, m *memory.Memory, _ device.Stream) error {
				var err error
				everyCollective(len(places), func(what string) []Algorithm {
					return slices.DeleteFunc(CollectiveAlgorithms(constructors[what], device.Host), func(a Algorithm) bool { return a != Hierarchical })
				}, func(c collectiveTest) {
					if c.sums() && c.dtype == tensor.Float64 {
						c.dtype = tensor.Float32
					}
					if c.sums() && c.op == Prod {
						c.op = Sum // exact in any order
					}
					if err == nil && (c.n > 1 || len(places) > 4) {
						if err = c.run(ctx, m, 0x5a); err != nil {
							err = fmt.Errorf("%+v: %w", c, err)
						}
					}
				})
				return err
			})
		})
	}
}

// TestIslandOrder: the result of a reduce-scatter, and of a reduction to any rank, has the bits of an all-reduce in the form, whose order TestHierarchicalOrder has.
func TestIslandOrder(t *testing.T) {
	shortLaps(t)
	for _, places := range [][]int{{0, 0, 1, 1}, {0, 1, 1, 2, 2, 0}} {
		onIslands(t, places, 10*time.Second, nil, func(ctx context.Context, m *memory.Memory, s device.Stream) error {
			for i, n := range []int64{5003, 33_333} {
				for _, op := range []Op{Sum, Avg} {
					dtype := []tensor.DType{tensor.Float16, tensor.Float32}[i]
					if err := sameAsAllReduce(ctx, m, s, dtype, op, n); err != nil {
						return fmt.Errorf("islands %v, %s of %d %s: %w", places, op, n, dtype, err)
					}
				}
			}
			return nil
		})
	}
}

func sameAsAllReduce(ctx context.Context, m *memory.Memory, s device.Stream, dtype tensor.DType, op Op, n int64) error {
	rank, size := m.Group().Rank(), m.Group().Size()
	var ts [4]*tensor.Tensor // the input, all of the result, root's, and shares
	for i := range ts {
		elements := n
		if i == 3 {
			elements = shareElements(n, size)
		}
		var err error
		if ts[i], err = tensor.Zeros(ctx, m, dtype, elements); err != nil {
			return err
		}
		if err := ts[i].Rendezvous(ctx); err != nil {
			return err
		}
	}
	var b []byte
	for i := range n { // of sizes that are far apart
		mix := uint64(i)*0x9e3779b97f4a7c15 + uint64(rank+1)*0xbf58476d1ce4e5b9
		mix ^= mix >> 31
		b = appendFloat32(b, dtype, float32(int(mix%255)-127)/64*float32(int(1)<<(mix>>8%9))*(1+float32(mix>>44)*0x1p-20))
	}
	if err := m.Device().CopyFromHost(ts[0].Ptr(), b); err != nil {
		return err
	}
	root := size - 1
	all, err := NewAllReduce(ctx, ts[0], op, &AllReduceOptions{Algorithm: Hierarchical, Out: ts[1]})
	if err != nil {
		return err
	}
	one, err := NewReduce(ctx, ts[0], ts[2], op, root, &Options{Algorithm: Hierarchical})
	if err != nil {
		return err
	}
	shares, err := NewReduceScatter(ctx, ts[0], ts[3], op, &Options{Algorithm: Hierarchical})
	if err != nil {
		return err
	}
	var got [4][]byte
	if err := errors.Join(all.Run(s), one.Run(s), shares.Run(s), s.Synchronize(ctx)); err != nil {
		return err
	}
	for i := range got {
		got[i] = make([]byte, ts[i].Bytes())
		if err := m.Device().CopyToHost(got[i], ts[i].Ptr()); err != nil {
			return err
		}
	}
	lo, hi := shareOf(n, size, rank)
	if width := dtype.Bytes(); !bytes.Equal(got[3][:(hi-lo)*width], got[1][lo*width:hi*width]) {
		return errors.New("the reduce-scatter has other bits than the all-reduce")
	}
	if rank == root && !bytes.Equal(got[1], got[2]) {
		return errors.New("the reduction to one rank has other bits than the all-reduce")
	}
	err = errors.Join(all.Close(ctx), one.Close(ctx), shares.Close(ctx))
	for _, x := range ts {
		err = errors.Join(err, x.Close(ctx))
	}
	return err
}

// TestIslandLate: what a rank has in its output until it comes to the run is not what it has behind it, and root's input counts as it is when root comes.
func TestIslandLate(t *testing.T) {
	shortLaps(t)
	for _, constructor := range []string{"NewAllGather", "NewBroadcast", "NewAllToAll"} {
		for late := range 4 {
			onIslands(t, []int{0, 0, 1, 1}, 10*time.Second, nil, func(ctx context.Context, m *memory.Memory, s device.Stream) error {
				long := int64(64 << 10)
				if constructor == "NewAllToAll" && late%2 == 0 {
					long = 4 << 10 // short blocks
				}
				rank := m.Group().Rank()
				p, tensors, done, err := newOfBytes(ctx, m, constructor, long, &Options{Algorithm: Hierarchical})
				if err != nil {
					return err
				}
				whole := tensors[1]
				if constructor == "NewBroadcast" {
					tensors, whole = tensors[:1], tensors[0]
				}
				if rank == late {
					time.Sleep(20 * time.Millisecond) // the others would have done all that does not wait for this rank
				}
				for i, x := range tensors {
					b := byte(1)
					if i > 0 || constructor == "NewBroadcast" && rank != 0 {
						b = 2
					}
					if err := m.Device().CopyFromHost(x.Ptr(), slices.Repeat([]byte{b}, int(x.Bytes()))); err != nil {
						return err
					}
				}
				if err := errors.Join(p.Run(s), s.Synchronize(ctx)); err != nil {
					return err
				}
				got := make([]byte, long)
				if err := m.Device().CopyToHost(got, whole.Ptr()); err != nil {
					return err
				}
				if at := slices.IndexFunc(got, func(b byte) bool { return b != 1 }); at >= 0 {
					return fmt.Errorf("%s, rank %d late: byte %d is %d", constructor, late, at, got[at])
				}
				return done()
			})
		}
	}
}

// TestIslandFails: a peer that does not come, and a put that fails, are told to every rank that has run, in time, and the plan is refused from then on.
func TestIslandFails(t *testing.T) {
	shortLaps(t)
	for _, constructor := range islandCollectives {
		for _, late := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s/late=%t", constructor, late), func(t *testing.T) {
				t.Parallel() // they wait more than they work
				var broken atomic.Bool
				onIslands(t, []int{0, 0, 1, 1}, time.Second, &broken, func(ctx context.Context, m *memory.Memory, s device.Stream) error {
					g := m.Group()
					bytes := 8 * hierarchicalLapBytes // several laps
					if constructor == "NewAllToAll" {
						bytes = 4 * hierarchicalPackBytes
					}
					p, _, done, err := newOfBytes(ctx, m, constructor, bytes, &Options{Algorithm: Hierarchical})
					if err != nil {
						return err
					}
					if err := errors.Join(p.Run(s), s.Synchronize(ctx), g.Barrier(ctx, "one run")); err != nil {
						return err
					}
					broken.Store(!late)
					if !late || g.Rank() != 3 {
						if err := p.Run(s); err != nil {
							return err
						}
						// A rank whose put failed knows why, and the others that nothing comes.
						if err := s.Synchronize(ctx); !errors.Is(err, os.ErrDeadlineExceeded) && (late || !errors.Is(err, errBroken)) {
							return fmt.Errorf("Synchronize gave %v", err)
						}
						if p.Run(s) == nil {
							return errors.New("a plan that has failed runs again")
						}
					}
					return errors.Join(g.Barrier(ctx, "told"), done())
				})
			})
		}
	}
}

// TestIslandLinks: whom a rank exchanges with exchanges with it, and what any rank brings comes to each other island by one rank there.
func TestIslandLinks(t *testing.T) {
	for _, islands := range hierarchicalIslands {
		for _, even := range []bool{false, true} {
			places := map[int]islandPlace{}
			for _, ranks := range islands {
				for _, r := range ranks {
					places[r] = newIslandPlace(r, islands, even)
				}
			}
			for r, p := range places {
				for _, l := range p.links() {
					require.Contains(t, places[l].links(), r)
				}
				for _, i := range p.otherIslands() {
					var carriers []int
					for _, k := range islands[i] {
						if slices.Contains(places[k].carried(p.island), r) {
							carriers = append(carriers, k)
						}
					}
					if p.owns() {
						require.Equal(t, []int{p.carrier(i)}, carriers)
						require.Contains(t, p.links(), p.carrier(i))
					} else {
						require.Empty(t, carriers)
					}
				}
			}
		}
	}
}

// newOfBytes prepares a collective whose larger tensor has so many bytes.
func newOfBytes(ctx context.Context, m *memory.Memory, constructor string, bytes int64, o *Options) (p *Plan, tensors []tensor.SymmetricTensor, done func() error, err error) {
	size := int64(m.Group().Size())
	for _, n := range map[string][]int64{"NewAllGather": {bytes / size, bytes}, "NewReduceScatter": {bytes, bytes / size}}[constructor] {
		x, err := tensor.Zeros(ctx, m, tensor.Uint8, n)
		if err != nil {
			return nil, nil, nil, err
		}
		tensors = append(tensors, x)
	}
	for len(tensors) < 2 {
		x, err := tensor.Zeros(ctx, m, tensor.Uint8, bytes)
		if err != nil {
			return nil, nil, nil, err
		}
		tensors = append(tensors, x)
	}
	for _, x := range tensors {
		if err := x.(*tensor.Tensor).Rendezvous(ctx); err != nil {
			return nil, nil, nil, err
		}
	}
	switch in, out := tensors[0], tensors[1]; constructor {
	case "NewAllGather":
		p, err = NewAllGather(ctx, in, out, o)
	case "NewReduceScatter":
		p, err = NewReduceScatter(ctx, in, out, Sum, o)
	case "NewBroadcast":
		p, err = NewBroadcast(ctx, in, 0, o)
	case "NewReduce":
		p, err = NewReduce(ctx, in, out, Sum, 0, o)
	default:
		p, err = NewAllToAll(ctx, in, out, o)
	}
	return p, tensors, func() error {
		if p != nil {
			err = p.Close(ctx)
		}
		for _, x := range tensors {
			err = errors.Join(err, x.(*tensor.Tensor).Close(ctx))
		}
		return err
	}, err
}

// TestIslandChoice: auto takes the form from some size on where there are several islands and one of more than one rank, an all-to-all up to some size of a block. An all-to-all with counts has it not, and says so.
func TestIslandChoice(t *testing.T) {
	for _, c := range []struct {
		islands []int
		want    Algorithm // of a large message
	}{{[]int{0, 0, 1, 1}, Hierarchical}, {[]int{0, 1}, Transfers}, {[]int{0, 0}, OneShot}} {
		onIslands(t, c.islands, 10*time.Second, nil, func(ctx context.Context, m *memory.Memory, _ device.Stream) error {
			var ts [4]*tensor.Tensor
			for i := range ts {
				var err error
				if ts[i], err = tensor.Zeros(ctx, m, tensor.Int64, 2, int64(len(c.islands))); err != nil {
					return err
				}
				if err := ts[i].Rendezvous(ctx); err != nil {
					return err
				}
			}
			if _, err := NewAllToAllV(ctx, ts[0], ts[1], ts[2], ts[3], &Options{Algorithm: Hierarchical}); !errors.Is(err, errs.ErrUnsupported) {
				return fmt.Errorf("an all-to-all with counts gives %w", err)
			}
			for _, x := range ts {
				if err := x.Close(ctx); err != nil {
					return err
				}
			}
			for _, constructor := range slices.Sorted(maps.Values(constructors)) {
				sizes := []int64{hierarchicalBytes, hierarchicalBytes - 4}
				if constructor == "NewAllToAll" {
					sizes = []int64{int64(len(c.islands)) * hierarchicalPackBytes, int64(len(c.islands)) * (hierarchicalPackBytes + 1), int64(len(c.islands))}
				}
				for _, bytes := range sizes {
					want := c.want
					if want == Hierarchical && (constructor != "NewAllToAll" && bytes < hierarchicalBytes || constructor == "NewAllToAll" && bytes == sizes[1]) {
						want = Transfers
					}
					p, _, done, err := newOfBytes(ctx, m, constructor, bytes, nil)
					if err != nil {
						return err
					}
					if got := p.Algorithm(); got != want && c.want != OneShot || got == Hierarchical && want != Hierarchical {
						return fmt.Errorf("islands %v, %s, %d bytes: %s was taken, and %s was expected", c.islands, constructor, bytes, got, want)
					}
					if err := done(); err != nil {
						return err
					}
				}
				_, _, done, err := newOfBytes(ctx, m, constructor, 64, &Options{Algorithm: Hierarchical})
				if err = errors.Join(err, done()); err != nil {
					return fmt.Errorf("%s by its name: %w", constructor, err)
				}
			}
			return nil
		})
	}
}

// leftBackend has so many bytes that can still be allocated.
type leftBackend struct {
	*host.Backend
	left atomic.Int64
}

func (b *leftBackend) Allocate(ctx context.Context, bytes int64) (backend.Allocation, error) {
	if b.left.Add(-bytes) < 0 {
		b.left.Add(bytes)
		return nil, fmt.Errorf("%d bytes are too many: %w", bytes, errs.ErrNoMemory)
	}
	return b.Backend.Allocate(ctx, bytes)
}

// TestTransfersWhereIslandsHaveNoRoom: over several islands, where one rank has no memory for the workspace of the form that auto takes, all take the one that comes behind it.
func TestTransfersWhereIslandsHaveNoRoom(t *testing.T) {
	const bytes, islands = 16 << 20, 3 // the first workspace is 8 MiB
	for _, c := range []struct {
		left int64 // of rank 1's memory, behind the tensors
		want Algorithm
	}{{64 << 20, Hierarchical}, {10 << 20, Transfers}} {
		backendtest.RequireAll(t, backendtest.OnRanks(t, islands, nil, func(ctx context.Context, g *group.Group) error {
			near, err := host.New(g, nil)
			if err != nil {
				return err
			}
			b := &leftBackend{Backend: near}
			b.left.Store(math.MaxInt64)
			m := memory.New(backendtest.Far(b, g, &backendtest.FarOptions{Islands: []int{0, 0, 1}}), g, nil)
			in, inErr := mapped(ctx, m, bytes/4)
			out, outErr := mapped(ctx, m, (bytes/4+islands-1)/islands)
			if err := errors.Join(inErr, outErr); err != nil {
				return err
			}
			if g.Rank() == 1 {
				b.left.Store(c.left)
			}
			for _, prepare := range []func() (*Plan, error){
				func() (*Plan, error) { return NewAllReduce(ctx, in, Sum, nil) },
				func() (*Plan, error) { return NewReduceScatter(ctx, in, out, Sum, nil) },
			} {
				p, err := prepare()
				if err != nil {
					return err
				}
				if p.Algorithm() != c.want {
					err = fmt.Errorf("%s was taken in place of %s", p, c.want)
				}
				if err := errors.Join(err, p.Close(ctx)); err != nil {
					return err
				}
			}
			return errors.Join(in.Close(ctx), out.Close(ctx), m.Close(ctx))
		}))
	}
}

// TestIslandRankOrder: with RankOrder, auto takes a reduction to one rank, and to shares, in the form that has the order of the ranks, and its result has the bits of that order; nobody can ask for
// another form, and all ranks ask for the same. What combines nothing takes no notice.
func TestIslandRankOrder(t *testing.T) {
	onIslands(t, []int{0, 1, 1, 0}, 10*time.Second, nil, func(ctx context.Context, m *memory.Memory, s device.Stream) error {
		const n = hierarchicalBytes / 4
		rank, size := m.Group().Rank(), m.Group().Size()
		var ts [3]*tensor.Tensor
		for i := range ts {
			var err error
			if ts[i], err = tensor.Zeros(ctx, m, tensor.Float32, []int64{n, n, n / 4}[i]); err != nil {
				return err
			}
			if err := ts[i].Rendezvous(ctx); err != nil {
				return err
			}
		}
		in := []float32{1e8, 1, -1e8, 1}[rank] // in the order of the ranks 1, and by islands 0
		if err := tensor.Write(ts[0].Local(), slices.Repeat([]float32{in}, n), 0); err != nil {
			return err
		}
		makes := map[string]func(o Options) (*Plan, error){
			"reduce":         func(o Options) (*Plan, error) { return NewReduce(ctx, ts[0], ts[1], Sum, 1, &o) },
			"reduce-scatter": func(o Options) (*Plan, error) { return NewReduceScatter(ctx, ts[0], ts[2], Sum, &o) },
			"all-to-all":     func(o Options) (*Plan, error) { return NewAllToAll(ctx, ts[0], ts[1], &o) },
		}
		for _, what := range slices.Sorted(maps.Keys(makes)) {
			for _, ordered := range []bool{false, true} {
				p, err := makes[what](Options{RankOrder: ordered})
				if err != nil {
					return err
				}
				want := Hierarchical
				if ordered && what != "all-to-all" {
					want = Transfers
				}
				if p.Algorithm() != want {
					return fmt.Errorf("%s in rank order %t: %s was taken", what, ordered, p.Algorithm())
				}
				if ordered && want == Transfers && (what == "reduce-scatter" || rank == 1) {
					out := ts[1]
					if what == "reduce-scatter" {
						out = ts[2]
					}
					var got [1]float32
					if err := errors.Join(p.Run(s), s.Synchronize(ctx), tensor.Read(out.Local(), got[:], n/4-1)); err != nil {
						return err
					}
					if got[0] != 1 {
						return fmt.Errorf("%s in rank order gives %v", what, got[0])
					}
				} else if err := errors.Join(p.Run(s), s.Synchronize(ctx)); err != nil {
					return err
				}
				if err := p.Close(ctx); err != nil {
					return err
				}
			}
			p, err := makes[what](Options{Algorithm: Hierarchical, RankOrder: true})
			if what == "all-to-all" {
				err = errors.Join(err, p.Close(ctx))
			} else if errors.Is(err, errs.ErrUnsupported) {
				err = nil
			} else {
				err = fmt.Errorf("%s by its name in rank order gives %w", what, err)
			}
			if err != nil {
				return err
			}
			if what == "all-to-all" {
				continue
			}
			if _, err := makes[what](Options{Algorithm: Transfers, RankOrder: rank == size-1}); !errors.Is(err, errs.ErrMismatch) {
				return fmt.Errorf("%s in rank order on one rank only gives %v", what, err)
			}
			if _, err := makes[what](Options{RankOrder: rank == size-1}); !errors.Is(err, errs.ErrMismatch) {
				return fmt.Errorf("%s of auto in rank order on one rank only gives %v", what, err)
			}
		}
		return errors.Join(ts[0].Close(ctx), ts[1].Close(ctx), ts[2].Close(ctx))
	})
}

// TestIslandEmpty: a tensor without elements needs no rendezvous, and Auto takes the same form on ranks that have had one and on others.
func TestIslandEmpty(t *testing.T) {
	onIslands(t, []int{0, 0, 1}, 10*time.Second, nil, func(ctx context.Context, m *memory.Memory, s device.Stream) error {
		var ts [2]*tensor.Tensor
		for i := range ts {
			var err error
			if ts[i], err = tensor.Zeros(ctx, m, tensor.Float32, 3); err != nil {
				return err
			}
			if err := ts[i].Rendezvous(ctx); err != nil {
				return err
			}
		}
		in, err := ts[0].Sub(0, 0)
		if err == nil && m.Group().Rank() == 0 {
			in, err = tensor.Zeros(ctx, m, tensor.Float32, 0)
		}
		if err != nil {
			return err
		}
		out, err := ts[1].Sub(3, 0)
		if err != nil {
			return err
		}
		p, err := NewAllToAll(ctx, in, out, nil)
		if err != nil {
			return err
		}
		if err := errors.Join(p.Run(s), s.Synchronize(ctx), p.Close(ctx)); err != nil {
			return err
		}
		if m.Group().Rank() == 0 {
			err = in.Close(ctx)
		}
		return errors.Join(err, ts[0].Close(ctx), ts[1].Close(ctx))
	})
}

// TestLongRunsOverIslands: a run may take longer than waits last, as long as none of its laps does, also for ranks that have no part in these, and for those whose own are over sooner.
func TestLongRunsOverIslands(t *testing.T) {
	shortLaps(t)
	// They wait more than they work, and longer than a machine may stand still: so all of them go at once, and not as many as there are processors.
	var all sync.WaitGroup
	for _, islands := range [][]int{{0, 0, 1}, {0, 1, 1}, {0, 0, 1, 2}, {0, 0, 1, 1}} {
		for _, constructor := range []string{"NewAllReduce", "NewBroadcast", "NewReduce", "NewAllGather", "NewReduceScatter"} {
			alike := islands[2] == islands[len(islands)-1] && len(islands) == 4
			if !alike && strings.HasSuffix(constructor, "er") { // in which all ranks have a part
				continue
			}
			all.Go(func() {
				for rank, err := range backendtest.OnRanks(t, len(islands), nil, func(ctx context.Context, g *group.Group) error {
					return longRun(ctx, g, constructor, islands, alike)
				}) {
					assert.NoError(t, err, "%s over %v, rank %d", constructor, islands, rank)
				}
			})
		}
	}
	all.Wait()
}

// longRun is a run that takes half as long again as waits last, or longer.
func longRun(ctx context.Context, g *group.Group, constructor string, islands []int, alike bool) error {
	const laps, delay, waits = 100, 30 * time.Millisecond, 4 * time.Second // a lap is a put, and a signal behind it
	near, err := host.New(g, nil)
	if err != nil {
		return err
	}
	o := backendtest.FarOptions{Islands: islands, Delay: delay}
	if alike && g.Rank()%2 == 0 {
		o.Delay = 0 // the other rail is slow
	}
	m := memory.New(backendtest.Far(near, g, &o), g, &memory.Options{KernelTimeout: waits})
	s, err := m.Device().NewStream()
	if err != nil {
		return err
	}
	bytes := laps * hierarchicalLapBytes // of one shard
	switch {
	case strings.HasSuffix(constructor, "er"):
		bytes *= int64(len(islands))
	case alike:
		bytes *= 2
	}
	var p *Plan
	done := func() error { return nil }
	if constructor == "NewAllReduce" {
		var x tensor.SymmetricTensor
		if x, err = mapped(ctx, m, bytes/4); err == nil {
			p, err = NewAllReduce(ctx, x, Sum, &AllReduceOptions{Algorithm: Hierarchical})
			done = func() error { return errors.Join(p.Close(ctx), x.Close(ctx)) }
		}
	} else {
		p, _, done, err = newOfBytes(ctx, m, constructor, bytes, &Options{Algorithm: Hierarchical})
	}
	if err != nil {
		return err
	}
	ran := errors.Join(p.Run(s), s.Synchronize(ctx))
	return errors.Join(ran, g.Barrier(ctx, "ran"), done(), s.Close(), m.Close(ctx))
}
