package symmem_test

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

// One rank of however many: the process finds out from its launcher who it is, and from SYMMEM_* variables and symmem.yaml what its user
// wants. The same program runs alone, and under symmem run, torchrun, mpirun, srun and in indexed jobs of Kubernetes.
func ExampleOpen() {
	ctx := context.Background()
	r, err := symmem.Open(ctx, config.Config{}, nil) // collective: group, device, backend; settings as config.Load finds them
	if err != nil {
		log.Fatal(err)
	}
	t, err := r.Zeros(ctx, tensor.Float32, 3)
	if err != nil {
		log.Fatal(err)
	}
	if err := t.Rendezvous(ctx); err != nil { // collective: every rank can now reach every other's copy
		log.Fatal(err)
	}
	if err := tensor.Write(t.Local(), []float32{1, 2, 3}, 0); err != nil {
		log.Fatal(err)
	}
	plan, err := kernels.NewAllReduce(ctx, t, kernels.Sum, nil) // collective, once
	if err != nil {
		log.Fatal(err)
	}
	stream, err := r.NewStream()
	if err != nil {
		log.Fatal(err)
	}
	if err := errors.Join(plan.Run(stream), stream.Synchronize(ctx)); err != nil {
		log.Fatal(err)
	}
	sums, err := tensor.ReadAll[float32](t.Local())
	if err != nil {
		log.Fatal(err)
	}
	ranks := float32(r.WorldSize())
	fmt.Println(slices.Equal(sums, []float32{ranks, 2 * ranks, 3 * ranks}))
	if err := errors.Join(plan.Close(ctx), stream.Close(), t.Close(ctx), r.Close(ctx)); err != nil {
		log.Fatal(err)
	}
	// Output: true
}

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
			t, err := r.Zeros(ctx, tensor.Float32, 3)
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
