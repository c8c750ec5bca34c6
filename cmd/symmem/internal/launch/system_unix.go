//go:build unix

package launch

import (
	"os"
	"slices"
	"syscall"
)

// terminate is the signal that asks a rank to end.
const terminate = syscall.SIGTERM

// dumpStacks is the signal at which a rank of verify or bench prints where its goroutines are, and ends.
const dumpStacks = syscall.SIGQUIT

// forwarded are the signals that a launcher passes on to its ranks.
var forwarded = []os.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGUSR1, syscall.SIGUSR2}

// asksToEnd reports whether a signal is one that programs end by.
func asksToEnd(sig os.Signal) bool {
	return slices.Contains([]os.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT}, sig)
}

// launchSupported says whether ranks can be started on this system.
func launchSupported() error { return nil }

// signalGroup sends sig to a rank's process group. Whoever is not there any more needs no signal, so no error is told.
func signalGroup(p *os.Process, sig os.Signal) {
	if s, ok := sig.(syscall.Signal); ok {
		_ = syscall.Kill(-p.Pid, s)
	}
}

// signalNumber gives the number of a signal.
func signalNumber(sig os.Signal) int {
	s, _ := sig.(syscall.Signal)
	return int(s)
}

// exitOf gives the exit status or the signal that ended a process.
func exitOf(state *os.ProcessState) (code int, sig os.Signal) {
	if w, ok := state.Sys().(syscall.WaitStatus); ok && w.Signaled() {
		return 0, w.Signal()
	}
	return state.ExitCode(), nil
}
