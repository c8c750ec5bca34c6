// Package suite is symmem's correctness suite as ordinary code: the same cases run on every backend, between goroutines and
// between processes, in `go test ./tests/...` and in `symmem verify`.
//
// A case is collective: every rank of a group runs it, with a [*symmem.Rank] of its own, in the order that [Cases] gives.
// [Run] agrees on each result, so that a case that fails on one rank fails, by name, for all. What a backend cannot do is
// skipped with the missing capability as the reason; nothing else is ever skipped.
//
// All-reduce cases use integer-valued inputs whose result is exact in every dtype and compare bits, with each other rank's
// too; outputs are poisoned and have guard bands; ranks are skewed at random.
//
// The package imports the public packages only.
package suite
