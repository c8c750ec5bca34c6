package launch

import (
	"os"
	"os/signal"
)

// CatchSignals gives the signals that a launcher passes on, instead of letting them end this process, until stop is called.
func CatchSignals() (signals <-chan os.Signal, stop func()) {
	c := make(chan os.Signal, 16)
	signal.Notify(c, forwarded...)
	return c, func() { signal.Stop(c) }
}

// SignalStatus is the exit status that shells give to what a signal has ended.
func SignalStatus(sig os.Signal) int { return 128 + signalNumber(sig) }
