//go:build amd64 || arm64

package dl

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	signals    = 64
	saOnStack  = 0x08000000 // SA_ONSTACK of the kernel
	sigsetSize = 8          // bytes of the kernel's sigset_t
)

// kernelAction is struct sigaction of the kernel on amd64 and arm64.
type kernelAction struct {
	handler  uintptr
	flags    uint64
	restorer uintptr
	mask     uint64
}

// signalHandlers asks the kernel for the handlers of all signals, which takes some microseconds. A signal that it does not report has a zero entry.
func signalHandlers() []handler {
	all := make([]handler, signals+1)
	for s := 1; s <= signals; s++ {
		var a kernelAction
		_, _, errno := unix.RawSyscall6(unix.SYS_RT_SIGACTION, uintptr(s), 0, uintptr(unsafe.Pointer(&a)), sigsetSize, 0, 0)
		if errno == 0 {
			all[s] = handler{address: a.handler, flags: a.flags}
		}
	}
	return all
}

// changedHandlers returns the signals whose handler was replaced by another.
func changedHandlers(before, after []handler) []change {
	var all []change
	for s := range after {
		if after[s].address != before[s].address && after[s].address > 1 {
			all = append(all, change{signal: s, onAltStack: after[s].flags&saOnStack != 0})
		}
	}
	return all
}
