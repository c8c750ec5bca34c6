package nixl

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/symmem/symmem/group"
)

// agentFiles is how many files an agent may open while it is made. With memory of the CPU it opens fewer than ten; one of a GPU, and each device of a network, some more.
const agentFiles = 64

// roomForFiles returns a [group.FileLimitError] if this process cannot open as many files as an agent may need. UCX ends the process, by an assertion
// (ucs_async_thread_start of ucs/async/thread.c in UCX 1.23), if it is one of the first that cannot be opened. It opens none to find out: another rank's agent may be at its first ones.
func roomForFiles() error {
	var limit unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &limit) != nil {
		return nil // it is not known
	}
	left := 0
	for fd := range limit.Cur {
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err == nil {
			continue // it is open
		}
		if left++; left == agentFiles {
			return nil
		}
	}
	return &group.FileLimitError{Limit: limit.Cur, Err: fmt.Errorf("an agent of NIXL takes up to %d, and %d are left: %w", agentFiles, left, unix.EMFILE)}
}
