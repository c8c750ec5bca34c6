// Package backend says what a backend is to symmem: a way to allocate memory alike on every rank of a group and to make it
// reachable by all of them. It is for those who write one; programs use package memory, which is the same for all backends.
//
// # Writing a backend
//
// Implement [Backend], [Allocation] and [Mapping], which are small on purpose, and call [Register] from init. What only some
// backends can do is an optional interface that is found by type assertion: on a mapping [Multicaster], [ContiguousViewer] and
// [WindowHandler]; on a backend [Transferrer] and [Flagger], where peers have no pointers, [Quiescer] and [AllReducer]; on a factory
// [Networked], [Preflighter] and [Libraries]. The package backendtest holds the conformance suite that each backend passes.
//
// Before a backend is asked to map, all ranks have agreed that they bring the same. A backend votes ([group.Group.Vote]) before each of
// its own steps that can block or cannot be undone, and so undoes on every rank what failed on one. [Tell] is a vote that carries
// something besides.
//
// Errors are the conditions of the module's root package, wrapped with what was found and what to do next.
//
// # Choosing
//
// [Choose] picks the backend that all ranks have: a list of names is tried in order, "auto" stands for every registered
// backend in a fixed order, and one name alone never falls back. It reports every refusal.
//
// This package knows device and group. It loads no native library.
package backend
