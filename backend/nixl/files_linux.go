package nixl

import (
	"errors"
	"fmt"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/symmem/symmem/group"
)

// agentFiles is how many files an agent may open while it is made. With memory of the CPU it opens fewer than ten; one of a GPU, and each device of a network, some more.
const agentFiles = 64

// trying is held during roomForFiles, whose files another call would count as taken.
var trying sync.Mutex

// roomForFiles returns a [group.FileLimitError] if this process cannot open as many files as an agent may need. UCX ends the process, by an assertion
// (ucs_async_thread_start of ucs/async/thread.c in UCX 1.23), if it is one of the first that cannot be opened.
func roomForFiles() (err error) {
	trying.Lock()
	defer trying.Unlock()
	opened := make([]int, 0, agentFiles)
	defer func() {
		for _, fd := range opened {
			err = errors.Join(err, unix.Close(fd))
		}
	}()
	for len(opened) < agentFiles {
		fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
		if err != nil {
			var limit unix.Rlimit
			_ = unix.Getrlimit(unix.RLIMIT_NOFILE, &limit) // 0 if it is not known
			return &group.FileLimitError{Limit: limit.Cur, Err: fmt.Errorf("an agent of NIXL takes up to %d: %w", agentFiles, err)}
		}
		opened = append(opened, fd)
	}
	return nil
}
