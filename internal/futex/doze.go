package futex

import "time"

// Doze sleeps for d. [time.Sleep] lasts a millisecond at least in a process that has nothing else to do, since the runtime then
// waits in the network poller, which counts in milliseconds.
func Doze(d time.Duration) {
	// Nobody writes or wakes the word, so only the timeout ends the wait.
	var never uint32
	if err := Wait(&never, 0, d); err != nil {
		time.Sleep(d)
	}
}
