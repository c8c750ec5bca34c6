package nvshmem

import (
	"fmt"
	"sync"

	"github.com/symmem/symmem/internal/errs"
)

// arena is the part of this PE's heap that groups of only some PEs take their memory from. Each PE divides its arena in its own way.
type arena struct {
	mu    sync.Mutex
	bytes int64
	free  spans // by offset from the world's ref, which is the arena's beginning
	taken int64
}

// take cuts a piece, or returns ErrNoMemory.
func (a *arena) take(bytes int64) (offset int64, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	rounded := roundUp(bytes, alignment)
	offset, ok := a.free.take(rounded)
	if !ok {
		return 0, fmt.Errorf("%d bytes are asked for, and of the %d that are there for groups of only some ranks %d are taken: set %s to "+
			"more, as 1G: %w", rounded, a.bytes, a.taken, arenaEnv, errs.ErrNoMemory)
	}
	a.taken += rounded
	return offset, nil
}

// give puts back a piece that nobody can reach any more.
func (a *arena) give(offset, bytes int64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	rounded := roundUp(bytes, alignment)
	a.free.give(span{offset, rounded})
	a.taken -= rounded
}
