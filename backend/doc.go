// Package backend says what a backend is to symmem: a way to allocate memory alike on every rank of a group and to make it
// reachable by all of them. It is for those who write one; programs use package memory, which is the same for all backends.
//
// # Writing a backend
//
// Implement [Backend], [Allocation] and [Mapping], which are small on purpose, and a [Factory], and call [Register] from init. What only some
// backends can do is an optional interface that is found by type assertion: on a mapping [Multicaster], [ContiguousViewer] and
// [WindowHandler]; on a backend [Transferrer] and [Flagger], where peers have no pointers, [Quiescer] and [AllReducer]; on a factory
// [Configurable], [Preferred], [Networked], [Preflighter] and [Libraries]. The package backendtest holds the conformance suite that each
// backend passes, and tests/suite all that is to work above it. examples/backend is a backend in a module of its own, which uses only what is
// public.
//
// Before a backend is asked to map, all ranks have agreed that they bring the same. A backend votes ([group.Group.Vote]) before each of
// its own steps that can block or cannot be undone, and so undoes on every rank what failed on one. [Tell] is a vote that carries
// something besides.
//
// Errors are the conditions of the module's root package, wrapped with what was found and what to do next.
//
// # Options
//
// Settings that all backends share come as fields of [Env]. What only one backend knows is its own: a factory that is [Configurable] declares it.
//
//	func (factory) Options() []backend.Option {
//		return []backend.Option{{Name: "directory", Default: "/dev/shm", Form: "an absolute path", Check: filepath.IsAbs, Usage: "where the files are"}}
//	}
//
// Users set it like any setting: SYMMEM_TOY_DIRECTORY, toy-directory in the file, --toy-directory. Package config refuses what the option does not
// allow, names the nearest option for one that is mistyped, and says to import the backend for one whose backend is not there. The factory reads
// it with [Env.Option]. A program that opens symmetric memory may also give options in the backend's own type, as symmem.Options.Backend: they
// come as Env.Given, to a backend that takes the type, and no other backend is chosen then.
//
// # Choosing
//
// [Choose] picks the backend that all ranks have: a list of names is tried in order, "auto" stands for every registered backend, the one
// that says it is preferred most ([Preferred]) first, and one name alone never falls back. It reports every refusal.
//
// This package knows device and group. It loads no native library.
package backend
