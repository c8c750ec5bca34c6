package kernels

import (
	"context"
	"fmt"
	"testing"

	"github.com/symmem/symmem/kernels/ptx"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// TestOneShotInPlaceIsStaged: a rank whose result goes where its peers still read has its input copied aside first, into workspace that
// has room for it; a result that goes elsewhere costs neither.
func TestOneShotInPlaceIsStaged(t *testing.T) {
	onCastRanks(t, "", func(ctx context.Context, b *castBackend, m *memory.Memory, in, out *tensor.Tensor) error {
		for _, alg := range []Algorithm{OneShotPull, OneShotMultimem} {
			for _, to := range []*tensor.Tensor{in, out} {
				a := &allReduce{in: in, out: to, op: Sum, algorithm: alg, inPlace: to == in}
				p, err := NewAllReduce(ctx, in, Sum, &AllReduceOptions{Algorithm: alg, Out: to})
				if err != nil {
					return err
				}
				staged := b.dev.launches[len(b.dev.launches)-1].p.Flags&ptx.Staged != 0
				if room := a.spec().Workspace >= in.Bytes(); staged != (to == in) || room != staged {
					return fmt.Errorf("%s, in place %t: staged %t, with room for that %t", alg, to == in, staged, room)
				}
				if err := p.Close(ctx); err != nil {
					return err
				}
			}
		}
		return nil
	})
}
