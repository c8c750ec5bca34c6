package backend

import (
	"errors"
	"fmt"

	"github.com/symmem/symmem/internal/errs"
)

// The errors of this package, for errors.Is. The first eight are the same values in every package of the module that
// names them.
var (
	ErrUnavailable  = errs.ErrUnavailable  // a library or device is not on this machine
	ErrUnsupported  = errs.ErrUnsupported  // this backend or device cannot do it
	ErrNotReachable = errs.ErrNotReachable // the peer's memory has no address in this process
	ErrMismatch     = errs.ErrMismatch     // the ranks did not ask for the same thing
	ErrPeerLost     = errs.ErrPeerLost     // another rank has died or left
	ErrNoMemory     = errs.ErrNoMemory     // the device or the host has not enough memory left
	ErrClosed       = errs.ErrClosed       // the object was closed before
	ErrInvalid      = errs.ErrInvalid      // an argument outside of what is allowed

	// ErrNoRendezvous: the memory was used for something that needs a rendezvous before there was one.
	ErrNoRendezvous = errors.New("no rendezvous yet")
	// ErrNoMulticast: the multicast address was asked for before the ranks have enabled it.
	ErrNoMulticast = errors.New("no multicast enabled yet (EnableMulticast on every rank)")
	// ErrNotSymmetric: the address is not inside memory that this Memory allocated or registered.
	ErrNotSymmetric = errors.New("not symmetric memory")
	// ErrNotPosted: a transfer was asked about or waited for before it was posted.
	ErrNotPosted = errors.New("transfer not posted")
	// ErrInProgress: a transfer was posted again, or closed, before its last post had ended.
	ErrInProgress = errors.New("transfer in progress")
)

// ArgumentError is a refused argument: what was asked, the value and what was allowed. It is ErrInvalid.
type ArgumentError = errs.ArgumentError

// WorkspaceError says that there cannot be that much more workspace, because some rank has not the memory, or cannot make it reachable.
// Every rank of the call gets it, so that all may go on with something that takes less; the group goes on working.
type WorkspaceError struct {
	Bytes int64 // of workspace on each rank
	Err   error // names the ranks; on those it wraps the reason, such as ErrNoMemory
}

// Error says how much was asked for, and why there is none.
func (e *WorkspaceError) Error() string {
	return fmt.Sprintf("making %d bytes of workspace: %v", e.Bytes, e.Err)
}

// Unwrap gives the vote's error.
func (e *WorkspaceError) Unwrap() error { return e.Err }
