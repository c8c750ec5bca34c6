// Package errs holds the error conditions that every room of symmem shares, so that one errors.Is works whichever package
// the error came from. The public packages re-export the ones their callers meet (backend.ErrUnsupported, group.ErrPeerLost);
// nothing outside the module imports this one.
package errs

import (
	"errors"
	"fmt"
)

// The conditions a caller may act on. Public packages re-export these values; compare with errors.Is.
var (
	// ErrUnavailable: a library or a device that is needed is not on this machine.
	ErrUnavailable = errors.New("unavailable")
	// ErrUnsupported: what is asked for can never work with this backend, device or operating system.
	ErrUnsupported = errors.New("unsupported")
	// ErrNotReachable: the peer's memory has no address in this process.
	ErrNotReachable = errors.New("not reachable by pointer")
	// ErrMismatch: the ranks of a group did not ask for the same thing.
	ErrMismatch = errors.New("ranks disagree")
	// ErrPeerLost: another rank of the group has died or left.
	ErrPeerLost = errors.New("peer lost")
	// ErrClosed: the object was closed before.
	ErrClosed = errors.New("closed")
	// ErrNoMemory: the device or the host has not enough memory left.
	ErrNoMemory = errors.New("out of memory")
	// ErrInvalid: an argument is outside of what is allowed; the error is an [*ArgumentError].
	ErrInvalid = errors.New("invalid argument")
)

// ArgumentError is a refused argument: what was asked, the value and what was allowed.
type ArgumentError struct {
	Op      string // the operation that refused, as a user would write it: "Slice"
	Arg     string // the argument: "start"
	Value   any    // the value given
	Allowed string // what is allowed, and where it helps what to do next
}

// Error says which argument of which operation was refused, its value and what is allowed.
func (e *ArgumentError) Error() string {
	if e.Value == nil {
		return fmt.Sprintf("%s: %s is nil; allowed: %s", e.Op, e.Arg, e.Allowed)
	}
	return fmt.Sprintf("%s: %s is %v; allowed: %s", e.Op, e.Arg, e.Value, e.Allowed)
}

// Is reports that an ArgumentError is an ErrInvalid.
func (e *ArgumentError) Is(target error) bool { return target == ErrInvalid }

// Invalid makes an ArgumentError.
func Invalid(op, arg string, value any, allowed string) error {
	return &ArgumentError{Op: op, Arg: arg, Value: value, Allowed: allowed}
}
