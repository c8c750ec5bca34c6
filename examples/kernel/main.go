// Program kernel runs a collective of its own, rmsnorm.cu on GPUs and the same in Go on the CPU, and checks what it computes. Each rank is a
// process:
//
//	symmem run -n 2 -- kernel
package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"os/signal"

	"github.com/symmem/symmem"
	_ "github.com/symmem/symmem/backend/all"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/tensor"
)

const rows, columns, runs = 37, 1032, 6 // every second run is a launch of a graph

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	r, err := symmem.Open(ctx, config.Config{}, nil)
	if err == nil {
		err = errors.Join(run(ctx, r), r.Close(ctx))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "kernel:", err)
		os.Exit(1)
	}
}

// run runs the collective on one rank, from the stream and from a graph, and checks each result.
func run(ctx context.Context, r *symmem.Rank) error {
	n, err := newNorm(ctx, r)
	if err != nil {
		return err
	}
	plan, err := n.plan(ctx)
	if err != nil {
		return err
	}
	s, err := r.NewStream()
	if err != nil {
		return err
	}
	if err := errors.Join(s.BeginCapture(), plan.Run(s)); err != nil {
		return err
	}
	graph, err := s.EndCapture()
	if err != nil {
		return err
	}
	hidden := make([]float64, rows*columns)
	for i := range runs {
		launch := plan.Run
		if i%2 == 1 {
			launch = graph.Launch
		}
		if err := errors.Join(tensor.Write(n.x.Local(), input(r.Rank(), i), 0), launch(s), s.Synchronize(ctx)); err != nil {
			return err
		}
		if err := n.check(r.WorldSize(), i, hidden); err != nil {
			return err
		}
	}
	fmt.Printf("backend %s: rank %d of %d: %d runs are right\n", r.Backend(), r.Rank(), r.WorldSize(), runs)
	return errors.Join(graph.Close(), plan.Close(ctx), s.Close())
}

// newNorm makes the tensors. hidden begins with zeros.
func newNorm(ctx context.Context, r *symmem.Rank) (n *norm, err error) {
	n = &norm{epsilon: 1e-5}
	for _, t := range []**tensor.Tensor{&n.x, &n.hidden, &n.y} {
		if *t, err = r.Zeros(ctx, tensor.Float32, rows, columns); err != nil {
			return nil, err
		}
	}
	if n.weight, err = r.Zeros(ctx, tensor.Float32, columns); err != nil {
		return nil, err
	}
	for _, t := range n.tensors() {
		if err := t.Rendezvous(ctx); err != nil {
			return nil, err
		}
	}
	return n, tensor.Write(n.weight.Local(), weights(), 0)
}

// weights are the same on every rank.
func weights() []float32 {
	w := make([]float32, columns)
	for i := range w {
		w[i] = 1 + float32(i%3)
	}
	return w
}

// input is the x of a rank in a run. Sums of it are exact.
func input(rank, run int) []float32 {
	x := make([]float32, rows*columns)
	for i := range x {
		x[i] = float32((i*(rank+3)+17*run)%61) / 64
	}
	return x
}

// check compares y after a run with what comes of all ranks' inputs. hidden is as the last run left it.
func (n *norm) check(world, run int, hidden []float64) error {
	y, err := tensor.ReadAll[float32](n.y.Local())
	if err != nil {
		return err
	}
	for rank := range world {
		for i, x := range input(rank, run) {
			hidden[i] += float64(x)
		}
	}
	for at := 0; at < len(hidden); at += columns {
		row, squares := hidden[at:at+columns], 0.0
		for _, h := range row {
			squares += h * h
		}
		for i, w := range weights() {
			want := row[i] / math.Sqrt(squares/columns+float64(n.epsilon)) * float64(w)
			if got := float64(y[at+i]); !(math.Abs(got-want) < 1e-4) {
				return fmt.Errorf("run %d, row %d, column %d: %v instead of %v", run, at/columns, i, got, want)
			}
		}
	}
	return nil
}
