//go:build !linux

package machine

// Limits returns none: those of this system are not known.
func Limits() []Limit { return nil }
