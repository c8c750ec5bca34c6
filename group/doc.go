// Package group says who takes part in a job: every rank's number, where it runs, the small exchanges by which ranks agree,
// the passing of open files between ranks of one host, and the detection of ranks that have died.
//
// A [Group] is one rank's membership. [Join] makes the world group of a job whose ranks are processes on one or many hosts;
// rank 0 serves the rendezvous for all of them over gRPC, unless [Serve] or [ServeJobs] does. [Local] makes n ranks inside this process, without a network. Both
// give the same type with the same behaviour, and [Group.Sub] makes smaller groups of either.
//
// # Collective calls
//
// A collective call is made by every rank of the group, in the same order. Each call takes the group's next sequence number
// when it begins, and calls with equal numbers are matched. They carry their kind, the caller's op text and, for a broadcast,
// the root: if those differ, every rank gets a [*MismatchError] with every rank's value. Several goroutines of one rank may
// call at the same time; the order in which their calls begin is the order in which they are matched, and to keep that order
// alike on all ranks is the caller's duty.
//
// Every collective call blocks until all ranks have come, and ends at its context's deadline or after [Options].Timeout,
// whichever is first. The rank that gives up gets a [*MissingRanksError] that names the ranks that had not come. The ranks that waited
// with it, and those that come later, get an [*AbandonedError] that names the rank that gave up. The group goes on working:
// the next call is matched with the next call. A rank whose context ends when all have come waits up to a second for the
// service to say how the call ended, and with a context of [Heard] longer.
//
// # Errors of collective calls
//
// Besides the errors that its own comment names, every collective call may return
//
//   - a [*MismatchError] if the ranks' calls differ
//   - a [*MissingRanksError] or an [*AbandonedError] if a rank did not come in time
//   - a [*PeerLostError] if a rank is lost, or has left the group
//   - a [*VoteError] if a rank came and could not take part
//   - a [*QuotaError] if this rank has too many calls, or too many bytes, under way
//   - ErrClosed after Close
//
// # Loss
//
// A rank whose connection breaks, or from which no byte comes for [Options].LivenessTimeout, is lost; the others know it by then. Pending and later collective calls
// in every group that it belongs to end with a [*PeerLostError]. Groups without it go on working. Where rank 0 hosts the rendezvous
// service, every group of the job is lost with it; with [Serve], or [ServeJobs], it is a rank like any other. Before a collective call returns an error on rank 0, the error
// has been sent to the other ranks, unless that takes more than a second: they get it even if rank 0 exits at once.
//
// # Imports
//
// This package knows nothing of devices, memory or backends: it carries bytes and open files. It reads the environment only
// through the function given to the launcher detection, and starts nothing when it is imported.
package group
