package group

import (
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/symmem/symmem/internal/processors"
)

// Member is what a group knows of one of its ranks.
type Member struct {
	WorldRank int    // its rank in the world group
	Host      string // the name of its host, for people
	PID       int    // its process id on that host
	BootID    string // the boot of the kernel it runs on: equal means the same machine. "" if not known
	Process   string // unique to its process, so that ranks sharing one can tell
	LocalRank int    // its number among the ranks of its host, as its launcher gave it

	share processors.Share // of its machine's processors; not known if the member made it up
}

// sameMachine reports whether both run under one kernel, as far as is known.
func (m Member) sameMachine(other Member) bool {
	return m.Process == other.Process && m.BootID == other.BootID || m.BootID != "" && m.BootID == other.BootID
}

// Oversubscribed reports whether the ranks of the group that are on this rank's machine, in whichever container, have too few processors for each to
// have one: by those that their processes may run on, by GOMAXPROCS, and by the quotas of their control groups, each as it was when the rank
// joined. It is the same on all ranks of a machine. A rank that waits for another one in a loop may then keep it from running.
func (g *Group) Oversubscribed() bool {
	if g.made("Oversubscribed") != nil {
		return false
	}
	var ranks []processors.Rank
	for _, m := range g.members {
		if m.sameMachine(g.members[g.rank]) {
			ranks = append(ranks, processors.Rank{Process: m.Process, Share: m.share})
		}
	}
	return !processors.Enough(ranks)
}

// processID is unique to this process, as the system's process ids are not: they repeat between containers and over time.
var processID = sync.OnceValue(func() string { return rand.Text() })

// thisProcess describes this process as the given rank. The error is that nothing could be found out for want of files or of memory.
func thisProcess(worldRank, localRank int, bootID string) (Member, error) {
	host, err := os.Hostname()
	if err != nil { // the name is only for people
		host = "unknown"
	}
	if bootID == "" {
		if bootID, err = readBootID(); err != nil {
			return Member{}, fmt.Errorf("finding out which host this is: %w", fileLimit(err))
		}
	}
	return Member{
		WorldRank: worldRank,
		Host:      host,
		PID:       os.Getpid(),
		BootID:    bootID,
		Process:   processID(),
		LocalRank: localRank,
		share:     processors.Here(),
	}, nil
}

// bootIDFile holds the kernel's boot id.
const bootIDFile = "/proc/sys/kernel/random/boot_id"

// knownBootID is what readBootID has found.
var knownBootID atomic.Pointer[string]

// readBootID is the kernel's boot id, or "" where there is none: then only ranks of one process count as of one machine.
func readBootID() (string, error) {
	if known := knownBootID.Load(); known != nil {
		return *known, nil
	}
	id, err := bootIDIn(bootIDFile)
	if id != "" {
		knownBootID.Store(&id)
	}
	return id, err
}

// bootIDIn returns the boot id in a file, or "" where it cannot be read: a container may hide it, or show an empty file. A process that only has too
// many files open, or no memory, must not take itself for one of another host: that is an error.
func bootIDIn(path string) (string, error) {
	text, err := os.ReadFile(path)
	switch {
	case errors.Is(err, syscall.EMFILE), errors.Is(err, syscall.ENFILE), errors.Is(err, syscall.ENOMEM):
		return "", err
	case err != nil:
		return "", nil
	}
	return clip(strings.TrimSpace(string(text))), nil
}
