//go:build !linux

package machine

// Limits knows no limits of this system.
func Limits() []Limit { return nil }
