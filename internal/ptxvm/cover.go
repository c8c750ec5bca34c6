package ptxvm

import (
	"slices"
	"sync"
)

// Coverage is which instructions were executed, by all machines that have it in their [Config]. It is safe for concurrent use by several
// machines once they have stopped; while they run, each needs one of its own, which [Coverage.Add] puts together.
type Coverage struct {
	mu   sync.Mutex
	hits map[*Function][]bool
}

// of is where the instructions of a function are ticked off.
func (c *Coverage) of(f *Function) []bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.hits == nil {
		c.hits = map[*Function][]bool{}
	}
	if c.hits[f] == nil {
		c.hits[f] = make([]bool, len(f.code))
	}
	return c.hits[f]
}

// Add adds what another one has.
func (c *Coverage) Add(other *Coverage) {
	other.mu.Lock()
	defer other.mu.Unlock()
	for f, hits := range other.hits {
		own := c.of(f)
		for i, h := range hits {
			own[i] = own[i] || h
		}
	}
}

// Missing are the instructions of a function, or of all of the module's if f is nil, that no thread has executed, and how many instructions there are. An instruction with
// a guard is executed by a thread that the guard lets do it. A module counts as it was parsed: the same text parsed again is another one.
func (c *Coverage) Missing(m *Module, f *Function) (missing []Place, of int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, g := range m.funcs {
		if !g.defined || f != nil && f != g {
			continue
		}
		hits := c.hits[g]
		n := len(g.at) - 1 // the last is the return that decoding puts behind everything
		for i := 0; i < n; {
			j, hit := i, true
			for ; j < n && g.at[j] == g.at[i]; j++ { // a line may be several for the machine
				hit = hit && hits != nil && hits[j]
			}
			of++
			if !hit {
				missing = append(missing, g.place(int32(i)))
			}
			i = j
		}
	}
	return slices.Clip(missing), of
}
