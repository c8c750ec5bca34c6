// Program toybackend adds the ranks' numbers over a backend that is no part of symmem. Each rank is a process:
//
//	SYMMEM_BACKEND=toy symmem run -n 4 -- toybackend
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"

	_ "example.com/toybackend/toy"
	"github.com/symmem/symmem"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/tensor"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	r, err := symmem.Open(ctx, config.Config{}, nil)
	if err == nil {
		err = errors.Join(sum(ctx, r), r.Close(ctx))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "toybackend:", err)
		os.Exit(1)
	}
}

// sum says what all ranks' numbers are together, as every rank has it.
func sum(ctx context.Context, r *symmem.Rank) error {
	t, err := r.Zeros(ctx, tensor.Float32, 1024)
	if err != nil {
		return err
	}
	mine := make([]float32, t.NumElements())
	for i := range mine {
		mine[i] = float32(r.Rank())
	}
	if err := errors.Join(tensor.Write(t.Local(), mine, 0), t.Rendezvous(ctx)); err != nil {
		return err
	}
	plan, err := kernels.NewAllReduce(ctx, t, kernels.Sum, nil)
	if err != nil {
		return err
	}
	s, err := r.NewStream()
	if err != nil {
		return err
	}
	if err := errors.Join(plan.Run(s), s.Synchronize(ctx), tensor.Read(t.Local(), mine, 0)); err != nil {
		return err
	}
	fmt.Printf("backend %s: rank %d of %d has %v\n", r.Backend(), r.Rank(), r.WorldSize(), mine[len(mine)-1])
	return errors.Join(plan.Close(ctx), s.Close(), t.Close(ctx))
}
