package kernels_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"slices"

	"golang.org/x/sync/errgroup"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/tensor"
)

// A plan is captured in a graph once and replayed: three maxima over two ranks with one launch each.
func ExampleNewAllReduce_graph() {
	ctx := context.Background()
	ranks, err := symmem.OpenLocal(ctx, 2, config.Default(), nil)
	if err != nil {
		log.Fatal(err)
	}
	var g errgroup.Group
	for _, r := range ranks {
		g.Go(func() error { return errors.Join(maxima(ctx, r), r.Close(ctx)) })
	}
	if err := g.Wait(); err != nil {
		log.Fatal(err)
	}
	// Output:
	// [7 5]
	// [17 15]
	// [27 25]
}

func maxima(ctx context.Context, r *symmem.Rank) error {
	in, err := r.Zeros(ctx, tensor.Int32, 2)
	if err != nil {
		return err
	}
	out, err := r.Zeros(ctx, tensor.Int32, 2)
	if err != nil {
		return err
	}
	if err := errors.Join(in.Rendezvous(ctx), out.Rendezvous(ctx)); err != nil {
		return err
	}
	plan, err := kernels.NewAllReduce(ctx, in, kernels.Max, &kernels.AllReduceOptions{Out: out})
	if err != nil {
		return err
	}
	stream, err := r.NewStream()
	if err != nil {
		return err
	}
	if err := errors.Join(stream.BeginCapture(), plan.Run(stream)); err != nil {
		return err
	}
	graph, err := stream.EndCapture()
	if err != nil {
		return err
	}
	for i := range int32(3) {
		mine := []int32{10*i + 7, 10*i + 4} // rank 0
		if r.Rank() == 1 {
			mine = []int32{10*i + 6, 10*i + 5}
		}
		if err := tensor.Write(in.Local(), mine, 0); err != nil {
			return err
		}
		if err := errors.Join(graph.Launch(stream), stream.Synchronize(ctx)); err != nil {
			return err
		}
		all, err := tensor.ReadAll[int32](out.Local())
		if err != nil {
			return err
		}
		if r.Rank() == 0 {
			fmt.Println(all)
		}
	}
	return errors.Join(graph.Close(), plan.Close(ctx), stream.Close(), out.Close(ctx), in.Close(ctx))
}

// What follows a row-parallel layer of a transformer: all-reduce, residual and RMSNorm in one plan.
func ExampleNewAllReduceRMSNorm() {
	ctx := context.Background()
	ranks, err := symmem.OpenLocal(ctx, 2, config.Default(), nil)
	if err != nil {
		log.Fatal(err)
	}
	var g errgroup.Group
	for _, r := range ranks {
		g.Go(func() error { return errors.Join(layer(ctx, r), r.Close(ctx)) })
	}
	if err := g.Wait(); err != nil {
		log.Fatal(err)
	}
	// Output:
	// the residual is [6 6 6 6], the next layer gets [1 1 1 1]
}

func layer(ctx context.Context, r *symmem.Rank) error {
	const tokens, hidden = 3, 4
	x, err := r.Zeros(ctx, tensor.Float32, tokens, hidden)
	if err != nil {
		return err
	}
	residual, err := r.Zeros(ctx, tensor.Float32, tokens, hidden)
	if err != nil {
		return err
	}
	weight, err := r.Zeros(ctx, tensor.Float32, hidden)
	if err != nil {
		return err
	}
	fill := func(t *tensor.Tensor, v float32) error {
		return tensor.Write(t.Local(), slices.Repeat([]float32{v}, int(t.NumElements())), 0)
	}
	if err := errors.Join(x.Rendezvous(ctx), fill(x, 2), fill(residual, 2), fill(weight, 1)); err != nil {
		return err
	}
	norm := kernels.RMSNorm{Residual: kernels.LocalOf(residual.Local()), Weight: kernels.LocalOf(weight.Local()), Epsilon: 1e-6}
	plan, err := kernels.NewAllReduceRMSNorm(ctx, x, norm, nil)
	if err != nil {
		return err
	}
	s, err := r.NewStream()
	if err != nil {
		return err
	}
	if err := errors.Join(plan.Run(s), s.Synchronize(ctx)); err != nil {
		return err
	}
	sum, err := tensor.ReadAll[float32](residual.Local())
	if err != nil {
		return err
	}
	y, err := tensor.ReadAll[float32](x.Local()) // in place
	if err != nil {
		return err
	}
	if r.Rank() == 0 {
		fmt.Printf("the residual is %v, the next layer gets %.3g\n", sum[:hidden], y[:hidden])
	}
	return errors.Join(plan.Close(ctx), s.Close(), weight.Close(ctx), residual.Close(ctx), x.Close(ctx))
}
