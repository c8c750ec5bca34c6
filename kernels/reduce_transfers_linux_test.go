package kernels

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// TestReduceToSlowRoot: what one rank has combined takes longer on its way to root than all else. Ranks that are ahead put their parts of the next run to where there is room for them, and not
// over a result that is still on its way.
func TestReduceToSlowRoot(t *testing.T) {
	via := viaAllBytes
	t.Cleanup(func() { viaAllBytes = via })
	viaAllBytes = func(device.Kind, bool) int64 { return 1 }
	const root, n, runs = 3, 1000, 4
	w := &wire{islands: [][]int{{0}, {1}, {2}, {3}}, slow: func(from, to, put int) time.Duration {
		if from == 0 && to == root && put%2 == 1 { // the first of each run is of the input
			return 30 * time.Millisecond
		}
		return 0
	}}
	backendtest.RequireAll(t, onWired(t, w, 1, 10*time.Second, func(ctx context.Context, g *group.Group, m *memory.Memory) error {
		in, err := tensor.Zeros(ctx, m, tensor.Int32, n)
		if err != nil {
			return err
		}
		out, err := tensor.Zeros(ctx, m, tensor.Int32, n)
		if err != nil {
			return err
		}
		s, err := m.Device().NewStream()
		if err := errors.Join(err, in.Rendezvous(ctx), out.Rendezvous(ctx)); err != nil {
			return err
		}
		p, err := NewReduce(ctx, in, out, Sum, root, &Options{Algorithm: Transfers})
		if err != nil {
			return err
		}
		for run := range int32(runs) {
			mine, got := make([]int32, n), make([]int32, n)
			for i := range mine {
				mine[i] = int32(i)*1000 + run*10 + int32(g.Rank())
			}
			if err := errors.Join(tensor.Write(in.Local(), mine, 0), p.Run(s), s.Synchronize(ctx), tensor.Read(out.Local(), got, 0)); err != nil {
				return err
			}
			for i, v := range got {
				if want := int32(i)*4000 + run*40 + 6; g.Rank() == root && v != want {
					return fmt.Errorf("run %d: element %d is %d, expected %d", run, i, v, want)
				}
			}
		}
		return errors.Join(g.Barrier(ctx, "ran"), p.Close(ctx), s.Close(), out.Close(ctx), in.Close(ctx))
	}))
}
