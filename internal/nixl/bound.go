package nixl

import (
	"context"
	"fmt"
)

// StuckError is a call of the library that had not returned when the caller could wait no longer. The call's thread is still in
// there, with what it holds, and cannot be called back: end the process.
type StuckError struct {
	What string // what the call was doing: "making an agent"
	Err  error  // why the caller waited no longer
}

// Error says what hangs and what to do.
func (e *StuckError) Error() string {
	return fmt.Sprintf("%s: %s has not returned (%v); end the process", e.What, libraryName, e.Err)
}

// Unwrap gives the context's error.
func (e *StuckError) Unwrap() error { return e.Err }

// Bound runs call, which may block inside of the library, on a goroutine of its own, and returns what it returns, or a
// [*StuckError] when ctx ends first. The goroutine is then left behind for as long as the call lasts.
func Bound[T any](ctx context.Context, what string, call func() (T, error)) (T, error) {
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
		var none T
		return none, &StuckError{What: what, Err: context.Cause(ctx)}
	}
}
