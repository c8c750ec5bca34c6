package launch

import (
	"os"
	"os/signal"
)

// CatchSignals delivers the signals that a launcher passes on, which then do not end this process, until stop is called.
func CatchSignals() (signals <-chan os.Signal, stop func()) {
	c := make(chan os.Signal, 16)
	signal.Notify(c, forwarded...)
	return c, func() { signal.Stop(c) }
}

// SignalStatus returns the exit status that shells define for a process that was ended by sig.
func SignalStatus(sig os.Signal) int { return 128 + signalNumber(sig) }
