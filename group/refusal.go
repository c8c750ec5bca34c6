package group

import (
	"fmt"
	"time"
)

// RefusalReason says why a rank was not let into a job.
type RefusalReason int

// The reasons to refuse a rank.
const (
	RefusedNotService RefusalReason = iota + 1 // what answers at the address is no rendezvous service
	RefusedVersion                             // the two sides speak different versions of the protocol
	RefusedTLS                                 // the certificates were not accepted
	RefusedToken                               // the token is missing or wrong
	RefusedJob                                 // it is another job's service
	RefusedRestart                             // it is another attempt of the job
	RefusedWorldSize                           // the ranks do not agree on the size of the world
	RefusedRank                                // the rank is outside of the world
	RefusedDuplicate                           // a rank of this number is present
	RefusedLate                                // a rank of this number was present, and has left or is lost, or an earlier service that knew it is forgotten
	RefusedProtocol                            // the first message was not the expected one
)

// String returns the reason in a word or two.
func (r RefusalReason) String() string {
	switch r {
	case RefusedNotService:
		return "no rendezvous service"
	case RefusedVersion:
		return "protocol version"
	case RefusedTLS:
		return "certificate"
	case RefusedToken:
		return "token"
	case RefusedJob:
		return "job"
	case RefusedRestart:
		return "restart"
	case RefusedWorldSize:
		return "world size"
	case RefusedRank:
		return "rank"
	case RefusedDuplicate:
		return "duplicate rank"
	case RefusedLate:
		return "late rank"
	case RefusedProtocol:
		return "protocol"
	}
	return fmt.Sprintf("RefusalReason(%d)", int(r))
}

// RefusedError says that the service, or whatever answers in its place, has refused this rank. Joining again does not help. The ranks that are in the
// job are not disturbed.
type RefusedError struct {
	Addr   string        // where the service was looked for
	Reason RefusalReason // why, for programs
	Text   string        // why, with the values, and what to do
}

// Error says who refused, and why.
func (e *RefusedError) Error() string {
	return fmt.Sprintf("refused by %s (%v): %s", e.Addr, e.Reason, e.Text)
}

// elsewhere reports whether the refusal is, for certain or perhaps, that of somebody else, behind whom this rank's own service may be at another port.
func (r RefusalReason) elsewhere() (perhaps, certain bool) {
	switch r {
	case RefusedJob, RefusedNotService:
		return true, true
	case RefusedVersion, RefusedTLS, RefusedToken, RefusedRestart: // or this rank is not set up as the others are
		return true, false
	}
	return false, false
}

func refused(reason RefusalReason, format string, args ...any) *RefusedError {
	return &RefusedError{Reason: reason, Text: fmt.Sprintf(format, args...)}
}

// quoteJob returns the name of a job for an error: quoted, and not all of it if it is long.
func quoteJob(name string) string {
	const longest = 80
	if len(name) <= longest {
		return fmt.Sprintf("%q", name)
	}
	return fmt.Sprintf("%q… (%d bytes)", name[:longest], len(name))
}

// ConnectError says that no rendezvous service was reached in time. It is ErrUnavailable, and unwraps to the error of the
// context that ended and to the last attempt's.
type ConnectError struct {
	Addr     string        // where the service was looked for
	Ports    int           // at how many ports, from that of Addr on
	Served   bool          // whether it is to be in a process of its own, as [Options].Served says, and not rank 0's
	Attempts int           // how often
	Waited   time.Duration // for how long
	Last     error         // why the last attempt failed
	Err      error         // the error of the context that ended
}

// Error names the address and the last cause.
func (e *ConnectError) Error() string {
	who := "rank 0"
	if e.Served {
		who = "what serves it (symmem run, symmem rendezvous)"
	}
	return fmt.Sprintf("no rendezvous service at %s after %d attempts in %v; is %s running, and is this its address? last attempt: %v",
		places(e.Addr, e.Ports), e.Attempts, e.Waited.Round(time.Millisecond), who, e.Last)
}

// places says where a service is looked for.
func places(addr string, ports int) string {
	switch {
	case ports < 2:
		return addr
	case ports == 2:
		return addr + " and the port after it"
	}
	return fmt.Sprintf("%s and the %d ports after it", addr, ports-1)
}

// Is reports that a ConnectError is ErrUnavailable.
func (e *ConnectError) Is(target error) bool { return target == ErrUnavailable }

// Unwrap returns the context's error and the last attempt's.
func (e *ConnectError) Unwrap() []error { return []error{e.Err, e.Last} }
