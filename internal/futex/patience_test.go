package futex

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestPatience: what a waiter looks for shrinks with each wait in vain, comes back with one that paid, and is tried in full
// once in a while.
func TestPatience(t *testing.T) {
	var none *Patience
	require.Equal(t, impatientRounds, none.rounds())
	none.paid(3)
	none.vain(4)

	var p Patience
	require.Equal(t, patientRounds, p.rounds())
	for range 10 {
		p.vain(p.rounds())
	}
	require.Equal(t, impatientRounds, p.rounds())
	full := 0
	for range 2 * probeEvery {
		if p.rounds() == patientRounds {
			full++
		}
	}
	require.Equal(t, 2, full)
	p.paid(30)
	require.Equal(t, 2*30+impatientRounds, p.rounds())
	p.paid(0)
	require.Equal(t, 2*30+impatientRounds, p.rounds(), "a short wait is no reason to become less patient")
	p.paid(79)
	require.Equal(t, patientRounds, p.rounds())
}
