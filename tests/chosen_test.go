package tests

import (
	"bufio"
	"fmt"
	"io"
	"iter"
	"os"

	"github.com/symmem/symmem/tests/suite"
)

// choice is the cases of the suite that a worker is told to run.
type choice struct {
	known map[string]suite.Case
	names io.Reader // of the chosen, a line each
	err   error     // why it ended early
}

// chosenCases gives those that standard input names.
func chosenCases(opts *suite.Options) *choice {
	c := &choice{known: map[string]suite.Case{}, names: os.Stdin}
	for _, one := range suite.Cases(opts) {
		c.known[one.Name] = one
	}
	return c
}

// all gives the chosen cases as they are named.
func (c *choice) all() iter.Seq[suite.Case] {
	return func(yield func(suite.Case) bool) {
		lines := bufio.NewScanner(c.names)
		for lines.Scan() {
			one, known := c.known[lines.Text()]
			if !known {
				c.err = fmt.Errorf("there is no case %q on this rank", lines.Text())
				return
			}
			if !yield(one) {
				return
			}
		}
		c.err = lines.Err()
	}
}

// received gives the cases that come.
func received(from <-chan suite.Case) iter.Seq[suite.Case] {
	return func(yield func(suite.Case) bool) {
		for c := range from {
			if !yield(c) {
				return
			}
		}
	}
}
