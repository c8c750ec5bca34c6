//go:build unix

package launch

import (
	"errors"
	"io"
	"os"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
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

// foregroundReader reads from a terminal while this process is in its foreground. One that reads in the background is stopped, and can then neither pass
// signals on nor end with its ranks.
func foregroundReader(tty *os.File) io.Reader { return foreground{tty} }

// backgroundLook is how often a process in the background looks whether it is in the foreground, while somebody types for others.
const backgroundLook = 200 * time.Millisecond

type foreground struct{ tty *os.File }

func (f foreground) Read(p []byte) (int, error) {
	fd := int(f.tty.Fd())
	for {
		// To wait for input stops nobody.
		if _, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, -1); err != nil {
			if errors.Is(err, unix.EINTR) {
				continue
			}
			return 0, err
		}
		// Where this is not the terminal that rules this process, or it is gone, reading stops nobody either.
		if group, err := unix.IoctlGetInt(fd, unix.TIOCGPGRP); err != nil || group == syscall.Getpgrp() {
			return f.tty.Read(p)
		}
		time.Sleep(backgroundLook)
	}
}
