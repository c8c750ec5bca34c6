//go:build unix

package launch

import (
	"os"
	"slices"
	"syscall"
)

// terminate is the signal that asks a rank to end.
const terminate = syscall.SIGTERM

// dumpStacks is the signal that makes a Go program print its stacks and end.
const dumpStacks = syscall.SIGQUIT

// forwarded are the signals that a launcher passes on to its ranks.
var forwarded = []os.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGUSR1, syscall.SIGUSR2}

// AsksToEnd reports whether a signal asks a program to end.
func AsksToEnd(sig os.Signal) bool {
	return slices.Contains([]os.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT}, sig)
}

// launchSupported returns an error if ranks cannot be started on this system.
func launchSupported() error { return nil }

// signalGroup sends sig to the process group of a rank. A process that is gone needs no signal, so errors are ignored.
func signalGroup(p *os.Process, sig os.Signal) {
	if s, ok := sig.(syscall.Signal); ok {
		_ = syscall.Kill(-p.Pid, s)
	}
}

// signalNumber returns the number of a signal.
func signalNumber(sig os.Signal) int {
	s, _ := sig.(syscall.Signal)
	return int(s)
}

// exitOf returns the exit status or the signal that ended a process.
func exitOf(state *os.ProcessState) (code int, sig os.Signal) {
	if w, ok := state.Sys().(syscall.WaitStatus); ok && w.Signaled() {
		return 0, w.Signal()
	}
	return state.ExitCode(), nil
}
