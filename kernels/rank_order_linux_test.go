package kernels

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/backend/host"
	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/kernels/tuning"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// TestRankOrder: with RankOrder, Auto takes no form that combines in another order, though it be the fastest, and nobody can ask for one.
func TestRankOrder(t *testing.T) {
	registered.RLock()
	before := len(registered.forms)
	registered.RUnlock()
	other := RegisterAllReduce(AllReduceForm{
		Name: "in_another_order", AnyOrder: true,
		Supports: func(device.Kind, tensor.DType, Op, int) bool { return true },
		Spec: func(tensor.SymmetricTensor, tensor.SymmetricTensor, Op, *AllReduceOptions) (collective.Spec, error) {
			return collective.Spec{Program: &collective.Program{Build: func(context.Context, *collective.Builder) error { return nil }}}, nil
		},
	})
	t.Cleanup(func() {
		registered.Lock()
		registered.forms = registered.forms[:before]
		registered.Unlock()
	})
	// As a table of measurements would have it.
	tables := tuning.Default(true)
	fastest := &tuning.Table{Rules: []tuning.Rule{{Collective: tuning.AllReduce, Ranks: 2, Steps: []tuning.Step{{Form: other.String()}}}}}
	tables.Tables = append([]*tuning.Table{fastest}, tables.Tables...)
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		near, err := host.New(g, nil)
		if err != nil {
			return err
		}
		m := memory.New(near, g, nil)
		m.SetTuning(tables)
		x, err := tensor.Zeros(ctx, m, tensor.Float32, 100)
		if err != nil {
			return err
		}
		if err := x.Rendezvous(ctx); err != nil {
			return err
		}
		var wrong error
		for _, c := range []struct {
			opts AllReduceOptions
			want Algorithm
			err  error
		}{
			{AllReduceOptions{}, other, nil},
			{AllReduceOptions{RankOrder: true}, OneShot, nil},
			{AllReduceOptions{RankOrder: true, Algorithm: TwoShot}, TwoShot, nil},
			{AllReduceOptions{RankOrder: true, Algorithm: other}, Auto, errs.ErrUnsupported},
			{AllReduceOptions{RankOrder: true, Algorithm: 99}, Auto, errs.ErrInvalid},
			{AllReduceOptions{RankOrder: g.Rank() == 0, Algorithm: OneShot}, Auto, errs.ErrMismatch},
		} {
			p, err := NewAllReduce(ctx, x, Sum, &c.opts)
			if c.err != nil {
				if !errors.Is(err, c.err) {
					wrong = errors.Join(wrong, fmt.Errorf("%+v: %w is not %w", c.opts, err, c.err))
				}
				continue
			}
			if err != nil {
				return err
			}
			if p.Algorithm() != c.want {
				wrong = errors.Join(wrong, fmt.Errorf("%+v: %s was taken", c.opts, p.Algorithm()))
			}
			wrong = errors.Join(wrong, p.Close(ctx))
		}
		return errors.Join(wrong, x.Close(ctx), m.Close(ctx))
	}))
}

// TestAutoIsInRankOrder: what Auto takes by itself has the promise where there are no multicast addresses, so that the README's paragraph holds without any
// option.
func TestAutoIsInRankOrder(t *testing.T) {
	for _, kind := range []device.Kind{device.Host, device.CUDA} {
		tables := tuning.Default(kind == device.Host)
		for _, dtype := range tensor.DTypes() {
			for _, op := range Ops() {
				for size := 1; size <= 10; size++ {
					for bytes := int64(8); bytes < 8<<30; bytes *= 4 {
						for _, whole := range []bool{false, true} {
							c := chooseAllReduce(nil, tables, Auto, kind, dtype, op, bytes, size, whole, func(Algorithm) bool { return false })
							if !c.algorithm.RankOrder() || !Supported(kind, c.algorithm, dtype, op, size) {
								t.Fatalf("%s of %d bytes of %s between %d ranks on %s: %s", op, bytes, dtype, size, kind, c.algorithm)
							}
						}
					}
				}
			}
		}
	}
}
