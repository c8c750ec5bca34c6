package symmem

import "github.com/symmem/symmem/internal/errs"

// The conditions that callers act on, for errors.Is: all that the module has, the same values in every package that names them. What is
// agreed by all ranks fails with the same conditions on all of them; see the package comment.
var (
	ErrUnavailable  = errs.ErrUnavailable  // a library, a device or the rendezvous service is not there
	ErrUnsupported  = errs.ErrUnsupported  // this backend, device or operating system cannot do it
	ErrNotReachable = errs.ErrNotReachable // the peer's memory has no address in this process
	ErrMismatch     = errs.ErrMismatch     // the ranks did not ask for the same thing
	ErrPeerLost     = errs.ErrPeerLost     // another rank has died or left
	ErrClosed       = errs.ErrClosed       // the object was closed before
	ErrNoMemory     = errs.ErrNoMemory     // the device or the host has not enough memory left
	ErrInvalid      = errs.ErrInvalid      // an argument or a setting outside of what is allowed
	ErrNoRendezvous = errs.ErrNoRendezvous // what the tensor was used for needs a rendezvous before
	ErrNoMulticast  = errs.ErrNoMulticast  // the multicast address was asked for before EnableMulticast
	ErrNotSymmetric = errs.ErrNotSymmetric // the address is not inside symmetric memory
	ErrNotPosted    = errs.ErrNotPosted    // a transfer was asked about or waited for before it was posted
	ErrInProgress   = errs.ErrInProgress   // a transfer was posted again, or closed, before its last post had ended
	ErrTwoStreams   = errs.ErrTwoStreams   // a plan was run while it was in use on another stream
	ErrNoRoom       = errs.ErrNoRoom       // the device has no room for a plan beside those on other streams
	ErrContextLost  = errs.ErrContextLost  // device work has ended the process's CUDA context
)

// The types of errors that every package of the module may give, for errors.As.
type (
	ArgumentError = errs.ArgumentError // a refused argument or setting: what was asked, the value, what was allowed. It is ErrInvalid
	LoadError     = errs.LoadError     // a library that could not be loaded, with the places where it was looked for. It is ErrUnavailable
	SymbolError   = errs.SymbolError   // a function that a library does not have. It is ErrUnsupported
	CallError     = errs.CallError     // a call of a library that failed, with its code
	StuckError    = errs.StuckError    // what a library had not done when the context ended. It is the context's error
)
