package group

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
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

// ArgumentError is a refused argument: what was asked, the value and what was allowed. It is ErrInvalid.
type ArgumentError = errs.ArgumentError

// PeerLostError says that a rank is gone, so that collective calls of the group can never complete again. It is ErrPeerLost.
type PeerLostError struct {
	Group  string // the name of the group that Rank counts in
	Rank   int    // the rank that is gone
	Host   string // the host it ran on, "" if not known
	PID    int    // its process id on that host, 0 if not known
	Reason string // what was seen: the connection broke, silence, it left
}

// Error names the rank, its process and host, and what was seen of its end.
func (e *PeerLostError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "rank %d of group %s is lost", e.Rank, e.Group)
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

// MissingRanksError is what a rank gets that gave up waiting: which ranks had not come. It unwraps to the error of the context
// that ended, context.DeadlineExceeded or context.Canceled.
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
	return fmt.Sprintf("%s: waiting for ranks %s of %d after %v: %v", e.Op, formatRanks(e.Missing), e.Size, waited, e.Err)
}

// Unwrap gives the context's error.
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
		text += " waiting for ranks " + formatRanks(e.Missing)
	}
	return text + ": " + e.Reason
}

// Unwrap gives this rank's own context's error, or nil.
func (e *AbandonedError) Unwrap() error { return e.Err }

// MismatchError says that the ranks of a group did not ask for the same thing. It is ErrMismatch.
type MismatchError struct {
	What   string   // what differs: "collective call 12 of group world"
	Values []string // what each rank brought, by rank
}

// Error lists what every rank brought; ranks that brought the same share one entry.
func (e *MismatchError) Error() string {
	var order []string
	ranks := make(map[string][]int)
	for rank, v := range e.Values {
		if ranks[v] == nil {
			order = append(order, v)
		}
		ranks[v] = append(ranks[v], rank)
	}
	parts := make([]string, len(order))
	for i, v := range order {
		parts[i] = fmt.Sprintf("ranks %s: %s", formatRanks(ranks[v]), v)
	}
	return fmt.Sprintf("%s: ranks disagree: %s", e.What, strings.Join(parts, "; "))
}

// Is reports that a MismatchError is ErrMismatch.
func (e *MismatchError) Is(target error) bool { return target == ErrMismatch }

// RankFailure is one rank's reason to fail.
type RankFailure struct {
	Rank int    // the rank in the group
	Text string // the text of its error
}

// VoteError says which ranks failed in a step that all ranks had to pass. On a rank that failed itself it unwraps to that
// rank's own error.
type VoteError struct {
	Op       string        // the call: `vote "mapping"`
	Failures []RankFailure // every rank that failed, ascending
	Local    error         // this rank's own error, nil if it did not fail

	reasons []condition
}

// Error names every rank that failed and its reason.
func (e *VoteError) Error() string {
	const most = 8 // a thousand ranks fail alike; the field has them all
	parts := make([]string, 0, most+1)
	for i, f := range e.Failures {
		if i == most {
			parts = append(parts, fmt.Sprintf("and %d more ranks", len(e.Failures)-most))
			break
		}
		parts = append(parts, fmt.Sprintf("rank %d: %s", f.Rank, f.Text))
	}
	return e.Op + ": failed on " + strings.Join(parts, "; ")
}

// Is reports whether a failure of any rank is target, as far as the ranks tell each other: ErrNoMemory of package backend.
func (e *VoteError) Is(target error) bool {
	for _, r := range e.reasons {
		if r > 0 && int(r) <= len(conditions) && conditions[r-1] == target {
			return true
		}
	}
	return false
}

// Unwrap gives this rank's own error, or nil.
func (e *VoteError) Unwrap() error { return e.Local }

// condition numbers the conditions of failures that ranks tell each other, so that errors.Is finds them on every rank.
type condition uint32

// conditions are what the numbers stand for, from 1.
var conditions = []error{errs.ErrNoMemory}

// conditionOf gives the condition that err is, or 0.
func conditionOf(err error) condition {
	for i, c := range conditions {
		if errors.Is(err, c) {
			return condition(i + 1)
		}
	}
	return 0
}

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

// Unwrap gives what the operating system said.
func (e *FileLimitError) Unwrap() error { return e.Err }

// formatRanks gives ranks as "[0-3 7]": runs of three or more are folded, so that a thousand ranks stay readable.
func formatRanks(ranks []int) string { return "[" + foldRanks(ranks, " ") + "]" }

func foldRanks(ranks []int, separator string) string {
	if !slices.IsSorted(ranks) {
		ranks = slices.Sorted(slices.Values(ranks))
	}
	var b strings.Builder
	for i := 0; i < len(ranks); {
		j := i
		for j+1 < len(ranks) && ranks[j+1] == ranks[j]+1 {
			j++
		}
		if j-i < 2 { // a run of two is shorter as a list
			j = i
		}
		if b.Len() > 0 {
			b.WriteString(separator)
		}
		b.WriteString(strconv.Itoa(ranks[i]))
		if j > i {
			b.WriteString("-" + strconv.Itoa(ranks[j]))
		}
		i = j + 1
	}
	return b.String()
}
