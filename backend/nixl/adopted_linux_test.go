package nixl

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
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
