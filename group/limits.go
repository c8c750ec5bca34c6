package group

import (
	"fmt"
	"time"
)

// limits bound what rank 0 spends on its clients, in time, memory and open files. The defaults are far above what jobs need. The limits of one rank
// are checked twice: the rank itself refuses what exceeds them, with a typed error, and the hub refuses what exceeds twice as much, for ranks that
// run other code.
type limits struct {
	attempt   time.Duration // a rank's first attempt to connect; later ones may take longer
	doubt     time.Duration // how long a rank looks at further ports, after an answer that may be of somebody else, or of its own service; and how long one that has left waits for rank 0 to leave too
	handshake time.Duration // from a connection's beginning until a rank is admitted on it
	patience  time.Duration // the same, while further connections wait for a place; a tenth of it where no greeting has come
	hurry     time.Duration // the same for a source that has more than its share of the places; 0 goes by the number of places
	pending   int           // connections on which no rank was admitted yet; 0 goes by the limit of open files
	unproven  int64         // bytes that are read from a connection before a rank is admitted on it
	returning int64         // the same where a rank may come back to a service that was started again, and says what it waits for
	lent      int64         // bytes beyond unproven that are read from all such connections together
	jobs      int           // that ServeJobs has at a time
	jobRanks  int           // of all of them

	keys       int   // in all stores of the job
	storeBytes int64 // of keys and values in all stores of the job
	calls      int   // collective calls of one rank that are under way
	callBytes  int64 // what one rank has brought to calls under way
	groups     int   // groups of one rank that are open
	gets       int   // Gets of one rank that wait
	queued     int   // messages to one rank, or from one, that are not sent yet
	queueBytes int64 // of such messages
	replies    int   // to requests of one rank that are kept until it has them
	replyBytes int64 // of their values
}

var defaultLimits = limits{
	attempt:   3 * time.Second,
	doubt:     5 * time.Second,
	handshake: 10 * time.Second,
	patience:  2 * time.Second,
	unproven:  256 << 10,
	returning: 16 << 20, // twice what a rank says that waits for as many calls as it may, in groups with the longest names
	lent:      128 << 20,
	jobs:      MaxJobs,
	jobRanks:  maxJobRanks,

	keys:       1 << 18,
	storeBytes: 256 << 20,
	calls:      1024,
	callBytes:  8 * MaxBlob,
	groups:     4096,
	gets:       4096,
	queued:     16384,
	queueBytes: 4 * MaxBlob,
	replies:    2 * queueFactor * 16384, // twice what it may queue
	replyBytes: 2 * queueFactor * 4 * MaxBlob,
}

// maxPending is the most connections without an admitted rank.
const maxPending = 256

// pendingLimit leaves most of the process's open files to the ranks that were admitted, and to the program.
func (l *limits) pendingLimit() int {
	if l.pending > 0 {
		return l.pending
	}
	if files := openFileLimit(); files > 0 && files/4 < maxPending {
		return max(4, int(files/4))
	}
	return maxPending
}

// moment is how long a connection may do nothing where its source has more than its share of so many places. The fewer places there are, the sooner each
// has to be free again, for thousands a second.
func (l *limits) moment(places int) time.Duration {
	const longest, shortest = 40 * time.Millisecond, 5 * time.Millisecond
	if l.hurry > 0 {
		return l.hurry
	}
	return max(shortest, longest*time.Duration(places)/maxPending)
}

// What the quotas count, and what to do about them.
const (
	quotaKeys       = "keys in the stores of a job; delete those that are no longer needed"
	quotaStoreBytes = "bytes of keys and values in the stores of a job; delete those that are no longer needed"
	quotaCalls      = "collective calls of one rank at the same time; wait for some of them first"
	quotaCallBytes  = "bytes that one rank brings to collective calls at the same time; wait for some of them first"
	quotaGroups     = "open groups of one rank; close those that are no longer needed"
	quotaGets       = "Gets of one rank that wait at the same time; wait for some of them first"
	quotaQueued     = "requests of one rank that wait to be sent to the rendezvous service; wait for some of them first"
	quotaReplies    = "requests of one rank whose answers it has not taken yet; wait for some of them first"
	quotaReplyBytes = "bytes of answers that one rank has not taken yet; wait for some of them first"
	quotaQueueBytes = "bytes of one rank that wait to be sent to the rendezvous service; wait for earlier requests first"
)

// QuotaError says that a rank asked the rendezvous service to keep more than it keeps for one rank or for one job.
type QuotaError struct {
	Op    string // the call: `set "k" in the store of group world`
	What  string // what is limited, and what to do: "keys in the stores of a job; delete those that are no longer needed"
	Limit int64  // the most of it
}

// Error says what is limited, to how much, and what to do.
func (e *QuotaError) Error() string {
	return fmt.Sprintf("%s: allowed are at most %d %s", e.Op, e.Limit, e.What)
}
