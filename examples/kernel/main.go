// Program kernel runs a collective of its own, rmsnorm.cu on GPUs and the same in Go on the CPU, and checks what it computes. Each rank is a
// process:
//
//	symmem run -n 2 -- kernel
package main

import (
	"context"
	"errors"
	"fmt"
	"log"

	"github.com/symmem/symmem"
	_ "github.com/symmem/symmem/backend/all"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/tensor"
)

const rows, columns, epsilon = 37, 1032, 1e-5

func main() {
	ctx := context.Background()
	r, err := symmem.Open(ctx, config.Config{}, nil)
	check(err)
	run(ctx, r)
	check(r.Close(ctx))
}

// run runs the collective on one rank, from the stream and from a graph, and compares each result with what it is to be.
func run(ctx context.Context, r *symmem.Rank) {
	x, hidden, y := zeros(ctx, r, rows, columns), zeros(ctx, r, rows, columns), zeros(ctx, r, rows, columns)
	weight := zeros(ctx, r, columns)
	plan, err := newNorm(ctx, x, hidden, y, weight, epsilon)
	check(err)
	s, err := r.NewStream()
	check(err)
	want := newPlain(r.WorldSize())
	check(errors.Join(tensor.Write(weight.Local(), want.weight, 0), s.BeginCapture(), plan.Run(s)))
	graph, err := s.EndCapture()
	check(err)
	for i, launch := range []func(device.Stream) error{plan.Run, plan.Run, graph.Launch, graph.Launch, plan.Run} {
		check(errors.Join(tensor.Write(x.Local(), input(r.Rank(), i), 0), launch(s), s.Synchronize(ctx), want.compare(y, i)))
	}
	fmt.Printf("backend %s: rank %d of %d has it right\n", r.Backend(), r.Rank(), r.WorldSize())
	check(errors.Join(graph.Close(), plan.Close(ctx), s.Close()))
}

// zeros makes a tensor that all ranks reach.
func zeros(ctx context.Context, r *symmem.Rank, shape ...int64) tensor.SymmetricTensor {
	t, err := r.Zeros(ctx, tensor.Float32, shape...)
	check(err)
	check(t.Rendezvous(ctx))
	return t
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
