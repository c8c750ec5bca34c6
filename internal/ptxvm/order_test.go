package ptxvm

import (
	"strings"
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
		four = does{"look at four", func(a *Agent, of *Allocation) error { return a.Look(of, 64, address+64, 4) }}
		more = does{"look at twelve", func(a *Agent, of *Allocation) error { return a.Look(of, 60, address+60, 12) }}
	)
	for _, c := range []struct {
		first, second does
		races         bool
	}{
		{store, look, false},
		{look, store, false},
		{store, four, false},
		{four, store, false},
		{store, more, false},
		{more, store, false},
		{write, four, true},
		{more, write, true},
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

// TestPartsRace: a store that is wider than the accesses before it leaves in the rest of the word, and where it goes, what those are in a race with, in whatever
// order threads go on.
func TestPartsRace(t *testing.T) {
	const flagged = "ld.relaxed.sys.global.u32 %r0, [y]; setp.eq.u32 %p0, %r0, 0; @%p0 bra End1; "
	for _, l := range []litmus{
		{name: "beside it", threads: []string{"st.global.u16 [%rd0+4], %r5; st.global.u32 [%rd0], %r6", "ld.global.u16 %r0, [%rd0+4]"}, out: "1:r0", want: "race"},
		{name: "beside it, of a byte", threads: []string{"st.global.u8 [%rd0+6], %r5; st.global.u16 [%rd0], %r6", "ld.global.u8 %r0, [%rd0+6]"}, out: "1:r0", want: "race"},
		{name: "where it goes", threads: []string{"st.global.u16 [%rd0], %r5; st.relaxed.sys.global.u32 [%rd0], %r6", "ld.relaxed.sys.global.u32 %r0, [%rd0]"}, out: "1:r0", want: "race"},
		{name: "a load beside it", threads: []string{"ld.global.u16 %r1, [%rd0+4]; st.global.u32 [%rd0], %r6", "st.global.u16 [%rd0+4], %r5"}, out: "1:r0", want: "race"},
		{
			name:    "behind a flag that releases nothing",
			threads: []string{"st.global.u16 [%rd0+4], %r5; st.global.u32 [%rd0], %r6; st.relaxed.sys.global.u32 [y], 1", flagged + "ld.global.u16 %r1, [%rd0+4]; End1:"},
			out:     "1:r0 1:r1", want: "0,9 race",
		},
		{
			name:    "behind a flag that releases",
			threads: []string{"st.global.u16 [%rd0+4], 5; st.global.u32 [%rd0], %r6; st.release.sys.global.u32 [y], 1", "ld.acquire.sys.global.u32 %r0, [y]; setp.eq.u32 %p0, %r0, 0; @%p0 bra End1; ld.global.u16 %r1, [%rd0+4]; End1:"},
			out:     "1:r0 1:r1", want: "0,9 1,5",
		},
	} {
		t.Run(l.name, func(t *testing.T) {
			out, _ := l.outcomes(t, true)
			require.Equal(t, l.want, strings.Join(out, " "))
		})
	}
}

// TestLooksStandForNobody: who has read weakly is in a race with a strong store, whoever looks afterwards.
func TestLooksStandForNobody(t *testing.T) {
	const address, size = 1 << 20, 256
	memory := NewMemory()
	of := NewAllocation(aligned(size))
	require.NoError(t, memory.MapAllocation(address, of, 0, size))
	m := New(memory, Config{Weak: true, Keep: true})
	a := m.Agent(0, "reads", Order{})
	require.NoError(t, a.Read(of, 0, address, size))
	b := m.Agent(0, "looks", a.End())
	require.NoError(t, b.Look(of, 0, address, size))
	var race *Race
	require.ErrorAs(t, m.Agent(1, "stores", Order{}).Store(of, 64, address+64, 1), &race)
	require.Equal(t, "reads", race.First.Thread.Function)
}
