package backend

import (
	"fmt"

	"github.com/symmem/symmem/device"
)

// TransferOp is the direction of a transfer, seen from the rank that posts it.
type TransferOp int

// The directions.
const (
	Read  TransferOp = iota + 1 // from the peer's memory into this rank's
	Write                       // from this rank's memory into the peer's
)

// String returns "read" or "write".
func (op TransferOp) String() string {
	switch op {
	case Read:
		return "read"
	case Write:
		return "write"
	}
	return fmt.Sprintf("TransferOp(%d)", int(op))
}

// Transferrer is a Backend that moves blocks itself, because its mappings have no peer pointers. For other backends Memory copies.
type Transferrer interface {
	// PrepareTransfer prepares moving the blocks. The caller has checked them: none is empty, and each is inside symmetric memory on both sides, the
	// remote one on another rank. Local.
	PrepareTransfer(op TransferOp, peer int, blocks []Block) (PreparedTransfer, error)
}

// Mover is a Backend that has the methods of [Transferrer], [Flagger] and [Quiescer], and can do what they say for some groups only.
type Mover interface {
	// Moves reports whether it can for its group. All ranks get the same, at any time. If so, it may refuse to read from ranks without addresses
	// (ErrNotReachable), when its Transfers capability is not set. Signals between ranks that have addresses of each other's memory stay there.
	Moves() bool
}

// moves reports whether b can do what the methods that it may have say.
func moves(b Backend) bool {
	m, some := b.(Mover)
	return !some || m.Moves()
}

// TransferrerOf returns b as a Transferrer, if it is one for its group.
func TransferrerOf(b Backend) (Transferrer, bool) {
	t, ok := b.(Transferrer)
	return t, ok && moves(b)
}

// FlaggerOf returns b as a Flagger, if it is one for its group.
func FlaggerOf(b Backend) (Flagger, bool) {
	f, ok := b.(Flagger)
	return f, ok && moves(b)
}

// QuiescerOf returns b as a Quiescer, if it is one for its group.
func QuiescerOf(b Backend) (Quiescer, bool) {
	q, ok := b.(Quiescer)
	return q, ok && moves(b)
}

// Block is one block of a transfer, as it is passed to a backend: Bytes at Local, which is in Alloc, on this rank and at Offset of the peer's copy of
// Remote. Other allocations, of this group or of others, may have the same memory and be released first.
type Block struct {
	Alloc  Allocation
	Local  device.Ptr
	Remote Mapping
	Offset int64
	Bytes  int64
}

// PreparedTransfer is a backend's transfer: work that the CPU does for a stream. A run has ended when the data has arrived, on the peer too. It is
// bounded by the backend, and ends with ErrPeerLost when the peer is lost. A Start while a run is under way returns ErrInProgress.
type PreparedTransfer interface {
	device.HostWork
	// Close releases everything; no run is under way.
	Close() error
}
