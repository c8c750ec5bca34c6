package dl

import (
	"context"
	"fmt"
)

// StuckError is something that a library had not done when the caller could wait no longer.
type StuckError struct {
	Library string // what its makers call it
	What    string // what was going on: "making the communicator"
	Err     error  // why the caller waited no longer
	// Abortable is set if the library can be told to end it. Otherwise a thread is still in there, with what it holds, and
	// cannot be called back: end the process.
	Abortable bool
}

// Error says what hangs and what to do.
func (e *StuckError) Error() string {
	text := fmt.Sprintf("%s: %s has not done it (%v); perhaps another rank did not come", e.What, e.Library, e.Err)
	if !e.Abortable {
		text += "; end the process"
	}
	return text
}

// Unwrap gives the context's error.
func (e *StuckError) Unwrap() error { return e.Err }

// Bound runs call, which may block inside of a library for ever, on a goroutine of its own, and returns what it returns, or a
// [*StuckError] when ctx ends first. The goroutine is then left behind for as long as the call lasts.
func Bound[T any](ctx context.Context, library, what string, call func() (T, error)) (T, error) {
	type result struct {
		value T
		err   error
	}
	done := make(chan result, 1)
	go func() {
		value, err := call()
		done <- result{value, err}
	}()
	select {
	case r := <-done:
		return r.value, r.err
	case <-ctx.Done():
	}
	select {
	case r := <-done: // both were there
		return r.value, r.err
	default:
		var none T
		return none, &StuckError{Library: library, What: what, Err: context.Cause(ctx)}
	}
}
