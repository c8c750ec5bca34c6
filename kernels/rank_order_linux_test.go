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

// hundred is a rank's memory on the host, and a hundred f32 of it that every rank reaches.
func hundred(ctx context.Context, g *group.Group, opts *memory.Options) (*memory.Memory, *tensor.Tensor, error) {
	near, err := host.New(g, nil)
	if err != nil {
		return nil, nil, err
	}
	m := memory.New(near, g, opts)
	x, err := tensor.Zeros(ctx, m, tensor.Float32, 100)
	if err != nil {
		return nil, nil, err
	}
	return m, x, x.Rendezvous(ctx)
}

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
		m, x, err := hundred(ctx, g, nil)
		if err != nil {
			return err
		}
		m.SetTuning(tables)
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
	// So it is for all plans with the setting, but for those whose form is named.
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		m, x, err := hundred(ctx, g, &memory.Options{RankOrder: true})
		if err != nil {
			return err
		}
		m.SetTuning(tables)
		var wrong error
		for _, opts := range []*AllReduceOptions{nil, {}, {Algorithm: other}} {
			p, err := NewAllReduce(ctx, x, Sum, opts)
			if err != nil {
				return err
			}
			if named := opts != nil && opts.Algorithm == other; (p.Algorithm() == other) != named {
				wrong = errors.Join(wrong, fmt.Errorf("%+v: %s was taken", opts, p.Algorithm()))
			}
			wrong = errors.Join(wrong, p.Close(ctx))
			if opts != nil && opts.RankOrder {
				wrong = errors.Join(wrong, errors.New("the caller's options were changed"))
			}
		}
		return errors.Join(wrong, x.Close(ctx), m.Close(ctx))
	}))
}

// TestRanksDifferInRankOrder: ranks of which one has the setting are told.
func TestRanksDifferInRankOrder(t *testing.T) {
	for rank, err := range backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		m, x, err := hundred(ctx, g, &memory.Options{RankOrder: g.Rank() == 1})
		if err != nil {
			return err
		}
		_, err = NewAllReduce(ctx, x, Sum, nil)
		_, other := NewReduce(ctx, x, x, Sum, 0, nil)
		if !errors.Is(other, errs.ErrMismatch) {
			return fmt.Errorf("a reduce: %w", other)
		}
		return errors.Join(err, x.Close(ctx), m.Close(ctx))
	}) {
		if !errors.Is(err, errs.ErrMismatch) {
			t.Errorf("rank %d: %v", rank, err)
		}
	}
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

// TestReductionsInRankOrder: with RankOrder, a reduction to one rank, and to shares, does without multicast, though a table would have it, and nobody can ask for it; broadcasts and all-gathers take
// no notice.
func TestReductionsInRankOrder(t *testing.T) {
	var rules []tuning.Rule
	for _, collective := range []string{tuning.Reduce, tuning.ReduceScatter, tuning.Broadcast} {
		rules = append(rules, tuning.Rule{Collective: collective, Ranks: 2, Steps: []tuning.Step{{Form: OneShotMultimem.String()}}})
	}
	tables := tuning.Default(false)
	tables.Tables = append([]*tuning.Table{{Rules: rules}}, tables.Tables...)
	onCastRanks(t, "", func(ctx context.Context, _ *castBackend, m *memory.Memory, in, out *tensor.Tensor) error {
		m.SetTuning(tables)
		share, err := out.Sub(0, out.NumElements()/2)
		if err != nil {
			return err
		}
		for _, c := range []struct {
			what    string
			refused bool
			make    func(o *Options) (*Plan, error)
		}{
			{"reduce", true, func(o *Options) (*Plan, error) { return NewReduce(ctx, in, out, Sum, 1, o) }},
			{"reduce-scatter", true, func(o *Options) (*Plan, error) { return NewReduceScatter(ctx, in, share, Sum, o) }},
			{"broadcast", false, func(o *Options) (*Plan, error) { return NewBroadcast(ctx, in, 1, o) }},
		} {
			for _, ordered := range []bool{false, true} {
				p, err := c.make(&Options{RankOrder: ordered})
				if err != nil {
					return fmt.Errorf("%s: %w", c.what, err)
				}
				if cast := p.Algorithm() == OneShotMultimem; cast == (ordered && c.refused) {
					return fmt.Errorf("%s in rank order %t: %s was taken", c.what, ordered, p.Algorithm())
				}
				if err := p.Close(ctx); err != nil {
					return err
				}
			}
			p, err := c.make(&Options{RankOrder: true, Algorithm: OneShotMultimem})
			if c.refused != errors.Is(err, errs.ErrUnsupported) {
				return fmt.Errorf("%s by multicast in rank order gives %w", c.what, err)
			}
			if err == nil {
				err = p.Close(ctx)
			}
			if err != nil && !c.refused {
				return err
			}
		}
		return nil
	})
}
