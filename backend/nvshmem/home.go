package nvshmem

import (
	"fmt"
	"sync"

	"github.com/symmem/symmem/internal/errs"
)

// home holds the library's one state: one for each process, and in tests one for each rank.
type home struct {
	own bool // not the process's: other ranks of it have others

	mu    sync.Mutex
	group string   // the group that has opened it or is about to; "" if none has
	spent error    // why it cannot be opened in this process any more; nil if it can
	first *reading // what the library has read of the environment at its first start; nil before
}

// reading is what the library reads only once.
type reading struct {
	multicast   bool
	granularity int64
}

// process is the state of this process.
var process home

// enter takes the library for a group.
func (h *home) enter(group string) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case h.spent != nil:
		return fmt.Errorf("NVSHMEM cannot be started again in this process: %w", h.spent)
	case h.group != "":
		return fmt.Errorf("NVSHMEM has one state for a process, and group %s has it open: close that first, or make sub-groups of it: %w",
			h.group, errs.ErrUnsupported)
	}
	h.group = group
	return nil
}

// leave releases the library, permanently if it is spent.
func (h *home) leave(spent error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.group, h.spent = "", spent
}

// compare returns an error if the environment differs from that of the library's first start.
func (h *home) compare(now reading) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if first := h.first; first != nil && *first != now {
		return fmt.Errorf("NVSHMEM reads its environment at its first start in a process, which was with multicast %t and a granularity of "+
			"%d bytes; it cannot be started with multicast %t and %d bytes now: %w", first.multicast, first.granularity, now.multicast,
			now.granularity, errs.ErrUnsupported)
	}
	return nil
}

// read notes that the library reads its environment now.
func (h *home) read(now reading) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.first = &now
}

// usable says why the library cannot be opened in this process any more.
func (h *home) usable() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.spent
}
