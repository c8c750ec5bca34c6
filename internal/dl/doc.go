// Package dl finds and loads native libraries when the program runs, so that building needs no compiler, no headers and no
// library.
//
// [Open] looks for a library in a fixed order. If it finds none, its error has every path that it tried, what the loader said about each, and what to
// do next. [Library.Bind] makes a Go function of a symbol. A missing symbol is not a failure of the library but a capability that this version lacks,
// and an error of its own, [*SymbolError].
//
// Failures of the calls themselves are an [*Error], which all bindings share.
//
// A library, once loaded, stays: native libraries keep threads and callbacks, so that unloading them is not safe.
//
// Only Linux on amd64 and arm64 can load libraries here. Elsewhere Open returns an error that is ErrUnavailable. The package
// knows nothing of the libraries that are loaded with it.
package dl
