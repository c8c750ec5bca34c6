package kernels

import (
	"context"
	"errors"
	"fmt"
	"math"
	"reflect"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/host"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// libBackend passes for the backend of a library, which it pretends to be: it notes what is asked for.
type libBackend struct {
	*simBackend
	name  string
	asked []backend.AllReduce
	runs  int
}

func (b *libBackend) Name() string { return b.name }

func (b *libBackend) PrepareAllReduce(_ context.Context, r *backend.AllReduce) (backend.PreparedAllReduce, error) {
	b.asked = append(b.asked, *r)
	return libCall{b}, nil
}

type libCall struct{ *libBackend }

func (c libCall) Enqueue(device.Stream) error { c.runs++; return nil }
func (c libCall) Close() error                { return nil }

// TestLibraryCollectives: a plan in NCCL's form asks the backend's library for what it is to be, of bytes where nothing is combined, and refuses
// what NCCL has not, on every rank.
func TestLibraryCollectives(t *testing.T) {
	const size, n = 3, 30
	groups, err := group.Local(size, nil)
	require.NoError(t, err)
	var ranks errgroup.Group
	for _, g := range groups {
		ranks.Go(func() error {
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			near, err := host.New(g, nil)
			if err != nil {
				return err
			}
			sim := &simBackend{Backend: near, dev: &simDevice{Device: near.Device(), mem: near.Device().(device.HostMemory)}}
			sim.left.Store(math.MaxInt64)
			b := &libBackend{simBackend: sim, name: "nccl"}
			m := memory.New(b, g, nil)
			make1 := func(elements int64) *tensor.Tensor {
				x, err2 := tensor.Zeros(ctx, m, tensor.Int16, elements)
				if err = errors.Join(err, err2); err2 == nil {
					err = errors.Join(err, x.Rendezvous(ctx))
				}
				return x
			}
			share, whole, other, odd := make1(n/size), make1(n), make1(n), make1(n+1)
			sums, sumErr := tensor.Zeros(ctx, m, tensor.Float32, n)
			if err := errors.Join(err, sumErr, sums.Rendezvous(ctx)); err != nil {
				return err
			}
			mine, mineErr := sums.Sub(int64(g.Rank())*n/size, n/size)
			if mineErr != nil {
				return mineErr
			}
			opts := &Options{Algorithm: NCCL}
			s, err := b.dev.NewStream()
			if err != nil {
				return err
			}
			rank := int64(g.Rank())
			for i, c := range []struct {
				plan func() (*Plan, error)
				want backend.AllReduce
			}{
				{func() (*Plan, error) { return NewBroadcast(ctx, whole, 2, opts) }, backend.AllReduce{Collective: "broadcast", Root: 2, Count: 2 * n, DType: "u8", Op: "sum"}},
				{func() (*Plan, error) { return NewAllGather(ctx, share, whole, opts) }, backend.AllReduce{Collective: "all_gather", Count: 2 * n / size, DType: "u8", Op: "sum"}},
				{func() (*Plan, error) { return NewAllToAll(ctx, whole, other, opts) }, backend.AllReduce{Collective: "all_to_all", Count: 2 * n / size, DType: "u8", Op: "sum"}},
				{func() (*Plan, error) { return NewReduce(ctx, sums, sums, Max, 1, opts) }, backend.AllReduce{Collective: "reduce", Root: 1, Count: n, DType: "f32", Op: "max"}},
				{func() (*Plan, error) { return NewReduceScatter(ctx, sums, mine, Avg, opts) }, backend.AllReduce{Collective: "reduce_scatter", Count: n / size, DType: "f32", Op: "avg", OutOffset: 4 * rank * n / size}},
				{func() (*Plan, error) { return NewBarrier(ctx, m, opts) }, backend.AllReduce{Count: 1, DType: "u8", Op: "sum"}},
			} {
				p, err := c.plan()
				if err != nil {
					return err
				}
				got := b.asked[len(b.asked)-1]
				got.In, got.Out, c.want.Name = nil, nil, "nccl"
				if got.Collective == "" && got.InOffset == got.OutOffset {
					got.InOffset, got.OutOffset = 0, 0 // of the plan's workspace
				}
				if fmt.Sprint(got) != fmt.Sprint(c.want) || p.Algorithm() != NCCL {
					return fmt.Errorf("%+v and not %+v", got, c.want)
				}
				if err := errors.Join(p.Run(s), s.Synchronize(ctx), p.Close(ctx)); err != nil || b.runs != i+1 {
					return fmt.Errorf("%d runs: %w", b.runs, err)
				}
			}
			unsupported := func(what string, plan func() (*Plan, error)) error {
				if _, err := plan(); !errors.Is(err, errs.ErrUnsupported) {
					return fmt.Errorf("%s: %w", what, err)
				}
				return nil
			}
			shorter, longErr := odd.Sub(0, (n+1+size-1)/size)
			err = errors.Join(longErr,
				unsupported("integers of 16 bits", func() (*Plan, error) { return NewReduce(ctx, whole, other, Sum, 0, opts) }),
				unsupported("uneven shares", func() (*Plan, error) {
					part, err := whole.Sub(0, shorter.NumElements())
					if err != nil {
						return nil, err
					}
					return NewAllGather(ctx, part, odd, opts)
				}),
				unsupported("another library's", func() (*Plan, error) { return NewBroadcast(ctx, whole, 0, &Options{Algorithm: NVSHMEM}) }))
			for _, x := range []*tensor.Tensor{share, whole, other, odd, sums} {
				err = errors.Join(err, x.Close(ctx))
			}
			return errors.Join(err, s.Close(), m.Close(ctx), g.Close(ctx))
		})
	}
	require.NoError(t, ranks.Wait())
	require.Empty(t, LibraryCollectives("NewAllToAllV", "nccl"))
	require.Equal(t, []Algorithm{NCCL}, LibraryCollectives("NewBroadcast", "nccl"))
	require.Equal(t, []Algorithm{NCCL}, LibraryCollectives("NewAllToAll", "nccl"))
	require.Equal(t, []Algorithm{NCCL}, LibraryCollectives("NewBarrier", "nccl"))
	require.Empty(t, LibraryCollectives("NewReduce", "nvshmem"))
	require.Equal(t, []Algorithm{NVSHMEM}, LibraryCollectives("NewReduceScatter", "nvshmem"))
	require.Equal(t, []Algorithm{NVSHMEM}, LibraryCollectives("NewBarrier", "nvshmem"))
}

// TestLibraryOfNVSHMEM: NVSHMEM is asked for barriers too, which have no tensors, and not for a reduction to one rank.
func TestLibraryOfNVSHMEM(t *testing.T) {
	const size = 2
	groups, err := group.Local(size, nil)
	require.NoError(t, err)
	var ranks errgroup.Group
	for _, g := range groups {
		ranks.Go(func() error {
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			near, err := host.New(g, nil)
			if err != nil {
				return err
			}
			sim := &simBackend{Backend: near, dev: &simDevice{Device: near.Device(), mem: near.Device().(device.HostMemory)}}
			sim.left.Store(math.MaxInt64)
			b := &libBackend{simBackend: sim, name: "nvshmem"}
			m := memory.New(b, g, nil)
			x, err := tensor.Zeros(ctx, m, tensor.Float32, 8)
			if err != nil {
				return err
			}
			s, err := b.dev.NewStream()
			if err := errors.Join(err, x.Rendezvous(ctx)); err != nil {
				return err
			}
			opts := &Options{Algorithm: NVSHMEM}
			meet, err := NewBarrier(ctx, m, opts)
			if err != nil {
				return err
			}
			spread, err := NewBroadcast(ctx, x, 1, opts)
			if err != nil {
				return err
			}
			mine, err := x.Sub(0, 4)
			if err != nil {
				return err
			}
			out, err := x.Sub(4, 2)
			if err != nil {
				return err
			}
			scatter, err := NewReduceScatter(ctx, mine, out, Max, opts)
			if err != nil {
				return err
			}
			want := []backend.AllReduce{
				{Name: "nvshmem", Collective: "barrier"}, {Name: "nvshmem", Collective: "broadcast", Root: 1, Count: 32, DType: "u8", Op: "sum"},
				{Name: "nvshmem", Collective: "reduce_scatter", Count: 2, DType: "f32", Op: "max", OutOffset: 16},
			}
			for i, r := range b.asked {
				r.In, r.Out = nil, nil
				if i >= len(want) || !reflect.DeepEqual(r, want[i]) {
					return fmt.Errorf("asked for %+v", r)
				}
			}
			if len(b.asked) != len(want) || meet.Algorithm() != NVSHMEM {
				return fmt.Errorf("%d are asked for, %s", len(b.asked), meet.Algorithm())
			}
			_, err = NewReduce(ctx, x, x, Sum, 0, opts)
			if !errors.Is(err, errs.ErrUnsupported) {
				return fmt.Errorf("a reduction to one rank: %w", err)
			}
			_, err = NewBarrier(ctx, m, &Options{Algorithm: NCCL})
			if !errors.Is(err, errs.ErrUnsupported) {
				return fmt.Errorf("another library's barrier: %w", err)
			}
			err = errors.Join(meet.Run(s), spread.Run(s), scatter.Run(s), s.Synchronize(ctx))
			if b.runs != 3 {
				err = errors.Join(err, fmt.Errorf("%d runs", b.runs))
			}
			return errors.Join(err, meet.Close(ctx), spread.Close(ctx), scatter.Close(ctx), x.Close(ctx), s.Close(), m.Close(ctx), g.Close(ctx))
		})
	}
	require.NoError(t, ranks.Wait())
}

// meetingBackend is one whose library's ranks come together when they prepare a collective.
type meetingBackend struct {
	*libBackend
	group *group.Group
}

func (b *meetingBackend) PrepareAllReduce(ctx context.Context, r *backend.AllReduce) (backend.PreparedAllReduce, error) {
	if _, err := b.group.AllGather(ctx, "the library's", nil); err != nil {
		return nil, err
	}
	return b.libBackend.PrepareAllReduce(ctx, r)
}

// closing is a tensor that is closed when it has been asked for its window so often.
type closing struct {
	tensor.SymmetricTensor
	left int
}

func (c *closing) Window() (*memory.Window, int64, error) {
	if c.left--; c.left < 0 {
		return nil, 0, fmt.Errorf("the test's tensor: %w", errs.ErrClosed)
	}
	return c.SymmetricTensor.Window()
}

// TestLibraryWithoutATensor: a rank whose tensor is closed while a plan is made tells the others, whenever that is, and all are in step: nobody waits.
func TestLibraryWithoutATensor(t *testing.T) {
	const size, most = 2, 20
	groups, err := group.Local(size, &group.LocalOptions{Timeout: 10 * time.Second})
	require.NoError(t, err)
	var ranks errgroup.Group
	for _, g := range groups {
		ranks.Go(func() error {
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			near, err := host.New(g, nil)
			if err != nil {
				return err
			}
			sim := &simBackend{Backend: near, dev: &simDevice{Device: near.Device(), mem: near.Device().(device.HostMemory)}}
			sim.left.Store(math.MaxInt64)
			m := memory.New(&meetingBackend{&libBackend{simBackend: sim, name: "nccl"}, g}, g, nil)
			x, err := mapped(ctx, m, 64)
			if err != nil {
				return err
			}
			for _, plan := range []func(in tensor.SymmetricTensor) (*Plan, error){
				func(in tensor.SymmetricTensor) (*Plan, error) {
					return NewAllReduce(ctx, in, Sum, &AllReduceOptions{Algorithm: NCCL})
				},
				func(in tensor.SymmetricTensor) (*Plan, error) {
					return NewBroadcast(ctx, in, 0, &Options{Algorithm: NCCL})
				},
			} {
				for left, made := 0, false; !made; left++ {
					in := x
					if g.Rank() == 1 {
						in = &closing{x, left}
					}
					p, err := plan(in)
					if made = err == nil; made {
						err = p.Close(ctx)
					} else {
						err = nil // or that the ranks' tensors differ, before the library is asked
					}
					if err = errors.Join(err, g.Barrier(ctx, "told")); err != nil || left == most {
						return fmt.Errorf("closed after %d looks: %w", left, err)
					}
				}
			}
			return errors.Join(x.Close(ctx), m.Close(ctx), g.Close(ctx))
		})
	}
	require.NoError(t, ranks.Wait())
}
