package kernels

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// hostCollective is a collective of messages that ranks move, or combine, where they lie.
type hostCollective struct {
	name    string
	inPlace bool
	ins     func(size, n int64) int64 // elements of the input and of the output
	outs    func(size, n int64) int64
	plan    func(ctx context.Context, in, out tensor.SymmetricTensor, root int) (*Plan, error)
	want    func(v meetValue, size, rank, root int, n, i int64) (value float32, written bool)
}

// meetValue is element i of a rank's input in a run.
type meetValue func(rank int, i int64) float32

func whole(_, n int64) int64      { return n }
func shareIn(size, n int64) int64 { return (n + size - 1) / size }
func blocks(size, n int64) int64  { return shareIn(size, n) * size }

var hostCollectives = []hostCollective{
	{
		name: "broadcast", inPlace: true, ins: whole, outs: whole,
		plan: func(ctx context.Context, in, _ tensor.SymmetricTensor, root int) (*Plan, error) {
			return NewBroadcast(ctx, in, root, nil)
		},
		want: func(v meetValue, _, _, root int, _, i int64) (float32, bool) { return v(root, i), true },
	},
	{
		name: "reduce", ins: whole, outs: whole,
		plan: func(ctx context.Context, in, out tensor.SymmetricTensor, root int) (*Plan, error) {
			return NewReduce(ctx, in, out, Sum, root, nil)
		},
		want: reduced,
	},
	{
		name: "reduce in place", inPlace: true, ins: whole, outs: whole,
		plan: func(ctx context.Context, in, _ tensor.SymmetricTensor, root int) (*Plan, error) {
			return NewReduce(ctx, in, in, Sum, root, nil)
		},
		want: reduced,
	},
	{
		name: "all-gather", ins: shareIn, outs: whole,
		plan: func(ctx context.Context, in, out tensor.SymmetricTensor, _ int) (*Plan, error) {
			return NewAllGather(ctx, in, out, nil)
		},
		want: func(v meetValue, size, _, _ int, n, i int64) (float32, bool) {
			each := shareIn(int64(size), n)
			return v(int(i/each), i%each), true
		},
	},
	{
		name: "all-to-all", ins: blocks, outs: blocks,
		plan: func(ctx context.Context, in, out tensor.SymmetricTensor, _ int) (*Plan, error) {
			return NewAllToAll(ctx, in, out, nil)
		},
		want: func(v meetValue, size, rank, _ int, n, i int64) (float32, bool) {
			each := shareIn(int64(size), n)
			return v(int(i/each), int64(rank)*each+i%each), true
		},
	},
}

func reduced(v meetValue, size, rank, root int, _, i int64) (sum float32, written bool) {
	for r := range size {
		sum += v(r, i)
	}
	return sum, rank == root
}

// TestHostRanksMeet: whichever rank is late, messages above those that go through slots are loaded and stored only once all that it takes is
// ready, and inputs and outputs are the program's again directly behind the run. Each run has other inputs, written on the stream just before it
// and overwritten just behind it, as the outputs are just before.
func TestHostRanksMeet(t *testing.T) {
	for _, c := range hostCollectives {
		for _, size := range []int{2, 3, 5} {
			for _, root := range []int{0, size - 1} {
				for _, n := range []int64{3*hostSlotBytes + 5, 70001} { // elements: shares are above a slot, and uneven
					t.Run(fmt.Sprintf("%s/size=%d/root=%d/elements=%d", c.name, size, root, n), func(t *testing.T) {
						onHostRanks(t, size, func(ctx context.Context, m *memory.Memory, _, _ *tensor.Tensor) error {
							return c.runs(ctx, m, root, n)
						})
					})
				}
			}
		}
	}
}

func (c *hostCollective) runs(ctx context.Context, m *memory.Memory, root int, n int64) error {
	const runs, offset = 6, 3
	rank, size := m.Group().Rank(), m.Group().Size()
	elements := []int64{c.ins(int64(size), n), c.outs(int64(size), n)}
	// The tensors at an odd offset, and beside them what goes in and has come out, run by run.
	var wholes, beside []*tensor.Tensor
	var tensors []tensor.SymmetricTensor
	for _, count := range elements {
		x, err := tensor.Zeros(ctx, m, tensor.Float32, offset+count)
		if err != nil {
			return err
		}
		if err := x.Rendezvous(ctx); err != nil {
			return err
		}
		sub, err := x.Sub(offset, count)
		if err != nil {
			return err
		}
		y, err := tensor.Zeros(ctx, m, tensor.Float32, runs, count)
		if err != nil {
			return err
		}
		wholes, beside, tensors = append(wholes, x), append(beside, y), append(tensors, sub)
	}
	in, out, given, got := tensors[0], tensors[1], beside[0], beside[1]
	p, err := c.plan(ctx, in, out, root)
	if err != nil {
		return err
	}
	if c.inPlace {
		out = in
	}
	value := func(run int64) meetValue {
		return func(rank int, i int64) float32 { return float32((i*7+int64(rank)*13+run*29)%1009 + 1) }
	}
	values := make([]float32, elements[0])
	for run := range int64(runs) {
		for i := range values {
			values[i] = value(run)(rank, int64(i))
		}
		if err := tensor.Write(given.Local(), values, run*elements[0]); err != nil {
			return err
		}
	}
	s, err := m.Device().NewStream()
	if err != nil {
		return err
	}
	late := rand.New(rand.NewPCG(uint64(n), uint64(rank)))
	for run := range int64(runs) {
		pause := time.Duration(late.IntN(3)) * time.Millisecond
		err := errors.Join(
			s.HostFunc(func() { time.Sleep(pause) }),
			s.Fill(out.Ptr(), 0xee, out.Bytes()),
			s.Copy(in.Ptr(), given.Ptr().Add(run*in.Bytes()), in.Bytes()),
			p.Run(s),
			s.Copy(got.Ptr().Add(run*out.Bytes()), out.Ptr(), out.Bytes()),
			s.Fill(in.Ptr(), 0xdd, in.Bytes()),
		)
		if err != nil {
			return err
		}
	}
	if err := s.Synchronize(ctx); err != nil {
		return err
	}
	have, err := tensor.ReadAll[float32](got.Local())
	if err != nil {
		return err
	}
	for run := range int64(runs) {
		for i := range elements[1] {
			v := have[run*elements[1]+i]
			if want, written := c.want(value(run), size, rank, root, n, i); written && v != want {
				return fmt.Errorf("run %d: element %d is %v, not %v", run, i, v, want)
			}
		}
	}
	err = errors.Join(s.Close(), p.Close(ctx))
	for _, x := range append(wholes, beside...) {
		err = errors.Join(err, x.Close(ctx))
	}
	return err
}
