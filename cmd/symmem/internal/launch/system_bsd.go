//go:build unix && !linux

package launch

import "syscall"

// groupLeader makes a child the leader of a process group. These systems cannot end it when this process is killed.
func groupLeader() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }

// awaitExit returns false, because these systems cannot wait for a process without reaping it.
func awaitExit(int) bool { return false }
