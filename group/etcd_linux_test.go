package group

import "syscall"

// dieWithParent ends a process with this one, whatever happens to it.
func dieWithParent() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
}
