package kernels

import (
	"fmt"

	"github.com/symmem/symmem/tensor"
)

// life is memory that a plan works on, for as long as Err is nil.
type life interface{ Err() error }

// livesOn gives the memory that the plan works on.
func (p *Plan) livesOn() []life {
	lives := []life{p.channel}
	for _, t := range []tensor.SymmetricTensor{p.in, p.out} {
		if t.Bytes() == 0 {
			continue
		}
		if w, _, err := t.Window(); err == nil {
			lives = append(lives, w)
		}
	}
	return lives
}

// released is the error of a run that a graph has kept until the plan, a tensor of it or its group was closed; nil before. Run refuses
// sooner: when any of them begins to close, while runs that are queued still have their memory.
func (p *Plan) released() error {
	for _, l := range p.lives {
		if err := l.Err(); err != nil {
			return fmt.Errorf("running %s from a graph: %w", p.name, err)
		}
	}
	return nil
}
