//go:build !linux

package launch

import "syscall"

// KeepsDescendants is false: on these systems orphans go to the first process of the system, and only the process group of a rank is
// ended.
const KeepsDescendants = false

func adoptOrphans() error { return nil }

func ownGroup() *syscall.SysProcAttr { return groupLeader() }

func keepWriting() {}

func closeOnExec(int) error { return nil }

type known struct{}

func knownChildren() known { return known{} }

func sweep(*Family, known) {}

func (*Family) reap() (stop func()) { return func() {} }
