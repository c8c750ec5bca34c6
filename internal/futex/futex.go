package futex

import (
	"math"
	"time"
)

// All is the n with which [Wake] wakes every sleeper.
const All = math.MaxInt32

// Wait sleeps until somebody calls [Wake] for addr, for at most timeout. It does not sleep if *addr is not old or if timeout is not positive. It may
// also return for no reason, so the caller looks at the word again in any case: the result is nil when it was woken, when the word has changed, after
// a signal and after the timeout. An error means that the system refused the call.
//
// The calling goroutine keeps its thread while it sleeps. addr may lie in memory that several processes map.
func Wait(addr *uint32, old uint32, timeout time.Duration) error {
	if timeout <= 0 {
		return nil
	}
	return wait(addr, old, timeout)
}

// Wake wakes up to n goroutines, of any process, that sleep in [Wait] for addr, and returns how many it woke. It does not
// block. n below 1 wakes nobody.
func Wake(addr *uint32, n int) (int, error) {
	if n < 1 {
		return 0, nil
	}
	return wake(addr, min(n, All))
}
