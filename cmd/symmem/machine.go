package main

import "runtime"

// machine is where something was found out or measured.
type machine struct {
	CPU    string `json:"cpu"`          // model of the processor, "" if not known
	Cores  int    `json:"cores"`        // that this process may use
	Memory int64  `json:"memory_bytes"` // of the host, 0 if not known
	OS     string `json:"os"`           // as Go names it
	Arch   string `json:"arch"`         // as Go names it
	Kernel string `json:"kernel"`       // release, "" if not known
	Go     string `json:"go"`           // version that compiled the command
}

// readMachine asks the system. It needs no device.
func readMachine() machine {
	m := machine{Cores: runtime.NumCPU(), OS: runtime.GOOS, Arch: runtime.GOARCH, Go: runtime.Version()}
	m.fill()
	return m
}
