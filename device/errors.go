package device

import (
	"fmt"

	"github.com/symmem/symmem/internal/errs"
)

// The errors of this package, for errors.Is.
var (
	ErrUnavailable = errs.ErrUnavailable // the device or its driver is not on this machine
	ErrUnsupported = errs.ErrUnsupported // the device cannot do this
	ErrNoMemory    = errs.ErrNoMemory    // the device has not enough memory left
	ErrClosed      = errs.ErrClosed      // the object was closed before
	ErrInvalid     = errs.ErrInvalid     // an argument outside of what is allowed
)

// WaitError is device work whose wait has failed: the peer is lost (ErrPeerLost), or did not come within the kernel timeout (os.ErrDeadlineExceeded).
type WaitError struct {
	Op      string // "wait", "barrier", or the name of a plan
	Channel int    // -1 for a plan, which has a channel of its own
	Peer    int    // the rank waited for, which may itself have waited for another one
	Err     error
}

// Error says for whom the work waited, and why the wait failed.
func (e *WaitError) Error() string {
	if e.Channel < 0 {
		return fmt.Sprintf("%s: waiting for rank %d: %v", e.Op, e.Peer, e.Err)
	}
	return fmt.Sprintf("%s on channel %d: waiting for rank %d: %v", e.Op, e.Channel, e.Peer, e.Err)
}

// Unwrap returns the reason.
func (e *WaitError) Unwrap() error { return e.Err }
