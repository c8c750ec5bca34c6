package futex

import (
	"errors"
	"runtime"
	"sync/atomic"
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

// TestLooksOfOneProcessor: where goroutines run one at a time, only who has Patience looks for long.
func TestLooksOfOneProcessor(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	var none *Patience
	rounds, loads := none.looks()
	require.Equal(t, []int{impatientRounds, 1}, []int{rounds, loads})
	rounds, loads = new(Patience).looks()
	require.Equal(t, []int{patientRounds, roundLoads}, []int{rounds, loads})
}

// TestPatienceLeavesTurns: where goroutines run one at a time, the others have a turn in the rounds of a wait. So what they do is hardly late,
// and a wait for one of them ends.
func TestPatienceLeavesTurns(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	var stop atomic.Bool
	var turns atomic.Int64
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for !stop.Load() {
			turns.Add(1)
			runtime.Gosched()
		}
	}()
	w := new(Word)
	gone := errors.New("gone")
	p := new(Patience)
	err := w.WaitAtLeast(1, Bound{Patience: p, Err: func() error { return gone }})
	had := turns.Load()
	stop.Store(true)
	<-ended
	require.ErrorIs(t, err, gone)
	require.Greater(t, had, int64(patientRounds/2), "the scheduler may skip one now and then")

	// The writer is a goroutine of this process. It is found in a round: the wait does not sleep, which would be asked for an error first.
	w = new(Word)
	for v := uint32(1); v <= 100; v++ {
		go w.Store(v)
		require.NoError(t, w.WaitAtLeast(v, Bound{Patience: new(Patience), Err: func() error { return gone }}))
	}
}
