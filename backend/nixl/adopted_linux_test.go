package nixl

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// TestListOfAdoptedMemory: what ranks adopt lies where each has it, not alike modulo 16. A list of it is reduced right.
func TestListOfAdoptedMemory(t *testing.T) {
	onFakesAt(t, &network{}, []string{"a", "a", "a"}, func(int) Options { return Options{} }, func(ctx context.Context, m *memory.Memory) error {
		d := m.Device()
		p, err := d.Alloc(128)
		if err != nil {
			return err
		}
		var pairs []kernels.Pair
		for i := range int64(2) {
			x, err := tensor.FromPtr(ctx, m, p.Add(4*int64(m.Group().Rank())+64*i), tensor.Float32, 3)
			if err != nil {
				return err
			}
			var in []byte
			for k := range 3 {
				in = binary.LittleEndian.AppendUint32(in, math.Float32bits(float32(k+1)+float32(10*i)))
			}
			if err := errors.Join(x.Rendezvous(ctx), d.CopyFromHost(x.Ptr(), in)); err != nil {
				return err
			}
			pairs = append(pairs, kernels.Pair{In: x})
		}
		plan, err := kernels.NewAllReduceMany(ctx, pairs, kernels.Sum, nil)
		if err != nil {
			return err
		}
		s, err := d.NewStream()
		if err != nil {
			return err
		}
		if err := errors.Join(plan.Run(s), s.Synchronize(ctx), s.Close()); err != nil {
			return err
		}
		for i, pair := range pairs {
			got := make([]byte, 12)
			if err := d.CopyToHost(got, pair.In.Ptr()); err != nil {
				return err
			}
			for k := range 3 {
				want := 3 * (float32(k+1) + float32(10*i))
				if is := math.Float32frombits(binary.LittleEndian.Uint32(got[4*k:])); is != want {
					return fmt.Errorf("element %d of tensor %d is %v, and should be %v", k, i, is, want)
				}
			}
		}
		err = plan.Close(ctx)
		for _, pair := range pairs {
			err = errors.Join(err, pair.In.(*tensor.Tensor).Close(ctx))
		}
		return errors.Join(err, d.Free(p))
	})
}

// TestAutoOnAdoptedMemory: what any rank has adopted has addresses on no rank, so Auto takes the same form on all of them: on islands of several ranks and of one, for every collective.
func TestAutoOnAdoptedMemory(t *testing.T) {
	for who, adopts := range map[string]func(rank int) bool{
		"all": func(int) bool { return true }, "one with others": func(rank int) bool { return rank == 1 }, "one alone": func(rank int) bool { return rank == 2 },
	} {
		t.Run(strings.ReplaceAll(who, " ", "_"), func(t *testing.T) {
			onFakesAt(t, &network{}, []string{"a", "a", "b"}, onHosts, func(ctx context.Context, m *memory.Memory) error {
				return autoOnAdopted(ctx, m, adopts(m.Group().Rank()), 0)
			})
		})
	}
}

// TestAdoptedAnywhere: ranks may have adopted memory of the CPU at places that are not alike modulo 16.
func TestAdoptedAnywhere(t *testing.T) {
	for _, hosts := range [][]string{{"a", "a", "a"}, {"a", "a", "b"}} {
		onFakesAt(t, &network{}, hosts, onHosts, func(ctx context.Context, m *memory.Memory) error {
			return autoOnAdopted(ctx, m, true, 4*int64(m.Group().Rank()))
		})
	}
}

// autoOnAdopted runs every collective that Auto has a choice for, on memory of which this rank has adopted its own, if it does, at so many bytes behind a multiple of 64.
func autoOnAdopted(ctx context.Context, m *memory.Memory, adopts bool, shift int64) error {
	const n = 16 << 10 // whole pages, as allocations are rounded to
	size := int64(m.Group().Size())
	p, free, err := OnDevice(m.Backend(), m.Group().Rank(), 3*size*4*n+64)
	if err != nil {
		return err
	}
	s, err := m.Device().NewStream()
	if err != nil {
		return err
	}
	make := func(elements int64) (x *tensor.Tensor, err error) {
		if adopts {
			x, err = tensor.FromPtr(ctx, m, p.Add(shift), tensor.Float32, elements)
			p = p.Add(4 * elements)
		} else {
			x, err = tensor.Zeros(ctx, m, tensor.Float32, elements)
		}
		if err != nil {
			return nil, err
		}
		return x, errors.Join(x.Rendezvous(ctx), tensor.Write(x.Local(), slices.Repeat([]float32{float32(m.Group().Rank() + 1)}, int(elements)), 0))
	}
	var ts [4]*tensor.Tensor
	for i, elements := range []int64{size * n, size * n, n, n} {
		if ts[i], err = make(elements); err != nil {
			return err
		}
	}
	for _, c := range []struct {
		what string
		plan func() (*kernels.Plan, error)
		out  *tensor.Tensor
		want float32 // everywhere; 0 is not looked at
	}{
		{"all-reduce", func() (*kernels.Plan, error) {
			return kernels.NewAllReduce(ctx, ts[0], kernels.Sum, &kernels.AllReduceOptions{Out: ts[1]})
		}, ts[1], 6},
		{"reduce-scatter", func() (*kernels.Plan, error) { return kernels.NewReduceScatter(ctx, ts[0], ts[2], kernels.Sum, nil) }, ts[2], 6},
		{"reduce", func() (*kernels.Plan, error) { return kernels.NewReduce(ctx, ts[0], ts[1], kernels.Sum, 2, nil) }, ts[1], 0},
		{"all-gather", func() (*kernels.Plan, error) { return kernels.NewAllGather(ctx, ts[3], ts[1], nil) }, ts[1], 0},
		{"all-to-all", func() (*kernels.Plan, error) { return kernels.NewAllToAll(ctx, ts[0], ts[1], nil) }, ts[1], 0},
		{"broadcast", func() (*kernels.Plan, error) { return kernels.NewBroadcast(ctx, ts[0], 1, nil) }, ts[0], 2},
	} {
		plan, err := c.plan()
		if err != nil {
			return fmt.Errorf("%s: %w", c.what, err)
		}
		if err := errors.Join(plan.Run(s), s.Synchronize(ctx), plan.Close(ctx)); err != nil {
			return fmt.Errorf("%s: %w", c.what, err)
		}
		got, err := tensor.ReadAll[float32](c.out.Local())
		if err != nil {
			return err
		}
		if at := slices.IndexFunc(got, func(v float32) bool { return c.want != 0 && v != c.want }); at >= 0 {
			return fmt.Errorf("%s: element %d is %v, and should be %v", c.what, at, got[at], c.want)
		}
	}
	for _, x := range ts {
		err = errors.Join(err, x.Close(ctx))
	}
	return errors.Join(err, s.Close(), free())
}
