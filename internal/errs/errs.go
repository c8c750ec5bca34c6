// Package errs holds the error conditions that every package of symmem shares, so that one errors.Is works whichever package
// the error came from. The public packages re-export the ones their callers meet (backend.ErrUnsupported, group.ErrPeerLost);
// nothing outside the module imports this one.
package errs

import (
	"errors"
	"fmt"
	"strings"
)

// The conditions that a caller may act on. Public packages re-export these values; compare with errors.Is.
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
	// ErrNoRendezvous: the memory was used for something that needs a rendezvous before there was one.
	ErrNoRendezvous = errors.New("no rendezvous yet")
	// ErrNoMulticast: the multicast address was asked for before the ranks have enabled it.
	ErrNoMulticast = errors.New("no multicast enabled yet (EnableMulticast on every rank)")
	// ErrNotSymmetric: the address is not inside memory that was allocated or registered as symmetric.
	ErrNotSymmetric = errors.New("not symmetric memory")
	// ErrNotPosted: a transfer was asked about or waited for before it was posted.
	ErrNotPosted = errors.New("transfer not posted")
	// ErrInProgress: a transfer was posted again, or closed, before its last post had ended.
	ErrInProgress = errors.New("transfer in progress")
	// ErrTwoStreams: a plan runs on one stream at a time.
	ErrTwoStreams = errors.New("plan is in use on another stream")
	// ErrNoRoom: the device has no room for the kernels of a plan beside those of others.
	ErrNoRoom = errors.New("no room beside other plans")
	// ErrContextLost: device work has ended the CUDA context of this process.
	ErrContextLost = errors.New("the CUDA context is lost")
)

// ArgumentError is a refused argument: what was asked, the value and what was allowed.
type ArgumentError struct {
	Op      string // the operation that refused, as a user would write it: "Slice"
	Arg     string // the argument: "start"
	Value   any    // the value given
	Allowed string // the values that are allowed; "" where that says nothing
	Advice  string // what to do next; "" if that is plain
}

// Error says which argument of which operation was refused, its value, what is allowed and what to do next.
func (e *ArgumentError) Error() string {
	value := e.Value
	if value == nil {
		value = "nil"
	}
	text := fmt.Sprintf("%s: %s is %s", e.Op, e.Arg, brief(fmt.Sprint(value)))
	if e.Allowed != "" {
		text += "; allowed: " + e.Allowed
	}
	if e.Advice != "" {
		text += "; " + e.Advice
	}
	return text
}

// maxValue is how many bytes of a value a text has. Values come from environments and files, where a mistake may be megabytes long.
const maxValue = 1000

// brief is a text with no more of its beginning than can be read, and how long it is.
func brief(text string) string {
	if len(text) <= maxValue {
		return text
	}
	const shown = 200
	return fmt.Sprintf("%s… (%d bytes)", strings.ToValidUTF8(text[:shown], ""), len(text))
}

// Is reports that an ArgumentError is an ErrInvalid.
func (e *ArgumentError) Is(target error) bool { return target == ErrInvalid }

// Invalid makes an ArgumentError without advice.
func Invalid(op, arg string, value any, allowed string) error {
	return &ArgumentError{Op: op, Arg: arg, Value: value, Allowed: allowed}
}

// Foreign makes an ArgumentError about memory that belongs to another group or memory: it is ErrNotSymmetric too.
func Foreign(op, arg string, value any, allowed string) error {
	return &foreign{&ArgumentError{Op: op, Arg: arg, Value: value, Allowed: allowed}}
}

type foreign struct{ *ArgumentError }

func (e *foreign) Is(target error) bool { return target == ErrInvalid || target == ErrNotSymmetric }
func (e *foreign) Unwrap() error        { return e.ArgumentError }

// Advised makes an ArgumentError with advice.
func Advised(op, arg string, value any, allowed, advice string) error {
	return &ArgumentError{Op: op, Arg: arg, Value: value, Allowed: allowed, Advice: advice}
}
