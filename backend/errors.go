package backend

import (
	"fmt"

	"github.com/symmem/symmem/internal/errs"
)

// The errors of this package, for errors.Is. They are the same values in every package of the module that names them.
var (
	ErrUnavailable  = errs.ErrUnavailable  // a library or device is not on this machine
	ErrUnsupported  = errs.ErrUnsupported  // this backend or device cannot do it
	ErrNotReachable = errs.ErrNotReachable // the peer's memory has no address in this process
	ErrMismatch     = errs.ErrMismatch     // the ranks did not ask for the same thing
	ErrPeerLost     = errs.ErrPeerLost     // another rank has died or left
	ErrNoMemory     = errs.ErrNoMemory     // the device or the host has not enough memory left
	ErrClosed       = errs.ErrClosed       // the object was closed before
	ErrInvalid      = errs.ErrInvalid      // an argument outside of what is allowed
	ErrNoRendezvous = errs.ErrNoRendezvous // what the memory was used for needs a rendezvous before
	ErrNoMulticast  = errs.ErrNoMulticast  // the multicast address was asked for before the ranks have enabled it
	ErrNotSymmetric = errs.ErrNotSymmetric // the address is not inside memory that this Memory allocated or registered
	ErrNotPosted    = errs.ErrNotPosted    // a transfer was asked about or waited for before it was posted
	ErrInProgress   = errs.ErrInProgress   // a transfer was posted again, or closed, before its last post had ended
)

// ArgumentError is a refused argument: what was asked, the value and what was allowed. It is ErrInvalid.
type ArgumentError = errs.ArgumentError

// The errors of native libraries, in what backends say of theirs.
type (
	LoadError   = errs.LoadError   // a library that could not be loaded, with the places where it was looked for. It is ErrUnavailable
	SymbolError = errs.SymbolError // a function that a library does not have. It is ErrUnsupported
	CallError   = errs.CallError   // a call of a library that failed, with its code
	StuckError  = errs.StuckError  // what a library had not done when the context ended. It is the context's error
)

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
