package properties

import (
	"context"
	"fmt"

	"pgregory.net/rapid"

	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/tensor"
)

// reduce combines the elements of all ranks.
func (d *draft) reduce(s span, op kernels.Op) []int64 {
	dtype, data := d.tensors[s.t].dtype, d.tensors[s.t].data
	out := make([]int64, s.len())
	for i := range out {
		v := data[0][s.from+i]
		for _, of := range data[1:] {
			switch w := of[s.from+i]; op {
			case kernels.Sum:
				v = wrap(dtype, v+w)
			case kernels.Min:
				v = min(v, w)
			case kernels.Max:
				v = max(v, w)
			case kernels.Prod:
				v = wrap(dtype, v*w)
			}
		}
		out[i] = v
	}
	return out
}

func (d *draft) op() kernels.Op {
	return rapid.SampledFrom([]kernels.Op{kernels.Sum, kernels.Min, kernels.Max, kernels.Prod}).Draw(d.T, "op")
}

func (d *draft) allReduce(group int) {
	in, ok := d.part(group, -1, 0)
	if !ok {
		return
	}
	op, f, runs := d.op(), d.fence(), rapid.IntRange(1, 2).Draw(d.T, "runs")
	alg := rapid.SampledFrom([]kernels.Algorithm{kernels.Auto, kernels.OneShot, kernels.TwoShot, kernels.Transfers, kernels.Hierarchical}).Draw(d.T, "form")
	for range runs {
		sum := d.reduce(in, op)
		for _, data := range d.tensors[in.t].data {
			copy(data[in.from:in.to], sum)
		}
	}
	d.add(group, func(r *rank, g *member) error {
		return r.fenced(g, in.t, f, r.plan(g, runs, func(ctx context.Context) (*kernels.Plan, error) {
			return kernels.NewAllReduce(ctx, g.view(in), op, &kernels.AllReduceOptions{Algorithm: r.form(alg)})
		}))
	}, "all-reduce %v, %v, %v, %d runs; %v", in, op, alg, runs, f)
}

// collective draws one of the others.
func (d *draft) collective(group int) {
	world := len(d.groups[group].ranks)
	in, ok := d.part(group, -1, 0)
	if !ok {
		return
	}
	dtype := d.tensors[in.t].dtype
	kind := rapid.SampledFrom([]string{"broadcast", "reduce", "all-gather", "reduce-scatter", "all-to-all"}).Draw(d.T, "collective")
	share := func(n int) int { return (n + world - 1) / world }
	length := map[string]int{"broadcast": in.len(), "reduce": in.len(), "all-gather": in.len() * world, "reduce-scatter": share(in.len()), "all-to-all": in.len()}[kind]
	if kind == "all-to-all" {
		in.to -= in.len() % world
		length = in.len()
	}
	out := in
	if kind != "broadcast" {
		if out, ok = d.part(group, length, dtype); !ok || d.overlap(in, out) {
			return
		}
	}
	op, root, f := d.op(), d.rankOf(group), d.fence()
	alg := rapid.SampledFrom([]kernels.Algorithm{kernels.Auto, kernels.OneShot, kernels.Transfers, kernels.Hierarchical}).Draw(d.T, "form")
	var make func(ctx context.Context, g *member, opts *kernels.Options) (*kernels.Plan, error)
	src, dst := d.tensors[in.t].data, d.tensors[out.t].data
	n := in.len()
	switch kind {
	case "broadcast":
		for r := range world {
			copy(dst[r][in.from:in.to], src[root][in.from:in.to])
		}
		make = func(ctx context.Context, g *member, opts *kernels.Options) (*kernels.Plan, error) {
			return kernels.NewBroadcast(ctx, g.view(in), root, opts)
		}
	case "reduce":
		copy(dst[root][out.from:], d.reduce(in, op))
		make = func(ctx context.Context, g *member, opts *kernels.Options) (*kernels.Plan, error) {
			return kernels.NewReduce(ctx, g.view(in), g.view(out), op, root, opts)
		}
	case "all-gather":
		for r := range world {
			for from := range world {
				copy(dst[r][out.from+from*n:], src[from][in.from:in.to])
			}
		}
		make = func(ctx context.Context, g *member, opts *kernels.Options) (*kernels.Plan, error) {
			return kernels.NewAllGather(ctx, g.view(in), g.view(out), opts)
		}
	case "reduce-scatter":
		sum, c := d.reduce(in, op), share(n)
		for r := range world {
			copy(dst[r][out.from:], sum[min(r*c, n):min((r+1)*c, n)])
		}
		make = func(ctx context.Context, g *member, opts *kernels.Options) (*kernels.Plan, error) {
			return kernels.NewReduceScatter(ctx, g.view(in), g.view(out), op, opts)
		}
	case "all-to-all":
		block := n / world
		for r := range world {
			for from := range world {
				copy(dst[r][out.from+from*block:], src[from][in.from+r*block:in.from+(r+1)*block])
			}
		}
		make = func(ctx context.Context, g *member, opts *kernels.Options) (*kernels.Plan, error) {
			return kernels.NewAllToAll(ctx, g.view(in), g.view(out), opts)
		}
	}
	d.add(group, func(r *rank, g *member) error {
		return r.fenced(g, out.t, f, r.plan(g, 1, func(ctx context.Context) (*kernels.Plan, error) {
			return make(ctx, g, &kernels.Options{Algorithm: r.form(alg)})
		}))
	}, "%s %v to %v, %v, root %d, %v; %v", kind, in, out, op, root, alg, f)
}

// illegal draws a step that must give every rank the error, and change nothing.
func (d *draft) illegal(group int) {
	s, ok := d.part(group, -1, 0)
	if !ok {
		return
	}
	n, world := len(d.tensors[s.t].data[0]), len(d.groups[group].ranks)
	kind := rapid.SampledFrom([]string{"beyond the end", "negative", "no such peer", "no such channel", "another length", "another dtype", "ranks disagree", "closed"}).Draw(d.T, "illegal")
	want := errs.ErrInvalid
	var do func(r *rank, g *member) error
	switch kind {
	case "beyond the end":
		do = func(_ *rank, g *member) error {
			_, err := g.tensors[s.t].Sub(int64(s.from), int64(n-s.from+1))
			return err
		}
	case "negative":
		do = func(r *rank, g *member) error {
			_, err := tensor.Zeros(r.ctx, g.memory(), tensor.Int32, -1)
			return err
		}
	case "no such peer":
		do = func(r *rank, g *member) error { return g.tensors[s.t].Put(r.stream, world, g.tensors[s.t]) }
	case "no such channel":
		do = func(r *rank, g *member) error { return g.tensors[s.t].Wait(r.stream, 0, 1<<20) }
	case "another length":
		if s.len() == n {
			return
		}
		do = func(r *rank, g *member) error { return g.tensors[s.t].Put(r.stream, 0, g.view(s)) }
	case "another dtype":
		other, ok := d.part(group, -1, 0)
		if !ok || d.tensors[other.t].dtype == d.tensors[s.t].dtype || s.len() == 0 || other.len() == 0 {
			return
		}
		do = func(r *rank, g *member) error {
			_, err := kernels.NewReduce(r.ctx, g.view(s), g.view(other), kernels.Sum, 0, nil)
			return err
		}
	case "ranks disagree":
		if world == 1 {
			return
		}
		want = errs.ErrMismatch
		do = func(r *rank, g *member) error {
			op := kernels.Sum
			if g.rank() == world-1 {
				op = kernels.Max
			}
			_, err := kernels.NewAllReduce(r.ctx, g.tensors[s.t], op, nil)
			return err
		}
	case "closed":
		want = errs.ErrClosed
		for i, t := range d.tensors {
			if t.group == group && t.closed {
				do = func(r *rank, g *member) error { return g.tensors[i].Signal(r.stream, 0, 0) }
			}
		}
		if do == nil {
			return
		}
	}
	d.add(group, func(r *rank, g *member) error { return r.refused(do(r, g), want) }, "%s (%v) is refused: %v", kind, s, fmt.Sprint(want))
}
