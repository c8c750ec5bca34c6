package kernels

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/backend/host"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/kernels/ptx"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// dispatchTest is an all-to-all with counts on the device.
type dispatchTest struct {
	algorithm  Algorithm
	rows, room int64
	width      int64 // elements of a row
	displaced  bool
}

// int64s is the memory of a tensor as numbers.
func int64s(t tensor.SymmetricTensor, m device.HostMemory) ([]int64, error) {
	var all []int64
	b, err := m.Bytes(t.Ptr(), t.Bytes())
	for i := 0; i+8 <= len(b); i += 8 {
		n := int64(0)
		for k := 7; k >= 0; k-- {
			n = n<<8 | int64(b[i+k])
		}
		all = append(all, n)
	}
	return all, err
}

func bytesOfInts(words []int64) (b []byte) {
	for _, n := range words {
		for k := range 8 {
			b = append(b, byte(n>>(8*k)))
		}
	}
	return b
}

// counts is what rank has for whom in a run, and where it begins; alike on every rank that asks.
func (d dispatchTest) counts(run, rank, size int) (counts, places []int64) {
	rnd := rand.New(rand.NewPCG(uint64(run), uint64(rank)))
	left, at := min(d.rows, d.room/int64(size)), int64(0)
	for range size {
		n := rnd.Int64N(left + 1)
		left -= n
		if d.displaced {
			at = rnd.Int64N(d.rows - n + 1)
		}
		counts, places = append(counts, n), append(places, at)
		at += n
	}
	return counts, places
}

// value is what row i of rank's input is full of.
func (d dispatchTest) value(run, rank int, i int64) byte { return byte(run*31 + rank*17 + int(i)*7) }

// run is one rank of the test: several runs, some from a graph, and then one that is refused.
func (d dispatchTest) run(ctx context.Context, m *memory.Memory, hm device.HostMemory, launched func(device.Stream) device.Stream) error {
	rank, size, dev := m.Group().Rank(), m.Group().Size(), m.Device()
	make2 := func(dtype tensor.DType, shape ...int64) *tensor.Tensor {
		t, err := tensor.Zeros(ctx, m, dtype, shape...)
		if err == nil {
			err = t.Rendezvous(ctx)
		}
		if err != nil {
			panic(err)
		}
		return t
	}
	in, out := make2(tensor.Int8, d.rows, d.width), make2(tensor.Int8, d.room, d.width)
	received := make2(tensor.Int64, 2, int64(size))
	counts := make2(tensor.Int64, int64(size))
	if d.displaced {
		counts = make2(tensor.Int64, 2, int64(size))
	}
	p, err := NewAllToAllV(ctx, in, out, counts, received, &Options{Algorithm: d.algorithm, FirstEpoch: 1<<32 - 2, MaxBlocks: 2})
	if err != nil {
		return err
	}
	s, err := dev.NewStream()
	if err != nil {
		return err
	}
	if err := errors.Join(s.BeginCapture(), p.Run(s)); err != nil {
		return err
	}
	graph, err := s.EndCapture()
	if err != nil {
		return err
	}
	fill := func(run int, spoil func(counts []int64)) error {
		n, at := d.counts(run, rank, size)
		if spoil != nil {
			spoil(n)
		}
		if d.displaced {
			n = append(n, at...)
		}
		b := make([]byte, in.Bytes())
		for i := range b {
			b[i] = d.value(run, rank, int64(i)/d.width)
		}
		poison := make([]byte, out.Bytes())
		for i := range poison {
			poison[i] = 0xab
		}
		var inErr, outErr error
		if len(b) > 0 {
			inErr = dev.CopyFromHost(in.Ptr(), b)
		}
		if len(poison) > 0 {
			outErr = dev.CopyFromHost(out.Ptr(), poison)
		}
		return errors.Join(inErr, outErr, dev.CopyFromHost(counts.Ptr(), bytesOfInts(n)), m.Group().Barrier(ctx, "filled"))
	}
	check := func(run int, refused bool) error {
		want := make([]byte, out.Bytes())
		for i := range want {
			want[i] = 0xab
		}
		told := make([]int64, 2*size)
		at := int64(0)
		for r := range size {
			n, places := d.counts(run, r, size)
			if refused {
				continue
			}
			for i := range n[rank] {
				for k := range d.width {
					want[(at+i)*d.width+k] = d.value(run, r, places[rank]+i)
				}
			}
			told[r], told[size+r] = n[rank], at
			at += n[rank]
		}
		got := make([]byte, len(want))
		if len(got) > 0 {
			if err := dev.CopyToHost(got, out.Ptr()); err != nil {
				return err
			}
		}
		for i := range want {
			if got[i] != want[i] {
				return fmt.Errorf("run %d, rank %d: byte %d is %#x, not %#x", run, rank, i, got[i], want[i])
			}
		}
		have, err := int64s(received, hm)
		if err == nil && !refused && fmt.Sprint(have) != fmt.Sprint(told) {
			err = fmt.Errorf("run %d, rank %d: received %v, not %v", run, rank, have, told)
		}
		return errors.Join(err, m.Group().Barrier(ctx, "looked"))
	}
	for run := range 6 {
		once := func() error { return p.Run(s) }
		if run%2 == 1 {
			once = func() error { return graph.Launch(launched(s)) }
		}
		if err := errors.Join(fill(run, nil), once(), s.Synchronize(ctx), check(run, false)); err != nil {
			return err
		}
	}
	if err := errors.Join(graph.Close(), p.Close(ctx)); err != nil {
		return err
	}
	last := size - 1
	for i, spoil := range []func(counts []int64){
		func(n []int64) {
			if n[0] = 0; rank == last {
				n[0] = -1
			}
		},
		func(n []int64) {
			if rank == last {
				n[last] = d.rows + 1
			}
		},
		func(n []int64) {
			clear(n)
			n[last] = d.room/int64(size) + 1
		},
	} {
		if i == 2 && (d.displaced || d.room/int64(size)+1 > d.rows) {
			continue // what would not fit does not come out of the input
		}
		want := CountsError{Rank: last, To: []int{0, last, -1}[i], Negative: i == 0, Most: d.rows}
		if i == 2 {
			want.Rows, want.Most = (d.room/int64(size)+1)*int64(size), d.room
		}
		p, err := NewAllToAllV(ctx, in, out, counts, received, &Options{Algorithm: d.algorithm, MaxBlocks: 2})
		if err != nil {
			return err
		}
		if err := errors.Join(fill(7, spoil), p.Run(s)); err != nil {
			return err
		}
		synchronized := s.Synchronize(ctx)
		var bad *CountsError
		if err := p.Run(s); !errors.As(errors.Join(synchronized, err), &bad) || !errors.Is(err, errs.ErrInvalid) || err == nil {
			return fmt.Errorf("counts that are wrong in way %d: %w", i, errors.Join(synchronized, err, errors.New("no such error")))
		}
		if want.Op = bad.Op; *bad != want {
			return fmt.Errorf("%+v and not %+v", *bad, want)
		}
		if err := errors.Join(check(7, true), p.Close(ctx)); err != nil {
			return err
		}
		if closed := s.Close(); closed != nil && !errors.Is(closed, errs.ErrInvalid) {
			return closed
		}
		if s, err = dev.NewStream(); err != nil {
			return err
		}
	}
	return errors.Join(s.Close(), counts.Close(ctx), received.Close(ctx), out.Close(ctx), in.Close(ctx))
}

var dispatchTests = []dispatchTest{
	{rows: 40, room: 40, width: 3}, {rows: 30, room: 70, width: 16, displaced: true}, {rows: 0, room: 0, width: 4}, {rows: 5, room: 0, width: 1}, {rows: 200, room: 190, width: 129},
}

// TestAllToAllVOnCUDA runs the compiled kernel, its parameters and its faults on the simulated device.
func TestAllToAllVOnCUDA(t *testing.T) {
	for _, size := range []int{1, 2, 3, ptx.Inline + 1} {
		for i, d := range dispatchTests {
			if size > ptx.Inline && i > 1 && !fullMatrix {
				break
			}
			t.Run(fmt.Sprintf("size=%d/%d", size, i), func(t *testing.T) {
				onSimulated(t, size, func(ctx context.Context, dev *simDevice, m *memory.Memory) error {
					return d.run(ctx, m, dev.mem, func(s device.Stream) device.Stream { return s.(*simStream).Stream })
				})
			})
		}
	}
}

// TestAllToAllVOnHost runs it on the host device, by the kernel, by transfers, and between peers without pointers.
func TestAllToAllVOnHost(t *testing.T) {
	same := func(s device.Stream) device.Stream { return s }
	for _, size := range []int{1, 2, 3, 5} {
		for i, d := range dispatchTests {
			for _, way := range []string{"kernel", "transfers", "far"} {
				t.Run(fmt.Sprintf("size=%d/%d/%s", size, i, way), func(t *testing.T) {
					backendtest.RequireAll(t, backendtest.OnRanks(t, size, nil, func(ctx context.Context, g *group.Group) error {
						near, err := host.New(g, nil)
						if err != nil {
							return err
						}
						hm := near.Device().(device.HostMemory)
						d := d // of this rank
						d.algorithm = OneShot
						m := memory.New(near, g, nil)
						switch way {
						case "transfers":
							d.algorithm = Transfers
						case "far":
							d.algorithm, m = Auto, memory.New(backendtest.Far(near, g, nil), g, nil)
						}
						return errors.Join(d.run(ctx, m, hm, same), m.Close(ctx))
					}))
				})
			}
		}
	}
}

// adopting is a backend whose memory has no addresses on other ranks while it hides them, as backend nixl's has not that a rank has adopted.
type adopting struct {
	backend.Backend
	hides bool
}

// Rendezvous hides the addresses of the peers.
func (a *adopting) Rendezvous(ctx context.Context, memory backend.Allocation) (backend.Mapping, error) {
	m, err := a.Backend.Rendezvous(ctx, memory)
	if err == nil && a.hides {
		return adopted{m, memory.Ptr()}, nil
	}
	return m, err
}

type adopted struct {
	backend.Mapping
	own device.Ptr
}

func (a adopted) Peer(rank int) (device.Ptr, error) {
	if p, err := a.Mapping.Peer(rank); err != nil || p == a.own {
		return p, err
	}
	return 0, errs.ErrNotReachable
}

// TestAllToAllVOfAdoptedCounts: Auto takes transfers where the counts, or what is told, have no addresses, though the ranks share memory.
func TestAllToAllVOfAdoptedCounts(t *testing.T) {
	for _, hidden := range []int{2, 3} {
		backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
			near, err := host.New(g, nil)
			if err != nil {
				return err
			}
			b := &adopting{Backend: near}
			m := memory.New(backendtest.Far(b, g, &backendtest.FarOptions{Islands: []int{0, 0}}), g, nil)
			if err := backendtest.WithWindow(ctx, m, 100, nil); err != nil { // the first makes the signal pads
				return err
			}
			var all []*tensor.Tensor
			for i, shape := range [][]int64{{3}, {3}, {2}, {2, 2}} {
				x, err := tensor.Zeros(ctx, m, tensor.Int64, shape...)
				if err != nil {
					return err
				}
				b.hides = i == hidden
				if err := x.Rendezvous(ctx); err != nil {
					return err
				}
				b.hides = false
				all = append(all, x)
			}
			if err := errors.Join(tensor.Write(all[0].Local(), []int64{1, 2, 3}, 0), tensor.Write(all[2].Local(), []int64{1, 1}, 0)); err != nil {
				return err
			}
			p, err := NewAllToAllV(ctx, all[0], all[1], all[2], all[3], nil)
			if err != nil {
				return err
			}
			s, err := m.Device().NewStream()
			if err != nil {
				return err
			}
			if err := errors.Join(p.Run(s), s.Synchronize(ctx)); err != nil {
				return err
			}
			got, err := tensor.ReadAll[int64](all[1].Local())
			if want := int64(g.Rank() + 1); err != nil || fmt.Sprint(got) != fmt.Sprint([]int64{want, want, 0}) || p.Algorithm() != Transfers {
				return fmt.Errorf("%v by %s: %w", got, p.Algorithm(), errors.Join(err, errors.New("not what was sent")))
			}
			err = errors.Join(p.Close(ctx), s.Close())
			for _, x := range all {
				err = errors.Join(err, x.Close(ctx))
			}
			return errors.Join(err, m.Close(ctx))
		}))
	}
}

// TestBarrierPlan: behind a barrier every rank sees what the others have written before it, on every kind of memory, in runs and graphs.
func TestBarrierPlan(t *testing.T) {
	run := func(ctx context.Context, m *memory.Memory, algorithm Algorithm, launched func(device.Stream) device.Stream) error {
		rank, size, dev := m.Group().Rank(), m.Group().Size(), m.Device()
		x, err := tensor.Zeros(ctx, m, tensor.Int8, int64(size))
		if err != nil {
			return err
		}
		if err := x.Rendezvous(ctx); err != nil {
			return err
		}
		p, err := NewBarrier(ctx, m, &Options{Algorithm: algorithm, FirstEpoch: 1<<32 - 3})
		if err != nil {
			return err
		}
		s, err := dev.NewStream()
		if err != nil {
			return err
		}
		if err := errors.Join(s.BeginCapture(), p.Run(s)); err != nil {
			return err
		}
		graph, err := s.EndCapture()
		if err != nil {
			return err
		}
		var came = make(chan struct{}, 1)
		for i := range 8 {
			if (i+rank)%3 == 0 {
				err = s.HostFunc(func() { time.Sleep(time.Millisecond) })
			}
			late := (i + 1) % size
			if rank == late { // everybody else is behind the barrier only when this one is before it
				err = errors.Join(err, s.HostFunc(func() { _ = dev.CopyFromHost(x.Ptr(), []byte{byte(i + 1)}); came <- struct{}{}; <-came }))
			}
			if err = errors.Join(err, p.Run(s)); i%2 == 1 {
				err = errors.Join(err, graph.Launch(launched(s)))
			}
			if err = errors.Join(err, s.Synchronize(ctx)); err != nil {
				return err
			}
			v, err := x.Remote(late)
			if err == nil { // where there is an address
				got := make([]byte, 1)
				if err := dev.CopyToHost(got, v.Ptr()); err != nil {
					return err
				}
				if got[0] != byte(i+1) {
					return fmt.Errorf("behind barrier %d rank %d sees %d of rank %d", i, rank, got[0], late)
				}
			}
			if err := m.Group().Barrier(ctx, "seen"); err != nil {
				return err
			}
		}
		if i := p.Bytes(); i != 0 {
			return fmt.Errorf("a barrier of %d bytes", i)
		}
		return errors.Join(graph.Close(), p.Close(ctx), s.Close(), x.Close(ctx))
	}
	same := func(s device.Stream) device.Stream { return s }
	for _, size := range []int{1, 2, 3, ptx.Inline + 1} {
		for _, algorithm := range CollectiveAlgorithms("NewBarrier", device.CUDA) {
			t.Run(fmt.Sprintf("size=%d/%s/simulated", size, algorithm), func(t *testing.T) {
				onSimulated(t, size, func(ctx context.Context, dev *simDevice, m *memory.Memory) error {
					return run(ctx, m, algorithm, func(s device.Stream) device.Stream { return s.(*simStream).Stream })
				})
			})
			for _, far := range []bool{false, true} {
				t.Run(fmt.Sprintf("size=%d/%s/far=%t", size, algorithm, far), func(t *testing.T) {
					backendtest.RequireAll(t, backendtest.OnRanks(t, size, nil, func(ctx context.Context, g *group.Group) error {
						near, err := host.New(g, nil)
						if err != nil {
							return err
						}
						m, alg := memory.New(near, g, nil), algorithm
						if far {
							m, alg = memory.New(backendtest.Far(near, g, nil), g, nil), Auto
						}
						return errors.Join(run(ctx, m, alg, same), m.Close(ctx))
					}))
				})
			}
		}
	}
	require.NotEmpty(t, CollectiveAlgorithms("NewBarrier", device.Host))
	require.Empty(t, CollectiveAlgorithms("NewNothing", device.Host))
	require.Empty(t, CollectiveAlgorithms("NewNothing", device.CUDA))
}

// TestRanksDifferInABarrier: ranks that make barriers of other forms, or with other bounds, are told which, also where they have made nothing else before.
func TestRanksDifferInABarrier(t *testing.T) {
	differ := func(ctx context.Context, m *memory.Memory) error {
		for _, c := range []struct {
			of   [2]Options
			text [2]string
		}{
			{[2]Options{{Algorithm: OneShot}, {Algorithm: Transfers}}, [2]string{"one_shot", "transfers"}},
			{[2]Options{{MaxBlocks: 1}, {MaxBlocks: 2}}, [2]string{"at most 1 blocks", "at most 2 blocks"}},
			{[2]Options{{FirstEpoch: 1}, {FirstEpoch: 2}}, [2]string{"first epoch 1", "first epoch 2"}},
		} {
			_, err := NewBarrier(ctx, m, &c.of[m.Group().Rank()])
			var told *group.MismatchError
			if !errors.As(err, &told) || !strings.Contains(told.Values[0], c.text[0]) || !strings.Contains(told.Values[1], c.text[1]) {
				return fmt.Errorf("%v are not told: %w", c.text, errors.Join(err, errors.New("no such difference")))
			}
		}
		// A rank's mistake is told as what it is.
		var o Options
		if m.Group().Rank() == 1 {
			o.MaxBlocks = -1
		}
		if _, err := NewBarrier(ctx, m, &o); !errors.Is(err, errs.ErrInvalid) {
			return fmt.Errorf("a bound below 0: %w", err)
		}
		p, err := NewBarrier(ctx, m, nil)
		if err != nil {
			return err
		}
		return p.Close(ctx)
	}
	t.Run("simulated", func(t *testing.T) {
		onSimulated(t, 2, func(ctx context.Context, _ *simDevice, m *memory.Memory) error { return differ(ctx, m) })
	})
	t.Run("host", func(t *testing.T) {
		backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
			m, err := newHostMemory(g)
			if err != nil {
				return err
			}
			return errors.Join(differ(ctx, m), m.Close(ctx))
		}))
	})
}
