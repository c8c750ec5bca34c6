package backend

import (
	"context"
	"sync/atomic"
)

// Flagger is a Backend whose peers have no pointers, and whose ranks write words of each other's host memory instead: it is
// what signals, waits and barriers are made of there, on whichever device.
type Flagger interface {
	// NewFlags makes count words, 0, on every rank, which all ranks can write. Collective: the count is the same everywhere. It
	// fails on all ranks or on none.
	NewFlags(ctx context.Context, count int) (Flags, error)
}

// Flags are words of this rank that peers write, and the means to write theirs.
type Flags interface {
	// Words returns this rank's words. Peers write them at any time, so they must be loaded atomically. A word that is being written may
	// hold a mixture of its bytes from before and after, in the order of the bytes or in the reverse order.
	Words() []atomic.Uint64
	// Progress drives on what peers write, where that takes this process too. It is called again and again while this rank waits for
	// a word, by several goroutines perhaps, and does not block.
	Progress()
	// PrepareStore makes what writing the word at index of another rank takes. Local.
	PrepareStore(peer, index int) (FlagStore, error)
	// Close frees the words. Every rank has agreed that nobody writes them any more, or is lost.
	Close() error
}

// FlagStore writes one word of a peer. It is used by one goroutine at a time.
type FlagStore interface {
	// Post begins to write value; the last write has ended. Everything that ended before is visible to whoever sees the value.
	Post(value uint64) error
	// Poll reports whether the last write has ended, and its error. It does not block.
	Poll() (ended bool, err error)
	// Close releases it; no write is under way.
	Close() error
}
