package kernels

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// TestLongOnCUDA: an all-reduce in one shot between two takes the kernels for long messages from the lengths on for which they are meant, with the same results.
func TestLongOnCUDA(t *testing.T) {
	const n = 4096
	whole, long := oneShotWholeBytes, oneShotLongBytes
	t.Cleanup(func() { oneShotWholeBytes, oneShotLongBytes = whole, long })
	oneShotWholeBytes, oneShotLongBytes = n*4-32, n*4-16
	onTwoGPUs(t, func(ctx context.Context, g *group.Group, m *memory.Memory) error {
		s, err := m.Device().NewStream()
		if err != nil {
			return err
		}
		for i, want := range []string{"_push_whole_", "_push_long_", "_push_longer_"} {
			count := n - 8 + 4*int64(i) // a vector more each
			x, err := tensor.Zeros(ctx, m, tensor.Float32, count)
			if err == nil {
				err = x.Rendezvous(ctx)
			}
			if err != nil {
				return err
			}
			a := allReduce{in: x, out: x, op: Sum, algorithm: OneShotPush, opts: &AllReduceOptions{}, inPlace: true}
			spec := a.spec()
			if spec.Failure != nil || !strings.Contains(spec.CUDA.Function, want) {
				return fmt.Errorf("%d elements: %s, %w", count, spec.CUDA.Function, spec.Failure)
			}
			p, err := NewAllReduce(ctx, x, Sum, &AllReduceOptions{Algorithm: OneShotPush})
			if err != nil {
				return err
			}
			values := make([]float32, count)
			for i := range values {
				values[i] = float32(i + g.Rank())
			}
			bits := make([]byte, 4*count)
			if _, err := binary.Encode(bits, binary.LittleEndian, values); err != nil {
				return err
			}
			if err := m.Device().CopyFromHost(x.Ptr(), bits); err != nil {
				return err
			}
			for run := range 3 {
				if err := errors.Join(x.Barrier(s, 0), p.Run(s), s.Synchronize(ctx)); err != nil {
					return err
				}
				if err := m.Device().CopyToHost(bits, x.Ptr()); err != nil {
					return err
				}
				if _, err := binary.Decode(bits, binary.LittleEndian, values); err != nil {
					return err
				}
				for i, v := range values {
					if want := float32(2*i+1) * float32(int(1)<<run); v != want {
						return fmt.Errorf("%d elements, run %d: element %d is %v, not %v", count, run, i, v, want)
					}
				}
			}
			if err := errors.Join(p.Close(ctx), x.Close(ctx)); err != nil {
				return err
			}
		}
		return m.Close(ctx)
	})
}
