package nvshmem

import (
	"context"
	"fmt"
)

// StuckError is a call of the library that had not returned when the caller could wait no longer. The call's thread is still
// in there, with what it holds, and cannot be called back: end the process.
type StuckError struct {
	What string // what the call was doing: "allocating"
	Err  error  // why the caller waited no longer
}

// Error says what hangs and what to do.
func (e *StuckError) Error() string {
	return fmt.Sprintf("%s: NVSHMEM has not returned, most often because a rank did not come (%v); end the process", e.What, e.Err)
}

// Unwrap gives why the caller waited no longer.
func (e *StuckError) Unwrap() error { return e.Err }

// Bound runs call, which may block inside of the library for ever, on a goroutine of its own, and returns what it returns, or a
// [*StuckError] when ctx ends first. The goroutine is then left behind for as long as the call lasts.
func Bound(ctx context.Context, what string, call func() error) error {
	done := make(chan error, 1)
	go func() { done <- call() }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
	}
	select {
	case err := <-done: // both were there
		return err
	default:
		return &StuckError{What: what, Err: context.Cause(ctx)}
	}
}
