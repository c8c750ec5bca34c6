// Package backend says what a backend is to symmem: a way to allocate memory alike on every rank of a group and to make it
// reachable by all of them.
//
// # Who uses what
//
// Somebody who writes a backend implements [Backend], [Allocation] and [Mapping], which are small on purpose, and calls
// [Register] from init. What only some backends can do is an optional interface that this package finds by type assertion:
// [Multicaster] and [ContiguousViewer] on a mapping, [Transferrer] on a backend. The package backendtest holds the
// conformance suite that each backend passes.
//
// Everybody else goes through [Memory], one rank's symmetric memory: it does once, for all backends, what must not differ
// between them. It makes the ranks agree before anything is mapped, votes afterwards, undoes what failed, keeps the window
// of each allocation so that any address inside finds it again, holds the workspace with the signal pads, and prepares
// transfers.
//
// # How ranks agree
//
// [Memory.Rendezvous] begins with one exchange of a [Record] that says what the rank brought. Any difference that matters is
// a [group.MismatchError] on every rank, listing each rank's value, and nothing was mapped. Then the backend maps, and a vote
// follows: if one rank failed, every rank gets an error that names it and unmaps what it had. Backends put the same kind of
// vote ([Agreement.Vote]) before each of their own steps that can block or that cannot be undone.
//
// # Choosing
//
// [Choose] picks the backend that all ranks have: a list of names is tried in order, "auto" stands for every registered
// backend in a fixed order, and one name alone never falls back. It reports every refusal.
//
// This room knows device and group. It loads no native library.
package backend
