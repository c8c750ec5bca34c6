// Package machine asks the system what machine this is, and which of its limits symmetric memory can run into.
package machine

import (
	"fmt"
	"runtime"
)

// Machine describes the machine on which something was found out or measured.
type Machine struct {
	CPU    string `json:"cpu"`          // model of the processor, "" if not known
	Cores  int    `json:"cores"`        // that this process may use
	Online int    `json:"online_cores"` // that the machine has, 0 if not known
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

// CoreCount returns for people how many cores this process may use, and of how many if it may not use all: "1 of 2 cores".
func (m Machine) CoreCount() string {
	switch {
	case m.Cores < m.Online:
		return fmt.Sprintf("%d of %d cores", m.Cores, m.Online)
	case m.Cores == 1:
		return "1 core"
	}
	return fmt.Sprintf("%d cores", m.Cores)
}

// Read asks the system what machine this is. It needs no device. What is not known stays empty.
func Read() Machine {
	m := Machine{Cores: runtime.NumCPU(), OS: runtime.GOOS, Arch: runtime.GOARCH, Go: runtime.Version()}
	m.fill()
	return m
}
