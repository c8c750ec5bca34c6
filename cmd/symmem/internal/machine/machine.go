// Package machine asks the system what machine this is, and which of its limits symmetric memory can run into.
package machine

import "runtime"

// Machine describes the machine on which something was found out or measured.
type Machine struct {
	CPU    string `json:"cpu"`          // model of the processor, "" if not known
	Cores  int    `json:"cores"`        // that this process may use
	Memory int64  `json:"memory_bytes"` // of the host, 0 if not known
	OS     string `json:"os"`           // as Go names it
	Arch   string `json:"arch"`         // as Go names it
	Kernel string `json:"kernel"`       // release, "" if not known
	Go     string `json:"go"`           // version that compiled the command
}

// Processor returns the model of the processor for people.
func (m Machine) Processor() string {
	if m.CPU == "" {
		return "unknown processor"
	}
	return m.CPU
}

// Read asks the system what machine this is. It needs no device. What is not known stays empty.
func Read() Machine {
	m := Machine{Cores: runtime.NumCPU(), OS: runtime.GOOS, Arch: runtime.GOARCH, Go: runtime.Version()}
	m.fill()
	return m
}
