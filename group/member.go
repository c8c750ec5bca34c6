package group

import (
	"crypto/rand"
	"os"
	"strings"
	"sync"
)

// Member is what a group knows of one of its ranks.
type Member struct {
	WorldRank int    // its rank in the world group
	Host      string // the name of its host, for people
	PID       int    // its process id on that host
	BootID    string // the boot of the kernel it runs on: equal means the same machine. "" if not known
	Process   string // unique to its process, so that ranks sharing one can tell
	LocalRank int    // its number among the ranks of its host, as its launcher gave it
}

// sameMachine reports whether both run under one kernel, as far as is known.
func (m Member) sameMachine(other Member) bool {
	return m.Process == other.Process && m.BootID == other.BootID || m.BootID != "" && m.BootID == other.BootID
}

// processID is unique to this process, as the system's process ids are not: they repeat between containers and over time.
var processID = sync.OnceValue(func() string { return rand.Text() })

// thisProcess describes this process as the given rank.
func thisProcess(worldRank, localRank int, bootID string) Member {
	host, err := os.Hostname()
	if err != nil { // the name is only for people
		host = "unknown"
	}
	if bootID == "" {
		bootID = readBootID()
	}
	return Member{
		WorldRank: worldRank,
		Host:      host,
		PID:       os.Getpid(),
		BootID:    bootID,
		Process:   processID(),
		LocalRank: localRank,
	}
}

// readBootID is the kernel's boot id, or "" where there is none: then only ranks of one process count as of one machine.
var readBootID = sync.OnceValue(func() string { return bootIDIn("/proc/sys/kernel/random/boot_id") })

// bootIDIn returns the boot id in a file, or "" where it cannot be read: a container may hide it, or show an empty file.
func bootIDIn(path string) string {
	text, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	return clip(strings.TrimSpace(string(text)))
}
