package launch

import (
	"errors"
	"syscall"

	"golang.org/x/sys/unix"
)

// groupLeader makes a child the leader of a process group, and lets it die with this process, whatever ends it.
func groupLeader() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}

// awaitExit blocks until the process has ended, without reaping it. It returns false if it could not wait.
func awaitExit(pid int) bool {
	for {
		if err := unix.Waitid(unix.P_PID, pid, nil, unix.WEXITED|unix.WNOWAIT, nil); !errors.Is(err, unix.EINTR) {
			return err == nil
		}
	}
}
