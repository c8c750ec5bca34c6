//go:build !linux

package launch

import "syscall"

// KeepsDescendants is false: on these systems orphans go to the system's first process, and only a rank's process group is ended.
const KeepsDescendants = false

func adoptOrphans() error { return nil }

func ownGroup() *syscall.SysProcAttr { return groupLeader() }

func closeOnExec(int) error { return nil }

func sweep(*Family) {}

func (*Family) reap() (stop func()) { return func() {} }
