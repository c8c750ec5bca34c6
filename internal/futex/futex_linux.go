package futex

import (
	"fmt"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The operations of futex(2), from linux/futex.h. Neither carries FUTEX_PRIVATE_FLAG: the other side may be another process.
const (
	opWait = 0
	opWake = 1
)

// wait is one FUTEX_WAIT. The timeout is relative and runs on the monotonic clock.
func wait(addr *uint32, old uint32, timeout time.Duration) error {
	ts := unix.NsecToTimespec(int64(timeout))
	_, _, errno := unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(addr)), opWait, uintptr(old),
		uintptr(unsafe.Pointer(&ts)), 0, 0)
	switch errno {
	case 0, unix.EAGAIN, unix.EINTR, unix.ETIMEDOUT:
		// Woken, changed before, interrupted by a signal, or timed out. The caller looks at the word in any case, because
		// a wake-up proves nothing either.
		return nil
	}
	return fmt.Errorf("waiting on a futex: %w", errno)
}

// wake is one FUTEX_WAKE.
func wake(addr *uint32, n int) (int, error) {
	woken, _, errno := unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(addr)), opWake, uintptr(n), 0, 0, 0)
	if errno != 0 {
		return 0, fmt.Errorf("waking a futex: %w", errno)
	}
	return int(woken), nil
}
