//go:build !unix

package launch

import (
	"fmt"
	"io"
	"os"
	"runtime"
	"syscall"

	"github.com/symmem/symmem/internal/errs"
)

// terminate ends a rank. Here nothing can ask it to end.
var terminate, dumpStacks = os.Kill, os.Kill

// forwarded are the signals that a launcher passes on to its ranks.
var forwarded = []os.Signal{os.Interrupt}

// AsksToEnd reports whether a signal asks a program to end.
func AsksToEnd(os.Signal) bool { return true }

// launchSupported returns the reason why ranks cannot be started on this system.
func launchSupported() error {
	return fmt.Errorf("starting ranks, and ending all that they leave, needs groups of processes, which %s has not; run on Linux: %w",
		runtime.GOOS, errs.ErrUnsupported)
}

// foregroundReader reads from a terminal. Here no process is stopped for that.
func foregroundReader(tty *os.File) io.Reader { return tty }

func groupLeader() *syscall.SysProcAttr { return nil }

func awaitExit(int) bool { return false }

// signalGroup kills the process, since there is no other signal. One that is gone needs none, so errors are ignored.
func signalGroup(p *os.Process, _ os.Signal) { _ = p.Kill() }

func signalNumber(os.Signal) int { return 0 }

// exitOf returns the exit status of a process.
func exitOf(state *os.ProcessState) (code int, sig os.Signal) { return state.ExitCode(), nil }
