package launch

import (
	"os"
	"os/signal"
	"slices"
	"syscall"
)

// CatchSignals delivers the signals that a launcher passes on, which then do not end this process, until stop is called. A hangup that this process was
// started to ignore, as by nohup, stays ignored, here and in the ranks, which inherit that: to catch it would be to end them with the terminal.
func CatchSignals() (signals <-chan os.Signal, stop func()) {
	c := make(chan os.Signal, 16)
	signal.Notify(c, slices.DeleteFunc(slices.Clone(forwarded), func(sig os.Signal) bool { return sig == syscall.SIGHUP && signal.Ignored(sig) })...)
	return c, func() { signal.Stop(c) }
}

// holdBrokenPipes keeps a write that nobody reads from ending this process, until stop is called. Package os ends it where that is the standard output or the
// standard error; now each such write has an error. The signal itself goes nowhere, as it comes with the connection that a rank leaves behind, too. Ignoring it
// instead would make the ranks ignore it.
func holdBrokenPipes() (stop func()) {
	c := make(chan os.Signal, 1)
	signal.Notify(c, syscall.SIGPIPE)
	return func() { signal.Stop(c) }
}

// SignalStatus returns the exit status that shells define for a process that was ended by sig.
func SignalStatus(sig os.Signal) int { return 128 + signalNumber(sig) }
