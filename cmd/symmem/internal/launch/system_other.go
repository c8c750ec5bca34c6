//go:build !unix

package launch

import (
	"fmt"
	"os"
	"runtime"
	"syscall"

	"github.com/symmem/symmem/internal/errs"
)

// terminate is the signal that asks a rank to end: here nothing can ask.
var terminate, dumpStacks = os.Kill, os.Kill

// forwarded are the signals that a launcher passes on to its ranks.
var forwarded = []os.Signal{os.Interrupt}

// asksToEnd reports whether a signal is one that programs end by.
func asksToEnd(os.Signal) bool { return true }

// launchSupported says why ranks cannot be started on this system.
func launchSupported() error {
	return fmt.Errorf("starting ranks passes an open socket to rank 0, which %s cannot do; run on Linux: %w",
		runtime.GOOS, errs.ErrUnsupported)
}

func groupLeader() *syscall.SysProcAttr { return nil }

func awaitExit(int) bool { return false }

// signalGroup kills the process: there is no other signal. One that has ended needs none, so no error is told.
func signalGroup(p *os.Process, _ os.Signal) { _ = p.Kill() }

func signalNumber(os.Signal) int { return 0 }

// exitOf gives the exit status of a process.
func exitOf(state *os.ProcessState) (code int, sig os.Signal) { return state.ExitCode(), nil }
