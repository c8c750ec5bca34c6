package group

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/symmem/symmem/internal/errs"
)

// The errors of this package, for errors.Is.
var (
	ErrPeerLost    = errs.ErrPeerLost    // another rank of the group has died or left
	ErrMismatch    = errs.ErrMismatch    // the ranks did not ask for the same thing
	ErrClosed      = errs.ErrClosed      // the group was closed before, on this rank
	ErrInvalid     = errs.ErrInvalid     // an argument outside of what is allowed
	ErrUnsupported = errs.ErrUnsupported // files cannot be passed between these ranks, or on this operating system
	ErrUnavailable = errs.ErrUnavailable // the rendezvous service could not be reached or served
)

// PeerLostError says that a rank is gone, or the rendezvous service, so that collective calls of the group can never complete again. It is ErrPeerLost.
type PeerLostError struct {
	Group  string // the name of the group that Rank counts in
	Rank   int    // the rank that is gone; -1 if it is a service that [Serve] serves, and no rank
	Host   string // the host it ran on, "" if not known
	PID    int    // its process id on that host, 0 if not known
	Reason string // what was seen: the connection broke, silence, it left
}

// Error names the rank, its process and host, and what was seen of its end.
func (e *PeerLostError) Error() string {
	var b strings.Builder
	if e.Rank < 0 {
		fmt.Fprintf(&b, "the rendezvous service of group %s is lost", e.Group)
	} else {
		fmt.Fprintf(&b, "rank %d of group %s is lost", e.Rank, e.Group)
	}
	if e.PID != 0 {
		fmt.Fprintf(&b, " (process %d on %s)", e.PID, e.Host)
	}
	if e.Reason != "" {
		b.WriteString(": " + e.Reason)
	}
	return b.String()
}

// Is reports that a PeerLostError is ErrPeerLost.
func (e *PeerLostError) Is(target error) bool { return target == ErrPeerLost }

// MissingRanksError is the error of a rank that gave up waiting. It names the ranks that had not come. It unwraps to the error of the
// context that ended, context.DeadlineExceeded or context.Canceled.
type MissingRanksError struct {
	Op      string        // the call: `all-gather "rendezvous 3"`
	Missing []int         // the ranks that had not come, ascending; nil if the service could not be asked
	Size    int           // the size of the group
	Waited  time.Duration // how long this rank had waited
	Err     error         // the error of the context that ended
}

// Error says which ranks had not come to what, and how long this rank had waited.
func (e *MissingRanksError) Error() string {
	waited := e.Waited.Round(time.Millisecond)
	if waited >= 10*time.Second {
		waited = e.Waited.Round(time.Second)
	}
	if e.Missing == nil {
		return fmt.Sprintf("%s: no answer from the rendezvous service on which of %d ranks are missing after %v: %v",
			e.Op, e.Size, waited, e.Err)
	}
	return fmt.Sprintf("%s: waiting for %s of %d after %v: %v", e.Op, errs.Ranks(e.Missing), e.Size, waited, e.Err)
}

// Unwrap returns the context's error.
func (e *MissingRanksError) Unwrap() error { return e.Err }

// AbandonedError says that another rank gave up waiting in a collective call, so that the call failed on every rank. The group
// goes on working.
type AbandonedError struct {
	Op      string // the call: `all-gather "rendezvous 3"`
	Rank    int    // the rank that gave up
	Missing []int  // the ranks that had not come when it gave up; nil if not known any more
	Reason  string // why it gave up
	Err     error  // this rank's own context's error, if that had ended too; else nil
}

// Error names the rank that gave up, why, and for whom it had waited.
func (e *AbandonedError) Error() string {
	if e.Rank < 0 {
		return e.Op + ": " + e.Reason
	}
	text := fmt.Sprintf("%s: rank %d gave up", e.Op, e.Rank)
	if len(e.Missing) > 0 {
		text += " waiting for " + errs.Ranks(e.Missing)
	}
	return text + ": " + e.Reason
}

// Unwrap returns this rank's own context's error, or nil.
func (e *AbandonedError) Unwrap() error { return e.Err }

// MismatchError says that the ranks of a group did not ask for the same thing. It is ErrMismatch.
type MismatchError struct {
	What   string   // what differs: "collective call 12 of group world"
	Values []string // what each rank brought, by rank
}

// Error lists what the ranks brought, a value a line, with the ranks that brought it.
func (e *MismatchError) Error() string {
	var values errs.Reasons
	for rank, v := range e.Values {
		values.Add("", rank, v)
	}
	return values.Text(e.What + ": ranks disagree")
}

// Is reports that a MismatchError is ErrMismatch.
func (e *MismatchError) Is(target error) bool { return target == ErrMismatch }

// RankFailure is one rank's reason to fail.
type RankFailure struct {
	Rank int    // the rank in the group
	Text string // the text of its error
	// Conditions are the errors of this module, such as ErrUnavailable, that its error is. Those of a newer release are left out.
	Conditions []error
}

// VoteError says which ranks failed in a step that all ranks had to pass. errors.Is finds in it the conditions of this module that the
// failures are, with the same answer on every rank, on those that failed and on those that were told. On a rank that failed itself it
// also unwraps to that rank's own error. The errors of contexts, of the operating system and of the program are found only there.
type VoteError struct {
	Op       string        // the call: `vote "mapping"`
	Failures []RankFailure // every rank that failed, ascending
	Local    error         // this rank's own error, nil if it did not fail
}

// Error returns each reason once, with the ranks that had it: in one line if there is one, else each in a line of its own.
func (e *VoteError) Error() string {
	var reasons errs.Reasons
	for _, f := range e.Failures {
		reasons.Add("", f.Rank, f.Text)
	}
	return reasons.Text(e.Op + " failed")
}

// Is reports whether target is one of the Conditions of any rank's failure.
func (e *VoteError) Is(target error) bool {
	return slices.ContainsFunc(e.Failures, func(f RankFailure) bool { return slices.Contains(f.Conditions, target) })
}

// Unwrap returns this rank's own error, or nil.
func (e *VoteError) Unwrap() error { return e.Local }

// FileLimitError says that a process may not open another file.
type FileLimitError struct {
	Limit uint64 // the soft limit of open files, RLIMIT_NOFILE; 0 if not known
	Owner string // whose process it is, if not this one: "rank 0, which serves the rendezvous"
	Err   error  // what the operating system said; nil if it was another process that was told
}

// Error says what to do: raise the limit or close files.
func (e *FileLimitError) Error() string {
	owner := "this process"
	if e.Owner != "" {
		owner = "the process of " + e.Owner + ","
	}
	text := fmt.Sprintf("too many open files: the limit of %s is %d; raise it (ulimit -n) or close files", owner, e.Limit)
	if e.Err != nil {
		text += ": " + e.Err.Error()
	}
	return text
}

// Unwrap returns what the operating system said.
func (e *FileLimitError) Unwrap() error { return e.Err }
