package symmem_test

import (
	"context"
	"errors"
	"fmt"
	"log"

	"golang.org/x/sync/errgroup"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/tensor"
)

// Four ranks as goroutines of one process add up a tensor. Ranks that are processes use [symmem.Open] instead, and the rest
// is the same.
func ExampleOpenLocal() {
	ctx := context.Background()
	ranks, err := symmem.OpenLocal(ctx, 4, config.Default(), nil)
	if err != nil {
		log.Fatal(err)
	}
	sums := make([][]float32, len(ranks))
	var g errgroup.Group
	for i, r := range ranks {
		g.Go(func() error {
			t, err := r.Empty(ctx, tensor.Float32, 3)
			if err != nil {
				return err
			}
			if err := t.Rendezvous(ctx); err != nil {
				return err
			}
			mine := float32(r.Rank())
			if err := tensor.Write(t.Local(), []float32{1, mine, 10 * mine}, 0); err != nil {
				return err
			}
			plan, err := kernels.NewAllReduce(ctx, t, kernels.Sum, nil)
			if err != nil {
				return err
			}
			stream, err := r.NewStream()
			if err != nil {
				return err
			}
			if err := errors.Join(plan.Run(stream), stream.Synchronize(ctx)); err != nil {
				return err
			}
			sums[i], err = tensor.ReadAll[float32](t.Local())
			return errors.Join(err, plan.Close(ctx), stream.Close(), t.Close(ctx), r.Close(ctx))
		})
	}
	if err := g.Wait(); err != nil {
		log.Fatal(err)
	}
	fmt.Println(sums)
	// Output: [[4 6 60] [4 6 60] [4 6 60] [4 6 60]]
}
