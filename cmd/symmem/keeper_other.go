//go:build !linux

package main

import "syscall"

// keepsDescendants is false: on these systems orphans go to the system's first process, and only a rank's process group is ended.
const keepsDescendants = false

func adoptOrphans() error { return nil }

func ownGroup() *syscall.SysProcAttr { return groupLeader() }

func closeOnExec(int) error { return nil }

func sweep(*family) {}

func (*family) reap() (stop func()) { return func() {} }
