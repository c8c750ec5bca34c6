// Package memory is symmetric memory as programs and collectives use it, on any backend.
//
// A [Memory] is one rank's. It allocates ([Memory.Allocate]) or adopts ([Memory.Register]) memory of the rank's device, and a
// collective [Memory.Rendezvous] makes a [Window] of it: memory that has an address for every rank that can be reached by load and
// store. Where there are no such addresses, a [Transfer] moves data all the same. [Memory.Signal], [Memory.Wait] and
// [Memory.Barrier] order what ranks do. A [Workspace] is a zeroed piece of memory at the same place on every rank, for one plan's
// flags and buffers, with [Signals] of its own if it wants some. Package tensor gives all this a shape and a dtype.
//
// # How ranks agree
//
// What differs between backends is behind package backend; what must not differ is here, once for all of them. A rendezvous begins
// with one exchange of a [Record] that says what each rank brought. Any difference that matters is a [group.MismatchError] on every
// rank, with everybody's value, and nothing was mapped. Then the backend maps, and a vote follows: if one rank failed, every rank gets
// an error that names it and unmaps what it had. The window of an allocation is kept, so that any address inside finds it again.
//
// # What blocks
//
// Calls that are collective block until every rank has come, or the context ends; ranks make them in the same order. Those of one rank come one after
// the other, in the order in which they begin. One whose context ends before its turn has come returns a [TurnError] at once, and keeps its place: the
// others get a [group.VoteError] there, which names this rank, and all stay in step. One whose context ends in the middle of the backend's steps, or when all give memory
// back, waits until it has heard how the step ended ([group.Heard]), as the others may go on. What runs on a device is enqueued on a stream and returns at once.
//
// # Errors
//
// The conditions are those of the module's root package. A collective call may return the errors of collective calls that package group
// lists; every rank gets the same conditions. A call that enqueues work returns ErrInvalid for a nil stream, a stream of another device, or
// a peer, channel or range that does not exist. ErrClosed means that the memory, or what the call is about, was closed or freed, and
// ErrPeerLost that a rank of the group is lost.
package memory
