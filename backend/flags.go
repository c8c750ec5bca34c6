package backend

import (
	"context"
	"sync/atomic"
)

// Flagger is a Backend without peer pointers, whose ranks write words of each other's host memory instead. Signals, waits and barriers are made of
// these words, on any device.
type Flagger interface {
	// NewFlags makes count words on every rank, all 0, which all ranks can write. Collective: all ranks pass the same count. It fails on all ranks or
	// on none.
	NewFlags(ctx context.Context, count int) (Flags, error)
}

// Flags are words of this rank that peers write, and the means to write theirs.
type Flags interface {
	// Words returns this rank's words. Peers write them at any time, so they must be loaded atomically. A word that is being written may
	// hold a mixture of its bytes from before and after, in the order of the bytes or in the reverse order.
	Words() []atomic.Uint64
	// Progress makes progress with the writes of peers, where that needs this process. It is called again and again while this rank waits for a word,
	// perhaps by several goroutines, and does not block.
	Progress()
	// PrepareStore prepares writing the word at index of another rank. Local.
	PrepareStore(peer, index int) (FlagStore, error)
	// Close frees the words. Every rank that is not lost has agreed that nobody writes them any more.
	Close() error
}

// FlagsFailer is implemented by Flags that may fail for good while no rank is lost.
type FlagsFailer interface {
	// Err is why words of peers may not come any more, on every rank soon after it is so on one; nil as long as they do. It does not block, and
	// whoever waits for a word asks for it again and again.
	Err() error
}

// FlagStore writes one word of a peer. It is used by one goroutine at a time.
type FlagStore interface {
	// Post begins to write value; the previous write has ended. Everything that ended before is visible to a rank that sees the value.
	Post(value uint64) error
	// Poll reports whether the last write has ended, and its error. It does not block.
	Poll() (ended bool, err error)
	// Close releases it; no write is under way.
	Close() error
}
