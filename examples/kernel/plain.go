package main

import (
	"fmt"
	"math"

	"github.com/symmem/symmem/tensor"
)

// plain is what the collective computes, without the other ranks: what their inputs are is known.
type plain struct {
	world  int
	weight []float32
	hidden []float64
}

func newPlain(world int) *plain {
	p := &plain{world: world, weight: make([]float32, columns), hidden: make([]float64, rows*columns)}
	for i := range p.weight {
		p.weight[i] = 1 + float32(i%3)
	}
	return p
}

// input is the x of a rank in a run. Sums of it are exact.
func input(rank, run int) []float32 {
	x := make([]float32, rows*columns)
	for i := range x {
		x[i] = float32((i*(rank+3)+17*run)%61) / 64
	}
	return x
}

// compare does the next run, and compares y with what comes of it.
func (p *plain) compare(y tensor.SymmetricTensor, run int) error {
	got, err := tensor.ReadAll[float32](y.Local())
	if err != nil {
		return err
	}
	for rank := range p.world {
		for i, x := range input(rank, run) {
			p.hidden[i] += float64(x)
		}
	}
	for at := 0; at < len(p.hidden); at += columns {
		row, squares := p.hidden[at:at+columns], 0.0
		for _, h := range row {
			squares += h * h
		}
		for i, w := range p.weight {
			want := row[i] / math.Sqrt(squares/columns+epsilon) * float64(w)
			if diff := float64(got[at+i]) - want; !(math.Abs(diff) < 1e-4) {
				return fmt.Errorf("run %d, row %d, column %d: %v instead of %v", run, at/columns, i, got[at+i], want)
			}
		}
	}
	return nil
}
