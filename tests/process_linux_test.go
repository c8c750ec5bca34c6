package tests

import (
	"os/exec"
	"syscall"
)

// endWithParent kills the worker when the test process ends, however it ends.
func endWithParent(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
}
