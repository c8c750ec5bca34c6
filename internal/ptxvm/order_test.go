package ptxvm

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestAgentsRace: of two agents that nothing orders, one that stores weakly races with whoever else accesses the bytes; one that stores a word strongly does with
// who reads it as bytes, and not with a copy for the host, which reads every four as a strong load does.
func TestAgentsRace(t *testing.T) {
	const address, size = 1 << 20, 256
	type does struct {
		name string
		do   func(a *Agent, of *Allocation) error
	}
	var (
		store = does{"store", func(a *Agent, of *Allocation) error { return a.Store(of, 64, address+64, 1) }}
		write = does{"write", func(a *Agent, of *Allocation) error {
			return a.Write(of, 60, address+60, 9, func(uint64) byte { return 1 })
		}}
		read = does{"read", func(a *Agent, of *Allocation) error { return a.Read(of, 0, address, size) }}
		look = does{"look", func(a *Agent, of *Allocation) error { return a.Look(of, 0, address, size) }}
	)
	for _, c := range []struct {
		first, second does
		races         bool
	}{
		{store, look, false},
		{look, store, false},
		{store, read, true},
		{read, store, true},
		{write, look, true},
		{look, write, true},
		{write, read, true},
		{read, write, true},
		{read, look, false},
		{look, read, false},
		{store, store, false},
		{store, write, true},
	} {
		for _, accessed := range []bool{false, true} { // by a word before, so that words are known, or not
			name := c.first.name + " and " + c.second.name
			if accessed {
				name += ", of words"
			}
			t.Run(name, func(t *testing.T) {
				memory := NewMemory()
				of := NewAllocation(aligned(size))
				require.NoError(t, memory.MapAllocation(address, of, 0, size))
				m := New(memory, Config{Weak: true, Keep: true})
				var before Order
				if accessed {
					a := m.Agent(0, "before", before)
					require.NoError(t, a.Store(of, 64, address+64, 0))
					before = a.End()
				}
				a, b := m.Agent(0, "one", before), m.Agent(1, "other", before)
				require.NoError(t, c.first.do(a, of))
				err := c.second.do(b, of)
				if !c.races {
					require.NoError(t, err)
					require.NoError(t, c.first.do(a, of), "once more")
					return
				}
				var race *Race
				require.ErrorAs(t, err, &race)
			})
		}
	}
}
