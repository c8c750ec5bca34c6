// Package backend defines what a backend is: a way to allocate memory alike on every rank of a group and to make it reachable by all of them. It is
// for people who write backends; programs use package memory, which is the same for all backends.
//
// # Writing a backend
//
// Implement [Backend], [Allocation] and [Mapping], which are small on purpose, and a [Factory], and call [Register] from init. What only some
// backends can do is in optional interfaces, which are found by type assertion: on a mapping [Multicaster], [ContiguousViewer] and [WindowHandler];
// on a backend [Transferrer] and [Flagger], where peers have no pointers, [Mover], [Quiescer] and [AllReducer]; on a factory [Configurable], [Preferred],
// [Networked], [Preflighter] and [Libraries]. Package backendtest holds the conformance suite that each backend passes, and tests/suite tests what is
// built above it. examples/backend is a backend in a module of its own, which uses only public packages.
//
// Before a backend is asked to map, all ranks have agreed that they bring the same. A backend votes ([group.Group.Vote]) before each of its own steps
// that can block or cannot be undone, so that every rank undoes what failed on one. [Tell] is a vote that also carries a value of each rank.
//
// Errors are the conditions of the module's root package, wrapped with what was found and what to do next.
//
// # Options
//
// Settings that all backends share are fields of [Env]. An option of a single backend is declared by its factory, which is [Configurable].
//
//	func (factory) Options() []backend.Option {
//		return []backend.Option{{Name: "directory", Default: "/dev/shm", Form: "an absolute path", Check: filepath.IsAbs, Usage: "where the files are"}}
//	}
//
// Users set it like any setting: SYMMEM_TOY_DIRECTORY, toy-directory in the file, --toy-directory. Package config refuses values that the option does
// not allow, names the nearest option for one that is mistyped, and says to import the backend's package if it is missing. The factory reads it with
// [Env.Option]. A program that opens symmetric memory may also give options in the backend's own type, as symmem.Options.Backend: they come as
// Env.Given, to a backend that takes the type, and no other backend is chosen then.
//
// # Choosing
//
// [Choose] picks a backend that all ranks can use. It tries a list of names in order; "auto" stands for all registered backends, the most preferred
// first ([Preferred]). A single name never falls back to another backend. It reports every refusal.
//
// This package imports device and group. It loads no native library.
package backend
