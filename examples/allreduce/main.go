// Allreduce adds up a tensor over all ranks. As processes, on the best backend there is:
//
//	go run ./cmd/symmem run -n 4 -- go run ./examples/allreduce
//
// or as goroutines of one process:
//
//	go run ./examples/allreduce --local 4
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"time"

	"github.com/spf13/pflag"
	"golang.org/x/sync/errgroup"

	"github.com/symmem/symmem"
	_ "github.com/symmem/symmem/backend/all"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/tensor"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := start(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "allreduce:", err)
		os.Exit(1)
	}
}

// start opens this process's rank, or several, and runs the program on each.
func start(ctx context.Context) error {
	flags := pflag.NewFlagSet("allreduce", pflag.ContinueOnError)
	local := flags.Int("local", 0, "run this many ranks as goroutines of this process")
	config.AddFlags(flags)
	if err := flags.Parse(os.Args[1:]); err != nil {
		return err
	}
	cfg, err := config.Load(&config.LoadOptions{Flags: flags})
	if err != nil {
		return err
	}
	if *local == 0 {
		r, err := symmem.Open(ctx, cfg, nil)
		if err != nil {
			return err
		}
		return errors.Join(run(ctx, r), r.Close(ctx))
	}
	ranks, err := symmem.OpenLocal(ctx, *local, cfg, nil)
	if err != nil {
		return err
	}
	var g errgroup.Group
	for _, r := range ranks {
		g.Go(func() error { return errors.Join(run(ctx, r), r.Close(ctx)) })
	}
	return g.Wait()
}

// run is the program of one rank.
func run(ctx context.Context, r *symmem.Rank) error {
	// Every rank allocates alike. After the rendezvous each can reach every other's copy.
	t, err := r.Zeros(ctx, tensor.Float32, 4096, 1024)
	if err != nil {
		return err
	}
	if err := t.Rendezvous(ctx); err != nil {
		return err
	}
	ones := make([]float32, t.NumElements())
	for i := range ones {
		ones[i] = float32(r.Rank() + 1)
	}
	if err := tensor.Write(t.Local(), ones, 0); err != nil {
		return err
	}

	// A plan is made once, and run as often as wanted: one launch each, on a stream.
	plan, err := kernels.NewAllReduce(ctx, t, kernels.Sum, nil)
	if err != nil {
		return err
	}
	stream, err := r.NewStream()
	if err != nil {
		return err
	}
	began := time.Now()
	if err := plan.Run(stream); err != nil {
		return err
	}
	if err := stream.Synchronize(ctx); err != nil {
		return err
	}
	took := time.Since(began)

	var first [1]float32
	if err := tensor.Read(t.Local(), first[:], 0); err != nil {
		return err
	}
	n := r.WorldSize()
	if want := float32(n * (n + 1) / 2); first[0] != want {
		return fmt.Errorf("rank %d: the sum is %v, expected %v", r.Rank(), first[0], want)
	}
	if r.Rank() == 0 {
		fmt.Printf("%d ranks on backend %s: %s of %d MiB gave %v in %v\n", n, r.Backend(), plan.Algorithm(), t.Bytes()>>20, first[0], took.Round(time.Microsecond))
	}
	return errors.Join(plan.Close(ctx), stream.Close(), t.Close(ctx))
}
